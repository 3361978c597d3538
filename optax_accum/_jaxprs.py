"""Jaxprs: tracing a function of its arrays, evaluating it, and what it computes with."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")
_MOVES = {  # elements, without arithmetic
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
    *("dynamic_update_slice", "gather", "pad", "reshape", "rev", "select_n", "slice", "split"),
    *("squeeze", "transpose"),
}


def of_arrays(fun, args, kwargs):
    """Split off what is no array.

    Returns `fun` as a function of the arrays among its arguments, all else held fixed, and a
    function that picks these arrays out of arguments of the same structure.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

    def with_the_rest(*arrays):
        arrays = iter(arrays)
        both = [next(arrays) if a else x for x, a in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, both)
        return fun(*args, **kwargs)

    def arrays_of(args, kwargs):
        both = zip(jax.tree.leaves((args, kwargs)), is_array, strict=True)
        return [x for x, a in both if a]

    return with_the_rest, arrays_of


def traced(fun, args, kwargs):
    """The jaxpr of a call, its arrays, and what makes the result of those of the jaxpr."""
    with_the_rest, arrays_of = of_arrays(fun, args, kwargs)
    arrays = arrays_of(args, kwargs)
    jaxpr, out = jax.make_jaxpr(with_the_rest, return_shape=True)(*arrays)
    return jaxpr, arrays, functools.partial(jax.tree.unflatten, jax.tree.structure(out))


def is_random(equations) -> bool:
    """Whether a random number is drawn."""
    return any(equation.primitive.name in _RANDOM for equation in equations)


def with_constant_draws(fun: Callable[..., Any], quantile: float) -> Callable[..., Any]:
    """`fun`, compiled, where each random number is the same quantile of its distribution.

    A draw within a loop of unknown length stays random, since the loop might wait for another one.
    """
    draw = functools.partial(_constant_draw, quantile)
    return jax.jit(rewritten(fun, _is_draw, draw, left=("shard_map", "while")))


def _is_draw(equation):
    return equation.primitive.name in ("random_bits", "random_gamma")


def _constant_draw(quantile, equation, *inputs):
    """The result of a draw, the same number everywhere."""
    (out,) = equation.outvars
    if equation.primitive.name == "random_bits":  # uniform integers, of which the others are made
        bits = int(quantile * 2 ** equation.params["bit_width"])
        return [jnp.full(out.aval.shape, bits, out.aval.dtype)]
    _, shape = inputs  # of the gamma distribution, which is its mean
    factor = 2 * quantile
    if equation.params["log_space"]:
        return [jnp.log(shape) + jnp.asarray(np.log(factor), shape.dtype)]
    return [shape * jnp.asarray(factor, shape.dtype)]


def equations(jaxpr):
    """The equations of a jaxpr and of those inside it, without what only calls others."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inside = [
            value
            for parameter in equation.params.values()
            for value in (parameter if isinstance(parameter, tuple | list) else [parameter])
            if is_jaxpr(value)
        ]
        for value in inside:
            yield from equations(value)
        if not inside:
            yield equation


def is_jaxpr(value):
    """Whether it is one, closed or open."""
    return hasattr(value, "eqns")


def evaluate(jaxpr, *args, rule):
    """The results of a jaxpr, where `rule(equation, *inputs)` gives those of an equation."""
    values = initial_values(jaxpr, args)
    run(jaxpr.eqns, values, rule)
    return results(jaxpr, values)


def rewritten(
    fun: Callable[..., Any],
    is_replaced: Callable[[Any], bool],
    rule: Callable[..., list[Any]],
    left: tuple[str, ...] = ("shard_map",),
) -> Callable[..., Any]:
    """`fun`, where `rule(equation, *inputs)` gives the results of the equations that it replaces.

    Those in nested jaxprs too, except in the primitives of the names `left`: the body of a
    `shard_map` means nothing outside of its mesh.
    """

    @functools.wraps(fun)
    def new(*args, **kwargs):
        jaxpr, arrays, result = traced(fun, args, kwargs)
        is_found = any(map(is_replaced, equations(jaxpr)))
        return result((of_jaxpr(jaxpr) if is_found else jaxpr_as_fun(jaxpr))(*arrays))

    def of_jaxpr(jaxpr):
        return functools.partial(evaluate, jaxpr, rule=of_equation)

    def of_equation(equation, *inputs):
        if is_replaced(equation):
            return rule(equation, *inputs)
        if equation.primitive.name in left:
            return bind(equation, *inputs)
        return bind(equation, *inputs, **{n: of_value(v) for n, v in equation.params.items()})

    def of_value(value):
        """A parameter of an equation, with the jaxprs in it rewritten."""
        if isinstance(value, tuple | list):
            if not any(map(is_jaxpr, value)):
                return value
            new = map(of_value, value)
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
        if not is_jaxpr(value) or not any(map(is_replaced, equations(value))):
            return value
        new = jax.make_jaxpr(of_jaxpr(value))(*(v.aval for v in value.invars))
        return new if hasattr(value, "consts") else new.jaxpr

    return new


def initial_values(jaxpr, args):
    """The values of a jaxpr's variables before its first equation, by variable."""
    values = dict(zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True))
    return values | dict(zip(jaxpr.invars, args, strict=True))


def run(equations, values, rule):
    """Add to `values` what `rule` gives for each equation."""
    for equation in equations:
        outputs = rule(equation, *(_read(values, v) for v in equation.invars))
        values.update(zip(equation.outvars, outputs, strict=True))


def results(jaxpr, values):
    """What a jaxpr returns."""
    return [_read(values, v) for v in jaxpr.outvars]


def bind(equation, *inputs, **changed):
    """The results of an equation, with other parameters where they are `changed`."""
    params = equation.primitive.get_bind_params({**equation.params, **changed})
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*inputs, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def variables(atoms):
    """Those that are no constants."""
    return [v for v in atoms if not isinstance(v, Literal)]


def _read(values, v):
    return v.val if isinstance(v, Literal) else values[v]


def eps_of(equations) -> float:
    """Relative rounding of the narrowest dtype that is computed with, or rounded to."""
    eps = lambda variable: float(jnp.finfo(variable.aval.dtype).eps)
    seen = [0.0]
    for equation in equations:
        # Images that come in float16 and are cast to float32 lose nothing.
        moves = equation.primitive.name in _MOVES
        kept = max(map(eps, filter(_is_inexact, equation.invars)), default=None) if moves else 0.0
        rounded = map(eps, filter(_is_inexact, equation.outvars))
        seen += [e for e in rounded if kept is not None and e > kept]
    return max(seen)


def _is_inexact(variable) -> bool:
    return jnp.issubdtype(getattr(variable.aval, "dtype", bool), jnp.inexact)
