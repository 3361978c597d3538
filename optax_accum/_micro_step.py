"""What one device does in a ready train step: gradient, window, and an update behind the gate."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_accum import _call_validation, _validation
from optax_accum._axis import check_own, reduce_over, varying
from optax_accum._chain import Accumulator
from optax_accum._gate import after
from optax_accum._loss_function import LossFunction
from optax_accum._monitor import norm, ratio
from optax_accum._state import AccumulateState, has_updated


class _Held(NamedTuple):
    """What the gate of a train step holds: the inner state, and what an update changes too."""

    inner_state: optax.OptState
    params: optax.Params
    step_metrics: dict[str, jax.Array]  # float32 [], of the last window that updated
    applied: dict[str, jax.Array]  # float32 []: what a monitor cannot see, the update being applied


def applying(
    inner: optax.GradientTransformation, monitor: bool
) -> optax.GradientTransformationExtraArgs:
    """`inner`, which applies its updates itself: behind the gate no array is made to carry them."""
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates, state, params=None, **extra_args):
        del params  # those that are held, for XLA to write over
        mean, held = updates, state
        grad_norm = norm(mean)
        updates, inner_state = inner.update(mean, held.inner_state, held.params, **extra_args)
        applied = held.applied
        if monitor:
            update_norm, params_norm = norm(updates), norm(held.params)
            updates = jax.tree.map(functools.partial(after, params_norm), updates)
            applied = {
                "update_norm": update_norm,
                "update_ratio": ratio(update_norm, params_norm),
            }
            applied = {name: x.astype(jnp.float32) for name, x in applied.items()}
        with jax.numpy_dtype_promotion("standard"):  # unscaled updates are wider than parameters
            new_params = optax.apply_updates(held.params, updates)
        shown = {"loss": extra_args["value"], "grad_norm": grad_norm}
        shown |= {name: extra_args[name] for name in held.step_metrics.keys() - shown.keys()}
        shown = {name: jnp.asarray(x, jnp.float32) for name, x in shown.items()}
        return (), _Held(inner_state, new_params, shown, applied)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


@dataclasses.dataclass(frozen=True)
class MicroStep:
    """The micro-step of a train step and its flush, on one device."""

    loss_fn: LossFunction
    accumulator: Accumulator  # whose innermost transformation is `applying`
    init_fn: Callable[[optax.Params], Any]  # its init
    update: Callable[..., Any]  # its update
    weight_fn: Callable[[Any], jax.typing.ArrayLike] | None
    rng: bool

    @property
    def model_state(self) -> bool:
        """Whether `loss_fn` takes and returns one."""
        return self.loss_fn.carry_argnum is not None

    @property
    def averaged_aux(self) -> frozenset[str]:
        """Names of the scalars in an aux of which a window has the mean."""
        return self.accumulator.gathering.averaged - {"value"}

    def init(self, params):
        """The state of `tx`, and what a step shows before the first window."""
        names = ("loss", "grad_norm", *self.averaged_aux)
        shown = {name: jnp.zeros([], jnp.float32) for name in names}
        return with_extras(self.init_fn(params), step_metrics=shown)

    def run(self, params, opt_state, batch, rng, model_state):
        """Take a micro-batch; returns params, state, metrics and the new model state, if any."""
        state, axis_name = accumulate_state(opt_state), self.accumulator.gathering.axis_name
        _call_validation.check_not_empty(batch)
        weight = self._weight(batch, state)
        own = self._own(opt_state, model_state)
        args = [params if axis_name is None else varying(params, axis_name)]
        args += [own] if self.model_state else []
        args += [batch]
        args += [self._key(rng, state)] if self.rng else []
        scale = state.extras.get("loss_scale", {}).get("scale")
        loss, (new_own, aux), gradients = self.loss_fn.value_and_grad(*args, loss_scale=scale)
        if axis_name is not None:
            check_own("loss_fn", loss, axis_name)
        averaged = {"value": loss, **_call_validation.averaged_aux(self.averaged_aux, aux)}
        update = functools.partial(self.update, gradients, weight=weight, **averaged)
        params, opt_state, metrics, *rest = self._behind_gate(
            update, params, opt_state, own, new_own, model_state
        )
        if self.loss_fn.has_aux:
            with_axis = lambda x: jnp.expand_dims(x, 0)
            metrics["aux"] = aux if axis_name is None else jax.tree.map(with_axis, aux)
        return params, opt_state, metrics, *rest

    def flush(self, params, opt_state, model_state):
        """Close the window without a micro-batch."""
        own = self._own(opt_state, model_state)
        update = functools.partial(
            self.accumulator.step, params, extra_args={}, flush=True, is_micro_step=False
        )
        return self._behind_gate(update, params, opt_state, own, own, model_state)

    def _behind_gate(self, update, params, opt_state, own, new_own, model_state):
        """Call `update(opt_state, params=params)` with the parameters behind its gate."""
        before = accumulate_state(opt_state)
        shown = before.extras.get("metrics", {})
        applied = {name: shown[name] for name in ("update_norm", "update_ratio") if name in shown}
        step_metrics = before.extras["step_metrics"]
        hold = lambda inner_state: _Held(inner_state, params, step_metrics, applied)
        _, opt_state = update(self.accumulator.map_inner(hold, opt_state), params=params)
        is_held = lambda x: isinstance(x, _Held)
        (held,) = filter(is_held, jax.tree.leaves(opt_state, is_leaf=is_held))
        opt_state = self.accumulator.map_inner(lambda held: held.inner_state, opt_state)

        if applied:
            shown = accumulate_state(opt_state).extras["metrics"] | held.applied
            opt_state = with_extras(opt_state, metrics=shown)
        opt_state = with_extras(opt_state, step_metrics=held.step_metrics)
        state, emitted = accumulate_state(opt_state), has_updated(opt_state)
        metrics = {
            **held.step_metrics,
            "micro_step": state.micro_step,
            "gradient_step": state.gradient_step,
            "emitted": emitted,
        }
        if not self.model_state:
            return held.params, opt_state, metrics

        accepted = jnp.all(state.num_skipped == before.num_skipped)
        new_own = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), new_own, own)
        axis_name = self.accumulator.gathering.axis_name
        if axis_name is not None:
            own = jax.tree.map(lambda x: x[None], new_own)
            opt_state = with_extras(opt_state, model_state=own)
            new_own = lax.cond(
                emitted,
                lambda new, old: jax.tree.map(functools.partial(_mean_over, axis_name), new),
                lambda new, old: old,
                new_own,
                model_state,
            )
        return held.params, opt_state, metrics, new_own

    def _weight(self, batch, state):
        """The weight of this micro-batch on this device; None where it cancels and none is told."""
        if self.weight_fn is not None:
            return _call_validation.weight(self.weight_fn(batch))
        gathering = self.accumulator.gathering
        is_mean = gathering.normalize == "mean" and gathering.axis_name is None
        num_examples = _call_validation.count_examples(batch)
        if num_examples is None and not (is_mean and state.window_sum is None):
            _call_validation.refuse_uncounted(batch)
        return num_examples

    def _key(self, rng, state):
        """The key of this micro-batch on this device."""
        if not self.rng:
            return None
        axis_name = self.accumulator.gathering.axis_name
        # The skipped ones too: a window of them alone is no gradient step.
        places = [state.gradient_step, state.num_skipped.reshape([]), state.micro_step]
        places += [] if axis_name is None else [lax.axis_index(axis_name)]
        return functools.reduce(jax.random.fold_in, places, rng)

    def _own(self, opt_state, model_state):
        """This device's model state, which begins each window with that of all."""
        _call_validation.check_no_keys("model_state", model_state)
        if not self.model_state or self.accumulator.gathering.axis_name is None:
            return model_state
        own = jax.tree.map(lambda x: x[0], accumulate_state(opt_state).extras["model_state"])
        _call_validation.check_kept(
            "model_state", "model_state must have", "the state was made with", model_state, own
        )
        is_begun = accumulate_state(opt_state).micro_step > 0
        return jax.tree.map(lambda own, shared: jnp.where(is_begun, own, shared), own, model_state)


def accumulate_state(opt_state: Any) -> AccumulateState:
    """The accumulator's state in that of an `accumulate` or a `chain`."""
    while type(opt_state) is tuple and opt_state:
        opt_state = opt_state[-1]
    return _validation.state_of(opt_state, AccumulateState)


def with_extras(opt_state: Any, **extras: Any) -> Any:
    """`opt_state` with these extras beside those of its accumulator."""
    if type(opt_state) is tuple:
        return *opt_state[:-1], with_extras(opt_state[-1], **extras)
    return opt_state._replace(extras={**opt_state.extras, **extras})


def _mean_over(axis_name, x):
    """The mean over devices; of counters, which are the same on all, the value."""
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return reduce_over(axis_name, lax.pmean, x) if is_inexact else lax.pmax(x, axis_name)
