"""`chain`, an `optax.chain` with an accumulator in it, and `flush`, which closes its window."""

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import optax

from optax_accum import _checks
from optax_accum._checks import PyTree
from optax_accum._core.component import Component
from optax_accum._core.state_checks import refuse_nested

if TYPE_CHECKING:
    from optax_accum._core.accumulator import WindowAccumulator
    from optax_accum._core.boundary import Finish


class Accumulator(abc.ABC):
    """What makes the transformation of `accumulate` or `chain`: its bound `init` and `update`."""

    @property
    @abc.abstractmethod
    def window(self) -> "WindowAccumulator":
        """The accumulator of an `accumulate`: this one, or the last element of this chain."""

    @abc.abstractmethod
    def init(self, params: optax.Params) -> Any:
        """Make the state."""

    @abc.abstractmethod
    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        """Take a micro-step."""

    @abc.abstractmethod
    def step(
        self,
        gradients: optax.Updates,
        state: Any,
        params: optax.Params | None,
        extra_args: dict[str, Any],
        weight: Any = None,
        flush: Any = False,
        finish: "Finish | None" = None,
    ) -> tuple[PyTree, Any, PyTree]:
        """Take a micro-step: updates, the new state, and what `finish` returned."""

    @abc.abstractmethod
    def close_now(
        self,
        state: Any,
        params: optax.Params,
        extra_args: dict[str, Any],
        finish: "Finish | None" = None,
    ) -> tuple[PyTree, Any, PyTree]:
        """Close the open window without a micro-step; returns what `step` does."""

    @abc.abstractmethod
    def followed_by(self, *transforms: optax.GradientTransformation) -> "Accumulator":
        """The same accumulator with more transformations behind its gate."""

    @abc.abstractmethod
    def with_component(self, component: Component) -> "Accumulator":
        """The same accumulator with one more component, which replaces one of the same name."""

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation of this accumulator."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)


def accumulator_in(tx: optax.GradientTransformation) -> Accumulator | None:
    """The accumulator of what `accumulate` or `chain` returned; None for any other `tx`."""
    owner = getattr(tx.update, "__self__", None)
    return owner if isinstance(owner, Accumulator) else None


def accumulator_of(tx: Any, purpose: str, remedy: str) -> Accumulator:
    """The accumulator of `tx`, which must have one; `purpose` and `remedy` are for the error."""
    accumulator = accumulator_in(tx) if isinstance(tx, optax.GradientTransformation) else None
    if accumulator is None:
        raise TypeError(
            f"tx must come from optax_accum.accumulate or optax_accum.chain {purpose}, got"
            f" {type(tx).__name__}; {remedy}"
        )
    return accumulator


