"""Trace-time checks of what users pass: each error gives the name, the rule and the value."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._axis import axis_names

_State = TypeVar("_State")
Schedule = Callable[[jax.Array], jax.typing.ArrayLike]

_LARGEST_K = 2**31 - 1  # micro_step is an int32


def check_every_k(every_k: Any) -> None:
    """Require an int of at least 1 or a schedule."""
    if isinstance(every_k, optax.GradientTransformation):
        raise ValueError(
            "every_k comes first and the inner transformations after it, as in"
            f" accumulate(4, optax.adam(1e-3)); got the transformation {every_k!r} as every_k."
        )
    if callable(every_k):
        return
    is_int = isinstance(every_k, int | np.integer) and not isinstance(every_k, bool)
    if not is_int or not 1 <= every_k <= _LARGEST_K:
        raise ValueError(
            f"every_k must be an int from 1 to 2**31 - 1 or a schedule, got {every_k!r}."
        )


def scheduled_k(every_k: Any) -> jax.Array:
    """The k that a schedule's value asks for: rounded, an int32 of at least 1."""
    dtype = jnp.result_type(every_k) if _is_arraylike(every_k) else None
    if dtype is None or jnp.shape(every_k) or not _is_real(dtype):
        raise ValueError(
            "every_k as a schedule must return a real number (a scalar) for a gradient step,"
            f" got {every_k!r}."
        )
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.maximum(jnp.asarray(every_k).astype(jnp.int32), 1)
    k = jnp.round(jnp.asarray(every_k))
    # A comparison, so that NaN gives 1 too; and float32 has no number from 2**31 - 127 to 2**31.
    return jnp.minimum(jnp.where(k >= 1, k, 1), _LARGEST_K - 127).astype(jnp.int32)


def check_transforms(name: str, transforms: Iterable[Any]) -> None:
    """Require gradient transformations."""
    for transform in transforms:
        if not isinstance(transform, optax.GradientTransformation):
            hint = " (a factory must be called)" if callable(transform) else ""
            raise ValueError(
                f"{name} must be optax gradient transformations, and every_k comes before them,"
                f" as in accumulate(4, optax.adam(1e-3)); got {transform!r}{hint}."
            )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Require one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_dtype(name: str, dtype: Any) -> None:
    """Require None or a real floating dtype."""
    if dtype is None:
        return
    try:
        is_floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        raise ValueError(f"{name} must be a real floating dtype or None, got {dtype!r}.")


def check_accumulator_dtype(dtype: Any) -> None:
    """Require None or a floating dtype in which a window's sum does not overflow."""
    check_dtype("accumulator_dtype", dtype)
    if dtype is not None and float(jnp.finfo(dtype).max) < 1e38:
        raise ValueError(
            "accumulator_dtype must have the range of float32 (float32, bfloat16 or float64):"
            f" sums overflow at {float(jnp.finfo(dtype).max):g}; got {jnp.dtype(dtype).name}."
        )


def check_enabled(name: str, dtype: Any) -> None:
    """Require a dtype that jax does not truncate as it is configured now."""
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(f"{name}={jnp.dtype(dtype).name} needs jax_enable_x64, which is off.")


def check_callable(name: str, value: Any) -> None:
    """Require None or a function."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {value!r}.")


def check_function(name: str, value: Any) -> None:
    """Require a function."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {value!r}.")


def check_names(name: str, value: Any, reserved: tuple[str, ...]) -> None:
    """Require a sequence of argument names, none of them reserved."""
    valid = isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)
    if not valid or set(value) & set(reserved):
        raise ValueError(
            f"{name} must be a tuple of names of extra args other than"
            f" {' and '.join(map(repr, reserved))}, got {value!r}."
        )


def check_averaged_inside(names: frozenset[str], inside: frozenset[str]) -> None:
    """Require that an accumulator averages what the one around it does, and may be more."""
    if not names <= inside:
        raise ValueError(
            "average_extra_args of an accumulator around another must be named inside too, where"
            f" the window is whole; got {sorted(names)} around {sorted(inside)}."
        )


def check_outermost_axis(inside: Any) -> None:
    """Require that of nested accumulators only the outermost crosses devices."""
    if inside is not None:
        raise ValueError(
            "axis_name belongs to the outermost of nested accumulators, whose boundaries do not"
            f" depend on what a device gathered; got axis_name={inside!r} inside another."
        )


