"""Checks of a batch that is split into micro-batches, and of what goes with it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import PyTree, check_leaves, describe, dtype_of, is_arraylike
from optax_accum._devices.axis import axis_names


def check_batch(batch: PyTree) -> int:
    """Require arrays that are split along one example axis, the first; returns its length."""
    check_leaves(batch, "batch")
    sizes = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if not jnp.ndim(leaf):
            raise ValueError(
                "batch must hold arrays with the example axis first, along which it is split;"
                f" batch{keystr(path)} is the scalar {leaf!r}. Give each example one of its own, as"
                " jnp.full(num_examples, scalar) does, or let loss_fn take it from elsewhere."
            )
        sizes[f"batch{keystr(path)}"] = len(leaf)
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "batch must hold one number of examples in all its arrays, the length of axis 0, along"
            f" which it is split; got {sizes}. jnp.moveaxis(x, axis, 0) brings the examples of"
            " another axis there."
        )
    if not sizes or not min(sizes.values()):
        raise ValueError(
            "batch must hold at least one example, in arrays with the example axis first; got"
            f" {sizes or f'no array in {batch!r}'}."
        )
    return min(sizes.values())


def check_enough_examples(num_microbatches: int, size: int) -> None:
    """Require an example for each micro-batch."""
    if num_microbatches > size:
        raise ValueError(
            f"num_microbatches must be at most the number of examples, {size}; got"
            f" {num_microbatches}."
        )


def examples_on_each_device(x: jax.Array) -> int | None:
    """How many of an array's rows a device has, where its type says that they are sharded."""
    sharding = jax.typeof(x).sharding
    rows = sharding.spec[0] if len(sharding.spec) else None
    if rows is None:
        return None
    return len(x) // math.prod(sharding.mesh.shape[name] for name in axis_names(rows))


def checked_weight(value: Any) -> jax.typing.ArrayLike:
    """Require a number, as `weight_fn` must return, and return it."""
    if not is_arraylike(value):
        raise ValueError(f"weight_fn must return a real scalar, got {value!r}.")
    return value


def check_kept(name: str, rule: str, origin: str, new: PyTree, old: PyTree) -> None:
    """Require the tree, shapes and dtypes of `old`; errors say `rule`, what, "that", `origin`."""
    new_leaves, new_def = tree_flatten_with_path(new)
    old_leaves, old_def = tree_flatten_with_path(old)
    if new_def != old_def:
        raise ValueError(f"{rule} the tree that {origin}, {old_def}; got {new_def}.")
    for (path, n), (_, o) in zip(new_leaves, old_leaves, strict=True):
        if jnp.shape(n) != jnp.shape(o) or dtype_of(n) != dtype_of(o):
            raise ValueError(
                f"{rule} the shapes and dtypes that {origin}; {name}{keystr(path)} goes from"
                f" {describe(o)} to {describe(n)}."
            )
