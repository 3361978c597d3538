"""The network of claims.py, what trains it in each setting, and how sharp it ends."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from norm_models import CLASSES
from optax_accum import has_updated, sharpness
from training import Trainer

RATES = {"sgd": 0.03, "adam": 0.006, "lamb": 0.05}  # the highest, at a rate of x1
RADIUS = 2.0  # of the perturbation that measures sharpness
SHARPNESS_IMAGES = 1_000
DIRECTIONS = 32  # that sharpness is the mean of
AVERAGED = 0.25  # the part of the updates, the last ones, whose weights are averaged


class ConvNet(nnx.Module):
    """Three strided convolutions with GroupNorm: 16 x 16, 8 x 8 and 4 x 4 positions."""

    def __init__(self, channels: int, rngs: nnx.Rngs):
        widths = 16, 32, 64
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), strides=2, use_bias=False, rngs=rngs)
        self.convs = nnx.List(map(conv, (channels, *widths[:-1]), widths))
        self.norms = nnx.List(nnx.GroupNorm(width, num_groups=8, rngs=rngs) for width in widths)
        self.head = nnx.Linear(widths[-1], CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = (images.astype(jnp.float32) / 255 - 0.5) * 4
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))


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


def schedule_of(setting, updates):
    """The rate of each update."""
    peak = setting.rate * RATES[setting.optimizer]
    warm_up = max(round(setting.warm_up * updates), 1)
    first = peak / warm_up
    if setting.schedule == "constant":
        return optax.warmup_constant_schedule(first, peak, warm_up)
    end = max(updates, warm_up + 1)  # of a single update, which is the warm-up
    return optax.warmup_cosine_decay_schedule(first, peak, warm_up, end)


def new_trainer(setting, images, seed, updates):
    model = ConvNet(images.train_images.shape[-1], nnx.Rngs(seed))
    make = {
        "sgd": functools.partial(optax.sgd, momentum=setting.momentum),
        "adam": optax.adam,
        "lamb": optax.lamb,
    }[setting.optimizer]
    tx = make(schedule_of(setting, updates))
    if setting.is_averaged:
        # The last quarter, and of few updates the last one at least.
        first_update = min(int(updates * (1 - AVERAGED)) + 1, updates)
        return AveragingTrainer(model, setting.arm, tx, first_update)
    return Trainer(model, setting.arm, tx, monitor=setting.is_monitored)


def sharpness_of(trainer, images):
    """How much the loss on some training images rises around the weights, and their norm."""
    batch = images.train_images[:SHARPNESS_IMAGES], images.train_labels[:SHARPNESS_IMAGES]

    def loss_fn(params):
        return trainer.loss(params, trainer.rest, *batch)[0]

    rise = jax.jit(functools.partial(sharpness, loss_fn, radius=RADIUS, num_samples=DIRECTIONS))
    return {
        "sharpness": float(rise(trainer.params, jax.random.key(0))),  # the same directions for all
        "params_norm": float(optax.tree.norm(trainer.params)),
    }
