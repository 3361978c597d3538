"""The laws of DESIGN as properties over random trees, dtypes, k, weights and optimizers."""

import itertools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import laws
from optax_accum import AccumulateState, accumulate, chain, flush, has_updated

ks = st.integers(1, 5)
normalizations = st.sampled_from(("mean", "sum", "ratio"))


@hypothesis.given(laws.seeds, laws.structures, laws.dtypes, ks, laws.inners)
def test_law_1_weighted_micro_batches_give_the_update_of_the_big_batch(
    seed, structure, dtypes, k, inner
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    windows = [[laws.small_integers(rng, structure, dtypes) for _ in range(k)] for _ in range(2)]
    weights = [laws.power_of_two_weights(rng, k) for _ in windows]
    micro = list(itertools.chain(*windows))
    per_step = [{"weight": w} for w in itertools.chain(*weights)]
    big = [laws.mean(g, w) for g, w in zip(windows, weights, strict=True)]

    got, state = laws.run(accumulate(k, inner), params, micro, per_step=per_step)
    want, want_state = laws.run(inner, params, big)
    laws.assert_bitwise(got, want)
    laws.assert_bitwise(state.inner_state, want_state)


@hypothesis.given(laws.seeds, st.integers(1, 6), normalizations)
def test_law_1_holds_for_real_weights_and_floats_to_rounding(seed, k, normalize):
    rng = np.random.default_rng(seed)
    gradients = [jnp.asarray(rng.normal(size=5), jnp.float32) for _ in range(k)]
    weights = rng.uniform(0.1, 10, k)
    stacked = np.stack(gradients).astype(np.float64)
    want = {
        "mean": (weights[:, None] * stacked).sum(0) / weights.sum(),
        "sum": (weights[:, None] * stacked).sum(0),
        "ratio": stacked.sum(0) / weights.sum(),
    }[normalize]
    tx = accumulate(k, normalize=normalize)
    state = tx.init(gradients[0])
    for gradient, weight in zip(gradients, weights, strict=True):
        updates, state = jax.jit(tx.update)(gradient, state, weight=weight)
    np.testing.assert_allclose(updates, want, rtol=2e-6, atol=1e-5)


@hypothesis.given(laws.seeds, laws.structures, laws.dtypes, st.integers(2, 5))
def test_law_2_off_the_boundary_nothing_moves_even_where_inner_would_give_nan(
    seed, structure, dtypes, k
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    params = jax.tree.map(lambda p: p * -0.0, params)  # +0.0 added to -0.0 would change its sign
    poison = optax.stateless(lambda updates, _: jax.tree.map(lambda u: u / 0, updates))
    tx = accumulate(k, optax.scale_by_adam(), poison)
    for update in (tx.update, jax.jit(tx.update)):
        state = tx.init(params)
        inner_state = state.inner_state
        for _ in range(k - 1):
            gradient = laws.small_integers(rng, structure, dtypes)
            updates, state = update(gradient, state, params)
            laws.assert_zeros(updates)
            moved = optax.apply_updates(params, updates)
            for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(params), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            chex.assert_trees_all_equal(state.inner_state, inner_state)
            assert not state.emitted
            assert not has_updated(state)


@hypothesis.given(
    laws.seeds,
    laws.structures,
    st.sampled_from(("mean", "ratio")),
    st.sampled_from((0.25, 2.0, 64.0)),
)
def test_law_3_scaling_all_weights_changes_nothing(seed, structure, normalize, scale):
    rng = np.random.default_rng(seed)
    dtypes = [jnp.float32]
    params = laws.small_integers(rng, structure, dtypes)
    gradients = [laws.small_integers(rng, structure, dtypes) for _ in range(6)]
    weights = rng.integers(1, 6, 6)
    tx = accumulate(3, optax.adam(0.5), normalize=normalize)
    scaled = gradients
    if normalize == "ratio":
        scaled = [jax.tree.map(lambda g: g * scale, gradient) for gradient in gradients]
    plain, _ = laws.run(tx, params, gradients, per_step=[{"weight": float(w)} for w in weights])
    other, _ = laws.run(
        tx, params, scaled, per_step=[{"weight": float(w) * scale} for w in weights]
    )
    laws.assert_bitwise(other, plain)  # the scales are powers of two


@hypothesis.given(
    laws.seeds,
    laws.structures,
    laws.dtypes,
    normalizations,
    st.sampled_from((0.0, -1.0, np.nan, np.inf, -np.inf)),
    st.booleans(),
)
def test_law_3_a_micro_step_without_weight_adds_nothing_even_with_a_nan_gradient(
    seed, structure, dtypes, normalize, no_weight, jit
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    gradient = laws.small_integers(rng, structure, dtypes)
    nan = jax.tree.map(lambda g: jnp.full_like(g, np.nan), gradient)
    tx = accumulate(2, optax.sgd(0.5, momentum=0.5), normalize=normalize)
    update = jax.jit(tx.update) if jit else tx.update
    _, state = update(nan, tx.init(params), params, weight=no_weight)
    updates, state = update(gradient, state, params, weight=2.0)
    factor = {"mean": 1.0, "sum": 2.0, "ratio": 0.5}[normalize]
    chex.assert_trees_all_close(
        updates, jax.tree.map(lambda g: (-0.5 * factor * g).astype(g.dtype), gradient)
    )
    assert state.num_skipped == 1
    assert state.gradient_step == 1


@hypothesis.given(laws.seeds, laws.structures, st.lists(st.booleans(), min_size=1, max_size=9))
def test_law_4_a_rejected_micro_step_is_one_of_weight_zero(seed, structure, rejected):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, [jnp.float32])
    gradients = [laws.small_integers(rng, structure, [jnp.float32]) for _ in rejected]
    poisoned = [
        jax.tree.map(lambda g: jnp.full_like(g, jnp.inf), g) if no else g
        for g, no in zip(gradients, rejected, strict=True)
    ]
    weights = [{"weight": 0.0 if no else 1.0} for no in rejected]
    inner = optax.sgd(0.5, momentum=0.5)
    skipping = accumulate(3, inner, should_skip_update_fn=optax.skip_not_finite)
    got = laws.run(skipping, params, poisoned)
    want = laws.run(accumulate(3, inner), params, gradients, per_step=weights)
    laws.assert_bitwise(got, want)


@hypothesis.given(laws.seeds, laws.structures, laws.dtypes, st.integers(1, 4), laws.inners)
def test_law_5_flushing_an_empty_window_only_clears_emitted(seed, structure, dtypes, k, inner):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    gradients = [laws.small_integers(rng, structure, dtypes) for _ in range(2 * k)]
    tx = accumulate(k, inner)
    for params_, state in ((params, tx.init(params)), laws.run(tx, params, gradients)):
        for update in (flush, jax.jit(flush, static_argnums=0)):
            updates, flushed = update(tx, state, params_)
            laws.assert_zeros(updates)
            chex.assert_trees_all_equal_shapes_and_dtypes(updates, params_)
            laws.assert_bitwise(flushed, state._replace(emitted=jnp.asarray(False)))


@hypothesis.given(laws.seeds, laws.structures, laws.dtypes, st.integers(1, 7), laws.inners)
def test_law_5_a_partial_window_is_the_mean_over_what_it_holds(
    seed, structure, dtypes, held, inner
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    gradients = [laws.small_integers(rng, structure, dtypes) for _ in range(held)]
    weights = laws.power_of_two_weights(rng, held)
    per_step = [{"weight": w} for w in weights]
    tx = accumulate(8, inner)
    want, inner_state = laws.run(inner, params, [laws.mean(gradients, weights)])

    _, state = laws.run(tx, params, gradients, per_step=per_step)
    updates, state = flush(tx, state, params)
    laws.assert_bitwise(optax.apply_updates(params, updates), want)
    laws.assert_bitwise(state.inner_state, inner_state)
    assert state.micro_step == 0
    assert has_updated(state)

    per_step[-1] = per_step[-1] | {"flush": True}
    got, state = laws.run(tx, params, gradients, per_step=per_step)
    laws.assert_bitwise(got, want)
    assert state.micro_step == 0
    assert state.gradient_step == 1


@hypothesis.given(laws.seeds, laws.structures, laws.dtypes, st.integers(1, 3), laws.inners)
def test_law_6_the_state_keeps_its_structure_shapes_and_dtypes_in_one_trace(
    seed, structure, dtypes, k, inner
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    tx = accumulate(k, inner, average_extra_args=("value",))

    def avals(tree):
        return jax.tree.map(lambda x: (jax.typeof(x), x.weak_type), tree)

    chex.clear_trace_counter()  # it counts by name, over hypothesis's examples too

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(gradient, state, params, value):
        updates, state = tx.update(gradient, state, params, value=value)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    before = avals(state)
    assert jax.eval_shape(tx.init, params) == jax.eval_shape(lambda s: s, state)
    for i in range(2 * k + 1):
        gradient = laws.small_integers(rng, structure, dtypes)
        params, state = step(gradient, state, params, jnp.float32(i))
        assert avals(state) == before


@hypothesis.given(laws.seeds, laws.structures, laws.dtypes, laws.inners)
def test_law_7_every_k_of_one_is_the_inner_transformation(seed, structure, dtypes, inner):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    # A tree of any floats will do: nothing is summed.
    gradients = [
        jax.tree.map(lambda p: (p * rng.normal() + 0.1).astype(p.dtype), params) for _ in range(3)
    ]
    for wrap in (lambda f: f, jax.jit):
        tx, bare = accumulate(1, inner), optax.with_extra_args_support(inner)
        state, bare_state, start = tx.init(params), bare.init(params), params
        assert jax.tree.leaves(state.window_sum) == []
        update, bare_update = wrap(tx.update), wrap(bare.update)
        for gradient in gradients:
            updates, state = update(gradient, state, start)
            bare_updates, bare_state = bare_update(gradient, bare_state, start)
            laws.assert_bitwise(updates, bare_updates)
            laws.assert_bitwise(state.inner_state, bare_state)
            start = optax.apply_updates(start, updates)
        assert state.gradient_step == 3


WIDE = {jnp.dtype(jnp.complex64): jnp.complex64}
law_7_inners = st.sampled_from(
    (
        optax.sgd(0.5, momentum=0.5),
        optax.lion(0.5),
        optax.adamw(0.5),
        optax.contrib.schedule_free_sgd(0.5),
        optax.inject_hyperparams(optax.adam)(0.5),
    )
)


def is_taken_by_optax(dtypes):
    """Whether the inners of law 7 take parameters of these dtypes.

    schedule_free looks for the lowest dtype, and of bfloat16 and float16 neither is lower;
    inject_hyperparams casts its numbers to the dtype of one leaf.
    """
    is_mixed = jnp.complex64 in dtypes and {*dtypes} != {jnp.complex64}
    return not is_mixed and not {jnp.bfloat16, jnp.float16} <= {*dtypes}


@hypothesis.given(
    laws.seeds,
    laws.dtypes.filter(is_taken_by_optax),
    law_7_inners,
    st.sampled_from((None, 1, 3, 0.1, np.float32(7), "traced")),
    st.booleans(),
)
def test_law_7_holds_for_gradients_wider_than_the_params_and_for_any_weight(
    seed, dtypes, inner, weight, jit
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, {"a": (2, 2), "b": (3,)}, dtypes)

    def wide(p):
        return (p + rng.normal(size=p.shape)).astype(WIDE.get(p.dtype, jnp.float32))

    tx, bare = accumulate(1, inner), optax.with_extra_args_support(inner)
    state, bare_state = tx.init(params), bare.init(params)
    wrap = jax.jit if jit else lambda f: f
    update = wrap(lambda g, s, w: tx.update(g, s, params, weight=w if weight else None))
    bare_update = wrap(lambda g, s: bare.update(g, s, params))
    if weight != "traced" and weight is not None:
        update = wrap(lambda g, s, w: tx.update(g, s, params, weight=weight))
    for _ in range(4):
        gradients = jax.tree.map(wide, params)
        updates, state = update(gradients, state, jnp.float32(0.3))
        bare_updates, bare_state = bare_update(gradients, bare_state)
        laws.assert_bitwise(updates, bare_updates)
        laws.assert_bitwise(state.inner_state, bare_state)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("options", [{"should_skip_update_fn": optax.skip_not_finite}, {}])
def test_law_7_a_skipped_micro_step_keeps_the_state_in_the_dtypes_of_the_inner(jit, options):
    params = jnp.ones(2, jnp.bfloat16)
    tx = accumulate(1, optax.sgd(0.5, momentum=0.5), **options)
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(params)
    assert state.inner_state[0].trace.dtype == jnp.bfloat16
    bad = jnp.array([jnp.nan, 1.0])
    updates, state = update(bad, state, params, weight=jnp.float32(1.0 if options else 0.0))
    laws.assert_zeros(updates)
    assert updates.dtype == jnp.float32
    laws.assert_bitwise(state.inner_state[0].trace, jnp.zeros(2, jnp.float32))
    assert (state.num_skipped, state.gradient_step, state.emitted) == (1, 0, False)
    _, state = update(jnp.ones(2), state, params, weight=jnp.float32(1))
    laws.assert_bitwise(state.inner_state[0].trace, jnp.ones(2))


def test_law_7_an_inner_whose_state_grows_runs_where_nothing_is_gated():
    tx = accumulate(1, optax.monitor({"norm": optax.tree.norm}))
    update = jax.jit(lambda gradient, state: tx.update(gradient, state, weight=2))
    _, state = update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
    assert optax.tree.get(state, "norm") == 5
    with pytest.raises(ValueError, match="inner must keep the tree of its state"):
        tx.update(jnp.ones(2), tx.init(jnp.zeros(2)), weight=jnp.float32(2))


def test_law_7_the_weight_of_a_single_micro_batch_changes_no_digit():
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=100_000), jnp.float32)
    tx = accumulate(1, optax.sgd(0.1))
    got, _ = jax.jit(tx.update)(gradient, tx.init(gradient), weight=jnp.float32(3))
    want, _ = jax.jit(optax.sgd(0.1).update)(gradient, optax.sgd(0.1).init(gradient))
    laws.assert_bitwise(got, want)


@hypothesis.given(laws.seeds, laws.structures, laws.dtypes, ks, st.integers(1, 9), laws.inners)
def test_law_8_saved_and_restored_training_goes_on_bit_for_bit(
    seed, structure, dtypes, k, saved_after, inner
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    gradients = [laws.small_integers(rng, structure, dtypes) for _ in range(10)]
    tx = accumulate(k, inner)
    want = laws.run(tx, params, gradients)
    saved = jax.tree.map(np.asarray, laws.run(tx, params, gradients[:saved_after]))
    # JAX arrays, as a checkpointer restores them: of NumPy's, Adam alone computes other bits.
    saved = jax.tree.map(jnp.asarray, saved)
    laws.assert_bitwise(laws.run(tx, saved[0], gradients[saved_after:], state=saved[1]), want)


@pytest.mark.parametrize("mode", ["eager", "jit", "scan"])
def test_law_10_inner_runs_once_per_window(mode):
    calls = []
    counting = optax.stateless(
        lambda updates, _: (jax.debug.callback(lambda: calls.append(1)), updates)[1]
    )
    tx = accumulate(4, counting)
    params = jnp.zeros(3)
    gradients = jnp.ones((12, 3))

    def step(state, gradient):
        return tx.update(gradient, state, params)[::-1]

    state = tx.init(params)
    if mode == "scan":
        jax.lax.scan(step, state, gradients)
    else:
        step = jax.jit(step) if mode == "jit" else step
        for gradient in gradients:
            state, _ = step(state, gradient)
    jax.effects_barrier()
    assert len(calls) == 3


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "int32", "float32", "bfloat16"])
def test_schedules_may_return_any_real_dtype(dtype):
    tx = accumulate(lambda step: jnp.asarray([2, 3], dtype)[jnp.minimum(step, 1)])
    state = tx.init(jnp.zeros([]))
    seen = []
    for _ in range(5):
        _, state = tx.update(jnp.ones([]), state)
        seen.append(bool(state.emitted))
    assert seen == [False, True, False, False, True]


def test_a_schedule_of_nan_means_one():
    tx = accumulate(lambda step: jnp.nan)
    assert tx.update(jnp.ones([]), tx.init(jnp.zeros([])))[1].emitted


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_meta_gradients_do_not_see_a_rejected_gradient(bad):
    def loss(scale):
        tx = accumulate(2, optax.sgd(1.0))
        state = tx.init(jnp.ones(2))
        for gradient, weight in ((jnp.array([1.0, 2.0]), 1.0), (jnp.full(2, bad), 0.0)):
            updates, state = tx.update(gradient, state, weight=scale * weight)
        return updates.sum()

    assert jax.grad(loss)(2.0) == 0


def test_every_k_of_one_passes_even_subnormals_and_large_values_through():
    gradient = jnp.asarray(np.array([1e-39], np.float32))
    got = []

    def spy(u, s, p=None, *, value):
        return (got.append(value), (u, s))[1]

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, spy)
    tx = accumulate(1, inner, average_extra_args=("value",))
    updates, _ = tx.update(gradient, tx.init(gradient), value=2**24 + 1)
    assert np.asarray(updates).tobytes() == np.asarray(gradient).tobytes()
    assert got == [2**24 + 1]


