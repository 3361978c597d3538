"""Pooled batch statistics are those of all the values of the window together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from hypothesis import given, strategies as st

from optax_accum import pool_batch_collections, pool_batch_stats


def split_statistics(parts):
    return (
        np.stack([part.mean(0) for part in parts]),
        np.stack([part.var(0) for part in parts]),
        np.array([len(part) for part in parts]),
    )


@st.composite
def windows(draw):
    """Values [N, 3] in micro-batches of uneven sizes, around a mean that may be large."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    center, spread = draw(st.sampled_from([0.0, 1.0, -1e3, 1e5])), draw(st.sampled_from([1, 1e-2]))
    values = center + spread * rng.normal(size=(sum(sizes), 3))
    return np.split(values, np.cumsum(sizes)[:-1])


@given(windows())
def test_the_window_has_the_mean_and_variance_of_all_its_values(parts):
    with jax.enable_x64(True):
        mean, variance = pool_batch_stats(*split_statistics(parts))
    together = np.concatenate(parts)
    np.testing.assert_allclose(mean, together.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(variance, together.var(0), rtol=1e-7, atol=1e-12)


@given(windows(), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
def test_narrow_statistics_are_pooled_in_float32_and_keep_their_dtype(parts, dtype):
    means, variances, counts = split_statistics([part - part.mean() for part in parts])
    means, variances = jnp.asarray(means, dtype), jnp.asarray(variances, dtype)
    got = pool_batch_stats(means, variances, counts)
    wide = pool_batch_stats(means.astype(jnp.float32), variances.astype(jnp.float32), counts)
    for x, y in zip(got, wide, strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(x, y.astype(dtype))


@given(windows(), st.booleans())
def test_pooling_is_associative_and_starts_from_nothing(parts, starts_from_nan):
    means, variances, counts = split_statistics(parts)
    with jax.enable_x64(True):
        expected = pool_batch_stats(means, variances, counts)
        so_far = (
            (jnp.full(3, jnp.nan), jnp.zeros(3)) if starts_from_nan else (jnp.zeros(3), jnp.ones(3))
        )
        count = 0
        for mean, variance, n in zip(means, variances, counts, strict=True):
            stacked = [jnp.stack(pair) for pair in zip(so_far, (mean, variance), strict=True)]
            so_far, count = pool_batch_stats(*stacked, jnp.stack([count, n])), count + n
    np.testing.assert_allclose(so_far[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(so_far[1], expected[1], rtol=1e-6, atol=1e-12)


@given(windows())
def test_only_the_ratio_of_the_counts_matters(parts):
    means, variances, counts = split_statistics(parts)
    pooled = pool_batch_stats(means, variances, counts)
    for got, want in zip(pool_batch_stats(means, variances, 64 * counts), pooled, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_spread_of_the_means_counts():
    mean, variance = pool_batch_stats([1.0, 11.0], [1.0, 1.0], [2, 2])  # {0, 2} and {10, 12}
    assert (mean, variance) == (6, 26)


def test_large_means_lose_nothing_in_float32():
    means, variances = jnp.array([[1e4], [1e4]]), jnp.array([[1.0], [3.0]])
    mean, variance = pool_batch_stats(means, variances, [1, 3])
    assert (mean, variance) == (1e4, 2.5)
    naive = jnp.average(variances + means**2, axis=0, weights=jnp.array([1.0, 3.0])) - mean**2
    assert abs(naive - 2.5) > 1  # what the formula gives as it is written


def test_a_micro_batch_of_count_0_adds_nothing_and_no_values_have_no_mean():
    nothing = jnp.array([jnp.nan, 5.0])
    mean, variance = pool_batch_stats(nothing, nothing, [0, 2])
    assert (mean, variance) == (5, 5)
    assert np.isnan(pool_batch_stats(nothing, nothing, [0, 0])).all()


@pytest.mark.parametrize("count", [3_000_000_000, 2**60, 1e30, 1e-30])
def test_counts_of_any_size_are_a_ratio(count):
    for counts in ([3 * count, count], np.array([3 * count, count])):
        mean, variance = pool_batch_stats([1.0, 5.0], [1.0, 1.0], counts)
        np.testing.assert_allclose([mean, variance], [2, 4], rtol=1e-6)


def test_it_jits_and_differentiates():
    def variance(means):
        return pool_batch_stats(means, jnp.ones(2), jnp.array([1.0, 3.0]))[1]

    gradient = jax.jit(jax.grad(variance))(jnp.array([0.0, 4.0]))
    np.testing.assert_allclose(gradient, [-1.5, 1.5])  # of 3/16 (a - b)^2


@pytest.mark.parametrize(
    ("means", "variances", "counts", "message"),
    [
        (jnp.ones((2, 3)), jnp.ones((2, 4)), [1, 1], r"got \(2, 3\), \(2, 4\) and \(2,\)"),
        (jnp.ones((2, 3)), jnp.ones((2, 3)), [1, 1, 1], r"got \(2, 3\), \(2, 3\) and \(3,\)"),
        (1.0, 1.0, 1, r"got \(\), \(\) and \(\)"),
        (jnp.ones(0), jnp.ones(0), [], r"k >= 1; got \(0,\)"),
        (jnp.ones(2, complex), jnp.ones(2), [1, 1], "means must be floating.*complex64"),
        (jnp.ones(2), jnp.ones(2, int), [1, 1], "variances must be floating.*int32"),
        (jnp.ones(2), jnp.ones(2), jnp.ones(2, complex), "counts must be real.*complex64"),
    ],
)
def test_wrong_statistics_are_named(means, variances, counts, message):
    with pytest.raises(ValueError, match=message):
        pool_batch_stats(means, variances, counts)


# Whole collections.

MOMENTUM = 0.75


class LinenNet(nn.Module):
    """The second BatchNorm sees what the first one left of a micro-batch."""

    momentum: float

    @nn.compact
    def __call__(self, x):
        for features in (4, 3):
            norm = nn.BatchNorm(use_running_average=False, momentum=self.momentum)
            x = nn.Dense(features)(norm(x))
        return x


class NnxNet(nnx.Module):
    def __init__(self, momentum, rngs):
        def norm(features):
            return nnx.BatchNorm(features, momentum=momentum, rngs=rngs)

        self.norms = nnx.List([norm(5), norm(4)])
        self.layers = nnx.List([nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)])

    def __call__(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return x


def linen_statistics(x, momentum):
    """The collection that one pass leaves behind."""
    net = LinenNet(momentum)
    variables = net.init(jax.random.key(0), jnp.ones((2, 5)))
    start = {"params": variables["params"], "batch_stats": fresh(variables["batch_stats"])}
    return net.apply(start, x, mutable=["batch_stats"])[1]["batch_stats"]


def nnx_statistics(x, momentum, as_pure=False):
    net = NnxNet(momentum, nnx.Rngs(0))
    net(x)
    statistics = nnx.state(net, nnx.BatchStat)
    return nnx.as_pure(statistics) if as_pure else statistics


def fresh(collection):
    def name(path):
        return path[-1].key

    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if name(path) == "mean" else jnp.ones_like(x), collection
    )


def first_norm(collection):
    """The leaves of the first BatchNorm, which sees the batch itself."""
    return [
        leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(collection)[0]
        if "BatchNorm_0" in str(path) or ("norms" in str(path) and "key=0" in str(path))
    ]


@pytest.mark.parametrize(
    "statistics",
    [linen_statistics, nnx_statistics, lambda x, m: nnx_statistics(x, m, as_pure=True)],
    ids=["Linen", "NNX", "NNX as arrays"],
)
@pytest.mark.parametrize("sizes", [(8, 8), (1, 5, 2), (16,)])
def test_collections_pool_to_the_running_statistics_of_the_big_batch(statistics, sizes):
    x = np.random.default_rng(0).normal(3, 2, size=(sum(sizes), 5)).astype(np.float32)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    pooled = pool_batch_collections([statistics(part, 0.0) for part in parts], sizes)
    big = statistics(x, MOMENTUM)
    assert jax.tree.structure(pooled) == jax.tree.structure(big)
    running = jax.tree.map(jnp.zeros_like, pooled)
    running = optax.incremental_update(pooled, running, 1 - MOMENTUM)
    mean, variance = first_norm(running)
    big_mean, big_variance = first_norm(big)
    np.testing.assert_allclose(mean, big_mean, rtol=1e-5)
    np.testing.assert_allclose(variance + MOMENTUM, big_variance, rtol=1e-5)  # started from 1


def test_every_pair_is_pooled_by_itself_wherever_it_stands():
    def collection(value):
        def pair(x):
            return {"mean": jnp.full(2, x), "var": jnp.full(2, 2 * x)}

        return {"mean": pair(value), "blocks": [pair(value + 1), {"deep": pair(value + 2)}]}

    pooled = pool_batch_collections([collection(1.0), collection(5.0)], [3, 1])
    pairs = [pooled["mean"], pooled["blocks"][0], pooled["blocks"][1]["deep"]]
    for offset, pair in enumerate(pairs):
        a, b = 1.0 + offset, 5.0 + offset
        want = pool_batch_stats(jnp.array([a, b]), jnp.array([2 * a, 2 * b]), [3, 1])
        np.testing.assert_array_equal(pair["mean"], want[0])
        np.testing.assert_array_equal(pair["var"], want[1])


PAIR = {"mean": jnp.ones(2), "var": jnp.ones(2)}


@pytest.mark.parametrize(
    ("collections", "message"),
    [
        ([], "got an empty one"),
        ((), "got an empty one"),
        (PAIR, "must be a list or tuple.*got dict"),
        ([PAIR, {"mean": jnp.ones(2)}], r"\['var'\] has \(2,\) .* and no leaf in collections\[1\]"),
        ([PAIR, {**PAIR, "mean": jnp.ones(3)}], r"\['mean'\] has \(2,\) .* and \(3,\) in"),
        ([{"a": {"mean": jnp.ones(2)}}], r"a mean beside each var.*\['a'\]\['mean'\]"),
        ([{"bn": PAIR, "count": jnp.ones(2)}], r"a mean beside each var.*\['count'\]"),
        ([{"mean": jnp.ones(2), "var": jnp.ones(3)}], r"got \(1, 2\), \(1, 3\)"),
    ],
)
def test_a_wrong_collection_is_named(collections, message):
    with pytest.raises(ValueError, match=message):
        pool_batch_collections(collections, [1] * len(collections))
