"""The loop over the micro-batches of a call, and the window that it gathers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum._checks import Dtype, PyTree, Scalar
from optax_accum._core.arithmetic import (
    add_if_accepted,
    complex_where,
    is_positive_weight,
    normalizers,
    scale_as,
    sum_dtype,
    weight_and_factor,
    weight_dtype,
    zeros_where,
)
from optax_accum._core.internals import varying_as
from optax_accum._core.rounding import add_tree_if_accepted
from optax_accum._devices.axis_checks import check_carried, check_summable
from optax_accum._in_call import aux_parts, jaxprs
from optax_accum._in_call.arguments import Call
from optax_accum._in_call.batches import checked_weight
from optax_accum._in_call.convolutions import canonical_convolutions
from optax_accum._in_call.loss_function import LossFunction
from optax_accum._in_call.split import EqualSizes, by_size, in_order, part_of

ValueAndGrad: TypeAlias = tuple[Any, PyTree]


class Weighting(NamedTuple):
    """How a window weighs and sums its micro-batches."""

    weight_fn: Callable[..., jax.typing.ArrayLike] | None
    normalize: str
    accumulator_dtype: Dtype | None

    @property
    def is_over_examples(self) -> bool:
        """Whether it is the mean over examples, so that the sum of the weights is known."""
        return self.weight_fn is None and self.normalize == "mean"


class Averaged(NamedTuple):
    """What a window averages: the values of one micro-batch, or their sums."""

    loss: Scalar
    aux: PyTree  # scalars
    gradients: PyTree


class MicroBatch(NamedTuple):
    """The results of a micro-batch."""

    weight: jax.typing.ArrayLike
    averaged: Averaged
    carry: PyTree
    counts: PyTree  # integer scalars of the aux, which are summed
    rows: PyTree  # arrays of the aux


class Sums(NamedTuple):
    """What the loop carries from micro-batch to micro-batch."""

    weight: Scalar  # W
    averaged: Averaged
    counts: PyTree
    carry: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatchLoop:
    """The micro-batches of one call, and the window that they are gathered in."""

    call: Call
    loss_fn: LossFunction
    num: int
    size: int  # examples in the batch
    batch: list[PyTree]  # the arguments that are split
    keys: dict[int, jax.Array]  # one for each micro-batch, by the place of the argument
    carry: PyTree  # of the first micro-batch
    weighting: Weighting

    def run(self) -> ValueAndGrad:
        """Loop over the micro-batches: what `loss_fn` returns, and the gradients."""
        least = self.size // self.num  # examples in the smallest micro-batches
        shapes = jax.eval_shape(lambda carry: self._micro_batch(0, carry, least), self.carry)
        self._check_types(shapes)
        sums, all_rows = self._empty_sums(shapes), []
        for group in by_size(self.size, self.num):
            sums, rows = self._gather_all(sums, group)
            all_rows.append(rows)
        averaged = self._normalized(sums, shapes.averaged)
        rows = jax.tree.map(in_order, *all_rows)
        aux = aux_parts.joined(aux_parts.AuxParts(sums.counts, averaged.aux, rows))
        return self.loss_fn.value(averaged.loss, sums.carry, aux), averaged.gradients

    @functools.cached_property
    def _compiled(self) -> tuple[Callable[..., Any], Callable[..., list[Any]]]:
        """The gradient as a function of arrays, and a function that picks them out of a row."""
        function = self.loss_fn.value_and_grad
        if self.num > 1:
            function = canonical_convolutions(function)
        row = self._row(self.batch, {}, self.carry)
        of_arrays, arrays_of = jaxprs.of_arrays(function, row, {})
        return jax.jit(of_arrays), arrays_of  # jitted: loss_fn is traced once for each size

    def _row(
        self, parts: list[PyTree], keys: dict[int, jax.Array], carry: PyTree
    ) -> tuple[PyTree, ...]:
        """The arguments of a micro-batch."""
        row = list(self.call.row)
        for at, part in zip(self.call.batch_at, parts, strict=True):
            row[at] = part
        for at, key in keys.items():
            row[at] = key
        if self.call.carry_at is not None:
            row[self.call.carry_at] = carry
        return tuple(row)

    def _micro_batch(self, number: Scalar | int, carry: PyTree, size: int) -> MicroBatch:
        """Differentiate a micro-batch of `size` examples."""

        def part(x: jax.Array) -> jax.Array:
            return part_of(x, number, self.num, size)

        parts = [jax.tree.map(part, argument) for argument in self.batch]
        keys = {at: key[number] for at, key in self.keys.items()}
        value_and_grad, arrays_of = self._compiled
        loss, (carry, aux), gradients = value_and_grad(
            *arrays_of(self._row(parts, keys, carry), {})
        )
        counts, scalars, rows = aux_parts.divided(aux, size)
        averaged = Averaged(loss, scalars, gradients)
        return MicroBatch(self._weight(parts, size), averaged, carry, counts, rows)

    def _weight(self, parts: list[PyTree], size: int) -> jax.typing.ArrayLike:
        if self.weighting.weight_fn is not None:
            return checked_weight(self.weighting.weight_fn(*parts))
        # If the weight is the share of the examples, no leaf needs a division at the end.
        return size / self.size if self.weighting.is_over_examples else size

    def _check_types(self, shapes: MicroBatch) -> None:
        check_summable(shapes.averaged.gradients, shapes.weight)
        if self.call.carry_at is not None:
            check_carried(self.call.labels[self.call.carry_at], self.carry, shapes.carry)

    def _empty_sums(self, shapes: MicroBatch) -> Sums:
        """The sums before the first micro-batch."""
        loss, aux, gradients = shapes.averaged
        accumulator_dtype = self.weighting.accumulator_dtype
        sum_dtypes = jax.tree.map(lambda g: sum_dtype(g, accumulator_dtype), gradients)
        scalar_dtypes = jax.tree.map(lambda x: x.dtype, (loss, aux))
        wide = weight_dtype((sum_dtypes, scalar_dtypes))

        def zero(x: Any, dtype: Dtype) -> jax.Array:
            """A zero of the type that a scalar times the weight has, also on explicit axes."""
            of_type = varying_as(x, jnp.zeros([], dtype, device=x.sharding))
            return varying_as(shapes.weight, of_type)

        def zero_of_scalar(x: Any) -> jax.Array:
            return zero(x, complex_where(x, wide))

        params = jax.tree.leaves([self.call.row[at] for at in self.call.grad_at])
        zeros = jax.tree.map(zeros_where, params, jax.tree.leaves(sum_dtypes))
        averaged = Averaged(
            *jax.tree.map(zero_of_scalar, (loss, aux)),
            gradients=jax.tree.unflatten(jax.tree.structure(sum_dtypes), zeros),
        )
        counts = jax.tree.map(lambda x: zero(x, x.dtype), shapes.counts)
        return Sums(zero(shapes.weight, wide), averaged, counts, self.carry)

    def _gather_all(self, sums: Sums, group: EqualSizes) -> tuple[Sums, PyTree]:
        """Gather the micro-batches of one size; returns the sums, and the stacked rows."""

        def gather(sums: Sums, number: Scalar) -> tuple[Sums, PyTree]:
            new = self._micro_batch(number, sums.carry, group.size)
            return self._added(sums, new, number), new.rows

        return lax.scan(gather, sums, group.numbers)

    def _added(self, sums: Sums, new: MicroBatch, number: Scalar) -> Sums:
        """The sums with a micro-batch added, if its weight is positive."""
        weight_fn, normalize, _ = self.weighting
        dtype = sums.weight.dtype
        weight, factor = weight_and_factor(new.weight, normalize, dtype)
        accepted = weight_fn is None or is_positive_weight(weight, dtype)

        def counters() -> tuple[Scalar, Scalar]:
            # Sums in bfloat16 are rounded at random; the bits of the loss differ between calls.
            loss = new.averaged.loss.astype(jnp.float32)
            return number, lax.bitcast_convert_type(loss, jnp.uint32)

        averaged = add_tree_if_accepted(sums.averaged, new.averaged, factor, accepted, counters)
        add = functools.partial(add_if_accepted, factor=1, accepted=accepted)
        counts = jax.tree.map(add, sums.counts, new.counts)
        carry = new.carry
        if accepted is not True:
            carry = jax.tree.map(functools.partial(jnp.where, accepted), carry, sums.carry)
        return Sums(add(sums.weight, weight), averaged, counts, carry)

    def _normalized(self, sums: Sums, shapes: Averaged) -> Averaged:
        """The window's averages, in the dtypes of a micro-batch's."""
        if self.weighting.is_over_examples:
            factor = per_weight = 1
        else:
            factor, per_weight = normalizers(sums.weight, sums.weight > 0, self.weighting.normalize)

        def scaled(sums: PyTree, shapes: PyTree, factor: Scalar | int) -> PyTree:
            return jax.tree.map(lambda s, x: scale_as(s, factor, x.dtype), sums, shapes)

        total = sums.averaged
        return Averaged(
            scaled(total.loss, shapes.loss, factor),
            scaled(total.aux, shapes.aux, per_weight),
            scaled(total.gradients, shapes.gradients, factor),
        )
