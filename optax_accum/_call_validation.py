"""Trace-time checks of batches, of loss functions and of what they are called with."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._axis import axis_names, spec_of
from optax_accum._validation import check_leaves, dtype_of, is_arraylike, is_real


def check_statistics(means: jax.Array, variances: jax.Array, counts: Any) -> None:
    """Require stacked statistics and a count for each."""
    for name, x in (("means", means), ("variances", variances)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got dtype {x.dtype}.")
    counts_dtype = jnp.result_type(*jax.tree.leaves(counts), jnp.int8)
    if not is_real(counts_dtype):
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
    """Require arrays that are split along one example axis, the first; returns its length."""
    check_leaves(batch, "batch")
    sizes = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if not jnp.ndim(leaf):
            raise ValueError(
                "batch must hold arrays with the example axis first, along which it is split;"
                f" batch{keystr(path)} is the scalar {leaf!r}. Give each example one of its own, as"
                " jnp.full(num_examples, scalar) does, or let loss_fn take it from elsewhere."
            )
        sizes[f"batch{keystr(path)}"] = len(leaf)
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "batch must hold one number of examples in all its arrays, the length of axis 0, along"
            f" which it is split; got {sizes}. jnp.moveaxis(x, axis, 0) brings the examples of"
            " another axis there."
        )
    if not sizes or not min(sizes.values()):
        raise ValueError(
            "batch must hold at least one example, in arrays with the example axis first; got"
            f" {sizes or f'no array in {batch!r}'}."
        )
    return min(sizes.values())


def check_not_empty(batch: Any) -> None:
    """Require a row in the arrays of a batch, if it has any."""
    sizes = _lengths(batch)
    if sizes and not max(sizes.values()):
        raise ValueError(f"batch must hold at least one example, got {sizes}.")


def count_examples(batch: Any) -> int | None:
    """The number of examples in a batch that is not split; None where its arrays do not agree.

    Its scalars are of all examples.
    """
    sizes = {*_lengths(batch).values()}
    return sizes.pop() if len(sizes) == 1 else None


def refuse_uncounted(batch: Any) -> None:
    """Refuse a batch without the number of examples, which is the weight of a micro-batch."""
    raise ValueError(
        "batch must hold at least one example and one number of them in all its arrays, the length"
        " of axis 0, where it is the weight of the micro-batch; got"
        f" {_lengths(batch) or f'no array in {batch!r}'}. For a batch of another form make the step"
        " with weight_fn=, the weight of a micro-batch: weight_fn=lambda batch: 1 where all weigh"
        " the same."
    )


def _lengths(batch: Any) -> dict[str, int]:
    """The lengths of the arrays in a batch along their first axis."""
    leaves = tree_flatten_with_path(batch)[0]
    return {f"batch{keystr(path)}": len(leaf) for path, leaf in leaves if jnp.ndim(leaf)}


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


def check_averages_of_step(names: frozenset[str], metrics: tuple[str, ...], has_aux: bool) -> None:
    """Require that a train step can give all that its `tx` averages, and show it."""
    if names - {"value"} and not has_aux:
        raise ValueError(
            "average_extra_args of tx may name 'value', the loss, and in a train step with"
            f" has_aux=True scalars of its aux; got {sorted(names)} and has_aux=False."
        )
    if names & {*metrics, "aux"}:
        raise ValueError(
            f"average_extra_args of tx must not name what a train step shows itself, {metrics};"
            f" got {sorted(names)}. Give the aux another key."
        )


def averaged_aux(names: frozenset[str], aux: Any) -> dict[str, Any]:
    """The scalars of an aux that a window averages."""
    if names and not isinstance(aux, Mapping):
        raise ValueError(
            f"aux must be a dict with the scalars {sorted(names)}, which average_extra_args of tx"
            f" names; got a {type(aux).__name__}."
        )
    missing = sorted(names - aux.keys()) if names else []
    if missing:
        raise ValueError(
            f"aux must hold the scalars that average_extra_args of tx names; it lacks {missing},"
            f" and has {sorted(aux)}."
        )
    return {name: aux[name] for name in names}


def check_made_by_step(extras: dict[str, Any]) -> None:
    """Require a state with room for the losses of a window."""
    if "step_metrics" not in extras:
        raise ValueError(
            "opt_state must come from step.init(params), which has room for what the step shows;"
            " got one as tx.init makes it."
        )


def check_count(name: str, value: Any) -> None:
    """Require an int of at least 1."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Require a finite number above 0."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    if not is_real or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def check_keys_follow(rng_at: tuple[int, ...]) -> None:
    """Require keys that follow `params` and `batch`."""
    if sorted(rng_at) != [*range(2, 2 + len(rng_at))]:
        raise ValueError(
            "rng_argnums must be 2, or 2 and 3 and so on: keys follow params and batch; got"
            f" {rng_at}."
        )


