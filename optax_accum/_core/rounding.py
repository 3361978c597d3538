"""Rounding to bfloat16 at random, so that a long sum in bfloat16 is right on average."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_accum._checks import PyTree, Scalar
from optax_accum._core.arithmetic import add_if_accepted, scale_as

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)
_QUIET = np.uint32(1 << 22)  # a NaN that has this bit has it in bfloat16 too
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: its multiples lie far apart
_MULTIPLIERS = np.uint32(747796405), np.uint32(2891336453)


def add_tree_if_accepted(
    total: PyTree,
    tree: PyTree,
    factor: Scalar | int,
    accepted: Scalar | bool,
    counters: Callable[[], Sequence[Any]],
    decay: Scalar | int = 1,
) -> PyTree:
    """`decay * total + factor * tree`, or `decay * total` where the micro-step is not accepted.

    Sums in bfloat16 are rounded at random. `counters` gives the integers that seed the noise. Two
    trees with the same counters, such as two groups in `optax.partition`, get the same noise.
    """
    leaves, treedef = jax.tree.flatten(total)
    is_narrow = any(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    seed = seed_of(*counters()) if is_narrow else None

    def add(index: int, sum_: jax.Array, x: Any) -> jax.Array:
        if seed is None or sum_.dtype != jnp.bfloat16:
            decayed = scale_as(sum_, decay, sum_.dtype)
            return add_if_accepted(decayed, x, factor, accepted)
        decayed = scale_as(sum_, decay, jnp.float32)
        exact = add_if_accepted(decayed, x, factor, accepted)
        return rounded(exact, noise_bits(seed, index, sum_.shape))

    xs = treedef.flatten_up_to(tree)
    return treedef.unflatten(map(add, range(len(leaves)), leaves, xs))


@jax.custom_jvp
def rounded(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Round float32 to a neighbour in bfloat16, to the nearer one more often.

    With lo <= x <= hi the neighbours of x and `noise` uniform on 0, 1, ..., 2¹⁶ - 1:

        P(hi) = (x - lo) / (hi - lo)        E[rounded(x)] = x, exactly

    With rounding to nearest, a sum no longer changes once its addends are below half its last digit
    (1/512 to 1/256 of it). Here it is right on average, and its errors are a random walk. A number
    that bfloat16 can hold is returned as it is: zeros keep their sign, infinities stay, and NaN
    stays NaN. Beyond the largest number of bfloat16 (3.39e38), x is rounded towards zero, so that
    the result is finite if x is. The derivative is that of the identity.

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
def _rounded_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return rounded(*primals), tangents[0].astype(jnp.bfloat16)


def seed_of(*counters: Any) -> tuple[jax.Array, jax.Array]:
    """Two uint32 scalars that differ between micro-steps and devices, by their counters."""
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

    They are a hash of the element's position. XLA fuses it into the sum that is rounded, also where
    a leaf is sharded; the bits of `jax.random.bits` would be written to memory first.

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
    # With an iota for each axis, and no reshape, each device makes those of its part of a leaf.
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        iota = lax.broadcasted_iota(jnp.uint32, shape, axis)
        position += iota * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return position


def _mixed(x: jax.Array, key: Any = 0) -> jax.Array:
    """The hash triple32 of `x`, into which `key` enters after the first product."""
    # Without the key the noise of all leaves and micro-steps would be parts of one sequence.
    x = (x ^ (x >> 17)) * np.uint32(0xED5AD4BB) ^ key
    x = (x ^ (x >> 11)) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> 15)) * np.uint32(0x31848BAB)
    return x ^ (x >> 14)
