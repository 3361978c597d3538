"""The ready train step: the hand-written loop, on one device and on eight."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_accum import (
    AccumulateState,
    DynamicLossScale,
    accumulate,
    chain,
    has_updated,
    make_train_step,
    reshard_window,
)
from optax_accum.testing import collectives

N = 8
MESH = jax.make_mesh((N,), ("data",), (AxisType.Auto,))
X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 16, 2)), jnp.float32)


def params_of():
    """Fresh ones each time, since a step donates them."""
    return {"w": jnp.arange(6.0).reshape(2, 3) / 7, "b": jnp.ones(3)}


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def on_mesh(k, *inner, axis_name="data", mesh=MESH, loss_fn=loss_fn, **options):
    tx = chain(accumulate(k, axis_name=axis_name), *inner)
    return make_train_step(loss_fn, tx, mesh=mesh, **options)


def without_emitted(state):
    def is_ours(x):
        return isinstance(x, AccumulateState)

    def drop(x):
        return x._replace(emitted=None) if is_ours(x) else x

    return jax.tree.map(drop, state, is_leaf=is_ours)


def train(step, batches, **keywords):
    params = params_of()
    opt_state = step.init(params)
    rows = []
    for batch in batches:
        params, opt_state, metrics = step(params, opt_state, batch, **keywords)
        rows.append(jax.device_get(metrics))
    return params, opt_state, rows


def big_batches(inner, batches, loss_fn=loss_fn):
    """Parameters, losses and gradient norms of one update for each big batch."""
    params = params_of()
    inner = optax.with_extra_args_support(inner)
    state, rows = inner.init(params), []
    for batch in batches:
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = inner.update(gradients, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        rows.append((loss, optax.tree.norm(gradients)))
    return params, rows


INNERS = {
    "sgd": optax.sgd(0.5),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clip and adamw": optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2)),
    "schedule": optax.adam(optax.linear_schedule(1e-1, 1e-3, 4)),
    "plateau": optax.chain(
        optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=1.0)
    ),
}


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("place", ["one device", "eight devices"])
def test_it_is_the_big_batch_and_its_metrics_are_those_of_the_window(inner, place):
    k, inner = 3, INNERS[inner]
    one = make_train_step(loss_fn, chain(accumulate(k), inner))
    step = one if place == "one device" else on_mesh(k, inner)
    params, opt_state, rows = train(step, X)
    want, want_rows = big_batches(inner, X.reshape(-1, k * 16, 2))
    chex.assert_trees_all_close(params, want, rtol=2e-5, atol=1e-6)
    for i, row in enumerate(rows):
        assert row["micro_step"] == (i + 1) % k
        assert row["gradient_step"] == (i + 1) // k
        assert row["emitted"] == ((i + 1) % k == 0)
        if row["emitted"]:
            np.testing.assert_allclose(
                (row["loss"], row["grad_norm"]), want_rows[i // k], rtol=1e-5
            )
        else:
            before = rows[i - 1] if i else {"loss": 0, "grad_norm": 0}
            assert row["loss"] == before["loss"]
            assert row["grad_norm"] == before["grad_norm"]
    assert has_updated(opt_state)


@settings(max_examples=6)  # each compiles twice
@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, 3),
    normalize=st.sampled_from(["mean", "ratio", "sum"]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    inner=st.sampled_from([optax.sgd(0.5), optax.adam(1e-2), optax.lion(1e-2)]),
)
def test_it_is_the_hand_written_loop(seed, k, normalize, dtype, inner):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.integers(-4, 5, shape), dtype)

    params = {"w": draw(3), "nested": [draw(2, 2), draw()]}
    weights = list(rng.choice([0.0, 1.0, 2.0, 4.0, np.nan], 2 * k))
    gradients = [jax.tree.map(lambda p: draw(1, *p.shape), params) for _ in weights]

    # A linear loss, whose gradient is the batch itself.
    def loss(params, batch):
        return sum(
            jnp.sum(p.astype(jnp.float32) * g[0].astype(jnp.float32))
            for p, g in zip(*map(jax.tree.leaves, (params, batch["gradient"])), strict=True)
        )

    tx = accumulate(k, inner, normalize=normalize)
    step = make_train_step(loss, tx, weight_fn=lambda batch: batch["weight"][0])

    @jax.jit
    def by_hand(params, state, batch):
        gradients = jax.grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params, weight=batch["weight"][0])
        return optax.apply_updates(params, updates), state

    want, want_state = params, tx.init(params)
    params = jax.tree.map(jnp.copy, params)
    state = step.init(params)
    for gradient, weight in zip(gradients, weights, strict=True):
        batch = {"gradient": gradient, "weight": jnp.asarray([weight], jnp.float32)}
        params, state, metrics = step(params, state, batch)
        want, want_state = by_hand(want, want_state, batch)
        assert metrics["emitted"] == want_state.emitted
        tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
        chex.assert_trees_all_close(params, want, rtol=tolerance, atol=tolerance)
        chex.assert_trees_all_equal(state.window_sum, want_state.window_sum)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, want)
    assert state.num_skipped == want_state.num_skipped


@pytest.mark.parametrize("place", ["one device", "eight devices"])
def test_a_micro_step_leaves_each_bit_of_the_parameters(place):
    inner = optax.adamw(1e-1)
    step = make_train_step(loss_fn, accumulate(3, inner))
    step = step if place == "one device" else on_mesh(3, inner)
    params = {"w": -jnp.zeros((2, 3)), "b": jnp.full(3, jnp.nan)}
    before = jax.tree.map(np.asarray, params)
    state = step.init(params)
    for x in X[:2]:
        params, state, _ = step(params, state, x)
    for name in params:
        assert np.asarray(params[name]).tobytes() == before[name].tobytes()


@pytest.mark.parametrize("place", ["one device", "eight devices"])
def test_tokens_weigh_and_a_device_without_any_waits_for_nobody(place):
    """Rows of uneven length, some without a token; the loss is a mean over tokens."""

    def token_loss(params, batch):
        losses = (jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2).mean(-1)
        return jnp.sum(losses * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1)

    masks = np.random.default_rng(1).random((4, 16)) < np.linspace(0, 1, 16)
    masks[:, :2] = False  # the first device never has a token
    batches = [{"x": x, "mask": mask} for x, mask in zip(X, masks, strict=False)]
    options = {"weight_fn": lambda batch: batch["mask"].sum(), "loss_fn": token_loss}
    if place == "one device":
        options.pop("loss_fn")
        step = make_train_step(token_loss, accumulate(4, optax.sgd(0.5)), **options)
    else:
        step = on_mesh(4, optax.sgd(0.5), **options)
    params, _, rows = train(step, batches)
    whole = {"x": X[:4].reshape(64, 2), "mask": masks.reshape(64)}
    want, ((loss, norm),) = big_batches(optax.sgd(0.5), [whole], token_loss)
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    np.testing.assert_allclose(rows[-1]["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(rows[-1]["grad_norm"], norm, rtol=1e-5)


def test_under_ratio_the_loss_is_per_token_too():
    def summed(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    tx = accumulate(2, optax.sgd(0.1), normalize="ratio")
    step = make_train_step(summed, tx, weight_fn=lambda x: 3 * len(x))
    params, _, rows = train(step, X[:2])
    want, ((loss, norm),) = big_batches(optax.sgd(0.1), [X[:2].reshape(-1, 2)])
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    np.testing.assert_allclose((rows[-1]["loss"], rows[-1]["grad_norm"]), (loss, norm), rtol=1e-5)


def test_every_k_1_is_the_inner_transformation_to_the_bit():
    inner = optax.adam(1e-2)
    params, _, rows = train(make_train_step(loss_fn, accumulate(1, inner)), X)

    @jax.jit
    def plain(params, state, x):
        updates, state = inner.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    want = params_of()
    state = inner.init(want)
    for x in X:
        want, state = plain(want, state, x)
    chex.assert_trees_all_equal(params, want)
    assert all(row["emitted"] and row["micro_step"] == 0 for row in rows)


@pytest.mark.parametrize("place", ["one device", "eight devices"])
def test_flush_closes_a_short_window_and_an_empty_one_changes_nothing(place):
    inner = optax.sgd(0.5)
    step = make_train_step(loss_fn, accumulate(5, inner))
    step = step if place == "one device" else on_mesh(5, inner)
    params, state, _ = train(step, X[:2])
    params, state, metrics = step.flush(params, state)
    want, ((loss, norm),) = big_batches(inner, [X[:2].reshape(-1, 2)])
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    np.testing.assert_allclose((metrics["loss"], metrics["grad_norm"]), (loss, norm), rtol=1e-5)
    assert metrics["emitted"]
    before = jax.device_get((params, state))
    params, state, metrics = step.flush(params, state)
    chex.assert_trees_all_equal((params, without_emitted(state)), without_emitted(before))
    assert not metrics["emitted"]
    assert metrics["gradient_step"] == 1


@pytest.mark.parametrize("normalize", ["mean", "ratio", "sum"])
@pytest.mark.parametrize("k", [1, 2])
def test_one_device_and_eight_weigh_alike_at_every_k(normalize, k):
    ends = []
    for axis_name, mesh in ((None, None), ("data", MESH)):
        tx = accumulate(k, optax.sgd(1e-3), normalize=normalize, axis_name=axis_name)
        params, _, rows = train(make_train_step(loss_fn, tx, mesh=mesh), X[:k])
        # Eight devices bring eight losses of two examples each for one of sixteen.
        factor = 8 if normalize == "ratio" and mesh else 1
        ends.append((params, factor, rows[-1]["loss"]))
    start = params_of()
    (one, _, loss), (eight, factor, eight_loss) = ends

    def change(params):
        return jax.tree.map(lambda p, s: np.asarray(p) - s, params, start)

    want = jax.tree.map(lambda c: c * factor, change(one))
    chex.assert_trees_all_close(change(eight), want, rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(eight_loss, loss * factor, rtol=1e-5)


@pytest.mark.parametrize("place", ["one device", "eight devices"])
def test_with_every_k_1_there_is_nothing_to_flush(place):
    inner = INNERS["plateau"]
    step = make_train_step(loss_fn, accumulate(1, inner))
    step = step if place == "one device" else on_mesh(1, inner)
    params, state, rows = train(step, X[:2])
    assert all(row["emitted"] for row in rows)
    before = jax.device_get(params)
    params, state, metrics = step.flush(params, state)
    chex.assert_trees_all_equal(params, before)
    assert not metrics["emitted"]


def test_what_stands_before_the_accumulator_sees_micro_gradients():
    scale = optax.scale(2.0)
    tx = chain(scale, accumulate(6, optax.sgd(0.25)))
    params, _, rows = train(make_train_step(loss_fn, tx), X[:6])
    want, ((loss, _),) = big_batches(optax.sgd(0.5), [X[:6].reshape(-1, 2)])
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    np.testing.assert_allclose(rows[-1]["loss"], loss, rtol=1e-6)

    tx = chain(scale, accumulate(6, optax.sgd(0.25), axis_name="data"))
    params, _, rows = train(make_train_step(loss_fn, tx, mesh=MESH), X[:6])
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    np.testing.assert_allclose(rows[-1]["loss"], loss, rtol=1e-6)


@pytest.mark.parametrize("place", ["one device", "eight devices"])
def test_each_micro_batch_and_device_has_a_key_of_its_own(place):
    def noisy(params, x, key):
        return loss_fn(params, x) + 0 * jax.random.normal(key), jax.random.key_data(key)

    options = {"rng": True, "has_aux": True}
    tx = accumulate(2, optax.sgd(0.1), axis_name=None if place == "one device" else "data")
    # The second window closes without an update.
    options["weight_fn"] = lambda x: jnp.where(jnp.any(x == 7), 0, 1)
    step = make_train_step(noisy, tx, mesh=None if place == "one device" else MESH, **options)
    _, _, rows = train(step, [*X[:2], 7 + 0 * X[2], 7 + 0 * X[3], *X[4:6]], rng=jax.random.key(0))
    assert [bool(row["emitted"]) for row in rows] == [False, True, False, False, False, True]
    keys = np.concatenate([row["aux"].reshape(-1, 2) for row in rows])
    assert len(keys) == 6 * (1 if place == "one device" else N)
    assert len(np.unique(keys, axis=0)) == len(keys)


def test_aux_comes_from_each_device():
    def with_aux(p, x):
        return (loss_fn(p, x), {"x": x, "number": 3})

    step = on_mesh(2, optax.sgd(0.1), loss_fn=with_aux, has_aux=True)
    params, state, rows = train(step, X[:2])
    np.testing.assert_array_equal(rows[1]["aux"]["x"], X[1].reshape(N, 2, 2))
    np.testing.assert_array_equal(rows[1]["aux"]["number"], [3] * N)
    assert "aux" not in step.flush(params, state)[2]
    one = make_train_step(lambda p, x: (loss_fn(p, x), x), accumulate(2), has_aux=True)
    _, _, rows = train(one, X[:2])
    np.testing.assert_array_equal(rows[1]["aux"], X[1])


# Statistics that no gradient moves.


def with_statistics(params, state, x):
    mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
    return loss_fn(params, x), {"mean": mean, "count": state["count"] + 1}


def keyed(params, state, x, key):
    return with_statistics(params, state, x)


def statistics():
    return {"mean": jnp.zeros(2), "count": jnp.zeros([], jnp.int32)}


def test_aux_and_model_state_together():
    def both(params, state, x):
        loss, state = with_statistics(params, state, x)
        return loss, (state, x.sum())

    step = make_train_step(both, accumulate(2, optax.sgd(0.1)), has_aux=True, model_state=True)
    params, state = params_of(), statistics()
    _, _, metrics, state = step(params, step.init(params), X[0], model_state=state)
    np.testing.assert_allclose(metrics["aux"], X[0].sum(), rtol=1e-6)
    assert state["count"] == 1


def test_on_one_device_the_model_state_moves_with_each_micro_batch():
    step = make_train_step(with_statistics, accumulate(2, optax.sgd(0.1)), model_state=True)
    params, state, want = params_of(), statistics(), statistics()
    opt_state = step.init(params)
    for x in X[:4]:
        params, opt_state, _, state = step(params, opt_state, x, model_state=state)
        _, want = with_statistics(params, want, x)
        chex.assert_trees_all_close(state, want, rtol=1e-5)


@pytest.mark.parametrize("given_to_init", [True, False])
def test_on_a_mesh_the_model_state_is_local_and_meets_at_the_boundary(given_to_init):
    step = on_mesh(2, optax.sgd(0.1), loss_fn=with_statistics, model_state=True)
    params, state = params_of(), statistics()
    opt_state = step.init(params, state) if given_to_init else step.init(params)
    own = [statistics() for _ in range(N)]
    for i, x in enumerate(X[:6]):
        before = jax.device_get(state)
        params, opt_state, metrics, state = step(params, opt_state, x, model_state=state)
        for d, part in enumerate(x.reshape(N, 2, 2)):
            _, own[d] = with_statistics(params_of(), own[d], part)
        if i % 2 == 1:
            mean = jnp.mean(jnp.stack([s["mean"] for s in own]), 0)
            own = [{"mean": mean, "count": s["count"]} for s in own]
            chex.assert_trees_all_close(state, own[0], rtol=1e-5)
            assert metrics["emitted"]
        else:
            chex.assert_trees_all_equal(state, before)
    if given_to_init:
        chex.assert_trees_all_equal_shapes_and_dtypes(
            opt_state, step.init(params_of(), statistics())
        )
    params, opt_state, metrics, flushed = step.flush(params, opt_state, model_state=state)
    chex.assert_trees_all_equal(flushed, state)


@pytest.mark.parametrize("place", ["one device", "eight devices"])
def test_a_rejected_micro_batch_does_not_touch_the_model_state(place):
    skip = {"should_skip_update_fn": optax.skip_not_finite}
    if place == "one device":
        tx, mesh = accumulate(3, optax.sgd(0.1), **skip), None
    else:
        tx, mesh = accumulate(3, optax.sgd(0.1), axis_name="data", **skip), MESH
    step = make_train_step(with_statistics, tx, model_state=True, mesh=mesh)
    params, state = params_of(), statistics()
    opt_state = step.init(params)
    for x in (X[0], X[1].at[0].set(jnp.nan), X[2].at[-1].set(jnp.inf)):
        params, opt_state, metrics, state = step(params, opt_state, x, model_state=state)
    assert metrics["emitted"]
    assert np.isfinite(metrics["loss"])
    for leaf in jax.tree.leaves((params, state)):
        assert np.all(np.isfinite(leaf))
    # Of three micro-batches one device saw one, or two of the eight saw two.
    assert state["count"] == (1 if place == "one device" else 3)


# Flax.


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(4)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(2, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.5), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, key):
        x = nnx.relu(self.norm(self.dense(x)))
        return self.out(self.dropout(x, rngs=nnx.Rngs(dropout=key)))


def linen():
    model = Linen()
    variables = model.init(jax.random.key(0), X[0], train=False)

    def loss_fn(params, batch_stats, x, key):
        out, new = model.apply(
            {"params": params, "batch_stats": batch_stats},
            x,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return jnp.mean((out - 1) ** 2), new["batch_stats"]

    return loss_fn, variables["params"], variables["batch_stats"]


def nnx_model():
    graphdef, params, rest = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, rest, x, key):
        model = nnx.merge(graphdef, params, rest)
        loss = jnp.mean((model(x, key) - 1) ** 2)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    return loss_fn, params, rest


@pytest.mark.parametrize("model", [linen, nnx_model])
@pytest.mark.parametrize("mesh", [None, MESH], ids=["one device", "eight devices"])
def test_flax_models_train_with_batchnorm_and_dropout(model, mesh):
    loss_fn, params, model_state = model()
    tx = chain(accumulate(3, axis_name=mesh and "data"), optax.adam(3e-2))
    step = make_train_step(loss_fn, tx, rng=True, model_state=True, mesh=mesh)
    start = jax.device_get((params, model_state))
    opt_state, key, losses = step.init(params, model_state), jax.random.key(1), []
    for i in range(60):
        params, opt_state, metrics, model_state = step(
            params, opt_state, X[i % 12], rng=key, model_state=model_state
        )
        losses += [float(metrics["loss"])] if metrics["emitted"] else []
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 3
    chex.assert_trees_all_equal_shapes_and_dtypes((params, model_state), start)
    for new, old in zip(*map(jax.tree.leaves, (model_state, start[1])), strict=True):
        assert np.any(new != old)


# Meshes.


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("count", [1, 8])
def test_a_state_that_lies_elsewhere_is_brought_to_its_devices(axis_type, count):
    mesh = jax.make_mesh((count,), ("data",), (axis_type,), devices=jax.devices()[:count])
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = [
        jax.device_get,
        lambda tree: jax.device_put(jax.device_get(tree), NamedSharding(mesh, P())),
        lambda tree: jax.device_put(jax.device_get(tree), one),
    ]
    step = on_mesh(2, optax.adam(0.1), loss_fn=keyed, mesh=mesh, model_state=True, rng=True)
    ends = []
    for place in (lambda tree: tree, *places):
        params, state = params_of(), statistics()
        opt_state = step.init(params, state)
        for x in X[:2]:
            params, opt_state, state = place((params, opt_state, state))
            key = jax.device_put(jax.random.key(0), one)
            params, opt_state, _, state = step(params, opt_state, x, model_state=state, rng=key)
        ends.append(jax.device_get((params, opt_state, state)))
    for end in ends[1:]:
        chex.assert_trees_all_equal(end, ends[0])


def test_a_step_is_lowered_from_shapes_alone():
    step = on_mesh(2, optax.adam(0.1), loss_fn=with_statistics, model_state=True)

    def shapes(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    state = shapes(step.init(params_of()))
    step.lower(shapes(params_of()), state, shapes(X[0]), model_state=shapes(statistics())).compile()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis_name", ["data", ("data", "more")])
def test_automatic_and_explicit_meshes_of_one_axis_or_two(axis_type, axis_name):
    mesh = jax.make_mesh((4, 2), ("data", "more"), (axis_type,) * 2)
    step = on_mesh(3, optax.sgd(0.5), axis_name=axis_name, mesh=mesh)

    def put(*spec):
        return lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec)))

    # From the host, on the devices already but not split, and split.
    places = [np.asarray, put(), put(axis_name)] * 4
    params, _, _ = train(step, [place(x) for x, place in zip(X, places, strict=True)])
    want, _ = big_batches(optax.sgd(0.5), X.reshape(-1, 48, 2))
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    for leaf in jax.tree.leaves(params):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == N
        assert all(np.array_equal(shard, shards[0]) for shard in shards)


def test_parameters_that_another_axis_shards_stay_so():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "model"))
    step = on_mesh(3, optax.adam(1e-2), mesh=mesh)

    def wide():
        return {"w": jnp.pad(params_of()["w"], ((0, 0), (0, 1))), "b": jnp.ones(4)}

    params = wide()
    params["w"] = jax.device_put(params["w"], sharding)
    state = step.init(params)
    own = NamedSharding(mesh, P("data", None, "model"))
    for x in X[:4]:
        params, state, _ = step(params, state, x)
        assert params["w"].sharding.is_equivalent_to(sharding, 2)
        assert state[-1].window_sum["w"].sharding.is_equivalent_to(own, 3)
    params, state, _ = step.flush(params, state)
    assert state[-1].window_sum["w"].sharding.is_equivalent_to(own, 3)

    single = make_train_step(loss_fn, accumulate(3, optax.adam(1e-2)))
    want = wide()
    state = single.init(want)
    for x in X[:4]:
        want, state, _ = single(want, state, x)
    want, _, _ = single.flush(want, state)
    chex.assert_trees_all_close(params, want, rtol=1e-5)


def test_a_batch_that_lies_on_its_devices_is_not_moved():
    step = on_mesh(2, optax.sgd(0.1))
    params = params_of()
    batch = jax.device_put(X[0], NamedSharding(MESH, P("data")))
    compiled = step.lower(params, step.init(params), batch).compile()
    assert collectives(compiled).outside.count == 0
    (sharding,) = jax.tree.leaves(compiled.input_shardings[0][2])
    assert sharding.is_equivalent_to(batch.sharding, 2)


# What is compiled.

SUM_BYTES, SCALAR = 4 * (6 + 3), 4


def test_one_reduction_at_the_boundary_and_none_in_a_micro_step():
    step = on_mesh(4, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    params = params_of()
    found = collectives(step.lower(params, step.init(params), X[0]).compile())
    assert found.outside.count == found.in_loops.count == 0
    assert found.in_conditionals.kinds == {"all-reduce": 1}
    assert (
        found.in_conditionals.bytes == SUM_BYTES + 3 * SCALAR
    )  # and the weight, and two of the loss


def test_the_model_state_crosses_devices_at_the_boundary_alone():
    step = on_mesh(4, optax.sgd(1e-2), loss_fn=with_statistics, model_state=True)
    params = params_of()
    lowered = step.lower(params, step.init(params), X[0], model_state=statistics())
    found = collectives(lowered.compile())
    assert found.outside.count == found.in_loops.count == 0
    assert found.in_conditionals.bytes == SUM_BYTES + 3 * SCALAR + 3 * SCALAR


@pytest.mark.parametrize("mesh", [None, MESH], ids=["one device", "eight devices"])
def test_one_trace_serves_all(mesh):
    traced = chex.assert_max_traces(loss_fn, n=1)
    tx = chain(accumulate(3, axis_name=mesh and "data"), optax.adam(1e-2))
    step = make_train_step(traced, tx, mesh=mesh)
    chex.clear_trace_counter()
    train(step, X)


def test_no_large_array_is_made_beside_params_and_state():
    """At the boundary one copy of the parameters (jax 0.10: two): the mean whose norm is taken."""
    params = {"w": jnp.ones((1000, 1000))}
    step = make_train_step(
        lambda p, x: jnp.tanh(jnp.vdot(p["w"], x[0])), accumulate(4, optax.adam(1e-3))
    )
    compiled = step.lower(params, step.init(params), params["w"][None]).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < (1.1 if jax.__version_info__ >= (0, 12) else 2.1) * 4e6
    assert memory.alias_size_in_bytes >= 4 * 4e6  # parameters, sum and both moments


def test_params_and_state_are_donated():
    step = make_train_step(loss_fn, accumulate(2, optax.adam(1e-2)))
    params = params_of()
    state = step.init(params)
    step(params, state, X[0])
    assert params["w"].is_deleted()
    assert state.window_sum["w"].is_deleted()


# Errors: the name, the rule and the value.


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: make_train_step(loss_fn, optax.adam(1.0)), TypeError, r"tx must come from"),
        (
            lambda: make_train_step(loss_fn, optax.masked(accumulate(2), {"w": True, "b": False})),
            TypeError,
            r"tx must come from .*write the step with tx.update",
        ),
        (lambda: make_train_step(None, accumulate(2)), ValueError, "loss_fn must be a function"),
        (
            lambda: make_train_step(loss_fn, accumulate(2), weight_fn=3),
            ValueError,
            "weight_fn must be a function or None, got 3",
        ),
        (
            lambda: make_train_step(loss_fn, accumulate(2, average_extra_args=("heat",))),
            ValueError,
            r"average_extra_args of tx may name 'value', .*has_aux=True.*\['heat'\]",
        ),
        (
            lambda: make_train_step(
                loss_fn, accumulate(2, average_extra_args=("loss",)), has_aux=True
            ),
            ValueError,
            r"average_extra_args of tx must not name what a train step shows.*\['loss'\]",
        ),
        (
            lambda: make_train_step(loss_fn, accumulate(2), mesh=MESH),
            ValueError,
            r"mesh goes with a tx that reduces .*axis_name=None",
        ),
        (
            lambda: make_train_step(loss_fn, accumulate(2, axis_name="data")),
            ValueError,
            r"mesh goes with .*mesh=None and axis_name='data'",
        ),
        (
            lambda: make_train_step(loss_fn, accumulate(2, axis_name="batch"), mesh=MESH),
            ValueError,
            r"mesh must have the axis .*axis_name='batch'.*\('data',\)",
        ),
        (
            lambda: make_train_step(loss_fn, accumulate(2, axis_name="data"), mesh=8),
            ValueError,
            "mesh must be a jax.sharding.Mesh or None, got 8",
        ),
    ],
)
def test_a_wrong_argument_of_the_factory_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def call(step, *, params=None, state=None, batch=None, **keywords):
    params = params_of() if params is None else params
    state = step.init(params) if state is None else state
    return step(params, state, X[0] if batch is None else batch, **keywords)


def call_with_statistics(model_state):
    step = on_mesh(2, loss_fn=with_statistics, model_state=True)
    return call(step, state=step.init(params_of(), statistics()), model_state=model_state)


PLAIN = functools.partial(make_train_step, loss_fn, accumulate(2, optax.sgd(0.1)))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: on_mesh(2).init(
                {"w": jax.device_put(jnp.ones((8, 3)), NamedSharding(MESH, P("data")))}
            ),
            r"params must be the same on all devices .*\['w'\] is sharded by .*without mesh=",
        ),
        (
            lambda: call(on_mesh(2), batch=X[0][:12]),
            r"batch must hold .* the 8 devices along axis_name='data' divide, got 12",
        ),
        (
            lambda: call(on_mesh(2, loss_fn=lambda p, x: jax.lax.pmean(loss_fn(p, x), "data"))),
            r"loss_fn must return the loss of its own device.*axis 'data'.*lax.pmean",
        ),
        (
            lambda: call(PLAIN(weight_fn=lambda x: None)),
            "weight_fn must return a real scalar, got None",
        ),
        (
            lambda: call(PLAIN(), state=on_mesh(2, optax.sgd(0.1)).init(params_of())),
            r"opt_state must be that of a step without a mesh; got one for the 8 devices",
        ),
        (
            lambda: make_train_step(
                loss_fn, chain(optax.zero_nans(), accumulate(2, axis_name="data")), mesh=MESH
            ).init(params_of()),
            r"tx must hold no state before its accumulator on a mesh",
        ),
        (
            lambda: call_with_statistics({"mean": jnp.zeros(3), "count": jnp.int32(0)}),
            r"model_state\['mean'\] goes from float32\[2\] to float32\[3\]",
        ),
        (lambda: call_with_statistics({"mean": jnp.zeros(2)}), "model_state must have the tree"),
        (lambda: call(PLAIN(), batch={}), "batch must hold at least one example .* no array in {}"),
        (lambda: call(PLAIN(), batch=X[0][:0]), r"batch must hold at least one example.*batch.*0"),
        (
            lambda: call(make_train_step(loss_fn, accumulate(1)), batch=X[0][:0]),
            r"batch must hold at least one example, got {'batch': 0}",
        ),
        (lambda: call(on_mesh(2), batch=X[0][:0]), "batch must hold at least one example"),
        (
            lambda: call(PLAIN(), batch={"x": X[0], "y": X[0][:3]}),
            r"one number of them in all its arrays.*16.*3.*make the step with weight_fn=",
        ),
        (
            lambda: call(on_mesh(2), batch={"x": X[0], "y": X[0][:3]}),
            r"one number of examples in all its arrays.*16.*3.*jnp.moveaxis\(x, axis, 0\)",
        ),
        (
            lambda: call(on_mesh(2), batch={"x": X[0], "t": 0.5}),
            r"along which it is split; batch\['t'\] is the scalar 0.5.* jnp.full\(num_examples",
        ),
        (lambda: call(PLAIN(), batch={"x": X[0], "id": "a"}), r"batch\['id'\] is 'a'"),
        (lambda: call(PLAIN(rng=True)), r"rng must be passed .*got none and rng=True"),
        (lambda: call(PLAIN(), rng=jax.random.key(0)), r"rng must be passed .*and rng=False"),
        (lambda: call(PLAIN(model_state=True)), r"model_state must be passed .*got none"),
        (
            lambda: call(PLAIN(), state=accumulate(2, optax.sgd(0.1)).init(params_of())),
            r"opt_state must come from step.init\(params\)",
        ),
        (lambda: call(PLAIN(), state=optax.adam(1.0).init({})), "opt_state must hold the Acc"),
        (lambda: call(PLAIN(has_aux=True)), r"loss_fn must be a pair, got float32\[\]"),
        (
            lambda: call(make_train_step(lambda p, x: (loss_fn(p, x), x), accumulate(2))),
            r"loss_fn's loss must be a real floating scalar, got \(float32\[\], float32\[16, 2\]\)",
        ),
        (
            lambda: call(make_train_step(lambda p, x: x @ p["w"], accumulate(2))),
            r"loss_fn's loss must be a real floating scalar, got float32\[16, 3\]",
        ),
        (
            lambda: call(
                make_train_step(
                    lambda p, s, x: (loss_fn(p, x), s["mean"]), accumulate(2), model_state=True
                ),
                model_state=statistics(),
            ),
            r"loss_fn must return the model_state with the tree",
        ),
        (
            lambda: call(
                make_train_step(
                    lambda p, s, x: (loss_fn(p, x), {**s, "mean": x}),
                    accumulate(2),
                    model_state=True,
                ),
                model_state=statistics(),
            ),
            r"model_state\['mean'\] goes from float32\[2\] to float32\[16, 2\]",
        ),
        (
            lambda: call(
                make_train_step(with_statistics, accumulate(2), model_state=True),
                model_state={"key": jax.random.key(0)},
            ),
            r"model_state must hold no random keys.*\['key'\]",
        ),
    ],
)
def test_a_wrong_argument_of_a_call_is_named(run, message):
    with pytest.raises(ValueError, match=message):
        run()


GRAPH = {"nodes": X[0], "senders": jnp.arange(5), "receivers": jnp.arange(5) + 1}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("loss_scale", [None, DynamicLossScale()])
def test_a_bfloat16_step_runs_where_dtypes_are_not_promoted(k, loss_scale):
    tx = accumulate(k, optax.sgd(0.5), loss_scale=loss_scale)
    ends = []
    for promotion in ("standard", "strict"):
        with jax.numpy_dtype_promotion(promotion):
            step = make_train_step(loss_fn, tx)
            params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params_of(), X[0]))
            opt_state = step.init(params)
            for part in (batch[:4], batch[4:]):
                params, opt_state, metrics = step(params, opt_state, part)
            ends.append((params, opt_state, metrics))
    chex.assert_trees_all_equal(*ends)


UNSPLIT_BATCHES = {
    "a graph": (GRAPH, lambda b: (b["nodes"][b["senders"]], b["nodes"][b["receivers"]])),
    "a scalar": ({"x": X[0], "noise": 0.5}, lambda b: (b["x"] * b["noise"], b["x"])),
    "the examples second": (jnp.stack([X[0][:, None], X[1][:, None], X[2][:, None]]), list),
}


@pytest.mark.parametrize("name", UNSPLIT_BATCHES)
@pytest.mark.parametrize("k", [1, 2])
def test_on_one_device_a_batch_has_any_form_where_its_size_is_not_the_weight(name, k):
    batch, parts = UNSPLIT_BATCHES[name]

    def loss(params, batch):
        return sum(loss_fn(params, part) for part in parts(batch))

    options = {} if k == 1 else {"weight_fn": lambda batch: 3}
    step = make_train_step(loss, accumulate(k, optax.sgd(0.5)), **options)
    params, _, rows = train(step, [batch] * k)
    want, want_rows = big_batches(optax.sgd(0.5), [batch], loss)
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    np.testing.assert_allclose(rows[-1]["loss"], want_rows[0][0], rtol=1e-5)


def test_a_scalar_in_the_batch_of_one_device_is_no_example():
    def loss(params, batch):
        return loss_fn(params, batch["x"] * batch["noise"])

    step = make_train_step(loss, accumulate(2, optax.sgd(0.5)))
    parts = [{"x": X[0][:4], "noise": 0.5}, {"x": X[0][4:], "noise": 0.5}]
    params, _, _ = train(step, parts)  # of 4 and 12 examples
    want, _ = big_batches(optax.sgd(0.5), [{"x": X[0], "noise": 0.5}], loss)
    chex.assert_trees_all_close(params, want, rtol=1e-5)


def test_an_open_window_with_a_model_state_goes_from_8_to_2_devices():
    two = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    options = {"loss_fn": with_statistics, "model_state": True}
    eight = on_mesh(3, optax.sgd(0.5), **options)
    small = on_mesh(3, optax.sgd(0.5), mesh=two, **options)
    ends = []
    for steps in ((eight, eight, eight), (eight, small, eight)):
        params, state = params_of(), statistics()
        opt_state = steps[0].init(params, state)
        for i, (step, x) in enumerate(zip(steps, X, strict=False)):
            if i and step is not steps[i - 1]:
                params, opt_state, state = jax.device_get((params, opt_state, state))
                opt_state = reshard_window(opt_state, 2 if step is small else N)
            params, opt_state, _, state = step(params, opt_state, x, model_state=state)
        ends.append((params, state))
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_state_of_another_number_of_devices_names_the_remedy():
    half = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    small, large = on_mesh(4, optax.adam(1e-2), mesh=half), on_mesh(4, optax.adam(1e-2))
    params, state, _ = train(small, X[:2])
    params, state = jax.device_get((params, state))
    with pytest.raises(ValueError, match=r"of the 8 devices .* got one for 4\. .*reshard_window"):
        large(params, state, X[2])
    state = reshard_window(state, N)
    for x in X[2:4]:
        params, state, _ = large(params, state, x)
    want, _ = big_batches(optax.adam(1e-2), [X[:4].reshape(-1, 2)])
    chex.assert_trees_all_close(params, want, rtol=1e-5)


def with_accuracy(params, x):
    return loss_fn(params, x), {"accuracy": jnp.mean(x > 0), "unused": x}


@pytest.mark.parametrize("mesh", [None, MESH], ids=["one device", "eight devices"])
@pytest.mark.parametrize("k", [1, 2])
def test_scalars_of_aux_are_averaged_over_the_window_where_tx_names_them(k, mesh):
    seen = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros([]), lambda u, s, p=None, *, accuracy, **_: (u, accuracy)
    )
    axis_name = None if mesh is None else "data"
    tx = accumulate(k, seen, average_extra_args=("accuracy",), axis_name=axis_name)
    step = make_train_step(with_accuracy, tx, has_aux=True, mesh=mesh)
    params, opt_state = params_of(), None
    opt_state = step.init(params)
    for i, x in enumerate(X[:4]):
        params, opt_state, metrics = step(params, opt_state, x)
        closed = (i + 1) // k * k  # micro-batches in closed windows
        want = np.mean(np.asarray(X[closed - k : closed]) > 0) if closed else 0.0
        np.testing.assert_allclose(metrics["accuracy"], want, rtol=1e-6)
        np.testing.assert_allclose(opt_state.inner_state, want, rtol=1e-6)
        assert metrics["aux"].keys() == {"accuracy", "unused"}


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda x: jnp.mean(x), r"aux must be a dict with the scalars \['accuracy'\].*got a"),
        (lambda x: {"other": x}, r"it lacks \['accuracy'\], and has \['other'\]"),
        (lambda x: {"accuracy": x}, "accuracy must be a real scalar, got dtype float32 and shape"),
    ],
)
def test_an_aux_without_the_scalars_that_tx_names_is_refused(aux, message):
    tx = accumulate(2, average_extra_args=("accuracy",))
    step = make_train_step(lambda params, x: (loss_fn(params, x), aux(x)), tx, has_aux=True)
    with pytest.raises(ValueError, match=message):
        step(params_of(), step.init(params_of()), X[0])
