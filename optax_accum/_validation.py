"""Trace-time checks of what users pass: each error gives the name, the rule and the value."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

_State = TypeVar("_State")
Schedule = Callable[[jax.Array], jax.typing.ArrayLike]

OVERWRITTEN = "_overwrite_with_gradient"  # the collection of Flax's fp8
OVERWRITE_BESIDE_TX = (
    "Give tx the rest alone, tx.init(params['params']) and tx.update(gradients['params'],"
    " opt_state, params['params']), and in each micro-step put"
    f" gradients[{OVERWRITTEN!r}] in place of the old values, as"
    " flax.training.train_state.TrainState does."
)
OVERWRITE_AS_STATE = (
    "Pass them as {name}, and let loss_fn return their gradient as the new ones:"
    f" jax.grad(loss)(variables, batch)[{OVERWRITTEN!r}], which XLA does not compute twice."
)
HOLD_OVERWRITTEN = "Let {name} hold them fixed, as constants beside params."
_LARGEST_K = 2**31 - 1  # micro_step is an int32
_REMEDY_FOR_STATES = (
    "To go on from it between two windows, make a new state, new = tx.init(params), and put what"
    " training needs into its AccumulateState: new._replace(gradient_step=old.gradient_step,"
    " num_skipped=old.num_skipped, inner_state=old.inner_state)."
)


def check_every_k(every_k: Any) -> None:
    """Require an int of at least 1 or a schedule."""
    if isinstance(every_k, optax.GradientTransformation):
        raise ValueError(
            "every_k comes first and the inner transformations after it, as in"
            f" accumulate(4, optax.adam(1e-3)); got the transformation {every_k!r} as every_k."
        )
    if callable(every_k):
        return
    is_int = isinstance(every_k, int | np.integer) and not isinstance(every_k, bool)
    if not is_int or not 1 <= every_k <= _LARGEST_K:
        raise ValueError(
            f"every_k must be an int from 1 to 2**31 - 1 or a schedule, got {every_k!r}."
        )


def scheduled_k(every_k: Any) -> jax.Array:
    """The k that a schedule's value asks for: rounded, an int32 of at least 1."""
    dtype = jnp.result_type(every_k) if is_arraylike(every_k) else None
    if dtype is None or jnp.shape(every_k) or not is_real(dtype):
        raise ValueError(
            "every_k as a schedule must return a real number (a scalar) for a gradient step,"
            f" got {every_k!r}."
        )
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.maximum(jnp.asarray(every_k).astype(jnp.int32), 1)
    k = jnp.round(jnp.asarray(every_k))
    # A comparison, so that NaN gives 1 too; and float32 has no number from 2**31 - 127 to 2**31.
    return jnp.minimum(jnp.where(k >= 1, k, 1), _LARGEST_K - 127).astype(jnp.int32)


def check_transforms(name: str, transforms: Iterable[Any]) -> None:
    """Require gradient transformations."""
    for transform in transforms:
        if not isinstance(transform, optax.GradientTransformation):
            hint = " (a factory must be called)" if callable(transform) else ""
            raise ValueError(
                f"{name} must be optax gradient transformations, and every_k comes before them,"
                f" as in accumulate(4, optax.adam(1e-3)); got {transform!r}{hint}."
            )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Require one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_dtype(name: str, dtype: Any) -> None:
    """Require None or a real floating dtype."""
    if dtype is None:
        return
    try:
        is_floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        raise ValueError(f"{name} must be a real floating dtype or None, got {dtype!r}.")


def check_accumulator_dtype(dtype: Any) -> None:
    """Require None or a floating dtype in which a window's sum does not overflow."""
    check_dtype("accumulator_dtype", dtype)
    if dtype is not None and jnp.dtype(dtype).name not in ("bfloat16", "float32", "float64"):
        raise ValueError(
            "accumulator_dtype must have the range of float32 (float32, bfloat16 or float64):"
            f" sums overflow at {float(jnp.finfo(dtype).max):g}; got {jnp.dtype(dtype).name}."
        )


