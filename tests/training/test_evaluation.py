"""Sharpness on a quadratic, whose curvature is known, and the ranges of moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_accum import accumulate, chain, moment_ranges, sharpness

KEY = jax.random.key(0)


@pytest.mark.parametrize("radius", [0.01, 1.0])
def test_on_a_quadratic_it_is_the_mean_curvature_wherever_it_stands(radius):
    curvatures = {"a": jnp.array([1.0, 2.0, 9.0]), "b": jnp.array([[4.0, 0.0]])}
    mean = 16 / 5

    def loss_fn(p):
        return sum(
            jnp.sum(c * x**2) / 2 for c, x in zip(curvatures.values(), p.values(), strict=True)
        )

    with jax.enable_x64(True):
        params = jax.tree.map(lambda c: jnp.asarray(c, jnp.float64) + 3, curvatures)
        few = [
            sharpness(loss_fn, params, key, radius=radius, num_samples=50)
            for key in jax.random.split(KEY, 20)
        ]
    estimates = 2 * np.array(few) / radius**2
    error = estimates.std(ddof=1) / len(estimates) ** 0.5
    assert abs(estimates.mean() - mean) < 3 * error < 0.3


def test_the_slope_does_not_count_and_the_key_decides():
    def linear(p):
        return 100 * p.sum()

    def rise(key):
        return sharpness(linear, jnp.zeros(10), key, radius=1.0)

    assert abs(rise(KEY)) < 1e-3

    def bent(p):
        return jnp.sum(jnp.exp(5 * p))

    run = jax.jit(lambda p, key: sharpness(bent, p, key, radius=0.5, num_samples=2))
    one, again, other = (run(jnp.ones(10), key) for key in (KEY, KEY, jax.random.key(1)))
    assert one == again != other


def test_moments_are_named_and_ranged():
    params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
    tx = chain(optax.trace(0.5), accumulate(2, optax.adam(0.1), monitor=True))
    state = tx.init(params)
    gradients = {"w": jnp.array([[1.0, -2.0], [3.0, 4.0]]), "b": jnp.array([-8.0, 0.0])}
    for _ in range(2):
        _, state = tx.update(gradients, state, params)
    ranges = jax.jit(moment_ranges)(state)
    assert sorted(ranges) == ["mu", "nu", "trace"]
    want = {"min": -12.0, "max": 6.0, "rms": 1.5 * (94 / 6) ** 0.5}  # 1 + 1/2 of the gradients
    assert jax.tree.map(float, ranges["trace"]) == pytest.approx(want)
    twice = optax.chain(optax.trace(0.5), optax.trace(0.9)).init(params)
    assert sorted(moment_ranges(twice)) == ["[0].trace", "[1].trace"]
    assert moment_ranges(optax.sgd(0.1).init(params)) == {}


def test_a_wrong_argument_is_named():
    with pytest.raises(ValueError, match="loss_fn must be a function, got 1"):
        sharpness(1, jnp.zeros(2), KEY, radius=1.0)
    for radius in (0, -1.0, float("nan"), float("inf"), "a"):
        with pytest.raises(ValueError, match="radius must be a finite number above 0, got"):
            sharpness(jnp.sum, jnp.zeros(2), KEY, radius=radius)
    with pytest.raises(ValueError, match="num_samples must be an int of at least 1, got 0"):
        sharpness(jnp.sum, jnp.zeros(2), KEY, radius=1.0, num_samples=0)
    with pytest.raises(ValueError, match="loss must be a real floating scalar"):
        sharpness(jnp.sin, jnp.zeros(2), KEY, radius=1.0)
