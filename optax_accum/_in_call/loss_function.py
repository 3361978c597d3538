"""A user's loss function: its loss, carry and aux, and its gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import (
    PyTree,
    Scalar,
    checked_loss,
    describe,
    is_arraylike,
    wider_dtype,
)
from optax_accum._core.internals import spec_of
from optax_accum._in_call.batches import check_kept
from optax_accum._in_call.wide_reductions import wide_reductions

CarryAndAux: TypeAlias = tuple[PyTree, PyTree]  # each None where the function returns none


class LossFunction(NamedTuple):
    """The user's loss function, with the roles of its arguments and results."""

    loss_fn: Callable[..., Any]
    argnums: int | Sequence[int]
    has_aux: bool
    carry_argnum: int | None
    carry_name: str  # for errors

    def loss(self, *args: PyTree) -> tuple[Scalar, CarryAndAux]:
        """The loss, and beside it the carry and the aux."""
        has_carry = self.carry_argnum is not None

        def copied(i: int, x: PyTree) -> PyTree:
            # loss_fn may change a variable of NNX only in the trace in which it was made.
            return jax.tree.map(lambda x: x, x) if i == self.carry_argnum else x

        value, carry, aux = self.loss_fn(*map(copied, range(len(args)), args)), None, None
        if self.has_aux or has_carry:
            value, beside = _checked_pair("loss_fn", value)
            if self.has_aux and has_carry:
                carry, aux = _checked_pair("what loss_fn returns beside the loss", beside)
            else:
                carry, aux = (beside, None) if has_carry else (None, beside)
        _check_arrays("aux", aux)
        return checked_loss(value), (carry, aux)

    def value_and_grad(
        self, *args: PyTree, loss_scale: Scalar | None = None
    ) -> tuple[Scalar, CarryAndAux, PyTree]:
        """The loss, the carry and the aux, and the gradients (times `loss_scale`)."""

        def scaled(*args: PyTree) -> tuple[Scalar, tuple[Scalar, CarryAndAux]]:
            loss, rest = self.loss(*args)
            if loss_scale is None:
                return loss, (loss, rest)
            wide = wider_dtype(loss.dtype, jnp.float32)  # or the product might overflow
            return loss.astype(wide) * loss_scale, (loss, rest)

        grad_fn = jax.grad(scaled, self.argnums, has_aux=True)
        gradients, (loss, rest) = wide_reductions(grad_fn)(*args)
        if self.carry_argnum is not None:
            _check_returned(self.carry_name, rest[0], args[self.carry_argnum])
        return loss, rest, gradients

    def value(self, loss: Scalar, carry: PyTree, aux: PyTree) -> Any:
        """Put the loss, the carry and the aux together as `loss_fn` returns them."""
        if self.carry_argnum is None:
            return (loss, aux) if self.has_aux else loss
        return loss, ((carry, aux) if self.has_aux else carry)


def _checked_pair(name: str, value: Any) -> tuple[Any, Any]:
    """Require two values, and return them."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be a pair, got {describe(value)}.")
    return value[0], value[1]


def _check_arrays(name: str, tree: PyTree) -> None:
    """Require arrays and numbers."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not is_arraylike(leaf):
            raise ValueError(
                f"{name} must hold arrays and numbers; {name}{keystr(path)} is {leaf!r}."
            )


def _check_returned(name: str, new: PyTree, old: PyTree) -> None:
    """Require that `loss_fn` returns what it was given with its tree, shapes and dtypes."""
    check_kept(name, f"loss_fn must return the {name} with", "it was given", new, old)
    pairs = zip(tree_flatten_with_path(new)[0], jax.tree.leaves(old), strict=True)
    for (path, n), o in pairs:
        if spec_of(n) != spec_of(o):
            raise ValueError(
                f"loss_fn must return the {name} sharded as it was given, over axes of a mesh that"
                f" are explicit; {name}{keystr(path)} goes from {spec_of(o)} to {spec_of(n)}. Use"
                " jax.sharding.reshard."
            )
