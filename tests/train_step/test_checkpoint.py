"""Nothing is lost: law 8 with Orbax, another k, another number of devices, and SIGKILL."""

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import resume as example
from optax_accum import accumulate, chain, make_train_step

MESH = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
X = np.random.default_rng(0).normal(size=(20, 16, 2)).astype(np.float32)
SCRIPT = Path(__file__).parents[2] / "examples" / "resume.py"


def params_of():
    return {"w": jnp.arange(6.0).reshape(2, 3) / 7, "b": jnp.ones(3)}


def loss_fn(params, model_state, x):
    new_state = {"mean": 0.9 * model_state["mean"] + 0.1 * x.mean(0)}
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2), new_state


def step_of(k, mesh, inner=None):
    inner = inner or optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))
    tx = chain(accumulate(k, axis_name=mesh and "data"), inner)
    return make_train_step(loss_fn, tx, model_state=True, mesh=mesh)


def start(step):
    params, model_state = params_of(), {"mean": jnp.zeros(2)}
    return params, step.init(params, model_state), model_state


def advance(step, state, batches):
    for x in batches:
        params, opt_state, _, model_state = step(*state[:2], x, model_state=state[2])
        state = params, opt_state, model_state
    return state


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("mesh", [None, MESH], ids=["plain", "mesh"])
def test_orbax_restores_after_any_micro_step_and_goes_on_bit_for_bit(k, mesh, tmp_path):
    step = step_of(k, mesh)
    state, end = start(step), 2 * k
    with ocp.StandardCheckpointer() as checkpointer:
        for done in range(1, k + 1):
            state = advance(step, state, X[done - 1 : done])
            checkpointer.save(tmp_path / str(done), state)
            checkpointer.wait_until_finished()
        want = advance(step, state, X[k:end])
        for done in range(1, k + 1):
            restored = checkpointer.restore(tmp_path / str(done), start(step))
            chex.assert_trees_all_equal(advance(step, restored, X[done:end]), want)


@pytest.mark.parametrize("new_k", [1, 2, 5, 8])
@pytest.mark.parametrize("mesh", [None, MESH], ids=["plain", "mesh"])
def test_another_k_goes_on_with_what_was_gathered(new_k, mesh, tmp_path):
    old, new = step_of(4, mesh, optax.sgd(0.5)), step_of(new_k, mesh, optax.sgd(0.5))
    state = advance(old, start(old), X[:3])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        # The state of k=1 has no sum, so it is restored into that of the old k.
        state = checkpointer.restore(tmp_path / "state", start(old))
    size = max(new_k, 4)  # a window of fewer is full with the next
    params, opt_state, _ = advance(new, state, X[3:size])

    def loss(params):
        return loss_fn(params, {"mean": jnp.zeros(2)}, X[:size].reshape(-1, 2))[0]

    want = jax.tree.map(lambda p, g: p - 0.5 * g, params_of(), jax.grad(loss)(params_of()))
    chex.assert_trees_all_close(params, want, rtol=1e-5)
    assert opt_state[-1].micro_step == 0
    assert opt_state[-1].gradient_step == 1


def resume(*arguments, devices=2):
    count = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": count},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return re.search(r"parameters (\w+)", out)[1]


@pytest.mark.slow
def test_a_run_goes_on_under_another_k_and_on_other_devices(tmp_path):
    for micro_steps, k, devices in ((3, 1, 2), (6, 4, 2), (8, 4, 4), (16, 4, 1)):
        options = ["--micro-steps", micro_steps, "--every-k", k]
        finished(resume("--dir", tmp_path, *options, devices=devices))
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        params = manager.restore(16)["params"]

    # Three windows of one, three of four, and one that is open.
    ends, inner = [1, 2, 3, 7, 11, 15], optax.adamw(1e-2)
    _, want, _ = example.fresh(4)
    inner_state = inner.init(want)
    for first, last in itertools.pairwise([0, *ends]):
        batch = map(np.concatenate, zip(*map(example.micro_batch, range(first, last)), strict=True))
        gradients = jax.grad(example.loss_fn)(want, tuple(batch))
        updates, inner_state = inner.update(gradients, inner_state, want)
        want = optax.apply_updates(want, updates)
    chex.assert_trees_all_close(params, jax.device_get(want), rtol=1e-4)


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_as_one_that_is_not(tmp_path):
    micro_steps = 60
    uninterrupted = resume("--dir", tmp_path / "whole", "--micro-steps", micro_steps)
    rng, starts = random.Random(0), []
    for _ in range(10):
        process = resume("--dir", tmp_path / "cut", "--micro-steps", micro_steps)
        steps_to_live = rng.randint(2, 5)
        for line in process.stdout:
            if found := re.match(r"goes on after (\d+)", line):
                starts.append(int(found[1]))
            steps_to_live -= line.startswith("micro-batch")
            if not steps_to_live:
                break
        process.kill()
        process.communicate()
        assert process.returncode == -9
    last = resume("--dir", tmp_path / "cut", "--micro-steps", micro_steps)
    assert finished(last) == finished(uninterrupted)
    assert len(starts) >= 8  # it did go on
    assert starts == sorted(starts)
    assert any(start % 8 for start in starts)  # in mid-window too
