"""What a traced function computes with: random numbers, and the narrowest dtype."""

import jax.numpy as jnp

_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")
_MOVES = {  # bytes about, without arithmetic
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
    *("dynamic_update_slice", "gather", "pad", "reshape", "rev", "select_n", "slice", "split"),
    *("squeeze", "transpose"),
}


def is_random(equations) -> bool:
    """Whether a random number is drawn."""
    return any(equation.primitive.name in _RANDOM for equation in equations)


def equations(jaxpr):
    """The equations of a jaxpr and of those inside it, without what only calls others."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inside = [
            value
            for parameter in equation.params.values()
            for value in (parameter if isinstance(parameter, tuple | list) else [parameter])
            if hasattr(value, "eqns") or hasattr(value, "jaxpr")
        ]
        for value in inside:
            yield from equations(value)
        if not inside:
            yield equation


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
