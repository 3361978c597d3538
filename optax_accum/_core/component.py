"""The protocol of components: what a window gathers besides the gradient."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_accum._checks import Dtype, PyTree, Scalar, wider_dtype
from optax_accum._core.arithmetic import scale_as

Sums: TypeAlias = PyTree  # of scalars, summed over the open window, 0 in an empty one
Memory: TypeAlias = PyTree  # of scalars, kept from window to window, the same on all devices


class ComponentState(NamedTuple):
    """A component's entry in `AccumulateState.extras`."""

    sums: Sums
    memory: Memory


class MicroStep(NamedTuple):
    """A micro-step, as a window receives it."""

    gradients: optax.Updates  # of the loss times the loss scale
    weight: Scalar | int  # added to W
    factor: Scalar | int  # S += factor * gradients, and so for scalars that a window averages
    accepted: Scalar | bool  # whether the weight is above 0 and finite
    is_exact: bool  # a window of one micro-step, whose mean is the gradient as it came
    unscale: Scalar | int  # 1 / loss scale
    gradient_step: Scalar
    params: optax.Params | None
    extra_args: dict[str, Any]
    counters: Callable[[], tuple[Scalar, ...]]  # tell micro-steps and devices apart

    def unscaled_gradients(self) -> optax.Updates:
        """Gradients of the loss itself, no narrower than float32 if they were scaled."""
        if isinstance(self.unscale, int):
            return self.gradients

        def unscaled(gradient: Any) -> jax.Array:
            dtype = wider_dtype(jnp.result_type(gradient), jnp.float32)
            return scale_as(gradient, self.unscale, dtype)

        return jax.tree.map(unscaled, self.gradients)


class Norms(NamedTuple):
    """Norms, float32 []: 0 off the boundary, None where no component reads it."""

    window_sum: Scalar | None  # ‖S‖, unscaled
    update: Scalar | None
    params: Scalar | None  # before the update


class Window(NamedTuple):
    """A window at its boundary, with the totals of all devices."""

    weight: Scalar  # W
    sums: dict[str, Sums]  # by component
    is_filled: Scalar | bool  # whether the inner transformations run on it
    gradient_factor: Scalar | int  # takes S, unscaled, to what they receive
    mean_factor: Scalar | int  # takes S, unscaled, to the mean gradient: 1 / W
    num_micro_steps: Scalar
    every_k: Scalar | int
    unscale: Scalar | int  # 1 / loss scale
    norms: Norms
    inner_args: dict[str, Any]  # extra args that the inner transformations receive


class Component:
    """Base class of components, which gathers nothing and accepts each micro-step.

    A subclass overrides what it needs. An accumulator calls the methods so:

    each micro-step   sums, accepted = gather(sums, micro_step, accepted)   on its device
    boundary          inner.update(mean, ..., **inner_args(...))            if all `allows_update`
                      memory = close(memory, window)                        updated or not
    """

    name: ClassVar[str]  # in `AccumulateState.extras`
    may_reject: ClassVar[bool] = False  # whether `gather` or `allows_update` can say no
    norms: ClassVar[frozenset[str]] = frozenset()  # the fields of `Norms` that `close` reads

    def init(self, weight_dtype: Dtype) -> ComponentState:
        """Zero sums, and the memory before the first window."""
        del weight_dtype
        return ComponentState((), ())

    def loss_scale(self, memory: Memory) -> Scalar | None:
        """The factor of the loss that the next micro-step differentiates; None: no such factor."""
        del memory

    def gather(
        self, sums: Sums, micro_step: MicroStep, accepted: Scalar | bool
    ) -> tuple[Sums, Scalar | bool]:
        """Add a micro-step to the sums, if it is accepted.

        Args:
          sums: Those of this component, on this device.
          micro_step: The micro-step.
          accepted: Whether its weight counts and no component before this one rejected it.

        Returns:
          The new sums, and whether the micro-step is still accepted.
        """
        del micro_step
        return sums, accepted

    def allows_update(self, sums: Sums) -> Scalar | bool:
        """Whether a window with these sums may update; if not, it closes without an update."""
        del sums
        return True

    def inner_args(self, sums: Sums, passed: dict[str, Any] | None) -> dict[str, Scalar]:
        """Extra args of `inner.update` that replace those of the call that closes the window.

        Args:
          sums: Those of this component over the window, on all devices.
          passed: The extra args of that call; None for `flush(tx, ...)`, which has no micro-step.

        Returns:
          Extra args by name.
        """
        del sums, passed
        return {}

    def close(self, memory: Memory, window: Window) -> Memory:
        """The memory after a window, whether it updated or not."""
        del window
        return memory
