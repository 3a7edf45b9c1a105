# SPDX-License-Identifier: Apache-2.0
"""The command: which sizes and arms, in how much time, and what becomes of the rows."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import benchmarks.kda as package
from benchmarks.kda.comparisons import ARM_NAMES, COMPARISONS, Arm, comparison_of, copy_arms
from benchmarks.kda.goals import goals_table
from benchmarks.kda.rows import (
    AFTER_PREDECESSOR,
    YARDSTICKS,
    Row,
    carry,
    findings,
    merge,
    parse_row,
    read_rows,
    source_hash,
    write_rows,
)
from benchmarks.kda.runs import Machine
from benchmarks.kda.sizes import STANDARD, Size, layer_copies, records_bytes
from benchmarks.kda.table import ratios, table
from benchmarks.kda.timing import DryTimer, Figure, GraphTimer, Timer
from benchmarks.kda.yardsticks import check_yardsticks
from tensorrt_llm import envs

MIN_COPY_TB_PER_S = 3.6
DONE, FAILED, OUT_OF_TIME = 0, 1, 3
DRY_SIZES = {
    "verify": (Size(n=2, h=1, t=2),),
    "decode": (Size(n=2, h=1, t=1, p=0),),
    "attn": (Size(n=1, h=1, t=2),),
    "prefill": (Size(n=1, h=1, t=65, p=0),),
}
DRY_COPIES = 2


@dataclass(slots=True, kw_only=True)
class Session:
    """One run. `arms`: names of those to measure, () for all. failures: one line each, as printed."""

    machine: Machine
    timer: Timer
    arms: tuple[str, ...] = ()
    failures: list[str] = field(default_factory=list)

    def attempt(self, label: str, work: Callable[[], Any]) -> Any:
        """The work's result, or None when it failed, which is said in one line."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever ails one arm, the others are measured
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.failures.append(f"{label}: {text}"[:300])
            print(self.failures[-1], file=sys.stderr, flush=True)
            return None

    def measure(self, comparison: str, size: Size) -> list[Row]:
        """The rows of every arm that could be measured at one size."""
        listed: list[Arm] = self.attempt(
            f"{comparison} at {size}", lambda: list(COMPARISONS[comparison](size, self.machine))
        )
        wanted = [arm for arm in listed or [] if not self.arms or arm.name in self.arms]
        by_copies: dict[int, dict[str, Arm]] = {}
        for arm in wanted:
            by_copies.setdefault(arm.copies, {})[arm.label] = arm
        figures: dict[str, Figure] = {}
        for copies, arms in by_copies.items():
            prepared = {}
            for label, arm in arms.items():
                ready = self.attempt(label, lambda arm=arm: self.timer.prepare(arm.make(), arm.is_captured))
                if ready is not None:
                    prepared[label] = ready
            figures |= self.attempt("timing", lambda p=prepared, c=copies: self.timer.time(p, c)) or {}
        measured = [(arm, figures[arm.label]) for arm in wanted if arm.label in figures]
        rows = list(_rows(measured, size))
        for row in rows:
            assert parse_row(json.loads(row.dump())) == row, f"{row} is another when it is read back"
        return rows


def _rows(measured: Sequence[tuple[Arm, Figure]], size: Size) -> Iterator[Row]:
    """Of a yardstick's launches the best; behind a predecessor what the op adds to it."""
    best: dict[tuple[str, str], float] = {}
    for arm, figure in measured:
        if arm.name in YARDSTICKS:
            key = (arm.op, arm.name)
            best[key] = min(best.get(key, figure.us), figure.us)
    alone = {arm.op: f.us for arm, f in measured if arm.name == AFTER_PREDECESSOR and not arm.implementation}
    for arm, figure in measured:
        us = figure.us
        if arm.name in YARDSTICKS and us > best[arm.op, arm.name]:
            continue
        if arm.name == AFTER_PREDECESSOR:
            if not arm.implementation or arm.op not in alone:
                continue
            us -= alone[arm.op]
        yield Row(
            op=arm.op, arm=arm.name, implementation=arm.implementation, n=size.n, h=size.h, t=size.t,
            p=size.p, us=round(us, 3), us_spread=round(figure.spread, 3), bytes=arm.bytes, tokens=arm.tokens,
            source_hash=source_hash(arm.op, arm.name, arm.implementation),
        )  # fmt: skip


