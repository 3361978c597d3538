"""A window gathered in the momentum is the window gathered beside it, for the heavy ball."""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import laws
from optax_accum import (
    AccumulateState,
    accumulate,
    accumulate_in_momentum,
    chain,
    flush,
    has_updated,
    make_train_step,
)


def K_SCHEDULE(step):
    return 1 + step % 3


PARAMS = {"w": jnp.linspace(-2.0, 2.0, 6).reshape(2, 3), "b": {"c": jnp.ones(3)}}
LEAVES, LENGTH = 20, 50_000
LARGE = {f"w{i}": jnp.ones(LENGTH) for i in range(LEAVES)}
SIZE = LEAVES * 4 * LENGTH  # bytes of the large params

momenta = st.floats(0, 1, exclude_max=True, width=32)
every_ks = st.one_of(st.integers(1, 5), st.just(K_SCHEDULE))
rates = st.sampled_from((0.5, optax.linear_schedule(1.0, 0.25, 3)))


def normals(rng, like):
    """A tree of random numbers."""
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), like)


def both(every_k, learning_rate, momentum, **options):
    """The window gathered in the momentum, and beside it."""
    return (
        accumulate_in_momentum(every_k, learning_rate, momentum, **options),
        accumulate(every_k, optax.sgd(learning_rate, momentum), **options),
    )


def history(tx, params, gradients, per_step=None):
    """The updates of each micro-step, and the state at the end."""
    tx, state, seen = optax.with_extra_args_support(tx), tx.init(params), []
    for i, gradient in enumerate(gradients):
        updates, state = tx.update(gradient, state, params, **(per_step[i] if per_step else {}))
        params = optax.apply_updates(params, updates)
        seen.append(updates)
    return seen, state


def shares_and_weights(rng, lengths):
    """Extra args of windows of these lengths, for the one and for the other."""
    sizes = [rng.integers(1, 20, length) for length in lengths]
    shares = [{"share": n / window.sum()} for window in sizes for n in window]
    return shares, [{"weight": float(n)} for window in sizes for n in window]


# The law: it is `accumulate(every_k, optax.sgd(learning_rate, momentum))`.