def test_trees_without_leaves_are_windows_too():
    for empty in (None, (), {}, {"a": None}):
        tx = accumulate(2, optax.sgd(1.0))
        state = tx.init(empty)
        for emitted in (False, True):
            updates, state = tx.update(empty, state, empty)
            assert updates == empty
            assert state.emitted == emitted


def test_numpy_and_python_leaves_are_taken_as_jax_takes_them():
    for one in (np.ones(2), np.float64(1), 1.0):
        tx = accumulate(2, optax.stateless(lambda u, p: jax.tree.map(lambda _: 0.5, u)))
        state = tx.init(one)
        for _ in range(2):
            updates, state = tx.update(one, state, one)
        np.testing.assert_array_equal(updates, 0.5)


def test_schedules_of_k_change_at_boundaries_and_are_rounded():
    def schedule(step):
        return jnp.array([1.6, 3.2, -4.0, 1.0])[jnp.minimum(step, 3)]

    tx = accumulate(schedule, optax.sgd(1.0))
    params = jnp.zeros([])
    state = tx.init(params)
    emitted = []
    for _ in range(8):
        _, state = jax.jit(tx.update)(jnp.ones([]), state, params)
        emitted.append(bool(state.emitted))
    assert emitted == [False, True, False, False, True, True, True, True]