def check_no_more_arguments(args: tuple, rng_at: tuple[int, ...]) -> None:
    """Require no more by position than params, batch and as many keys as were announced."""
    if len(args) > 2 + len(rng_at):
        raise ValueError(
            "encode_fn must be called with params, batch and a key for each of rng_argnums,"
            f" {rng_at}; got {len(args) - 2} arguments after batch."
        )


def check_enough_examples(num_microbatches: int, size: int) -> None:
    """Require an example for each micro-batch."""
    if num_microbatches > size:
        raise ValueError(
            f"num_microbatches must be at most the number of examples, {size}; got"
            f" {num_microbatches}."
        )


def check_shares(num_microbatches: int, batch: Any) -> None:
    """Require micro-batches that each device has an equal part of, where types shard the batch."""
    for path, leaf in tree_flatten_with_path(batch)[0]:
        share = examples_on_each_device(leaf)
        if share and share % num_microbatches:
            raise ValueError(
                f"num_microbatches must divide the examples that each device has, {share} here, of"
                f" a batch that is sharded over explicit axes of a mesh (batch{keystr(path)}); got"
                f" {num_microbatches}."
            )


def examples_on_each_device(x: Any) -> int | None:
    """How many of an array's rows a device has, where its type says that they are sharded."""
    sharding = jax.typeof(x).sharding
    rows = sharding.spec[0] if len(sharding.spec) else None
    if rows is None:
        return None
    return len(x) // math.prod(sharding.mesh.shape[name] for name in axis_names(rows))


def check_key(label: str, key: Any) -> None:
    """Require one PRNG key, new or old."""
    dtype = getattr(key, "dtype", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_old = dtype == jnp.uint32 and jnp.ndim(key) == 1
    if not is_old and not (is_new and not jnp.ndim(key)):
        raise ValueError(f"{label} must be one PRNG key, got {_shapes(key)}.")


def check_arrays(name: str, tree: Any) -> None:
    """Require arrays and numbers."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not is_arraylike(leaf):
            raise ValueError(
                f"{name} must hold arrays and numbers; {name}{keystr(path)} is {leaf!r}."
            )


def check_aux(aux: Any, size: int) -> None:
    """Require scalars, which have a mean, and arrays with a row for each example."""
    for path, leaf in tree_flatten_with_path(aux)[0]:
        kinds = (jnp.number, jnp.bool_)
        has_mean = any(jnp.issubdtype(dtype_of(leaf), kind) for kind in kinds)
        if not jnp.ndim(leaf) and not has_mean:
            raise ValueError(
                "aux must hold scalars, which have a mean, and arrays with the example axis first;"
                f" aux{keystr(path)} is {leaf!r}."
            )
        if jnp.ndim(leaf) and len(leaf) != size:
            raise ValueError(
                "aux must hold scalars, and arrays with the example axis first;"
                f" aux{keystr(path)} has the shape {jnp.shape(leaf)} for a micro-batch of {size}."
            )


def check_shared_params(params: Any, axis_name: Any) -> None:
    """Require parameters that the devices along the axis share."""
    names = set(axis_names(axis_name))
    for path, leaf in tree_flatten_with_path(params)[0]:
        spec = getattr(getattr(leaf, "sharding", None), "spec", ())
        if any(names & set(axis_names(part)) for part in spec):
            raise ValueError(
                f"params must be the same on all devices along axis_name={axis_name!r};"
                f" params{keystr(path)} is sharded by {spec}. For parameters that this axis shards"
                " make the step without mesh= and axis_name=: XLA then gathers and reduces in each"
                " micro-step."
            )


def check_representations(representations: Any, size: int) -> None:
    """Require a row for each example."""
    if not jax.tree.leaves(representations):
        raise ValueError(
            "encode_fn must return arrays with a row for each example; got the empty"
            f" {representations!r}."
        )
    for path, leaf in tree_flatten_with_path(representations)[0]:
        if jnp.ndim(leaf) < 1 or len(leaf) != size:
            raise ValueError(
                "encode_fn must return arrays with a row for each example; of a micro-batch of"
                f" {size} it returns representations{keystr(path)} of shape {jnp.shape(leaf)}."
            )


def check_given(name: str, value: Any, is_expected: bool) -> None:
    """Require an argument of a train step where it was announced, and there alone."""
    if (value is not None) != is_expected:
        got = "none" if value is None else f"a {type(value).__name__}"
        raise ValueError(
            f"{name} must be passed to a step made with {name}=True, and to no other; got {got} and"
            f" {name}={is_expected}."
        )


def check_shared_prefix(states: Any) -> None:
    """Require that what sees the micro-gradients of each device holds no state."""
    for path, _ in tree_flatten_with_path(states)[0]:
        raise ValueError(
            "tx must hold no state before its accumulator on a mesh, where devices share it and"
            f" each sees gradients of its own; got opt_state{keystr(path)}. Let it stand after the"
            " accumulator."
        )


def check_no_keys(name: str, tree: Any) -> None:
    """Require arrays of which a mean or a maximum over devices can be taken."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            raise ValueError(
                f"{name} must hold no random keys, of which there is no mean over devices; {name}"
                f"{keystr(path)} is one. Make the step with rng=True, and pass it as rng=."
            )


