"""What a BatchNorm loses under accumulation, a GroupNorm keeps, and what helps.

    python examples/batchnorm_vs_groupnorm.py
        13 cells of 12,000 images: five minutes on two CPU cores; CIFAR-10 at 64, 8 and 2: BatchNorm
        57, 57 and 63 % error, GroupNorm 66, 66 and 65 %

    python examples/batchnorm_vs_groupnorm.py --full
        72 cells of 100,000 images, three hours; finished cells are kept: run it again to go on.
        BatchNorm 35, 36 and 42 %, GroupNorm 43, 42 and 43 %

    python examples/batchnorm_vs_groupnorm.py --full --again batch/2/0
        one cell once more, beside the figure that was kept

A small residual network is trained on effective batches of 64, made of physical batches of 64,
32, 16, 8, 4 or 2. A cell NORM/BATCH/SEED has the same start, order of images and number of
updates for each norm and batch. The norms are batch, group, layer (over channels and positions,
as in Wu and He, 2018, arXiv:1803.08494) and three remedies: batch-pooled, whose running statistics
are those of the whole window; batch-frozen, which after the first epoch normalises by its running
statistics also in training; and batch-sync, whose physical batch is that of each of eight devices
that normalise by the statistics of all. Under --out: batchnorm_vs_groupnorm.json and .png.
"""

import argparse
import functools
import pathlib
import shlex
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
import optax

import norm_plots
from cells import (
    Results,
    add_cell_options,
    add_options,
    load,
    mean_and_error,
    plus_minus,
    train_all,
)
from norm_models import DEVICES, freeze, new_trainer
from training import Arm, commit, epoch_order, first_update_max_diff, positive

EFFECTIVE_BATCH = 64
SIZES, QUICK_SIZES = (64, 32, 16, 8, 4, 2), (64, 8, 2)
NORMS = ("batch", "group", "layer")
REMEDIES, REMEDY_SIZES = ("batch-pooled", "batch-frozen", "batch-sync"), (8, 2)
WARM_UP_EPOCHS = 1  # of batch-frozen


