"""Recipes for what happens once per window: schedules, averages, records."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tensorboardX import SummaryWriter

from optax_accum import (
    accumulate,
    batch_growth,
    chain,
    has_updated,
    scale_hyperparams,
    window_metrics,
)
from recipes_data import distance, new_batch, new_params, split, steps, train


def warm_up(every_k=4, micro_steps=32):
    """Let a schedule count gradient steps: put it inside the window.

    Its lengths are in gradient steps, micro-steps over k. Before an accumulator, and behind
    `optax.MultiSteps` in an `optax.chain`, it would count micro-steps and end k times too early.
    (Behind `accumulate(k)` in a plain `optax.chain` it is an error.)
    """
    num_updates = micro_steps // every_k
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, num_updates // 4, num_updates)
    rate = optax.scale_by_schedule(schedule)
    multi_steps = optax.MultiSteps(optax.identity(), every_k).gradient_transformation()
    placements = {
        "inside": chain(accumulate(every_k), rate),
        "before": chain(rate, accumulate(every_k)),
        "behind MultiSteps": optax.chain(multi_steps, rate),
    }
    figures = {}
    for name, tx in placements.items():
        update, opt_state, rates = jax.jit(tx.update), tx.init(1.0), []
        for _ in range(micro_steps):
            applied, opt_state = update(jnp.ones([]), opt_state)  # to a gradient of 1
            rates.append(float(applied))
        figures[f"{name}: count"] = int(optax.tree.get(opt_state, "count"))
        figures[f"{name}: rates"] = rates[every_k - 1 :: every_k]
    return figures


def lamb():
    """Train with an optimizer for large batches, LAMB, in small ones.

    Its trust ratios, moments and weight decay see the window's mean, once.
    """
    params, batch = new_params(), new_batch(64)
    optimizer = optax.lamb(1e-2, weight_decay=1e-2)
    got = train(chain(accumulate(8), optimizer), params, 3 * split(batch, 8))
    want = train(optimizer, params, 3 * [batch])
    return {"differs by": distance(got, want), "moved by": distance(want, params)}


def averaged_weights(decay=0.9):
    """Average the weights once per window: an EMA, and the plain mean of SWA.

    `has_updated` says when. An EMA that moves in each micro-step decays by decay^k per update.
    """

    @jax.jit
    def average(averages, params, moves):
        ema, swa, n = averages

        def moved():
            return (
                optax.incremental_update(params, ema, 1 - decay),
                optax.incremental_update(params, swa, 1 / (n + 1)),
                n + 1,
            )

        return jax.lax.cond(moves, moved, lambda: averages)

    def averages_of(tx, params, micro_batches, moves=has_updated):
        averages = params, params, 0
        for new, opt_state in steps(tx, params, micro_batches):
            averages = average(averages, new, moves(opt_state))
        return averages

    params, batch = new_params(), new_batch(32)
    tx = chain(accumulate(4), optax.adam(1e-2))
    got = averages_of(tx, params, 6 * split(batch, 4))
    always = averages_of(tx, params, 6 * split(batch, 4), lambda opt_state: True)
    want = averages_of(optax.adam(1e-2), params, 6 * [batch], lambda opt_state: True)
    return {
        "EMA differs by": distance(got[0], want[0]),
        "SWA by": distance(got[1], want[1]),
        "weights in SWA": int(got[2]),
        "EMA of each micro-step by": distance(always[0], want[0]),
    }


def growing_window(start=16, stop=48, growth_steps=4, microbatch_size=8):
    """Let the learning rate follow a window that grows, and decay with the examples seen.

    `batch_growth` is the schedule of k. `scale_hyperparams` takes κ as a number, so the rates are a
    table over gradient steps, in which a window and its rate are at the same place. Schedules count
    gradient steps; one over examples is a schedule of those that came before a gradient step.
    """
    every_k = batch_growth(start, stop, growth_steps, microbatch_size)
    ks = [round(float(every_k(t))) for t in range(growth_steps + 1)]
    ratios = [k * microbatch_size / start for k in ks]
    scaled = [scale_hyperparams(ratio, "linear", learning_rate=0.01) for ratio in ratios]
    rates = jnp.array([hyperparams["learning_rate"] for hyperparams in scaled])
    seen = microbatch_size * jnp.array([0, *np.cumsum(ks[:-1])])
    decay = optax.linear_schedule(1.0, 0.5, microbatch_size * sum(ks))  # over examples

    def rate(gradient_step):
        i = jnp.minimum(gradient_step, growth_steps)
        return rates[i] * decay(seen[i] + (gradient_step - i) * stop)

    sgd = optax.inject_hyperparams(optax.sgd)(rate)  # its state tells the rate

    params, batch = new_params(), new_batch(microbatch_size * sum(ks))
    run = list(steps(accumulate(every_k, sgd), params, split(batch, sum(ks))))
    closed = [i for i, (_, opt_state) in enumerate(run, start=1) if has_updated(opt_state)]
    states = [run[i - 1][1].inner_state for i in closed]
    ends = microbatch_size * np.array(closed)
    windows = zip(*(np.split(x, ends[:-1]) for x in batch), strict=True)
    want = train(optax.sgd(rate), params, windows)
    return {
        "examples": np.diff(ends, prepend=0).tolist(),
        "seen before": seen.tolist(),
        "learning rates": [float(state.hyperparams["learning_rate"]) for state in states],
        "differs by": distance(run[-1][0], want),
    }


def tensorboard(folder=None):
    """Write `window_metrics` to TensorBoard, one point per window.

    `value=loss` gives the monitor the loss. The metrics are those of the window that just closed:
    read them where `has_updated`. `folder=None` writes to a folder that is then removed.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return tensorboard(folder)
    tx = chain(accumulate(4, monitor=True), optax.adam(1e-2))
    points = []
    with SummaryWriter(str(folder)) as writer:
        for _, opt_state in steps(tx, new_params(), 3 * split(new_batch(32), 4)):
            if has_updated(opt_state):
                metrics = {name: float(m) for name, m in window_metrics(opt_state).items()}
                points.append(metrics)
                gradient_step = int(optax.tree.get(opt_state, "gradient_step"))
                for name, value in metrics.items():
                    writer.add_scalar(f"window/{name}", value, gradient_step)
    return {name: [point[name] for point in points] for name in points[0]}
