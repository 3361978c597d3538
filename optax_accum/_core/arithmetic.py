"""The arithmetic of a window: weights, sums, norms and their dtypes."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_accum import _checks
from optax_accum._checks import Dtype, PyTree, Scalar, wider_dtype
from optax_accum._core.internals import spec_of, varying_over

_SMALL = 2**14  # elements; to reduce a smaller leaf costs more than to copy it
_LEAVES_IN_A_CHUNK = 64  # XLA takes long to compile the concatenation of many more


def weight_and_factor(
    weight: Any, normalize: str, dtype: Dtype
) -> tuple[Scalar | int, Scalar | int]:
    """The weight that a micro-step adds to W, and the factor of its gradient and its scalars."""
    if weight is None:
        return 1, 1
    weight = _checks.checked_scalar("weight", weight, dtype)
    return weight, 1 if normalize == "ratio" else weight


def is_positive_weight(weight: Any, dtype: Dtype) -> Scalar | bool:
    """Whether a micro-step of this weight counts; a Python bool if the weight is a number."""
    if weight is None:
        return True
    if isinstance(weight, int | float | np.number):
        return bool(0 < np.asarray(weight, dtype) < np.inf)
    weight = jnp.asarray(weight, dtype)
    return (weight > 0) & (weight < jnp.inf)


def normalizers(window_weight: Scalar, is_filled: Any, normalize: str) -> tuple[Scalar, Scalar]:
    """The factor that turns S into the window's gradient, and 1 / W."""
    # The reciprocal, since XLA keeps the result of a division in a buffer of its own.
    per_weight = 1 / jnp.where(is_filled, window_weight, 1)
    return jnp.ones_like(per_weight) if normalize == "sum" else per_weight, per_weight


def add_if_accepted(total: Any, x: Any, factor: Scalar | int, accepted: Scalar | bool) -> jax.Array:
    """`total + factor * x`, or `total` where the micro-step is not accepted."""

    # Selected, not multiplied, since 0 * NaN is NaN; and before the product too, since the
    # derivative of an unselected NaN is NaN.
    def select(new: Any, old: Any) -> Any:
        return new if accepted is True else jnp.where(accepted, new, old)

    factor = factor if isinstance(factor, int) else select(factor, 1)
    return select(total + scale_as(select(x, 0), factor, total.dtype), total)


def scale_as(x: Any, factor: Scalar | int, dtype: Dtype) -> jax.Array:
    """`x * factor` in `dtype`, computed no narrower than float32; a factor of 1 is no product."""
    if isinstance(factor, int):
        return jnp.asarray(x, dtype)
    wide = wider_dtype(wider_dtype(jnp.result_type(x), dtype), jnp.float32)
    x = jnp.asarray(x, wide)
    factor = factor.astype(real_dtype(wide))
    if jnp.issubdtype(wide, jnp.complexfloating):
        # Part by part: the product with a complex factor would turn an infinite part into NaN.
        x = lax.complex(x.real * factor, x.imag * factor)
    else:
        x = x * factor
    return x.astype(dtype)


def sum_dtype(leaf: Any, accumulator_dtype: Dtype | None) -> jnp.dtype:
    """The dtype of a leaf's sum: as asked, or float32 and wider; complex where the leaf is."""
    dtype = jnp.result_type(leaf)
    return complex_where(dtype, accumulator_dtype or wider_dtype(real_dtype(dtype), jnp.float32))


def weight_dtype(sum_dtypes: PyTree) -> jnp.dtype:
    """The dtype of W: float32, and wider where a sum is."""
    dtypes = map(real_dtype, jax.tree.leaves(sum_dtypes))
    return functools.reduce(wider_dtype, dtypes, jnp.dtype(jnp.float32))


def complex_where(dtype_source: Any, dtype: Dtype) -> jnp.dtype:
    """A real dtype, made complex where `dtype_source` is."""
    is_complex = jnp.issubdtype(jnp.result_type(dtype_source), jnp.complexfloating)
    return wider_dtype(dtype, jnp.complex64) if is_complex else jnp.dtype(dtype)


def real_dtype(dtype: Dtype) -> jnp.dtype:
    """The dtype of a number's real part."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(dtype)


def zeros_where(param: Any, dtype: Dtype) -> jax.Array:
    """Zeros of a parameter's shape, and of its sharding."""
    # Plain zeros land on one device under jit; a select on the parameter goes where it is.
    return jnp.where(jnp.zeros([], jnp.bool_), param, 0).astype(dtype)


def increment_where(happened: Scalar | bool, count: Scalar) -> Scalar:
    """`count`, one higher where it `happened`."""
    return jnp.where(happened, optax.safe_increment(count), count)


def strongly_typed(leaf: Any) -> jax.Array:
    """`leaf` with its dtype pinned."""
    return lax.convert_element_type(leaf, getattr(leaf, "dtype", jnp.result_type(leaf)))


def safe_ratio(value: Any, over: Any) -> jax.Array:
    """`value / over`, and 0 for 0 / 0, which makes no NaN on the way (`jax_debug_nans`)."""
    return jnp.where(value == 0, 0, value) / jnp.where(value == 0, 1, over)


def norm(tree: PyTree, factor: Scalar | int = 1) -> Scalar:
    """The root of the sum of the squares of all elements times `factor`, float32 [] or wider."""
    return jnp.sqrt(square_norm(tree, factor))


def square_norm(tree: PyTree, factor: Scalar | int = 1) -> Scalar:
    """The sum of the squares of all elements times `factor`, float32 [] or wider."""

    def square(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize < 4:
            # Without a barrier XLA would widen narrow numbers once for all that reads them, and
            # keep the wide copy in memory.
            x = lax.optimization_barrier(x)
        # Multiplied first: the squares of gradients of a scaled loss might overflow.
        wide = scale_as(x, factor, wider_dtype(x.dtype, jnp.float32))
        return jnp.sum(jnp.square(jnp.abs(wide)))

    squares = [square(x) for x in in_chunks(jax.tree.leaves(tree))]
    widest = functools.reduce(wider_dtype, [s.dtype for s in squares], jnp.dtype(jnp.float32))
    return sum([s.astype(widest) for s in squares], jnp.zeros([], widest))


def in_chunks(leaves: Iterable[Any]) -> list[jax.Array]:
    """The elements of all leaves: large leaves as they are, small ones concatenated by type.

    XLA compiles and calls a program for each array that is reduced. For many small leaves this
    costs more than a copy of them does. Large leaves are not copied.
    """
    chunks: list[jax.Array] = []
    small: dict[Any, list[jax.Array]] = {}
    for x in map(jnp.asarray, leaves):
        if x.size > _SMALL or any(spec_of(x)):
            chunks.append(x)
        elif x.size:
            small.setdefault((x.dtype, varying_over(x)), []).append(x.ravel())
    for group in small.values():
        for start in range(0, len(group), _LEAVES_IN_A_CHUNK):
            chunk = group[start : start + _LEAVES_IN_A_CHUNK]
            chunks.append(jnp.concatenate(chunk) if len(chunk) > 1 else chunk[0])
    return chunks
