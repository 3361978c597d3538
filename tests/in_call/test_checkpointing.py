"""`checkpoint_segments`: the same numbers, with less kept between the passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_accum import checkpoint_segments


def deep(params, x, key, flag=True):
    """Many layers: nested calls, custom derivatives, random numbers, a loop, integers."""
    for i in range(6):
        x = jax.jit(lambda x, i=i: jax.nn.relu(x @ params[i % 2]) + 0.1 * x)(x)
        x *= jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(params))
    x = jax.nn.softmax(x) if flag else x
    return jnp.where(jnp.arange(x.shape[-1]) > 2, x, 0).mean() + x.argmax()


@pytest.mark.parametrize("flag", [True, False])
def test_segments_change_neither_value_nor_gradient(flag):
    keys = jax.random.split(jax.random.key(flag), 3)
    params = tuple(jax.random.normal(keys[0], (2, 4, 4)))
    x = jax.random.normal(keys[1], (5, 4))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)

    def of(fun):
        return jax.jit(functools.partial(jax.value_and_grad(fun, (0, 1)), flag=flag))

    results = of(deep)(params, x, keys[2]), of(checkpoint_segments(deep))(params, x, keys[2])
    jax.tree.map(close, *results)
    in_axes = (None, 0, None)

    def each(fun):
        return jax.vmap(of(fun), in_axes)(params, x[:, None], keys[2])

    jax.tree.map(close, each(checkpoint_segments(deep)), each(deep))


@pytest.mark.parametrize("layers", [1, 4, 16, 25])
def test_there_are_as_many_segments_as_the_root_of_the_products(layers):
    def loss_fn(w, x):
        for _ in range(layers):
            x = jnp.tanh(x @ w)
        return x.sum()

    w, x = jnp.eye(8), jnp.ones((16, 8))
    jaxpr = jax.make_jaxpr(checkpoint_segments(loss_fn))(w, x)
    checkpoints = [e for e in jaxpr.eqns if e.primitive.name in ("checkpoint", "remat2")]
    assert len(checkpoints) == round(layers**0.5) - 1

    def second(f):
        return jax.hessian(lambda t: f(t * w, x))(1.0)

    np.testing.assert_allclose(second(checkpoint_segments(loss_fn)), second(loss_fn), rtol=1e-5)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="its XLA recomputes all at once on CPU")
def test_segments_take_less_memory():
    def loss_fn(w, x):
        for _ in range(16):
            x = jnp.tanh(x @ w)
        return x.sum()

    w, x = jnp.eye(64), jnp.ones((4096, 64))

    def temp(f):
        return jax.jit(jax.grad(f)).lower(w, x).compile().memory_analysis().temp_size_in_bytes

    assert temp(checkpoint_segments(loss_fn)) < 0.6 * temp(loss_fn)


def test_a_function_without_products_is_left_whole():
    fun = checkpoint_segments(lambda tree, scale: {"s": tree["x"].sum() * scale, "n": None})
    assert fun({"x": jnp.arange(3.0)}, 2.0) == {"s": 6.0, "n": None}
    empty = checkpoint_segments(lambda w, x: x @ w @ w @ w @ w)
    assert empty(jnp.eye(3), jnp.ones((0, 3))).shape == (0, 3)
    with pytest.raises(ValueError, match="fun must be a function, got 1"):
        checkpoint_segments(1)