def test_a_window_closes_once_a_lowered_k_is_reached_and_loses_nothing():
    params = jnp.zeros([])
    _, state = laws.run(accumulate(5, optax.sgd(1.0)), params, [jnp.float32(g) for g in (1, 2, 3)])
    for k in (1, 2, 4):
        updates, after = accumulate(k, optax.sgd(1.0)).update(jnp.float32(6), state, params)
        assert updates == -3
        assert after.micro_step == 0


@pytest.mark.parametrize("jit", [False, True])
def test_counters_tell_what_happened(jit):
    tx = accumulate(2, optax.sgd(1.0), should_skip_update_fn=optax.skip_not_finite)
    params = jnp.zeros([])
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(params)
    seen = []
    steps = [(1, 1), (np.nan, 1), (1, 0), (np.inf, 1), (1, 1), (1, 1), (1, -1), (1, np.nan)]
    for gradient, weight in steps:
        _, state = update(jnp.float32(gradient), state, params, weight=weight)
        numbers = (state.micro_step, state.gradient_step, state.emitted, state.num_skipped)
        seen.append(tuple(map(int, numbers)))
    assert seen == [
        (1, 0, 0, 0),
        (0, 1, 1, 1),
        (1, 1, 0, 2),
        (0, 1, 0, 3),  # a window without weight closes without an update
        (1, 1, 0, 3),
        (0, 2, 1, 3),
        (1, 2, 0, 4),
        (0, 2, 0, 5),
    ]


