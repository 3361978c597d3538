"""Batch statistics of a window, from those of its micro-batches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import is_real


def pool_batch_stats(
    means: jax.typing.ArrayLike, variances: jax.typing.ArrayLike, counts: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Pool means and variances of micro-batches into those of all their values together.

    With nᵢ values of mean μᵢ and (biased) variance σᵢ² in micro-batch i, and N = Σ nᵢ:

        mean = Σ nᵢ μᵢ / N        variance = Σ nᵢ (σᵢ² + μᵢ²) / N - mean²

    computed as Σ nᵢ (σᵢ² + (μᵢ - mean)²) / N, which loses nothing where means are large. Pooling
    is associative: pool what was pooled so far, counted as its N, with the next micro-batch, and
    a window needs the memory of one.

    A BatchNorm that updates its running statistics in each of k micro-steps multiplies the old
    ones by its momentum k times, and never sees the spread of the means. Pool the window, then
    apply the momentum once: `optax.incremental_update(pooled, running, 1 - momentum)`.

    Args:
      means: Floating [k, ...], those of the micro-batches stacked on axis 0, for any channels.
      variances: As `means`; divided by nᵢ, not by nᵢ - 1, as Flax has them.
      counts: Real [k], nᵢ >= 0. Their ratio alone matters: examples do, where all micro-batches
        have the same positions per example. An entry of count 0 adds nothing, even if it is NaN.
        Keep a count that grows as a float: an int32 ends at 2³¹ - 1.

    Returns:
      Mean and variance, shape [...], in the dtype of `means` and `variances`, computed no narrower
      than float32; NaN if all counts are 0.

    Raises:
      ValueError: The shapes do not fit each other, or means and variances are not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> mean, variance = pool_batch_stats(jnp.array([1.0, 11.0]), jnp.array([1.0, 1.0]), [2, 2])
      >>> print(mean, variance)  # of 0, 2, 10 and 12
      6.0 26.0

    References:
      Chan, Golub and LeVeque, 1983, Algorithms for Computing the Sample Variance.
    """
    means, variances = jnp.asarray(means), jnp.asarray(variances)
    _check_statistics(means, variances, counts)
    wide = jnp.float64 if jnp.float64 in (means.dtype, variances.dtype) else jnp.float32
    means_, variances_ = means.astype(wide), variances.astype(wide)
    counts = jnp.asarray(counts, wide)  # not int32, which ends at 2**31
    n = jnp.where(counts > 0, counts, 0).reshape(-1, *[1] * (means.ndim - 1))
    share = n / n.sum()
    # Around one of the means, so that a large common part cancels before it is rounded.
    origin = jnp.take(means_, jnp.argmax(n), axis=0)
    # Selected, since 0 * NaN is NaN.
    mu, var = jnp.where(n > 0, means_, origin), jnp.where(n > 0, variances_, 0)
    mean = origin + jnp.sum(share * (mu - origin), axis=0)
    variance = jnp.sum(share * (var + (mu - mean) ** 2), axis=0)
    return mean.astype(means.dtype), variance.astype(variances.dtype)


