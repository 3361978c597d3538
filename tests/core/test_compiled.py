"""Facts of the compiled micro-step: they do not depend on the machine's mood."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_accum import accumulate, flush

SHAPE, LEAVES = (256, 256), 4
SIZE = LEAVES * 4 * SHAPE[0] * SHAPE[1]  # bytes of the params
PARAMS = {f"w{i}": jnp.ones(SHAPE) for i in range(LEAVES)}


def compile_step(tx, params=PARAMS, **extra_args):
    """A micro-step as users write it: params and state donated, `apply_updates` inside."""

    def step(params, state, grads, extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    arguments = (params, jax.eval_shape(tx.init, params), params, extra_args)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def temp_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def entry(compiled):
    """The HLO text of the entry computation and of what it fuses, without the branches."""
    text = compiled.as_text()
    return text[text.index("\nENTRY ") :]


INNERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "clip, adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "muon": optax.contrib.muon(1e-3),
}
VARIANTS = {
    "plain": ({}, {}),
    "weighted": ({}, {"weight": 1.0}),
    "flushed": ({}, {"weight": 1.0, "flush": False}),
    # Not optax.skip_not_finite, which itself writes out a mask of the gradients' size.
    "skipping": (
        {"should_skip_update_fn": lambda g, *_: optax.skip_large_updates(g, 0, None, 9.0)},
        {},
    ),
    "sum": ({"normalize": "sum"}, {}),
    "schedule": ({"every_k": lambda step: 2 + step}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", INNERS)
def test_temp_memory_is_the_bare_inners_plus_one_percent_of_the_params(name, variant):
    if variant != "plain" and name not in ("adam", "momentum"):
        pytest.skip("the options are tried on two inners")
    options, extra = VARIANTS[variant]
    options = {"every_k": 8, **options}
    bare = temp_bytes(compile_step(optax.with_extra_args_support(INNERS[name])))
    ours = temp_bytes(
        compile_step(accumulate(options.pop("every_k"), INNERS[name], **options), **extra)
    )
    assert ours <= bare + SIZE / 100
    if name == "adam":
        assert ours <= SIZE / 100


@pytest.mark.parametrize("name", INNERS)
def test_every_k_of_one_is_no_larger_than_the_bare_inner(name):
    bare = compile_step(optax.with_extra_args_support(INNERS[name]))
    ours = compile_step(accumulate(1, INNERS[name]))
    assert temp_bytes(ours) <= temp_bytes(bare) + 256  # the counters
    assert "conditional(" not in ours.as_text()


def square_roots_outside_the_gate(compiled):
    """Computations with a square root, Adam's, that something else than a branch may run."""
    computations = compiled.as_text().split("\n\n")
    rooted = [c for c in computations if re.search(r" r?sqrt\(", c)]
    assert rooted
    names = [re.search(r"%?([\w.\-]+) \(", c)[1] for c in rooted]
    calls = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
    called = set(calls.findall(entry(compiled)))
    return [n for n, c in zip(names, rooted, strict=True) if n in called or "ENTRY" in c]


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_is_one_conditional_and_no_inner_work_outside_it(variant):
    options, extra = VARIANTS[variant]
    options = {"every_k": 8, **options}
    compiled = compile_step(
        accumulate(options.pop("every_k"), optax.adam(1e-3), **options), **extra
    )
    assert len(re.findall(r" conditional\(", compiled.as_text())) == 1
    assert square_roots_outside_the_gate(compiled) == []


def test_the_search_for_inner_work_finds_it():
    before = optax.stateless(lambda updates, _: jax.tree.map(jnp.sqrt, updates))
    compiled = compile_step(optax.chain(before, accumulate(8, optax.adam(1e-3))))
    assert len(square_roots_outside_the_gate(compiled)) == LEAVES


def test_all_state_is_updated_in_place():
    compiled = compile_step(accumulate(8, optax.adam(1e-3)))
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= 4 * SIZE  # params, sums and two moments


def test_the_accumulator_is_one_float32_copy_of_the_params():
    tx = accumulate(8, optax.sgd(1.0))
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    for params in (PARAMS, half):
        state = tx.init(params)
        assert sum(x.nbytes for x in jax.tree.leaves(state.window_sum)) == SIZE
        scalars = sum(x.nbytes for x in jax.tree.leaves(state._replace(window_sum=None)))
        assert scalars < 32


def test_bfloat16_params_need_one_bfloat16_copy_of_the_mean_at_most():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    ours = temp_bytes(compile_step(accumulate(8, optax.adam(1e-3)), half))
    bare = temp_bytes(compile_step(optax.adam(1e-3), half))
    assert ours <= bare + SIZE / 2 + SIZE / 100


def test_flush_compiles_to_one_conditional_too():
    tx = accumulate(8, optax.adam(1e-3))
    state = jax.eval_shape(tx.init, PARAMS)
    step = jax.jit(lambda s, p: flush(tx, s, p))
    assert len(re.findall(r" conditional\(", step.lower(state, PARAMS).compile().as_text())) == 1


def test_one_trace_serves_micro_steps_and_boundaries():
    tx = accumulate(lambda step: 1 + step % 3, optax.adam(1e-3))
    traces = []

    @jax.jit
    def step(params, state):
        traces.append(1)
        updates, state = tx.update(params, state, params, weight=1.0, flush=False)
        return optax.apply_updates(params, updates), state

    params, state = {"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)})
    for _ in range(9):
        params, state = step(params, state)
    assert len(traces) == 1
