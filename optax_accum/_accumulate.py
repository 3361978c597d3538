"""Gradient accumulation as an optax transformation: one weighted window, one gate."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_accum import _loss_scale, _monitor, _validation
from optax_accum._axis import (
    AxisName,
    check_local,
    check_reduced,
    check_reduced_over,
    check_shared,
    is_mapped,
    reduce_over,
    varying,
)
from optax_accum._chain import Accumulator, accumulator_in, chain, transformation
from optax_accum._followers import check_followers
from optax_accum._gate import after, emit_or_hold
from optax_accum._gathering import Gathering
from optax_accum._loss_scale import DynamicLossScale
from optax_accum._monitor import AdaptiveEveryK
from optax_accum._state import AccumulateState, accumulate_states, map_own
from optax_accum._window import (
    count,
    dtype_like,
    factors,
    in_dtypes_of,
    real,
    strongly_typed,
    times,
    weight_dtype_of,
    zeros,
)


def accumulate(
    every_k: int | _validation.Schedule | AdaptiveEveryK,
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
    closes with its `every_k`-th micro-step, or with one that says `flush=True`: then
    `inner` sees S / W once, its updates come out, and S and W start afresh. In all other
    micro-steps the updates are zeros (-0.0, which added to a parameter changes no bit of it) and
    `inner` does not run. k micro-batches thus give the update of the big batch that they make up,
    and a schedule in `inner` counts windows.

    `update` takes these extra args, and hands all others to `inner`:

    - `weight`: real scalar, wᵢ: the examples or tokens of the micro-batch. Only weights above 0
      count; a micro-step of weight 0, below 0, infinite or NaN adds nothing, even where its
      gradient is NaN.
    - `flush`: bool scalar, whether to close the window with this micro-step.

    Args:
      every_k: Micro-steps in a window: an int of at least 1, or a schedule, a function of the
        number of gradient steps so far (int32 scalar) whose value is rounded and at least 1, or
        `adaptive_every_k(...)`.
        `every_k=1` keeps no buffer and compiles to `inner` alone.
      *inner: The transformations that run once per window, chained. None: the mean itself. No
        accumulator may be among them, however deep: write `accumulate(a * b)`.
      normalize: `"mean"`, S / W, for the gradient of a mean loss; `"sum"`, S; `"ratio"`,
        Σ gᵢ / Σ wᵢ, for the gradient of a summed loss over wᵢ tokens.
      accumulator_dtype: Dtype of S, complex where the parameter is. Default: the parameter's, and
        float32 where that is narrower. In bfloat16 S takes half the memory between micro-steps;
        each sum is rounded at random to one of its neighbours, so that its expectation is the sum
        (a reduction over devices rounds to nearest). Where updates are wider than S, a call needs
        room for them beside it; a train step does not.
      emit_dtype: Dtype of what `inner` sees. Default: the gradient's, and with a `loss_scale` at
        least float32.
      should_skip_update_fn: `fn(gradients, gradient_step, params) -> (bool [], info)`, such as
        `optax.skip_not_finite`: a micro-step for which it says True counts as one of weight 0.
        The info is dropped.
      average_extra_args: Names of scalar extra args whose mean over the window reaches `inner`
        instead of the last value, weighted as the gradients are (under `"ratio"` Σ vᵢ / Σ wᵢ).
        Each call of `update` needs them. Default: `value`, optax's name for the loss, where a call
        passes it: `inner` receives the mean over the micro-steps of the window that passed it, and
        nothing from a call that does not. `()`: none.
      axis_name: Mapped axis of `jax.shard_map` or `jax.pmap`, or a tuple of them, over whose
        devices a window reaches. Each device gathers its own S and W, with a leading axis of 1
        (`state_specs` gives the PartitionSpecs); the boundary adds them up in one reduction, in
        the dtype of S, and no other micro-step crosses devices. In `shard_map` differentiate with
        respect to `varying(params, axis_name)`: the gradient with respect to parameters that all
        devices share has been summed over them already, and would count N-fold. That is an error
        here; under `pmap` and with `check_vma=False` it cannot be seen, and does not happen
        unless you reduce the gradients yourself.
      monitor: Whether to measure each window, for `window_metrics`: the gradient's norm in each
        micro-step, all else at the boundary. `value=`, where it is passed, is the loss.
      loss_scale: A `DynamicLossScale`, for gradients of the loss times
        `optax_accum.loss_scale(opt_state)`: what `inner`, `should_skip_update_fn` and the monitor
        see is divided by it. A micro-step whose gradient is infinite or NaN counts as rejected,
        whatever `should_skip_update_fn` says. What stands before the accumulator in a `chain` sees
        scaled gradients, and hides overflows if it clips.

    Returns:
      A `GradientTransformationExtraArgs` with an `AccumulateState`. A window whose weights are all
      0 closes without an update.

    Raises:
      ValueError: An argument breaks its rule; here, in `init` or while `update` is traced, and
        with the name, the rule and the value. In a plain `optax.chain`, also if what follows the
        accumulator would be wrong in a micro-step off the boundary: use `chain` there.

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
      micro-batches divided by what was gathered; Goyal et al., 2017, Accurate, Large Minibatch SGD
      (arXiv:1706.02677), remark 3, for the normalisation by the whole batch.
    """
    is_adaptive = isinstance(every_k, AdaptiveEveryK)
    if not is_adaptive:
        _validation.check_every_k(every_k)
    _validation.check_transforms("inner", inner)
    _validation.check_choice("normalize", normalize, ("mean", "sum", "ratio"))
    _validation.check_accumulator_dtype(accumulator_dtype)
    _validation.check_dtype("emit_dtype", emit_dtype)
    _validation.check_callable("should_skip_update_fn", should_skip_update_fn)
    _validation.check_axis_name(axis_name)
    _validation.check_bool("monitor", monitor)
    _validation.check_loss_scale(loss_scale, DynamicLossScale)
    if is_adaptive:
        _validation.check_monitored(every_k, monitor)
    if average_extra_args is not None:
        _validation.check_names("average_extra_args", average_extra_args, ("weight", "flush"))

    always_closes = not is_adaptive and not callable(every_k) and every_k == 1
    tx = optax.with_extra_args_support(
        optax.identity() if not inner else inner[0] if len(inner) == 1 else chain(*inner)
    )
    _validation.check_not_nested("inner", accumulator_in(tx) is not None)
    gathers: dict[str, Any] = {
        "normalize": normalize,
        "accumulator_dtype": accumulator_dtype,
        "should_skip_update_fn": should_skip_update_fn,
        "axis_name": axis_name,
        "monitor": monitor,
        "loss_scale": loss_scale,
    }
    gathering = Gathering(
        has_window=not always_closes,
        averaged=frozenset(("value",) if average_extra_args is None else average_extra_args),
        requires_averaged=average_extra_args is not None,
        **gathers,
    )
    may_hold = not always_closes or should_skip_update_fn is not None or loss_scale is not None

    def init_fn(params):
        _validation.check_enabled("accumulator_dtype", accumulator_dtype)
        _validation.check_enabled("emit_dtype", emit_dtype)
        if not always_closes:
            _validation.check_not_overwritten(params, "params", _validation.OVERWRITE_BESIDE_TX)
        check = _validation.check_model if always_closes else _validation.check_inexact
        check(params, "params")
        weight_dtype = weight_dtype_of(jax.tree.map(gathering.sum_dtype, params))
        inner_state = tx.init(params)
        _validation.check_not_nested("inner_state", bool(accumulate_states(inner_state)))
        if not always_closes:
            # A weakly typed leaf would turn strong in the first update, and cost a second trace.
            inner_state = jax.tree.map(strongly_typed, inner_state)

        def new_sum(p):
            return zeros(p, gathering.sum_dtype(p))

        state = AccumulateState(
            micro_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            emitted=jnp.zeros([], jnp.bool_),
            num_skipped=jnp.zeros([], jnp.int32),
            window_weight=jnp.zeros([], weight_dtype),
            window_sum=None if always_closes else jax.tree.map(new_sum, params),
            extras=gathering.new_extras(weight_dtype),
            inner_state=inner_state,
        )
        return state if axis_name is None else map_own(with_axis, state)

    def with_axis(x):
        """An array of this device's own, and of the type that `update` returns it with."""
        return varying(x[None], axis_name) if is_mapped(axis_name) else x[None]

    def update_fn(gradients, state, params=None, *, weight=None, flush=False, **extra_args):
        return step(gradients, state, params, extra_args, weight, flush)

    def step(gradients, state, params, extra_args, weight=None, flush=False, is_micro_step=True):
        """A micro-step, or only a flush: then the params come as gradients, for their dtypes."""
        if may_hold:
            check_followers()
        _validation.state_of(state, AccumulateState)
        if axis_name is not None:
            if is_micro_step:
                check_local("gradients", gradients, axis_name)
            check_shared("flush", flush, axis_name)
            state = map_own(_validation.of_one_device, state)
        buffered = gathering.is_buffered(state, gradients)
        if buffered:
            name = "gradients" if is_micro_step else "params"
            is_free = accumulator_dtype is not None
            _validation.check_gradients(name, gradients, state.window_sum, any_width=is_free)
        elif not always_closes:
            _validation.check_has_window(every_k)
        if flush is not False:
            flush = _validation.scalar("flush", flush, jnp.bool_)

        # The mean over one micro-batch does not depend on its weight, and takes no rounding.
        is_single = is_micro_step and not buffered and axis_name is None
        is_single &= weight is None or normalize == "mean"
        if is_micro_step:
            check_reduced("gradients", gradients)
            total, beside, accepted = gathering.gather(
                gradients, state, params, extra_args, weight, is_single
            )
            if buffered or accepted is not True:
                before = state.window_sum if buffered else params
                check_reduced_over(axis_name, gradients, before, total, *beside)
        else:
            total, beside = gathering.held(state, params)
            accepted = False

        # Does the window close, and with what? Without a buffer both may be known at trace time.
        closes = flush if buffered else True
        k: Any = every_k
        if isinstance(every_k, AdaptiveEveryK):
            k = every_k.after(state.extras["metrics"])
        elif callable(every_k):
            k = _validation.scheduled_k(every_k(state.gradient_step))
        micro_step = state.micro_step + int(is_micro_step)
        if buffered and is_micro_step:
            closes |= micro_step >= k

        def emitted_dtype(g):
            dtype = real(jnp.result_type(g))
            if loss_scale is not None:  # unscaled, it might vanish in float16
                dtype = _validation.wider(dtype, jnp.float32)
            return dtype_like(emit_dtype or dtype, g)

        unscale = _loss_scale.unscaling(state)

        def emit(beside, filled, total, carry):
            """Run `inner` on a whole window."""
            inner_state, metrics = carry
            factor, per_weight = factors(beside.weight, filled, normalize)
            means = gathering.means(beside.sums, extra_args, is_micro_step)
            mean_of = factor, per_weight
            if is_single:
                factor, means = 1, {}
                mean_of = 1, 1
            factor = factor * unscale
            sum_norm = _monitor.norm(total, unscale) if monitor else None
            if monitor and not isinstance(factor, int):
                factor = after(sum_norm, factor)
            mean = jax.tree.map(lambda s, g: times(s, factor, emitted_dtype(g)), total, gradients)
            updates, new_state = tx.update(mean, inner_state, params, **{**extra_args, **means})
            if buffered:
                new_state = in_dtypes_of(inner_state, new_state)
            elif filled is not True:
                _validation.check_same_structure(new_state, inner_state, dtypes_may_change=True)
            if monitor:
                window = beside.sums["monitor"], beside.weight, sum_norm, mean_of, micro_step, k
                new_metrics = _monitor.report(metrics, *window, updates, params)
                metrics = jax.tree.map(functools.partial(jnp.where, filled), new_metrics, metrics)
            return updates, (new_state, metrics)

        def reduce_and_emit(total, carry):
            """The same across devices, which alone know together if they gathered anything."""
            carry, *_ = carry
            total, of_all = reduce_over(axis_name, lax.psum, (total, beside))
            filled = gathering.is_filled(of_all)
            updates, _, carry = emit_or_hold(
                filled, functools.partial(emit, of_all, filled), total, carry, buffered=False
            )
            return updates, (carry, filled, gathering.overflowed(of_all))

        carry = state.inner_state, state.extras.get("metrics", {})
        if axis_name is None:
            filled = gathering.is_filled(beside) if buffered else accepted
            overflowed = gathering.overflowed(beside)
            updated = closes & filled
            updates, total, (inner_state, metrics) = emit_or_hold(
                updated, functools.partial(emit, beside, filled), total, carry, buffered
            )
        else:
            no = jnp.zeros([], bool)
            updates, total, ((inner_state, metrics), updated, overflowed) = emit_or_hold(
                closes, reduce_and_emit, total, (carry, no, no), buffered
            )

        def reopen(x):
            return jnp.where(closes, jnp.zeros_like(x), x)

        # The sum needs no reopening: where no inner ran, a window that closes holds zeros.
        beside = jax.tree.map(reopen, beside)
        sums = {name: x for name, x in beside.sums.items() if name in state.extras}
        extras = state.extras | sums | ({"metrics": metrics} if monitor else {})
        if loss_scale is not None:
            extras |= _loss_scale.after(loss_scale, extras, closes & overflowed, updated)
        new_state = AccumulateState(
            micro_step=reopen(micro_step),
            gradient_step=count(state.gradient_step, updated),
            emitted=jnp.asarray(updated),
            num_skipped=count(state.num_skipped, is_micro_step & jnp.logical_not(accepted)),
            window_weight=beside.weight,
            window_sum=total,
            extras=extras,
            inner_state=inner_state,
        )
        return updates, new_state if axis_name is None else map_own(lambda x: x[None], new_state)

    def rebuilt(*transforms, average_extra_args=average_extra_args):
        options = {"emit_dtype": emit_dtype, "average_extra_args": average_extra_args}
        return accumulate(every_k, *transforms, **options, **gathers)

    def followed_by(*transforms):
        return rebuilt(*inner, *transforms)

    def wrapped(fn, names):
        """With `fn` around the inner transformation, which also gets the mean of `names`."""
        return rebuilt(fn(tx), average_extra_args=sorted(gathering.averaged | set(names)))

    def map_inner(fn, state):
        return state._replace(inner_state=fn(state.inner_state))

    return transformation(
        init_fn,
        update_fn,
        Accumulator(step, followed_by, wrapped, map_inner, gathering),
    )
