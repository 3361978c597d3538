"""Gradient accumulation as an optax transformation: one weighted window, one gate."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_accum import _validation
from optax_accum._followers import check_followers
from optax_accum._gate import emit_or_hold, gate


class AccumulateState(NamedTuple):
    """State of `accumulate`: counters, the open window and the inner state."""

    micro_step: jax.Array  # int32 [], micro-steps in the open window, 0 <= micro_step < every_k
    gradient_step: jax.Array  # int32 [], windows that closed with an update
    emitted: jax.Array  # bool [], whether the last call closed a window with an update
    num_skipped: jax.Array  # int32 [], micro-steps rejected or without weight, since init
    window_weight: jax.Array  # W, float32 or float64 [], 0 in an empty window
    window_sum: optax.Updates  # S in the accumulator dtype, or None where every_k=1
    extras: dict[str, Any]  # sums of the averaged extra args; {} where there are none
    inner_state: optax.OptState


class Accumulation(optax.GradientTransformationExtraArgs):
    """A transformation with an accumulator in it, which can be flushed and continued."""

    flush: Callable[..., tuple[optax.Updates, Any]]  # (like, state, params, extra_args)
    followed_by: Callable[..., "Accumulation"]  # (*transforms), behind the accumulator's gate

    def __new__(cls, init, update, flush, followed_by):
        self = super().__new__(cls, init, update)
        self.flush = flush
        self.followed_by = followed_by
        return self


class _HandedOn(NamedTuple):
    """The `weight` with which an accumulator calls an accumulator directly inside it."""

    weight: jax.Array  # W of the closed window
    scale: jax.Array  # takes the gradient that it emits back to the window's sum


def accumulate(
    every_k: int | _validation.Schedule,
    *inner: optax.GradientTransformation,
    normalize: str = "mean",
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    emit_dtype: jax.typing.DTypeLike | None = None,
    should_skip_update_fn: Callable[..., tuple[Any, Any]] | None = None,
    average_extra_args: Sequence[str] = (),
) -> Accumulation:
    """Gather gradients over a window of micro-steps and run `inner` once, on their mean.

    TODO
    """
    _validation.check_every_k(every_k)
    _validation.check_inner(inner)
    _validation.check_choice("normalize", normalize, ("mean", "sum", "ratio"))
    _validation.check_accumulator_dtype(accumulator_dtype)
    _validation.check_dtype("emit_dtype", emit_dtype)
    _validation.check_callable("should_skip_update_fn", should_skip_update_fn)
    _validation.check_names("average_extra_args", average_extra_args, ("weight", "flush"))

    always_closes = not callable(every_k) and every_k == 1
    tx = inner[0] if len(inner) == 1 else chain(*inner or [optax.identity()])
    tx = optax.with_extra_args_support(tx)
    nested = isinstance(tx, Accumulation)
    sum_dtype = functools.partial(_sum_dtype, accumulator_dtype=accumulator_dtype)

    def init_fn(params):
        if not always_closes:
            _validation.check_inexact(params, "params")
        sum_dtypes = [_real(sum_dtype(p)) for p in jax.tree.leaves(params)]
        weight_dtype = functools.reduce(jnp.promote_types, sum_dtypes, jnp.float32)
        averages = {name: jnp.zeros([], weight_dtype) for name in average_extra_args}
        return AccumulateState(
            micro_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            emitted=jnp.zeros([], jnp.bool_),
            num_skipped=jnp.zeros([], jnp.int32),
            window_weight=jnp.zeros([], weight_dtype),
            window_sum=(
                None
                if always_closes
                else jax.tree.map(lambda p: _zeros(p, sum_dtype(p)), params)
            ),
            extras={"averages": averages} if averages else {},
            # A weakly typed leaf would turn strong in the first update, and cost a second trace.
            inner_state=jax.tree.map(_strongly_typed, tx.init(params)),
        )

    def update_fn(gradients, state, params=None, *, weight=None, flush=False, **extra_args):
        if not always_closes:
            check_followers(update_fn.__code__)
        return step(gradients, state, params, extra_args, weight, flush)

    def flush_fn(like, state, params, extra_args):
        return step(like, state, params, extra_args, flush=True, is_micro_step=False)

    def step(gradients, state, params, extra_args, weight=None, flush=False, is_micro_step=True):
        """A micro-step, or only a flush: of its gradients just the dtypes count."""
        buffered = state.window_sum is not None
        if buffered:
            _validation.check_gradients(gradients, state.window_sum, accumulator_dtype is None)
        elif not always_closes:
            raise ValueError(
                "a state made with every_k=1 has no buffer to gather a window in, and every_k is"
                f" {every_k!r} now; carry it over with tx.init(params)._replace(gradient_step="
                "state.gradient_step, num_skipped=state.num_skipped,"
                " inner_state=state.inner_state)."
            )
        may_flush = flush is not False
        if may_flush:
            flush = _validation.scalar("flush", flush, jnp.bool_)

        # Gather: S, W and the sums of averaged extra args grow, unless the micro-step is rejected.
        total, window_weight = state.window_sum, state.window_weight
        averages = state.extras.get("averages", {})
        accepted, scale = False, 1
        if is_micro_step:
            w, scale, value_scale = _weights(weight, normalize, window_weight.dtype)
            accepted = weight is None or w > 0
            if should_skip_update_fn is not None:
                skip, _ = should_skip_update_fn(gradients, state.gradient_step, params)
                accepted &= ~_validation.check_skip(skip)
            # Selected, not multiplied, since 0 * NaN is NaN.
            select = lambda new, old: new if accepted is True else jnp.where(accepted, new, old)
            add = lambda s, x, scale: select(s + _times(x, scale, s.dtype), s)
            averages = {
                name: add(s, _averaged_arg(name, extra_args, s.dtype), value_scale)
                for name, s in averages.items()
            }
            window_weight = add(window_weight, w, 1)
            if buffered:
                total = jax.tree.map(lambda s, g: add(s, g, scale), total, gradients)
        if not buffered:
            total = jax.tree.map(lambda g: _times(g, scale, sum_dtype(g)), gradients)

        # Does the window close, and with what? Without a buffer both may be known at trace time.
        closes = flush if buffered else True
        if buffered and is_micro_step:
            k = every_k
            if callable(every_k):
                k = _validation.check_scheduled_k(every_k(state.gradient_step))
            closes |= state.micro_step + 1 >= k
        filled = window_weight > 0 if buffered else accepted
        updated = closes & filled
        # An accumulator inside has a window of its own to flush, even when this one is empty.
        runs = closes & (filled | flush) if nested and may_flush else updated

        # The reciprocal, since XLA keeps the result of a division in a buffer of its own.
        per_weight = 1 / jnp.where(filled, window_weight, 1)
        factor = jnp.ones_like(per_weight) if normalize == "sum" else per_weight

        def emit(total, inner_state):
            means = {name: value * per_weight for name, value in averages.items()}
            args = {**extra_args, **means}
            mean = jax.tree.map(
                lambda s, g: _times(s, factor, _dtype_like(emit_dtype or jnp.result_type(g), g)), total, gradients
            )
            if not nested:
                updates, new_state = tx.update(mean, inner_state, params, **args)
            else:
                handed_on = _HandedOn(window_weight, 1 / factor)
                updates, new_state = gate(
                    filled if may_flush else True,
                    lambda s: tx.update(mean, s, params, weight=handed_on, flush=flush, **args),
                    lambda s: tx.flush(mean, s, params, args),
                    inner_state,
                )
            return updates, jax.tree.map(_with_dtype_of, new_state, inner_state)

        updates, total, inner_state = emit_or_hold(
            runs, emit, total, state.inner_state, buffered
        )
        emitted = updated
        if nested and may_flush:
            emitted |= runs & has_updated(inner_state)
        reopen = lambda x: jnp.where(closes, jnp.zeros_like(x), x)
        return updates, AccumulateState(
            micro_step=reopen(state.micro_step + is_micro_step),
            gradient_step=_count(state.gradient_step, updated),
            emitted=jnp.asarray(emitted),
            num_skipped=_count(state.num_skipped, is_micro_step & jnp.logical_not(accepted)),
            window_weight=reopen(window_weight),
            window_sum=total,
            extras={"averages": jax.tree.map(reopen, averages)} if averages else {},
            inner_state=inner_state,
        )

    return Accumulation(
        init_fn,
        update_fn,
        flush_fn,
        lambda *transforms: accumulate(
            every_k,
            *inner,
            *transforms,
            normalize=normalize,
            accumulator_dtype=accumulator_dtype,
            emit_dtype=emit_dtype,
            should_skip_update_fn=should_skip_update_fn,
            average_extra_args=average_extra_args,
        ),
    )


def chain(*transforms: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optax.chain`, except that all after an `accumulate(k)` runs once per window.

    TODO
    """
    for index, transform in enumerate(transforms):
        if isinstance(transform, Accumulation):
            before, after = transforms[:index], transforms[index + 1 :]
            return _behind(before, transform.followed_by(*after) if after else transform)
    return optax.chain(*transforms)


