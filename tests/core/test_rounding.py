"""Rounding to bfloat16 at random: unbiased, exact where it can be, and the same each time."""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_accum import accumulate, make_train_step, microbatch_value_and_grad
from optax_accum._core.rounding import noise_bits, rounded, seed_of
from optax_accum.testing import collectives

N = 1 << 16
PINNED = [43128, 63055, 11722, 49118]
ALL_NOISE = jnp.arange(N, dtype=jnp.uint32)
EVERY_BFLOAT16 = np.arange(N, dtype=np.uint16).view(jnp.bfloat16)
LARGEST = float(jnp.finfo(jnp.bfloat16).max)


@partial(jax.jit, static_argnums=(0, 1))
def draw(leaf_index, shape, *counters):
    return noise_bits(seed_of(*counters), leaf_index, shape)


def as_bits(x):
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def of_bits(*bits):
    return jnp.asarray(np.array(bits, np.uint32).view(np.float32))


def centred(noise):
    """Noise as numbers of mean 0 and variance 1."""
    return (np.asarray(noise, np.float64) + 0.5) / N * np.sqrt(12) - np.sqrt(3)


def standard_errors(x):
    """How many of its standard errors the mean of x is from 0."""
    return abs(x.mean()) / (x.std() / np.sqrt(x.size))


# The rounding.


def test_the_expectation_over_all_noise_is_x_exactly():
    xs = np.random.default_rng(0).normal(size=20) * 10.0 ** np.arange(-40, 40, 4)
    edges = [1.0, -1.0, 1 + 2**-23, 2 - 2**-23, -255.999, 1 / 3, 1e-45, -1e-40, 3.38e38]
    for x in np.float32([*xs[np.abs(xs) < LARGEST], *edges]):
        values = np.asarray(rounded(jnp.full(N, x), ALL_NOISE), np.float64)
        assert values.mean() == x
        assert len(set(values)) <= 2


def test_the_result_is_one_of_the_two_neighbours():
    x = np.random.default_rng(1).normal(size=N).astype(np.float32)
    below = (as_bits(x) >> 16).astype(np.uint16)  # towards zero
    got = as_bits(rounded(jnp.asarray(x), draw(0, (N,), 1)))
    assert set(np.unique(got - below)) == {0, 1}


