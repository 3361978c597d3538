"""`assert_window_equivalence`: is a window of micro-batches the big batch?"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from optax_accum import _checks
from optax_accum._checks import PyTree
from optax_accum._in_call.batches import check_batch
from optax_accum.testing.diagnostics import likely_reason
from optax_accum.testing.gate_check import check_gate
from optax_accum.testing.gradients import compare, cut_window
from optax_accum.testing.model_adapter import model_of

_SHOWN = 3  # parameters in a message


def assert_window_equivalence(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    num_microbatches: int,
    *,
    has_aux: bool = False,
    model_state: PyTree = None,
    rng: jax.Array | None = None,
    weight_fn: Callable[..., jax.typing.ArrayLike] | None = None,
    normalize: str = "mean",
    micro_loss_fn: Callable[..., Any] | None = None,
    tx: optax.GradientTransformation | None = None,
) -> None:
    """Assert that a window of micro-batches gives the gradient of the big batch.

    The batch is cut along axis 0 into `num_microbatches` parts, whose gradients gᵢ an
    `accumulate(num_microbatches)` gathers with their weights wᵢ; Σ wᵢgᵢ / Σ wᵢ must be the gradient
    of the whole batch. Gradients are compared, not parameters after an update of Adam, which turns
    rounding into whole steps. How much is rounding, a change of the parameters in their last digit
    tells: what is smaller cannot be seen, so check a model in float32 before it goes to bfloat16.
    Where `loss_fn` is random, it is compared twice. First with each random number held at one
    value, where no noise hides a difference; it counts if examples of a batch see each other, or
    state that the last micro-batch changed. (Within a `while` loop numbers stay random.) Then with
    64 draws, which takes 64 times as long, and a difference that might be chance passes.

    A constant factor in `loss_fn` is in both gradients and cannot be seen. If the loss of your
    micro-steps is not the one of the big batch, pass it as `micro_loss_fn`.

    Args:
      loss_fn: `loss_fn(params[, model_state], batch[, rng]) -> loss`. With `has_aux` it returns
        `(loss, aux)`; with `model_state`, `(loss, new_state)`, or `(loss, (new_state, aux))`.
      params: A tree of arrays; or an `nnx.Module`, in the mode in which it trains (after `eval()` a
        BatchNorm passes), whose other state is carried along.
      batch: A tree of arrays with the example axis first.
      num_microbatches: k, from 1 to the number of examples. Parts may differ by one example.
      has_aux: Whether `loss_fn` returns something beside the loss.
      model_state: Linen's mutable collections, say `{"batch_stats": ...}`; each micro-batch
        receives what the one before it left.
      rng: A key for `loss_fn`; each micro-batch receives one of its own.
      weight_fn: `weight_fn(micro_batch) -> wᵢ`; default, its number of examples. Pass the same as
        `weight=` to `tx.update`.
      normalize: As in `accumulate`. Under `"ratio"` the summed loss is the `micro_loss_fn`.
      micro_loss_fn: The loss in the micro-steps; default `loss_fn`.
      tx: Your optimizer, around an `accumulate(num_microbatches)`: all that clips, counts or holds
        other state must stand behind the gate. Of extra args it gets `value` and those that it
        averages; one that needs others (`grad_fn`, `value_fn`) is an error that names them.

    Raises:
      AssertionError: The two differ by more than rounding. The message names the parameters and
        the likely reason: batch statistics, one random key for all micro-batches, a loss that is
        not a mean over examples, a common factor, or a part of `tx` outside the gate. Or
        `params` hold Flax's `_overwrite_with_gradient`, for which no mean of gradients is right.
      ValueError: An argument breaks its rule, or there is nothing to compare: a gradient that is
        zero everywhere, or not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> params, batch = {"w": jnp.ones(3)}, jnp.arange(24.0).reshape(8, 3)
      >>> assert_window_equivalence(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, batch, 4)
      >>> assert_window_equivalence(lambda p, x: jnp.sum((x @ p["w"]) ** 2), params, batch, 4)
      Traceback (most recent call last):
      AssertionError: ...
    """
    size = check_batch(batch)
    _check_num_microbatches(num_microbatches, size)
    _checks.check_choice("normalize", normalize, ("mean", "sum", "ratio"))
    if tx is not None and not isinstance(tx, optax.GradientTransformation):
        raise ValueError(f"tx must be an optax gradient transformation, got {tx!r}.")
    model = model_of(loss_fn, micro_loss_fn or loss_fn, params, model_state, has_aux, rng)
    _checks.check_not_overwritten(
        model.params,
        "params",
        f"{_checks.OVERWRITE_BESIDE_TX} For a check of the rest, let loss_fn hold them fixed.",
        AssertionError,
    )
    _checks.check_inexact(model.params, "params")
    window = cut_window(batch, num_microbatches, weight_fn, normalize)

    with jax.default_matmul_precision("highest"):  # a card rounds float32 products otherwise
        comparison = compare(model, window)
        faults = comparison.faults()
        reason = likely_reason(comparison, batch) if faults else ""
    if faults:
        constant = "" if comparison.model is model else ", with random numbers held at one value"
        raise AssertionError(
            f"a window of {num_microbatches} micro-batches does not give the gradient of its batch"
            f" of {size}{constant}. {len(faults)} of {len(comparison.names)} parameters differ:\n"
            + "\n".join(faults[:_SHOWN])
            + f"\nLikely: {reason}"
        )
    if tx is not None:
        check_gate(tx, model.params, comparison.micro_trees, num_microbatches, normalize)


def _check_num_microbatches(value: Any, num_examples: int) -> None:
    """Require an int from 1 to the number of examples."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or not 1 <= value <= num_examples:
        raise ValueError(
            f"num_microbatches must be an int from 1 to the {num_examples} examples of the batch,"
            f" got {value!r}."
        )
