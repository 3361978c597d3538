"""Cost of the gate, the CIFAR arms, and peak memory against the plan, on a machine with a GPU.

    python benchmarks/gpu.py --data-dir DIR         # on a GPU; DIR as in examples/cifar_flax.py
    python benchmarks/gpu.py --parts "cost/adam 400x10k" arm/16x4 --runs 1 --train-size 200 \
        --epochs 1 --out results/trial              # cut down to a few minutes on a CPU

Each part has a process of its own, so that its peak is its own. Finished parts are kept in
parts.json under --out: run the same command again to go on where it was stopped. A part that was
measured with other settings is measured again.

cost/CASE/GATE is the table of cost.py; with the gate as `select` both branches run in every
micro-step, as they do under `vmap`. arm/BxK is an arm of examples/cifar_flax.py. plan/CASE/SHARE
plans a step of window.py's case for that share of the memory that the whole batch takes, runs it,
and sets the bytes of the plan beside the peak that the device reports.
"""

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
from concurrent import futures
from unittest import mock

import cost
import jax
import jax.numpy as jnp
import optax
import window

from optax_accum import microbatch_value_and_grad, plan_microbatches
from optax_accum._core import gate as gate_module

CIFAR = pathlib.Path(__file__).parents[1] / "examples" / "cifar_flax.py"
GATES = ("cond", "select")
ARMS = ("64x1", "16x4", "16x1")
PARTS = [f"cost/{case}/{gate}" for case in cost.CASES for gate in GATES]
PARTS += [f"arm/{arm}" for arm in ARMS]
PARTS += [f"plan/{case}/{share}" for case in ("cnn", "transformer") for share in ("1", "0.2")]

gate_as_cond = gate_module.select_branch


def gate_as_select(predicate, emit, hold, *operands):
    """Run both branches, and select between their results."""
    if not isinstance(predicate, jax.core.Tracer):
        return gate_as_cond(predicate, emit, hold, *operands)

    def pick(emitted, held):
        return jnp.where(predicate, emitted, held)

    return jax.tree.map(pick, emit(*operands), hold(*operands))


def measure_cost(case, gate, runs):
    """Rows of cost.py for one case, with the gate as asked."""
    with mock.patch.object(
        gate_module, "select_branch", {"cond": gate_as_cond, "select": gate_as_select}[gate]
    ):
        rows = cost.measure(case, runs)
    for row in rows:
        if row["method"] == "accumulate":
            row["method"] = f"accumulate, gate as {gate}"
    device = jax.devices()[0].device_kind
    return {"rows": rows, "versions": {"jax": jax.__version__, "device": device}}


def measure_arm(arm, out, args):
    """The arm's row of results.json."""
    command = [sys.executable, str(CIFAR), "--arms", arm, "--out", str(out / arm)]
    command += ["--epochs", str(args.epochs), "--train-size", str(args.train_size)]
    command += ["--test-size", "10000"]
    command += ["--drift-steps", "0"]  # that picture is made on a CPU just as well
    command += ["--data-dir", args.data_dir] if args.data_dir else []
    command += ["--data-name", args.data_name] if args.data_name else []
    subprocess.run(command, check=True)
    (row,) = json.loads((out / arm / "results.json").read_text())
    del row["curve"]
    return row


