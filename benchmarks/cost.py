"""What a micro-step costs: this library, `acc += g` (the floor) and `optax.MultiSteps`.

    python benchmarks/cost.py --cases "adam 20x1M" "momentum 20x1M"   # two minutes on two CPU cores
    python benchmarks/cost.py   # all; hundreds of leaves and Muon take minutes each to compile
    python benchmarks/cost.py --runs 1 --cases "adam 20x1M"

Each row is one jitted call per micro-step with params and state donated and `apply_updates`
inside, k=8. A run takes the median over its micro-steps, off the boundary; the methods take turns
within a run, and the ratios are medians over the runs of ratios within a run. `temp` is what XLA
reserves beside arguments and results, `state` the optimizer's state, in units of the parameters.
Momentum SGD is measured with its window in the momentum itself too, and Adam with a window for half
of the leaves alone, where the others update in each micro-step. The second floor passes the
inner optimizer's state through the call as well, as every stateful step must: with hundreds of
small leaves, that costs as much as the sum.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import DynamicLossScale, accumulate, accumulate_in_momentum

K = 8
ALWAYS_UPDATE = ("optax.MultiSteps", "bare inner", "accumulate(1)")  # in each call
ADAM = optax.adam(1e-3)
MOMENTUM = {"learning_rate": 1e-3, "momentum": 0.9}
# name: (number of leaves, shape of a leaf, inner optimizer)
CASES = {
    "adam 20x1M": (20, (1000, 1000), ADAM),
    "adam 400x10k": (400, (100, 100), ADAM),
    "momentum 20x1M": (20, (1000, 1000), optax.sgd(**MOMENTUM)),
    "momentum 400x10k": (400, (100, 100), optax.sgd(**MOMENTUM)),
    "muon 20x1M": (20, (1000, 1000), optax.contrib.muon(1e-3)),
    "muon 400x10k": (400, (100, 100), optax.contrib.muon(1e-3)),
}


def stepper(tx):
    """One micro-step as users write it."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def floor_step(params, state, grads):
    return params, jax.tree.map(jnp.add, state, grads)


def carrying_step(params, state, grads):
    total = jax.tree.map(jnp.add, state.window_sum, grads)
    return params, state._replace(window_sum=total)


def half_and_half(params):
    """The group of each leaf, "w0", "w1" and so on, in turns."""
    return {name: ("each micro-step", "window")[int(name[1:]) % 2] for name in params}


GROUPS = {"each micro-step": accumulate(1, ADAM), "window": accumulate(K, ADAM)}
# name of an optimizer: what else it is measured as
OTHERS = {
    "adam": {
        "accumulate, loss_scale": accumulate(K, ADAM, loss_scale=DynamicLossScale()),
        "accumulate in bfloat16": accumulate(K, ADAM, accumulator_dtype=jnp.bfloat16),
        "partition: accumulate(1), accumulate": optax.partition(GROUPS, half_and_half),
    },
    "momentum": {"accumulate_in_momentum": accumulate_in_momentum(K, **MOMENTUM)},
    "muon": {},
}


def methods(case):
    """name: (step, init, window)."""
    _, _, inner = CASES[case]
    others = OTHERS[case.split()[0]]
    accumulated, every_step = accumulate(K, inner), accumulate(1, inner)
    monitored = accumulate(K, inner, monitor=True)
    multi = optax.MultiSteps(inner, K)

    def zeros(params):
        return jax.tree.map(jnp.zeros_like, params)

    return {
        "floor: acc += g": (floor_step, zeros, K),
        "floor, carrying inner's state": (carrying_step, accumulated.init, K),
        "accumulate": (stepper(accumulated), accumulated.init, K),
        "accumulate, monitor=True": (stepper(monitored), monitored.init, K),
        **{name: (stepper(tx), tx.init, K) for name, tx in others.items()},
        "optax.MultiSteps": (stepper(multi), multi.init, K),
        "bare inner": (stepper(inner), inner.init, 1),
        "accumulate(1)": (stepper(every_step), every_step.init, 1),
    }


class Arm:
    """A compiled step with its buffers."""

    def __init__(self, step, init, window, params):
        self.window = window
        self.grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
        self.params = jax.tree.map(jnp.copy, params)
        self.state = init(params)
        self.state_size = sum(x.nbytes for x in jax.tree.leaves(self.state))
        arguments = (self.params, self.state, self.grads)
        # Compiled once, for its memory and for its calls: Muon on 400 leaves takes a minute.
        self.step = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
        self.temp = self.step.memory_analysis().temp_size_in_bytes

    def time(self, calls):
        """Milliseconds of each of so many calls."""
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            self.params, self.state = self.step(self.params, self.state, self.grads)
            jax.block_until_ready((self.params, self.state))
            times.append(1e3 * (time.perf_counter() - start))
        return times


def measure(case, runs):
    """The rows of one case, as dicts."""
    leaves, shape, _ = CASES[case]
    params = {f"w{i}": jnp.ones(shape) for i in range(leaves)}
    size = sum(p.nbytes for p in params.values())
    arms = {name: Arm(*method, params) for name, method in methods(case).items()}
    micro = {name: [] for name in arms}
    window = {name: [] for name in arms}
    heavy = case.startswith("muon")  # seconds an update, and MultiSteps makes one in each call
    for run in range(runs + 1):
        for name, arm in arms.items():
            calls = 1 if heavy and name in ALWAYS_UPDATE else 2 * K
            times = arm.time(calls if not heavy else min(calls, K))
            if run:  # the first warms up
                off_boundary = [t for i, t in enumerate(times) if (i + 1) % arm.window] or times
                micro[name].append(statistics.median(off_boundary))
                window[name].append(arm.window * statistics.mean(times))
    rows = []
    for name, arm in arms.items():
        base = "bare inner" if arm.window == 1 else "floor: acc += g"
        rows.append(
            {
                "case": case,
                "method": name,
                "micro_step_ms": statistics.median(micro[name]),
                "ratio": _ratio(micro[name], micro[base]),
                "ratio_to": base,
                "multisteps_ratio": _ratio(micro["optax.MultiSteps"], micro[name]),
                "window_ms": statistics.median(window[name]),
                "temp_bytes": arm.temp,
                "temp_over_params": arm.temp / size,
                "state_bytes": arm.state_size,
                "state_over_params": arm.state_size / size,
            }
        )
    return rows


def _ratio(times, base):
    return float(np.median(np.divide(times, base)))


def table(rows):
    lines = [
        "| case | method | micro-step ms | ratio | MultiSteps is slower by | window ms | temp |"
        " state |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        windowed = row["ratio_to"] != "bare inner"
        lines.append(
            "| {case} | {method} | {micro_step_ms:.1f} | {ratio:.2f} x {base} | {multi} |"
            " {window_ms:.0f} | {temp_over_params:.3f} | {state_over_params:.3f} |".format(
                **row,
                base="floor" if windowed else "bare inner",
                multi=f"{row['multisteps_ratio']:.1f} x" if windowed else "",
            )
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.runs} runs")
    for case in args.cases:
        print(table(measure(case, args.runs)), flush=True)


if __name__ == "__main__":
    main()
