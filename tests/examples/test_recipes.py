"""The recipes: each is the big batch where it says so, and differs where it says so."""

import functools
import math
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import laws
import recipes
import recipes_data
import recipes_ecosystem
import recipes_memory
import recipes_once
from optax_accum import accumulate, chain, has_updated
from recipes_ecosystem import closed_window
from tensorboard_files import events

pytestmark = pytest.mark.usefixtures("compile_quickly")

ROUNDING = 2e-6  # of parameters of about 1


@functools.cache
def figures(name):
    return recipes.RECIPES[name]()


@pytest.mark.parametrize(
    "name",
    [
        *("token_weights", "lamb", "growing_window", "checkpoint", "planned_k", "host_memory"),
        *("finite_average", "schedule_free", "logged_rate", "continued_checkpoint"),
    ],
)
def test_the_window_is_its_big_batch(name):
    assert figures(name)["differs by"] < ROUNDING


# What a window is the mean of.


def test_the_tasks_of_one_window_are_their_weighted_sum():
    assert figures("multi_task")["one window differs by"] < ROUNDING


def test_a_head_s_own_window_is_exact_and_the_trunk_under_it_is_not():
    assert figures("multi_task")["heads of own windows by"] < ROUNDING
    assert figures("multi_task")["their trunk by"] > 1e-3


def test_tokens_count_the_same_only_by_weight():
    assert figures("token_weights")["without weights by"] > 1e-2


def test_a_step_is_compiled_once_for_each_bucket():
    found = figures("token_weights")
    assert found["compilations"] == 3 < found["micro-steps"]
    assert found["entries"] < found["in one batch"]


def test_without_a_bad_micro_batch_only_clipping_each_is_another_mean():
    found = figures("clip_after_window")
    assert found["clean, clip each"] > 1e-2
    for arm in ("clip after", "skip NaN", "skip large"):
        assert found[f"clean, {arm}"] < ROUNDING


def test_a_spike_takes_the_window_less_of_it_where_each_is_clipped_and_nothing_where_skipped():
    found = figures("clip_after_window")
    assert found["spike, clip after"] > found["spike, clip each"] > 1e-2
    assert found["spike, skip large"] < ROUNDING


def test_a_nan_passes_through_any_clip_and_no_skip():
    found = figures("clip_after_window")
    for arm in ("clip after", "clip each"):
        assert math.isnan(found[f"NaN, {arm}"])
    for arm in ("skip NaN", "skip large"):
        assert found[f"NaN, {arm}"] < ROUNDING


def test_clipped_examples_give_the_gradient_of_the_big_batch_without_noise():
    found = figures("differential_privacy")
    assert found["without noise the mean differs by"] < ROUNDING
    assert found["the sum by"] < ROUNDING
    assert found["without clipping by"] > 0.1


def test_noise_behind_the_accumulator_is_that_of_the_big_batch():
    found = figures("differential_privacy")
    for place in ("noise of the big batch", "on the mean", "on the sum"):
        assert found[place] == pytest.approx(1, abs=0.05), place  # of 4,320 entries: 0.011


def test_noise_of_each_micro_batch_is_too_large_by_the_root_of_k():
    found = figures("differential_privacy")
    assert found["before the accumulator"] == pytest.approx(math.sqrt(4), rel=0.05)


# What happens once per window.


def test_a_schedule_inside_counts_windows_and_outside_micro_steps():
    found = figures("warm_up")
    assert found["inside: count"] == 8
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 8)
    np.testing.assert_allclose(found["inside: rates"], [schedule(t) for t in range(8)], rtol=1e-6)
    for placement in ("before", "behind MultiSteps"):
        assert found[f"{placement}: count"] == 32
        assert found[f"{placement}: rates"][2:] == [0] * 6  # through in a quarter of the time


def test_a_schedule_behind_an_accumulator_in_a_plain_chain_is_an_error():
    tx = optax.chain(accumulate(4), optax.scale_by_schedule(optax.constant_schedule(1.0)))
    with pytest.raises(ValueError, match=r"optax_accum\.chain"):
        tx.update(jnp.ones([]), tx.init(jnp.ones([])), jnp.ones([]))


def test_lamb_moves():
    assert figures("lamb")["moved by"] > 1e-3


