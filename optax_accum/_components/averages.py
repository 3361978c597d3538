"""Means of extra args over a window."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _checks
from optax_accum._checks import Dtype, Scalar
from optax_accum._core.arithmetic import add_if_accepted
from optax_accum._core.chain import Accumulator
from optax_accum._core.component import Component, ComponentState, MicroStep, Sums


@dataclasses.dataclass(frozen=True, eq=False)
class Averages(Component):
    """Gives the inner transformations the window's mean of scalar extra args.

    For each it sums wᵢvᵢ (vᵢ under `normalize="ratio"`) and wᵢ over the micro-steps that passed it.
    """

    names: frozenset[str]
    are_required: bool  # whether each update must pass them
    name = "average_extra_args"

    def init(self, weight_dtype: Dtype) -> ComponentState:
        def zeros() -> dict[str, jax.Array]:
            return {field: jnp.zeros([], weight_dtype) for field in ("sum", "weight")}

        return ComponentState({name: zeros() for name in sorted(self.names)}, ())

    def gather(
        self, sums: Sums, micro_step: MicroStep, accepted: Scalar | bool
    ) -> tuple[Sums, Scalar | bool]:
        def add(name: str, old: dict[str, Scalar]) -> dict[str, Scalar]:
            value = self._passed(name, micro_step.extra_args, old["sum"].dtype)
            if value is None:
                return old
            return {
                "sum": add_if_accepted(old["sum"], value, micro_step.factor, accepted),
                "weight": add_if_accepted(old["weight"], micro_step.weight, 1, accepted),
            }

        return {name: add(name, old) for name, old in sums.items()}, accepted

    def inner_args(self, sums: Sums, passed: dict[str, Any] | None) -> dict[str, Scalar]:
        return {
            name: s["sum"] / jnp.where(s["weight"] > 0, s["weight"], 1)
            for name, s in sums.items()
            if passed is None or passed.get(name) is not None
        }

    def _passed(self, name: str, extra_args: dict[str, Any], dtype: Dtype) -> Scalar | None:
        """The scalar extra arg of this name; None if the call leaves it out, where it may."""
        value = extra_args.get(name)
        if self.are_required:
            if name not in extra_args:
                _refuse_missing(name, extra_args)
            return _checks.checked_scalar(name, value, dtype)
        if value is None:
            return None
        try:
            return _checks.checked_scalar(name, value, dtype)
        except ValueError as error:
            raise ValueError(
                f"{error} By default inner receives its mean over the window; with"
                " average_extra_args=() it receives what each call passes."
            ) from None


def averaged_names(accumulator: Accumulator) -> frozenset[str]:
    """The names of the extra args whose means an accumulator gives its inner transformations."""
    averages = (c for c in accumulator.window.pieces.components if isinstance(c, Averages))
    return frozenset[str]().union(*(c.names for c in averages))


def _refuse_missing(name: str, extra_args: dict[str, Any]) -> None:
    raise ValueError(
        f"average_extra_args names {name!r}, so each update needs it: tx.update(gradients,"
        f" opt_state, params, {name}=...); got {sorted(extra_args) or 'no extra args'}."
    )
