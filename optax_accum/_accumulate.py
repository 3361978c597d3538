"""`accumulate`: it checks its arguments and makes an accumulator of the components they ask for."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from optax_accum import _checks
from optax_accum._checks import Schedule
from optax_accum._components.averages import Averages
from optax_accum._components.loss_scale import DynamicLossScale, LossScaling
from optax_accum._components.monitor import AdaptiveEveryK, Monitor
from optax_accum._components.rejection import Rejection
from optax_accum._core.accumulator import WindowAccumulator
from optax_accum._core.component import Component
from optax_accum._core.every_k import ScheduledK, check_every_k
from optax_accum._core.window import WindowPieces
from optax_accum._devices.axis import AxisName
from optax_accum._devices.reductions import MappedAxis, OneDevice


def accumulate(
    every_k: int | Schedule | AdaptiveEveryK,
    *inner: optax.GradientTransformation,
    normalize: str = "mean",
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    emit_dtype: jax.typing.DTypeLike | None = None,
    should_skip_update_fn: Callable[..., tuple[Any, Any]] | None = None,
    average_extra_args: Sequence[str] | None = None,
    axis_name: AxisName | None = None,
    monitor: bool = False,
    loss_scale: DynamicLossScale | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Gather gradients over a window of micro-steps and run `inner` once, on their mean.

    Micro-step i of a window brings a gradient gᵢ and a weight wᵢ (1 unless `weight=` is passed).
    The state keeps S = Σ wᵢgᵢ, a tree like the parameters, and W = Σ wᵢ, a scalar. The window
    closes with its `every_k`-th micro-step, or with one that passes `flush=True`. Then `inner` runs
    once, on S / W, its updates are returned, and S and W start again from 0. In all other
    micro-steps `inner` does not run, and the updates are zeros: -0.0, which changes no bit of the
    parameter that it is added to. So k micro-batches give the update of the big batch that they
    make up, and a schedule in `inner` counts windows.

    `update` takes these extra args, and hands all others to `inner`:

    - `weight`: wᵢ, a real scalar, such as the number of examples or tokens in the micro-batch. Only
      a finite weight above 0 counts. A micro-step of any other weight (0, negative, infinite, NaN)
      adds nothing, even if its gradient is NaN.
    - `flush`: bool scalar, whether to close the window with this micro-step. It must be the same on
      all devices.

    Args:
      every_k: Micro-steps in a window: an int from 1 to 2**31 - 1, a schedule, or
        `adaptive_every_k(...)`, which needs `monitor=True`. A schedule is a function of the number
        of gradient steps so far (int32 scalar); its value is rounded, and taken as 1 if it is below
        1. With `every_k=1` the state has no buffer, and `update` compiles to `inner`, with what
        other arguments ask for (a reduction over `axis_name`, a monitor).
      *inner: The transformations that run once per window, one after the other. Without any, the
        updates are the mean itself. Accumulators do not nest: none of these may be or contain one.
        Write windows of windows as `accumulate(a * b)`.
      normalize: `"mean"`, S / W, for the gradient of a mean loss; `"sum"`, S; `"ratio"`,
        Σ gᵢ / Σ wᵢ, for the gradient of a summed loss over wᵢ tokens.
      accumulator_dtype: Dtype of S: float32, float64 or bfloat16; a complex parameter has a complex
        sum. Default: the parameter's, and float32 where that is narrower. A gradient that is wider
        than S is an error by default, and is cast if this is set. In bfloat16, S takes half the
        memory of float32. Each sum is then rounded at random to one of its neighbours, so that its
        expectation is the sum; a reduction over devices rounds to nearest. Where updates are wider
        than S, `update` needs memory for both; `make_train_step` does not.
      emit_dtype: Real floating dtype of what `inner` sees; a complex gradient stays complex.
        Default: the gradient's, and with a `loss_scale` at least float32.
      should_skip_update_fn: `fn(gradients, gradient_step, params) -> (bool [], info)`, such as
        `optax.skip_not_finite`. A micro-step for which it returns True is rejected: it counts as
        one of weight 0. The info is dropped.
      average_extra_args: Names of scalar extra args whose mean over the window reaches `inner`
        instead of the last value. The mean is Σ wᵢvᵢ / Σ wᵢ, and under `"ratio"` Σ vᵢ / Σ wᵢ. Each
        call of `update` must pass them; `flush(tx, ...)` needs none. The default averages `value`,
        optax's name for the loss, which calls may then leave out: if the call that closes the
        window passes it, `inner` receives its mean over the micro-steps that passed it; if not,
        `inner` receives no `value`. `()` averages nothing, and `inner` receives the last values.
      axis_name: Mapped axis of `jax.shard_map` or `jax.pmap`, or a tuple of them: a window holds
        the micro-steps of all devices along it. Each device gathers its own S and W, with a leading
        axis of 1 (`state_specs` gives the PartitionSpecs). The boundary sums them over the devices
        in one reduction, in the dtype of S; no other micro-step communicates. In `shard_map`,
        differentiate with respect to `varying(params, axis_name)`. A gradient with respect to
        parameters that all devices share is already summed over the devices, would count once more
        for each of them, and is an error. Under `pmap` and with `check_vma=False` types do not show
        this: gradients are local there, unless you reduce them yourself.
      monitor: Whether to measure each window, for `window_metrics`. The norm of the gradient is
        taken in each micro-step, everything else at the boundary. The loss is `value=`, where it is
        passed.
      loss_scale: A `DynamicLossScale`. The gradients are then those of the loss times
        `optax_accum.loss_scale(opt_state)`. `inner`, `should_skip_update_fn` and the monitor see
        them divided by it. A micro-step whose gradient is infinite or NaN is rejected, whatever
        `should_skip_update_fn` returns. What stands before the accumulator in a `chain` sees the
        scaled gradients, and hides overflows if it clips them.

    Returns:
      A `GradientTransformationExtraArgs` with an `AccumulateState`. A window in which no micro-step
      counted closes without an update.

    Raises:
      ValueError: An argument breaks its rule. The error comes here, in `init` or while `update` is
        traced, and gives the name, the rule and the value. It also comes in a plain `optax.chain`
        where a follower of the accumulator would be wrong off the boundary; use `chain` instead.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = accumulate(2, optax.sgd(1.0))
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for gradient in (jnp.array([3.0, 0.0]), jnp.array([-1.0, 4.0])):
      ...     updates, state = tx.update(gradient, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, int(state.micro_step), int(state.gradient_step))
      [0. 0.] 1 0
      [-1. -2.] 0 1

    References:
      Ott et al., 2018, Scaling Neural Machine Translation (arXiv:1806.00187), for sums over
      micro-batches divided by the sum of weights; Goyal et al., 2017, Accurate, Large Minibatch SGD
      (arXiv:1706.02677), remark 3, for the normalisation by the whole batch.
    """
    is_adaptive = isinstance(every_k, AdaptiveEveryK)
    if not is_adaptive:
        check_every_k(every_k)
    _checks.check_transforms("inner", inner)
    _checks.check_choice("normalize", normalize, ("mean", "sum", "ratio"))
    _checks.check_accumulator_dtype(accumulator_dtype)
    _checks.check_dtype("emit_dtype", emit_dtype)
    _checks.check_callable("should_skip_update_fn", should_skip_update_fn)
    _check_axis_name(axis_name)
    _check_monitor(monitor, every_k)
    _check_loss_scale(loss_scale)
    _check_names(average_extra_args)

    # Components that may reject a micro-step come first: the others gather what those accept.
    components: list[Component] = []
    if loss_scale is not None:
        components.append(LossScaling(loss_scale))
    if should_skip_update_fn is not None:
        components.append(Rejection(should_skip_update_fn))
    if average_extra_args is None:
        components.append(Averages(frozenset({"value"}), are_required=False))
    elif average_extra_args:
        components.append(Averages(frozenset(average_extra_args), are_required=True))
    if monitor:
        components.append(Monitor())
    accumulator = WindowAccumulator(
        every_k=ScheduledK(every_k) if callable(every_k) and not is_adaptive else every_k,
        pieces=WindowPieces(inner, tuple(components), normalize, accumulator_dtype, emit_dtype),
        reduction=OneDevice() if axis_name is None else MappedAxis(axis_name),
    )
    return accumulator.transformation()


