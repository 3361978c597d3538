"""Contrastive learning at an effective batch of 512: its exact gradient against a naive one.

    python examples/contrastive.py
        nine cells of 200,000 images: half an hour on two CPU cores; finished cells are kept: run it
        again to go on. 57.6, 57.6 and 52.7 % for the three arms

A small network learns to tell which two views (random crop, mirror image, colours) are of one
image, by a symmetric InfoNCE loss with a learned temperature (van den Oord et al., 2018,
arXiv:1807.03748; Chen et al., 2020, arXiv:2002.05709). Three arms see the same views in the same
order: `big batch`, whose 512 pairs meet each other; `exact 8x64`, which has the same loss in
micro-batches of 64, by `contrastive_value_and_grad`; and `naive 8x64`, the mean over micro-batches
that each meet only their own 64 pairs. Retrieval is the fraction of the test images whose second
view is, of all second views, the nearest to their first. Under --out: contrastive.json.
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cells import Results, add_options, load, mean_and_error, plus_minus, train_all
from optax_accum import contrastive_value_and_grad, microbatch_value_and_grad
from training import commit, epoch_order, positive, split

BATCH, MICRO_BATCHES = 512, 8
PIXELS = 24  # the height and width of a view
PEAK_LEARNING_RATE = 2e-3
GRADIENTS = {
    "big batch": lambda encode, loss: jax.value_and_grad(composed(encode, loss)),
    "exact 8x64": lambda encode, loss: contrastive_value_and_grad(encode, loss, MICRO_BATCHES),
    "naive 8x64": lambda encode, loss: microbatch_value_and_grad(
        composed(encode, loss), MICRO_BATCHES
    ),
}
BIG = "big batch"


class Encoder(nnx.Module):
    """Three convolutions with GroupNorm, so that examples do not see each other."""

    def __init__(self, channels: int, rngs: nnx.Rngs):
        convs, norms = [], []
        for features, kernel, stride in ((64, 4, 4), (128, 3, 2), (128, 3, 1)):
            convs.append(nnx.Conv(channels, features, (kernel, kernel), stride, rngs=rngs))
            norms.append(nnx.GroupNorm(features, num_groups=8, rngs=rngs))
            channels = features
        self.convs, self.norms = nnx.List(convs), nnx.List(norms)
        self.head = nnx.Linear(channels, 64, rngs=rngs)
        self.log_scale = nnx.Param(jnp.log(10.0))  # of the inverse temperature

    def __call__(self, views: jax.Array) -> jax.Array:
        x = views.reshape(-1, *views.shape[2:])
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # Smooth: a ReLU turns the rounding of one unit near 0 into a difference of 1e-3.
            x = nnx.silu(norm(conv(x)))
        x = self.head(x.mean((1, 2)))
        x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x.reshape(*views.shape[:2], -1)


def new_model(images, seed):
    """`encode(params, views)`, unit vectors [N, 2, 64] of views [N, 2, ...]; and its params."""
    graph, params, rest = split(Encoder(images.train_images.shape[-1], nnx.Rngs(seed)))
    return lambda params, views: nnx.merge(graph, params, rest)(views), params


def info_nce(params, r):
    """Which of all second views belongs to each first one, and the reverse."""
    logits = jnp.exp(params["log_scale"]) * r[:, 0] @ r[:, 1].T
    each = optax.softmax_cross_entropy_with_integer_labels
    labels = jnp.arange(len(logits))
    return (each(logits, labels).mean() + each(logits.T, labels).mean()) / 2


def composed(encode, loss):
    return lambda params, views: loss(params, encode(params, views))


@jax.jit
def two_views(key, images):
    """Two random views of each image, float32 [N, 2, PIXELS, PIXELS, channels]."""

    def view(key, image):
        size = image.shape[0]
        side_key, corner_key, mirror_key, gain_key, contrast_key = jax.random.split(key, 5)
        side = size * jax.random.uniform(side_key, minval=0.5)
        corner = (size - side) * jax.random.uniform(corner_key, (2,))
        scale = jnp.full(2, PIXELS / side)
        x, shape = image.astype(jnp.float32) / 255 - 0.5, (PIXELS, PIXELS, image.shape[-1])
        x = jax.image.scale_and_translate(
            x, shape, (0, 1), scale, -corner * scale, "linear", antialias=False
        )
        x = jnp.where(jax.random.bernoulli(mirror_key), x[:, ::-1], x)
        brightness = jax.random.uniform(gain_key, (image.shape[-1],), minval=-0.3, maxval=0.3)
        contrast = jax.random.uniform(contrast_key, minval=0.5, maxval=1.5)
        return 4 * (contrast * x + brightness)

    keys = jax.random.split(key, (len(images), 2))
    return jax.vmap(jax.vmap(view, (0, None)))(keys, images)


def batches(images, seed, epoch):
    """The views of an epoch's updates, which know nothing of the arm."""
    size = len(images.train_images) // BATCH * BATCH
    order = epoch_order(len(images.train_images), seed, epoch)[:size]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), epoch), size // BATCH)
    for key, index in zip(keys, order.reshape(-1, BATCH), strict=True):
        yield two_views(key, images.train_images[index])


