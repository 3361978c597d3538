"""Hyper-parameters for another batch size, and a batch size that grows."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import optax

from optax_accum import _checks


def _kept(value: Any, ratio: float) -> Any:
    del ratio
    return value


def _times_ratio(value: Any, ratio: float) -> Any:
    return ratio * value


def _times_root(value: Any, ratio: float) -> Any:
    return math.sqrt(ratio) * value


def _over_root(value: Any, ratio: float) -> Any:
    return value / math.sqrt(ratio)


def _to_the_ratio(decay: Any, ratio: float) -> Any:
    return decay**ratio


def _times_ratio_from_1(decay: Any, ratio: float) -> Any:
    """1 - κ(1 - β), written so that κ = 1 changes no bit of β."""
    return decay - (ratio - 1) * (1 - decay)


def _is_non_negative(value: float) -> bool:
    return 0 <= value < math.inf


def _is_decay(value: float) -> bool:
    return 0 <= value < 1


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (_is_non_negative, "a finite number of at least 0 or a schedule"),
    "momentum": (_is_decay, "a number of at least 0 and below 1"),
    "b1": (_is_decay, "a number of at least 0 and below 1"),
    "b2": (_is_decay, "a number of at least 0 and below 1"),
    "eps": (_is_non_negative, "a finite number of at least 0"),
    "ema_decay": (_is_decay, "a number of at least 0 and below 1"),
}

_RULES: dict[str, dict[str, Callable[[Any, float], Any]]] = {
    "linear": {"learning_rate": _times_ratio, "ema_decay": _to_the_ratio},
    "sqrt": {"learning_rate": _times_root, "ema_decay": _to_the_ratio},
    "adam_sde": {
        "learning_rate": _times_root,
        "b1": _times_ratio_from_1,
        "b2": _times_ratio_from_1,
        "eps": _over_root,
        "ema_decay": _to_the_ratio,
    },
    "half_life": dict.fromkeys(("momentum", "b1", "b2", "ema_decay"), _to_the_ratio),
    "none": {},
}


def scale_hyperparams(
    batch_ratio: float, rule: str, **hyperparams: float | _checks.Schedule
) -> dict[str, Any]:
    """Scale an optimizer's hyper-parameters for a batch `batch_ratio` times as large.

    With κ = `batch_ratio`, each rule takes a hyper-parameter to what its column says. It keeps the
    hyper-parameters that it does not cover (-).

        rule             linear    sqrt     adam_sde        half_life    none
        learning_rate    κ η       √κ η     √κ η            -            -
        momentum         -         -        -               μ^κ          -
        b1, b2           -         -        1 - κ(1 - β)    β^κ          -
        eps              -         -        ε / √κ          -            -
        ema_decay        δ^κ       δ^κ      δ^κ             δ^κ          -

    All of them compare runs over the same number of examples, in 1/κ as many gradient steps.
    Scaling by one ratio and then by another is scaling by their product. None of them holds for a
    batch so large that little noise is left in its gradient.

    - `"linear"`, for SGD: κ steps of η are one of κη as long as the gradient hardly changes in
      between [1]. It does in the first epochs, so warm up: from η to κη in five epochs, say, with
      `optax.linear_schedule`. On ImageNet it holds up to batches of some 8,000 images. Momentum
      stays; what `optax.trace` gathers has no learning rate in it and needs no correction when
      that changes.
    - `"sqrt"`, for SGD: the covariance of a single step stays, η² Σ / B for a gradient of
      covariance Σ per example [2, 3]. Over the same examples the parameters then move √κ times
      less far, and [2], which derives it, finds `"linear"` to work better. With Adam it is the
      learning rate's part of `"adam_sde"`.
    - `"adam_sde"`, for Adam and RMSprop (whose decay is a `b2`): η² / B, (1 - β) / η² and ηε stay,
      and so does the stochastic differential equation that the optimizer approximates [4]. It
      does so for small η, and where noise outweighs the gradient in each entry. κ(1 - β) must be
      below 1, and the approximation is good where it is far below.
    - `"half_life"`, for moments: a gradient's part in a moment halves over the same number of
      examples. [5] finds this for `b2`, from batches of 1 to 4096 sequences in language models, and
      keeps `b1`; its best learning rate grows far more slowly than √κ (some 3 times for κ = 1024),
      by no formula. To first order in 1 - β, `"adam_sde"` does the same. (`optax.trace` sums, and
      does not average: by a momentum of μ^κ its steps get smaller by (1 - μ) / (1 - μ^κ).)
    - `"none"` changes nothing.

    An average of the parameters, updated once per gradient step, decays by δ^κ under all rules
    but `"none"` [6]: exact while the parameters stand still for κ of the old steps, close while
    they go slowly.

    Args:
      batch_ratio: κ > 0, the new effective batch (micro-batch times k times devices) over the old.
      rule: `"linear"`, `"sqrt"`, `"adam_sde"`, `"half_life"` or `"none"`.
      **hyperparams: Any of `learning_rate`, `momentum`, `b1`, `b2`, `eps` and `ema_decay`.
        `learning_rate` may be a schedule. `eps` is the one that is added to the root, as
        `optax.adam` does, and `optax.rmsprop` with `eps_in_sqrt=False`.

    Returns:
      A dict of those that were given: floats, and for a schedule a schedule, whose values are
      scaled and whose argument is not: it counts gradient steps, of which an epoch has 1/κ as many
      now.

    Raises:
      ValueError: `batch_ratio` is not a finite number above 0; the rule or a name is unknown; a
        value is out of its range, or would be when scaled (under `"adam_sde"`, κ(1 - β) >= 1).

    Example:
      >>> import optax
      >>> from optax_accum import accumulate
      >>> scaled = scale_hyperparams(4, "adam_sde", learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8)
      >>> for name, value in scaled.items():
      ...     print(f"{name} {value:.3g}")
      learning_rate 0.002
      b1 0.6
      b2 0.996
      eps 5e-09
      >>> tx = accumulate(4, optax.adam(**scaled))

    References:
      [1] Goyal et al., 2017, Accurate, Large Minibatch SGD (arXiv:1706.02677). [2] Krizhevsky,
      2014, One weird trick for parallelizing convolutional neural networks (arXiv:1404.5997).
      [3] Hoffer et al., 2017, Train longer, generalize better (arXiv:1705.08741). [4] Malladi et
      al., 2022, On the SDEs and Scaling Rules for Adaptive Gradient Algorithms (arXiv:2205.10287).
      [5] Marek et al., 2025, Small Batch Size Training for Language Models (arXiv:2507.07101).
      [6] Busbridge et al., 2023, How to Scale Your EMA (arXiv:2307.13813).
    """
    ratio = _real(batch_ratio)
    if not 0 < ratio < math.inf:
        raise ValueError(
            "batch_ratio must be a finite number above 0, the new batch over the old; got"
            f" {batch_ratio!r}."
        )
    _checks.check_choice("rule", rule, tuple(_RULES))
    for name, value in hyperparams.items():
        check_hyperparam(name, value)
    return {name: _scaled(rule, ratio, name, value) for name, value in hyperparams.items()}


def batch_growth(start: int, stop: int, steps: int, microbatch_size: int) -> _checks.Schedule:
    """Let the effective batch go linearly from `start` to `stop`, as a schedule for `every_k`.

    At gradient step t, counted from 0:

        batch = start + (stop - start) min(t / steps, 1)        k = batch / microbatch_size

    `accumulate` rounds k to the nearest whole number, so that a window holds the multiple of
    `microbatch_size` nearest to `batch`. Whatever k is, the window's gradient is the mean over
    what it holds. A window keeps the k with which it began.

    Args:
      start: Examples in the first window.
      stop: Examples in a window from gradient step `steps` on. Below `start`, the batch shrinks.
      steps: Gradient steps from the one to the other.
      microbatch_size: Examples in one micro-step, on all devices together; at most `start` and
        `stop`, since k is at least 1.

    Returns:
      A function of the gradient step (int32 scalar), for the real number k.

    Raises:
      ValueError: An argument is not an int of at least 1, `microbatch_size` is above `start` or
        `stop`, or `steps` above 2³¹ - 1.

    Example:
      >>> import optax
      >>> from optax_accum import accumulate
      >>> every_k = batch_growth(256, 2048, steps=1000, microbatch_size=64)
      >>> [float(every_k(t)) for t in (0, 500, 1000, 9000)]
      [4.0, 18.0, 32.0, 32.0]
      >>> tx = accumulate(every_k, optax.adam(1e-3))

    References:
      Smith et al., 2018, Don't Decay the Learning Rate, Increase the Batch Size (arXiv:1711.00489),
      for a batch that grows in place of a learning rate that falls; Brown et al., 2020, Language
      Models are Few-Shot Learners (arXiv:2005.14165), for a linear growth at the start of training.
    """
    sizes = {"start": start, "stop": stop, "steps": steps, "microbatch_size": microbatch_size}
    for name, value in sizes.items():
        _checks.check_count(name, value)
    if steps >= 2**31:
        raise ValueError(f"steps must be below 2**31, as an int32 counts them, got {steps!r}.")
    if microbatch_size > min(start, stop):
        raise ValueError(
            "microbatch_size must be at most start and stop, since a window has at least one"
            f" micro-batch; got microbatch_size={microbatch_size!r}, start={start!r} and"
            f" stop={stop!r}."
        )
    first, last = int(start) / int(microbatch_size), int(stop) / int(microbatch_size)
    return optax.linear_schedule(first, last, int(steps))


def check_hyperparam(name: str, value: Any) -> None:
    """Require a known hyper-parameter in its own range."""
    if name not in _RANGES:
        raise ValueError(
            f"hyperparams must be among {', '.join(_RANGES)}, as optax names them; got"
            f" {name}={value!r}."
        )
    is_in_range, description = _RANGES[name]
    if not (name == "learning_rate" and callable(value)) and not is_in_range(_real(value)):
        raise ValueError(f"{name} must be {description}, got {value!r}.")


def _scaled(rule: str, ratio: float, name: str, value: Any) -> Any:
    """A hyper-parameter under a rule: a float, or a schedule for a schedule."""
    scale = _RULES[rule].get(name, _kept)
    if callable(value):
        return lambda gradient_step: scale(value(gradient_step), ratio)
    number = _real(value)
    rate = ratio * (1 - number)
    # 10 * (1 - 0.9) is 1 but for its rounding.
    if scale is _times_ratio_from_1 and ratio > 1 and (rate > 1 or math.isclose(rate, 1)):
        raise ValueError(
            f"rule {rule!r} must have batch_ratio * (1 - {name}) below 1, since {name} becomes 1"
            f" minus that; got batch_ratio={ratio!r} and {name}={value!r}. Rule 'half_life' has no"
            " such bound."
        )
    scaled = scale(number, ratio)
    is_in_range, description = _RANGES[name]
    if not is_in_range(scaled):
        raise ValueError(
            f"{name} scaled by rule {rule!r} must be {description} too; batch_ratio={ratio!r} takes"
            f" {value!r} to {scaled!r}."
        )
    return scaled


def _real(value: Any) -> float:
    """A real number as a float; NaN, which is in no range, for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
