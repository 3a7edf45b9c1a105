# SPDX-License-Identifier: Apache-2.0
"""Finds accesses that nothing orders: vector clocks of warps, and the last accesses to every piece of memory.

Two accesses to the same bytes race when they come from different threads, one of them writes, and no barrier
or mbarrier orders them. Within a warp, `bar.warp.sync` orders what its threads did; shuffles do not. Time is
kept by warp, so what one thread publishes counts as published by its warp, and of reads since a write two are
remembered: some races are missed, but what is reported has no order, whatever the schedule. Atomics are left
out.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.ptx.memory import Array
from tests.ptx.parse import Instruction

WARP = 32
_NONE = -1
_MANY = -2  # several lanes of a warp

_UNORDERED_READ = "reads without order after the write of"
_UNORDERED_WRITE = "writes without order after the {} of"
_IN_FLIGHT = "touches data that is still in flight from"
_TWO_WRITERS = "writes bytes that another thread writes in"
_UNORDERED_MBARRIER = "uses an mbarrier without order after"


class _Accesses:
    """One access per piece: warp (_NONE: none), lane (_MANY: several), time, index of the instruction."""

    def __init__(self, size: int) -> None:
        self.warp, self.lane, self.time, self.at = (np.full(size, _NONE, dtype=np.int32) for _ in range(4))

    def put(self, pieces: Array, threads: Array, times: Array, at: int) -> None:
        self.warp[pieces], self.lane[pieces] = threads // WARP, threads % WARP
        self.time[pieces], self.at[pieces] = times, at


class Shadow:
    """Of pieces of `unit` bytes: the last write, two of the reads since, what is in flight to them."""

    def __init__(self, size: int, unit: int) -> None:
        self.unit, pieces = unit, -(-size // unit)
        self.write, self.reads = _Accesses(pieces), (_Accesses(pieces), _Accesses(pieces))
        self.in_flight = np.full(pieces, _NONE, dtype=np.int32)

    def flat(self, offsets: Array, size: int, threads: Array) -> tuple[Array, Array]:
        """The pieces of accesses of `size` bytes, and the thread of each."""
        count = max(size // self.unit, 1)
        pieces = (offsets // self.unit)[:, None] + np.arange(count)
        return pieces.reshape(-1), np.repeat(threads, count)

    def written(self, pieces: Array, threads: Array, times: Array, at: int) -> None:
        self.write.put(pieces, threads, times, at)
        for reads in self.reads:
            reads.warp[pieces] = _NONE


@dataclass
class RaceLog:
    """A launch's races, one for each pair of instructions, and its global memory, which outlives machines."""

    memory: Shadow
    warps: int = 0
    found: dict[tuple[int, int], str] = field(default_factory=dict)

    def messages(self, instructions: list[Instruction]) -> list[str]:
        result = []
        for (at, past), words in sorted(self.found.items()):
            now, before = instructions[at], instructions[past]
            result.append(f"line {now.line}: {now.text}: {words} line {before.line}: {before.text}")
        return result


