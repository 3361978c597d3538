"""The pictures of cifar_flax.py."""

import matplotlib

matplotlib.use("Agg")  # files only, so that it runs without a screen
import matplotlib.pyplot as plt

COLORS = {"64x1": "black", "16x4": "tab:orange", "16x1": "tab:blue"}


def curves(rows, path):
    """Training loss and test accuracy of each arm, over gradient steps and over time."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharey="row", layout="constrained")
    axis_names = {"gradient_step": "gradient steps", "seconds": "seconds of training"}
    for row in rows:
        for column, key in enumerate(axis_names):
            # Beneath the arm that should lie on top of it, 64x1 is drawn broad.
            broad = {"linewidth": 6, "alpha": 0.3} if row["arm"] == "64x1" else {}
            style = {"color": COLORS.get(row["arm"]), "label": row["arm"], **broad}
            points = row["curve"]
            axes[0, column].plot(
                [p[key] for p in points], [p["train_loss"] for p in points], **style
            )
            tested = [p for p in points if "test_accuracy" in p]
            axes[1, column].plot(
                [p[key] for p in tested],
                [100 * p["test_accuracy"] for p in tested],
                marker="o",
                markersize=4,
                **style,
            )
    for column, name in enumerate(axis_names.values()):
        axes[1, column].set_xlabel(name)
        for line in (0, 1):
            axes[line, column].grid(alpha=0.3)
            axes[line, column].margins(x=0.02)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test accuracy, %")
    axes[0, 0].legend(title="physical batch x k")
    first = rows[0]
    figure.suptitle(f"{first['data']}, norm: {first['norm']}, Adam {first['config']['lr']:g}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def drift(distances, data, path):
    """How far the parameters of each run are from those of 64x1, over gradient steps."""
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    styles = (
        {"color": "tab:orange"},
        {"color": "black", "linestyle": "--"},
        {"color": "tab:green"},
    )
    for (label, values), style in zip(distances.items(), styles, strict=True):
        axis.semilogy(range(1, len(values) + 1), values, label=label, linewidth=2, **style)
    axis.set_xlabel("gradient steps")
    axis.set_ylabel("distance from 64x1, relative to its parameters")
    axis.set_title(f"Adam amplifies rounding, not accumulation ({data})")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
