"""The loss scale: nothing but the range of float16 changes, and overflows cost what was asked."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

import laws
from optax_accum import (
    DynamicLossScale,
    accumulate,
    adaptive_every_k,
    chain,
    flush,
    loss_scale,
    make_train_step,
    reshard_window,
    state_specs,
    varying,
    window_metrics,
)
from optax_accum.testing import collectives

modes = st.sampled_from(["window", "micro_batch"])


def scaled(gradient, state):
    """What the gradient of the scaled loss is."""
    return jax.tree.map(lambda g: g * loss_scale(state).astype(g.dtype), gradient)


def run(tx, params, gradients, state=None, scale=True, **per_step):
    """Params, state and all updates after these gradients of the unscaled loss."""
    state, all_updates = tx.init(params) if state is None else state, []
    for i, gradient in enumerate(gradients):
        extra = {name: values[i] for name, values in per_step.items()}
        if scale:
            gradient = scaled(gradient, state)
        updates, state = tx.update(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
        all_updates.append(updates)
    return params, state, all_updates


@given(laws.seeds, laws.structures, laws.inners, st.integers(1, 4), modes, st.data())
def test_without_an_overflow_a_power_of_two_changes_no_bit(seed, structure, inner, k, mode, data):
    normalize = data.draw(st.sampled_from(["mean", "sum", "ratio"]))
    scale = 2.0 ** data.draw(st.integers(-5, 20))
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, [jnp.float32])
    gradients = [laws.small_integers(rng, structure, [jnp.float32]) for _ in range(2 * k)]
    weights = [w for _ in range(2) for w in laws.power_of_two_weights(rng, k)]
    config = DynamicLossScale(scale, min_scale=2.0**-9, max_scale=2.0**21, on_overflow=mode)
    plain = accumulate(k, inner, normalize=normalize)
    tx = accumulate(k, inner, normalize=normalize, loss_scale=config)
    want, want_state, _ = run(plain, params, gradients, scale=False, weight=weights)
    got, state, _ = run(tx, params, gradients, weight=weights)
    laws.assert_bitwise(got, want)
    laws.assert_bitwise(state.inner_state, want_state.inner_state)
    assert loss_scale(state) == scale


@st.composite
def overflowing(draw):
    """A scale's configuration, windows, and which of their micro-steps overflow."""
    k = draw(st.integers(1, 3))
    init, interval, factor = draw(st.sampled_from([(1.0, 1, 4.0), (16.0, 2, 2.0), (4.0, 3, 2.0)]))
    config = DynamicLossScale(init, interval, factor, max_scale=32.0, on_overflow=draw(modes))
    windows = draw(st.lists(st.lists(st.booleans(), min_size=k, max_size=k), max_size=8))
    return k, config, windows


@functools.cache
def compiled(k, config):
    tx = accumulate(k, optax.trace(0.5), loss_scale=config)
    return tx, jax.jit(tx.update)


@given(overflowing(), st.sampled_from([jnp.inf, -jnp.inf, jnp.nan]), st.booleans())
def test_it_follows_the_overflows_of_windows(case, overflow, weighted):
    k, config, windows = case
    (tx, update), (plain, plain_update) = compiled(k, config), compiled(k, None)
    params = {"a": jnp.zeros(2), "b": jnp.zeros([])}
    state, plain_state = tx.init(params), plain.init(params)
    scale, clean, num_skipped = config.init, 0, 0
    for i, window in enumerate(windows):
        weights = [float(1 + (i + j) % 3) if weighted else 1.0 for j in range(k)]
        dropped = any(window) and config.on_overflow == "window"
        for j, is_overflow in enumerate(window):
            assert loss_scale(state) == scale  # the same within a window
            good = {"a": jnp.array([i + 1.0, j]), "b": jnp.array(2.0)}
            gradient = scaled(good, state)
            if is_overflow:
                gradient["a"] = gradient["a"].at[1].set(overflow)
            updates, state = update(gradient, state, params, weight=weights[j])
            weight = 0.0 if is_overflow or dropped else weights[j]
            want, plain_state = plain_update(good, plain_state, params, weight=weight)
            chex.assert_trees_all_close(updates, want, rtol=1e-6)
            num_skipped += is_overflow or (dropped and any(window[:j]))
        chex.assert_trees_all_close(state.inner_state, plain_state.inner_state, rtol=1e-6)
        laws.assert_zeros(state.window_sum)
        assert state.window_weight == 0
        assert state.num_skipped == num_skipped
        assert bool(state.emitted) == (not dropped and not all(window))
        if any(window):
            scale, clean = max(scale / config.factor, config.min_scale), 0
        else:
            clean += 1
            if clean == config.growth_interval:
                scale, clean = min(scale * config.factor, config.max_scale), 0
        assert loss_scale(state) == scale


