"""A train step on one device: the gradient, its place in the window, and the gated update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import PyTree, Scalar
from optax_accum._core.boundary import Finish
from optax_accum._core.chain import Accumulator
from optax_accum._core.state import AccumulateState, LocalState
from optax_accum._devices.axis import AxisName, reduce_over, varying
from optax_accum._devices.axis_checks import check_loss_is_local
from optax_accum._in_call.batches import check_kept, checked_weight
from optax_accum._in_call.loss_function import LossFunction
from optax_accum._train_step.opt_state import accumulate_state, with_extras


class ModelState(NamedTuple):
    """The model state of a call, shared and of this device; None if the step has none."""

    shared: PyTree  # the same on all devices, since the last boundary
    own: PyTree  # of this device, before the micro-batch
    new: PyTree  # of this device, after it

    def kept(self, accepted: Scalar | bool) -> PyTree:
        """The model state of this device after the call, unchanged by a rejected micro-batch."""
        return jax.tree.map(lambda new, own: jnp.where(accepted, new, own), self.new, self.own)


@dataclasses.dataclass(frozen=True)
class DeviceMicroStep:
    """The micro-step of a train step and its flush, on one device."""

    loss_fn: LossFunction
    accumulator: Accumulator  # with `StepMetrics`
    averaged_aux: frozenset[str]  # names of the scalars in an aux that a window averages
    weight_fn: Callable[[Any], jax.typing.ArrayLike] | None
    rng: bool

    @property
    def axis_name(self) -> AxisName | None:
        """The axis over whose devices a window reaches."""
        return self.accumulator.window.reduction.axis_name

    @property
    def model_state(self) -> bool:
        """Whether `loss_fn` takes and returns a model state."""
        return self.loss_fn.carry_argnum is not None

    def run(
        self,
        params: optax.Params,
        opt_state: Any,
        batch: PyTree,
        rng: jax.Array | None,
        model_state: PyTree,
    ) -> tuple[Any, ...]:
        """Take a micro-batch; returns params, state, metrics and the new model state, if any."""
        state, axis_name = accumulate_state(opt_state), self.axis_name
        _check_not_empty(batch)
        weight = self._weight(batch, state)
        own = self._own_model_state(state, model_state)
        args = [params if axis_name is None else varying(params, axis_name)]
        args += [own] if self.model_state else []
        args += [batch]
        args += [] if rng is None else [self._key(rng, state)]
        scale = self.accumulator.window.pieces.loss_scale(state.extras)
        loss, (new, aux), gradients = self.loss_fn.value_and_grad(*args, loss_scale=scale)
        if axis_name is not None:
            check_loss_is_local("loss_fn", loss, axis_name)
        averaged = {"value": loss, **_averaged_aux(self.averaged_aux, aux)}
        step = functools.partial(
            self.accumulator.step, gradients, opt_state, params, averaged, weight=weight
        )
        params, opt_state, metrics, *rest = self._take(
            step, state.num_skipped, ModelState(model_state, own, new)
        )
        if self.loss_fn.has_aux:
            stacked = functools.partial(jnp.expand_dims, axis=0)
            metrics["aux"] = aux if axis_name is None else jax.tree.map(stacked, aux)
        return params, opt_state, metrics, *rest

    def flush(self, params: optax.Params, opt_state: Any, model_state: PyTree) -> tuple[Any, ...]:
        """Close the window without a micro-batch; returns what `run` does."""
        state = accumulate_state(opt_state)
        own = self._own_model_state(state, model_state)
        step = functools.partial(self.accumulator.close_now, opt_state, params, {})
        return self._take(step, state.num_skipped, ModelState(model_state, own, own))

    def _take(
        self,
        step: Callable[..., tuple[PyTree, Any, PyTree]],
        num_skipped: jax.Array,
        model_state: ModelState,
    ) -> tuple[Any, ...]:
        """Take a step of the accumulator, which applies the update behind its gate.

        Args:
          step: `step` or `close_now` of the accumulator, with all arguments but `finish`.
          num_skipped: That of the state before the call.
          model_state: The model state of the call.

        Returns:
          params, state, metrics and the new model state, if any.
        """
        axis_name = self.axis_name

        def apply(params: PyTree, updates: PyTree, accepted: Any, shared: PyTree) -> Any:
            with jax.numpy_dtype_promotion("standard"):  # unscaled updates are wider than params
                params = optax.apply_updates(params, updates)
            if axis_name is not None and self.model_state:
                mean = functools.partial(_mean_over, axis_name)
                shared = jax.tree.map(mean, model_state.kept(accepted))
            return params, shared

        _, opt_state, (params, shared) = step(finish=Finish(apply, model_state.shared))
        state = accumulate_state(opt_state)
        metrics = {
            **state.extras["step_metrics"].memory,
            "micro_step": state.micro_step,
            "gradient_step": state.gradient_step,
            "emitted": state.emitted,
        }
        if not self.model_state:
            return params, opt_state, metrics
        own = model_state.kept(jnp.all(state.num_skipped == num_skipped))
        if axis_name is None:
            return params, opt_state, metrics, own
        local = LocalState(jax.tree.map(lambda x: x[None], own))
        return params, with_extras(opt_state, model_state=local), metrics, shared

    def _weight(self, batch: PyTree, state: AccumulateState) -> Any:
        """The weight of this micro-batch on this device; None if the mean needs no weight."""
        if self.weight_fn is not None:
            return checked_weight(self.weight_fn(batch))
        is_mean = self.accumulator.window.pieces.normalize == "mean" and self.axis_name is None
        num_examples = _count_examples(batch)
        if num_examples is None and not (is_mean and state.window_sum is None):
            _refuse_uncounted(batch)
        return num_examples

    def _key(self, rng: jax.Array, state: AccumulateState) -> jax.Array:
        """The key of this micro-batch on this device."""
        axis_name = self.axis_name
        # `num_skipped` too, since a window of skipped micro-steps alone is no gradient step.
        places = [state.gradient_step, state.num_skipped.reshape([]), state.micro_step]
        places += [] if axis_name is None else [lax.axis_index(axis_name)]
        return functools.reduce(jax.random.fold_in, places, rng)

    def _own_model_state(self, state: AccumulateState, shared: PyTree) -> PyTree:
        """The model state of this device; in the first micro-step of a window, the shared one."""
        check_no_keys("model_state", shared)
        if not self.model_state or self.axis_name is None:
            return shared
        own = jax.tree.map(lambda x: x[0], state.extras["model_state"].values)
        check_kept("model_state", "model_state must have", "the state was made with", shared, own)
        is_begun = state.micro_step > 0
        return jax.tree.map(lambda own, shared: jnp.where(is_begun, own, shared), own, shared)


def _mean_over(axis_name: AxisName, x: jax.Array) -> jax.Array:
    """The mean over devices; of a counter, which is the same on all of them, the maximum."""
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return reduce_over(axis_name, lax.pmean, x) if is_inexact else lax.pmax(x, axis_name)


def check_no_keys(name: str, tree: Any) -> None:
    """Require arrays of which a mean or a maximum over devices can be taken."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            raise ValueError(
                f"{name} must hold no random keys, since they have no mean over devices; {name}"
                f"{keystr(path)} is one. Make the step with rng=True, and pass the key as rng=."
            )


