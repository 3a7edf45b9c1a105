# SPDX-License-Identifier: Apache-2.0
"""A sweep as a picture: tokens of attention over the longest axis, a panel per value of the next one."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorrt_llm.planning.models import PlannedModel
from tensorrt_llm.planning.request import PlanRequest
from tensorrt_llm.planning.svg import MARGIN, WIDTH, document, facts, line, nice_step, text
from tensorrt_llm.planning.sweep import FIELD_OF_AXIS, Axis, Point, row_axis

_SCHEME_COLOURS = {"records": "#d9822b", "replay": "#8e5bb5", "intermediate": "#c2413b"}
_COLOURS = ("#2f6fb2", "#d9822b", "#1d8a7a", "#8e5bb5", "#c2413b", "#7b8794")
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_PANELS_PER_ROW = 3
_PANEL_GAP = 20
_PANEL_HEIGHT = 210
_PANEL_PITCH = 268
_TOP = 84
_LEFT = MARGIN + 44
_MOST_Y_TICKS = 5
_MOST_X_TICKS = 6
_PIXELS_PER_CHARACTER = 6.6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """How a line of a panel is drawn."""

    colour: str
    dash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where a panel lies, and the numbers at its ends."""

    left: float
    top: float
    width: float
    lowest: int
    highest: int
    most_tokens: int

    def x(self, value: int) -> float:
        span = self.highest - self.lowest
        return self.left + ((value - self.lowest) / span * self.width if span else self.width / 2)

    def y(self, tokens: float) -> float:
        return self.top + _PANEL_HEIGHT * (1 - tokens / self.most_tokens)


_Key = tuple[str, tuple[int, ...]]
"""A line: its scheme, and its values of the axes that have neither the abscissa nor a panel."""


def sweep_picture(
    model: PlannedModel, request: PlanRequest, axes: Sequence[Axis], points: Sequence[Point]
) -> str:
    """Small panels on one scale; `request` is what the points have in common. ValueError where none fits."""
    along = row_axis(axes)
    panel = _panel_axis(axes, along)
    inner = [axis for axis in axes if axis not in (along, panel)]
    most, looks = _top_of_scale(points), _looks(points, inner)
    values = (None,) if panel is None else panel.values
    elements: list[str] = []
    for i, value in enumerate(values):
        frame = _frame(i, len(values), along, most)
        elements += _grid(frame, along, show_scale=i % _PANELS_PER_ROW == 0)
        if panel is not None:
            elements.append(text(frame.left, frame.top - 8, f"{panel.name} {value}", "strong"))
        chosen = [p for p in points if panel is None or p.values[panel.name] == value]
        elements += _lines(frame, along, inner, chosen, looks)
    bottom = _TOP + math.ceil(len(values) / _PANELS_PER_ROW) * _PANEL_PITCH
    legend, height = _legend(looks, inner, bottom)
    subtitle = (
        f"{facts(request, [FIELD_OF_AXIS[axis.name] for axis in axes])}. A line ends where nothing fits."
    )
    title = f"{model.name}: tokens in attention pages over {along.name}"
    return document(height, title, [text(MARGIN, 54, subtitle, "faint"), *elements, *legend])


def _top_of_scale(points: Sequence[Point]) -> int:
    """The most tokens of any point, rounded up to the next line."""
    most = max((point.plan.attention_tokens for point in points if point.plan), default=0)
    if not most:
        raise ValueError("no configuration of the sweep fits, so there is nothing to draw")
    step = nice_step(most, _MOST_Y_TICKS)
    return math.ceil(math.ceil(most / step) * step)


def _panel_axis(axes: Sequence[Axis], along: Axis) -> Axis | None:
    """The first of the other axes that has more than one value."""
    return next((axis for axis in axes if axis is not along and len(axis.values) > 1), None)