def check_size(window_weight: Any, num_devices: int | None, axis_name: Any) -> None:
    """Require a state that was made for so many devices, or for no mesh."""
    if num_devices is None:
        if jnp.ndim(window_weight):
            raise ValueError(
                "opt_state must be that of a step without a mesh; got one for the"
                f" {jnp.size(window_weight)} devices of an axis_name. Make the step with mesh=."
            )
    elif jnp.shape(window_weight) != (num_devices,):
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


def weight(value: Any) -> Any:
    """What `weight_fn` returned, if anything."""
    if not is_arraylike(value):
        raise ValueError(f"weight_fn must return a real scalar, got {value!r}.")
    return value


def loss(value: Any) -> Any:
    """A real floating scalar."""
    is_floating = is_arraylike(value) and jnp.issubdtype(jnp.result_type(value), jnp.floating)
    if not is_floating or jnp.shape(value):
        raise ValueError(
            f"loss_fn's loss must be a real floating scalar, got {_shapes(value)}. (Where it may"
            " return a second value, an argument such as has_aux=True says so.)"
        )
    return value


def check_returned(name: str, new: Any, old: Any) -> None:
    """Require that `loss_fn` returns what it was given with its tree, shapes and dtypes."""
    check_kept(name, f"loss_fn must return the {name} with", "it was given", new, old)
    pairs = zip(tree_flatten_with_path(new)[0], jax.tree.leaves(old), strict=True)
    for (path, n), o in pairs:
        if spec_of(n) != spec_of(o):
            raise ValueError(
                f"loss_fn must return the {name} sharded as it was given, over axes of a mesh that"
                f" are explicit; {name}{keystr(path)} goes from {spec_of(o)} to {spec_of(n)}. Use"
                " jax.sharding.reshard."
            )


def check_kept(name: str, rule: str, origin: str, new: Any, old: Any) -> None:
    """Require the tree, the shapes and the dtypes of another."""
    new_leaves, new_def = tree_flatten_with_path(new)
    old_leaves, old_def = tree_flatten_with_path(old)
    if new_def != old_def:
        raise ValueError(f"{rule} the tree that {origin}, {old_def}; got {new_def}.")
    for (path, n), (_, o) in zip(new_leaves, old_leaves, strict=True):
        if jnp.shape(n) != jnp.shape(o) or dtype_of(n) != dtype_of(o):
            raise ValueError(
                f"{rule} the shapes and dtypes that {origin}; {name}{keystr(path)} goes from"
                f" {_shapes(o)} to {_shapes(n)}."
            )


def _shapes(tree: Any) -> str:
    """A value for a message: arrays by dtype and shape."""
    show = lambda x: f"{dtype_of(x)}{list(jnp.shape(x))}" if is_arraylike(x) else repr(x)
    return str(jax.tree.map(show, tree)).replace("'", "")
