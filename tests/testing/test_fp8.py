"""Flax's fp8 scales, whose gradient is their new value: refused by name; the remedies work."""

import chex
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.core import freeze
from flax.training.train_state import TrainState

from optax_accum import (
    accumulate,
    accumulate_in_momentum,
    chain,
    contrastive_value_and_grad,
    make_train_step,
    microbatch_value_and_grad,
    plan_microbatches,
)
from optax_accum.testing import assert_window_equivalence

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")

SCALES = "_overwrite_with_gradient"
MODEL = nn.Dense(5, dot_general_cls=nn.Fp8DotGeneralOp)
RNG = np.random.default_rng(0)
BATCH = (30 * RNG.normal(size=(8, 8)).astype(np.float32), RNG.integers(0, 5, 8))
MICRO_BATCHES = [(BATCH[0][i::4], BATCH[1][i::4]) for i in range(4)]


def mean_loss(variables, batch):
    logits = MODEL.apply(variables, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def loss_and_scales(params, scales, batch):
    """The loss, and the gradient of the scales, which is their new value."""
    variables = {"params": params, SCALES: scales}
    return mean_loss(variables, batch), jax.grad(mean_loss)(variables, batch)[SCALES]


def new_variables():
    return MODEL.init(jax.random.key(0), BATCH[0])


def after_two_windows_of_flax():
    """The variables of Flax's own train state, which overwrites the scales."""
    tx = chain(accumulate(2), optax.adam(1e-3))
    state = TrainState.create(apply_fn=MODEL.apply, params=new_variables(), tx=tx)
    for batch in MICRO_BATCHES:
        state = state.apply_gradients(grads=jax.grad(mean_loss)(state.params, batch))
    return state.params


def call(entry, variables):
    """Hand the variables to an entry point, as if all of them had gradients to average."""
    tx = chain(accumulate(2), optax.adam(1e-3))
    match entry:
        case "accumulate":
            tx.init(variables)
        case "accumulate_in_momentum":
            accumulate_in_momentum(2, learning_rate=0.1, momentum=0.9).init(variables)
        case "make_train_step":
            make_train_step(mean_loss, tx).init(variables)
        case "make_train_step, k=1":
            make_train_step(mean_loss, accumulate(1, optax.adam(1e-3))).init(variables)
        case "microbatch":
            microbatch_value_and_grad(mean_loss, 2)(variables, BATCH)
        case "contrastive":

            def encode(variables, batch):
                return MODEL.apply(variables, batch[0])

            contrastive_value_and_grad(encode, lambda _, r: r.sum(), 2)(variables, BATCH)
        case "plan":
            plan_microbatches(mean_loss, variables, BATCH, memory_budget=1e9)


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ("accumulate", "tx.update(gradients['params']"),
        ("accumulate_in_momentum", "tx.update(gradients['params']"),
        ("make_train_step", "Pass them as model_state"),
        ("make_train_step, k=1", "Pass them as model_state"),
        ("microbatch", "Pass them as carry_argnum"),
        ("contrastive", "Let encode_fn hold them fixed"),
        ("plan", "Let loss_fn hold them fixed"),
    ],
)
@pytest.mark.parametrize("container", [dict, freeze])
def test_scales_among_what_is_averaged_are_refused_with_a_remedy(entry, remedy, container):
    with pytest.raises(ValueError, match=f"must not hold '{SCALES}'") as error:
        call(entry, container(new_variables()))
    assert f"['{SCALES}']['Fp8DotGeneralOp_0']" in str(error.value)
    assert remedy in str(error.value)


def test_scales_as_variables_of_nnx_are_refused_and_its_parameters_are_not():
    module = nnx.bridge.ToNNX(MODEL, rngs=nnx.Rngs(0)).lazy_init(BATCH[0])
    tx = accumulate(2, optax.adam(1e-3))
    tx.init(nnx.state(module, nnx.Param))
    with pytest.raises(ValueError, match=r"must not hold .* got params\['Fp8DotGeneralOp_0'\]"):
        tx.init(nnx.state(module, nnx.Not(nnx.RngState)))


def test_scales_outside_of_an_accumulator_are_no_matter_of_its_own():
    kinds = {"params": "learnt", SCALES: "held"}
    held = {"learnt": accumulate(2, optax.adam(1e-3)), "held": optax.set_to_zero()}
    optax.partition(held, kinds).init(new_variables())


def test_overwritten_beside_the_optimizer_scales_are_those_of_flax():
    want = after_two_windows_of_flax()
    variables, tx = new_variables(), chain(accumulate(2), optax.adam(1e-3))
    opt_state = tx.init(variables["params"])
    for batch in MICRO_BATCHES:
        gradients = jax.grad(mean_loss)(variables, batch)
        updates, opt_state = tx.update(gradients["params"], opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        variables = {"params": params, SCALES: gradients[SCALES]}
    chex.assert_trees_all_equal(variables, want)
    assert variables[SCALES]["Fp8DotGeneralOp_0"]["input_amax_history"][0] > 30


def test_as_the_model_state_of_a_train_step_scales_are_those_of_flax():
    want, variables = after_two_windows_of_flax(), new_variables()
    step = make_train_step(
        loss_and_scales, chain(accumulate(2), optax.adam(1e-3)), model_state=True
    )
    params, scales = variables["params"], variables[SCALES]
    opt_state = step.init(params)
    for batch in MICRO_BATCHES:
        params, opt_state, _, scales = step(params, opt_state, batch, model_state=scales)
    chex.assert_trees_all_close({"params": params, SCALES: scales}, want, rtol=1e-5)


def test_as_the_carry_of_micro_batches_scales_are_those_after_the_last_one():
    want = variables = new_variables()
    for batch in MICRO_BATCHES:
        want = {**want, SCALES: jax.grad(mean_loss)(want, batch)[SCALES]}
    carried = microbatch_value_and_grad(loss_and_scales, 4, batch_argnums=2, carry_argnum=1)
    (_, scales), _ = carried(variables["params"], variables[SCALES], BATCH)
    chex.assert_trees_all_close(scales, want[SCALES], rtol=1e-5)


def test_a_loss_that_returns_the_new_scales_computes_its_gradient_once():
    def flops(function, *args):
        return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]

    variables = new_variables()
    both = jax.grad(loss_and_scales, has_aux=True)
    once = flops(jax.grad(mean_loss), variables, BATCH)
    assert flops(both, variables["params"], variables[SCALES], BATCH) == pytest.approx(
        once, rel=0.1
    )


def test_the_checker_names_the_scales_and_passes_where_they_are_held():
    variables = new_variables()
    with pytest.raises(AssertionError, match=f"must not hold '{SCALES}'.*hold them fixed"):
        assert_window_equivalence(mean_loss, variables, BATCH, 2)

    def held(params, batch):
        return mean_loss({"params": params, SCALES: variables[SCALES]}, batch)

    assert_window_equivalence(held, variables["params"], BATCH, 2)
    module = nnx.bridge.ToNNX(MODEL, rngs=nnx.Rngs(0)).lazy_init(BATCH[0])

    def loss(module, batch):
        return (module(batch[0]) ** 2).mean()

    assert_window_equivalence(loss, module, BATCH, 2)
