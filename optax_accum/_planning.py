"""Which k does a batch need? Answered by the compiler, before anything runs."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum import _call_validation, _validation
from optax_accum._axis import is_manual
from optax_accum._checkpoint_segments import checkpoint_segments
from optax_accum._microbatch import microbatch_value_and_grad
from optax_accum._window import sum_dtype_of

_AMPLE = 0.8  # of the budget: beneath it, the batch could be larger


class PlanRow(NamedTuple):
    """What one way to compute a step takes, in bytes on one device."""

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
    """The answer of `plan_microbatches`; `print` shows it as a table."""

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
            f" fits {_size(self.memory_budget)} |",
            "|---" * (len(names) + 3) + "|",
        ]
        for row in self.rows:
            sizes = " | ".join(_size(getattr(row, name)) for name in names)
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

    A step, of `microbatch_value_and_grad(loss_fn, k)` and the update of `tx`, is compiled for one
    divisor k of the batch after the other, the smallest first, until its peak fits:

        peak = params + opt_state + batch + accumulator + temporaries

    Nothing is run, and shapes are enough. Where more than one micro-batch is needed, two other
    ways to save memory are tried, with the next smaller k and the next, until one does not fit
    (where no k fits, from the largest down): `"checkpoint"` is `checkpoint_segments(loss_fn)`, and
    `"bfloat16"` casts parameters and batch inside `loss_fn`, which gives another loss, to rounding
    (and nothing where a layer has a dtype of its own and casts back: leave Flax's `dtype=None`).
    Each row is one compilation.

    The bytes are those that XLA reserves on the default device's platform, on one device where
    arrays are sharded. `accumulate(k)`, whose micro-batches come one at a time, holds a micro-batch
    in place of the batch, and its accumulator between calls too.

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
      The plan. `num_microbatches`, `microbatch_size` and `fits` are of `loss_fn` as it is: the
      smallest k that fits, else the one of the lowest peak (where the arguments alone are too
      large, the largest). `advice` says in words what fits, in
      which way; that the batch fits whole, or could be larger; or what comes nearest.

    Raises:
      ValueError: An argument breaks its rule: the budget is smaller than parameters, optimizer
        state and one example, say, or a fraction where the device does not report its memory.
      NotImplementedError: The platform does not report what a program takes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss_fn = lambda w, x: jnp.mean(jnp.sin(jnp.sin(x @ w) @ w.T))
      >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
      >>> plan = plan_microbatches(loss_fn, w, x, memory_budget=800_000)
      >>> plan.num_microbatches, plan.microbatch_size, plan.fits
      (4, 256, True)
    """
    _validation.check_function("loss_fn", loss_fn)
    if tx is not None and not isinstance(tx, optax.GradientTransformation):
        raise ValueError(f"tx must be an optax gradient transformation or None, got {tx!r}.")
    if is_manual():
        raise ValueError(
            "plan_microbatches must be called outside jax.shard_map, since it compiles a program"
            " of its own: pass shapes there, with their shardings or of one device's part."
        )
    _validation.check_not_overwritten(
        params, "params", _validation.HOLD_OVERWRITTEN.format(name="loss_fn")
    )
    _validation.check_inexact(params, "params")
    size = _call_validation.check_batch(batch)
    budget = _budget(memory_budget)
    params, batch = jax.tree.map(_struct, (params, batch))
    opt_state = _state_of(tx, params)
    least = _bytes((params, opt_state)) + _bytes(batch) // size
    if budget < least:
        raise ValueError(
            "memory_budget must hold the parameters, the optimizer state and one example,"
            f" {_size(least)}; got {_size(budget)}."
        )

    argument_bytes = _bytes(params), _bytes(opt_state), _bytes(batch)

    def compiled(method, k):
        beside = _beside_arguments(_METHODS[method](loss_fn), k, tx, params, opt_state, batch)
        sums = _bytes(jax.tree.map(_sum_of, params)) if k > 1 else 0
        sums = min(sums, beside)  # XLA drops the sum of what has no gradient
        fits = sum(argument_bytes) + beside <= budget
        return PlanRow(method, k, size // k, *argument_bytes, sums, beside - sums, fits)

    shares = map(_call_validation.examples_on_each_device, jax.tree.leaves(batch))
    size_of_all = math.gcd(size, *filter(None, shares))
    divisors = [k for k in range(1, size_of_all + 1) if not size_of_all % k]
    if sum(argument_bytes) > budget:  # then no k fits, and the largest is the nearest
        divisors = divisors[-1:]
    plain = _take_through(lambda row: row.fits, (compiled("as it is", k) for k in divisors))
    chosen = plain[-1] if plain[-1].fits else min(plain, key=lambda row: row.peak)
    fewer = [k for k in divisors if k < chosen.num_microbatches or not chosen.fits]
    others = []
    for method in ("checkpoint", "bfloat16"):
        rows = (compiled(method, k) for k in reversed(fewer))
        others += _take_through(lambda row: not row.fits, rows)
    split = chosen.num_microbatches, chosen.microbatch_size, chosen.fits
    return MicrobatchPlan(*split, budget, _advice(chosen, others, budget), (*plain, *others))


def _take_through(is_last, rows):
    """The rows up to the first that is the last."""
    taken = []
    for row in rows:
        taken.append(row)
        if is_last(row):
            break
    return taken


def _in_bfloat16(loss_fn):
    def cast(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.bfloat16) if is_float else x

    return lambda params, batch: loss_fn(*jax.tree.map(cast, (params, batch)))


_METHODS = {
    "as it is": lambda loss_fn: loss_fn,
    "checkpoint": checkpoint_segments,
    "bfloat16": _in_bfloat16,
}


def _beside_arguments(loss_fn, k, tx, params, opt_state, batch):
    """Bytes on one device that a step takes beside its arguments, by compiling it."""
    value_and_grad = microbatch_value_and_grad(loss_fn, k)

    def step(params, opt_state, batch):
        loss, gradients = value_and_grad(params, batch)
        if tx is None:
            return loss, gradients, opt_state
        update = optax.with_extra_args_support(tx).update
        updates, opt_state = update(gradients, opt_state, params, value=loss)
        return loss, optax.apply_updates(params, updates), opt_state

    stays = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    jitted = jax.jit(
        step,
        donate_argnums=() if tx is None else (0, 1),
        keep_unused=True,
        out_shardings=(None, *stays),
    )
    memory = jitted.lower(params, opt_state, batch).compile().memory_analysis()
    if memory is None:
        raise NotImplementedError(f"{jax.default_backend()!r} does not report a program's memory.")
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    whole = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    return whole - _bytes((params, opt_state, batch))


def _advice(chosen, others, budget):
    """What the rows say, in words."""
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
    advice = f"Nothing fits. The nearest is {nearest}, which takes {_size(nearest.peak)}."
    arguments = nearest.params + nearest.opt_state + nearest.batch
    if arguments > budget:
        advice += (
            f" Parameters, optimizer state and batch alone take {_size(arguments)}: bring the"
            " micro-batches one by one, with accumulate(k)."
        )
    return advice


def _struct(x):
    """Shape, dtype and sharding of a leaf."""
    sharding = getattr(x, "sharding", None)
    on_mesh = sharding if isinstance(sharding, NamedSharding) else None
    dtype = jax.dtypes.canonicalize_dtype(_validation.dtype_of(x), allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype, sharding=on_mesh)


def _state_of(tx, params):
    """The optimizer's state, sharded as the parameters that it has a copy of."""
    if tx is None:
        return ()
    state = jax.eval_shape(tx.init, params)
    if all(leaf.sharding is None for leaf in jax.tree.leaves(params)):
        return state
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    like = lambda s, p: s if is_masked(s) else _like(p, s.shape, s.dtype)
    return optax.tree.map_params(tx, like, state, params, is_leaf=is_masked)


def _sum_of(param):
    return _like(param, param.shape, sum_dtype_of(param, None))


def _like(param, shape, dtype):
    sharding = param.sharding
    if sharding is not None and shape != param.shape:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _bytes(tree):
    """Bytes on one device."""

    def of_leaf(x):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(of_leaf, jax.tree.leaves(tree)))


def _budget(memory_budget):
    """Bytes."""
    is_number = _validation.is_arraylike(memory_budget) and not jnp.shape(memory_budget)
    if (
        not is_number
        or not _validation.is_real(jnp.result_type(memory_budget))
        or not 0 < memory_budget < math.inf
    ):
        raise ValueError(
            "memory_budget must be a number of bytes, or a fraction of the device's memory up to"
            f" 1; got {memory_budget!r}."
        )
    if memory_budget > 1:
        return int(memory_budget)
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(
            "memory_budget must be passed, in bytes, where the device does not report its memory,"
            f" as {device.device_kind!r} does not; got the fraction {memory_budget!r}. 16 GB are"
            " memory_budget=16e9."
        )
    return int(memory_budget * limit)


def _size(num_bytes):
    """Bytes as people read them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"
