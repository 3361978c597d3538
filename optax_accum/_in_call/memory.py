"""Bytes on one device: of trees of arrays, of a compiled step, and of the device itself."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum import _checks
from optax_accum._checks import Dtype, PyTree, Scalar
from optax_accum._core.arithmetic import sum_dtype
from optax_accum._in_call.microbatch import microbatch_value_and_grad


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf."""
    sharding = getattr(x, "sharding", None)
    on_mesh = sharding if isinstance(sharding, NamedSharding) else None
    dtype = jax.dtypes.canonicalize_dtype(_checks.dtype_of(x), allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype, sharding=on_mesh)


def state_shapes(tx: optax.GradientTransformation | None, params: PyTree) -> optax.OptState:
    """The shapes of the optimizer's state; copies of parameters are sharded as they are."""
    if tx is None:
        return ()
    state = jax.eval_shape(tx.init, params)
    if all(leaf.sharding is None for leaf in jax.tree.leaves(params)):
        return state

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    def sharded(leaf: Any, param: jax.ShapeDtypeStruct) -> Any:
        return leaf if is_masked(leaf) else _with_sharding(param, leaf.shape, leaf.dtype)

    return optax.tree.map_params(tx, sharded, state, params, is_leaf=is_masked)


def sum_shapes(params: PyTree) -> PyTree:
    """The shapes of the sums of the parameters' gradients."""

    def of_leaf(param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return _with_sharding(param, param.shape, sum_dtype(param, None))

    return jax.tree.map(of_leaf, params)


def _with_sharding(
    param: jax.ShapeDtypeStruct, shape: tuple[int, ...], dtype: Dtype
) -> jax.ShapeDtypeStruct:
    """An array that is sharded as the parameter, if it has its shape; else it is replicated."""
    sharding = param.sharding
    if sharding is not None and shape != param.shape:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def bytes_of(shapes: PyTree) -> int:
    """Bytes of a tree of shapes on one device."""

    def of_leaf(x: jax.ShapeDtypeStruct) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(of_leaf, jax.tree.leaves(shapes)))


def bytes_beside_arguments(
    loss_fn: Callable[[PyTree, PyTree], jax.Array],
    num_microbatches: int,
    tx: optax.GradientTransformation | None,
    params: PyTree,
    opt_state: optax.OptState,
    batch: PyTree,
) -> int:
    """Bytes on one device that a step takes beside its arguments, by compiling it."""
    value_and_grad = microbatch_value_and_grad(loss_fn, num_microbatches)

    def step(
        params: PyTree, opt_state: optax.OptState, batch: PyTree
    ) -> tuple[Scalar, PyTree, optax.OptState]:
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
    return whole - bytes_of((params, opt_state, batch))


def budget_in_bytes(memory_budget: Any) -> int:
    """Check the budget of `plan_microbatches`, and turn a fraction of memory into bytes."""
    is_number = _checks.is_arraylike(memory_budget) and not jnp.shape(memory_budget)
    if (
        not is_number
        or not _checks.is_real(jnp.result_type(memory_budget))
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


def readable(num_bytes: int) -> str:
    """A number of bytes with a unit: "1.5 GB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"
