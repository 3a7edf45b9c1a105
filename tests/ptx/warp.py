# SPDX-License-Identifier: Apache-2.0
"""Warp-wide steps: shuffles, votes, reductions, matrix products and the moves of their fragments."""

from collections.abc import Callable

import numpy as np

from tests.ptx.access import address_reader, note_shared, shared_offsets, space_of
from tests.ptx.alu import BINARY, DTYPES, F32, F64, U32, bf16_to_f32
from tests.ptx.machine import WARP, Bundle, Mask, Step
from tests.ptx.memory import Array
from tests.ptx.parse import Instruction, Operand, PtxError
from tests.ptx.program import Program, assign, compiles

Members = Callable[[Bundle, Mask], None]


def _members(program: Program, operand: Operand) -> Members:
    """Checks that the lanes of a member mask are there."""
    value = program.integer(operand)
    if value is not None and value & 0xFFFFFFFF == 0xFFFFFFFF:
        return lambda b, m: b.require(m)
    slot = program.source(operand, "b32")
    return lambda b, m: b.require(m, b.r[slot])


def _by_warp(value: Array) -> Array:
    return value.reshape(-1, WARP)


def _spread(value: Array) -> Array:
    """One value per warp, for all its lanes."""
    return np.repeat(value, WARP)


@compiles("bar", "barrier")
def _warp_barrier(program: Program, instruction: Instruction) -> Step:
    if instruction.parts[1] != "warp":
        raise PtxError("the interpreter does not know this barrier")
    check = _members(program, instruction.operands[0])

    def step(b: Bundle, m: Mask) -> None:
        check(b, m)
        if b.machine.races is not None:
            taking = _by_warp(_active(b, m)).any(axis=1)
            b.machine.races.synchronise(b.start // WARP + np.flatnonzero(taking))

    return step


@compiles("shfl")
def _shuffle(program: Program, instruction: Instruction) -> Step:
    mode = instruction.parts[2]
    target, value, lane, clamp, members = instruction.operands
    targets = target.parts if target.kind == "pair" else (target,)
    slot = program.register(targets[0].name)
    predicate = program.register(targets[1].name) if len(targets) > 1 else None
    source, index, bounds = (
        program.source(value, "b32"),
        program.source(lane, "b32"),
        program.source(clamp, "b32"),
    )
    check = _members(program, members)

    def step(b: Bundle, m: Mask) -> None:
        check(b, m)
        wanted, valid = _shuffle_source(
            mode, b.warp_lane, b.r[index].view(np.int32), b.r[bounds].astype(np.int64)
        )
        absolute = b.warp_base + np.where(valid, wanted, b.warp_lane)
        if m is not None and not m[absolute[m]].all():
            raise PtxError("a shuffle reads a lane that does not take part")
        assign(b, m, slot, b.r[source].take(absolute))
        if predicate is not None:
            assign(b, m, predicate, valid)

    return step


def _shuffle_source(mode: str, lane: Array, operand: Array, bounds: Array) -> tuple[Array, Array]:
    """The lane read, and whether it is in the segment."""
    segment, clamp = (bounds >> 8) & 31, bounds & 31
    by = operand.astype(np.int64) & 31
    last, first = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "idx":
        wanted = first | (by & ~segment)
        return wanted, wanted <= last
    if mode == "up":
        wanted = lane - by
        return wanted, wanted >= last
    wanted = lane + by if mode == "down" else lane ^ by
    if mode not in ("down", "bfly"):
        raise PtxError(f"shuffle mode {mode}")
    return wanted, wanted <= last


@compiles("vote", "activemask", "elect", "redux", "match")
def _vote(program: Program, instruction: Instruction) -> Step:
    word, parts = instruction.parts[0], instruction.parts
    if word == "activemask":
        slot = program.register(instruction.operands[0].name)
        return lambda b, m: assign(b, m, slot, _spread(_ballot(_active(b, m))))
    if word == "elect":
        return _elect(program, instruction)
    target, value, members = instruction.operands
    slot, check = program.register(target.name), _members(program, members)
    if word == "redux":
        return _reduce(program, instruction, check)
    if word == "match":
        raise PtxError("the interpreter does not know match")
    source, negated, mode = program.source(value, "pred"), value.negated, parts[2]

    def step(b: Bundle, m: Mask) -> None:
        check(b, m)
        taking, held = _active(b, m), (~b.r[source] if negated else b.r[source])
        if mode == "ballot":
            assign(b, m, slot, _spread(_ballot(held & taking)))
            return
        result: Array
        if mode == "any":
            result = np.any(_by_warp(held & taking), axis=1)
        else:
            result = np.all(_by_warp(held | ~taking), axis=1)
            if mode == "uni":
                result = result | ~np.any(_by_warp(held & taking), axis=1)
        assign(b, m, slot, _spread(result))

    return step


def _active(b: Bundle, m: Mask) -> Array:
    return np.ones(b.n, dtype=np.bool_) if m is None else m


def _ballot(held: Array) -> Array:
    return (_by_warp(held).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1).astype(U32)


def _elect(program: Program, instruction: Instruction) -> Step:
    target, members = instruction.operands
    parts = target.parts if target.kind == "pair" else (target,)
    first, chosen = (program.register(p.name) if p.kind == "register" else None for p in parts)
    check = _members(program, members)

    def step(b: Bundle, m: Mask) -> None:
        check(b, m)
        leader = _spread(_by_warp(_active(b, m)).argmax(axis=1))
        if first is not None:
            assign(b, m, first, leader.astype(U32))
        if chosen is not None:
            assign(b, m, chosen, b.warp_lane == leader)

    return step


def _reduce(program: Program, instruction: Instruction, check: Members) -> Step:
    operation, kind = instruction.parts[2], instruction.parts[-1]
    target, value, _ = instruction.operands
    slot, source = program.register(target.name), program.source(value, kind)
    combine = BINARY[operation]

    def step(b: Bundle, m: Mask) -> None:
        check(b, m)
        values, taking = _by_warp(b.r[source].view(DTYPES[kind])), _by_warp(_active(b, m))
        first = taking.argmax(axis=1)
        result = values[np.arange(len(values)), first]
        for lane in range(WARP):
            used = taking[:, lane] & (first != lane)
            result = np.where(used, combine(result, values[:, lane]), result)
        assign(b, m, slot, _spread(result).view(U32))

    return step


# --- matrix products ---


def _halves(word: Array) -> Array:
    """[warps, 8, 8]: pairs of bf16 of a fragment register as a matrix with a row per group of four lanes."""
    return bf16_to_f32(word.view(np.uint16)).reshape(-1, 8, 8)


def _tf32(word: Array) -> Array:
    """[warps, 8, 4]: the mantissa's low 13 bits are not read."""
    return (word & U32(0xFFFFE000)).view(F32).reshape(-1, 8, 4)


def _f16_halves(word: Array) -> Array:
    return word.view(np.float16).reshape(-1, 8, 8)


_SHAPES = {
    ("m16n8k8", "tf32"): (_tf32, 2), ("m16n8k4", "tf32"): (_tf32, 1), ("m16n8k16", "bf16"): (_halves, 2),
    ("m16n8k8", "bf16"): (_halves, 1), ("m16n8k16", "f16"): (_f16_halves, 2),
    ("m16n8k8", "f16"): (_f16_halves, 1),
}  # fmt: skip


@compiles("mma")
def _matrix_product(program: Program, instruction: Instruction) -> Step:
    """D = A B + C, products and sums in double, rounded once."""
    parts = instruction.parts
    shape, (out, left, right, add) = parts[3], parts[6:10]
    if (parts[1], parts[2], parts[4], parts[5]) != ("sync", "aligned", "row", "col") or len(parts) != 10:
        raise PtxError("the interpreter does not know this mma")
    if (out, add) != ("f32", "f32") or left != right:
        raise PtxError("the interpreter knows mma with float32 sums only")
    unpack, k_parts = _SHAPES[shape, left]
    d, a, b_, c = (operand.parts for operand in instruction.operands)
    targets = [program.register(part.name) for part in d]
    a_slots, b_slots = ([program.source(part, "b32") for part in operand] for operand in (a, b_))
    c_slots = [program.source(part, "f32") for part in c]

    def step(b: Bundle, m: Mask) -> None:
        b.require(m)
        rows = [
            np.concatenate([unpack(b.r[a_slots[half + 2 * k]]) for k in range(k_parts)], axis=2)
            for half in (0, 1)
        ]
        matrix_a = np.concatenate(rows, axis=1).astype(F64)
        matrix_b = np.concatenate([unpack(b.r[slot]) for slot in b_slots], axis=2).astype(F64)
        product = np.matmul(matrix_a, matrix_b.transpose(0, 2, 1)).reshape(-1, 2, 8, 4, 2)
        for half in (0, 1):
            for odd in (0, 1):
                start = b.r[c_slots[2 * half + odd]].view(F32)
                total = product[:, half, :, :, odd].reshape(-1) + start
                assign(b, m, targets[2 * half + odd], total.astype(F32).view(U32))

    return step


@compiles("ldmatrix", "stmatrix")
def _matrix_move(program: Program, instruction: Instruction) -> Step:
    """8 x 8 matrices of 16-bit elements; row i of matrix j lies at the address of lane 8 j + i."""
    parts = instruction.parts
    if "m8n8" not in parts or parts[-1] != "b16":
        raise PtxError("the interpreter knows .m8n8 of .b16 only")
    load = parts[0] == "ldmatrix"
    fragment, address = instruction.operands if load else instruction.operands[::-1]
    slots = [program.register(part.name) for part in (fragment.parts or (fragment,))]
    read, transposed, space = address_reader(program, address), "trans" in parts, space_of(instruction)
    space = space or "shared"

    def step(b: Bundle, m: Mask) -> None:
        b.require(m)
        bases = np.arange(b.n) if m is None else np.flatnonzero(m)
        bases = bases[::WARP]
        for j, slot in enumerate(slots):
            lanes = (bases[:, None] + 8 * j + np.arange(8)).reshape(-1)
            offsets = shared_offsets(b, read(b, lanes), 16, lanes, space)
            note_shared(b, offsets, 16, lanes, "read" if load else "write")
            all_lanes = (bases[:, None] + np.arange(WARP)).reshape(-1)
            if load:
                rows = b.machine.shared.bytes.read(offsets, 2, 8)
                matrix = np.stack(rows, axis=1).reshape(-1, 8, 8)
                matrix = matrix.transpose(0, 2, 1) if transposed else matrix
                new = b.r[slot].copy()
                new[all_lanes] = np.ascontiguousarray(matrix).reshape(-1).view(U32)
                b.r[slot] = new
            else:
                matrix = b.r[slot][all_lanes].view(np.uint16).reshape(-1, 8, 8)
                matrix = matrix.transpose(0, 2, 1) if transposed else matrix
                flat = np.ascontiguousarray(matrix).reshape(-1, 8)
                b.machine.shared.bytes.write(offsets, 2, [flat[:, i] for i in range(8)])

    return step