def test_averages_move_once_per_window():
    found = figures("averaged_weights")
    assert found["EMA differs by"] < ROUNDING
    assert found["SWA by"] < ROUNDING
    assert found["weights in SWA"] == 6
    assert found["EMA of each micro-step by"] > 1e-3


def test_the_learning_rate_follows_the_window():
    found = figures("growing_window")
    assert found["examples"] == [16, 24, 32, 40, 48]
    assert found["seen before"] == [0, 16, 40, 72, 112]
    decays = 1 - 0.5 * np.array(found["seen before"]) / 160
    per_example = np.divide(found["learning rates"], found["examples"])
    np.testing.assert_allclose(per_example, 0.01 / 16 * decays, rtol=1e-6)


def test_tensorboard_has_a_point_of_each_metric_for_each_window(tmp_path):
    points = recipes_once.tensorboard(tmp_path)
    (file,) = tmp_path.iterdir()
    logged = {
        (value.tag, event.step): value.simple_value
        for event in events(file)
        for value in event.summary.value
    }
    assert {"grad_norm", "loss", "noise_scale", "update_norm"} <= points.keys()
    want = {
        (f"window/{name}", step): value
        for name, values in points.items()
        for step, value in enumerate(values, start=1)
    }
    assert len(want) == 3 * len(points)
    assert logged == pytest.approx(want)
    assert points["loss"] == sorted(points["loss"], reverse=True)


# Parts of other libraries.


def test_has_updated_moves_an_average_twice_where_apply_if_finite_calls_no_accumulator():
    assert figures("finite_average")["by has_updated"] > 1e-3


def test_gradient_step_tells_a_closed_window_from_a_call_that_did_not_reach_the_accumulator():
    tx = optax.apply_if_finite(accumulate(2, optax.sgd(1.0)), 5)
    params, states, told = jnp.ones(2), [], []
    states.append(tx.init(params))
    for value in (1.0, 1.0, jnp.nan, jnp.nan, 1.0, 1.0):
        _, opt_state = tx.update(jnp.full(2, value), states[-1], params)
        told.append((bool(has_updated(opt_state)), bool(closed_window(opt_state, states[-1]))))
        states.append(opt_state)
    by_has_updated, by_gradient_step = zip(*told, strict=True)
    assert by_has_updated == (False, True, True, True, False, True)
    assert by_gradient_step == (False, True, False, False, False, True)


def test_schedule_free_evaluates_other_parameters_than_it_trains():
    assert figures("schedule_free")["the training's parameters by"] > 1e-3


def test_schedule_free_around_the_accumulator_counts_micro_steps():
    assert figures("schedule_free")["with schedule_free outside by"] > 1e-3


def test_schedule_free_eval_params_does_not_take_the_state_of_a_chain():
    tx = chain(accumulate(2), optax.contrib.schedule_free(optax.sgd(0.1), 0.1))
    opt_state = tx.init(jnp.ones(2))
    with pytest.raises(AttributeError, match="b1"):
        optax.contrib.schedule_free_eval_params(opt_state, jnp.ones(2))
    evaluated = recipes_ecosystem.schedule_free_parameters(opt_state, jnp.ones(2))
    np.testing.assert_allclose(evaluated, jnp.ones(2), rtol=1e-6)


def test_the_logged_rate_is_that_of_the_update_and_train_state_step_gives_another():
    found = figures("logged_rate")
    rates = 1e-2 * (1 - np.arange(7) / 6)
    assert found["TrainState.step"] == [4, 8, 12, 16, 20, 24]
    np.testing.assert_allclose(found["learning rates"], rates[:6], rtol=1e-5)
    np.testing.assert_allclose(found["of the next update"], rates[1:], rtol=1e-5, atol=1e-9)
    assert found["by TrainState.step"][1:] == [0] * 5


def test_a_plain_checkpoint_continues_its_moments_and_counts():
    found = figures("continued_checkpoint")
    assert found["with new moments by"] > 1e-3
    assert found["gradient_step"] == 10


