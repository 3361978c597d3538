"""Micro-steps that a function rejects."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from optax_accum import _checks
from optax_accum._checks import Scalar
from optax_accum._core.component import Component, MicroStep, Sums


@dataclasses.dataclass(frozen=True, eq=False)
class Rejection(Component):
    """Rejects the micro-steps for which optax's `should_skip_update_fn` says so."""

    should_skip_update_fn: Callable[..., tuple[Any, Any]]
    name = "rejection"
    may_reject = True

    def gather(
        self, sums: Sums, micro_step: MicroStep, accepted: Scalar | bool
    ) -> tuple[Sums, Scalar | bool]:
        gradients = micro_step.unscaled_gradients()
        result = self.should_skip_update_fn(gradients, micro_step.gradient_step, micro_step.params)
        return sums, accepted & ~_skip_decision(result)


def _skip_decision(result: Any) -> Scalar:
    """The first value of optax's pair, a bool scalar; the second, an info, is dropped."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(
            f"should_skip_update_fn must return a pair (bool scalar, info), got {result!r}."
        )
    return _checks.checked_scalar("should_skip_update_fn's first value", result[0], jnp.bool_)
