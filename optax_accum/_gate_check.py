"""Does an optimizer keep behind its gate what must not see micro-steps?"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._chain import accumulator_in
from optax_accum._comparison import norm, vectors
from optax_accum._equivalence import changed
from optax_accum._state import AccumulateState, has_updated

# What optax calls the extra args that depend on the batch, and what they must be.
OF_THE_WINDOW = {
    "grad": "grad=jax.grad(loss_fn)(params, window_batch)",
    "grad_fn": "grad_fn=lambda params, _: jax.grad(loss_fn)(params, window_batch)",
    "obj_fn": "obj_fn=lambda params: loss_fn(params, window_batch)",
    "value_fn": "value_fn=lambda params: loss_fn(params, window_batch)",
}


def check_gate(tx, params, gradients, num_microbatches, normalize) -> None:
    """Assert that what `tx` has before or around its accumulators does not see micro-steps."""
    accumulator = accumulator_in(tx)
    start = tx.init(params)
    remedy = f"Let it stand behind the gate: chain(accumulate({num_microbatches}), ...)."
    if not _split_state(start)[0]:
        raise AssertionError(
            "tx must hold an accumulator: without one each micro-batch is a step of its own."
            f" Let it be chain(accumulate({num_microbatches}), ...)."
        )
    if _has(optax.MultiStepsState, start):
        raise AssertionError(
            "tx must hold no optax.MultiSteps, which is an accumulator of its own: put"
            f" accumulate({num_microbatches}, ...) in its place."
        )
    has = normalize if accumulator is None else accumulator.gathering.normalize
    if has != normalize:
        raise AssertionError(
            f"tx has normalize={has!r}, and the window was compared with {normalize!r}."
        )
    size = lambda gradient: norm(np.concatenate(vectors(gradient)))
    first, *others = sorted(gradients, key=size, reverse=True)
    averaged = set() if accumulator is None else set(accumulator.gathering.averaged)
    extra_args = _accepted_extra_args(tx, averaged, first, start, params)
    with_extra_args = optax.with_extra_args_support(tx)
    update = jax.jit(lambda g, state: with_extra_args.update(g, state, params, **extra_args))
    _, after = update(first, start)
    moved = changed(_split_state(start)[1], _split_state(after)[1])
    if moved:
        raise AssertionError(
            f"tx changes a state outside the gate in each micro-step, opt_state{moved[0]}."
            "\nLikely: a stateful transformation outside the gate, which counts micro-steps or"
            f" remembers micro-gradients. {remedy}"
        )
    if num_microbatches > 1:
        _check_affine(update, start, first, others[0] if others else first, remedy)
    state = start
    for i in range(num_microbatches):
        updates, state = update(first, state)
        is_last = i + 1 == num_microbatches
        for path, inside in _split_state(state)[0]:
            if bool(has_updated(inside)) != is_last:
                raise AssertionError(
                    f"tx closes the window of opt_state{path} not with micro-step"
                    f" {num_microbatches}; is its every_k another than num_microbatches, or does"
                    " its should_skip_update_fn reject these gradients?"
                )
        for path, update_ in tree_flatten_with_path(updates)[0]:
            if not is_last and np.any(np.asarray(update_)):
                raise AssertionError(
                    f"tx updates params{keystr(path)} in a micro-step off the boundary: it is not"
                    f" accumulated, or something adds to it outside the gate. {remedy}"
                )


def _accepted_extra_args(tx, averaged, gradient, state, params) -> dict[str, float]:
    """The scalars that `update` can be given here: a loss, and what is averaged."""
    update = optax.with_extra_args_support(tx).update
    failure: Exception | None = None
    for names in ({"value", *averaged}, averaged - {"value"}):
        extra_args = dict.fromkeys(names, 1.0)
        try:
            jax.eval_shape(functools.partial(update, **extra_args), gradient, state, params)
        except (KeyError, TypeError, ValueError) as error:
            failure = error
            if "unexpected keyword argument 'value'" not in str(error):
                break
        else:
            return extra_args
    assert failure is not None
    missing = _missing_names(failure) - set(extra_args)
    if not missing:
        raise failure
    needed = [OF_THE_WINDOW.get(name, f"{name}=...") for name in sorted(missing)]
    raise ValueError(
        f"tx must need no other extra args here than scalars, got one that needs {sorted(missing)}:"
        " they depend on the batch. In training, pass to tx.update those of all examples of the"
        f" window, not of the micro-batch: {', '.join(needed)}. To check the gate, put another"
        " transformation in the place of the one that needs them."
    ) from failure


def _missing_names(failure: Exception) -> set[str]:
    """The extra args that an `update` says it lacks."""
    message = str(failure)
    names = OF_THE_WINDOW.keys() & set(re.findall(r"\w+_fn\b", message))
    if isinstance(failure, TypeError) and "required keyword-only argument" in message:
        names |= set(re.findall(r"'(\w+)'", message))
    if isinstance(failure, KeyError) and failure.args and isinstance(failure.args[0], str):
        names |= {failure.args[0]}
    return names


def _check_affine(update, start, g, h, remedy) -> None:
    """Assert that what the accumulator receives of g + h is that of g and of h together."""
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves((g, h)) if x.size)
    limit = min(float(jnp.finfo(x.dtype).max) for x in jax.tree.leaves(g))
    # Up to where a clip would act if it ever does.
    highest = 2.0 ** math.floor(math.log2(min(2.0**20, limit / (16 * largest))))
    for scale in (1.0, highest):
        ends = [
            _split_state(
                update(jax.tree.map(lambda x, y, a=a, b=b: a * x + b * y, g, h), start)[1]
            )[0]
            for a, b in ((scale, scale), (scale, 0.0), (0.0, scale), (0.0, 0.0))
        ]
        for (path, both), *others in zip(*ends, strict=True):
            states = [both, *(state for _, state in others)]
            if any(np.any(state.num_skipped) for state in states[:3]):
                continue  # rejected by size, which is the gate's own
            sums = [vectors(state.window_sum) for state in states]
            for s_both, s_g, s_h, s_0 in zip(*sums, strict=True):
                parts = s_g + s_h - s_0
                if not norm(s_both - parts) <= 0.01 * (norm(s_g) + norm(s_h)):  # NaN neither
                    raise AssertionError(
                        "tx hands a gradient to the accumulator"
                        f" opt_state{path} that is not the sum of its parts.\nLikely: it is clipped"
                        f" or normalised outside the gate, micro-batch by micro-batch. {remedy}"
                    )


def _split_state(opt_state):
    """The outermost accumulators' states with their paths, and the tree without them."""
    is_accumulator = lambda x: isinstance(x, AccumulateState)
    leaves, treedef = tree_flatten_with_path(opt_state, is_leaf=is_accumulator)
    inside = [(keystr(path), leaf) for path, leaf in leaves if is_accumulator(leaf)]
    return inside, treedef.unflatten(None if is_accumulator(x) else x for _, x in leaves)


def _has(kind, opt_state) -> bool:
    is_kind = lambda x: isinstance(x, kind)
    return any(map(is_kind, jax.tree.leaves(opt_state, is_leaf=is_kind)))
