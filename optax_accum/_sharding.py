"""States of windows over many devices: what is each device's own, and what all share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._axis import AxisName
from optax_accum._state import SHARED_EXTRAS, AccumulateState, map_own


def state_specs(opt_state: Any, axis_name: AxisName, param_specs: Any = None) -> Any:
    """PartitionSpecs of an optimizer state, for `jax.shard_map` and for checkpoints.

    Args:
      opt_state: A state of `accumulate(..., axis_name=axis_name)`, however deep in others, or its
        shapes: `jax.eval_shape(tx.init, params)`.
      axis_name: The axis that the accumulator reduces over, or a tuple of them.
      param_specs: PartitionSpecs of the parameters, as a tree of their structure, where they are
        sharded (over other axes). Default: replicated.

    Returns:
      A tree like `opt_state`. What a device gathers is its own, `P(axis_name)` on a leading axis;
      all else is replicated, or sharded as the parameters whose tree it repeats.

    Raises:
      ValueError: There is no accumulator with an `axis_name` in `opt_state`.
    """
    shared = PartitionSpec()
    params_tree = None if param_specs is None else jax.tree.structure(param_specs, is_leaf=_is_spec)

    def repeats_params(tree):
        return params_tree is not None and jax.tree.structure(tree) == params_tree

    def of_shared(tree):
        """Moments and their like repeat the tree of the parameters, and their shardings."""
        spec = lambda leaf, spec: spec if len(spec) <= jnp.ndim(leaf) else shared
        return jax.tree.map(
            lambda x: jax.tree.map(spec, x, param_specs) if repeats_params(x) else of_state(x),
            tree,
            is_leaf=lambda x: repeats_params(x) or _is_accumulator(x),
        )

    def of_state(state):
        if not _is_accumulator(state):
            return shared
        # One inside another gathers what the outer one has reduced.
        own = PartitionSpec(axis_name) if jnp.ndim(state.window_weight) else shared
        specs = jax.tree.map(lambda _: own, state)
        if repeats_params(state.window_sum):
            sums = lambda spec: PartitionSpec(*own, *spec)
            specs = specs._replace(window_sum=jax.tree.map(sums, param_specs, is_leaf=_is_spec))
        return specs._replace(
            micro_step=shared,
            gradient_step=shared,
            emitted=shared,
            extras=specs.extras
            | {
                name: jax.tree.map(lambda _: shared, state.extras[name])
                for name in SHARED_EXTRAS & state.extras.keys()
            },
            inner_state=of_shared(state.inner_state),
        )

    _check_has_own(opt_state)
    return of_shared(opt_state)


def reshard_window(opt_state: Any, num_devices: int) -> Any:
    """Carry an open window to another number of devices, between two micro-steps.

    The sums of all devices are added up, and handed to the first of the new ones: the next update
    is what it would have been, to rounding. A train step's `model_state` within the window goes to
    each of them, as the mean over the old ones. Call it outside `shard_map` and `pmap`, say on a
    checkpoint that was restored.

    Args:
      opt_state: A state whose accumulators have an `axis_name`, for any number of devices.
      num_devices: How many devices the axis will have, at least 1.

    Returns:
      The state for so many devices.

    Raises:
      ValueError: `num_devices` is no int of at least 1, or there is no such accumulator.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> state = accumulate(4, optax.sgd(1.0), axis_name="data").init(jnp.zeros(2))
      >>> print(state.window_sum.shape, reshard_window(state, 8).window_sum.shape)
      (1, 2) (8, 2)
    """
    if not isinstance(num_devices, int) or isinstance(num_devices, bool) or num_devices < 1:
        raise ValueError(f"num_devices must be an int of at least 1, got {num_devices!r}.")
    _check_has_own(opt_state)

    def hand_over(x):
        total = jnp.sum(x, axis=0, keepdims=True, dtype=x.dtype)
        return jnp.pad(total, [(0, num_devices - 1)] + [(0, 0)] * (x.ndim - 1))

    def share_out(x):
        """Statistics, which devices have a mean of, not a sum; of counters they have one value."""
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        shared = jnp.mean(x, axis=0, dtype=x.dtype) if is_inexact else jnp.max(x, axis=0)
        return jnp.broadcast_to(shared, (num_devices, *shared.shape))

    def of_state(state):
        if not _is_accumulator(state):
            return state
        carried = map_own(hand_over, state) if jnp.ndim(state.window_weight) else state
        if "model_state" in state.extras:
            own = jax.tree.map(share_out, state.extras["model_state"])
            carried = carried._replace(extras={**carried.extras, "model_state": own})
        inner = jax.tree.map(of_state, state.inner_state, is_leaf=_is_accumulator)
        return carried._replace(inner_state=inner)

    return jax.tree.map(of_state, opt_state, is_leaf=_is_accumulator)


def _is_accumulator(x: Any) -> bool:
    return isinstance(x, AccumulateState)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _check_has_own(opt_state: Any) -> None:
    states = filter(_is_accumulator, jax.tree.leaves(opt_state, is_leaf=_is_accumulator))
    if not any(jnp.ndim(state.window_weight) for state in states):
        raise ValueError(
            "opt_state must be that of an accumulate(..., axis_name=...), and hold sums of each"
            f" device's own; got a {type(opt_state).__name__} without."
        )
