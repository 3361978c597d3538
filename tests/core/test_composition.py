"""An accumulator inside, around and beside other things of optax, jax and flax."""

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import laws
from optax_accum import AccumulateState, accumulate, chain, flush, has_updated

PARAMS = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((2, 3))}}
LABELS = {"a": "fast", "b": {"c": "slow"}}


def gradients(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda p: jnp.asarray(rng.integers(-8, 8, p.shape), p.dtype), PARAMS)
        for _ in range(count)
    ]


def mean(grads):
    return laws.mean(grads, [1.0] * len(grads))


def sums(state):
    """All window sums in a state."""

    def is_state(node):
        return isinstance(node, AccumulateState)

    states = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    return [jax.tree.leaves(x.window_sum) for x in states]


def test_partition_gives_each_group_its_own_k_and_no_memory_for_the_others():
    tx = optax.partition(
        {"fast": accumulate(2, optax.sgd(1.0)), "slow": accumulate(4, optax.adam(0.5))}, LABELS
    )
    grads = gradients(4)
    params, state = laws.run(tx, PARAMS, grads)
    fast, _ = laws.run(optax.sgd(1.0), PARAMS["a"], [mean(grads[:2])["a"], mean(grads[2:])["a"]])
    slow, _ = laws.run(optax.adam(0.5), PARAMS["b"], [mean(grads)["b"]])
    laws.assert_bitwise(params, {"a": fast, "b": slow})
    shapes = [[leaf.shape for leaf in leaves] for leaves in sums(state)]
    assert shapes == [[(4,)], [(2, 3)]]


def test_has_updated_is_true_when_any_group_of_a_partition_has():
    tx = optax.partition(
        {"fast": accumulate(2, optax.sgd(1.0)), "slow": accumulate(3, optax.sgd(1.0))}, LABELS
    )
    state = tx.init(PARAMS)
    seen = []
    for grad in gradients(6):
        _, state = tx.update(grad, state, PARAMS)
        seen.append(bool(jax.jit(has_updated)(state)))
    assert seen == [False, True, True, True, False, True]


def test_weight_and_flush_reach_the_groups_of_a_partition():
    tx = optax.partition(
        {"fast": accumulate(8, optax.sgd(1.0)), "slow": accumulate(8, optax.sgd(1.0))}, LABELS
    )
    grads = gradients(2)
    per_step = [{"weight": 3.0}, {"weight": 1.0, "flush": True}]
    params, _ = laws.run(tx, PARAMS, grads, per_step=per_step)
    want, _ = laws.run(optax.sgd(1.0), PARAMS, [laws.mean(grads, [3.0, 1.0])])
    laws.assert_bitwise(params, want)


def test_masked_and_frozen_leaves_cost_no_buffer():
    mask = {"a": True, "b": {"c": False}}
    tx = optax.chain(
        optax.masked(accumulate(2, optax.sgd(1.0)), mask),
        optax.masked(optax.set_to_zero(), {"a": False, "b": {"c": True}}),
    )
    grads = gradients(2)
    params, state = laws.run(tx, PARAMS, grads)
    assert [[leaf.shape for leaf in leaves] for leaves in sums(state)] == [[(4,)]]
    laws.assert_bitwise(params["b"], PARAMS["b"])
    laws.assert_bitwise(params["a"], PARAMS["a"] - mean(grads)["a"])


def test_none_and_masked_node_leaves_cost_no_buffer():
    params = {"a": jnp.ones(2), "none": None, "masked": optax.MaskedNode()}
    tx = accumulate(2, optax.adam(0.5))
    state = tx.init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state.window_sum)] == [(2,)]
    updates, state = jax.jit(tx.update)(params, state, params)
    assert updates["none"] is None
    assert updates["masked"] == optax.MaskedNode()


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 4)),
        lambda: optax.apply_if_finite(optax.adam(0.5), 3),
        lambda: optax.chain(optax.zero_nans(), optax.adam(0.5)),
        lambda: optax.contrib.schedule_free(optax.sgd(0.5), 0.5, b1=0.9),
        lambda: optax.contrib.schedule_free_adamw(0.5),
        lambda: optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 8)),
        lambda: optax.contrib.muon(0.5),
    ],
    ids=lambda make: make.__code__.co_names[-1],
)
@pytest.mark.parametrize("jit", [False, True])
def test_wrappers_inside_see_windows_only(make, jit):
    grads = gradients(8)
    inner = make()
    windows = [mean(grads[i : i + 2]) for i in range(0, 8, 2)]
    tx = accumulate(2, inner)
    if jit:
        tx = optax.GradientTransformation(tx.init, jax.jit(tx.update))
    params, state = laws.run(tx, PARAMS, grads)
    want, inner_state = laws.run(inner, PARAMS, windows)
    chex.assert_trees_all_close(
        (params, state.inner_state), (want, inner_state), rtol=1e-4, atol=1e-5
    )


