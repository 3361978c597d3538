"""Every entry point on meshes of which `shard_map` maps some axes, and errors about axes."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_accum import (
    accumulate,
    accumulate_in_momentum,
    canonical_convolutions,
    chain,
    checkpoint_segments,
    contrastive_value_and_grad,
    flush,
    make_train_step,
    microbatch_value_and_grad,
    state_specs,
    varying,
)

K = 2
DATA = 4
PARAMS = {"b": jnp.ones(8) / 4, "w": jnp.arange(32.0).reshape(4, 8) / 40}
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
KINDS = {
    "automatic": (AxisType.Auto, AxisType.Auto),
    "explicit and automatic": (AxisType.Explicit, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
}


def encode(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def loss_fn(params, x):
    return jnp.mean(encode(params, x) ** 2)


def grid(kind):
    return jax.make_mesh((DATA, 2), ("data", "model"), KINDS[kind])


def placed(mesh):
    """Parameters that are split over the axis that is not mapped, and a batch over the other."""

    def put(spec):
        return lambda x: jax.device_put(x, NamedSharding(mesh, spec))

    params = {"b": put(P("model"))(PARAMS["b"]), "w": put(P(None, "model"))(PARAMS["w"])}
    return params, put(P("data"))(X)


def over_data(function, mesh, in_specs, out_specs, check_vma=True):
    """`function` on each part of the batch; the axis `model` is left to XLA."""
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={"data"},
            check_vma=check_vma,
        )
    )


# Where only some axes of a mesh are mapped.


def microbatched(params, x):
    return microbatch_value_and_grad(loss_fn, K)(params, x)


def microbatched_with_carry(params, x):
    def with_count(params, count, x):
        return loss_fn(params, x), (count + x.mean(), x[:, 0])

    fn = microbatch_value_and_grad(
        with_count, K, batch_argnums=2, carry_argnum=1, has_aux=True, weight_fn=len
    )
    (loss, (count, rows)), gradients = fn(params, varying(jnp.zeros([]), "data"), x)
    np.testing.assert_equal((count.shape, rows.shape), ((), (len(x),)))
    return loss, gradients


def contrasted(params, x):
    def mean_square(params, r):
        # JAX's derivative of a gathered `r` fails where the other axis is explicit.
        is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        r = r if is_explicit else lax.all_gather(r, "data", tiled=True)
        return lax.pmean(jnp.mean(r**2), "data")

    loss, gradients = contrastive_value_and_grad(encode, mean_square, K)(params, x)
    return loss, jax.tree.map(lambda g: DATA * g, gradients)  # they are to be summed


def of_each_device(params, x):
    tx = accumulate(K, optax.sgd(1.0))
    state = tx.init(params)
    for part in jnp.split(x, K):
        loss, gradients = jax.value_and_grad(loss_fn)(params, part)
        updates, state = jax.jit(tx.update)(gradients, state, params)
    del loss
    return loss_fn(params, x), jax.tree.map(jnp.negative, updates)


def checkpointed(params, x):
    return jax.value_and_grad(checkpoint_segments(loss_fn))(params, x)


def in_canonical_layout(params, x):
    return canonical_convolutions(jax.value_and_grad(loss_fn))(params, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "run",
    [
        microbatched,
        microbatched_with_carry,
        contrasted,
        of_each_device,
        checkpointed,
        in_canonical_layout,
    ],
)
def test_a_gradient_is_that_of_the_big_batch_where_one_axis_of_two_is_mapped(run, kind):
    mesh = grid(kind)

    def mean(params, x):
        return lax.pmean(run(varying(params, "data"), x), "data")

    with jax.set_mesh(mesh):
        got = over_data(mean, mesh, (P(), P("data")), P())(*placed(mesh))
        assert got[1]["w"].sharding.spec in (P(None, "model"), P())
    want = jax.value_and_grad(loss_fn)(PARAMS, X)
    chex.assert_trees_all_close(jax.device_get(got), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_those_of_the_big_batch_where_one_axis_of_two_is_mapped(kind):
    mesh = grid(kind)
    tx = chain(accumulate(K, axis_name="data"), optax.sgd(1.0))
    momentum = accumulate_in_momentum(K, 1.0, 0.0)
    specs = state_specs(jax.eval_shape(tx.init, PARAMS), "data")

    def body(params, x):
        state, own = tx.init(params), momentum.init(params)
        for part in jnp.split(x, K):
            gradients = jax.grad(loss_fn)(varying(params, "data"), part)
            updates, state = tx.update(gradients, state, params)
            by_momentum, own = momentum.update(lax.pmean(gradients, "data"), own, params)
        gradients = jax.grad(loss_fn)(varying(params, "data"), x)
        _, state = tx.update(gradients, state, params)
        flushed, state = flush(tx, state, params)
        return (updates, by_momentum, flushed), state

    with jax.set_mesh(mesh):
        params, x = placed(mesh)
        got, _ = over_data(body, mesh, (P(), P("data")), (P(), specs))(params, x)
    want = jax.tree.map(jnp.negative, jax.grad(loss_fn)(PARAMS, X))
    for updates in jax.device_get(got):
        chex.assert_trees_all_close(updates, want, rtol=1e-5, atol=1e-7)


# Reductions of bfloat16: XLA's CPU compiler ends the process with one in a partly manual region.


def reduced_dtypes(lowered):
    """The dtypes that a program, which has not been compiled, reduces over devices."""
    reductions = r'"stablehlo.(?:all_reduce|reduce_scatter)".*?\}\) : \((.*?)\) ->'
    found = re.findall(reductions, lowered.as_text(), re.S)
    return set(re.findall(r"[x<]([a-z]+\d+)>", " ".join(found)))


def in_bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
@pytest.mark.parametrize("k", [1, 2])
def test_sums_in_bfloat16_are_reduced_in_float32_where_one_axis_of_two_is_mapped(
    k, kind, check_vma
):
    mesh = grid(kind)
    tx = accumulate(k, optax.sgd(1.0), axis_name="data", accumulator_dtype=jnp.bfloat16)
    specs = state_specs(jax.eval_shape(tx.init, PARAMS), "data")

    def body(params, state, x):
        gradients = jax.grad(loss_fn)(varying(params, "data"), x)
        return tx.update(gradients, state, params, flush=True)

    with jax.set_mesh(mesh):
        params, x = placed(mesh)
        state = over_data(tx.init, mesh, P(), specs, check_vma)(params)
        run = over_data(body, mesh, (P(), specs, P("data")), (P(), specs), check_vma)
        traced = run.trace(params, state, x)
        assert "bf16" not in reduced_dtypes(traced.lower())
        assert "bf16" in reduced_dtypes(traced.lower(lowering_platforms=("cuda",)))
        updates, _ = run(params, state, x)
    want = jax.tree.map(jnp.negative, jax.grad(loss_fn)(PARAMS, X))
    chex.assert_trees_all_close(jax.device_get(updates), want, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("narrow", ["sums", "parameters and batch", "loss", "model state"])
def test_a_train_step_ends_no_process_where_one_axis_of_two_is_mapped(narrow, dtype):
    def with_state(params, mean, x):
        loss = loss_fn(params, x)
        loss = loss.astype(jnp.bfloat16) if narrow == "loss" else loss
        return loss, (0.5 * mean + 0.5 * x.mean(0)).astype(mean.dtype)

    mesh = grid("automatic")
    params, x = placed(mesh)
    mean = jnp.zeros(4, jnp.bfloat16 if narrow == "model state" else jnp.float32)
    if narrow == "parameters and batch":
        params, x = in_bfloat16((params, x))
    tx = accumulate(2, optax.sgd(1.0), axis_name="data", accumulator_dtype=dtype)
    step = make_train_step(with_state, tx, mesh=mesh, model_state=True)
    state = step.init(params, model_state=mean)
    assert "bf16" not in reduced_dtypes(step.lower(params, state, x, model_state=mean))
    want = jax.tree.map(lambda p, g: p - g, PARAMS, jax.grad(loss_fn)(PARAMS, X))
    params, state, _, mean = step(params, state, x, model_state=mean)
    params, state, metrics, mean = step.flush(params, state, model_state=mean)
    assert metrics["emitted"]
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: np.float32(x), params), want, rtol=2e-2, atol=2e-2
    )
    np.testing.assert_allclose(np.float32(mean), 0.5 * X.mean(0), rtol=2e-2, atol=1e-3)


def summed_over_devices(params, x):
    return jax.tree.map(lambda g: g / DATA, microbatch_value_and_grad(loss_fn, K)(params, x)[1])


def with_gathered_rows(num):
    def mean_square(params, r):
        return lax.pmean(jnp.mean(lax.all_gather(r, "data", tiled=True) ** 2), "data")

    def run(params, x):
        fn = contrastive_value_and_grad(encode, mean_square, num)
        gradients = fn(varying(params, "data"), x)[1]
        return jax.tree.map(lambda g: lax.psum(g.astype(jnp.float32), "data"), gradients)

    return run


@pytest.mark.parametrize(
    "run",
    [summed_over_devices, with_gathered_rows(1), with_gathered_rows(2)],
    ids=["parameters that all share", "gathered rows", "gathered rows of micro-batches"],
)
def test_reductions_in_bfloat16_within_a_gradient_end_no_process(run):
    mesh = grid("automatic")
    mapped = over_data(run, mesh, (P(), P("data")), P())
    arguments = in_bfloat16(placed(mesh))
    assert "bf16" not in reduced_dtypes(mapped.lower(*arguments))
    got = jax.tree.map(np.float32, mapped(*arguments))
    chex.assert_trees_all_close(got, jax.grad(loss_fn)(PARAMS, X), rtol=5e-2, atol=1e-3)


def test_statistics_in_bfloat16_over_all_devices_end_no_process_in_a_train_step():
    def standardized_loss(params, x):
        def center(h, _):
            return h - lax.pmean(h.mean(0), "data"), None

        h, _ = lax.scan(center, x @ params["w"], None, length=1)
        return jnp.mean(jnp.tanh(h) ** 2)

    mesh = grid("automatic")
    params, x = in_bfloat16(placed(mesh))
    tx = accumulate(1, optax.sgd(1.0), axis_name="data")
    step = make_train_step(standardized_loss, tx, mesh=mesh)
    state = step.init(params)
    assert "bf16" not in reduced_dtypes(step.lower(params, state, x))
    params, _, _ = step(params, state, x)

    def whole_loss(params):
        h = X @ params["w"]
        return jnp.mean(jnp.tanh(h - h.mean(0)) ** 2)

    want = PARAMS["w"] - jax.grad(whole_loss)(PARAMS)["w"]
    np.testing.assert_allclose(np.float32(params["w"]), want, rtol=2e-2, atol=1e-2)


# Axes that nothing reduces over.


MESH = jax.make_mesh((8,), ("data",), (AxisType.Auto,))


def updating(tx, axes=("data",), reduce=lambda g: g, **extra_args):
    """Lower `tx.update` with gradients that vary over axes of a mesh, `reduce`d."""
    mesh = MESH if axes == ("data",) else grid("automatic")
    state = tx.init(PARAMS)

    def body(params, state, x):
        gradients = reduce(jax.grad(loss_fn)(varying(params, axes), x))
        own = {name: fn(x) for name, fn in extra_args.items()}
        return tx.update(gradients, state, params, **own)

    in_specs = (P(), P(), P("data"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P())
    return jax.jit(mapped).lower(PARAMS, state, X)


def mean_over_data(gradients):
    return lax.pmean(gradients, "data")


FORGOTTEN = r"gradients\['b'\] varies over the axis 'data'.*Pass axis_name='data' to accumulate"


@pytest.mark.parametrize(
    "tx",
    [
        accumulate(2, optax.adam(1.0)),
        accumulate(2, optax.sgd(1.0), accumulator_dtype=jnp.bfloat16),
        accumulate(lambda step: 2, optax.sgd(1.0), monitor=True),
        accumulate(1, optax.adam(1.0), should_skip_update_fn=optax.skip_not_finite),
        chain(optax.clip(1.0), accumulate(2), optax.adam(1.0)),
        optax.partition(
            {"k": accumulate(2, optax.adam(1.0)), "rest": optax.set_to_zero()},
            {"b": "k", "w": "rest"},
        ),
        accumulate_in_momentum(2, 1.0, 0.9),
    ],
)
def test_a_forgotten_axis_name_is_named(tx):
    with pytest.raises(ValueError, match=FORGOTTEN):
        updating(tx)
    updating(tx, reduce=mean_over_data)


def test_an_axis_beside_axis_name_is_named():
    tx = accumulate(2, optax.adam(1.0), axis_name="data")
    with pytest.raises(ValueError, match=r"over the axis 'model'.*axis_name=\('data', 'model'\)"):
        updating(tx, axes=("data", "model"))


@pytest.mark.parametrize(
    ("tx", "name"),
    [
        (accumulate(2, optax.adam(1.0)), "weight"),
        (accumulate(1, optax.adam(1.0)), "weight"),
        (accumulate(2, optax.adam(1.0), average_extra_args=("value",)), "value"),
        (accumulate(2, optax.adam(1.0), monitor=True), "value"),
        (accumulate(2, optax.adam(1.0), average_extra_args=("accuracy",)), "accuracy"),
        (accumulate_in_momentum(2, 1.0, 0.9), "share"),
    ],
)
def test_a_weight_or_value_of_one_device_is_named(tx, name):
    arguments = {name: lambda x: jnp.abs(x).sum()}
    with pytest.raises(ValueError, match=rf"^{name} varies over .*'data'.*jax\.lax\.p\w+\({name}"):
        updating(tx, reduce=mean_over_data, **arguments)
    updating(tx, reduce=mean_over_data, **{name: lambda x: mean_over_data(jnp.abs(x).sum())})


def test_windows_of_each_device_may_have_their_own_weights_and_values():
    tx = accumulate(2, optax.sgd(1.0), average_extra_args=("value",))

    def body(params, x):
        params = varying(params, "data")
        state = tx.init(params)
        for part in jnp.split(x, 2):
            loss, gradients = jax.value_and_grad(loss_fn)(params, part)
            weight = (part[:, 0] > 0).sum() + 1
            updates, state = tx.update(gradients, state, params, weight=weight, value=loss)
        return jax.tree.map(lambda u: u[None], updates)

    mapped = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"))
    got = jax.jit(mapped)(PARAMS, X)
    for device, pair in enumerate(X.reshape(8, 2, 1, 4)):
        weights = [int(part[0, 0] > 0) + 1 for part in pair]
        each = [jax.grad(loss_fn)(PARAMS, part) for part in pair]
        want = jax.tree.map(lambda a, b, w=weights: -(w[0] * a + w[1] * b) / sum(w), *each)
        chex.assert_trees_all_close(
            jax.tree.map(lambda u, d=device: u[d], got), want, rtol=1e-5, atol=1e-7
        )


def test_a_window_may_begin_inside_shard_map_and_go_through_a_scan():
    tx = accumulate(2, optax.sgd(1.0), axis_name="data", average_extra_args=("value",))

    def body(params, xs):
        def step(carry, x):
            params, state = carry
            loss, gradients = jax.value_and_grad(loss_fn)(varying(params, "data"), x)
            updates, state = tx.update(gradients, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, tx.init(params)), xs)[0][0]

    mapped = jax.shard_map(body, mesh=MESH, in_specs=(P(), P(None, "data")), out_specs=P())
    got = jax.jit(mapped)(PARAMS, jnp.stack([X, X]))
    want = jax.tree.map(lambda p, g: p - g, PARAMS, jax.grad(loss_fn)(PARAMS, X))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)


# Sums that their type says have still to be taken.


def linear_loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


UNREDUCED = r"gradients\['w'\] is unreduced over the axis 'data'.*pass axis_name='data'"


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("make", [accumulate, lambda k, tx: accumulate_in_momentum(k, 1.0, 0.0)])
def test_unreduced_gradients_are_named_and_the_remedy_works(make, k):
    mesh = jax.make_mesh((8,), ("data",))
    tx = make(k, optax.sgd(1.0))

    def step(params, state, x, reduce):
        reduced = jax.sharding.reshard(params, P(reduced={"data"}))
        gradients = jax.grad(linear_loss)(reduced, x)
        if reduce:
            gradients = jax.sharding.reshard(gradients, {"w": P()})
        return tx.update(gradients, state, params, flush=True)[0]

    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P()))}
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        run = jax.jit(step, static_argnames="reduce")
        with pytest.raises(ValueError, match=UNREDUCED):
            run(params, tx.init(params), x, reduce=False)
        if make is accumulate:
            updates = run(params, tx.init(params), x, reduce=True)
            want = -jax.grad(linear_loss)({"w": PARAMS["w"]}, X)["w"]
            np.testing.assert_allclose(updates["w"], want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "fn",
    [
        microbatch_value_and_grad(linear_loss, 2),
        contrastive_value_and_grad(
            lambda params, x: x @ params["w"],
            lambda params, r: jnp.mean(jax.sharding.reshard(r, P()) ** 2),
            2,
        ),
    ],
    ids=["microbatch", "contrastive"],
)
def test_micro_batches_with_unreduced_gradients_are_named(fn):
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        reduced = jax.device_put(PARAMS["w"], NamedSharding(mesh, P(reduced={"data"})))
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=UNREDUCED):
            jax.jit(fn)({"w": reduced}, x)


# Micro-batches in one call.


def in_micro_batches(*args, params, **options):
    fn = microbatch_value_and_grad(*args, 2, **options)
    mapped = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], fn(*params(), x)),
        mesh=MESH,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    return jax.jit(mapped)(X)


def test_weights_of_each_device_on_gradients_that_are_summed_already_are_named():
    run = functools.partial(in_micro_batches, loss_fn, weight_fn=lambda x: (x > 0).sum())
    with pytest.raises(ValueError, match=r"weight that varies over the axis 'data', and gradients"):
        run(params=lambda: [PARAMS])
    run(params=lambda: [varying(PARAMS, "data")])


def test_a_carry_that_each_device_changes_is_named():
    def carrying(params, mean, x):
        return (loss_fn(params, x), mean + x.mean())

    run = functools.partial(in_micro_batches, carrying, batch_argnums=2, carry_argnum=1)
    with pytest.raises(ValueError, match=r"argument 1 comes back varying over .*varying\(carry, "):
        run(params=lambda: [varying(PARAMS, "data"), jnp.zeros([])])
    run(params=lambda: varying([PARAMS, jnp.zeros([])], "data"))


def test_a_carry_that_comes_back_sharded_in_another_way_is_named():
    mesh = jax.make_mesh((8,), ("data",))

    def carrying(params, mean, x):
        return (linear_loss(params, x), (x @ params["w"]).mean(0))

    fn = microbatch_value_and_grad(carrying, 2, batch_argnums=2, carry_argnum=1)
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P(None, "data")))}
        message = r"return the carry sharded as it was given.* from \(None,\) to \('data',\)"
        with pytest.raises(ValueError, match=message):
            jax.jit(fn)(params, jnp.zeros(8), X)
