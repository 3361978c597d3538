"""What articles claim about gradient accumulation, tried on CIFAR-10.

    python examples/claims.py
        22 cells of 12,000 images: some minutes on two CPU cores; of one seed, so it cannot tell

    python examples/claims.py --full
        132 cells of 100,000 images, an hour or two; finished cells are kept: run it again to go on.
        The test error at 8, 64 and 256 is 46, 50 and 58 %

    python examples/claims.py --full --time
        seconds of an epoch of 64x4, 256x1 and 64x1, which take turns; let nothing else run

    python examples/claims.py --full --again 64x4/sgd/x1/cosine/0
        one cell once more, beside the figure that was kept

A cell SETTING/SEED trains a small convolutional network with GroupNorm, in windows of k
micro-batches: 64x4 is four of 64. All cells of a seed have the same start and order of images, and
98,304 to 100,000 of them, in whole windows, so that larger windows have fewer updates. The settings
are in claims_table.py, which judges each claim by the differences between two of them in each seed:
"yes" or "no" where the whole 95 % t-interval of their mean says so, else "cannot tell". "Alike" is
within 1 %-point of test error, 10 % of sharpness or 5 % of time. Each interval stands for itself:
one in twenty is expected to miss. Under --out: claims.json, claims_time.json and claims.png.
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
from flax import nnx

import claims_plots
from cells import Results, add_cell_options, add_options, load, train_all
from claims_models import DIRECTIONS, RADIUS, RATES, ConvNet, new_trainer, sharpness_of
from claims_table import SETTINGS, TIMED, Setting, errors_table, table
from optax_accum import window_metrics
from training import Trainer, commit, epoch_order, parse_arm, positive

CURVE_POINTS, NOISE_POINTS, CURVE_IMAGES = 20, 60, 2_000
METRICS = ("noise_scale", "grad_norm", "micro_grad_norm", "update_ratio", "loss")


class Cell(NamedTuple):
    """One training; named "64x4/sgd/x2/cosine/0"."""

    setting: Setting
    seed: int

    def __str__(self) -> str:
        return f"{self.setting}/{self.seed}"


def even_points(number, updates):
    """The updates after which something is measured, the last among them."""
    return set(np.linspace(0, updates, number + 1)[1:].round().astype(int).tolist())


def train(cell, images, args):
    """Train one cell; returns its entry in the results."""
    setting, seed = cell
    arm = setting.arm
    size = len(images.train_images) // arm.effective_batch * arm.effective_batch  # whole windows
    updates = args.epochs * size // arm.effective_batch
    trainer = new_trainer(setting, images, seed, updates)
    trainer.compile(
        images.train_images[: arm.physical_batch], images.train_labels[: arm.physical_batch]
    )
    at_curve, at_noise = (even_points(n, updates) for n in (CURVE_POINTS, NOISE_POINTS))
    shown = images.head(None, CURVE_IMAGES)
    done, seconds, curve, noise = 0, 0.0, [], []
    began = time.perf_counter()
    for epoch in range(args.epochs):
        order = epoch_order(len(images.train_images), seed, epoch)[:size]
        for window in order.reshape(-1, arm.every_k, arm.physical_batch):
            for index in window:
                trainer.micro_step(images.train_images[index], images.train_labels[index])
            done += 1
            if setting.is_monitored and done in at_noise:
                metrics = window_metrics(trainer.opt_state)
                noise.append({"updates": done} | {name: float(metrics[name]) for name in METRICS})
            if done in at_curve:
                jax.block_until_ready(trainer.params)
                seconds += time.perf_counter() - began
                _, accuracy = trainer.evaluate(shown.test_images, shown.test_labels)
                curve.append({"updates": done, "test_error": 1 - accuracy})
                began = time.perf_counter()
    row = {
        "cell": str(cell),
        **setting._asdict(),
        "arm": str(arm),
        "seed": seed,
        "data": images.name,
        "train_images": args.epochs * size,
        "updates": updates,
        "test_error": test_error(trainer, images),
        "seconds": seconds,
        "curve": curve,
        **facts(config(args)),
    }
    if setting.is_monitored:
        row["noise"] = noise
    if setting.has_sharpness:
        row |= sharpness_of(trainer, images)
    if setting.is_averaged:
        trainer.params = trainer.rest[1]
        row["averaged_test_error"] = test_error(trainer, images)
    return row


def test_error(trainer, images):
    return 1 - trainer.evaluate(images.test_images, images.test_labels)[1]


def config(args):
    """What a cell's figures depend on, beside the cell and the data."""
    options = {name: getattr(args, name) for name in ("train_size", "test_size", "epochs")}
    return options | {"rates": RATES, "radius": RADIUS, "directions": DIRECTIONS}


