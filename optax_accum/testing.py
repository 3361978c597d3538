"""Is a window equivalent to the big batch, for this model and this optimizer?"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum import _validation
from optax_accum._accumulate import AccumulateState, accumulate, has_updated

_DRAWS = 32  # of a random loss
_RANDOM_PRIMITIVES = ("random_bits[", "threefry2x32", "rng_bit_generator[", "rng_uniform[")
_DTYPES = {  # as a jaxpr writes them
    ":bf16[": jnp.bfloat16,
    ":f16[": jnp.float16,
    ":f32[": jnp.float32,
    ":c64[": jnp.float32,
    ":f64[": jnp.float64,
    ":c128[": jnp.float64,
}
_SHOWN = 3  # parameters in a message


def assert_window_equivalence(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    num_microbatches: int,
    *,
    has_aux: bool = False,
    model_state: Any = None,
    rng: jax.Array | None = None,
    weight_fn: Callable[..., jax.typing.ArrayLike] | None = None,
    normalize: str = "mean",
    micro_loss_fn: Callable[..., Any] | None = None,
    tx: optax.GradientTransformation | None = None,
) -> None:
    """Assert that a window of micro-batches gives the gradient of the big batch.

    The batch is cut along axis 0 into `num_microbatches` parts, whose gradients gᵢ an
    `accumulate(num_microbatches)` gathers with their weights wᵢ; Σ wᵢgᵢ / Σ wᵢ must be the gradient
    of the whole batch. Gradients are compared, not parameters after an update of Adam, which turns
    rounding into whole steps; how much is rounding, the batch in another order tells. Where
    `loss_fn` is random, means over 32 draws are compared, up to five standard errors.

    A constant factor in `loss_fn` is in both gradients and cannot be seen. If the loss of your
    micro-steps is not the one of the big batch, pass it as `micro_loss_fn`.

    Args:
      loss_fn: `loss_fn(params[, model_state], batch[, rng]) -> loss`. With `has_aux` it returns
        `(loss, aux)`; with `model_state`, `(loss, new_state)`, or `(loss, (new_state, aux))`.
      params: A tree of arrays; or an `nnx.Module`, whose other state is carried along.
      batch: A tree of arrays with the example axis first.
      num_microbatches: k, from 1 to the number of examples. Parts may differ by one example.
      has_aux: Whether `loss_fn` returns something beside the loss.
      model_state: Linen's mutable collections, say `{"batch_stats": ...}`; each micro-batch
        receives what the one before it left.
      rng: A key for `loss_fn`; each micro-batch receives one of its own.
      weight_fn: `weight_fn(micro_batch) -> wᵢ`; default, its number of examples.
      normalize: As in `accumulate`.
      micro_loss_fn: The loss in the micro-steps; default `loss_fn`.
      tx: Your optimizer, around an `accumulate(num_microbatches)`: all that clips, counts or holds
        other state must stand behind the gate.

    Raises:
      AssertionError: The two differ by more than rounding. The message names the parameters and
        the likely reason: batch statistics, one random key for all micro-batches, a loss that is
        not a mean over examples, a common factor, or a part of `tx` outside the gate.
      ValueError: An argument breaks its rule, or there is nothing to compare: a gradient that is
        zero everywhere, or not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> params, batch = {"w": jnp.ones(3)}, jnp.arange(24.0).reshape(8, 3)
      >>> assert_window_equivalence(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, batch, 4)
      >>> assert_window_equivalence(lambda p, x: jnp.sum((x @ p["w"]) ** 2), params, batch, 4)
      Traceback (most recent call last):
      AssertionError: ...
    """
    size = _validation.check_batch(batch)
    is_int = isinstance(num_microbatches, int) and not isinstance(num_microbatches, bool)
    if not is_int or not 1 <= num_microbatches <= size:
        raise ValueError(
            f"num_microbatches must be an int from 1 to the {size} examples of the batch, got"
            f" {num_microbatches!r}."
        )
    _validation.check_choice("normalize", normalize, ("mean", "sum", "ratio"))
    model = _model(loss_fn, micro_loss_fn or loss_fn, params, model_state, has_aux, rng)
    cut = np.array_split(np.arange(size), num_microbatches)
    micro_batches = [_take(batch, index) for index in cut]
    if weight_fn is not None:
        weights = [weight_fn(micro_batch) for micro_batch in micro_batches]
    else:
        weights = [None if normalize == "sum" else len(index) for index in cut]

    comparison = _compare(model, batch, micro_batches, weights, normalize)
    faults = comparison.faults()
    if faults:
        raise AssertionError(
            f"a window of {num_microbatches} micro-batches does not give the gradient of its batch"
            f" of {size}. {len(faults)} of {len(comparison.names)} parameters differ:\n"
            + "\n".join(faults[:_SHOWN])
            + f"\nLikely: {comparison.reason()}"
        )
    if tx is not None:
        _check_gate(tx, model.params, comparison.gradient, num_microbatches)


class _Model(NamedTuple):
    """The user's model, whatever it is written in."""

    params: Any
    state: Any  # what loss_fn changes, or None
    key: Any
    big_gradient: Callable[..., tuple[Any, Any]]  # (params, state, batch, *key) -> gradient, state
    micro_gradient: Callable[..., tuple[Any, Any]]
    jaxpr: Callable[..., Any]  # of the loss, (batch, *key)


