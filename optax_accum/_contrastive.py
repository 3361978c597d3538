"""The exact gradient of a contrastive loss, in the memory of a micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _call_arguments, _call_validation, _validation
from optax_accum._canonical_conv import canonical_convolutions
from optax_accum._microbatch import by_size, in_order, microbatch_value_and_grad, part_of, split_key
from optax_accum._wide_reductions import wide_reductions

_PART_OF_BATCH = (
    "Put it into the batch, a tree, if it is; let encode_fn be a functools.partial that has {name}"
    " if each micro-batch is to get all of it."
)


def contrastive_value_and_grad(
    encode_fn: Callable[..., Any],
    loss_fn: Callable[[Any, Any], jax.Array],
    num_microbatches: int,
    *,
    rng_argnums: int | Sequence[int] = (),
) -> Callable[..., tuple[jax.Array, Any]]:
    """Differentiate a loss in which each example meets all others, micro-batch by micro-batch.

    With representations r = `encode_fn(params, batch)` of all examples, the loss L(params, r) is
    no mean over micro-batches, and its gradient is not that of any accumulation. It is

        dL/dparams = ∂L/∂params + Σᵢ (∂rᵢ/∂params)ᵀ ∂L/∂rᵢ

    over micro-batches i: the representations are computed first, without a gradient, then the
    loss and its derivative ∂L/∂r, and then each micro-batch once more, with its part of that. So
    encoding takes a second pass forward, and memory for the activations of one micro-batch.

    Args:
      encode_fn: `encode_fn(params, batch[, rng])`, the representations: a pytree of arrays with the
        example axis first, of which integers (labels, say) are passed on without a gradient.
        Examples must not see each other in it (no BatchNorm).
      loss_fn: `loss_fn(params, representations)`, a real scalar, of those of the whole batch in its
        order. What it takes from `params`, such as a temperature, counts once.
      num_microbatches: At least 1; 1 is `jax.value_and_grad` of the composition.
      rng_argnums: 2 where `encode_fn` takes a key, 2 and 3 where it takes two. Each micro-batch
        gets one split from it (a single one the key itself), the same in both passes.

    Returns:
      A function `(params, batch[, rng]) -> (loss, gradients)`. These may also be passed by the
      names that they have in the signature of `encode_fn`. All other keywords, such as
      `is_train=True`, go to `encode_fn` as they are for each micro-batch; an array among them that
      is as long as the batch is an error. Inside
      `jax.shard_map` let `loss_fn` gather the representations, `lax.all_gather(r, axis,
      tiled=True)`, and return `lax.pmean(loss, axis)`; call the function with `varying(params,
      axis)`, and sum the gradients, `lax.psum(gradients, axis)`. Without checked types, under
      `pmap` too, they come N times too large from N devices: take `lax.pmean(gradients, axis)`.

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
    _validation.check_function("encode_fn", encode_fn)
    _validation.check_function("loss_fn", loss_fn)
    _call_validation.check_count("num_microbatches", num_microbatches)
    roles = _call_arguments.checked_roles(0, 1, rng_argnums)
    rng_at = roles.rng_argnums
    _call_validation.check_keys_follow(rng_at)
    num = int(num_microbatches)
    encode = canonical_convolutions(encode_fn) if num > 1 else encode_fn

    def checked_loss(params, representations):
        return _call_validation.loss(loss_fn(params, representations))

    def whole(params, batch, /, *rngs, **keywords):
        representations = encode_fn(params, batch, *rngs, **keywords)
        _call_validation.check_representations(representations, _call_validation.check_batch(batch))
        return checked_loss(params, representations)

    def surrogate(params, batch, cotangents, /, *rngs, **keywords):
        """A number whose gradient is a micro-batch's part of the sum."""
        representations = encode_fn(params, batch, *rngs, **keywords)
        differentiable = filter(_is_inexact, jax.tree.leaves(representations))
        pairs = zip(differentiable, cotangents, strict=True)
        return sum(jnp.sum(r * c).real.astype(jnp.float32) for r, c in pairs)

    backward = microbatch_value_and_grad(
        surrogate,
        num,
        batch_argnums=(1, 2),
        rng_argnums=tuple(at + 1 for at in rng_at),
        normalize="sum",
        weight_fn=lambda batch, cotangents: 1,
    )

    def value_and_grad(*args, **keywords):
        _call_validation.check_no_more_arguments(args, rng_at)
        call = _call_arguments.arrange(encode_fn, roles, args, keywords)
        (params,), (batch,) = ([call.row[i] for i in at] for at in (call.grad_at, call.batch_at))
        rngs, keywords = [call.row[i] for i in call.rng_at], call.shared_keywords
        _validation.check_not_overwritten(
            params, "params", _validation.HOLD_OVERWRITTEN.format(name="encode_fn")
        )
        _validation.check_inexact(params, "params")
        size = _call_validation.check_batch(batch)
        batch = jax.tree.map(jnp.asarray, batch)
        _call_validation.check_enough_examples(num, size)
        _call_arguments.check_shared_keywords(keywords, size, _PART_OF_BATCH)
        if num == 1:
            return wide_reductions(jax.value_and_grad(whole))(params, batch, *rngs, **keywords)
        keys = [split_key(rng, num) for rng in rngs]

        def forward(numbers, is_larger):
            """Representations of the micro-batches of one size."""

            def body(_, i):
                part = jax.tree.map(lambda x: part_of(x, i, num, is_larger), batch)
                keys_of_part = (key[i] for key in keys)
                rows = wide_reductions(encode)(params, part, *keys_of_part, **keywords)
                _call_validation.check_representations(rows, _call_validation.check_batch(part))
                return None, rows

            return lax.scan(body, None, numbers)[1]

        parts = [forward(*group) for group in by_size(size, num)]
        representations = jax.tree.map(in_order, *parts)
        leaves, treedef = jax.tree.flatten(representations)
        # Integers have no gradient, and go to the loss as they are.
        of_leaves = lambda params, floats: checked_loss(
            params, jax.tree.unflatten(treedef, _put_back(leaves, floats))
        )
        differentiated = wide_reductions(jax.value_and_grad(of_leaves, (0, 1)))
        loss, (direct, cotangents) = differentiated(params, list(filter(_is_inexact, leaves)))
        _, through = backward(params, batch, cotangents, *rngs, **keywords)
        return loss, jax.tree.map(jnp.add, direct, through)

    return value_and_grad


def _is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _put_back(leaves, floats):
    """The leaves, with these in place of those that are floating or complex."""
    floats = iter(floats)
    return [next(floats) if _is_inexact(x) else x for x in leaves]
