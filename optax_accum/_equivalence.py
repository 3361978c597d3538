"""The gradients of a big batch and of its window side by side, and why they differ."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._accumulate import accumulate

_DRAWS = 64  # of a random loss
_CHANCE = 10  # standard errors
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")
_MOVES = {  # bytes about, without arithmetic
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
    *("dynamic_update_slice", "gather", "pad", "reshape", "rev", "select_n", "slice", "split"),
    *("squeeze", "stop_gradient", "transpose"),
}


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


def model_of(loss_fn, micro_loss_fn, params, model_state, has_aux, rng) -> Model:
    nnx = sys.modules.get("flax.nnx")  # where it is not imported, nothing is its module
    if nnx is not None and isinstance(params, nnx.Module):
        if model_state is not None:
            raise ValueError("model_state must be None for an nnx.Module, which holds its own.")
        params, model_state, pure = _of_module(nnx, params, has_aux)
    else:
        pure = functools.partial(_of_function, model_state is not None, has_aux)
    gradient = lambda loss_fn: jax.jit(jax.grad(pure(loss_fn), has_aux=True))
    return Model(params, model_state, rng, gradient(loss_fn), gradient(micro_loss_fn))


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
        loss, new_state = loss_fn(params, state, batch, *key)
        new_state = new_state[0] if has_aux else new_state
        if jax.tree.structure(new_state) != jax.tree.structure(state):
            raise ValueError(
                "loss_fn must return the tree of model_state, got"
                f" {jax.tree.structure(new_state)} for {jax.tree.structure(state)}."
            )
        return loss, new_state

    return loss_and_state


def _loss(result, has_aux):
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise ValueError(f"loss_fn must return (loss, aux) with has_aux=True, got {result!r}.")
    return result[0] if has_aux else result


def take(batch, index):
    return jax.tree.map(lambda x: x[index], batch)


class Comparison(NamedTuple):
    """The gradients of the big batch and of its window; leaves are flat and in double precision."""

    names: list[str]
    big: list[np.ndarray]
    window: list[np.ndarray]
    micro: list[list[np.ndarray]]  # of the micro-batches that count
    micro_trees: list[Any]  # the same as they were
    jitter: list[float]  # how far big moves with the last digit of the parameters
    draws: list[tuple[list[np.ndarray], list[np.ndarray]]]  # (big, window); [] where not random
    eps: float  # of the narrowest dtype that is computed with
    one_key: bool  # random, and the same in each draw
    statistics: list[str]  # state that loss_fn changes

    def tolerances(self) -> list[float]:
        """What each parameter's gradient may differ by, in the norm, from rounding."""
        scales = self.scales()
        return [
            self.eps * (3 * scale + norm(scales)) + 6 * jitter
            for scale, jitter in zip(scales, self.jitter, strict=True)
        ]

    def scales(self) -> list[float]:
        """Norms of what is summed: where a big batch's gradient cancels, its rounding does not."""
        norms = [[norm(leaf) for leaf in leaves] for leaves in (self.big, *self.micro)]
        return np.max(norms, axis=0).tolist()

    def residuals(self, factor: float = 1.0) -> list[float]:
        """Norms of big - factor * window, 0 where rounding or chance explains them."""
        norms = []
        for i, tolerance in enumerate(self.tolerances()):
            size = norm(self.big[i] - factor * self.window[i])
            differences = [big[i] - factor * window[i] for big, window in self.draws]
            is_chance = bool(differences) and not _is_shifted(differences)
            norms.append(0.0 if size <= max(1.0, abs(factor)) * tolerance or is_chance else size)
        return norms

    def faults(self) -> list[str]:
        """A line for each parameter that differs, the worst first."""
        lines = []
        for name, residual, scale, jitter in zip(
            self.names, self.residuals(), self.scales(), self.jitter, strict=True
        ):
            if residual:
                line = f"  {name}: by {residual / scale:.1e} of its gradient"
                lines.append((residual / scale, f"{line} (rounding: {jitter / scale:.0e})"))
        return [line for _, line in sorted(lines, reverse=True)]

    def reason(self, model: Model, batch: Any) -> str:
        """The likely reason of the difference, and what helps."""
        big, window = np.concatenate(self.big), np.concatenate(self.window)
        factor = float(np.vdot(window, big).real / max(np.vdot(window, window).real, 1e-300))
        if abs(factor - 1) > 0.01 and not any(self.residuals(factor)):
            return (
                f"a common factor. The big batch's gradient is {factor:.4g} times the window's: a"
                " sum that was never normalised, or a loss that is divided by k already. Let the"
                ' loss be a mean over examples, or take normalize="sum" or "ratio".'
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
        if self.one_key:
            return (
                "one random key for all micro-batches, each of which sees the same dropout mask."
                " Let loss_fn take a key (pass rng=), and split it in each micro-step."
            )
        if not self.draws:
            order = np.random.default_rng(0).permutation(len(jax.tree.leaves(batch)[0]))
            again, _ = model.big_gradient(
                model.params, model.state, take(batch, order), *model.keys(0)
            )
            moved = [norm(b - a) for b, a in zip(self.big, vectors(again), strict=True)]
            if any(m > t for m, t in zip(moved, self.tolerances(), strict=True)):
                return (
                    "a loss that depends on the order of its examples, and is not a mean over"
                    " examples."
                )
        return (
            "a loss that is not a mean over examples: in a contrastive or auxiliary loss and in"
            " BatchNorm (batch statistics, which loss_fn does not return) the examples of a batch"
            " see each other."
        )

    def _shares(self) -> np.ndarray | None:
        """Shares of the micro-batches, in place of their weights, that give the big batch."""
        # Each parameter in units of what it may be off by, since all must fit.
        units = np.repeat(np.maximum(self.tolerances(), 1e-300), [leaf.size for leaf in self.big])
        micro = np.stack([np.concatenate(leaves) for leaves in self.micro], axis=1) / units[:, None]
        if self.draws or len(micro) < 4 * micro.shape[1]:
            return None  # with so few parameters, some shares would always fit
        shares, *_ = np.linalg.lstsq(micro, np.concatenate(self.big) / units)
        misfit = units * (np.concatenate(self.big) / units - micro @ shares)
        parts = np.split(misfit, np.cumsum([leaf.size for leaf in self.big])[:-1])
        fits = all(norm(p) <= 3 * t for p, t in zip(parts, self.tolerances(), strict=True))
        shares = shares.real / shares.real.sum()
        return shares if fits and (shares > -1e-3).all() else None


def _is_shifted(draws: list[np.ndarray]) -> bool:
    """Whether the mean of independent draws of a vector is not 0, by more than chance.

    Inner products of different draws average to the squared norm of the mean, whatever the noise.
    """
    n, x = len(draws), np.stack(draws)
    products = np.real(x.conj() @ x.T)[~np.eye(n, dtype=bool)]
    spread = np.sqrt(2 * np.mean(products**2) / (n * (n - 1)))
    return bool(products.mean() > _CHANCE * spread)


def compare(model, batch, micro_batches, weights, normalize) -> Comparison:
    """Compute the gradients to compare, averaged over draws where the loss is random."""
    tx = accumulate(len(micro_batches), normalize=normalize)
    gather = jax.jit(tx.update)
    state, calls = model.state, 0

    def gradient(function, batch):
        nonlocal state, calls
        result, state = function(model.params, state, batch, *model.keys(calls))
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

    big, window, micro = draw()
    statistics = changed(_floating(model.state), _floating(state))
    equations = list(
        _equations(
            jax.make_jaxpr(model.big_gradient)(model.params, model.state, batch, *model.keys(0))
        )
    )
    is_random = any(equation.primitive.name in _RANDOM for equation in equations)
    one_key = is_random and _equal(big, gradient(model.big_gradient, batch))
    eps = _eps(equations)
    jittered = [
        model.big_gradient(_jitter(model.params, eps, seed), model.state, batch, *model.keys(0))[0]
        for seed in range(2)
    ]
    jitter = [
        max(norm(b - j) for j in others)
        for b, *others in zip(vectors(big), *map(vectors, jittered), strict=True)
    ]
    counts = [w is None or bool(w > 0) for w in weights]
    draws, seen = [], [list(map(vectors, (big, window, *micro)))]
    if is_random and not one_key:
        for _ in range(1, _DRAWS):
            again = draw()
            seen.append(list(map(vectors, (*again[:2], *again[2]))))
        draws = [(v[0], v[1]) for v in seen]
    mean_big, mean_window, *mean_micro = [
        [np.mean(leaf, axis=0) for leaf in zip(*trees, strict=True)]
        for trees in zip(*seen, strict=True)
    ]
    comparison = Comparison(
        names=[keystr(path) for path, _ in tree_flatten_with_path(big)[0]],
        big=mean_big,
        window=mean_window,
        micro=[m for m, is_counted in zip(mean_micro, counts, strict=True) if is_counted],
        micro_trees=[m for m, is_counted in zip(micro, counts, strict=True) if is_counted],
        jitter=jitter,
        draws=draws,
        eps=eps,
        one_key=one_key,
        statistics=statistics,
    )
    for name, scale in zip(comparison.names, comparison.scales(), strict=True):
        if not np.isfinite(scale):
            raise ValueError(f"gradients must be finite to be compared; that of {name} is not.")
    tiny = max(float(jnp.finfo(leaf.dtype).tiny) for leaf in jax.tree.leaves(big))
    if max(comparison.scales()) < tiny / eps:
        raise ValueError(
            "gradients must not be zero everywhere, or so small that they underflow: there is"
            " nothing to compare."
        )
    return comparison


def _equations(jaxpr):
    """The equations of a jaxpr and of those inside it, without what only calls others."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inside = [
            value
            for parameter in equation.params.values()
            for value in (parameter if isinstance(parameter, tuple | list) else [parameter])
            if hasattr(value, "eqns") or hasattr(value, "jaxpr")
        ]
        for value in inside:
            yield from _equations(value)
        if not inside:
            yield equation


def _eps(equations) -> float:
    """Relative rounding of the narrowest dtype that is computed with, or rounded to."""
    eps = lambda variable: float(jnp.finfo(variable.aval.dtype).eps)
    seen = [0.0]
    for equation in equations:
        # Images that come in float16 and are cast to float32 lose nothing.
        moves = equation.primitive.name in _MOVES
        kept = max(map(eps, filter(_is_inexact, equation.invars)), default=None) if moves else 0.0
        rounded = map(eps, filter(_is_inexact, equation.outvars))
        seen += [e for e in rounded if kept is not None and e > kept]
    return max(seen)


def _is_inexact(variable) -> bool:
    return jnp.issubdtype(getattr(variable.aval, "dtype", bool), jnp.inexact)


def _jitter(params, eps, seed):
    """The parameters, each off by one unit in the last digit of its leaf's largest."""
    rng = np.random.default_rng(seed)

    def off(p):
        signs = rng.choice([-1.0, 1.0], p.shape)
        return p + jnp.asarray(signs * eps, p.dtype) * jnp.sqrt(jnp.mean(jnp.abs(p) ** 2))

    return jax.tree.map(off, params)


def _floating(tree):
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(jnp.result_type(x), jnp.floating) else None, tree
    )


def changed(before, after) -> list[str]:
    """Paths of the leaves that differ; random keys do not count."""
    old = {keystr(path): leaf for path, leaf in tree_flatten_with_path(before)[0]}
    return [
        keystr(path)
        for path, new in tree_flatten_with_path(after)[0]
        if not jnp.issubdtype(jnp.result_type(new), jax.dtypes.prng_key)
        and not np.array_equal(old[keystr(path)], new, equal_nan=True)
    ]


def _equal(tree, other) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(other)))


def vectors(tree) -> list[np.ndarray]:
    """The leaves in double precision, flat."""
    wide = lambda x: np.complex128 if jnp.iscomplexobj(x) else np.float64
    return [np.asarray(x).astype(wide(x)).ravel() for x in jax.tree.leaves(tree)]


def norm(values) -> float:
    return float(np.linalg.norm(values))
