"""A window inside one call: the gradient of a big batch, micro-batch by micro-batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum import _checks
from optax_accum._checks import PyTree
from optax_accum._in_call import arguments, aux_parts
from optax_accum._in_call.batches import check_batch, check_enough_examples, examples_on_each_device
from optax_accum._in_call.loop import MicroBatchLoop, ValueAndGrad, Weighting
from optax_accum._in_call.loss_function import LossFunction
from optax_accum._in_call.split import split_key

_WITHOUT_A_NUMBER = " Name what has no number, a keyword-only argument, in batch_argnames."
_SHARED_OR_SPLIT = (
    "Pass batch_argnames={name!r} if it is, and batch_argnames=() if each micro-batch is to get all"
    " its rows."
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
    """Make `jax.value_and_grad(loss_fn)` run in the memory of a micro-batch.

    The batch is split into micro-batches, which run one after the other in a loop. With their
    losses lᵢ, gradients gᵢ and weights wᵢ, the loss is Σ wᵢlᵢ / Σ wᵢ and the gradient is
    Σ wᵢgᵢ / Σ wᵢ. They are the loss and the gradient of the big batch if `loss_fn` is a mean over
    what `weight_fn` counts.

    Example j of the batch goes to micro-batch j modulo `num_microbatches`, so that a batch that is
    sharded over devices stays where it is. If `num_microbatches` does not divide the number of
    examples, the sizes of micro-batches differ by one.

    Args:
      loss_fn: Function of any arguments; returns a real scalar, or with `has_aux` `(loss, aux)`,
        with `carry_argnum` `(loss, carry)`, with both `(loss, (carry, aux))`.
      num_microbatches: At least 1; 1 compiles to `jax.value_and_grad(loss_fn)`.
      argnums: Arguments to differentiate with respect to.
      has_aux: Whether `loss_fn` returns an aux. An integer scalar in it is a count, of correct
        answers say: it comes back as the sum over the accepted micro-batches, in its own dtype (as
        a float it would be a mean). Other scalars come back as the mean weighted as the loss is
        (Σ / Σ wᵢ under each `normalize`), a bool as float32. Arrays have the example axis first
        and come back in the order of the batch, with the rows of rejected micro-batches.
      batch_argnums: Arguments whose arrays have the example axis first.
      batch_argnames: The names of more such arguments, for those that have no number (keyword-only
        ones). If they are the whole batch, the call need not have those of `batch_argnums`. If
        given, `()` too, all other keyword arguments are shared, whatever their length.
      rng_argnums: Arguments that are a PRNG key. Each key is split, one for each micro-batch; with
        one micro-batch it stays as it is.
      carry_argnum: Argument of which `loss_fn` returns a new value for the next micro-batch, such
        as the statistics of BatchNorm. A rejected micro-batch does not change it.
      weight_fn: `weight_fn(*batch arguments)`, the weight of a micro-batch, such as its tokens;
        those of `batch_argnums` come first. Default: its number of examples. As in `accumulate`, a
        micro-batch whose weight is 0, negative, infinite or NaN is rejected. If all are rejected,
        loss and gradient are 0.
      normalize: As in `accumulate`: `"mean"`, `"sum"` (Σ wᵢgᵢ, and so for the loss) or `"ratio"`
        (Σ gᵢ / Σ wᵢ, for a loss that is a sum).
      accumulator_dtype: Dtype of the sums. Default: the gradient's, and float32 where that is
        narrower. Sums in bfloat16 are rounded at random, as in `accumulate`. The gradient has the
        dtype of its argument.

    Returns:
      A function of the arguments of `loss_fn` that returns `(value, gradients)` as
      `jax.value_and_grad(loss_fn, argnums, has_aux)` does; `value` is what `loss_fn` returns.
      Each argument may be passed by its name: it has the number of its place in the signature of
      `loss_fn`, as in `jax.jit`. Each micro-batch receives arguments without a role, such as
      `is_train=True` or a table, unchanged. An array by keyword that is as long as the batch and
      has no role is an error, unless `batch_argnames` names what is split.
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
    _checks.check_function("loss_fn", loss_fn)
    _checks.check_count("num_microbatches", num_microbatches)
    _checks.check_callable("weight_fn", weight_fn)
    _checks.check_choice("normalize", normalize, ("mean", "sum", "ratio"))
    _checks.check_accumulator_dtype(accumulator_dtype)
    roles = arguments.checked_roles(
        argnums, batch_argnums, rng_argnums, carry_argnum, batch_argnames
    )
    num = int(num_microbatches)
    weighting = Weighting(weight_fn, normalize, accumulator_dtype)
    remedy = _SHARED_OR_SPLIT if batch_argnames is None else None

    @functools.wraps(loss_fn)
    def microbatched(*args: Any, **keywords: Any) -> ValueAndGrad:
        call = arguments.arrange(loss_fn, roles, args, keywords, _WITHOUT_A_NUMBER)
        _checks.check_enabled("accumulator_dtype", accumulator_dtype)
        _check_arguments(call)
        batch = [call.row[at] for at in call.batch_at]
        size = check_batch(batch)
        batch = [jax.tree.map(jnp.asarray, argument) for argument in batch]
        check_enough_examples(num, size)
        arguments.check_shared_keywords(call.shared_keywords, size, remedy)
        _check_shares(num, batch)
        grad_at = call.grad_at if isinstance(argnums, tuple | list) else call.grad_at[0]
        loss = LossFunction(call.function, grad_at, has_aux, call.carry_at, "carry")
        if num == 1 and weighting.is_over_examples:
            return _of_whole_batch(loss, call, size)
        return MicroBatchLoop(
            call=call,
            loss_fn=loss,
            num=num,
            size=size,
            batch=batch,
            keys={at: split_key(call.row[at], num) for at in call.rng_at},
            carry=_first_carry(call),
            weighting=weighting,
        ).run()

    return microbatched


