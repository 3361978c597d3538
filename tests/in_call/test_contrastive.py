"""A contrastive loss over micro-batches: the gradient of the whole batch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from optax_accum import contrastive_value_and_grad, microbatch_value_and_grad, varying
from optax_accum.testing import collectives

RNG = np.random.default_rng(0)
X = {name: jnp.asarray(RNG.normal(size=(24, 6)), jnp.float32) for name in ("image", "text")}


def params_of(width=8):
    def draw(*shape):
        return jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32)

    towers = {name: {"in": draw(6, width), "out": draw(width, 4)} for name in X}
    return {**towers, "temperature": jnp.float32(0.5)}


PARAMS = params_of()


def encode(params, batch, key=None):
    """Two towers, of unit vectors, with dropout where there is a key."""

    def tower(weights, x, key):
        hidden = jnp.tanh(x @ weights["in"])
        if key is not None:
            hidden *= jax.random.bernoulli(key, 0.5, hidden.shape)
        out = hidden @ weights["out"]
        return out / jnp.linalg.norm(out, axis=-1, keepdims=True)

    return {name: tower(params[name], x, key) for name, x in batch.items()}


def info_nce(params, representations):
    logits = representations["image"] @ representations["text"].T / params["temperature"]

    def each(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))

    return (each(logits) + each(logits.T)).mean() / 2


def whole(params, batch):
    return info_nce(params, encode(params, batch))


@pytest.mark.parametrize("num", [1, 2, 5, 8, 24])
def test_it_is_the_gradient_of_the_big_batch_with_its_temperature(num):
    got = jax.jit(contrastive_value_and_grad(encode, info_nce, num))(PARAMS, X)
    want = jax.value_and_grad(whole)(PARAMS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)


def test_micro_batches_on_their_own_are_another_loss():
    loss, _ = microbatch_value_and_grad(whole, 8)(PARAMS, X)
    assert abs(loss - whole(PARAMS, X)) > 0.5


@pytest.mark.parametrize("num", [1, 2, 8])
def test_dropout_drops_the_same_in_both_passes(num):
    key = jax.random.key(0)
    run = contrastive_value_and_grad(encode, info_nce, num, rng_argnums=2)
    got = jax.jit(run)(PARAMS, X, key)

    def big(params):
        keys = jax.random.split(key, num) if num > 1 else [key]
        parts = [
            encode(params, jax.tree.map(lambda x, i=i: x[i::num], X), keys[i]) for i in range(num)
        ]
        # Row j of the batch is row j // num of part j % num.
        order = [(j % num, j // num) for j in range(24)]
        rows = {name: jnp.stack([parts[i][name][row] for i, row in order]) for name in X}
        return info_nce(params, rows)

    chex.assert_trees_all_close(got, jax.value_and_grad(big)(PARAMS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num", [1, 3])
def test_over_eight_devices_it_is_still_the_big_batch(num):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def gathered(params, representations):
        def everywhere(x):
            return lax.all_gather(x, "data", tiled=True)

        return lax.pmean(info_nce(params, jax.tree.map(everywhere, representations)), "data")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def run(params, batch):
        fn = contrastive_value_and_grad(encode, gathered, num)
        loss, gradients = fn(varying(params, "data"), batch)
        return loss, lax.psum(gradients, "data")

    want = jax.value_and_grad(whole)(PARAMS, X)
    chex.assert_trees_all_close(run(PARAMS, X), want, rtol=1e-5, atol=1e-6)
    assert collectives(run.lower(PARAMS, X).compile()).in_loops.count == 0


@pytest.mark.parametrize("num", [1, 2, 5])
def test_integers_and_complex_numbers_may_be_among_the_representations(num):
    batch = {**X, "label": jnp.arange(24) % 3}

    def encode_and_pass_on(params, batch):
        out = encode(params, {name: batch[name] for name in X})
        return {"z": lax.complex(out["image"], out["text"]), "label": batch["label"]}

    def supervised(params, r):
        same = r["label"][:, None] == r["label"][None]
        return jnp.where(same, jnp.abs(r["z"] @ r["z"].conj().T), 0).mean()

    got = jax.jit(contrastive_value_and_grad(encode_and_pass_on, supervised, num))(PARAMS, batch)

    def composed(params, batch):
        return supervised(params, encode_and_pass_on(params, batch))

    chex.assert_trees_all_close(
        got, jax.value_and_grad(composed)(PARAMS, batch), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("num", [1, 5])
def test_it_runs_where_dtypes_are_not_promoted(num):
    params, batch = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, X))
    run = contrastive_value_and_grad(
        lambda params, x: jnp.tanh(x["text"] @ params["text"]["in"]),
        lambda params, r: (r @ r.T).mean() * params["temperature"],
        num,
    )
    want = jax.jit(run)(params, batch)
    with jax.numpy_dtype_promotion("strict"):
        chex.assert_trees_all_equal(jax.jit(run)(params, batch), want)


@pytest.mark.parametrize("num", [1, 4])
def test_keywords_go_to_the_encoder(num):
    def encode_where(params, batch, key, *, is_train, scale):
        out = encode(params, batch, key if is_train else None)
        return jax.tree.map(lambda r: r * scale.sum(), out)

    run = contrastive_value_and_grad(encode_where, info_nce, num, rng_argnums=2)
    keywords = {"batch": X, "key": jax.random.key(0), "scale": jnp.ones(2)}
    got = jax.jit(functools.partial(run, is_train=False))(PARAMS, **keywords)

    def big(params):
        return info_nce(params, encode_where(params, is_train=False, **keywords))

    chex.assert_trees_all_close(got, jax.value_and_grad(big)(PARAMS), rtol=1e-5, atol=1e-6)
    run(PARAMS, is_train=True, **keywords)


def test_memory_is_that_of_a_micro_batch():
    params = params_of(width=4096)
    batch = jax.tree.map(lambda x: jnp.tile(x, (32, 1)), X)

    def temp(f):
        return jax.jit(f).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    big = temp(jax.value_and_grad(whole))
    assert temp(contrastive_value_and_grad(encode, info_nce, 16)) < big / 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: contrastive_value_and_grad(3, info_nce, 2), "encode_fn must be a function, got 3"),
        (lambda: contrastive_value_and_grad(encode, None, 2), "loss_fn must be a function, got No"),
        (lambda: contrastive_value_and_grad(encode, info_nce, 0), "num_microbatches .* got 0"),
        (
            lambda: contrastive_value_and_grad(encode, info_nce, 25)(PARAMS, X),
            "num_microbatches must be at most the number of examples, 24; got 25",
        ),
        (
            lambda: contrastive_value_and_grad(encode, info_nce, 2, rng_argnums=1),
            "rng_argnums must name other arguments than batch_argnums, got 1 in both",
        ),
        (
            lambda: contrastive_value_and_grad(encode, info_nce, 2, rng_argnums=2)(PARAMS, X),
            "argument 2 must be passed, since rng_argnums names it; got 2 arguments by position",
        ),
        (
            lambda: contrastive_value_and_grad(encode, info_nce, 2)(PARAMS, X, jax.random.key(0)),
            r"a key for each of rng_argnums, \(\); got 1 arguments after batch",
        ),
        (
            lambda: contrastive_value_and_grad(encode, info_nce, 2, rng_argnums=5),
            r"rng_argnums must be 2, or 2 and 3 and so on: .* got \(5,\)",
        ),
        (
            lambda: contrastive_value_and_grad(lambda p, x: p["temperature"], info_nce, 2)(
                PARAMS, X
            ),
            r"encode_fn must return arrays with a row for each example; .*of 12.*shape \(\)",
        ),
        (
            lambda: contrastive_value_and_grad(lambda p, x: {}, info_nce, 2)(PARAMS, X),
            "encode_fn must return arrays with a row for each example; got the empty {}",
        ),
        (
            lambda: contrastive_value_and_grad(lambda p, x, y: x, info_nce, 2)(
                PARAMS, X, y=X["text"]
            ),
            "y, passed by keyword, has the 24 rows of the batch.* Put it into the batch",
        ),
        (
            lambda: contrastive_value_and_grad(lambda p, x, rngs: x, info_nce, 2)(
                PARAMS, X, rngs=jax.random.key(0)
            ),
            "rngs, passed by keyword, is a random key without a role",
        ),
        (
            lambda: contrastive_value_and_grad(encode, info_nce, 1)(
                PARAMS, jax.tree.map(lambda x: x[:0], X)
            ),
            "batch must hold at least one example",
        ),
        (
            lambda: contrastive_value_and_grad(encode, lambda p, r: r["text"], 2)(PARAMS, X),
            r"loss_fn's loss must be a real floating scalar, got float32\[24, 4\]",
        ),
    ],
)
def test_a_wrong_argument_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
