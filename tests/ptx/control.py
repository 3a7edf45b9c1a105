# SPDX-License-Identifier: Apache-2.0
"""Control steps: branches, exits, CTA and cluster barriers, waits on mbarriers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.access import address_reader, shared_offsets, space_of
from tests.ptx.machine import AT_MBARRIER, WARP, Bundle, Control, Mask, Mbarrier, Step
from tests.ptx.memory import Array
from tests.ptx.parse import Instruction, Operand, PtxError
from tests.ptx.program import Program, compiles, controls, scatter


@controls("bra")
def _branch(program: Program, instruction: Instruction) -> Control:
    target = program.kernel.labels[instruction.operands[0].name]
    active = program.active(instruction)

    def step(b: Bundle, m: Array, at: int) -> None:
        b.pc[m] = at + 1
        b.pc[active(b, m)] = target

    return step


@controls("ret", "exit")
def _exit(program: Program, instruction: Instruction) -> Control:
    active = program.active(instruction)

    def step(b: Bundle, m: Array, at: int) -> None:
        b.pc[m] = at + 1
        leaving = active(b, m)
        if leaving.any():
            b.machine.exit(b, leaving)

    return step


@controls("trap")
def _trap(program: Program, instruction: Instruction) -> Control:
    active = program.active(instruction)

    def step(b: Bundle, m: Array, at: int) -> None:
        b.pc[m] = at + 1
        if active(b, m).any():
            lane = b.start + int(active(b, m).argmax())
            raise PtxError(f"{b.machine.describe(lane)} traps")

    return step


@controls("bar", "barrier")
def _barrier(program: Program, instruction: Instruction) -> Control:
    """bar.sync and bar.arrive, whose counts are of threads."""
    parts = instruction.parts
    if parts[1] == "cta":
        parts = [parts[0], *parts[2:]]
    if parts[1] not in ("sync", "arrive") or any(part not in ("aligned",) for part in parts[2:]):
        raise PtxError("the interpreter knows the barriers .sync and .arrive")
    number = program.source(instruction.operands[0], "u32")
    count = program.source(instruction.operands[1], "u32") if len(instruction.operands) > 1 else None
    wait, active = parts[1] == "sync", program.active(instruction)
    aligned = parts[0] == "bar" or "aligned" in parts

    def step(b: Bundle, m: Array, at: int) -> None:
        taking = active(b, m)
        if aligned:
            b.require(taking)
        b.pc[m] = at + 1
        if taking.any():
            b.machine.barrier(b, taking, b.r[number], None if count is None else b.r[count], wait)

    return step


@controls("barrier.cluster.arrive")
def _cluster_arrive(program: Program, instruction: Instruction) -> Control:
    active, ordered = program.active(instruction), "relaxed" not in instruction.parts

    def step(b: Bundle, m: Array, at: int) -> None:
        taking = active(b, m)
        b.pc[m] = at + 1
        b.machine.cluster_arrive(b, taking, ordered)

    return step


@controls("barrier.cluster.wait")
def _cluster_wait(program: Program, instruction: Instruction) -> Control:
    active = program.active(instruction)

    def step(b: Bundle, m: Array, at: int) -> None:
        taking = active(b, m)
        b.pc[m] = at + 1
        b.machine.cluster_wait(b, taking)

    return step


# --- mbarriers ---


def _keys(b: Bundle, address: Array, lanes: Array, space: str) -> list[tuple[int, int]]:
    """(CTA, byte offset) of the mbarrier of every lane."""
    offsets = shared_offsets(b, address, 8, lanes, space or "shared")
    pitch, races = b.machine.shared.pitch, b.machine.races
    if races is not None:
        at = b.machine.at
        if b.machine.program.kernel.instructions[at].opcode.startswith("mbarrier.init"):
            races.write(races.shared, offsets, 8, b.threads[lanes], at)
        else:
            races.use_mbarrier(offsets, b.threads[lanes], at)
    return [(int(offset) // pitch, int(offset) % pitch) for offset in offsets]


def _lanes(b: Bundle, m: Mask) -> Array:
    return np.arange(b.n) if m is None else np.flatnonzero(m)


def _for_each(
    program: Program, operand: Operand, space: str, apply: Callable[[Bundle, int, tuple[int, int]], object]
) -> Step:
    """A step that does something to the mbarrier of each lane in turn."""
    read = address_reader(program, operand)

    def step(b: Bundle, m: Mask) -> None:
        lanes = _lanes(b, m)
        for lane, key in zip(lanes, _keys(b, read(b, lanes), lanes, space), strict=True):
            apply(b, int(lane), key)

    return step


def _count(program: Program, operands: tuple[Operand, ...], default: int) -> Callable[[Bundle, int], int]:
    if not operands:
        return lambda b, lane: default
    slot = program.source(operands[0], "u32")
    return lambda b, lane: int(b.r[slot][lane])


@compiles("mbarrier")
def _mbarrier(program: Program, instruction: Instruction) -> Step:
    parts, operands, space = instruction.parts, instruction.operands, space_of(instruction)
    operation = parts[1]
    if operation == "init":
        initial = _count(program, operands[1:], 0)

        def init(b: Bundle, lane: int, key: tuple[int, int]) -> None:
            count = initial(b, lane)
            b.machine.mbarriers[key] = Mbarrier(count, count)

        return _for_each(program, operands[0], space, init)
    if operation == "inval":
        return _for_each(program, operands[0], space, lambda b, lane, key: b.machine.mbarriers.pop(key))
    if operation in ("expect_tx", "complete_tx"):
        amount, sign = _count(program, operands[1:], 0), 1 if operation == "expect_tx" else -1

        def expect(b: Bundle, lane: int, key: tuple[int, int]) -> None:
            found = b.machine.mbarrier(key)
            found.transactions += sign * amount(b, lane)
            found.settle()

        return _for_each(program, operands[0], space, expect)
    if operation in ("arrive", "arrive_drop"):
        return _arrive(program, instruction, space)
    raise PtxError(f"the interpreter does not know mbarrier.{operation}")


def _arrive(program: Program, instruction: Instruction, space: str) -> Step:
    """mbarrier.arrive{.expect_tx}; the state it returns is the phase."""
    operands = list(instruction.operands)
    state = operands.pop(0) if operands[0].kind != "address" else None
    slot = program.register(state.name) if state is not None and state.kind == "register" else None
    expects = "expect_tx" in instruction.parts
    given = _count(program, tuple(operands[1:]), 0 if expects else 1)
    drop = instruction.parts[1] == "arrive_drop"

    def arrive(b: Bundle, lane: int, key: tuple[int, int]) -> None:
        found = b.machine.mbarrier(key)
        if slot is not None:
            scatter(b, np.array([lane]), slot, np.array([found.phase], dtype=np.uint64))
        amount = given(b, lane)
        if b.machine.races is not None:
            found.publish(b.machine.races.publish(np.array([(b.start + lane) // WARP]))[0])
        if expects:
            found.transactions += amount
        found.pending -= 1 if expects else amount
        if drop:
            found.count -= 1
        if found.pending < 0:
            raise PtxError(f"more arrivals at an mbarrier than its {found.count}")
        found.settle()

    return _for_each(program, operands[0], space, arrive)


@controls("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(program: Program, instruction: Instruction) -> Control:
    """Waits until the phase is over; data in flight towards the mbarrier arrives only then."""
    parts, operands = instruction.parts, instruction.operands
    parity, space, active = "parity" in parts, space_of(instruction), program.active(instruction)
    result = program.register(operands[0].name)
    read = address_reader(program, operands[1])
    wanted = program.source(operands[2], "u32" if parity else "u64")

    def step(b: Bundle, m: Array, at: int) -> None:
        lanes = np.flatnonzero(active(b, m))
        b.pc[m] = at + 1
        done = np.zeros(lanes.size, dtype=np.bool_)
        phases = b.r[wanted][lanes]
        for index, key in enumerate(_keys(b, read(b, lanes), lanes, space)):
            found: Any = b.machine.deliver(key)
            # The wait for a parity ends once the phase of that parity is over: the current one has the other.
            done[index] = (
                (found.phase & 1) != int(phases[index]) if parity else found.phase != int(phases[index])
            )
            if not done[index]:
                lane = int(lanes[index])
                b.machine.waits[b.start + lane] = (key, found.phase)
                b.state[lane], b.pc[lane] = AT_MBARRIER, at
            elif b.machine.races is not None and found.published is not None:
                b.machine.races.acquire((b.start + int(lanes[index])) // WARP, found.published)
        over = lanes[done]
        if over.size:
            scatter(b, over, result, np.ones(over.size, dtype=np.bool_))

    return step