@pytest.mark.parametrize("form", ["accumulate", "chain", "behind a clip"])
def test_a_continued_state_is_that_of_the_transformation(form):
    clip, adam, params = optax.clip(1.0), optax.adam(0.1), jnp.ones(3)
    tx = {
        "accumulate": accumulate(2, clip, adam),
        "chain": chain(accumulate(2), clip, adam),
        "behind a clip": chain(clip, accumulate(2), clip, adam),
    }[form]
    _, old_state = laws.run(optax.chain(clip, adam), params, [jnp.ones(3)])
    state = recipes_ecosystem.continued_state(tx, params, old_state, 1)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(params))
    laws.assert_bitwise(optax.tree.get(state, "inner_state"), old_state)
    assert optax.tree.get(state, "gradient_step") == optax.tree.get(state, "count") == 1


def test_an_equinox_model_trains_alike_by_partition_and_by_filter():
    found = figures("equinox_model")
    assert found["partition differs by"] < ROUNDING
    assert found["filter by"] < ROUNDING
    assert found["moved by"] > 1e-3


# Memory.


def test_checkpoint_saves_memory_beside_what_the_window_saves():
    found = figures("checkpoint")
    assert found["of a micro-batch"] < found["temp bytes of the batch"] / 2
    assert found["and with checkpoint"] < found["of a micro-batch"] / 2


def test_the_planned_k_is_the_least_that_fits():
    found = figures("planned_k")
    assert found["fits"]
    assert found["planned peak"] <= 50_000 < found["peak bytes of the batch"]
    assert found["k"] == 4


def test_sums_on_the_host_change_no_bit():
    assert figures("host_memory") == {"memory of the sums": ["pinned_host"], "differs by": 0}


def kinds(opt_state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(opt_state)}


def test_only_sums_go_to_the_host_those_of_groups_too():
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    groups = {"a": accumulate(4, optax.adam(0.1)), "b": chain(optax.clip(1.0), accumulate(3))}
    tx = optax.partition(groups, {"a": "a", "b": "b"})
    on_host = recipes_memory.sums_on_host(tx)
    gradients = [{"a": jnp.full(3, i + 1.0), "b": jnp.full(2, -i)} for i in range(4)]
    want, want_state = laws.run(tx, params, gradients, per_step=[{}] * 3 + [{"flush": True}])
    got, state = laws.run(on_host, params, gradients, per_step=[{}] * 3 + [{"flush": True}])
    laws.assert_bitwise(got, want)
    laws.assert_bitwise(state, want_state)
    sums = optax.tree.get_all_with_path(state, "window_sum")
    assert len(sums) == 2
    assert kinds([x for _, x in sums]) == {"pinned_host"}
    rest = optax.tree.set(state, window_sum=None)
    assert kinds(rest) == {"device"}


def test_sums_on_the_host_stay_sharded_as_the_parameters_are_and_compile_once():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    params = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("data")))
    tx = recipes_memory.sums_on_host(accumulate(3, optax.sgd(1.0)))
    opt_state, update = jax.jit(tx.init)(params), jax.jit(chex.assert_max_traces(tx.update, n=1))
    for _ in range(4):
        _, opt_state = update(params, opt_state, params)
        sharding = opt_state.window_sum.sharding
        assert sharding.memory_kind == "pinned_host"
        assert sharding.is_equivalent_to(params.sharding.with_memory_kind("pinned_host"), 2)


# The command.


def test_the_command_prints_a_line_of_figures_for_each_name(capsys):
    recipes.main(["lamb", "warm_up"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("lamb: differs by ")
    assert lines[1].startswith("warm_up: inside: count 8; inside: rates [0, 0.5, 1, 0.933, ")


def test_an_unknown_name_is_told_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit_info:
        recipes.main(["lamb", "lars"])
    assert exit_info.value.code == 2
    assert f"must be among {', '.join(recipes.RECIPES)}; got 'lars'" in capsys.readouterr().err


def test_the_command_has_the_recipes_of_the_readme_in_its_order():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    assert re.findall(r"\[`(\w+)`\]\(examples/recipes_", readme) == list(recipes.RECIPES)
    assert all(recipe.__doc__ for recipe in recipes.RECIPES.values())


def test_a_nan_is_a_distance_of_nan():
    assert math.isnan(recipes_data.distance({"a": np.ones(2)}, {"a": np.array([1, np.nan])}))
    assert recipes_data.distance([np.ones(2), np.zeros(1)], [np.ones(2), np.ones(1)]) == 1
