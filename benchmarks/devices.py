"""What crosses eight devices in a window of k=8, counted, and what a window takes there.

    python benchmarks/devices.py          # eight virtual devices; three minutes on two CPU cores
    python benchmarks/devices.py --runs 1 --leaves 4 --size 100

A model of `--leaves` matrices of `--size` squared, Adam, one example a device and micro-batch. The
reductions are read from the compiled program: what runs in each call counts k times, what stands in
a conditional once. Times are medians over runs of the methods' turns; virtual devices share the
cores, so the ratios tell, not the milliseconds. `compute alone` is the gradient and its sum, on
each device by itself, without an update.
"""

import argparse
import functools
import os
import statistics
import time

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_accum import accumulate, chain, make_train_step, state_specs, varying
from optax_accum.testing import collectives

N, K = 8, 8
ADAM = optax.adam(1e-3)
MESH = jax.make_mesh((N,), ("data",), (AxisType.Auto,))
REPLICATED, SPLIT = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))


def loss_fn(params, x):
    """A chain of matrices: with little to compute, what else it costs is seen."""
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def jitted(step):
    return jax.jit(step, donate_argnums=(0, 1))


def mapped(body, specs):
    return jitted(
        jax.shard_map(body, mesh=MESH, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    )


def train_step(params):
    """Our own, with its losses and norms."""
    step = make_train_step(loss_fn, chain(accumulate(K, axis_name="data"), ADAM), mesh=MESH)
    return lambda *args: step(*args)[:2], step.lower, params, step.init(params)


def by_hand(params):
    """The README's loop in `shard_map`."""
    tx = chain(accumulate(K, axis_name="data"), ADAM)
    specs = state_specs(jax.eval_shape(tx.init, params), "data")

    def body(params, state, x):
        gradients = jax.grad(loss_fn)(varying(params, "data"), x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = mapped(body, specs)
    init = jax.jit(jax.shard_map(tx.init, mesh=MESH, in_specs=P(), out_specs=specs))
    return step, step.lower, params, init(params)


def with_pmap(params):
    tx = chain(accumulate(K, axis_name="data"), ADAM)

    def body(params, state, x):
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    pmapped = jax.pmap(body, axis_name="data", donate_argnums=(0, 1))
    params = on_each(params)

    def split(step):
        return lambda params, state, x: step(params, state, x[:, None])

    state = jax.pmap(tx.init, axis_name="data")(params)
    return split(pmapped), split(pmapped.lower), params, state


def automatic(tx, params):
    """`jit` alone: the batch is split, and XLA reduces each gradient."""

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(REPLICATED, None))
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step, step.lower, params, jax.device_put(tx.init(params), REPLICATED)


def multi_steps(params):
    """`optax.MultiSteps` behind the mean of each micro-step."""
    tx = optax.MultiSteps(ADAM, K)

    def body(params, state, x):
        gradients = lax.pmean(jax.grad(loss_fn)(varying(params, "data"), x), "data")
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = mapped(body, P())
    return step, step.lower, params, jax.device_put(tx.init(params), REPLICATED)


def sharded(params):
    """Parameters sharded as well (FSDP): nothing is written for it but where they lie."""
    params = jax.device_put(params, SPLIT)
    tx = accumulate(K, ADAM)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(SPLIT, None))
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step, step.lower, params, jax.jit(tx.init)(params)


def compute_alone(params):
    def body(params, state, x):
        gradients = jax.grad(loss_fn)(varying(params, "data"), x)
        return params, jax.tree.map(lambda s, g: s + g[None], state, gradients)

    step = mapped(body, P("data"))
    return step, step.lower, params, on_each(jax.tree.map(jnp.zeros_like, params))


METHODS = {
    "make_train_step": train_step,
    "accumulate(k, axis_name=...) in shard_map": by_hand,
    "accumulate(k, axis_name=...) in pmap": with_pmap,
    "accumulate(k) under jit": functools.partial(automatic, accumulate(K, ADAM)),
    "accumulate(k) under jit, parameters sharded": sharded,
    "MultiSteps under jit": functools.partial(
        automatic, optax.MultiSteps(ADAM, K).gradient_transformation()
    ),
    "MultiSteps and pmean in shard_map": multi_steps,
    "compute alone": compute_alone,
}


def on_each(tree):
    """One on each device, along a leading axis."""
    return jax.device_put(jax.tree.map(lambda x: jnp.stack([x] * N), tree), SPLIT)


def params_of(args):
    keys = jax.random.split(jax.random.key(0), args.leaves)

    def draw(key):
        return jax.random.normal(key, (args.size, args.size)) / args.size**0.5

    return jax.device_put({f"w{i}": draw(key) for i, key in enumerate(keys)}, REPLICATED)


def main():
    args = parse()
    x = jax.device_put(jnp.ones((N, args.size)), SPLIT)
    sum_bytes = 4 * args.leaves * args.size**2
    arms, times = {}, {}
    print("| how | reductions a window | bytes a window and device, S = the gradients in float32 |")
    print("|---|---|---|")
    for name, make in METHODS.items():
        step, lower, params, state = make(params_of(args))
        found = collectives(lower(params, state, x).compile())
        assert not found.in_loops.count
        count = K * found.outside.count + found.in_conditionals.count
        size = K * found.outside.bytes + found.in_conditionals.bytes
        beside = size % sum_bytes
        shown = f"{size // sum_bytes} S" + (f" + {beside}" if beside else "")
        print(f"| {name} | {count} | {shown} |", flush=True)
        arms[name], times[name] = [step, params, state], []

    for run in range(args.runs + 1):
        for name, arm in arms.items():
            began = time.perf_counter()
            for _ in range(K):
                arm[1:] = arm[0](*arm[1:], x)
            jax.block_until_ready(arm[1:])
            if run:  # the first warms up
                times[name].append(1e3 * (time.perf_counter() - began))
    print(f"\n{args.leaves} matrices of {args.size} x {args.size}, {N} devices, k={K}")
    print("| how | ms a window | MultiSteps and pmean takes |")
    print("|---|---|---|")
    for name, row in times.items():
        pairs = zip(times["MultiSteps and pmean in shard_map"], row, strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        print(f"| {name} | {statistics.median(row):.0f} | {ratio:.1f} x |")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--leaves", type=int, default=20)
    parser.add_argument("--size", type=int, default=400, help="of a square matrix")
    return parser.parse_args()


if __name__ == "__main__":
    main()