@hypothesis.given(laws.seeds, st.integers(1, 4), normalizations)
def test_averaged_extra_args_reach_inner_as_the_mean_of_the_window(seed, k, normalize):
    rng = np.random.default_rng(seed)
    got = []

    def spy(updates, state, params=None, *, value, other):
        jax.debug.callback(lambda v, o: got.append((float(v), float(o))), value, other)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, spy)
    tx = accumulate(k, inner, normalize=normalize, average_extra_args=("value",))
    values, weights = rng.normal(size=k), rng.uniform(1, 4, k)
    state = tx.init(jnp.zeros(2))
    for i in range(k):
        _, state = jax.jit(tx.update)(
            jnp.ones(2), state, value=values[i], weight=weights[i], other=float(i)
        )
    jax.effects_barrier()
    scale = np.ones(k) if normalize == "ratio" else weights
    want = (scale * values).sum() / weights.sum()
    assert len(got) == 1
    np.testing.assert_allclose(got[0], (want, k - 1), rtol=1e-5, atol=1e-6)  # values may cancel


@pytest.mark.parametrize("jit", [False, True])
def test_flush_hands_on_the_mean_of_the_averaged_args_that_were_accepted(jit):
    inner = optax.GradientTransformationExtraArgs(
        optax.init_empty_state, lambda u, s, p=None, *, value: (jnp.full_like(u, value), s)
    )
    skip = optax.skip_not_finite
    tx = accumulate(8, inner, average_extra_args=("value",), should_skip_update_fn=skip)
    params = jnp.zeros([])
    per_step = [{"value": v} for v in (2.0, np.nan, 4.0)]
    _, state = laws.run(tx, params, [params, params + np.nan, params], per_step=per_step)
    for extra in ({}, {"value": 100.0}):  # what is passed to flush belongs to no micro-step

        def do_flush(s, extra=extra):
            return flush(tx, s, params, **extra)

        updates, _ = (jax.jit(do_flush) if jit else do_flush)(state)
        assert updates == 3


