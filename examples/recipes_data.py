"""What the recipes train: a small network on made-up examples, micro-batch by micro-batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax


def new_params(seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"w": (8, 16), "v": (16,)}
    return {name: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for name, s in sizes.items()}


def new_batch(size, seed=0):
    rng = np.random.default_rng((seed, size))
    x = rng.normal(size=(size, 8)).astype(np.float32)
    return x, np.sin(x.sum(-1)) + 1


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def split(batch, k):
    """The k micro-batches of a batch."""
    return list(zip(*(np.split(x, k) for x in batch), strict=True))


def num_examples(batch):
    return len(jax.tree.leaves(batch)[0])


@functools.cache
def compiled(tx, loss_fn, weight_fn):
    """A jitted `init` and micro-step."""
    update = optax.with_extra_args_support(tx).update

    def micro_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        extra_args = {"weight": weight_fn(batch), "value": loss}
        updates, opt_state = update(grads, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(tx.init), jax.jit(micro_step)


def steps(tx, params, micro_batches, loss_fn=loss_fn, weight_fn=num_examples, opt_state=None):
    """Train, and yield parameters and optimizer state after each micro-step.

    Without an `opt_state` the training starts from that of `tx.init`.
    """
    init, micro_step = compiled(tx, loss_fn, weight_fn)
    if opt_state is None:
        opt_state = init(params)
    for batch in micro_batches:
        params, opt_state = micro_step(params, opt_state, batch)
        yield params, opt_state


def train(*args, **kwargs):
    """The parameters after all micro-steps."""
    *_, (params, _) = steps(*args, **kwargs)
    return params


def distance(a, b):
    """The largest difference of an entry; NaN if there is one."""
    differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), a, b)
    return float(np.max(jax.tree.leaves(differences)))
