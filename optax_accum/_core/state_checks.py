"""Trace-time checks of states and gradients: each error gives the name, the rule and the value."""

from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import PyTree, check_inexact, dtype_of, wider_dtype
from optax_accum._core.state import LocalState, accumulate_states

_State = TypeVar("_State")

REMEDY_FOR_STATES = (
    "To go on from it between two windows, make a new state, new = tx.init(params), and put what"
    " training needs into its AccumulateState: new._replace(gradient_step=old.gradient_step,"
    " num_skipped=old.num_skipped, inner_state=old.inner_state)."
)


def checked_state(state: Any, state_type: type[_State]) -> _State:
    """Require the state that `init` made."""
    if not isinstance(state, state_type):
        raise ValueError(
            f"opt_state must hold the {state_type.__name__} that tx.init made, as in"
            f" tx.update(gradients, opt_state, params); got a {type(state).__name__} in its place."
        )
    return state


def check_nests_no_accumulator(where: str, inner_state: PyTree) -> None:
    """Require an inner state without that of another accumulator."""
    if accumulate_states(inner_state):
        refuse_nested(where)


def refuse_nested(where: str) -> NoReturn:
    """Raise for an accumulator inside another."""
    raise ValueError(
        f"accumulators must not nest, and {where} holds one: write windows of a micro-steps"
        " inside windows of b as one, accumulate(a * b, ...), and give parameter groups windows"
        " of their own with optax.partition({name: accumulate(k, ...), ...}, labels)."
    )


def check_extras(extras: dict[str, Any], new: dict[str, Any]) -> None:
    """Require a state that was made with the same components; errors give their names."""

    def paths(tree: PyTree) -> list[str]:
        return [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]

    for name in {**extras, **new}:
        if isinstance(extras.get(name), LocalState):
            continue
        made, wanted = paths(extras.get(name)), paths(new.get(name))
        if made != wanted:
            raise ValueError(
                f"{name} must be that with which the state was made, whose entry is"
                f" {made or 'missing'}; got one for {wanted or 'nothing'}. {REMEDY_FOR_STATES}"
            )


def check_gradients(name: str, gradients: PyTree, window_sum: PyTree, is_cast: bool) -> None:
    """Require gradients that the window can gather: its tree, its shapes, dtypes it can hold.

    Args:
      name: The name of the gradients in errors.
      gradients: Those of a micro-step.
      window_sum: S.
      is_cast: Whether the user has set the dtype of S, so that wider gradients are cast to it.
    """
    check_inexact(gradients, name)
    got, got_def = tree_flatten_with_path(gradients)
    want, want_def = tree_flatten_with_path(window_sum)
    if got_def != want_def:
        _refuse_tree(name, got, want, f"{got_def} against {want_def}")
    for (path, gradient), (_, total) in zip(got, want, strict=True):
        where = f"{name}{keystr(path)}"
        if jnp.shape(gradient) != total.shape:
            raise ValueError(
                f"{name} must have the shapes of the params that init was given; {where} has"
                f" shape {jnp.shape(gradient)}, its parameter {total.shape}."
            )
        dtype = dtype_of(gradient)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        too_wide = is_complex and not jnp.issubdtype(total.dtype, jnp.complexfloating)
        too_wide |= not is_cast and wider_dtype(dtype, total.dtype) != total.dtype
        if too_wide:
            raise ValueError(
                f"{name} must not be wider than their accumulator; {where} has dtype"
                f" {dtype} and its accumulator {total.dtype}. Cast them, or set"
                " accumulator_dtype."
            )


def _refuse_tree(name: str, got: Any, want: Any, containers: str) -> NoReturn:
    got_paths = {keystr(path) for path, _ in got}
    want_paths = {keystr(path) for path, _ in want}
    missing, unexpected = sorted(want_paths - got_paths), sorted(got_paths - want_paths)
    if missing or unexpected:
        detail = f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
    else:
        detail = f"the leaves are the same, the containers are not: {containers}"
    raise ValueError(
        f"{name} must have the tree of the params that init was given; in the {name}: {detail}."
    )


def check_keeps_structure(new_state: PyTree, old_state: PyTree) -> None:
    """Require an inner transformation whose state keeps its tree and its shapes."""
    new, new_def = tree_flatten_with_path(new_state)
    old, old_def = tree_flatten_with_path(old_state)
    if new_def != old_def:
        raise ValueError(
            "inner must keep the tree of its state, or no gate can hold the state back; its init"
            f" gives {old_def} and its update {new_def}."
        )
    for (path, n), (_, o) in zip(new, old, strict=True):
        if jnp.shape(n) != jnp.shape(o):
            _refuse_leaf(keystr(path), o, n)


def keep_dtypes(old_state: PyTree, new_state: PyTree) -> PyTree:
    """The new inner state in the dtypes of the old one, whose real leaves must stay real."""
    check_keeps_structure(new_state, old_state)

    def keep(path: Any, old: Any, new: Any) -> jax.Array:
        if _is_complex(new) and not _is_complex(old):
            _refuse_leaf(keystr(path), old, new)
        return lax.convert_element_type(new, old.dtype)

    return jax.tree.map_with_path(keep, old_state, new_state)


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(dtype_of(x), jnp.complexfloating)


def _refuse_leaf(path: str, old: Any, new: Any) -> NoReturn:
    raise ValueError(
        "inner must keep the shapes of its state, and real leaves real;"
        f" inner_state{path} goes from {dtype_of(old)}{list(jnp.shape(old))} in init to"
        f" {dtype_of(new)}{list(jnp.shape(new))} in update."
    )