class Races:
    """The order among the warps of a machine, and its accesses. Threads count through the launch."""

    def __init__(self, log: RaceLog, warps: int, shared: Shadow) -> None:
        self.log, self.shared, self.memory = log, shared, log.memory
        self.first = log.warps
        log.warps += warps
        # What each warp has seen of the others; its own time; until when its lanes are in order.
        self.seen = np.zeros((warps, warps), dtype=np.int64)
        self.own = np.ones(warps, dtype=np.int64)
        self.synced = np.zeros(warps, dtype=np.int64)
        # With relaxed arrivals too, behind which fence.mbarrier_init publishes mbarriers and nothing else.
        self._met = np.zeros((warps, warps), dtype=np.int64)
        self._clocks: dict[tuple[str, int], Array] = {}
        self._arrival = np.zeros(warps, dtype=np.int64)

    # --- order ---

    def publish(self, warps: Array) -> Array:
        """[warps, all warps]: the times that each warp has seen, its own too; what it does next is later."""
        known = self.seen[warps]
        known[np.arange(warps.size), warps] = self.own[warps]
        self._arrival[warps] = self.own[warps]
        self.own[warps] += 1
        return known

    def synchronise(self, warps: Array) -> None:
        """bar.warp.sync."""
        self.synced[warps] = self.own[warps]
        self.own[warps] += 1

    def arrive(self, kind: str, keys: Array, warps: Array, ordered: bool = True) -> None:
        """Warps arrive at barriers; `keys` names the barrier of each. `ordered`: not relaxed."""
        met = np.maximum(self._met[warps], self.seen[warps])
        met[np.arange(warps.size), warps] = self.own[warps]
        for key, known, weak in zip(keys.tolist(), self.publish(warps), met, strict=True):
            self._raise((f"{kind} met", key), weak)
            if ordered:
                self._raise((kind, key), known)

    def _raise(self, name: tuple[str, int], known: Array) -> None:
        clock = self._clocks.get(name)
        self._clocks[name] = known if clock is None else np.maximum(clock, known)

    def complete(self, kind: str, key: int) -> None:
        """The barrier's phase is over: what arrived is for those that `leave`; the next phase starts anew."""
        for part in (kind, f"{kind} met"):
            clock = self._clocks.pop((part, key), np.zeros_like(self.own))
            self._clocks[f"{part} over", key] = clock

    def leave(self, kind: str, keys: Array, warps: Array) -> None:
        """Warps go on behind barriers, all lanes in order up to their arrival."""
        for key, warp in zip(keys.tolist(), warps.tolist(), strict=True):
            clock = self._clocks[f"{kind} over", key]
            self._met[warp] = np.maximum(self._met[warp], self._clocks[f"{kind} met over", key])
            if clock[warp]:
                self.seen[warp] = np.maximum(self.seen[warp], clock)
                self.synced[warp] = max(self.synced[warp], self._arrival[warp])

    def acquire(self, warp: int, published: Array) -> None:
        """A warp comes after everything published."""
        self.seen[warp] = np.maximum(self.seen[warp], published)

    def times(self, threads: Array) -> Array:
        """Of the threads' warps."""
        times: Array = self.own[threads // WARP - self.first]
        return times

    def _ordered(self, past: _Accesses, pieces: Array, threads: Array, seen: Array | None = None) -> Array:
        """Whether each piece's past access precedes what the thread does now; true where there is none."""
        seen = self.seen if seen is None else seen
        warp, time, mine = past.warp[pieces], past.time[pieces], threads // WARP
        own, other = mine - self.first, warp - self.first
        here = (other >= 0) & (other < len(self.own))
        same = (past.lane[pieces] == threads % WARP) | (time <= self.synced[own])
        across = here & (seen[own, np.where(here, other, 0)] >= time)
        return (warp == _NONE) | np.where(warp == mine, same, across)

    # --- accesses ---

    def _expect(
        self, past: _Accesses, pieces: Array, threads: Array, at: int, words: str, seen: Array | None = None
    ) -> None:
        wrong = ~self._ordered(past, pieces, threads, seen)
        for index in np.unique(past.at[pieces[wrong]]):
            self.log.found.setdefault((at, int(index)), words)

    def _expect_landed(self, shadow: Shadow, pieces: Array, at: int) -> None:
        flying = shadow.in_flight[pieces]
        for index in np.unique(flying[flying != _NONE]):
            self.log.found.setdefault((at, int(index)), _IN_FLIGHT)

    def _expect_writable(self, shadow: Shadow, pieces: Array, threads: Array, at: int) -> None:
        self._expect(shadow.write, pieces, threads, at, _UNORDERED_WRITE.format("write"))
        for reads in shadow.reads:
            self._expect(reads, pieces, threads, at, _UNORDERED_WRITE.format("read"))
        self._expect_landed(shadow, pieces, at)

    def read(self, shadow: Shadow, offsets: Array, size: int, threads: Array, at: int) -> None:
        """Loads of `size` bytes at byte offsets, at instruction `at`."""
        pieces, who = shadow.flat(offsets, size, threads)
        self._expect(shadow.write, pieces, who, at, _UNORDERED_READ)
        self._expect_landed(shadow, pieces, at)
        first, second = shadow.reads
        times, warps, lanes = self.times(who), who // WARP, who % WARP
        mine = first.warp[pieces] == warps
        ordered = self._ordered(first, pieces, who)
        crowded = mine & ~ordered
        replaced = mine | ordered
        first.put(pieces[replaced], who[replaced], times[replaced], at)
        # Several lanes of a warp: none of them is "the" reader. Other warps' reads take the second place.
        still = first.warp[pieces] == warps
        first.lane[pieces[still & (crowded | (first.lane[pieces] != lanes))]] = _MANY
        second.put(pieces[~still], who[~still], times[~still], at)

    def write(self, shadow: Shadow, offsets: Array, size: int, threads: Array, at: int) -> None:
        """Stores, as `read`."""
        pieces, who = shadow.flat(offsets, size, threads)
        self._expect_writable(shadow, pieces, who, at)
        shadow.written(pieces, who, self.times(who), at)
        if ((shadow.write.lane[pieces] != who % WARP) | (shadow.write.warp[pieces] != who // WARP)).any():
            self.log.found.setdefault((at, at), _TWO_WRITERS)

    def use_mbarrier(self, offsets: Array, threads: Array, at: int) -> None:
        """Anything but the initialisation, which was a write."""
        pieces, who = self.shared.flat(offsets, 8, threads)
        self._expect(
            self.shared.write, pieces, who, at, _UNORDERED_MBARRIER, np.maximum(self.seen, self._met)
        )

    def depart(self, offsets: Array, size: int, threads: Array, at: int) -> None:
        """Asynchronous writes to shared memory start: they may land at once, or only at their wait."""
        pieces, who = self.shared.flat(offsets, size, threads)
        self._expect_writable(self.shared, pieces, who, at)
        self.shared.in_flight[pieces] = at

    def land(self, offsets: Array, size: int, threads: Array, times: Array, at: int) -> None:
        """They are over for those who come after `times`."""
        pieces, who = self.shared.flat(offsets, size, threads)
        self.shared.in_flight[pieces] = _NONE
        self.shared.written(pieces, who, np.repeat(times, pieces.size // max(times.size, 1)), at)
