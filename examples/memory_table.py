"""What accumulation, `jax.checkpoint` and 16 bits save, beside the figures that articles give.

    python examples/memory_table.py
        23 steps are compiled, and none is run, so any machine will do: ten minutes on two CPU
        cores. Finished cells are kept: run it again to go on. ResNet-50 takes 34 GB whole and 9 GB
        in 4 x 64, with checkpoints 11 GB whole; BERT-base at batch 8 takes 9.2 GB, with them 2.3

    python examples/memory_table.py --time
        times a ResNet-50 at 64 x 64, whose arms take turns: ten minutes

A cell MODEL/DTYPE/METHOD/KxMICROBATCH is a training step: loss and gradient by
`microbatch_value_and_grad`, and the update. Its peak is what the compiled program takes: arguments,
temporaries and results, less what is donated. The models are ResNet-50 at 224 x 224 with BatchNorm
or GroupNorm and SGD with momentum, and BERT-base at 512 tokens with AdamW. Parameters are float32,
and the dtype is that of the activations; `checkpoint` recomputes each residual block or layer,
`plan` asks `plan_microbatches`, and over 8 devices parameters, optimizer state and batch are
sharded. Under --out: memory_table.json and .png.
"""

import argparse
import functools
import math
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable
from concurrent import futures
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import memory_plots
from cells import Results
from memory_claims import BIG, CALL, CALLS, claims_table, memory_table, time_table
from memory_models import Bert, ResNet, init, loss_of
from optax_accum import accumulate, chain, microbatch_value_and_grad, plan_microbatches
from training import commit, positive

DEVICES, BUDGET = 8, 11e9
PARTS = ("params", "opt_state", "statistics", "batch", "accumulator", "temporaries")


class Model(NamedTuple):
    """A network, the shape of one input and the optimizer."""

    net: Callable  # net(dtype=..., checkpoint=...)
    example: jax.ShapeDtypeStruct
    tx: optax.GradientTransformation


_IMAGE, _SGD = jax.ShapeDtypeStruct((224, 224, 3), jnp.float32), optax.sgd(0.1, momentum=0.9)
MODELS = {
    "resnet50-batch": Model(functools.partial(ResNet, "batch"), _IMAGE, _SGD),
    "resnet50-group": Model(functools.partial(ResNet, "group"), _IMAGE, _SGD),
    "bert-base": Model(Bert, jax.ShapeDtypeStruct((512,), jnp.int32), optax.adamw(1e-4)),
}


class Cell(NamedTuple):
    """A step to compile; named "resnet50-batch/float32/plain/4x64"."""

    model: str
    dtype: str
    method: str  # "plain", "checkpoint" or "plan"
    k: int
    microbatch: int
    devices: int = 1

    def __str__(self) -> str:
        name = f"{self.model}/{self.dtype}/{self.method}/{self.k}x{self.microbatch}"
        return f"{name}/{self.devices} devices" if self.devices > 1 else name


_WAYS = [(dtype, way) for dtype in ("float32", "bfloat16") for way in ("plain", "checkpoint")]
CELLS = [
    *(
        Cell(f"resnet50-{norm}", *way, *split)
        for norm in ("batch", "group")
        for way in _WAYS
        for split in ((1, 256), (4, 64))
    ),
    *(Cell("bert-base", *way, 1, 8) for way in _WAYS),
    Cell("bert-base", "float32", "plan", 1, 32),
    *(Cell("bert-base", "float32", "plain", *split, DEVICES) for split in ((1, 32), (4, 8))),
]


def step_of(net, tx, k):
    """A training step of k micro-batches."""
    value_and_grad = microbatch_value_and_grad(
        loss_of(net), k, batch_argnums=(2, 3), carry_argnum=1
    )

    def step(params, opt_state, stats, batch):
        (loss, stats), gradients = value_and_grad(params, stats, *batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats, loss

    return step


def sharded(mesh, state):
    """Each array along its largest dimension that divides."""

    def of(x):
        divides = [i for i, size in enumerate(x.shape) if size % mesh.size == 0]
        largest = max(divides, key=lambda i: x.shape[i], default=None)
        spec = P() if largest is None else P(*[None] * largest, *mesh.axis_names)
        return x.update(sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of, state)


def bytes_of(tree):
    """On one device."""

    def shard(x):
        return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)

    return sum(math.prod(shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled_step(step, state, batch):
    """The compiled step, which leaves the state where it lies, and its bytes on one device."""
    stays = jax.tree.map(lambda x: x.sharding, state)
    donate = {"donate_argnums": (0, 1, 2), "keep_unused": True}
    jitted = jax.jit(step, out_shardings=(*stays, None), **donate)
    compiled = jitted.lower(*state, batch).compile()
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return compiled, memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def measure(cell):
    """Compile a cell; returns what it takes."""
    example, tx = MODELS[cell.model][1:]
    # A layer with a dtype of its own would undo the plan's cast to bfloat16.
    dtype = None if cell.method == "plan" else cell.dtype
    net = MODELS[cell.model].net(dtype=dtype, checkpoint=cell.method == "checkpoint")
    size = cell.k * cell.microbatch
    inputs = jax.ShapeDtypeStruct((size, *example.shape), example.dtype)
    batch = inputs, jax.ShapeDtypeStruct((size,), jnp.int32)
    params, stats = jax.eval_shape(functools.partial(init, net), jax.random.key(0), inputs)
    if cell.method == "plan":

        def loss_fn(params, batch):
            return loss_of(net)(params, stats, *batch)[0]

        plan = plan_microbatches(loss_fn, params, batch, memory_budget=BUDGET, tx=tx)
        rows = [row._asdict() | {"peak": row.peak} for row in plan.rows]
        return {"table": str(plan), "advice": plan.advice, "rows": rows}
    state = params, jax.eval_shape(tx.init, params), stats
    if cell.devices > 1:
        mesh = jax.make_mesh((cell.devices,), ("data",), axis_types=(AxisType.Auto,))
        over_examples = NamedSharding(mesh, P("data"))
        net = net.clone(sharding=over_examples)
        state = sharded(mesh, state)
        batch = jax.tree.map(lambda x: x.update(sharding=over_examples), batch)
    _, peak = compiled_step(step_of(net, tx, cell.k), state, batch)
    sums = bytes_of(state[0]) if cell.k > 1 else 0  # float32, as the parameters
    known = [*map(bytes_of, (*state, batch)), sums]
    return dict(zip(PARTS, (*known, peak - sum(known)), strict=True)) | {"peak": peak}


def _virtual_devices(devices):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}"
    jax.config.update("jax_platforms", "cpu")


def measure_apart(cell):
    """`measure`, in a process with virtual devices: they change what is compiled for one."""
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, spawn, _virtual_devices, (cell.devices,)) as pool:
        return pool.submit(measure, cell).result()