def facts(config):
    """What each row in the results says of the run."""
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    return {"config": config, "versions": versions, "commit": commit()}


def measure_time(images, rounds):
    """Seconds of an epoch by arm, one a round; the arms take turns."""
    arms = {name: parse_arm(name) for name in TIMED}
    largest = max(arm.effective_batch for arm in arms.values())
    size = len(images.train_images) // largest * largest
    trainers = {}
    for name, arm in arms.items():
        model = ConvNet(images.train_images.shape[-1], nnx.Rngs(0))
        trainers[name] = Trainer(model, arm, optax.sgd(RATES["sgd"], momentum=0.9))

    def epoch(name):
        trainer, batch = trainers[name], arms[name].physical_batch
        began = time.perf_counter()
        for i in range(0, size, batch):
            part = slice(i, i + batch)
            trainer.micro_step(images.train_images[part], images.train_labels[part])
        jax.block_until_ready(trainer.params)
        return time.perf_counter() - began

    seconds = {name: [] for name in TIMED}
    for i in range(rounds + 1):
        for name in np.roll(TIMED, i).tolist():  # none is always the first
            seconds[name].append(epoch(name))
    # The first round compiles.
    return {"train_images": size, "seconds": {name: each[1:] for name, each in seconds.items()}}


def grid(args):
    """All cells, one seed after the other."""
    return [Cell(setting, seed) for seed in range(args.seeds) for setting in SETTINGS]


def parse_cell(text):
    name, _, seed = text.rpartition("/")
    settings = {str(setting): setting for setting in SETTINGS}
    if name not in settings or not seed.isdecimal():
        raise argparse.ArgumentTypeError(
            f"a cell must read like {SETTINGS[0]}/0, with a setting of {', '.join(settings)}; got"
            f" {text!r}"
        )
    return Cell(settings[name], int(seed))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all of the data set, and six seeds")
    add_cell_options(parser, parse_cell)
    parser.add_argument("--time", action="store_true", help="time epochs, in place of training")
    parser.add_argument("--rounds", type=positive, default=5, help="of --time, each of an epoch")
    add_options(parser)
    parser.add_argument("--train-size", type=positive, help="(default: 6000; 50000 with --full)")
    parser.add_argument("--test-size", type=positive, help="(default: 1000; 10000 with --full)")
    parser.add_argument("--seeds", type=positive, help="(default: 1; 6 with --full)")
    parser.add_argument("--epochs", type=positive, default=2)
    args = parser.parse_args(argv)
    for name, quick, full in (
        ("train_size", 6_000, 50_000),
        ("test_size", 1_000, 10_000),
        ("seeds", 1, 6),
    ):
        if getattr(args, name) is None:
            setattr(args, name, full if args.full else quick)
    if args.again and args.time:
        parser.error("argument --again: not allowed with --time")
    cells = [args.again] if args.again else args.cells or grid(args)
    arms = map(parse_arm, TIMED) if args.time else [cell.setting.arm for cell in cells]
    largest = max(arm.effective_batch for arm in arms)
    if args.train_size < largest:
        parser.error(
            f"argument --train-size: must be at least {largest}, the largest window, got"
            f" {args.train_size}"
        )
    return args


def main(argv=None):
    args = parse_args(argv)
    path = pathlib.Path(args.out) / "claims.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    images = load(args)
    of_file = functools.partial(
        Results,
        data=images.name,
        cell_of=lambda row: row["cell"],
        order=lambda row: (row["seed"], row["cell"]),
    )
    results = of_file(path, config(args))
    timed = of_file(path.with_stem("claims_time"), {"train_size": args.train_size})
    if args.again:

        def again(row):
            return print(f"{args.again} on {images.name}: {row['test_error']}")

        train_all(train, [args.again], args, images.name, again)
        kept = {row["cell"]: row["test_error"] for row in results.mine()}
        print(f"{path} has: {kept.get(str(args.again), 'no such cell with these options')}")
        return
    if args.time:
        row = {"cell": "epoch", "seed": 0, "data": images.name}
        timed.add(row | measure_time(images, args.rounds) | facts(timed.config))
    else:
        cells = {str(cell): cell for cell in args.cells or grid(args)}
        left = [cells[name] for name in results.left(list(cells))]
        train_all(train, left, args, images.name, results.add)
    rows = results.mine(), timed.mine()
    print(f"\n{images.name}\n{table(*rows)}\n\n{errors_table(rows[0])}")
    claims_plots.draw(*rows, images.name, path.with_suffix(".png"))
    options = shlex.join(sys.argv[1:] if argv is None else argv)
    print(f"\nOne cell again: python {__file__} {options} --again {SETTINGS[0]}/0")


if __name__ == "__main__":
    main()
