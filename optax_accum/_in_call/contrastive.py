"""The exact gradient of a contrastive loss, in the memory of a micro-batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum import _checks
from optax_accum._checks import PyTree, Scalar
from optax_accum._in_call import arguments
from optax_accum._in_call.batches import check_batch, check_enough_examples
from optax_accum._in_call.convolutions import canonical_convolutions
from optax_accum._in_call.microbatch import microbatch_value_and_grad
from optax_accum._in_call.split import EqualSizes, by_size, in_order, part_of, split_key
from optax_accum._in_call.wide_reductions import wide_reductions

_PART_OF_BATCH = (
    "Put it into the batch, which may be a tree, if it is split. Bind {name} to encode_fn with"
    " functools.partial if each micro-batch is to get all of it."
)


def contrastive_value_and_grad(
    encode_fn: Callable[..., Any],
    loss_fn: Callable[[Any, Any], jax.Array],
    num_microbatches: int,
    *,
    rng_argnums: int | Sequence[int] = (),
) -> Callable[..., tuple[jax.Array, Any]]:
    """Differentiate a loss that compares each example with all others, by micro-batches.

    With representations r = `encode_fn(params, batch)` of all examples, the loss L(params, r) is
    not a mean over micro-batches, and accumulation does not give its gradient. It is

        dL/dparams = ∂L/∂params + Σᵢ (∂rᵢ/∂params)ᵀ ∂L/∂rᵢ

    over micro-batches i. The representations are computed first, without a gradient; then the loss
    and its derivative ∂L/∂r; then each micro-batch is encoded and differentiated with its part of
    ∂L/∂r. So encoding takes a second forward pass, and memory for the activations of one
    micro-batch.

    Args:
      encode_fn: `encode_fn(params, batch[, rng])`, the representations: a pytree of arrays with the
        example axis first, of which integers (labels, say) are passed on without a gradient.
        It must treat each example by itself (no BatchNorm).
      loss_fn: `loss_fn(params, representations)`, a real scalar; the representations are those of
        the whole batch, in its order. What it takes from `params`, such as a temperature, counts
        once.
      num_microbatches: At least 1; 1 is `jax.value_and_grad` of the composition.
      rng_argnums: 2 if `encode_fn` takes a key, (2, 3) if it takes two. Each key is split, one for
        each micro-batch (with one micro-batch it stays as it is), the same in both passes.

    Returns:
      A function `(params, batch[, rng]) -> (loss, gradients)`. Its arguments may also be passed by
      the names that they have in the signature of `encode_fn`. All other keywords, such as
      `is_train=True`, go to `encode_fn` unchanged for each micro-batch; an array among them that is
      as long as the batch is an error.

      Inside `jax.shard_map`, let `loss_fn` gather the representations, `lax.all_gather(r, axis,
      tiled=True)`, and return `lax.pmean(loss, axis)`. Call the function with `varying(params,
      axis)`, and sum the gradients, `lax.psum(gradients, axis)`. Without checked types, as under
      `pmap`, the gradients of N devices are N times too large: take `lax.pmean(gradients, axis)`.

    Raises:
      ValueError: An argument breaks its rule.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> encode = lambda params, x: jnp.tanh(x @ params["w"])
      >>> def loss(params, r):
      ...     similarity = params["scale"] * r @ r.T
      ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(similarity)))
      >>> params = {"w": jnp.eye(3), "scale": 2.0}
      >>> x = jax.random.normal(jax.random.key(0), (8, 3))
      >>> value, gradients = contrastive_value_and_grad(encode, loss, 4)(params, x)
      >>> want = jax.grad(lambda params: loss(params, encode(params, x)))(params)
      >>> bool(jnp.allclose(gradients["scale"], want["scale"]))
      True

    References:
      Gao et al., 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup
      (arXiv:2101.06983).
    """
    _checks.check_function("encode_fn", encode_fn)
    _checks.check_function("loss_fn", loss_fn)
    _checks.check_count("num_microbatches", num_microbatches)
    roles = arguments.checked_roles(0, 1, rng_argnums)
    _check_keys_follow(roles.rng_argnums)
    gradient = _ContrastiveGradient(encode_fn, loss_fn, int(num_microbatches), roles)
    return gradient.value_and_grad


@dataclasses.dataclass(frozen=True, eq=False)
class _ContrastiveGradient:
    """The function that `contrastive_value_and_grad` returns, with its checked arguments."""

    encode_fn: Callable[..., Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    num: int
    roles: arguments.Roles

    def value_and_grad(self, *args: Any, **keywords: Any) -> tuple[Scalar, PyTree]:
        """The loss and its gradient."""
        _check_no_more_arguments(args, self.roles.rng_argnums)
        call = arguments.arrange(self.encode_fn, self.roles, args, keywords)
        (params,), (batch,) = ([call.row[i] for i in at] for at in (call.grad_at, call.batch_at))
        rngs, keywords = [call.row[i] for i in call.rng_at], call.shared_keywords
        hold = _checks.HOLD_OVERWRITTEN.format(name="encode_fn")
        _checks.check_not_overwritten(params, "params", hold)
        _checks.check_inexact(params, "params")
        size = check_batch(batch)
        batch = jax.tree.map(jnp.asarray, batch)
        check_enough_examples(self.num, size)
        arguments.check_shared_keywords(keywords, size, _PART_OF_BATCH)
        if self.num == 1:
            whole = wide_reductions(jax.value_and_grad(self._whole))
            return whole(params, batch, *rngs, **keywords)
        representations = self._representations(params, batch, rngs, keywords)
        loss, (direct, cotangents) = self._differentiated_loss(params, representations)
        _, through = self._backward(params, batch, cotangents, *rngs, **keywords)
        return loss, jax.tree.map(jnp.add, direct, through)

    def _whole(self, params: PyTree, batch: PyTree, /, *rngs: Any, **keywords: Any) -> Scalar:
        """The loss, of the whole batch at once."""
        representations = self.encode_fn(params, batch, *rngs, **keywords)
        _check_representations(representations, check_batch(batch))
        return _checks.checked_loss(self.loss_fn(params, representations))

    def _representations(
        self, params: PyTree, batch: PyTree, rngs: list[Any], keywords: dict[str, Any]
    ) -> PyTree:
        """The representations of the batch, encoded micro-batch by micro-batch."""
        keys = [split_key(rng, self.num) for rng in rngs]
        encode = canonical_convolutions(self.encode_fn)

        def encoded(group: EqualSizes) -> PyTree:
            """The representations of the micro-batches of one size, stacked."""

            def body(_: None, number: Scalar) -> tuple[None, PyTree]:
                part = jax.tree.map(lambda x: part_of(x, number, self.num, group.size), batch)
                keys_of_part = (key[number] for key in keys)
                rows = wide_reductions(encode)(params, part, *keys_of_part, **keywords)
                _check_representations(rows, group.size)
                return None, rows

            return lax.scan(body, None, group.numbers)[1]

        groups = by_size(check_batch(batch), self.num)
        return jax.tree.map(in_order, *map(encoded, groups))

    def _differentiated_loss(
        self, params: PyTree, representations: PyTree
    ) -> tuple[Scalar, tuple[PyTree, list[jax.Array]]]:
        """The loss, and its derivatives ∂L/∂params and ∂L/∂r, for each array r of no integers."""
        leaves, treedef = jax.tree.flatten(representations)

        def loss(params: PyTree, inexact: list[jax.Array]) -> Scalar:
            # Integers have no gradient, and go to the loss as they are.
            all_leaves = _put_back(leaves, inexact)
            value = self.loss_fn(params, jax.tree.unflatten(treedef, all_leaves))
            return _checks.checked_loss(value)

        differentiated = wide_reductions(jax.value_and_grad(loss, (0, 1)))
        return differentiated(params, list(filter(_is_inexact, leaves)))

    @functools.cached_property
    def _backward(self) -> Callable[..., tuple[Any, PyTree]]:
        """The sum over micro-batches of (∂rᵢ/∂params)ᵀ ∂L/∂rᵢ, for `batch` and all ∂L/∂r."""
        return microbatch_value_and_grad(
            self._surrogate,
            self.num,
            batch_argnums=(1, 2),
            rng_argnums=tuple(at + 1 for at in self.roles.rng_argnums),
            normalize="sum",
            weight_fn=lambda batch, cotangents: 1,
        )

    def _surrogate(
        self,
        params: PyTree,
        batch: PyTree,
        cotangents: list[jax.Array],
        /,
        *rngs: Any,
        **keywords: Any,
    ) -> Any:
        """A scalar whose gradient is the term of one micro-batch in that sum."""
        representations = self.encode_fn(params, batch, *rngs, **keywords)
        inexact = filter(_is_inexact, jax.tree.leaves(representations))
        pairs = zip(inexact, cotangents, strict=True)
        return sum(jnp.sum(r * c).real.astype(jnp.float32) for r, c in pairs)


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _put_back(leaves: list[jax.Array], inexact: list[jax.Array]) -> list[jax.Array]:
    """The leaves, with `inexact` in place of those that are floating or complex."""
    replacements = iter(inexact)
    return [next(replacements) if _is_inexact(x) else x for x in leaves]


def _check_keys_follow(rng_at: tuple[int, ...]) -> None:
    """Require keys that follow `params` and `batch`."""
    if sorted(rng_at) != [*range(2, 2 + len(rng_at))]:
        raise ValueError(
            "rng_argnums must be 2, or 2 and 3 and so on: keys follow params and batch; got"
            f" {rng_at}."
        )


def _check_no_more_arguments(args: tuple, rng_at: tuple[int, ...]) -> None:
    """Require no more by position than params, batch and as many keys as were announced."""
    if len(args) > 2 + len(rng_at):
        raise ValueError(
            "encode_fn must be called with params, batch and a key for each of rng_argnums,"
            f" {rng_at}; got {len(args) - 2} arguments after batch."
        )


def _check_representations(representations: PyTree, size: int) -> None:
    """Require a row for each example."""
    if not jax.tree.leaves(representations):
        raise ValueError(
            "encode_fn must return arrays with a row for each example; got the empty"
            f" {representations!r}."
        )
    for path, leaf in tree_flatten_with_path(representations)[0]:
        if jnp.ndim(leaf) < 1 or len(leaf) != size:
            raise ValueError(
                "encode_fn must return arrays with a row for each example; of a micro-batch of"
                f" {size} it returns representations{keystr(path)} of shape {jnp.shape(leaf)}."
            )