@pytest.mark.parametrize("noise", [0, 1, N // 2, N - 1])
def test_what_bfloat16_holds_stays_as_it_is(noise):
    got = rounded(jnp.asarray(EVERY_BFLOAT16).astype(jnp.float32), jnp.full(N, noise, jnp.uint32))
    is_nan = np.isnan(EVERY_BFLOAT16.astype(np.float32))
    # Every finite number, both infinities, and both zeros with their signs.
    np.testing.assert_array_equal(as_bits(got)[~is_nan], as_bits(EVERY_BFLOAT16)[~is_nan])
    assert jnp.isnan(got[is_nan]).all()


@pytest.mark.parametrize("noise", [0, 1, N // 2, N - 1])
def test_nan_and_infinity_never_turn_into_each_other_or_into_numbers(noise):
    nans = of_bits(0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF)
    assert jnp.isnan(rounded(nans, jnp.uint32(noise))).all()
    infinities = jnp.array([jnp.inf, -jnp.inf])
    np.testing.assert_array_equal(rounded(infinities, jnp.uint32(noise)), infinities)


@pytest.mark.parametrize("noise", [0, 1, N // 2, N - 1])
def test_a_finite_number_never_becomes_infinite(noise):
    x = of_bits(0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0xFF7F8000)
    want = [LARGEST, LARGEST, LARGEST, -LARGEST]
    np.testing.assert_array_equal(rounded(x, jnp.uint32(noise)).astype(jnp.float32), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64, jnp.complex64, int])
def test_only_float32_is_rounded(dtype):
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=f"x must be float32.*got {jnp.dtype(dtype).name}"),
    ):
        rounded(jnp.ones(2, dtype), jnp.uint32(0))


# Sums.


def window_sums(gradients_of, k, n=1 << 14):
    """A window's sums of n elements: rounded at random, to nearest, and not at all."""

    def micro_step(sums, i):
        at_random, nearest, exact = sums
        gradients = gradients_of(i, n)
        noise = noise_bits(seed_of(3, i, 0, 0), 0, [n])
        at_random = rounded(at_random.astype(jnp.float32) + gradients, noise)
        nearest = (nearest.astype(jnp.float32) + gradients).astype(jnp.bfloat16)
        return (at_random, nearest, exact + gradients), None

    zeros = jnp.zeros(n, jnp.bfloat16), jnp.zeros(n, jnp.bfloat16), jnp.zeros(n, jnp.float32)
    sums, _ = jax.jit(lambda: jax.lax.scan(micro_step, zeros, jnp.arange(k)))()
    return [np.asarray(x, np.float64) for x in sums]


def test_small_addends_are_lost_to_nearest_and_kept_at_random():
    def gradients_of(i, n):
        return jnp.full(n, jnp.where(i == 0, 1, 1e-3), jnp.float32)

    at_random, nearest, exact = window_sums(gradients_of, k=256)
    assert (nearest == 1).all()
    assert standard_errors(at_random - exact) < 4
    np.testing.assert_allclose(at_random.mean(), 1.255, rtol=1e-3)


@pytest.mark.parametrize("constant", [0.1, 0.3, -1.003, 7e-20])
def test_a_sum_of_constants_is_unbiased(constant):
    at_random, nearest, exact = window_sums(lambda i, n: jnp.full(n, constant), k=256)
    assert standard_errors(at_random - exact) < 4
    assert abs((nearest / exact - 1).mean()) > 20 * abs((at_random / exact - 1).mean())


def test_a_sum_of_random_numbers_is_unbiased():
    # All above 0, and the later ones small beside the sum.
    def gradients_of(i, n):
        return jax.random.exponential(jax.random.fold_in(jax.random.key(0), i), [n]) / (1 + i)

    at_random, nearest, exact = window_sums(gradients_of, k=256)
    assert standard_errors(at_random - exact) < 4
    assert standard_errors(nearest - exact) > 40


def test_the_errors_of_elements_are_independent():
    at_random, _, exact = window_sums(lambda i, n: jnp.full(n, 0.3), k=64)
    error = (at_random - exact) / at_random.std()
    for lag in (1, 2, 8, 128):
        assert standard_errors(error[:-lag] * error[lag:]) < 4


# The noise.


def test_noise_is_uniform_on_16_bits():
    noise = np.concatenate([draw(0, (64 * N,), i) for i in range(2)])
    assert noise.min() == 0
    assert noise.max() == N - 1
    counts = np.bincount(noise)
    chi_squared = ((counts - 128) ** 2 / 128).sum()
    assert abs(chi_squared - N) < 4 * np.sqrt(2 * N)
    assert standard_errors(centred(noise)) < 4


def test_noise_differs_between_counters_leaves_and_elements():
    counters = itertools.product(range(2), repeat=4)
    draws = [centred(draw(leaf, (N,), *c)) for c in counters for leaf in (0, 1, 2, 1000)]
    correlations = np.corrcoef(draws)[np.triu_indices(len(draws), 1)] * np.sqrt(N)
    assert abs(correlations).max() < 5  # of 2016
    np.testing.assert_allclose(correlations.std(), 1, rtol=0.1)
    for noise in draws[:4]:
        for lag in (1, 2, 3, 8, 64, 128, 1000, 1024):
            assert abs((noise[:-lag] * noise[lag:]).mean()) * np.sqrt(N - lag) < 4


def test_many_micro_steps_have_seeds_of_their_own():
    step, micro_step, num_skipped, device = np.indices((64, 32, 8, 8)).reshape(4, -1)
    first, second = seed_of(step, micro_step, num_skipped, device)
    both = np.asarray(first, np.uint64) << 32 | np.asarray(second, np.uint64)
    assert len(np.unique(both)) == both.size


def test_noise_is_that_of_the_position_in_row_major_order():
    flat = draw(3, (24,), 1, 2)
    for shape in ((4, 6), (2, 3, 4), (1, 24), (24, 1)):
        np.testing.assert_array_equal(draw(3, shape, 1, 2), flat.reshape(shape))
    assert draw(3, (), 1, 2) == flat[0]
    assert draw(3, (0, 5), 1, 2).shape == (0, 5)


def test_noise_is_the_same_each_time_and_on_every_version():
    np.testing.assert_array_equal(noise_bits(seed_of(1, 2, 3, 4), 5, [4]), PINNED)
    np.testing.assert_array_equal(draw(5, (4,), *map(jnp.int32, (1, 2, 3, 4))), PINNED)
    with jax.enable_x64(True):
        wide = draw(5, (4,), *map(jnp.int64, (1, 2, 3, 4)))
    assert wide.dtype == jnp.uint32
    np.testing.assert_array_equal(wide, PINNED)


# Transformations.


@jax.jit
def rounded_sum(total, gradients, *counters):
    noise = noise_bits(seed_of(*counters), 0, gradients.shape)
    return rounded(total.astype(jnp.float32) + gradients, noise)


def test_the_derivative_is_that_of_the_identity():
    x, c = jnp.linspace(-3, 3, 7), jnp.arange(7.0)

    def loss(x):
        return jnp.sum(c * rounded_sum(jnp.zeros(7, jnp.bfloat16), 2 * x, 1))

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), 2 * c)

    def f(x):
        return rounded(x, draw(0, (7,), 1))

    y, tangent = jax.jvp(f, (x,), (c,))
    chex.assert_trees_all_equal(y, f(x))
    chex.assert_trees_all_equal(tangent, c.astype(jnp.bfloat16))
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(f(x).astype(jnp.float32) ** 2)))(x)
    np.testing.assert_array_equal(hessian, 2 * np.eye(7))
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x * jnp.inf), jnp.ones(7))


