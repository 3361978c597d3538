"""A window inside one call: the big batch's loss, gradient and aux, from micro-batches."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_accum import (
    accumulate,
    contrastive_value_and_grad,
    microbatch_value_and_grad,
    varying,
)
from optax_accum.testing import collectives

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(24, 4)), jnp.float32)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32), "b": jnp.ones(3)}


def losses(params, x):
    return (jnp.tanh(x @ params["w"] + params["b"]) ** 2).mean(-1)


def loss_fn(params, x):
    return losses(params, x).mean()


def assert_close(got, want, rtol=2e-5):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=1e-6)


@given(
    size=st.integers(1, 24), num=st.integers(1, 24), dtype=st.sampled_from(["float32", "bfloat16"])
)
def test_it_is_the_big_batch_however_it_divides(size, num, dtype):
    num = min(num, size)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    got = microbatch_value_and_grad(loss_fn, num)(params, X[:size])
    want = jax.value_and_grad(loss_fn)(params, X[:size])
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    chex.assert_trees_all_close(got, want, rtol=tolerance, atol=tolerance / 10)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)


@given(seed=st.integers(0, 2**32), num=st.sampled_from([2, 4, 8]), size=st.integers(8, 16))
def test_sums_of_integers_are_exact(seed, num, size):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-8, 9, (size, 5)), jnp.float32)

    def linear(w, x):
        return jnp.sum(x @ w)

    run = microbatch_value_and_grad(linear, num, normalize="ratio", weight_fn=lambda x: 1)
    value, gradient = run(jnp.ones(5), x)
    np.testing.assert_array_equal(value * num, x.sum())
    np.testing.assert_array_equal(gradient * num, x.sum(0))


@pytest.mark.parametrize("num", [1, 2, 5, 24])
@pytest.mark.parametrize("normalize", ["mean", "sum", "ratio"])
def test_tokens_weigh_under_each_normalisation(num, normalize):
    mask = jnp.asarray(RNG.random(24) < 0.4, jnp.float32).at[0].set(1)

    def tokens(batch):
        return batch["mask"].sum()

    def masked(params, batch):
        total = (losses(params, batch["x"]) * batch["mask"]).sum()
        return total if normalize == "ratio" else total / jnp.maximum(batch["mask"].sum(), 1)

    batch = {"x": X, "mask": mask}
    run = microbatch_value_and_grad(masked, num, normalize=normalize, weight_fn=tokens)
    loss, gradients = jax.jit(run)(PARAMS, batch)
    want = jax.value_and_grad(masked)(PARAMS, batch)
    factor = {"mean": 1, "sum": mask.sum(), "ratio": 1 / mask.sum()}[normalize]
    assert_close((loss, gradients), jax.tree.map(lambda x: x * factor, want))


def test_a_micro_batch_without_weight_adds_nothing_even_if_it_is_nan():
    x = X.at[1::4].set(jnp.nan)  # the second of four micro-batches
    keep = np.arange(24) % 4 != 1

    def weight(x):
        return jnp.where(jnp.isnan(x).any(), 0, len(x))

    got = microbatch_value_and_grad(loss_fn, 4, weight_fn=weight)(PARAMS, x)
    assert_close(got, jax.value_and_grad(loss_fn)(PARAMS, X[keep]))


def test_a_micro_batch_that_does_not_count_leaves_the_carry_as_it_was():
    def counting(params, x, count):
        return loss_fn(params, x), count + len(x)

    def weight_fn(x):
        return jnp.where(jnp.isin(jnp.arange(4), x[0, 0]).any(), 0, len(x))

    x = X.at[:, 0].set(jnp.arange(24.0) % 12)  # micro-batch i has i, i + 6 and so on
    run = microbatch_value_and_grad(counting, 6, carry_argnum=2, weight_fn=weight_fn)
    (_, count), _ = run(PARAMS, x, 0)
    assert count == 2 * 4  # of six micro-batches of four, those that begin with 4 and 5


def test_where_no_micro_batch_counts_loss_and_gradient_are_zero():
    run = microbatch_value_and_grad(loss_fn, 4, weight_fn=lambda x: 0)
    loss, gradient = run(PARAMS, X.at[0].set(jnp.nan))
    assert loss == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


def test_the_dtype_of_the_sums_is_the_one_asked_for():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    for asked, want in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        run = microbatch_value_and_grad(loss_fn, 4, accumulator_dtype=asked)
        (loop,) = [e for e in jax.make_jaxpr(run)(params, X).eqns if e.primitive.name == "scan"]
        sums = [v.aval.dtype for v in loop.outvars if v.aval.shape == (4, 3)]
        assert sums == [want]


@pytest.mark.parametrize("num", [1, 3, 5])
def test_aux_scalars_are_means_and_rows_keep_the_order_of_the_batch(num):
    def with_aux(params, x):
        aux = {"rows": x.sum(1), "matrix": x, "mean": x.mean(), "size": len(x), "none": None}
        return loss_fn(params, x), aux

    run = microbatch_value_and_grad(with_aux, num, has_aux=True)
    (loss, aux), _ = jax.jit(run)(PARAMS, X)
    assert_close((aux["rows"], aux["matrix"], aux["mean"]), (X.sum(1), X, X.mean()), rtol=1e-4)
    chex.assert_trees_all_equal(aux["size"], jnp.int32(24))
    assert_close(loss, loss_fn(PARAMS, X))
    assert aux["none"] is None


def test_integers_in_aux_are_counts_and_bools_are_means_whatever_the_number_of_micro_batches():
    def with_counts(params, x):
        positive = (x[:, 0] > 0).sum()
        aux = {
            "positive": positive,
            "small": positive.astype(jnp.uint8),
            "beyond float32": positive * 2**26 + 1,  # a float32 would lose the 1
            "all finite": jnp.isfinite(x).all(),
        }
        return loss_fn(params, x), aux

    positive = int((X[:, 0] > 0).sum())
    for num in (1, 3, 5):
        run = jax.jit(microbatch_value_and_grad(with_counts, num, has_aux=True))
        (_, aux), _ = run(PARAMS, X)
        want = {
            "positive": jnp.int32(positive),
            "small": jnp.uint8(positive),
            "beyond float32": jnp.int32(positive * 2**26 + num),
            "all finite": jnp.float32(1),
        }
        chex.assert_trees_all_equal_dtypes(aux, want)
        chex.assert_trees_all_close(aux, want, rtol=1e-6)
        assert aux["beyond float32"] == want["beyond float32"]
        assert not any(x.weak_type for x in jax.tree.leaves(aux))


@pytest.mark.parametrize("normalize", ["mean", "sum", "ratio"])
def test_a_count_is_summed_over_the_micro_batches_that_count(normalize):
    def with_count(params, x):
        return loss_fn(params, x), len(x)

    def weight_fn(x):
        return jnp.where(x[0, 0] == 0, 0, len(x))

    x = X.at[1::5].set(0)  # the second of five: 5 examples of 24
    options = {"weight_fn": weight_fn, "normalize": normalize, "has_aux": True}
    (_, count), _ = microbatch_value_and_grad(with_count, 5, **options)(PARAMS, x)
    assert count == 24 - 5


def test_aux_may_be_complex_and_empty_and_wider_than_the_parameters():
    def with_aux(params, x):
        return loss_fn(params, x), {"z": x.mean() * (1 + 2j), "empty": x[:, :0]}

    for num in (1, 4, 5):
        (_, aux), _ = microbatch_value_and_grad(with_aux, num, has_aux=True)(PARAMS, X)
        assert_close(aux, {"z": X.mean() * (1 + 2j), "empty": X[:, :0]})
    with jax.enable_x64(True):
        x = jnp.asarray(RNG.normal(size=(25, 4)))
        loss, _ = microbatch_value_and_grad(loss_fn, 5)(PARAMS, x)
        chex.assert_type(loss, jnp.float64)
        np.testing.assert_allclose(loss, loss_fn(PARAMS, x), rtol=1e-13)


def test_each_micro_batch_has_a_key_of_its_own():
    def noisy(params, x, key):
        return loss_fn(params, x), jnp.tile(jax.random.key_data(key), (len(x), 1))

    run = microbatch_value_and_grad(noisy, 6, has_aux=True, rng_argnums=2)
    (_, keys), _ = run(PARAMS, X, jax.random.key(0))
    assert len(np.unique(keys, axis=0)) == 6


@pytest.mark.parametrize("has_aux", [False, True])
def test_the_carry_goes_through_in_order(has_aux):
    def chained(params, carry, x):
        carry = {"n": carry["n"] + 1, "mean": 0.5 * carry["mean"] + x.mean(0)}
        return loss_fn(params, x), (carry, x.mean()) if has_aux else carry

    options = {"batch_argnums": 2, "carry_argnum": 1, "has_aux": has_aux}
    start = {"n": jnp.int32(0), "mean": jnp.zeros(4)}
    (_, rest), _ = microbatch_value_and_grad(chained, 4, **options)(PARAMS, start, X)
    carry = rest[0] if has_aux else rest
    want = start["mean"]
    for i in range(4):
        want = 0.5 * want + X[i::4].mean(0)
    assert_close(carry, {"n": jnp.int32(4), "mean": want})


def test_several_batch_arguments_and_argnums():
    def two(w, x, v, y):
        return jnp.mean((x @ w - y * v) ** 2)

    args = PARAMS["w"], X, jnp.float32(2), X[:, :3]
    options = {"argnums": (0, 2), "batch_argnums": (1, 3)}
    got = microbatch_value_and_grad(two, 5, **options)(*args)
    assert_close(got, jax.value_and_grad(two, (0, 2))(*args))


@pytest.mark.parametrize("num", [1, 5])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.bfloat16, {}),
        (jnp.bfloat16, {"normalize": "ratio", "weight_fn": lambda x: (x[:, 0] > 0).sum()}),
        (jnp.float32, {"accumulator_dtype": jnp.bfloat16}),
    ],
)
def test_it_runs_where_dtypes_are_not_promoted(dtype, num, options):
    params, x = jax.tree.map(lambda a: a.astype(dtype), (PARAMS, X))

    def loss(params, x, carry, key):
        x = x + jax.random.normal(key, x.shape, x.dtype)
        aux = {"count": (x > 0).sum(), "mean": x.mean(), "flag": x[0, 0] > 0, "rows": x}
        return loss_fn(params, x), (carry + x.mean(0), aux)

    run = microbatch_value_and_grad(
        loss, num, has_aux=True, carry_argnum=2, rng_argnums=3, **options
    )
    args = params, x, jnp.zeros(4, dtype), jax.random.key(0)
    want = jax.jit(run)(*args)
    with jax.numpy_dtype_promotion("strict"):
        chex.assert_trees_all_equal(jax.jit(run)(*args), want)


# Arguments by keyword.


def keyword_loss(params, x, y=None, *, table=None, is_train=False, **more):
    assert isinstance(is_train, bool)  # as it was passed, no tracer
    loss = losses(params, x)
    loss = loss if y is None else loss * y
    loss = loss if table is None else loss * table.sum()
    for factor in more.values():
        loss = loss * factor
    return loss.mean() * (2 if is_train else 1)


def keyword_only_loss(params, *, x, y):
    return (losses(params, x) * y).mean()


Y = X[:, 1]


@pytest.mark.parametrize(
    ("loss", "options", "args", "keywords"),
    [
        (keyword_loss, {}, (PARAMS,), {"x": X, "is_train": True}),
        (keyword_loss, {}, (), {"x": X, "params": PARAMS}),
        (keyword_loss, {}, (PARAMS, X), {"table": jnp.ones(5)}),
        (keyword_loss, {"batch_argnums": (1, 2)}, (PARAMS,), {"y": Y, "x": X}),
        (keyword_loss, {"batch_argnames": "y"}, (PARAMS, X), {"y": Y}),
        (keyword_loss, {"batch_argnames": ("x", "y")}, (PARAMS, X, Y), {}),
        (keyword_loss, {"batch_argnames": "z"}, (PARAMS, X), {"z": Y, "table": jnp.ones(24)}),
        (keyword_loss, {"batch_argnames": ()}, (PARAMS, X), {"table": jnp.ones(24)}),
        (keyword_only_loss, {"batch_argnames": ["x", "y"]}, (PARAMS,), {"x": X, "y": Y}),
        (functools.partial(keyword_loss, is_train=True), {}, (PARAMS,), {"x": X}),
    ],
)
@pytest.mark.parametrize("num", [1, 5])
def test_keywords_work_as_in_a_call_of_the_loss(loss, options, args, keywords, num):
    got = microbatch_value_and_grad(loss, num, **options)(*args, **keywords)
    params, others = keywords.get("params", PARAMS), {**keywords}
    others.pop("params", None)
    assert_close(got, jax.value_and_grad(loss)(params, *args[1:], **others))


def test_keywords_may_be_static_in_jit_and_follow_the_signature_of_the_loss():
    run = microbatch_value_and_grad(keyword_loss, 4, batch_argnames="y")
    got = jax.jit(run, static_argnames="is_train")(PARAMS, x=X, y=Y, is_train=True)
    assert_close(got, jax.value_and_grad(keyword_loss)(PARAMS, X, Y, is_train=True))


def test_keys_carry_and_weights_by_keyword_have_the_numbers_of_their_parameters():
    def loss(params, x, key, carry, y):
        assert key.shape == ()
        return (losses(params, x) * y).mean(), carry + jax.random.uniform(key)

    options = {"rng_argnums": 2, "carry_argnum": 3, "batch_argnums": (1, 4)}
    run = microbatch_value_and_grad(loss, 3, weight_fn=lambda x, y: y.sum() ** 2, **options)
    by_position = run(PARAMS, X, jax.random.key(0), jnp.zeros([]), Y)
    by_keyword = run(PARAMS, y=Y, carry=jnp.zeros([]), key=jax.random.key(0), x=X)
    chex.assert_trees_all_equal(by_keyword, by_position)


@pytest.mark.parametrize(
    ("loss", "options", "keywords", "message"),
    [
        (
            keyword_loss,
            {},
            {"x": X, "y": Y},
            r"y, passed by keyword, has the 24 rows of the batch.*batch_argnames='y' if it is, and"
            r" batch_argnames=\(\) if",
        ),
        (
            keyword_loss,
            {},
            {"x": X, "z": {"a": X}},
            r"z\['a'\], passed by keyword, has the 24 rows",
        ),
        (
            keyword_only_loss,
            {},
            {"x": X, "y": Y},
            r"argument 1 must be passed.*\['x', 'y'\]\. Name what has no number.*batch_argnames",
        ),
        (
            keyword_loss,
            {"batch_argnames": "w"},
            {"x": X},
            r"batch_argnames must name arguments that the call passes, \['params', 'x'\]; got 'w'",
        ),
        (
            keyword_loss,
            {"batch_argnames": "params"},
            {"x": X},
            "batch_argnames must name arguments without another role; 'params' has one",
        ),
        (keyword_loss, {"batch_argnames": 1}, {"x": X}, "batch_argnames must be the name .*got 1"),
        (
            keyword_loss,
            {"batch_argnames": ()},
            {"x": X, "rngs": {"dropout": jax.random.key(0)}},
            r"rngs\['dropout'\], passed by keyword, is a random key without a role.*rng_argnums",
        ),
        (
            keyword_loss,
            {},
            {"x": X, "key": jax.random.PRNGKey(0)},
            "key, passed by keyword, is a random key without a role",
        ),
    ],
)
def test_a_keyword_that_may_be_meant_to_be_split_is_named(loss, options, keywords, message):
    with pytest.raises(ValueError, match=message):
        microbatch_value_and_grad(loss, 2, **options)(PARAMS, **keywords)


def test_one_micro_batch_compiles_to_the_plain_function():
    def text(f):
        return jax.jit(f).lower(PARAMS, X).compile().as_text()

    run = microbatch_value_and_grad(loss_fn, 1)
    assert "while" not in text(run)
    chex.assert_trees_all_equal(
        jax.jit(run)(PARAMS, X), jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X)
    )


# What it composes with.


def test_windows_of_windows():
    tx = accumulate(2, optax.sgd(1.0))
    run = microbatch_value_and_grad(loss_fn, 3)
    state = tx.init(PARAMS)
    for part in (X[:12], X[12:]):
        updates, state = tx.update(run(PARAMS, part)[1], state, PARAMS, weight=len(part))
    assert_close(updates, jax.tree.map(jnp.negative, jax.grad(loss_fn)(PARAMS, X)))


def test_vmap_higher_gradients_and_checkpoint():
    run = microbatch_value_and_grad(jax.checkpoint(loss_fn), 4)

    def norm(fn):
        return lambda p: optax.tree.norm(fn(p, X)[1], squared=True)

    plain = jax.value_and_grad(loss_fn)
    assert_close(jax.grad(norm(run))(PARAMS), jax.grad(norm(plain))(PARAMS), rtol=1e-4)
    many = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)

    def vmapped(fn):
        return jax.vmap(fn, (0, None))(many, X)

    assert_close(vmapped(run), vmapped(plain))


def test_batchnorm_and_dropout_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, key):
            return self.dropout(self.norm(self.dense(x)), rngs=nnx.Rngs(dropout=key))

    graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x, key):
        model = nnx.merge(graphdef, params, rest)
        return (model(x, key) ** 2).mean(), nnx.state(model, nnx.Not(nnx.Param))

    run = microbatch_value_and_grad(loss, 3, batch_argnums=2, rng_argnums=3, carry_argnum=1)
    (value, new_rest), gradients = jax.jit(run)(params, rest, X, jax.random.key(0))
    assert np.isfinite(value)
    chex.assert_trees_all_equal_shapes_and_dtypes((gradients, new_rest), (params, rest))
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (new_rest, rest)), strict=True))


MESH = jax.make_mesh((8,), ("data",), (AxisType.Auto,))


def test_a_batch_that_is_split_over_devices_is_not_moved():
    x = jax.device_put(X, NamedSharding(MESH, P("data")))
    params = jax.device_put(PARAMS, NamedSharding(MESH, P()))
    compiled = jax.jit(microbatch_value_and_grad(loss_fn, 3)).lower(params, x).compile()
    found = collectives(compiled)
    assert set(found.outside.kinds) | set(found.in_loops.kinds) == {"all-reduce"}
    gradient_bytes = 4 * (12 + 3)
    assert found.in_loops.bytes + found.outside.bytes <= gradient_bytes + 8
    assert_close(compiled(params, x), jax.value_and_grad(loss_fn)(PARAMS, X))


def layers(params, x):
    block = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))
    return lax.scan(lambda h, w: (block(h, w), None), x, params)[0]


def mean_square(params, x):
    return jnp.mean(layers(params, x) ** 2)


@pytest.mark.parametrize(
    "fn",
    [
        microbatch_value_and_grad(mean_square, 4),
        microbatch_value_and_grad(mean_square, 4, accumulator_dtype=jnp.bfloat16),
        contrastive_value_and_grad(layers, lambda params, r: jnp.mean(r**2), 4),
    ],
    ids=["microbatch", "microbatch in bfloat16", "contrastive"],
)
def test_gradients_of_sharded_parameters_are_summed_and_returned_sharded(fn):
    sharding = NamedSharding(MESH, P(None, "data"))
    params = jax.ShapeDtypeStruct((32, 64, 64), jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(MESH, P("data")))
    compiled = jax.jit(fn).lower(params, x).compile()
    assert compiled.output_shardings[1].is_equivalent_to(sharding, 3)
    bytes_of_params = 4 * 32 * 64 * 64
    assert compiled.memory_analysis().temp_size_in_bytes < 0.4 * bytes_of_params


def test_inside_shard_map_a_weight_may_be_that_of_the_device():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def weight_fn(x):
        return (x[:, 0] > 0).sum()

    def masked(params, x):
        return (losses(params, x) * (x[:, 0] > 0)).sum() / weight_fn(x).clip(1)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def run(params, x):
        fn = microbatch_value_and_grad(masked, 3, weight_fn=weight_fn)
        return jax.tree.map(lambda x: x[None], fn(varying(params, "data"), x))

    x = jnp.tile(X, (2, 1))
    each = [jax.value_and_grad(masked)(PARAMS, part) for part in x.reshape(8, 6, 4)]
    assert_close(run(PARAMS, x), jax.tree.map(lambda *xs: jnp.stack(xs), *each))


def test_on_an_explicit_mesh_sums_are_sharded_as_the_parameters_and_the_split_is_checked():
    mesh = jax.make_mesh((8,), ("data",))
    params = {"w": jnp.ones((4, 16)) / 3, "b": jnp.ones(16)}
    x = jnp.tile(X, (2, 1))
    want = jax.value_and_grad(loss_fn)(params, x)
    with jax.set_mesh(mesh):

        def put(spec):
            return lambda x: jax.device_put(x, NamedSharding(mesh, spec))

        by_columns = {"w": put(P(None, "data"))(params["w"]), "b": put(P("data"))(params["b"])}
        got = jax.jit(microbatch_value_and_grad(loss_fn, 4))(by_columns, x)
        assert got[1]["w"].sharding.spec == P(None, "data")
        assert_close(jax.device_get(got), want)
        split = put(P("data"))(x)
        assert_close(
            jax.device_get(jax.jit(microbatch_value_and_grad(loss_fn, 3))(params, split)), want
        )
        with pytest.raises(ValueError, match=r"must divide the examples that each device has, 6"):
            microbatch_value_and_grad(loss_fn, 4)(params, split)


def test_inside_shard_map_it_reduces_once():
    @jax.jit
    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    def run(params, x):
        local = varying(params, "data")
        return lax.pmean(microbatch_value_and_grad(loss_fn, 3)(local, x), "data")

    found = collectives(run.lower(PARAMS, X).compile())
    assert found.outside.kinds == {"all-reduce": 1}
    assert found.in_loops.count == 0
    assert_close(run(PARAMS, X), jax.value_and_grad(loss_fn)(PARAMS, X))


def test_memory_is_that_of_a_micro_batch():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for features in (8, 16):
                x = nn.relu(nn.GroupNorm(4)(nn.Conv(features, (3, 3))(x)))
            return nn.Dense(3)(x.mean((1, 2)))

    net = Net()
    x = jnp.zeros((64, 16, 16, 3))
    params = net.init(jax.random.key(0), x[:1])

    def loss(params, x):
        return jnp.mean(net.apply(params, x) ** 2)

    def temp(f):
        return jax.jit(f).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    whole = temp(jax.value_and_grad(loss))
    assert temp(microbatch_value_and_grad(loss, 8)) < whole / 6


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches must be an int of at least 1, got 0"),
        ({"num_microbatches": -1}, "num_microbatches .*got -1"),
        ({"num_microbatches": 2.5}, r"num_microbatches .*got 2\.5"),
        ({"num_microbatches": True}, "num_microbatches .*got True"),
        ({"num_microbatches": 25}, "at most the number of examples, 24; got 25"),
        ({"weight_fn": 3}, "weight_fn must be a function or None, got 3"),
        ({"weight_fn": lambda x: x}, r"weight must be a real scalar, got .*shape \(12, 4\)"),
        ({"normalize": "max"}, "normalize must be one of"),
        ({"accumulator_dtype": jnp.float16}, "accumulator_dtype must have the range"),
        ({"batch_argnums": 0}, "batch_argnums must name other arguments than argnums, got 0"),
        ({"rng_argnums": -1}, "rng_argnums must be the number of an argument, from 0, got -1"),
        ({"carry_argnum": 1}, "carry_argnum must name other arguments than batch_argnums"),
        ({"batch_argnums": ()}, r"argnums and batch_argnums \(or .*\) must name an argument"),
        ({"batch_argnums": np.int64(1), "argnums": 4}, "argument 4 must be passed, since argnums"),
        ({"accumulator_dtype": jnp.float64}, "accumulator_dtype=float64 needs jax_enable_x64"),
        ({"rng_argnums": 1, "batch_argnums": 0, "argnums": 2}, "argument 2 must be passed"),
        (
            {"has_aux": True, "loss_fn": lambda p, x: (loss_fn(p, x), {"name": "a"})},
            r"aux must hold arrays and numbers; aux\['name'\] is 'a'",
        ),
        (
            {"has_aux": True, "loss_fn": lambda p, x: (loss_fn(p, x), jax.random.key(0))},
            "aux must hold scalars, which have a mean",
        ),
        (
            {"batch_argnums": 2},
            r"argument 2 must be passed, since batch_argnums names it; got 2 .*in batch_argnames",
        ),
        ({"loss_fn": losses}, r"loss_fn's loss must be a real floating scalar, got float32\[12\]"),
        ({"loss_fn": 1}, "loss_fn must be a function, got 1"),
        ({"has_aux": True}, r"loss_fn must be a pair, got float32\[\]"),
        (
            {"has_aux": True, "loss_fn": lambda p, x: (loss_fn(p, x), x.T)},
            r"aux must hold scalars, and arrays with the example axis first; aux.* \(4, 12\)",
        ),
    ],
)
def test_a_wrong_argument_is_named(options, message):
    options = {"loss_fn": loss_fn, "num_microbatches": 2, **options}
    with pytest.raises(ValueError, match=message):
        microbatch_value_and_grad(**options)(PARAMS, X)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (jnp.float32(1), "batch must hold arrays with the example axis first"),
        ((X, X[:3]), r"batch must hold one number of examples .*24.*3.*jnp.moveaxis"),
        (X[:0], r"batch must hold at least one example.*\{'batch\[0\]': 0\}"),
        ({}, r"batch must hold at least one example.* no array in \[\{\}\]"),
        ({"x": X, "id": "a"}, r"batch\[0\]\['id'\] is 'a'"),
    ],
)
def test_a_batch_without_one_leading_axis_is_named(batch, message):
    with pytest.raises(ValueError, match=message):
        microbatch_value_and_grad(lambda p, x: 1.0, 2)(PARAMS, batch)


@pytest.mark.parametrize("key", [3, None, jnp.ones(2), jax.random.split(jax.random.key(0), 2)])
def test_what_is_no_key_is_named(key):
    fn = microbatch_value_and_grad(lambda p, x, key: loss_fn(p, x), 2, rng_argnums=2)
    with pytest.raises(ValueError, match="argument 2 must be one PRNG key, got"):
        fn(PARAMS, X, key)
    fn(PARAMS, X, jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"argument 0 must be floating .* dtype int32"):
        fn({"w": jnp.arange(3)}, X, jax.random.key(0))


def test_a_carry_that_changes_is_named():
    run = microbatch_value_and_grad(
        lambda p, c, x: (loss_fn(p, x), c[None]), 2, batch_argnums=2, carry_argnum=1
    )
    with pytest.raises(ValueError, match=r"loss_fn must return the carry .*float32\[1, 3\]"):
        run(PARAMS, jnp.ones(3), X)
