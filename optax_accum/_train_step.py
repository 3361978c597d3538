"""A ready train step: one compiled call for each micro-batch, on one device or on a mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_accum import _call_validation, _validation
from optax_accum._axis import axis_names
from optax_accum._chain import accumulator_in, accumulator_of
from optax_accum._loss_function import LossFunction
from optax_accum._micro_step import MicroStep, accumulate_state, applying, with_extras
from optax_accum._sharding import state_specs

_METRICS = ("loss", "grad_norm", "micro_step", "gradient_step", "emitted")
_SHARED = PartitionSpec()  # the same on all devices


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    weight_fn: Callable[[Any], jax.typing.ArrayLike] | None = None,
    rng: bool = False,
    model_state: bool = False,
    mesh: Mesh | None = None,
) -> "TrainStep":
    """Make a compiled micro-step of a training loop.

    A call takes one micro-batch: the gradient of `loss_fn`, its part in the window of `tx`, and at
    the boundary the update, which is applied behind the gate. Off the boundary nothing touches the
    parameters, and no device waits for another.

    Args:
      loss_fn: `loss_fn(params[, model_state], batch[, rng])`, the mean loss of a micro-batch, or
        what the `normalize` of `tx` asks for; a real scalar. With `has_aux` it returns
        `(loss, aux)`, with `model_state` `(loss, new_state)`, with both
        `(loss, (new_state, aux))`.
      tx: What `accumulate` or `chain` returned. What it runs once per window also gets the
        window's mean loss, as `value=`, and of an aux that is a dict the means of the scalars that
        `average_extra_args` names. On a mesh nothing with a state may stand before the accumulator.
      has_aux: Whether `loss_fn` returns something to hand out.
      weight_fn: `weight_fn(batch)`, the weight of a micro-batch: the tokens in it, say. Default:
        its number of examples, the length of axis 0. It sees the part of one device.
      rng: Whether `loss_fn` takes a key. Each micro-batch and each device gets its own, folded from
        the key of the call, so that one key serves a whole training.
      model_state: Whether `loss_fn` takes and returns a state that no gradient moves: the
        statistics of BatchNorm. A rejected micro-batch does not change it.
      mesh: The devices to run on, where `tx` has an `axis_name`: an axis of this mesh, or several.
        Parameters are the same on all of them. Over axes of other names XLA shards as it likes.

    Returns:
      `step`, with `opt_state = step.init(params)` and

          params, opt_state, metrics = step(params, opt_state, batch, *, rng=None, model_state=None)

      and with `model_state` a fourth value, the new one. On a mesh all in `batch` are arrays with
      the example axis first, which the devices share out between them as it lies. On one device
      nothing is split: with `weight_fn`, or where a window is one micro-batch, `batch` is any tree
      (graphs, scalars, the examples along another axis); else its arrays have the example axis
      first, from which the weight is taken. `params` and `opt_state` are donated: use what is
      returned. `metrics` is a dict of

      - `loss`: float32 [], Σ wᵢ lossᵢ / Σ wᵢ of the last window that updated, over all devices;
        0 before the first. `emitted` tells whether this call closed it.
      - `grad_norm`: float32 [], the norm of that window's mean gradient as the inner
        transformations receive it, before they clip it; 0 before the first.
      - each name of `average_extra_args` but `value`: float32 [], the mean of that scalar of the
        aux, weighted as the loss is.
      - `micro_step`, `gradient_step`, `emitted`: of the state after the call.
      - `aux`: of this micro-batch; on a mesh with a leading axis of devices.

      On a mesh each device's `model_state` goes its own way within a window; the boundary takes
      the mean over devices, and the state that is returned is that of the last boundary.

      `step.flush(params, opt_state)` closes a short window, and returns what a call does.
      `step.lower(...)` takes the arguments of a call, for `testing.collectives`.

    Raises:
      TypeError: `tx` does not come from `accumulate` or `chain`.
      ValueError: An argument breaks its rule: `mesh` without `axis_name`, or the other way round;
        a mesh without that axis; a batch without an example, without the example axis where that
        is needed, or that the devices do not divide; a state of another number of devices; a key
        or a model state that is missing, or too many.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate, chain
      >>> step = make_train_step(
      ...     lambda w, x: jnp.mean((x - w) ** 2), chain(accumulate(2), optax.sgd(0.25))
      ... )
      >>> params = jnp.zeros([])
      >>> opt_state = step.init(params)
      >>> for batch in (jnp.array([1.0, 3.0]), jnp.array([5.0])):
      ...     params, opt_state, metrics = step(params, opt_state, batch)
      ...     print(params, metrics["loss"], metrics["emitted"])
      0.0 0.0 False
      1.5 11.666667 True
    """
    _validation.check_function("loss_fn", loss_fn)
    _validation.check_callable("weight_fn", weight_fn)
    accumulator = accumulator_of(
        tx,
        "to have its updates applied behind the gate",
        "around it, write the step with tx.update and optax.apply_updates.",
    )
    gathering = accumulator.gathering
    _call_validation.check_averages_of_step(gathering.averaged, _METRICS, has_aux)
    _call_validation.check_mesh(mesh, gathering.axis_name)
    tx = accumulator.wrapped(functools.partial(applying, monitor=gathering.monitor), ("value",))
    accumulator = accumulator_in(tx)
    assert accumulator is not None
    loss = LossFunction(loss_fn, 0, has_aux, 1 if model_state else None, "model_state")
    return TrainStep(MicroStep(loss, accumulator, tx.init, tx.update, weight_fn, rng), mesh)


class TrainStep:
    """What `make_train_step` returns: its micro-step, compiled, on the devices of a mesh."""

    def __init__(self, micro_step: MicroStep, mesh: Mesh | None):
        self._micro_step = micro_step
        self._axis_name = micro_step.accumulator.gathering.axis_name
        self._own = PartitionSpec(self._axis_name)  # each device's part, along the first axis
        self._mesh = mesh
        self._devices = set() if mesh is None else set(mesh.devices.flat)
        self._compiled_init = jax.jit(self._on_devices(micro_step.init, self._init_specs))
        self._compiled = jax.jit(
            self._on_devices(micro_step.run, self._run_specs), donate_argnums=(0, 1)
        )
        self._compiled_flush = jax.jit(
            self._on_devices(micro_step.flush, self._flush_specs), donate_argnums=(0, 1)
        )

    def init(self, params: optax.Params, model_state: Any = None) -> optax.OptState:
        """Make the optimizer state.

        Args:
          params: Tree of parameters.
          model_state: On a mesh with `model_state`, the one that training starts with. The state
            then has room for each device's own at once, as a state to restore into needs it;
            otherwise the first call makes it.

        Returns:
          The state of `tx`, with what a call shows of the last window.
        """
        _validation.check_not_overwritten(
            params, "params", _validation.OVERWRITE_AS_STATE.format(name="model_state")
        )
        _validation.check_model(params, "params")
        if model_state is not None:
            self._check_model_state(model_state)
            _call_validation.check_no_keys("model_state", model_state)
        if self._mesh is not None:
            _call_validation.check_shared_params(params, self._axis_name)
        return self._state_on_mesh(self._compiled_init(self._on_mesh(params)), model_state)

    def __call__(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        *,
        rng: jax.Array | None = None,
        model_state: Any = None,
    ) -> tuple:
        """Run a micro-step: see `make_train_step`."""
        return self._compiled(*self._arguments(params, opt_state, batch, rng, model_state))

    def lower(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        *,
        rng: jax.Array | None = None,
        model_state: Any = None,
    ) -> jax.stages.Lowered:
        """Lower a micro-step, as the `lower` of a jitted function does."""
        return self._compiled.lower(*self._arguments(params, opt_state, batch, rng, model_state))

    def flush(
        self, params: optax.Params, opt_state: optax.OptState, *, model_state: Any = None
    ) -> tuple:
        """Close the open window now, on the mean of what it holds.

        Args:
          params: Tree of parameters, donated.
          opt_state: State of the optimizer, donated.
          model_state: As in a call.

        Returns:
          What a call returns, without `aux`. An empty window changes nothing.
        """
        _validation.check_model(params, "params")
        self._check_model_state(model_state)
        return self._compiled_flush(
            self._on_mesh(params),
            self._state_on_mesh(opt_state, model_state),
            self._on_mesh(model_state),
        )

    @property
    def _metrics(self):
        return *_METRICS, *self._micro_step.averaged_aux

    def _arguments(self, params, opt_state, batch, rng, model_state):
        _validation.check_model(params, "params")
        _call_validation.check_given("rng", rng, self._micro_step.rng)
        self._check_model_state(model_state)
        _validation.check_leaves(batch, "batch")
        if self._mesh is not None:
            num_examples = _call_validation.check_batch(batch)
            _call_validation.check_divides(num_examples, self._num_devices(), self._axis_name)
        return (
            self._on_mesh(params),
            self._state_on_mesh(opt_state, model_state),
            self._split(batch),
            self._on_mesh(rng),
            self._on_mesh(model_state),
        )

    def _check_model_state(self, model_state):
        _call_validation.check_given("model_state", model_state, self._micro_step.model_state)

    def _state_on_mesh(self, opt_state, model_state):
        """The state on its devices, with room for the model state that each has within a window."""
        state = accumulate_state(opt_state)
        _call_validation.check_made_by_step(state.extras)
        size = None if self._mesh is None else self._num_devices()
        _call_validation.check_size(state.window_weight, size, self._axis_name)
        if self._mesh is None:
            return opt_state
        is_placed = self._is_split(state.window_weight)
        if model_state is not None and "model_state" not in state.extras:
            own = jax.tree.map(functools.partial(_stacked, size), model_state)
            opt_state, is_placed = with_extras(opt_state, model_state=own), False
        if is_placed:
            return opt_state
        specs = state_specs(opt_state, self._axis_name)
        place = lambda x, spec: self._split(x) if spec == self._own else self._on_mesh(x)
        return jax.tree.map(place, opt_state, specs)

    def _on_mesh(self, tree):
        """What is not on the devices of the mesh yet goes there: it could not be donated else."""
        if self._mesh is None:
            return tree
        sharding = NamedSharding(self._mesh, _SHARED)

        def is_there(x):
            if isinstance(x, Tracer | jax.ShapeDtypeStruct):
                return True
            return isinstance(x, jax.Array) and x.sharding.device_set == self._devices

        return jax.tree.map(lambda x: x if is_there(x) else jax.device_put(x, sharding), tree)

    def _split(self, tree):
        """Arrays shared out between the devices along their first axis, where they are not yet."""
        if self._mesh is None:
            return tree
        sharding = NamedSharding(self._mesh, self._own)
        place = lambda x: x if self._is_split(x) else jax.device_put(x, sharding)
        return jax.tree.map(place, tree)

    def _is_split(self, x):
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            return True
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self._mesh:
            return False
        spec = sharding.spec
        return len(spec) > 0 and axis_names(spec[0]) == axis_names(self._axis_name)

    def _num_devices(self):
        assert self._mesh is not None
        return math.prod(self._mesh.shape[name] for name in axis_names(self._axis_name))

    def _on_devices(self, function, specs):
        """`function` on each device, with its part of batch and state; or on the one device."""
        if self._mesh is None:
            return function

        def mapped(*args):
            in_specs, out_specs = specs(*args)
            # Along other axes of the mesh, XLA shards.
            return jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(axis_names(self._axis_name)),
            )(*args)

        return mapped

    def _init_specs(self, params):
        state = jax.eval_shape(self._micro_step.init, params)
        if type(state) is tuple:
            _call_validation.check_shared_prefix(state[:-1])
        return (_SHARED,), state_specs(state, self._axis_name)

    def _flush_specs(self, params, opt_state, model_state):
        specs = state_specs(opt_state, self._axis_name)
        out = (_SHARED, specs, dict.fromkeys(self._metrics, _SHARED))
        if self._micro_step.model_state:
            out = (*out, _SHARED)
        return (_SHARED, specs, _SHARED), out

    def _run_specs(self, params, opt_state, batch, rng, model_state):
        (_, specs, _), (_, _, metrics, *new) = self._flush_specs(params, opt_state, model_state)
        if self._micro_step.loss_fn.has_aux:
            metrics = {**metrics, "aux": self._own}
        in_specs = (_SHARED, specs, self._own, _SHARED, _SHARED)
        return in_specs, (_SHARED, specs, metrics, *new)


def _stacked(size, x):
    """One for each device."""
    shape = (size, *jnp.shape(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return jnp.broadcast_to(x, shape)