def _model(loss_fn, micro_loss_fn, params, model_state, has_aux, rng) -> _Model:
    nnx = sys.modules.get("flax.nnx")  # where it is not imported, nothing is its module
    if nnx is not None and isinstance(params, nnx.Module):
        if model_state is not None:
            raise ValueError("model_state must be None for an nnx.Module, which holds its own.")
        params, model_state, pure = _of_module(nnx, params, has_aux)
    else:
        pure = functools.partial(_of_function, model_state is not None, has_aux)
    gradient = lambda loss_fn: jax.jit(jax.grad(pure(loss_fn), has_aux=True))
    jaxpr = lambda batch, *key: jax.make_jaxpr(pure(micro_loss_fn))(
        params, model_state, batch, *key
    )
    return _Model(params, model_state, rng, gradient(loss_fn), gradient(micro_loss_fn), jaxpr)


def _of_module(nnx, module, has_aux):
    """Params, other state, and what makes a pure function of a loss of the module."""
    graph, params, state = nnx.split(module, nnx.Param, ...)

    def pure(loss_fn):
        def loss_and_state(params, state, batch, *key):
            module = nnx.merge(graph, params, state, copy=True)
            result = loss_fn(module, batch, *key)
            loss = result[0] if has_aux else result
            return loss, nnx.as_pure(nnx.split(module, nnx.Param, ...)[2])

        return loss_and_state

    return nnx.as_pure(params), nnx.as_pure(state), pure


def _of_function(has_state, has_aux, loss_fn):
    def loss_and_state(params, state, batch, *key):
        if not has_state:
            result = loss_fn(params, batch, *key)
            return (result[0] if has_aux else result), None
        loss, result = loss_fn(params, state, batch, *key)
        return loss, result[0] if has_aux else result

    return loss_and_state


def _take(batch, index):
    return jax.tree.map(lambda x: x[index], batch)


