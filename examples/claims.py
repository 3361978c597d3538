"""Claims about gradient accumulation, tried on CIFAR-10.

python examples/claims.py
    22 cells of 12,000 images
"""

import argparse
import functools
import pathlib
import shlex
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cells import Results, add_options, load, train_all
from norm_models import CLASSES
from optax_accum import has_updated, sharpness, window_metrics
from training import Arm, Trainer, commit, epoch_order, positive

RATES = {"sgd": 0.03, "adam": 0.006, "lamb": 0.05}  # the highest, at a rate of x1
RADIUS = 2.0  # of the perturbation that measures sharpness
CURVE_POINTS, NOISE_POINTS = 20, 60
CURVE_IMAGES, SHARPNESS_IMAGES = 2_000, 1_000
DIRECTIONS = 32  # that sharpness is the mean of
AVERAGED = 0.25  # the part of the updates, the last ones, whose weights are averaged
METRICS = ("noise_scale", "grad_norm", "micro_grad_norm", "update_ratio", "loss")


class ConvNet(nnx.Module):
    """Three strided convolutions with GroupNorm: 16 x 16, 8 x 8 and 4 x 4 positions."""

    def __init__(self, channels: int, rngs: nnx.Rngs, widths=(16, 32, 64)):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), strides=2, use_bias=False, rngs=rngs)
        self.convs = nnx.List(map(conv, (channels, *widths[:-1]), widths))
        self.norms = nnx.List(nnx.GroupNorm(width, num_groups=8, rngs=rngs) for width in widths)
        self.head = nnx.Linear(widths[-1], CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = (images.astype(jnp.float32) / 255 - 0.5) * 4
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))


class Setting(NamedTuple):
    """What a training is made with, but for its seed; named "64x4/sgd/x2/cosine"."""

    arm: Arm
    optimizer: str = "sgd"
    rate: float = 1  # a multiple of the optimizer's in RATES
    momentum: float = 0.9  # of SGD
    schedule: str = "cosine"
    warm_up: float = 0.05  # a part of the updates

    @property
    def is_averaged(self) -> bool:
        """Whether the mean of the last weights is tried too."""
        return self.schedule == "constant"

    @property
    def is_monitored(self) -> bool:
        """Whether the noise of its windows is measured."""
        return self == MONITORED

    @property
    def has_sharpness(self) -> bool:
        """Whether the sharpness of the last weights is measured."""
        return self in map(Setting, FOR_SHARPNESS)

    def __str__(self) -> str:
        names = [str(self.arm), self.optimizer, f"x{self.rate:g}", self.schedule]
        for name in ("momentum", "warm_up"):
            if getattr(self, name) != self._field_defaults[name]:
                names.append(f"{name}={getattr(self, name):g}")
        return "/".join(names)


MONITORED = Setting(Arm(64, 4))
FOR_SHARPNESS = Arm(64, 1), Arm(16, 4), Arm(16, 1)
ACCUMULATED, BIG = Arm(64, 4), Arm(256, 1)
RATE_STEPS = 1, 2, 4  # unchanged, the root of k and k
LONG_WARM_UP = 0.3
LARGE = [
    Setting(Arm(128, 16), optimizer, rate) for optimizer in ("adam", "lamb") for rate in (0.5, 1, 2)
]
SETTINGS = [
    *map(Setting, (Arm(8, 4), Arm(32, 1), Arm(8, 1), Arm(64, 1))),
    *(Setting(arm, rate=rate) for arm in (ACCUMULATED, BIG) for rate in RATE_STEPS),
    Setting(ACCUMULATED, momentum=0.85),
    Setting(ACCUMULATED, schedule="constant"),
    Setting(Arm(64, 8), schedule="constant"),
    Setting(ACCUMULATED, schedule="constant", warm_up=LONG_WARM_UP),
    *map(Setting, (Arm(16, 4), Arm(16, 1))),
    *LARGE,
]


class Cell(NamedTuple):
    """One training; named "64x4/sgd/x2/cosine/0"."""

    setting: Setting
    seed: int

    def __str__(self) -> str:
        return f"{self.setting}/{self.seed}"


