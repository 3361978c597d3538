"""A loss scale for float16 that follows the overflows of whole windows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _call_validation, _validation
from optax_accum._state import AccumulateState, accumulate_states

_LARGEST = 2.0**126  # of a scale that float32 can divide by too


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that is the same within a window, halves after an overflow and grows again.

    Gradients in float16 vanish below 6e-8 and overflow above 65504. So the loss is multiplied by a
    scale L before it is differentiated, and the accumulator, given this as its `loss_scale`,
    divides by it, once, where the window closes:

        S = Σ wᵢ L gᵢ,   inner sees S / (L W)

    A micro-step *overflows* if one of its gradients is infinite or NaN. It counts as rejected (with
    `"window"` so do those after it in its window), and L changes at the end of its window only,
    by what happened on all devices:

        a window with overflows:    L <- max(L / factor, min_scale), once, however many there were
        growth_interval windows that updated, and none that overflowed:
                                    L <- min(L factor, max_scale)

    Without an overflow a power of two for L changes nothing but what would have vanished. Take the
    loss itself in float32, of logits in float16: else L, which its derivative begins with, is no
    more than 65504.

    Attributes:
      init: L in the beginning.
      growth_interval: How many windows in a row must be clean before L grows.
      factor: Above 1; a power of two keeps the digits of the gradients.
      min_scale: Lower bound of L, above 0.
      max_scale: Upper bound.
      on_overflow: What is dropped, `"window"`, all of it, so that no mean lacks its largest
        gradients; or `"micro_batch"`, that one alone, so that less work is lost.

    Raises:
      ValueError: An attribute breaks its rule.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> tx = accumulate(2, optax.sgd(1.0), loss_scale=DynamicLossScale(init=8.0))
      >>> params = jnp.ones([])
      >>> state = tx.init(params)
      >>> for x in (1.0, 3.0, jnp.inf, 3.0):
      ...     scaled = lambda params: loss_scale(state) * params * x
      ...     updates, state = tx.update(jax.grad(scaled)(params), state, params)
      ...     print(updates, loss_scale(state))
      -0.0 8.0
      -2.0 8.0
      -0.0 8.0
      -0.0 4.0

    References:
      Micikevicius et al., 2018, Mixed Precision Training (arXiv:1710.03740), section 3.2.
    """

    init: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    on_overflow: str = "window"

    def __post_init__(self):
        for name in ("init", "factor", "min_scale", "max_scale"):
            _call_validation.check_positive(name, value := getattr(self, name))
            if not 1 / _LARGEST <= value <= _LARGEST:
                raise ValueError(f"{name} must be from 2**-126 to 2**126, got {value!r}.")
        _call_validation.check_count("growth_interval", self.growth_interval)
        if np.float32(self.factor) <= 1:
            raise ValueError(f"factor must be above 1, got {self.factor!r}.")
        if not self.min_scale <= self.init <= self.max_scale:
            raise ValueError(
                f"init must be from min_scale to max_scale, got init={self.init!r},"
                f" min_scale={self.min_scale!r} and max_scale={self.max_scale!r}."
            )
        _validation.check_choice("on_overflow", self.on_overflow, ("window", "micro_batch"))


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """Read the factor by which the loss is to be multiplied before it is differentiated.

    Args:
      opt_state: A state of `accumulate(..., loss_scale=DynamicLossScale(...))`, however deep in
        others.

    Returns:
      float32 [], the same for all micro-steps of a window.

    Raises:
      ValueError: There is no such accumulator in `opt_state`, or there are several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> tx = accumulate(4, optax.sgd(1.0), loss_scale=DynamicLossScale())
      >>> print(loss_scale(tx.init(jnp.ones(2, jnp.float16))))
      32768.0
    """
    states = accumulate_states(opt_state)
    found = [state.extras["loss_scale"] for state in states if "loss_scale" in state.extras]
    if len(found) != 1:
        raise ValueError(
            "opt_state must hold one accumulator with loss_scale=DynamicLossScale(...); got"
            f" {len(found)} in {len(states)} accumulators. A loss has one scale: groups go inside,"
            " as in accumulate(k, optax.partition(...), loss_scale=...)."
        )
    return found[0]["scale"]


def new_extras(config: DynamicLossScale) -> dict[str, Any]:
    """What a state has for a loss scale."""
    scale = {
        "scale": jnp.asarray(config.init, jnp.float32),
        "clean_windows": jnp.zeros([], jnp.int32),  # in a row, since the scale changed
    }
    # Overflows of the open window; float32, to cross devices with the gradients.
    return {"loss_scale": scale, "overflows": jnp.zeros([], jnp.float32)}


def after(config: DynamicLossScale, extras: Any, overflowed: Any, updated: Any) -> dict[str, Any]:
    """The scale after a call in which a window closed with overflows, or updated."""
    scale, clean = extras["loss_scale"]["scale"], extras["loss_scale"]["clean_windows"]
    clean = jnp.where(updated, optax.safe_increment(clean), clean)
    grows = updated & ~overflowed & (clean >= min(config.growth_interval, 2**31 - 1))
    lower = jnp.maximum(scale / config.factor, config.min_scale)
    higher = jnp.minimum(scale * config.factor, config.max_scale)
    now = {
        "scale": jnp.where(overflowed, lower, jnp.where(grows, higher, scale)),
        "clean_windows": jnp.where(overflowed | grows, 0, clean),
    }
    return {"loss_scale": now}


def unscaling(state: AccumulateState) -> Any:
    """What takes a scaled gradient back: 1 / L, or 1 without a scale."""
    if "loss_scale" not in state.extras:
        return 1
    return 1 / state.extras["loss_scale"]["scale"].astype(state.window_weight.dtype)


def is_overflow(gradients: optax.Updates) -> jax.Array:
    """Whether a gradient is infinite or NaN, bool []."""
    # By the largest, since NaN passes through a maximum: XLA keeps all results of isfinite.
    finite = [jnp.isfinite(_largest(x)) for x in jax.tree.leaves(gradients)]
    return ~jnp.all(jnp.array(finite, bool))


def _largest(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize < 4:  # XLA would keep all |x|
        return jnp.maximum(jnp.max(x, initial=0), -jnp.min(x, initial=0))
    return jnp.max(jnp.abs(x), initial=0)