def chain(*transforms: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Chain transformations so that all after an `accumulate(k)` run once per window.

    `chain(a, accumulate(k), b, c)` is `optax.chain(a, accumulate(k, b, c))`: `a` sees the gradient
    of every micro-step, `b` and `c` see one mean per window.

    Args:
      *transforms: Transformations in the order in which they are applied.

    Returns:
      A `GradientTransformationExtraArgs`, with the state of the `optax.chain` above. Without an
      accumulator it is `optax.chain(*transforms)`.

    Raises:
      ValueError: An argument is no gradient transformation, or a second accumulator follows the
        first.

    Example:
      After the accumulator the mean of the window is clipped, before it each micro-gradient.

      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate
      >>> clip = optax.clip_by_global_norm(1.0)
      >>> for tx in (chain(accumulate(2), clip), chain(clip, accumulate(2))):
      ...     state = tx.init(jnp.zeros(2))
      ...     _, state = tx.update(jnp.array([3.0, 0.0]), state)
      ...     mean, state = tx.update(jnp.array([-3.0, 4.0]), state)
      ...     print(mean.round(6))
      [0. 1.]
      [0.2 0.4]
    """
    _checks.check_transforms("transforms", transforms)
    for index, transform in enumerate(transforms):
        accumulator = accumulator_in(transform)
        if accumulator is not None:
            before, after = transforms[:index], transforms[index + 1 :]
            last = accumulator.followed_by(*after) if after else accumulator
            return ChainedAccumulator(before, last).transformation()
    return optax.chain(*transforms)


@dataclasses.dataclass(frozen=True, eq=False)
class ChainedAccumulator(Accumulator):
    """Transformations that see each micro-gradient, and an accumulator after them."""

    before: tuple[optax.GradientTransformation, ...]
    last: Accumulator

    @property
    def window(self) -> "WindowAccumulator":
        return self.last.window

    @functools.cached_property
    def _whole(self) -> optax.GradientTransformationExtraArgs:
        return optax.chain(*self.before, self.last.transformation())

    def init(self, params: optax.Params) -> Any:
        return self._whole.init(params)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        return self._whole.update(updates, state, params, **extra_args)

    def step(
        self,
        gradients: optax.Updates,
        state: Any,
        params: optax.Params | None,
        extra_args: dict[str, Any],
        weight: Any = None,
        flush: Any = False,
        finish: "Finish | None" = None,
    ) -> tuple[PyTree, Any, PyTree]:
        states: Any = state[:-1]
        if self.before:
            prefix = optax.chain(*self.before)
            gradients, states = prefix.update(gradients, states, params, **extra_args)
        updates, last, finished = self.last.step(
            gradients, state[-1], params, extra_args, weight, flush, finish
        )
        return updates, (*states, last), finished

    def close_now(
        self,
        state: Any,
        params: optax.Params,
        extra_args: dict[str, Any],
        finish: "Finish | None" = None,
    ) -> tuple[PyTree, Any, PyTree]:
        updates, last, finished = self.last.close_now(state[-1], params, extra_args, finish)
        return updates, (*state[:-1], last), finished

    def followed_by(self, *transforms: optax.GradientTransformation) -> Accumulator:
        return dataclasses.replace(self, last=self.last.followed_by(*transforms))

    def with_component(self, component: Component) -> Accumulator:
        return dataclasses.replace(self, last=self.last.with_component(component))


def check_nest_none(transforms: tuple[optax.GradientTransformation, ...]) -> None:
    """Require transformations that are no accumulators."""
    if any(accumulator_in(transform) is not None for transform in transforms):
        refuse_nested("inner")


def inner_of(
    transforms: tuple[optax.GradientTransformation, ...],
) -> optax.GradientTransformationExtraArgs:
    """The transformations that an accumulator runs once per window, as one."""
    match transforms:
        case ():
            return optax.with_extra_args_support(optax.identity())
        case (transform,):
            return optax.with_extra_args_support(transform)
        case _:
            return optax.chain(*transforms)


def flush(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Close the open window now, on the mean of what it holds.

    This is `update` without a gradient, for the short window at the end of an epoch. What stands
    before the accumulator in a `chain` is not called. If the window is empty, the updates are zeros
    and only `emitted` changes. `inner` receives the mean in the dtypes of the parameters, unless
    `emit_dtype` is set, since no gradient gives another dtype.

    Args:
      tx: What `accumulate` or `chain` returned.
      opt_state: Its state.
      params: The parameters.
      **extra_args: The extra args of the inner transformations, without the averaged ones, whose
        means come from the state.

    Returns:
      Updates and new state, as from `tx.update`.

    Raises:
      ValueError: `params` is None; or `weight` or `flush` is passed, which belong to a micro-step.
      TypeError: `tx` does not come from `accumulate` or `chain`. If the accumulator is inside
        `optax.partition`, `optax.masked` and the like, close the window with a micro-step that adds
        nothing: `tx.update(zeros, opt_state, params, weight=0, flush=True)` with
        `zeros = jax.tree.map(jnp.zeros_like, params)`, in the dtypes of the gradients.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_accum import accumulate, has_updated
      >>> tx = accumulate(4, optax.sgd(1.0))
      >>> params = jnp.zeros([])
      >>> state = tx.init(params)
      >>> _, state = tx.update(jnp.array(3.0), state, params)
      >>> _, state = tx.update(jnp.array(5.0), state, params)
      >>> updates, state = flush(tx, state, params)
      >>> print(updates, has_updated(state))
      -4.0 True
    """
    accumulator = accumulator_of(
        tx,
        "to be flushed",
        "around it, close the window with a micro-step that adds nothing:"
        " tx.update(zeros, opt_state, params, weight=0, flush=True), where"
        " zeros = jax.tree.map(jnp.zeros_like, params) in the dtypes of the gradients."
        " (accumulate_in_momentum takes share=0 in place of weight=0.)",
    )
    _check_params(params)
    _check_not_passed(extra_args)
    return accumulator.close_now(opt_state, params, extra_args)[:2]


def _check_params(params: PyTree) -> None:
    if params is None:
        raise ValueError("params must not be None: flush has no gradient to take the dtypes from.")
    _checks.check_model(params, "params")


def _check_not_passed(extra_args: dict[str, Any]) -> None:
    for name in ("weight", "flush"):
        if name in extra_args:
            raise ValueError(
                f"flush has no micro-step, and so takes no {name}; got"
                f" {name}={extra_args[name]!r}. Pass it to tx.update."
            )
