"""A small CNN on CIFAR-10: physical batch 16 x 4 micro-steps against the real batch of 64.

    python examples/cifar_flax.py
        10 epochs of 5,000 images: 4 minutes on two CPU cores; 49, 50 and 53 % for the three arms

    python examples/cifar_flax.py --train-size 50000 --test-size 10000
        the whole of CIFAR-10: 50 minutes on two busy cores; 68.9, 68.8 and 69.9 %

Each arm BxK trains the same model from the same start on the same order of images, with Adam and
windows of K micro-batches of B. Where CIFAR-10 cannot be had, the embedded sample of
Fashion-MNIST takes its place, and every result line says so. Under --out: results.json,
metrics.jsonl, TensorBoard event files, curves.png, and drift.png, which answers why loss curves
differ although the mathematics is equal.
"""

import argparse
import functools
import json
import pathlib
import shutil
import subprocess
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

import cifar_plots
import image_data
from optax_accum import accumulate, chain, flush

NORMS = ("group", "batch", "layer", "none")
CLASSES = 10
LOGS_PER_EPOCH = 10
DEFAULT_TRAIN_SIZE, DEFAULT_TEST_SIZE = 5_000, 2_000


class CNN(nnx.Module):
    """Four 3x3 convolutions, each with a norm and ReLU, and a linear layer: 151,000 parameters."""

    def __init__(self, images: np.ndarray, norm: str, dtype: Any, rngs: nnx.Rngs):
        _, height, width, channels = images.shape
        make_norm = {
            "group": functools.partial(nnx.GroupNorm, num_groups=8),
            "batch": functools.partial(nnx.BatchNorm, momentum=0.9),
            "layer": nnx.LayerNorm,
            "none": lambda features, **_: lambda x: x,
        }[norm]
        convs, norms = [], []
        for features, stride in ((32, 2), (64, 2), (64, 1), (128, 2)):
            convs.append(nnx.Conv(channels, features, (3, 3), stride, param_dtype=dtype, rngs=rngs))
            norms.append(make_norm(features, param_dtype=dtype, rngs=rngs))
            height, width, channels = -(-height // stride), -(-width // stride), features
        self.convs, self.norms = nnx.List(convs), nnx.List(norms)
        self.head = nnx.Linear(height * width * channels, CLASSES, param_dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = (images.astype(self.head.kernel.dtype) / 255 - 0.5) * 4
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.reshape(len(x), -1))


class Arm(NamedTuple):
    """What one arm trains with; named "16x4"."""

    physical_batch: int
    every_k: int

    @property
    def effective_batch(self) -> int:
        """Examples in a window."""
        return self.physical_batch * self.every_k

    def __str__(self) -> str:
        return f"{self.physical_batch}x{self.every_k}"


class Trainer:
    """A model, its optimizer and the compiled steps."""

    def __init__(self, images, arm, tx, *, norm, seed, dtype=jnp.float32):
        self.arm = arm
        self.tx = chain(accumulate(arm.every_k), tx)
        model = CNN(images.train_images, norm, dtype, nnx.Rngs(seed))
        # Params are trained; the rest (BatchNorm's statistics) is carried along.
        self.graph, self.params, self.rest = nnx.split(model, nnx.Param, ...)
        self.opt_state = self.tx.init(self.params)
        self.step = jax.jit(self._step, donate_argnums=(0, 1, 2))
        self.compiled = {}  # by the size of the micro-batch
        self.flush = jax.jit(self._flush, donate_argnums=(0, 1))
        self.evaluate_batch = jax.jit(self._evaluate_batch)

    def _loss(self, params, rest, images, labels):
        model = nnx.merge(self.graph, params, rest, copy=True)  # BatchNorm writes to it
        model.train()
        loss = optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
        return loss, nnx.split(model, nnx.Param, ...)[2]

    def _step(self, params, rest, opt_state, images, labels):
        grad_fn = jax.value_and_grad(self._loss, has_aux=True)
        (loss, rest), grads = grad_fn(params, rest, images, labels)
        # A micro-batch counts by its examples, so that an uneven last one is no trouble.
        updates, opt_state = self.tx.update(grads, opt_state, params, weight=len(images))
        return optax.apply_updates(params, updates), rest, opt_state, loss

    def _flush(self, params, opt_state):
        updates, opt_state = flush(self.tx, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def _evaluate_batch(self, params, rest, images, labels):
        model = nnx.merge(self.graph, params, rest)
        model.eval()
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum(), (logits.argmax(-1) == labels).sum()

    def micro_step(self, images, labels):
        """Train on one micro-batch; returns its loss, still on the device."""
        step = self.compiled.get(len(images), self.step)
        self.params, self.rest, self.opt_state, loss = step(
            self.params, self.rest, self.opt_state, images, labels
        )
        return loss

    def close_window(self):
        """Update from a short last window, if one is open."""
        self.params, self.opt_state = self.flush(self.params, self.opt_state)

    def evaluate(self, images, labels, batch=500):
        """Mean loss and accuracy."""
        loss = correct = 0.0
        for i in range(0, len(images), batch):
            sums = self.evaluate_batch(
                self.params, self.rest, images[i : i + batch], labels[i : i + batch]
            )
            loss, correct = loss + float(sums[0]), correct + float(sums[1])
        return loss / len(images), correct / len(images)

    def compile(self, images, labels):
        """Compile the step for such a micro-batch; returns the bytes that XLA reserves for it."""
        lowered = self.step.lower(self.params, self.rest, self.opt_state, images, labels)
        compiled = self.compiled[len(images)] = lowered.compile()
        return compiled.memory_analysis().temp_size_in_bytes


def epoch_order(size, seed, epoch):
    """The order in which every arm sees the images of an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(size)


def train(images, arm, args, log, writer):
    """Train one arm; returns its row of results.json."""
    trainer = Trainer(images, arm, optax.adam(args.lr), norm=args.norm, seed=args.seed)
    size, batch = len(images.train_images), arm.physical_batch
    temp_bytes = trainer.compile(images.train_images[:batch], images.train_labels[:batch])
    if size % batch:
        trainer.compile(images.train_images[: size % batch], images.train_labels[: size % batch])
    trainer.close_window()  # of an empty window: compiles it, and changes nothing
    micro_steps = -(-size // batch)
    log_every = -(-micro_steps // LOGS_PER_EPOCH)
    seconds, curve, peak_bytes = 0.0, [], None
    bar = tqdm(total=args.epochs * micro_steps, desc=str(arm), unit=" micro-steps")
    for epoch in range(args.epochs):
        order = epoch_order(size, args.seed, epoch)
        start, losses, examples = time.perf_counter(), [], []
        for i in range(micro_steps):
            index = order[i * batch : (i + 1) * batch]
            losses.append(
                trainer.micro_step(images.train_images[index], images.train_labels[index])
            )
            examples.append(len(index))
            bar.update()
            last = i + 1 == micro_steps
            if not last and (i + 1) % log_every:
                continue
            if last:
                trainer.close_window()
            point = {
                "arm": str(arm),
                "data": images.name,
                "epoch": epoch + (i + 1) / micro_steps,
                "micro_step": epoch * micro_steps + i + 1,
                "gradient_step": int(trainer.opt_state[-1].gradient_step),
                "train_loss": float(np.average([float(loss) for loss in losses], weights=examples)),
            }
            point["seconds"] = seconds + time.perf_counter() - start
            losses, examples = [], []
            bar.set_postfix(
                loss=f"{point['train_loss']:.3f}", gradient_steps=point["gradient_step"]
            )
            if last:
                seconds = point["seconds"]  # evaluation does not count
                if epoch == 0:
                    peak_bytes = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
                point["test_loss"], point["test_accuracy"] = trainer.evaluate(
                    images.test_images, images.test_labels
                )
            curve.append(point)
            log.write(json.dumps(point) + "\n")
            log.flush()
            for name in point.keys() & {"train_loss", "test_loss", "test_accuracy"}:
                writer.add_scalar(name, point[name], point["gradient_step"])
    bar.close()
    return {
        "arm": str(arm),
        "physical_batch": arm.physical_batch,
        "every_k": arm.every_k,
        "norm": args.norm,
        "data": images.name,
        "test_accuracy": curve[-1]["test_accuracy"],
        "test_loss": curve[-1]["test_loss"],
        "images_per_second": args.epochs * size / seconds,
        "seconds": seconds,
        "temp_bytes": temp_bytes,
        # The process's, so only its first arm's: benchmarks/gpu.py gives each arm its own.
        "peak_bytes_in_use": peak_bytes if arm == args.arms[0] else None,
        "first_update_max_diff": first_update_max_diff(images, arm, args),
        "config": {
            name: [str(arm) for arm in value] if name == "arms" else value
            for name, value in vars(args).items()
            if name not in ("data_dir", "out")  # paths of one machine
        },
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "commit": commit(),
        "curve": curve,
    }


def first_update_max_diff(images, arm, args):
    """Largest difference of a parameter from the big batch's, after one update of SGD at rate 1.

    Not of Adam, whose first update is the gradient's sign: it turns rounding into whole steps.
    """
    index = epoch_order(len(images.train_images), args.seed, 0)[: arm.effective_batch]
    ends = []
    for each in (arm, Arm(arm.effective_batch, 1)):
        trainer = Trainer(images, each, optax.sgd(1.0), norm=args.norm, seed=args.seed)
        for part in filter(len, np.array_split(index, each.every_k)):
            trainer.micro_step(images.train_images[part], images.train_labels[part])
        ends.append(trainer.params)
    differences = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), *ends)
    return max(float(leaf) for leaf in jax.tree.leaves(differences))


def drift(images, args, steps):
    """Relative distance of 16x4 and of a control from 64x1, after each of `steps` updates.

    The control is 64x1 with the examples inside each batch in another order: the same
    mathematics, other rounding. In float64 the rounding is 1e-16, and nothing is left to grow.

    Returns:
      Mapping from a label to a list of ||params - params of 64x1|| / ||params of 64x1||.
    """
    small, big = Arm(16, 4), Arm(64, 1)
    new = functools.partial(Trainer, images, tx=optax.adam(args.lr), norm=args.norm, seed=args.seed)

    def run(dtype, others):
        reference = new(arm=big, dtype=dtype)
        trainers = {label: new(arm=arm, dtype=dtype) for label, arm in others.items()}
        distances = {label: [] for label in others}
        order = epoch_order(len(images.train_images), args.seed, 0)
        for step in tqdm(range(steps), desc=f"drift, {jnp.dtype(dtype).name}", unit=" updates"):
            index = order[step * 64 : (step + 1) * 64]
            reference.micro_step(images.train_images[index], images.train_labels[index])
            for label, trainer in trainers.items():
                again = (
                    index
                    if trainer.arm == small
                    else np.random.default_rng(step).permutation(index)
                )
                for part in np.array_split(again, trainer.arm.every_k):
                    trainer.micro_step(images.train_images[part], images.train_labels[part])
                away = optax.tree.sub(trainer.params, reference.params)
                distances[label].append(
                    float(optax.tree.norm(away) / optax.tree.norm(reference.params))
                )
        return distances

    distances = run(
        jnp.float32,
        {"16x4, float32": small, "64x1, other order in each batch, float32": big},
    )
    with jax.enable_x64(True):
        distances |= run(jnp.float64, {"16x4, float64": small})
    return distances


def commit():
    """The checkout's commit, with a + where it has changes."""
    git = functools.partial(
        subprocess.run, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True
    )
    try:
        head = git(["git", "rev-parse", "--short=12", "HEAD"])
        changes = git(["git", "status", "--porcelain", "--untracked-files=no"])
    except FileNotFoundError:  # no git here
        return "unknown"
    return (
        head.stdout.strip() + ("+" if changes.stdout else "") if not head.returncode else "unknown"
    )


def table(rows):
    """The arms side by side, as Markdown."""
    lines = [
        "| arm | test accuracy | test loss | images/s | seconds | compiled temp | peak in use"
        " | first update | data |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peak = row["peak_bytes_in_use"]
        lines.append(
            f"| {row['arm']} | {100 * row['test_accuracy']:.1f} % | {row['test_loss']:.3f}"
            f" | {row['images_per_second']:.0f} | {row['seconds']:.0f}"
            f" | {row['temp_bytes'] / 1e6:.1f} MB"
            f" | {f'{peak / 1e6:.0f} MB' if peak else 'not reported'}"
            f" | {row['first_update_max_diff']:.1e} | {row['data']} |"
        )
    return "\n".join(lines)


def parse_arm(text):
    try:
        arm = Arm(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"an arm must read like 16x4, got {text!r}") from None
    if min(arm) < 1:
        raise argparse.ArgumentTypeError(f"batch and k must be at least 1, got {text!r}")
    return arm


def positive(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an int of at least 1, got {text!r}")
    return int(text)


def not_negative(text):
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an int of at least 0, got {text!r}")
    return int(text)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms",
        type=lambda text: [parse_arm(part) for part in text.split(",")],
        default="64x1,16x4,16x1",
        help="physical batch x every_k, with commas between (default: %(default)s)",
    )
    parser.add_argument("--norm", choices=NORMS, default="group")
    parser.add_argument("--data", choices=image_data.SOURCES, default="auto")
    parser.add_argument("--data-dir", help="folder with cifar-10-batches-bin or a TFDS CIFAR-10")
    parser.add_argument("--data-name", help="name to report results under (default: what is read)")
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--train-size", type=positive, default=DEFAULT_TRAIN_SIZE)
    parser.add_argument("--test-size", type=positive, default=DEFAULT_TEST_SIZE)
    parser.add_argument("--drift-steps", type=not_negative, default=50)
    parser.add_argument("--seed", type=not_negative, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", default="results/cifar_flax")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    images = image_data.load(args.data, args.data_dir).head(args.train_size, args.test_size)
    images = images._replace(name=args.data_name or images.name)
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    print(
        f"{images.name}: {len(images.train_images)} training and {len(images.test_images)} test"
        f" images; norm {args.norm}, Adam {args.lr:g}, {args.epochs} epochs"
    )
    rows = []
    with (out / "metrics.jsonl").open("w") as log:
        for arm in args.arms:
            print(
                f"physical batch {arm.physical_batch} x k {arm.every_k} = effective batch"
                f" {arm.effective_batch}"
            )
            events = out / "tensorboard" / str(arm)
            shutil.rmtree(events, ignore_errors=True)  # of an earlier run
            with SummaryWriter(str(events)) as writer:
                rows.append(train(images, arm, args, log, writer))
            (out / "results.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))
    cifar_plots.curves(rows, out / "curves.png")
    steps = min(args.drift_steps, len(images.train_images) // 64)
    if steps:
        distances = drift(images, args, steps)
        (out / "drift.json").write_text(json.dumps(distances))
        cifar_plots.drift(distances, images.name, out / "drift.png")
    print(f"Results, metrics, TensorBoard files and pictures are in {out}")


if __name__ == "__main__":
    main()