class Cell(NamedTuple):
    """One training; named "batch/8/0"."""

    norm: str
    physical_batch: int
    seed: int

    @property
    def devices(self) -> int:
        """How many devices share a micro-step."""
        return DEVICES if self.norm == "batch-sync" else 1

    @property
    def arm(self) -> Arm:
        """The window: the images of a micro-step, on all devices, and their number."""
        images = self.devices * self.physical_batch
        return Arm(images, EFFECTIVE_BATCH // images)

    def __str__(self) -> str:
        return "/".join(map(str, self))


def train(cell, images, args):
    """Train one cell; returns its entry in the results."""
    start = functools.partial(new_trainer, cell.norm, images=images, seed=cell.seed)
    size = len(images.train_images) // EFFECTIVE_BATCH * EFFECTIVE_BATCH  # whole windows
    updates = args.epochs * size // EFFECTIVE_BATCH
    schedule = optax.cosine_onecycle_schedule(updates, args.lr, pct_start=0.2)
    trainer = start(cell.arm, optax.sgd(schedule, momentum=0.9))
    batch, seconds, curve = cell.arm.physical_batch, 0.0, []
    for epoch in range(args.epochs):
        if cell.norm == "batch-frozen" and epoch == WARM_UP_EPOCHS:
            freeze(trainer)
        if batch not in trainer.compiled:
            trainer.compile(images.train_images[:batch], images.train_labels[:batch])
        order = epoch_order(len(images.train_images), cell.seed, epoch)[:size]
        began, losses = time.perf_counter(), []
        for index in order.reshape(-1, batch):
            losses.append(
                trainer.micro_step(images.train_images[index], images.train_labels[index])
            )
        train_loss = float(np.nanmean(jax.device_get(losses)))
        seconds += time.perf_counter() - began
        _, accuracy = trainer.evaluate(images.test_images, images.test_labels)
        curve.append({"epoch": epoch + 1, "train_loss": train_loss, "test_error": 1 - accuracy})

    def from_start(arm, tx):
        # The frozen remedy is compared as it trains once it is frozen.
        return freeze(start(arm, tx)) if cell.norm == "batch-frozen" else start(arm, tx)

    window = epoch_order(len(images.train_images), cell.seed, 0)[:EFFECTIVE_BATCH]
    row = {
        "norm": cell.norm,
        "physical_batch": cell.physical_batch,
        "every_k": cell.arm.every_k,
        "seed": cell.seed,
        "data": images.name,
        "train_images": args.epochs * size,
        "test_error": curve[-1]["test_error"],
        "first_update_max_diff": first_update_max_diff(from_start, cell.arm, images, window),
        "seconds": seconds,
        "curve": curve,
        "config": config(args),
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "commit": commit(),
    }
    return row | ({"collectives": trainer.collectives} if cell.norm == "batch-sync" else {})


def config(args):
    """What a cell's figures depend on, beside the cell and the data."""
    return {name: getattr(args, name) for name in ("train_size", "test_size", "epochs", "lr")}


def run(cells, args, data, keep):
    """Train the cells, `args.workers` at a time; each goes to `keep` when it is finished."""
    for devices in (1, DEVICES):
        mine = [cell for cell in cells if cell.devices == devices]
        if mine:
            train_all(train, mine, args, data, keep, devices)


def cell_of(row):
    return Cell(row["norm"], row["physical_batch"], row["seed"])


def grid(args):
    """All cells, one seed after the other."""
    pairs = [(norm, size) for size in (SIZES if args.full else QUICK_SIZES) for norm in NORMS]
    remedies = REMEDIES if args.full else REMEDIES[:2]
    pairs += [(norm, size) for size in REMEDY_SIZES for norm in remedies]
    return [Cell(*pair, seed) for seed in range(args.seeds) for pair in pairs]


def mean_errors(rows):
    """Mean test error and its standard error in percent, by (norm, physical batch)."""
    errors = {}
    for row in rows:
        key = row["norm"], row["physical_batch"]
        errors.setdefault(key, []).append(100 * row["test_error"])
    return {key: mean_and_error(each) for key, each in errors.items()}


def table(rows):
    """Test error by norm and physical batch; then the difference of the first update."""
    shown = {key: plus_minus(*each) for key, each in mean_errors(rows).items()}
    largest = {}
    for row in rows:
        key = row["norm"], row["physical_batch"]
        largest[key] = max(largest.get(key, 0), row["first_update_max_diff"])
    differences = {key: f"{value:.0e}" for key, value in largest.items()}
    return "\n\n".join(
        (_markdown("test error, %", shown), _markdown("first update differs by", differences))
    )


def _markdown(title, values):
    sizes = [size for size in SIZES if any(key[1] == size for key in values)]
    lines = [f"| {title} | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for norm in (*NORMS, *REMEDIES):
        if any(key[0] == norm for key in values):
            lines.append(f"| {norm} | {' | '.join(values.get((norm, s), '') for s in sizes)} |")
    return "\n".join(lines)


def parse_cell(text):
    norm, *numbers = text.split("/")
    if (
        norm not in NORMS + REMEDIES
        or len(numbers) != 2
        or not all(number.isdecimal() for number in numbers)
        or int(numbers[0]) not in SIZES
    ):
        raise argparse.ArgumentTypeError(
            f"a cell must read like batch/8/0, with a norm of {', '.join(NORMS + REMEDIES)} and a"
            f" physical batch of {', '.join(map(str, SIZES))}; got {text!r}"
        )
    return Cell(norm, *map(int, numbers))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all of the data set, and three seeds")
    add_cell_options(parser, parse_cell)
    add_options(parser)
    parser.add_argument("--train-size", type=positive, help="(default: 6000; 50000 with --full)")
    parser.add_argument("--test-size", type=positive, help="(default: 1000; 10000 with --full)")
    parser.add_argument("--seeds", type=positive, help="(default: 1; 3 with --full)")
    parser.add_argument("--epochs", type=positive, default=2)
    parser.add_argument("--lr", type=float, default=0.1, help="highest rate (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, quick, full in (
        ("train_size", 6_000, 50_000),
        ("test_size", 1_000, 10_000),
        ("seeds", 1, 3),
    ):
        if getattr(args, name) is None:
            setattr(args, name, full if args.full else quick)
    if args.epochs <= WARM_UP_EPOCHS:
        parser.error(
            f"argument --epochs: must be more than {WARM_UP_EPOCHS}, the warm-up of batch-frozen,"
            f" got {args.epochs}"
        )
    if args.train_size < EFFECTIVE_BATCH:
        parser.error(
            f"argument --train-size: must be at least {EFFECTIVE_BATCH}, got {args.train_size}"
        )
    return args


def main(argv=None):
    args = parse_args(argv)
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data = load(args).name

    def order(row):
        return (row["seed"], row["norm"], -row["physical_batch"])

    path = out / "batchnorm_vs_groupnorm.json"
    results = Results(path, config(args), data, cell_of, order)
    if args.again:

        def again(row):
            return print(f"{args.again} on {data}: {row['test_error']}")

        run([args.again], args, data, again)
        kept = {cell_of(row): row["test_error"] for row in results.mine()}
        print(f"{results.path} has: {kept.get(args.again, 'no such cell with these options')}")
        return
    cells = args.cells or grid(args)
    run(results.left(cells), args, data, results.add)
    print(
        f"\n{data}, effective batch {EFFECTIVE_BATCH}, by physical batch\n{table(results.mine())}"
    )
    picture = results.path.with_suffix(".png")
    norm_plots.errors(mean_errors(results.mine()), data, EFFECTIVE_BATCH, picture)
    options = shlex.join(sys.argv[1:] if argv is None else argv)
    print(f"\nOne cell again: python {__file__} {options} --again {cells[-1]}")


if __name__ == "__main__":
    main()
