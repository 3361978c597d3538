"""The network of batchnorm_vs_groupnorm.py, and what trains it under each remedy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

from optax_accum import accumulate, chain, has_updated, make_train_step, pool_batch_collections
from optax_accum.testing import collectives
from training import Trainer, split

BN_MOMENTUM = 0.9
CLASSES = 10
DEVICES = 8  # of batch-sync


class ResNet(nnx.Module):
    """Three residual blocks on a strided convolution: 16 x 16, 8 x 8 and 4 x 4 positions."""

    def __init__(self, channels: int, make_norm, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        widths = (16, 16, 32, 64)
        self.stem, self.stem_norm = conv(channels, widths[0], (3, 3), 2), make_norm(widths[0])
        blocks = []
        for before, after in itertools.pairwise(widths):
            stride = 1 if before == after else 2
            blocks.append(
                nnx.Dict(
                    conv1=conv(before, after, (3, 3), stride),
                    norm1=make_norm(after),
                    conv2=conv(after, after, (3, 3)),
                    norm2=make_norm(after),
                )
            )
            if before != after:
                blocks[-1].shortcut = conv(before, after, (1, 1), stride)
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(widths[-1], CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = (images.astype(jnp.float32) / 255 - 0.5) * 4
        x = nnx.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            branch = nnx.relu(block.norm1(block.conv1(x)))
            branch = block.norm2(block.conv2(branch))
            x = nnx.relu(branch + (block.shortcut(x) if "shortcut" in block else x))
        return self.head(x.mean((1, 2)))


def new_model(norm, channels, seed):
    rngs = nnx.Rngs(seed)
    make_norm = {
        "batch": functools.partial(nnx.BatchNorm, momentum=BN_MOMENTUM),
        "batch-frozen": functools.partial(nnx.BatchNorm, momentum=BN_MOMENTUM),
        # Leaves the micro-batch's own statistics behind, for PooledTrainer.
        "batch-pooled": functools.partial(nnx.BatchNorm, momentum=0.0),
        "batch-sync": functools.partial(nnx.BatchNorm, momentum=BN_MOMENTUM, axis_name="data"),
        "group": functools.partial(nnx.GroupNorm, num_groups=8),
        "layer": functools.partial(nnx.LayerNorm, reduction_axes=(1, 2, 3), feature_axes=-1),
    }[norm]
    return ResNet(channels, functools.partial(make_norm, rngs=rngs), rngs)


class PooledTrainer(Trainer):
    """Running statistics of a BatchNorm take in the whole window, once."""

    def __init__(self, model, arm, tx):
        super().__init__(model, arm, tx)
        running = self.rest
        self.rest = (running, jax.tree.map(jnp.zeros_like, running), jnp.zeros([]))

    def _step(self, params, rest, opt_state, images, labels):
        running, window, count = rest
        params, own, opt_state, loss = super()._step(params, running, opt_state, images, labels)
        # Of the window so far, and of this micro-batch.
        window = pool_batch_collections([window, own], jnp.stack([count, len(images)]))
        taken_in = optax.incremental_update(window, running, 1 - BN_MOMENTUM)
        closed = has_updated(opt_state)
        running = jax.tree.map(functools.partial(jnp.where, closed), taken_in, running)
        count = jnp.where(closed, 0, count + len(images))
        return params, (running, window, count), opt_state, loss

    def _evaluate_batch(self, params, rest, images, labels):
        return super()._evaluate_batch(params, rest[0], images, labels)


class SyncTrainer(Trainer):
    """Shares a micro-batch out between devices, whose BatchNorm sees all of it."""

    def __init__(self, model, arm, tx):
        super().__init__(model, arm, tx)
        self.train_step = make_train_step(
            lambda params, rest, batch: self.loss(params, rest, *batch),
            chain(accumulate(arm.every_k, axis_name="data"), tx),
            model_state=True,
            mesh=jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,)),
        )
        self.opt_state = self.train_step.init(self.params, self.rest)

    def compile(self, images, labels):
        lowered = self.train_step.lower(
            self.params, self.opt_state, (images, labels), model_state=self.rest
        )
        compiled = self.compiled[len(images)] = lowered.compile()
        found = collectives(compiled)
        self.collectives = {
            "each_micro_step": dataclasses.asdict(found.outside),
            "each_boundary": dataclasses.asdict(found.in_conditionals),
        }

        return compiled.memory_analysis().temp_size_in_bytes

    def close_window(self):
        self.params, self.opt_state, _, self.rest = self.train_step.flush(
            self.params, self.opt_state, model_state=self.rest
        )

    def micro_step(self, images, labels):
        """Train on one micro-batch; returns the loss of the window that it closed, else NaN."""
        self.params, self.opt_state, metrics, self.rest = self.train_step(
            self.params, self.opt_state, (images, labels), model_state=self.rest
        )
        return jnp.where(metrics["emitted"], metrics["loss"], jnp.nan)

    def evaluate(self, images, labels, batch=500):
        on_mesh = self.params, self.rest
        self.params, self.rest = jax.device_get(on_mesh)  # once, not on each device
        try:
            return super().evaluate(images, labels, batch)
        finally:
            self.params, self.rest = on_mesh


def new_trainer(norm, arm, tx, images, seed):
    kind = {"batch-pooled": PooledTrainer, "batch-sync": SyncTrainer}.get(norm, Trainer)
    return kind(new_model(norm, images.train_images.shape[-1], seed), arm, tx)


def freeze(trainer):
    """From now on BatchNorm normalises by its running statistics, and leaves them alone."""
    model = nnx.merge(trainer.graph, trainer.params, trainer.rest)
    model.set_attributes(nnx.BatchNorm, use_running_average=True)
    trainer.graph = split(model)[0]
    trainer.reset()
    return trainer
