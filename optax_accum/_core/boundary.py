"""The boundary of a window: the gate, with the reduction and the closing inside it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._checks import PyTree, Scalar
from optax_accum._core import arithmetic
from optax_accum._core.component import ComponentState, Norms, Sums, Window
from optax_accum._core.gate import depends_on, emit_or_hold, select_where
from optax_accum._core.reduction import Reduction
from optax_accum._core.state import AccumulateState
from optax_accum._core.window import Call, WindowPieces, WindowSums

EveryK = int | Callable[[AccumulateState], Scalar]


class Finish(NamedTuple):
    """What the gate does with the updates in place of returning them, such as applying them."""

    # (params, updates, whether the micro-step was accepted, kept) -> (params, kept)
    apply: Callable[[PyTree, PyTree, Scalar | bool, PyTree], tuple[PyTree, PyTree]]
    kept: PyTree  # what `apply` changes besides the params


class Closed(NamedTuple):
    """Totals and norms of the window that the gate closed."""

    weight: Scalar
    sums: dict[str, Sums]
    is_filled: Scalar | bool
    norms: Norms


@dataclasses.dataclass(frozen=True)
class Boundary:
    """When a window closes, what closes it, and over which devices it is reduced."""

    every_k: EveryK
    pieces: WindowPieces
    reduction: Reduction

    def pass_gate(
        self, state: AccumulateState, sums: WindowSums, call: Call, finish: Finish | None
    ) -> tuple[PyTree, AccumulateState, PyTree]:
        """Close the window if it is due; else keep the sums and change nothing else."""
        num_micro_steps = state.micro_step + int(call.is_micro_step)
        k = self.every_k(state) if callable(self.every_k) else self.every_k
        closes = call.flush if call.has_window else True
        if call.has_window and call.is_micro_step:
            closes |= num_micro_steps >= k
        crosses = self.reduction.crosses
        window_of = functools.partial(
            self.pieces.window,
            call=call,
            unscale=self.pieces.unscale(state.extras, sums.weight.dtype),
            num_micro_steps=num_micro_steps,
            every_k=k,
        )

        def boundary(total: PyTree, carry: Any) -> tuple[PyTree, Any]:
            inner_state, closed, kept = carry
            totals = self.reduction(sums._replace(gradient=total))
            is_filled = self.pieces.is_filled(totals) if crosses else closed.is_filled
            window = window_of(totals.weight, totals.components, is_filled, closed.norms)
            updates, _, (inner_state, norms, kept) = emit_or_hold(
                is_filled if crosses else True,
                functools.partial(self._close_and_finish, totals, window, call, finish),
                totals.gradient,
                (inner_state, closed.norms, kept),
                keeps_sums=False,
            )
            closed = Closed(totals.weight, totals.components, is_filled, norms)
            return updates, (inner_state, closed, kept)

        closed = self._before_gate(sums, call)
        kept = () if finish is None else (call.params, finish.kept)
        updates, total, (inner_state, closed, kept) = emit_or_hold(
            closes if crosses else closes & closed.is_filled,
            boundary,
            sums.gradient,
            (state.inner_state, closed, kept),
            keeps_sums=call.has_window,
        )
        window = window_of(*closed)
        updated = closes & closed.is_filled

        def reopened(x: jax.Array) -> jax.Array:
            return jnp.where(closes, jnp.zeros_like(x), x)

        # S is 0 already: the gate has emptied it, or the window has closed with nothing in it.
        weight, component_sums = jax.tree.map(reopened, (sums.weight, sums.components))
        new_state = AccumulateState(
            micro_step=reopened(num_micro_steps),
            gradient_step=arithmetic.increment_where(updated, state.gradient_step),
            emitted=jnp.asarray(updated),
            num_skipped=arithmetic.increment_where(
                call.is_micro_step & jnp.logical_not(call.accepted), state.num_skipped
            ),
            window_weight=weight,
            window_sum=total,
            extras=self._closed_extras(state.extras, component_sums, window, closes),
            inner_state=inner_state,
        )
        return updates, self.reduction.stacked(new_state), kept

    def _close_and_finish(
        self,
        totals: WindowSums,
        window: Window,
        call: Call,
        finish: Finish | None,
        total: PyTree,
        carry: Any,
    ) -> tuple[PyTree, Any]:
        """Close a window that updates; with `finish`, apply its updates too."""
        inner_state, _, kept = carry
        params = call.params if finish is None else kept[0]
        totals = totals._replace(gradient=total)
        updates, inner_state, norms = self.pieces.close(totals, window, inner_state, params, call)
        if finish is None:
            return updates, (inner_state, norms, kept)
        if norms.params is not None:
            updates = jax.tree.map(functools.partial(depends_on, norms.params), updates)
        return (), (inner_state, norms, finish.apply(params, updates, call.accepted, kept[1]))

    def _before_gate(self, sums: WindowSums, call: Call) -> Closed:
        """`Closed` as the gate receives it: the sums of one device; zeros if there are others."""
        wanted = self.pieces.wanted_norms
        norms = Norms(*(jnp.zeros([], jnp.float32) if n in wanted else None for n in Norms._fields))
        if not self.reduction.crosses:
            is_filled = self.pieces.is_filled(sums) if call.has_window else call.accepted
            return Closed(sums.weight, sums.components, is_filled, norms)

        def zero(x: jax.Array) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype)

        weight, components = jax.tree.map(zero, (sums.weight, sums.components))
        return Closed(weight, components, jnp.zeros([], jnp.bool_), norms)

    def _closed_extras(
        self, extras: dict[str, Any], sums: dict[str, Sums], window: Window, closes: Any
    ) -> dict[str, Any]:
        """The extras after a call: the components' sums, and their memory after the window."""
        new_extras = dict(extras)
        for c in self.pieces.components:
            if c.name not in extras:
                continue
            old = extras[c.name]
            memory = select_where(
                closes, functools.partial(c.close, old.memory, window), old.memory
            )
            kept_sums = sums[c.name] if jax.tree.leaves(old.sums) else old.sums
            new_extras[c.name] = ComponentState(kept_sums, memory)
        return new_extras
