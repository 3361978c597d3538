"""The state of an accumulator, and whether it has just updated."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._checks import PyTree
from optax_accum._core.component import ComponentState


class AccumulateState(NamedTuple):
    """State of `accumulate`: counters, the open window and the inner state.

    With an `axis_name`, what each device gathers by itself has a leading axis of devices:
    `num_skipped`, `window_weight`, `window_sum` and the sums in `extras`.
    """

    micro_step: jax.Array  # int32 [], micro-steps in the open window, fewer than its every_k
    gradient_step: jax.Array  # int32 [], windows that closed with an update
    emitted: jax.Array  # bool [], whether the last call closed a window with an update
    num_skipped: jax.Array  # int32 [], micro-steps rejected or without weight, since init
    window_weight: jax.Array  # float32 or float64 [], W, 0 in an empty window
    window_sum: optax.Updates | None  # S, in the accumulator dtype; None under every_k=1, say
    extras: dict[str, Any]  # ComponentState by component; LocalState of a train step
    inner_state: optax.OptState


class LocalState(NamedTuple):
    """An entry in `extras` that each device changes by itself, and that no reduction sums."""

    values: PyTree


def map_own(fn: Callable[[Any], Any], state: AccumulateState) -> AccumulateState:
    """Apply `fn` to what each device gathers by itself, where there is an `axis_name`."""
    apply = functools.partial(jax.tree.map, fn)

    def of_extra(extra: Any) -> Any:
        if isinstance(extra, ComponentState):
            return extra._replace(sums=apply(extra.sums))
        return apply(extra)

    return state._replace(
        num_skipped=fn(state.num_skipped),
        window_weight=fn(state.window_weight),
        window_sum=apply(state.window_sum),
        extras={name: of_extra(extra) for name, extra in state.extras.items()},
    )


def has_updated(opt_state: optax.OptState) -> jax.Array:
    """Whether the last call of `update` or `flush` closed a window with an update.

    Args:
      opt_state: A state with an accumulator in it, however deep. It may hold several, as in
        `optax.partition`. A wrapper that did not call its accumulator leaves the result of the
        call before.

    Returns:
      bool []; of several accumulators, whether any has updated.

    Raises:
      ValueError: There is no `AccumulateState` in `opt_state`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> tx = accumulate(2, optax.sgd(1.0))
      >>> state = tx.init(jnp.zeros([]))
      >>> for _ in range(2):
      ...     _, state = tx.update(jnp.ones([]), state)
      ...     print(has_updated(state))
      False
      True
    """
    states = accumulate_states(opt_state)
    if not states:
        raise ValueError(
            "opt_state must hold an AccumulateState, from accumulate or chain; got a"
            f" {type(opt_state).__name__} without one."
        )
    return functools.reduce(jnp.logical_or, [state.emitted for state in states])


def accumulate_states(tree: Any) -> list[AccumulateState]:
    """The accumulator states in a tree."""

    def is_state(node: Any) -> bool:
        return isinstance(node, AccumulateState)

    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_state) if is_state(leaf)]
