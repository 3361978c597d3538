"""The gate: what closes a window runs here, and nowhere else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from optax_accum._axis import varying_as, varying_over
from optax_accum._validation import wider


def gate(predicate: Any, emit: Callable, hold: Callable, *operands: Any) -> Any:
    """`lax.cond`, or the branch itself where the predicate is known already."""
    if isinstance(predicate, Tracer):
        return lax.cond(predicate, emit, hold, *operands)
    return emit(*operands) if predicate else hold(*operands)


def emit_or_hold(
    predicate: Any, emit: Callable, total: Any, inner_state: Any, buffered: bool
) -> tuple[optax.Updates, Any, Any]:
    """Run `updates, inner_state = emit(total, inner_state)` and empty `total`, or do neither.

    Where the updates fit into the sums, the gate carries the sums alone and writes the updates
    over them. XLA then keeps sums and inner state in place and fuses the selects below into the
    user's `apply_updates`; any other large array made in the gate would cost a buffer.

    Args:
      predicate: bool [], traced or not.
      emit: the inner transformation, on the window's sums.
      total: the window's sums.
      inner_state: state that `emit` takes and gives back.
      buffered: whether `total` lives on, in the state.

    Returns:
      The updates (or nothing to add), the sums (or zeros; None if not `buffered`) and the inner
      state.
    """

    def results_of(total, inner_state):
        """The shapes of the updates, and the inner state in the dtypes that `emit` gives it."""
        updates, new_state = jax.eval_shape(emit, total, inner_state)
        return updates, jax.tree.map(_in_dtype, inner_state, new_state)

    if isinstance(predicate, Tracer):
        like, _ = results_of(total, inner_state)
        if _fits(like, total):

            def write_over(total, inner_state):
                updates, inner_state = emit(total, inner_state)
                as_sums = lambda u, s: lax.convert_element_type(u, s.dtype)
                return jax.tree.map(as_sums, updates, total), inner_state

            def keep(total, inner_state):
                return total, results_of(total, inner_state)[1]

            buffer, inner_state = gate(predicate, write_over, keep, total, inner_state)
            updates = jax.tree.map(
                lambda b, u: jnp.where(predicate, b.astype(u.dtype), nothing(u)), buffer, like
            )
            total = jax.tree.map(lambda b: jnp.where(predicate, 0, b), buffer)
            return updates, total if buffered else None, inner_state

    def write_beside(total, inner_state):
        results = emit(total, inner_state)
        if buffered:
            # Emptied last, and by a select, or XLA makes the zeros in buffers of their own.
            _, total = lax.optimization_barrier((results, total))
            total = jax.tree.map(lambda s: jnp.where(predicate, 0, s), total)
        updates, inner_state = results
        return updates, total if buffered else None, inner_state

    def hold(total, inner_state):
        like, inner_state = results_of(total, inner_state)
        held = jax.tree.map(
            # The sharding is that of the type, where a mesh has explicit axes; else there is none.
            lambda u: varying_as(u, jnp.full(u.shape, nothing(u), u.dtype, device=u.sharding)),
            like,
        )
        return held, total if buffered else None, inner_state

    return gate(predicate, write_beside, hold, total, inner_state)


def _in_dtype(leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
    is_same = getattr(leaf, "dtype", None) == like.dtype
    return leaf if is_same else lax.convert_element_type(leaf, like.dtype)


def after(value: Any, x: Any) -> Any:
    """`x`, once `value` is known, a number of at least 0.

    What is read for `value` is written over later on. XLA copies it, unless what is written depends
    on `value`.
    """
    return jnp.where(value < -1, jnp.zeros_like(x), x)  # never below 0: always x


def _fits(updates: Any, total: Any) -> bool:
    """Whether the sums can hold the updates without loss, and differ between the same devices."""
    if jax.tree.structure(updates) != jax.tree.structure(total):
        return False
    pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(total), strict=True)
    return all(
        u.shape == s.shape
        and wider(u.dtype, s.dtype) == s.dtype
        and varying_over(u) == varying_over(s)
        for u, s in pairs
    )


def nothing(update: Any) -> np.ndarray:
    """The zero that changes no float when added: +0.0 would turn a parameter of -0.0 into 0.0."""
    is_complex = jnp.issubdtype(update.dtype, jnp.complexfloating)
    return np.asarray(complex(-0.0, -0.0) if is_complex else -0.0, update.dtype)
