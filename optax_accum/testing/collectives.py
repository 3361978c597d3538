"""What a compiled program sends between devices, read from its HLO."""

import collections
import dataclasses
import math
import re
from typing import Any, NamedTuple

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z\-]+)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(branch_computations|true_computation|false_computation|body|condition|to_apply|calls)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


@dataclasses.dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one place in a program."""

    count: int  # operations; one may reduce many arrays
    bytes: int  # of their results, on one device
    kinds: dict[str, int]  # operations by name, such as "all-reduce"


class Collectives(NamedTuple):
    """Collectives of a program: what runs in each call, and what may not."""

    outside: CollectiveCount  # in each call, once
    in_conditionals: CollectiveCount  # in a branch, wherever that stands
    in_loops: CollectiveCount  # in a loop and no branch: once per iteration


def collectives(compiled: Any) -> Collectives:
    """Count what a compiled program sends between devices.

    Args:
      compiled: `jax.jit(step).lower(...).compile()`, or the text of its HLO.

    Returns:
      Counts and bytes. A micro-step of `accumulate(k, axis_name=...)` has nothing outside its
      conditional, and one all-reduce inside.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
      >>> spec = jax.sharding.PartitionSpec("data")
      >>> total = jax.shard_map(
      ...     lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec,
      ...     out_specs=jax.sharding.PartitionSpec(),
      ... )
      >>> x = jnp.ones((jax.device_count(), 3))
      >>> collectives(jax.jit(total).lower(x).compile()).outside
      CollectiveCount(count=1, bytes=12, kinds={'all-reduce': 1})
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    computations, entry = _parsed(text)
    found: dict[str, list[_Operation]] = {place: [] for place in Collectives._fields}
    _collect(computations, entry, "outside", found)
    return Collectives(**{place: _count(operations) for place, operations in found.items()})


class _Operation(NamedTuple):
    """A collective."""

    kind: str
    bytes: int


class _Computation(NamedTuple):
    """A function of a program."""

    operations: list[_Operation]
    calls: list[tuple[str, str]]  # how it calls, and the name of what it calls


def _parsed(text: str) -> tuple[dict[str, _Computation], str]:
    """The computations of an HLO text by name, and the name of the first to run."""
    computations: dict[str, _Computation] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            computations[name] = _Computation([], [])
            entry = name if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            shape, operation = instruction.groups()
            kind = operation.removesuffix("-start")
            if kind in _KINDS:
                size = _bytes(shape, operation)
                computations[name].operations.append(_Operation(kind, size))
            for how, called in _CALLED.findall(line):
                names = re.findall(r"[\w.\-]+", called)
                computations[name].calls.extend((how, each) for each in names)
    return computations, entry


def _collect(
    computations: dict[str, _Computation],
    name: str,
    place: str,
    found: dict[str, list[_Operation]],
) -> None:
    """Add the collectives of a computation that runs at `place`, and of all that it calls."""
    found[place].extend(computations[name].operations)
    for how, called in computations[name].calls:
        place_of_call = place
        if how in _BRANCHES:
            place_of_call = "in_conditionals"
        elif how in ("body", "condition") and place == "outside":
            place_of_call = "in_loops"
        _collect(computations, called, place_of_call, found)


def _bytes(shape: str, operation: str) -> int:
    """The size of what an operation receives."""
    sizes = []
    for dtype, dims in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        sizes.append(bits * math.prod(map(int, filter(None, dims.split(",")))) // 8)
    # The start of an asynchronous operation returns what it sends and what it will receive.
    if operation.endswith("-start") and operation != "all-reduce-start":
        return sizes[len(sizes) // 2]
    return sum(sizes)


def _count(operations: list[_Operation]) -> CollectiveCount:
    kinds = collections.Counter(operation.kind for operation in operations)
    size = sum(operation.bytes for operation in operations)
    return CollectiveCount(len(operations), size, dict(kinds))
