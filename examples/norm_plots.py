"""The picture of batchnorm_vs_groupnorm.py."""

import matplotlib

matplotlib.use("Agg")  # files only, so that it runs without a screen
import matplotlib.pyplot as plt

STYLES = {
    "batch": ("BatchNorm", {"color": "tab:red", "marker": "o"}),
    "group": ("GroupNorm", {"color": "tab:blue", "marker": "s"}),
    "layer": ("LayerNorm", {"color": "tab:green", "marker": "^"}),
    "batch-pooled": ("BatchNorm, pooled statistics", {"color": "tab:orange", "marker": "D"}),
    "batch-frozen": ("BatchNorm, frozen statistics", {"color": "tab:purple", "marker": "v"}),
}


def errors(statistics, data, path):
    """Test error of each norm over the physical batch, with standard errors."""
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for norm, (label, style) in STYLES.items():
        sizes = sorted((size for name, size in statistics if name == norm), reverse=True)
        if not sizes:
            continue
        means, spreads = zip(*(statistics[norm, size] for size in sizes), strict=True)
        line = "-" if len(sizes) > 2 else ":"
        spreads = [spread or 0 for spread in spreads]  # None where there is one seed
        axis.errorbar(sizes, means, spreads, label=label, capsize=3, linestyle=line, **style)
    axis.set_xscale("log", base=2)
    sizes = sorted({size for _, size in statistics})
    axis.set_xticks(sizes, [f"{size}\nk={64 // size}" for size in sizes])
    axis.minorticks_off()
    axis.invert_xaxis()
    axis.set_xlabel("physical batch (the effective batch is 64)")
    axis.set_ylabel("test error, %")
    axis.set_title(f"What the norm sees: {data}")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
