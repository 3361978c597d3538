"""Recomputation of activations in segments, for any function: less memory for more time."""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from optax_accum import _checks
from optax_accum._in_call import jaxprs

_PRODUCTS = (lax.dot_general_p, lax.conv_general_dilated_p)


def checkpoint_segments(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Let the gradient of `fun` keep a few points of the forward pass, and recompute the rest.

    The n matrix products and convolutions of `fun`, those in nested `jit`s too, are cut into about
    √n segments that make about equally many bytes; each cut is moved to where the fewest bytes are
    alive. `jax.checkpoint` goes around each segment but the last. So memory holds the activations
    between segments and those of one segment at a time, for at most one more forward pass. Use this
    for functions whose layers you cannot change. Otherwise put `jax.checkpoint` around the layers,
    and around the body of a `lax.scan` over them, which is not cut. (XLA decides in the end when to
    recompute: on CPU memory falls with jax 0.12, and not with 0.10.)

    Args:
      fun: Function of any pytrees of arrays: a loss function.

    Returns:
      The same function, for differentiation.

    Raises:
      ValueError: `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss_fn(w, x):
      ...     for _ in range(16):
      ...         x = jnp.tanh(x @ w)
      ...     return x.mean()
      >>> w, x = jnp.eye(8), jnp.ones((4, 8))
      >>> less = checkpoint_segments(loss_fn)  # 4 segments of 4 layers
      >>> bool(jnp.allclose(jax.grad(less)(w, x), jax.grad(loss_fn)(w, x)))
      True

    References:
      Chen et al., 2016, Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174).
    """
    _checks.check_function("fun", fun)

    @functools.wraps(fun)
    def segmented(*args: Any, **kwargs: Any) -> Any:
        jaxpr, arrays, result = jaxprs.traced(fun, args, kwargs)
        inlined = jax.make_jaxpr(functools.partial(jaxprs.evaluate, jaxpr, rule=_inline))(*arrays)
        return result(_in_segments(inlined, arrays))

    return segmented


def _inline(equation: JaxprEqn, *inputs: Any) -> list[Any]:
    """The results of an equation; a nested `jit` becomes equations that can be cut too."""
    if equation.primitive.name == "jit":
        return jaxprs.evaluate(equation.params["jaxpr"], *inputs, rule=_inline)
    return jaxprs.bind(equation, *inputs)


def _in_segments(jaxpr: jaxprs.Jaxpr, arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, each segment of it but the last under `jax.checkpoint`."""
    last_read = {v: i for i, e in enumerate(jaxpr.eqns) for v in jaxprs.variables(e.invars)}
    returned = set(jaxprs.variables(jaxpr.outvars))
    values = jaxprs.initial_values(jaxpr, arrays)
    for start, end in itertools.pairwise(_cuts(jaxpr, last_read)):
        equations = jaxpr.eqns[start:end]
        reads = dict.fromkeys(v for e in equations for v in jaxprs.variables(e.invars))
        inputs = [v for v in reads if v in values]
        made = [v for e in equations for v in e.outvars]
        outputs = [v for v in made if last_read.get(v, -1) >= end or v in returned]
        run = _segment(equations, inputs, outputs)
        if end < len(jaxpr.eqns):  # recomputing what was just computed saves nothing
            run = jax.checkpoint(run)
        values |= zip(outputs, run(*(values[v] for v in inputs)), strict=True)
    return jaxprs.results(jaxpr, values)


def _segment(
    equations: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var]
) -> Callable[..., list[Any]]:
    """Equations as a function of their inputs."""

    def run(*xs: Any) -> list[Any]:
        values = dict(zip(inputs, xs, strict=True))
        jaxprs.run(equations, values, jaxprs.bind)
        return [values[v] for v in outputs]

    return run


def _cuts(jaxpr: jaxprs.Jaxpr, last_read: dict[Var, int]) -> list[int]:
    """Where segments begin, by the number of the equation, and where the last one ends."""
    num_products = sum(e.primitive in _PRODUCTS for e in jaxprs.equations(jaxpr))
    num_segments = max(1, round(math.sqrt(num_products)))
    made, alive = _bytes_before_equations(jaxpr, last_read)
    cuts, total = [0], max(made[-1], 1)
    for j in range(1, num_segments):
        near = [
            i
            for i, bytes_made in enumerate(made)
            if abs(bytes_made * num_segments / total - j) < 0.5 and i > cuts[-1]
        ]
        cuts += [min(near, key=alive.__getitem__)] if near else []
    return [*cuts, len(jaxpr.eqns)]


def _bytes_before_equations(
    jaxpr: jaxprs.Jaxpr, last_read: dict[Var, int]
) -> tuple[list[int], list[int]]:
    """Before each equation and after the last, the bytes made, and those still to be read."""
    made, alive = [0], [0]
    freed: collections.Counter[int] = collections.Counter()  # by the equation that reads them last
    for i, equation in enumerate(jaxpr.eqns):
        sizes = {v: _bytes(v.aval) for v in equation.outvars}
        for v, size in sizes.items():
            freed[last_read.get(v, i)] += size
        made.append(made[-1] + sum(sizes.values()))
        alive.append(alive[-1] + sum(sizes.values()) - freed[i])
    return made, alive


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
