"""Convolutions that stay fast in a loop on CPU.

XLA changes convolutions to the layout of its fast CPU kernels in the entry computation only. In the
body of a loop, the transposed convolutions of gradients run as naive loops, twenty times slower.
Here a jaxpr is rewritten before it goes into the loop: each convolution gets that layout, with
transpositions around it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from optax_accum import _checks
from optax_accum._in_call import jaxprs


def canonical_convolutions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Let `fun` run its convolutions in the layout that stays fast inside a loop on CPU.

    Each `lax.conv_general_dilated` runs with channels last (NHWC images, HWIO kernels, and so for
    other numbers of dimensions) and transpositions around it. On platforms other than CPU nothing
    changes. Convolutions in a `jax.shard_map` inside `fun` do not change either: there, use this
    inside the mapped function. Values stay the same up to rounding; control flow, `jax.checkpoint`
    and custom derivatives stay too.

    Apply it to the gradient, whose convolutions differ from those of the function, inside the loop:
    `canonical_convolutions(jax.grad(loss_fn))` in the body of `lax.scan`.

    Args:
      fun: Function of any pytrees of arrays.

    Returns:
      The same function. If all convolutions have that layout, nothing changes.

    Raises:
      ValueError: `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss_fn(w, x):
      ...     return jnp.tanh(jax.lax.conv(x, w, (1, 1), "SAME")).sum()
      >>> gradient = canonical_convolutions(jax.grad(loss_fn))
      >>> w, xs = jnp.ones((4, 3, 3, 3)) / 27, jnp.ones((5, 2, 3, 8, 8))
      >>> total, _ = jax.lax.scan(lambda s, x: (s + gradient(w, x), None), jnp.zeros_like(w), xs)
      >>> bool(jnp.allclose(total, 5 * jax.grad(loss_fn)(w, xs[0]), rtol=1e-5))
      True
    """
    _checks.check_function("fun", fun)

    return jaxprs.rewritten(fun, _is_slow, _convolve)


def _is_slow(equation: JaxprEqn) -> bool:
    """Whether it is a convolution of another layout than the fast one."""
    if equation.primitive is not lax.conv_general_dilated_p:
        return False
    return equation.params["dimension_numbers"] != _fast(jaxprs.aval_of(equation.invars[0]).ndim)


def _fast(ndim: int) -> lax.ConvDimensionNumbers:
    """The fast layout: NHWC inputs and outputs, HWIO kernels, for `ndim` dimensions."""
    space = tuple(range(1, ndim - 1))
    outer = (0, ndim - 1, *space)
    return lax.ConvDimensionNumbers(outer, (ndim - 1, ndim - 2, *(i - 1 for i in space)), outer)


def _convolve(equation: JaxprEqn, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    """A convolution in the fast layout, where the platform is a CPU."""
    as_it_is = functools.partial(lax.conv_general_dilated_p.bind, **equation.params)
    params = dict(equation.params)
    own = params.pop("dimension_numbers")

    def in_fast_layout(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        fast = _fast(lhs.ndim)
        out = lax.conv_general_dilated_p.bind(
            lhs.transpose(_permutation(own.lhs_spec, fast.lhs_spec)),
            rhs.transpose(_permutation(own.rhs_spec, fast.rhs_spec)),
            dimension_numbers=fast,
            **params,
        )
        return out.transpose(np.argsort(_permutation(own.out_spec, fast.out_spec)))

    return [lax.platform_dependent(lhs, rhs, cpu=in_fast_layout, default=as_it_is)]


def _permutation(spec: Sequence[int], fast_spec: Sequence[int]) -> tuple[int, ...]:
    """The transposition that takes an array from one layout to the fast one."""
    return tuple(spec[fast_spec.index(axis)] for axis in range(len(spec)))
