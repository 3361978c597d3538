"""Generic checks of what users pass: each error gives the name, the rule and the value."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

PyTree: TypeAlias = Any
Scalar: TypeAlias = jax.Array  # of shape []
Dtype: TypeAlias = Any  # what jax takes for a dtype
Schedule: TypeAlias = Callable[[jax.Array], jax.typing.ArrayLike]

OVERWRITTEN = "_overwrite_with_gradient"  # the collection of Flax's fp8
OVERWRITE_BESIDE_TX = (
    "Give tx only the rest, tx.init(params['params']) and tx.update(gradients['params'],"
    " opt_state, params['params']), and in each micro-step put"
    f" gradients[{OVERWRITTEN!r}] in place of the old values, as"
    " flax.training.train_state.TrainState does."
)
OVERWRITE_AS_STATE = (
    "Pass them as {name}, and let loss_fn return their gradient as the new ones:"
    f" jax.grad(loss)(variables, batch)[{OVERWRITTEN!r}], which XLA does not compute twice."
)
HOLD_OVERWRITTEN = "Let {name} hold them fixed, as constants beside params."


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
    """Require a dtype that jax does not truncate: float64 needs jax_enable_x64."""
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


def check_count(name: str, value: Any) -> None:
    """Require an int of at least 1."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Require a finite number above 0."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    if not is_real or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def checked_scalar(name: str, value: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Require a real scalar, or a bool one if `dtype` is bool, and return it in `dtype`."""
    source = jnp.result_type(value) if is_arraylike(value) else None
    wants_bool = jnp.dtype(dtype) == jnp.bool_
    rule = "a bool scalar" if wants_bool else "a real scalar"
    if source is None:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
    # A bool is a number too: True in a mask is a weight of 1.
    valid = source == jnp.bool_ or (not wants_bool and is_real(source))
    if jnp.shape(value) or not valid:
        raise ValueError(
            f"{name} must be {rule}, got dtype {source.name} and shape {jnp.shape(value)}."
        )
    return jnp.asarray(value, dtype)


def check_leaves(tree: Any, what: str, remedy: str = "") -> None:
    """Require leaves that are arrays or numbers."""
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        return  # the fast case: a train step checks in each call
    for path, leaf in tree_flatten_with_path(tree)[0]:
        # Scalar types of numpy and jax, such as jnp.float32, have a dtype and are no arrays.
        has_dtype = hasattr(leaf, "dtype") and not isinstance(leaf, type)
        if not has_dtype and not is_arraylike(leaf):
            raise ValueError(
                f"{what} must hold arrays and numbers; {what}{keystr(path)} is {leaf!r}.{remedy}"
            )


def check_model(params: Any, what: str) -> None:
    """Require the parameters of a model, without functions and other static parts."""
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

    def is_variable(x: Any) -> bool:  # of Flax NNX
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


def is_arraylike(value: Any) -> bool:
    """Whether `value` is an array or a number."""
    return isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def is_real(dtype: Any) -> bool:
    """Whether `dtype` is one of real numbers."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def dtype_of(leaf: Any) -> Any:
    """The dtype in which jax computes with a leaf."""
    dtype = getattr(leaf, "dtype", None)
    is_numpys = dtype is None or (isinstance(leaf, np.ndarray | np.generic) and dtype.kind in "fc")
    return jnp.result_type(leaf) if is_numpys else dtype  # float64 is float32 without x64


def wider_dtype(dtype: Dtype, other: Dtype) -> Any:
    """The dtype that holds the values of both, whatever `jax_numpy_dtype_promotion` says."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def describe(tree: Any) -> str:
    """Describe a tree in a message: arrays by dtype and shape."""

    def show(x: Any) -> str:
        return f"{dtype_of(x)}{list(jnp.shape(x))}" if is_arraylike(x) else repr(x)

    return str(jax.tree.map(show, tree)).replace("'", "")


def checked_loss(value: Any) -> Scalar:
    """Require a real floating scalar, as a loss function must return, and return it."""
    is_floating = is_arraylike(value) and jnp.issubdtype(jnp.result_type(value), jnp.floating)
    if not is_floating or jnp.shape(value):
        raise ValueError(
            f"loss_fn's loss must be a real floating scalar, got {describe(value)}. (If loss_fn"
            " returns a second value, an argument such as has_aux=True has to say so.)"
        )
    return value
