"""The laws of a window, for any inner transformation, and the random trees they are tried on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64)

# Trees of shapes: nested, with empty nodes, scalars and leaves without elements.
STRUCTURES = (
    (),
    (3,),
    {"a": (2, 2), "b": (3,)},
    [(), {"c": (2,), "none": None}, ((1,), (2, 1, 2))],
    {"masked": optax.MaskedNode(), "empty": (0, 2), "leaf": (2,)},
)

seeds = st.integers(0, 2**31 - 1)
structures = st.sampled_from(STRUCTURES)
dtypes = st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)
inners = st.sampled_from(
    (
        optax.sgd(0.5),
        optax.sgd(0.5, momentum=0.5, nesterov=True),
        optax.chain(optax.add_decayed_weights(0.5), optax.trace(0.5)),
        optax.adam(0.5),
        optax.sgd(optax.linear_schedule(1.0, 0.25, 3)),
    )
)


def _is_shape(node):
    return type(node) is tuple and all(isinstance(n, int) for n in node)


def shapes_to_tree(structure, dtypes, make):
    """A tree with `make(shape, dtype)` at each shape, the dtypes taking turns."""
    leaves, treedef = jax.tree.flatten(structure, is_leaf=_is_shape)
    return jax.tree.unflatten(
        treedef, [make(s, dtypes[i % len(dtypes)]) for i, s in enumerate(leaves)]
    )


def small_integers(rng, structure, dtypes, low=-8, high=8):
    """A tree of integers that any dtype holds exactly, and sums and halves of them too."""

    def leaf(shape, dtype):
        values = rng.integers(low, high, shape).astype(np.float64)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            values = values + 1j * rng.integers(low, high, shape)
        return jnp.asarray(values, dtype)

    return shapes_to_tree(structure, dtypes, leaf)


def power_of_two_weights(rng, k):
    """k weights, whole and not negative, whose sum is a power of two."""
    weights = rng.integers(0, 5, k)
    total = 1 << int(np.ceil(np.log2(max(weights.sum(), 1))))
    weights[rng.integers(k)] += total - weights.sum()
    return [float(w) for w in weights]


def mean(gradients, weights):
    """Sum of w g over the sum of w, in the gradients' own dtype at the end."""

    def leaf(*values):
        wide = np.promote_types(values[0].dtype, np.float32)
        # In NumPy, so that no XLA rewrites the reference as it might the thing tested.
        total = sum(
            w * np.asarray(v).astype(wide) for w, v in zip(weights, values, strict=True) if w > 0
        )
        return jnp.asarray(total / sum(weights), values[0].dtype)

    return jax.tree.map(leaf, *gradients)


def assert_bitwise(actual, expected):
    """The same tree, dtypes and bits (of NaN, only that it is one)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, a), e in pairs:
        name = jax.tree_util.keystr(path)
        assert a.dtype == e.dtype, f"{name}: {a.dtype} against {e.dtype}"
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = np.asarray(a), np.asarray(e)
        assert a.shape == e.shape, f"{name}: {a.shape} against {e.shape}"
        same = a.tobytes() == e.tobytes()
        assert same or np.array_equal(a, e, equal_nan=True), f"{name}: {a} against {e}"


def assert_zeros(updates):
    for leaf in jax.tree.leaves(updates):
        assert not np.any(np.asarray(leaf)), leaf


def run(tx, params, gradients, state=None, per_step=None, **extra_args):
    """Train on a list of gradients; returns params and state.

    Args:
      tx: the transformation.
      params: where to start.
      gradients: one per micro-step.
      state: where to go on from, else `tx.init(params)`.
      per_step: extra args of each micro-step, as a list of dicts.
      **extra_args: extra args of all micro-steps.
    """
    state = tx.init(params) if state is None else state
    tx = optax.with_extra_args_support(tx)
    for i, gradient in enumerate(gradients):
        extra = extra_args | (per_step[i] if per_step else {})
        updates, state = tx.update(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state
