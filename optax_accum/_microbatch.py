"""A window inside one call: the gradient of a big batch, micro-batch by micro-batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _call_arguments, _call_validation, _jaxprs, _validation
from optax_accum._axis import check_carried, check_summable, varying_as
from optax_accum._canonical_conv import canonical_convolutions
from optax_accum._loss_function import LossFunction
from optax_accum._rounding import gathered_tree
from optax_accum._window import (
    dtype_like,
    factors,
    gathered,
    is_counted,
    sum_dtype_of,
    times,
    weight_dtype_of,
    weights,
    zeros,
)

_WITHOUT_A_NUMBER = " Name what has no number, being keyword-only, in batch_argnames."
_SHARED_OR_SPLIT = (
    "Pass batch_argnames={name!r} if it is, and batch_argnames=() if each micro-batch is to get all"
    " of it."
)


def microbatch_value_and_grad(
    loss_fn: Callable[..., Any],
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] | None = None,
    rng_argnums: int | Sequence[int] = (),
    carry_argnum: int | None = None,
    weight_fn: Callable[..., jax.typing.ArrayLike] | None = None,
    normalize: str = "mean",
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad(loss_fn)`, in the memory of a micro-batch.

    The batch is split into micro-batches, which run one after the other in a loop. With their
    losses lᵢ, gradients gᵢ and weights wᵢ, the loss is Σ wᵢlᵢ / Σ wᵢ and the gradient
    Σ wᵢgᵢ / Σ wᵢ: those of the big batch, where `loss_fn` is a mean over what `weight_fn` counts.

    Example j of the batch goes to micro-batch j modulo `num_microbatches`, so that a batch that is
    sharded over devices stays where it is. Where the examples do not divide, sizes differ by one.

    Args:
      loss_fn: Function of any arguments; returns a real scalar, or with `has_aux` `(loss, aux)`,
        with `carry_argnum` `(loss, carry)`, with both `(loss, (carry, aux))`.
      num_microbatches: At least 1; 1 compiles to `jax.value_and_grad(loss_fn)`.
      argnums: Arguments to differentiate with respect to.
      has_aux: Whether `loss_fn` returns an aux. An integer scalar in it is a count, of correct
        answers say: it comes back as the sum over the micro-batches that count, in its own dtype
        (as a float it would be a mean). Other scalars come back as the mean weighted as the loss is
        (Σ / Σ wᵢ under each `normalize`), a bool as float32. Arrays have the example axis first
        and come back in the order of the batch, also the rows of a micro-batch that does not count.
      batch_argnums: Arguments whose arrays have the example axis first.
      batch_argnames: The names of more such arguments, for those that have no number (keyword-only
        ones). They may be the whole batch: then the call need not have those of `batch_argnums`.
        If given, `()` too, all other keyword arguments are shared, whatever their length.
      rng_argnums: Arguments that are a PRNG key: each micro-batch gets one split from it, a single
        one the key itself.
      carry_argnum: Argument that `loss_fn` returns changed, for the next micro-batch: statistics
        of BatchNorm, say. A micro-batch that does not count leaves it as it was.
      weight_fn: `weight_fn(*batch arguments)`, the weight of a micro-batch, such as its tokens;
        those of `batch_argnums` come first. Default: its number of examples. As in `accumulate`, a
        weight of 0, below 0, infinite or NaN does not count; where none counts, loss and gradient
        are 0.
      normalize: As in `accumulate`: `"mean"`, `"sum"` (Σ wᵢgᵢ, and so for the loss) or `"ratio"`
        (Σ gᵢ / Σ wᵢ, for a loss that is a sum).
      accumulator_dtype: Dtype of the sums. Default: the gradient's, and float32 where that is
        narrower. In bfloat16 they are rounded at random, as in `accumulate`. The gradient comes
        back in the dtype of its argument.

    Returns:
      A function of the arguments of `loss_fn` that returns `(value, gradients)` as
      `jax.value_and_grad(loss_fn, argnums, has_aux)` does; `value` is what `loss_fn` returns.
      Each argument may be passed by its name: it has the number of its place in the signature of
      `loss_fn`, as in `jax.jit`. What has no role, such as `is_train=True` or a table, each
      micro-batch gets as it is. An array by keyword that is as long as the batch and has no role is
      an error, unless `batch_argnames` tells what is split.
      Inside `jax.shard_map` nothing is reduced: differentiate with respect to `varying(params,
      axis)` and reduce the result once, or hand it to `accumulate(k, axis_name=axis)`; a carry
      that each device changes in its own way must come in as `varying(carry, axis)`.

    Raises:
      ValueError: An argument breaks its rule; here, or while the function is traced.

    Example:
      >>> import jax.numpy as jnp
      >>> loss_fn = lambda w, x: jnp.mean((x - w) ** 2)
      >>> loss, gradient = microbatch_value_and_grad(loss_fn, 3)(1.0, jnp.arange(7.0))
      >>> print(loss, gradient)
      8.0 -4.0
      >>> print(*jax.value_and_grad(loss_fn)(1.0, jnp.arange(7.0)))
      8.0 -4.0

    References:
      Huang et al., 2019, GPipe (arXiv:1811.06965), section 2.2, for gradients accumulated over
      micro-batches.
    """
    _validation.check_function("loss_fn", loss_fn)
    _call_validation.check_count("num_microbatches", num_microbatches)
    _validation.check_callable("weight_fn", weight_fn)
    _validation.check_choice("normalize", normalize, ("mean", "sum", "ratio"))
    _validation.check_accumulator_dtype(accumulator_dtype)
    roles = _call_arguments.checked_roles(
        argnums, batch_argnums, rng_argnums, carry_argnum, batch_argnames
    )
    num = int(num_microbatches)
    is_over_examples = weight_fn is None and normalize == "mean"

    @functools.wraps(loss_fn)
    def microbatched(*args, **keywords):
        call = _call_arguments.arrange(loss_fn, roles, args, keywords, _WITHOUT_A_NUMBER)
        args, batch_at, carry_at = call.row, call.batch_at, call.carry_at
        _validation.check_enabled("accumulator_dtype", accumulator_dtype)
        for i in call.grad_at:
            _validation.check_not_overwritten(
                args[i],
                call.labels[i],
                _validation.OVERWRITE_AS_STATE.format(name="carry_argnum"),
            )
            _validation.check_inexact(args[i], call.labels[i])
        for i in call.rng_at:
            _call_validation.check_key(call.labels[i], args[i])
        size = _call_validation.check_batch([args[i] for i in batch_at])
        batch = [jax.tree.map(jnp.asarray, args[i]) for i in batch_at]
        _call_validation.check_enough_examples(num, size)
        remedy = _SHARED_OR_SPLIT if batch_argnames is None else None
        _call_arguments.check_shared_keywords(call.shared_keywords, size, remedy)
        grad_at = call.grad_at if isinstance(argnums, tuple | list) else call.grad_at[0]
        one = LossFunction(call.function, grad_at, has_aux, carry_at, "carry")
        run = canonical_convolutions(one.value_and_grad) if num > 1 else one.value_and_grad
        _call_validation.check_shares(num, batch)
        if num == 1 and is_over_examples:
            loss, (carry, aux), gradients = run(*args)
            return one.value(loss, carry, _join_aux(*_divide_aux(aux, size))), gradients
        keys = {i: split_key(args[i], num) for i in call.rng_at}
        carry = None if carry_at is None else jax.tree.map(jnp.asarray, args[carry_at])

        def with_arguments(batch, keys, carry):
            new = {**dict(zip(batch_at, batch, strict=True)), **keys, carry_at: carry}
            return tuple(new.get(i, x) for i, x in enumerate(args))

        of_arrays, arrays_of = _jaxprs.of_arrays(run, with_arguments(batch, {}, carry), {})
        run_once_traced = jax.jit(of_arrays)  # or each loop would trace loss_fn anew

        def micro_batch(i, carry, is_larger):
            """Its weight; what is averaged; its carry, and counts and rows of its aux."""
            part = functools.partial(part_of, i=i, num=num, is_larger=is_larger)
            parts = [jax.tree.map(part, x) for x in batch]
            new = with_arguments(parts, {at: key[i] for at, key in keys.items()}, carry)
            loss, (carry, aux), gradients = run_once_traced(*arrays_of(new, {}))
            part_size = _call_validation.check_batch(parts)
            counts, means, rows = _divide_aux(aux, part_size)
            if weight_fn is not None:
                weight = _call_validation.weight(weight_fn(*parts))
            else:  # its share, where it is known: then no leaf is divided at the end
                weight = part_size / size if is_over_examples else part_size
            return weight, (loss, means, gradients), (carry, counts, rows)

        weight_like, like, (carry_like, counts_like, _) = jax.eval_shape(
            lambda carry: micro_batch(0, carry, is_larger=False), carry
        )
        check_summable(like[2], weight_like)
        if carry_at is not None:
            check_carried(call.labels[carry_at], carry, carry_like)
        sum_dtypes = jax.tree.map(lambda g: sum_dtype_of(g, accumulator_dtype), like[2])
        wide = weight_dtype_of((sum_dtypes, jax.tree.map(lambda x: x.dtype, like[:2])))
        dtypes = (*jax.tree.map(lambda x: dtype_like(wide, x), like[:2]), sum_dtypes)

        def zero(x, dtype):
            """Of a scalar's type, on a mesh with explicit axes too, and times the weight's."""
            return varying_as(weight_like, varying_as(x, jnp.zeros([], dtype, device=x.sharding)))

        differentiated = jax.tree.leaves([args[i] for i in call.grad_at])
        zero_sums = jax.tree.map(zeros, differentiated, jax.tree.leaves(sum_dtypes))
        totals = (
            *jax.tree.map(zero, like[:2], dtypes[:2]),
            jax.tree.unflatten(jax.tree.structure(sum_dtypes), zero_sums),
        )
        no_counts = jax.tree.map(lambda x: zero(x, x.dtype), counts_like)

        def gather(state, i, is_larger):
            window_weight, total, counts, carry = state
            weight, new, (new_carry, new_counts, rows) = micro_batch(i, carry, is_larger)
            weight, scale, _ = weights(weight, normalize, wide)
            accepted = weight_fn is None or is_counted(weight, wide)
            # The bits of the loss tell calls apart, where sums are rounded at random.
            bits = lambda: lax.bitcast_convert_type(new[0].astype(jnp.float32), jnp.uint32)
            total = gathered_tree(total, new, scale, accepted, counters=lambda: (i, bits()))
            add = functools.partial(gathered, scale=1, accepted=accepted)
            counts = jax.tree.map(add, counts, new_counts)
            if accepted is not True:
                keep = lambda new, old: jnp.where(accepted, new, old)
                new_carry = jax.tree.map(keep, new_carry, carry)
            return (add(window_weight, weight), total, counts, new_carry), rows

        state, all_rows = (zero(weight_like, wide), totals, no_counts, carry), []
        for numbers, is_larger in by_size(size, num):
            body = functools.partial(gather, is_larger=is_larger)
            state, rows = lax.scan(body, state, numbers)
            all_rows.append(rows)
        window_weight, total, counts, carry = state

        factor, per_weight = factors(window_weight, window_weight > 0, normalize)
        if is_over_examples:
            factor = per_weight = 1
        scale = lambda factor: lambda s, x: times(s, factor, x.dtype)
        (loss, means, gradients) = (
            jax.tree.map(scale(f), s, x)
            for f, s, x in zip((factor, per_weight, factor), total, like, strict=True)
        )
        rows = jax.tree.map(in_order, *all_rows)
        return one.value(loss, carry, _join_aux(counts, means, rows)), gradients

    return microbatched


