"""Recipes for other libraries' parts: optax's wrappers and checkpoints, Equinox, Flax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from optax_accum import AccumulateState, accumulate, chain, flush, has_updated
from recipes_data import distance, loss_fn, new_batch, new_params, num_examples, split, steps, train


def schedule_free_parameters(opt_state, params):
    """The parameters to evaluate, wherever `schedule_free` stands in the optimizer."""
    state = optax.tree.get(opt_state, "ScheduleFreeState")
    return optax.contrib.schedule_free_eval_params(state, params)


def schedule_free():
    """Evaluate parameters that `optax.contrib.schedule_free` trains inside a window.

    It averages parameters, once per call, so it stands inside the accumulator, and
    `schedule_free_eval_params` takes its own state, not that of the chain. Parameters and state
    stand still within a window, so they may be evaluated after any micro-step.
    """
    sgd, params, batch = optax.sgd(0.1), new_params(), new_batch(32)
    optimizer = optax.contrib.schedule_free(sgd, 0.1)
    tx = chain(accumulate(4), optax.clip_by_global_norm(1.0), optimizer)
    outside = optax.contrib.schedule_free(accumulate(4, optax.clip_by_global_norm(1.0), sgd), 0.1)
    big = optax.chain(optax.clip_by_global_norm(1.0), optimizer)

    def trained(tx, micro_batches):
        *_, (params_now, opt_state) = steps(tx, params, micro_batches)
        return params_now, schedule_free_parameters(opt_state, params_now)

    micro_batches = split(batch, 4)
    _, want = trained(big, 5 * [batch])
    training, evaluated = trained(tx, 5 * micro_batches + micro_batches[:2])
    return {
        "differs by": distance(evaluated, want),
        "the training's parameters by": distance(training, want),
        "with schedule_free outside by": distance(trained(outside, 5 * micro_batches)[1], want),
    }


def closed_window(opt_state, previous_state):
    """Whether the call between two states closed a window with an update.

    `has_updated` is the same where the accumulator was called. A wrapper that did not call it
    returns its old state, in which `has_updated` is still that of the call before.
    """
    gradient_step = optax.tree.get(opt_state, "gradient_step")
    return gradient_step != optax.tree.get(previous_state, "gradient_step")


def finite_average(decay=0.9):
    """Average the weights once per window, beside an outer `optax.apply_if_finite`.

    At a NaN `apply_if_finite` does not call the accumulator. If the call before closed a window,
    `has_updated` still says so and the EMA would move twice: ask whether `gradient_step` moved.
    Below, a NaN follows each window. (`should_skip_update_fn=optax.skip_not_finite` is the same
    guard inside the accumulator; `has_updated` is right there, and a rejected micro-batch takes a
    place in its window.)
    """
    tx = optax.apply_if_finite(chain(accumulate(4), optax.adam(1e-2)), 5)
    params, (x, y) = new_params(), new_batch(32)
    with_nan = [*split((x, y), 4), (x[:8], np.full_like(y[:8], np.nan))]

    def average_of(tx, micro_batches, moves):
        @jax.jit
        def average(ema, params, opt_state, previous_state):
            moved = optax.incremental_update(params, ema, 1 - decay)
            return optax.tree.where(moves(opt_state, previous_state), moved, ema)

        ema, previous_state = params, tx.init(params)
        for new, opt_state in steps(tx, params, micro_batches):
            ema = average(ema, new, opt_state, previous_state)
            previous_state = opt_state
        return ema

    want = average_of(optax.adam(1e-2), 6 * [(x, y)], lambda *states: True)
    by_has_updated = average_of(tx, 6 * with_nan, lambda opt_state, _: has_updated(opt_state))
    return {
        "differs by": distance(average_of(tx, 6 * with_nan, closed_window), want),
        "by has_updated": distance(by_has_updated, want),
    }


def equinox_model():
    """Train an Equinox model, by `eqx.partition` or by Equinox's filtered functions.

    An accumulator takes trees of arrays of real or complex numbers, and a model also holds
    functions and integers: `init`, `update` and `flush` take `eqx.filter(model,
    eqx.is_inexact_array)`, which is also the first half of `eqx.partition`.
    """
    model = eqx.nn.MLP(8, "scalar", 16, 1, activation=jnp.tanh, key=jax.random.key(0))
    x, y = new_batch(32)
    batches = [*split((x, y), 4), (x[:8], y[:8])]  # the last one is a short window
    optimizer = optax.adamw(1e-2)
    tx = chain(accumulate(4), optimizer)

    def model_loss(model, batch):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    # Arrays apart from the rest of the model: the parameters are an ordinary tree of arrays.
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def array_loss(arrays, batch):
        return model_loss(eqx.combine(arrays, static), batch)

    *_, (partitioned, opt_state) = steps(tx, arrays, batches, array_loss)
    updates, _ = flush(tx, opt_state, partitioned)
    partitioned = eqx.combine(optax.apply_updates(partitioned, updates), static)

    # The whole model: Equinox filters it for gradients and jit, and you for the optimizer.
    @eqx.filter_jit
    def micro_step(model, opt_state, batch):
        grads = eqx.filter_grad(model_loss)(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params, weight=num_examples(batch))
        return eqx.apply_updates(model, updates), opt_state

    filtered, opt_state = model, tx.init(eqx.filter(model, eqx.is_inexact_array))
    for batch in batches:
        filtered, opt_state = micro_step(filtered, opt_state, batch)
    updates, _ = flush(tx, opt_state, eqx.filter(filtered, eqx.is_inexact_array))
    filtered = eqx.apply_updates(filtered, updates)

    want = train(optimizer, arrays, [(x, y), batches[-1]], array_loss)
    return {
        "partition differs by": distance(eqx.filter(partitioned, eqx.is_inexact_array), want),
        "filter by": distance(eqx.filter(filtered, eqx.is_inexact_array), want),
        "moved by": distance(arrays, want),
    }


def continued_state(tx, params, inner_state, gradient_step):
    """A new state of `tx`, whose accumulator goes on from `inner_state`.

    Args:
      tx: an accumulator, or a `chain` that has one.
      params: its parameters.
      inner_state: a state of the transformation behind the accumulator, or of the `optax.chain` of
        several.
      gradient_step: how many updates it has made.
    """

    def is_window(node):
        return isinstance(node, AccumulateState)

    def continued(node):
        counted = jnp.asarray(gradient_step, jnp.int32)
        replaced = {"inner_state": inner_state, "gradient_step": counted}
        return node._replace(**replaced) if is_window(node) else node

    return jax.tree.map(continued, tx.init(params), is_leaf=is_window)


def continued_checkpoint(num_updates=5):
    """Continue a plain AdamW checkpoint with smaller batches, in windows of the old batch.

    The inner state of an accumulator is the old optimizer's own state: moments, and the count of
    its schedule. `gradient_step` is what a schedule of `every_k` counts. Restore the old state as
    it was saved, by the old optimizer's `init`, and put it into the new one.
    """
    schedule = optax.linear_schedule(2e-2, 1e-3, 2 * num_updates)
    adamw, params, batch = optax.adamw(schedule), new_params(), new_batch(32)
    *_, (params, old_state) = steps(adamw, params, num_updates * [batch])

    tx, rest = chain(accumulate(4), adamw), num_updates * split(batch, 4)
    opt_state = continued_state(tx, params, old_state, num_updates)
    *_, (got, opt_state) = steps(tx, params, rest, opt_state=opt_state)
    want = train(adamw, params, num_updates * [batch], opt_state=old_state)
    return {
        "differs by": distance(got, want),
        "with new moments by": distance(train(tx, params, rest), want),
        "gradient_step": int(optax.tree.get(opt_state, "gradient_step")),
    }


def logged_rate(every_k=4, num_updates=6):
    """Log the learning rate in effect: Linen's `TrainState.step` counts micro-steps.

    Inside the accumulator, `optax.inject_hyperparams` keeps the rate of the last update in the
    optimizer's state. Without it, a schedule of `gradient_step` gives the rate of the next update.
    """
    schedule = optax.linear_schedule(1e-2, 0.0, num_updates)
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
    params, batch = new_params(), new_batch(32)
    tx = chain(accumulate(every_k), adam)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    def micro_step(state, batch):
        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch))

    counts, rates, next_rates, rates_of_step = [], [], [], []
    for micro_batch in num_updates * split(batch, every_k):
        state = micro_step(state, micro_batch)
        if has_updated(state.opt_state):
            counts.append(int(state.step))
            rates.append(float(optax.tree.get(state.opt_state, "hyperparams")["learning_rate"]))
            next_rates.append(float(schedule(optax.tree.get(state.opt_state, "gradient_step"))))
            rates_of_step.append(float(schedule(state.step)))
    return {
        "TrainState.step": counts,
        "learning rates": rates,
        "of the next update": next_rates,
        "by TrainState.step": rates_of_step,
        "differs by": distance(state.params, train(adam, params, num_updates * [batch])),
    }
