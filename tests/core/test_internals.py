"""Reading the private parts of jax and optax harms nobody, and finds what it reads."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from optax_accum import accumulate, chain, make_train_step
from optax_accum._core import followers, internals

PARAMS = {"a": jnp.ones(2), "b": jnp.ones(3)}
LABELS = {"a": "first", "b": "second"}
ADAM = optax.adam(0.1)
TRANSFORMS = {
    "chain": chain(optax.clip(1.0), accumulate(2), ADAM),
    "optax.chain": optax.chain(accumulate(2, ADAM), optax.scale(0.5)),
    "optax.chain in optax.chain": optax.chain(optax.chain(accumulate(2, ADAM)), optax.scale(0.5)),
    "named_chain": optax.named_chain(("window", accumulate(2, ADAM)), ("half", optax.scale(0.5))),
    "partition": optax.partition({"first": accumulate(2, ADAM), "second": ADAM}, LABELS),
    "masked": optax.masked(accumulate(2, ADAM), LABELS),
    "apply_if_finite": optax.apply_if_finite(accumulate(2, ADAM), 3),
    "inject_hyperparams": accumulate(2, optax.inject_hyperparams(optax.adam)(0.1)),
}


OPTAX_CHANGED = f"optax {optax.__version__} changed its chains: see optax_accum/_core/internals.py"
JAX_CHANGED = f"jax {jax.__version__} changed its types: see optax_accum/_core/internals.py"


@pytest.mark.parametrize("make", [optax.chain, lambda *txs: optax.named_chain(*enumerate(txs))])
def test_a_running_chain_of_optax_is_found(make, monkeypatch):
    found = []

    def look(updates, state, params=None):
        found.extend(internals.running_chains())
        return updates, state

    # Let the frame count as one that may stand between a chain and its accumulator.
    monkeypatch.setattr(internals, "_FOLDERS", (*internals._FOLDERS, __file__))
    looking = optax.GradientTransformation(optax.init_empty_state, look)
    tx = make(optax.scale(2.0), looking, ADAM)
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert len(found) == 1, OPTAX_CHANGED
    assert found[0].num_done == 2, OPTAX_CHANGED
    assert len(found[0].steps) == 3, OPTAX_CHANGED
    assert found[0].dtype_source is PARAMS, OPTAX_CHANGED


def test_types_tell_over_which_axes_an_array_varies_and_is_sharded():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    found = []

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    def look(own, same):
        found.extend(map(internals.varying_over, (own, same)))
        return own

    look(jnp.ones(8), jnp.ones(8))
    assert found == [frozenset({"data"}), frozenset()], JAX_CHANGED
    explicit = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(explicit, P("data")))
    assert internals.spec_of(x) == ("data",), JAX_CHANGED


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_array_outlives_its_trace(name):
    tx = TRANSFORMS[name]
    if name == "masked":
        tx = optax.masked(accumulate(2, ADAM), {"a": True, "b": False})
    state = tx.init(PARAMS)
    with jax.checking_leaks():
        update = jax.jit(optax.with_extra_args_support(tx).update)
        for _ in range(2):
            updates, state = update(PARAMS, state, PARAMS)
    assert jnp.all(updates["a"] != 0)


@pytest.mark.parametrize("k", [1, 2])
def test_no_array_of_a_train_step_outlives_its_trace(k):
    def loss_fn(params, x):
        return jnp.mean(params["a"] * x) + jnp.sum(params["b"])

    step = make_train_step(loss_fn, chain(optax.clip(1.0), accumulate(k), ADAM))
    params = jax.tree.map(jnp.copy, PARAMS)
    with jax.checking_leaks():
        state = step.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, jnp.ones((4, 2)))
        step.flush(params, state)


def test_no_array_outlives_a_refusal():
    tx = optax.chain(accumulate(2), ADAM)
    state = tx.init(PARAMS)
    with jax.checking_leaks(), pytest.raises(ValueError, match="holds state"):
        jax.jit(tx.update)(PARAMS, state, PARAMS)


def test_a_chain_with_unknown_variables_passes_unchecked(monkeypatch):
    accumulator, follower = accumulate(2), ADAM

    def other_update(gradients, states, params=None):
        gradients, first = accumulator.update(gradients, states[0], params)
        gradients, second = follower.update(gradients, states[1], params)
        return gradients, (first, second)

    monkeypatch.setattr(internals, "_CHAIN", other_update.__code__)
    # Let the frame count as one that may stand between a chain and its accumulator.
    monkeypatch.setattr(internals, "_FOLDERS", (*internals._FOLDERS, __file__))
    other_update(PARAMS, (accumulator.init(PARAMS), follower.init(PARAMS)), PARAMS)


class Proxy(dict):
    """The variables of a frame as Python 3.13 gives them: the keys are a list."""

    def keys(self):
        return list(super().keys())


def test_the_variables_of_a_frame_may_be_a_proxy_with_a_list_of_keys(monkeypatch):
    tx = accumulate(2)
    state = (tx.init(PARAMS), ADAM.init(PARAMS))
    variables = Proxy(
        update_fns=(tx.update, ADAM.update),
        updates=PARAMS,
        state=state,
        params=PARAMS,
        extra_args={},
        new_state=[],
    )
    file = optax.__file__
    code = compile("", file, "exec")
    monkeypatch.setattr(internals, "_CHAIN", code)
    chain_frame = types.SimpleNamespace(f_code=code, f_locals=variables, f_back=None)
    fake = types.SimpleNamespace(currentframe=lambda: chain_frame)
    monkeypatch.setattr(internals, "inspect", fake)
    with pytest.raises(ValueError, match=r"transformation 1.*holds state"):
        followers.check_followers()


class Untouchable:
    """A frame of which nothing but the code may be read."""

    f_code = compile("", optax.__file__, "exec")
    f_back = None

    @property
    def f_locals(self):
        raise AssertionError("the variables of a frame that is no chain were read")

    f_globals = f_builtins = f_locals


def test_of_other_frames_only_the_code_is_read(monkeypatch):
    fake = types.SimpleNamespace(currentframe=Untouchable)
    monkeypatch.setattr(internals, "inspect", fake)
    followers.check_followers()
