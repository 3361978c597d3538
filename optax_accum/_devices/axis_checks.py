"""Checks by type: over which mapped axes the arrays that a window gathers vary."""

from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import PyTree
from optax_accum._core.internals import unreduced_over, varying_over
from optax_accum._devices.axis import AxisName, are_types_checked, axis_names


def check_local(name: str, tree: Any, axis_name: AxisName) -> None:
    """Require gradients that have not been summed over the axis, if types are checked."""
    if not are_types_checked(axis_name):
        return
    for path, leaf in tree_flatten_with_path(tree)[0]:
        shared = [axis for axis in axis_names(axis_name) if axis not in varying_over(leaf)]
        if shared:
            raise ValueError(
                f"{name} must differ from device to device, and {name}{keystr(path)} does not vary"
                f" over the axis {shared[0]!r}: differentiated with respect to parameters that all"
                " devices share, it has been summed over them in this micro-step already, and"
                " would count once more for each device. Differentiate with respect to"
                f" optax_accum.varying(params, {axis_name!r})."
            )


def check_loss_is_local(name: str, loss: Any, axis_name: AxisName) -> None:
    """Require a loss that has not been averaged over the axis, if types are checked."""
    missing = set(axis_names(axis_name)) - varying_over(loss)
    if missing and are_types_checked(axis_name):
        raise ValueError(
            f"{name} must return the loss of its own device, and its loss does not vary over the"
            f" axis {min(missing, key=str)!r}. After lax.pmean each device would have its share of"
            " the gradient, too small by the number of devices: return the loss without lax.pmean,"
            " since the boundary takes the mean."
        )


def check_shared(name: str, value: Any, axis_name: AxisName) -> None:
    """Require a value that is the same on all devices, if types are checked."""
    if are_types_checked(axis_name) and set(axis_names(axis_name)) & varying_over(value):
        raise ValueError(
            f"{name} must be the same on all devices, or some would wait for the others for ever;"
            f" got one that varies over the axis {axis_name!r}."
        )


def check_reduced(name: str, tree: Any) -> None:
    """Require arrays whose types are not unreduced: no sum over devices is still to be taken."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if unreduced_over(leaf):
            axis = min(unreduced_over(leaf), key=str)
            raise ValueError(
                f"{name} must be reduced, and {name}{keystr(path)} is unreduced over the axis"
                f" {axis!r}, a type that no window can hold. Reduce it in each micro-step,"
                " jax.sharding.reshard(gradients, the PartitionSpecs of the parameters), or once"
                " per window: inside jax.shard_map, differentiate with respect to"
                f" optax_accum.varying(params, {axis!r}) and pass axis_name={axis!r} to accumulate."
            )


def check_reduced_over(
    axis_name: AxisName | None,
    gradients: PyTree,
    before: PyTree,
    total: PyTree,
    weight: Any,
    sums: dict[str, PyTree],
    weight_name: str = "weight",
) -> None:
    """Require a window that varies only over the axes of its state and those of `axis_name`.

    Args:
      axis_name: The axes that the boundary reduces over.
      gradients: Those of a micro-step.
      before: The sums of gradients before it; parameters or None where the state has no sums.
      total: The sums of gradients after it.
      weight: The sum of weights after it.
      sums: The components' sums after it.
      weight_name: The name of the weight in errors.
    """
    if jax.tree.structure(before) != jax.tree.structure(total):
        return
    names = () if axis_name is None else axis_names(axis_name)
    owns = list(map(varying_over, jax.tree.leaves(before)))
    leaves = zip(tree_flatten_with_path(gradients)[0], owns, strict=True)
    found = [
        (f"gradients{keystr(path)}", varying_over(leaf) - own, "pmean(gradients")
        for (path, leaf), own in leaves
    ]
    leaves = zip(jax.tree.leaves(total), owns, strict=True)
    weighted = frozenset[Any]().union(*(varying_over(leaf) - own for leaf, own in leaves))
    weighted |= varying_over(weight).difference(*owns)
    found.append((weight_name, weighted, f"psum({weight_name}"))
    for path, leaf in tree_flatten_with_path(sums)[0]:
        # Sums of averaged extra args stand under their names; all others depend on `value` alone.
        name = path[1].key if len(path) > 2 else "value"
        found.append((name, varying_over(leaf).difference(*owns), f"pmean({name}"))
    for name, axes, remedy in found:
        for axis in sorted(axes.difference(names), key=str):
            raise ValueError(
                f"{name} varies over the axis {axis!r}, over which axis_name={axis_name!r} does"
                " not reduce, and the window must be the same on all devices of that axis. Pass"
                f" axis_name={(*names, axis) if names else axis!r} to accumulate, or reduce in each"
                f" micro-step, jax.lax.{remedy}, {axis!r}). For a window of its own on each device,"
                f" make the state from optax_accum.varying(params, {axis!r})."
            )


def check_summable(gradients: Any, weight: Any) -> None:
    """Require gradients that vary over the axes of the weight, so that their sum has their type."""
    check_reduced("gradients", gradients)
    for path, leaf in tree_flatten_with_path(gradients)[0]:
        axes = varying_over(weight) - varying_over(leaf)
        if axes:
            axis = min(axes, key=str)
            raise ValueError(
                f"weight_fn returns a weight that varies over the axis {axis!r}, and"
                f" gradients{keystr(path)} does not: differentiated with respect to parameters that"
                " all devices share, it is summed over them in each micro-batch, before it is"
                f" weighted. Differentiate with respect to optax_accum.varying(params, {axis!r})."
            )


def check_carried(name: str, carry: Any, new_carry: Any) -> None:
    """Require that `loss_fn` returns a carry that varies over no more axes than it was given."""
    pairs = zip(tree_flatten_with_path(carry)[0], jax.tree.leaves(new_carry), strict=True)
    for (path, old), new in pairs:
        axes = varying_over(new) - varying_over(old)
        if axes:
            axis = min(axes, key=str)
            raise ValueError(
                f"{name} must have the type that loss_fn returns it with, and {name}{keystr(path)}"
                f" comes back varying over the axis {axis!r}, since each device changes it by"
                f" itself. Pass optax_accum.varying(carry, {axis!r})."
            )