def _of_whole_batch(loss_fn: LossFunction, call: arguments.Call, size: int) -> ValueAndGrad:
    """The result of a single micro-batch, in a mean over examples."""
    loss, (carry, aux), gradients = loss_fn.value_and_grad(*call.row)
    aux = aux_parts.joined(aux_parts.divided(aux, size))
    return loss_fn.value(loss, carry, aux), gradients


def _first_carry(call: arguments.Call) -> PyTree:
    """The carry that the first micro-batch receives."""
    return None if call.carry_at is None else jax.tree.map(jnp.asarray, call.row[call.carry_at])


def _check_arguments(call: arguments.Call) -> None:
    """Require parameters that have gradients to sum, and keys."""
    for at in call.grad_at:
        _checks.check_not_overwritten(
            call.row[at],
            call.labels[at],
            _checks.OVERWRITE_AS_STATE.format(name="carry_argnum"),
        )
        _checks.check_inexact(call.row[at], call.labels[at])
    for at in call.rng_at:
        _check_key(call.labels[at], call.row[at])


def _check_key(label: str, key: Any) -> None:
    """Require one PRNG key, typed or of uint32."""
    dtype = getattr(key, "dtype", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_old = dtype == jnp.uint32 and jnp.ndim(key) == 1
    if not is_old and not (is_new and not jnp.ndim(key)):
        raise ValueError(f"{label} must be one PRNG key, got {_checks.describe(key)}.")


def _check_shares(num_microbatches: int, batch: PyTree) -> None:
    """Require that each device has an equal part of each micro-batch, if types shard the batch."""
    for path, leaf in tree_flatten_with_path(batch)[0]:
        share = examples_on_each_device(leaf)
        if share and share % num_microbatches:
            raise ValueError(
                f"num_microbatches must divide the examples that each device has, {share} here, of"
                f" a batch that is sharded over explicit axes of a mesh (batch{keystr(path)}); got"
                f" {num_microbatches}."
            )
