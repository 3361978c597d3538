"""The picture of memory_table.py."""

import matplotlib

matplotlib.use("Agg")  # files only, so that it runs without a screen
import matplotlib.pyplot as plt

from memory_claims import CALL, CALLS, of_steps, ratios

NORMS = {"resnet50-batch": "BatchNorm, ", "resnet50-group": "GroupNorm, ", "bert-base": ""}
SPLITS = {"1x256": ("tab:red", "batch 256", 10.8), "4x64": ("tab:blue", "4 x 64", 3.1)}
SLOWER = {"checkpoint": (1.3, 1.3), CALL: (1.1, 1.15), CALLS: (1.1, 1.15)}  # in articles


def draw(rows, path):
    """Peaks by configuration, and times, beside what articles give."""
    figure, (resnet, bert, timed) = plt.subplots(
        1, 3, figsize=(16, 6), width_ratios=(4, 3, 3), layout="constrained"
    )
    of_resnet, of_bert = {}, {}
    for name, row in of_steps(rows).items():
        model, dtype, method, split = name.split("/", 3)
        label = f"{NORMS[model]}{dtype}" + "\n+ checkpoint" * (method == "checkpoint")
        if model == "bert-base":
            split = split.replace("x", " x ").replace("/", "\nover ")
            of_bert[f"{label}, {split}"] = row["peak"] / 1e9
        else:
            of_resnet.setdefault(label, {})[split] = row["peak"] / 1e9
    for i, (split, (colour, label, theirs)) in enumerate(SPLITS.items()):
        peaks = [of_split.get(split, 0) for of_split in of_resnet.values()]
        resnet.axvline(theirs, color=colour, linestyle="--", label=f"articles: {theirs} GB")
        _bars(resnet, [j + 0.4 * i - 0.2 for j in range(len(peaks))], peaks, 0.4, colour, label)
    _finish(resnet, of_resnet, "ResNet-50, 224 x 224: peak, GB")

    bert.axvline(11, color="black", linestyle="--", label="articles: a card of 11 GB")
    _bars(bert, range(len(of_bert)), of_bert.values(), 0.6, "tab:green", "ours, on each device")
    _finish(bert, of_bert, "BERT-base, 512 tokens: peak, GB")

    arms = next((ratios(row) for row in reversed(rows) if "ms" in row), {})
    slower = [slower for slower, _ in arms.values()]
    _bars(timed, range(len(arms)), slower, 0.6, "tab:orange", "ours", label_type="center")
    for i, arm in enumerate(arms):
        if arm in SLOWER:
            timed.plot(SLOWER[arm], (i, i), "|-k", markersize=30)
    timed.plot([], [], "|-k", label="articles")
    _finish(timed, [arm.replace(" in ", "\nin ") for arm in arms], "ResNet-50: time of an update")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _bars(axis, at, lengths, height, colour, label, label_type="edge"):
    bars = axis.barh(at, lengths, height, color=colour, label=label)
    padding = 4 if label_type == "edge" else 0
    for text in axis.bar_label(bars, fmt="{:.3g}", padding=padding, label_type=label_type):
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def _finish(axis, labels, title):
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) + 1.2, -0.6)  # from above, with room for the legend
    axis.margins(x=0.12)
    axis.set_title(title)
    axis.set_axisbelow(True)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