class Timed:
    """An arm of the time part, with its own state."""

    def __init__(self, start, net, tx, batch, k=1, calls=1):
        params, stats = jax.tree.map(jnp.copy, start)  # donated
        self.state = params, tx.init(params), stats
        self.parts = [tuple(x[i::calls] for x in batch) for i in range(calls)]
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state)
        self.step, self.peak = compiled_step(step_of(net, tx, k), like, self.parts[0])
        self.ms = []
        self.update()
        self.ms.clear()  # that was to warm up

    def update(self):
        began = time.perf_counter()
        for part in self.parts:
            *self.state, _ = self.step(*self.state, part)
        jax.block_until_ready(self.state)
        self.ms.append(round(1e3 * (time.perf_counter() - began), 1))


def measure_time(model, pixels, size, runs):
    """Milliseconds of an update, by arm; the arms take turns within a run."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(size, pixels, pixels, 3)).astype(np.float32)
    batch = jnp.asarray(images), jnp.asarray(rng.integers(0, 1000, size), jnp.int32)
    net, tx = model.net(), model.tx
    start = jax.jit(functools.partial(init, net))(jax.random.key(0), batch[0])
    timed = functools.partial(Timed, start)
    arms = {
        BIG: timed(net, tx, batch),
        "checkpoint": timed(model.net(checkpoint=True), tx, batch),
        "bfloat16": timed(model.net(dtype="bfloat16"), tx, batch),
        CALL: timed(net, tx, batch, k=4),
        CALLS: timed(net, chain(accumulate(4), tx), batch, calls=4),
    }
    for _ in range(runs):
        for arm in arms.values():
            arm.update()

    def of_arms(name):
        return {label: getattr(arm, name) for label, arm in arms.items()}

    return {"ms": of_arms("ms"), "peak": of_arms("peak")}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", action="store_true", help="time, in place of memory")
    parser.add_argument("--pixels", type=positive, default=64, help="height and width, for --time")
    parser.add_argument("--batch", type=positive, default=32, help="images, for --time")
    parser.add_argument("--runs", type=positive, default=7, help="of each arm, for --time")
    parser.add_argument("--out", default="results")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    path = pathlib.Path(args.out) / "memory_table.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    platform = jax.default_backend()
    of_file = functools.partial(
        Results, path, cell_of=lambda row: row["cell"], order=lambda row: row["data"]
    )
    shapes = {name: list(model.example.shape) for name, model in MODELS.items()}
    memory = of_file(shapes, f"compiled for {platform}")
    timed = of_file({"pixels": args.pixels, "batch": args.batch}, f"timed on {platform}")

    def keep(results, cell, get):
        began = time.perf_counter()
        row = {"cell": cell, **get(), "seconds": round(time.perf_counter() - began)}
        print(f"{cell}: {row['seconds']} s", flush=True)
        versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        facts = {"config": results.config, "data": results.data}
        results.add(row | facts | {"versions": versions, "commit": commit()})

    if args.time:
        sizes = args.pixels, args.batch, args.runs
        get = functools.partial(measure_time, MODELS["resnet50-group"], *sizes)
        keep(timed, "resnet50-group/time", get)
    else:
        cells = {str(cell): cell for cell in CELLS}
        for name in memory.left(list(cells)):
            where = measure if cells[name].devices == 1 else measure_apart
            keep(memory, name, functools.partial(where, cells[name]))
    rows = [row for row in memory.rows() if row["data"] in (memory.data, timed.data)]
    print("\n\n".join(["", claims_table(rows), memory_table(rows), time_table(rows)]))
    memory_plots.draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
