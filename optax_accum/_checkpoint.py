"""Recomputation in segments, for any function: time for memory inside a micro-batch."""

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

    A function of n matrix products and convolutions is cut into √n segments, about as large each,
    where the least is to be kept; `jax.checkpoint` goes around each but the last. So memory for
    activations falls to that of a segment and of the points between them, for at most one more
    forward pass. It is `jax.checkpoint` for a function whose parts are not at hand; a loop in it,
    such as a `lax.scan` over layers, stays whole: put `jax.checkpoint` around its body. (When to
    recompute is XLA's choice in the end: on CPU memory falls with jax 0.12, and not with 0.10.)

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
        of_arrays, arrays_of = _jaxprs.of_arrays(fun, args, kwargs)
        arrays = arrays_of(args, kwargs)
        jaxpr, out = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        inlined = jax.make_jaxpr(functools.partial(_jaxprs.evaluate, jaxpr, rule=_inline))(*arrays)
        return jax.tree.unflatten(jax.tree.structure(out), _in_segments(inlined, arrays))

    return segmented


def _inline(equation, *inputs):
    """What is jitted inside can be cut too."""
    if equation.primitive.name == "jit":
        return _jaxprs.evaluate(equation.params["jaxpr"], *inputs, rule=_inline)
    return _jaxprs.bind(equation, *inputs)


def _in_segments(jaxpr, arrays):
    """Evaluate a jaxpr, each segment of it but the last under `jax.checkpoint`."""
    segments = _cut(jaxpr)
    values = _jaxprs.initial_values(jaxpr, arrays)
    for i, segment in enumerate(segments):
        reads = dict.fromkeys(v for equation in segment for v in _jaxprs.variables(equation.invars))
        inputs = [v for v in reads if v in values]
        later = {
            v
            for s in segments[i + 1 :]
            for equation in s
            for v in _jaxprs.variables(equation.invars)
        }
        later |= set(_jaxprs.variables(jaxpr.outvars))
        outputs = [v for equation in segment for v in equation.outvars if v in later]

        def run(*xs, segment=segment, inputs=inputs, outputs=outputs):
            inside = dict(zip(inputs, xs, strict=True))
            _jaxprs.run(segment, inside, _jaxprs.bind)
            return [inside[v] for v in outputs]

        is_last = i + 1 == len(segments)  # recomputing what was just computed saves nothing
        run = run if is_last else jax.checkpoint(run)
        values |= zip(outputs, run(*(values[v] for v in inputs)), strict=True)
    return _jaxprs.results(jaxpr, values)


def _cut(jaxpr):
    """The equations in segments."""
    equations = jaxpr.eqns
    products = sum(e.primitive in _PRODUCTS for e in _jaxprs.equations(jaxpr))
    num = max(1, round(math.sqrt(products)))
    last_read = {v: i for i, e in enumerate(equations) for v in _jaxprs.variables(e.invars)}
    crossing, alive = [0] * (len(equations) + 1), 0  # bytes to keep for a cut before equation i
    leaves = [0] * (len(equations) + 1)
    made = [0]
    for i, equation in enumerate(equations):
        sizes = {v: _bytes(v.aval) for v in equation.outvars}
        made.append(made[-1] + sum(sizes.values()))
        for v, size in sizes.items():
            if v in last_read:
                alive += size
                leaves[last_read[v]] += size
        alive -= leaves[i]
        crossing[i + 1] = alive
    cuts = [0]
    for j in range(1, num):
        near = [i for i, m in enumerate(made) if abs(m * num / made[-1] - j) < 0.5 and i > cuts[-1]]
        cuts += [min(near, key=crossing.__getitem__)] if near else []
    return [equations[a:b] for a, b in itertools.pairwise([*cuts, len(equations)])]


def _bytes(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
