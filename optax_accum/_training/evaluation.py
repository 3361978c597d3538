"""Diagnostics outside of the training step: sharpness, and the ranges of moments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from optax_accum import _checks
from optax_accum._checks import PyTree, Scalar
from optax_accum._core.arithmetic import norm
from optax_accum._core.state import AccumulateState


def sharpness(
    loss_fn: Callable[[Any], jax.Array],
    params: optax.Params,
    key: jax.Array,
    *,
    radius: float,
    num_samples: int = 8,
) -> jax.Array:
    """Estimate how much the loss rises around `params`, by random perturbation.

    With u uniform among the directions of length 1 in the space of all parameters:

        E[(L(params + radius u) + L(params - radius u)) / 2] - L(params)

    that is radius² / 2 times the mean curvature, where L is quadratic that far. The two sides
    cancel the slope, which a direction alone would measure. It takes 2 `num_samples` + 1
    evaluations of the loss, one after the other.

    Args:
      loss_fn: `loss_fn(params)`, a real scalar, the same in each call: of a fixed batch, without
        dropout.
      params: Tree of floating arrays.
      key: PRNG key. The same key tries the same directions.
      radius: Length of the perturbation, above 0. To compare networks of other norms, take a part
        of the norm of `params`.
      num_samples: Directions, at least 1.

    Returns:
      Scalar, in the dtype of the loss.

    Raises:
      ValueError: An argument breaks its rule.

    Example:
      The mean curvature of a quadratic, of 1 and 3:

      >>> import jax, jax.numpy as jnp
      >>> loss_fn = lambda w: (1.0 * w[0] ** 2 + 3.0 * w[1] ** 2) / 2
      >>> key = jax.random.key(0)
      >>> rise = sharpness(loss_fn, jnp.array([5.0, 7.0]), key, radius=0.1, num_samples=1000)
      >>> print(f"{2 * rise / 0.1**2:.1f}")
      2.0

    References:
      Keskar et al., 2017, On Large-Batch Training for Deep Learning (arXiv:1609.04836), there for
      the largest rise in a box; Jiang et al., 2019, Fantastic Generalization Measures
      (arXiv:1912.02178), for random perturbations.
    """
    _checks.check_function("loss_fn", loss_fn)
    _checks.check_inexact(params, "params")
    _checks.check_count("num_samples", num_samples)
    _checks.check_positive("radius", radius)

    def loss(params: PyTree) -> Scalar:
        return _checks.checked_loss(loss_fn(params))

    def rise(key: jax.Array) -> Scalar:
        noise = optax.tree.random_like(key, params)
        step = radius / norm(noise)

        def loss_at(sign: int) -> Scalar:
            return loss(jax.tree.map(lambda p, u: p + sign * step * u, params, noise))

        return (loss_at(1) + loss_at(-1)) / 2

    return jnp.mean(lax.map(rise, jax.random.split(key, num_samples))) - loss(params)


def moment_ranges(opt_state: optax.OptState) -> dict[str, dict[str, jax.Array]]:
    """Report the ranges of what an optimizer remembers of gradients, by name.

    Args:
      opt_state: State of an optimizer; of accumulators in it, what is theirs is left out.

    Returns:
      For each field of a state that holds floating arrays (Adam's `mu` and `nu`, say), `min`, `max`
      and `rms` over all their elements: scalars. The name is the field's, or its whole path where
      several have one name.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> tx = accumulate(2, optax.adam(0.1, b1=0.5))
      >>> state = tx.init(jnp.zeros(2))
      >>> for gradient in (jnp.array([1.0, -2.0]), jnp.array([1.0, -2.0])):
      ...     _, state = tx.update(gradient, state)
      >>> ranges = moment_ranges(state)
      >>> print(*ranges, ranges["mu"]["min"], ranges["mu"]["max"])
      mu nu -1.0 0.5
    """
    fields: dict[tuple[Any, ...], list[jax.Array]] = {}
    for path, leaf in tree_flatten_with_path(opt_state)[0]:
        named = [i for i, entry in enumerate(path) if isinstance(entry, GetAttrKey)]
        if not named or path[named[-1]].name in AccumulateState._fields:  # a window's own
            continue
        if jnp.ndim(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            fields.setdefault(path[: named[-1] + 1], []).append(leaf)
    names = [path[-1].name for path in fields]

    def name(path: tuple[Any, ...]) -> str:
        return path[-1].name if names.count(path[-1].name) == 1 else keystr(path)

    return {name(path): _range(leaves) for path, leaves in fields.items()}


def _range(leaves: list[jax.Array]) -> dict[str, jax.Array]:
    """Minimum, maximum and root mean square of all elements of a field."""
    size = sum(x.size for x in leaves)
    return {
        "min": jnp.stack([jnp.min(x) for x in leaves]).min(),
        "max": jnp.stack([jnp.max(x) for x in leaves]).max(),
        "rms": norm(leaves) / size**0.5,
    }
