"""Recipes for what a window is the mean of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import accumulate, chain
from recipes_data import distance, loss_fn, new_batch, new_params, split, train


def multi_task():
    """Train a shared trunk and a head for each task, on one task's micro-batch after the other.

    One window: task t with k_t micro-batches has the weight λ_t / k_t in each, and the window's
    mean is the gradient of Σ λ_t L_t, where Σ λ_t = 1. A head gets zeros from micro-batches of
    other tasks, as it does in the gradient of that sum.

    A window for each part: `optax.partition`. Below, each micro-step brings examples of both tasks;
    one head moves after two, trunk and other head after four. The heads' updates are those of their
    big batches, while the trunk stands still. The trunk's is not: a head moves within its window.
    """
    params = {"trunk": new_params(0)["w"], "a": new_params(1)["v"], "b": new_params(2)["v"]}
    data, share = {"a": new_batch(16), "b": new_batch(32)}, {"a": 0.25, "b": 0.75}
    parts = {"a": split(data["a"], 2), "b": split(data["b"], 4)}

    def losses(params, batch):
        return {
            task: loss_fn({"w": params["trunk"], "v": params[task]}, examples)
            for task, examples in batch.items()
        }

    def total(params, batch):
        return sum(losses(params, batch).values())

    def weighted(params, batch):
        return sum(share[task] * loss for task, loss in losses(params, batch).items())

    # One window of six micro-batches.
    in_turns = [{task: part} for task in parts for part in parts[task]]

    def weight_fn(batch):
        return sum(share[task] / len(parts[task]) for task in batch)

    tx = chain(accumulate(6), optax.adam(1e-2))
    got = train(tx, params, in_turns, total, weight_fn)
    want = train(optax.adam(1e-2), params, [data], weighted)

    # A window for each part, over micro-steps with 4 and 8 examples.
    every_k = {"a": 2, "b": 4, "trunk": 4}
    own = {part: accumulate(k, optax.sgd(0.1)) for part, k in every_k.items()}
    in_step = [{"a": a, "b": b} for a, b in zip(*(split(data[t], 4) for t in data), strict=True)]
    parted = train(optax.partition(own, {part: part for part in every_k}), params, in_step, total)
    only_head = {"a": optax.sgd(0.1), "b": optax.set_to_zero(), "trunk": optax.set_to_zero()}
    head = train(
        optax.partition(only_head, {part: part for part in every_k}),
        params,
        [{"a": part} for part in parts["a"]],
        total,
    )
    big = train(optax.sgd(0.1), params, [data], total)
    return {
        "one window differs by": distance(got, want),
        "heads of own windows by": max(
            distance(parted["a"], head["a"]), distance(parted["b"], big["b"])
        ),
        "their trunk by": distance(parted["trunk"], big["trunk"]),
    }


def token_weights(buckets=(4, 8, 16)):
    """Take the mean over all tokens of a window of uneven sequences, and compile few steps.

    `weight=` is the number of tokens, so that each token counts the same, whatever its micro-batch.
    A micro-batch is padded to the smallest bucket that holds it: a jitted step is compiled once for
    each bucket.
    """
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(2, 17, 24))  # alike ones together: less to pad
    sequences = [rng.integers(1, 50, length) for length in lengths]
    params = {"in": rng.normal(size=(50, 8)), "out": rng.normal(size=(8, 50))}
    params = jax.tree.map(jnp.float32, params)

    def padded(sequences):
        size = min(bucket for bucket in buckets if bucket >= max(map(len, sequences)))
        return np.stack([np.pad(s, (0, size - len(s))) for s in sequences])  # 0 is no token

    def num_tokens(tokens):
        return (tokens[:, 1:] > 0).sum()

    shapes = []  # of each trace

    def token_loss(params, tokens):
        shapes.append(tokens.shape)
        logits = params["in"][tokens[:, :-1]] @ params["out"]
        targets = tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(where=targets > 0)

    tx = accumulate(6, optax.sgd(1.0))
    micro_batches = [padded(sequences[i : i + 4]) for i in range(0, 24, 4)]
    got = train(tx, params, micro_batches, token_loss, num_tokens)
    num_traces = len(shapes)
    big_batch = padded(sequences)
    want = train(optax.sgd(1.0), params, [big_batch], token_loss)
    unweighted = train(tx, params, np.split(big_batch, 6), token_loss, lambda tokens: 1)
    return {
        "differs by": distance(got, want),
        "without weights by": distance(unweighted, want),
        "micro-steps": len(micro_batches),
        "compilations": num_traces,
        "entries": sum(tokens.size for tokens in micro_batches),
        "in one batch": big_batch.size,
    }


def clip_after_window():
    """Survive one bad micro-batch of four: where to clip, and what to do with a NaN.

    After the window, so that its mean is clipped, as that of the big batch would be. Clipping each
    micro-batch bounds a spike's part of the window, but gives another mean where nothing is wrong.
    No clip stops a NaN: `should_skip_update_fn=optax.skip_not_finite` leaves that micro-batch out,
    and `optax.skip_large_updates` a spike. The figures are distances from the clipped mean of the
    good micro-batches.
    """
    params, (x, y) = new_params(), new_batch(32)
    clip, sgd = optax.clip_by_global_norm(0.5), optax.sgd(1.0)
    is_large = functools.partial(optax.skip_large_updates, max_squared_norm=100.0)
    arms = {
        "clip after": chain(accumulate(4), clip, sgd),
        "clip each": chain(clip, accumulate(4), sgd),
        "skip NaN": chain(accumulate(4, should_skip_update_fn=optax.skip_not_finite), clip, sgd),
        "skip large": chain(accumulate(4, should_skip_update_fn=is_large), clip, sgd),
    }
    figures = {}
    for data, value, num_bad in (("clean", y[0], 0), ("spike", 1e4, 8), ("NaN", np.nan, 8)):
        want = train(optax.chain(clip, sgd), params, [(x[num_bad:], y[num_bad:])])
        targets = np.append(np.float32(value), y[1:])
        for arm, tx in arms.items():
            got = train(tx, params, split((x, targets), 4))
            figures[f"{data}, {arm}"] = distance(got, want)
    return figures
