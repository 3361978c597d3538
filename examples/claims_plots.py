"""The picture of claims.py."""

import math

import matplotlib

matplotlib.use("Agg")  # files only, so that it runs without a screen
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from claims_table import ACCUMULATED, CANNOT_TELL, MARGIN, NO, YES, findings, interval

COLOURS = {YES: "tab:green", NO: "tab:red", CANNOT_TELL: "tab:gray"}


def draw(rows, timed, data, path):
    """The noise scale over training, and what each claim is judged by."""
    found = findings(rows, timed)
    points = [finding for finding in found if not finding.is_ratio]
    ratios = [finding for finding in found if finding.is_ratio]
    heights = [max(len(part), 1) for part in (points, ratios)]
    figure, axes = plt.subplot_mosaic(
        [["noise", "points"], ["noise", "ratios"]],
        figsize=(16, 8),
        layout="constrained",
        height_ratios=heights,
        width_ratios=(4, 3),
    )
    of_points, of_ratios = axes["points"], axes["ratios"]
    noise(axes["noise"], [row for row in rows if "noise" in row])
    forest(of_points, points)
    of_points.axvspan(-MARGIN, MARGIN, color="tab:blue", alpha=0.1, label="alike")
    of_points.set_xlabel("difference by seed, %-points (95 %)")
    of_points.legend()
    forest(of_ratios, ratios)
    if ratios:  # an axis without any cannot be logarithmic
        of_ratios.set_xscale("log")
        of_ratios.set_xticks([0.9, 1, 1.1, 1.5, 2, 3, 4], minor=False)
        of_ratios.xaxis.set_major_formatter("{x:g}")
        of_ratios.xaxis.set_minor_locator(NullLocator())
    of_ratios.set_xlabel("ratio by seed or round (95 %)")
    figure.suptitle(f"Claims about accumulation: {data}")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def noise(axis, rows):
    """Noise scale in examples, a line a seed, and the k that would be as large."""
    arm = ACCUMULATED.arm
    for row in rows:
        updates = [point["updates"] for point in row["noise"]]
        scales = [point["noise_scale"] for point in row["noise"]]
        scales = [scale if math.isfinite(scale) else math.nan for scale in scales]
        axis.plot(updates, scales, label=f"seed {row['seed']}")
    axis.axhline(arm.effective_batch, color="black", linestyle="--", label=f"the window of {arm}")
    axis.set_yscale("log", base=2)
    axis.set_xlabel("updates")
    axis.set_ylabel("noise scale, examples")

    def of_k(examples):
        return examples / arm.physical_batch

    second = axis.secondary_yaxis("right", functions=(of_k, lambda k: k * arm.physical_batch))
    second.set_ylabel(f"k that makes a window so large, of micro-batches of {arm.physical_batch}")
    for each in (axis.yaxis, second.yaxis):
        each.set_major_locator(LogLocator(2))
        each.set_minor_locator(NullLocator())
        each.set_major_formatter("{x:g}")
    axis.set_title("Noise scale")
    axis.grid(alpha=0.3)
    axis.legend()


def forest(axis, found):
    """An interval a claim, from above, in the colour of the verdict."""
    for i, finding in enumerate(found):
        mean, low, high = interval(finding.differences)
        ends = (mean, mean) if math.isinf(low) else (low, high)  # of one seed
        if finding.is_ratio:
            mean, ends = math.exp(mean), tuple(map(math.exp, ends))
        colour = COLOURS[finding.verdict]
        axis.plot(ends, (i, i), "|-", color=colour)
        axis.plot(mean, i, "o", color=colour)
    axis.axvline(
        1.0 if any(finding.is_ratio for finding in found) else 0.0, color="black", linewidth=0.8
    )
    axis.set_yticks(range(len(found)), [f"{f.claim}: {f.verdict}" for f in found])
    axis.set_ylim(max(len(found), 1) - 0.5, -0.5)  # the first on top
    axis.grid(alpha=0.3)