def split_key(key, num):
    """A key for each micro-batch; one alone keeps that of the call."""
    return jax.random.split(key, num) if num > 1 else key[None]


def by_size(size, num):
    """The numbers of the micro-batches of one size, and whether they are the larger ones."""
    larger = size % num
    groups = ((jnp.arange(larger), True), (jnp.arange(larger, num), False))
    return [group for group in groups if len(group[0])]


def part_of(x, i, num, is_larger):
    """Rows i, i + num, i + 2 num and so on: in place on each device that has a part of them."""
    whole = len(x) // num
    rows = x[: whole * num].reshape(whole, num, *x.shape[1:])
    part = lax.dynamic_index_in_dim(rows, i, axis=1, keepdims=False)
    if not is_larger:
        return part
    last = lax.dynamic_index_in_dim(x, whole * num + i, axis=0)
    return jnp.concatenate([part, last])


def in_order(*parts):
    """The rows of all micro-batches, stacked by size, as they lay in the batch."""
    if len(parts) == 1:
        return lax.collapse(parts[0].swapaxes(0, 1), 0, 2)
    larger, smaller = parts
    return jnp.concatenate([in_order(jnp.concatenate([larger[:, :-1], smaller])), larger[:, -1]])


def _divide_aux(aux, size):
    """Its counts; its other scalars, as floats; its arrays. None stands in for what is of another.

    The arrays have a row for each example.
    """
    _call_validation.check_aux(aux, size)
    is_count = lambda x: not jnp.ndim(x) and jnp.issubdtype(_validation.dtype_of(x), jnp.integer)

    def mean(x):
        if jnp.ndim(x) or is_count(x):
            return None
        is_float = jnp.issubdtype(_validation.dtype_of(x), jnp.inexact)
        return jnp.asarray(x) if is_float else jnp.asarray(x, jnp.float32)

    # A number of Python's gets a dtype, which it has after a sum too.
    count = lambda x: jnp.asarray(x, _validation.dtype_of(x)) if is_count(x) else None
    rows = lambda x: x if jnp.ndim(x) else None
    return tuple(jax.tree.map(of, aux) for of in (count, mean, rows))


def _join_aux(*parts):
    """The aux of its parts, in each of which None stands in for what is of another."""
    first = lambda *xs: next((x for x in xs if x is not None), None)
    return jax.tree.map(first, *parts, is_leaf=lambda x: x is None)
