"""Splitting a batch into micro-batches, and putting their rows back in its order.

Micro-batch i of n has rows i, i + n, i + 2n and so on. So each device keeps its part of a batch
that is sharded over devices. If n does not divide the rows, the first micro-batches have one more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum._checks import Scalar


class EqualSizes(NamedTuple):
    """The micro-batches of one size."""

    numbers: jax.Array  # int32 [n]
    size: int


def by_size(size: int, num: int) -> list[EqualSizes]:
    """Group the micro-batches of a batch of `size` rows by their sizes, the larger ones first."""
    rows, num_larger = divmod(size, num)
    groups = [
        EqualSizes(jnp.arange(num_larger), rows + 1),
        EqualSizes(jnp.arange(num_larger, num), rows),
    ]
    return [group for group in groups if len(group.numbers)]


def part_of(x: jax.Array, number: Scalar | int, num: int, size: int) -> jax.Array:
    """The rows of a micro-batch that has `size` of them, one of `num` micro-batches."""
    shared = len(x) // num  # rows that each micro-batch has at least
    rows = x[: shared * num].reshape(shared, num, *x.shape[1:])
    part = lax.dynamic_index_in_dim(rows, number, axis=1, keepdims=False)
    if size == shared:
        return part
    last = lax.dynamic_index_in_dim(x, shared * num + number, axis=0)
    return jnp.concatenate([part, last])


def in_order(*parts: jax.Array) -> jax.Array:
    """The rows of all micro-batches in the order of the batch.

    Args:
      *parts: For each size, the larger first, the rows of the micro-batches of this size, stacked:
        `[number of micro-batches, size, ...]`.

    Returns:
      `[number of rows, ...]`.
    """
    if len(parts) == 1:
        return lax.collapse(parts[0].swapaxes(0, 1), 0, 2)
    larger, smaller = parts
    return jnp.concatenate([in_order(jnp.concatenate([larger[:, :-1], smaller])), larger[:, -1]])


def split_key(key: jax.Array, num: int) -> jax.Array:
    """A key for each micro-batch; with one micro-batch, the key of the call itself."""
    return jax.random.split(key, num) if num > 1 else key[None]
