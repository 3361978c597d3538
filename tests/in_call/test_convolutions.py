"""Convolutions that stay fast in a loop on CPU: the same function, in another layout."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from optax_accum import canonical_convolutions, microbatch_value_and_grad

RNG = np.random.default_rng(0)


def small_net(x, kernels):
    for i, kernel in enumerate(kernels):
        stride = (2, 2) if i == 1 else (1, 1)
        x = lax.conv_general_dilated(
            x, kernel, stride, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jnp.tanh(x)
    return x


KERNELS = [jnp.asarray(RNG.normal(size=s) / 5, jnp.float32) for s in ((3, 3, 2, 4), (3, 3, 4, 6))]
IMAGES = jnp.asarray(RNG.normal(size=(8, 9, 9, 2)), jnp.float32)


def image_loss(kernels, images):
    return jnp.mean(small_net(images, kernels) ** 2)


def convolutions(closed):
    """The layouts of all convolutions of a jaxpr, however deep, of its branch for CPU."""
    found = []
    for eqn in closed.eqns:
        if eqn.primitive is lax.conv_general_dilated_p:
            found.append(eqn.params["dimension_numbers"])
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                found += convolutions(inner) if hasattr(inner, "eqns") else []
    return found


def test_a_convolutional_net_has_the_gradient_of_the_big_batch():
    got = jax.jit(microbatch_value_and_grad(image_loss, 4))(KERNELS, IMAGES)
    want = jax.value_and_grad(image_loss)(KERNELS, IMAGES)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-6)


@st.composite
def convolution(draw):
    """Arguments of lax.conv_general_dilated, of any kind that it takes."""
    n = draw(st.integers(1, 3))

    def ints(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    features, batch_groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))

    def spec(letters):
        return "".join(draw(st.permutations(letters)))

    space = "DHW"[:n]
    numbers = spec("NC" + space), spec("OI" + space), spec("NC" + space)
    batch, channels, out = 2 * batch_groups, 2 * features, 2 * features * batch_groups
    window, size = ints(1, 3), ints(5, 7)
    sizes = {"N": batch, "C": channels, "O": out, "I": channels // features}
    lhs = [{**sizes, **dict(zip(space, size, strict=True))}[c] for c in numbers[0]]
    rhs = [{**sizes, **dict(zip(space, window, strict=True))}[c] for c in numbers[1]]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16]))

    def array(shape):
        return jnp.asarray(rng.integers(-3, 4, shape), dtype)

    options = {
        "window_strides": ints(1, 2),
        "padding": [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(n)],
        "lhs_dilation": ints(1, 2),
        "rhs_dilation": ints(1, 2),
        "dimension_numbers": numbers,
        "feature_group_count": features,
        "batch_group_count": batch_groups,
    }
    return array(lhs), array(rhs), options


@given(convolution())
def test_a_canonical_convolution_is_the_convolution(arguments):
    lhs, rhs, options = arguments

    def convolve(lhs, rhs):
        return lax.conv_general_dilated(lhs, rhs, **options)

    got, want = canonical_convolutions(convolve)(lhs, rhs), convolve(lhs, rhs)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=1e-2 if lhs.dtype == jnp.bfloat16 else 1e-6)


@settings(max_examples=5)
@given(convolution())
def test_gradients_of_convolutions_and_of_canonical_ones_agree(arguments):
    lhs, rhs, options = arguments
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)

    def total(lhs, rhs):
        return (lax.conv_general_dilated(lhs, rhs, **options) ** 2).sum()

    gradient = jax.grad(total, (0, 1))
    want = gradient(lhs, rhs)
    chex.assert_trees_all_close(canonical_convolutions(gradient)(lhs, rhs), want, rtol=1e-4)
    again = jax.grad(canonical_convolutions(total), (0, 1))
    chex.assert_trees_all_close(again(lhs, rhs), want, rtol=1e-4)


def nested(kernels, images):
    """Convolutions wherever a jaxpr may hide."""
    first, second = kernels
    conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    square = second[..., :4]
    fixed = np.asarray(KERNELS[1])[..., :4]  # a custom derivative may close over no argument

    @jax.custom_vjp
    def doubled(x):
        return 2 * conv(x, fixed)

    doubled.defvjp(
        lambda x: (doubled(x), x),
        lambda x, g: (3 * jax.vjp(lambda x: conv(x, fixed), x)[1](g)[0],),
    )

    @jax.custom_jvp
    def halved(x):
        return conv(x, fixed) / 2

    halved.defjvps(lambda t, ans, x: 5 * conv(t, fixed))

    x = jax.checkpoint(lambda x: jnp.tanh(conv(x, first)))(images)
    x = lax.cond(x.sum() > -1e9, lambda x: conv(x, square), lambda x: x, x)
    x = lax.scan(lambda c, _: (jnp.tanh(conv(c, square)), None), x, None, length=2)[0]
    x = jax.jit(lambda x: doubled(x) + halved(x))(x)
    return jnp.mean(lax.fori_loop(0, 2, lambda i, x: jnp.tanh(conv(x, square)), x) ** 2)


def test_control_flow_checkpoint_and_custom_derivatives_keep_their_meaning():
    want = jax.jit(jax.value_and_grad(nested))(KERNELS, IMAGES)
    got = jax.jit(canonical_convolutions(jax.value_and_grad(nested)))(KERNELS, IMAGES)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)
    outside = jax.jit(jax.value_and_grad(canonical_convolutions(nested)))(KERNELS, IMAGES)
    chex.assert_trees_all_close(outside, want, rtol=1e-4, atol=1e-6)


def test_what_is_inside_a_linear_solve_or_a_shard_map_keeps_its_meaning():
    kernel = KERNELS[1][..., :4]

    def conv(x):
        return lax.conv_general_dilated(
            x, kernel / 9, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW")
        )

    images = jnp.asarray(RNG.normal(size=(8, 4, 5, 5)), jnp.float32)

    def matvec(x):
        return x + 0.1 * conv(x)

    def solve(matvec, b):
        return lax.fori_loop(0, 20, lambda _, x: b - (matvec(x) - x), b)

    def solved(b):
        return lax.custom_linear_solve(matvec, b, solve, transpose_solve=solve)

    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    mapped = jax.shard_map(conv, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for fun in (solved, mapped):
        gradient = jax.grad(lambda x, fun=fun: jnp.sum(fun(x) ** 2))
        got = jax.jit(canonical_convolutions(gradient))(images)
        chex.assert_trees_all_close(got, jax.jit(gradient)(images), rtol=1e-4, atol=1e-5)


def test_the_recomputation_of_a_checkpoint_survives():
    def loss(kernels, images):
        return image_loss(kernels, images)

    kept, recomputed = (
        jax.jit(canonical_convolutions(jax.value_and_grad(f))).lower(KERNELS, IMAGES).as_text()
        for f in (loss, jax.checkpoint(loss))
    )
    assert recomputed.count("convolution(") > kept.count("convolution(")


def test_no_layout_work_where_there_is_nothing_to_mend():
    gradient = jax.grad(lambda w, x: jnp.tanh(x @ w).mean())
    plain = jax.make_jaxpr(gradient)(jnp.ones((4, 3)), jnp.ones((5, 4)))
    ours = jax.make_jaxpr(canonical_convolutions(gradient))(jnp.ones((4, 3)), jnp.ones((5, 4)))
    assert [e.primitive for e in ours.eqns] == [e.primitive for e in plain.eqns]
    # The forward convolutions of a net with channels last are as they should be.
    plain = jax.make_jaxpr(small_net)(IMAGES, KERNELS)
    ours = jax.make_jaxpr(canonical_convolutions(small_net))(IMAGES, KERNELS)
    assert [e.primitive for e in ours.eqns] == [e.primitive for e in plain.eqns]
    # Lowered for another platform, a convolution is what it was.
    gradient = jax.grad(image_loss)

    def count(f):
        return str(
            jax.jit(f).trace(KERNELS, IMAGES).lower(lowering_platforms=("cuda",)).as_text()
        ).count("stablehlo.transpose")

    assert count(canonical_convolutions(gradient)) == count(gradient)
