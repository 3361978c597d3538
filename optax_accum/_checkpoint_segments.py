"""Recomputation in segments, for any function: time for memory inside a micro-batch."""

import collections
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from optax_accum import _jaxprs, _validation

_PRODUCTS = (lax.dot_general_p, lax.conv_general_dilated_p)


def checkpoint_segments(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Let the gradient of `fun` keep a few points of the forward pass, and recompute the rest.

    The n matrix products and convolutions of `fun`, those in nested `jit`s too, are cut into about
    √n segments with outputs of about as many bytes; each cut is moved to where the fewest bytes are
    alive. `jax.checkpoint` goes around each segment but the last. So the activations that are kept
    are those between segments, and those of one segment at a time, for at most one more forward
    pass. It is for functions whose layers are not at hand; where they are, put `jax.checkpoint`
    around them, and around the body of a `lax.scan` over them, which is not cut. (When to recompute
    is XLA's choice in the end: on CPU memory falls with jax 0.12, and not with 0.10.)

    Args:
      fun: Function of any pytrees of arrays: a loss function.

    Returns:
      The same function, for differentiation.

    Raises:
      ValueError: `fun` is no function.

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
    _validation.check_function("fun", fun)

    @functools.wraps(fun)
    def segmented(*args, **kwargs):
        jaxpr, arrays, result = _jaxprs.traced(fun, args, kwargs)
        inlined = jax.make_jaxpr(functools.partial(_jaxprs.evaluate, jaxpr, rule=_inline))(*arrays)
        return result(_in_segments(inlined, arrays))

    return segmented


def _inline(equation, *inputs):
    """What is jitted inside can be cut too."""
    if equation.primitive.name == "jit":
        return _jaxprs.evaluate(equation.params["jaxpr"], *inputs, rule=_inline)
    return _jaxprs.bind(equation, *inputs)


def _in_segments(jaxpr, arrays):
    """Evaluate a jaxpr, each segment of it but the last under `jax.checkpoint`."""
    last_read = {v: i for i, e in enumerate(jaxpr.eqns) for v in _jaxprs.variables(e.invars)}
    returned = set(_jaxprs.variables(jaxpr.outvars))
    values = _jaxprs.initial_values(jaxpr, arrays)
    for start, end in itertools.pairwise(_cuts(jaxpr, last_read)):
        segment = jaxpr.eqns[start:end]
        reads = dict.fromkeys(v for e in segment for v in _jaxprs.variables(e.invars))
        inputs = [v for v in reads if v in values]
        is_kept = lambda v, end=end: last_read.get(v, -1) >= end or v in returned
        outputs = [v for e in segment for v in e.outvars if is_kept(v)]

        def run(*xs, segment=segment, inputs=inputs, outputs=outputs):
            inside = dict(zip(inputs, xs, strict=True))
            _jaxprs.run(segment, inside, _jaxprs.bind)
            return [inside[v] for v in outputs]

        is_last = end == len(jaxpr.eqns)  # recomputing what was just computed saves nothing
        run = run if is_last else jax.checkpoint(run)
        values |= zip(outputs, run(*(values[v] for v in inputs)), strict=True)
    return _jaxprs.results(jaxpr, values)


def _cuts(jaxpr, last_read):
    """Where segments begin, by the number of the equation, and where the last one ends."""
    products = sum(e.primitive in _PRODUCTS for e in _jaxprs.equations(jaxpr))
    num = max(1, round(math.sqrt(products)))
    made, alive = [0], [0]  # bytes made before each equation, and those that are read after it
    freed = collections.Counter()  # bytes, by the equation that reads them last
    for i, equation in enumerate(jaxpr.eqns):
        sizes = {v: _bytes(v.aval) for v in equation.outvars}
        for v, size in sizes.items():
            freed[last_read.get(v, i)] += size
        made.append(made[-1] + sum(sizes.values()))
        alive.append(alive[-1] + sum(sizes.values()) - freed[i])
    cuts, total = [0], max(made[-1], 1)
    for j in range(1, num):
        near = [i for i, m in enumerate(made) if abs(m * num / total - j) < 0.5 and i > cuts[-1]]
        cuts += [min(near, key=alive.__getitem__)] if near else []
    return [*cuts, len(jaxpr.eqns)]


def _bytes(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