def test_it_recovers_after_it_has_fallen_to_its_bound():
    config = DynamicLossScale(8.0, growth_interval=2, min_scale=2.0, max_scale=16.0)
    tx = accumulate(2, optax.sgd(1.0), loss_scale=config)
    nan, fine = jnp.array(jnp.nan), jnp.array(1.0)
    scales = []
    params, state = jnp.zeros([]), tx.init(jnp.zeros([]))
    for gradient in [nan] * 10 + [fine] * 20:
        params, state, _ = run(tx, params, [gradient], state)
        scales.append(float(loss_scale(state)))
    # A window is two micro-steps, and two clean windows make it grow.
    assert scales[1::2] == [4.0] + [2.0] * 5 + [4.0] * 2 + [8.0] * 2 + [16.0] * 5
    assert params == -10.0


def test_a_lower_growth_interval_takes_effect_where_a_window_closes():
    def make(interval):
        return accumulate(
            3, optax.sgd(1.0), loss_scale=DynamicLossScale(2.0, growth_interval=interval)
        )

    one = jnp.array(1.0)
    params, state, _ = run(make(100), jnp.zeros([]), [one] * 10)
    params, state, _ = run(make(2), params, [one], state)
    assert loss_scale(state) == 2.0
    params, state, _ = run(make(2), params, [one], state)
    assert params == -4.0
    assert loss_scale(state) == 4.0


def test_windows_without_weight_are_no_clean_ones():
    tx = accumulate(1, optax.sgd(1.0), loss_scale=DynamicLossScale(4.0, growth_interval=2))
    _, state, _ = run(tx, jnp.ones([]), [jnp.ones([])] * 5, weight=[1.0, 0.0, 0.0, 0.0, 0.0])
    _, state = flush(tx, state, jnp.ones([]))
    assert loss_scale(state) == 4.0
    _, state, _ = run(tx, jnp.ones([]), [jnp.ones([])], state)
    assert loss_scale(state) == 8.0


@pytest.mark.parametrize("mode", ["window", "micro_batch"])
def test_a_flush_closes_an_overflowed_window(mode):
    config = DynamicLossScale(4.0, on_overflow=mode)
    tx = accumulate(4, optax.sgd(1.0), loss_scale=config)
    params = jnp.zeros([])
    gradients = [jnp.array(2.0), jnp.array(jnp.inf), jnp.array(4.0)]
    _, state, _ = run(tx, params, gradients)
    updates, state = flush(tx, state, params)
    assert updates == (0.0 if mode == "window" else -3.0)
    assert bool(state.emitted) == (mode == "micro_batch")
    assert loss_scale(state) == 2.0
    assert state.window_sum == 0
    assert state.micro_step == 0
    params, state, updates = run(tx, params, [jnp.array(1.0)] * 4, state)
    assert updates[-1] == -1.0
    assert state.gradient_step == 1 + (mode == "micro_batch")


def half_loss(params, batch):
    """A small network in float16, its loss in float32."""
    x, y = batch
    low = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jnp.tanh(x.astype(jnp.float16) @ low["w1"])
    return jnp.mean((hidden @ low["w2"]).astype(jnp.float32) * y)


def network(rng):
    params = {"w1": rng.normal(size=(6, 8)) / 2, "w2": rng.normal(size=(8, 1)) / 3}
    x, y = rng.normal(size=(24, 6)), rng.normal(size=(24, 1))

    def as_float(tree):
        return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)

    return as_float(params), as_float((x, y))


