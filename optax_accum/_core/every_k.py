"""How many micro-steps a window has: an int, or a schedule of the gradient step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum._checks import Scalar, Schedule, is_arraylike, is_real
from optax_accum._core.state import AccumulateState

_LARGEST_K = 2**31 - 1  # micro_step is an int32


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


@dataclasses.dataclass(frozen=True)
class ScheduledK:
    """An `every_k` that a schedule of the gradient step gives."""

    schedule: Schedule

    def __call__(self, state: AccumulateState) -> Scalar:
        """The k of the open window, int32 []."""
        return scheduled_k(self.schedule(state.gradient_step))


def scheduled_k(every_k: Any) -> jax.Array:
    """A schedule's value as k: rounded, at least 1, int32 []."""
    dtype = jnp.result_type(every_k) if is_arraylike(every_k) else None
    if dtype is None or jnp.shape(every_k) or not is_real(dtype):
        raise ValueError(
            "every_k as a schedule must return a real number (a scalar) for a gradient step,"
            f" got {every_k!r}."
        )
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.maximum(jnp.asarray(every_k).astype(jnp.int32), 1)
    k = jnp.round(jnp.asarray(every_k))
    # With a comparison NaN gives 1 too. The largest float32 below 2**31 is 2**31 - 128.
    return jnp.minimum(jnp.where(k >= 1, k, 1), _LARGEST_K - 127).astype(jnp.int32)
