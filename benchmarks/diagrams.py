"""The pictures that explain: docs/how-it-works.md shows them.

    python -m benchmarks.diagrams [--out docs/pictures]

SVG without a background, in colours and a grey that can be read on white and on black.
"""

import argparse
import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

GREY, BLUE, ORANGE, GREEN, VIOLET = "#747b84", "#1f83d6", "#e0801f", "#2fa36b", "#b06fd8"
WIDTH = 720


class Drawing:
    """Boxes, words and arrows; a y grows downward."""

    def __init__(self, height: int) -> None:
        self.height, self.parts = height, []

    def words(self, x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
            f' fill="{GREY}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, colour: str, text: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{colour}"'
            f' fill-opacity="0.12" stroke="{colour}"/>'
        )
        if text:
            self.words(x + w / 2, y + h / 2 + 4, text)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{GREY}"'
            ' marker-end="url(#end)"/>'
        )

    def __str__(self) -> str:
        end = (
            '<marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}"'
            f' width="{WIDTH}" height="{self.height}" font-family="sans-serif">'
        )
        return "\n".join([head, f"<defs>{end}</defs>", *self.parts, "</svg>\n"])


def online_softmax() -> Drawing:
    """One query over three blocks of two keys: numbers as the algorithm computes them."""
    blocks, values = [(1.0, 3.0), (2.0, 0.0), (5.0, 1.0)], [(1.0, 2.0), (4.0, 0.0), (3.0, 1.0)]
    drawing, largest, total, out = Drawing(230), -math.inf, 0.0, 0.0
    for row, name in enumerate(("scores S", "largest so far, m", "old sums times", "sum ℓ", "O")):
        drawing.words(120, 62 + 34 * row, name, "end")
    for i, (scores, v) in enumerate(zip(blocks, values, strict=True)):
        x = 150 + 185 * i
        drawing.words(x + 75, 20, f"keys {2 * i} and {2 * i + 1}")
        drawing.box(x, 44, 150, 26, BLUE, f"{scores[0]:g}, {scores[1]:g}")
        before, largest = largest, max(largest, *scores)
        factor = math.exp(before - largest)
        weights = [math.exp(s - largest) for s in scores]
        total = total * factor + sum(weights)
        out = out * factor + sum(p * value for p, value in zip(weights, v, strict=True))
        drawing.box(x, 78, 150, 26, ORANGE, f"{largest:g}")
        text = "nothing yet" if i == 0 else f"exp({before:g} - {largest:g}) = {factor:.3f}"
        drawing.box(x, 112, 150, 26, VIOLET, text)
        drawing.box(x, 146, 150, 26, GREEN, f"{total:.3f}")
        drawing.box(x, 180, 150, 26, GREEN, f"{out:.3f}")
        if i > 0:
            drawing.arrow(x - 33, 159, x - 2, 159)
            drawing.arrow(x - 33, 193, x - 2, 193)
    drawing.words(
        WIDTH / 2,
        225,
        f"at the end: out = O / ℓ = {out / total:.3f},"
        f" LSE = m + log ℓ = {largest + math.log(total):.3f}",
    )
    return drawing


def split_kv() -> Drawing:
    drawing, pieces = Drawing(210), 4
    drawing.words(20, 34, "the keys of one sequence", "start")
    for i in range(pieces):
        x = 20 + 170 * i
        drawing.box(x, 44, 160, 28, BLUE, f"piece {i}")
        drawing.arrow(x + 80, 74, x + 80, 96)
        drawing.box(x, 98, 160, 28, ORANGE, "a thread block: O, LSE")
        drawing.arrow(x + 80, 128, 360 + 40 * (i - 1.5), 160)
    drawing.box(230, 162, 260, 28, GREEN, "merge: Σ exp(LSEᵢ - LSE) · Oᵢ")
    drawing.words(505, 181, "the second kernel, which starts early", "start", 10)
    return drawing


def timeline(rows: list[tuple[str, list[tuple[float, float, str, str]]]], unit: float) -> Drawing:
    """rows: name, and (begin, length, colour, words) of what runs, in steps of `unit` points."""
    drawing = Drawing(40 + 44 * len(rows))
    for number, (name, boxes) in enumerate(rows):
        y = 14 + 44 * number
        drawing.words(104, y + 21, name, "end", 11)
        for begin, length, colour, text in boxes:
            drawing.box(112 + unit * begin, y, unit * length - 3, 32, colour, text)
    drawing.words(112, drawing.height - 8, "time →", "start", 10)
    return drawing


def hopper_forward() -> Drawing:
    products, softmax, copies = BLUE, ORANGE, GREEN
    issue = "issues Q Kᵀ and P V"
    return timeline(
        [
            ("producer", [(i, 1, copies, f"K, V ({n})") for i, n in enumerate("5432")]),
            (
                "consumer 0",
                [(i, 1, (products, softmax)[i % 2], (issue, "softmax")[i % 2]) for i in range(4)],
            ),
            (
                "consumer 1",
                [(i, 1, (softmax, products)[i % 2], ("softmax", issue)[i % 2]) for i in range(4)],
            ),
            (
                "tensor cores",
                [(i, 1, products, f"of consumer {i % 2}") for i in range(4)],
            ),
        ],
        148,
    )


def hopper_backward() -> Drawing:
    names = ["S (i)", "dP (i)", "dV, half", "dV, half", "dQ (i-1)", "dK (i)"]
    others = ["LSE, delta", "exp", "dS, half", "dS → memory", "", "dQ → L2"]
    second = ["dQ (i-2)", "dK (i-1)", "S (i)", "dP (i)", "dV, half", "dV, half"]
    return timeline(
        [
            ("consumer 0", [(i, 1, BLUE, n) for i, n in enumerate(names)]),
            ("and meanwhile", [(i, 1, ORANGE, n) for i, n in enumerate(others) if n]),
            ("consumer 1", [(i, 1, VIOLET, n) for i, n in enumerate(second)]),
        ],
        99,
    )


def call_memory() -> Drawing:
    """Bytes of a forward and backward call of one sequence, 16 heads of 128 in bf16."""
    length, heads, d = 8192, 16, 128
    rows = length * heads
    tensor, row, square = rows * d * 2, rows * 4, rows * length
    kinds = [
        ("q, k, v, out, dout, dq, dk, dv", 8 * tensor, BLUE),
        ("LSE and delta, fp32", 2 * row, GREEN),
        ("the sums of dQ, fp32", 2 * tensor, ORANGE),
        ("naive attention: S and P, bf16", 2 * 2 * square, VIOLET),
    ]
    drawing = Drawing(50 + 34 * len(kinds))
    longest = max(size for _, size, _ in kinds)
    for number, (name, size, colour) in enumerate(kinds):
        y = 12 + 34 * number
        drawing.words(240, y + 17, name, "end")
        wide = max(2, 360 * size / longest)
        drawing.box(250, y, wide, 24, colour)
        drawing.words(258 + wide, y + 17, f"{size / 2**20:,.0f} MiB", "start")
    drawing.words(
        WIDTH / 2,
        drawing.height - 8,
        f"{heads} heads of {d}, {length} tokens; naive: S and P alone",
    )
    return drawing


DRAWINGS = {
    "online-softmax": online_softmax,
    "split-kv": split_kv,
    "hopper-forward": hopper_forward,
    "hopper-backward": hopper_backward,
    "call-memory": call_memory,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "docs" / "pictures"
    parser.add_argument("--out", type=Path, default=default, metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (args.out / f"{name}.svg").write_text(str(draw()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
