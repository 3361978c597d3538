"""Every gradient transformation that optax and optax.contrib export, ready to be made."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from optax_accum.testing.gate_check import OF_THE_WINDOW

# What a required parameter of this name is given.
ARGUMENTS = {
    "learning_rate": 0.5,
    "clipping": 0.5,
    "max_delta": 0.5,
    "threshold": 0.5,
    "max_norm": 0.5,
    "decay": 0.5,
    "step_size": 0.5,
    "eta": 0.5,
    "gamma": 0.5,
    "step_size_fn": lambda count: 1.0 / (1 + count),
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.5,
    "seed": 0,
    "max_backtracking_steps": 4,
    "max_linesearch_steps": 4,
    "max_consecutive_errors": 3,
    "inner": optax.sgd(0.5, momentum=0.5),
    "base_optimizer": optax.sgd(0.5, momentum=0.5),
    "optimizer": optax.sgd(0.5, momentum=0.5),
    "adv_optimizer": optax.chain(optax.contrib.normalize(), optax.sgd(0.25)),
    "inner_factory": optax.adam,
    "measure_name": "norm",
    "measure": lambda updates, *_, **__: optax.tree.norm(updates),
    "should_transform_fn": lambda step, **_: step % 2 == 0,
    "tx": optax.sgd(0.5, momentum=0.5),
    "fast_optimizer": optax.sgd(0.5),
    "sync_period": 2,
    "slow_step_size": 0.5,
    "f": lambda updates, params: jax.tree.map(lambda u, p: 2 * u, updates, params),
}

# What those need that their signature does not tell.
SPECIAL: dict[str, Callable[[], optax.GradientTransformation]] = {
    "optax.chain": lambda: optax.chain(optax.scale(0.5), optax.trace(0.5)),
    "optax.named_chain": lambda: optax.named_chain(
        ("scale", optax.scale(0.5)), ("trace", optax.trace(0.5))
    ),
    "optax.masked": lambda: optax.masked(optax.trace(0.5), _first_leaf),
    "optax.freeze": lambda: optax.freeze(_first_leaf),
    "optax.selective_transform": lambda: optax.selective_transform(
        optax.trace(0.5), freeze_mask=_first_leaf
    ),
    "optax.partition": lambda: optax.partition(
        {True: optax.trace(0.5), False: optax.adam(0.5)}, _first_leaf
    ),
    "optax.multi_transform": lambda: optax.multi_transform(
        {True: optax.trace(0.5), False: optax.adam(0.5)}, _first_leaf
    ),
    "optax.inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1.0, 0.0, 8)
    ),
    "optax.inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(
        learning_rate=0.5
    ),
    "optax.stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: 2 * u),
    "optax.scale_by_factored_rms": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "optax.adafactor": lambda: optax.adafactor(0.5, min_dim_size_to_factor=2),
    "optax.add_decayed_weights": lambda: optax.add_decayed_weights(0.5),
    "optax.nadam": lambda: optax.nadam(0.5),
    "optax.nadamw": lambda: optax.nadamw(0.5),
    "optax.contrib.dog": lambda: optax.contrib.dog(),
    "optax.contrib.dowg": lambda: optax.contrib.dowg(),
    "optax.measure_with_ema": lambda: optax.measure_with_ema(lambda updates: updates, 0.5),
    "optax.monitor": lambda: optax.monitor({"norm": optax.tree.norm}),
    "optax.contrib.galore": lambda: optax.contrib.galore(0.5, rank=2),
    "optax.contrib.scale_by_galore": lambda: optax.contrib.scale_by_galore(rank=2),
    "optax.contrib.scale_by_muon": lambda: optax.contrib.scale_by_muon(
        weight_dimension_numbers=lambda params: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(), params
        )
    ),
    "optax.contrib.sam": lambda: optax.contrib.sam(
        optax.sgd(0.5), optax.chain(optax.contrib.normalize(), optax.sgd(0.25)), sync_period=2
    ),
}


# Entries that take no vectors among their params.
MATRICES_ONLY = {
    "optax.contrib.galore",
    "optax.contrib.scale_by_galore",
    "optax.contrib.scale_by_muon",
}

# Extra args that an entry's update needs.
NEEDS = {
    "optax.polyak_sgd": ("value",),
    "optax.scale_by_polyak": ("value",),
    "optax.contrib.momo": ("value",),
    "optax.contrib.momo_adam": ("value",),
    "optax.contrib.reduce_on_plateau": ("value",),
    "optax.contrib.sophia": ("obj_fn",),
    "optax.lbfgs": ("value", "grad", "value_fn"),
    "optax.scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "optax.scale_by_zoom_linesearch": ("value", "grad", "value_fn"),
}


# Where law 1 does not hold, and why; tests/core/test_optimizers.py shows each, and prints the
# README's table from it.
EXCEPTIONS = {
    "optax.lookahead": "its params are a pair, the gradients are not",
    "optax.contrib.dpsgd": "its gradients have an axis of examples, its params do not",
    "optax.contrib.differentially_private_aggregate": "as `dpsgd`",
    "optax.monitor": "its state gains entries in its first update",
}
COMPLEX_EXCEPTIONS = {
    "optax.scale_by_distance_over_gradients": "its real state turns complex: an error here",
}
BFLOAT16_EXCEPTIONS = {
    "optax.scale_by_distance_over_gradients": (
        "its state would turn float32; here it stays bfloat16"
    ),
}


# Where law 1 holds if these extra args are those of the window's whole batch: the other way to make
# an entry, and what it needs. `value` is averaged by the accumulator.
OPAQUE_SAM = "optax.contrib.sam(opaque_mode=True)"
WINDOW_ARGS = {
    name: tuple(arg for arg in needs if arg in OF_THE_WINDOW)
    for name, needs in {**NEEDS, OPAQUE_SAM: ("grad_fn",)}.items()
    if set(needs) & set(OF_THE_WINDOW)
}


def opaque_sam() -> optax.GradientTransformation:
    """Sharpness-aware minimization that asks `grad_fn` for its second gradient."""
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.25))
    return optax.contrib.sam(optax.sgd(0.5), ascent, opaque_mode=True)


# Functions that optax exports beside its transformations.
_NAMES = """
    MaskOrFn OptState Params ScalarOrSchedule Schedule Updates apply_updates
    constant_schedule contrib.hutchinson_estimator_diag_hessian
    contrib.schedule_free_eval_params convex_kl_divergence cosine_decay_schedule
    cosine_distance cosine_onecycle_schedule cosine_similarity ctc_loss
    ctc_loss_with_forward_probs differentially_private_aggregate dpsgd exponential_decay
    generalized_kl_divergence global_norm hinge_loss huber_loss incremental_update
    init_empty_state join_schedules kl_divergence l2_loss linear_onecycle_schedule
    linear_schedule log_cosh matrix_inverse_pth_root microbatch multi_normal nnls ntxent
    per_example_global_norm_clip per_example_layer_norm_clip periodic_update
    piecewise_constant_schedule piecewise_interpolate_schedule polynomial_schedule
    power_iteration safe_increment safe_int32_increment safe_norm safe_root_mean_squares
    scale_gradient sgdr_schedule sigmoid_binary_cross_entropy skip_large_updates
    skip_not_finite smooth_labels softmax_cross_entropy
    softmax_cross_entropy_with_integer_labels value_and_grad_from_state
    warmup_cosine_decay_schedule warmup_exponential_decay_schedule
