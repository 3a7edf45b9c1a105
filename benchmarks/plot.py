# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of `benchmarks.kda` and prints them: python -m benchmarks.plot RESULTS.json OUT.svg"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 190, 24, 48
CURVES = {
    ("records", "cute"): ("records verify, CuTe DSL", "#76b900"),
    ("records", "triton"): ("records verify, Triton", "#4472c4"),
    ("fla_states", ""): ("fla-core, state per token*", "#c55a11"),
    ("fla_replay", ""): ("fla-core, replay of 7*", "#8064a2"),
    ("copy", ""): ("copy of the same bytes", "#7f7f7f"),
}
TICKS_US = (2, 5, 10, 20, 50, 100, 200)

Points = dict[tuple[str, str], dict[int, float]]


def read_points(path: Path, heads: int = 6) -> Points:
    """us by N for every curve: T 8, mixed acceptance."""
    points: Points = {curve: {} for curve in CURVES}
    for row in json.loads(path.read_text())["rows"]:
        curve = (row["arm"], "" if row["arm"] != "records" else row["implementation"])
        if curve in points and (row["h"], row["t"], row["p"]) == (heads, 8, "mixed"):
            points[curve][row["n"]] = row["us"]
    return {curve: dict(sorted(values.items())) for curve, values in points.items() if values}


def table(points: Points) -> str:
    """Markdown: one line per N, one column per curve, and the op over the copy."""
    names = [CURVES[curve][0] for curve in points]
    lines = ["| N | " + " | ".join(names) + " | CuTe DSL / copy |", "|---" * (len(names) + 2) + "|"]
    for n in points["copy", ""]:
        ratio = points["records", "cute"][n] / points["copy", ""][n]
        cells = [f"{values[n]:.2f}" if n in values else "" for values in points.values()]
        lines.append(f"| {n} | " + " | ".join(cells) + f" | {ratio:.2f} |")
    return "\n".join(lines)


def after_predecessor_table(path: Path, heads: int = 6) -> str:
    """Markdown: us that a layer adds behind a kernel it depends on, by N, in the launch the op chooses."""
    us_by_n = {
        row["n"]: row["us"]
        for row in json.loads(path.read_text())["rows"]
        if (row["arm"], row["implementation"], row["h"]) == ("after_predecessor", "cute", heads)
    }
    lines = ["| N | us a layer adds |", "|---|---|"]
    return "\n".join([*lines, *(f"| {n} | {us:.2f} |" for n, us in sorted(us_by_n.items()))])


def _x(n: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(n) / 7


def _y(us: float) -> float:
    low, high = math.log(1.6), math.log(260)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(us) - low) / (high - low)


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "#888") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def draw(points: Points) -> str:
    """An SVG with both axes logarithmic; readable on a light and on a dark page."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">'
    ]
    for us in TICKS_US:
        parts.append(f'<path d="M{LEFT} {_y(us):.1f}H{WIDTH - RIGHT}" stroke="#8884"/>')
        parts.append(_text(LEFT - 8, _y(us) + 4, str(us), "end"))
    for exponent in range(8):
        parts.append(_text(_x(2**exponent), HEIGHT - BOTTOM + 18, str(2**exponent), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "requests (6 heads, 8 tokens each)", "middle"))
    parts.append(_text(8, TOP - 8, "us per layer, HBM-cold, one H200"))
    for curve, values in points.items():
        label, color = CURVES[curve]
        line = " ".join(f"{_x(n):.1f},{_y(us):.1f}" for n, us in values.items())
        dash = ' stroke-dasharray="5 4"' if curve[0] == "copy" else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        last = list(values.items())[-1]
        parts.append(_text(_x(last[0]) + 8, _y(last[1]) + 4, label, color=color))
    parts.append(_text(WIDTH - RIGHT + 8, HEIGHT - BOTTOM + 18, "* recurrence alone"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    points = read_points(Path(argv[0]))
    Path(argv[1]).write_text(draw(points))
    print(table(points), after_predecessor_table(Path(argv[0])), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
