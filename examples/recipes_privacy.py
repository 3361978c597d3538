"""A recipe for differential privacy: clip examples in micro-batches, add noise once per window."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import accumulate, chain
from recipes_data import distance, loss_fn, new_batch, new_params, num_examples, split


def example_gradients(params, batch):
    """The gradient of each example, on a leading axis: this is what a micro-batch keeps small."""
    batches_of_one = jax.tree.map(lambda x: x[:, None], batch)
    return jax.vmap(jax.grad(loss_fn), (None, 0))(params, batches_of_one)


def window_updates(tx, gradient_fn, weight_fn, micro_batches, num_windows):
    """The updates of windows of the same micro-batches, all at the same parameters."""
    params, update = new_params(), optax.with_extra_args_support(tx).update

    @jax.jit
    def micro_step(opt_state, batch):
        gradients, weight = gradient_fn(params, batch), weight_fn(batch)
        return update(gradients, opt_state, params, weight=weight)

    opt_state, windows = tx.init(params), []
    for _ in range(num_windows):
        for batch in micro_batches:
            updates, opt_state = micro_step(opt_state, batch)
        windows.append(updates)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *windows)


def differential_privacy(
    clip_norm=0.5, noise_multiplier=2.0, every_k=4, window_size=32, num_windows=30
):
    """Train with differential privacy: DP-SGD (Abadi et al., 2016, arXiv:1607.00133).

    A micro-batch brings the sum of its examples' gradients, each clipped to the norm C. Under
    `normalize="ratio"`, with the number of examples as weight, the window gives the sum of all
    clipped gradients / N. Behind the accumulator, noise of standard deviation zC / N is added
    once, where z is the noise multiplier; a privacy accountant counts windows of N examples. If
    `differentially_private_aggregate` stands before the accumulator, each micro-batch adds noise
    of its own, and the noise of the window is √k too large.

    One example changes the mean of n examples by up to C / n, so noise of zC / N is too little for
    a window of fewer than N examples (`flush`, rejected micro-batches, Poisson sampling). Where
    windows may be smaller, add zC to the sum and divide by the expected N: `normalize="sum"`.

    Noise is measured from window to window, at fixed parameters, in units of zC / N.
    """
    params, batch = new_params(), new_batch(window_size)
    micro_batches = split(batch, every_k)
    key, sgd = jax.random.key(0), optax.sgd(1.0)

    def clipped_sum(params, batch):
        gradients = example_gradients(params, batch)
        return optax.per_example_global_norm_clip(gradients, clip_norm)[0]  # and how many it clips

    def noise_on_mean(multiplier):
        variance = (multiplier * clip_norm / window_size) ** 2
        mean = accumulate(every_k, normalize="ratio")
        return chain(mean, optax.add_noise(variance, 0, key), sgd)

    def noise_on_sum(multiplier):
        variance = (multiplier * clip_norm) ** 2
        total = accumulate(every_k, normalize="sum")  # without weights
        return chain(total, optax.add_noise(variance, 0, key), optax.scale(1 / window_size), sgd)

    def big_batch(multiplier):
        aggregate = optax.contrib.differentially_private_aggregate(clip_norm, multiplier, key)
        return optax.chain(aggregate, sgd)

    def noise_before(multiplier):
        aggregate = optax.contrib.differentially_private_aggregate(clip_norm, multiplier, key)
        return chain(aggregate, accumulate(every_k), sgd)

    def no_weight(batch):
        return 1

    def deviation(optimizer, *args):
        """The standard deviation of the noise from window to window."""
        updates = window_updates(optimizer(noise_multiplier), *args, num_windows)
        windows = [leaf.reshape(num_windows, -1) for leaf in jax.tree.leaves(updates)]
        variance = np.concatenate(windows, axis=1).var(axis=0, ddof=1).mean()
        return float(np.sqrt(variance) * window_size / noise_multiplier / clip_norm)

    def without_noise(optimizer, *args):
        return window_updates(optimizer(0.0), *args, num_windows=1)

    big = big_batch, example_gradients, no_weight, [batch]
    on_mean = noise_on_mean, clipped_sum, num_examples, micro_batches
    on_sum = noise_on_sum, clipped_sum, no_weight, micro_batches
    before = noise_before, example_gradients, num_examples, micro_batches
    want = without_noise(*big)
    plain = jax.tree.map(lambda g: -jnp.mean(g, axis=0), example_gradients(params, batch))
    return {
        "noise of the big batch": deviation(*big),
        "on the mean": deviation(*on_mean),
        "on the sum": deviation(*on_sum),
        "before the accumulator": deviation(*before),
        "without noise the mean differs by": distance(without_noise(*on_mean), want),
        "the sum by": distance(without_noise(*on_sum), want),
        "without clipping by": distance(plain, want),
    }