def retrieval(r, labels):
    """How often an image finds its own second view, and another one's of its class."""
    similarity = np.array(r[:, 0] @ r[:, 1].T)
    own = similarity.argmax(1) == np.arange(len(r))
    np.fill_diagonal(similarity, -np.inf)
    return own.mean(), (labels[similarity.argmax(1)] == labels).mean()


def max_relative_diff(gradients, want):
    """Largest difference of an element, relative to the largest element of its array."""

    def relative(a, b):
        return jnp.abs(a - b).max() / jnp.abs(b).max()

    return max(map(float, jax.tree.leaves(jax.tree.map(relative, gradients, want))))


def train(cell, images, args):
    """Train one cell; returns its row of the results."""
    arm, seed = cell
    encode, params = new_model(images, seed)
    views = next(batches(images, seed, 0))
    compiled = {
        name: jax.jit(GRADIENTS[name](encode, info_nce)).lower(params, views).compile()
        for name in {arm, BIG}
    }
    value_and_grad = compiled[arm]
    first = {name: fn(params, views)[1] for name, fn in compiled.items()}

    updates = args.epochs * (len(images.train_images) // BATCH)
    tx = optax.adam(optax.cosine_onecycle_schedule(updates, PEAK_LEARNING_RATE, pct_start=0.2))
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, gradients):
        changes, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    seconds, losses = 0.0, []
    for epoch in range(args.epochs):
        began, epoch_losses = time.perf_counter(), []
        for views in batches(images, seed, epoch):
            loss, gradients = value_and_grad(params, views)
            params, opt_state = update(params, opt_state, gradients)
            epoch_losses.append(loss)
        losses.append(float(np.mean(jax.device_get(epoch_losses))))
        seconds += time.perf_counter() - began

    test_views = two_views(jax.random.key(0), images.test_images)  # the same for all seeds
    own, its_class = retrieval(jax.jit(encode)(params, test_views), images.test_labels)
    return {
        "arm": arm,
        "seed": seed,
        "data": images.name,
        "updates": updates,
        "retrieval": own,
        "neighbour_class": its_class,
        "first_gradient_max_diff": max_relative_diff(first[arm], first[BIG]),
        "temp_bytes": value_and_grad.memory_analysis().temp_size_in_bytes,
        "images_per_second": updates * BATCH / seconds,
        "inverse_temperature": float(jnp.exp(params["log_scale"])),
        "train_losses": losses,
        "config": config(args),
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "commit": commit(),
    }


def config(args):
    """What a cell's figures depend on, beside the cell and the data."""
    return {name: getattr(args, name) for name in ("train_size", "test_size", "epochs")}


def cell_of(row):
    return row["arm"], row["seed"]


def table(rows):
    """Means over seeds, and of the differences from the big batch's training of the same seed."""
    of = {cell_of(row): row for row in rows}
    lines = [
        "| arm | finds its own second view, % | minus the big batch |"
        " nearest other is of its class, % | minus the big batch | first gradient differs by |"
        " temp MB | images/s |",
        "|---" * 8 + "|",
    ]
    for arm in GRADIENTS:
        mine = [row for row in rows if row["arm"] == arm]
        if not mine:
            continue
        paired = [(row, of[BIG, row["seed"]]) for row in mine if (BIG, row["seed"]) in of]
        shown = [arm]
        for name in ("retrieval", "neighbour_class"):
            differences = [100 * (row[name] - big[name]) for row, big in paired if arm != BIG]
            shown.append(plus_minus(*mean_and_error([100 * row[name] for row in mine])))
            shown.append(plus_minus(*mean_and_error(differences)) if differences else "")

        def each(name, mine=mine):
            return [row[name] for row in mine]

        shown.append(f"{max(each('first_gradient_max_diff')):.0e}")
        shown.append(f"{max(each('temp_bytes')) / 1e6:.1f}")
        shown.append(f"{np.median(each('images_per_second')):.0f}")
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--train-size", type=positive, default=50_000)
    parser.add_argument("--test-size", type=positive, default=2_000)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--epochs", type=positive, default=4)
    args = parser.parse_args(argv)
    if args.train_size < BATCH:
        parser.error(f"argument --train-size: must be at least {BATCH}, got {args.train_size}")
    return args


def main(argv=None):
    args = parse_args(argv)
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data = load(args).name
    results = Results(out / "contrastive.json", config(args), data, cell_of, order=cell_of)
    cells = [(arm, seed) for seed in range(args.seeds) for arm in GRADIENTS]
    train_all(train, results.left(cells), args, data, results.add)
    print(f"\n{data}, effective batch {BATCH}\n{table(results.mine())}")


if __name__ == "__main__":
    main()
