# SPDX-License-Identifier: Apache-2.0
"""Rows as text: a table per comparison, and what the schemes of a verify round cost beside each other."""

from collections.abc import Sequence

from benchmarks.kda.rows import AFTER_PREDECESSOR, YARDSTICKS, Row

RATIOS = (("records", "replay"), ("records", "intermediate"), ("records_bf16_conv", "records"))


def column_of(row: Row) -> str:
    """The name of an arm's column; yardsticks are one column whatever their launch."""
    if row.arm in YARDSTICKS:
        return row.arm
    return f"{row.op if row.arm == AFTER_PREDECESSOR else row.arm}/{row.implementation}".rstrip("/")


def table(rows: Sequence[Row]) -> str:
    """us by size, one column per arm and implementation."""
    columns = list(dict.fromkeys(column_of(row) for row in rows))
    sizes = dict.fromkeys((row.n, row.h, row.t, row.p) for row in rows)
    cells = {(row.n, row.h, row.t, row.p, column_of(row)): f"{row.us:.2f}" for row in rows}
    lines = ["| N | H | T | P | " + " | ".join(columns) + " |", "|---" * (len(columns) + 4) + "|"]
    for n, h, t, p in sizes:
        values = " | ".join(cells.get((n, h, t, p, column), "") for column in columns)
        lines.append(f"| {n} | {h} | {t} | {p} | {values} |")
    return "\n".join(lines)


def fastest(rows: Sequence[Row], arm: str) -> Row | None:
    """The arm's fastest implementation, launch variants aside."""
    found = [row for row in rows if row.arm == arm and "/" not in row.implementation]
    return min(found, key=lambda row: row.us, default=None)


def ratios(rows: Sequence[Row]) -> str:
    """How many times as long one scheme takes as another, with the bytes and tokens of each."""
    lines = []
    for n, h, t, p in dict.fromkeys((row.n, row.h, row.t, row.p) for row in rows):
        here = [row for row in rows if (row.n, row.h, row.t, row.p) == (n, h, t, p)]
        for left, right in RATIOS:
            a, b = fastest(here, left), fastest(here, right)
            if a is not None and b is not None:
                costs = f"{_cost(a)} against {_cost(b)}"
                lines.append(f"N {n}, H {h}, P {p}: {right} takes {b.us / a.us:.2f} times {left} ({costs})")
    return "\n".join(lines)


def _cost(row: Row) -> str:
    return f"{row.us:.2f} us, {row.bytes / 1e6:.2f} MB, {row.tokens} tokens, {row.implementation}"
