"""A run that may be cut at any moment and goes on where it was, in the middle of a window too.

    python examples/resume.py --dir DIR       # 2 s; cut it (Ctrl-C, kill -9), and start it again

Orbax keeps parameters and optimizer state after `--save-every` micro-steps, under the number of
micro-batches so far: that number is where the data goes on. Started again with another number of
devices, the open window is carried over to them; with another `--every-k`, it goes on under that.
"""

import argparse
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType

from optax_accum import accumulate, chain, make_train_step, reshard_window


def main(argv=None):
    args = parse(argv)
    step, params, opt_state = fresh(args.every_k)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(Path(args.dir).absolute(), item_handlers=handler) as manager:
        done = manager.latest_step() or 0
        if done:
            params, opt_state = restored(manager, args.every_k)
            print(f"goes on after {done} micro-batches", flush=True)
        for number in range(done, args.micro_steps):
            params, opt_state, _ = step(params, opt_state, micro_batch(number))
            if (number + 1) % args.save_every == 0:
                state = {"params": params, "opt_state": opt_state}
                manager.save(number + 1, args=ocp.args.StandardSave(state))
            print(f"micro-batch {number + 1}", flush=True)
    print(
        "parameters", hashlib.sha256(b"".join(map(bytes_of, jax.tree.leaves(params)))).hexdigest()
    )


def fresh(every_k):
    """The train step on all devices, with parameters and state to start from."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    tx = chain(accumulate(every_k, axis_name="data"), optax.adamw(1e-2))
    step = make_train_step(loss_fn, tx, mesh=mesh)
    params = {"w": jnp.full((8, 16), 0.1), "v": jnp.full((16,), 0.1)}
    return step, params, step.init(params)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def micro_batch(number):
    """Micro-batch `number`, whatever came before it."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(16, 8)).astype(np.float32)
    return x, np.sin(x[:, 0])


def restored(manager, every_k):
    """The last checkpoint, for the devices and the k of now."""
    saved = manager.item_metadata(manager.latest_step())["opt_state"][-1]
    num_devices, had_sum = saved["window_weight"].shape[0], saved["window_sum"] is not None
    _, params, opt_state = fresh(2 if had_sum else 1)  # it is the same for each k from 2
    like = {"params": params, "opt_state": opt_state}
    if num_devices != jax.device_count():
        like["opt_state"] = jax.eval_shape(lambda x: reshard_window(x, num_devices), opt_state)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like)
    state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
    if num_devices != jax.device_count():
        state["opt_state"] = reshard_window(state["opt_state"], jax.device_count())
    if every_k > 1 and not had_sum:  # nothing is open: go on with an empty window
        (old,), (_, _, (new,)) = state["opt_state"], fresh(every_k)
        kept = {
            name: getattr(old, name) for name in ("gradient_step", "num_skipped", "inner_state")
        }
        state["opt_state"] = (new._replace(**kept),)
    return state["params"], state["opt_state"]


def bytes_of(x):
    return np.asarray(x).tobytes()


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, help="where the checkpoints are")
    parser.add_argument("--every-k", type=int, default=8)
    parser.add_argument("--micro-steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=1, help="micro-steps")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
