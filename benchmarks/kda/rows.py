# SPDX-License-Identifier: Apache-2.0
"""Figures as rows: their schema, the sources they belong to, and how a run's rows join earlier ones."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS

HASH_DIGITS = 16
YARDSTICKS = ("copy", "weight_pass")
"""Arms of the benchmark's own kernels; of several launch shapes the best is kept."""
AFTER_PREDECESSOR = "after_predecessor"

_HERE = Path(__file__).parent
Key = tuple[str, str, str, int, int, int, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: us per call.

    p: drafts replayed per request, or "mixed" (3, 4 .. 7, 0 .. in turn). bytes: the fewest a call moves.
    tokens: that a call computes, replayed ones included; 0 in rows from before it was kept. stale: the
    sources have moved on since.
    """

    op: str
    arm: str
    implementation: str
    n: int
    h: int
    t: int
    p: int | str
    us: float
    us_spread: float
    bytes: int
    source_hash: str
    tokens: int = 0
    stale: bool = False

    @property
    def key(self) -> Key:
        """What the row is a figure of."""
        implementation = "" if self.arm in YARDSTICKS else self.implementation
        return (self.op, self.arm, implementation, self.n, self.h, self.t, self.p)

    def dump(self) -> str:
        """One line of JSON; what is not known or not so is left out."""
        values = {
            name: value for name, value in asdict(self).items() if value or name not in ("tokens", "stale")
        }
        return json.dumps(values)


def parse_row(values: dict[str, Any]) -> Row:
    """A row from JSON; ValueError names a field that is missing, unknown or of another kind."""
    kinds = {"us": (float, int), "us_spread": (float, int), "p": (int, str), "stale": bool}
    kinds |= dict.fromkeys(("n", "h", "t", "bytes", "tokens"), int)
    known = {field.name for field in fields(Row)}
    if unknown := set(values) - known:
        raise ValueError(f"a row of figures has the unknown field {min(unknown)!r}")
    if missing := known - set(values) - {"tokens", "stale"}:
        raise ValueError(f"a row of figures lacks {min(missing)!r}")
    for name, value in values.items():
        if not isinstance(value, kinds.get(name, str)):
            raise ValueError(f"{name} of a row of figures is {value!r}")
    row = Row(**values)
    if not (math.isfinite(row.us) and row.us_spread >= 0):
        raise ValueError(f"us of a row of figures is {row.us!r} with a spread of {row.us_spread!r}")
    if isinstance(row.p, str) and row.p != "mixed":
        raise ValueError(f'p of a row of figures is {row.p!r}: it is a count or "mixed"')
    return row


def source_hash(op: str, arm: str, implementation: str) -> str:
    """What a figure belongs to: a hash of the implementation's sources, or a package's release.

    Empty for an op or an implementation that is no more.
    """
    if arm.startswith("fla_"):
        try:
            return f"fla-core {version('fla-core')}"
        except PackageNotFoundError:
            return ""
    if arm in YARDSTICKS:
        return packs.source_hash(("yardstick_kernels.py",), _HERE)[:HASH_DIGITS]
    name = implementation.partition("/")[0]
    found = [x for x in OPS[op].implementations if x.name == name] if op in OPS else []
    return packs.source_hash(found[0].sources)[:HASH_DIGITS] if found else ""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    return [parse_row(row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """A row a line; the file is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text('{"rows": [\n  ' + ",\n  ".join(row.dump() for row in rows) + "\n]}\n")
    scratch.replace(path)


def merge(kept: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows in place of those of their keys; a kept one is marked stale where its sources moved on."""
    fresh = {row.key: row for row in new}
    merged = [fresh.pop(row.key) if row.key in fresh else _marked(row) for row in kept]
    return [*merged, *fresh.values()]


def _marked(row: Row) -> Row:
    return replace(row, stale=row.source_hash != source_hash(row.op, row.arm, row.implementation))


def findings(rows: Sequence[Row]) -> list[str]:
    """One line per op, arm and implementation whose figures are of other sources than these."""
    old: dict[tuple[str, str, str], int] = {}
    for row in map(_marked, rows):
        if row.stale:
            name = (row.op, row.arm, "" if row.arm in YARDSTICKS else row.implementation.partition("/")[0])
            old[name] = old.get(name, 0) + 1
    return [
        f"{op}, {arm} {implementation}".rstrip() + f": {count} figures are of other sources"
        for (op, arm, implementation), count in sorted(old.items())
    ]


def carry(rows: Sequence[Row], implementations: Sequence[str]) -> list[Row]:
    """The rows with the hash of these sources for `implementations` ("cute", "triton", "copy", "fla").

    For sources whose compiled code was compared and found the same; nothing checks that here.
    """
    return [
        replace(row, source_hash=source_hash(row.op, row.arm, row.implementation), stale=False)
        if (row.implementation.partition("/")[0] in implementations and row.arm not in YARDSTICKS)
        or row.arm.partition("_")[0] in implementations
        else row
        for row in rows
    ]
