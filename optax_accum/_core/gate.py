"""The gate: a conditional that runs what closes a window, or keeps everything as it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from optax_accum._checks import PyTree, Scalar, wider_dtype
from optax_accum._core.internals import varying_as, varying_over

Emit = Callable[[PyTree, PyTree], tuple[optax.Updates, PyTree]]


def emit_or_hold(
    predicate: Scalar | bool, emit: Emit, total: PyTree, carry: PyTree, keeps_sums: bool
) -> tuple[optax.Updates, PyTree, PyTree]:
    """Run `updates, carry = emit(total, carry)` and empty `total`, or do neither.

    Where the updates fit into the sums, the gate carries the sums alone and writes the updates
    over them. XLA then keeps sums and inner state in place and fuses the selects below into the
    user's `apply_updates`; any other large array made in the gate would cost a buffer.

    Args:
      predicate: bool [], traced or not.
      emit: Runs the inner transformations on the window's sums.
      total: The window's sums.
      carry: The inner state, and what else `emit` takes and returns.
      keeps_sums: Whether the state keeps `total`.

    Returns:
      The updates (or zeros that change nothing), the sums (or zeros; None if not `keeps_sums`) and
      the carry.
    """
    updates, kept, carry = _gated(predicate, emit, total, carry, keeps_sums)
    return updates, kept if keeps_sums else None, carry


def _gated(
    predicate: Scalar | bool, emit: Emit, total: PyTree, carry: PyTree, keeps_sums: bool
) -> tuple[optax.Updates, PyTree, PyTree]:
    if isinstance(predicate, Tracer):
        shapes, _ = jax.eval_shape(emit, total, carry)
        if _fits(shapes, total):
            return _write_over(predicate, emit, total, carry, shapes)

    def write_beside(total: PyTree, carry: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        updates, carry = results = emit(total, carry)
        if keeps_sums:
            # The sums are emptied last, and by a select; else XLA makes zeros in new buffers.
            _, total = lax.optimization_barrier((results, total))
            total = jax.tree.map(lambda s: jnp.where(predicate, 0, s), total)
        return updates, total, carry

    def hold(total: PyTree, carry: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        shapes, carry = _if_held(emit, total, carry)
        return jax.tree.map(_zero_update, shapes), total, carry

    return select_branch(predicate, write_beside, hold, total, carry)


def _write_over(
    predicate: Scalar, emit: Emit, total: PyTree, carry: PyTree, shapes: PyTree
) -> tuple[optax.Updates, PyTree, PyTree]:
    def write(total: PyTree, carry: PyTree) -> tuple[PyTree, PyTree]:
        updates, carry = emit(total, carry)

        def in_dtype_of_sum(update: Any, sum_: jax.Array) -> jax.Array:
            return lax.convert_element_type(update, sum_.dtype)

        return jax.tree.map(in_dtype_of_sum, updates, total), carry

    def hold(total: PyTree, carry: PyTree) -> tuple[PyTree, PyTree]:
        return total, _if_held(emit, total, carry)[1]

    buffer, carry = select_branch(predicate, write, hold, total, carry)

    def update_of(written: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.where(predicate, written.astype(shape.dtype), negative_zero(shape.dtype))

    updates = jax.tree.map(update_of, buffer, shapes)
    return updates, jax.tree.map(lambda b: jnp.where(predicate, 0, b), buffer), carry


def select_branch(
    predicate: Scalar | bool, emit: Callable[..., Any], hold: Callable[..., Any], *operands: Any
) -> Any:
    """`lax.cond`, or the branch itself where the predicate is known already."""
    if isinstance(predicate, Tracer):
        return lax.cond(predicate, emit, hold, *operands)
    return emit(*operands) if predicate else hold(*operands)


def select_where(predicate: Scalar | bool, new: Callable[[], PyTree], old: PyTree) -> PyTree:
    """The leaves of `new()`, or those of `old` where the predicate does not hold."""
    if isinstance(predicate, Tracer):
        return jax.tree.map(lambda n, o: jnp.where(predicate, n, o), new(), old)
    return new() if predicate else old


def _if_held(emit: Emit, total: PyTree, carry: PyTree) -> tuple[PyTree, PyTree]:
    """The shapes of the updates, and the carry in the types that `emit` gives it."""

    def in_type_of(leaf: Any, shape: jax.ShapeDtypeStruct) -> Any:
        is_same = getattr(leaf, "dtype", None) == shape.dtype
        leaf = leaf if is_same else lax.convert_element_type(leaf, shape.dtype)
        return varying_as(shape, leaf)

    shapes, new_carry = jax.eval_shape(emit, total, carry)
    return shapes, jax.tree.map(in_type_of, carry, new_carry)


def _zero_update(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An update that changes no bit of a parameter, of the type of the update that `emit` makes."""
    # The type has a sharding only if a mesh has explicit axes.
    zero = negative_zero(shape.dtype)
    return varying_as(shape, jnp.full(shape.shape, zero, shape.dtype, device=shape.sharding))


def negative_zero(dtype: Any) -> np.ndarray:
    """The zero that changes no float when added: +0.0 would turn a parameter of -0.0 into 0.0."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return np.asarray(complex(-0.0, -0.0) if is_complex else -0.0, dtype)


def depends_on(value: Scalar, x: Any) -> Any:
    """`x`, as a result that XLA can only compute after `value`, a number of at least 0.

    The arrays from which `value` is computed are written over later. XLA copies them first, unless
    what is written depends on `value`.
    """
    return jnp.where(value < -1, jnp.zeros_like(x), x)  # value is at least 0: always x


def _fits(updates: PyTree, total: PyTree) -> bool:
    """Whether the sums can hold the updates without loss, and vary over the same axes."""
    if jax.tree.structure(updates) != jax.tree.structure(total):
        return False
    pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(total), strict=True)
    return all(
        u.shape == s.shape
        and wider_dtype(u.dtype, s.dtype) == s.dtype
        and varying_over(u) == varying_over(s)
        for u, s in pairs
    )
