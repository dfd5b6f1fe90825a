"""The pictures that README shows, from the newest results.

    python -m benchmarks.pictures [--out docs/pictures]

SVG without a background, in colours and a grey that can be read on white and on black.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks import results

NAMES = {
    "sm90": "flash_attn (this)",
    "cuda": "flash_attn (this)",
    "ours": "flash_attn (this)",
    "fa2": "FlashAttention-2",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "sdpa": "SDPA's default",
    "flex": "FlexAttention",
}
COLOURS = {
    "flash_attn (this)": "#1f83d6",
    "cuDNN": "#e0801f",
    "FlashAttention-2": "#2fa36b",
    "FlashAttention-4": "#2fa36b",
    "SDPA's default": "#2fa36b",
    "FlexAttention": "#b06fd8",
}
GREY = "#747b84"
STYLE = {
    "svg.hashsalt": "flash_attn",
    "font.size": 9,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
KIBI = 1024


def length(rows: int) -> str:
    return f"{rows // KIBI}k" if rows >= KIBI else str(rows)


def lines(axes: Axes, records: list[dict]) -> None:
    """One value a contestant over the length of the sequence."""
    for name in NAMES:
        points = [(r["shape"]["seqlen"], r["values"].get(name)) for r in records]
        if all(value is None for _, value in points):
            continue
        label = NAMES[name]
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, color=COLOURS[label], label=label)
    seqlens = [r["shape"]["seqlen"] for r in records]
    axes.set_xscale("log", base=2)
    axes.set_xticks(seqlens, [length(s) for s in seqlens])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def bars(axes: Axes, records: list[dict], labels: list[str]) -> None:
    """A group of bars a record."""
    present = [name for name in NAMES if any(r["values"].get(name) for r in records)]
    width = 0.8 / len(present)
    for index, name in enumerate(present):
        places = [i + (index - (len(present) - 1) / 2) * width for i in range(len(records))]
        heights = [r["values"].get(name) or 0 for r in records]
        axes.bar(places, heights, width * 0.92, color=COLOURS[NAMES[name]], label=NAMES[name])
    axes.set_xticks(range(len(records)), labels)
    axes.grid(axis="y", alpha=0.25)


def race(records: list[dict], kind: str) -> plt.Figure:
    figure, rows = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, layout="constrained")
    for causal, row in enumerate(rows):
        for d, axes in zip((64, 128, 256), row, strict=True):
            wanted = (d, bool(causal))
            lines(
                axes,
                [
                    r
                    for r in records
                    if r["kind"] == kind and (r["shape"]["d"], r["shape"]["causal"]) == wanted
                ],
            )
            axes.set_title(f"head dim {d}, {'causal' if causal else 'full'}", fontsize=9)
    rows[0][0].legend(loc="lower right")
    figure.supylabel("TFLOP/s", fontsize=9)
    figure.supxlabel("tokens of a sequence, 16k in all", fontsize=9)
    return figure


def decode(records: list[dict]) -> plt.Figure:
    chosen = [r for r in records if r["kind"] == "decode"]
    labels = [
        f"{r['shape']['heads']}\nbatch {r['shape']['batch']}\n{length(r['shape']['length'])}"
        for r in chosen
    ]
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    bars(axes, chosen, labels)
    axes.legend(loc="upper left", ncols=3)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.15)
    axes.set_ylabel("K and V read, TB/s")
    axes.set_xlabel("heads of queries / of keys, sequences, tokens of each")
    return figure


def steps(records: list[dict]) -> plt.Figure:
    titles = {
        "llama128": "Llama\nd = 128",
        "llama64": "Llama\nd = 64",
        "gpt2": "GPT-2\ndropout",
        "gemma2": "Gemma-2\nsoftcap",
    }
    chosen = [r for r in records if r["kind"] == "step" and r["shape"]["model"] in titles]
    labels = [f"{titles[r['shape']['model']]}\n{length(r['shape']['seqlen'])}" for r in chosen]
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    bars(axes, chosen, labels)
    axes.legend(loc="upper left", ncols=2)
    axes.set_ylabel("ms of a training step")
    axes.set_xlabel("model of four layers, tokens of a sequence, 16k in all")
    return figure


# Each picture, the end of its file's name among the results, and what draws it. They are the runs
# whose means README quotes.
PICTURES: dict[str, tuple[str, Callable[[list[dict]], plt.Figure]]] = {
    "forward": ("h200-fwd-34-shapes", lambda records: race(records, "fwd")),
    "backward": ("h200-bwd-fa4", lambda records: race(records, "bwd")),
    "decode": ("h200-decode", decode),
    "step": ("h200-steps", steps),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", default=results.ROOT / "docs" / "pictures")
    out = Path(parser.parse_args().out)
    out.mkdir(parents=True, exist_ok=True)
    for name, (ending, draw) in PICTURES.items():
        newest = max((results.ROOT / "benchmarks" / "results").glob(f"*-{ending}.json"))
        with plt.rc_context(STYLE):
            figure = draw(results.read(newest))
            figure.savefig(out / f"{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
        print(f"{out / name}.svg from {newest.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