@given(laws.seeds, laws.structures, every_ks, momenta, rates)
def test_it_is_momentum_sgd_on_the_mean_of_each_window_to_rounding(
    seed, structure, every_k, momentum, rate
):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, [jnp.float32])
    gradients = [normals(rng, params) for _ in range(13)]
    (ours, state), (theirs, other) = (
        history(tx, params, gradients) for tx in both(every_k, rate, momentum)
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name in ("micro_step", "gradient_step", "emitted", "num_skipped"):
        laws.assert_bitwise(getattr(state, name), getattr(other, name))


@given(laws.seeds, st.integers(1, 5), momenta)
def test_shares_of_uneven_micro_batches_are_their_weights_over_the_windows(seed, k, momentum):
    rng = np.random.default_rng(seed)
    gradients = [normals(rng, PARAMS) for _ in range(4 * k)]
    shares, weights = shares_and_weights(rng, [k] * 4)
    ours, theirs = both(k, 0.5, momentum)
    chex.assert_trees_all_close(
        history(ours, PARAMS, gradients, shares)[0],
        history(theirs, PARAMS, gradients, weights)[0],
        rtol=1e-5,
        atol=1e-5,
    )


@given(laws.seeds, laws.structures, laws.dtypes, st.sampled_from((1, 2, 4)))
def test_of_small_integers_it_is_so_bit_for_bit(seed, structure, dtypes, k):
    rng = np.random.default_rng(seed)
    params = laws.small_integers(rng, structure, dtypes)
    # So small that bfloat16, in which optax keeps the momentum of such leaves, holds it too.
    gradients = [laws.small_integers(rng, structure, dtypes, -2, 3) for _ in range(3 * k + 1)]
    ours, theirs = (history(tx, params, gradients)[0] for tx in both(k, 0.5, 0.5))
    laws.assert_bitwise(ours, theirs)


@given(laws.seeds, laws.structures, laws.dtypes, st.integers(2, 5))
def test_off_the_boundary_updates_are_zeros_that_change_no_bit(seed, structure, dtypes, k):
    rng = np.random.default_rng(seed)
    params = jax.tree.map(jnp.negative, laws.small_integers(rng, structure, dtypes, 0, 2))
    gradients = [laws.small_integers(rng, structure, dtypes) for _ in range(2 * k - 1)]
    seen, _ = history(accumulate_in_momentum(k, 0.5, 0.5), params, gradients)
    for updates in seen[: k - 1] + seen[k:]:
        laws.assert_zeros(updates)
        assert all(np.all(np.signbit(np.real(x))) for x in jax.tree.leaves(updates))
        moved = optax.apply_updates(params, updates)
        assert [x.tobytes() for x in map(np.asarray, jax.tree.leaves(moved))] == [
            x.tobytes() for x in map(np.asarray, jax.tree.leaves(params))
        ]


@given(laws.seeds, st.integers(1, 4), st.integers(0, 9))
def test_saved_after_any_micro_step_it_goes_on_bit_for_bit(seed, k, stop):
    rng = np.random.default_rng(seed)
    gradients = [normals(rng, PARAMS) for _ in range(9)]
    tx = accumulate_in_momentum(k, optax.linear_schedule(1.0, 0.25, 3), 0.9)
    params, state = laws.run(tx, PARAMS, gradients[:stop])
    saved = pickle.loads(pickle.dumps(jax.device_get((params, state))))
    params, state = jax.tree.map(jnp.asarray, saved)
    laws.assert_bitwise(
        laws.run(tx, params, gradients[stop:], state), laws.run(tx, PARAMS, gradients)
    )


def test_the_mean_form_of_momentum_is_the_same_with_a_smaller_learning_rate():
    rng = np.random.default_rng(0)
    gradients = [normals(rng, PARAMS) for _ in range(12)]
    mean_form = accumulate(3, optax.ema(0.75, debias=False), optax.scale(-0.5))
    ours = accumulate_in_momentum(3, 0.25 * 0.5, 0.75)
    chex.assert_trees_all_close(
        history(ours, PARAMS, gradients)[0], history(mean_form, PARAMS, gradients)[0], atol=1e-6
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_float64_is_gathered_in_float64(dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
        gradients = [normals(rng, params) for _ in range(9)]
        options = {"accumulator_dtype": jnp.float64}
        (ours, state), (theirs, _) = (
            history(tx, params, gradients)
            for tx in (
                accumulate_in_momentum(3, 0.1, 0.9, **options),
                accumulate(
                    3,
                    optax.trace(0.9, accumulator_dtype=jnp.float64),
                    optax.scale(-0.1),
                    emit_dtype=jnp.float64,
                    **options,
                ),
            )
        )
        assert state.window_weight.dtype == jnp.float64
        assert {x.dtype for x in jax.tree.leaves(state.inner_state)} == {np.dtype("float64")}
        assert {x.dtype for x in jax.tree.leaves(ours)} == {np.dtype(dtype)}
        tolerance = 1e-14 if dtype == jnp.float64 else 1e-6
        chex.assert_trees_all_close(
            ours, jax.tree.map(lambda x: x.astype(dtype), theirs), rtol=tolerance, atol=tolerance
        )


def test_a_narrow_gradient_gathers_in_float32_and_one_is_as_wide_as_asked():
    half = jnp.ones(3, jnp.bfloat16)
    for asked, dtype in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        tx = accumulate_in_momentum(2, 0.5, 0.5, accumulator_dtype=asked)
        updates, state = tx.update(half, tx.init(half))
        assert state.inner_state.trace.dtype == dtype
        assert updates.dtype == jnp.bfloat16


# Micro-steps that do not count, and windows that close early.


@pytest.mark.parametrize("share", [0.0, -0.5, np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_micro_step_without_a_share_adds_nothing_even_of_nan(share, position):
    rng = np.random.default_rng(0)
    gradients = [normals(rng, PARAMS) for _ in range(4)]
    shares = [{"share": s} for s in (0.5, 0.5, 0.25, 0.75)]
    clean, state = history(accumulate_in_momentum(2, 0.5, 0.5), PARAMS, gradients, shares)
    poison = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS)
    at = 3 + position  # in the second of two windows of three, and first, second or last there
    gradients[2:2] = [poison]  # and last in the first one
    shares[2:2] = [{"share": share}]
    gradients[at:at] = [poison]
    shares[at:at] = [{"share": share}]
    seen, skipping = history(accumulate_in_momentum(3, 0.5, 0.5), PARAMS, gradients, shares)
    chex.assert_trees_all_close(seen[2], clean[1], atol=1e-6)
    chex.assert_trees_all_close(seen[5], clean[3], atol=1e-6)
    chex.assert_trees_all_close(skipping.inner_state, state.inner_state, atol=1e-6)
    assert (int(skipping.num_skipped), int(skipping.gradient_step)) == (2, 2)


def test_a_window_in_which_nothing_counts_changes_counters_alone():
    rng = np.random.default_rng(0)
    tx = accumulate_in_momentum(2, optax.linear_schedule(1.0, 0.25, 3), 0.5)
    params, state = laws.run(tx, PARAMS, [normals(rng, PARAMS) for _ in range(2)])
    assert has_updated(state)
    moved, after = laws.run(tx, params, [normals(rng, PARAMS)] * 2, state, share=0.0)
    laws.assert_bitwise(moved, params)
    changed = {"emitted": jnp.array(False), "num_skipped": jnp.int32(2)}
    laws.assert_bitwise(after, state._replace(**changed))
    # The next window decays the momentum once.
    gradients = [normals(rng, PARAMS) for _ in range(2)]
    laws.assert_bitwise(
        laws.run(tx, params, gradients, after)[0], laws.run(tx, params, gradients, state)[0]
    )


def test_shares_make_a_short_window_that_flush_closes_the_mean_of_what_it_holds():
    rng = np.random.default_rng(0)
    lengths = [4, 2, 1, 4, 3]
    shares, weights = shares_and_weights(rng, lengths)
    ends = {sum(lengths[: i + 1]) - 1 for i in range(len(lengths))}
    flushes = [{"flush": i in ends} for i in range(sum(lengths))]
    gradients = [normals(rng, PARAMS) for _ in flushes]
    ours, theirs = (
        history(tx, PARAMS, gradients, [a | b for a, b in zip(args, flushes, strict=True)])
        for tx, args in zip(both(4, 0.5, 0.9), (shares, weights), strict=True)
    )
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert int(ours[1].gradient_step) == len(lengths)


def test_what_shares_lack_to_one_is_lacking_in_the_gradient():
    tx = accumulate_in_momentum(4, 1.0, 0.5)
    updates, _ = tx.update(jnp.array(8.0), tx.init(jnp.zeros([])), flush=True)
    assert updates == -2.0


# In jit, scan, vmap and grad.


def test_it_is_the_same_in_jit_scan_and_vmap_in_one_trace():
    rng = np.random.default_rng(0)
    tx = accumulate_in_momentum(K_SCHEDULE, optax.linear_schedule(1.0, 0.25, 3), 0.5)
    gradients = [laws.small_integers(rng, (4, 3), [jnp.float32]) for _ in range(12)]
    params = jnp.ones((4, 3))
    want = laws.run(tx, params, gradients)
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @chex.assert_max_traces(n=1)
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jnp.copy(params), tx.init(params)
    for gradient in gradients:
        jitted = step(*jitted, gradient)

    def body(carry, gradient):
        return (step.__wrapped__(*carry, gradient), None)

    chex.clear_trace_counter()

    def scan(params, gradients):
        return jax.lax.scan(body, (params, tx.init(params)), gradients)[0]

    scanned = scan(params, jnp.stack(gradients))
    chex.clear_trace_counter()
    mapped = jax.vmap(scan, in_axes=(0, 1))(params, jnp.stack(gradients))
    chex.assert_trees_all_close(jitted, want, rtol=1e-6)
    chex.assert_trees_all_close(scanned, want, rtol=1e-6)
    chex.assert_trees_all_close(mapped[0], want[0], rtol=1e-6)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert shapes(jitted) == shapes((params, tx.init(params)))


def test_its_derivative_is_that_of_the_equation_and_a_nan_left_out_does_not_enter_it():
    tx = accumulate_in_momentum(3, 0.5, 0.5)
    share = [{"share": 0.25}, {"share": 0.0}, {"share": 0.75}]

    def end(gradients):
        return laws.run(tx, jnp.zeros([]), list(gradients), per_step=share)[0]

    slopes = jax.grad(end)(jnp.array([1.0, jnp.nan, 2.0]))
    np.testing.assert_allclose(slopes, [-0.125, 0.0, -0.375])


# In chains.


def test_weight_decay_before_it_is_exact_and_clipping_before_it_is_of_micro_batches():
    rng = np.random.default_rng(0)
    gradients = [normals(rng, PARAMS) for _ in range(9)]
    ours, theirs = both(3, 0.5, 0.9)
    for before in (optax.add_decayed_weights(0.1), optax.clip_by_global_norm(0.5)):
        chex.assert_trees_all_close(
            history(optax.chain(before, ours), PARAMS, gradients)[0],
            history(chain(before, theirs), PARAMS, gradients)[0],
            rtol=1e-5,
            atol=1e-5,
        )
    decay = optax.add_decayed_weights(0.1)
    inside = accumulate(3, decay, optax.sgd(0.5, 0.9))
    chex.assert_trees_all_close(
        history(optax.chain(decay, ours), PARAMS, gradients)[0],
        history(inside, PARAMS, gradients)[0],
        rtol=1e-5,
        atol=1e-5,
    )


def test_what_holds_no_state_and_keeps_zeros_may_follow_it():
    rng = np.random.default_rng(0)
    gradients = [normals(rng, PARAMS) for _ in range(9)]
    ours, theirs = both(3, 0.5, 0.9)
    clip = optax.clip_by_global_norm(0.25)
    chex.assert_trees_all_close(
        history(optax.chain(ours, clip), PARAMS, gradients)[0],
        history(chain(theirs, clip), PARAMS, gradients)[0],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("make", [optax.chain, chain])
@pytest.mark.parametrize(
    "follower", [optax.adam(0.1), optax.trace(0.9), optax.add_decayed_weights(0.1)]
)
def test_what_would_run_in_every_micro_step_behind_it_is_refused(make, follower, k):
    tx = make(accumulate_in_momentum(k, 0.5, 0.9), follower)
    state = tx.init(PARAMS)
    with pytest.raises(
        ValueError,
        match=r"transformation 1 .* comes after accumulate_in_momentum.* take accumulate",
    ):
        tx.update(PARAMS, state, PARAMS)


def test_a_partition_gathers_some_leaves_in_the_momentum_and_others_beside_it():
    rng = np.random.default_rng(0)
    gradients = [normals(rng, PARAMS) for _ in range(6)]
    ours, theirs = both(3, 0.5, 0.9)
    labels = {"w": "in", "b": "beside"}
    mixed = optax.partition({"in": ours, "beside": theirs}, labels)
    (seen, state), (want, _) = (history(tx, PARAMS, gradients) for tx in (mixed, theirs))
    chex.assert_trees_all_close(seen, want, rtol=1e-5, atol=1e-5)
    assert has_updated(state)


def test_hyperparameters_may_be_injected():
    rng = np.random.default_rng(0)
    gradients = [normals(rng, PARAMS) for _ in range(3)]
    tx = optax.inject_hyperparams(accumulate_in_momentum, static_args="every_k")(
        3, learning_rate=9.0, momentum=0.5
    )
    state = jax.jit(tx.init)(PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(0.5)
    seen, _ = laws.run(tx, PARAMS, gradients, state)
    chex.assert_trees_all_close(seen, laws.run(both(3, 0.5, 0.5)[0], PARAMS, gradients)[0])


# What is compiled, and what is kept.


def compile_step(tx, extra_args):
    """A micro-step as users write it: params and state donated, `apply_updates` inside."""

    def step(params, state, gradients, extra_args):
        updates, state = tx.update(gradients, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    arguments = (LARGE, jax.eval_shape(tx.init, LARGE), LARGE, extra_args)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


@pytest.mark.parametrize("every_k", [1, 8, K_SCHEDULE], ids=["1", "8", "schedule"])
@pytest.mark.parametrize("extra_args", [{}, {"share": 0.5, "flush": False}], ids=["", "share"])
def test_a_micro_step_needs_no_memory_beside_the_params_and_the_momentum(every_k, extra_args):
    tx = accumulate_in_momentum(every_k, optax.linear_schedule(1.0, 0.1, 9), 0.9)
    compiled = compile_step(tx, extra_args)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < SIZE / 100
    assert memory.alias_size_in_bytes >= 2 * SIZE
    assert "conditional(" not in compiled.as_text()


def test_the_state_is_the_params_smaller_than_with_sums():
    ours, theirs = (
        sum(x.nbytes for x in jax.tree.leaves(tx.init(LARGE))) for tx in both(8, 0.5, 0.9)
    )
    assert theirs - ours == SIZE + 8  # and the two scalars of `value`
    assert SIZE <= ours < SIZE + 32


def test_the_state_is_an_accumulators_with_the_momentum_of_optax():
    tx = accumulate_in_momentum(2, 0.5, 0.9)
    state = tx.init(PARAMS)
    assert isinstance(state, AccumulateState)
    assert (state.window_sum, state.extras) == (None, {})
    laws.assert_bitwise(state.inner_state, optax.trace(0.9).init(PARAMS))
    _, state = tx.update(PARAMS, state, share=0.25)
    assert (float(state.window_weight), bool(has_updated(state))) == (0.25, False)
    _, state = tx.update(PARAMS, state, share=0.75)
    assert (float(state.window_weight), bool(has_updated(state))) == (0.0, True)


# Errors.


@pytest.mark.parametrize("every_k", [0, 2.0, True, "4", None, optax.sgd(0.1)])
def test_a_wrong_every_k_is_named(every_k):
    with pytest.raises(ValueError, match=r"every_k .*got "):
        accumulate_in_momentum(every_k, 0.1, 0.9)


@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf, True, "0.1", None, 1j])
def test_a_wrong_learning_rate_is_named(value):
    with pytest.raises(ValueError, match=r"learning_rate must be a finite number .*schedule, got "):
        accumulate_in_momentum(2, value, 0.9)


@pytest.mark.parametrize("value", [-0.1, np.nan, 1, 1.5, True, None, lambda step: 0.9])
def test_a_wrong_momentum_is_named(value):
    with pytest.raises(ValueError, match=r"momentum must be a number of at least 0 .*1, got "):
        accumulate_in_momentum(2, 0.1, value)


@pytest.mark.parametrize("name", ["learning_rate", "momentum"])
def test_an_array_that_is_no_real_scalar_is_named(name):
    for value in (jnp.ones(2), jnp.ones([], complex)):
        with pytest.raises(ValueError, match=f"{name} must be a real scalar, got dtype"):
            accumulate_in_momentum(2, **{"learning_rate": 0.1, "momentum": 0.9, name: value})


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"weight": 3.0}, r"weight must not be passed .* pass share=.*; got weight=3.0"),
        ({"share": jnp.ones(2)}, r"share must be a real scalar, got .*\(2,\)"),
        ({"share": "all"}, r"share must be a real scalar, got 'all'"),
        ({"flush": 1}, r"flush must be a bool scalar, got"),
    ],
)
def test_a_wrong_extra_arg_is_named(extra_args, message):
    tx = accumulate_in_momentum(2, 0.1, 0.9)
    with pytest.raises(ValueError, match=message):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra_args)


