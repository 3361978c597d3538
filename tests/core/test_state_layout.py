"""The layout of a state is a promise: a checkpoint of this version is read by later ones."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum import DynamicLossScale, accumulate, make_train_step

PARAMS = {"w": jnp.zeros((2, 3)), "half": jnp.zeros(3, jnp.bfloat16)}
COUNTERS = {
    ".micro_step": "int32[]",
    ".gradient_step": "int32[]",
    ".emitted": "bool[]",
    ".num_skipped": "int32[]",
    ".window_weight": "float32[]",
}
SUM = {".window_sum['w']": "float32[2,3]", ".window_sum['half']": "float32[3]"}
VALUE = {
    f".extras['average_extra_args'].sums['value']['{name}']": "float32[]"
    for name in ("sum", "weight")
}
MOMENTUM = {
    ".inner_state[0].trace['w']": "float32[2,3]",
    ".inner_state[0].trace['half']": "bfloat16[3]",
}
MONITOR = {
    f".extras['monitor'].{field}['{name}']": "float32[]"
    for field, names in {
        "sums": "count norms squares weighted_squares loss loss_weight skipped",
        "memory": "grad_norm micro_grad_norm micro_grad_norm_std update_norm update_ratio loss"
        " weight num_skipped noise_scale every_k micro_weight noise signal",
    }.items()
    for name in names.split()
}
LOSS_SCALE = {
    ".extras['loss_scale'].sums": "float32[]",
    ".extras['loss_scale'].memory['scale']": "float32[]",
    ".extras['loss_scale'].memory['clean_windows']": "int32[]",
}
STEP = {f".extras['step_metrics'].memory['{name}']": "float32[]" for name in ("loss", "grad_norm")}


def layout(state):
    def show(x):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"

    return {keystr(path): show(leaf) for path, leaf in tree_flatten_with_path(state)[0]}


@pytest.mark.parametrize(
    ("every_k", "options", "want"),
    [
        (1, {}, COUNTERS | MOMENTUM),
        (4, {}, COUNTERS | SUM | VALUE | MOMENTUM),
        (lambda step: 4, {"average_extra_args": ()}, COUNTERS | SUM | MOMENTUM),
        (4, {"monitor": True}, COUNTERS | SUM | VALUE | MOMENTUM | MONITOR),
        (4, {"loss_scale": DynamicLossScale()}, COUNTERS | SUM | VALUE | MOMENTUM | LOSS_SCALE),
    ],
    ids=["every_k=1", "every_k=4", "no averages", "monitor", "loss scale"],
)
def test_paths_shapes_and_dtypes_of_a_state_are_those_of_0_2(every_k, options, want):
    tx = accumulate(every_k, optax.sgd(0.1, momentum=0.9), **options)
    assert layout(tx.init(PARAMS)) == want
    state = jax.eval_shape(lambda params: tx.update(params, tx.init(params), params)[1], PARAMS)
    if every_k != 1:  # there the dtypes are the inner transformation's
        assert layout(state) == want


def test_a_train_step_adds_the_metrics_that_it_shows():
    step = make_train_step(lambda params, x: jnp.sum(params["w"]) * jnp.mean(x), accumulate(2))
    state = step.init({"w": jnp.zeros((2, 3))})
    sums = {".window_sum['w']": "float32[2,3]"}
    assert layout(state) == COUNTERS | sums | VALUE | STEP


def test_with_an_axis_only_what_a_device_gathers_has_a_leading_axis_of_devices():
    tx = accumulate(4, optax.sgd(0.1, momentum=0.9), axis_name="data", monitor=True)
    own = {".num_skipped", ".window_weight", *SUM, *VALUE}
    own |= {path for path in MONITOR if ".sums" in path}
    without = COUNTERS | SUM | VALUE | MOMENTUM | MONITOR
    stacked = {
        path: shape.replace("[]", "[1]").replace("[2", "[1,2").replace("[3", "[1,3")
        for path, shape in without.items()
        if path in own
    }
    assert layout(tx.init(PARAMS)) == without | stacked
