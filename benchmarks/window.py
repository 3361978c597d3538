"""A window inside one call against the big batch: memory, time and compile time.

    python benchmarks/window.py                       # eight minutes on two CPU cores
    python benchmarks/window.py --cases transformer --runs 11

`cnn` is a small residual network with GroupNorm and 256 images of 32 x 32, `transformer` has 4
layers of width 256 and 64 sequences of 64 tokens; each row is loss and gradient, compiled. The
methods take turns within a run, in compiling too, which begins with tracing and without what other
compilations left behind; times are medians, ratios medians of the ratios within a run. `temp` is
what XLA reserves beside arguments and results. `optax.microbatch` is the mean over as many
micro-batches with `jax.value_and_grad` inside; on the CNN it is timed once, beside the first run of
the others, since XLA's convolutions are slow in its loop.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from optax_accum import microbatch_value_and_grad

MEAN = optax.microbatching.AccumulationType.MEAN


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        strides = (self.stride, self.stride)
        y = nn.relu(nn.GroupNorm(8)(nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)))
        y = nn.GroupNorm(8)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), strides, use_bias=False)(x)
        return nn.relu(x + y)


class Cnn(nn.Module):
    """Seven convolutions and three shortcuts."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3))(x)
        for features, stride in ((16, 1), (32, 2), (64, 2)):
            x = Block(features, stride)(x)
        return nn.Dense(10)(x.mean((1, 2)))


class Transformer(nn.Module):
    """Four layers before the norm, of width 256."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(512, 256)(tokens)
        for _ in range(4):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x += nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(512)(nn.LayerNorm()(x))


def cross_entropy(net):
    def loss_fn(params, x, y):
        logits = net.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss_fn


def case(name):
    """Loss function, parameters, batch and the numbers of micro-batches."""
    rng = np.random.default_rng(0)
    if name == "cnn":
        net, ks = Cnn(), (4, 16, 64)
        x = rng.normal(size=(256, 32, 32, 3)).astype(np.float32)
        y = rng.integers(0, 10, 256)
    else:
        net, ks = Transformer(), (4, 8)
        x, y = rng.integers(0, 512, (2, 64, 64))
    return cross_entropy(net), net.init(jax.random.key(0), x[:1]), (x, y), ks


class Arm:
    """A compiled method."""

    def __init__(self, fn, params, batch):
        self.fn, self.args = fn, (params, *batch)
        self.ms, self.compile_s = [], []
        self.compile()
        self.compile_s.clear()  # the first one imports and warms up too
        self.temp = self.compiled.memory_analysis().temp_size_in_bytes

    def compile(self):
        jax.clear_caches()
        began = time.perf_counter()
        self.compiled = jax.jit(lambda *args: self.fn(*args)).lower(*self.args).compile()
        self.compile_s.append(time.perf_counter() - began)

    def run(self):
        began = time.perf_counter()
        result = jax.block_until_ready(self.compiled(*self.args))
        self.ms.append(1e3 * (time.perf_counter() - began))
        return result


def measure(name, runs):
    """Print the rows of a case."""
    loss_fn, params, batch, ks = case(name)
    plain = jax.value_and_grad(loss_fn)
    size = len(batch[0])
    arms = {"the big batch": Arm(plain, params, batch)}
    for k in ks:
        ours = microbatch_value_and_grad(loss_fn, k, batch_argnums=(1, 2))
        arms[f"{k} x {size // k}"] = Arm(ours, params, batch)
    theirs = {}
    for k in ks:
        micro = optax.microbatch(plain, (1, 2), size // k, MEAN)
        theirs[f"{k} x {size // k}, optax.microbatch"] = Arm(micro, params, batch)
    for arm in arms.values():
        arm.run()  # warms up
        arm.ms.clear()
    often = arms if name == "cnn" else {**arms, **theirs}
    for arm in theirs.values():
        arm.run()
        if name != "cnn":
            arm.ms.clear()
    for _ in range(runs):
        for arm in often.values():
            arm.run()
    for _ in range(runs):
        for arm in (*arms.values(), *theirs.values()):
            arm.compile()
    big = arms["the big batch"]

    def ratio(a, b):
        return statistics.median(x / y for x, y in zip(a, b, strict=False))

    parts = {k: Arm(plain, params, [x[: size // k] for x in batch]).temp for k in ks}
    gradient = sum(4 * p.size for p in jax.tree.leaves(params))
    print(f"\n{name}: {size} examples, parameters {gradient / 1e6:.1f} MB")
    print("| method | temp MB | less by | of micro-batch + gradient | ms | time | compile |")
    print("|---|---|---|---|---|---|---|")
    for label, arm in {**arms, **theirs}.items():
        k = None if arm is big else int(label.split()[0])
        beside = "" if k is None else f"{arm.temp / (parts[k] + gradient):.2f}"
        print(
            f"| {label} | {arm.temp / 1e6:.1f} | {big.temp / arm.temp:.1f} x | {beside} |"
            f" {statistics.median(arm.ms):.0f} | {ratio(arm.ms, big.ms):.2f} x |"
            f" {ratio(arm.compile_s, big.compile_s):.2f} x |",
            flush=True,
        )
    for label, arm in theirs.items():
        ours = arms[label.split(",")[0]]
        print(f"{label.split(',')[0]} takes {ratio(ours.ms, arm.ms):.2f} of optax.microbatch")
    want = big.run()
    differences = jax.tree.map(
        lambda *all_: max(float(jnp.abs(x - all_[0]).max()) for x in all_),
        want,
        *(arm.run() for arm in arms.values()),
    )
    print(f"loss and gradients differ by at most {max(jax.tree.leaves(differences)):.1e}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=("cnn", "transformer"), default=None)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    for name in args.cases or ("cnn", "transformer"):
        measure(name, args.runs)


if __name__ == "__main__":
    main()
