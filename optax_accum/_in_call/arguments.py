"""The roles of the arguments of a call, by position or by keyword."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

_OLD_KEYS = ((2,), (4,))  # the shapes of keys of uint32


class Roles(NamedTuple):
    """The roles of a function's arguments, by their numbers in its signature."""

    argnums: tuple[int, ...]  # to differentiate with respect to
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    carry_argnum: int | None
    batch_argnames: tuple[str, ...] | None = None  # more arguments of the batch; None: not given


class Call(NamedTuple):
    """A call with its arguments in one row, keywords last, and the places of roles in the row."""

    function: Callable[..., Any]  # of the row
    row: tuple[Any, ...]
    labels: tuple[str, ...]  # of the row, for errors
    grad_at: tuple[int, ...]
    batch_at: tuple[int, ...]
    rng_at: tuple[int, ...]
    carry_at: int | None
    shared_keywords: dict[str, Any]  # those without a role


def checked_roles(
    argnums: Any,
    batch_argnums: Any,
    rng_argnums: Any,
    carry_argnum: Any = None,
    batch_argnames: Any = None,
) -> Roles:
    """The roles that a factory was given; an argument of a call has at most one."""
    given = {
        "argnums": argnums,
        "batch_argnums": batch_argnums,
        "rng_argnums": rng_argnums,
        "carry_argnum": () if carry_argnum is None else carry_argnum,
    }
    roles: dict[Any, str] = {}
    numbers = {}
    for name, value in given.items():
        is_many = isinstance(value, tuple | list) and (name != "carry_argnum" or not value)
        numbers[name] = tuple(value) if is_many else (value,)
        for number in numbers[name]:
            is_int = isinstance(number, int | np.integer) and not isinstance(number, bool)
            if not is_int or number < 0:
                raise ValueError(
                    f"{name} must be the number of an argument, from 0, got {value!r}."
                )
            if number in roles:
                raise ValueError(
                    f"{name} must name other arguments than {roles[number]}, got {number} in both."
                )
            roles[number] = name
    names = _checked_names(batch_argnames)
    if not numbers["argnums"] or not (numbers["batch_argnums"] or names):
        raise ValueError(
            "argnums and batch_argnums (or batch_argnames) must name an argument, got"
            f" {argnums!r} and {batch_argnums!r}."
        )
    return Roles(
        numbers["argnums"],
        numbers["batch_argnums"],
        numbers["rng_argnums"],
        carry_argnum,
        names,
    )


def arrange(
    function: Callable[..., Any],
    roles: Roles,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    hint: str = "",
) -> Call:
    """Find the arguments that have a role in a call of `function`; `hint` is for errors."""
    place_of = _places(function, roles, len(args), tuple(keywords))

    def places(role: str, numbers: Sequence[int]) -> tuple[int, ...]:
        for number in numbers:
            if number not in place_of:
                raise ValueError(
                    f"argument {number} must be passed, since {role} names it; got {len(args)}"
                    f" arguments by position and the keywords {sorted(keywords)}.{hint}"
                )
        return tuple(place_of[number] for number in numbers)

    grad_at = places("argnums", roles.argnums)
    rng_at = places("rng_argnums", roles.rng_argnums)
    carry_at = () if roles.carry_argnum is None else places("carry_argnum", (roles.carry_argnum,))
    batch_numbers = roles.batch_argnums
    if roles.batch_argnames:  # named arguments may be the whole batch
        batch_numbers = [number for number in batch_numbers if number in place_of]
    named = _named_places(roles.batch_argnames or (), place_of, (*grad_at, *rng_at, *carry_at))
    batch_at = tuple(dict.fromkeys((*places("batch_argnums", batch_numbers), *named)))

    def of_row(*row: Any) -> Any:
        by_name = dict(zip(keywords, row[len(args) :], strict=True))
        return function(*row[: len(args)], **by_name)

    with_role = {*grad_at, *batch_at, *rng_at, *carry_at}
    return Call(
        function=of_row if keywords else function,
        row=(*args, *keywords.values()),
        labels=(*(f"argument {i}" for i in range(len(args))), *keywords),
        grad_at=grad_at,
        batch_at=batch_at,
        rng_at=rng_at,
        carry_at=carry_at[0] if carry_at else None,
        shared_keywords={
            name: x for i, (name, x) in enumerate(keywords.items(), len(args)) if i not in with_role
        },
    )


def check_shared_keywords(keywords: dict[str, Any], size: int, remedy: str | None) -> None:
    """Require that arguments without a role are neither a part of the batch nor a key.

    The `remedy` is for errors; None if the user lets micro-batches share arrays of any length.
    """
    for name, value in keywords.items():
        for path, leaf in tree_flatten_with_path(value)[0]:
            if _is_key(leaf):
                raise ValueError(
                    f"{name}{keystr(path)}, passed by keyword, is a random key without a role,"
                    " and would be the same in each micro-batch. Let the key be an argument that"
                    " may be passed by position, and name its number in rng_argnums."
                )
            shape = getattr(leaf, "shape", ())
            if remedy is not None and size > 1 and shape[:1] == (size,):
                raise ValueError(
                    f"{name}{keystr(path)}, passed by keyword, has the {size} rows of the batch,"
                    f" and nothing says whether it is split with it. {remedy.format(name=name)}"
                )


def _is_key(x: Any) -> bool:
    """Whether it is a random key, or several."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    is_old = dtype == jnp.uint32 and x.shape in _OLD_KEYS
    return is_old or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _checked_names(names: Any) -> tuple[str, ...] | None:
    if names is None or isinstance(names, str):
        return None if names is None else (names,)
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"batch_argnames must be the name of an argument, or a tuple of names, got {names!r}."
        )
    return tuple(names)


def _places(
    function: Callable[..., Any], roles: Roles, num_args: int, keywords: tuple[str, ...]
) -> dict[int | str, int]:
    """The place of each argument in the row of a call, by its number and by its name."""
    places: dict[int | str, int] = {i: i for i in range(num_args)}
    places |= {name: i for i, name in enumerate(keywords, num_args)}
    names = _numbered_names(function) if keywords or roles.batch_argnames else ()
    for number, name in enumerate(names):
        if number < num_args:
            places[name] = number
        elif name in places:
            places[number] = places[name]
    return places


def _numbered_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that have a number; "" for those that are positional-only."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin has none
        return ()
    may_be_named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(
        parameter.name if parameter.kind is may_be_named else ""
        for parameter in parameters
        if parameter.kind in (may_be_named, inspect.Parameter.POSITIONAL_ONLY)
    )


def _named_places(
    names: Sequence[str], place_of: dict[int | str, int], taken: Sequence[int]
) -> list[int]:
    """The places of the arguments of these names; an error if one has another role."""
    for name in names:
        if name not in place_of:
            passed = sorted(name for name in place_of if isinstance(name, str) and name)
            raise ValueError(
                f"batch_argnames must name arguments that the call passes, {passed}; got {name!r}."
            )
        if place_of[name] in taken:
            raise ValueError(
                f"batch_argnames must name arguments without another role; {name!r} has one."
            )
    return [place_of[name] for name in names]
