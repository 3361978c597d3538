"""A window inside one call: the gradient of a big batch, micro-batch by micro-batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _call_validation, _jaxprs, _validation
from optax_accum._axis import varying_as
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
)


def microbatch_value_and_grad(
    loss_fn: Callable[..., Any],
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
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
      has_aux: Whether `loss_fn` returns an aux. Its scalars come back as floats, the mean weighted
        as the loss is (Σ / Σ wᵢ under each `normalize`); its arrays with the example axis first in
        the order of the batch, also the rows of a micro-batch that does not count.
      batch_argnums: Arguments whose arrays have the example axis first.
      rng_argnums: Arguments that are a PRNG key: each micro-batch gets one split from it, a single
        one the key itself.
      carry_argnum: Argument that `loss_fn` returns changed, for the next micro-batch: statistics
        of BatchNorm, say. A micro-batch that does not count leaves it as it was.
      weight_fn: `weight_fn(*batch arguments)`, the weight of a micro-batch, such as its tokens.
        Default: its number of examples. As in `accumulate`, a weight of 0, below 0, infinite or
        NaN does not count; where none counts, loss and gradient are 0.
      normalize: As in `accumulate`: `"mean"`, `"sum"` (Σ wᵢgᵢ, and so for the loss) or `"ratio"`
        (Σ gᵢ / Σ wᵢ, for a loss that is a sum).
      accumulator_dtype: Dtype of the sums. Default: the gradient's, and float32 where that is
        narrower. In bfloat16 they are rounded at random, as in `accumulate`. The gradient comes
        back in the dtype of its argument.

    Returns:
      A function of the arguments of `loss_fn`, by position, that returns `(value, gradients)` as
      `jax.value_and_grad(loss_fn, argnums, has_aux)` does; `value` is what `loss_fn` returns.
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
    grad_at, batch_at, rng_at = _call_validation.argument_numbers(
        argnums, batch_argnums, rng_argnums, carry_argnum
    )
    one = LossFunction(loss_fn, argnums, has_aux, carry_argnum, "carry")
    num = int(num_microbatches)
    run = canonical_convolutions(one.value_and_grad) if num > 1 else one.value_and_grad
    is_over_examples = weight_fn is None and normalize == "mean"

    def microbatched(*args):
        _call_validation.check_has_arguments(args, (*grad_at, *batch_at, *rng_at), carry_argnum)
        _validation.check_enabled("accumulator_dtype", accumulator_dtype)
        for i in grad_at:
            _validation.check_inexact(args[i], f"argument {i}")
        for i in rng_at:
            _call_validation.check_key(i, args[i])
        batch = [jax.tree.map(jnp.asarray, args[i]) for i in batch_at]
        size = _call_validation.check_batch(batch)
        _call_validation.check_enough_examples(num, size)
        _call_validation.check_shares(num, batch)
        if num == 1 and is_over_examples:
            loss, (carry, aux), gradients = run(*args)
            return one.value(loss, carry, _join_aux(*_divide_aux(aux, size))), gradients
        keys = {i: split_key(args[i], num) for i in rng_at}
        carry = None if carry_argnum is None else jax.tree.map(jnp.asarray, args[carry_argnum])

        def with_arguments(batch, keys, carry):
            new = {**dict(zip(batch_at, batch, strict=True)), **keys, carry_argnum: carry}
            return tuple(new.get(i, x) for i, x in enumerate(args))

        of_arrays, arrays_of = _jaxprs.of_arrays(run, with_arguments(batch, {}, carry), {})
        run_once_traced = jax.jit(of_arrays)  # or each loop would trace loss_fn anew

        def micro_batch(i, carry, is_larger):
            """Its weight; what is summed; its carry and what is not summed of its aux."""
            part = functools.partial(part_of, i=i, num=num, is_larger=is_larger)
            parts = [jax.tree.map(part, x) for x in batch]
            new = with_arguments(parts, {at: key[i] for at, key in keys.items()}, carry)
            loss, (carry, aux), gradients = run_once_traced(*arrays_of(new, {}))
            part_size = _call_validation.check_batch(parts)
            scalars, rows = _divide_aux(aux, part_size)
            if weight_fn is not None:
                weight = _call_validation.weight(weight_fn(*parts))
            else:  # its share, where it is known: then no leaf is divided at the end
                weight = part_size / size if is_over_examples else part_size
            return weight, (loss, scalars, gradients), (carry, rows)

        weight_like, like, _ = jax.eval_shape(
            lambda carry: micro_batch(0, carry, is_larger=False), carry
        )
        sum_dtypes = jax.tree.map(lambda g: sum_dtype_of(g, accumulator_dtype), like[2])
        wide = weight_dtype_of((sum_dtypes, jax.tree.map(lambda x: x.dtype, like[:2])))
        dtypes = (*jax.tree.map(lambda x: dtype_like(wide, x), like[:2]), sum_dtypes)
        # The sharding is that of the type, where a mesh has explicit axes; else there is none.
        zero = lambda x, dtype: varying_as(x, jnp.zeros(x.shape, dtype, device=x.sharding))
        zeros = jax.tree.map(zero, like, dtypes)

        def gather(state, i, is_larger):
            window_weight, total, carry = state
            weight, new, (new_carry, rows) = micro_batch(i, carry, is_larger)
            weight, scale, _ = weights(weight, normalize, wide)
            accepted = weight_fn is None or is_counted(weight, wide)
            # The bits of the loss tell calls apart, where sums are rounded at random.
            bits = lambda: lax.bitcast_convert_type(new[0].astype(jnp.float32), jnp.uint32)
            total = gathered_tree(total, new, scale, accepted, counters=lambda: (i, bits()))
            if accepted is not True:
                keep = lambda new, old: jnp.where(accepted, new, old)
                new_carry = jax.tree.map(keep, new_carry, carry)
            return (gathered(window_weight, weight, 1, accepted), total, new_carry), rows

        state, all_rows = (zero(weight_like, wide), zeros, carry), []
        for numbers, is_larger in by_size(size, num):
            body = functools.partial(gather, is_larger=is_larger)
            state, rows = lax.scan(body, state, numbers)
            all_rows.append(rows)
        window_weight, total, carry = state

        factor, per_weight = factors(window_weight, window_weight > 0, normalize)
        if is_over_examples:
            factor = per_weight = 1
        scale = lambda factor: lambda s, x: times(s, factor, x.dtype)
        (loss, scalars, gradients) = (
            jax.tree.map(scale(f), s, x)
            for f, s, x in zip((factor, per_weight, factor), total, like, strict=True)
        )
        rows = jax.tree.map(in_order, *all_rows)
        return one.value(loss, carry, _join_aux(scalars, rows)), gradients

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
    """Scalars, as floats, and arrays with a row for each example; None in place of the others."""
    _call_validation.check_aux(aux, size)
    as_float = lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
    scalars = jax.tree.map(lambda x: None if jnp.ndim(x) else as_float(jnp.asarray(x)), aux)
    return scalars, jax.tree.map(lambda x: x if jnp.ndim(x) else None, aux)


def _join_aux(scalars, rows):
    is_none = lambda x: x is None
    return jax.tree.map(lambda s, r: r if s is None else s, scalars, rows, is_leaf=is_none)
