"""Plan the number of micro-batches by compiling programs, without running them."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_accum import _checks
from optax_accum._checks import PyTree
from optax_accum._devices.axis import is_manual
from optax_accum._in_call import memory
from optax_accum._in_call.batches import check_batch, examples_on_each_device
from optax_accum._in_call.checkpointing import checkpoint_segments

LossFn: TypeAlias = Callable[[Any, Any], jax.Array]

_AMPLE = 0.8  # of the budget: below this, the batch could be larger


class PlanRow(NamedTuple):
    """The memory that one way to compute a step takes, in bytes on one device."""

    method: str  # "as it is", "checkpoint" or "bfloat16"
    num_microbatches: int
    microbatch_size: int  # examples
    params: int  # bytes, and so for the next four
    opt_state: int
    batch: int  # all of it
    accumulator: int  # the sums of the gradients; 0 for one micro-batch
    temporaries: int  # all else: activations, gradients
    fits: bool  # peak <= memory_budget

    @property
    def peak(self) -> int:
        """Bytes on one device: the sum of the five."""
        return self.params + self.opt_state + self.batch + self.accumulator + self.temporaries

    def __str__(self) -> str:
        return f"{self.num_microbatches} x {self.microbatch_size} ({self.method})"


class MicrobatchPlan(NamedTuple):
    """The result of `plan_microbatches`; `print` shows it as a table."""

    num_microbatches: int  # of loss_fn as it is, and so for the next two
    microbatch_size: int  # examples
    fits: bool
    memory_budget: int  # bytes
    advice: str
    rows: tuple[PlanRow, ...]  # all that was compiled, in that order

    def __str__(self) -> str:
        names = ("params", "opt_state", "batch", "accumulator", "temporaries", "peak")
        lines = [
            f"| method | k x micro-batch | {' | '.join(names)} |"
            f" fits {memory.readable(self.memory_budget)} |",
            "|---" * (len(names) + 3) + "|",
        ]
        for row in self.rows:
            sizes = " | ".join(memory.readable(getattr(row, name)) for name in names)
            split = f"{row.num_microbatches} x {row.microbatch_size}"
            lines.append(f"| {row.method} | {split} | {sizes} | {'yes' if row.fits else 'no'} |")
        return "\n".join([*lines, "", self.advice])


def plan_microbatches(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    batch: Any,
    *,
    memory_budget: float = 0.8,
    tx: optax.GradientTransformation | None = None,
) -> MicrobatchPlan:
    """Find the number of micro-batches that a batch needs to fit into memory.

    A step consists of `microbatch_value_and_grad(loss_fn, k)` and the update of `tx`. It is
    compiled for one divisor k of the batch after the other, the smallest first, until it fits:

        peak = params + opt_state + batch + accumulator + temporaries

    Nothing runs, and shapes are enough. If more than one micro-batch is needed, two other ways to
    save memory are tried, with smaller and smaller k until one does not fit (if no k fits, from the
    largest down). `"checkpoint"` is `checkpoint_segments(loss_fn)`. `"bfloat16"` casts parameters
    and batch inside `loss_fn`, which changes the loss by rounding (it has no effect where a layer
    has a dtype of its own and casts back: leave Flax's `dtype=None`). Each row is one compilation.

    The bytes are those that XLA reserves on the default device's platform, on one device if arrays
    are sharded. `accumulate(k)`, whose micro-batches come one at a time, holds a micro-batch in
    place of the batch, and keeps its accumulator between calls.

    Args:
      loss_fn: `loss_fn(params, batch)`, the mean loss; a real scalar.
      params: The parameters: arrays, or `jax.ShapeDtypeStruct`s (with a `NamedSharding`, where they
        will be sharded).
      batch: The whole batch, the same way; the example axis comes first.
      memory_budget: Bytes; or, up to 1, a fraction of what JAX may allocate on the device, where
        the device reports that (three quarters of a card, unless set otherwise; a CPU does not
        report it, and needs bytes here).
      tx: The optimizer; of extra args it is given `value`, the loss (so not `optax.lbfgs` with a
        line search). Default: none, so that the step is loss and gradient alone.

    Returns:
      The plan. `num_microbatches`, `microbatch_size` and `fits` are those of `loss_fn` as it is:
      of the smallest k that fits. If none fits, they are those of the k with the lowest peak, or of
      the largest k if the arguments alone are too large. `advice` says in words which k fit and
      with which method, whether the batch could be larger, or what comes nearest if nothing fits.

    Raises:
      ValueError: An argument breaks its rule. For example, the budget is smaller than parameters,
        optimizer state and one example, or is a fraction and the device does not report its memory.
      NotImplementedError: The platform does not report the memory of a program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss_fn = lambda w, x: jnp.mean(jnp.sin(jnp.sin(x @ w) @ w.T))
      >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
      >>> plan = plan_microbatches(loss_fn, w, x, memory_budget=800_000)
      >>> plan.num_microbatches, plan.microbatch_size, plan.fits
      (4, 256, True)
    """
    _checks.check_function("loss_fn", loss_fn)
    if tx is not None and not isinstance(tx, optax.GradientTransformation):
        raise ValueError(f"tx must be an optax gradient transformation or None, got {tx!r}.")
    if is_manual():
        raise ValueError(
            "plan_microbatches must be called outside jax.shard_map, since it compiles a program"
            " of its own. Pass it shapes with their shardings, or the shapes of one device's part."
        )
    _checks.check_not_overwritten(params, "params", _checks.HOLD_OVERWRITTEN.format(name="loss_fn"))
    _checks.check_inexact(params, "params")
    size = check_batch(batch)
    budget = memory.budget_in_bytes(memory_budget)
    params, batch = jax.tree.map(memory.shape_of, (params, batch))
    step = _Step(loss_fn, tx, params, memory.state_shapes(tx, params), batch, size, budget)
    step.check_budget()
    plain = _through_first(lambda row: row.fits, step.rows("as it is", step.divisors()))
    chosen = plain[-1] if plain[-1].fits else min(plain, key=lambda row: row.peak)
    fewer = [k for k in step.divisors() if k < chosen.num_microbatches or not chosen.fits]
    others = []
    for method in ("checkpoint", "bfloat16"):
        rows = step.rows(method, reversed(fewer))
        others += _through_first(lambda row: not row.fits, rows)
    return MicrobatchPlan(
        num_microbatches=chosen.num_microbatches,
        microbatch_size=chosen.microbatch_size,
        fits=chosen.fits,
        memory_budget=budget,
        advice=_advice(chosen, others, budget),
        rows=(*plain, *others),
    )


class _Step(NamedTuple):
    """The step to plan for."""

    loss_fn: LossFn
    tx: optax.GradientTransformation | None
    params: PyTree  # of shapes, and so the next two
    opt_state: optax.OptState
    batch: PyTree
    size: int  # examples in the batch
    budget: int  # bytes

    def argument_bytes(self) -> tuple[int, int, int]:
        """Bytes of parameters, optimizer state and batch."""
        return (
            memory.bytes_of(self.params),
            memory.bytes_of(self.opt_state),
            memory.bytes_of(self.batch),
        )

    def check_budget(self) -> None:
        """Require a budget for parameters, optimizer state and one example."""
        params, opt_state, batch = self.argument_bytes()
        least = params + opt_state + batch // self.size
        if self.budget < least:
            raise ValueError(
                "memory_budget must hold the parameters, the optimizer state and one example,"
                f" {memory.readable(least)}; got {memory.readable(self.budget)}."
            )

    def divisors(self) -> list[int]:
        """The numbers of micro-batches to try, the smallest first."""
        shares = map(examples_on_each_device, jax.tree.leaves(self.batch))
        common = math.gcd(self.size, *filter(None, shares))
        divisors = [k for k in range(1, common + 1) if not common % k]
        # If the arguments alone are too large, no k fits, and the largest is the nearest.
        return divisors[-1:] if sum(self.argument_bytes()) > self.budget else divisors

    def rows(self, method: str, ks: Iterable[int]) -> Iterator[PlanRow]:
        """Compile the step for each k, one after the other, when the caller takes the next row."""
        for k in ks:
            yield self._row(method, k)

    def _row(self, method: str, k: int) -> PlanRow:
        params, opt_state, batch = self.argument_bytes()
        beside = memory.bytes_beside_arguments(
            _METHODS[method](self.loss_fn), k, self.tx, self.params, self.opt_state, self.batch
        )
        sums = memory.bytes_of(memory.sum_shapes(self.params)) if k > 1 else 0
        sums = min(sums, beside)  # XLA drops the sum of what has no gradient
        return PlanRow(
            method=method,
            num_microbatches=k,
            microbatch_size=self.size // k,
            params=params,
            opt_state=opt_state,
            batch=batch,
            accumulator=sums,
            temporaries=beside - sums,
            fits=params + opt_state + batch + beside <= self.budget,
        )


def _through_first(is_last: Callable[[PlanRow], bool], rows: Iterable[PlanRow]) -> list[PlanRow]:
    """The rows through the first for which `is_last` holds; those after it are not compiled."""
    taken = []
    for row in rows:
        taken.append(row)
        if is_last(row):
            break
    return taken


def _as_it_is(loss_fn: LossFn) -> LossFn:
    return loss_fn


def _in_bfloat16(loss_fn: LossFn) -> LossFn:
    """`loss_fn` of parameters and batch in bfloat16."""

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def narrow(params: PyTree, batch: PyTree) -> jax.Array:
        return loss_fn(*jax.tree.map(cast, (params, batch)))

    return narrow


_METHODS: dict[str, Callable[[LossFn], LossFn]] = {
    "as it is": _as_it_is,
    "checkpoint": checkpoint_segments,
    "bfloat16": _in_bfloat16,
}


def _advice(chosen: PlanRow, others: list[PlanRow], budget: int) -> str:
    """Say in words what fits, or what comes nearest if nothing does."""
    if chosen.fits and chosen.num_microbatches == 1:
        share = chosen.peak / budget
        advice = f"The whole batch fits: no accumulation is needed. It takes {share:.0%}"
        return f"{advice} of the budget{', so the batch could be larger' * (share < _AMPLE)}."
    fewest = {row.method: row for row in others if row.fits}  # the last of a method, if any
    others_that_fit = ", ".join(map(str, fewest.values()))
    if chosen.fits:
        advice = f"{chosen.num_microbatches} micro-batches of {chosen.microbatch_size} fit"
        return f"{advice}; so do {others_that_fit}." if fewest else f"{advice}."
    if fewest:
        return f"No number of micro-batches fits as it is; what fits is {others_that_fit}."
    nearest = min((chosen, *others), key=lambda row: row.peak)
    advice = f"Nothing fits. The nearest is {nearest}, which takes {memory.readable(nearest.peak)}."
    arguments = nearest.params + nearest.opt_state + nearest.batch
    if arguments > budget:
        advice += (
            f" Parameters, optimizer state and batch alone take {memory.readable(arguments)}:"
            " bring the micro-batches one by one, with accumulate(k)."
        )
    return advice
