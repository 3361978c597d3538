"""A ready train step: one compiled call for each micro-batch, on one device or on a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from optax_accum import _checks
from optax_accum._checks import PyTree
from optax_accum._components.averages import Averages, averaged_names
from optax_accum._components.step_metrics import StepMetrics
from optax_accum._core.chain import accumulator_of
from optax_accum._devices.sharding import state_specs
from optax_accum._in_call.loss_function import LossFunction
from optax_accum._train_step.micro_step import DeviceMicroStep, check_no_keys
from optax_accum._train_step.opt_state import accumulate_state
from optax_accum._train_step.placement import SHARED, Placement, placement_on

_METRICS = ("loss", "grad_norm", "micro_step", "gradient_step", "emitted")


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

    A call takes one micro-batch: it adds the gradient of `loss_fn` to the window of `tx`. At the
    boundary it applies the update, behind the gate. Off the boundary the parameters do not change,
    and no device waits for another.

    Args:
      loss_fn: `loss_fn(params[, model_state], batch[, rng])`, a real scalar: the mean loss of a
        micro-batch, or the summed loss if `tx` has `normalize="ratio"`. With `has_aux` it returns
        `(loss, aux)`, with `model_state` `(loss, new_state)`, with both `(loss, (new_state, aux))`.
      tx: What `accumulate` or `chain` returned. Its inner transformations receive the window's
        means of the loss, as `value=`, and of the scalars in a dict aux that `average_extra_args`
        names. On a mesh nothing before the accumulator may hold state.
      has_aux: Whether `loss_fn` also returns an aux, for the metrics.
      weight_fn: `weight_fn(batch)`, the weight of a micro-batch, such as the tokens in it. Default:
        its number of examples, the length of axis 0. On a mesh it sees the part of one device.
      rng: Whether `loss_fn` takes a key. Each micro-batch and each device gets its own, folded from
        the key of the call, so that one key serves a whole training.
      model_state: Whether `loss_fn` takes and returns a state that no gradient moves, such as the
        statistics of BatchNorm. A rejected micro-batch does not change it.
      mesh: The mesh to run on, if `tx` has an `axis_name`, which names one or several of its axes.
        Parameters are the same on all devices along them. XLA handles the other axes.

    Returns:
      `step`, with `opt_state = step.init(params)` and

          params, opt_state, metrics = step(params, opt_state, batch, *, rng=None, model_state=None)

      and with `model_state` a fourth value, the new one. On a mesh `batch` holds arrays with the
      example axis first, which the devices divide in order. On one device nothing is split: with
      `weight_fn`, or if a window is one micro-batch, `batch` is any tree (graphs, scalars, examples
      along another axis). Otherwise its arrays have the example axis first, whose length is the
      weight. `params` and `opt_state` are donated: go on with the returned ones. `metrics` holds

      - `loss`: float32 [], Σ wᵢ lossᵢ / Σ wᵢ of the last window that updated, over all devices;
        0 before the first. `emitted` tells whether this call closed it.
      - `grad_norm`: float32 [], the norm of that window's mean gradient as the inner
        transformations receive it, before they clip it; 0 before the first.
      - each name in `average_extra_args` except `value`: float32 [], the mean of that scalar of the
        aux, weighted as the loss is.
      - `micro_step`, `gradient_step`, `emitted`: those of the state after the call.
      - `aux`, with `has_aux`: that of this micro-batch; on a mesh it has a leading axis of devices.

      On a mesh each device updates a `model_state` of its own within a window, and the boundary
      takes the mean over devices. A call returns the mean of the last boundary.
      `step.flush(params, opt_state)` closes the open window now, and returns what a call returns.
      `step.lower(...)` takes the arguments of a call, for `testing.collectives`.

    Raises:
      TypeError: `tx` does not come from `accumulate` or `chain`.
      ValueError: An argument breaks its rule, here or in a call: for example `mesh` without
        `axis_name`, a batch that the devices do not divide, a state for another number of devices,
        or a key that is missing.

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
    _checks.check_function("loss_fn", loss_fn)
    _checks.check_callable("weight_fn", weight_fn)
    accumulator = accumulator_of(
        tx,
        "to have its updates applied behind the gate",
        "around it, write the step with tx.update and optax.apply_updates.",
    )
    averaged = averaged_names(accumulator)
    _check_averages(averaged, has_aux)
    placement = placement_on(mesh, accumulator.window.reduction.axis_name)
    # A step passes its loss in each call, and shows its mean.
    accumulator = accumulator.with_component(Averages(averaged | {"value"}, are_required=True))
    accumulator = accumulator.with_component(StepMetrics(averaged - {"value"}))
    loss = LossFunction(loss_fn, 0, has_aux, 1 if model_state else None, "model_state")
    micro_step = DeviceMicroStep(loss, accumulator, averaged - {"value"}, weight_fn, rng)
    return TrainStep(micro_step, placement)


class TrainStep:
    """A compiled micro-step, on one device or a mesh, as `make_train_step` returns it."""

    def __init__(self, micro_step: DeviceMicroStep, placement: Placement) -> None:
        self._micro_step = micro_step
        self._placement = placement
        init = placement.mapped(micro_step.accumulator.init, self._init_specs)
        run = placement.mapped(micro_step.run, self._run_specs)
        flush = placement.mapped(micro_step.flush, self._flush_specs)
        self._compiled_init = jax.jit(init)
        self._compiled = jax.jit(run, donate_argnums=(0, 1))
        self._compiled_flush = jax.jit(flush, donate_argnums=(0, 1))

    def init(self, params: optax.Params, model_state: Any = None) -> optax.OptState:
        """Make the optimizer state.

        Args:
          params: Tree of parameters.
          model_state: The model state that training starts with. On a mesh the optimizer state then
            holds that of each device, as a state to restore into must; else the first call adds it.

        Returns:
          The state of `tx`, with the metrics of the last window.

        Raises:
          ValueError: An argument breaks its rule.
        """
        _checks.check_not_overwritten(
            params, "params", _checks.OVERWRITE_AS_STATE.format(name="model_state")
        )
        _checks.check_model(params, "params")
        if model_state is not None:
            self._check_model_state(model_state)
            check_no_keys("model_state", model_state)
        self._placement.check_params(params)
        opt_state = self._compiled_init(self._placement.shared(params))
        return self._placed_state(opt_state, model_state)

    def __call__(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        *,
        rng: jax.Array | None = None,
        model_state: Any = None,
    ) -> tuple:
        """Run a micro-step; `make_train_step` says what it takes and returns."""
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
        """Lower a micro-step for the arguments of a call, as `jax.jit(...).lower` does."""
        return self._compiled.lower(*self._arguments(params, opt_state, batch, rng, model_state))

    def flush(
        self, params: optax.Params, opt_state: optax.OptState, *, model_state: Any = None
    ) -> tuple:
        """Close the open window now, on the mean of what it holds.

        Args:
          params: Tree of parameters, donated.
          opt_state: State of the optimizer, donated.
          model_state: The model state, if the step has one.

        Returns:
          What a call returns, without `aux`. If the window is empty, only `emitted` changes.

        Raises:
          ValueError: An argument breaks its rule, as in a call.
        """
        _checks.check_model(params, "params")
        self._check_model_state(model_state)
        return self._compiled_flush(
            self._placement.shared(params),
            self._placed_state(opt_state, model_state),
            self._placement.shared(model_state),
        )

    def _arguments(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: PyTree,
        rng: jax.Array | None,
        model_state: PyTree,
    ) -> tuple[PyTree, ...]:
        """The arguments of a micro-step, checked and on their devices."""
        _checks.check_model(params, "params")
        _check_given("rng", rng, self._micro_step.rng)
        self._check_model_state(model_state)
        _checks.check_leaves(batch, "batch")
        self._placement.check_batch(batch)
        return (
            self._placement.shared(params),
            self._placed_state(opt_state, model_state),
            self._placement.split(batch),
            self._placement.shared(rng),
            self._placement.shared(model_state),
        )

    def _check_model_state(self, model_state: PyTree) -> None:
        _check_given("model_state", model_state, self._micro_step.model_state)

    def _placed_state(self, opt_state: Any, model_state: PyTree) -> Any:
        """The state on its devices."""
        if StepMetrics.name not in accumulate_state(opt_state).extras:
            raise ValueError(
                "opt_state must come from step.init(params), which has room for what the step"
                " shows; got one as tx.init makes it."
            )
        return self._placement.state(opt_state, model_state)

    def _init_specs(self, params: PyTree) -> tuple[PyTree, PyTree]:
        state = jax.eval_shape(self._micro_step.accumulator.init, params)
        if type(state) is tuple:
            _check_shared_prefix(state[:-1])
        return (SHARED,), state_specs(state, self._micro_step.axis_name)

    def _flush_specs(
        self, params: PyTree, opt_state: Any, model_state: PyTree
    ) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
        del params, model_state
        specs = state_specs(opt_state, self._micro_step.axis_name)
        names = (*_METRICS, *self._micro_step.averaged_aux)
        out = (SHARED, specs, dict.fromkeys(names, SHARED))
        if self._micro_step.model_state:
            out = (*out, SHARED)
        return (SHARED, specs, SHARED), out

    def _run_specs(
        self, params: PyTree, opt_state: Any, batch: PyTree, rng: PyTree, model_state: PyTree
    ) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
        del batch, rng
        (_, specs, _), (_, _, metrics, *new) = self._flush_specs(params, opt_state, model_state)
        own = PartitionSpec(self._micro_step.axis_name)  # each device's part, on the first axis
        if self._micro_step.loss_fn.has_aux:
            metrics = {**metrics, "aux": own}
        return (SHARED, specs, own, SHARED, SHARED), (SHARED, specs, metrics, *new)


def _check_averages(names: frozenset[str], has_aux: bool) -> None:
    """Require that the loss and the aux have all that `tx` averages, under free names."""
    if names - {"value"} and not has_aux:
        raise ValueError(
            "average_extra_args of tx may name 'value', the loss, and in a train step with"
            f" has_aux=True scalars of its aux; got {sorted(names)} and has_aux=False."
        )
    if names & {*_METRICS, "aux"}:
        raise ValueError(
            f"average_extra_args of tx must not name what a train step shows anyway, {_METRICS};"
            f" got {sorted(names)}. Give the scalar another name in the aux."
        )


def _check_given(name: str, value: Any, is_expected: bool) -> None:
    """Require an argument of a call if, and only if, the step was made for it."""
    if (value is not None) != is_expected:
        got = "none" if value is None else f"a {type(value).__name__}"
        raise ValueError(
            f"{name} must be passed to a step made with {name}=True, and to no other; got {got} and"
            f" {name}={is_expected}."
        )


def _check_shared_prefix(states: Any) -> None:
    """Require that nothing before the accumulator holds state."""
    for path, _ in tree_flatten_with_path(states)[0]:
        raise ValueError(
            "tx must hold no state before its accumulator on a mesh, where devices share the state"
            f" and each has gradients of its own; got opt_state{keystr(path)}. Put that"
            " transformation after the accumulator."
        )
