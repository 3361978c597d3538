"""Mapped axes: which arrays vary over them, by their types, and reductions over them."""

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from optax_accum._checks import PyTree
from optax_accum._core.internals import varying_over

AxisName: TypeAlias = Hashable | tuple[Hashable, ...]


def varying(tree: Any, axis_name: AxisName) -> Any:
    """Mark a tree as varying over a mapped axis, inside `jax.shard_map`.

    There, JAX sums a gradient with respect to parameters that all devices share over the devices,
    in every micro-step. A gradient with respect to `varying(params, axis_name)` stays on its
    device, and `accumulate(k, axis_name=...)` sums once per window. No value changes, and nothing
    is sent.

    Args:
      tree: Arrays. Those that vary over the axis already stay as they are.
      axis_name: Mapped axis, or a tuple of them.

    Returns:
      The tree with arrays of a varying type. Under `pmap` and `shard_map(check_vma=False)`, where
      gradients stay on their device anyway, it is the tree itself.

    Raises:
      ValueError: `axis_name` is not mapped here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
      >>> def gradient(w, x):
      ...     return jax.grad(lambda w: (w * x).sum())(varying(w, "data"))
      >>> sharded = jax.shard_map(
      ...     gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
      ... )
      >>> print(sharded(jnp.ones(1), jnp.array([3.0])))
      [3.]
    """

    def vary(leaf: Any) -> Any:
        missing = tuple(name for name in axis_names(axis_name) if name not in varying_over(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree) if are_types_checked(axis_name) else tree


def are_types_checked(axis_name: AxisName) -> bool:
    """Whether types say what varies over the axis; under pmap and check_vma=False they do not."""
    if not is_mapped(axis_name):
        raise ValueError(f"axis_name must be mapped here, by pmap or shard_map, got {axis_name!r}.")
    return all(name in varying_over(lax.axis_index(name)) for name in axis_names(axis_name))


def is_mapped(axis_name: AxisName) -> bool:
    """Whether the code runs on each device of the axis, under pmap or shard_map."""
    try:
        lax.axis_index(axis_names(axis_name))
    except NameError:
        return False
    return True


def axis_names(axis_name: AxisName) -> tuple[Hashable, ...]:
    """The names of the axes, as a tuple."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def reduce_over(axis_name: AxisName, reduce: Callable[..., Any], tree: Any) -> Any:
    """Reduce a tree over an axis; `reduce` is `lax.psum` or `lax.pmean`.

    XLA's CPU compiler aborts ("Invalid binary instruction opcode copy") on a reduction of bfloat16
    if only some axes of the mesh are manual. There, bfloat16 is reduced in float32.
    """

    def as_it_is(tree: PyTree) -> PyTree:
        return reduce(tree, axis_name)

    def in_float32(tree: PyTree) -> PyTree:
        def widen(x: jax.Array) -> jax.Array:
            return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

        reduced = as_it_is(jax.tree.map(widen, tree))
        return jax.tree.map(lambda x, r: r.astype(x.dtype), tree, reduced)

    is_narrow = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(tree))
    if is_narrow and is_partly_manual():
        return lax.platform_dependent(tree, cpu=in_float32, default=as_it_is)
    return as_it_is(tree)


def is_manual() -> bool:
    """Whether the code runs inside `jax.shard_map`."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def is_partly_manual() -> bool:
    """Whether the code runs inside `jax.shard_map`, on a mesh with other axes that XLA handles."""
    return is_manual() and len(set(jax.sharding.get_abstract_mesh().axis_types)) > 1
