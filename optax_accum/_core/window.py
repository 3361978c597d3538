"""The pieces of a window: gather a micro-step, close on totals; and the types they exchange."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._checks import Dtype, PyTree, Scalar, wider_dtype
from optax_accum._core import arithmetic
from optax_accum._core.chain import check_nest_none, inner_of
from optax_accum._core.component import (
    Component,
    ComponentState,
    MicroStep,
    Norms,
    Sums,
    Window,
)
from optax_accum._core.gate import depends_on
from optax_accum._core.rounding import add_tree_if_accepted
from optax_accum._core.state_checks import check_keeps_structure, keep_dtypes


class WindowSums(NamedTuple):
    """The sums of a device over an open window, zeros in an empty one."""

    gradient: PyTree  # S
    weight: Scalar  # W
    components: dict[str, Sums]


class Call(NamedTuple):
    """The call that the gate serves: a micro-step, or a flush without one."""

    params: optax.Params | None
    extra_args: dict[str, Any]
    dtype_source: PyTree  # the inner transformations receive the mean in its dtypes
    is_micro_step: bool  # False: a flush without a micro-step
    flush: Scalar | bool
    accepted: Scalar | bool  # whether the micro-step counts; False without one
    has_window: bool  # whether the state has sums; else each micro-step is a window of its own
    is_exact: bool  # whether S is the gradient of one micro-step as it came, and no sum


@dataclasses.dataclass(frozen=True, eq=False)
class WindowPieces:
    """What a window gathers and runs, by the arguments of `accumulate`."""

    transforms: tuple[optax.GradientTransformation, ...]
    components: tuple[Component, ...]
    normalize: str
    accumulator_dtype: Dtype | None
    emit_dtype: Dtype | None

    def __post_init__(self) -> None:
        check_nest_none(self.transforms)

    @functools.cached_property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The transformations that run once per window, as one."""
        return inner_of(self.transforms)

    @property
    def wanted_norms(self) -> frozenset[str]:
        """The norms that components read."""
        return frozenset().union(*(c.norms for c in self.components))

    def sum_dtype(self, leaf: Any) -> jnp.dtype:
        return arithmetic.sum_dtype(leaf, self.accumulator_dtype)

    def weight_dtype(self, params: PyTree) -> jnp.dtype:
        """The dtype of W."""
        return arithmetic.weight_dtype(jax.tree.map(self.sum_dtype, params))

    def empty_sums(self, params: PyTree) -> WindowSums:
        """The sums of an empty window."""
        weight_dtype = self.weight_dtype(params)
        return WindowSums(
            jax.tree.map(lambda p: arithmetic.zeros_where(p, self.sum_dtype(p)), params),
            jnp.zeros([], weight_dtype),
            {c.name: c.init(weight_dtype).sums for c in self.components},
        )

    def new_extras(self, weight_dtype: Dtype, has_window: bool) -> dict[str, ComponentState]:
        """The components' entries of a new state."""
        extras = {c.name: c.init(weight_dtype) for c in self.components}
        if not has_window:
            extras = {name: extra._replace(sums=()) for name, extra in extras.items()}
        return {name: extra for name, extra in extras.items() if jax.tree.leaves(extra)}

    def gather(self, sums: WindowSums, micro_step: MicroStep) -> tuple[WindowSums, Scalar | bool]:
        """Add a micro-step to the sums of its device, and say whether it was accepted."""
        components, accepted = dict(sums.components), micro_step.accepted
        for c in self.components:
            components[c.name], accepted = c.gather(components[c.name], micro_step, accepted)
        weight = arithmetic.add_if_accepted(sums.weight, micro_step.weight, 1, accepted)
        gradient = self._gather_gradient(sums.gradient, micro_step, accepted)
        allowed = self._allows_update(components)
        if allowed is not True:
            # A window that may not update is emptied, and so closes as an empty one.

            def empty(x: jax.Array) -> jax.Array:
                return jnp.where(allowed, x, jnp.zeros_like(x))

            gradient, weight = jax.tree.map(empty, (gradient, weight))
        return WindowSums(gradient, weight, components), accepted

    def _gather_gradient(
        self, total: PyTree, micro_step: MicroStep, accepted: Scalar | bool
    ) -> PyTree:
        if total is not None:
            return add_tree_if_accepted(
                total, micro_step.gradients, micro_step.factor, accepted, micro_step.counters
            )
        if micro_step.is_exact and accepted is True:
            return micro_step.gradients

        def product(gradient: Any) -> jax.Array:
            factor = 1 if micro_step.is_exact else micro_step.factor
            return arithmetic.scale_as(gradient, factor, self.sum_dtype(gradient))

        products = jax.tree.map(product, micro_step.gradients)
        if accepted is True:
            return products
        return jax.tree.map(lambda x: jnp.where(accepted, x, 0), products)

    def close(
        self, totals: WindowSums, window: Window, inner_state: PyTree, params: PyTree, call: Call
    ) -> tuple[PyTree, PyTree, Norms]:
        """Run the inner transformations on a window: updates, inner state and norms.

        This names no axis of devices, so that it can also run on global arrays.
        """
        wanted = self.wanted_norms

        def measure(name: str, tree: PyTree, factor: Scalar | int = 1) -> Scalar | None:
            return arithmetic.norm(tree, factor).astype(jnp.float32) if name in wanted else None

        sum_norm = measure("window_sum", totals.gradient, window.unscale)
        params_norm = measure("params", () if params is None else params)
        factor = window.gradient_factor
        if not isinstance(window.unscale, int):
            factor = factor * window.unscale
        if sum_norm is not None and not isinstance(factor, int):
            factor = depends_on(sum_norm, factor)
        is_scaled = not isinstance(window.unscale, int)

        def mean_of(total: Any, dtype_source: Any) -> jax.Array:
            return arithmetic.scale_as(total, factor, self._emitted_dtype(dtype_source, is_scaled))

        mean = jax.tree.map(mean_of, totals.gradient, call.dtype_source)
        updates, new_state = self.inner.update(mean, inner_state, params, **window.inner_args)
        if call.has_window:
            new_state = keep_dtypes(inner_state, new_state)
        elif window.is_filled is not True:
            check_keeps_structure(new_state, inner_state)
        return updates, new_state, Norms(sum_norm, measure("update", updates), params_norm)

    def window(
        self,
        weight: Scalar,
        sums: dict[str, Sums],
        is_filled: Scalar | bool,
        norms: Norms,
        call: Call,
        unscale: Scalar | int,
        num_micro_steps: Scalar,
        every_k: Scalar | int,
    ) -> Window:
        """A window at its boundary, with the factors and extra args that follow from its totals."""
        if call.is_exact:
            gradient_factor, mean_factor = 1, 1
        else:
            gradient_factor, mean_factor = arithmetic.normalizers(weight, is_filled, self.normalize)
        inner_args = dict(call.extra_args)
        if not call.is_exact:
            passed = call.extra_args if call.is_micro_step else None
            for c in self.components:
                inner_args |= c.inner_args(sums[c.name], passed)
        return Window(
            weight=weight,
            sums=sums,
            is_filled=is_filled,
            gradient_factor=gradient_factor,
            mean_factor=mean_factor,
            unscale=unscale,
            num_micro_steps=num_micro_steps,
            every_k=every_k,
            norms=norms,
            inner_args=inner_args,
        )

    def is_filled(self, sums: WindowSums) -> Scalar | bool:
        """Whether the inner transformations run on a window with these sums."""
        return (sums.weight > 0) & self._allows_update(sums.components)

    def _allows_update(self, sums: dict[str, Sums]) -> Scalar | bool:
        allowed: Scalar | bool = True
        for c in self.components:
            allowed &= c.allows_update(sums[c.name])
        return allowed

    def loss_scale(self, extras: dict[str, Any]) -> Scalar | None:
        """The factor L of the loss that the next micro-step differentiates; None: no loss scale."""
        scales = (c.loss_scale(extras[c.name].memory) for c in self.components if c.name in extras)
        return next((scale for scale in scales if scale is not None), None)

    def unscale(self, extras: dict[str, Any], weight_dtype: Dtype) -> Scalar | int:
        """The factor that unscales a gradient: 1 / L, or 1 without a loss scale."""
        scale = self.loss_scale(extras)
        return 1 if scale is None else 1 / scale.astype(weight_dtype)

    def _emitted_dtype(self, dtype_source: Any, is_scaled: bool) -> jnp.dtype:
        dtype = arithmetic.real_dtype(jnp.result_type(dtype_source))
        if is_scaled:  # an unscaled gradient might vanish in float16
            dtype = wider_dtype(dtype, jnp.float32)
        return arithmetic.complex_where(dtype_source, self.emit_dtype or dtype)
