"""A loss scale for float16, adjusted once per window by its overflows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _checks
from optax_accum._checks import Dtype, Scalar
from optax_accum._core.arithmetic import in_chunks
from optax_accum._core.component import (
    Component,
    ComponentState,
    Memory,
    MicroStep,
    Sums,
    Window,
)
from optax_accum._core.state import accumulate_states

_LARGEST = 2.0**126  # a scale whose reciprocal float32 can hold too


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Set up a loss scale that is constant in a window, falls after overflows and grows again.

    Gradients in float16 vanish below 6e-8 and overflow above 65504. So the loss is multiplied by a
    scale L before it is differentiated. An accumulator with this `loss_scale` divides by L once,
    where the window closes:

        S = Σ wᵢ L gᵢ,   inner sees S / (L W)

    A micro-step *overflows* if one of its gradients is infinite or NaN. It is then rejected, and
    with `on_overflow="window"` so are those after it in its window. L changes only where a window
    closes, by what happened on all devices:

        after a window with overflows, however many:    L <- max(L / factor, min_scale)
        after growth_interval windows that updated, with no overflow between them:
                                                        L <- min(L factor, max_scale)

    If L and `factor` are powers of two and nothing overflows, only gradients change that would have
    vanished. Compute the loss itself in float32, even if the logits are float16: its derivative
    starts with L, which in float16 could be at most 65504.

    Attributes:
      init: L of the first window, from `min_scale` to `max_scale`.
      growth_interval: How many windows in a row must update without an overflow before L grows.
      factor: By how much L grows and falls, above 1. A power of two rounds no gradient.
      min_scale: Lower bound of L, above 0.
      max_scale: Upper bound of L. All scales are from 2**-126 to 2**126.
      on_overflow: What an overflow drops. `"window"` drops all of the window, so that no mean lacks
        its largest gradients; `"micro_batch"` drops that micro-batch alone, so that less work is
        lost.

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

    def __post_init__(self) -> None:
        for name in ("init", "factor", "min_scale", "max_scale"):
            _checks.check_positive(name, value := getattr(self, name))
            if not 1 / _LARGEST <= value <= _LARGEST:
                raise ValueError(f"{name} must be from 2**-126 to 2**126, got {value!r}.")
        _checks.check_count("growth_interval", self.growth_interval)
        if np.float32(self.factor) <= 1:
            raise ValueError(f"factor must be above 1, got {self.factor!r}.")
        if not self.min_scale <= self.init <= self.max_scale:
            raise ValueError(
                f"init must be from min_scale to max_scale, got init={self.init!r},"
                f" min_scale={self.min_scale!r} and max_scale={self.max_scale!r}."
            )
        _checks.check_choice("on_overflow", self.on_overflow, ("window", "micro_batch"))


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """Read the factor by which to multiply the loss before it is differentiated.

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
    found = [s.extras["loss_scale"].memory for s in states if "loss_scale" in s.extras]
    if len(found) != 1:
        raise ValueError(
            "opt_state must hold one accumulator with loss_scale=DynamicLossScale(...); got"
            f" {len(found)} in {len(states)} accumulators. A loss has one scale: groups go inside,"
            " as in accumulate(k, optax.partition(...), loss_scale=...)."
        )
    return found[0]["scale"]


@dataclasses.dataclass(frozen=True, eq=False)
class LossScaling(Component):
    """Rejects micro-steps that overflow, and adjusts the scale where a window closes."""

    config: DynamicLossScale
    name = "loss_scale"
    may_reject = True

    def init(self, weight_dtype: Dtype) -> ComponentState:
        del weight_dtype
        memory = {
            "scale": jnp.asarray(self.config.init, jnp.float32),
            "clean_windows": jnp.zeros([], jnp.int32),  # in a row, since the scale changed
        }
        # Overflows of the open window; float32, to cross devices with the gradients.
        return ComponentState(jnp.zeros([], jnp.float32), memory)

    def loss_scale(self, memory: Memory) -> Scalar:
        return memory["scale"]

    def gather(
        self, sums: Sums, micro_step: MicroStep, accepted: Scalar | bool
    ) -> tuple[Sums, Scalar | bool]:
        overflow = accepted & is_overflow(micro_step.gradients)
        overflows = sums + overflow.astype(jnp.float32)
        return overflows, accepted & ~overflow & self.allows_update(overflows)

    def allows_update(self, sums: Sums) -> Scalar | bool:
        return True if self.config.on_overflow == "micro_batch" else sums == 0

    def close(self, memory: Memory, window: Window) -> Memory:
        overflowed = window.sums[self.name] > 0
        scale, clean = memory["scale"], memory["clean_windows"]
        clean = jnp.where(window.is_filled, optax.safe_increment(clean), clean)
        enough = min(self.config.growth_interval, 2**31 - 1)
        grows = window.is_filled & ~overflowed & (clean >= enough)
        lower = jnp.maximum(scale / self.config.factor, self.config.min_scale)
        higher = jnp.minimum(scale * self.config.factor, self.config.max_scale)
        return {
            "scale": jnp.where(overflowed, lower, jnp.where(grows, higher, scale)),
            "clean_windows": jnp.where(overflowed | grows, 0, clean),
        }


def is_overflow(gradients: optax.Updates) -> Scalar:
    """Whether a gradient is infinite or NaN, bool []."""
    # The maximum of |x| tells, since NaN passes through it; XLA would store isfinite of each x.
    finite = [jnp.isfinite(_largest(x)) for x in in_chunks(jax.tree.leaves(gradients))]
    return ~jnp.all(jnp.array(finite, bool))


def _largest(x: jax.Array) -> Scalar:
    if x.dtype.itemsize < 4:  # XLA would store each |x|
        return jnp.maximum(jnp.max(x, initial=0), -jnp.min(x, initial=0))
    return jnp.max(jnp.abs(x), initial=0)
