"""Jaxprs: tracing a function of its arrays, evaluating it, and what it computes with."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

Jaxpr: TypeAlias = Any  # closed or open; newer versions of jax have one class for both
Rule: TypeAlias = Callable[..., list[Any]]  # (equation, *inputs) -> its results
Values: TypeAlias = dict[Var, Any]

_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")
_MOVES = {  # elements, without arithmetic
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
    *("dynamic_update_slice", "gather", "pad", "reshape", "rev", "select_n", "slice", "split"),
    *("squeeze", "transpose"),
}


def of_arrays(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Callable[..., list[Any]]]:
    """Separate the arrays among the arguments of `fun` from all else.

    Returns `fun` as a function of these arrays, with all else held fixed, and a function that picks
    the arrays out of arguments of the same structure.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

    def fun_of_arrays(*arrays: Any) -> Any:
        replacements = iter(arrays)
        both = [next(replacements) if a else x for x, a in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, both)
        return fun(*args, **kwargs)

    def arrays_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        both = zip(jax.tree.leaves((args, kwargs)), is_array, strict=True)
        return [x for x, a in both if a]

    return fun_of_arrays, arrays_of


def traced(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Jaxpr, list[Any], Callable[[Iterable[Any]], Any]]:
    """The jaxpr of a call, its arrays, and a function from the jaxpr's results to the call's."""
    fun_of_arrays, arrays_of = of_arrays(fun, args, kwargs)
    arrays = arrays_of(args, kwargs)
    jaxpr, out = jax.make_jaxpr(fun_of_arrays, return_shape=True)(*arrays)
    return jaxpr, arrays, functools.partial(jax.tree.unflatten, jax.tree.structure(out))


def is_random(equations: Iterable[JaxprEqn]) -> bool:
    """Whether one of the equations draws random numbers."""
    return any(equation.primitive.name in _RANDOM for equation in equations)


def with_constant_draws(fun: Callable[..., Any], quantile: float) -> Callable[..., Any]:
    """`fun`, compiled, where each random number is the same quantile of its distribution.

    A draw within a `while` loop stays random: with a constant one the loop might never end.
    """
    draw = functools.partial(_constant_draw, quantile)
    return jax.jit(rewritten(fun, _is_draw, draw, left=("shard_map", "while")))


def _is_draw(equation: JaxprEqn) -> bool:
    return equation.primitive.name in ("random_bits", "random_gamma")


def _constant_draw(quantile: float, equation: JaxprEqn, *inputs: Any) -> list[jax.Array]:
    """The result of a draw, the same number everywhere."""
    (out,) = equation.outvars
    if equation.primitive.name == "random_bits":  # uniform integers, of which the others are made
        bits = int(quantile * 2 ** equation.params["bit_width"])
        return [jnp.full(aval_of(out).shape, bits, aval_of(out).dtype)]
    _, shape = inputs  # of the gamma distribution, which is its mean
    factor = 2 * quantile
    if equation.params["log_space"]:
        return [jnp.log(shape) + jnp.asarray(np.log(factor), shape.dtype)]
    return [shape * jnp.asarray(factor, shape.dtype)]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of those nested in it, without those that hold others."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        nested = [
            value
            for parameter in equation.params.values()
            for value in (parameter if isinstance(parameter, tuple | list) else [parameter])
            if is_jaxpr(value)
        ]
        for value in nested:
            yield from equations(value)
        if not nested:
            yield equation


def is_jaxpr(value: Any) -> bool:
    """Whether it is a jaxpr, closed or open."""
    return hasattr(value, "eqns")


def evaluate(jaxpr: Jaxpr, *args: Any, rule: Rule) -> list[Any]:
    """Evaluate a jaxpr, where `rule(equation, *inputs)` gives the results of an equation."""
    values = initial_values(jaxpr, args)
    run(jaxpr.eqns, values, rule)
    return results(jaxpr, values)


