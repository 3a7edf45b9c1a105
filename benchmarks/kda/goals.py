# SPDX-License-Identifier: Apache-2.0
"""What the ops shall reach on one H200, 6 heads, and whether the rows of a file do: --goals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.kda.rows import Row
from benchmarks.kda.table import fastest

LAUNCH_US = 1.0
"""What one launch more costs in a graph, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`measure` gives a figure that shall be at most `limit`, None where the rows do not tell."""

    name: str
    measure: Callable[[Sequence[Row]], float | None]
    limit: float


def _at(rows: Sequence[Row], **sizes: int | str) -> list[Row]:
    return [
        row for row in rows if all({"n": row.n, "t": row.t, "p": row.p}[k] == v for k, v in sizes.items())
    ]


def _arm(rows: Sequence[Row], op: str, arm: str, implementation: str | None = None) -> Row | None:
    """The fastest row of an arm, or the one of an implementation."""
    mine = [row for row in rows if row.op == op]
    if implementation is None:
        return fastest(mine, arm)
    return next((row for row in mine if (row.arm, row.implementation) == (arm, implementation)), None)


def _over(left: Row | None, right: Row | None) -> float | None:
    return None if left is None or right is None else left.us / right.us


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _us(op: str, arm: str, n: int) -> Callable[[Sequence[Row]], float | None]:
    def measure(rows: Sequence[Row]) -> float | None:
        row = _arm(_at(rows, n=n, p=0 if op == "kda_decode" else "mixed"), op, arm)
        return None if row is None else row.us

    return measure


def _copies(
    op: str, arm: str, requests: Sequence[int], p: int | str
) -> Callable[[Sequence[Row]], float | None]:
    def measure(rows: Sequence[Row]) -> float | None:
        sizes = [_at(rows, n=n, p=p) for n in requests]
        return _worst([_over(_arm(here, op, arm), _arm(here, op, "copy")) for here in sizes])

    return measure


def _triton_over_cute(rows: Sequence[Row]) -> float | None:
    sizes = [_at(rows, n=n, p="mixed") for n in {row.n for row in rows}]
    op = "k3_kda_verify"
    return _worst([_over(_arm(x, op, "records", "triton"), _arm(x, op, "records", "cute")) for x in sizes])


def _records_beyond_replay(rows: Sequence[Row]) -> float | None:
    """us by which records are slower than replay, the larger spread taken off, at the worst size."""
    beyond = []
    for n, p in {(row.n, row.p) for row in rows}:
        here = _at(rows, n=n, p=p)
        records, replay = _arm(here, "k3_kda_verify", "records"), _arm(here, "kda_mtp_decode", "replay")
        if records is not None and replay is not None:
            beyond.append(records.us - replay.us - max(records.us_spread, replay.us_spread))
    return _worst(beyond)


def _records_over(op: str, arm: str, fits: Callable[[Row], bool]) -> Callable[[Sequence[Row]], float | None]:
    def measure(rows: Sequence[Row]) -> float | None:
        shares = []
        for n, p in {(row.n, row.p) for row in rows if fits(row)}:
            here = _at(rows, n=n, p=p)
            shares.append(_over(_arm(here, "k3_kda_verify", "records"), _arm(here, op, arm)))
        return _worst(shares)

    return measure


def _attn_over_floor(rows: Sequence[Row]) -> float | None:
    parts = [_arm(_at(rows, p="mixed"), "k3_kda_attn", arm) for arm in ("attn", "weight_pass", "copy")]
    op, weight, copy = parts
    return None if op is None or weight is None or copy is None else op.us / (weight.us + copy.us)


def _attn_beyond_halves(rows: Sequence[Row]) -> float | None:
    here = _at(rows, p="mixed")
    op, halves = (_arm(here, "k3_kda_attn", arm) for arm in ("attn", "projection_then_verify"))
    return None if op is None or halves is None else op.us - halves.us


def _prefill_over_fla(rows: Sequence[Row]) -> float | None:
    sizes = [_at(rows, t=t) for t in {row.t for row in rows if row.op == "kda_prefill"}]
    return _worst(
        [_over(_arm(x, "kda_prefill", "prefill"), _arm(x, "kda_prefill", "fla_core")) for x in sizes]
    )


_VERIFY = "k3_kda_verify"
GOALS = (
    *(
        Goal(name=f"verify, N {n}: us", measure=_us(_VERIFY, "records", n), limit=limit)
        for n, limit in ((1, 6.0), (8, 8.0), (32, 15.0), (64, 27.0))
    ),
    Goal(
        name="verify, N 32 and 64: copies", measure=_copies(_VERIFY, "records", (32, 64), "mixed"), limit=1.5
    ),
    Goal(name="verify, any N: Triton over CuTe DSL", measure=_triton_over_cute, limit=2.0),
    Goal(
        name="any N and P: us of records beyond replay and spread", measure=_records_beyond_replay, limit=0.0
    ),
    Goal(
        name="N <= 8, P 7: records over replay",
        measure=_records_over("kda_mtp_decode", "replay", lambda row: row.n <= 8 and row.p == 7),
        limit=1 / 1.2,
    ),
    Goal(
        name="N >= 16: records over intermediate states",
        measure=_records_over("kda_intermediate_verify", "intermediate", lambda row: row.n >= 16),
        limit=0.5,
    ),
    Goal(name="decode, N 1: us", measure=_us("kda_decode", "decode", 1), limit=5.0),
    Goal(
        name="decode, N >= 16: copies",
        measure=_copies("kda_decode", "decode", (16, 32, 64, 128), 0),
        limit=1.5,
    ),
    Goal(name="attn over a read of the weight and a copy", measure=_attn_over_floor, limit=1.4),
    Goal(name="us of attn beyond projection then verify", measure=_attn_beyond_halves, limit=-LAUNCH_US),
    Goal(name="prefill over fla-core's chunks alone, any T", measure=_prefill_over_fla, limit=1.0),
)


def goals_table(rows: Sequence[Row], heads: int = 6) -> str:
    """Markdown: every goal, what it asks for, what the rows give."""
    mine = [row for row in rows if row.h == heads]
    lines = ["| goal | at most | measured | |", "|---|---|---|---|"]
    for goal in GOALS:
        found = goal.measure(mine)
        verdict = "not measured" if found is None else "met" if found <= goal.limit else "missed"
        lines.append(
            f"| {goal.name} | {goal.limit:.2f} | {'' if found is None else f'{found:.2f}'} | {verdict} |"
        )
    return "\n".join(lines)
