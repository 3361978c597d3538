"""What stands after an accumulator in a plain `optax.chain`, and whether it may.

Nothing gates the followers of an accumulator in a plain chain: they are called in every
micro-step, off the boundary with zeros. That is harmless for a follower without state that maps
zeros to zeros, and silently wrong for any other.
"""

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


_CHAIN = _code(optax.chain(optax.identity()).update)
_NAMED_CHAIN = _code(optax.named_chain(("identity", optax.identity())).update)


def check_followers() -> None:
    """Raise if a plain chain that calls this accumulator goes on with what only a window may run.

    Reads the frames of the optax chains on the way here, through whatever wrapper of optax or of
    this library stands between, up to the first caller from elsewhere. A chain whose update has
    not the variables that are known today passes unchecked.

    Raises:
      ValueError: A follower holds state, or does not map zero updates to zero.
    """
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None and _is_between(frame):
        for position, update, state in _followers(frame):
            if jax.tree.leaves(state):
                _refuse(position, "holds state, which would advance in every micro-step")
            like = frame.f_locals["params"]
            like = frame.f_locals["updates"] if like is None else like
            if not _keeps_zeros(update, state, like, frame.f_locals["extra_args"]):
                _refuse(position, "does not map zero updates to zero updates")


def _is_between(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("optax", "jax", "optax_accum")


def _followers(frame: FrameType) -> Iterator[tuple[int, Callable, Any]]:
    """Position, update and state of all that the chain running in `frame` has still to call."""
    names = frame.f_locals
    common = {"updates", "state", "params", "extra_args", "new_state"}
    if frame.f_code is _CHAIN and common | {"update_fns"} <= names.keys():
        steps = list(zip(names["update_fns"], names["state"], strict=True))
    elif frame.f_code is _NAMED_CHAIN and common | {"transforms"} <= names.keys():
        steps = [(tx.update, names["state"][name]) for name, tx in names["transforms"]]
    else:
        return
    for position in range(len(names["new_state"]) + 1, len(steps)):
        yield position, *steps[position]


def _keeps_zeros(update: Callable, state: Any, like: Any, extra_args: dict[str, Any]) -> bool:
    """Whether zero updates stay zero at params of -1, tried on leaves of one element each."""
    one_element = lambda leaf: jax.ShapeDtypeStruct((1,) * jnp.ndim(leaf), jnp.result_type(leaf))
    probe = jax.tree.map(one_element, like)
    concrete = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype) if isinstance(x, Tracer) else x, extra_args
    )
    with jax.ensure_compile_time_eval():
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), probe)
        params = jax.tree.map(lambda x: jnp.full(x.shape, -1, x.dtype), probe)
        try:
            updates, _ = update(zeros, state, params, **concrete)
            return not any(bool(jnp.any(u != 0)) for u in jax.tree.leaves(updates))
        except Exception:
            # A follower that a probe cannot run (it closes over a traced value, or needs the
            # true shapes) is not known to be wrong; its own call shows its own error.
            return True


def _refuse(position: int, reason: str) -> None:
    raise ValueError(
        f"In a plain optax.chain, transformation {position} (from 0) comes after an"
        f" accumulate(k), but it {reason}. Use optax_accum.chain(...) in place of"
        " optax.chain(...), with accumulate(k) as an argument of its own, or put what"
        " follows inside: accumulate(k, inner)."
    )
