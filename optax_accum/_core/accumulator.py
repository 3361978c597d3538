"""The accumulator: one weighted window and one gate, for any components.

A micro-step is three pieces. `gather` adds it to the sums of its device. `reduction` takes the sums
of all devices to their totals. `close` runs the inner transformations on totals, and names no
device. The gate holds the last two; nothing outside of it reads another device's sums.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import _checks
from optax_accum._checks import PyTree, Scalar
from optax_accum._core import arithmetic, state_checks
from optax_accum._core.boundary import Boundary, EveryK, Finish
from optax_accum._core.chain import Accumulator
from optax_accum._core.component import Component, MicroStep
from optax_accum._core.followers import check_followers
from optax_accum._core.reduction import Reduction
from optax_accum._core.state import AccumulateState
from optax_accum._core.window import Call, WindowPieces, WindowSums


@dataclasses.dataclass(frozen=True, eq=False)
class WindowAccumulator(Accumulator):
    """The `init` and `update` of `accumulate`, with the pieces that its arguments ask for."""

    every_k: EveryK
    pieces: WindowPieces
    reduction: Reduction

    @property
    def window(self) -> "WindowAccumulator":
        return self

    @property
    def has_window(self) -> bool:
        """Whether micro-steps are gathered; else each is a window of its own."""
        return callable(self.every_k) or self.every_k != 1

    @property
    def _boundary(self) -> Boundary:
        return Boundary(self.every_k, self.pieces, self.reduction)

    def followed_by(self, *transforms: optax.GradientTransformation) -> "WindowAccumulator":
        return self._with_pieces(transforms=(*self.pieces.transforms, *transforms))

    def with_component(self, component: Component) -> "WindowAccumulator":
        others = (c for c in self.pieces.components if c.name != component.name)
        return self._with_pieces(components=(*others, component))

    def _with_pieces(self, **changes: Any) -> "WindowAccumulator":
        pieces = dataclasses.replace(self.pieces, **changes)
        return dataclasses.replace(self, pieces=pieces)

    def init(self, params: optax.Params) -> AccumulateState:
        _checks.check_enabled("accumulator_dtype", self.pieces.accumulator_dtype)
        _checks.check_enabled("emit_dtype", self.pieces.emit_dtype)
        if self.has_window:
            _checks.check_not_overwritten(params, "params", _checks.OVERWRITE_BESIDE_TX)
            _checks.check_inexact(params, "params")
        else:
            _checks.check_model(params, "params")
        inner_state = self.pieces.inner.init(params)
        state_checks.check_nests_no_accumulator("inner_state", inner_state)
        if self.has_window:
            # A weakly typed leaf would turn strong in the first update, and cost a second trace.
            inner_state = jax.tree.map(arithmetic.strongly_typed, inner_state)
        weight_dtype = self.pieces.weight_dtype(params)
        state = AccumulateState(
            micro_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            emitted=jnp.zeros([], jnp.bool_),
            num_skipped=jnp.zeros([], jnp.int32),
            window_weight=jnp.zeros([], weight_dtype),
            window_sum=self.pieces.empty_sums(params).gradient if self.has_window else None,
            extras=self.pieces.new_extras(weight_dtype, self.has_window),
            inner_state=inner_state,
        )
        return self.reduction.stacked(state)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        weight: Any = None,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateState]:
        return self.step(updates, state, params, extra_args, weight=weight, flush=flush)[:2]

    def step(
        self,
        gradients: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None,
        extra_args: dict[str, Any],
        weight: Any = None,
        flush: Any = False,
        finish: Finish | None = None,
    ) -> tuple[PyTree, AccumulateState, PyTree]:
        """Take a micro-step.

        Args:
          gradients: Those of this micro-step.
          state: The state before it.
          params: The parameters, or None.
          extra_args: All that `update` was passed by name, without `weight` and `flush`.
          weight: wᵢ; None is 1.
          flush: Whether to close the window with this micro-step.
          finish: What the gate does with the updates. None: it returns them.

        Returns:
          The updates and the new state. The third value is what `finish` returned, or held off the
          boundary; with `finish` there are no updates, without it the third value is empty.
        """
        self.reduction.check_call(gradients, flush)
        state = self._checked(state, gradients, "gradients")
        if flush is not False:
            flush = _checks.checked_scalar("flush", flush, jnp.bool_)
        sums, has_window = self.current_sums(state, gradients)
        micro_step = self._micro_step(state, gradients, params, extra_args, weight, has_window)
        gathered, accepted = self.pieces.gather(sums, micro_step)
        if has_window or accepted is not True:
            before = state.window_sum if has_window else params
            self.reduction.check_sums(gradients, before, gathered)
        call = Call(
            params=params,
            extra_args=extra_args,
            dtype_source=gradients,
            is_micro_step=True,
            flush=flush,
            accepted=accepted,
            has_window=has_window,
            is_exact=micro_step.is_exact,
        )
        return self._boundary.pass_gate(state, gathered, call, finish)

    def _micro_step(
        self,
        state: AccumulateState,
        gradients: optax.Updates,
        params: optax.Params | None,
        extra_args: dict[str, Any],
        weight: Any,
        has_window: bool,
    ) -> MicroStep:
        dtype, normalize = state.window_weight.dtype, self.pieces.normalize
        counted, factor = arithmetic.weight_and_factor(weight, normalize, dtype)
        # The mean over one micro-batch does not depend on its weight, and takes no rounding.
        is_mean = weight is None or normalize == "mean"

        def counters() -> tuple[Scalar, ...]:
            # `num_skipped` tells windows apart that close without an update, and so no new
            # `gradient_step`.
            counts = (state.gradient_step, state.micro_step, state.num_skipped)
            return (*counts, *self.reduction.counters())

        return MicroStep(
            gradients=gradients,
            weight=counted,
            factor=factor,
            accepted=arithmetic.is_positive_weight(weight, dtype),
            is_exact=is_mean and not has_window and not self.reduction.crosses,
            unscale=self.pieces.unscale(state.extras, dtype),
            gradient_step=state.gradient_step,
            params=params,
            extra_args=extra_args,
            counters=counters,
        )

    def close_now(
        self,
        state: AccumulateState,
        params: optax.Params,
        extra_args: dict[str, Any],
        finish: Finish | None = None,
    ) -> tuple[PyTree, AccumulateState, PyTree]:
        """Close the window without a micro-step; returns what `step` does."""
        state = self._checked(state, params, "params")
        sums, has_window = self.current_sums(state, params)
        if not has_window:
            sums = self.pieces.empty_sums(params)
        call = Call(
            params=params,
            extra_args=extra_args,
            dtype_source=params,
            is_micro_step=False,
            flush=True,
            accepted=False,
            has_window=has_window,
            is_exact=False,
        )
        return self._boundary.pass_gate(state, sums, call, finish)

    def current_sums(self, state: AccumulateState, dtype_source: PyTree) -> tuple[WindowSums, bool]:
        """The sums of the open window, and whether the state has them; S of params None is None."""
        has_window = self._has_sums(state, dtype_source)
        components = {
            c.name: state.extras[c.name].sums
            if has_window and c.name in state.extras
            else c.init(state.window_weight.dtype).sums
            for c in self.pieces.components
        }
        return WindowSums(state.window_sum, state.window_weight, components), has_window

    def _has_sums(self, state: AccumulateState, dtype_source: PyTree) -> bool:
        return state.window_sum is not None or (dtype_source is None and self.has_window)

    def _checked(self, state: Any, tree: PyTree, name: str) -> AccumulateState:
        """The state of this device, which must fit `tree`, the gradients or the params."""
        if self.has_window or any(c.may_reject for c in self.pieces.components):
            check_followers()
        state = self.reduction.own(state_checks.checked_state(state, AccumulateState))
        has_window = self._has_sums(state, tree)
        if self.has_window and not has_window:
            raise ValueError(
                "a state made with every_k=1 has no buffer to gather a window in, and every_k is"
                f" {self.every_k!r} now. {state_checks.REMEDY_FOR_STATES} (The state of"
                " accumulate(lambda _: 1) has the tree of that of any other k.)"
            )
        new_extras = self.pieces.new_extras(state.window_weight.dtype, has_window)
        state_checks.check_extras(state.extras, new_extras)
        if has_window:
            is_cast = self.pieces.accumulator_dtype is not None
            state_checks.check_gradients(name, tree, state.window_sum, is_cast)
        return state