@hypothesis.given(laws.seeds, st.integers(1, 4), st.sampled_from(("mean", "ratio")), st.booleans())
def test_value_is_averaged_like_the_gradient_without_being_named(seed, k, normalize, jit):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(2 * k, 4)), jnp.float32)

    def loss(w, x):
        return jnp.mean((x * w - 1) ** 2)

    def micro_loss(w, x):
        return loss(w, x) * (x.size if normalize == "ratio" else 1)

    inner = optax.polyak_sgd(1.0)
    tx, w = accumulate(k, inner, normalize=normalize), jnp.float32(0)
    state, bare_state, want = tx.init(w), inner.init(w), w
    update = jax.jit(tx.update) if jit else tx.update
    for i in range(2 * k):
        value, gradient = jax.value_and_grad(micro_loss)(w, x[i])
        updates, state = update(gradient, state, w, value=value, weight=x[i].size)
        w = optax.apply_updates(w, updates)
    for big in (x[:k], x[k:]):
        value, gradient = jax.value_and_grad(loss)(want, big)
        updates, bare_state = inner.update(gradient, bare_state, want, value=value)
        want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(w, want, rtol=1e-5, atol=1e-5)


def test_value_of_the_micro_steps_that_passed_it_reaches_inner_if_the_last_one_did():
    nothing = jnp.float32(-1)

    def remember(updates, state, params=None, **extra_args):
        value = extra_args.get("value")
        return updates, nothing if value is None else value

    inner = optax.GradientTransformationExtraArgs(lambda params: nothing, remember)
    tx, params = accumulate(4, inner), jnp.zeros([])
    first = [{"value": 8.0}, {}, {"value": None, "weight": 5}]
    rejected = {"value": np.nan, "weight": 0}
    for per_step, want in (
        ([*first, {"value": 2.0, "weight": 3}], 3.5),
        ([*first, {}], -1),
        ([rejected, *first[:2], {"value": 4.0}], 6),
    ):
        _, state = laws.run(tx, params, [params] * 4, per_step=per_step)
        assert state.inner_state == want
    for per_step, want in ((first, 8), ([{}], 0)):
        _, state = laws.run(tx, params, [params] * len(per_step), per_step=per_step)
        _, state = flush(tx, state, params)
        assert state.inner_state == want


