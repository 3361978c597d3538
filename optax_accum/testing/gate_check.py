"""Does an optimizer keep behind its gate what must not see micro-steps?"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import PyTree
from optax_accum._components.averages import averaged_names
from optax_accum._core.chain import accumulator_in
from optax_accum._core.state import AccumulateState, has_updated
from optax_accum.testing.comparison import norm, vectors
from optax_accum.testing.gradients import changed_paths

# What optax calls the extra args that depend on the batch, and what they must be.
OF_THE_WINDOW = {
    "grad": "grad=jax.grad(loss_fn)(params, window_batch)",
    "grad_fn": "grad_fn=lambda params, _: jax.grad(loss_fn)(params, window_batch)",
    "obj_fn": "obj_fn=lambda params: loss_fn(params, window_batch)",
    "value_fn": "value_fn=lambda params: loss_fn(params, window_batch)",
}

Update: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # (gradient, state)


def check_gate(
    tx: optax.GradientTransformation,
    params: PyTree,
    gradients: list[PyTree],
    num_microbatches: int,
    normalize: str,
) -> None:
    """Assert that what `tx` has before or around its accumulators does not see micro-steps."""
    accumulator = accumulator_in(tx)
    start = tx.init(params)
    _check_accumulates(start, num_microbatches)
    has = normalize if accumulator is None else accumulator.window.pieces.normalize
    if has != normalize:
        raise AssertionError(
            f"tx has normalize={has!r}, and the window was compared with {normalize!r}."
        )
    first, *others = sorted(gradients, key=_size, reverse=True)
    averaged = set() if accumulator is None else averaged_names(accumulator)
    extra_args = _accepted_extra_args(tx, averaged, first, start, params)
    update_fn = optax.with_extra_args_support(tx).update

    @jax.jit
    def update(gradient: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return update_fn(gradient, state, params, **extra_args)

    remedy = f"Let it stand behind the gate: chain(accumulate({num_microbatches}), ...)."
    _check_state_outside(update, start, first, remedy)
    if num_microbatches > 1:
        _check_affine(update, start, first, others[0] if others else first, remedy)
    _check_boundary(update, start, first, num_microbatches, remedy)


def _check_accumulates(start: PyTree, num_microbatches: int) -> None:
    """Assert that an initial state is that of an accumulator, and of no other kind of it."""
    if not _split_state(start)[0]:
        raise AssertionError(
            "tx must hold an accumulator: without one each micro-batch is a step of its own."
            f" Let it be chain(accumulate({num_microbatches}), ...)."
        )
    if _holds(optax.MultiStepsState, start):
        raise AssertionError(
            "tx must hold no optax.MultiSteps, which is an accumulator of its own: put"
            f" accumulate({num_microbatches}, ...) in its place."
        )


def _accepted_extra_args(
    tx: optax.GradientTransformation,
    averaged: set[str] | frozenset[str],
    gradient: PyTree,
    state: PyTree,
    params: PyTree,
) -> dict[str, float]:
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


def _check_state_outside(update: Update, start: PyTree, gradient: PyTree, remedy: str) -> None:
    """Assert that a micro-step changes no state outside the accumulators."""
    _, after = update(gradient, start)
    changed = changed_paths(_split_state(start)[1], _split_state(after)[1])
    if changed:
        raise AssertionError(
            f"tx changes a state outside the gate in each micro-step, opt_state{changed[0]}."
            "\nLikely: a stateful transformation outside the gate, which counts micro-steps or"
            f" remembers micro-gradients. {remedy}"
        )


def _check_affine(update: Update, start: PyTree, g: PyTree, h: PyTree, remedy: str) -> None:
    """Assert that what the accumulator receives of g + h is that of g and of h together."""
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves((g, h)) if x.size)
    limit = min(float(jnp.finfo(x.dtype).max) for x in jax.tree.leaves(g))
    # Up to where a clip would act if it ever does.
    highest = 2.0 ** math.floor(math.log2(min(2.0**20, limit / (16 * largest))))

    def accumulators_after(a: float, b: float) -> list[tuple[str, PyTree]]:
        _, state = update(jax.tree.map(lambda x, y: a * x + b * y, g, h), start)
        return _split_state(state)[0]

    for scale in (1.0, highest):
        factors = (scale, scale), (scale, 0.0), (0.0, scale), (0.0, 0.0)
        after = [accumulators_after(a, b) for a, b in factors]
        for (path, both), *others in zip(*after, strict=True):
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


def _check_boundary(
    update: Update, state: PyTree, gradient: PyTree, num_microbatches: int, remedy: str
) -> None:
    """Assert that the window closes with its last micro-step, and nothing moves before."""
    for i in range(num_microbatches):
        updates, state = update(gradient, state)
        is_last = i + 1 == num_microbatches
        for path, accumulator_state in _split_state(state)[0]:
            if bool(has_updated(accumulator_state)) != is_last:
                raise AssertionError(
                    f"tx closes the window of opt_state{path} not with micro-step"
                    f" {num_microbatches}; is its every_k another than num_microbatches, or does"
                    " its should_skip_update_fn reject these gradients?"
                )
        for path, leaf in tree_flatten_with_path(updates)[0]:
            if not is_last and np.any(np.asarray(leaf)):
                raise AssertionError(
                    f"tx updates params{keystr(path)} in a micro-step off the boundary: it is not"
                    f" accumulated, or something adds to it outside the gate. {remedy}"
                )


def _size(gradient: PyTree) -> float:
    return norm(np.concatenate(vectors(gradient)))


def _split_state(opt_state: PyTree) -> tuple[list[tuple[str, PyTree]], PyTree]:
    """The outermost accumulators' states with their paths, and the tree without them."""
    is_accumulator = functools.partial(_is_instance, AccumulateState)
    leaves, treedef = tree_flatten_with_path(opt_state, is_leaf=is_accumulator)
    accumulators = [(keystr(path), leaf) for path, leaf in leaves if is_accumulator(leaf)]
    rest = treedef.unflatten(None if is_accumulator(leaf) else leaf for _, leaf in leaves)
    return accumulators, rest


def _holds(kind: type, opt_state: PyTree) -> bool:
    is_kind = functools.partial(_is_instance, kind)
    return any(map(is_kind, jax.tree.leaves(opt_state, is_leaf=is_kind)))


def _is_instance(kind: type, node: Any) -> bool:
    return isinstance(node, kind)
