"""The gradients of a big batch and of its window, computed and compared."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._accumulate import accumulate
from optax_accum._checks import PyTree
from optax_accum._in_call.batches import check_batch
from optax_accum._in_call.jaxprs import eps_of, equations, is_random
from optax_accum.testing.comparison import Comparison, norm, vectors
from optax_accum.testing.model_adapter import Model, take

_DRAWS = 64  # of a random loss
_KEPT = 4096  # numbers of a leaf in a draw, about
# With one of them dropout keeps all elements, however it compares a random number with its rate.
_QUANTILES = (1 / 64, 63 / 64)


class Window(NamedTuple):
    """A batch, and the micro-batches that it is cut into."""

    batch: PyTree
    micro_batches: list[PyTree]
    weights: list[Any]  # of the micro-batches; None where they have none
    weight_of: Callable[[PyTree], Any] | None
    normalize: str

    def without_rejected(self, micro: list[Any]) -> list[Any]:
        """The entries of a list that belong to micro-batches with a weight above 0."""
        accepted = [weight is None or bool(weight > 0) for weight in self.weights]
        return list(itertools.compress(micro, accepted))

    def factor(self, batch: PyTree) -> float:
        """The factor of a batch's gradient in the sum over the window."""
        if self.weight_of is None or self.normalize == "ratio":
            return 1.0
        weight = float(self.weight_of(batch))
        return weight if weight > 0 else 0.0


class Draw(NamedTuple):
    """Gradients of one run of the model, and the state that it left."""

    big: PyTree
    window: PyTree
    micro: list[PyTree]
    state: PyTree

    def vectors(self) -> list[list[np.ndarray]]:
        """The gradients in double precision: of the big batch, the window and each micro-batch."""
        return [vectors(tree) for tree in (self.big, self.window, *self.micro)]


def cut_window(
    batch: PyTree,
    num_microbatches: int,
    weight_fn: Callable[..., Any] | None,
    normalize: str,
) -> Window:
    """A window of micro-batches whose sizes differ by one at most."""
    parts = np.array_split(np.arange(check_batch(batch)), num_microbatches)
    micro_batches = [take(batch, rows) for rows in parts]
    by_size = None if normalize == "sum" else check_batch
    weight_of = weight_fn or by_size
    weights = [None if weight_of is None else weight_of(part) for part in micro_batches]
    return Window(batch, micro_batches, weights, weight_of, normalize)


def compare(model: Model, window: Window) -> Comparison:
    """Compute the gradients to compare; where the loss is random, without its noise and with it."""
    draws = _draws(model, window)
    first = next(draws)
    comparison = _compare_one(model, window, first)
    if comparison.draws_differ:
        for quantile in _QUANTILES:
            without_noise = _compare_without_noise(comparison, window, first.state, quantile)
            if without_noise is not None and without_noise.faults():
                return without_noise
        comparison = _averaged(comparison, window, first, draws)
    for name, scale in zip(comparison.names, comparison.scales(), strict=True):
        if not np.isfinite(scale):
            raise ValueError(f"gradients must be finite to be compared; that of {name} is not.")
    tiny = max(float(jnp.finfo(leaf.dtype).tiny) for leaf in jax.tree.leaves(first.big))
    if max(comparison.scales()) < tiny / comparison.eps:
        raise ValueError(
            "gradients must not be zero everywhere, or so small that they underflow: there is"
            " nothing to compare."
        )
    return comparison


def _draws(model: Model, window: Window) -> Iterator[Draw]:
    """Runs of the model on the big batch and on the window, each with keys of its own.

    Both begin each time with the state that the micro-batches left.
    """
    tx = accumulate(len(window.micro_batches), normalize=window.normalize)
    update = jax.jit(tx.update)
    state, calls = model.state, itertools.count()
    while True:
        big, _ = model.big_gradient(model.params, state, window.batch, *model.keys(next(calls)))
        mean, window_state, micro = big, tx.init(big), []
        for part, weight in zip(window.micro_batches, window.weights, strict=True):
            g, state = model.micro_gradient(model.params, state, part, *model.keys(next(calls)))
            extra_args = {} if weight is None else {"weight": weight}
            mean, window_state = update(g, window_state, **extra_args)
            micro.append(g)
        yield Draw(big, mean, micro, state)


def _compare_one(model: Model, window: Window, draw: Draw) -> Comparison:
    """The comparison of one draw."""

    def gradient(params: PyTree, state: PyTree, key_index: int = 0) -> PyTree:
        return model.big_gradient(params, state, window.batch, *model.keys(key_index))[0]

    flat = list(equations(jax.make_jaxpr(gradient)(model.params, model.state)))
    unused_key = 2 + len(draw.micro)
    draws_repeat = is_random(flat) and _equal(
        draw.big, gradient(model.params, draw.state, unused_key)
    )
    eps, big = eps_of(flat), vectors(draw.big)
    jittered = [
        vectors(gradient(_jitter(model.params, eps, seed), model.state)) for seed in range(2)
    ]
    accepted = window.without_rejected(draw.micro)
    return Comparison(
        names=[keystr(path) for path, _ in tree_flatten_with_path(draw.big)[0]],
        big=big,
        window=vectors(draw.window),
        micro=[vectors(tree) for tree in accepted],
        micro_trees=accepted,
        jitter=[max(norm(b - j) for j in js) for b, *js in zip(big, *jittered, strict=True)],
        draws=[],
        size=len(jax.tree.leaves(window.batch)[0]),
        eps=eps,
        draws_differ=is_random(flat) and not draws_repeat,
        draws_repeat=draws_repeat,
        statistics=changed_paths(_floating(model.state), _floating(draw.state)),
        model=model,
        excused=[False] * len(big),
    )


