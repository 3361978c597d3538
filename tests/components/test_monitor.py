"""The monitor: what it measures is so, in any window, on any devices, and it costs a norm."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

import laws
from optax_accum import (
    accumulate,
    adaptive_every_k,
    chain,
    flush,
    make_train_step,
    reshard_window,
    state_specs,
    varying,
    window_metrics,
)
from optax_accum.testing import collectives

PARAMS = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[0.0, 4.0]])}


def norm(tree):
    return math.sqrt(sum(float(np.sum(np.abs(x) ** 2)) for x in jax.tree.leaves(tree)))


def run(tx, gradients, **extra):
    """The state after these gradients; `extra` has a list for each extra arg."""
    state = tx.init(PARAMS)
    for i, gradient in enumerate(gradients):
        args = {name: values[i] for name, values in extra.items()}
        updates, state = tx.update(gradient, state, PARAMS, **args)
    return updates, state


@st.composite
def windows(draw):
    """Gradients and weights of a window, some of which do not count."""
    k = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gradients = [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), PARAMS)
        for _ in range(k)
    ]
    weights = [draw(st.sampled_from([0.0, 1.0, 3.0, 8.0, 20.0])) for _ in range(k)]
    return gradients, weights if any(weights) else [1.0] * k


@given(windows(), st.sampled_from(["mean", "sum", "ratio"]))
def test_it_says_what_the_window_was(window, normalize):
    gradients, weights = window
    k, total = len(gradients), sum(weights)
    losses = [float(i) for i in range(k)]
    tx = accumulate(k, optax.sgd(0.1), normalize=normalize, monitor=True)
    updates, state = run(tx, gradients, weight=weights, value=losses)
    got = jax.tree.map(float, window_metrics(state))

    counted = [(g, w, v) for g, w, v in zip(gradients, weights, losses, strict=True) if w > 0]
    scale = (lambda w: 1) if normalize == "ratio" else (lambda w: w)
    means = [jax.tree.map(lambda x, w=w: x * scale(w) / w, g) for g, w, _ in counted]
    norms = np.array([norm(g) for g in means])
    n = np.array([w for _, w, _ in counted])
    mean = jax.tree.map(lambda *xs: sum(w * x for w, x in zip(n, xs, strict=True)) / total, *means)
    want = {
        "grad_norm": norm(mean) * (total if normalize == "sum" else 1),
        "micro_grad_norm": norms.mean(),
        "micro_grad_norm_std": norms.std(),
        "update_norm": norm(updates),
        "update_ratio": norm(updates) / 5,
        "loss": sum(scale(w) * v for _, w, v in counted) / total,
        "weight": total,
        "num_skipped": k - len(counted),
        "every_k": k,
        "micro_weight": total / k,
    }
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-3), name
    if len(counted) > 1:
        noise = ((n * norms**2).sum() - total * norm(mean) ** 2) / (len(counted) - 1)
        signal = norm(mean) ** 2 - noise / total
        if signal > 1e-3:
            assert got["noise_scale"] == pytest.approx(noise / signal, rel=1e-2)
    else:
        assert got["noise_scale"] == -1


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [1, 3, 8, 20]], ids=["even", "uneven"])
def test_the_noise_scale_of_gaussian_gradients_is_the_true_one(sizes):
    # Gradients of n examples: mean G, covariance Σ / n. S estimates tr Σ, and B is tr Σ / |G|².
    dim, runs, mean, spread = 50, 2000, 0.2, 1.5
    trace, square = dim * spread**2, dim * mean**2
    n = jnp.array(sizes, jnp.float32)
    tx = accumulate(len(sizes), optax.identity(), monitor=True)
    state = tx.init(jnp.zeros(dim))

    def window(state, key):
        draws = jax.random.normal(key, (len(sizes), dim)) * spread / jnp.sqrt(n)[:, None] + mean

        def step(state, x):
            return (tx.update(x[0], state, weight=x[1])[1], None)

        state, _ = jax.lax.scan(step, state, (draws, n))
        return state.extras["monitor"].memory

    fresh = jax.vmap(lambda key: window(state, key))(jax.random.split(jax.random.key(0), runs))
    # The first window's averages are (1 - decay) of its own S and |G|².
    for name, want in (("noise", trace), ("signal", square)):
        values = np.asarray(fresh[name]) / (1 - 0.99)
        error = values.std() / runs**0.5
        assert abs(values.mean() - want) < 3 * error, name
        assert error < 0.1 * want
    # What it would be uncorrected: |G|² from the norm of the mean is too large by tr Σ / N,
    uncorrected = np.asarray(fresh["grad_norm"]) ** 2
    assert uncorrected.mean() == pytest.approx(square + trace / sum(sizes), rel=0.05)
    # and a mean of ratios is not the ratio of the means.
    ratios = np.asarray(fresh["noise"] / fresh["signal"])
    assert abs(ratios.mean() / (trace / square) - 1) > 0.1


def test_the_noise_scale_settles_over_windows():
    dim, trace, square = 50, 50 * 2.25, 50 * 0.04
    tx = accumulate(4, optax.identity(), monitor=True)

    def step(state, key):
        gradient = jax.random.normal(key, (dim,)) * 1.5 / jnp.sqrt(8.0) + 0.2
        return tx.update(gradient, state, weight=8)[1], None

    keys = jax.random.split(jax.random.key(1), 4 * 600)
    state, _ = jax.lax.scan(step, tx.init(jnp.zeros(dim)), keys)
    assert window_metrics(state)["noise_scale"] == pytest.approx(trace / square, rel=0.15)


def test_metrics_are_those_of_the_last_window_that_updated_and_0_before():
    tx = accumulate(2, optax.sgd(0.1), monitor=True, should_skip_update_fn=optax.skip_not_finite)
    state = tx.init(PARAMS)
    nothing = dict.fromkeys(window_metrics(state), 0) | {"noise_scale": -1}
    assert window_metrics(state) == nothing
    seen = []
    nan = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    for gradient in (PARAMS, PARAMS, nan, nan, nan, PARAMS):
        _, state = tx.update(gradient, state, PARAMS)
        seen.append(jax.tree.map(float, window_metrics(state)))
    assert seen[0] == nothing
    assert seen[1] == seen[2]
    assert seen[1] == seen[3]  # a window without weight is no update
    assert (seen[5]["num_skipped"], seen[5]["weight"], seen[5]["grad_norm"]) == (1, 1, 5)
    assert seen[5]["loss"] == 0  # no value= was passed


def test_a_flush_is_no_micro_step():
    tx = chain(accumulate(4, monitor=True), optax.sgd(0.1))
    _, state = run(tx, [PARAMS] * 3, value=[1.0, 2.0, 6.0])
    _, state = flush(tx, state, PARAMS)
    metrics = jax.tree.map(float, window_metrics(state))
    assert (metrics["weight"], metrics["micro_weight"], metrics["loss"]) == (3, 1, 3)
    assert (metrics["every_k"], metrics["num_skipped"]) == (4, 0)


def test_off_is_what_it_was_and_on_changes_no_update():
    gradients = [jax.tree.map(lambda p, i=i: p * i + 0.1, PARAMS) for i in range(7)]
    plain, watched = (accumulate(3, optax.adam(0.1), monitor=m) for m in (False, True))
    assert "monitor" not in plain.init(PARAMS).extras
    want, _ = laws.run(plain, PARAMS, gradients)
    got, _ = laws.run(watched, PARAMS, gradients)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_copy_is_made_for_it(dtype):
    params = {str(i): jnp.ones((256, 256), dtype) for i in range(4)}

    def temp_bytes(monitor):
        tx = accumulate(8, optax.adam(1e-3), monitor=monitor)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params, weight=2.0, value=1.0)
            return optax.apply_updates(params, updates), state

        compiled = step.lower(params, tx.init(params), params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(True) < temp_bytes(False) + 0.1 * 4 * 256 * 256 * 4


def test_with_every_k_1_and_under_jit_it_is_traced_once():
    tx = accumulate(1, optax.sgd(0.1), monitor=True)
    traces = []

    @jax.jit
    def step(gradient, state):
        traces.append(1)
        return tx.update(gradient, state, PARAMS, weight=4.0, value=2.0)

    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = step(PARAMS, state)
    assert len(traces) == 1
    metrics = jax.tree.map(float, window_metrics(state))
    assert (metrics["grad_norm"], metrics["loss"], metrics["weight"]) == (5, 2, 4)
    assert metrics["noise_scale"] == -1


# Windows that follow the noise.


def test_the_window_follows_the_noise_scale_at_boundaries_alone():
    dim, every_k = 40, adaptive_every_k(2, 32)
    tx = accumulate(every_k, optax.identity(), monitor=True)

    def step(state, key):
        gradient = jax.random.normal(key, (dim,)) + 0.5  # of 8 examples: B is 8 * 40 / 10 = 32
        _, state = tx.update(gradient, state, weight=8)
        return state, (state.micro_step, window_metrics(state))

    keys = jax.random.split(jax.random.key(0), 3000)
    _, (micro_steps, metrics) = jax.jit(functools.partial(jax.lax.scan, step))(
        tx.init(jnp.zeros(dim)), keys
    )
    closed = np.flatnonzero(np.asarray(micro_steps) == 0)
    sizes = np.diff(closed)
    assert closed[0] == 1  # min_k, while nothing is known
    wanted = [int(every_k.after({n: v[i] for n, v in metrics.items()})) for i in closed[:-1]]
    assert sizes.tolist() == wanted
    np.testing.assert_array_equal(np.asarray(metrics["every_k"])[closed[1:]], sizes)
    assert np.mean(sizes[-100:]) == pytest.approx(32 / 8, abs=0.7)


@pytest.mark.parametrize(
    ("noise_scale", "fraction", "k"),
    [
        *((math.nan, 1.0, 2), (math.inf, 1.0, 32), (0.0, 1.0, 2), (80.0, 1.0, 10)),
        *((80.0, 0.5, 5), (1e9, 1.0, 32)),
    ],
)
def test_k_is_rounded_and_bounded(noise_scale, fraction, k):
    metrics = {"noise_scale": jnp.float32(noise_scale), "micro_weight": jnp.float32(8)}
    assert adaptive_every_k(2, 32, fraction=fraction).after(metrics) == k


# Devices.

MESH = jax.make_mesh((8,), ("data",), (AxisType.Auto,))


def on_devices(tx):
    specs = state_specs(jax.eval_shape(tx.init, PARAMS), "data")
    init = jax.jit(jax.shard_map(tx.init, mesh=MESH, in_specs=P(), out_specs=specs))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=MESH, in_specs=(specs, P("data"), P("data")), out_specs=(P(), specs)
    )
    def micro_step(state, gradients, weights):
        own = varying(jax.tree.map(lambda x: x[0], gradients), "data")
        return tx.update(own, state, PARAMS, weight=weights[0], value=weights[0])

    return init, micro_step


def test_over_devices_it_is_the_window_of_all_and_costs_no_reduction():
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=(2, 8, *p.shape)), jnp.float32), PARAMS
    )
    weights = jnp.asarray(rng.integers(1, 9, (2, 8)), jnp.float32)

    def of(*at):
        return jax.tree.map(lambda x: x[at], gradients)

    init, micro_step = on_devices(accumulate(2, optax.sgd(0.1), axis_name="data", monitor=True))
    state = init(PARAMS)
    for i in range(2):
        _, state = micro_step(state, of(i), weights[i])
    flat = [of(i, d) for i in range(2) for d in range(8)]
    one = accumulate(16, optax.sgd(0.1), monitor=True)
    _, want = run(one, flat, weight=list(weights.reshape(-1)), value=list(weights.reshape(-1)))
    got, want = (jax.tree.map(float, window_metrics(s)) for s in (state, want))
    differ = {"every_k": (2, 16), "micro_weight": (got["weight"] / 2, got["weight"] / 16)}
    for name, value in want.items():
        if name in differ:
            assert (got[name], value) == pytest.approx(differ[name])
        else:
            assert got[name] == pytest.approx(value, rel=1e-4), name
    found = collectives(micro_step.lower(state, of(0), weights[0]).compile())
    assert found.outside.count == 0
    assert found.in_conditionals.count == 1


def test_another_number_of_devices_keeps_what_was_measured():
    init, micro_step = on_devices(accumulate(2, optax.sgd(0.1), axis_name="data", monitor=True))
    gradients = jax.tree.map(lambda p: jnp.broadcast_to(p, (8, *p.shape)), PARAMS)
    state = init(PARAMS)
    for _ in range(3):
        _, state = micro_step(state, gradients, jnp.ones(8))
    carried = reshard_window(state, 2)
    jax.tree.map(np.testing.assert_array_equal, window_metrics(carried), window_metrics(state))
    assert carried.extras["monitor"].sums["count"].shape == (2,)
    assert carried.extras["monitor"].sums["count"].sum() == 8


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_train_step_measures_the_update_that_it_applies(on_mesh):
    def loss_fn(w, x):
        return jnp.mean((x - w) ** 2)

    tx = chain(accumulate(2, axis_name="data" if on_mesh else None, monitor=True), optax.sgd(0.25))
    step = make_train_step(loss_fn, tx, mesh=MESH if on_mesh else None)
    params = jnp.full([], 2.0)
    state = step.init(params)
    for i in range(2):
        params, state, metrics = step(params, state, jnp.full(8, 4.0 + 2 * i))
    got = jax.tree.map(float, window_metrics(state))
    assert got["grad_norm"] == pytest.approx(6)
    assert got["update_norm"] == pytest.approx(1.5)
    assert got["update_ratio"] == pytest.approx(0.75)
    assert got["loss"] == pytest.approx(float(metrics["loss"])) == pytest.approx(10)
    assert got["weight"] == 16


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="monitor must be True or False, got 1"):
        accumulate(2, monitor=1)
    with pytest.raises(ValueError, match=r"every_k=AdaptiveEveryK.* follows what monitor=True"):
        accumulate(adaptive_every_k(2, 4))
    for args, message in (((1, 4), "min_k must be at least 2"), ((4, 3), "at most max_k; got")):
        with pytest.raises(ValueError, match=message):
            adaptive_every_k(*args)
    with pytest.raises(ValueError, match=r"max_k must be an int of at least 1, got 2\.5"):
        adaptive_every_k(2, 2.5)
    with pytest.raises(ValueError, match="fraction must be a finite number above 0, got 0"):
        adaptive_every_k(2, 4, fraction=0)
    with pytest.raises(ValueError, match="got 0 of 1 accumulators with a monitor"):
        window_metrics(accumulate(2).init(PARAMS))
    with pytest.raises(ValueError, match="got 0 of 0 accumulators"):
        window_metrics(optax.adam(0.1).init(PARAMS))
    state = accumulate(2).init(PARAMS)
    with pytest.raises(ValueError, match="monitor must be that with which the state was made"):
        accumulate(2, monitor=True).update(PARAMS, state)
    tx = accumulate(2, monitor=True)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="value must be a real scalar"):
        tx.update(PARAMS, state, value=jnp.ones(2))
