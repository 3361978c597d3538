"""What a micro-step adds to its window: to S, to W and to the sums beside them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _loss_scale, _monitor, _validation
from optax_accum._axis import AxisName, axis_names
from optax_accum._loss_scale import DynamicLossScale
from optax_accum._rounding import gathered_tree
from optax_accum._state import SUMMED_EXTRAS, AccumulateState
from optax_accum._window import gathered, is_counted, sum_dtype_of, times, weights, zeros


class Beside(NamedTuple):
    """What a window sums beside S."""

    weight: jax.Array  # W
    sums: dict[str, Any]  # SUMMED_EXTRAS


@dataclasses.dataclass(frozen=True)
class Gathering:
    """How an accumulator gathers: the arguments of `accumulate` that say so."""

    has_window: bool  # whether a new state has sums
    normalize: str
    accumulator_dtype: Any
    should_skip_update_fn: Callable[..., tuple[Any, Any]] | None
    averaged: frozenset[str]
    requires_averaged: bool  # whether each update needs them
    axis_name: AxisName | None
    monitor: bool
    loss_scale: DynamicLossScale | None

    def new_extras(self, weight_dtype: Any) -> dict[str, Any]:
        """The extras of a new state."""
        averages = self._new_averages(weight_dtype) if self.has_window else {}
        return {
            **({"averages": averages} if averages else {}),
            **(_monitor.new_extras() if self.monitor else {}),
            **({} if self.loss_scale is None else _loss_scale.new_extras(self.loss_scale)),
        }

    def _new_averages(self, weight_dtype: Any) -> dict[str, Any]:
        """Of each averaged extra arg Σ wᵢvᵢ, and Σ wᵢ of the micro-steps that passed it."""
        return {
            name: {x: jnp.zeros([], weight_dtype) for x in ("sum", "weight")}
            for name in sorted(self.averaged)
        }

    def is_buffered(self, state: AccumulateState, gradients: Any) -> bool:
        """Whether the state has sums, be it of an empty tree."""
        return state.window_sum is not None or (gradients is None and self.has_window)

    def sum_dtype(self, leaf: Any) -> Any:
        """The dtype of a leaf's sum."""
        return sum_dtype_of(leaf, self.accumulator_dtype)

    def held(self, state: AccumulateState, like: Any) -> tuple[Any, Beside]:
        """S, which has the shapes of `like`, and what is summed beside it."""
        sums = {name: x for name, x in state.extras.items() if name in SUMMED_EXTRAS}
        total = state.window_sum
        buffered = self.is_buffered(state, like)
        averaged = self.averaged if buffered else ()
        _validation.check_averages(sums.get("averages", {}), averaged)
        _validation.check_monitor(sums.get("monitor", {}), self.monitor)
        _validation.check_has_scale(state.extras, self.loss_scale)
        if not buffered:
            if self.averaged:
                sums["averages"] = self._new_averages(state.window_weight.dtype)
            total = jax.tree.map(lambda x: zeros(x, self.sum_dtype(x)), like)
        return total, Beside(state.window_weight, sums)

    def gather(
        self, gradients, state, params, extra_args, weight, is_single
    ) -> tuple[Any, Beside, Any]:
        """The same with a micro-step, and whether it was accepted.

        Where the micro-step `is_single`, its gradient is not multiplied.
        """
        total, (window_weight, sums) = self.held(state, gradients)
        w, scale, value_scale = weights(weight, self.normalize, window_weight.dtype)
        unscale = _loss_scale.unscaling(state)

        accepted = True if weight is None else is_counted(weight, w.dtype)
        if self.loss_scale is not None:
            overflow = accepted & _loss_scale.is_overflow(gradients)
            sums["overflows"] += overflow.astype(jnp.float32)
            accepted &= ~(overflow | self._drops(sums))
        if self.should_skip_update_fn is not None:
            seen = gradients
            if self.loss_scale is not None:
                seen = jax.tree.map(lambda g: times(g, unscale, self.sum_dtype(g)), gradients)
            skip = self.should_skip_update_fn(seen, state.gradient_step, params)
            accepted &= ~_validation.skip_decision(skip)

        add = functools.partial(gathered, accepted=accepted)
        window_weight = add(window_weight, w, 1)
        for name, s in sums.get("averages", {}).items():
            value = self._averaged_arg(name, extra_args, window_weight.dtype)
            if value is not None:
                new = {"sum": add(s["sum"], value, value_scale), "weight": add(s["weight"], w, 1)}
                sums["averages"] = sums["averages"] | {name: new}
        if self.monitor:
            value = extra_args.get("value")
            factors = w, scale, value_scale
            sums["monitor"] = _monitor.gathered(
                sums["monitor"], gradients, unscale, value, factors, accepted
            )
        if self.is_buffered(state, gradients):
            add_all = functools.partial(gathered_tree, accepted=accepted)
            total = add_all(total, gradients, scale, counters=lambda: self._counters(state))
        elif is_single and accepted is True:
            total = gradients
        else:
            scale = 1 if is_single else scale
            total = jax.tree.map(lambda g: times(g, scale, self.sum_dtype(g)), gradients)
            if self.axis_name is not None:  # the other devices' sums go on
                total = jax.tree.map(lambda s: jnp.where(accepted, s, 0), total)
        if self.loss_scale is not None:
            # Where no inner is to run, a window that closes holds zeros.
            empty = lambda x: jnp.where(self._drops(sums), jnp.zeros_like(x), x)
            kept = {"overflows": sums["overflows"]}
            total, window_weight, emptied = jax.tree.map(empty, (total, window_weight, sums))
            sums = emptied | kept
        return total, Beside(window_weight, sums), accepted

    def _averaged_arg(self, name: str, extra_args: dict[str, Any], dtype: Any) -> Any:
        """The scalar extra arg of this name, or None where a call may leave it out, and does."""
        if self.requires_averaged:
            return _validation.averaged_arg(name, extra_args, dtype)
        value = extra_args.get(name)
        return None if value is None else _validation.value_to_average(name, value, dtype)

    def means(
        self, sums: dict[str, Any], extra_args: dict[str, Any], is_micro_step: bool
    ) -> dict[str, Any]:
        """The window's means of those averaged extra args that this call hands on."""
        return {
            name: s["sum"] / jnp.where(s["weight"] > 0, s["weight"], 1)
            for name, s in sums.get("averages", {}).items()
            if not is_micro_step or extra_args.get(name) is not None
        }

    def _counters(self, state: AccumulateState) -> list[Any]:
        """Integers that differ between micro-steps whose sums are kept, and between devices."""
        # A window without an update is no gradient step, but its micro-steps are skipped ones.
        counters: list[Any] = [state.gradient_step, state.micro_step, state.num_skipped]
        names = () if self.axis_name is None else axis_names(self.axis_name)
        return [*counters, *map(lax.axis_index, names)]

    def is_filled(self, beside: Beside) -> Any:
        """Whether a window has something for the inner transformations."""
        filled = beside.weight > 0
        # Of the overflows of other devices a device learns only where the window closes.
        return filled if self.loss_scale is None else filled & ~self._drops(beside.sums)

    def overflowed(self, beside: Beside) -> Any:
        """Whether a gradient of the window was infinite or NaN, as far as that matters."""
        return beside.sums.get("overflows", 0) > 0

    def _drops(self, sums: dict[str, Any]) -> Any:
        """Whether the window is dropped, for its overflows so far."""
        assert self.loss_scale is not None
        return (sums["overflows"] > 0) & (self.loss_scale.on_overflow == "window")
