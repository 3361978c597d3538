"""Law 1 for every transformation of optax, and each as a follower in a plain chain."""

import inspect
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import laws
import zoo
from optax_accum import accumulate
from optax_accum.testing.gate_check import OF_THE_WINDOW

pytestmark = [
    pytest.mark.filterwarnings("ignore:Specifying a key will be required:UserWarning"),
    # adafactor and others on parameters of a few elements, momo_adam in low precision
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Casting (from )?complex"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning"),
]

K = 2
NAMES = [entry.name for entry in zoo.ENTRIES if entry.name not in zoo.EXCEPTIONS]
DTYPES = ("float32", "bfloat16", "complex64", "float64")
# Every transformation and every dtype is in the quick tier, their combinations are not.
COMBINATIONS = [
    pytest.param(dtype, name, marks=[pytest.mark.slow] if (i + j) % len(DTYPES) else [])
    for j, dtype in enumerate(DTYPES)
    for i, name in enumerate(NAMES)
]
README = pathlib.Path(__file__).parents[2] / "README.md"


def train(name, tx, dtype, *, micro, windows=2, jit=False, mean_value=False):
    """Params and state after so many windows, by micro-steps or by whole windows."""
    rng = np.random.default_rng(0)
    params = zoo.params(name, dtype)
    shapes = jax.tree.map(lambda p: p.shape, params)
    state = tx.init(params)

    def step(gradient, state, params, mean, value):
        extra = zoo.extra_args(name, params, mean, value)
        updates, state = tx.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for _ in range(windows):
        gradients = [laws.small_integers(rng, shapes, [jnp.dtype(dtype)]) for _ in range(K)]
        mean = laws.mean(gradients, [1.0] * K)
        values = rng.integers(1, 9, K).astype(jax.dtypes.canonicalize_dtype(float))
        for i in range(K if micro else 1):
            gradient = gradients[i] if micro else mean
            value = values[i] if micro and not mean_value else values.mean()
            params, state = step(gradient, state, params, mean, value)
    return params, state


def make(name):
    averaged = ("value",) if "value" in zoo.NEEDS.get(name, ()) else ()
    inner = zoo.BY_NAME[name].make()
    return optax.with_extra_args_support(inner), accumulate(K, inner, average_extra_args=averaged)


def optax_alone_fails(name, dtype):
    try:
        train(name, make(name)[0], dtype, micro=False)
    except (ValueError, TypeError, AttributeError) as error:
        return error
    return None


@pytest.mark.parametrize(("dtype", "name"), COMBINATIONS)
def test_k_micro_batches_give_the_update_of_the_big_batch_bit_for_bit(name, dtype):
    if dtype != "float32" and "value_fn" in zoo.NEEDS.get(name, ()):
        pytest.skip("line searches take seconds: float32 alone")
    windows = 2 if dtype == "float32" else 1
    with jax.enable_x64(dtype == "float64"):
        if dtype == "complex64" and optax_alone_fails(name, dtype):
            pytest.skip("optax itself does not take complex parameters here")
        bare, accumulated = make(name)
        want = train(name, bare, dtype, micro=False, windows=windows)
        if dtype == "complex64" and name in zoo.COMPLEX_EXCEPTIONS:
            with pytest.raises(ValueError, match="real leaves real"):
                train(name, accumulated, dtype, micro=True)
            return
        got, state = train(name, accumulated, dtype, micro=True, windows=windows)
        laws.assert_bitwise(got, want[0])
        if dtype == "bfloat16" and name in zoo.BFLOAT16_EXCEPTIONS:
            with pytest.raises(AssertionError, match="bfloat16 against float32"):
                laws.assert_bitwise(state.inner_state, want[1])
        else:
            laws.assert_bitwise(state.inner_state, want[1])
        assert state.gradient_step == windows


@pytest.mark.parametrize("name", NAMES)
def test_compiled_micro_batches_give_the_update_of_the_big_batch_to_rounding(name):
    bare, accumulated = make(name)
    want, _ = train(name, bare, "float32", micro=False, jit=True)
    got, _ = train(name, accumulated, "float32", micro=True, jit=True)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", zoo.EXCEPTIONS)
def test_exceptions_are_exceptions(name):
    if name == "optax.monitor":
        assert optax_alone_fails(name, "float32") is None
        with pytest.raises(ValueError, match="inner must keep the tree of its state"):
            train(name, make(name)[1], "float32", micro=True)
    else:
        assert optax_alone_fails(name, "float32")


