"""Monitoring a window: norms, loss, and the gradient noise scale."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import _checks
from optax_accum._checks import Dtype, Scalar
from optax_accum._core.arithmetic import add_if_accepted, safe_ratio, square_norm
from optax_accum._core.component import (
    Component,
    ComponentState,
    Memory,
    MicroStep,
    Norms,
    Sums,
    Window,
)
from optax_accum._core.state import AccumulateState, accumulate_states

_NAMES = (
    *("grad_norm", "micro_grad_norm", "micro_grad_norm_std", "update_norm", "update_ratio"),
    *("loss", "weight", "num_skipped", "noise_scale", "every_k", "micro_weight"),
)
_DECAY = 0.99  # of the averages whose ratio is the noise scale


def window_metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Read what the monitor of an accumulator measured in the last window that updated.

    With gradients gᵢ of micro-batches of nᵢ examples (weights), N = Σ nᵢ in all and ḡ their mean:

    - `grad_norm`: ‖ḡ‖, as the inner transformations receive it, before they clip it.
    - `micro_grad_norm`, `micro_grad_norm_std`: mean and standard deviation of ‖gᵢ‖.
    - `update_norm`, `update_ratio`: ‖update‖, and ‖update‖ / ‖params‖.
    - `loss`: the mean of `value=`, weighted as the gradients are, over the micro-steps that passed
      it; 0 where none did.
    - `weight`: N, over all devices. `micro_weight`: N over the number of micro-steps.
    - `num_skipped`: micro-steps that were rejected or had no weight, over all devices.
    - `every_k`: the k of the window, which a flush may have closed with fewer micro-steps.
    - `noise_scale`: B, in examples where weights count examples. A batch far smaller than B is
      mostly noise, one far larger hardly better than B (McCandlish et al., 2018). It is

          S = (Σ nᵢ‖gᵢ‖² - N‖ḡ‖²) / (k - 1),   |G|² = ‖ḡ‖² - S / N,   B = average S / average |G|²

      with averages over windows that decay by 0.99. S and |G|² are unbiased, for micro-batches of
      any sizes; their ratio in a window is not. A window of one micro-batch adds nothing. B is
      infinite where |G|² is not above 0, and -1 where it cannot be estimated yet.

    Args:
      opt_state: A state with one accumulator made with `monitor=True` in it.

    Returns:
      float32 [] by name. Before the first window that updates (`gradient_step` is 0) they are 0,
      and `noise_scale` is -1.

    Raises:
      ValueError: There is no such accumulator, or there are several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> tx = accumulate(2, optax.sgd(1.0), monitor=True)
      >>> params = jnp.array([3.0, 4.0])
      >>> state = tx.init(params)
      >>> for gradient in (jnp.array([3.0, 0.0]), jnp.array([-3.0, 4.0])):
      ...     _, state = tx.update(gradient, state, params, weight=8)
      >>> metrics = window_metrics(state)
      >>> for name in ("grad_norm", "micro_grad_norm", "update_ratio", "weight"):
      ...     print(name, metrics[name])
      grad_norm 2.0
      micro_grad_norm 4.0
      update_ratio 0.4
      weight 16.0

    References:
      McCandlish et al., 2018, An Empirical Model of Large-Batch Training (arXiv:1812.06162),
      appendix A.1, there for two batch sizes.
    """
    states = accumulate_states(opt_state)
    found = [state.extras["monitor"].memory for state in states if "monitor" in state.extras]
    if len(found) != 1:
        raise ValueError(
            "opt_state must hold one accumulator made with monitor=True, and no other one beside"
            f" it; got {len(found)} of {len(states)} accumulators with a monitor."
        )
    return {name: found[0][name] for name in _NAMES}


@dataclasses.dataclass(frozen=True)
class AdaptiveEveryK:
    """An `every_k` that follows the noise scale, made by `adaptive_every_k`."""

    min_k: int
    max_k: int
    fraction: float

    def __call__(self, state: AccumulateState) -> Scalar:
        """The k of the open window, int32 []."""
        return self.after(state.extras["monitor"].memory)

    def after(self, metrics: dict[str, jax.Array]) -> jax.Array:
        """The k of the window after the one with these metrics, int32 []."""
        wanted = self.fraction * safe_ratio(metrics["noise_scale"], metrics["micro_weight"])
        # A comparison, so that a noise scale of -1, and NaN from a gradient of NaN, give min_k.
        k = jnp.where(wanted > self.min_k, jnp.minimum(jnp.round(wanted), self.max_k), self.min_k)
        return k.astype(jnp.int32)


