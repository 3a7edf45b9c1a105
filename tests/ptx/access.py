# SPDX-License-Identifier: Apache-2.0
"""Steps that touch memory: loads, stores, atomics, addresses, cp.async."""

from collections.abc import Callable

import numpy as np

from tests.ptx.alu import BINARY, DTYPES, WIDTH
from tests.ptx.machine import Bundle, Copy, Mask, Step
from tests.ptx.memory import CLUSTER_WINDOW, GENERIC_SHARED, AccessError, Array
from tests.ptx.parse import Instruction, Operand, PtxError
from tests.ptx.program import Program, assign, compiles, extend, narrow, scatter

_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")


def lanes_of(m: Mask) -> Array | None:
    return None if m is None else np.flatnonzero(m)


def pick(value: Array, lanes: Array | None) -> Array:
    return value if lanes is None else value[lanes]


def address_reader(program: Program, operand: Operand) -> Callable[[Bundle, Array | None], Array]:
    """Addresses of the lanes as uint64."""
    base, offset = program.source(operand.parts[0], "u64"), np.int64(operand.offset).view(np.uint64)

    def read(b: Bundle, lanes: Array | None) -> Array:
        return pick(b.r[base], lanes).astype(np.uint64) + offset

    def read32(b: Bundle, lanes: Array | None) -> Array:
        # 32-bit addresses wrap around.
        return (pick(b.r[base], lanes) + np.uint32(offset & np.uint64(0xFFFFFFFF))).astype(np.uint64)

    part = operand.parts[0]
    short = part.kind == "register" and program.kernel.registers[part.name] == "b32"
    return read32 if short else read


def space_of(instruction: Instruction) -> str:
    """The state space, empty for generic addresses."""
    return next((part for part in instruction.parts if part in _SPACES), "")