class _Comparison(NamedTuple):
    """The gradients of the big batch and of its window; leaves are float64 or complex vectors."""

    names: list[str]
    big: list[np.ndarray]
    window: list[np.ndarray]
    micro: list[list[np.ndarray]]  # of each micro-batch
    gradient: Any  # of one micro-batch, as it was
    permuted: list[np.ndarray]  # the big batch in another order; big itself where that says nothing
    noise: list[float]  # five standard errors of what the draws differ by; 0 without draws
    eps: float  # of the narrowest dtype in the loss
    one_key: bool  # random, and never another draw
    statistics: list[str]  # batch statistics that loss_fn changes

    def tolerances(self) -> list[float]:
        """What each parameter may differ by, in the norm: its rounding and its noise."""
        # Order changes rounding by eps, or sqrt(eps) after cancellation; more is no rounding.
        most = 32 * self.eps**0.5 * _norm(self.scales())
        floors = [4 * self.eps * scale for scale in self.scales()]
        return [
            floor + self.eps * _norm(self.scales()) + 8 * min(rounding, most) + noise
            for floor, rounding, noise in zip(floors, self.roundings(), self.noise, strict=True)
        ]

    def scales(self) -> list[float]:
        """Norms of what is summed: a big batch's gradient may cancel, its rounding does not."""
        return np.max(
            [[_norm(leaf) for leaf in g] for g in (self.big, *self.micro)], axis=0
        ).tolist()

    def roundings(self) -> list[float]:
        return [_norm(b - p) for b, p in zip(self.big, self.permuted, strict=True)]

    def differences(self, factor: float = 1.0) -> list[float]:
        return [_norm(b - factor * w) for b, w in zip(self.big, self.window, strict=True)]

    def faults(self) -> list[str]:
        """A line for each parameter that differs, the worst first."""
        lines = []
        for name, difference, tolerance, rounding, scale in zip(
            self.names,
            self.differences(),
            self.tolerances(),
            self.roundings(),
            self.scales(),
            strict=True,
        ):
            if difference > tolerance:
                line = f"  {name}: by {difference / scale:.1e} of its gradient"
                lines.append((difference / scale, f"{line} (rounding: {rounding / scale:.0e})"))
        return [line for _, line in sorted(lines, reverse=True)]

    def reason(self) -> str:
        """The likely reason of the difference, and what helps."""
        big, window = np.concatenate(self.big), np.concatenate(self.window)
        allowed = _norm(self.tolerances())
        factor = np.vdot(window, big).real / np.vdot(window, window).real
        if _norm(self.differences(factor)) <= allowed:
            return (
                f"a common factor. The big batch's gradient is {factor:.4g} times the window's: a"
                " sum that was never normalised, or a loss that is divided by k already. Let the"
                ' loss be a mean over examples, or take normalize="sum" or "ratio".'
            )
        if self.one_key:
            return (
                "one random key for all micro-batches, each of which sees the same dropout mask."
                " Let loss_fn take a key (pass rng=), and split it in each micro-step."
            )
        shares = self._shares()
        if shares is not None:
            return (
                "a loss that is not a mean over examples but weighted, over tokens say. Pass the"
                " weights as weight_fn=, and as weight= to tx.update; what fits here is"
                f" {', '.join(f'{share:.3f}' for share in shares[:8])} of the whole."
            )
        if self.statistics:
            return (
                f"batch statistics. loss_fn changes {self.statistics[0]}: such a layer (BatchNorm)"
                " normalises by its micro-batch. Use GroupNorm or LayerNorm, or freeze its"
                " statistics within the window."
            )
        if _norm(self.roundings()) > allowed:
            return (
                "a loss that depends on the order of its examples; it is not a mean over examples."
            )
        return (
            "a loss that is not a mean over examples: in a contrastive or auxiliary loss and in"
            " BatchNorm (batch statistics, which loss_fn does not return) the examples of a batch"
            " see each other."
        )

    def _shares(self) -> np.ndarray | None:
        """Shares of the micro-batches, in place of their weights, that give the big batch."""
        micro = np.stack([np.concatenate(gradient) for gradient in self.micro], axis=1)
        if len(micro) < 4 * micro.shape[1]:
            return None  # so few parameters, some shares would always fit
        shares, *_ = np.linalg.lstsq(micro, np.concatenate(self.big))
        misfit = np.concatenate(self.big) - micro @ shares
        fits = _norm(misfit) <= _norm(self.tolerances()) and (shares.real > 0).all()
        return shares.real / shares.real.sum() if fits else None


def _compare(model, batch, micro_batches, weights, normalize) -> _Comparison:
    """Compute the gradients to compare, averaged over draws where the loss is random."""
    tx = accumulate(len(micro_batches), normalize=normalize)
    gather = jax.jit(tx.update)
    state, calls = model.state, 0

    def gradient(function, batch):
        nonlocal state, calls
        key = [] if model.key is None else [jax.random.fold_in(model.key, calls)]
        result, state = function(model.params, state, batch, *key)
        calls += 1
        return result

    def draw():
        big = gradient(model.big_gradient, batch)
        micro = [gradient(model.micro_gradient, part) for part in micro_batches]
        window, window_state = big, tx.init(big)
        for g, weight in zip(micro, weights, strict=True):
            extra_args = {} if weight is None else {"weight": weight}
            window, window_state = gather(g, window_state, **extra_args)
        return big, window, micro

    draws = [draw()]
    floats = lambda tree: jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree
    )
    statistics = _changed(floats(model.state), floats(state))
    jaxpr = str(model.jaxpr(batch, *([] if model.key is None else [model.key])))
    is_random = any(primitive in jaxpr for primitive in _RANDOM_PRIMITIVES)
    one_key = is_random and _equal(draws[0][0], gradient(model.big_gradient, batch))
    if is_random and not one_key:
        draws += [draw() for _ in range(1, _DRAWS)]
    vectors = [[_vectors(tree) for tree in (big, window, *micro)] for big, window, micro in draws]
    big, window, *micro = [
        [np.mean(leaf, axis=0) for leaf in zip(*trees, strict=True)]
        for trees in zip(*vectors, strict=True)
    ]
    differences = [[w - b for b, w in zip(*v[:2], strict=True)] for v in vectors]
    permuted = big
    if not is_random:
        order = np.random.default_rng(0).permutation(len(jax.tree.leaves(batch)[0]))
        permuted = _vectors(gradient(model.big_gradient, _take(batch, order)))
    comparison = _Comparison(
        names=[keystr(path) for path, _ in tree_flatten_with_path(draws[0][0])[0]],
        big=big,
        window=window,
        micro=micro,
        gradient=draws[0][2][0],
        permuted=permuted,
        noise=[
            5 * _norm(np.std(d, axis=0, ddof=1)) / len(d) ** 0.5 if len(d) > 1 else 0.0
            for d in zip(*differences, strict=True)
        ],
        eps=max(float(jnp.finfo(_DTYPES[name]).eps) for name in _DTYPES if name in jaxpr),
        one_key=one_key,
        statistics=statistics,
    )
    for name, scale in zip(comparison.names, comparison.scales(), strict=True):
        if not np.isfinite(scale):
            raise ValueError(f"gradients must be finite to be compared; that of {name} is not.")
    if not any(comparison.scales()):
        raise ValueError("gradients must not be zero everywhere: there is nothing to compare.")
    return comparison


