"""The models of memory_table.py, in Flax Linen: ResNet-50 and BERT-base."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolution beside a shortcut; the stride is that of the second."""

    features: int
    stride: int
    norm: str
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x):
        strides = (self.stride, self.stride)
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = norm_layer(self.norm, self.dtype)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides)(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet-50 (He et al., 2015, arXiv:1512.03385); `checkpoint` recomputes each block."""

    norm: str  # "batch" or "group"
    dtype: jax.typing.DTypeLike = jnp.float32  # of the activations; parameters are float32
    checkpoint: bool = False
    stages: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Bottleneck) if self.checkpoint else Bottleneck
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(norm_layer(self.norm, self.dtype)()(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for i in range(blocks):
                stride = 2 if stage and not i else 1
                name = f"stage{stage}_block{i}"  # the same with checkpoint and without
                x = block(64 * 2**stage, stride, self.norm, self.dtype, name=name)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)).astype(jnp.float32))


def norm_layer(norm, dtype):
    """BatchNorm of training, or GroupNorm of 32 groups, in which examples do not meet."""
    if norm == "batch":
        return functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=dtype)
    return functools.partial(nn.GroupNorm, 32, dtype=dtype)


class Layer(nn.Module):
    """Self-attention and two dense layers, each with a LayerNorm after it."""

    heads: int
    dtype: jax.typing.DTypeLike | None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = norm()(x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(x))
        y = dense(width)(nn.gelu(dense(4 * width)(x), approximate=False))
        return norm()(x + y)


class Bert(nn.Module):
    """BERT-base (Devlin et al., 2018, arXiv:1810.04805) and a head that tells two classes apart.

    As in fine-tuning, with whole sequences of one segment; without dropout.
    """

    dtype: jax.typing.DTypeLike | None = jnp.float32  # None: that of the parameters
    checkpoint: bool = False  # recomputes each layer
    layers: int = 12
    width: int = 768
    vocabulary: int = 30522
    positions: int = 512
    sharding: jax.sharding.Sharding | None = None  # of the activations

    @nn.compact
    def __call__(self, tokens):
        layer = nn.remat(Layer) if self.checkpoint else Layer
        embed = functools.partial(nn.Embed, features=self.width, dtype=self.dtype)
        x = embed(self.vocabulary)(tokens) + embed(2)(jnp.zeros_like(tokens))
        x += embed(self.positions)(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(x)
        for i in range(self.layers):
            if self.sharding is not None:  # else the parameters' decides, and gathers the batch
                x = jax.lax.with_sharding_constraint(x, self.sharding)
            x = layer(self.width // 64, self.dtype, name=f"layer{i}")(x)
        pooled = nn.tanh(nn.Dense(self.width, dtype=self.dtype)(x[:, 0]))
        return nn.Dense(2)(pooled.astype(jnp.float32))


def loss_of(net):
    """`loss_fn(params, stats, inputs, labels)`: the mean loss, and BatchNorm's new statistics."""

    def loss_fn(params, stats, inputs, labels):
        logits, stats = net.apply({"params": params, **stats}, inputs, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), stats

    return loss_fn


def init(net, key, inputs):
    """Parameters and statistics; `jax.eval_shape` of it makes none."""
    variables = net.init(key, inputs)
    return variables.pop("params"), variables