@pytest.mark.parametrize("name", NAMES)
def test_a_follower_in_a_plain_chain_is_right_or_raises(name):
    bare, _ = make(name)
    chained = optax.chain(accumulate(K), bare)
    if name in zoo.RIGHT_FOLLOWERS:
        got, _ = train(name, chained, "float32", micro=True, mean_value=True)
        want, _ = train(name, bare, "float32", micro=False)
        chex.assert_trees_all_close(got, want, rtol=1e-6)
    else:
        with pytest.raises(ValueError, match=r"comes after an accumulate\(k\)"):
            train(name, chained, "float32", micro=True, mean_value=True)


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["matrix"] @ params["other"][:2] - y) ** 2)


def window_args(name, params, window_batch):
    """The extra args that the README's table and the checker tell users to pass, as written."""
    said = ", ".join(OF_THE_WINDOW[arg] for arg in zoo.WINDOW_ARGS[name])
    known = {"jax": jax, "loss_fn": mean_loss, "params": params, "window_batch": window_batch}
    return eval(f"dict({said})", known)


def after_one_update(name, *, micro, of_the_window=True):
    """Params and inner state after a window, given its own extra args or each micro-batch's."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4 * K, 4)).astype("float32"), np.ones(4 * K, "float32")
    batch = (x * np.repeat([4, 1], 2 * K)[:, None].astype("float32"), y)  # unlike halves
    parts = list(zip(*(np.split(x, K) for x in batch), strict=True)) if micro else [batch]
    bare = zoo.opaque_sam() if name == zoo.OPAQUE_SAM else zoo.BY_NAME[name].make()
    if "linesearch" in name:  # they search along a descent
        bare = optax.chain(optax.sgd(0.02), bare)
    averaged = ("value",) if "value" in zoo.NEEDS.get(name, ()) else ()
    tx = accumulate(len(parts), bare, average_extra_args=averaged)
    params = zoo.params(name, "float32")
    state = tx.init(params)
    for part in parts:
        value, gradient = jax.value_and_grad(mean_loss)(params, part)
        extra_args = window_args(name, params, batch if of_the_window else part)
        extra_args |= dict.fromkeys(averaged, value)
        updates, state = tx.update(gradient, state, params, **extra_args)
        params = optax.apply_updates(params, updates)
    return params, state.inner_state


@pytest.mark.parametrize("name", zoo.WINDOW_ARGS)
def test_extra_args_of_the_window_give_the_update_of_the_big_batch_and_others_do_not(name):
    want = after_one_update(name, micro=False)
    chex.assert_trees_all_close(after_one_update(name, micro=True), want, rtol=1e-5, atol=1e-6)
    wrong = after_one_update(name, micro=True, of_the_window=False)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(wrong, want, rtol=1e-3, atol=1e-3)


def test_every_export_of_optax_is_tried_or_is_no_transformation():
    for prefix, module in (("optax", optax), ("optax.contrib", optax.contrib)):
        for name in module.__all__ if hasattr(module, "__all__") else dir(module):
            value = getattr(module, name)
            if name.startswith("_") or inspect.isclass(value) or not callable(value):
                continue
            full = f"{prefix}.{name}"
            assert (full in zoo.BY_NAME) != (full in zoo.NO_TRANSFORMATIONS), full


def exceptions_table():
    """The README's table of exceptions to law 1, from what fails here."""
    refused = [
        name.removeprefix("optax.")
        for name in zoo.BY_NAME
        if name not in zoo.EXCEPTIONS and optax_alone_fails(name, "complex64")
    ]
    rows = [(f"`{name}`", "any", why) for name, why in zoo.EXCEPTIONS.items()]
    rows += [(f"`{name}`", "complex64", why) for name, why in zoo.COMPLEX_EXCEPTIONS.items()]
    rows += [(f"`{name}`", "bfloat16", why) for name, why in zoo.BFLOAT16_EXCEPTIONS.items()]
    rows.append((", ".join(f"`{n}`" for n in refused), "complex64", "optax itself refuses them"))
    for args in dict.fromkeys(zoo.WINDOW_ARGS.values()):
        names = ", ".join(f"`{name}`" for name, its in zoo.WINDOW_ARGS.items() if its == args)
        exact = " and ".join(f"`{OF_THE_WINDOW[arg]}`" for arg in args)
        why = f"exact with {exact}, not those of a micro-batch (float32 tried)"
        rows.append((names, "any", why))
    lines = ["| transformation | dtype | why |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


@pytest.mark.slow
def test_the_readme_has_the_table_of_exceptions():
    match = re.search(r"<!-- exceptions -->\n(.*?)\n<!-- end -->", README.read_text(), re.DOTALL)
    assert match is not None
    assert match[1] == exceptions_table()


if __name__ == "__main__":
    print(exceptions_table())
