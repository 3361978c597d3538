"""The parts of an aux: counts, which a window sums, scalars, which it averages, and rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import PyTree, dtype_of


class AuxParts(NamedTuple):
    """Trees of the structure of an aux, with None where a leaf belongs to another part."""

    counts: PyTree  # integer scalars
    scalars: PyTree  # other scalars, as floats
    rows: PyTree  # arrays with a row for each example


def divided(aux: PyTree, size: int) -> AuxParts:
    """The parts of the aux of a micro-batch of `size` examples."""
    _check_aux(aux, size)

    def count(x: Any) -> jax.Array | None:
        # A Python number gets the dtype that it has after a sum.
        return jnp.asarray(x, dtype_of(x)) if _is_count(x) else None

    def scalar(x: Any) -> jax.Array | None:
        if jnp.ndim(x) or _is_count(x):
            return None
        is_float = jnp.issubdtype(dtype_of(x), jnp.inexact)
        return jnp.asarray(x) if is_float else jnp.asarray(x, jnp.float32)

    def rows(x: Any) -> Any:
        return x if jnp.ndim(x) else None

    return AuxParts(*(jax.tree.map(part, aux) for part in (count, scalar, rows)))


def joined(parts: AuxParts) -> PyTree:
    """The aux that consists of these parts."""

    def is_none(x: Any) -> bool:
        return x is None

    def present(*xs: Any) -> Any:
        return next((x for x in xs if x is not None), None)

    return jax.tree.map(present, *parts, is_leaf=is_none)


def _is_count(x: Any) -> bool:
    return not jnp.ndim(x) and jnp.issubdtype(dtype_of(x), jnp.integer)


def _check_aux(aux: PyTree, size: int) -> None:
    """Require scalars, which have a mean, and arrays with a row for each example."""
    for path, leaf in tree_flatten_with_path(aux)[0]:
        kinds = (jnp.number, jnp.bool_)
        has_mean = any(jnp.issubdtype(dtype_of(leaf), kind) for kind in kinds)
        if not jnp.ndim(leaf) and not has_mean:
            raise ValueError(
                "aux must hold scalars, which have a mean, and arrays with the example axis first;"
                f" aux{keystr(path)} is {leaf!r}."
            )
        if jnp.ndim(leaf) and len(leaf) != size:
            raise ValueError(
                "aux must hold scalars, and arrays with the example axis first;"
                f" aux{keystr(path)} has the shape {jnp.shape(leaf)} for a micro-batch of {size}."
            )