def _frame(index: int, count: int, along: Axis, most_tokens: int) -> _Frame:
    in_row = min(count, _PANELS_PER_ROW)
    width = (WIDTH - MARGIN - _LEFT - (in_row - 1) * _PANEL_GAP) / in_row
    row, column = divmod(index, _PANELS_PER_ROW)
    return _Frame(
        left=_LEFT + column * (width + _PANEL_GAP),
        top=_TOP + row * _PANEL_PITCH,
        width=width,
        lowest=min(along.values),
        highest=max(along.values),
        most_tokens=most_tokens,
    )


def _looks(points: Sequence[Point], inner: Sequence[Axis]) -> Mapping[_Key, _Look]:
    """Colour by scheme and dashes by the inner axes; one scheme alone has its colours by the inner axes."""
    schemes = list(dict.fromkeys(point.scheme for point in points))
    combinations = list(itertools.product(*(axis.values for axis in inner)))
    looks = {}
    for scheme, (i, values) in itertools.product(schemes, enumerate(combinations)):
        by_scheme = len(schemes) > 1 or len(combinations) == 1
        looks[scheme, values] = _Look(
            colour=_SCHEME_COLOURS[scheme] if by_scheme else _COLOURS[i % len(_COLOURS)],
            dash=_DASHES[i % len(_DASHES)] if by_scheme else "",
        )
    return looks


def _grid(frame: _Frame, along: Axis, *, show_scale: bool) -> list[str]:
    right, bottom = frame.left + frame.width, frame.top + _PANEL_HEIGHT
    step = nice_step(frame.most_tokens, _MOST_Y_TICKS)
    elements = []
    for tick in range(int(frame.most_tokens / step) + 1):
        y = frame.y(tick * step)
        elements.append(line(frame.left, y, right, y))
        if show_scale:
            elements.append(text(frame.left - 8, y + 4, _short(tick * step), "faint end"))
    for value in _x_ticks(along):
        elements.append(text(frame.x(value), bottom + 18, f"{value}", "faint middle"))
    elements.append(text(frame.left + frame.width / 2, bottom + 36, along.name, "faint middle"))
    return elements


def _x_ticks(along: Axis) -> list[int]:
    """The values themselves where they are few, else round numbers between the ends."""
    if len(along.values) <= _MOST_X_TICKS:
        return list(along.values)
    lowest, highest = min(along.values), max(along.values)
    step = max(1, round(nice_step(highest - lowest, _MOST_X_TICKS)))
    return [tick for tick in range(0, highest + 1, step) if tick >= lowest]


def _short(tokens: float) -> str:
    return (
        f"{tokens / 10**6:g} M"
        if tokens >= 10**6
        else f"{tokens / 1000:g} k"
        if tokens >= 1000
        else f"{tokens:g}"
    )


def _lines(
    frame: _Frame, along: Axis, inner: Sequence[Axis], points: Sequence[Point], looks: Mapping[_Key, _Look]
) -> list[str]:
    elements = []
    for (scheme, values), look in looks.items():
        own = [
            (frame.x(point.values[along.name]), frame.y(point.plan.attention_tokens))
            for point in sorted(points, key=lambda p: p.values[along.name])
            if point.plan and point.scheme == scheme and tuple(point.values[a.name] for a in inner) == values
        ]
        if own:
            elements.append(_curve(own, look))
    return elements


def _curve(points: Sequence[tuple[float, float]], look: _Look) -> str:
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{look.colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{look.colour}" stroke-width="2"{dash}/>'


def _legend(looks: Mapping[_Key, _Look], inner: Sequence[Axis], top: float) -> tuple[list[str], float]:
    """A stroke and a name per line, and the height that they end at."""
    elements, x = [], float(MARGIN)
    top += 8
    for (scheme, values), look in looks.items():
        label = " ".join(
            [scheme, *(f"{axis.name} {value}" for axis, value in zip(inner, values, strict=True))]
        )
        width = 34 + len(label) * _PIXELS_PER_CHARACTER + 16
        if x + width > WIDTH - MARGIN:
            x, top = float(MARGIN), top + 22
        elements.append(_curve([(x, top - 4), (x + 26, top - 4)], look))
        elements.append(text(x + 34, top, label, "faint"))
        x += width
    return elements, top + 20
