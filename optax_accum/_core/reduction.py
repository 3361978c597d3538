"""The protocol of reductions, which sum over devices what each of them has gathered."""

from typing import Any, Protocol

from optax_accum._checks import PyTree, Scalar
from optax_accum._core.state import AccumulateState


class Reduction(Protocol):
    """The devices that a window reaches over, as an accumulator sees them."""

    @property
    def axis_name(self) -> Any:
        """The mapped axes that it reduces over, or None."""
        ...

    @property
    def crosses(self) -> bool:
        """Whether it sums over other devices, so that totals are known at the boundary alone."""
        ...

    def __call__(self, sums: PyTree) -> PyTree:
        """Sum over all devices; called at the boundary alone."""
        ...

    def check_call(self, gradients: PyTree, flush: Any) -> None:
        """Raise if the gradients or `flush` have a type that is wrong on these devices."""
        ...

    def check_sums(self, gradients: PyTree, before: PyTree, after: Any) -> None:
        """Raise if the sums after a micro-step vary over axes that are not reduced over."""
        ...

    def own(self, state: AccumulateState) -> AccumulateState:
        """The state of this device."""
        ...

    def stacked(self, state: AccumulateState) -> AccumulateState:
        """The state with a leading axis of devices on what each device gathers by itself."""
        ...

    def counters(self) -> tuple[Scalar, ...]:
        """Integers that tell this device from the others."""
        ...
