"""Recipes for memory: recomputation, a planned k, sums that wait in host memory."""

import functools

import jax
import jax.numpy as jnp
import optax

from optax_accum import accumulate, chain, plan_microbatches
from recipes_data import distance, loss_fn, new_batch, new_params, split, steps, train


def checkpoint(depth=16, width=64, size=256):
    """Put `jax.checkpoint` around each block: within a micro-batch, time for memory.

    Of a block its input is kept, and the rest is computed once more. `accumulate` only sees the
    gradient, which stays the same. Where the blocks are not at hand: `checkpoint_segments`.
    """
    key = jax.random.key(0)
    params = jax.random.normal(key, (depth, 2, width, width)) / jnp.sqrt(width)
    x = jax.random.normal(key, (size, width))

    def block(x, weights):
        return x + jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]), None

    tx = accumulate(4, optax.sgd(0.1))

    def compiled(block, size):
        def loss_fn(params, x):
            return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def micro_step(params, opt_state, x):
            grads = jax.grad(loss_fn)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return micro_step.lower(params, jax.eval_shape(tx.init, params), x[:size]).compile()

    def trained(step):
        new, opt_state = jnp.copy(params), tx.init(params)
        for part in jnp.split(x, 4):
            new, opt_state = step(new, opt_state, part)
        return new

    def temp_bytes(step):
        return step.memory_analysis().temp_size_in_bytes

    plain, less = compiled(block, size // 4), compiled(jax.checkpoint(block), size // 4)
    return {
        "temp bytes of the batch": temp_bytes(compiled(block, size)),
        "of a micro-batch": temp_bytes(plain),
        "and with checkpoint": temp_bytes(less),
        "differs by": distance(trained(less), trained(plain)),
    }


def planned_k(memory_budget=50_000):
    """Let the compiler choose k for a memory budget in bytes, and accumulate with it.

    `plan_microbatches` runs nothing, and shapes are enough. The plan is for the platform that
    compiles it.
    """
    params, batch, optimizer = new_params(), new_batch(512), optax.adam(1e-2)
    plan = plan_microbatches(loss_fn, params, batch, memory_budget=memory_budget, tx=optimizer)
    k = plan.num_microbatches
    got = train(chain(accumulate(k), optimizer), params, split(batch, k))
    want = train(optimizer, params, [batch])
    planned = next(row for row in plan.rows if row.num_microbatches == k)
    return {
        "peak bytes of the batch": plan.rows[0].peak,
        "fits": plan.fits,
        "k": k,
        "planned peak": planned.peak,
        "differs by": distance(got, want),
    }


def sums_on_host(tx):
    """`tx`, with the sums of its accumulators in host memory between micro-steps.

    Put it outermost, where `chain` needs to see no accumulator in it, and close a short window by
    `update(..., flush=True)`.
    """

    def move(opt_state, space):
        def is_sum(path):
            return any(getattr(key, "name", None) == "window_sum" for key in path)

        def put(path, x):
            return jax.device_put(x, space) if is_sum(path) else x

        return jax.tree.map_with_path(put, opt_state)

    def update(gradients, opt_state, params=None, **extra_args):
        opt_state = move(opt_state, jax.memory.Space.Device)
        updates, opt_state = tx.update(gradients, opt_state, params, **extra_args)
        return updates, move(opt_state, jax.memory.Space.Host)

    def init(params):
        return move(tx.init(params), jax.memory.Space.Host)

    return optax.GradientTransformationExtraArgs(init, update)


def host_memory():
    """Keep the window's sums in host memory between micro-steps, on the device within them.

    Device memory is free of them from one `update` to the next: during the forward and backward
    pass, if that is a call of its own (in one compiled step XLA decides when to fetch them). The
    price is the sums to the device and back in each micro-step; it has not been measured on an
    accelerator. Do not donate this state: JAX then aborts (0.10 and 0.12, on CPU). To donate the
    rest of it, pass `window_sum` as an argument of its own.
    """
    params, micro_batches = new_params(), 2 * split(new_batch(32), 4)
    tx = chain(accumulate(4), optax.adam(1e-2))
    kinds, differences = set(), []
    runs = [steps(each, params, micro_batches) for each in (sums_on_host(tx), tx)]
    for (got, opt_state), (want, _) in zip(*runs, strict=True):
        sums = jax.tree.leaves(optax.tree.get(opt_state, "window_sum"))
        kinds |= {x.sharding.memory_kind for x in sums}
        differences.append(distance(got, want))
    return {"memory of the sums": sorted(kinds), "differs by": max(differences)}
