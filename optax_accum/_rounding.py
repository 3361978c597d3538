"""Rounding to bfloat16 at random, so that a long sum in bfloat16 is right on average."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_accum._window import gathered, times

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)
_QUIET = np.uint32(1 << 22)  # a NaN that has this bit has it in bfloat16 too
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: its multiples lie far apart
_MULTIPLIERS = np.uint32(747796405), np.uint32(2891336453)


def gathered_tree(
    total: Any,
    tree: Any,
    scale: Any,
    accepted: Any,
    counters: Callable[[], Sequence[Any]],
    decay: Any = 1,
) -> Any:
    """`gathered` for each leaf of `decay * total`; sums in bfloat16 are rounded at random.

    The noise is that of `counters`: two trees with the same ones, of two groups in
    `optax.partition` say, are rounded alike.
    """
    seed = functools.cache(lambda: seed_of(*counters()))
    leaves, treedef = jax.tree.flatten(total)

    def add(index, s, x):
        if s.dtype != jnp.bfloat16:
            return gathered(times(s, decay, s.dtype), x, scale, accepted)
        exact = gathered(times(s, decay, jnp.float32), x, scale, accepted)
        return rounded(exact, noise_bits(seed(), index, s.shape))

    xs = treedef.flatten_up_to(tree)
    return treedef.unflatten(map(add, range(len(leaves)), leaves, xs))


@jax.custom_jvp
def rounded(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Round float32 to a neighbour in bfloat16, to the nearer one more often.

    With lo <= x <= hi the neighbours of x and `noise` uniform on 0, 1, ..., 2¹⁶ - 1:

        P(hi) = (x - lo) / (hi - lo)        E[rounded(x)] = x, exactly

    Rounded to nearest, a sum stands still once its addends are below half its last digit (1/512
    to 1/256 of it); here it is right on average, and its errors are a random walk. What bfloat16
    can hold stays as it is: zeros keep their sign, infinities stay and NaN stays NaN.
    Beyond the largest of bfloat16 (3.39e38) x is rounded towards zero, so that the result is
    finite where x is. The derivative is that of the identity.

    Args:
      x: float32.
      noise: uint32 of the shape of x, as `noise_bits` gives it.

    Returns:
      bfloat16 of the shape of x.

    Raises:
      ValueError: x is not float32.

    References:
      Gupta et al., 2015, Deep Learning with Limited Numerical Precision (arXiv:1502.02551), for
      the rule; Zamirai et al., 2020, Revisiting BFloat16 Training (arXiv:2010.06192), for bfloat16.
    """
    if x.dtype != jnp.float32:
        raise ValueError(f"x must be float32, to be rounded at random; got {x.dtype.name}.")
    # The upper half of a float32 is the bfloat16 below it: a carry out of the lower half goes up.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits += jnp.where(jnp.abs(x) < _LARGEST, noise, 0)
    bits |= jnp.where(jnp.isnan(x), _QUIET, 0)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


@rounded.defjvp
def _rounded_jvp(primals, tangents):
    return rounded(*primals), tangents[0].astype(jnp.bfloat16)


def seed_of(*counters: Any) -> tuple[jax.Array, jax.Array]:
    """Two words (uint32 scalars) that tell micro-steps and devices apart by what they count."""
    words = []
    for multiplier in _MULTIPLIERS:
        word = jnp.uint32(1)
        for counter in counters:
            word = word * multiplier + jnp.asarray(counter).astype(jnp.uint32)
        words.append(_mixed(word))
    return words[0], words[1]


def noise_bits(
    seed: tuple[jax.Array, jax.Array], leaf_index: int, shape: Sequence[int]
) -> jax.Array:
    """Draw 16 random bits (uint32) for each element of a leaf, from `seed_of` a micro-step.

    They are a hash of the element's position, so that they fuse into the sum that they round, in
    a leaf that is sharded too; `jax.random.bits` would be written to memory first.

    References:
      Wellons, 2018, Prospecting for Hash Functions (nullprogram.com/blog/2018/07/31), for the
      hash triple32; L'Ecuyer, 1999, Tables of Linear Congruential Generators of Different Sizes
      and Good Lattice Structure, for the multipliers of `seed_of`.
    """
    first, second = seed
    leaf = np.uint32(leaf_index * _GOLDEN % 2**32)
    return _mixed(_positions(shape) ^ first, second + leaf) >> 16


def _positions(shape: Sequence[int]) -> jax.Array:
    """0, 1, 2, ... in row-major order, modulo 2³²."""
    # One iota an axis and no reshape: so a sharded leaf's are made where the leaf is.
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        iota = lax.broadcasted_iota(jnp.uint32, shape, axis)
        position += iota * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return position


def _mixed(x: jax.Array, key: Any = 0) -> jax.Array:
    """triple32, in which another word enters after the first product."""
    # With the one word alone the noise of all leaves and micro-steps would be one sequence.
    x = (x ^ (x >> 17)) * np.uint32(0xED5AD4BB) ^ key
    x = (x ^ (x >> 11)) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> 15)) * np.uint32(0x31848BAB)
    return x ^ (x >> 14)
