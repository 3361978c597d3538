"""The user's model as pure functions, whatever it is written in."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _jaxprs, _validation


class Model(NamedTuple):
    """The user's model, whatever it is written in."""

    params: Any
    state: Any  # what loss_fn changes, or None
    key: Any
    big_gradient: Callable[..., tuple[Any, Any]]  # (params, state, batch, *key) -> gradient, state
    micro_gradient: Callable[..., tuple[Any, Any]]

    def keys(self, draw: int) -> list[jax.Array]:
        """The last argument of a loss that takes a key."""
        return [] if self.key is None else [jax.random.fold_in(self.key, draw)]

    def with_constant_draws(self, quantile: float) -> "Model":
        """The model without its noise: each random number is the same quantile."""
        big = _jaxprs.with_constant_draws(self.big_gradient, quantile)
        is_same = self.micro_gradient is self.big_gradient
        micro = big if is_same else _jaxprs.with_constant_draws(self.micro_gradient, quantile)
        return self._replace(big_gradient=big, micro_gradient=micro)


def model_of(loss_fn, micro_loss_fn, params, model_state, has_aux, rng) -> Model:
    nnx = sys.modules.get("flax.nnx")  # where it is not imported, nothing is its module
    if nnx is not None and isinstance(params, nnx.Module):
        if model_state is not None:
            raise ValueError("model_state must be None for an nnx.Module, which holds its own.")
        params, model_state, pure = _of_module(nnx, params, has_aux)
    else:
        pure = functools.partial(_of_function, model_state is not None, has_aux)
    _validation.check_model(params, "params")
    params = jax.tree.map(jnp.asarray, params)
    gradient = lambda loss_fn: jax.jit(jax.grad(pure(loss_fn), has_aux=True))
    big = gradient(loss_fn)
    micro = big if micro_loss_fn is loss_fn else gradient(micro_loss_fn)
    return Model(params, model_state, rng, big, micro)


def _of_module(nnx, module, has_aux):
    """Params, other state, and what makes a pure function of a loss of the module."""
    kinds = (nnx.Param, nnx.Intermediate, ...)
    graph, params, sown, state = nnx.split(module, *kinds)

    def pure(loss_fn):
        def loss_and_state(params, state, batch, *key):
            module = nnx.merge(graph, params, sown, state, copy=True)
            loss = _loss(loss_fn(module, batch, *key), has_aux)
            return loss, nnx.as_pure(nnx.split(module, *kinds)[3])

        return loss_and_state

    return nnx.as_pure(params), nnx.as_pure(state), pure


def _of_function(has_state, has_aux, loss_fn):
    def loss_and_state(params, state, batch, *key):
        if not has_state:
            return _loss(loss_fn(params, batch, *key), has_aux), None
        loss, new_state = _pair(loss_fn(params, state, batch, *key), "new_state")
        if has_aux:
            new_state, _ = _pair(new_state, "aux")
        if jax.tree.structure(new_state) != jax.tree.structure(state):
            raise ValueError(
                "loss_fn must return the tree of model_state, got"
                f" {jax.tree.structure(new_state)} for {jax.tree.structure(state)}."
            )
        return loss, new_state

    return loss_and_state


def _loss(result, has_aux):
    return _pair(result, "aux")[0] if has_aux else result


def _pair(result, second):
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"loss_fn must return a pair (..., {second}), got {result!r}.")
    return result


def take(batch, index):
    return jax.tree.map(lambda x: x[index], batch)
