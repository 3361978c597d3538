"""What a window tells about training: norms, loss, and the gradient noise scale."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_accum import _call_validation, _validation, _window
from optax_accum._state import accumulate_states

_NAMES = (
    *("grad_norm", "micro_grad_norm", "micro_grad_norm_std", "update_norm", "update_ratio"),
    *("loss", "weight", "num_skipped", "noise_scale", "every_k", "micro_weight"),
)
_DECAY = 0.99  # of the averages whose ratio is the noise scale


def window_metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Read what the monitor of an accumulator says of the last window that updated.

    With gradients gᵢ of micro-batches of nᵢ examples (weights), N = Σ nᵢ in all and ḡ their mean:

    - `grad_norm`: ‖ḡ‖, as the inner transformations receive it, before they clip it.
    - `micro_grad_norm`, `micro_grad_norm_std`: mean and standard deviation of ‖gᵢ‖.
    - `update_norm`, `update_ratio`: ‖update‖, and that over ‖params‖.
    - `loss`: the mean of `value=`, weighted as the gradients are, over the micro-steps that passed
      it; 0 where none did.
    - `weight`: N, over all devices. `micro_weight`: N over the number of micro-steps.
    - `num_skipped`: micro-steps that were rejected or had no weight, over all devices.
    - `every_k`: micro-steps that the window was to have.
    - `noise_scale`: B, in examples where weights count examples. A batch far smaller than B is
      mostly noise, one far larger hardly better than B (McCandlish et al., 2018). It is

          S = (Σ nᵢ‖gᵢ‖² - N‖ḡ‖²) / (k - 1),   |G|² = ‖ḡ‖² - S / N,   B = average S / average |G|²

      with averages over windows that decay by 0.99. S and |G|² are unbiased, for micro-batches of
      any sizes; their ratio in a window is not. A window of one micro-batch adds nothing. B is
      infinite where |G|² is not above 0, and -1 where it cannot be estimated yet.

    Args:
      opt_state: A state with one accumulator made with `monitor=True` in it.

    Returns:
      Float32 scalars of the last window that updated. Before the first they are 0, and
      `noise_scale` is -1; `gradient_step` tells.

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
    found = [state.extras["metrics"] for state in states if "metrics" in state.extras]
    if len(found) != 1:
        raise ValueError(
            "opt_state must hold one accumulator made with monitor=True, and no other one beside"
            f" it; got {len(found)} of {len(states)} accumulators with a monitor."
        )
    return {name: found[0][name] for name in _NAMES}


@dataclasses.dataclass(frozen=True)
class AdaptiveEveryK:
    """An `every_k` that follows the noise scale: what `adaptive_every_k` returns."""

    min_k: int
    max_k: int
    fraction: float

    def after(self, metrics: dict[str, jax.Array]) -> jax.Array:
        """The k of the window after the one with these metrics, int32 []."""
        wanted = self.fraction * ratio(metrics["noise_scale"], metrics["micro_weight"])
        # Written so that -1, and NaN of a gradient of NaN, give min_k.
        k = jnp.where(wanted > self.min_k, jnp.minimum(jnp.round(wanted), self.max_k), self.min_k)
        return k.astype(jnp.int32)


def adaptive_every_k(min_k: int, max_k: int, *, fraction: float = 1.0) -> AdaptiveEveryK:
    """Let the window grow and shrink with the measured noise scale B.

        k = fraction * B / (weight of a micro-step, over all devices)

    rounded, and from `min_k` to `max_k`. So a window holds `fraction * B` examples: at 1 an update
    costs twice the examples, and training twice the updates, of the least that each could be
    (McCandlish et al., 2018, section 2.2). k changes at boundaries only, and is the same on all
    devices, since what it follows is. Until B is known, k is `min_k`.

    Args:
      min_k: At least 2, for windows of one micro-batch measure no noise.
      max_k: At least `min_k`.
      fraction: Above 0; the part of B that a window holds.

    Returns:
      What `accumulate` takes as its `every_k`, with `monitor=True` and `weight=` the examples.

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
    _call_validation.check_count("min_k", min_k)
    _call_validation.check_count("max_k", max_k)
    _call_validation.check_positive("fraction", fraction)
    if not 2 <= min_k <= max_k:
        raise ValueError(
            "min_k must be at least 2, for windows of one micro-batch measure no noise, and at most"
            f" max_k; got min_k={min_k!r} and max_k={max_k!r}."
        )
    return AdaptiveEveryK(int(min_k), int(max_k), float(fraction))


def new_extras() -> dict[str, dict[str, jax.Array]]:
    """What a state has for a monitor, all of it float32 []."""
    sums = ("count", "norms", "squares", "weighted_squares", "loss", "loss_weight", "skipped")
    metrics = {name: jnp.zeros([], jnp.float32) for name in _NAMES}
    metrics["noise_scale"] -= 1
    averages = {name: jnp.zeros([], jnp.float32) for name in ("noise", "signal")}
    return {
        "monitor": {name: jnp.zeros([], jnp.float32) for name in sums},  # over micro-steps
        "metrics": metrics | averages,  # of the last window that updated
    }