class AveragingTrainer(Trainer):
    """Keeps the mean of the weights after each update, from `first_update` on."""

    def __init__(self, model, arm, tx, first_update):
        super().__init__(model, arm, tx)
        self.first_update = first_update
        self.rest = self.rest, jax.tree.map(jnp.zeros_like, self.params)

    def _step(self, params, rest, opt_state, images, labels):
        rest, mean = rest
        params, rest, opt_state, loss = super()._step(params, rest, opt_state, images, labels)
        # Off the boundary the weights have not moved, and are in the mean already.
        count = optax.tree.get(opt_state, "gradient_step") - self.first_update + 1
        takes_in = has_updated(opt_state) & (count > 0)
        moved = optax.incremental_update(params, mean, 1 / jnp.maximum(count, 1))
        mean = jax.tree.map(functools.partial(jnp.where, takes_in), moved, mean)
        return params, (rest, mean), opt_state, loss

    def _evaluate_batch(self, params, rest, images, labels):
        return super()._evaluate_batch(params, rest[0], images, labels)


def transformation(setting, updates):
    """The optimizer with its schedule, which counts updates."""
    peak = setting.rate * RATES[setting.optimizer]
    warm_up = max(round(setting.warm_up * updates), 1)
    first = peak / warm_up
    if setting.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(first, peak, warm_up, updates)
    else:
        schedule = optax.warmup_constant_schedule(first, peak, warm_up)
    if setting.optimizer == "sgd":
        return optax.sgd(schedule, momentum=setting.momentum)
    return {"adam": optax.adam, "lamb": optax.lamb}[setting.optimizer](schedule)


def new_trainer(setting, images, seed, updates):
    model = ConvNet(images.train_images.shape[-1], nnx.Rngs(seed))
    tx = transformation(setting, updates)
    if setting.is_averaged:
        # The last quarter, and of few updates the last one at least.
        first_update = min(int(updates * (1 - AVERAGED)) + 1, updates)
        return AveragingTrainer(model, setting.arm, tx, first_update)
    return Trainer(model, setting.arm, tx, monitor=setting.is_monitored)


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
        for window in order.reshape(-1, *reversed(arm)):
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
        "config": config(args),
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "commit": commit(),
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


def sharpness_of(trainer, images):
    """How much the loss on some training images rises around the weights, and their norm."""
    batch = images.train_images[:SHARPNESS_IMAGES], images.train_labels[:SHARPNESS_IMAGES]
    loss_fn = lambda params: trainer._loss(params, trainer.rest, *batch)[0]
    rise = jax.jit(functools.partial(sharpness, loss_fn, radius=RADIUS, num_samples=DIRECTIONS))
    return {
        "sharpness": float(rise(trainer.params, jax.random.key(0))),  # the same directions for all
        "params_norm": float(optax.tree.norm(trainer.params)),
    }


def config(args):
    """What a cell's figures depend on, beside the cell and the data."""
    options = {name: getattr(args, name) for name in ("train_size", "test_size", "epochs")}
    return options | {"rates": RATES, "radius": RADIUS, "directions": DIRECTIONS}


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
    parser.add_argument("--full", action="store_true", help="all of the data set, and three seeds")
    parser.add_argument(
        "--cells",
        type=lambda text: [parse_cell(cell) for cell in text.split(",")],
        help="only these, with commas between (default: all that belong to the run)",
    )
    parser.add_argument("--again", type=parse_cell, metavar="CELL", help="run one cell once more")
    add_options(parser)
    parser.add_argument("--train-size", type=positive, help="(default: 6000; 50000 with --full)")
    parser.add_argument("--test-size", type=positive, help="(default: 1000; 10000 with --full)")
    parser.add_argument("--seeds", type=positive, help="(default: 1; 3 with --full)")
    parser.add_argument("--epochs", type=positive, default=2)
    args = parser.parse_args(argv)
    for name, quick, full in (
        ("train_size", 6_000, 50_000),
        ("test_size", 1_000, 10_000),
        ("seeds", 1, 3),
    ):
        if getattr(args, name) is None:
            setattr(args, name, full if args.full else quick)
    cells = [args.again] if args.again else args.cells or grid(args)
    largest = max(cell.setting.arm.effective_batch for cell in cells)
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
    data = load(args).name
    order = lambda row: (row["seed"], row["cell"])
    results = Results(path, config(args), data, lambda row: row["cell"], order)
    if args.again:
        again = lambda row: print(f"{args.again} on {data}: {row['test_error']}")
        train_all(train, [args.again], args, data, again)
        kept = {row["cell"]: row["test_error"] for row in results.mine()}
        print(f"{path} has: {kept.get(str(args.again), 'no such cell with these options')}")
        return
    cells = {str(cell): cell for cell in args.cells or grid(args)}
    left = [cells[name] for name in results.left(list(cells))]
    train_all(train, left, args, data, results.add)
    options = shlex.join(sys.argv[1:] if argv is None else argv)
    print(f"\nOne cell again: python {__file__} {options} --again {list(cells)[-1]}")


if __name__ == "__main__":
    main()