def test_zero_nans_before_the_accumulator_saves_the_window():
    tx = chain(optax.zero_nans(), accumulate(2), optax.sgd(1.0))
    bad = jnp.array([jnp.nan, 2.0])
    params, _ = laws.run(tx, jnp.zeros(2), [bad, jnp.ones(2)])
    np.testing.assert_array_equal(params, [-0.5, -1.5])


def test_reduce_on_plateau_sees_the_mean_loss_of_the_window():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    tx = accumulate(2, inner)
    losses = [2.0, 4.0, 6.0, 2.0, 9.0, 1.0]  # the means are 3, 4, 5: they rise, the last ones fall
    params = jnp.zeros([])
    ones = [jnp.ones([])] * 6
    got, state = laws.run(tx, params, ones, per_step=[{"value": v} for v in losses])
    want, _ = laws.run(inner, params, ones[:3], per_step=[{"value": v} for v in (3.0, 4.0, 5.0)])
    assert got == want
    last_only, _ = laws.run(
        accumulate(2, inner, average_extra_args=()),
        params,
        ones,
        per_step=[{"value": v} for v in losses],
    )
    assert last_only != want
    assert state.extras["average_extra_args"].sums["value"] == {"sum": 0, "weight": 0}


def test_scan_over_micro_steps_is_the_loop():
    tx = chain(accumulate(3), optax.adam(0.5))
    grads = gradients(7)

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), has_updated(state)

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    (params, state), updated = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), stacked)
    want, want_state = laws.run(tx, PARAMS, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, want)
    assert state[-1].micro_step == want_state[-1].micro_step == 1
    assert updated.tolist() == [False, False, True, False, False, True, False]


def test_vmap_over_models_is_each_on_its_own():
    tx = accumulate(2, optax.adam(0.5))
    rng = np.random.default_rng(0)
    grads = jnp.asarray(rng.integers(-8, 8, (4, 3, 5)), jnp.float32)  # steps, models, params
    weights = jnp.asarray([[1.0, 0.0, 1.0]] * 4)  # the second model never has a window
    params = jnp.zeros((3, 5))
    state = jax.vmap(tx.init)(params)
    update = jax.jit(jax.vmap(lambda g, s, p, w: tx.update(g, s, p, weight=w)))
    for grad, weight in zip(grads, weights, strict=True):
        updates, state = update(grad, state, params, weight)
        params = optax.apply_updates(params, updates)
    assert state.gradient_step.tolist() == [2, 0, 2]
    assert state.num_skipped.tolist() == [0, 4, 0]
    np.testing.assert_array_equal(params[1], 0)
    for model in (0, 2):
        want, _ = laws.run(tx, jnp.zeros(5), list(grads[:, model]))
        np.testing.assert_allclose(params[model], want, rtol=1e-6)


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_meta_gradients_pass_through_windows(loop, transform):
    data = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)

    def trained(learning_rate, big):
        inner = optax.chain(optax.scale_by_adam(eps_root=1e-8), optax.scale(-learning_rate))
        batches = data.reshape(3, 2, 3) if big else data.reshape(6, 1, 3)
        tx = accumulate(1 if big else 2, inner)
        params = jnp.ones(3)

        def step(carry, batch):
            params, state = carry
            grad = jax.grad(lambda p: jnp.mean(jnp.tanh(batch @ p) ** 2))(params)
            updates, state = tx.update(grad, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = (params, tx.init(params))
        if loop == "scan":
            carry, _ = jax.lax.scan(step, carry, batches)
        else:
            for batch in batches:
                carry, _ = step(carry, batch)
        return jnp.sum(jnp.tanh(data @ carry[0]) ** 2)

    got = transform(lambda rate: trained(rate, big=False))(0.1)
    want = jax.grad(lambda rate: trained(rate, big=True))(0.1)
    assert want != 0
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_vmapped_meta_gradients_are_finite_where_a_window_is_empty():
    tx = accumulate(1, optax.sgd(1.0))

    def loss(gradient, weight):
        updates, _ = tx.update(gradient, tx.init(gradient), weight=weight)
        return jnp.sum(updates**2)

    slopes = jax.vmap(jax.grad(loss))(jnp.ones((2, 3)), jnp.array([0.0, 2.0]))
    np.testing.assert_array_equal(slopes, [[0, 0, 0], [2, 2, 2]])


def test_eval_shape_tells_the_state_and_the_updates():
    tx = chain(accumulate(2), optax.adam(0.5))
    state = jax.eval_shape(tx.init, PARAMS)
    updates, after = jax.eval_shape(tx.update, PARAMS, state, PARAMS)
    assert after == state
    assert updates == jax.eval_shape(lambda p: p, PARAMS)


def test_optax_tree_functions_find_the_fields():
    tx = chain(accumulate(2), optax.adam(0.5))
    state = tx.init(PARAMS)
    assert optax.tree.get(state, "micro_step") == 0
    assert optax.tree.get(state, "window_weight") == 0
    doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
    np.testing.assert_array_equal(doubled[-1].window_sum["a"], 1)
    assert doubled[-1].micro_step == 0


def test_bytes_of_live_arrays_do_not_grow():
    for donate in ((), (0, 1)):
        tx = accumulate(4, optax.adam(0.5))

        def step(params, state, tx=tx):
            updates, state = tx.update(params, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.jit(step, donate_argnums=donate)
        params = jax.tree.map(jnp.copy, PARAMS)
        state = tx.init(params)
        live = {}
        for i in range(1, 201):
            params, state = step(params, state)
            if i in (8, 200):
                live[i] = sum(x.nbytes for x in jax.live_arrays())
        assert live[8] == live[200]


def test_all_of_a_fresh_state_can_be_donated():
    params = {"w": jnp.zeros(2), "v": jnp.zeros(2)}
    tx = accumulate(2, optax.adam(0.5), average_extra_args=("value", "other"))
    update = jax.jit(tx.update, donate_argnums=(1,))
    _, state = update(params, tx.init(params), params, value=1.0, other=2.0)
    update(params, state, params, value=1.0, other=2.0)


@pytest.mark.parametrize("every_k", [1, 3])
def test_orbax_checkpoints_in_mid_window_restore_bit_for_bit(tmp_path, every_k):
    tx = chain(accumulate(every_k), optax.adam(0.5))
    grads = gradients(7)
    want = laws.run(tx, PARAMS, grads)
    saved = laws.run(tx, PARAMS, grads[:4])
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "4", saved)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: (PARAMS, tx.init(PARAMS)))
        params, state = checkpointer.restore(tmp_path / "4", like)
    laws.assert_bitwise(laws.run(tx, params, grads[4:], state=state), want)


