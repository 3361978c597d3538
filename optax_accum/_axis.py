"""Mapped axes: what varies over them, where types tell."""

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

AxisName = Hashable | tuple[Hashable, ...]


def varying(tree: Any, axis_name: AxisName) -> Any:
    """Let `tree` count as different on each device of the axis, inside `jax.shard_map`.

    There, a gradient with respect to what all devices share has been summed over them already, in
    every micro-step. A gradient with respect to `varying(params, axis_name)` stays on its device,
    and `accumulate(k, axis_name=...)` sums once per window. No value changes and no byte moves.

    Args:
      tree: Arrays; those that vary over the axis already are left alone.
      axis_name: Mapped axis, or a tuple of them.

    Returns:
      The same tree. Under `pmap` and `shard_map(check_vma=False)` it comes back as it is: gradients
      stay on their device there.

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

    def vary(leaf):
        missing = tuple(name for name in axis_names(axis_name) if name not in varying_over(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree) if are_types_checked(axis_name) else tree


def are_types_checked(axis_name: AxisName) -> bool:
    """Whether types tell here what varies over the axis: not in pmap, nor with check_vma=False."""
    for name in axis_names(axis_name):
        try:
            index = lax.axis_index(name)
        except NameError:
            raise ValueError(
                f"axis_name must be mapped here, by pmap or shard_map, got {axis_name!r}."
            ) from None
        if name not in varying_over(index):
            return False
    return True


def check_local(name: str, tree: Any, axis_name: AxisName) -> None:
    """Require gradients that have not been summed over the axis, where types tell."""
    if not are_types_checked(axis_name):
        return
    for path, leaf in tree_flatten_with_path(tree)[0]:
        shared = [axis for axis in axis_names(axis_name) if axis not in varying_over(leaf)]
        if shared:
            raise ValueError(
                f"{name} must differ from device to device, and {name}{keystr(path)} does not vary"
                f" over the axis {shared[0]!r}: differentiated with respect to parameters that all"
                " devices share, it has been summed over them in this micro-step already, and"
                " would count once more for each device. Differentiate with respect to"
                f" optax_accum.varying(params, {axis_name!r})."
            )


def check_shared(name: str, value: Any, axis_name: AxisName) -> None:
    """Require a value that is the same on all devices, where types tell."""
    if are_types_checked(axis_name) and set(axis_names(axis_name)) & varying_over(value):
        raise ValueError(
            f"{name} must be the same on all devices, or they would wait for each other for ever;"
            f" got one that varies over the axis {axis_name!r}."
        )


def varying_as(like: Any, x: jax.Array) -> jax.Array:
    """`x`, of a type that differs between devices where that of `like` does."""
    missing = tuple(varying_over(like) - varying_over(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def axis_names(axis_name: AxisName) -> tuple[Hashable, ...]:
    """The axes, of which there may be one."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def varying_over(leaf: Any) -> frozenset:
    """The axes over which the type of an array, or of its shape, says that it differs."""
    return jax.typeof(leaf).manual_axis_type.varying
