"""Bad input: each error gives the name, the rule and the value."""

import copy
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import laws
from optax_accum import (
    DynamicLossScale,
    accumulate,
    accumulate_in_momentum,
    chain,
    contrastive_value_and_grad,
    flush,
    has_updated,
    make_train_step,
    microbatch_value_and_grad,
    plan_microbatches,
)
from optax_accum.testing import assert_window_equivalence

PARAMS = {"w": jnp.zeros((2, 3)), "b": {"c": jnp.zeros(3)}}
GRADIENTS = jax.tree.map(jnp.ones_like, PARAMS)


@pytest.mark.parametrize("every_k", [0, -1, 2.0, True, "4", None, 2**31, np.float32(2), [2]])
def test_every_k_must_be_a_positive_int_or_a_schedule(every_k):
    with pytest.raises(ValueError, match=r"every_k must be an int from 1 .*schedule, got ") as info:
        accumulate(every_k, optax.sgd(0.1))
    assert repr(every_k) in str(info.value)


@pytest.mark.parametrize("every_k", [1, np.int64(3), np.uint8(2), lambda step: 2])
def test_every_k_may_be_any_int_or_a_schedule(every_k):
    tx = accumulate(every_k, optax.sgd(0.1))
    tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "value", [True, "2", None, jnp.ones(2), 1j, np.array([2])], ids=lambda v: type(v).__name__
)
def test_a_schedule_must_give_a_real_number(value):
    tx = accumulate(lambda step: value, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"every_k as a schedule must return a real number.*got"):
        tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


def test_multisteps_order_of_arguments_is_explained():
    with pytest.raises(ValueError, match=r"every_k comes first.*accumulate\(4, optax.adam"):
        accumulate(optax.adam(1e-3), 4)
    with pytest.raises(ValueError, match=r"inner must be optax gradient transformations.*got 4"):
        accumulate(4, 4)
    with pytest.raises(ValueError, match=r"inner must be .*a factory must be called"):
        accumulate(4, optax.adam)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("normalize", "max", r"normalize must be one of 'mean', 'sum', 'ratio'; got 'max'"),
        ("normalize", None, r"normalize must be one of .* got None"),
        ("accumulator_dtype", jnp.float16, r"accumulator_dtype must have the range.*float16"),
        ("accumulator_dtype", jnp.int32, r"accumulator_dtype must be a real floating"),
        ("accumulator_dtype", jnp.complex64, r"accumulator_dtype must be a real floating"),
        ("accumulator_dtype", "wide", r"accumulator_dtype must be a real floating.*'wide'"),
        ("emit_dtype", jnp.int8, r"emit_dtype must be a real floating"),
        ("should_skip_update_fn", True, r"should_skip_update_fn must be a function.*True"),
        ("average_extra_args", "value", r"average_extra_args must be a tuple.*'value'"),
        ("average_extra_args", (1,), r"average_extra_args must be a tuple.*\(1,\)"),
        ("average_extra_args", ("weight",), r"average_extra_args must be.*other than 'weight'"),
    ],
)
def test_options_are_checked_when_made(option, value, message):
    with pytest.raises(ValueError, match=message):
        accumulate(2, optax.sgd(0.1), **{option: value})


@pytest.mark.parametrize("name", ["accumulator_dtype", "emit_dtype"])
def test_float64_without_x64_is_refused_rather_than_truncated(name):
    with pytest.raises(ValueError, match=f"{name}=float64 needs jax_enable_x64"):
        accumulate(2, **{name: jnp.float64}).init(PARAMS)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"w": jnp.zeros((2, 3))}, r"missing \[\"\['b'\]\['c'\]\"\]"),
        ({**GRADIENTS, "x": jnp.zeros(1)}, r"unexpected \[\"\['x'\]\"\]"),
        ({"w": jnp.zeros((2, 3)), "b": {"c": None}}, r"missing \[\"\['b'\]\['c'\]\"\]"),
        (
            {"w": jnp.zeros((3, 2)), "b": {"c": jnp.zeros(3)}},
            r"\['w'\] has shape \(3, 2\).*\(2, 3\)",
        ),
        ({"w": jnp.zeros((2, 3), int), "b": {"c": jnp.zeros(3)}}, r"floating or complex.*\['w'\]"),
        ({"w": jnp.zeros((2, 3)) + 1j, "b": {"c": jnp.zeros(3)}}, r"wider.*\['w'\].*complex64"),
        ([jnp.zeros((2, 3)), [jnp.zeros(3)]], r"must have the tree of the params"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_must_be_those_of_the_params(gradients, message, jit):
    tx = accumulate(2, optax.sgd(0.1))
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError, match=message):
        update(gradients, tx.init(PARAMS), PARAMS)


