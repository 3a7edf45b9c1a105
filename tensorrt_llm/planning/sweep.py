# SPDX-License-Identifier: Apache-2.0
"""Plans over a grid of configurations: `tp=8,16,32 drafts=1,3,7 batch=1..64`, as a table and as CSV."""

import csv
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorrt_llm.planning.models import PlannedModel
from tensorrt_llm.planning.plan import JSON_KEYS, SchemePlan, plan_scheme
from tensorrt_llm.planning.request import PlanRequest

FIELD_OF_AXIS = {
    "tp": "tp",
    "pp": "pp",
    "ep": "ep",
    "drafts": "drafts",
    "batch": "max_batch_size",
    "seq": "max_seq_len",
    "page": "tokens_per_block",
}
MOST_PLANS = 20_000
_VALUE = re.compile(r"(-?\d+)(?:\.\.(-?\d+)(?:\.\.(\d+))?)?")
_EXAMPLE = "such as tp=8,16,32 or batch=1..64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An option's values, in the order given."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration under one scheme: its values by axis, and its plan or why it is refused."""

    values: Mapping[str, int]
    scheme: str
    plan: SchemePlan | None
    refusal: str = ""


def is_axis(word: str) -> bool:
    """Whether a word of the command line is meant as an axis."""
    return word.partition("=")[0] in FIELD_OF_AXIS and "=" in word


def parse_axes(words: Sequence[str]) -> tuple[Axis, ...]:
    """Axes from words `name=value,first..last,first..last..step`, ends included. ValueError for others."""
    axes = tuple(_parse_axis(word) for word in " ".join(words).split())
    if not axes:
        raise ValueError(f"--sweep needs at least one axis, {_EXAMPLE}")
    names = [axis.name for axis in axes]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"--sweep has the axis {repeated} twice: give all its values in one, {_EXAMPLE}")
    return axes


def _parse_axis(word: str) -> Axis:
    name, equals, values = word.partition("=")
    if not equals or name not in FIELD_OF_AXIS:
        raise ValueError(
            f"--sweep has no axis {name!r}: give one of {', '.join(FIELD_OF_AXIS)} with values, {_EXAMPLE}"
        )
    numbers = [number for piece in values.split(",") for number in _parse_values(name, piece)]
    return Axis(name=name, values=tuple(dict.fromkeys(numbers)))


def _parse_values(name: str, piece: str) -> range:
    match = _VALUE.fullmatch(piece)
    if match is None:
        raise ValueError(f"--sweep {name}: {piece!r} is neither a number nor a range, {_EXAMPLE}")
    first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    if last < first or step < 1:
        raise ValueError(f"--sweep {name}: the range {piece} is empty; it goes upwards, {_EXAMPLE}")
    return range(first, last + 1, step)


def run_sweep(
    model: PlannedModel, request: PlanRequest, schemes: Sequence[str], axes: Sequence[Axis]
) -> list[Point]:
    """Every combination under every scheme, the last axis fastest.

    Raises ValueError for a value that its option refuses, and for more than MOST_PLANS plans.
    """
    count = len(schemes) * math.prod(len(axis.values) for axis in axes)
    if count > MOST_PLANS:
        raise ValueError(
            f"--sweep asks for {count:,} plans; at most {MOST_PLANS:,} are made: take fewer values"
        )
    points = []
    for combination in itertools.product(*(axis.values for axis in axes)):
        values = {axis.name: value for axis, value in zip(axes, combination, strict=True)}
        changed = request
        for name, value in values.items():
            changed = changed.with_number(FIELD_OF_AXIS[name], value)
        points += [_point(model, changed, values, scheme) for scheme in schemes]
    return points


def _point(model: PlannedModel, request: PlanRequest, values: Mapping[str, int], scheme: str) -> Point:
    try:
        plan = plan_scheme(model, request, scheme)
    except ValueError as error:
        return Point(values=values, scheme=scheme, plan=None, refusal=str(error))
    return Point(values=values, scheme=scheme, plan=plan)


def as_csv(axes: Sequence[Axis], points: Sequence[Point]) -> str:
    """One line per point: the axes, the keys of `--json`, and why a point is refused."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*(axis.name for axis in axes), *JSON_KEYS, "refusal"])
    for point in points:
        numbers = {"scheme": point.scheme} if point.plan is None else point.plan.as_json()
        writer.writerow([*point.values.values(), *(numbers.get(key, "") for key in JSON_KEYS), point.refusal])
    return buffer.getvalue()


def row_axis(axes: Sequence[Axis]) -> Axis:
    """The axis that runs down a table and along a picture: that with the most values, the last of equals."""
    return max(reversed(axes), key=lambda axis: len(axis.values))


def as_table(axes: Sequence[Axis], points: Sequence[Point]) -> str:
    """A table per scheme: tokens of attention and, after them, full-length requests; - where refused."""
    schemes = list(dict.fromkeys(point.scheme for point in points))
    legend = "attention tokens, and how many full-length requests fit at once; - does not fit or is refused"
    return "\n\n".join([legend, *(_scheme_table(axes, points, scheme) for scheme in schemes)])


def _scheme_table(axes: Sequence[Axis], points: Sequence[Point], scheme: str) -> str:
    down = row_axis(axes)
    others = [axis for axis in axes if axis is not down]
    columns = list(itertools.product(*(axis.values for axis in others)))
    cells = {
        (point.values[down.name], tuple(point.values[axis.name] for axis in others)): _cell(point)
        for point in points
        if point.scheme == scheme
    }
    heads = [[axis.name, *(str(column[i]) for column in columns)] for i, axis in enumerate(others)]
    body = [[str(value), *(cells[value, column] for column in columns)] for value in down.values]
    return "\n".join([scheme, *_aligned([*heads, [down.name, *("" for _ in columns)], *body])])


def _cell(point: Point) -> str:
    if point.plan is None:
        return "-"
    return f"{point.plan.attention_tokens:,} {point.plan.full_length_requests:>3}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
