"""What a user's loss function returns, and its gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _call_validation
from optax_accum._validation import wider
from optax_accum._wide_reductions import wide_reductions


class LossFunction(NamedTuple):
    """The user's loss function, and what it returns beside the loss."""

    loss_fn: Callable[..., Any]
    argnums: int | Sequence[int]
    has_aux: bool
    carry_argnum: int | None
    carry_name: str  # for errors

    def loss(self, *args):
        """The loss, and beside it the carry and the aux."""
        has_carry = self.carry_argnum is not None
        # Made anew, since a variable of NNX can be changed only in the trace in which it was made.
        anew = lambda i, x: jax.tree.map(lambda x: x, x) if i == self.carry_argnum else x
        value, carry, aux = self.loss_fn(*map(anew, range(len(args)), args)), None, None
        if self.has_aux or has_carry:
            value, beside = _call_validation.pair("loss_fn", value)
            if self.has_aux and has_carry:
                carry, aux = _call_validation.pair("what loss_fn returns beside the loss", beside)
            else:
                carry, aux = (beside, None) if has_carry else (None, beside)
        _call_validation.check_arrays("aux", aux)
        return _call_validation.loss(value), (carry, aux)

    def value_and_grad(self, *args, loss_scale=None):
        """The loss, the carry and the aux, and the gradients (times `loss_scale`)."""

        def scaled(*args):
            loss, rest = self.loss(*args)
            if loss_scale is None:
                return loss, (loss, rest)
            wide = wider(loss.dtype, jnp.float32)  # or the product might overflow
            return loss.astype(wide) * loss_scale, (loss, rest)

        grad_fn = jax.grad(scaled, self.argnums, has_aux=True)
        gradients, (loss, rest) = wide_reductions(grad_fn)(*args)
        if self.carry_argnum is not None:
            _call_validation.check_returned(self.carry_name, rest[0], args[self.carry_argnum])
        return loss, rest, gradients

    def value(self, loss, carry, aux):
        """What `loss_fn` returns."""
        if self.carry_argnum is None:
            return (loss, aux) if self.has_aux else loss
        return loss, ((carry, aux) if self.has_aux else carry)
