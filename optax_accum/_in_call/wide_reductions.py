"""Reductions of bfloat16 in a user's gradient, which may abort XLA's CPU compiler.

It aborts ("Invalid binary instruction opcode copy") on an all-reduce or a reduce-scatter of
bfloat16 if only some axes of a mesh are manual. Such reductions come from `lax.pmean` of
statistics, from the derivative of `lax.all_gather`, and from derivatives with respect to parameters
that all devices share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from optax_accum._devices.axis import is_partly_manual
from optax_accum._in_call import jaxprs

_REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "reduce_scatter", "unreduced_psum"}


def wide_reductions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with reductions of bfloat16 over mapped axes in float32 where XLA would abort."""
    if not is_partly_manual():
        return fun
    return jaxprs.rewritten(fun, _is_narrow, _in_float32)


def _is_narrow(equation: JaxprEqn) -> bool:
    if equation.primitive.name not in _REDUCTIONS:
        return False
    return any(jaxprs.aval_of(variable).dtype == jnp.bfloat16 for variable in equation.invars)


def _in_float32(equation: JaxprEqn, *inputs: jax.Array) -> list[jax.Array]:
    """The results of a reduction, in float32 where the platform is a CPU."""

    def as_it_is(*inputs: jax.Array) -> list[jax.Array]:
        return jaxprs.bind(equation, *inputs)

    def widened(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    def wide(*inputs: jax.Array) -> list[jax.Array]:
        results = as_it_is(*map(widened, inputs))
        pairs = zip(results, equation.outvars, strict=True)
        return [x.astype(jaxprs.aval_of(variable).dtype) for x, variable in pairs]

    return lax.platform_dependent(*inputs, cpu=wide, default=as_it_is)