@pytest.mark.parametrize("written_out", [False, True])
def test_linen_train_state_trains_in_windows(written_out):
    model = linen.Dense(2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
    variables = model.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    state = TrainState.create(
        apply_fn=model.apply,
        params=variables,
        tx=chain(accumulate(8 if written_out else 3), optax.sgd(1.0)),
    )
    for i in range(0, 6, 2):
        grads = jax.grad(loss)(variables, x[i : i + 2])
        if written_out:  # the README's lines for what apply_gradients has no arguments for
            updates, opt_state = state.tx.update(
                grads, state.opt_state, state.params, weight=2, flush=i == 4
            )
            state = state.replace(
                step=state.step + 1,
                params=optax.apply_updates(state.params, updates),
                opt_state=opt_state,
            )
        else:
            state = state.apply_gradients(grads=grads)
    assert state.step == 3
    big = jax.grad(loss)(variables, x)
    jax.tree.map(
        lambda p, v, g: np.testing.assert_allclose(p, v - g, rtol=1e-5, atol=1e-6),
        state.params,
        variables,
        big,
    )
    assert has_updated(state.opt_state)


@pytest.mark.parametrize("jit", [False, True])
def test_nnx_optimizer_trains_in_windows_and_takes_weight_and_flush(jit):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 3)), jnp.float32)

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    def step(model, optimizer, x, flush):
        optimizer.update(model, nnx.grad(loss)(model, x), weight=len(x), flush=flush)

    step = nnx.jit(step) if jit else step
    model, reference = (nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    optimizer = nnx.Optimizer(model, chain(accumulate(8), optax.sgd(1.0)), wrt=nnx.Param)
    for i, end in ((0, False), (3, False), (6, True)):
        step(model, optimizer, x[i : i + 3], jnp.asarray(end))
        assert has_updated(nnx.as_pure(optimizer.opt_state)) == end
    plain = nnx.Optimizer(reference, optax.sgd(1.0), wrt=nnx.Param)
    plain.update(reference, nnx.grad(loss)(reference, x))
    np.testing.assert_allclose(model.kernel[...], reference.kernel[...], rtol=1e-5, atol=1e-6)


def test_init_under_jit_keeps_the_sharding_of_the_params():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = jax.device_put(jnp.ones((16, 2)), sharding)
    tx = accumulate(2, optax.sgd(1.0))
    for init in (tx.init, jax.jit(tx.init)):
        state = init(params)
        assert state.window_sum.sharding.is_equivalent_to(sharding, 2)
        update = jax.jit(tx.update)
        for _ in range(2):
            _, state = update(params, state, params)
            assert state.window_sum.sharding.is_equivalent_to(sharding, 2)


def test_flush_in_a_training_loop_equals_the_short_last_batch():
    grads = gradients(5)
    tx = chain(accumulate(4), optax.adam(0.5))
    params, state = laws.run(tx, PARAMS, grads)
    updates, state = flush(tx, state, params)
    got = optax.apply_updates(params, updates)
    want, _ = laws.run(optax.adam(0.5), PARAMS, [mean(grads[:4]), grads[4]])
    laws.assert_bitwise(got, want)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("params", [{}, (), None, {"a": optax.MaskedNode()}, optax.MaskedNode()])
def test_a_tree_without_leaves_is_accumulated_too(k, params):
    tx = accumulate(k, optax.sgd(1.0))
    state = tx.init(params)
    for _ in range(k):
        updates, state = tx.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert state.gradient_step == 1


def test_chain_refuses_a_second_accumulator_at_once():
    with pytest.raises(ValueError, match="accumulators must not nest"):
        chain(accumulate(2), accumulate(3))