def adaptive_every_k(min_k: int, max_k: int, *, fraction: float = 1.0) -> AdaptiveEveryK:
    """Let the window grow and shrink with the measured noise scale B.

        k = fraction * B / (weight of a micro-step, over all devices)

    rounded, and kept from `min_k` to `max_k`. So a window holds `fraction * B` examples. With
    `fraction=1` training takes twice the least number of examples, and twice the least number of
    updates (McCandlish et al., 2018, section 2.2). k changes at boundaries only, and is the same on
    all devices, since B is. Until B is known, k is `min_k`.

    Args:
      min_k: The smallest k, at least 2: windows of one micro-batch measure no noise.
      max_k: The largest k, at least `min_k`.
      fraction: The size of a window as a fraction of B, above 0.

    Returns:
      An `every_k` for `accumulate(..., monitor=True)`, whose `update` needs the number of examples
      as `weight=`.

    Raises:
      ValueError: An argument breaks its rule.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate, window_metrics
      >>> tx = accumulate(adaptive_every_k(2, 16), optax.sgd(0.1), monitor=True)
      >>> state = tx.init(jnp.zeros(1))
      >>> for gradient in (1.0, -0.9, 1.0):  # noise alone
      ...     _, state = tx.update(jnp.full(1, gradient), state, weight=8)
      >>> print(window_metrics(state)["noise_scale"], state.micro_step)
      inf 1
      >>> print(adaptive_every_k(2, 16).after(window_metrics(state)))
      16

    References:
      McCandlish et al., 2018, An Empirical Model of Large-Batch Training (arXiv:1812.06162).
    """
    _checks.check_count("min_k", min_k)
    _checks.check_count("max_k", max_k)
    _checks.check_positive("fraction", fraction)
    if not 2 <= min_k <= max_k:
        raise ValueError(
            "min_k must be at least 2, for windows of one micro-batch measure no noise, and at most"
            f" max_k; got min_k={min_k!r} and max_k={max_k!r}."
        )
    return AdaptiveEveryK(int(min_k), int(max_k), float(fraction))


@dataclasses.dataclass(frozen=True, eq=False)
class Monitor(Component):
    """Measures each window, for `window_metrics`."""

    name = "monitor"
    norms = frozenset(Norms._fields)

    def init(self, weight_dtype: Dtype) -> ComponentState:
        del weight_dtype
        sums = ("count", "norms", "squares", "weighted_squares", "loss", "loss_weight", "skipped")
        metrics = {name: _float32(0) for name in (*_NAMES, "noise", "signal")}
        metrics["noise_scale"] = _float32(-1)
        return ComponentState({name: _float32(0) for name in sums}, metrics)

    def gather(
        self, sums: Sums, micro_step: MicroStep, accepted: Scalar | bool
    ) -> tuple[Sums, Scalar | bool]:
        weight, factor = micro_step.weight, micro_step.factor
        # The mean gradient of a micro-batch is gᵢ factor / wᵢ: gᵢ, or under "ratio" gᵢ / wᵢ.
        divisor = weight if isinstance(weight, int) else jnp.where(accepted, weight, 1)
        square = _float32(square_norm(micro_step.gradients, micro_step.unscale))
        square = square * jnp.square(_float32(factor / divisor))
        new = {
            "count": 1.0,
            "norms": jnp.sqrt(square),
            "squares": square,
            "weighted_squares": square * _float32(weight),
        }
        value = micro_step.extra_args.get("value")
        if value is not None:
            loss = _checks.checked_scalar("value", value, jnp.float32)
            new |= {"loss": loss * _float32(factor), "loss_weight": _float32(weight)}
        added = {name: add_if_accepted(sums[name], x, 1, accepted) for name, x in new.items()}
        skipped = sums["skipped"] + jnp.where(accepted, 0.0, 1.0)
        return sums | added | {"skipped": skipped}, accepted

    def close(self, memory: Memory, window: Window) -> Memory:
        metrics = _window_metrics(memory, window.sums[self.name], window)
        return {
            name: jnp.where(window.is_filled, _float32(new), memory[name])
            for name, new in metrics.items()
        }


def _window_metrics(memory: Memory, sums: Sums, window: Window) -> dict[str, Any]:
    weight, count = _float32(window.weight), sums["count"]
    sum_norm, update_norm, params_norm = map(_float32, window.norms)
    has_noise = count > 1
    mean_square = jnp.square(sum_norm * _float32(window.mean_factor))
    noise = sums["weighted_squares"] - weight * mean_square
    noise = noise / jnp.where(has_noise, count - 1, 1)
    signal = mean_square - safe_ratio(noise, weight)

    def average(old: Scalar, new: Scalar) -> Scalar:
        return jnp.where(has_noise, _DECAY * old + (1 - _DECAY) * new, old)

    noise, signal = average(memory["noise"], noise), average(memory["signal"], signal)
    no_signal = jnp.where(noise > 0, jnp.inf, -1.0)
    micro_norm = safe_ratio(sums["norms"], count)
    variance = safe_ratio(sums["squares"], count) - micro_norm**2
    return {
        "grad_norm": sum_norm * _float32(window.gradient_factor),
        "micro_grad_norm": micro_norm,
        "micro_grad_norm_std": jnp.sqrt(jnp.maximum(variance, 0)),
        "update_norm": update_norm,
        "update_ratio": safe_ratio(update_norm, params_norm),
        "loss": safe_ratio(sums["loss"], sums["loss_weight"]),
        "weight": weight,
        "num_skipped": sums["skipped"],
        # Both averages start at 0 and have the same bias, which the ratio cancels.
        "noise_scale": jnp.where(signal > 0, noise / jnp.where(signal > 0, signal, 1), no_signal),
        "every_k": window.every_k,
        "micro_weight": safe_ratio(weight, _float32(window.num_micro_steps)),
        "noise": noise,
        "signal": signal,
    }


def _float32(x: Any) -> Scalar:
    return jnp.asarray(x, jnp.float32)