def of_one_device(x: Any) -> jax.Array:
    """A device's own part of what all devices hold, stacked."""
    if not x.ndim or len(x) != 1:
        raise ValueError(
            "opt_state must hold one window for each device, with a leading axis of 1 on each"
            " (give shard_map state_specs(opt_state, axis_name)); got the shape"
            f" {x.shape} on one device. Carry a state over from another number of devices with"
            " optax_accum.reshard_window(opt_state, num_devices)."
        )
    return x[0]


def skip_decision(result: Any) -> jax.Array:
    """The bool scalar of optax's `should_skip_update_fn` protocol, whose info is dropped."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(
            f"should_skip_update_fn must return a pair (bool scalar, info), got {result!r}."
        )
    return scalar("should_skip_update_fn's first value", result[0], jnp.bool_)


def check_averages(averages: dict[str, Any], names: Iterable[str]) -> None:
    """Require a state that was made for the same averaged extra args."""
    if set(averages) != set(names):
        raise ValueError(
            "average_extra_args must be those with which the state was made,"
            f" {sorted(averages)}; got {sorted(names)}."
        )


def scalar(name: str, value: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`value` as a scalar array of `dtype`: real numbers for a float dtype, bools for bool."""
    source = jnp.result_type(value) if _is_arraylike(value) else None
    wants_bool = jnp.dtype(dtype) == jnp.bool_
    rule = "a bool scalar" if wants_bool else "a real scalar"
    if source is None:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
    # A bool is a number too: a mask's True weighs one.
    valid = source == jnp.bool_ or (not wants_bool and _is_real(source))
    if jnp.shape(value) or not valid:
        raise ValueError(
            f"{name} must be {rule}, got dtype {source.name} and shape {jnp.shape(value)}."
        )
    return jnp.asarray(value, dtype)


def averaged_arg(name: str, extra_args: dict[str, Any], dtype: Any) -> jax.Array:
    """The scalar extra arg of this name."""
    if name not in extra_args:
        raise ValueError(
            f"average_extra_args names {name!r}, so each update needs it: tx.update(gradients,"
            f" opt_state, params, {name}=...); got {sorted(extra_args) or 'no extra args'}."
        )
    return scalar(name, extra_args[name], dtype)


