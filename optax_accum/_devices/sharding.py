"""States on many devices: their PartitionSpecs, and an open window on another number of devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._checks import PyTree
from optax_accum._core.state import AccumulateState, LocalState, accumulate_states, map_own
from optax_accum._devices.axis import AxisName


def state_specs(opt_state: Any, axis_name: AxisName, param_specs: Any = None) -> Any:
    """Make the PartitionSpecs of an optimizer state, for `jax.shard_map` and for checkpoints.

    Args:
      opt_state: A state of `accumulate(..., axis_name=axis_name)`, however deep in others, or its
        shapes: `jax.eval_shape(tx.init, params)`.
      axis_name: The axis that the accumulator reduces over, or a tuple of them.
      param_specs: PartitionSpecs of the parameters, as a tree of their structure, where they are
        sharded (over other axes). Default: replicated.

    Returns:
      A tree like `opt_state`. The sums that each device gathers by itself have a leading axis of
      `P(axis_name)`. All else is replicated; with `param_specs`, a part of the state that has the
      tree of the parameters, such as moments, is sharded as they are.

    Raises:
      ValueError: There is no accumulator with an `axis_name` in `opt_state`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> from optax_accum import accumulate
      >>> tx = accumulate(4, optax.sgd(1.0), axis_name="data")
      >>> specs = state_specs(jax.eval_shape(tx.init, jnp.zeros(2)), "data")
      >>> specs.window_sum == P("data"), specs.gradient_step == P()
      (True, True)
    """
    params_tree = None if param_specs is None else jax.tree.structure(param_specs, is_leaf=_is_spec)
    shared = PartitionSpec()

    def repeats_params(tree: PyTree) -> bool:
        return params_tree is not None and jax.tree.structure(tree) == params_tree

    def of_shared(tree: PyTree) -> PyTree:
        """The specs of what devices share; moments repeat the tree and the specs of params."""

        def spec_of(leaf: Any, spec: PartitionSpec) -> PartitionSpec:
            return spec if len(spec) <= jnp.ndim(leaf) else shared

        def of_node(node: PyTree) -> PyTree:
            if _is_accumulator(node):
                return of_state(node)
            return jax.tree.map(spec_of, node, param_specs) if repeats_params(node) else shared

        def is_node(x: Any) -> bool:
            return repeats_params(x) or _is_accumulator(x)

        return jax.tree.map(of_node, tree, is_leaf=is_node)

    def of_state(state: AccumulateState) -> AccumulateState:
        # A group of a partition may have no axis_name; its window is the same on all devices.
        own = PartitionSpec(axis_name) if jnp.ndim(state.window_weight) else shared
        specs = map_own(lambda _: own, jax.tree.map(lambda _: shared, state))
        if repeats_params(state.window_sum):

            def with_devices(spec: PartitionSpec) -> PartitionSpec:
                return PartitionSpec(*own, *spec)

            sums = jax.tree.map(with_devices, param_specs, is_leaf=_is_spec)
            specs = specs._replace(window_sum=sums)
        return specs._replace(inner_state=of_shared(state.inner_state))

    _check_has_own(opt_state)
    return of_shared(opt_state)


def reshard_window(opt_state: Any, num_devices: int) -> Any:
    """Carry an open window to another number of devices, between two micro-steps.

    The first of the new devices gets the sums of all old ones, the others get zeros. The next
    update is what it would have been, up to rounding. Each new device gets the mean over the old
    devices of a train step's `model_state` in the window. Call this outside `shard_map` and `pmap`,
    for example on a restored checkpoint.

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

    def hand_over(x: jax.Array) -> jax.Array:
        total = jnp.sum(x, axis=0, keepdims=True, dtype=x.dtype)
        return jnp.pad(total, [(0, num_devices - 1)] + [(0, 0)] * (x.ndim - 1))

    def share_out(x: jax.Array) -> jax.Array:
        """The mean of statistics over the devices, or the maximum of counters, for each device."""
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        shared = jnp.mean(x, axis=0, dtype=x.dtype) if is_inexact else jnp.max(x, axis=0)
        return jnp.broadcast_to(shared, (num_devices, *shared.shape))

    def of_node(node: Any) -> Any:
        if not _is_accumulator(node) or not jnp.ndim(node.window_weight):
            return node
        local = {
            name: jax.tree.map(share_out, extra)
            for name, extra in node.extras.items()
            if isinstance(extra, LocalState)
        }
        carried = map_own(hand_over, node)
        return carried._replace(extras={**carried.extras, **local})

    return jax.tree.map(of_node, opt_state, is_leaf=_is_accumulator)


def _is_accumulator(x: Any) -> bool:
    return isinstance(x, AccumulateState)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _check_has_own(opt_state: Any) -> None:
    if not any(jnp.ndim(state.window_weight) for state in accumulate_states(opt_state)):
        raise ValueError(
            "opt_state must be that of an accumulate(..., axis_name=...), and hold the sums of each"
            f" device; got a {type(opt_state).__name__} without them."
        )
