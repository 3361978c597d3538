"""`plan_microbatches`: what the compiler says of each split of a batch."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_accum import accumulate, microbatch_value_and_grad, plan_microbatches

PARAMS = {"a": jnp.eye(32), "b": jnp.ones((32, 4))}
BATCH = {"x": np.ones((24, 32), np.float32), "y": np.zeros(24, int)}
TX = optax.adam(1e-3)
DIVISORS = (1, 2, 3, 4, 6, 8, 12, 24)


def loss_fn(params, batch):
    x = batch["x"]
    for _ in range(4):
        x = jnp.tanh(x @ params["a"])
    logits = x @ params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def plan(budget, loss_fn=loss_fn, params=PARAMS, batch=BATCH, tx=TX):
    return plan_microbatches(loss_fn, params, batch, memory_budget=budget, tx=tx)


def bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@functools.cache
def whole_table():
    """The plan under a budget that nothing fits but the arguments of a step."""
    return plan(bytes_of((PARAMS, TX.init(PARAMS), jax.tree.map(jnp.asarray, BATCH))))


# Which k.


def test_the_rows_are_what_a_hand_written_step_takes():
    rows = {row.num_microbatches: row for row in whole_table().rows if row.method == "as it is"}
    assert tuple(rows) == DIVISORS
    for k, row in rows.items():

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, batch, k=k):
            loss, gradients = microbatch_value_and_grad(loss_fn, k)(params, batch)
            updates, opt_state = TX.update(gradients, opt_state, params)
            return loss, optax.apply_updates(params, updates), opt_state

        memory = step.lower(PARAMS, TX.init(PARAMS), BATCH).compile().memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
        assert row.peak == peak
        assert row.microbatch_size == 24 // k
        assert row.params == bytes_of(PARAMS)
        assert row.opt_state == bytes_of(TX.init(PARAMS))
        assert row.batch == 24 * 32 * 4 + 24 * 4  # labels are int32 on the device
        assert row.accumulator == (bytes_of(PARAMS) if k > 1 else 0)
        assert row.temporaries > 0


@pytest.mark.parametrize("k", DIVISORS)
def test_the_plan_is_the_smallest_divisor_that_fits(k):
    peaks = {r.num_microbatches: r.peak for r in whole_table().rows if r.method == "as it is"}
    got = plan(peaks[k])
    smallest = min(d for d in DIVISORS if peaks[d] <= peaks[k])
    assert got.fits
    assert (got.num_microbatches, got.microbatch_size) == (smallest, 24 // smallest)
    plain = [row.num_microbatches for row in got.rows if row.method == "as it is"]
    assert plain == [d for d in DIVISORS if d <= smallest]  # and no more was compiled
    others = [row for row in got.rows if row.method != "as it is"]
    assert all(row.num_microbatches < smallest for row in others)
    fewest = {row.method: row for row in others if row.fits}
    assert all((str(row) in got.advice) == (row is fewest.get(row.method)) for row in others)
    if smallest > 1:
        assert got.advice.startswith(f"{smallest} micro-batches of {24 // smallest} fit")


def test_a_batch_that_fits_whole_needs_no_accumulation_and_may_be_larger():
    peak = plan(1e9).rows[0].peak
    for budget, could in ((peak, False), (int(peak / 0.81), False), (int(peak / 0.79), True)):
        got = plan(budget)
        assert (got.num_microbatches, got.fits, len(got.rows)) == (1, True, 1)
        assert "no accumulation is needed" in got.advice
        assert ("could be larger" in got.advice) == could


def test_where_nothing_fits_the_plan_says_so_and_names_the_nearest():
    got = whole_table()
    assert not got.fits
    assert {row.method for row in got.rows} == {"as it is", "checkpoint", "bfloat16"}
    nearest = min(got.rows, key=lambda row: row.peak)
    assert f"The nearest is {nearest}" in got.advice
    plain = min((r for r in got.rows if r.method == "as it is"), key=lambda row: row.peak)
    assert got.num_microbatches == plain.num_microbatches


def test_a_batch_that_does_not_fit_beside_the_state_is_for_accumulate():
    got = plan(bytes_of((PARAMS, TX.init(PARAMS))) + bytes_of(BATCH) // 24 + 100)
    assert {row.num_microbatches for row in got.rows} == {24}  # smaller ones would not help
    assert not got.fits
    assert "batch alone take" in got.advice
    assert "accumulate(k)" in got.advice


def test_where_only_another_way_fits_the_plan_names_it():
    # A cumsum is one activation more that no segment can drop, and bfloat16 halves.
    params, batch = jnp.ones((8, 8)), jnp.ones((2, 4096, 8))

    def loss_fn(w, x):
        return jnp.mean(jnp.sin(jnp.cumsum(jnp.sin(x @ w), axis=1)))

    rows = plan(200_000, loss_fn, params, batch, tx=None).rows
    peaks = {row.method: row.peak for row in rows if row.num_microbatches == 2}
    assert peaks["bfloat16"] < peaks["as it is"]
    got = plan(peaks["bfloat16"], loss_fn, params, batch, tx=None)
    assert not got.fits
    assert "No number of micro-batches fits as it is" in got.advice
    assert "2 x 1 (bfloat16)" in got.advice


def test_shapes_are_enough_and_nothing_runs():
    ran = []

    def spying(params, batch):
        jax.debug.callback(lambda: ran.append(1))
        return loss_fn(params, batch)

    of = functools.partial(
        jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.result_type(x))
    )
    assert plan(1e9, params=of(PARAMS), batch=of(BATCH)) == plan(1e9)
    plan(1e9, spying)
    assert not ran


def test_without_an_optimizer_the_step_is_loss_and_gradient():
    (row,) = plan(1e9, tx=None).rows
    gradient = jax.jit(jax.value_and_grad(loss_fn), keep_unused=True).lower(PARAMS, BATCH)
    memory = gradient.compile().memory_analysis()
    assert row.opt_state == 0
    assert row.peak == (
        memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    )


def test_a_plan_is_made_where_dtypes_are_not_promoted():
    w, x = jnp.ones((8, 8), jnp.bfloat16), jnp.ones((512, 8), jnp.bfloat16)

    def make():
        return plan(12_000, lambda w, x: jnp.mean(jnp.tanh(x @ w)), w, x, optax.sgd(0.1))

    with jax.numpy_dtype_promotion("strict"):
        strict = make()
    assert strict == make()
    assert strict.num_microbatches > 1


TXS = {
    "clip and adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "reduce_on_plateau": optax.contrib.reduce_on_plateau(),
    "accumulate": accumulate(2, optax.sgd(0.1)),
    "masked": optax.masked(optax.adam(1e-3), {"a": True, "b": False}),
    "partition": optax.partition(
        {"x": optax.adam(1e-3), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}
    ),
}


@pytest.mark.parametrize("tx", TXS.values(), ids=TXS)
def test_any_optimizer_goes_in(tx):
    (row,) = plan(1e9, tx=tx).rows
    assert row.opt_state == bytes_of(tx.init(PARAMS))


def test_what_is_sharded_counts_by_device():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def shard(spec):
        return lambda x: jax.ShapeDtypeStruct(
            x.shape, jnp.result_type(x), sharding=NamedSharding(mesh, spec)
        )

    batch = jax.tree.map(shard(P("data")), BATCH)
    (row,) = plan(1e9, params=jax.tree.map(shard(P("data")), PARAMS), batch=batch).rows
    assert row.params == bytes_of(PARAMS) // 8
    assert row.opt_state == 2 * bytes_of(PARAMS) // 8 + 4
    assert row.batch == (24 * 32 * 4 + 24 * 4) // 8
    (replicated,) = plan(1e9, params=jax.tree.map(shard(P()), PARAMS), batch=batch).rows
    assert replicated.params == bytes_of(PARAMS)
    assert replicated.batch == row.batch


@pytest.mark.parametrize("name", ["clip and adamw", "masked", "partition"])
def test_the_state_of_any_optimizer_is_sharded_as_its_parameters(name):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))

    def struct(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    (row,) = plan(1e9, params=jax.tree.map(struct, PARAMS), tx=TXS[name]).rows
    states = jax.tree.leaves(TXS[name].init(PARAMS))
    assert row.opt_state == sum(x.nbytes // (8 if x.ndim else 1) for x in states)


def test_on_an_explicit_mesh_only_what_its_devices_can_split_is_tried():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = NamedSharding(mesh, P("data"))

    def shard(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    w, x = jnp.ones((32, 8)), shard(48, 32)
    with jax.set_mesh(mesh):
        got = plan(bytes_of((w, TX.init(w))) + 48 * 32 * 4 // 8, loss_fn, w, x)
    ks = [row.num_microbatches for row in got.rows if row.method == "as it is"]
    assert ks == [1, 2, 3, 6]  # of 6 examples on each device
    assert not got.fits
    with jax.set_mesh(mesh):
        (row,) = plan(1e9, loss_fn, shard(32, 8), jnp.ones((48, 32)), optax.adafactor(1.0, 2)).rows
    assert row.fits


def test_parameters_without_a_gradient_leave_no_sum():
    params = {**PARAMS, "frozen": jnp.ones((300, 300))}
    rows = plan(bytes_of((params, BATCH)) + 2000, params=params, tx=optax.sgd(0.1)).rows
    assert all(row.temporaries >= 0 for row in rows)
    assert rows[-1].num_microbatches > 1


def test_the_table_has_a_row_for_each_that_was_compiled():
    got = plan(whole_table().rows[3].peak)
    lines = str(got).splitlines()
    assert len(lines) == 2 + len(got.rows) + 2
    assert lines[-1] == got.advice
    for line, row in zip(lines[2:], got.rows, strict=False):
        assert f"| {row.method} | {row.num_microbatches} x {row.microbatch_size} |" in line
        assert line.endswith("| yes |" if row.fits else "| no |")


def test_a_fraction_is_of_the_devices_memory_and_four_fifths_unless_told(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10**9}, device_kind="a card")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: [device])
        assert plan(0.25).memory_budget == 250_000_000
        assert plan_microbatches(loss_fn, PARAMS, BATCH).memory_budget == 800_000_000
    message = r"memory_budget must be passed, in bytes.*'cpu' does not; got the fraction {}.*=16e9"
    with pytest.raises(ValueError, match=message.format(0.25)):
        plan(0.25)
    with pytest.raises(ValueError, match=message.format(0.8)):
        plan_microbatches(loss_fn, PARAMS, BATCH)


@pytest.mark.parametrize("budget", [0, -1, True, "8 GB", None, float("nan"), float("inf"), 1j])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ValueError, match=re.escape(f"got {budget!r}")):
        plan(budget)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"memory_budget must hold .* one example, .* got 2 kB"):
        plan(2000)
    with pytest.raises(ValueError, match="loss_fn must be a function, got 3"):
        plan(1e9, loss_fn=3)
    with pytest.raises(ValueError, match="tx must be an optax gradient transformation or None"):
        plan(1e9, tx=optax.adam)
    with pytest.raises(ValueError, match="batch is the scalar"):
        plan(1e9, batch=1.0)
    with pytest.raises(ValueError, match="batch must hold at least one example"):
        plan(1e9, batch=jnp.ones((0, 32)))
    with pytest.raises(ValueError, match="one number of examples"):
        plan(1e9, batch={"x": jnp.ones((4, 32)), "y": jnp.ones(3)})
    with pytest.raises(ValueError, match="loss must be a real floating scalar"):
        plan(1e9, loss_fn=lambda params, batch: batch["x"] @ params["b"])
    with pytest.raises(ValueError, match="params must be floating"):
        plan(1e9, params={"a": jnp.arange(3)})


def test_inside_shard_map_it_says_to_plan_outside():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def plan(x):
        return plan_microbatches(lambda w, x: jnp.mean(x * w), x, x, memory_budget=1e9)

    with pytest.raises(ValueError, match=r"must be called outside jax\.shard_map"):
        jax.shard_map(plan, mesh=mesh, in_specs=P("data"), out_specs=P())(jnp.ones(8))