def _behind(before: Sequence[optax.GradientTransformation], last: Accumulation) -> Accumulation:
    """`optax.chain(*before, last)`, whose flush goes to `last` alone."""
    chained = optax.chain(*before, last)

    def flush_fn(like, state, params, extra_args):
        updates, last_state = last.flush(like, state[-1], params, extra_args)
        return updates, (*state[:-1], last_state)

    return Accumulation(
        chained.init,
        chained.update,
        flush_fn,
        lambda *transforms: _behind(before, last.followed_by(*transforms)),
    )


def flush(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Close the open window now, on the mean of what it holds.

    TODO
    """
    if not isinstance(tx, Accumulation):
        raise TypeError(
            "tx must come from optax_accum.accumulate or optax_accum.chain to be flushed, got"
            f" {type(tx).__name__}; around it, close the window with a micro-step:"
            " tx.update(gradients, opt_state, params, flush=True)."
        )
    return tx.flush(params, opt_state, params, extra_args)


def has_updated(opt_state: optax.OptState) -> jax.Array:
    """Whether the last call of `update` or `flush` closed a window and updated.

    TODO
    """
    states = _accumulate_states(opt_state)
    if not states:
        raise ValueError(
            "opt_state must hold an AccumulateState, from accumulate or chain; got a"
            f" {type(opt_state).__name__} without one."
        )
    emitted = jnp.zeros([], jnp.bool_)
    for state in states:
        inside = _accumulate_states(state.inner_state)
        emitted |= state.emitted & has_updated(state.inner_state) if inside else state.emitted
    return emitted


def _accumulate_states(tree: Any) -> list[AccumulateState]:
    """The outermost accumulator states of a tree."""
    is_state = lambda node: isinstance(node, AccumulateState)
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_state) if is_state(leaf)]


def _weights(weight: Any, normalize: str, dtype: Any) -> tuple[Any, Any, Any]:
    """What a micro-step adds to W, and the factors of its gradient and its averaged args."""
    if weight is None:
        return 1, 1, 1
    if isinstance(weight, _HandedOn):
        return weight.weight, weight.scale, weight.weight
    weight = _validation.scalar("weight", weight, dtype)
    scale = 1 if normalize == "ratio" else weight
    return weight, scale, scale


def _averaged_arg(name: str, extra_args: dict[str, Any], dtype: Any) -> jax.Array:
    if name not in extra_args:
        raise ValueError(
            f"average_extra_args names {name!r}, so each update needs it: tx.update(gradients,"
            f" opt_state, params, {name}=...); got {sorted(extra_args) or 'no extra args'}."
        )
    return _validation.scalar(name, extra_args[name], dtype)


def _times(x: Any, factor: Any, dtype: Any) -> jax.Array:
    """`x * factor` in `dtype`, computed no narrower than float32."""
    wide = jnp.promote_types(jnp.promote_types(jnp.result_type(x), dtype), jnp.float32)
    x = jnp.asarray(x, wide)
    if not isinstance(factor, int):
        x = x * factor.astype(_real(wide))
    return x.astype(dtype)


def _sum_dtype(leaf: Any, accumulator_dtype: Any) -> Any:
    """The dtype of a leaf's sum: complex where the leaf is, else as asked, else float32 or wider."""
    dtype = jnp.result_type(leaf)
    return _dtype_like(accumulator_dtype or jnp.promote_types(_real(dtype), jnp.float32), dtype)


def _dtype_like(real_dtype: Any, like: Any) -> Any:
    """`real_dtype`, made complex where `like` is."""
    is_complex = jnp.issubdtype(jnp.result_type(like), jnp.complexfloating)
    return jnp.promote_types(real_dtype, jnp.complex64) if is_complex else jnp.dtype(real_dtype)


def _real(dtype: Any) -> Any:
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(dtype)


def _zeros(param: Any, dtype: Any) -> jax.Array:
    # A select on the parameter, unlike plain zeros, takes its sharding, under jit too.
    return jnp.where(jnp.zeros([], jnp.bool_), param, 0).astype(dtype)


def _count(count: jax.Array, happened: Any) -> jax.Array:
    return jnp.where(happened, optax.safe_increment(count), count)


def _with_dtype_of(new: Any, old: Any) -> jax.Array:
    return lax.convert_element_type(new, old.dtype)


def _strongly_typed(leaf: Any) -> jax.Array:
    return lax.convert_element_type(leaf, getattr(leaf, "dtype", jnp.result_type(leaf)))
