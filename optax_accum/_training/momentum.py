"""Momentum SGD whose window gathers in the momentum itself."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _checks
from optax_accum._checks import Dtype, PyTree, Scalar, Schedule
from optax_accum._core.arithmetic import (
    add_if_accepted,
    increment_where,
    is_positive_weight,
    scale_as,
    sum_dtype,
    weight_dtype,
    zeros_where,
)
from optax_accum._core.every_k import check_every_k, scheduled_k
from optax_accum._core.followers import check_followers
from optax_accum._core.gate import negative_zero
from optax_accum._core.rounding import add_tree_if_accepted
from optax_accum._core.state import AccumulateState
from optax_accum._core.state_checks import check_gradients, checked_state
from optax_accum._devices.axis_checks import check_reduced, check_reduced_over
from optax_accum._training.hyperparams import check_hyperparam

_REMEDY_FOR_FOLLOWERS = (
    "Nothing holds it back there, in no chain: take accumulate(k, optax.sgd(learning_rate,"
    " momentum), what follows)."
)


def accumulate_in_momentum(
    every_k: int | Schedule,
    learning_rate: jax.typing.ArrayLike | Schedule,
    momentum: jax.typing.ArrayLike,
    *,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run SGD with momentum once per window, and gather the window in its momentum.

    Micro-step i of a window brings a gradient gᵢ and its share sᵢ of the window, 1/k unless
    `share=` is passed. With μ = `momentum`, η = `learning_rate` and m a tree like the parameters:

        first micro-step that counts    m ← μ m + sᵢ gᵢ
        the others                      m ← m + sᵢ gᵢ
        boundary                        update = -η m

    With shares that add up to 1, Σ sᵢgᵢ is the window's mean, and the updates are those of
    `accumulate(every_k, optax.sgd(learning_rate, momentum))` but for rounding, without its tree of
    sums. Off the boundary they are zeros (-0.0). The window closes with its
    `every_k`-th micro-step, or with one that says `flush=True`.

    `update` takes these extra args, and drops all others:

    - `share`: real scalar, sᵢ, such as nᵢ / N for nᵢ of the window's N examples or tokens. Only
      shares above 0 count; a micro-step of share 0, below 0, infinite or NaN adds nothing, even
      where its gradient is NaN. What shares lack to 1 is lacking in the gradient: in a
      window that is closed early, or in which a micro-step does not count, give the others shares
      that add up to 1.
    - `flush`: bool scalar, whether to close the window with this micro-step. `optax_accum.flush`
      does not take this transformation.

    There is no `weight`: m decays before the window's whole weight is known, and what is in it
    cannot be divided later on.

    It is exact for SGD with heavy-ball momentum alone, whose m is linear in the gradient (that of
    `optax.trace`; an average (1 - μ) Σ μʲgⱼ, as of `optax.ema` without `debias`, is the same with
    (1 - μ) η for η). Of the others, use `accumulate`:

    - Nesterov's momentum steps along g + μm, and needs the window's mean g apart from m.
    - Adam, RMSProp, Adagrad and LAMB keep a second moment, and the square of a mean is not the mean
      of squares. AdamA [1] adds up the squares of the micro-gradients instead, which is another
      optimizer.
    - Lion takes the sign of the momentum and the mean mixed by b1, and decays by another, b2.
    - Clipping the window's mean, normalising it, or whatever else is not linear in it.

    In an `optax.chain`, what stands before it sees each micro-gradient: `add_decayed_weights`
    there is exact where shares add up to 1, since the parameters stand still in a window, and
    clipping there is of each micro-batch. After it, only what holds no state and leaves zeros zero
    is accepted: clipping there is of the update -η m. There is no reduction over devices: average
    the gradient over them before it, in each micro-step.

    Args:
      every_k: Micro-steps in a window: an int of at least 1, or a schedule, a function of the
        number of gradient steps so far (int32 scalar) whose value is rounded and at least 1.
      learning_rate: η, a number of at least 0, or a schedule of the gradient step. The range of
        arrays is not checked.
      momentum: μ, a number of at least 0 and below 1.
      accumulator_dtype: Dtype of m, complex where the parameter is. Default: the parameter's, and
        float32 where that is narrower. In bfloat16 m is rounded at random, as a sum is there.

    Returns:
      A `GradientTransformationExtraArgs` with an `AccumulateState`: its `inner_state` is an
      `optax.TraceState` with m, its `window_weight` the shares of the open window added up, and it
      has no `window_sum`. A window in which no micro-step counts closes without an update, and
      leaves m as it is.

    Raises:
      ValueError: An argument breaks its rule; here, in `init` or while `update` is traced, and
        with the name, the rule and the value. Also if `weight=` is passed, or if in an
        `optax.chain` what follows would be wrong in a micro-step off the boundary.

    Example:
      Micro-batches of 1 and 3 examples, and the momentum of the window before.

      >>> import jax.numpy as jnp
      >>> tx = accumulate_in_momentum(2, learning_rate=1.0, momentum=0.5)
      >>> params = jnp.zeros([])
      >>> state = tx.init(params)
      >>> for gradient, share in ((8.0, 0.25), (4.0, 0.75), (0.0, 0.5), (2.0, 0.5)):
      ...     updates, state = tx.update(jnp.array(gradient), state, params, share=share)
      ...     print(updates, state.inner_state.trace)
      -0.0 2.0
      -5.0 5.0
      -0.0 2.5
      -3.5 3.5

    References:
      [1] Zhang et al., 2023, Adam Accumulation to Reduce Memory Footprints of both Activations and
      Gradients for Large-scale DNN Training (arXiv:2305.19982), which gathers in the moments of
      Adam. Polyak, 1964, Some methods of speeding up the convergence of iteration methods, for the
      heavy ball.
    """
    check_every_k(every_k)
    _check_number("learning_rate", learning_rate)
    _check_number("momentum", momentum)
    _checks.check_accumulator_dtype(accumulator_dtype)
    window = MomentumWindow(every_k, learning_rate, momentum, accumulator_dtype)
    return optax.GradientTransformationExtraArgs(window.init, window.update)


