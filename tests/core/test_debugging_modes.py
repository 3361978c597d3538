"""A sample of the laws under each of JAX's debugging modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_laws

import laws
from optax_accum import (
    DynamicLossScale,
    accumulate,
    accumulate_in_momentum,
    chain,
    contrastive_value_and_grad,
    flush,
    loss_scale,
    make_train_step,
    microbatch_value_and_grad,
    plan_microbatches,
    window_metrics,
)
from optax_accum.testing import assert_window_equivalence

TREE = {"a": (2, 2), "b": (3,)}
MIXED = [jnp.float32, jnp.bfloat16, jnp.complex64]
MODES = {
    "debug_nans": lambda: jax.debug_nans(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "leak checking": jax.checking_leaks,
    "x64": lambda: jax.enable_x64(True),
    "no jit": jax.disable_jit,
    "numpy rank promotion": lambda: jax.numpy_rank_promotion("raise"),
}


def of_law(test, *args):
    """A law for given values, without hypothesis."""
    return functools.partial(test.hypothesis.inner_test, *args)


LAWS = {
    "law 1": of_law(
        test_laws.test_law_1_weighted_micro_batches_give_the_update_of_the_big_batch,
        *(3, TREE, [jnp.float32, jnp.bfloat16], 3, optax.sgd(0.5, momentum=0.5)),
    ),
    "law 4": of_law(
        test_laws.test_law_4_a_rejected_micro_step_is_one_of_weight_zero,
        *(3, TREE, [False, True, False, False]),
    ),
    "law 5": of_law(
        test_laws.test_law_5_a_partial_window_is_the_mean_over_what_it_holds,
        *(3, TREE, [jnp.float32], 3, optax.lion(0.5)),
    ),
    "law 7": of_law(
        test_laws.test_law_7_holds_for_gradients_wider_than_the_params_and_for_any_weight,
        *(3, [jnp.float32], optax.lion(0.5), "traced", True),
    ),
    "law 8": of_law(
        test_laws.test_law_8_saved_and_restored_training_goes_on_bit_for_bit,
        *(3, TREE, [jnp.float32], 3, 4, optax.lion(0.5)),
    ),
    "value": of_law(
        test_laws.test_value_is_averaged_like_the_gradient_without_being_named,
        *(3, 2, "ratio", True),
    ),
}


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


@pytest.mark.parametrize("law", LAWS)
def test_laws_hold(mode, law):
    LAWS[law]()


PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
HALF = PARAMS | {"half": jnp.ones(3, jnp.bfloat16)}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("inner", [optax.sgd(0.5), optax.sgd(0.5, 0.5), optax.lion(0.5)])
@pytest.mark.parametrize("k", [1, 2])
def test_all_components_at_once_run_from_the_first_call_on(mode, k, inner, jit):
    tx = chain(
        accumulate(
            k,
            monitor=True,
            loss_scale=DynamicLossScale(8.0),
            should_skip_update_fn=optax.skip_not_finite,
        ),
        inner,
    )
    state = tx.init(PARAMS)
    update = jax.jit(tx.update) if jit else tx.update
    for i in range(2 * k):
        gradients = jax.tree.map(lambda p, i=i: p * (8.0 * (i + 1)), PARAMS)
        weight = jnp.float32(i % 2 + 1)
        _, state = update(gradients, state, PARAMS, weight=weight, value=jnp.float32(i))
        assert window_metrics(state)["loss"] <= 2 * k
        assert loss_scale(state) == 8
    _, state = flush(tx, state, PARAMS)
    assert state[-1].gradient_step == 2


def test_momentum_windows_run(mode):
    tx = accumulate_in_momentum(2, 0.5, 0.5)
    laws.run(tx, HALF, [HALF] * 4)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def test_train_steps_run_off_the_boundary_too(mode):
    tx = chain(accumulate(2, monitor=True), optax.lion(0.1))
    step = make_train_step(loss_fn, tx)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones((1, 3))}
    state = step.init(params)
    for i in range(3):
        params, state, metrics = step(params, state, jnp.ones((4, 2)) * (i + 1))
    assert (metrics["micro_step"], metrics["gradient_step"]) == (1, 1)
    step.flush(params, state)


PARAMS_OF_LOSS = {"w": jnp.ones((2, 3)) / 4, "b": jnp.ones((1, 3))}
X = jnp.arange(14.0).reshape(7, 2) / 16


def eps_of(dtype):
    return float(jnp.finfo(dtype).eps)


def assert_close(got, want, eps):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.float32(a), np.float32(b)
        assert np.max(np.abs(a - b)) < 8 * eps * (1 + np.max(np.abs(b)))


@pytest.mark.parametrize(
    ("dtype", "accumulator_dtype"),
    [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, jnp.bfloat16)],
)
def test_windows_in_one_call_run(mode, dtype, accumulator_dtype):
    params, x = jax.tree.map(lambda a: a.astype(dtype), (PARAMS_OF_LOSS, X))
    fn = microbatch_value_and_grad(loss_fn, 3, accumulator_dtype=accumulator_dtype)
    assert_close(jax.jit(fn)(params, x), jax.value_and_grad(loss_fn)(params, x), eps_of(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_contrastive_windows_run(mode, dtype):
    params, x = jax.tree.map(lambda a: a.astype(dtype), (PARAMS_OF_LOSS, X))

    def encode(params, x):
        return jnp.tanh(x @ params["w"])

    def loss_of_rows(params, rows):
        return jnp.mean((rows @ rows.T) ** 2)

    def whole_loss(params, x):
        return loss_of_rows(params, encode(params, x))

    fn = contrastive_value_and_grad(encode, loss_of_rows, 3)
    assert_close(jax.jit(fn)(params, x), jax.value_and_grad(whole_loss)(params, x), eps_of(dtype))


def test_a_batch_is_planned(mode):
    plan = plan_microbatches(loss_fn, PARAMS_OF_LOSS, X, memory_budget=1e6, tx=optax.lion(0.5))
    assert (plan.fits, plan.num_microbatches) == (True, 1)


def test_windows_of_bfloat16_are_checked(mode):
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS_OF_LOSS, X))
    tx = chain(accumulate(3), optax.lion(0.5))
    assert_window_equivalence(loss_fn, params, x, 3, tx=tx)

    def summed_loss(params, x):
        return len(x) * loss_fn(params, x)

    with pytest.raises(AssertionError, match="does not give the gradient of its batch"):
        assert_window_equivalence(summed_loss, params, x, 3)
