"""The state of an accumulator, and whether it has just updated."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

SUMMED_EXTRAS = {"averages", "monitor", "overflows"}  # over the open window, 0 in an empty one
SHARED_EXTRAS = {"metrics", "loss_scale", "step_metrics"}  # the same on all devices


class AccumulateState(NamedTuple):
    """State of `accumulate`: counters, the open window and the inner state."""

    micro_step: jax.Array  # int32 [], micro-steps in the open window, fewer than its every_k
    gradient_step: jax.Array  # int32 [], windows that closed with an update
    emitted: jax.Array  # bool [], whether the last call closed a window with an update
    num_skipped: jax.Array  # int32 [], micro-steps rejected or without weight, since init
    window_weight: jax.Array  # W, float32 or float64 [], 0 in an empty window
    window_sum: optax.Updates | None  # S in the accumulator dtype, or None where it is not needed
    extras: dict[str, Any]  # SUMMED_EXTRAS, SHARED_EXTRAS; "model_state" of a train step
    inner_state: optax.OptState


def map_own(fn: Callable[[jax.Array], jax.Array], state: AccumulateState) -> AccumulateState:
    """Apply `fn` to what each device gathers by itself, where there is an `axis_name`."""
    own = ("num_skipped", "window_weight", "window_sum")
    apply = functools.partial(jax.tree.map, fn)
    return state._replace(
        **{name: apply(getattr(state, name)) for name in own},
        extras={
            name: value if name in SHARED_EXTRAS else apply(value)
            for name, value in state.extras.items()
        },
    )


def has_updated(opt_state: optax.OptState) -> jax.Array:
    """Whether the last call of `update` or `flush` closed a window with an update.

    Args:
      opt_state: A state with an accumulator in it, however deep. Of several, in
        `optax.partition`, any must have updated. A wrapper that did not call its accumulator leaves
        what the call before has said.

    Returns:
      bool [].

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
    is_state = lambda node: isinstance(node, AccumulateState)
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_state) if is_state(leaf)]
