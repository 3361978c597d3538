"""Convolutions that stay fast in a loop on CPU.

XLA brings convolutions to the layout of its fast CPU kernels in the entry computation only. In the
body of a loop, the transposed ones that gradients bring fall to naive loops, twenty times slower.
Where each convolution already has that layout, with transpositions around it, there is nothing to
bring: so a jaxpr is rewritten, before it goes into the loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from optax_accum import _jaxprs, _validation


def canonical_convolutions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Let `fun` do its convolutions in the layout that stays fast inside a loop on CPU.

    Each `lax.conv_general_dilated` is done with channels last, N spatial C times spatial I O, and
    transpositions around it; on other platforms than CPU it is done as it is, and so within a
    `jax.shard_map` inside `fun`: put this inside of that. All else stays: the same values to
    rounding, the same control flow, `jax.checkpoint` and custom derivatives.

    Put it around the gradient, whose convolutions are others than those of the function:
    `canonical_convolutions(jax.grad(loss_fn))`, and that into `lax.scan`.

    Args:
      fun: Function of any pytrees of arrays.

    Returns:
      The same function. Where no convolution has another layout, nothing is changed.

    Raises:
      ValueError: `fun` is no function.

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
    _validation.check_function("fun", fun)

    return _jaxprs.rewritten(fun, _is_slow, _convolve)


def _is_slow(equation: Any) -> bool:
    """Whether it is a convolution of another layout than the fast one."""
    if equation.primitive is not lax.conv_general_dilated_p:
        return False
    return equation.params["dimension_numbers"] != _fast(equation.invars[0].aval.ndim)


def _fast(ndim: int) -> lax.ConvDimensionNumbers:
    """Batch, space, features; space, features in and out; batch, space, features."""
    space = tuple(range(1, ndim - 1))
    outer = (0, ndim - 1, *space)
    return lax.ConvDimensionNumbers(outer, (ndim - 1, ndim - 2, *(i - 1 for i in space)), outer)


def _convolve(equation: Any, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    """A convolution in the fast layout, where the platform is a CPU."""
    as_it_is = functools.partial(lax.conv_general_dilated_p.bind, **equation.params)
    params = dict(equation.params)
    dimension_numbers = params.pop("dimension_numbers")

    def fast(lhs, rhs):
        order = lambda spec, fast_spec: tuple(
            spec[fast_spec.index(axis)] for axis in range(lhs.ndim)
        )
        like = _fast(lhs.ndim)
        out = lax.conv_general_dilated_p.bind(
            lhs.transpose(order(dimension_numbers.lhs_spec, like.lhs_spec)),
            rhs.transpose(order(dimension_numbers.rhs_spec, like.rhs_spec)),
            dimension_numbers=like,
            **params,
        )
        return out.transpose(np.argsort(order(dimension_numbers.out_spec, like.out_spec)))

    return [lax.platform_dependent(lhs, rhs, cpu=fast, default=as_it_is)]
