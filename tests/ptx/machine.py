# SPDX-License-Identifier: Apache-2.0
"""Threads of a batch of CTAs: who runs, who waits for what, and the barriers between them.

A bundle is a run of neighbouring lanes that share program steps: all lanes of the batch in lockstep, or one
warp. Divergent lanes reconverge at the lowest program counter; warp-synchronous steps wait for their members.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tests.ptx.memory import AccessError, Array, GlobalMemory, SharedMemory
from tests.ptx.parse import Instruction, Kernel, PtxError
from tests.ptx.races import RaceLog, Races, Shadow

WARP = 32
RUN, EXITED, PARKED, AT_BARRIER, AT_CLUSTER, AT_MBARRIER = range(6)
_WAITS = {PARKED: "the rest of its warp", AT_BARRIER: "a barrier", AT_CLUSTER: "the cluster's barrier",
          AT_MBARRIER: "an mbarrier"}  # fmt: skip
_BARRIERS = 16

Mask = Array | None
Step = Callable[["Bundle", Mask], None]
Control = Callable[["Bundle", Array, int], None]


class Incomplete(Exception):
    """A warp-synchronous step was reached without all its members; `lanes` are the ones that must wait."""

    def __init__(self, lanes: Array) -> None:
        super().__init__()
        self.lanes = lanes


class Program(Protocol):
    """Compiled steps. A control step moves its lanes' program counters. `unit`: bytes of the least access.

    `stretch_end[i]`: the next index from i on that is a control step or, after i, where other lanes may join.
    """

    kernel: Kernel
    steps: list[Step]
    controls: dict[int, Control]
    stretch_end: list[int]
    unit: int

    def registers(self, bundle: "Bundle") -> list[Array]: ...


@dataclass
class Copy:
    """A cp.async in flight: per thread its group, target offset, source, and bytes not zero-filled."""

    lanes: Array
    group: Array
    target: Array
    source: Array
    size: int
    valid: Array | None
    at: int


@dataclass
class Mbarrier:
    """An mbarrier object. `arriving` delivers what is in flight towards it.

    `clock`: what arrivals have published of their warps' times; `published`: up to the last phase's end.
    """

    count: int
    pending: int
    transactions: int = 0
    phase: int = 0
    arriving: list[Callable[[], None]] = field(default_factory=list)
    clock: Array | None = None
    published: Array | None = None

    def settle(self) -> None:
        """End the phase once nothing is missing."""
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending, self.published = self.count, self.clock

    def publish(self, known: Array) -> None:
        """Whoever waits comes after these times."""
        self.clock = known if self.clock is None else np.maximum(self.clock, known)


class Bundle:
    """Lanes [start, start + n) of a machine, with their registers `r`."""

    def __init__(self, machine: "Machine", start: int, n: int) -> None:
        self.machine, self.start, self.n = machine, start, n
        lanes = slice(start, start + n)
        self.state, self.pc, self.cta = machine.state[lanes], machine.pc[lanes], machine.cta[lanes]
        self.warp_lane = np.arange(n, dtype=np.int64) % WARP
        self.warp_base = np.arange(n, dtype=np.int64) - self.warp_lane
        self.commits = np.zeros(n, dtype=np.int64)
        self.copies: list[Copy] = []
        self.bulk_commits = np.zeros(n, dtype=np.int64)
        self.bulk: list[tuple[int, int, Callable[[], None]]] = []
        self.r: list[Array] = machine.program.registers(self)
        first = machine.races.first * WARP if machine.races is not None else 0
        self.threads = np.arange(first + start, first + start + n)

    def require(self, mask: Mask, members: Array | None = None) -> None:
        """Incomplete unless, in warps with an active lane, all members that have not exited are active."""
        if mask is None:
            return
        wanted = self.state != EXITED
        if members is not None:
            wanted = wanted & ((members >> self.warp_lane.astype(np.uint32)) & np.uint32(1)).astype(np.bool_)
        missing = (wanted & ~mask).reshape(-1, WARP).any(axis=1)
        waiting = np.repeat(missing, WARP) & mask
        if waiting.any():
            raise Incomplete(waiting)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[bytes, ...]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_ctas(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


@dataclass(frozen=True)
class Order:
    """Warps in random turns. `apart`: CTAs of a cluster may even start late, when others have gone far."""

    rng: np.random.Generator
    apart: bool


class Machine:
    """Runs some clusters of a launch, named by their indices, to their end."""

    def __init__(
        self, program: Program, geometry: Geometry, memory: GlobalMemory, clusters: list[int],
        order: "Order | None", log: RaceLog | None = None,
    ) -> None:  # fmt: skip
        if geometry.threads % WARP:
            raise PtxError(f"{geometry.threads} threads to a CTA; the interpreter runs whole warps")
        self.program, self.geometry, self.memory, self._order = program, geometry, memory, order
        self.ctas = len(clusters) * geometry.cluster_ctas
        self.n = self.ctas * geometry.threads
        self.shared = SharedMemory(self.ctas, geometry.shared_bytes, geometry.cluster_ctas)
        self.cta = np.repeat(np.arange(self.ctas), geometry.threads)
        self.cta_ids = cta_ids(geometry, clusters)
        self.state = np.full(self.n, RUN, dtype=np.int8)
        self.pc = np.zeros(self.n, dtype=np.int64)
        self.alive = np.full(self.ctas, geometry.threads)
        self._arrived = np.zeros(self.ctas * _BARRIERS, dtype=np.int64)
        self._needed = np.zeros(self.ctas * _BARRIERS, dtype=np.int64)
        self._barrier = np.zeros(self.n, dtype=np.int64)
        self._cluster_arrived = np.zeros(len(clusters), dtype=np.int64)
        self._cluster_phase = np.zeros(len(clusters), dtype=np.int64)
        self._cluster_target = np.full(self.n, -1, dtype=np.int64)
        self.mbarriers: dict[tuple[int, int], Mbarrier] = {}
        self.waits: dict[int, tuple[tuple[int, int], int]] = {}
        # The index of the instruction that runs.
        self.at = 0
        self.races: Races | None = None
        if log is not None:
            self.races = Races(log, self.n // WARP, Shadow(self.shared.bytes.data.size, program.unit))
        size = self.n if order is None else WARP
        self.bundles = [Bundle(self, start, size) for start in range(0, self.n, size)]

    def run(self) -> None:
        """Until every thread has exited. PtxError where one may not do what it does, or where all wait."""
        with np.errstate(all="ignore"):
            while True:
                ready = [bundle for bundle in self.bundles if (bundle.state == RUN).any()]
                for bundle in self._turns(ready):
                    self._run_bundle(bundle)
                if not ready:
                    if (self.state == EXITED).all():
                        return
                    self._poll()

    def _turns(self, ready: list["Bundle"]) -> list["Bundle"]:
        """Who runs next: every ready warp once, or with `apart` a single one."""
        if self._order is None or len(ready) < 2:
            return ready
        order = [ready[index] for index in self._order.rng.permutation(len(ready))]
        return order[:1] if self._order.apart else order

    def _poll(self) -> None:
        """Let in-flight data arrive where everyone waits; a deadlock is an error."""
        for lane, (key, phase) in list(self.waits.items()):
            if self.deliver(key).phase > phase:
                del self.waits[lane]
                self.state[lane] = RUN
        if not (self.state == RUN).any():
            lane = int((self.state != EXITED).argmax())
            line = self.program.kernel.instructions[max(int(self.pc[lane]) - 1, 0)].line
            waits = _WAITS[int(self.state[lane])]
            raise PtxError(f"deadlock: {self.describe(lane)} waits for {waits} at line {line}")

    def _run_bundle(self, bundle: Bundle) -> None:
        program = self.program
        while True:
            running = bundle.state == RUN
            if not running.any():
                return
            at = int(bundle.pc[running].min())
            mask: Mask = running & (bundle.pc == at)
            assert mask is not None
            full = bool(mask.all())
            while True:
                end = program.stretch_end[at]
                if not self._stretch(bundle, mask, full, at, end):
                    break
                control = program.controls.get(end)
                if control is not None:
                    self._guarded(bundle, mask, end, control)
                    break
                if not full:
                    bundle.pc[mask] = end
                    break
                at = end

    def _stretch(self, bundle: Bundle, mask: Array, full: bool, at: int, end: int) -> bool:
        """Steps [at, end); False where lanes had to be rescheduled."""
        steps, m = self.program.steps, None if full else mask
        try:
            for at in range(at, end):  # noqa: B020
                self.at = at
                steps[at](bundle, m)
        except Incomplete as incomplete:
            self._park(bundle, mask, incomplete.lanes, at)
            return False
        except PtxError as error:
            raise self._located(error, bundle, at) from error
        except Exception as error:
            error.add_note(f"in {self.program.kernel.instructions[at]}")
            raise
        return True

    def _guarded(self, bundle: Bundle, mask: Array, at: int, control: Control) -> None:
        self.at = at
        try:
            control(bundle, mask, at)
        except Incomplete as incomplete:
            self._park(bundle, mask, incomplete.lanes, at)
        except PtxError as error:
            raise self._located(error, bundle, at) from error

    def _park(self, bundle: Bundle, mask: Array, waiting: Array, at: int) -> None:
        """Lanes wait at a warp-synchronous step; whoever is there already goes on with them."""
        bundle.pc[mask] = at
        parked = (bundle.state == PARKED) & (bundle.pc == at)
        if parked.any():
            bundle.state[parked] = RUN
            joined = parked | mask
            missing = ((bundle.state != EXITED) & ~joined).reshape(-1, WARP).any(axis=1)
            waiting = joined & np.repeat(missing, WARP)
        bundle.state[waiting] = PARKED

    def _located(self, error: PtxError, bundle: Bundle, at: int) -> PtxError:
        instruction: Instruction = self.program.kernel.instructions[at]
        where = f"line {instruction.line}: {instruction.text}"
        if isinstance(error, AccessError):
            where += f": {self.describe(bundle.start + error.lane)}"
        return PtxError(f"{where}: {error}")

    def describe(self, lane: int) -> str:
        """A thread in words."""
        x, y, z = (int(axis[self.cta[lane]]) for axis in self.cta_ids)
        return f"thread {lane % self.geometry.threads} of CTA ({x}, {y}, {z})"

    # --- exits and barriers ---

    def exit(self, bundle: Bundle, mask: Array) -> None:
        bundle.state[mask] = EXITED
        np.subtract.at(self.alive, bundle.cta[mask], 1)
        self._release_barriers()
        self._release_clusters()

    def barrier(self, bundle: Bundle, mask: Array, number: Array, count: Array | None, wait: bool) -> None:
        """Arrive at barriers of the lanes' CTAs; with `wait`, until `count` threads, or all, have arrived."""
        lanes = np.flatnonzero(mask)
        key = bundle.cta[lanes] * _BARRIERS + number[lanes].astype(np.int64)
        np.add.at(self._arrived, key, 1)
        self._needed[key] = 0 if count is None else count[lanes].astype(np.int64)
        if self.races is not None:
            self.races.arrive("barrier", *_pairs(key, bundle.start + lanes))
        if wait:
            bundle.state[lanes] = AT_BARRIER
            self._barrier[bundle.start + lanes] = key
        self._release_barriers()

    def _release_barriers(self) -> None:
        needed = np.where(self._needed == 0, np.repeat(self.alive, _BARRIERS), self._needed)
        done = (self._arrived > 0) & (self._arrived >= needed)
        if done.any():
            self._arrived[done] = 0
            released = np.flatnonzero((self.state == AT_BARRIER) & done[self._barrier])
            self.state[released] = RUN
            if self.races is not None:
                for key in np.flatnonzero(done).tolist():
                    self.races.complete("barrier", key)
                self.races.leave("barrier", *_pairs(self._barrier[released], released))

    def cluster_arrive(self, bundle: Bundle, mask: Array, ordered: bool) -> None:
        """`ordered`: with release, so that what the threads did is published."""
        lanes = np.flatnonzero(mask)
        where = bundle.start + lanes
        if (self._cluster_target[where] >= 0).any():
            raise PtxError("a thread arrives twice at the cluster's barrier without a wait between")
        cluster = bundle.cta[lanes] // self.geometry.cluster_ctas
        self._cluster_target[where] = self._cluster_phase[cluster]
        np.add.at(self._cluster_arrived, cluster, 1)
        if self.races is not None:
            self.races.arrive("cluster", *_pairs(cluster, where), ordered=ordered)
        self._release_clusters()

    def cluster_wait(self, bundle: Bundle, mask: Array) -> None:
        lanes = np.flatnonzero(mask)
        if (self._cluster_target[bundle.start + lanes] < 0).any():
            raise PtxError("a thread waits at the cluster's barrier without having arrived")
        bundle.state[lanes] = AT_CLUSTER
        self._release_clusters()

    def _release_clusters(self) -> None:
        size = self.geometry.cluster_ctas
        alive = self.alive.reshape(-1, size).sum(axis=1)
        done = (self._cluster_arrived > 0) & (self._cluster_arrived >= alive)
        self._cluster_phase[done] += 1
        self._cluster_arrived[done] = 0
        passed = self._cluster_target < self._cluster_phase[self.cta // size]
        released = np.flatnonzero((self.state == AT_CLUSTER) & passed)
        self._cluster_target[released] = -1
        self.state[released] = RUN
        if self.races is not None:
            for cluster in np.flatnonzero(done).tolist():
                self.races.complete("cluster", cluster)
            self.races.leave("cluster", *_pairs(self.cta[released] // size, released))

    def mbarrier(self, key: tuple[int, int]) -> Mbarrier:
        """The object at (CTA, byte offset)."""
        found = self.mbarriers.get(key)
        if found is None:
            raise PtxError(f"no mbarrier was initialised at offset {key[1]} of the CTA's shared memory")
        return found

    def deliver(self, key: tuple[int, int]) -> Mbarrier:
        """Let everything in flight towards an mbarrier arrive: as late as a waiter can tell."""
        found = self.mbarrier(key)
        arriving, found.arriving = found.arriving, []
        for apply in arriving:
            apply()
        return found


def _pairs(keys: Array, lanes: Array) -> tuple[Array, Array]:
    """(key, warp) of lanes, each pair once."""
    pairs = np.unique(np.stack([keys, lanes // WARP], axis=1), axis=0)
    return pairs[:, 0], pairs[:, 1]


def cta_ids(geometry: Geometry, clusters: list[int]) -> tuple[Array, Array, Array]:
    """%ctaid of every CTA of the clusters, rank by rank."""
    per_axis = [g // c for g, c in zip(geometry.grid, geometry.cluster, strict=True)]
    ids: tuple[list[int], list[int], list[int]] = ([], [], [])
    for cluster in clusters:
        corner = (
            cluster % per_axis[0],
            cluster // per_axis[0] % per_axis[1],
            cluster // per_axis[0] // per_axis[1],
        )
        for rank in range(geometry.cluster_ctas):
            x, y, _ = geometry.cluster
            inner = (rank % x, rank // x % y, rank // x // y)
            for axis in range(3):
                ids[axis].append(corner[axis] * geometry.cluster[axis] + inner[axis])
    return tuple(np.array(axis, dtype=np.uint32) for axis in ids)  # type: ignore[return-value]


def special_registers(bundle: Bundle) -> dict[str, Any]:
    """Values of %tid.x and the like for every lane."""
    machine, geometry = bundle.machine, bundle.machine.geometry
    thread = (np.arange(bundle.start, bundle.start + bundle.n) % geometry.threads).astype(np.uint32)
    x, y, _ = (np.uint32(size) for size in geometry.block)
    rank = (bundle.cta % geometry.cluster_ctas).astype(np.uint32)
    lane = bundle.warp_lane.astype(np.uint32)
    one = np.uint32(1)
    values: dict[str, Any] = {
        "%tid.x": thread % x, "%tid.y": thread // x % y, "%tid.z": thread // x // y, "%laneid": lane,
        "%warpid": thread // np.uint32(WARP), "%nwarpid": geometry.threads // WARP,
        "%cluster_ctarank": rank, "%cluster_nctarank": geometry.cluster_ctas,
        "%is_explicit_cluster": int(geometry.cluster_ctas > 1), "%dynamic_smem_size": geometry.shared_bytes,
        "%lanemask_eq": one << lane, "%lanemask_lt": (one << lane) - one,
        "%lanemask_le": (one << lane) | ((one << lane) - one),
        "%lanemask_gt": ~((one << lane) | ((one << lane) - one)), "%lanemask_ge": ~((one << lane) - one),
        "%smid": 0, "%clock": 0, "%clock64": 0, "%globaltimer": 0, "%nsmid": 132,
    }  # fmt: skip
    for axis, name in enumerate("xyz"):
        ids, size = machine.cta_ids[axis][bundle.cta], geometry.cluster[axis]
        values |= {
            f"%ntid.{name}": geometry.block[axis], f"%nctaid.{name}": geometry.grid[axis],
            f"%ctaid.{name}": ids, f"%cluster_ctaid.{name}": ids % np.uint32(size),
            f"%cluster_nctaid.{name}": size, f"%clusterid.{name}": ids // np.uint32(size),
            f"%nclusterid.{name}": geometry.grid[axis] // size,
        }  # fmt: skip
    return values
