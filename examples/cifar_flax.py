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
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

import cifar_plots
import image_data
from training import (
    Arm,
    Trainer,
    commit,
    epoch_order,
    first_update_max_diff,
    not_negative,
    parse_arm,
    positive,
)

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


def new_trainer(arm, tx, images, args, dtype=jnp.float32):
    """The arm's trainer at its start, the same for all arms."""
    return Trainer(CNN(images.train_images, args.norm, dtype, nnx.Rngs(args.seed)), arm, tx)


def train(images, arm, args, log, writer):
    """Train one arm; returns its row of results.json."""
    new = functools.partial(new_trainer, images=images, args=args)
    trainer = new(arm, optax.adam(args.lr))
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
        "first_update_max_diff": first_update_max_diff(
            new, arm, images, epoch_order(size, args.seed, 0)[: arm.effective_batch]
        ),
        "config": {
            name: [str(arm) for arm in value] if name == "arms" else value
            for name, value in vars(args).items()
            if name not in ("data_dir", "out")  # paths of one machine
        },
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "commit": commit(),
        "curve": curve,
    }


def drift(images, args, steps):
    """Relative distance of 16x4 and of a control from 64x1, after each of `steps` updates.

    The control is 64x1 with the examples inside each batch in another order: the same
    mathematics, other rounding. In float64 the rounding is 1e-16, and nothing is left to grow.

    Returns:
      Mapping from a label to a list of ||params - params of 64x1|| / ||params of 64x1||.
    """
    small, big = Arm(16, 4), Arm(64, 1)
    new = functools.partial(new_trainer, tx=optax.adam(args.lr), images=images, args=args)

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