def copy_rate(session: Session) -> float:
    """TB/s of the best copy at 64 requests of 6 heads."""
    size = Size(n=64)
    copies, num_bytes = layer_copies(size.n), records_bytes(size)
    arms = {arm.label: arm for arm in copy_arms("", num_bytes, copies, session.machine.device)}
    prepared = {label: session.timer.prepare(arm.make()) for label, arm in arms.items()}
    best = min(figure.us for figure in session.timer.time(prepared, copies).values())
    return num_bytes / best / 1e6


def missing_share(rows: Sequence[Row], comparison: str, size: Size, session: Session) -> float:
    """The share of a size's arms that have no row of these sources: 0 where all is measured."""
    found = {row.key for row in rows if row.source_hash == source_hash(row.op, row.arm, row.implementation)}
    try:
        arms = list(COMPARISONS[comparison](size, session.machine))
    except ValueError:
        return 1.0
    keys = {
        (arm.op, arm.name, "" if arm.name in YARDSTICKS else arm.implementation)
        for arm in arms
        if (not session.arms or arm.name in session.arms)
        and (arm.name != AFTER_PREDECESSOR or arm.implementation)
    }
    lacking = [key for key in keys if (*key, size.n, size.h, size.t, size.p) not in found]
    return len(lacking) / max(1, len(keys))


def wanted_sizes(options: argparse.Namespace) -> list[tuple[str, Size]]:
    """(comparison, size) in the order they are measured: the standard ones, or those that are named.

    ValueError where nothing is left.
    """
    names = options.op or (list(STANDARD) if options.all else ["verify"])
    standard = DRY_SIZES if options.dry_run else STANDARD
    chosen = []
    for comparison in dict.fromkeys(comparison_of(name) for name in names):
        for size in standard[comparison]:
            if options.n or options.t:
                chosen += [
                    (comparison, Size(n=n, h=h, t=t, p=size.p if options.p is None else options.p))
                    for h in options.h or [size.h]
                    for n in options.n or [size.n]
                    for t in options.t or [size.t]
                ]
            elif (not options.h or size.h in options.h) and options.p in (None, size.p):
                chosen.append((comparison, size))
    if not chosen:
        raise ValueError("no standard size fits: name --n, --h and --p together")
    return list(dict.fromkeys(chosen))


def parse_count(text: str) -> int | str:
    """A count of drafts, or "mixed"."""
    return text if text == "mixed" else int(text)


def make_parser() -> argparse.ArgumentParser:
    summary = str(package.__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="benchmarks.kda", description=summary)
    parser.add_argument("--op", nargs="+", help="an op of the catalog, or verify, decode, attn, prefill")
    parser.add_argument("--all", action="store_true", help="every comparison at every size it is known by")
    parser.add_argument("--arm", nargs="+", default=[], choices=ARM_NAMES, help="these arms only")
    parser.add_argument("--n", type=int, nargs="+", help="requests")
    parser.add_argument("--h", type=int, nargs="+", help="heads")
    parser.add_argument("--t", type=int, nargs="+", help="tokens per request")
    parser.add_argument("--p", type=parse_count, help='drafts to replay, or "mixed"')
    parser.add_argument("--implementations", nargs="+", default=[], help="cute, triton/rows=32,warps=8 ...")
    parser.add_argument("--variants", action="store_true", help="add every compiled configuration")
    parser.add_argument(
        "--pack", type=Path, default=envs.kernel_pack(), help="kernel pack; what it lacks the DSL compiles"
    )
    parser.add_argument("--out", type=Path, help="JSON file: rows join those in it")
    parser.add_argument(
        "--seconds", type=float, default=math.inf,
        help="begin no size after so long, and leave out sizes that --out holds; code 3: run again to go on",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="every arm once, tiny, on the CPU, in torch")
    parser.add_argument("--check", action="store_true", help="name the figures in --out of other sources")
    parser.add_argument("--goals", action="store_true", help="say which goals the figures in --out meet")
    parser.add_argument("--carry", nargs="+", help="give --out's rows of these implementations today's hash")
    return parser