def rewritten(
    fun: Callable[..., Any],
    is_replaced: Callable[[JaxprEqn], bool],
    rule: Rule,
    left: tuple[str, ...] = ("shard_map",),
) -> Callable[..., Any]:
    """`fun` with some equations replaced: `rule(equation, *inputs)` gives their results.

    Equations in nested jaxprs are replaced too, except inside the primitives of the names `left`:
    the body of a `shard_map` cannot be traced outside its mesh.
    """

    @functools.wraps(fun)
    def new(*args: Any, **kwargs: Any) -> Any:
        jaxpr, arrays, result = traced(fun, args, kwargs)
        is_found = any(map(is_replaced, equations(jaxpr)))
        return result((of_jaxpr(jaxpr) if is_found else jaxpr_as_fun(jaxpr))(*arrays))

    def of_jaxpr(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
        return functools.partial(evaluate, jaxpr, rule=of_equation)

    def of_equation(equation: JaxprEqn, *inputs: Any) -> list[Any]:
        if is_replaced(equation):
            return rule(equation, *inputs)
        if equation.primitive.name in left:
            return bind(equation, *inputs)
        return bind(equation, *inputs, **{n: of_value(v) for n, v in equation.params.items()})

    def of_value(value: Any) -> Any:
        """A parameter of an equation, with the jaxprs in it rewritten."""
        if isinstance(value, tuple | list):
            return of_sequence(value) if any(map(is_jaxpr, value)) else value
        if not is_jaxpr(value) or not any(map(is_replaced, equations(value))):
            return value
        new = jax.make_jaxpr(of_jaxpr(value))(*(v.aval for v in value.invars))
        return new if hasattr(value, "consts") else new.jaxpr

    def of_sequence(values: Sequence[Any]) -> Sequence[Any]:
        kind: Any = type(values)
        new = map(of_value, values)
        return kind(*new) if hasattr(values, "_fields") else kind(new)

    return new


def initial_values(jaxpr: Jaxpr, args: Iterable[Any]) -> Values:
    """The values of a jaxpr's variables before its first equation, by variable."""
    values = dict(zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True))
    return values | dict(zip(jaxpr.invars, args, strict=True))


def run(equations: Iterable[JaxprEqn], values: Values, rule: Rule) -> None:
    """Add to `values` what `rule` gives for each equation."""
    for equation in equations:
        outputs = rule(equation, *(_read(values, v) for v in equation.invars))
        values.update(zip(equation.outvars, outputs, strict=True))


def results(jaxpr: Jaxpr, values: Values) -> list[Any]:
    """What a jaxpr returns."""
    return [_read(values, v) for v in jaxpr.outvars]


def bind(equation: JaxprEqn, *inputs: Any, **changed: Any) -> list[Any]:
    """The results of an equation; `changed` replaces some of its parameters."""
    params = equation.primitive.get_bind_params({**equation.params, **changed})
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*inputs, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def variables(atoms: Iterable[Var | Literal]) -> list[Var]:
    """The variables among variables and literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def aval_of(variable: Var | Literal) -> Any:
    """The type of a variable, with its shape and dtype if it is an array."""
    return variable.aval


def _read(values: Values, v: Var | Literal) -> Any:
    return v.val if isinstance(v, Literal) else values[v]


def eps_of(equations: Iterable[JaxprEqn]) -> float:
    """The largest machine epsilon of the dtypes that equations compute in or round to."""
    seen = [0.0]
    for equation in equations:
        # Images that come in float16 and are cast to float32 lose nothing.
        moves = equation.primitive.name in _MOVES
        kept = max(map(_eps, filter(_is_inexact, equation.invars)), default=None) if moves else 0.0
        rounded = map(_eps, filter(_is_inexact, equation.outvars))
        seen += [e for e in rounded if kept is not None and e > kept]
    return max(seen)


def _eps(variable: Var | Literal) -> float:
    return float(jnp.finfo(aval_of(variable).dtype).eps)


def _is_inexact(variable: Var | Literal) -> bool:
    return jnp.issubdtype(getattr(aval_of(variable), "dtype", bool), jnp.inexact)
