"""Draws records {kind, shape, unit, values, ratio} over sequence length with matplotlib."""

import math


def plot_records(records: list[dict], path: str, title: str = "") -> None:
    """A panel for each kind and shape without seqlen and batch, a line for each value."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[tuple, list[dict]] = {}
    for record in records:
        if "seqlen" not in record["shape"]:
            continue
        fixed = tuple(
            (k, v) for k, v in record["shape"].items() if k not in ("seqlen", "batch", "heads")
        )
        panels.setdefault((record["kind"], record["unit"], fixed), []).append(record)
    if not panels:
        raise ValueError(
            "no record has a seqlen in its shape: nothing to draw over sequence length"
        )
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False)
    for axis, ((kind, unit, fixed), group) in zip(axes.flat, panels.items(), strict=False):
        _draw(axis, group)
        axis.set_title(" ".join([kind, *(_words(k, v) for k, v in fixed)]), fontsize=9)
        axis.set_ylabel(unit)
        if unit in ("ms", "us", "MiB"):  # grow by powers of the length; rates do not
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _words(name: str, value: object) -> str:
    if name == "causal":
        return "causal" if value else "full"
    return f"{name} {value}"


def _draw(axis, group: list[dict]) -> None:
    group = sorted(group, key=lambda r: r["shape"]["seqlen"])
    names = dict.fromkeys(name for record in group for name in record["values"])
    for name in names:
        points = [(r["shape"]["seqlen"], r["values"].get(name)) for r in group]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("sequence length")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
