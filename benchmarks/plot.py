# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of `benchmarks.kda` and prints them: python -m benchmarks.plot RESULTS.json OUT.svg

OUT.svg shows the verify ops; where there are figures of decode or prefill, OUT-decode.svg and OUT-prefill.svg
those. A figure marked with a dagger was measured on other sources than the file's newest.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kda.comparisons import OPS_OF
from benchmarks.kda.rows import AFTER_PREDECESSOR, YARDSTICKS, Row, read_rows

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 190, 24, 48
COPY = ("copy", "")
IMPLEMENTATIONS = {"cute": "CuTe DSL", "triton": "Triton", "fla": "through fla-core"}
Curve = tuple[str, str]
Points = dict[Curve, dict[int, Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Curves of one comparison by name and color, over `axis` ("n" or "t"), doublings of `first` to `last`.

    `sizes`: what rows must have in common, beside the heads.
    """

    comparison: str
    curves: dict[Curve, tuple[str, str]]
    axis: str
    first: int
    last: int
    sizes: dict[str, int | str]
    us: tuple[float, float]
    ticks_us: tuple[int, ...]
    caption: str
    footnote: str = ""

    def x(self, value: float) -> float:
        share = math.log2(value / self.first) / math.log2(self.last / self.first)
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(self, us: float) -> float:
        low, high = map(math.log, self.us)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(us) - low) / (high - low)

    def values(self) -> list[int]:
        """The doublings on the axis."""
        return [self.first << i for i in range(round(math.log2(self.last / self.first)) + 1)]


PICTURES = {
    picture.comparison: picture
    for picture in (
        Picture(
            comparison="verify",
            curves={
                ("records", "cute"): ("records verify, CuTe DSL", "#76b900"),
                ("records", "triton"): ("records verify, Triton", "#4472c4"),
                ("replay", "cute"): ("replay verify, CuTe DSL", "#2e9e83"),
                ("replay", "triton"): ("replay verify, Triton", "#5b9bd5"),
                ("intermediate", "cute"): ("states verify, CuTe DSL", "#bf9000"),
                ("intermediate", "triton"): ("states verify, Triton", "#a05195"),
                ("fla_states", ""): ("fla-core, state per token*", "#c55a11"),
                ("fla_replay", ""): ("fla-core, replay of 7*", "#8064a2"),
                COPY: ("copy of the same bytes", "#7f7f7f"),
            },
            axis="n",
            first=1,
            last=128,
            sizes={"t": 8, "p": "mixed"},
            us=(1.6, 260),
            ticks_us=(2, 5, 10, 20, 50, 100, 200),
            caption="requests (6 heads, 8 tokens each)",
            footnote="* recurrence alone",
        ),
        Picture(
            comparison="decode",
            curves={
                ("decode", "cute"): ("decode, CuTe DSL", "#76b900"),
                ("decode", "triton"): ("decode, Triton", "#4472c4"),
                COPY: ("copy of the same bytes", "#7f7f7f"),
            },
            axis="n",
            first=1,
            last=128,
            sizes={"t": 1, "p": 0},
            us=(1.6, 260),
            ticks_us=(2, 5, 10, 20, 50, 100, 200),
            caption="requests (6 heads, 1 token each)",
        ),
        Picture(
            comparison="prefill",
            curves={
                ("prefill", "fla"): ("prefill, through fla-core", "#76b900"),
                ("prefill", "torch"): ("prefill, torch", "#4472c4"),
                ("fla_core", ""): ("fla-core's chunk_kda*", "#c55a11"),
                COPY: ("copy of the same bytes", "#7f7f7f"),
            },
            axis="t",
            first=128,
            last=8192,
            sizes={"n": 1, "p": 0},
            us=(1.6, 20_000),
            ticks_us=(2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000),
            caption="tokens of one prompt (6 heads)",
            footnote="* chunks alone",
        ),
    )
}
VERIFY = PICTURES["verify"]


def _curve_of(row: Row) -> Curve:
    return (row.arm, "" if row.arm in YARDSTICKS else row.implementation)


def read_points(path: Path, heads: int = 6, picture: Picture = VERIFY) -> Points:
    """Rows by the axis' value for every curve of a picture that has any."""
    points: Points = {curve: {} for curve in picture.curves}
    wanted = picture.sizes | {"h": heads}
    for row in read_rows(path):
        fits = row.op in OPS_OF[picture.comparison] and all(
            value == {"n": row.n, "t": row.t, "h": row.h, "p": row.p}[name] for name, value in wanted.items()
        )
        if fits and _curve_of(row) in points:
            points[_curve_of(row)][row.n if picture.axis == "n" else row.t] = row
    return {curve: dict(sorted(values.items())) for curve, values in points.items() if values}


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row.us:.2f}{'†' if row.stale else ''}"


def table(points: Points, picture: Picture = VERIFY) -> str:
    """Markdown: one line per value, one column per curve, and the op over the copy."""
    names = [picture.curves[curve][0] for curve in points]
    first = next((curve for curve in points if curve[1] in IMPLEMENTATIONS), None)
    head = [picture.axis.upper(), *names]
    if first is not None and COPY in points:
        head.append(f"{IMPLEMENTATIONS[first[1]]} / copy")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for value in sorted({value for values in points.values() for value in values}):
        cells = [str(value), *(_cell(values.get(value)) for values in points.values())]
        if len(head) > len(cells) and first is not None:
            op, copy = points[first].get(value), points[COPY].get(value)
            cells.append("" if op is None or copy is None else f"{op.us / copy.us:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def after_predecessor_table(path: Path, heads: int = 6, op: str = "k3_kda_verify") -> str:
    """Markdown: us that a layer adds behind a kernel it depends on, by N, in the launch the op chooses."""
    found = {
        row.n: row
        for row in read_rows(path)
        if (row.op, row.arm, row.implementation, row.h) == (op, AFTER_PREDECESSOR, "cute", heads)
    }
    lines = ["| N | us a layer adds |", "|---|---|"]
    return "\n".join([*lines, *(f"| {n} | {_cell(row)} |" for n, row in sorted(found.items()))])


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "#888") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def _axes(picture: Picture) -> list[str]:
    parts = []
    for us in picture.ticks_us:
        parts.append(f'<path d="M{LEFT} {picture.y(us):.1f}H{WIDTH - RIGHT}" stroke="#8884"/>')
        parts.append(_text(LEFT - 8, picture.y(us) + 4, str(us), "end"))
    for value in picture.values():
        parts.append(_text(picture.x(value), HEIGHT - BOTTOM + 18, str(value), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, picture.caption, "middle"))
    parts.append(_text(8, TOP - 8, "us per layer, HBM-cold, one H200"))
    return parts


def label_heights(points: Points, picture: Picture) -> dict[Curve, float]:
    """Where each curve's name stands: at its end, moved down from one that it would cover."""
    ends = {curve: picture.y(list(values.values())[-1].us) + 4 for curve, values in points.items()}
    heights: dict[Curve, float] = {}
    lowest = -math.inf
    for curve in sorted(ends, key=lambda curve: ends[curve]):
        lowest = heights[curve] = max(ends[curve], lowest + 12)
    return heights


def draw(points: Points, picture: Picture = VERIFY) -> str:
    """An SVG with both axes logarithmic; readable on a light and on a dark page."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        *_axes(picture),
    ]
    heights = label_heights(points, picture)
    for curve, values in points.items():
        label, color = picture.curves[curve]
        line = " ".join(f"{picture.x(at):.1f},{picture.y(row.us):.1f}" for at, row in values.items())
        dash = ' stroke-dasharray="5 4"' if curve == COPY else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(_text(picture.x(list(values)[-1]) + 8, heights[curve], label, color=color))
    if picture.footnote:
        parts.append(_text(WIDTH - RIGHT + 8, HEIGHT - BOTTOM + 18, picture.footnote))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    results, out = Path(argv[0]), Path(argv[1])
    for picture in PICTURES.values():
        points = read_points(results, picture=picture)
        if points:
            suffix = "" if picture is VERIFY else f"-{picture.comparison}"
            out.with_stem(out.stem + suffix).write_text(draw(points, picture))
            print(f"{picture.comparison}\n\n{table(points, picture)}\n")
    print(after_predecessor_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
