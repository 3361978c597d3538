"""Windows over eight devices: one reduction, and the update of one device that saw it all."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_accum import (
    DynamicLossScale,
    accumulate,
    chain,
    flush,
    has_updated,
    reshard_window,
    state_specs,
    varying,
)
from optax_accum.testing import collectives

N = 8
MESH = jax.make_mesh((N,), ("data",), (AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def specs_of(tx, params=PARAMS, axis="data"):
    return state_specs(jax.eval_shape(tx.init, params), axis)


def on_mesh(tx, params=PARAMS, axis="data", mesh=MESH, check_vma=True):
    """`init` and a jitted `update`, whose gradients and own extra args have an axis of devices."""
    specs = specs_of(tx, params, axis)
    shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    init = jax.jit(shard_map(tx.init, in_specs=P(), out_specs=specs))

    def body(gradients, state, params, own, shared):
        gradients, own = jax.tree.map(lambda x: x[0], (gradients, own))
        return tx.update(gradients, state, params, **own, **shared)

    mapped = jax.jit(
        shard_map(body, in_specs=(P(axis), specs, P(), P(axis), P()), out_specs=(P(), specs))
    )

    def update(gradients, state, params, shared=None, **own):
        return mapped(gradients, state, params, own, shared or {})

    return init, update


def with_pmap(tx, params=PARAMS):
    """The same under `jax.pmap`; updates and what is shared come from the first device."""

    def repeat(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * N), tree)

    def body(gradients, state, params, own, shared):
        return tx.update(gradients, state, params, **own, **shared)

    mapped = jax.pmap(body, axis_name="data")

    def init(params):
        return jax.pmap(tx.init, axis_name="data")(repeat(params))

    def update(gradients, state, params, shared=None, **own):
        updates, state = mapped(gradients, state, repeat(params), own, repeat(shared or {}))
        for leaf in jax.tree.leaves(updates):
            np.testing.assert_array_equal(leaf, jnp.broadcast_to(leaf[0], leaf.shape))
        return jax.tree.map(lambda x: x[0], updates), state

    return init, update


WAYS = {
    "shard_map": on_mesh,
    "shard_map, unchecked": functools.partial(on_mesh, check_vma=False),
    "pmap": with_pmap,
}


def integers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), jnp.float32)


def gradients_of(seed):
    """One gradient a device, of small integers, whose sums are exact."""
    return {"w": integers(seed, N, 2, 3), "b": integers(seed + 1, N, 3)}


def one_device(tx, windows, params=PARAMS):
    """Updates of one device that gathers all micro-batches: windows of (gradient, weight)."""
    state, all_updates = tx.init(params), []
    for window in windows:
        for i, (gradient, weight) in enumerate(window):
            updates, state = tx.update(
                gradient, state, params, weight=weight, flush=i + 1 == len(window)
            )
        all_updates.append(updates)
    return all_updates, state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inner", [optax.sgd(1.0), optax.adam(1e-2)], ids=["sgd", "adam"])
@pytest.mark.parametrize("normalize", ["mean", "sum", "ratio"])
def test_devices_with_uneven_weights_are_one_window(way, inner, normalize):
    k = 2
    tx = accumulate(k, inner, normalize=normalize, axis_name="data")
    single = accumulate(10**6, inner, normalize=normalize)
    init, update = WAYS[way](tx)
    state, windows = init(PARAMS), []
    got = []
    for step in range(2 * k):
        gradients = gradients_of(10 * step)
        # Tokens of a device: uneven, some none, 32 in all.
        weights = jnp.asarray([0, 1, 2, 3, 4, 5, 6, 11.0])[
            np.random.default_rng(step).permutation(N)
        ]
        updates, state = update(gradients, state, PARAMS, weight=weights)
        got.append(updates)
        windows += [[]] if step % k == 0 else []
        windows[-1] += [
            (jax.tree.map(lambda g, d=d: g[d], gradients), weights[d]) for d in range(N)
        ]
    expected, single_state = one_device(single, windows)
    for step, updates in enumerate(got):
        if step % k == k - 1:
            chex.assert_trees_all_close(updates, expected[step // k], rtol=1e-6, atol=1e-7)
        else:
            assert not any(np.any(x) for x in jax.tree.leaves(updates))
    np.testing.assert_array_equal(jnp.ravel(state.gradient_step)[0], 2)
    assert int(state.num_skipped.sum()) == int(single_state.num_skipped) == 2 * k


@pytest.mark.parametrize("way", WAYS)
def test_the_mean_of_integers_is_exact_to_the_bit(way):
    tx = accumulate(4, axis_name="data")
    init, update = WAYS[way](tx)
    state, total = init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
    for step in range(4):
        gradients = gradients_of(step)
        total = jax.tree.map(lambda t, g: t + g.sum(0), total, gradients)
        updates, state = update(gradients, state, PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda t: t / 32, total))


@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from(["mean", "ratio"]))
def test_any_devices_may_skip_and_nobody_waits(seed, k, normalize):
    rng = np.random.default_rng(seed)
    init, update, single = _skipping(k, normalize)
    state, window = init(PARAMS), []
    for step in range(k):
        gradients = jax.tree.map(np.array, gradients_of(seed + step))
        weights = rng.choice([0.0, 1.0, 2.0, np.nan, -1.0], N)
        gradients["w"][rng.random(N) < 0.3] = np.nan  # rejected
        updates, state = update(gradients, state, PARAMS, weight=jnp.asarray(weights, jnp.float32))
        window += [(jax.tree.map(lambda g, d=d: g[d], gradients), weights[d]) for d in range(N)]
    (expected,), single_state = one_device(single, [window])
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    assert bool(has_updated(state)) == bool(has_updated(single_state))
    assert int(state.gradient_step) == int(single_state.gradient_step)
    assert int(state.num_skipped.sum()) == int(single_state.num_skipped)
    assert not np.any(state.window_weight)


@functools.cache
def _skipping(k, normalize):
    skip = {"normalize": normalize, "should_skip_update_fn": optax.skip_not_finite}
    tx = accumulate(k, optax.sgd(1.0), axis_name="data", **skip)
    return *on_mesh(tx), accumulate(10**6, optax.sgd(1.0), **skip)


@pytest.mark.parametrize("way", WAYS)
def test_a_window_that_no_device_gathered_for_closes_without_an_update(way):
    init, update = WAYS[way](accumulate(2, optax.adam(1.0), axis_name="data"))
    start = init(PARAMS)
    state = start
    for _ in range(2):
        updates, state = update(gradients_of(0), state, PARAMS, weight=jnp.zeros(N))
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    assert not np.any(has_updated(state))
    chex.assert_trees_all_equal(state.inner_state, start.inner_state)
    np.testing.assert_array_equal(jnp.ravel(state.num_skipped), 2)


def test_averaged_extra_args_are_averaged_over_devices():
    seen = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros([]), lambda u, s, p=None, *, value: (u, value)
    )
    tx = accumulate(2, seen, average_extra_args=("value",), axis_name="data")
    init, update = on_mesh(tx)
    state = init(PARAMS)
    weights, values = jnp.arange(8.0), jnp.arange(8.0) ** 2
    for _ in range(2):
        _, state = update(gradients_of(0), state, PARAMS, weight=weights, value=values)
    np.testing.assert_allclose(state.inner_state, np.average(values, weights=weights), rtol=1e-6)


def test_flush_closes_the_window_of_all_devices():
    tx = chain(accumulate(5, axis_name="data"), optax.sgd(1.0))
    init, update = on_mesh(tx)
    specs = specs_of(tx)
    gradients = gradients_of(0)
    mean = jax.tree.map(lambda g: -g.mean(0), gradients)
    _, state = update(gradients, init(PARAMS), PARAMS)
    flushed = jax.jit(
        jax.shard_map(
            functools.partial(flush, tx), mesh=MESH, in_specs=(specs, P()), out_specs=(P(), specs)
        )
    )
    updates, closed = flushed(state, PARAMS)
    chex.assert_trees_all_equal(updates, mean)
    assert has_updated(closed)
    updates, closed = flushed(closed, PARAMS)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    updates, _ = update(gradients, state, PARAMS, shared={"flush": jnp.asarray(True)})
    chex.assert_trees_all_equal(updates, mean)


# What is compiled.


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def training_step(tx, mesh=MESH, axis="data", check_vma=True, gradient=None):
    """The micro-step of the README."""
    specs = specs_of(tx, axis=axis)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), specs, P(axis)),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    def micro_step(params, opt_state, x):
        if gradient is not None:
            gradients = gradient(params, x)
        else:
            gradients = jax.grad(loss_fn)(varying(params, axis), x)
        updates, opt_state = tx.update(gradients, opt_state, params, weight=len(x))
        return optax.apply_updates(params, updates), opt_state

    init = jax.jit(
        jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=check_vma)
    )
    return init, micro_step


X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 32, 2)), jnp.float32)
SUM_BYTES = 4 * (6 + 3)
WEIGHT_BYTES = 4


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("mesh", [MESH, GRID], ids=["data", "data and model"])
def test_one_reduction_of_the_sums_at_the_boundary_and_none_in_a_micro_step(check_vma, mesh):
    axis = mesh.axis_names if len(mesh.axis_names) > 1 else "data"
    tx = chain(accumulate(4, axis_name=axis), optax.adam(1e-2))
    init, step = training_step(tx, mesh, axis, check_vma)
    params = jax.tree.map(jnp.copy, PARAMS)
    found = collectives(step.lower(params, init(params), X[0]).compile())
    assert found.outside.count == found.in_loops.count == 0
    assert found.in_conditionals.kinds == {"all-reduce": 1}
    assert found.in_conditionals.bytes == SUM_BYTES + WEIGHT_BYTES


def test_every_k_1_has_the_reduction_of_the_mean_alone():
    tx = accumulate(1, optax.adam(1e-2), axis_name="data")
    init, step = training_step(tx)
    params = jax.tree.map(jnp.copy, PARAMS)
    found = collectives(step.lower(params, init(params), X[0]).compile())
    assert found.outside.kinds == {"all-reduce": 1}
    assert found.outside.bytes == SUM_BYTES + WEIGHT_BYTES
    assert found.in_conditionals.count == 0


def test_an_eager_reduction_is_caught():
    def reduced(params, x):
        return jax.lax.pmean(jax.grad(loss_fn)(varying(params, "data"), x), "data")

    tx = optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation()

    @functools.partial(jax.jit)
    @functools.partial(
        jax.shard_map, mesh=MESH, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
    )
    def eager(params, opt_state, x):
        updates, opt_state = tx.update(reduced(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    found = collectives(eager.lower(PARAMS, tx.init(PARAMS), X[0]).compile())
    assert found.outside.count >= 1
    assert found.outside.bytes >= SUM_BYTES

    def scanned(params, opt_state, xs):
        return jax.lax.scan(lambda c, x: (eager(*c, x), None), (params, opt_state), xs)[0]

    found = collectives(jax.jit(scanned).lower(PARAMS, tx.init(PARAMS), X).compile())
    assert found.in_loops.count >= 1
    assert found.outside.count == 0


def test_training_is_that_of_one_device_and_params_are_the_same_everywhere():
    inner = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2))
    init, step = training_step(chain(accumulate(3, axis_name="data"), inner))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = init(params)
    want, want_state = PARAMS, inner.init(PARAMS)
    for x in X:
        params, state = step(params, state, x)
    for window in X.reshape(2, 96, 2):
        updates, want_state = inner.update(jax.grad(loss_fn)(want, window), want_state, want)
        want = optax.apply_updates(want, updates)
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    for leaf in jax.tree.leaves(params):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == N
        for shard in shards:
            np.testing.assert_array_equal(shard, shards[0])


def test_one_trace_serves_micro_steps_and_boundaries():
    tx = chain(accumulate(3, axis_name="data"), optax.adam(1e-2))
    specs = specs_of(tx)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(gradients, state):
        def body(g, s):
            return tx.update(jax.tree.map(lambda x: x[0], g), s, PARAMS)

        mapped = jax.shard_map(body, mesh=MESH, in_specs=(P("data"), specs), out_specs=(P(), specs))
        return mapped(gradients, state)

    state = on_mesh(tx)[0](PARAMS)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    for seed in range(4):
        _, state = step(gradients_of(seed), state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == shapes


# Shardings.


def test_sharded_parameters_keep_their_axis_beside_that_of_the_devices():
    specs = {"w": P(None, "model"), "b": P()}
    params = {"w": jnp.arange(8.0).reshape(2, 4), "b": jnp.ones(3)}
    tx = chain(accumulate(2, axis_name="data"), optax.adam(1e-2))
    got = state_specs(jax.eval_shape(tx.init, params), "data", specs)[0]
    assert got.window_sum == {"w": P("data", None, "model"), "b": P("data")}
    assert got.inner_state[0].mu == got.inner_state[0].nu == specs
    assert got.inner_state[0].count == got.micro_step == got.gradient_step == got.emitted == P()
    assert got.window_weight == got.num_skipped == P("data")

    init = jax.jit(
        jax.shard_map(tx.init, mesh=GRID, in_specs=(specs,), out_specs=(got,), check_vma=False)
    )
    (state,) = init(params)
    assert state.window_sum["w"].shape == (4, 2, 4)
    assert state.window_sum["w"].sharding.spec == P("data", None, "model")
    assert state.inner_state[0].mu["w"].sharding.spec == P(None, "model")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(), P("data")], ids=["replicated", "FSDP"])
def test_under_jit_the_sums_take_the_sharding_of_the_parameters(axis_type, spec):
    mesh = jax.make_mesh((N,), ("data",), (axis_type,))
    sharding = NamedSharding(mesh, spec)
    params = {"w": jax.device_put(jnp.ones((16, 4)), sharding)}
    tx = accumulate(2, optax.adam(1e-2))
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        assert state.window_sum["w"].sharding.is_equivalent_to(sharding, 2)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(params, state, params)
            assert state.window_sum["w"].sharding.is_equivalent_to(sharding, 2)
    assert updates["w"].sharding.is_equivalent_to(sharding, 2)


@pytest.mark.parametrize(
    "tx",
    [
        accumulate(8, optax.adam(1e-2)),
        optax.MultiSteps(optax.adam(1e-2), 8).gradient_transformation(),
    ],
    ids=["accumulate", "MultiSteps"],
)
def test_under_jit_every_micro_step_reduces_the_gradient(tx):
    shared, split = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))
    params, x = jax.device_put(PARAMS, shared), jax.device_put(X[0], split)

    @functools.partial(jax.jit, out_shardings=(shared, None))
    def micro_step(params, opt_state, x):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    found = collectives(micro_step.lower(params, jax.jit(tx.init)(params), x).compile())
    assert found.outside.kinds == {"all-reduce": 1}
    assert found.outside.bytes == SUM_BYTES


# Sums that are sharded themselves: a composition, for optimizers that go element by element.


def test_without_an_axis_each_device_has_a_window_of_its_own():
    tx = accumulate(2, optax.adam(1e-2))
    state = jax.tree.map(lambda x: jnp.stack([x] * N), tx.init(PARAMS))

    def body(gradients, state):
        gradients, state = jax.tree.map(lambda x: x[0], (gradients, state))
        return jax.tree.map(lambda x: x[None], tx.update(gradients, state))

    mapped = jax.jit(jax.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P("data")))
    windows = [gradients_of(0), gradients_of(1)]
    for gradients in windows:
        updates, state = mapped(gradients, state)
    for d in range(N):
        window = [(jax.tree.map(lambda g, d=d: g[d], g), 1.0) for g in windows]
        (want,), _ = one_device(accumulate(10**6, optax.adam(1e-2)), [window])
        chex.assert_trees_all_close(jax.tree.map(lambda u, d=d: u[d], updates), want, rtol=1e-5)


def test_a_reduce_scatter_in_each_micro_step_shards_sums_and_moments():
    """ZeRO-2: an eighth of their memory, for k reductions of the gradient in place of one."""
    params = {"w": jnp.arange(16.0 * 24).reshape(16, 24) / 300, "b": jnp.ones(24)}
    tx = accumulate(2, optax.adam(1e-2), normalize="ratio")

    def split(x):
        return P("data") if x.ndim else P()

    specs = jax.tree.map(split, jax.eval_shape(tx.init, params))
    shardings = jax.tree.map(functools.partial(NamedSharding, MESH), specs)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    assert {x.size for x in jax.tree.leaves(state.window_sum)} == {16 * 24, 24}
    for x in jax.tree.leaves((state.window_sum, state.inner_state[0].mu)):
        assert x.addressable_shards[0].data.size == x.size // N

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P(), specs, P("data"), P("data")),
        out_specs=(P(), specs),
    )
    def micro_step(params, state, x, weight):
        weight = weight[0]

        def first(x):
            return lax.axis_index("data") * (x.shape[0] // N)

        def part(x):
            return lax.dynamic_slice_in_dim(x, first(x), x.shape[0] // N)

        local = varying(params, "data")
        gradients = jax.grad(loss_fn)(local, x)

        def scatter(g):
            return lax.psum_scatter(weight * g, "data", tiled=True)

        own, gradients = jax.tree.map(part, local), jax.tree.map(scatter, gradients)
        updates, state = tx.update(gradients, state, own, weight=lax.psum(weight, "data"))

        def gather(own, params):
            def at(p, x):
                return lax.dynamic_update_slice_in_dim(jnp.zeros_like(p), x, first(p), 0)

            return jax.tree.map(
                lambda p, x: lax.psum(at(varying(p, "data"), x), "data"), params, own
            )

        own = optax.apply_updates(own, updates)
        return lax.cond(has_updated(state), gather, lambda own, params: params, own, params), state

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, 16)), jnp.float32)
    weights = jnp.asarray([1.0, 2, 3, 4, 0, 5, 0, 1])
    found = collectives(micro_step.lower(params, state, x[0], weights).compile())
    sum_bytes = 4 * (16 * 24 + 24)
    assert found.outside.kinds["reduce-scatter"] >= 1
    assert found.outside.bytes == sum_bytes // N + WEIGHT_BYTES
    assert found.in_conditionals.bytes == sum_bytes

    want = params
    inner_state = optax.adam(1e-2).init(want)
    params = jax.tree.map(jnp.copy, params)
    for window in x.reshape(2, 2, 32, 16):
        for micro_batch in window:
            params, state = micro_step(params, state, micro_batch, weights)
        parts = window.reshape(2, N, 4, 16)

        def mean(p, parts=parts):
            return jnp.average(
                jnp.stack([jnp.stack([loss_fn(p, x) for x in part]) for part in parts]).mean(0),
                weights=weights,
            )

        updates, inner_state = optax.adam(1e-2).update(jax.grad(mean)(want), inner_state, want)
        want = optax.apply_updates(want, updates)
    chex.assert_trees_all_close(params, want, rtol=1e-5)


# Another number of devices.


def test_an_open_window_goes_from_8_to_4_to_1_to_8_devices():
    tx = accumulate(5, optax.adam(1e-2), axis_name="data")
    weights = jnp.arange(1.0, 9.0)
    ends = []
    for counts in ((8, 8, 8, 8, 8), (8, 4, 1, 8, 2)):
        state = None
        for step, count in enumerate(counts):
            mesh = jax.make_mesh(
                (count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count]
            )
            init, update = on_mesh(tx, mesh=mesh)
            state = init(PARAMS) if state is None else reshard_window(jax.device_get(state), count)
            gradients = gradients_of(step)  # of eight micro-batches; each device takes its share
            w = weights.reshape(count, -1)
            summed = jax.tree.map(
                lambda g, w=w, count=count: (
                    jnp.einsum("ds,ds...->d...", w, g.reshape(count, -1, *g.shape[1:]))
                    / w.sum(1).reshape(-1, *[1] * (g.ndim - 1))
                ),
                gradients,
            )
            updates, state = update(summed, state, PARAMS, weight=w.sum(1))
        ends.append((updates, state.inner_state, state.gradient_step))
        assert has_updated(state)
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-7)


def test_a_state_for_another_number_of_devices_names_the_remedy():
    tx = accumulate(2, axis_name="data")
    init, _ = on_mesh(tx)
    half = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    _, update = on_mesh(tx, mesh=half)
    state = jax.device_get(init(PARAMS))
    gradients = jax.tree.map(lambda g: g[:4], gradients_of(0))
    with pytest.raises(ValueError, match=r"leading axis of 1.*\(2,\).*reshard_window"):
        update(gradients, state, PARAMS)
    update(gradients, reshard_window(state, 4), PARAMS)


# Errors.


def test_gradients_that_are_summed_already_name_the_n_fold_trap():
    _, step = training_step(
        accumulate(2, axis_name="data"), gradient=lambda params, x: jax.grad(loss_fn)(params, x)
    )
    init, _ = training_step(accumulate(2, axis_name="data"))
    with pytest.raises(
        ValueError, match=r"gradients\['b'\] does not vary .*'data'.*varying\(params"
    ):
        step.lower(PARAMS, init(PARAMS), X[0])


def test_a_flush_that_varies_is_refused():
    tx = accumulate(2, axis_name="data")
    init, update = on_mesh(tx)
    with pytest.raises(ValueError, match=r"flush must be the same on all devices.*'data'"):
        update(gradients_of(0), init(PARAMS), PARAMS, flush=jnp.arange(8) > 3)


@pytest.mark.parametrize("function", ["update", "varying"])
def test_an_axis_that_is_not_mapped_is_named(function):
    tx = accumulate(2, axis_name="batch")
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"axis_name must be mapped here.*'batch'"):
        tx.update(PARAMS, state, PARAMS) if function == "update" else varying(PARAMS, "batch")


def test_a_list_of_axes_is_refused():
    with pytest.raises(ValueError, match=r"axis_name must be .* a tuple of names, got \['data'\]"):
        accumulate(2, axis_name=["data"])


@pytest.mark.parametrize("number", [0, -1, 2.0, True])
def test_a_wrong_number_of_devices_is_named(number):
    state = accumulate(2, axis_name="data").init(PARAMS)
    with pytest.raises(ValueError, match=f"num_devices must be an int.*got {number}"):
        reshard_window(state, number)


@pytest.mark.parametrize(
    "function", [lambda s: state_specs(s, "data"), lambda s: reshard_window(s, 2)]
)
def test_a_state_without_an_axis_is_named(function):
    with pytest.raises(ValueError, match=r"accumulate\(\.\.\., axis_name=\.\.\.\)"):
        function(accumulate(2).init(PARAMS))


def test_what_varies_already_stays_as_it_is():
    def body(x):
        return varying({"x": x, "y": jnp.ones(())}, "data")

    specs = {"x": P("data"), "y": P("data")}
    mapped = jax.shard_map(
        lambda x: jax.tree.map(lambda v: v.reshape(1), body(x)),
        mesh=MESH,
        in_specs=P("data"),
        out_specs=specs,
    )
    out = mapped(jnp.arange(8.0))
    np.testing.assert_array_equal(out["x"], np.arange(8))
    np.testing.assert_array_equal(out["y"], np.ones(8))


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (2, {"accumulator_dtype": jnp.bfloat16}),
        (1, {"loss_scale": DynamicLossScale(1.0)}),
        (1, {"should_skip_update_fn": optax.skip_not_finite}),
    ],
)
def test_what_a_gate_writes_beside_the_sums_is_sharded_as_the_parameters_are(k, options):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
        tx = accumulate(k, optax.sgd(1.0), **options)
        state = jax.jit(tx.init)(params)
        for _ in range(k):
            updates, state = jax.jit(tx.update)(params, state, params)
        assert updates.sharding.spec[0] == "data"
        np.testing.assert_array_equal(updates, -np.ones((8, 4)))


@pytest.mark.parametrize("options", [{"monitor": True}, {"loss_scale": DynamicLossScale(8.0)}])
@pytest.mark.parametrize("k", [1, 2])
def test_a_window_of_its_own_on_each_device_takes_every_component(k, options):
    tx = accumulate(k, optax.sgd(1.0), **options)

    def updates_of(params, gradients):
        params = varying(params, "data")
        state = tx.init(params)
        for i in range(k):
            updates, state = tx.update(gradients[0] * (i + 1), state, params, weight=2.0)
        return updates[None]

    mapped = jax.shard_map(updates_of, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"))
    gradients = jnp.arange(N * 3.0).reshape(N, 3)
    got = jax.jit(mapped)(jnp.ones(3), gradients)
    mean = gradients * (k + 1) / 2 / (8 if "loss_scale" in options else 1)
    np.testing.assert_allclose(got, -mean, rtol=1e-6)