def test_a_schedule_that_gives_no_number_is_named():
    for tx, message in (
        (accumulate_in_momentum(lambda step: None, 0.1, 0.9), "every_k as a schedule must"),
        (accumulate_in_momentum(2, lambda step: None, 0.9), "learning_rate must be a real scalar"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*got None"):
            tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_a_wrong_dtype_or_tree_or_state_is_named():
    with pytest.raises(ValueError, match=r"accumulator_dtype must have the range.*float16"):
        accumulate_in_momentum(2, 0.1, 0.9, accumulator_dtype=jnp.float16)
    with pytest.raises(ValueError, match="accumulator_dtype=float64 needs jax_enable_x64"):
        accumulate_in_momentum(2, 0.1, 0.9, accumulator_dtype=jnp.float64).init(PARAMS)
    tx = accumulate_in_momentum(2, 0.1, 0.9)
    with pytest.raises(ValueError, match=r"params must be floating or complex"):
        tx.init(jnp.ones(3, int))
    with pytest.raises(ValueError, match=r"missing \[\"\['b'\]"):
        tx.update({"w": PARAMS["w"]}, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="opt_state must hold the AccumulateState"):
        tx.update(PARAMS, optax.EmptyState(), PARAMS)
    with pytest.raises(ValueError, match="opt_state must hold the TraceState"):
        tx.update(PARAMS, accumulate(2, optax.adam(0.1)).init(PARAMS), PARAMS)


def test_what_asks_for_a_gate_says_what_to_write_instead():
    tx = accumulate_in_momentum(2, 0.1, 0.9)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, share=1.0)
    with pytest.raises(TypeError, match=r"to be flushed, .*share=0 in place of weight=0"):
        flush(tx, state, PARAMS)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, state, PARAMS, share=0, flush=True)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda p: -0.1 * p, PARAMS))
    with pytest.raises(TypeError, match=r"write the step with tx.update"):
        make_train_step(lambda params, batch: 0.0, tx)


@pytest.mark.parametrize("momentum", [0.9, 0.999])
def test_in_bfloat16_the_momentum_is_right_on_average(momentum):
    params, windows = jnp.zeros(1 << 13), 200
    gradients = jax.random.normal(jax.random.key(0), (windows, 1)) * 0.1 + 0.37

    def last(**options):
        tx = accumulate_in_momentum(1, 1.0, momentum, **options)

        def step(state, g):
            return (tx.update(jnp.broadcast_to(g, params.shape), state)[1], None)

        state, _ = jax.lax.scan(step, tx.init(params), gradients)
        return np.asarray(state.inner_state.trace, np.float64)

    got = last(accumulator_dtype=jnp.bfloat16)
    error = got.std() / got.size**0.5
    assert 0 < error < 1e-3 * abs(got.mean())
    assert abs(got.mean() - last().mean()) < 4 * error