def test_vmap_rounds_each_as_if_alone():
    gradients = jax.random.normal(jax.random.key(0), (5, 64))
    total = jnp.ones((5, 64), jnp.bfloat16)
    want = jnp.stack([rounded_sum(total[i], gradients[i], 7, i) for i in range(5)])
    got = jax.vmap(rounded_sum, (0, 0, None, 0))(total, gradients, 7, jnp.arange(5))
    chex.assert_trees_all_equal(got, want)
    alike = jax.vmap(rounded_sum, (0, 0, None))(total, gradients, 7)
    chex.assert_trees_all_equal(alike[1], rounded_sum(total[1], gradients[1], 7))


def test_the_noise_stays_in_the_sum_that_it_rounds():
    n = 1 << 20
    args = jnp.ones(n, jnp.bfloat16), jnp.ones(n), jnp.int32(1), jnp.int32(2)
    compiled = jax.jit(rounded_sum, donate_argnums=0).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096


def test_a_sharded_leaf_has_the_noise_of_a_whole_one_and_nothing_crosses_devices():
    mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
    args = jnp.ones((64, 32), jnp.bfloat16), jax.random.normal(jax.random.key(0), (64, 32))
    want = rounded_sum(*args, 1)
    sharding = NamedSharding(mesh, P("a", "b"))
    compiled = (
        jax.jit(rounded_sum, out_shardings=sharding, donate_argnums=0)
        .lower(*jax.device_put(args, sharding), jnp.int32(1))
        .compile()
    )
    assert all(place.count == 0 for place in collectives(compiled))
    got = compiled(*jax.device_put(args, sharding), jnp.int32(1))
    chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_round_apart_in_shard_map(check_vma):
    @jax.jit
    @partial(
        jax.shard_map,
        mesh=jax.make_mesh((8,), ("data",), (AxisType.Auto,)),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    def on_each(x, counter):
        noise = noise_bits(seed_of(counter, jax.lax.axis_index("data")), 0, x.shape)
        return jax.jvp(lambda x: rounded(x, noise), (x,), (x,))

    x = jnp.full((64, 16), 1.001)
    got, tangent = on_each(x, jnp.int32(3))
    noise = [draw(0, (8, 16), 3, device) for device in range(8)]
    chex.assert_trees_all_equal(got, rounded(x, jnp.concatenate(noise)))
    chex.assert_trees_all_equal(tangent, x.astype(jnp.bfloat16))
    assert len({row.tobytes() for row in np.asarray(got).reshape(8, -1)}) == 8


# Windows in bfloat16.


@pytest.mark.parametrize("weighted", [False, True])
def test_a_window_in_bfloat16_is_right_on_average_and_takes_half_the_memory(weighted):
    k, size = 256, 4096
    tx = accumulate(k, optax.identity(), accumulator_dtype=jnp.bfloat16)
    params = {"a": jnp.zeros(size), "b": jnp.zeros((size, 1))}
    gradients = jax.random.normal(jax.random.key(0), (k, 1)) * 0.1 + 1  # the same in each element
    weights = 1.0 + jnp.arange(k) % 3 if weighted else jnp.ones(k)

    def step(state, x):
        gradient, weight = x
        gradient = jax.tree.map(lambda p: jnp.broadcast_to(gradient, p.shape), params)
        updates, state = tx.update(gradient, state, params, weight=weight)
        return state, (updates["a"].mean(), updates["a"].std(), updates["b"].mean())

    start = tx.init(params)
    _, (means, spreads, others) = jax.lax.scan(step, start, (gradients, weights))
    want = float((gradients[:, 0] * weights).sum() / weights.sum())
    error = float(spreads[-1]) / size**0.5
    assert 0 < error < 0.01
    assert abs(means[-1] - want) < 4 * error
    assert abs(others[-1] - want) < 4 * error

    def nbytes(state):
        return sum(s.nbytes for s in jax.tree.leaves(state.window_sum))

    assert 2 * nbytes(start) == nbytes(accumulate(k).init(params))


def test_a_train_step_takes_less_memory_with_a_sum_in_bfloat16():
    params = {str(i): jnp.ones((256, 256)) for i in range(8)}

    def loss_fn(params, x):
        return sum(jnp.sum(p * x.mean()) for p in params.values())

    def peak(**options):
        step = make_train_step(loss_fn, accumulate(4, optax.adam(1e-3), **options))
        memory = step.lower(params, step.init(params), jnp.ones(8)).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    size = 8 * 256 * 256 * 4
    assert peak(accumulator_dtype=jnp.bfloat16) < peak() - 0.45 * size


def test_a_window_in_bfloat16_goes_on_bit_for_bit_and_differs_from_the_next():
    tx = accumulate(3, optax.identity(), accumulator_dtype=jnp.bfloat16)
    params, gradient = jnp.zeros(512), jnp.full(512, 1 / 3)
    update, sums, state = jax.jit(tx.update), [], tx.init(params)
    for _ in range(6):
        _, state = update(gradient, state, params)
        sums.append(np.asarray(state.window_sum))
        again = jax.tree.map(np.asarray, state)
        kept = update(gradient, again, params)[1]
        np.testing.assert_array_equal(
            kept.window_sum, update(gradient, state, params)[1].window_sum
        )
    assert (sums[0] != sums[3]).mean() > 0.2  # two windows of the same gradients


def test_skipped_micro_steps_leave_a_sum_in_bfloat16_as_it_is():
    tx = accumulate(8, accumulator_dtype=jnp.bfloat16)
    params = jnp.zeros(512)
    _, state = tx.update(jnp.full(512, 1 / 3), tx.init(params), params)
    _, skipped = tx.update(jnp.full(512, jnp.nan), state, params, weight=0)
    np.testing.assert_array_equal(skipped.window_sum, state.window_sum)


def test_devices_round_their_own_windows_apart():
    tx = accumulate(2, axis_name="data", accumulator_dtype=jnp.bfloat16)
    state = jax.pmap(tx.init, axis_name="data")(jnp.zeros((8, 512)))
    _, state = jax.pmap(tx.update, axis_name="data")(jnp.full((8, 512), 1 / 3), state)
    sums = np.asarray(state.window_sum)[:, 0]
    for a, b in itertools.combinations(sums, 2):
        assert (a != b).mean() > 0.2


def test_a_window_in_one_call_is_right_on_average_too_and_calls_differ():
    size, k = 4096, 64
    batch = jax.random.normal(jax.random.key(1), (k, 1)) * 0.1 + 1

    def loss_fn(p, x, shift):
        return jnp.mean(x * p) + shift

    fn = jax.jit(
        microbatch_value_and_grad(loss_fn, k, accumulator_dtype=jnp.bfloat16),
    )
    params = jnp.zeros(size)
    _, gradients = fn(params, batch, 0.0)
    want = float(batch.mean()) / size
    error = float(gradients.std()) / size**0.5
    assert 0 < error < 0.01 * want
    assert abs(gradients.mean() - want) < 4 * error
    _, others = fn(params, batch, 1.0)  # another loss, the same gradients
    assert (gradients != others).mean() > 0.2