def _averaged(
    comparison: Comparison, window: Window, first: Draw, draws: Iterator[Draw]
) -> Comparison:
    """The comparison of means over draws, of which the first is given."""
    total = first.vectors()
    thinned = [_thinned(total[:2])]
    for draw in itertools.islice(draws, _DRAWS - 1):
        each = draw.vectors()
        thinned.append(_thinned(each[:2]))
        total = [list(map(np.add, *pair)) for pair in zip(total, each, strict=True)]
    big, mean, *micro = [[leaf / _DRAWS for leaf in leaves] for leaves in total]
    return comparison._replace(
        big=big, window=mean, micro=window.without_rejected(micro), draws=thinned
    )


def _compare_without_noise(
    comparison: Comparison, window: Window, state: PyTree, quantile: float
) -> Comparison | None:
    """The comparison with each random number the same; None if that is not possible.

    Constant draws are exact for what is a mean over examples with noise of their own. They may
    differ where the noise belongs to a place in the batch (times of diffusion that are spread over
    it, a random choice of examples). So a difference counts only if, with draws as they are,
    examples see each other, or see the state that the last micro-batch left.
    """
    model = comparison.model.with_constant_draws(quantile)
    constant = _compare_one(model, window, next(_draws(model, window)))
    if constant.draws_differ or not np.isfinite(constant.scales()).all():
        return None
    if not constant.faults():
        return constant
    by_examples, by_state = _interactions(comparison, window, state)
    interact = zip(by_examples, by_state, strict=True)
    return constant._replace(excused=[not (e > 0 or s > 0) for e, s in interact])


def _interactions(
    comparison: Comparison, window: Window, state: PyTree
) -> tuple[list[float], list[float]]:
    """How far examples change each other's gradients, and how far the state does.

    With the same draws, G(a, b) + G(a', b') = G(a, b') + G(a', b) for all examples a and a' in one
    half of the batch, b and b' in the other, if G is a sum over examples. 0 stands for rounding.
    """
    model, size = comparison.model, comparison.size
    rows = np.arange(size)
    order = np.random.default_rng(0).permutation(size)
    others = np.empty_like(rows)
    others[order] = np.roll(order, 1)  # another example in each place
    in_half = np.isin(rows, order[: size // 2])
    unit = window.factor(window.batch) or 1.0

    def gradient(rows: np.ndarray, state: PyTree) -> list[np.ndarray]:
        batch = take(window.batch, rows)
        tree, _ = model.micro_gradient(model.params, state, batch, *model.keys(0))
        factor = window.factor(batch) / unit
        return [leaf * factor if factor else np.zeros_like(leaf) for leaf in vectors(tree)]

    start = model.state
    moved = jax.tree.map(lambda old, new: old if _is_of_keys(new) else new, start, state)
    pairs = (rows, others), (others, rows)
    swapped = [gradient(np.where(in_half, *pair), start) for pair in pairs]
    base = gradient(rows, start)
    return (
        _differences(comparison, [base, gradient(others, start)], swapped),
        _differences(comparison, [base], [gradient(rows, moved)]),
    )


def _differences(
    comparison: Comparison, ones: list[list[np.ndarray]], others: list[list[np.ndarray]]
) -> list[float]:
    """Norms of the difference between the means of gradients, 0 where rounding explains it."""
    means = [[sum(x) / len(x) for x in zip(*each, strict=True)] for each in (ones, others)]
    jitter = [4 * jitter for jitter in comparison.jitter]  # that of other batches is another
    both = comparison._replace(big=means[0], window=means[1], micro=[*ones, *others], jitter=jitter)
    return both.residuals()


def _thinned(trees: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """A few thousand numbers of each leaf, enough to tell chance from a shift."""
    return [[leaf[:: -(-leaf.size // _KEPT) or 1] for leaf in leaves] for leaves in trees]


def _jitter(params: PyTree, eps: float, seed: int) -> PyTree:
    """The parameters, each off by one unit in the last digit of its leaf's root mean square."""
    rng = np.random.default_rng(seed)

    def off(p: jax.Array) -> jax.Array:
        (wide,) = vectors(p)
        step = eps * rng.choice([-1.0, 1.0], wide.shape) * np.sqrt(np.mean(np.abs(wide) ** 2))
        return jnp.asarray((wide + step).reshape(p.shape), p.dtype)

    return jax.tree.map(off, params)


def _floating(tree: PyTree) -> PyTree:
    """The floating leaves; None in the place of others."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(jnp.result_type(x), jnp.floating) else None, tree
    )


def _is_of_keys(x: Any) -> bool:
    """Whether it is a random key, or may be a raw one or the counter that keys are folded with."""
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32


def changed_paths(before: PyTree, after: PyTree) -> list[str]:
    """Paths of the leaves that differ; random keys do not count."""
    old = {keystr(path): leaf for path, leaf in tree_flatten_with_path(before)[0]}
    return [
        keystr(path)
        for path, new in tree_flatten_with_path(after)[0]
        if not jnp.issubdtype(jnp.result_type(new), jax.dtypes.prng_key)
        and not np.array_equal(old[keystr(path)], new, equal_nan=True)
    ]


def _equal(tree: PyTree, other: PyTree) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(other)))