def check_inexact(tree: Any, what: str) -> None:
    """Require floating or complex leaves, which alone have gradients to sum."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(_dtype(leaf), jnp.inexact):
            raise ValueError(
                f"{what} must be floating or complex to be accumulated (leave other leaves out"
                f" with optax.masked or optax.partition); {what}{keystr(path)} has dtype"
                f" {_dtype(leaf)}."
            )


def check_gradients(name: str, gradients: Any, window_sum: Any, any_width: bool) -> None:
    """Require gradients that the window can gather: its tree, its shapes, dtypes it can hold."""
    check_inexact(gradients, name)
    got, got_def = tree_flatten_with_path(gradients)
    want, want_def = tree_flatten_with_path(window_sum)
    if got_def != want_def:
        got_paths = [keystr(path) for path, _ in got]
        want_paths = [keystr(path) for path, _ in want]
        missing = sorted(set(want_paths) - set(got_paths))
        unexpected = sorted(set(got_paths) - set(want_paths))
        detail = (
            f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            if missing or unexpected
            else f"the leaves are the same, the containers are not: {got_def} against {want_def}"
        )
        raise ValueError(
            f"{name} must have the tree of the params that init was given; in the {name}: {detail}."
        )
    for (path, gradient), (_, total) in zip(got, want, strict=True):
        where = f"{name}{keystr(path)}"
        if jnp.shape(gradient) != total.shape:
            raise ValueError(
                f"{name} must have the shapes of the params that init was given; {where} has"
                f" shape {jnp.shape(gradient)}, its parameter {total.shape}."
            )
        dtype = _dtype(gradient)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        too_wide = is_complex and not jnp.issubdtype(total.dtype, jnp.complexfloating)
        too_wide |= not any_width and jnp.promote_types(dtype, total.dtype) != total.dtype
        if too_wide:
            raise ValueError(
                f"{name} must not be wider than their accumulator; {where} has dtype"
                f" {dtype} and its accumulator {total.dtype}. Cast them, or set"
                " accumulator_dtype."
            )


def state_of(state: Any, state_type: type[_State]) -> _State:
    """Require the state that `init` made."""
    if not isinstance(state, state_type):
        raise ValueError(
            f"opt_state must hold the {state_type.__name__} that tx.init made, as in"
            f" tx.update(gradients, opt_state, params); got a {type(state).__name__} in its place."
        )
    return state


def check_params(params: Any) -> None:
    """Require parameters, which `flush` takes for gradients."""
    if params is None:
        raise ValueError("params must not be None: flush has no gradient to take the dtypes from.")


def check_not_passed(function: str, extra_args: dict[str, Any], names: Iterable[str]) -> None:
    """Require that none of `names` is among the extra args."""
    for name in names:
        if name in extra_args:
            raise ValueError(
                f"{function} has no micro-step, and so takes no {name}; got"
                f" {name}={extra_args[name]!r}. Pass it to tx.update."
            )


def check_statistics(means: jax.Array, variances: jax.Array, counts: Any) -> None:
    """Require stacked statistics and a count for each."""
    for name, x in (("means", means), ("variances", variances)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got dtype {x.dtype}.")
    counts_dtype = jnp.result_type(*jax.tree.leaves(counts), jnp.int8)
    if not _is_real(counts_dtype):
        raise ValueError(f"counts must be real, got dtype {counts_dtype}.")
    counts_shape = (len(counts),) if isinstance(counts, list | tuple) else jnp.shape(counts)
    is_stacked = means.ndim and len(means) and means.shape == variances.shape
    if not is_stacked or counts_shape != means.shape[:1]:
        raise ValueError(
            "means and variances must have one shape (k, ...) and counts the shape (k,), k >= 1;"
            f" got {means.shape}, {variances.shape} and {counts_shape}."
        )


def check_collections(collections: Any) -> None:
    """Require a sequence of trees of one structure and of one shape for each leaf."""
    is_sequence = isinstance(collections, tuple | list)
    if not is_sequence or not collections:
        raise ValueError(
            "collections must be a list or tuple of one collection for each micro-batch, got"
            f" {'an empty one' if is_sequence else type(collections).__name__}."
        )
    shapes = [
        {keystr(path): jnp.shape(leaf) for path, leaf in tree_flatten_with_path(collection)[0]}
        for collection in collections
    ]
    for i, (collection, each) in enumerate(zip(collections, shapes, strict=True)):
        differ = sorted(p for p in {*each, *shapes[0]} if each.get(p) != shapes[0].get(p))
        if differ:
            raise ValueError(
                f"collections must have one structure and one shape for each leaf;"
                f" {differ[0]} has {shapes[0].get(differ[0], 'no leaf')} in collections[0] and"
                f" {each.get(differ[0], 'no leaf')} in collections[{i}]."
            )
        if jax.tree.structure(collection) != jax.tree.structure(collections[0]):
            raise ValueError(
                f"collections must have one structure; collections[{i}] has the leaves of"
                " collections[0] in other containers."
            )


def check_batch(batch: Any) -> int:
    """Require arrays with one example axis, the first; returns the number of examples."""
    sizes = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if not jnp.ndim(leaf):
            raise ValueError(
                "batch must hold arrays with the example axis first;"
                f" batch{keystr(path)} is the scalar {leaf!r}."
            )
        sizes[f"batch{keystr(path)}"] = len(leaf)
    if len(set(sizes.values())) != 1 or not min(sizes.values()):
        raise ValueError(f"batch must hold one number of examples in all its arrays, got {sizes}.")
    return min(sizes.values())


def check_mesh(mesh: Any, axis_name: Any) -> None:
    """Require a mesh with the axis that `tx` reduces over, or neither."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}.")
    if (mesh is None) != (axis_name is None):
        raise ValueError(
            "mesh goes with a tx that reduces over one of its axes, accumulate(k, axis_name=...);"
            f" got mesh={mesh!r} and axis_name={axis_name!r}."
        )
    if mesh is not None and not set(axis_names(axis_name)) <= set(mesh.axis_names):
        raise ValueError(
            f"mesh must have the axis that tx reduces over, axis_name={axis_name!r}; its axes are"
            f" {mesh.axis_names}."
        )


def check_averages_of_step(names: frozenset[str]) -> None:
    """Require that a train step can give all that its `tx` averages."""
    if names - {"value"}:
        raise ValueError(
            "average_extra_args of tx may name 'value' alone in a train step, which passes its"
            f" loss as such; got {sorted(names)}."
        )


def check_made_by_step(extras: dict[str, Any]) -> None:
    """Require a state with room for the losses of a window."""
    if "value" not in extras.get("averages", {}):
        raise ValueError(
            "opt_state must come from step.init(params), which sums the losses of a window too; got"
            f" one that averages {sorted(extras.get('averages', {})) or 'nothing'}, as tx.init"
            " makes it."
        )


