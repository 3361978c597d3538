"""Scaled hyper-parameters keep what their rule says it keeps; a growing batch grows as it says."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import laws
from optax_accum import accumulate, batch_growth, scale_hyperparams

NAMES = {
    "linear": ("learning_rate", "ema_decay"),
    "sqrt": ("learning_rate", "ema_decay"),
    "adam_sde": ("learning_rate", "b1", "b2", "eps", "ema_decay"),
    "half_life": ("momentum", "b1", "b2", "ema_decay"),
    "none": (),
}
RULES = pytest.mark.parametrize("rule", NAMES)
GIVEN = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-8,
    "ema_decay": 0.99,
}

decays = st.floats(0, 1, exclude_max=True)
ratios = st.floats(0.125, 8.0)


@st.composite
def scalings(draw):
    """A rule and hyper-parameters far inside its regime for all `ratios` and their products."""
    rule = draw(st.sampled_from(list(NAMES)))
    decay = st.floats(0.99, 0.9999)
    numbers = {
        name: draw(st.floats(1e-8, 10.0) if name in ("learning_rate", "eps") else decay)
        for name in draw(st.sets(st.sampled_from(NAMES[rule] or list(GIVEN))))
    }
    return rule, numbers


# Laws of all rules.


@given(scalings(), ratios, ratios)
def test_scaling_twice_is_scaling_by_the_product(scaling, first, second):
    rule, numbers = scaling
    twice = scale_hyperparams(second, rule, **scale_hyperparams(first, rule, **numbers))
    chex.assert_trees_all_close(twice, scale_hyperparams(first * second, rule, **numbers))


@given(scalings(), ratios)
def test_scaling_back_gives_what_there_was(scaling, ratio):
    rule, numbers = scaling
    back = scale_hyperparams(1 / ratio, rule, **scale_hyperparams(ratio, rule, **numbers))
    chex.assert_trees_all_close(back, numbers)


@RULES
@given(decays, st.floats(0, 1e9))
def test_a_ratio_of_one_changes_no_bit(rule, decay, number):
    numbers = {name: number if name in ("learning_rate", "eps") else decay for name in NAMES[rule]}
    assert scale_hyperparams(1, rule, **numbers) == numbers


@RULES
def test_those_that_were_given_come_back_as_python_floats(rule):
    assert scale_hyperparams(2, rule) == {}
    for name in NAMES[rule]:
        for number in (np.float32(0.875), np.float64(0.875), 0.875):
            scaled = scale_hyperparams(np.int32(2), rule, **{name: number})
            assert list(scaled) == [name]
            assert type(scaled[name]) is float
            assert scaled == scale_hyperparams(2, rule, **{name: 0.875})
    zeros = {name: 0 for name in NAMES[rule] if name not in ("b1", "b2")}
    assert scale_hyperparams(2, rule, **zeros) == zeros


def test_the_rules_scale_as_their_papers_write_them():
    ema = {"ema_decay": 0.99**4}
    changed = {
        "linear": {"learning_rate": 0.4, **ema},
        "sqrt": {"learning_rate": 0.2, **ema},
        "adam_sde": {"learning_rate": 0.2, "b1": 0.6, "b2": 0.996, "eps": 0.5e-8, **ema},
        "half_life": {"momentum": 0.9**4, "b1": 0.9**4, "b2": 0.999**4, **ema},
        "none": {},
    }
    for rule, numbers in changed.items():
        assert numbers.keys() == set(NAMES[rule])
        # What a rule says nothing about comes back as it was.
        chex.assert_trees_all_close(
            scale_hyperparams(4, rule, **GIVEN), GIVEN | numbers, rtol=1e-12
        )


@pytest.mark.parametrize("rule", ["linear", "sqrt", "adam_sde", "none"])
def test_a_schedule_is_scaled_in_its_values_and_counts_gradient_steps(rule):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.5, 3, 10)
    scaled = scale_hyperparams(4, rule, learning_rate=schedule)["learning_rate"]
    for step in (0, 2, 7, 20):
        want = scale_hyperparams(4, rule, learning_rate=float(schedule(step)))["learning_rate"]
        np.testing.assert_allclose(jax.jit(scaled)(step), want, rtol=1e-6)
    params, _ = laws.run(optax.sgd(scaled), jnp.zeros(2), [jnp.ones(2)] * 3)
    np.testing.assert_allclose(params, -sum(map(scaled, range(3))) * np.ones(2), rtol=1e-6)


# What each rule keeps.


def quadratic_runs(learning_rate, ratio):
    """SGD of small batches, and of batches `ratio` times as large, over the same examples."""
    centers = np.random.default_rng(0).normal(size=(ratio, 5))
    curvature = jnp.linspace(0.1, 2.0, 5)
    scaled = scale_hyperparams(ratio, "linear", learning_rate=learning_rate)
    ends = []
    for tx in (optax.sgd(learning_rate), accumulate(ratio, optax.sgd(**scaled))):
        params = jnp.ones(5)
        state = tx.init(params)
        for center in centers:
            updates, state = tx.update(curvature * (params - center), state, params)
            params = optax.apply_updates(params, updates)
        ends.append(params)
    return ends


def test_linear_makes_one_large_step_of_k_small_ones_to_second_order():
    with jax.enable_x64(True):
        errors = []
        for learning_rate in (1e-2, 1e-3):
            small, large = quadratic_runs(learning_rate, ratio=4)
            errors.append(np.abs(small - large).max())
            assert np.abs(small - 1).max() > 10 * errors[-1]
    np.testing.assert_allclose(np.divide(errors[1:], errors[:-1]), 0.01, rtol=0.1)


def test_sqrt_keeps_the_covariance_of_a_step():
    gradients = np.random.default_rng(0).normal(size=(50_000, 4, 2)) @ [[1.0, 0.5], [0.0, 2.0]]
    small = 0.1 * gradients.reshape(-1, 2)
    scaled = scale_hyperparams(4, "sqrt", learning_rate=0.1)
    large = scaled["learning_rate"] * gradients.mean(1)
    np.testing.assert_allclose(np.cov(large.T), np.cov(small.T), rtol=0.03)  # 5 standard errors


def noisy_adam(ratio, learning_rate, b1, b2, eps, coordinates=8000, examples=1200):
    """Means and deviations of θ while Adam goes down θ² / 20 under noise of 1 / sqrt(ratio)."""
    tx = optax.adam(learning_rate, b1, b2, eps)
    curvature, params = 0.1, jnp.ones(coordinates)

    def step(carry, key):
        params, state = carry
        noise = jax.random.normal(key, params.shape) / jnp.sqrt(ratio)
        updates, state = tx.update(curvature * params + noise, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params.mean(), params.std())

    keys = jax.random.split(jax.random.key(ratio), examples // ratio)
    path = jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), keys)[1])()
    return np.stack(path)[:, np.array([600, 900, 1200]) // ratio - 1]


def test_adam_sde_keeps_the_distribution_of_adams_path_where_noise_outweighs_the_gradient():
    numbers = {"learning_rate": 0.01, "b1": 0.98, "b2": 0.99, "eps": 0.5}
    small = noisy_adam(1, **numbers)
    assert small[0, -1] < 0.5  # it has gone somewhere
    scaled = scale_hyperparams(4, "adam_sde", **numbers)
    # The sample leaves 1%, and the rate of 0.01 some 2%.
    np.testing.assert_allclose(noisy_adam(4, **scaled), small, rtol=0.05)
    for wrong in ({"learning_rate": 0.04}, {"learning_rate": 0.01}, {"eps": 0.5}, {"b1": 0.98}):
        other = noisy_adam(4, **{**scaled, **wrong})
        assert np.abs(other / small - 1).max() > 0.1, wrong


@given(ratios)
def test_adam_sde_keeps_the_constants_of_the_equation(ratio):
    numbers = {"learning_rate": 1e-3, "b1": 0.95, "b2": 0.999, "eps": 1e-6}

    def constants(learning_rate, b1, b2, eps, batch):
        return (
            learning_rate**2 / batch,  # noise of η per square root of a batch
            (1 - b1) / learning_rate**2,
            (1 - b2) / learning_rate**2,
            learning_rate * eps,
        )

    scaled = scale_hyperparams(ratio, "adam_sde", **numbers)
    chex.assert_trees_all_close(
        constants(**scaled, batch=ratio), constants(**numbers, batch=1), rtol=1e-9
    )


def adams_moments(b1, b2, gradients, every_k=1):
    tx = accumulate(every_k, optax.scale_by_adam(b1, b2))
    _, state = laws.run(tx, jnp.zeros(3), gradients)
    return [state.inner_state.mu, state.inner_state.nu]


def test_half_life_keeps_the_moments_over_a_window_of_equal_gradients():
    constant = [[1.0, -2.0, 0.5], [0.25, 0.0, 3.0], [0.0, 0.0, 0.0]]
    with jax.enable_x64(True):
        gradients = [jnp.array(gradient) for gradient in constant for _ in range(8)]
        scaled = scale_hyperparams(8, "half_life", b1=0.9, b2=0.99)
        small = adams_moments(0.9, 0.99, gradients)
        large = adams_moments(**scaled, gradients=gradients, every_k=8)
    chex.assert_trees_all_close(large, small, rtol=1e-12)


@given(st.floats(0.01, 0.9999), ratios)
def test_half_life_keeps_the_half_life_in_examples(decay, ratio):
    def half_life(decay, batch):
        return batch * math.log(0.5) / math.log(decay)

    scaled = scale_hyperparams(ratio, "half_life", b2=decay)
    np.testing.assert_allclose(half_life(scaled["b2"], ratio), half_life(decay, 1), rtol=1e-9)


def test_adam_sde_and_half_life_agree_to_first_order():
    for rate in (1e-2, 1e-3, 1e-4):
        sde, half = (
            scale_hyperparams(4, rule, b2=1 - rate)["b2"] for rule in ("adam_sde", "half_life")
        )
        np.testing.assert_allclose(half - sde, 6 * rate**2, rtol=0.05)  # 4 over 2, times rate²


@RULES
def test_an_average_of_parameters_that_stand_still_for_a_window_is_the_same(rule):
    if rule == "none":
        return
    params = np.random.default_rng(0).normal(size=(3, 5))
    decay = scale_hyperparams(4, rule, ema_decay=0.9)["ema_decay"]
    with jax.enable_x64(True):
        small = large = jnp.zeros(5)
        for window in params:
            for _ in range(4):
                small = optax.incremental_update(window, small, 1 - 0.9)
            large = optax.incremental_update(window, large, 1 - decay)
    np.testing.assert_allclose(large, small, rtol=1e-12)


# Errors.


@RULES
@pytest.mark.parametrize(
    "ratio", [0, -1, -0.5, math.nan, math.inf, True, "2", None, 2j, [2], 10**400], ids=repr
)
def test_a_wrong_ratio_is_named(rule, ratio):
    with pytest.raises(ValueError, match=r"batch_ratio must be a finite number above 0.*got "):
        scale_hyperparams(ratio, rule, ema_decay=0.9)


@pytest.mark.parametrize("rule", ["Linear", "adam", "", None, 1, ("linear",)])
def test_an_unknown_rule_is_named(rule):
    with pytest.raises(ValueError, match=r"rule must be one of 'linear', .*'none'; got "):
        scale_hyperparams(2, rule, learning_rate=0.1)


@RULES
@pytest.mark.parametrize("name", ["lr", "weight_decay", "decay", "eps_root"])
def test_an_unknown_hyperparameter_is_named(rule, name):
    with pytest.raises(ValueError, match=f"must be among learning_rate, .*ema_decay.*got {name}="):
        scale_hyperparams(2, rule, **{name: 0.1})


@pytest.mark.parametrize("rule", ["linear", "none"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in GIVEN for value in (-0.1, math.nan, True, "0.1", None, 1j)],
        *[(name, math.inf) for name in ("learning_rate", "eps")],
        *[(name, value) for name in ("momentum", "b1", "b2", "ema_decay") for value in (1, 1.5)],
        *[(name, optax.constant_schedule(0.5)) for name in GIVEN if name != "learning_rate"],
    ],
)
def test_a_value_out_of_its_range_is_named(rule, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be a .*number of at least 0.*, got "):
        scale_hyperparams(2, rule, **{name: value})


@pytest.mark.parametrize("name", ["b1", "b2"])
@pytest.mark.parametrize(("ratio", "decay"), [(10, 0.9), (11, 0.9), (1.5, 0), (1e9, 0.999)])
def test_adam_sde_out_of_its_regime_is_named(name, ratio, decay):
    with pytest.raises(
        ValueError, match=rf"'adam_sde' must have batch_ratio \* \(1 - {name}\) below 1.*{decay}"
    ):
        scale_hyperparams(ratio, "adam_sde", learning_rate=0.1, **{name: decay})
    assert 0 < scale_hyperparams(9.99, "adam_sde", b1=0.9)["b1"] < 0.01


@pytest.mark.parametrize(
    ("ratio", "rule", "numbers"),
    [
        (1e300, "linear", {"learning_rate": 1e100}),
        (1e-300, "adam_sde", {"eps": 1e300}),
        (1e-20, "half_life", {"b2": 0.9}),
        (1e-20, "adam_sde", {"b1": 0.9}),
        (1e-20, "sqrt", {"ema_decay": 0.9}),
    ],
)
def test_a_result_that_no_float_holds_is_named(ratio, rule, numbers):
    (name,) = numbers
    with pytest.raises(ValueError, match=f"{name} scaled by rule '{rule}' must be .*takes .* to "):
        scale_hyperparams(ratio, rule, **numbers)


# A batch that grows.


def window_lengths(every_k, num_windows):
    """How many micro-steps each window takes, and the mean that it gives of 0, 1, 2, ..."""
    tx = accumulate(every_k, optax.scale(1.0))
    state = tx.init(jnp.zeros([]))
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(tx.update, 1))
    lengths, means, length = [], [], 0
    for i in range(10_000):
        mean, state = update(jnp.float32(i), state)
        length += 1
        if state.emitted:
            lengths, means, length = [*lengths, length], [*means, float(mean)], 0
        if len(lengths) == num_windows:
            return lengths, means
    pytest.fail("the windows do not close")


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 99), st.integers(1, 48))
def test_the_batch_is_linear_from_one_end_to_the_other(start_k, stop_k, steps, microbatch_size):
    every_k = batch_growth(
        start_k * microbatch_size, stop_k * microbatch_size, steps, microbatch_size
    )
    gradient_steps = np.array([0, 1, steps // 2, steps - 1, steps, steps + 1, 2**31 - 1], np.int32)
    want = start_k + (stop_k - start_k) * np.minimum(gradient_steps / steps, 1)
    for schedule in (every_k, jax.jit(every_k)):
        k = schedule(gradient_steps)
        np.testing.assert_allclose(k, want, rtol=1e-5)
        np.testing.assert_array_equal(jnp.round(k[np.array([0, -1])]), [start_k, stop_k])


def test_windows_take_the_micro_steps_that_the_batch_asks_for_and_give_their_mean():
    lengths, means = window_lengths(batch_growth(16, 64, steps=6, microbatch_size=8), 8)
    assert lengths == [2, 3, 4, 5, 6, 7, 8, 8]
    firsts = np.cumsum([0, *lengths[:-1]])
    np.testing.assert_allclose(means, firsts + (np.array(lengths) - 1) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("growth", "lengths"),
    [
        ((4, 4, 3, 1), [4, 4, 4]),
        ((4, 1, 3, 1), [4, 3, 2, 1, 1]),  # it may shrink
        ((1, 3, 4, 1), [1, 2, 2, 2, 3, 3]),  # 1.5 and 2.5 both go to the even 2
        ((10, 20, 1, 4), [2, 5, 5]),  # 10 / 4 goes to 2
        ((10, 23, 2, 4), [2, 4, 6, 6]),  # 2.5, 4.125, 5.75
        ((np.int64(2), np.int32(4), np.int64(2), np.int8(1)), [2, 3, 4, 4]),
    ],
)
def test_windows_hold_the_multiple_of_a_micro_batch_nearest_to_the_batch(growth, lengths):
    assert window_lengths(batch_growth(*growth), len(lengths))[0] == lengths


def test_ends_are_exact_for_large_batches_and_many_steps():
    every_k = batch_growth(256, 2048, steps=1000, microbatch_size=64)
    assert [every_k(step) for step in (0, 500, 1000, 10**6)] == [4, 18, 32, 32]
    tokens = batch_growth(2**40, 3 * 2**40, steps=2**31 - 1, microbatch_size=2**35)
    assert [tokens(jnp.int32(step)) for step in (0, 2**30, 2**31 - 1)] == [32, 64, 96]


@pytest.mark.parametrize("name", ["start", "stop", "steps", "microbatch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None, jnp.ones(2)], ids=repr)
def test_a_wrong_growth_is_named(name, value):
    sizes = {"start": 4, "stop": 8, "steps": 2, "microbatch_size": 2}
    with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got "):
        batch_growth(**{**sizes, name: value})


def test_more_steps_than_are_counted_are_named():
    with pytest.raises(ValueError, match=r"steps must be below 2\*\*31.*got 2147483648"):
        batch_growth(4, 8, 2**31, 2)


@pytest.mark.parametrize(("start", "stop"), [(4, 8), (8, 4), (4, 4)])
def test_a_micro_batch_larger_than_the_batch_is_named(start, stop):
    with pytest.raises(ValueError, match=r"microbatch_size must be at most start and stop.*size=5"):
        batch_growth(start, stop, 10, 5)
