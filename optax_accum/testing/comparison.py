"""The gradients of a big batch and of its window, and how far they differ."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._checks import PyTree
from optax_accum.testing.model_adapter import Model

_CHANCE = 10  # standard errors


class Comparison(NamedTuple):
    """The gradients of the big batch and of its window; leaves are flat and in double precision."""

    names: list[str]
    big: list[np.ndarray]
    window: list[np.ndarray]
    micro: list[list[np.ndarray]]  # of the micro-batches that are not rejected
    micro_trees: list[PyTree]  # the same, as trees in their own dtypes
    jitter: list[float]  # how far big moves with the last digit of the parameters
    draws: list[Any]  # thinned (big, window) of each draw; [] where the loss is not random
    size: int  # examples in the batch
    eps: float  # of the narrowest dtype that is computed with
    draws_differ: bool  # the loss is random, and each draw differs
    draws_repeat: bool  # the loss is random, and each draw is the same
    statistics: list[str]  # state that loss_fn changes
    model: Model
    excused: list[bool]  # the parameters whose difference is no fault

    def tolerances(self) -> list[float]:
        """The norm of the difference that rounding may cause, for each parameter."""
        scales = self.scales()
        # Sums are in float32 at least; examples that cancel leave their rounding behind.
        sums = min(self.eps, float(np.finfo(np.float32).eps)) * self.size**0.5
        return [
            (3 * self.eps + sums) * scale + self.eps * norm(scales) + 6 * jitter
            for scale, jitter in zip(scales, self.jitter, strict=True)
        ]

    def scales(self) -> list[float]:
        """Norms of what is summed: where a big batch's gradient cancels, its rounding does not."""
        norms = [[norm(leaf) for leaf in leaves] for leaves in (self.big, *self.micro)]
        return np.max(norms, axis=0).tolist()

    def residuals(self, factor: float = 1.0) -> list[float]:
        """Norms of big - factor * window, 0 where rounding or chance explains them."""
        norms = []
        for i, tolerance in enumerate(self.tolerances()):
            size = norm(self.big[i] - factor * self.window[i])
            differences = [big[i] - factor * window[i] for big, window in self.draws]
            is_chance = bool(differences) and not _is_shifted(differences)
            is_small = size <= max(1.0, abs(factor)) * tolerance
            norms.append(0.0 if is_small or is_chance or self.excused[i] else size)
        return norms

    def faults(self) -> list[str]:
        """A line for each parameter that differs, the worst first."""
        lines = []
        for name, residual, scale, tolerance in zip(
            self.names, self.residuals(), self.scales(), self.tolerances(), strict=True
        ):
            if residual:
                line = f"  {name}: by {residual / scale:.1e} of its gradient"
                lines.append((residual / scale, f"{line} (rounding: < {tolerance / scale:.0e})"))
        return [line for _, line in sorted(lines, reverse=True)]


def _is_shifted(draws: list[np.ndarray]) -> bool:
    """Whether the mean of independent draws of a vector is not 0, by more than chance.

    Inner products of different draws average to the squared norm of the mean, whatever the noise.
    """
    n, x = len(draws), np.stack(draws)
    products = np.real(x.conj() @ x.T)[~np.eye(n, dtype=bool)]
    spread = np.sqrt(2 * np.mean(products**2) / (n * (n - 1)))
    return bool(products.mean() > _CHANCE * spread)


def vectors(tree: PyTree) -> list[np.ndarray]:
    """The leaves in double precision, flat."""

    def vector(leaf: Any) -> np.ndarray:
        wide = np.complex128 if jnp.iscomplexobj(leaf) else np.float64
        return np.asarray(leaf).astype(wide).ravel()

    return [vector(leaf) for leaf in jax.tree.leaves(tree)]


def norm(values: Any) -> float:
    """The root of the sum of squares."""
    return float(np.linalg.norm(values))