def test_float16_trains_as_float32_does_to_rounding_and_without_a_scale_does_not():
    params, (x, y) = network(np.random.default_rng(0))
    y = y * 3e-7  # gradients of which float16 has no digits left

    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch[0] @ params["w1"]) @ params["w2"] * batch[1])

    batches = [(x[i::3], y[i::3]) for i in range(3)]

    def train(loss_fn, config):
        tx = chain(accumulate(3, loss_scale=config), optax.sgd(1e5, momentum=0.9))
        step = make_train_step(loss_fn, tx)
        p = jax.tree.map(jnp.copy, params)
        state = step.init(p)
        for batch in batches * 5:
            p, state, metrics = step(p, state, batch)
        return p, metrics

    (want, want_metrics), (got, metrics) = train(loss, None), train(half_loss, DynamicLossScale())

    def distance(a, b):
        return max(float(abs(a[n] - b[n]).max()) for n in a)

    moved = distance(want, params)
    assert moved > 0.05
    assert distance(got, want) < 0.01 * moved  # float16 has three digits
    assert metrics["loss"] == pytest.approx(float(want_metrics["loss"]), rel=0.02)
    assert metrics["grad_norm"] == pytest.approx(float(want_metrics["grad_norm"]), rel=0.02)
    assert distance(train(half_loss, None)[0], want) > 0.2 * moved


@pytest.mark.parametrize("mode", ["window", "micro_batch"])
def test_a_micro_step_without_weight_is_no_overflow(mode):
    tx = accumulate(2, optax.sgd(1.0), loss_scale=DynamicLossScale(8.0, on_overflow=mode))
    gradients = [jnp.array(1.0), jnp.array(jnp.nan)]
    params, state, _ = run(tx, jnp.zeros([]), gradients, weight=[1.0, 0.0])
    assert params == -1.0
    assert loss_scale(state) == 8.0


@pytest.mark.parametrize("mode", ["window", "micro_batch"])
def test_an_overflow_is_one_whatever_the_rule_for_skipping_says(mode):
    config = DynamicLossScale(8.0, on_overflow=mode)
    skip = {"should_skip_update_fn": optax.skip_not_finite}
    tx = accumulate(2, optax.sgd(1.0), loss_scale=config, **skip)
    params, state, _ = run(tx, jnp.zeros([]), [jnp.array(1.0), jnp.array(jnp.nan)])
    assert params == (0.0 if mode == "window" else -1.0)
    assert loss_scale(state) == 4.0


@pytest.mark.parametrize("k", [1, 2])
def test_what_float16_could_not_hold_reaches_the_inner_transformation(k):
    params = jnp.ones([], jnp.float16)
    tx = accumulate(k, optax.scale(1024.0), loss_scale=DynamicLossScale())
    state = tx.init(params)
    for _ in range(k):
        scale = loss_scale(state)

        def scaled_loss(p, scale=scale):
            return scale * p.astype(jnp.float32) * 2.0**-26

        updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
    assert updates == 2.0**-16


def test_large_scales_do_not_overflow_the_monitor():
    tx = accumulate(2, optax.sgd(1.0), monitor=True, loss_scale=DynamicLossScale(2.0**15))
    _, state, _ = run(tx, jnp.zeros(2), [jnp.array([3e16, 4e16])] * 2)
    metrics = window_metrics(state)
    np.testing.assert_allclose([metrics["grad_norm"], metrics["micro_grad_norm"]], 5e16, rtol=1e-6)


def test_a_scale_too_high_comes_down_by_itself():
    params, batch = network(np.random.default_rng(1))
    step = make_train_step(
        half_loss, accumulate(2, optax.sgd(0.1), loss_scale=DynamicLossScale(2.0**24))
    )
    state = step.init(params)
    skipped = []
    for _ in range(24):
        params, state, metrics = step(params, state, batch)
        skipped.append(bool(state.micro_step == 0) and not bool(metrics["emitted"]))
        assert jax.tree.all(jax.tree.map(lambda p: bool(jnp.isfinite(p).all()), params))
    assert any(skipped)
    assert not any(skipped[-8:])
    assert 2.0**15 <= loss_scale(state) < 2.0**24