def check_enabled(name: str, dtype: Any) -> None:
    """Require a dtype that jax does not truncate as it is configured now."""
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(f"{name}={jnp.dtype(dtype).name} needs jax_enable_x64, which is off.")


def check_callable(name: str, value: Any) -> None:
    """Require None or a function."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {value!r}.")


def check_function(name: str, value: Any) -> None:
    """Require a function."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {value!r}.")


def check_names(name: str, value: Any, reserved: tuple[str, ...]) -> None:
    """Require a sequence of argument names, none of them reserved."""
    valid = isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)
    if not valid or set(value) & set(reserved):
        raise ValueError(
            f"{name} must be a tuple of names of extra args other than"
            f" {' and '.join(map(repr, reserved))}, got {value!r}."
        )


def check_axis_name(axis_name: Any) -> None:
    """Require the name of an axis, or a tuple of them."""
    if isinstance(axis_name, list | set | dict):
        raise ValueError(
            f"axis_name must be the name of a mapped axis or a tuple of names, got {axis_name!r}."
        )


def check_not_nested(where: str, holds_accumulator: bool) -> None:
    """Require an inner without an accumulator."""
    if holds_accumulator:
        raise ValueError(
            f"accumulators must not nest, and {where} holds one: write windows of a micro-steps"
            " inside windows of b as one, accumulate(a * b, ...), and give parameter groups windows"
            " of their own with optax.partition({name: accumulate(k, ...), ...}, labels)."
        )


def check_has_window(every_k: Any) -> None:
    """Refuse a state without a buffer under an `every_k` that gathers."""
    raise ValueError(
        "a state made with every_k=1 has no buffer to gather a window in, and every_k is"
        f" {every_k!r} now. {_REMEDY_FOR_STATES} (The state of accumulate(lambda _: 1) has the"
        " tree of that of any other k.)"
    )


def of_one_device(x: Any) -> jax.Array:
    """A device's own part of what all devices hold, stacked."""
    if not x.ndim or len(x) != 1:
        raise ValueError(
            "opt_state must hold one window for each device, with a leading axis of 1 on each"
            " (give shard_map state_specs(opt_state, axis_name)); got the shape"
            f" {x.shape} on one device. Carry a state over from another number of devices with"
            " optax_accum.reshard_window(opt_state, num_devices)."
        )
    return x[0]


def skip_decision(result: Any) -> jax.Array:
    """The bool scalar of optax's `should_skip_update_fn` protocol, whose info is dropped."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(
            f"should_skip_update_fn must return a pair (bool scalar, info), got {result!r}."
        )
    return scalar("should_skip_update_fn's first value", result[0], jnp.bool_)


def check_bool(name: str, value: Any) -> None:
    """Require True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_monitored(every_k: Any, monitor: bool) -> None:
    """Require a monitor for an `every_k` that follows it."""
    if not monitor:
        raise ValueError(
            f"every_k={every_k!r} follows what monitor=True measures; got monitor={monitor!r}."
        )


def check_monitor(sums: dict[str, Any], monitor: bool) -> None:
    """Require a state that was made with a monitor, or without."""
    if bool(sums) != monitor:
        raise ValueError(
            f"monitor must be that with which the state was made, {bool(sums)}; got {monitor}."
            f" {_REMEDY_FOR_STATES}"
        )


def check_loss_scale(loss_scale: Any, scale_type: type) -> None:
    """Require None or a loss scale."""
    if loss_scale is not None and not isinstance(loss_scale, scale_type):
        raise ValueError(f"loss_scale must be a {scale_type.__name__} or None, got {loss_scale!r}.")


def check_has_scale(extras: dict[str, Any], loss_scale: Any) -> None:
    """Require a state that was made with a loss scale, or without."""
    if ("loss_scale" in extras) != (loss_scale is not None):
        made = "with one" if "loss_scale" in extras else "without"
        raise ValueError(
            f"loss_scale must fit the state, which was made {made}; got {loss_scale}."
            f" {_REMEDY_FOR_STATES}"
        )