def test_a_missing_value_is_the_error_of_the_inner_transformation():
    tx = accumulate(2, optax.polyak_sgd(1.0))
    with pytest.raises(TypeError, match="value"):
        laws.run(tx, jnp.zeros([]), [jnp.ones([])] * 2)


def test_without_averages_value_is_that_of_the_last_call_and_the_state_has_no_scalars():
    inner = optax.GradientTransformationExtraArgs(
        optax.init_empty_state, lambda u, s, p=None, *, value: (jnp.full_like(u, value), s)
    )
    tx = accumulate(2, inner, average_extra_args=())
    _, state = tx.update(jnp.zeros([]), tx.init(jnp.zeros([])), value=1.0)
    updates, state = tx.update(jnp.zeros([]), state, value=5.0)
    assert updates == 5
    assert state.extras == {}
    assert accumulate(1).init(jnp.zeros([])).extras == {}
    (averages,) = accumulate(2).init(jnp.zeros([])).extras.values()
    assert averages == ({"value": {"sum": 0, "weight": 0}}, ())


@pytest.mark.parametrize("value", [jnp.ones(2), "3", 1j])
def test_a_value_that_has_no_mean_is_refused_and_may_be_handed_on_as_it_is(value):
    tx = accumulate(2, optax.scale(1.0))
    with pytest.raises(ValueError, match=r"value must be a real scalar.*average_extra_args=\(\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=value)
    tx = accumulate(2, optax.scale(1.0), average_extra_args=())
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=value)