def measure_plan(case, share, runs):
    """What the plan says of a step, and what it took."""
    net_loss, params, batch, _ = window.case(case)

    def loss_fn(params, batch):
        return net_loss(params, *batch)

    tx = optax.adam(1e-3)
    plan = functools.partial(plan_microbatches, loss_fn, params, batch, tx=tx)
    whole = plan(memory_budget=1e15).rows[0].peak
    row = next(row for row in plan(memory_budget=float(share) * whole).rows if row.fits)
    value_and_grad = microbatch_value_and_grad(loss_fn, row.num_microbatches)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, gradients = value_and_grad(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, batch = tx.init(params), jax.device_put(batch)
    for _ in range(runs):
        params, opt_state, loss = jax.block_until_ready(step(params, opt_state, batch))
    device = jax.devices()[0]
    return {
        "case": case,
        "split": str(row),
        "planned": row.peak,
        "peak_bytes_in_use": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "loss": float(loss),
        "versions": {"jax": jax.__version__, "device": device.device_kind},
    }


def measure(part, out, args):
    kind, *names = part.split("/")
    if kind == "arm":
        return measure_arm(*names, out, args)
    run = {"cost": measure_cost, "plan": measure_plan}[kind]
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(run, *names, args.runs).result()


def settings(part, args):
    """What a part's numbers depend on, beside the machine."""
    if not part.startswith("arm/"):
        return {"runs": args.runs}
    return {name: getattr(args, name) for name in ("train_size", "epochs", "data_dir", "data_name")}


def measured_on(parts):
    """Device, jax version and date of parts, one a line."""
    lines = {
        f"{part['result']['versions']['device']}, jax {part['result']['versions']['jax']},"
        f" {part['date']}, "
        + ", ".join(f"{k} {v}" for k, v in part["settings"].items() if v and k != "data_dir")
        for part in parts
    }
    return "\n".join(sorted(lines))


def cost_table(parts):
    """The tables of cost.py, with one line more: the gate as a select."""
    rows = []
    for case in cost.CASES:
        for gate in GATES:
            measured = parts.get(f"cost/{case}/{gate}", {"result": {"rows": []}})["result"]["rows"]
            seen = {(row["case"], row["method"]) for row in rows}
            rows += [row for row in measured if (row["case"], row["method"]) not in seen]
    return cost.table(rows)


def megabytes(size):
    return "not reported" if size is None else f"{size / 1e6:.1f} MB"


def plan_table(rows):
    lines = ["| step | planned | peak in use | peak / planned |", "|---|---|---|---|"]
    for row in rows:
        planned, peak = row["planned"], row["peak_bytes_in_use"]
        ratio = "" if peak is None else f"{peak / planned:.2f}"
        sizes = f"{megabytes(planned)} | {megabytes(peak)}"
        lines.append(f"| {row['case']}, {row['split']} | {sizes} | {ratio} |")
    return "\n".join(lines)


def arm_table(rows):
    lines = [
        "| arm | test accuracy | images/s | seconds | compiled temp | peak in use | data |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['arm']} | {100 * row['test_accuracy']:.1f} % | {row['images_per_second']:.0f}"
        f" | {row['seconds']:.0f} | {megabytes(row['temp_bytes'])}"
        f" | {megabytes(row['peak_bytes_in_use'])} | {row['data']} |"
        for row in rows
    ]
    return "\n".join(lines)


def report(parts):
    costs = {name: part for name, part in parts.items() if name.startswith("cost/")}
    arms = [parts[f"arm/{arm}"] for arm in ARMS if f"arm/{arm}" in parts]
    plans = [part for name, part in parts.items() if name.startswith("plan/")]
    if costs:
        print(f"\n{measured_on(costs.values())}\n{cost_table(costs)}")
    if arms:
        rows = [part["result"] for part in arms]
        print(f"\n{measured_on(arms)}\n{arm_table(rows)}")
    if plans:
        rows = [part["result"] for part in plans]
        print(f"\n{measured_on(plans)}\n{plan_table(rows)}")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="results/gpu")
    parser.add_argument("--train-size", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data-dir", help="folder with cifar-10-batches-bin or a TFDS CIFAR-10")
    parser.add_argument("--data-name", help="name to report results under (default: what is read)")
    parser.add_argument("--runs", type=int, default=5, help="runs of cost.py (default: 5)")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=[""],
        metavar="PART",
        help=f"run only what starts with these, of {'; '.join(PARTS)}",
    )
    args = parser.parse_args(argv)
    for start in args.parts:
        if not any(part.startswith(start) for part in PARTS):
            parser.error(f"argument --parts: must start a name of {PARTS}, got {start!r}")
    return args


def main(argv=None):
    args = parse_args(argv)
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    store = out / "parts.json"
    parts = json.loads(store.read_text()) if store.exists() else {}
    failed = []
    for name in (part for part in PARTS if part.startswith(tuple(args.parts))):
        if name in parts and parts[name]["settings"] == settings(name, args):
            print(f"{name}: finished {parts[name]['date']}", flush=True)
            continue
        print(f"{name}: running", flush=True)
        try:
            result = measure(name, out, args)
        except Exception as error:  # the other parts do not depend on it
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        date = datetime.datetime.now().strftime("%Y-%m-%d")
        parts[name] = {"settings": settings(name, args), "date": date, "result": result}
        half_written = store.with_suffix(".tmp")
        half_written.write_text(json.dumps(parts, indent=1))
        os.replace(half_written, store)
    report(parts)
    if failed:
        sys.exit(f"Not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
