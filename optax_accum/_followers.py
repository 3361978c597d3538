"""What stands after an accumulator in a plain `optax.chain`, and whether it may.

Nothing gates the followers of an accumulator in a plain chain: they are called in every
micro-step, off the boundary with zeros. That is harmless for a follower without state that maps
zeros to zeros, and silently wrong for any other.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer


def _code(function: Any) -> CodeType:
    return function.__code__


_CHAIN_CODE = _code(optax.chain(optax.identity()).update)
_NAMED_CHAIN_CODE = _code(optax.named_chain(("identity", optax.identity())).update)


def check_followers(own_code: CodeType) -> None:
    """Raise if a calling plain chain goes on with something that only a window may run.

    Reads the frames of the optax chains that called this accumulator, through whatever optax
    wrapper stands between, up to the first caller outside optax and jax or up to an outer
    accumulator, which gates what it calls. A chain of an unknown form passes unchecked.

    Args:
      own_code: code of an accumulator's update, where the walk ends.

    Raises:
      ValueError: A follower holds state, or does not map zero updates to zero.
    """
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None and _is_between(frame, own_code):
        for update, state in _followers(frame):
            if jax.tree.leaves(state):
                _refuse(update, "it holds state, which would advance in every micro-step")
            like = frame.f_locals["params"]
            like = frame.f_locals["updates"] if like is None else like
            if not _keeps_zeros(update, state, like, frame.f_locals["extra_args"]):
                _refuse(update, "it does not map zero updates to zero updates")


def _is_between(frame: FrameType, own_code: CodeType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("optax", "jax") and frame.f_code is not own_code


def _followers(frame: FrameType) -> Iterator[tuple[Callable, Any]]:
    """(update, state) of all that the chain running in `frame` has still to call."""
    names = frame.f_locals
    if frame.f_code is _CHAIN_CODE:
        after = len(names["new_state"]) + 1
        yield from zip(names["update_fns"][after:], names["state"][after:], strict=True)
    elif frame.f_code is _NAMED_CHAIN_CODE:
        for name, transform in names["transforms"][len(names["new_state"]) + 1 :]:
            yield transform.update, names["state"][name]


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


def _refuse(update: Callable, reason: str) -> None:
    closed_over = inspect.getclosurevars(update).nonlocals if inspect.isfunction(update) else {}
    if "tx" in closed_over:  # optax.with_extra_args_support stands around it
        update = closed_over["tx"].update
    name = getattr(update, "__qualname__", repr(update)).partition(".<locals>")[0]
    raise ValueError(
        f"In a plain optax.chain, {name!r} follows accumulate(every_k), but {reason}. Use"
        " optax_accum.chain(...) in place of optax.chain(...), or put it inside:"
        " accumulate(every_k, inner)."
    )
