"""What may stand after an accumulator in a plain `optax.chain`, and what raises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_accum import accumulate, chain
from optax_accum._core import internals

PARAMS = {"w": jnp.zeros((2, 3)), "b": {"c": jnp.zeros(3)}}
GRADIENTS = jax.tree.map(jnp.ones_like, PARAMS)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "follower",
    [
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.sgd(optax.linear_schedule(0.1, 0, 4)),
        optax.add_decayed_weights(0.1),
        optax.masked(optax.add_decayed_weights(0.1), {"w": True, "b": False}),
        optax.keep_params_nonnegative(),
        accumulate(2),
    ],
)
@pytest.mark.parametrize("inner", [(), (optax.scale(-1.0),)])
def test_wrong_followers_in_a_plain_chain_raise_and_name_both_fixes(follower, inner, jit):
    first = accumulate(2, *inner)
    follower_named = ("second", follower)
    for tx in (
        optax.chain(first, follower),
        optax.chain(optax.clip(1.0), first, optax.scale(2.0), follower),
        optax.chain(optax.chain(first), follower),
        optax.chain(optax.masked(first, True), follower),
        optax.named_chain(("first", first), follower_named),
    ):
        update = jax.jit(tx.update) if jit else tx.update
        state = tx.init(PARAMS)
        with pytest.raises(
            ValueError, match=r"(?s)optax_accum.chain\(...\).*accumulate\(k, inner\)"
        ):
            update(GRADIENTS, state, PARAMS)


@pytest.mark.parametrize("jit", [False, True])
def test_right_followers_in_a_plain_chain_work_exactly(jit):
    followers = (optax.clip(0.5), optax.clip_by_global_norm(1.0), optax.sgd(0.5))
    tx = optax.chain(accumulate(2), *followers)
    update = jax.jit(tx.update) if jit else tx.update
    updates, state = update(GRADIENTS, tx.init(PARAMS), PARAMS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    updates, _ = update(GRADIENTS, state, PARAMS)
    bare = optax.chain(*followers)
    want, _ = bare.update(GRADIENTS, bare.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["w"], want["w"])


def test_every_k_of_one_may_be_followed_by_anything():
    tx = optax.chain(accumulate(1), optax.adam(0.1))
    tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


def test_what_calls_an_accumulator_from_user_code_is_not_searched():
    def meta_update(updates, state, params=None):
        tx = accumulate(2, optax.sgd(1.0))  # somebody's own accumulator, in a loss of theirs
        tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)
        return updates, state

    user = optax.GradientTransformation(optax.init_empty_state, meta_update)
    tx = optax.chain(user, optax.adam(0.1))
    tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("jit", [False, True])
def test_followers_of_an_accumulator_behind_a_wrapper_are_seen(jit):
    tx = chain(optax.masked(accumulate(2), True), optax.adam(0.1))
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError, match="it holds state"):
        update(GRADIENTS, tx.init(PARAMS), PARAMS)


def test_followers_of_the_leaves_that_the_accumulator_leaves_out_belong_in_a_partition():
    mask, rest = {"w": True, "b": {"c": False}}, {"w": False, "b": {"c": True}}
    first, second = accumulate(2, optax.sgd(0.1)), optax.adam(0.1)
    tx = optax.chain(optax.masked(first, mask), optax.masked(second, rest))
    with pytest.raises(ValueError, match="it holds state"):
        tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)
    tx = optax.partition({True: first, False: second}, mask)
    tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


def test_the_check_of_followers_fails_open(monkeypatch):
    tx = optax.chain(accumulate(2), optax.adam(0.1))
    monkeypatch.setattr(internals, "_CHAIN", None)  # an optax whose chain reads otherwise
    tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)
    monkeypatch.undo()

    def needs_its_shapes(updates, state, params=None):
        if jnp.shape(updates["w"]) != (2, 3):
            raise RuntimeError
        return updates, state

    picky = optax.GradientTransformation(optax.init_empty_state, needs_its_shapes)
    tx = optax.chain(accumulate(2), picky)
    tx.update(GRADIENTS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("jit", [False, True])
def test_followers_with_traced_numbers_are_told_apart_too(jit):
    def update(number, make):
        tx = optax.chain(accumulate(2), make(number))
        return tx.update(GRADIENTS, tx.init(PARAMS), PARAMS, value=number)[0]

    def clip_above(number):
        return optax.stateless(
            lambda updates, params: jax.tree.map(
                lambda u, p: jnp.minimum(p + u, number) - p, updates, params
            )
        )

    def large(params):
        return jax.tree.map(lambda p: p.size > 1, params)

    def decay(number):
        return optax.add_decayed_weights(number, mask=large)

    update = jax.jit(update, static_argnums=1) if jit else update
    number = jnp.float32(0.5)
    update(number, optax.scale)
    for wrong in (optax.add_decayed_weights, decay, clip_above):
        with pytest.raises(ValueError, match="does not map zero updates to zero"):
            update(number, wrong)


def test_right_followers_pass_under_a_transfer_guard():
    tx = optax.chain(accumulate(2), optax.scale(-1.0))
    state = tx.init(PARAMS)
    with jax.transfer_guard("disallow"):
        jax.jit(tx.update)(GRADIENTS, state, PARAMS)
