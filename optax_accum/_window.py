"""The arithmetic of a window: weights, sums and their dtypes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_accum import _validation
from optax_accum._validation import wider


def weights(weight: Any, normalize: str, dtype: Any) -> tuple[Any, Any, Any]:
    """What a micro-step adds to W, and the factors of its gradient and its averaged args."""
    if weight is None:
        return 1, 1, 1
    weight = _validation.scalar("weight", weight, dtype)
    scale = 1 if normalize == "ratio" else weight
    return weight, scale, scale


def is_counted(weight: Any, dtype: Any) -> Any:
    """Whether a micro-step of this weight adds to the window; known at once for a number."""
    if isinstance(weight, int | float | np.number):
        return bool(0 < np.asarray(weight, dtype) < np.inf)
    weight = jnp.asarray(weight, dtype)
    return (weight > 0) & (weight < jnp.inf)


def factors(window_weight: Any, filled: Any, normalize: str) -> tuple[Any, Any]:
    """What makes S the window's gradient, and 1 / W."""
    # The reciprocal, since XLA keeps the result of a division in a buffer of its own.
    per_weight = 1 / jnp.where(filled, window_weight, 1)
    return jnp.ones_like(per_weight) if normalize == "sum" else per_weight, per_weight


def gathered(total: Any, x: Any, scale: Any, accepted: Any) -> Any:
    """`total + scale * x`, or `total` where the micro-step is not accepted."""
    # Selected, not multiplied, since 0 * NaN is NaN; and before the product too, since the
    # derivative of an unselected NaN is NaN.
    select = lambda new, old: new if accepted is True else jnp.where(accepted, new, old)
    factor = scale if isinstance(scale, int) else select(scale, 1)
    return select(total + times(select(x, 0), factor, total.dtype), total)


def times(x: Any, factor: Any, dtype: Any) -> jax.Array:
    """`x * factor` in `dtype`, computed no narrower than float32; a factor of 1 is no product."""
    if isinstance(factor, int):
        return jnp.asarray(x, dtype)
    wide = wider(wider(jnp.result_type(x), dtype), jnp.float32)
    x = jnp.asarray(x, wide)
    factor = factor.astype(real(wide))
    if jnp.issubdtype(wide, jnp.complexfloating):
        # Part by part: the product with a complex factor would turn an infinite part into NaN.
        x = lax.complex(x.real * factor, x.imag * factor)
    else:
        x = x * factor
    return x.astype(dtype)


def sum_dtype_of(leaf: Any, accumulator_dtype: Any) -> Any:
    """The dtype of a leaf's sum: as asked, or float32 and wider; complex where the leaf is."""
    dtype = jnp.result_type(leaf)
    return dtype_like(accumulator_dtype or wider(real(dtype), jnp.float32), dtype)


def weight_dtype_of(sum_dtypes: Any) -> Any:
    """The dtype of W: float32, and wider where a sum is."""
    return functools.reduce(wider, map(real, jax.tree.leaves(sum_dtypes)), jnp.float32)


def dtype_like(real_dtype: Any, like: Any) -> Any:
    """`real_dtype`, made complex where `like` is."""
    is_complex = jnp.issubdtype(jnp.result_type(like), jnp.complexfloating)
    return wider(real_dtype, jnp.complex64) if is_complex else jnp.dtype(real_dtype)


def real(dtype: Any) -> Any:
    """The dtype of a number's real part."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(dtype)


def zeros(param: Any, dtype: Any) -> jax.Array:
    """Zeros of a parameter's shape, and of its sharding."""
    # Plain zeros land on one device under jit; a select on the parameter goes where it is.
    return jnp.where(jnp.zeros([], jnp.bool_), param, 0).astype(dtype)


def count(so_far: jax.Array, happened: Any) -> jax.Array:
    """`so_far`, one higher where it `happened`."""
    return jnp.where(happened, optax.safe_increment(so_far), so_far)


def in_dtypes_of(old: Any, new: Any) -> Any:
    """The new inner state in the dtypes of the old one, which must not change."""
    _validation.check_same_structure(new, old)
    return jax.tree.map(lambda o, n: lax.convert_element_type(n, o.dtype), old, new)


def strongly_typed(leaf: Any) -> jax.Array:
    """`leaf` with its dtype pinned."""
    return lax.convert_element_type(leaf, getattr(leaf, "dtype", jnp.result_type(leaf)))
