"""What a micro-step costs: this library, `acc += g` (the floor) and `optax.MultiSteps`.

    python benchmarks/cost.py                   # 20 x 1M and 400 x 10k float32 leaves, two minutes
    python benchmarks/cost.py --runs 1 --cases "adam 20x1M"

Each row is one jitted call per micro-step with params and state donated and `apply_updates`
inside, k=8. A run takes the median over its micro-steps, off the boundary; the methods take turns
within a run, and the ratios are medians over the runs of ratios within a run. `temp` is what XLA
reserves beside arguments and results, in units of the parameters.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import accumulate

K = 8
# name: (number of leaves, shape of a leaf, inner optimizer)
CASES = {
    "adam 20x1M": (20, (1000, 1000), optax.adam(1e-3)),
    "adam 400x10k": (400, (100, 100), optax.adam(1e-3)),
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


def methods(inner):
    """name: (step, init, window)."""
    accumulated, every_step = accumulate(K, inner), accumulate(1, inner)
    multi = optax.MultiSteps(inner, K)
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    return {
        "floor: acc += g": (floor_step, zeros, K),
        "accumulate": (stepper(accumulated), accumulated.init, K),
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
        arguments = (self.params, self.state, self.grads)
        self.step = jax.jit(step, donate_argnums=(0, 1))
        compiled = self.step.lower(*arguments).compile()
        self.temp = compiled.memory_analysis().temp_size_in_bytes

    def time(self, windows):
        """Milliseconds of a micro-step off the boundary (median) and of a window (mean)."""
        micro, total = [], 0.0
        for _ in range(windows):
            for i in range(self.window):
                start = time.perf_counter()
                self.params, self.state = self.step(self.params, self.state, self.grads)
                jax.block_until_ready((self.params, self.state))
                seconds = time.perf_counter() - start
                total += seconds
                if i < self.window - 1 or self.window == 1:
                    micro.append(seconds)
        return 1e3 * statistics.median(micro), 1e3 * total / windows


def measure(case, runs):
    """Rows of the table of one case, as dicts."""
    leaves, shape, inner = CASES[case]
    params = {f"w{i}": jnp.ones(shape) for i in range(leaves)}
    size = sum(p.nbytes for p in params.values())
    arms = {name: Arm(*method, params) for name, method in methods(inner).items()}
    micro = {name: [] for name in arms}
    window = {name: [] for name in arms}
    for run in range(runs + 1):
        for name, arm in arms.items():
            heavy = arm.window == 1 and case.startswith("muon")
            a_micro, a_window = arm.time(1 if heavy else 16 // arm.window)
            if run:  # the first warms up
                micro[name].append(a_micro)
                window[name].append(a_window)
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
            }
        )
    return rows


def _ratio(times, base):
    return float(np.median(np.divide(times, base)))


def table(rows):
    lines = [
        "| case | method | micro-step ms | ratio | MultiSteps is slower by | window ms | temp |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        windowed = row["ratio_to"] != "bare inner"
        lines.append(
            "| {case} | {method} | {micro_step_ms:.1f} | {ratio:.2f} x {base} | {multi} |"
            " {window_ms:.0f} | {temp_over_params:.3f} |".format(
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
    rows = []
    for case in args.cases:
        rows += measure(case, args.runs)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.runs} runs")
    print(table(rows))


if __name__ == "__main__":
    main()