def check_given(name: str, value: Any, is_expected: bool) -> None:
    """Require an argument of a train step where it was announced, and there alone."""
    if (value is not None) != is_expected:
        got = "none" if value is None else f"a {type(value).__name__}"
        raise ValueError(
            f"{name} must be passed to a step made with {name}=True, and to no other; got {got} and"
            f" {name}={is_expected}."
        )


def check_no_keys(name: str, tree: Any) -> None:
    """Require arrays of which a mean or a maximum over devices can be taken."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            raise ValueError(
                f"{name} must hold no random keys, of which devices have no mean; {name}"
                f"{keystr(path)} is one. Make the step with rng=True, and pass it as rng=."
            )


def check_size(window_weight: Any, num_devices: int, axis_name: Any) -> None:
    """Require a state that was made for so many devices."""
    if jnp.shape(window_weight) != (num_devices,):
        raise ValueError(
            f"opt_state must be that of the {num_devices} devices along axis_name={axis_name!r};"
            f" got one for {jnp.size(window_weight)}. Carry it over with"
            f" optax_accum.reshard_window(opt_state, {num_devices})."
        )


def check_divides(num_examples: int, num_devices: int, axis_name: Any) -> None:
    """Require a number of examples that the devices share out evenly."""
    if num_examples % num_devices:
        raise ValueError(
            f"batch must hold a number of examples that the {num_devices} devices along"
            f" axis_name={axis_name!r} divide, got {num_examples}. Fill it up, and give what fills"
            " it the weight 0 in loss_fn and weight_fn."
        )


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Two values."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be a pair, got {_shapes(value)}.")
    return value[0], value[1]


def loss(value: Any) -> Any:
    """A real floating scalar."""
    is_floating = _is_arraylike(value) and jnp.issubdtype(jnp.result_type(value), jnp.floating)
    if not is_floating or jnp.shape(value):
        raise ValueError(
            f"loss_fn's loss must be a real floating scalar, got {_shapes(value)}. With a second"
            " value make the step with has_aux=True or model_state=True."
        )
    return value


def check_same_model_state(new_state: Any, old_state: Any) -> None:
    """Require a model state that keeps its tree, its shapes and its dtypes."""
    new, new_def = tree_flatten_with_path(new_state)
    old, old_def = tree_flatten_with_path(old_state)
    if new_def != old_def:
        raise ValueError(
            "loss_fn must return the model_state with the tree that it was given,"
            f" {old_def}; got {new_def}."
        )
    for (path, n), (_, o) in zip(new, old, strict=True):
        if jnp.shape(n) != jnp.shape(o) or _dtype(n) != _dtype(o):
            raise ValueError(
                "loss_fn must return the model_state with the shapes and dtypes that it was given;"
                f" model_state{keystr(path)} goes from {_shapes(o)} to {_shapes(n)}."
            )


def check_same_structure(new_state: Any, old_state: Any) -> None:
    """Require an inner transformation whose state keeps its tree, and its real leaves real."""
    new, new_def = tree_flatten_with_path(new_state)
    old, old_def = tree_flatten_with_path(old_state)
    if new_def != old_def:
        raise ValueError(
            "inner must keep the tree of its state, or no gate can hold the state back; its init"
            f" gives {old_def} and its update {new_def}."
        )
    for (path, n), (_, o) in zip(new, old, strict=True):
        is_complex = [jnp.issubdtype(_dtype(x), jnp.complexfloating) for x in (n, o)]
        if jnp.shape(n) != jnp.shape(o) or is_complex[0] > is_complex[1]:
            raise ValueError(
                "inner must keep the shapes of its state, and real leaves real;"
                f" inner_state{keystr(path)} goes from {_dtype(o)}{list(jnp.shape(o))} in init to"
                f" {_dtype(n)}{list(jnp.shape(n))} in update."
            )


def _is_arraylike(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _shapes(tree: Any) -> str:
    """A value for a message: arrays by dtype and shape."""
    show = lambda x: f"{_dtype(x)}{list(jnp.shape(x))}" if _is_arraylike(x) else repr(x)
    return str(jax.tree.map(show, tree)).replace("'", "")


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def _dtype(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    is_numpys = dtype is None or (isinstance(leaf, np.ndarray | np.generic) and dtype.kind in "fc")
    return jnp.result_type(leaf) if is_numpys else dtype  # float64 is float32 without x64
