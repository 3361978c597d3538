"""What the examples train with: windows of micro-batches, in Flax NNX."""

import argparse
import functools
import pathlib
import subprocess
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from optax_accum import accumulate, chain, flush


class Arm(NamedTuple):
    """What one arm trains with; named "16x4"."""

    physical_batch: int
    every_k: int

    @property
    def effective_batch(self) -> int:
        """Examples in a window."""
        return self.physical_batch * self.every_k

    def __str__(self) -> str:
        return f"{self.physical_batch}x{self.every_k}"


def split(model):
    """The model's graph, its params, and the rest of its state, as plain arrays."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return graph, nnx.as_pure(params), nnx.as_pure(rest)  # Variables cost time in each call


class Trainer:
    """A Flax NNX model, its optimizer and the compiled steps."""

    def __init__(
        self, model: nnx.Module, arm: Arm, tx: optax.GradientTransformation, *, monitor=False
    ):
        self.arm = arm
        self.tx = chain(accumulate(arm.every_k, monitor=monitor), tx)
        # Params are trained; the rest (BatchNorm's statistics) is carried along.
        self.graph, self.params, self.rest = split(model)
        self.opt_state = self.tx.init(self.params)
        self.flush = jax.jit(self._flush, donate_argnums=(0, 1))
        self.evaluate_batch = jax.jit(self._evaluate_batch)
        self.reset()

    def reset(self):
        """Trace the step anew, after a change of the graph."""
        self.step = jax.jit(functools.partial(self._step), donate_argnums=(0, 1, 2))
        self.compiled = {}  # by the size of the micro-batch

    def loss(self, params, rest, images, labels):
        model = nnx.merge(self.graph, params, rest, copy=True)  # BatchNorm writes to it
        loss = optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
        return loss, split(model)[2]

    def _step(self, params, rest, opt_state, images, labels):
        grad_fn = jax.value_and_grad(self.loss, has_aux=True)
        (loss, rest), grads = grad_fn(params, rest, images, labels)
        # A micro-batch counts by its examples, so that an uneven last one is no trouble.
        updates, opt_state = self.tx.update(
            grads, opt_state, params, weight=len(images), value=loss
        )
        return optax.apply_updates(params, updates), rest, opt_state, loss

    def _flush(self, params, opt_state):
        updates, opt_state = flush(self.tx, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def _evaluate_batch(self, params, rest, images, labels):
        model = nnx.merge(self.graph, params, rest)
        model.eval()
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum(), (logits.argmax(-1) == labels).sum()

    def micro_step(self, images, labels):
        """Train on one micro-batch; returns its loss, still on the device."""
        step = self.compiled.get(len(images), self.step)
        self.params, self.rest, self.opt_state, loss = step(
            self.params, self.rest, self.opt_state, images, labels
        )
        return loss

    def close_window(self):
        """Update from a short last window, if one is open."""
        self.params, self.opt_state = self.flush(self.params, self.opt_state)

    def evaluate(self, images, labels, batch=500):
        """Mean loss and accuracy."""
        loss = correct = 0.0
        for i in range(0, len(images), batch):
            sums = self.evaluate_batch(
                self.params, self.rest, images[i : i + batch], labels[i : i + batch]
            )
            loss, correct = loss + float(sums[0]), correct + float(sums[1])
        return loss / len(images), correct / len(images)

    def compile(self, images, labels):
        """Compile the step for such a micro-batch; returns the bytes that XLA reserves for it."""
        lowered = self.step.lower(self.params, self.rest, self.opt_state, images, labels)
        compiled = self.compiled[len(images)] = lowered.compile()
        return compiled.memory_analysis().temp_size_in_bytes


def epoch_order(size, seed, epoch):
    """The order in which every arm sees the images of an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(size)


def first_update_max_diff(new_trainer, arm, images, index):
    """Largest difference of a parameter from the big batch's, after one update of SGD at rate 1.

    Not of Adam, whose first update is the gradient's sign: it turns rounding into whole steps.

    Args:
      new_trainer: Makes a trainer from an arm and a transformation.
      arm: The arm whose window is compared.
      images: The images to train on.
      index: Which of them make up the window.
    """
    ends = []
    for each in (arm, Arm(arm.effective_batch, 1)):
        trainer = new_trainer(each, optax.sgd(1.0))
        for part in filter(len, np.array_split(index, each.every_k)):
            trainer.micro_step(images.train_images[part], images.train_labels[part])
        ends.append(trainer.params)
    differences = jax.tree.map(lambda a, b: abs(a - b).max(), *ends)
    return max(float(leaf) for leaf in jax.tree.leaves(differences))


def parse_arm(text):
    try:
        arm = Arm(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"an arm must read like 16x4, got {text!r}") from None
    if min(arm) < 1:
        raise argparse.ArgumentTypeError(f"batch and k must be at least 1, got {text!r}")
    return arm


def positive(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an int of at least 1, got {text!r}")
    return int(text)


def not_negative(text):
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an int of at least 0, got {text!r}")
    return int(text)


def commit():
    """The checkout's commit, with a + where it has changes."""
    git = functools.partial(
        subprocess.run, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True
    )
    try:
        head = git(["git", "rev-parse", "--short=12", "HEAD"])
        changes = git(["git", "status", "--porcelain", "--untracked-files=no"])
    except FileNotFoundError:  # no git here
        return "unknown"
    return (
        head.stdout.strip() + ("+" if changes.stdout else "") if not head.returncode else "unknown"
    )
