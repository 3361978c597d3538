"""Access to private parts of jax and optax, and what happens when they change.

- The frames of optax's chains. If their variables have other names, a chain passes unchecked.
- `manual_axis_type` of an array's type. If it is missing, no array counts as varying.

`tests/core/test_internals.py` names the version that changed one of them.
"""

import inspect
import os
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import jax
import optax
from jax import lax


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


_CHAIN = _code(optax.chain(optax.identity()).update)
_NAMED_CHAIN = _code(optax.named_chain(("identity", optax.identity())).update)

# Frames of code in these folders may stand between a chain and its accumulator.
_FOLDERS = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (optax.__file__, jax.__file__, os.path.dirname(__file__))
)


class RunningChain(NamedTuple):
    """A chain of optax that is being updated."""

    steps: list[tuple[Callable[..., Any], Any]]  # update and state of each transformation
    num_done: int  # how many of them have been called, including the one that is running
    dtype_source: Any  # a tree of the parameters' structure
    extra_args: dict[str, Any]


def running_chains() -> list[RunningChain]:
    """The chains of optax that have called what runs now, the innermost first.

    The search goes through frames of optax, jax and this library, up to the first caller from
    elsewhere. It reads the variables of a frame only if its code is that of one of optax's two
    chains: reading those of other frames would keep their arrays alive.
    """
    chains = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        if frame.f_code in (_CHAIN, _NAMED_CHAIN):
            # A copy: the variables of a frame are a live proxy since Python 3.13.
            chain = _chain_from(frame.f_code, dict(frame.f_locals))
            if chain is not None:
                chains.append(chain)
        frame = frame.f_back
    return chains


def _chain_from(code: CodeType, variables: dict[str, Any]) -> RunningChain | None:
    """The chain whose update has these variables; None if they have not the names expected."""
    own = "update_fns" if code is _CHAIN else "transforms"
    if not {own, "updates", "state", "params", "extra_args", "new_state"} <= variables.keys():
        return None
    states = variables["state"]
    if code is _CHAIN:
        steps = list(zip(variables["update_fns"], states, strict=True))
    else:
        steps = [(tx.update, states[name]) for name, tx in variables["transforms"]]
    dtype_source = variables["updates"] if variables["params"] is None else variables["params"]
    # The accumulator itself is being called now, so its new state is not there yet.
    num_done = len(variables["new_state"]) + 1
    return RunningChain(steps, num_done, dtype_source, variables["extra_args"])


def varying_as(type_source: Any, x: jax.Array) -> jax.Array:
    """`x`, of a type that varies over the axes over which that of `type_source` does."""
    missing = tuple(varying_over(type_source) - varying_over(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_over(leaf: Any) -> frozenset[Any]:
    """The axes over which an array varies, by its type or that of its shape."""
    return _manual_axes(leaf, "varying")


def unreduced_over(leaf: Any) -> frozenset[Any]:
    """The axes over which an array is unreduced, by its type: its sum is still to be taken."""
    spec = getattr(type_of(leaf).sharding, "spec", None)
    on_mesh = frozenset() if spec is None else frozenset(spec.unreduced)
    return on_mesh | _manual_axes(leaf, "unreduced")


def _manual_axes(leaf: Any, kind: str) -> frozenset[Any]:
    types = getattr(type_of(leaf), "manual_axis_type", None)
    return getattr(types, kind, frozenset())


def type_of(leaf: Any) -> Any:
    """The type of an array, or of its shape."""
    # `jax.typeof` of a struct is an AssertionError where only some axes of a mesh are manual.
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def spec_of(leaf: Any) -> tuple[Any, ...]:
    """The entries of an array's PartitionSpec, by its type, over explicit axes of a mesh."""
    return tuple(getattr(type_of(leaf).sharding, "spec", None) or ())
