"""Train in several processes, one reduction per window: each process has its part of each batch.

    python examples/multi_process.py                  # two processes on this machine, in 15 seconds

On machines of your own, in each the same with a number of its own (under Slurm and on a TPU pod jax
finds all three by itself: there it is `jax.distributed.initialize()`):

    python examples/multi_process.py --coordinator host0:1234 --num-processes 2 --process-id 0

A small model learns a linear map from sequences of uneven length; a mean over tokens must weigh
each device's part by the tokens in it. Where processes do not come, the others end after
`--timeout` with a message about their number; where one is lost, within twice that, with one that
names it (jax calls process 0, which the others report to, the leader).
"""

import argparse
import os
import subprocess
import sys
import threading
import time

import numpy as np

WINDOWS, EVERY_K, LENGTH, WIDTH = 20, 4, 16, 8
ROWS = 8  # of a micro-batch, on all devices together


def main(argv=None):
    args = parse(argv)
    if args.process_id is None:
        return launch(args)

    import jax

    if args.num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Before jax gives up, which ends the process without a word about numbers.
        watch = threading.Timer(args.timeout, give_up, [args])
        watch.start()
        try:
            jax.distributed.initialize(
                args.coordinator,
                args.num_processes,
                args.process_id,
                initialization_timeout=args.timeout + 5,
                heartbeat_timeout_seconds=args.timeout,
                shutdown_timeout_seconds=args.timeout,
            )
        finally:
            watch.cancel()
    train(args)
    return 0


def give_up(args):
    say(
        args,
        f"fewer than --num-processes={args.num_processes} processes came to {args.coordinator}"
        f" within {args.timeout} s; this is process {args.process_id}. Are all started, with one"
        " number of processes, and each with its own --process-id?",
    )
    os._exit(1)


def train(args):
    """One process of the training; the code is that of one."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from optax_accum import accumulate, chain, make_train_step

    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def loss_fn(params, batch):
        errors = ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean(-1)
        return (errors * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)

    step = make_train_step(
        loss_fn,
        chain(accumulate(EVERY_K, axis_name="data"), optax.adam(1e-1)),
        weight_fn=lambda batch: batch["mask"].sum(),
        mesh=mesh,
    )
    params = {"w": np.zeros((WIDTH, 2), np.float32), "b": np.zeros(2, np.float32)}
    opt_state = step.init(params)
    for number in range(WINDOWS * EVERY_K):
        # Its own rows alone: a real loader would read no others.
        rows = np.array_split(np.arange(ROWS), args.num_processes)[args.process_id]
        local = micro_batch(number, rows)
        batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), local)
        params, opt_state, metrics = step(params, opt_state, batch)
        if metrics["emitted"]:
            say(args, f"window {metrics['gradient_step']}: loss {metrics['loss']:.6f}")
        time.sleep(args.pause)
    digest = " ".join(np.asarray(x).tobytes().hex() for x in jax.tree.leaves(params))
    say(args, f"parameters {digest}")


def micro_batch(number, rows):
    """Sequences of uneven length, the same for a number and a row in any process."""
    parts = []
    for row in rows:
        rng = np.random.default_rng([number, row])
        x = rng.normal(size=(LENGTH, WIDTH)).astype(np.float32)
        length = rng.integers(0, LENGTH + 1)  # some have no token at all
        y = x[:, :2] - x[:, 2:4] + 1
        parts.append({"x": x, "y": y, "mask": (np.arange(LENGTH) < length).astype(np.float32)})
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def launch(args):
    """Start the processes on this machine, and end them all when one fails."""
    command = [sys.executable, __file__]
    for name in ("pause", "timeout", "coordinator", "num_processes"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    device_count = f"--xla_force_host_platform_device_count={args.devices_per_process}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": device_count}
    processes = [
        subprocess.Popen([*command, "--process-id", str(i)], env=environment)
        for i in range(args.num_processes)
    ]
    while any(process.poll() is None for process in processes):
        for i, process in enumerate(processes):
            if process.poll():
                for other in processes:
                    other.kill()
                print(f"process {i} was lost: exit status {process.returncode}", file=sys.stderr)
                return 1
        time.sleep(0.1)
    return int(any(process.returncode for process in processes))


def say(args, message):
    sys.stdout.write(f"[{args.process_id}] {message}\n")  # in one piece, beside the others
    sys.stdout.flush()


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", default="127.0.0.1:12765", help="host:port of process 0")
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--process-id", type=int, help="without it, all are started here")
    parser.add_argument("--devices-per-process", type=int, default=2, help="where started here")
    parser.add_argument("--timeout", type=int, default=40, help="seconds, for a silent process")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after a micro-step")
    args = parser.parse_args(argv)
    if ROWS % args.num_processes:
        parser.error(f"argument --num-processes: must divide {ROWS} rows, got {args.num_processes}")
    return args


if __name__ == "__main__":
    sys.exit(main())
