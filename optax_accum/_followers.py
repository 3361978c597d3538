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
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


_CHAIN = _code(optax.chain(optax.identity()).update)
_NAMED_CHAIN = _code(optax.named_chain(("identity", optax.identity())).update)


_REMEDY = (
    "Use optax_accum.chain(...) in place of optax.chain(...), with accumulate(k) as an argument of"
    " its own, or put what follows inside: accumulate(k, inner)."
)


def check_followers(remedy: str = _REMEDY) -> None:
    """Raise if a plain chain that calls this accumulator goes on with what only a window may run.

    Reads the frames of the optax chains on the way here, through whatever wrapper of optax or of
    this library stands between, up to the first caller from elsewhere. A chain whose update has
    not the variables that are known today passes unchecked.

    Args:
      remedy: What the error says to do.

    Raises:
      ValueError: A follower holds state, or does not map zero updates to zero.
    """
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None and _is_between(frame):
        for position, update, state in _followers(frame):
            if jax.tree.leaves(state):
                _refuse(position, "holds state, which would advance in every micro-step", remedy)
            like = frame.f_locals["params"]
            like = frame.f_locals["updates"] if like is None else like
            if not _keeps_zeros(update, state, like, frame.f_locals["extra_args"]):
                _refuse(position, "does not map zero updates to zero updates", remedy)


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
    """Whether zero updates stay zero, tried on small leaves and a few values of the params."""
    try:
        return all(
            not np.any(np.asarray(leaf))
            for value in (-1.0, 1e3)
            for leaf in _probe(update, state, like, extra_args, value)
        )
    except Exception:
        # A follower that a probe cannot run (it needs the true shapes, say) is not known to be
        # wrong; its own call shows its own error.
        return True


def _probe(update: Callable, state: Any, like: Any, extra_args: dict[str, Any], value: float):
    """The leaves that come of zero updates where all params are `value`."""
    shape = lambda leaf: tuple(min(n, 2) for n in jnp.shape(leaf))
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        zeros = jax.tree.map(lambda x: jnp.zeros(shape(x), jnp.result_type(x)), like)
        params = jax.tree.map(lambda x: jnp.full(shape(x), value, jnp.result_type(x)), like)
    # Hyperparameters and extra args may be traced; a jaxpr lets numbers stand in for them.
    jaxpr = jax.make_jaxpr(lambda: update(zeros, state, params, **extra_args)[0])()
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        stand_in = lambda x: jnp.full(x.shape, 0.7, x.dtype) if isinstance(x, Tracer) else x
        return jaxpr_as_fun(jaxpr.replace(consts=[stand_in(x) for x in jaxpr.consts]))()


def _refuse(position: int, reason: str, remedy: str) -> None:
    raise ValueError(
        f"In a plain optax.chain, transformation {position} (from 0) comes after an"
        f" accumulate(k), but it {reason}. {remedy}"
    )
