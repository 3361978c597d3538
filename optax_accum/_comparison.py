"""The gradients of a big batch and of its window side by side, and why they differ."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._model import Model, take

_CHANCE = 10  # standard errors


class Comparison(NamedTuple):
    """The gradients of the big batch and of its window; leaves are flat and in double precision."""

    names: list[str]
    big: list[np.ndarray]
    window: list[np.ndarray]
    micro: list[list[np.ndarray]]  # of the micro-batches that count
    micro_trees: list[Any]  # the same as they were
    jitter: list[float]  # how far big moves with the last digit of the parameters
    draws: list[Any]  # (big, window) of each, thinned; [] where the loss is not random
    size: int  # examples in the batch
    eps: float  # of the narrowest dtype that is computed with
    is_noisy: bool  # random, and another in each draw
    one_key: bool  # random, and the same in each draw
    statistics: list[str]  # state that loss_fn changes
    model: Model
    excused: list[bool]  # where a difference is no fault

    def tolerances(self) -> list[float]:
        """What each parameter's gradient may differ by, in the norm, from rounding."""
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

    def reason(self, batch: Any) -> str:
        """The likely reason of the difference, and what helps."""
        big, window = np.concatenate(self.big), np.concatenate(self.window)
        factor = float(np.vdot(window, big).real / max(np.vdot(window, window).real, 1e-300))
        if abs(factor - 1) > 0.01 and not any(self.residuals(factor)):
            return (
                f"a common factor. The big batch's gradient is {factor:.4g} times the window's: a"
                " sum that was never normalised, or a loss that is divided by k already. Let the"
                ' loss be a mean over examples, or take normalize="sum" or "ratio".'
            )
        shares = self._shares()
        if shares is not None and len(shares) > 1 and np.allclose(shares, 1, atol=0.01):
            return (
                "a common factor. The big batch's gradient is the sum of the micro-batches', not"
                " their mean. Let the loss be a mean over examples, or take"
                ' normalize="sum" or "ratio".'
            )
        if shares is not None:
            parts = [f"{share:.3f}" for share in shares / shares.sum()]
            return (
                "a loss that is not a mean over examples but weighted, over tokens say. Pass the"
                " weights as weight_fn=, and as weight= to tx.update; what fits here is"
                f" {', '.join(parts[:8])}{', ...' if len(parts) > 8 else ''} of the whole."
            )
        if self.statistics:
            return (
                f"batch statistics. loss_fn changes {self.statistics[0]}: a layer with such"
                " statistics (BatchNorm) normalises by its micro-batch. Use GroupNorm or LayerNorm,"
                " or freeze them within the window. If it is no such layer's, the loss is not a"
                " mean over examples."
            )
        if self.one_key:
            return (
                "one random key for all micro-batches, each of which sees the same dropout mask."
                " Let loss_fn take a key (pass rng=), and split it in each micro-step. If nothing"
                " random differs between examples, the loss is not a mean over them."
            )
        if not self.draws:
            model, order = self.model, np.random.default_rng(0).permutation(self.size)
            again, _ = model.big_gradient(
                model.params, model.state, take(batch, order), *model.keys(0)
            )
            moved = [norm(b - a) for b, a in zip(self.big, vectors(again), strict=True)]
            if any(m > t for m, t in zip(moved, self.tolerances(), strict=True)):
                return (
                    "a loss that depends on the order of its examples, and is not a mean over"
                    " examples."
                )
        return (
            "a loss that is not a mean over examples: in a contrastive or auxiliary loss and in"
            " BatchNorm (batch statistics, which loss_fn does not return) the examples of a batch"
            " see each other."
        )

    def _shares(self) -> np.ndarray | None:
        """Shares of the micro-batches, in place of their weights, that give the big batch."""
        # Each parameter in units of what it may be off by, since all must fit.
        units = np.repeat(np.maximum(self.tolerances(), 1e-300), [leaf.size for leaf in self.big])
        micro = np.stack([np.concatenate(leaves) for leaves in self.micro], axis=1) / units[:, None]
        if self.draws or len(micro) < 4 * micro.shape[1]:
            return None  # with so few parameters, some shares would always fit
        shares, *_ = np.linalg.lstsq(micro, np.concatenate(self.big) / units)
        misfit = units * (np.concatenate(self.big) / units - micro @ shares)
        parts = np.split(misfit, np.cumsum([leaf.size for leaf in self.big])[:-1])
        fits = all(norm(p) <= 3 * t for p, t in zip(parts, self.tolerances(), strict=True))
        shares = shares.real
        return shares if fits and (shares > -1e-3 * shares.sum()).all() else None


def _is_shifted(draws: list[np.ndarray]) -> bool:
    """Whether the mean of independent draws of a vector is not 0, by more than chance.

    Inner products of different draws average to the squared norm of the mean, whatever the noise.
    """
    n, x = len(draws), np.stack(draws)
    products = np.real(x.conj() @ x.T)[~np.eye(n, dtype=bool)]
    spread = np.sqrt(2 * np.mean(products**2) / (n * (n - 1)))
    return bool(products.mean() > _CHANCE * spread)


def vectors(tree) -> list[np.ndarray]:
    """The leaves in double precision, flat."""
    wide = lambda x: np.complex128 if jnp.iscomplexobj(x) else np.float64
    return [np.asarray(x).astype(wide(x)).ravel() for x in jax.tree.leaves(tree)]


def norm(values) -> float:
    return float(np.linalg.norm(values))