def test_containers_that_differ_are_named():
    tx = accumulate(2)
    state = tx.init([jnp.zeros(2)])
    with pytest.raises(ValueError, match="the leaves are the same, the containers are not"):
        tx.update((jnp.zeros(2),), state)


def test_integer_params_are_named_in_init():
    with pytest.raises(ValueError, match=r"params\['step'\] has dtype int32"):
        accumulate(2).init({"step": jnp.zeros([], jnp.int32)})


def test_float64_gradients_of_float32_params_are_not_narrowed_silently():
    with jax.enable_x64(True):
        params = jnp.zeros(2, jnp.float32)
        tx = accumulate(2)
        with pytest.raises(ValueError, match="float64 and its accumulator float32"):
            tx.update(jnp.zeros(2, jnp.float64), tx.init(params))
        asked = accumulate(2, accumulator_dtype=jnp.float32)
        asked.update(jnp.zeros(2, jnp.float64), asked.init(params))


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"weight": jnp.ones(2)}, r"weight must be a real scalar.*shape \(2,\)"),
        ({"weight": "3"}, r"weight must be a real scalar, got '3'"),
        ({"weight": 1j}, r"weight must be a real scalar.*complex"),
        ({"flush": 1}, r"flush must be a bool scalar.*int32"),
        ({"flush": None}, r"flush must be a bool scalar, got None"),
        ({"flush": jnp.zeros(2, bool)}, r"flush must be a bool scalar.*\(2,\)"),
    ],
)
def test_extra_args_are_scalars(every_k, extra, message):
    tx = accumulate(every_k, optax.sgd(0.1))
    with pytest.raises(ValueError, match=message):
        tx.update(GRADIENTS, tx.init(PARAMS), PARAMS, **extra)


def test_a_missing_averaged_arg_is_named():
    tx = accumulate(2, optax.sgd(0.1), average_extra_args=("value",))
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"average_extra_args names 'value'.*got \['loss'\]"):
        tx.update(GRADIENTS, state, PARAMS, loss=1.0)
    with pytest.raises(ValueError, match=r"value must be a real scalar.*\(3,\)"):
        tx.update(GRADIENTS, state, PARAMS, value=jnp.ones(3))
    flush(tx, state, PARAMS)  # needs none


def test_a_state_made_for_other_averaged_args_is_refused():
    state = accumulate(2, optax.sgd(0.1)).init(PARAMS)
    tx = accumulate(2, optax.sgd(0.1), average_extra_args=("loss",))
    with pytest.raises(
        ValueError, match=r"average_extra_args must be that .*\['value'\].*got one for .*\['loss'\]"
    ):
        tx.update(GRADIENTS, state, PARAMS, loss=1.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"monitor": True}, {}),
        ({}, {"monitor": True}),
        ({"loss_scale": DynamicLossScale()}, {}),
        ({}, {"loss_scale": DynamicLossScale()}),
        ({"average_extra_args": ()}, {}),
        ({"every_k": 1}, {}),
    ],
)
def test_a_state_of_other_components_names_the_remedy_and_it_works(old, new):
    inner = optax.sgd(0.1, momentum=0.5)
    old_options = {name: value for name, value in old.items() if name != "every_k"}
    tx = accumulate(old.get("every_k", 2), inner, **old_options)
    _, state = laws.run(tx, PARAMS, [GRADIENTS] * 2)
    tx = accumulate(2, inner, **new)
    with pytest.raises(ValueError, match=r"new = tx.init\(params\).*new._replace\(gradient_step"):
        tx.update(GRADIENTS, state, PARAMS)
    carried = tx.init(PARAMS)._replace(
        gradient_step=state.gradient_step,
        num_skipped=state.num_skipped,
        inner_state=state.inner_state,
    )
    _, after = tx.update(GRADIENTS, carried, PARAMS)
    assert after.micro_step == 1
    laws.assert_bitwise(after.inner_state, state.inner_state)