def check_averages(averages: dict[str, Any], names: Iterable[str]) -> None:
    """Require a state that was made for the same averaged extra args."""
    if set(averages) != set(names):
        raise ValueError(
            "average_extra_args must be those with which the state was made,"
            f" {sorted(averages)}; got {sorted(names)}. {_REMEDY_FOR_STATES}"
        )


def scalar(name: str, value: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`value` as a scalar array of `dtype`: real numbers for a float dtype, bools for bool."""
    source = jnp.result_type(value) if is_arraylike(value) else None
    wants_bool = jnp.dtype(dtype) == jnp.bool_
    rule = "a bool scalar" if wants_bool else "a real scalar"
    if source is None:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
    # A bool is a number too: a mask's True weighs one.
    valid = source == jnp.bool_ or (not wants_bool and is_real(source))
    if jnp.shape(value) or not valid:
        raise ValueError(
            f"{name} must be {rule}, got dtype {source.name} and shape {jnp.shape(value)}."
        )
    return jnp.asarray(value, dtype)


def averaged_arg(name: str, extra_args: dict[str, Any], dtype: Any) -> jax.Array:
    """The scalar extra arg of this name."""
    if name not in extra_args:
        raise ValueError(
            f"average_extra_args names {name!r}, so each update needs it: tx.update(gradients,"
            f" opt_state, params, {name}=...); got {sorted(extra_args) or 'no extra args'}."
        )
    return scalar(name, extra_args[name], dtype)


def value_to_average(name: str, value: Any, dtype: Any) -> jax.Array:
    """An extra arg that is averaged by default."""
    try:
        return scalar(name, value, dtype)
    except ValueError as error:
        raise ValueError(
            f"{error} By default inner receives its mean over the window; average_extra_args=()"
            " hands on what each call passes."
        ) from None


def check_leaves(tree: Any, what: str, remedy: str = "") -> None:
    """Require arrays and numbers: what has a dtype."""
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        return  # quickly, since a train step asks in each call
    for path, leaf in tree_flatten_with_path(tree)[0]:
        # The scalar types of numpy and jax, jnp.float32 say, have a dtype and are no arrays.
        has_dtype = hasattr(leaf, "dtype") and not isinstance(leaf, type)
        if not has_dtype and not is_arraylike(leaf):
            raise ValueError(
                f"{what} must hold arrays and numbers; {what}{keystr(path)} is {leaf!r}.{remedy}"
            )


def check_model(params: Any, what: str) -> None:
    """Require the parameters of a model without its functions and other static parts."""
    check_leaves(
        params,
        what,
        " Take the arrays of such a model: params, static = eqx.partition(model,"
        " eqx.is_inexact_array) for an Equinox module (or eqx.filter(model, eqx.is_inexact_array)),"
        " and eqx.combine(params, static) in loss_fn.",
    )


def check_not_overwritten(
    tree: Any, what: str, remedy: str, error: type[Exception] = ValueError
) -> None:
    """Require that a mean of gradients is right for each leaf: none of Flax's fp8 scales."""

    def is_variable(x):  # of Flax NNX
        return type(x).__name__ == OVERWRITTEN

    for path, leaf in tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        if is_variable(leaf) or any(getattr(k, "key", None) == OVERWRITTEN for k in path):
            raise error(
                f"{what} must not hold {OVERWRITTEN!r}, the scales and amax histories of Flax's"
                " fp8: their gradient is their new value, for which a window's mean and an"
                f" optimizer are wrong; got {what}{keystr(path)}. {remedy}"
            )


def check_inexact(tree: Any, what: str) -> None:
    """Require floating or complex leaves, which alone have gradients to sum."""
    check_model(tree, what)
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(dtype_of(leaf), jnp.inexact):
            raise ValueError(
                f"{what} must be floating or complex to be accumulated (leave other leaves out"
                f" with optax.masked or optax.partition); {what}{keystr(path)} has dtype"
                f" {dtype_of(leaf)}."
            )


def check_gradients(name: str, gradients: Any, window_sum: Any, any_width: bool) -> None:
    """Require gradients that the window can gather: its tree, its shapes, dtypes it can hold."""
    check_inexact(gradients, name)
    got, got_def = tree_flatten_with_path(gradients)
    want, want_def = tree_flatten_with_path(window_sum)
    if got_def != want_def:
        got_paths = [keystr(path) for path, _ in got]
        want_paths = [keystr(path) for path, _ in want]
        missing = sorted(set(want_paths) - set(got_paths))
        unexpected = sorted(set(got_paths) - set(want_paths))
        detail = (
            f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            if missing or unexpected
            else f"the leaves are the same, the containers are not: {got_def} against {want_def}"
        )
        raise ValueError(
            f"{name} must have the tree of the params that init was given; in the {name}: {detail}."
        )
    for (path, gradient), (_, total) in zip(got, want, strict=True):
        where = f"{name}{keystr(path)}"
        if jnp.shape(gradient) != total.shape:
            raise ValueError(
                f"{name} must have the shapes of the params that init was given; {where} has"
                f" shape {jnp.shape(gradient)}, its parameter {total.shape}."
            )
        dtype = dtype_of(gradient)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        too_wide = is_complex and not jnp.issubdtype(total.dtype, jnp.complexfloating)
        too_wide |= not any_width and wider(dtype, total.dtype) != total.dtype
        if too_wide:
            raise ValueError(
                f"{name} must not be wider than their accumulator; {where} has dtype"
                f" {dtype} and its accumulator {total.dtype}. Cast them, or set"
                " accumulator_dtype."
            )


def state_of(state: Any, state_type: type[_State]) -> _State:
    """Require the state that `init` made."""
    if not isinstance(state, state_type):
        raise ValueError(
            f"opt_state must hold the {state_type.__name__} that tx.init made, as in"
            f" tx.update(gradients, opt_state, params); got a {type(state).__name__} in its place."
        )
    return state


def check_params(params: Any) -> None:
    """Require parameters, which `flush` takes for gradients."""
    if params is None:
        raise ValueError("params must not be None: flush has no gradient to take the dtypes from.")
    check_model(params, "params")


def check_not_passed(function: str, extra_args: dict[str, Any], names: Iterable[str]) -> None:
    """Require that none of `names` is among the extra args."""
    for name in names:
        if name in extra_args:
            raise ValueError(
                f"{function} has no micro-step, and so takes no {name}; got"
                f" {name}={extra_args[name]!r}. Pass it to tx.update."
            )


def check_same_structure(new_state: Any, old_state: Any, dtypes_may_change: bool = False) -> None:
    """Require an inner transformation whose state keeps its tree, and its real leaves real."""
    new, new_def = tree_flatten_with_path(new_state)
    old, old_def = tree_flatten_with_path(old_state)
    if new_def != old_def:
        raise ValueError(
            "inner must keep the tree of its state, or no gate can hold the state back; its init"
            f" gives {old_def} and its update {new_def}."
        )
    for (path, n), (_, o) in zip(new, old, strict=True):
        is_complex = [jnp.issubdtype(dtype_of(x), jnp.complexfloating) for x in (n, o)]
        turns_complex = is_complex[0] > is_complex[1] and not dtypes_may_change
        if jnp.shape(n) != jnp.shape(o) or turns_complex:
            raise ValueError(
                "inner must keep the shapes of its state, and real leaves real;"
                f" inner_state{keystr(path)} goes from {dtype_of(o)}{list(jnp.shape(o))} in init to"
                f" {dtype_of(n)}{list(jnp.shape(n))} in update."
            )


def is_arraylike(value: Any) -> bool:
    """Whether it is an array or a number."""
    return isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def is_real(dtype: Any) -> bool:
    """Whether it is a dtype of real numbers."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def dtype_of(leaf: Any) -> Any:
    """The dtype that jax computes with."""
    dtype = getattr(leaf, "dtype", None)
    is_numpys = dtype is None or (isinstance(leaf, np.ndarray | np.generic) and dtype.kind in "fc")
    return jnp.result_type(leaf) if is_numpys else dtype  # float64 is float32 without x64


def wider(dtype: Any, other: Any) -> Any:
    """The dtype that holds the values of both, whatever promotion the user has allowed."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)