def gathered(sums, gradients, unscale, value, factors, accepted):
    """The sums of a monitor with a micro-step.

    Args:
      sums: Of the window so far.
      gradients: Of the micro-step.
      unscale: What makes them those of the loss.
      value: Its loss, or None.
      factors: wᵢ, and what the gradient and the loss are multiplied by.
      accepted: Whether it counts.
    """
    weight, scale, value_scale = factors
    # Its mean gradient is gᵢ scale / wᵢ: gᵢ, or under "ratio" gᵢ / wᵢ.
    # Or XLA would widen narrow gradients once, for S and for this, and keep them.
    gradients = lax.optimization_barrier(gradients)
    per_weight = scale / (weight if isinstance(weight, int) else jnp.where(accepted, weight, 1))
    square = _float32(_square_norm(gradients, unscale)) * jnp.square(_float32(per_weight))
    new = {
        "count": 1.0,
        "norms": jnp.sqrt(square),
        "squares": square,
        "weighted_squares": square * _float32(weight),
    }
    if value is not None:
        loss = _validation.scalar("value", value, jnp.float32)
        new |= {"loss": loss * _float32(value_scale), "loss_weight": _float32(weight)}
    added = {name: _window.gathered(sums[name], x, 1, accepted) for name, x in new.items()}
    return sums | added | {"skipped": sums["skipped"] + jnp.where(accepted, 0.0, 1.0)}


def report(metrics, sums, window_weight, sum_norm, mean_of, micro_steps, every_k, updates, params):
    """The metrics of a window that updates.

    Args:
      metrics: Of the window before.
      sums: Of this one, over all devices.
      window_weight: W.
      sum_norm: ‖S‖.
      mean_of: What makes S what the inner transformations see, and 1 / W.
      micro_steps: Those of the window.
      every_k: Those that it was to have.
      updates: Of the inner transformations.
      params: Before the update, or None.
    """
    window_weight, sum_norm = _float32(window_weight), _float32(sum_norm)
    gradient_factor, norm_factor = map(_float32, mean_of)
    count = sums["count"]
    has_noise = count > 1
    mean_square = jnp.square(sum_norm * norm_factor)
    noise = sums["weighted_squares"] - window_weight * mean_square
    noise = noise / jnp.where(has_noise, count - 1, 1)
    signal = mean_square - ratio(noise, window_weight)

    def average(old, new):
        return jnp.where(has_noise, _DECAY * old + (1 - _DECAY) * new, old)

    noise, signal = average(metrics["noise"], noise), average(metrics["signal"], signal)
    no_signal = jnp.where(noise > 0, jnp.inf, -1.0)
    micro_norm = ratio(sums["norms"], count)
    variance = ratio(sums["squares"], count) - micro_norm**2
    update_norm = _float32(norm(updates))
    new = {
        "grad_norm": sum_norm * gradient_factor,
        "micro_grad_norm": micro_norm,
        "micro_grad_norm_std": jnp.sqrt(jnp.maximum(variance, 0)),
        "update_norm": update_norm,
        "update_ratio": 0.0 if params is None else ratio(update_norm, _float32(norm(params))),
        "loss": ratio(sums["loss"], sums["loss_weight"]),
        "weight": window_weight,
        "num_skipped": sums["skipped"],
        # Both are averaged alike, so that the bias of an average's beginning falls out.
        "noise_scale": jnp.where(signal > 0, noise / jnp.where(signal > 0, signal, 1), no_signal),
        "every_k": every_k,
        "micro_weight": ratio(window_weight, _float32(micro_steps)),
        "noise": noise,
        "signal": signal,
    }
    return {name: _float32(value) for name, value in new.items()}


def ratio(value: Any, over: Any) -> jax.Array:
    """`value / over`, and 0 for 0 / 0, on the way to which no NaN is made."""
    return jnp.where(value == 0, 0, value) / jnp.where(value == 0, 1, over)


def _float32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def norm(tree: Any, factor: Any = 1) -> jax.Array:
    """The root of the sum of the squares of all elements times `factor`, float32 [] or wider."""
    return jnp.sqrt(_square_norm(tree, factor))


def _square_norm(tree: Any, factor: Any) -> jax.Array:
    # Multiplied first: the squares of gradients of a scaled loss might overflow.
    leaves = [_window.times(x, factor, _wide(x)) for x in jax.tree.leaves(tree)]
    squares = [jnp.sum(jnp.square(jnp.abs(x))) for x in leaves]
    widest = functools.reduce(_validation.wider, [s.dtype for s in squares], jnp.float32)
    return sum([s.astype(widest) for s in squares], jnp.zeros([], widest))


def _wide(x):
    return _validation.wider(x.dtype, jnp.float32)