def _check_gate(tx, params, gradient, num_microbatches) -> None:
    """Assert that what `tx` has before or around its accumulators does not see micro-steps."""
    update = jax.jit(optax.with_extra_args_support(tx).update)
    start = tx.init(params)
    accumulators, _ = _split_state(start)
    if not accumulators:
        raise AssertionError(
            "tx holds no accumulator: each micro-batch would be a step of its own. Let it be"
            f" optax_accum.chain(accumulate({num_microbatches}), ...)."
        )
    remedy = f"Let it stand behind it: optax_accum.chain(accumulate({num_microbatches}), ...)."
    _, after = update(gradient, start, params)
    changed = _changed(_split_state(start)[1], _split_state(after)[1])
    if changed:
        raise AssertionError(
            f"tx changes a state outside the gate in each micro-step, opt_state{changed[0]}."
            "\nLikely: a stateful transformation outside the gate, which counts micro-steps or"
            f" remembers micro-gradients. {remedy}"
        )
    if num_microbatches > 1:
        scale = 2.0**-10  # exact in every dtype
        _, after_small = update(jax.tree.map(lambda g: g * scale, gradient), start, params)
        for (path, full), (_, small) in zip(
            _split_state(after)[0], _split_state(after_small)[0], strict=True
        ):
            for f, s in zip(_vectors(full.window_sum), _vectors(small.window_sum), strict=True):
                if _norm(f * scale - s) > 1e-3 * _norm(s):
                    raise AssertionError(
                        f"tx does not hand the gradient to the accumulator opt_state{path} in"
                        " proportion.\nLikely: it is clipped or normalised outside the gate,"
                        f" micro-batch by micro-batch. {remedy}"
                    )
    state = start
    for i in range(num_microbatches):
        _, state = update(gradient, state, params)
        for path, accumulator in _split_state(state)[0]:
            if bool(has_updated(accumulator)) != (i + 1 == num_microbatches):
                raise AssertionError(
                    f"tx closes the window of opt_state{path} not with micro-step"
                    f" {num_microbatches}; is its every_k another than num_microbatches?"
                )


def _split_state(opt_state):
    """The outermost accumulators' states with their paths, and the tree without them."""
    is_accumulator = lambda x: isinstance(x, AccumulateState)
    leaves, treedef = tree_flatten_with_path(opt_state, is_leaf=is_accumulator)
    inside = [(keystr(path), leaf) for path, leaf in leaves if is_accumulator(leaf)]
    return inside, treedef.unflatten(None if is_accumulator(x) else x for _, x in leaves)


def _changed(before, after) -> list[str]:
    """Paths of the floating leaves and counters that differ; random keys and None do not count."""
    paths = tree_flatten_with_path(before)[0]
    pairs = zip(paths, jax.tree.leaves(after), strict=True)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [
        keystr(path)
        for (path, old), new in pairs
        if not is_key(old) and not np.array_equal(old, new, equal_nan=True)
    ]


def _equal(tree, other) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(other)))


def _vectors(tree) -> list[np.ndarray]:
    """The leaves in double precision, flat."""
    wide = lambda x: np.complex128 if np.iscomplexobj(x) else np.float64
    return [np.asarray(x).astype(wide(x)).ravel() for x in jax.tree.leaves(tree)]


def _norm(values) -> float:
    return float(np.linalg.norm(values))