def keep_books(options: argparse.Namespace) -> int:
    """`--check`, `--goals` and `--carry`: nothing is measured."""
    rows = read_rows(options.out)
    if options.carry:
        rows = carry(rows, options.carry)
        write_rows(options.out, rows)
    for line in findings(rows) if options.check else ():
        print(f"{options.out.name}: {line}")
    if options.goals:
        print(goals_table(rows))
    return DONE


def remaining(options: argparse.Namespace, session: Session) -> list[tuple[str, Size]]:
    """The sizes to measure: under a limit of time without what --out holds, the least measured first."""
    sizes = wanted_sizes(options)
    if options.out is None or options.seconds == math.inf:
        return sizes
    rows = read_rows(options.out)
    shares = {item: missing_share(rows, *item, session) for item in sizes}
    return sorted((item for item in sizes if shares[item]), key=lambda item: -shares[item])


def run(options: argparse.Namespace, session: Session) -> int:
    """Measure, keep the rows after every size, print them; the exit code."""
    start, rows, done = time.monotonic(), [], 0
    sizes = remaining(options, session)
    for comparison, size in sizes:
        if time.monotonic() - start > options.seconds:
            break
        found, done = session.measure(comparison, size), done + 1
        rows += found
        if options.out and found:
            write_rows(options.out, merge(read_rows(options.out), found))
        if session.machine.device != "cpu":
            torch.cuda.empty_cache()
    report(rows)
    if done < len(sizes):
        print(f"time is up with {len(sizes) - done} sizes to go: run again", file=sys.stderr)
    return FAILED if session.failures else OUT_OF_TIME if done < len(sizes) else DONE


def report(rows: Sequence[Row]) -> None:
    """Print a table per comparison, and the schemes beside each other."""
    for op in dict.fromkeys(comparison_of(row.op) for row in rows):
        mine = [row for row in rows if comparison_of(row.op) == op]
        print(f"{op}\n{table([row for row in mine if row.arm != AFTER_PREDECESSOR])}\n")
        behind = [row for row in mine if row.arm == AFTER_PREDECESSOR]
        if behind:
            print(f"{op}, us added behind a predecessor\n{table(behind)}\n")
        if text := ratios(mine):
            print(f"{text}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: an arm failed, the others are there; 3: time is up."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.check or options.goals or options.carry:
        if options.out is None:
            parser.error("--check, --goals and --carry need --out")
        return keep_books(options)
    try:
        wanted_sizes(options)
    except ValueError as error:
        parser.error(str(error))
    if options.dry_run:
        machine = Machine(device="cpu", implementations=("torch",), copies=DRY_COPIES)
        session = Session(machine=machine, timer=DryTimer(), arms=tuple(options.arm))
        check_yardsticks("cpu")
        return run(options, session)
    if not torch.cuda.is_available():
        print("there is no GPU here; --dry-run tries the way without one", file=sys.stderr)
        return FAILED
    machine = Machine(
        device="cuda",
        pack=options.pack,
        implementations=tuple(options.implementations),
        variants=options.variants,
    )
    session = Session(machine=machine, timer=GraphTimer(), arms=tuple(options.arm))
    check_yardsticks("cuda")
    if (rate := copy_rate(session)) < MIN_COPY_TB_PER_S:
        print(f"no figures: the copy at N 64 reaches {rate:.2f} TB/s", file=sys.stderr)
        return FAILED
    return run(options, session)