@dataclasses.dataclass(frozen=True, eq=False)
class MomentumWindow:
    """SGD whose momentum is the sum of its window; its transformation is `init` and `update`."""

    every_k: int | Schedule
    learning_rate: jax.typing.ArrayLike | Schedule
    momentum: jax.typing.ArrayLike
    accumulator_dtype: Dtype | None

    def init(self, params: optax.Params) -> Any:
        _checks.check_enabled("accumulator_dtype", self.accumulator_dtype)
        _checks.check_not_overwritten(params, "params", _checks.OVERWRITE_BESIDE_TX)
        _checks.check_inexact(params, "params")

        def dtype_of_sum(param: Any) -> jnp.dtype:
            return sum_dtype(param, self.accumulator_dtype)

        dtypes = jax.tree.map(dtype_of_sum, params)
        return AccumulateState(
            micro_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            emitted=jnp.zeros([], jnp.bool_),
            num_skipped=jnp.zeros([], jnp.int32),
            window_weight=jnp.zeros([], weight_dtype(dtypes)),
            window_sum=None,
            extras={},
            inner_state=optax.TraceState(jax.tree.map(zeros_where, params, dtypes)),
        )

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        share: Any = None,
        flush: Any = False,
        weight: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        check_followers("accumulate_in_momentum", _REMEDY_FOR_FOLLOWERS)
        _check_no_weight(weight)
        state, trace = self._checked(state, updates)
        k = self._k(state)
        dtype = state.window_weight.dtype
        share = _checks.checked_scalar(
            "share", 1 / jnp.asarray(k, dtype) if share is None else share, dtype
        )
        accepted = is_positive_weight(share, dtype)
        trace, window_weight = self._gather(trace, updates, state, share, accepted)
        micro_step = state.micro_step + 1
        closes = jnp.logical_or(micro_step >= k, _checks.checked_scalar("flush", flush, jnp.bool_))
        emitted = jnp.logical_and(closes, window_weight > 0)
        factor = -self._learning_rate(state)

        def emit(m: jax.Array, gradient: Any) -> jax.Array:
            update = scale_as(m, factor, jnp.result_type(gradient))
            return jnp.where(emitted, update, negative_zero(update.dtype))

        def reopened(x: jax.Array) -> jax.Array:
            return jnp.where(closes, jnp.zeros_like(x), x)

        return jax.tree.map(emit, trace, updates), AccumulateState(
            micro_step=reopened(micro_step),
            gradient_step=increment_where(emitted, state.gradient_step),
            emitted=emitted,
            num_skipped=increment_where(jnp.logical_not(accepted), state.num_skipped),
            window_weight=reopened(window_weight),
            window_sum=None,
            extras=state.extras,
            inner_state=optax.TraceState(trace),
        )

    def _gather(
        self,
        before: PyTree,
        gradients: PyTree,
        state: AccumulateState,
        share: Scalar,
        accepted: Scalar | bool,
    ) -> tuple[PyTree, Scalar]:
        """The momentum and the sum of shares after a micro-step."""
        momentum = _checks.checked_scalar("momentum", self.momentum, share.dtype)
        decay = jnp.where(accepted & (state.window_weight == 0), momentum, 1)

        def counters() -> tuple[Scalar, ...]:
            return state.gradient_step, state.micro_step, state.num_skipped

        check_reduced("gradients", gradients)
        trace = add_tree_if_accepted(before, gradients, share, accepted, counters, decay)
        window_weight = add_if_accepted(state.window_weight, share, 1, accepted)
        check_reduced_over(None, gradients, before, trace, window_weight, {}, "share")
        return trace, window_weight

    def _k(self, state: AccumulateState) -> Scalar | int:
        """Micro-steps in the open window."""
        if callable(self.every_k):
            return scheduled_k(self.every_k(state.gradient_step))
        return self.every_k

    def _learning_rate(self, state: AccumulateState) -> Scalar:
        rate = self.learning_rate
        rate = rate(state.gradient_step) if callable(rate) else rate
        return _checks.checked_scalar("learning_rate", rate, state.window_weight.dtype)

    def _checked(self, state: Any, gradients: PyTree) -> tuple[AccumulateState, PyTree]:
        """The state and its momentum; or an error where they or the gradients do not fit."""
        state = checked_state(state, AccumulateState)
        trace = checked_state(state.inner_state, optax.TraceState).trace
        is_cast = self.accumulator_dtype is not None
        check_gradients("gradients", gradients, trace, is_cast)
        return state, trace


def _check_number(name: str, value: Any) -> None:
    """Require a hyper-parameter in its range, or an array, whose value may not be known yet."""
    if isinstance(value, jax.Array | np.ndarray):
        _checks.checked_scalar(name, value, jnp.float32)
    else:
        check_hyperparam(name, value)


def _check_no_weight(weight: Any) -> None:
    """Require shares of a window in place of weights."""
    if weight is not None:
        raise ValueError(
            "weight must not be passed to accumulate_in_momentum, whose momentum decays before the"
            " window's whole weight is known; pass share=, the micro-step's weight over that of its"
            f" window; got weight={weight!r}."
        )
