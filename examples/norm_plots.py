"""The picture of batchnorm_vs_groupnorm.py."""

import matplotlib

matplotlib.use("Agg")  # files only, so that it runs without a screen
import matplotlib.pyplot as plt

STYLES = {
    "batch": ("BatchNorm", {"color": "tab:red", "marker": "o"}),
    "group": ("GroupNorm", {"color": "tab:blue", "marker": "s"}),
    "layer": ("LayerNorm", {"color": "tab:green", "marker": "^"}),
    "batch-pooled": ("BatchNorm, pooled statistics", {"color": "tab:orange", "marker": "D"}),
    "batch-sync": ("BatchNorm, over eight devices", {"color": "tab:brown", "marker": "X"}),
    "batch-frozen": ("BatchNorm, frozen statistics", {"color": "tab:purple", "marker": "v"}),
}


def errors(mean_errors, data, effective_batch, path):
    """Test error of each norm over the physical batch, with standard errors."""
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for norm, (label, style) in STYLES.items():
        sizes = sorted((size for name, size in mean_errors if name == norm), reverse=True)
        if not sizes:
            continue
        means, standard_errors = zip(*(mean_errors[norm, size] for size in sizes), strict=True)
        line = "-" if len(sizes) > 2 else ":"
        standard_errors = [error or 0 for error in standard_errors]  # None where there is one seed
        axis.errorbar(
            sizes, means, standard_errors, label=label, capsize=3, linestyle=line, **style
        )
    axis.set_xscale("log", base=2)
    sizes = sorted({size for _, size in mean_errors})
    axis.set_xticks(sizes, [f"{size}\nk={effective_batch // size}" for size in sizes])
    axis.minorticks_off()
    axis.invert_xaxis()
    axis.set_xlabel(f"physical batch (the effective batch is {effective_batch})")
    axis.set_ylabel("test error, %")
    axis.set_title(f"What the norm sees: {data}")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