"""
NO_TRANSFORMATIONS = {f"optax.{name}" for name in _NAMES.split()}

# Entries that a plain chain may call after an accumulator: no state, and zeros stay zeros.
RIGHT_FOLLOWERS = {
    "optax.adaptive_grad_clip",
    "optax.centralize",
    "optax.clip",
    "optax.clip_by_block_rms",
    "optax.clip_by_global_norm",
    "optax.freeze",
    "optax.identity",
    "optax.normalize_by_update_norm",
    "optax.polyak_sgd",
    "optax.scale",
    "optax.scale_by_learning_rate",
    "optax.scale_by_param_block_norm",
    "optax.scale_by_param_block_rms",
    "optax.scale_by_polyak",
    "optax.scale_by_sign",
    "optax.scale_by_trust_ratio",
    "optax.selective_transform",
    "optax.set_to_zero",
    "optax.sgd",
    "optax.sign_sgd",
    "optax.stateless",
    "optax.stateless_with_tree_map",
}


class Entry(NamedTuple):
    name: str  # "optax.adam"
    make: Callable[[], optax.GradientTransformation]


def _first_leaf(tree):
    """True for the first leaf of a tree and False for the others."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [i == 0 for i in range(len(leaves))])


def _entries():
    for prefix, module in (("optax", optax), ("optax.contrib", optax.contrib)):
        for name in sorted(vars(module)):
            value, full = getattr(module, name), f"{prefix}.{name}"
            if name.startswith("_"):
                continue
            if full in SPECIAL:
                yield Entry(full, SPECIAL[full])
            elif inspect.isfunction(value):
                signature = inspect.signature(value, eval_str=False)
                if "GradientTransformation" in str(signature.return_annotation):
                    required = {
                        p.name: ARGUMENTS[p.name]
                        for p in signature.parameters.values()
                        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
                    }
                    yield Entry(full, lambda value=value, required=required: value(**required))


ENTRIES = list(_entries())
BY_NAME = {entry.name: entry for entry in ENTRIES}


def params(name, dtype):
    """Small parameters for an entry: a matrix, and where it takes one, a vector."""
    matrix = jnp.arange(-3, 5).reshape(4, 2) / 2
    tree = {"matrix": matrix, "other": matrix.T if name in MATRICES_ONLY else jnp.arange(3) / 2}
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def extra_args(name, params, gradient, value):
    """The extra args that an entry's update needs: a loss, its value and its gradient."""

    def value_fn(params):
        return sum(jnp.sum(jnp.abs(x - 1) ** 2) for x in jax.tree.leaves(params))

    available = {"value": value, "grad": gradient, "value_fn": value_fn, "obj_fn": value_fn}
    return {needed: available[needed] for needed in NEEDS.get(name, ())}