def test_accumulator_and_emit_dtypes_are_as_asked_and_wide_by_default():
    seen = {}

    def spy(updates, state, params=None):
        seen["dtype"] = jax.tree.map(lambda u: u.dtype, updates)
        return updates, state

    inner = optax.GradientTransformation(optax.init_empty_state, spy)
    params = {"half": jnp.ones(2, jnp.bfloat16), "z": jnp.ones(2, jnp.complex64)}

    def dtypes(**options):
        return jax.tree.map(lambda s: s.dtype, accumulate(2, **options).init(params).window_sum)

    assert dtypes() == {"half": jnp.float32, "z": jnp.complex64}
    assert dtypes(accumulator_dtype=jnp.bfloat16) == {"half": jnp.bfloat16, "z": jnp.complex64}
    for emit_dtype, want in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        tx = accumulate(2, inner, emit_dtype=emit_dtype)
        updates, _ = jax.jit(tx.update)(params, tx.init(params))
        assert seen["dtype"] == {"half": want, "z": jnp.complex64}
        assert updates["half"].dtype == want


def test_a_float32_sum_of_bfloat16_gradients_keeps_what_bfloat16_would_lose():
    tx = accumulate(512)
    params = jnp.zeros([], jnp.bfloat16)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(512):
        updates, state = update(jnp.ones([], jnp.bfloat16), state)
    assert updates == 1