@pytest.mark.parametrize("mode", ["window", "micro_batch"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("by_hand", [True, False], ids=["shard_map", "train_step"])
def test_devices_agree_on_an_overflow_of_one(mode, k, by_hand):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    config = DynamicLossScale(16.0, growth_interval=1, on_overflow=mode)
    tx = accumulate(k, optax.sgd(1.0), axis_name="data", loss_scale=config)

    def loss_fn(p, x):
        return jnp.mean(p * x)

    params = jnp.zeros([])
    if by_hand:
        specs = state_specs(jax.eval_shape(tx.init, params), "data")
        sharded = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
        state = jax.jit(sharded)(params)

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
        )
        def step(params, state, x):
            scale = loss_scale(state)
            gradient = jax.grad(lambda p: scale * loss_fn(p, x))(varying(params, "data"))
            updates, state = tx.update(gradient, state, params, weight=len(x))
            return optax.apply_updates(params, updates), state

        found = collectives(step.lower(params, state, jnp.ones(16)).compile())
        assert (found.outside.count, found.in_conditionals.count) == (0 if k > 1 else 1, k > 1)
    else:
        train_step = make_train_step(loss_fn, tx, mesh=mesh)
        state = train_step.init(params)

        def step(*args):
            return train_step(*args)[:2]

    fine, overflow = jnp.ones(16), jnp.ones(16).at[5].set(jnp.inf)  # device 2 overflows
    for batch in (overflow, *[fine] * (k - 1)):
        params, state = step(params, state, batch)
    assert state.num_skipped.sum() == (k if mode == "window" else 1)
    assert params == (0.0 if mode == "window" else -1.0)
    assert loss_scale(state) == 8.0
    for _ in range(k):
        params, state = step(params, state, fine)
    assert params == (-1.0 if mode == "window" else -2.0)
    assert loss_scale(state) == 16.0


def test_an_overflow_goes_with_an_open_window_to_other_devices():
    tx = accumulate(3, optax.sgd(1.0), axis_name="data", loss_scale=DynamicLossScale(16.0))

    def on(n, fn):
        return jax.pmap(fn, axis_name="data", devices=jax.devices()[:n])

    def spread(n, tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), tree)

    shared = state_specs(tx.init(jnp.zeros([])), "data")

    def is_own(spec):
        return spec == P("data")

    state = on(2, tx.init)(jnp.zeros(2))
    _, state = on(2, tx.update)(jnp.array([1.0, jnp.nan]), state, jnp.zeros(2))
    joined = jax.tree.map(
        lambda x, s: np.asarray(x)[:, 0] if is_own(s) else np.asarray(x)[0], state, shared
    )
    moved = reshard_window(joined, 4)
    state = jax.tree.map(lambda x, s: x[:, None] if is_own(s) else spread(4, x), moved, shared)
    for _ in range(2):
        updates, state = on(4, tx.update)(jnp.ones(4), state, jnp.zeros(4))
    assert not state.emitted.any()
    assert (updates == 0).all()
    assert (state.extras["loss_scale"].memory["scale"] == 8.0).all()


def test_the_monitor_and_the_rule_for_skipping_see_unscaled_gradients():
    seen = []

    def should_skip(gradients, gradient_step, params):
        seen.append(gradients)
        return jnp.array(False), ()

    params, gradients = jnp.zeros(2), [jnp.array([3.0, 0.0]), jnp.array([-3.0, 4.0])]
    plain = accumulate(2, optax.sgd(1.0), monitor=True)
    tx = accumulate(
        2,
        optax.sgd(1.0),
        monitor=True,
        should_skip_update_fn=should_skip,
        loss_scale=DynamicLossScale(1024.0),
    )
    losses = {"value": [1.0, 2.0], "weight": [2.0, 6.0]}
    _, want, _ = run(plain, params, gradients, scale=False, **losses)
    _, state, _ = run(tx, params, gradients, **losses)
    chex.assert_trees_all_close(window_metrics(state), window_metrics(want))
    chex.assert_trees_all_close(seen, gradients)


def test_a_window_of_its_own_length_may_be_scaled_too():
    tx = accumulate(
        adaptive_every_k(2, 8), optax.sgd(0.1), monitor=True, loss_scale=DynamicLossScale(8.0)
    )
    _params, state, _ = run(tx, jnp.zeros(1), [jnp.ones(1), -0.9 * jnp.ones(1)] * 5)
    assert state.gradient_step == 2
    assert window_metrics(state)["every_k"] == 8