@pytest.mark.parametrize("value", [1, jnp.ones(2, bool), None])
def test_should_skip_update_fn_must_give_a_bool_scalar(value):
    tx = accumulate(2, optax.sgd(0.1), should_skip_update_fn=lambda *_: (value, ()))
    with pytest.raises(ValueError, match=r"should_skip_update_fn's first value must be a bool"):
        tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


def test_should_skip_update_fn_must_give_a_pair():
    tx = accumulate(2, should_skip_update_fn=lambda *_: jnp.array(True))
    with pytest.raises(ValueError, match=r"must return a pair \(bool scalar, info\), got"):
        tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("transforms", [([optax.sgd(1.0)],), (optax.adam, accumulate(2))])
def test_chain_takes_transformations(transforms):
    with pytest.raises(ValueError, match="transforms must be optax gradient transformations"):
        chain(*transforms)


def test_an_every_k_of_one_that_may_reject_is_not_always_at_a_boundary():
    first = accumulate(1, should_skip_update_fn=optax.skip_not_finite)
    tx = optax.chain(first, optax.adam(0.1))
    with pytest.raises(ValueError, match="it holds state"):
        tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


def test_a_state_without_a_buffer_under_a_larger_k_names_the_remedy_and_it_works():
    one = accumulate(1, optax.adam(0.1))
    _, state = one.update(GRADIENTS, one.init(PARAMS), PARAMS)
    tx = accumulate(4, optax.adam(0.1))
    with pytest.raises(ValueError, match=r"every_k=1 has no buffer.*make a new state"):
        tx.update(GRADIENTS, state, PARAMS)
    carried = tx.init(PARAMS)._replace(
        gradient_step=state.gradient_step,
        num_skipped=state.num_skipped,
        inner_state=state.inner_state,
    )
    _, state = tx.update(GRADIENTS, carried, PARAMS)
    assert state.gradient_step == 1
    assert state.inner_state[0].count == 1


def test_inner_must_keep_its_state():
    grows = optax.GradientTransformation(lambda p: {}, lambda u, s, p=None: (u, {"seen": u}))
    tx = accumulate(2, grows)
    with pytest.raises(ValueError, match="inner must keep the tree of its state"):
        jax.jit(tx.update)(GRADIENTS, tx.init(PARAMS))
    turns = optax.GradientTransformation(
        lambda p: jnp.zeros([]), lambda u, s, p=None: (u, s + jnp.complex64(1j))
    )
    tx = accumulate(2, turns)
    with pytest.raises(ValueError, match="real leaves real; inner_state goes from float32"):
        jax.jit(tx.update)(GRADIENTS, tx.init(PARAMS))


def made_by_hyperparams(learning_rate):
    return accumulate(4, optax.sgd(learning_rate))