def _averaged_aux(names: frozenset[str], aux: Any) -> dict[str, Any]:
    """The scalars of an aux that a window averages."""
    if names and not isinstance(aux, Mapping):
        raise ValueError(
            f"aux must be a dict with the scalars {sorted(names)}, which average_extra_args of tx"
            f" names; got a {type(aux).__name__}."
        )
    missing = sorted(names - aux.keys()) if names else []
    if missing:
        raise ValueError(
            f"aux must hold the scalars that average_extra_args of tx names; it lacks {missing},"
            f" and has {sorted(aux)}."
        )
    return {name: aux[name] for name in names}


def _check_not_empty(batch: Any) -> None:
    """Require that one array of a batch has an example, if the batch has arrays."""
    sizes = _lengths(batch)
    if sizes and not max(sizes.values()):
        raise ValueError(f"batch must hold at least one example, got {sizes}.")


def _count_examples(batch: Any) -> int | None:
    """The number of examples in a batch, by its arrays; None if their lengths differ.

    Scalars do not count: they belong to all examples.
    """
    sizes = {*_lengths(batch).values()}
    return sizes.pop() if len(sizes) == 1 else None


def _refuse_uncounted(batch: Any) -> None:
    """Refuse a batch without one number of examples, where this is the weight."""
    raise ValueError(
        "batch must hold at least one example and one number of them in all its arrays (the length"
        " of axis 0), which is the weight of the micro-batch; got"
        f" {_lengths(batch) or f'no array in {batch!r}'}. For a batch of another form make the step"
        " with weight_fn=, which returns the weight of a micro-batch: weight_fn=lambda batch: 1 if"
        " all have the same weight."
    )


def _lengths(batch: Any) -> dict[str, int]:
    """The lengths of the arrays in a batch along their first axis."""
    leaves = tree_flatten_with_path(batch)[0]
    return {f"batch{keystr(path)}": len(leaf) for path, leaf in leaves if jnp.ndim(leaf)}
