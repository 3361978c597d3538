"""A check of the transformations that follow an accumulator in a plain `optax.chain`.

Nothing gates the followers of an accumulator in a plain chain: they are called in every
micro-step, off the boundary with zeros. That is harmless for a follower without state that maps
zeros to zeros, and silently wrong for any other.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from optax_accum._core.internals import RunningChain, running_chains

_REMEDY = (
    "Use optax_accum.chain(...) in place of optax.chain(...), with accumulate(k) as an argument of"
    " its own, or put what follows inside: accumulate(k, inner)."
)


def check_followers(name: str = "an accumulate(k)", remedy: str = _REMEDY) -> None:
    """Raise if a plain chain calls this accumulator, and a follower that is wrong off the boundary.

    Args:
      name: The accumulator's name in the error.
      remedy: The advice that ends the error.

    Raises:
      ValueError: A follower holds state, or does not map zero updates to zero.
    """
    for chain in running_chains():
        _check_chain(chain, name, remedy)


def _check_chain(chain: RunningChain, name: str, remedy: str) -> None:
    for position in range(chain.num_done, len(chain.steps)):
        update, state = chain.steps[position]
        if jax.tree.leaves(state):
            _refuse(position, "holds state, which would advance in every micro-step", name, remedy)
        if not _keeps_zeros(update, state, chain.dtype_source, chain.extra_args):
            _refuse(position, "does not map zero updates to zero updates", name, remedy)


def _keeps_zeros(
    update: Callable[..., Any], state: Any, dtype_source: Any, extra_args: dict[str, Any]
) -> bool:
    """Whether zero updates stay zero; tried on small leaves, for two values of the params."""
    try:
        return all(
            not np.any(np.asarray(leaf))
            for value in (-1.0, 1e3)
            for leaf in _probe(update, state, dtype_source, extra_args, value)
        )
    except Exception:
        # If the probe cannot run a follower, because it needs the true shapes say, nothing shows
        # that it is wrong. If it is, its own call raises its own error.
        return True


def _probe(
    update: Callable[..., Any],
    state: Any,
    dtype_source: Any,
    extra_args: dict[str, Any],
    value: float,
) -> list[Any]:
    """The leaves of the follower's updates, for zero updates and params that are all `value`."""

    def filled(value: float) -> Any:
        def small(leaf: Any) -> jax.Array:
            shape = tuple(min(n, 2) for n in jnp.shape(leaf))
            return jnp.full(shape, value, jnp.result_type(leaf))

        return jax.tree.map(small, dtype_source)

    def stand_in(x: Any) -> Any:
        return jnp.full(x.shape, 0.7, x.dtype) if isinstance(x, Tracer) else x

    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        zeros, params = filled(0), filled(value)
    # Hyperparameters and extra args may be traced; a jaxpr lets numbers stand in for them.
    jaxpr = jax.make_jaxpr(lambda: update(zeros, state, params, **extra_args)[0])()
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        return jaxpr_as_fun(jaxpr.replace(consts=[stand_in(x) for x in jaxpr.consts]))()


def _refuse(position: int, reason: str, name: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"In a plain optax.chain, transformation {position} (from 0) comes after"
        f" {name}, but it {reason}. {remedy}"
    )