@pytest.mark.parametrize(
    "wrapped",
    [
        optax.chain(accumulate(4, optax.sgd(1.0))),
        optax.masked(accumulate(4, optax.sgd(1.0)), True),
        optax.partition({"all": accumulate(4, optax.sgd(1.0))}, lambda params: "all"),
        optax.named_chain(("window", accumulate(4, optax.sgd(1.0)))),
        optax.inject_hyperparams(made_by_hyperparams)(learning_rate=1.0),
        optax.apply_if_finite(accumulate(4, optax.sgd(1.0)), 3),
    ],
    ids=["chain", "masked", "partition", "named_chain", "inject_hyperparams", "apply_if_finite"],
)
def test_the_error_of_flush_names_the_call_that_closes_the_window_of_any_wrapper(wrapped):
    state = wrapped.init(PARAMS)
    for size in (1.0, 3.0):
        gradients = jax.tree.map(lambda g, size=size: size * g, GRADIENTS)
        _, state = wrapped.update(gradients, state, PARAMS)
    with pytest.raises(TypeError) as error:
        flush(wrapped, state, PARAMS)
    message = str(error.value)
    call = re.search(r"tx\.update\(.*?\)", message).group()
    zeros = re.search(r"zeros = (.*?\))", message).group(1)
    names = {"jax": jax, "jnp": jnp, "tx": wrapped, "opt_state": state, "params": PARAMS}
    updates, state = eval(call, {**names, "zeros": eval(zeros, names)})
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda p: jnp.full_like(p, -2.0), PARAMS))
    assert has_updated(state)


def test_the_error_of_flush_names_the_call_for_momentum_too():
    tx = accumulate_in_momentum(2, 1.0, 0.0)
    state = tx.init(PARAMS)
    _, state = tx.update(GRADIENTS, state, PARAMS, share=1.0)
    with pytest.raises(TypeError, match="accumulate_in_momentum takes share=0 in place of weight"):
        flush(tx, state, PARAMS)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, state = tx.update(zeros, state, PARAMS, share=0, flush=True)
    np.testing.assert_array_equal(updates["w"], -1)
    assert has_updated(state)


EQUINOX_MLP = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))  # its activations are leaves
MODEL_WITH_A_FUNCTION = {"w": jnp.ones(3), "activation": jnp.tanh}
MODELS = {"Equinox": EQUINOX_MLP, "a function": MODEL_WITH_A_FUNCTION}


def model_loss(model, x):
    return jnp.mean(model["activation"](x * model["w"]))


MODEL_USES = {
    "init": lambda model: accumulate(4, optax.sgd(1.0)).init(model),
    "init with every_k=1": lambda model: accumulate(1, optax.sgd(1.0)).init(model),
    "init of momentum": lambda model: accumulate_in_momentum(4, 1.0, 0.9).init(model),
    "flush": lambda model: flush(
        accumulate(4), accumulate(4).init(eqx.filter(model, eqx.is_array)), model
    ),
    "flush with every_k=1": lambda model: flush(
        accumulate(1), accumulate(1).init(eqx.filter(model, eqx.is_array)), model
    ),
    "a train step's init": lambda model: make_train_step(model_loss, accumulate(2)).init(model),
    "a train step": lambda model: make_train_step(model_loss, accumulate(2))(
        model, accumulate(2).init(eqx.filter(model, eqx.is_array)), jnp.ones((2, 3))
    ),
    "microbatch": lambda model: microbatch_value_and_grad(model_loss, 2)(model, jnp.ones((2, 3))),
    "contrastive": lambda model: contrastive_value_and_grad(
        lambda model, x: x * model["w"], lambda model, r: r.mean(), 2
    )(model, jnp.ones((2, 3))),
    "plan": lambda model: plan_microbatches(model_loss, model, jnp.ones((2, 3)), memory_budget=1e9),
    "assert_window_equivalence": lambda model: assert_window_equivalence(
        model_loss, model, jnp.ones((2, 3)), 2
    ),
}


@pytest.mark.parametrize("use", MODEL_USES.values(), ids=MODEL_USES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_with_functions_among_its_leaves_is_told_to_partition_it(model, use):
    with pytest.raises(ValueError, match=r"must hold arrays.*activation.* is <.*eqx\.partition\("):
        use(model)


def test_an_equinox_model_trains_as_the_error_says():
    params, static = eqx.partition(EQUINOX_MLP, eqx.is_inexact_array)
    x = jnp.ones((6, 3))

    def loss_fn(params, x):
        return jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)

    tx = accumulate(4, optax.sgd(0.1))
    state = tx.init(eqx.filter(EQUINOX_MLP, eqx.is_inexact_array))
    for part in (x[:4], x[4:]):
        _, state = tx.update(jax.grad(loss_fn)(params, part), state, params, weight=len(part))
    updates, _ = flush(tx, state, params)
    want = jax.tree.map(lambda g: -0.1 * g, jax.grad(loss_fn)(params, x))
    chex.assert_trees_all_close(updates, want, rtol=1e-5)


