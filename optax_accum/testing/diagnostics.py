"""Why a window does not give the gradient of its big batch."""

import numpy as np

from optax_accum._checks import PyTree
from optax_accum.testing.comparison import Comparison, norm, vectors
from optax_accum.testing.model_adapter import take

_SHOWN_SHARES = 8  # in a message


def likely_reason(comparison: Comparison, batch: PyTree) -> str:
    """The likely reason of the difference, and what helps."""
    return (
        _common_factor(comparison)
        or _weighted_loss(comparison)
        or _batch_statistics(comparison)
        or _repeated_draws(comparison)
        or _order_of_examples(comparison, batch)
        or "a loss that is not a mean over examples: in a contrastive or auxiliary loss and in"
        " BatchNorm (batch statistics, which loss_fn does not return) the examples of a batch"
        " see each other."
    )


def _common_factor(comparison: Comparison) -> str | None:
    big, window = np.concatenate(comparison.big), np.concatenate(comparison.window)
    factor = float(np.vdot(window, big).real / max(np.vdot(window, window).real, 1e-300))
    if abs(factor - 1) > 0.01 and not any(comparison.residuals(factor)):
        return (
            f"a common factor. The big batch's gradient is {factor:.4g} times the window's: a"
            " sum that was never normalised, or a loss that is divided by k already. Let the"
            ' loss be a mean over examples, or take normalize="sum" or "ratio".'
        )
    return None


def _weighted_loss(comparison: Comparison) -> str | None:
    shares = _shares(comparison)
    if shares is None:
        return None
    if len(shares) > 1 and np.allclose(shares, 1, atol=0.01):
        return (
            "a common factor. The big batch's gradient is the sum of the micro-batches', not"
            " their mean. Let the loss be a mean over examples, or take"
            ' normalize="sum" or "ratio".'
        )
    parts = [f"{share:.3f}" for share in shares / shares.sum()]
    more = ", ..." if len(parts) > _SHOWN_SHARES else ""
    return (
        "a loss that is not a mean over examples but weighted, over tokens say. Pass the"
        " weights as weight_fn=, and as weight= to tx.update; what fits here is"
        f" {', '.join(parts[:_SHOWN_SHARES])}{more} of the whole."
    )


def _batch_statistics(comparison: Comparison) -> str | None:
    if not comparison.statistics:
        return None
    return (
        f"batch statistics. loss_fn changes {comparison.statistics[0]}: a layer with such"
        " statistics (BatchNorm) normalises by its micro-batch. Use GroupNorm or LayerNorm,"
        " or freeze them within the window. If it is no such layer's, the loss is not a"
        " mean over examples."
    )


def _repeated_draws(comparison: Comparison) -> str | None:
    if not comparison.draws_repeat:
        return None
    return (
        "one random key for all micro-batches, each of which sees the same dropout mask."
        " Let loss_fn take a key (pass rng=), and split it in each micro-step. If nothing"
        " random differs between examples, the loss is not a mean over them."
    )


def _order_of_examples(comparison: Comparison, batch: PyTree) -> str | None:
    if comparison.draws:
        return None
    model, order = comparison.model, np.random.default_rng(0).permutation(comparison.size)
    permuted, _ = model.big_gradient(model.params, model.state, take(batch, order), *model.keys(0))
    pairs = zip(comparison.big, vectors(permuted), strict=True)
    moved = [norm(new - old) for old, new in pairs]
    if any(m > t for m, t in zip(moved, comparison.tolerances(), strict=True)):
        return "a loss that depends on the order of its examples, and is not a mean over examples."
    return None


def _shares(comparison: Comparison) -> np.ndarray | None:
    """Shares of the micro-batches, in place of their weights, that give the big batch."""
    tolerances, sizes = comparison.tolerances(), [leaf.size for leaf in comparison.big]
    # Each parameter in units of what it may be off by, since all must fit.
    units = np.repeat(np.maximum(tolerances, 1e-300), sizes)
    big = np.concatenate(comparison.big)
    micro = np.stack([np.concatenate(leaves) for leaves in comparison.micro], axis=1)
    micro = micro / units[:, None]
    if comparison.draws or len(micro) < 4 * micro.shape[1]:
        return None  # with so few parameters, some shares would always fit
    shares, *_ = np.linalg.lstsq(micro, big / units)
    misfit = units * (big / units - micro @ shares)
    parts = np.split(misfit, np.cumsum(sizes)[:-1])
    fits = all(norm(p) <= 3 * t for p, t in zip(parts, tolerances, strict=True))
    shares = shares.real
    return shares if fits and (shares > -1e-3 * shares.sum()).all() else None