def shared_offsets(b: Bundle, address: Array, size: int, lanes: Array | None, space: str) -> Array:
    """Checked offsets into the bytes of the batch's shared memory."""
    machine, cta = b.machine, pick(b.cta, lanes)
    remote = space == "shared::cluster"
    offsets = machine.shared.offsets(address, size, cta, lanes, remote)
    if remote:
        gone = machine.alive[offsets // machine.shared.pitch] == 0
        if gone.any():
            at = int(gone.argmax())
            lane = at if lanes is None else int(lanes[at])
            raise AccessError("access to the shared memory of a CTA that has exited", lane, int(address[at]))
    return offsets


def note_shared(b: Bundle, offsets: Array, size: int, lanes: Array | None, what: str) -> None:
    """Tell the race finder, if one runs, of a "read" or "write" of shared memory."""
    races = b.machine.races
    if races is not None:
        note = races.read if what == "read" else races.write
        note(races.shared, offsets, size, pick(b.threads, lanes), b.machine.at)


def note_global(b: Bundle, address: Array, size: int, lanes: Array | None, what: str) -> None:
    """The same for global memory."""
    races = b.machine.races
    if races is not None:
        note = races.read if what == "read" else races.write
        note(races.memory, b.machine.memory.dense(address), size, pick(b.threads, lanes), b.machine.at)


def read_memory(
    b: Bundle, space: str, address: Array, width: int, count: int, lanes: Array | None, noted: bool = True
) -> list[Array]:
    """`count` values per lane of shared, global or generic memory. `noted`: the race finder is told."""
    if space in ("global", "const"):
        values = b.machine.memory.read(address, width, count, lanes)
        if noted:
            note_global(b, address, width * count, lanes, "read")
        return values
    if space:
        offsets = shared_offsets(b, address, width * count, lanes, space)
        if noted:
            note_shared(b, offsets, width * count, lanes, "read")
        return b.machine.shared.bytes.read(offsets, width, count)
    values = [np.zeros(address.size, dtype=f"u{width}") for _ in range(count)]
    for inner, some, rest, where in _by_space(address, lanes):
        for value, part in zip(values, read_memory(b, inner, where, width, count, rest, noted), strict=True):
            value[some] = part
    return values


def write_memory(
    b: Bundle, space: str, address: Array, width: int, values: list[Array], lanes: Array | None,
    noted: bool = True,
) -> None:  # fmt: skip
    """The counterpart of `read_memory`."""
    size = width * len(values)
    if space == "global":
        b.machine.memory.write(address, width, values, lanes)
        if noted:
            note_global(b, address, size, lanes, "write")
    elif space:
        offsets = shared_offsets(b, address, size, lanes, space)
        if noted:
            note_shared(b, offsets, size, lanes, "write")
        b.machine.shared.bytes.write(offsets, width, values)
    else:
        for inner, some, rest, where in _by_space(address, lanes):
            write_memory(b, inner, where, width, [value[some] for value in values], rest, noted)


def _by_space(address: Array, lanes: Array | None) -> list[tuple[str, Array, Array, Array]]:
    """Generic addresses by space: (space, their indices, their lanes, their addresses within the space)."""
    shared = address >= np.uint64(GENERIC_SHARED)
    result = []
    for where, space, base in ((shared, "shared::cluster", GENERIC_SHARED), (~shared, "global", 0)):
        some = np.flatnonzero(where)
        if some.size:
            rest = some if lanes is None else lanes[some]
            result.append((space, some, rest, address[some] - np.uint64(base)))
    return result


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if operand.kind == "vector" else (operand,)


@compiles("ld", "ldu")
def _load(program: Program, instruction: Instruction) -> Step:
    space, kind = space_of(instruction), instruction.parts[-1]
    target, source = instruction.operands[:2]
    targets = _vector(target)
    width = WIDTH[kind]
    slots = [None if t.kind == "sink" else (program.register(t.name), program.bits(t)) for t in targets]
    if space == "param":
        values = [
            program.parameter(source.parts[0].name, source.offset + i * width, kind)
            for i in range(len(slots))
        ]

        def load_parameter(b: Bundle, m: Mask) -> None:
            for place, value in zip(slots, values, strict=True):
                if place is not None:
                    assign(b, m, place[0], extend(b.r[value], kind, place[1]))

        return load_parameter
    if space == "local":
        raise PtxError("the interpreter has no local memory")
    read = address_reader(program, source)

    def load(b: Bundle, m: Mask) -> None:
        lanes = lanes_of(m)
        loaded = read_memory(b, space, read(b, lanes), width, len(slots), lanes)
        for place, value in zip(slots, loaded, strict=True):
            if place is not None:
                scatter(b, lanes, place[0], extend(value, kind, place[1]))

    return load


@compiles("st")
def _store(program: Program, instruction: Instruction) -> Step:
    if instruction.parts[1] == "async":
        from tests.ptx import bulk

        return bulk.compile_store_async(program, instruction)
    space, kind = space_of(instruction), instruction.parts[-1]
    if space == "local":
        raise PtxError("the interpreter has no local memory")
    target, source = instruction.operands[:2]
    width = WIDTH[kind]
    values = [program.source(part, kind) for part in _vector(source)]
    read = address_reader(program, target)

    def store(b: Bundle, m: Mask) -> None:
        lanes = lanes_of(m)
        stored = [narrow(pick(b.r[value], lanes), width) for value in values]
        write_memory(b, space, read(b, lanes), width, stored, lanes)

    return store


@compiles("atom", "red")
def _atomic(program: Program, instruction: Instruction) -> Step:
    """One lane after another, in the order of the lanes."""
    parts, space = instruction.parts, space_of(instruction)
    kind = parts[-1]
    operation = next(
        p for p in parts if p in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    )
    returns = parts[0] == "atom"
    target = instruction.operands[0] if returns else None
    address, *sources = instruction.operands[1 if returns else 0 :]
    if kind not in DTYPES or kind in ("bf16", "bf16x2", "f16x2", "f32x2") or "v2" in parts or "v4" in parts:
        raise PtxError(f"the interpreter knows no atomics of {kind}")
    read, values = address_reader(program, address), [program.source(s, kind) for s in sources]
    place = (program.register(target.name), program.bits(target)) if target is not None else None
    width, dtype = WIDTH[kind], DTYPES[kind]

    def step(b: Bundle, m: Mask) -> None:
        lanes = np.arange(b.n) if m is None else np.flatnonzero(m)
        where = read(b, lanes)
        old = np.zeros(lanes.size, dtype=f"u{width}")
        for index, lane in enumerate(lanes):
            one = slice(index, index + 1)
            current = read_memory(b, space, where[one], width, 1, lanes[one], noted=False)[0].view(dtype)
            given = [b.r[value][lane : lane + 1].view(dtype) for value in values]
            new = _updated(operation, current, given)
            write_memory(b, space, where[one], width, [new.view(f"u{width}")], lanes[one], noted=False)
            old[one] = current.view(f"u{width}")
        if place is not None:
            scatter(b, lanes, place[0], extend(old, kind, place[1]))

    return step


def _updated(operation: str, current: Array, given: list[Array]) -> Array:
    if operation == "exch":
        return given[0]
    if operation == "cas":
        return np.where(current == given[0], given[1], current)
    one = np.ones_like(current)
    if operation == "inc":
        return np.where(current >= given[0], current * 0, current + one)
    if operation == "dec":
        return np.where((current == 0) | (current > given[0]), given[0], current - one)
    return BINARY[operation](current, given[0])


@compiles("cvta")
def _to_generic(program: Program, instruction: Instruction) -> Step:
    """Generic addresses of global memory are its own; shared memory has a range far above."""
    target, source = instruction.operands
    slot, value, bits = program.register(target.name), program.source(source, "u64"), program.bits(target)
    space = space_of(instruction)
    if space in ("local", "param", "const"):
        raise PtxError(f"the interpreter has no generic addresses of .{space}")
    base = np.uint64(GENERIC_SHARED if space.startswith("shared") else 0)
    back = "to" in instruction.parts

    def step(b: Bundle, m: Mask) -> None:
        address = b.r[value].astype(np.uint64)
        assign(b, m, slot, (address - base if back else address + base).astype(bits))

    return step


@compiles("mapa")
def _map_address(program: Program, instruction: Instruction) -> Step:
    target, source, rank = instruction.operands
    slot, bits = program.register(target.name), program.bits(target)
    base, ranks = program.source(source, instruction.parts[-1]), program.source(rank, "u32")
    generic = not space_of(instruction)

    def step(b: Bundle, m: Mask) -> None:
        address = b.r[base].astype(np.int64) - (GENERIC_SHARED if generic else 0)
        window = (b.r[ranks].astype(np.int64) + 1) * CLUSTER_WINDOW
        if (b.r[ranks] >= b.machine.geometry.cluster_ctas).any() and m is None:
            raise PtxError(f"mapa to rank {int(b.r[ranks].max())} of {b.machine.geometry.cluster_ctas}")
        mapped = address % CLUSTER_WINDOW + window + (GENERIC_SHARED if generic else 0)
        assign(b, m, slot, mapped.astype(bits))

    return step


@compiles("getctarank")
def _rank_of(program: Program, instruction: Instruction) -> Step:
    target, source = instruction.operands
    slot, value = program.register(target.name), program.source(source, instruction.parts[-1])

    def step(b: Bundle, m: Mask) -> None:
        address = b.r[value].astype(np.int64) % GENERIC_SHARED
        own, window = b.cta % b.machine.geometry.cluster_ctas, address // CLUSTER_WINDOW
        assign(b, m, slot, np.where(window == 0, own, window - 1).astype(np.uint32))

    return step


@compiles("isspacep")
def _is_space(program: Program, instruction: Instruction) -> Step:
    target, source = instruction.operands
    slot, value = program.register(target.name), program.source(source, "u64")
    shared = space_of(instruction).startswith("shared")

    def step(b: Bundle, m: Mask) -> None:
        assign(b, m, slot, (b.r[value] >= np.uint64(GENERIC_SHARED)) == shared)

    return step


@compiles("prefetch", "prefetchu", "applypriority", "discard", "createpolicy")
def _prefetch(program: Program, instruction: Instruction) -> Step | None:
    """Addresses of prefetches are not checked: one outside of memory does nothing."""
    if instruction.parts[0] == "discard":
        raise PtxError("the interpreter does not know discard")
    return None


@compiles("fence", "membar", "griddepcontrol", "nanosleep", "setmaxnreg", "pmevent", "clusterlaunchcontrol")
def _ordering(program: Program, instruction: Instruction) -> Step | None:
    """Steps are already in order; the mbarrier's delivery and cp.async's wait model what is not."""
    if instruction.parts[0] == "clusterlaunchcontrol":
        raise PtxError("the interpreter does not know clusterlaunchcontrol")
    return None


# --- cp.async ---


@compiles("cp")
def _asynchronous_copy(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    if parts[1] != "async" or "bulk" in parts or "mbarrier" in parts:
        from tests.ptx import bulk

        return bulk.compile_bulk(program, instruction)
    if parts[2] == "commit_group":
        return _commit
    if parts[2] in ("wait_group", "wait_all"):
        left = program.integer(instruction.operands[0]) if parts[2] == "wait_group" else None
        return lambda b, m: complete_copies(b, m, left)
    size = program.integer(instruction.operands[2])
    if size not in (4, 8, 16):
        raise PtxError(f"cp.async of {size} bytes")
    target, source = (address_reader(program, operand) for operand in instruction.operands[:2])
    rest = instruction.operands[3:4]
    valid = program.source(rest[0], "u32") if rest and program.integer(rest[0]) != size else None
    if rest and rest[0].kind == "register" and program.kernel.registers[rest[0].name] == "b64":
        valid = None  # a cache policy

    def copy(b: Bundle, m: Mask) -> None:
        lanes = np.arange(b.n) if m is None else np.flatnonzero(m)
        offsets = shared_offsets(b, target(b, lanes), size, lanes, "shared")
        used = None if valid is None else b.r[valid][lanes].astype(np.int64)
        where = source(b, lanes)
        needed = slice(None) if used is None else used > 0
        b.machine.memory.offsets(where[needed], size, lanes[needed])
        note_global(b, where[needed], size, lanes[needed], "read")
        if b.machine.races is not None:
            b.machine.races.depart(offsets, size, b.threads[lanes], b.machine.at)
        b.copies.append(Copy(lanes, b.commits[lanes], offsets, where, size, used, b.machine.at))

    return copy


def _commit(b: Bundle, m: Mask) -> None:
    b.commits = b.commits + (1 if m is None else m.astype(np.int64))


def complete_copies(b: Bundle, m: Mask, left: int | None) -> None:
    """Perform the active threads' copies but those of their latest `left` groups; None: every copy."""
    kept = []
    for copy in b.copies:
        due = np.ones(copy.lanes.size, dtype=np.bool_)
        if left is not None:
            due = copy.group < b.commits[copy.lanes] - left
        if m is not None:
            due = due & m[copy.lanes]
        if due.any():
            _perform(b, copy, due)
        if not due.all():
            rest = ~due
            kept.append(
                Copy(copy.lanes[rest], copy.group[rest], copy.target[rest], copy.source[rest], copy.size,
                     None if copy.valid is None else copy.valid[rest], copy.at)
            )  # fmt: skip
    b.copies = kept


def _perform(b: Bundle, copy: Copy, due: Array) -> None:
    width, count = min(copy.size, 8), copy.size // min(copy.size, 8)
    memory, shared, races = b.machine.memory, b.machine.shared.bytes, b.machine.races
    if races is not None:
        threads = b.threads[copy.lanes[due]]
        races.land(copy.target[due], copy.size, threads, races.times(threads), copy.at)
    if copy.valid is None:
        values = memory.read(copy.source[due], width, count, copy.lanes[due])
        shared.write(copy.target[due], width, values)
        return
    full, empty = due & (copy.valid >= copy.size), due & (copy.valid == 0)
    if (due & ~full & ~empty).any():
        raise PtxError("the interpreter knows cp.async of all or no bytes only")
    shared.write(copy.target[full], width, memory.read(copy.source[full], width, count, copy.lanes[full]))
    zeros = np.zeros(int(empty.sum()), dtype=f"u{width}")
    shared.write(copy.target[empty], width, [zeros] * count)