def test_has_updated_needs_an_accumulator():
    with pytest.raises(ValueError, match="must hold an AccumulateState"):
        has_updated(optax.adam(0.1).init(PARAMS))


GROUPS = {"w": "a", "b": {"c": "b"}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: accumulate(2, accumulate(3, optax.sgd(0.1))),
        lambda: accumulate(1, accumulate(3)),
        lambda: accumulate(3, accumulate(1)),
        lambda: chain(accumulate(2), accumulate(3), optax.sgd(0.1)),
        lambda: chain(accumulate(2, optax.sgd(0.1)), chain(optax.scale(2.0), accumulate(3))),
        lambda: accumulate(2, optax.chain(accumulate(3), optax.scale(-1.0))),
        lambda: accumulate(2, optax.masked(accumulate(3), True)),
        lambda: accumulate(2, optax.apply_if_finite(accumulate(3), 5)),
        lambda: accumulate(2, accumulate_in_momentum(3, 0.1, 0.9)),
        lambda: accumulate(
            2, optax.partition({"a": accumulate(2), "b": optax.sgd(0.1)}, GROUPS), monitor=True
        ),
        lambda: accumulate(2, accumulate(2, axis_name="data")),
    ],
)
def test_accumulators_must_not_nest_and_the_error_names_the_flat_form(make):
    with pytest.raises(ValueError, match=r"must not nest.*accumulate\(a \* b.*optax\.partition"):
        make().init(PARAMS)


def test_accumulators_side_by_side_do_not_nest():
    groups = {"a": accumulate(2, optax.sgd(0.1)), "b": accumulate(3, optax.sgd(0.1))}
    tx = optax.partition(groups, GROUPS)
    tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


def test_a_copied_or_rebuilt_transformation_still_chains_and_flushes():
    for rebuild in (copy.copy, copy.deepcopy, lambda tx: jax.tree.map(lambda x: x, tx)):
        tx = rebuild(chain(rebuild(accumulate(4)), optax.sgd(1.0)))
        tx = tx._replace(init=tx.init)
        _, state = tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)
        updates, _ = flush(tx, state, PARAMS)
        np.testing.assert_array_equal(updates["w"], -1)


@pytest.mark.parametrize("every_k", [1, 2])
def test_a_wrong_state_is_named(every_k):
    tx = accumulate(every_k, optax.sgd(0.1))
    state = tx.init(PARAMS)
    multi = optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS)
    for call in (
        lambda: tx.update(GRADIENTS, PARAMS, state),
        lambda: tx.update(GRADIENTS, multi, PARAMS),
        lambda: flush(tx, PARAMS, state),
    ):
        with pytest.raises(ValueError, match=r"opt_state must hold the AccumulateState.*got a "):
            call()
    with pytest.raises(ValueError, match="params must not be None"):
        flush(tx, state, None)


@pytest.mark.parametrize("extra", [{"weight": 3.0}, {"flush": True}])
def test_flush_takes_no_weight(extra):
    tx = accumulate(2, optax.sgd(0.1))
    with pytest.raises(ValueError, match=rf"takes no {next(iter(extra))}; got"):
        flush(tx, tx.init(PARAMS), PARAMS, **extra)


def test_arguments_of_multisteps_are_no_arguments_here():
    with pytest.raises(TypeError, match="every_k"):
        accumulate(optax.adam(0.1), every_k=4)
    with pytest.raises(TypeError, match="every_k_schedule"):
        accumulate(optax.adam(0.1), every_k_schedule=4)