def _check_names(names: Any) -> None:
    """Require None or a sequence of argument names, none of them reserved."""
    is_sequence = isinstance(names, tuple | list) and all(isinstance(n, str) for n in names)
    if names is not None and (not is_sequence or {"weight", "flush"} & {*names}):
        raise ValueError(
            "average_extra_args must be a tuple of names of extra args other than 'weight' and"
            f" 'flush', got {names!r}."
        )


def _check_axis_name(axis_name: Any) -> None:
    """Require the name of an axis, or a tuple of them."""
    if isinstance(axis_name, list | set | dict):
        raise ValueError(
            f"axis_name must be the name of a mapped axis or a tuple of names, got {axis_name!r}."
        )


def _check_monitor(monitor: Any, every_k: Any) -> None:
    """Require True or False, and True for an `every_k` that follows what a monitor measures."""
    if not isinstance(monitor, bool):
        raise ValueError(f"monitor must be True or False, got {monitor!r}.")
    if isinstance(every_k, AdaptiveEveryK) and not monitor:
        raise ValueError(
            f"every_k={every_k!r} follows what monitor=True measures; got monitor={monitor!r}."
        )


def _check_loss_scale(loss_scale: Any) -> None:
    """Require None or a loss scale."""
    if loss_scale is not None and not isinstance(loss_scale, DynamicLossScale):
        raise ValueError(f"loss_scale must be a DynamicLossScale or None, got {loss_scale!r}.")
