"""The reductions of a window: none on one device, a `psum` over a mapped axis."""

import dataclasses
from typing import Any

import jax
from jax import lax

from optax_accum._checks import PyTree, Scalar
from optax_accum._core.state import AccumulateState, map_own
from optax_accum._core.window import WindowSums
from optax_accum._devices.axis import AxisName, axis_names, is_mapped, reduce_over, varying
from optax_accum._devices.axis_checks import (
    check_local,
    check_reduced,
    check_reduced_over,
    check_shared,
)


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """The `Reduction` without an axis: one device gathers the window, or XLA shards it."""

    crosses = False
    axis_name = None

    def __call__(self, sums: PyTree) -> PyTree:
        return sums

    def check_call(self, gradients: PyTree, flush: Any) -> None:
        del flush
        check_reduced("gradients", gradients)

    def check_sums(self, gradients: PyTree, before: PyTree, after: WindowSums) -> None:
        check_reduced_over(None, gradients, before, *after)

    def own(self, state: AccumulateState) -> AccumulateState:
        return state

    def stacked(self, state: AccumulateState) -> AccumulateState:
        return state

    def counters(self) -> tuple[Scalar, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class MappedAxis:
    """The `Reduction` over a mapped axis of `jax.shard_map` or `jax.pmap`, or several."""

    axis_name: AxisName
    crosses = True

    def __call__(self, sums: PyTree) -> PyTree:
        return reduce_over(self.axis_name, lax.psum, sums)

    def check_call(self, gradients: PyTree, flush: Any) -> None:
        check_local("gradients", gradients, self.axis_name)
        check_reduced("gradients", gradients)
        check_shared("flush", flush, self.axis_name)

    def check_sums(self, gradients: PyTree, before: PyTree, after: WindowSums) -> None:
        check_reduced_over(self.axis_name, gradients, before, *after)

    def own(self, state: AccumulateState) -> AccumulateState:
        return map_own(_of_one_device, state)

    def stacked(self, state: AccumulateState) -> AccumulateState:
        def stack(x: jax.Array) -> jax.Array:
            """`x` with a leading axis of devices, of the type that `update` returns it with."""
            return varying(x[None], self.axis_name) if is_mapped(self.axis_name) else x[None]

        return map_own(stack, state)

    def counters(self) -> tuple[Scalar, ...]:
        return tuple(lax.axis_index(name) for name in axis_names(self.axis_name))


def _of_one_device(x: Any) -> jax.Array:
    """This device's part of an array with a leading axis of devices."""
    if not x.ndim or len(x) != 1:
        raise ValueError(
            "opt_state must hold one window for each device, with a leading axis of 1 on each"
            " (give shard_map state_specs(opt_state, axis_name)); got the shape"
            f" {x.shape} on one device. Carry a state over from another number of devices with"
            " optax_accum.reshard_window(opt_state, num_devices)."
        )
    return x[0]
