"""`optax.chain` with an accumulator in it, and what closes its window from outside."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from optax_accum import _validation
from optax_accum._gathering import Gathering


class Accumulator(NamedTuple):
    """What is done with an accumulator from outside; hung on its `update`."""

    step: Callable[..., tuple[optax.Updates, Any]]  # update, and a flush without a micro-step
    followed_by: Callable[..., optax.GradientTransformationExtraArgs]  # with more behind its gate
    wrapped: Callable[..., optax.GradientTransformationExtraArgs]  # with fn(inner) for its inner
    map_inner: Callable[[Callable, Any], Any]  # (fn, state): with fn(state) of that inner
    gathering: Gathering


def accumulator_in(tx: optax.GradientTransformation) -> Accumulator | None:
    """The accumulator that `tx` is, or the first in the `chain` that it is."""
    return getattr(tx.update, "accumulator", None)


def accumulator_of(tx: Any, why: str, remedy: str) -> Accumulator:
    """The same, which `tx` must be."""
    accumulator = accumulator_in(tx) if isinstance(tx, optax.GradientTransformation) else None
    if accumulator is None:
        raise TypeError(
            f"tx must come from optax_accum.accumulate or optax_accum.chain {why}, got"
            f" {type(tx).__name__}; {remedy}"
        )
    return accumulator


def transformation(init, update, accumulator) -> optax.GradientTransformationExtraArgs:
    """A transformation that is an accumulator."""
    # On the function, where it outlives copies and tree_map of the tuple.
    update.accumulator = accumulator
    return optax.GradientTransformationExtraArgs(init, update)


def chain(*transforms: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optax.chain`, except that all after an `accumulate(k)` runs once per window.

    `chain(a, accumulate(k), b, c)` is `optax.chain(a, accumulate(k, b, c))`: `a` sees the gradient
    of every micro-step, `b` and `c` see one mean per window.

    Args:
      *transforms: Transformations in the order in which they are applied.

    Returns:
      A `GradientTransformationExtraArgs`, with the state of the `optax.chain` above.

    Example:
      Clipping after the accumulator is of the window's mean, before it of each micro-batch.

      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> clip = optax.clip_by_global_norm(1.0)
      >>> for tx in (chain(accumulate(2), clip), chain(clip, accumulate(2))):
      ...     state = tx.init(jnp.zeros(2))
      ...     _, state = tx.update(jnp.array([3.0, 0.0]), state)
      ...     mean, state = tx.update(jnp.array([-3.0, 4.0]), state)
      ...     print(mean.round(6))
      [0. 1.]
      [0.2 0.4]
    """
    _validation.check_transforms("transforms", transforms)
    for index, transform in enumerate(transforms):
        accumulator = accumulator_in(transform)
        if accumulator is not None:
            before, after = transforms[:index], transforms[index + 1 :]
            return behind(before, accumulator.followed_by(*after) if after else transform)
    return optax.chain(*transforms)


def behind(before, last) -> optax.GradientTransformationExtraArgs:
    """`optax.chain(*before, last)`, of which a flush is for `last`, an accumulator, alone."""
    chained = optax.chain(*before, last)
    prefix = optax.chain(*before) if before else None
    accumulator = accumulator_in(last)
    assert accumulator is not None

    def step(gradients, state, params, extra_args, weight=None, flush=False, is_micro_step=True):
        states: Any = state[:-1]
        if prefix is not None and is_micro_step:
            gradients, states = prefix.update(gradients, states, params, **extra_args)
        updates, last_state = accumulator.step(
            gradients, state[-1], params, extra_args, weight, flush, is_micro_step
        )
        return updates, (*states, last_state)

    return transformation(
        chained.init,
        chained.update,
        accumulator._replace(
            step=step,
            followed_by=lambda *args: behind(before, accumulator.followed_by(*args)),
            wrapped=lambda *args: behind(before, accumulator.wrapped(*args)),
            map_inner=lambda fn, state: (*state[:-1], accumulator.map_inner(fn, state[-1])),
        ),
    )


def flush(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Close the open window now, on the mean of what it holds.

    It is `update` without a gradient, for the short window at the end of an epoch. What stands
    before the accumulator in a `chain` is not called. An empty window gives zeros and changes
    nothing but `emitted`. The mean comes in the dtypes of the parameters, unless `emit_dtype` is
    set: there is no gradient to tell others.

    Args:
      tx: What `accumulate` or `chain` returned.
      opt_state: Its state.
      params: The parameters.
      **extra_args: What the inner transformations take, without the averaged ones: of those the
        state has the mean.

    Returns:
      Updates and new state, as from `tx.update`.

    Raises:
      ValueError: `weight` or `flush` is passed: there is no micro-step to weigh.
      TypeError: `tx` does not come from `accumulate` or `chain`. Around an accumulator, in
        `optax.partition`, `optax.masked` and the like, close the window with a micro-step that adds
        nothing: `tx.update(zeros, opt_state, params, weight=0, flush=True)` with
        `zeros = jax.tree.map(jnp.zeros_like, params)`, in the dtypes of the gradients.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate, has_updated
      >>> tx = accumulate(4, optax.sgd(1.0))
      >>> params = jnp.zeros([])
      >>> state = tx.init(params)
      >>> _, state = tx.update(jnp.array(3.0), state, params)
      >>> _, state = tx.update(jnp.array(5.0), state, params)
      >>> updates, state = flush(tx, state, params)
      >>> print(updates, has_updated(state))
      -4.0 True
    """
    accumulator = accumulator_of(
        tx,
        "to be flushed",
        "around it, close the window with a micro-step that adds nothing:"
        " tx.update(zeros, opt_state, params, weight=0, flush=True), where"
        " zeros = jax.tree.map(jnp.zeros_like, params) in the dtypes of the gradients."
        " (accumulate_in_momentum takes share=0 in place of weight=0.)",
    )
    _validation.check_params(params)
    _validation.check_not_passed("flush", extra_args, ("weight", "flush"))
    return accumulator.step(params, opt_state, params, extra_args, flush=True, is_micro_step=False)
