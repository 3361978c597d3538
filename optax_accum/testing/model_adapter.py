"""The user's model as pure functions, whatever framework it is written in."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optax_accum import _checks
from optax_accum._checks import PyTree, Scalar
from optax_accum._in_call import jaxprs

LossFunction: TypeAlias = Callable[..., Any]  # the user's
LossAndState: TypeAlias = Callable[..., tuple[Scalar, PyTree]]  # of (params, state, batch, *key)
Gradient: TypeAlias = Callable[..., tuple[PyTree, PyTree]]  # the same with the gradient


class Model(NamedTuple):
    """The user's model: what it starts with, and its gradient on a batch."""

    params: PyTree
    state: PyTree  # what loss_fn changes, or None
    key: jax.Array | None
    big_gradient: Gradient
    micro_gradient: Gradient

    def keys(self, draw: int) -> list[jax.Array]:
        """The last argument of a loss that takes a key."""
        return [] if self.key is None else [jax.random.fold_in(self.key, draw)]

    def with_constant_draws(self, quantile: float) -> "Model":
        """The model without its noise: each random number is the same quantile."""
        big = jaxprs.with_constant_draws(self.big_gradient, quantile)
        is_same = self.micro_gradient is self.big_gradient
        micro = big if is_same else jaxprs.with_constant_draws(self.micro_gradient, quantile)
        return self._replace(big_gradient=big, micro_gradient=micro)


def model_of(
    loss_fn: LossFunction,
    micro_loss_fn: LossFunction,
    params: PyTree,
    model_state: PyTree,
    has_aux: bool,
    rng: jax.Array | None,
) -> Model:
    """The gradients of a loss in whatever framework, as pure functions."""
    nnx = sys.modules.get("flax.nnx")  # where it is not imported, nothing is its module
    if nnx is not None and isinstance(params, nnx.Module):
        if model_state is not None:
            raise ValueError("model_state must be None for an nnx.Module, which holds its own.")
        params, model_state, pure = _of_module(nnx, params, has_aux)
    else:
        pure = functools.partial(_of_function, model_state is not None, has_aux)
    _checks.check_model(params, "params")
    params = jax.tree.map(jnp.asarray, params)

    def gradient(loss_fn: LossFunction) -> Gradient:
        return jax.jit(jax.grad(pure(loss_fn), has_aux=True))

    big = gradient(loss_fn)
    micro = big if micro_loss_fn is loss_fn else gradient(micro_loss_fn)
    return Model(params, model_state, rng, big, micro)


def _of_module(
    nnx: Any, module: Any, has_aux: bool
) -> tuple[PyTree, PyTree, Callable[[LossFunction], LossAndState]]:
    """Params, other state, and what makes a pure function of a loss of the module."""
    kinds = (nnx.Param, nnx.Intermediate, ...)
    graph, params, sown, state = nnx.split(module, *kinds)

    def pure(loss_fn: LossFunction) -> LossAndState:
        def loss_and_state(
            params: PyTree, state: PyTree, batch: PyTree, *key: jax.Array
        ) -> tuple[Scalar, PyTree]:
            module = nnx.merge(graph, params, sown, state, copy=True)
            loss = _loss(loss_fn(module, batch, *key), has_aux)
            return loss, nnx.as_pure(nnx.split(module, *kinds)[3])

        return loss_and_state

    return nnx.as_pure(params), nnx.as_pure(state), pure


def _of_function(has_state: bool, has_aux: bool, loss_fn: LossFunction) -> LossAndState:
    """A pure function of a loss that takes and returns its state, if it has one."""

    def loss_and_state(
        params: PyTree, state: PyTree, batch: PyTree, *key: jax.Array
    ) -> tuple[Scalar, PyTree]:
        if not has_state:
            return _loss(loss_fn(params, batch, *key), has_aux), None
        loss, new_state = _checked_pair(loss_fn(params, state, batch, *key), "new_state")
        if has_aux:
            new_state, _ = _checked_pair(new_state, "aux")
        if jax.tree.structure(new_state) != jax.tree.structure(state):
            raise ValueError(
                "loss_fn must return the tree of model_state, got"
                f" {jax.tree.structure(new_state)} for {jax.tree.structure(state)}."
            )
        return loss, new_state

    return loss_and_state


def _loss(result: Any, has_aux: bool) -> Scalar:
    """The loss among what a loss function returns."""
    return _checked_pair(result, "aux")[0] if has_aux else result


def _checked_pair(result: Any, second: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"loss_fn must return a pair (..., {second}), got {result!r}.")
    return result[0], result[1]


def take(batch: PyTree, index: Any) -> PyTree:
    """The examples of a batch at these positions."""
    return jax.tree.map(lambda x: x[index], batch)