@pytest.mark.parametrize("k", [1, 3])
def test_it_is_one_trace_and_keeps_its_dtypes(k):
    params = {"a": jnp.ones((64, 1024)), "b": jnp.ones((64, 1024), jnp.float16)}
    tx = accumulate(k, optax.sgd(0.5, momentum=0.5), loss_scale=DynamicLossScale())
    state = tx.init(params)

    traces = []

    @jax.jit
    def step(params, state):
        traces.append(1)
        updates, state = tx.update(scaled(params, state), state, params)
        return optax.apply_updates(params, updates), state

    # With every_k=1 the dtypes are those that the bare optimizer gives its state in the first step.
    new_params, new_state = step(params, state)
    shapes = jax.eval_shape(lambda: state if k > 1 else new_state)
    for _ in range(2 * k):
        new_params, new_state = step(new_params, new_state)
        assert jax.eval_shape(lambda state=new_state: state) == shapes
    assert len(traces) == (1 if k > 1 else 2)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_it_keeps_the_gradient_and_nothing_else(k, dtype):
    params = {"a": jnp.ones((64, 1024)), "b": jnp.ones((64, 1024), dtype)}

    def temp_bytes(config):
        tx = accumulate(k, optax.sgd(0.5), loss_scale=config, emit_dtype=jnp.float32)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, x):
            gradients = jax.tree.map(lambda p: p * x.astype(p.dtype), params)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        compiled = step.lower(params, tx.init(params), jnp.ones([])).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # The gradient is kept until it is known to be finite.
    gradients = 64 * 1024 * (4 + jnp.dtype(dtype if k > 1 else jnp.float32).itemsize)
    assert temp_bytes(DynamicLossScale()) <= temp_bytes(None) + gradients + 8192


def test_it_goes_on_bit_for_bit_from_any_micro_step():
    tx = accumulate(3, optax.adam(0.1), loss_scale=DynamicLossScale(8.0, growth_interval=1))
    rng = np.random.default_rng(0)
    gradients = [jnp.asarray(rng.normal(size=3), jnp.float32) for _ in range(9)]
    gradients[4] = gradients[4].at[0].set(jnp.inf)
    want, want_state, _ = run(tx, jnp.zeros(3), gradients)
    for cut in range(9):
        params, state, _ = run(tx, jnp.zeros(3), gradients[:cut])
        kept = jax.tree.map(np.asarray, (params, state))
        params, state, _ = run(tx, *[kept[0], gradients[cut:]], kept[1])
        laws.assert_bitwise((params, state), (want, want_state))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init": 0.0}, "init must be a finite number above 0, got 0.0"),
        ({"init": math.inf}, "init must be a finite number above 0, got inf"),
        ({"init": True}, "init must be .* got True"),
        ({"init": 10**400}, "init must be from "),
        (
            {"init": 2.0**30},
            "init must be from min_scale to max_scale, got init=1073741824.0, min_scale=1.0",
        ),
        ({"factor": 1.0}, "factor must be above 1, got 1.0"),
        ({"factor": 1 + 1e-9}, "factor must be above 1, got 1.000000001"),
        ({"max_scale": 1e40}, r"max_scale must be from 2\*\*-126 to 2\*\*126, got 1e\+40"),
        ({"min_scale": 1e-40}, "min_scale must be .*, got 1e-40"),
        ({"growth_interval": 0}, "growth_interval must be an int of at least 1, got 0"),
        ({"min_scale": -1.0}, "min_scale must be a finite number above 0, got -1.0"),
        ({"on_overflow": "raise"}, "on_overflow must be one of 'window', 'micro_batch'; got"),
    ],
)
def test_a_scale_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**arguments)


def test_what_does_not_fit_is_refused_by_name():
    params = jnp.zeros(2)
    with pytest.raises(ValueError, match="loss_scale must be a DynamicLossScale or None, got 1024"):
        accumulate(2, loss_scale=1024.0)
    plain, tx = accumulate(2), accumulate(2, loss_scale=DynamicLossScale())
    with pytest.raises(
        ValueError,
        match=r"loss_scale must be that .*whose entry is missing",
    ):
        tx.update(params, plain.init(params), params)
    with pytest.raises(ValueError, match=r"loss_scale must be that .*got one for nothing"):
        plain.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match=r"got 0 in 1 accumulators"):
        loss_scale(plain.init(params))
    with pytest.raises(ValueError, match=r"got 0 in 0 accumulators"):
        loss_scale(optax.adam(1.0).init(params))
