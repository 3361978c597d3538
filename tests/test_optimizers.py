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
README = pathlib.Path(__file__).parents[1] / "README.md"


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
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
    searches = [name for name, needs in zoo.NEEDS.items() if "value_fn" in needs]
    rows.append(
        (
            ", ".join(f"`{n}`" for n in searches),
            "any",
            "hold if `value`, `grad` and `value_fn` are those of the whole window (float32 tried)",
        )
    )
    lines = ["| transformation | dtype | why |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def test_the_readme_has_the_table_of_exceptions():
    match = re.search(r"<!-- exceptions -->\n(.*?)\n<!-- end -->", README.read_text(), re.DOTALL)
    assert match is not None
    assert match[1] == exceptions_table()


if __name__ == "__main__":
    print(exceptions_table())
