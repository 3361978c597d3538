"""The devices that hold the arrays of a train step and run it: one, or those of a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum._checks import PyTree
from optax_accum._core.state import LocalState
from optax_accum._devices.axis import AxisName, axis_names
from optax_accum._devices.sharding import state_specs
from optax_accum._in_call.batches import check_batch
from optax_accum._train_step.opt_state import accumulate_state, with_extras

SHARED = PartitionSpec()  # the same on all devices

# The specs of a function's arguments, and those of its results.
SpecsOf = Callable[..., tuple[PyTree, PyTree]]


class Placement(Protocol):
    """The devices of a train step."""

    def check_params(self, params: PyTree) -> None:
        """Raise if the parameters are split over these devices."""
        ...

    def check_batch(self, batch: PyTree) -> None:
        """Raise if these devices cannot divide the batch."""
        ...

    def shared(self, tree: PyTree) -> PyTree:
        """Put a tree on the devices, the same on all of them."""
        ...

    def split(self, tree: PyTree) -> PyTree:
        """Put a tree on the devices, its arrays split along their first axis."""
        ...

    def state(self, opt_state: Any, model_state: PyTree) -> Any:
        """Put a state on the devices, with each device's model state if there is one."""
        ...

    def mapped(self, function: Callable[..., Any], specs_of: SpecsOf) -> Callable[..., Any]:
        """Run a function on each device, with specs of its arguments and results."""
        ...


def placement_on(mesh: Any, axis_name: AxisName | None) -> Placement:
    """The devices of a mesh along the axis that `tx` reduces over; one device without both."""
    _check_mesh(mesh, axis_name)
    return OneDevicePlacement() if mesh is None else MeshPlacement(mesh, axis_name)


class OneDevicePlacement:
    """The `Placement` without a mesh: arrays stay where they are, on one device or sharded."""

    def check_params(self, params: PyTree) -> None:
        del params

    def check_batch(self, batch: PyTree) -> None:
        del batch

    def shared(self, tree: PyTree) -> PyTree:
        return tree

    def split(self, tree: PyTree) -> PyTree:
        return tree

    def state(self, opt_state: Any, model_state: PyTree) -> Any:
        del model_state
        window_weight = accumulate_state(opt_state).window_weight
        if jnp.ndim(window_weight):
            raise ValueError(
                "opt_state must be that of a step without a mesh; got one for the"
                f" {jnp.size(window_weight)} devices of an axis_name. Make the step with mesh=."
            )
        return opt_state

    def mapped(self, function: Callable[..., Any], specs_of: SpecsOf) -> Callable[..., Any]:
        del specs_of
        return function


@dataclasses.dataclass(frozen=True, eq=False)
class MeshPlacement:
    """The `Placement` on the devices along an axis of a mesh, or several."""

    mesh: Mesh
    axis_name: AxisName

    @property
    def spec(self) -> PartitionSpec:
        """The spec of an array whose first axis is split over the devices."""
        return PartitionSpec(self.axis_name)

    @functools.cached_property
    def num_devices(self) -> int:
        """The devices along the axis."""
        return math.prod(self.mesh.shape[name] for name in axis_names(self.axis_name))

    @functools.cached_property
    def _shared(self) -> NamedSharding:
        return NamedSharding(self.mesh, SHARED)

    @functools.cached_property
    def _split(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    def check_params(self, params: PyTree) -> None:
        names = set(axis_names(self.axis_name))
        for path, leaf in tree_flatten_with_path(params)[0]:
            spec = getattr(getattr(leaf, "sharding", None), "spec", ())
            if any(names & set(axis_names(part)) for part in spec):
                raise ValueError(
                    f"params must be the same on all devices along axis_name={self.axis_name!r};"
                    f" params{keystr(path)} is sharded by {spec}. For parameters that this axis"
                    " shards make the step without mesh= and axis_name=: XLA then gathers and"
                    " reduces in each micro-step."
                )

    def check_batch(self, batch: PyTree) -> None:
        num_examples = check_batch(batch)
        if num_examples % self.num_devices:
            raise ValueError(
                f"batch must hold a number of examples that the {self.num_devices} devices along"
                f" axis_name={self.axis_name!r} divide, got {num_examples}. Fill it up, and give"
                " what fills it the weight 0 in loss_fn and weight_fn."
            )

    def shared(self, tree: PyTree) -> PyTree:
        """Move arrays to the mesh; donation requires it."""

        def place(x: Any) -> Any:
            return x if self._is_on_mesh(x) else jax.device_put(x, self._shared)

        return jax.tree.map(place, tree)

    def split(self, tree: PyTree) -> PyTree:
        def place(x: Any) -> Any:
            return x if self._is_split(x) else jax.device_put(x, self._split)

        return jax.tree.map(place, tree)

    def state(self, opt_state: Any, model_state: PyTree) -> Any:
        state = accumulate_state(opt_state)
        self._check_num_devices(state.window_weight)
        is_placed = self._is_split(state.window_weight)
        if model_state is not None and "model_state" not in state.extras:
            own = jax.tree.map(self._stacked, model_state)
            opt_state = with_extras(opt_state, model_state=LocalState(own))
            is_placed = False
        if is_placed:
            return opt_state

        def place(x: Any, spec: PartitionSpec) -> Any:
            return self.split(x) if spec == self.spec else self.shared(x)

        return jax.tree.map(place, opt_state, state_specs(opt_state, self.axis_name))

    def mapped(self, function: Callable[..., Any], specs_of: SpecsOf) -> Callable[..., Any]:
        def on_each_device(*args: Any) -> Any:
            in_specs, out_specs = specs_of(*args)
            # XLA handles the other axes of the mesh.
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(axis_names(self.axis_name)),
            )(*args)

        return on_each_device

    def _is_on_mesh(self, x: Any) -> bool:
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            return True
        return isinstance(x, jax.Array) and x.sharding.device_set == self._shared.device_set

    def _is_split(self, x: Any) -> bool:
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            return True
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return False
        spec = sharding.spec
        return len(spec) > 0 and axis_names(spec[0]) == axis_names(self.axis_name)

    def _stacked(self, x: Any) -> Any:
        """One copy of an array for each device."""
        shape = (self.num_devices, *jnp.shape(x))
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return jnp.broadcast_to(x, shape)

    def _check_num_devices(self, window_weight: Any) -> None:
        """Require a state that was made for this number of devices."""
        if jnp.shape(window_weight) != (self.num_devices,):
            raise ValueError(
                f"opt_state must be that of the {self.num_devices} devices along"
                f" axis_name={self.axis_name!r}; got one for {jnp.size(window_weight)}. Carry it"
                f" over with optax_accum.reshard_window(opt_state, {self.num_devices})."
            )


def _check_mesh(mesh: Any, axis_name: AxisName | None) -> None:
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
