"""The metrics of a train step: means over the last window that updated."""

import dataclasses

import jax.numpy as jnp

from optax_accum._checks import Dtype
from optax_accum._core.component import Component, ComponentState, Memory, Window


@dataclasses.dataclass(frozen=True, eq=False)
class StepMetrics(Component):
    """Loss, gradient norm and averaged scalars of the last window that updated; first 0."""

    averaged: frozenset[str]  # extra args besides `value`
    name = "step_metrics"
    norms = frozenset({"window_sum"})

    def init(self, weight_dtype: Dtype) -> ComponentState:
        del weight_dtype
        names = ("loss", "grad_norm", *sorted(self.averaged))
        return ComponentState((), {name: jnp.zeros([], jnp.float32) for name in names})

    def close(self, memory: Memory, window: Window) -> Memory:
        means = {"loss": "value", **{name: name for name in self.averaged}}
        new = {name: window.inner_args[arg] for name, arg in means.items()}
        assert window.norms.window_sum is not None
        new["grad_norm"] = window.norms.window_sum * window.gradient_factor
        return {
            name: jnp.where(window.is_filled, jnp.asarray(new[name], jnp.float32), old)
            for name, old in memory.items()
        }
