"""What a compiled program sends between devices, read from its HLO."""

import dataclasses
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
    found: dict[str, list[tuple[str, int]]] = {}
    calls: dict[str, list[tuple[str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            found[name], calls[name] = [], []
            entry = name if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            kind = instruction[2].removesuffix("-start")
            if kind in _KINDS:
                found[name].append((kind, _bytes(instruction[1], instruction[2])))
            for how, called in _CALLED.findall(line):
                names = re.findall(r"[\w.\-]+", called)
                calls[name] += [(how, each) for each in names]

    places = {field: [] for field in Collectives._fields}

    def visit(name, place):
        places[place].extend(found[name])
        for how, called in calls[name]:
            inside = place
            if how in _BRANCHES:
                inside = "in_conditionals"
            elif how in ("body", "condition") and place == "outside":
                inside = "in_loops"
            visit(called, inside)

    visit(entry, "outside")
    return Collectives(**{place: _count(operations) for place, operations in places.items()})


def _bytes(shape: str, operation: str) -> int:
    sizes = []
    for dtype, dims in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        size = 1
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        sizes.append(size * bits // 8)
    # An asynchronous start returns what it sends beside what it will receive.
    if operation.endswith("-start") and operation != "all-reduce-start":
        return sizes[len(sizes) // 2]
    return sum(sizes)


def _count(operations: list[tuple[str, int]]) -> CollectiveCount:
    kinds: dict[str, int] = {}
    for kind, _ in operations:
        kinds[kind] = kinds.get(kind, 0) + 1
    return CollectiveCount(len(operations), sum(size for _, size in operations), kinds)
