"""Reductions of bfloat16 in what a user differentiates, where they would end the process.

XLA's CPU compiler aborts ("Invalid binary instruction opcode copy") on an all-reduce or a
reduce-scatter of bfloat16 where only some axes of a mesh are manual. They come from `lax.pmean` of
statistics, from the derivative of `lax.all_gather`, and from that with respect to parameters that
all devices share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _jaxprs
from optax_accum._axis import is_partly_manual

_REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "reduce_scatter", "unreduced_psum"}


def wide_reductions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, its reductions of bfloat16 over mapped axes in float32 where that is necessary."""
    if not is_partly_manual():
        return fun
    return _jaxprs.rewritten(fun, _is_narrow, _in_float32)


def _is_narrow(equation: Any) -> bool:
    if equation.primitive.name not in _REDUCTIONS:
        return False
    return any(variable.aval.dtype == jnp.bfloat16 for variable in equation.invars)


def _in_float32(equation: Any, *inputs: jax.Array) -> list[jax.Array]:
    """The results of a reduction, in float32 where the platform is a CPU."""

    def as_it_is(*inputs):
        return _jaxprs.bind(equation, *inputs)

    def wide(*inputs):
        widen = lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        results = as_it_is(*map(widen, inputs))
        pairs = zip(results, equation.outvars, strict=True)
        return [x.astype(variable.aval.dtype) for x, variable in pairs]

    return lax.platform_dependent(*inputs, cpu=wide, default=as_it_is)