def test_float64_windows_keep_float64():
    with jax.enable_x64(True):
        tx = accumulate(3)
        gradients = [jnp.float64(1 + 1e-12 * i) for i in range(3)]
        state = tx.init(gradients[0])
        for gradient in gradients:
            updates, state = jax.jit(tx.update)(gradient, state, weight=1 / 3)
        assert updates.dtype == jnp.float64
        assert abs(updates - (1 + 1e-12)) < 1e-15
        assert state.window_weight.dtype == jnp.float64


def test_a_narrower_accumulator_still_emits_updates_in_full():
    params = jnp.zeros(2, jnp.float32)
    tx = accumulate(2, optax.scale(1 / 3), accumulator_dtype=jnp.bfloat16)
    state = tx.init(params)
    update = jax.jit(tx.update)
    updates, state = update(jnp.ones(2), state)
    laws.assert_zeros(updates)
    updates, state = update(jnp.ones(2), state)
    np.testing.assert_array_equal(updates, np.float32(1 / 3))
    assert state.window_sum.dtype == jnp.bfloat16


def test_clipping_after_the_accumulator_is_of_the_window_and_before_it_of_each_micro_batch():
    gradients = [jnp.array([3.0, 0.0]), jnp.array([-3.0, 4.0])]
    clip = optax.clip_by_global_norm(1.0)
    for tx, want in (
        (chain(accumulate(2), clip), [0, 1]),
        (accumulate(2, clip), [0, 1]),
        (chain(clip, accumulate(2)), [0.2, 0.4]),
    ):
        got, _ = laws.run(tx, jnp.zeros(2), gradients)
        np.testing.assert_allclose(got, want, atol=1e-6)


@hypothesis.given(laws.seeds, st.integers(1, 3))
def test_chain_is_optax_chain_with_all_after_the_accumulator_inside_it(seed, k):
    rng = np.random.default_rng(seed)
    a, b, c = optax.trace(0.5), optax.scale_by_adam(), optax.scale(-0.5)
    gradients = [laws.small_integers(rng, (3,), [jnp.float32]) for _ in range(2 * k + 1)]
    start = jnp.zeros(3)
    want = laws.run(optax.chain(a, accumulate(k, b, c)), start, gradients)
    for tx in (
        chain(a, accumulate(k), b, c),
        chain(a, accumulate(k, b), c),
        chain(chain(a, accumulate(k, b)), c),
    ):
        got = laws.run(tx, start, gradients)
        laws.assert_bitwise(got[0], want[0])
    laws.assert_bitwise(laws.run(chain(a, accumulate(k), b, c), start, gradients), want)
    without = chain(a, b)
    laws.assert_bitwise(
        laws.run(without, start, gradients), laws.run(optax.chain(a, b), start, gradients)
    )


def test_flush_does_not_call_what_stands_before_the_accumulator():
    tx = chain(optax.trace(0.5), accumulate(4), optax.sgd(1.0))
    params = jnp.zeros(2)
    _, state = laws.run(tx, params, [jnp.ones(2)])
    updates, after = flush(tx, state, params)
    laws.assert_bitwise(after[0], state[0])
    np.testing.assert_array_equal(updates, [-1, -1])


def test_state_fields_are_those_of_the_contract():
    assert AccumulateState._fields == (
        "micro_step",
        "gradient_step",
        "emitted",
        "num_skipped",
        "window_weight",
        "window_sum",
        "extras",
        "inner_state",
    )
