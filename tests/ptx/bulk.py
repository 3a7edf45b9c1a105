# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies that signal mbarriers or end with bulk groups: st.async, cp.async.bulk."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.access import address_reader, shared_offsets
from tests.ptx.alu import WIDTH
from tests.ptx.machine import WARP, Bundle, Mask, Step
from tests.ptx.memory import Array
from tests.ptx.parse import Instruction, PtxError
from tests.ptx.program import Program, narrow


def _flight(
    b: Bundle, mbarrier: Array, lane: int, size: int, target: Array, write: Callable[[], None]
) -> None:
    """Put a write of `target`'s pieces of shared memory towards an mbarrier in flight."""
    pitch, races, at = b.machine.shared.pitch, b.machine.races, b.machine.at
    key = int(mbarrier) // pitch, int(mbarrier) % pitch
    found = b.machine.mbarrier(key)
    threads = np.repeat(b.threads[lane], target.size)
    piece = size // target.size
    if races is not None:
        races.use_mbarrier(np.array([mbarrier]), b.threads[lane : lane + 1], at)
        races.depart(target, piece, threads, at)
        times = races.times(threads)
        clock = np.zeros_like(races.own)
        clock[(b.start + lane) // WARP] = times[0]
        races.publish(np.array([(b.start + lane) // WARP]))

    def arrive() -> None:
        write()
        if races is not None:
            races.land(target, piece, threads, times, at)
            found.publish(clock)
        found.transactions -= size
        found.settle()

    found.arriving.append(arrive)


def compile_store_async(program: Program, instruction: Instruction) -> Step:
    """st.async: words into the shared memory of a CTA of the cluster."""
    kind = instruction.parts[-1]
    target, source, barrier = instruction.operands
    parts = source.parts if source.kind == "vector" else (source,)
    values, width = [program.source(part, kind) for part in parts], WIDTH[kind]
    where, signal = address_reader(program, target), address_reader(program, barrier)
    size = width * len(values)

    def step(b: Bundle, m: Mask) -> None:
        lanes = np.arange(b.n) if m is None else np.flatnonzero(m)
        offsets = shared_offsets(b, where(b, lanes), size, lanes, "shared::cluster")
        mbarriers = shared_offsets(b, signal(b, lanes), 8, lanes, "shared::cluster")
        words = [narrow(b.r[value][lanes], width) for value in values]
        shared = b.machine.shared.bytes
        for i, lane in enumerate(lanes):
            one = slice(i, i + 1)

            def write(one: slice = one) -> None:
                shared.write(offsets[one], width, [word[one] for word in words])

            _flight(b, mbarriers[i], int(lane), size, offsets[one], write)

    return step


def compile_bulk(program: Program, instruction: Instruction) -> Step:
    """cp.async.bulk between global and shared memory, and its groups."""
    parts = instruction.parts
    if "tensor" in parts or "reduce" in parts or parts[1] != "async" or "bulk" not in parts:
        raise PtxError("the interpreter does not know this copy")
    if parts[3] == "prefetch":
        return _bulk_prefetch(program, instruction)
    if parts[3] == "commit_group":
        return _commit
    if parts[3] == "wait_group":
        left = program.integer(instruction.operands[0])
        assert left is not None
        return lambda b, m: _wait(b, m, left)
    if any("multicast" in part or "mask" in part for part in parts):
        raise PtxError("the interpreter does not know this copy")
    target, source, size = instruction.operands[:3]
    sizes = program.source(size, "u32")
    to, origin = address_reader(program, target), address_reader(program, source)
    if parts[3] == "global":
        return _bulk_store(to, origin, sizes)
    signal = address_reader(program, instruction.operands[3])
    remote, from_shared = parts[3], parts[4].startswith("shared")

    def load(b: Bundle, m: Mask) -> None:
        for lane in np.arange(b.n) if m is None else np.flatnonzero(m):
            one, count = np.array([lane]), int(b.r[sizes][lane])
            target_at = _region(b, remote, int(to(b, one)[0]), count, one)
            mbarrier = shared_offsets(b, signal(b, one), 8, one, remote)[0]
            place = "shared" if from_shared else "global"
            chunk = _region(b, place, int(origin(b, one)[0]), count, one)

            def write(
                chunk: Array = chunk, target_at: Array = target_at, one: Array = one, place: str = place
            ) -> None:
                _write(b, remote, target_at, _read(b, place, chunk))

            _flight(b, mbarrier, int(lane), count, target_at, write)

    return load


def _bulk_prefetch(program: Program, instruction: Instruction) -> Step:
    """Moves nothing, but what it names has to be there."""
    origin = address_reader(program, instruction.operands[0])
    sizes = program.source(instruction.operands[1], "u32")

    def step(b: Bundle, m: Mask) -> None:
        for lane in np.arange(b.n) if m is None else np.flatnonzero(m):
            one = np.array([lane])
            _region(b, "global", int(origin(b, one)[0]), int(b.r[sizes][lane]), one)

    return step


def _region(b: Bundle, space: str, address: int, count: int, lane: Array) -> Array:
    """Checked offsets (shared) or addresses (global) of the 16-byte pieces of a region."""
    if count % 16 or count == 0:
        raise PtxError(f"a bulk copy of {count} bytes")
    pieces = np.arange(address, address + count, 16, dtype=np.uint64)
    lanes = np.repeat(lane, pieces.size)
    if space == "global":
        b.machine.memory.offsets(pieces, 16, lanes)
        return pieces
    return shared_offsets(b, pieces, 16, lanes, space)


def _read(b: Bundle, space: str, pieces: Array) -> list[Array]:
    if space == "global":
        return b.machine.memory.read(pieces, 8, 2, None)
    return b.machine.shared.bytes.read(pieces, 8, 2)


def _write(b: Bundle, space: str, pieces: Array, values: list[Array]) -> None:
    if space == "global":
        b.machine.memory.write(pieces, 8, values, None)
    else:
        b.machine.shared.bytes.write(pieces, 8, values)


def _bulk_store(to: Any, origin: Any, sizes: int) -> Step:
    """Shared to global; the source is read, and the target written, when the group is waited for."""

    def store(b: Bundle, m: Mask) -> None:
        for lane in np.arange(b.n) if m is None else np.flatnonzero(m):
            one, count = np.array([lane]), int(b.r[sizes][lane])
            target_at = _region(b, "global", int(to(b, one)[0]), count, one)
            source_at = _region(b, "shared", int(origin(b, one)[0]), count, one)

            def write(source_at: Array = source_at, target_at: Array = target_at) -> None:
                _write(b, "global", target_at, _read(b, "shared", source_at))

            b.bulk.append((int(lane), int(b.bulk_commits[lane]), write))

    return store


def _commit(b: Bundle, m: Mask) -> None:
    b.bulk_commits = b.bulk_commits + (1 if m is None else m.astype(np.int64))


def _wait(b: Bundle, m: Mask, left: int) -> None:
    kept = []
    for lane, group, write in b.bulk:
        if (m is None or m[lane]) and group < b.bulk_commits[lane] - left:
            write()
        else:
            kept.append((lane, group, write))
    b.bulk = kept