def pool_batch_collections(collections: Sequence[Any], counts: jax.typing.ArrayLike) -> Any:
    """Pool whole collections of batch statistics, one for each micro-batch.

    A collection is Linen's `batch_stats`, the NNX state of `nnx.BatchStat`, or any tree whose
    leaves are named `mean` and `var` side by side. It must hold the micro-batch's own statistics,
    not running ones: those that a BatchNorm of `momentum=0.0` leaves behind.

    Args:
      collections: k trees of one structure; see `pool_batch_stats`.
      counts: Real [k], nᵢ.

    Returns:
      A tree like each of them.

    Raises:
      ValueError: There is no collection, their trees differ, or a leaf is not a `mean` beside a
        `var`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> first = {"norm": {"mean": jnp.array([1.0]), "var": jnp.array([1.0])}}
      >>> second = {"norm": {"mean": jnp.array([11.0]), "var": jnp.array([1.0])}}
      >>> window = pool_batch_collections([first, second], counts=[2, 2])
      >>> running = {"norm": {"mean": jnp.array([0.0]), "var": jnp.array([1.0])}}
      >>> running = optax.incremental_update(window, running, 1 - 0.75)  # momentum, once
      >>> print(running["norm"]["mean"], running["norm"]["var"])
      [1.5] [7.25]
    """
    _check_collections(collections)
    leaves, treedef = tree_flatten_with_path(collections[0])
    stacked = [jnp.stack(same) for same in zip(*map(jax.tree.leaves, collections), strict=True)]
    by_names = {_names(path): leaf for (path, _), leaf in zip(leaves, stacked, strict=True)}
    pooled = {}
    for path, _ in leaves:
        mean, var = _siblings(_names(path))
        if mean not in by_names or var not in by_names:
            raise ValueError(
                "collections must hold a mean beside each var and nothing else (take Linen's"
                f" 'batch_stats' or nnx.state(model, nnx.BatchStat)), got {keystr(path)}."
            )
        if mean not in pooled:
            pooled[mean], pooled[var] = pool_batch_stats(by_names[mean], by_names[var], counts)
    return treedef.unflatten(pooled[_names(path)] for path, _ in leaves)


def _names(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A leaf's path as plain names."""
    return tuple(
        getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path
    )


def _siblings(names: tuple[Any, ...]) -> tuple[Any, Any]:
    """The names of the mean and of the variance that belong together, or twice None."""
    for i in reversed(range(len(names))):  # NNX has more after it, as in ('mean', 'value')
        if names[i] in ("mean", "var"):
            return tuple((*names[:i], name, *names[i + 1 :]) for name in ("mean", "var"))
    return None, None


def _check_statistics(means: jax.Array, variances: jax.Array, counts: Any) -> None:
    """Require stacked statistics and a count for each."""
    for name, x in (("means", means), ("variances", variances)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got dtype {x.dtype}.")
    counts_dtype = jnp.result_type(*jax.tree.leaves(counts), jnp.int8)
    if not is_real(counts_dtype):
        raise ValueError(f"counts must be real, got dtype {counts_dtype}.")
    counts_shape = (len(counts),) if isinstance(counts, list | tuple) else jnp.shape(counts)
    is_stacked = means.ndim and len(means) and means.shape == variances.shape
    if not is_stacked or counts_shape != means.shape[:1]:
        raise ValueError(
            "means and variances must have one shape (k, ...) and counts the shape (k,), k >= 1;"
            f" got {means.shape}, {variances.shape} and {counts_shape}."
        )


def _check_collections(collections: Any) -> None:
    """Require a sequence of trees of one structure and of one shape for each leaf."""
    is_sequence = isinstance(collections, tuple | list)
    if not is_sequence or not collections:
        raise ValueError(
            "collections must be a list or tuple of one collection for each micro-batch, got"
            f" {'an empty one' if is_sequence else type(collections).__name__}."
        )
    shapes = [
        {keystr(path): jnp.shape(leaf) for path, leaf in tree_flatten_with_path(collection)[0]}
        for collection in collections
    ]
    for i, (collection, each) in enumerate(zip(collections, shapes, strict=True)):
        differ = sorted(p for p in {*each, *shapes[0]} if each.get(p) != shapes[0].get(p))
        if differ:
            raise ValueError(
                f"collections must have one structure and one shape for each leaf;"
                f" {differ[0]} has {shapes[0].get(differ[0], 'no leaf')} in collections[0] and"
                f" {each.get(differ[0], 'no leaf')} in collections[{i}]."
            )
        if jax.tree.structure(collection) != jax.tree.structure(collections[0]):
            raise ValueError(
                f"collections must have one structure; collections[{i}] has the leaves of"
                " collections[0] in other containers."
            )
