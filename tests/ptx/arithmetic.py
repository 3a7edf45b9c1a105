# SPDX-License-Identifier: Apache-2.0
"""Steps of arithmetic, comparison, selection, moves and conversions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx import alu
from tests.ptx.alu import BINARY, COMPARE, DTYPES, F32, F64, U32, UNARY, WIDTH
from tests.ptx.machine import Bundle, Mask, Step
from tests.ptx.memory import Array
from tests.ptx.parse import Instruction, Operand, PtxError
from tests.ptx.program import Program, assign, compiles, extend, narrow

_MODIFIERS = {"rn", "approx", "full", "lo", "ftz", "sat", "wide", "hi", "NaN", "relu", "uni", "to", "rna"}
_SMALL = {"bf16", "bf16x2", "f16", "f16x2"}


def _typed(program: Program, operand: Operand, kind: str) -> Callable[[Bundle], Array]:
    """Reads an operand as an array of its type; bf16 and f16 as float32, packed ones as twice the lanes."""
    slot = program.source(operand, kind)
    if kind in ("bf16", "bf16x2"):
        return lambda b: alu.bf16_to_f32(b.r[slot].view(np.uint16))
    if kind in ("f16", "f16x2"):
        return lambda b: b.r[slot].view(np.float16).astype(F32)
    if kind == "f32x2":
        return lambda b: b.r[slot].view(F32)
    if kind == "pred":
        negated = operand.negated
        return lambda b: ~b.r[slot] if negated else b.r[slot]
    dtype, width = DTYPES[kind], WIDTH[kind]
    return lambda b: narrow(b.r[slot], width).view(dtype)


def _raw(value: Array, kind: str) -> Array:
    """A result's bits, one element per lane."""
    if kind in ("bf16", "bf16x2"):
        bits = alu.f32_to_bf16(value.astype(F32))
        return bits.view(U32) if kind == "bf16x2" else bits
    if kind in ("f16", "f16x2"):
        half = value.astype(np.float16)
        return half.view(U32) if kind == "f16x2" else half.view(np.uint16)
    if kind == "f32x2":
        return value.view(np.uint64)
    return value


def _emit(program: Program, target: Operand, kind: str, compute: Callable[[Bundle], Array]) -> Step:
    if target.kind == "sink":
        return lambda b, m: None
    slot, bits = program.register(target.name), program.bits(target)

    def step(b: Bundle, m: Mask) -> None:
        assign(b, m, slot, extend(_raw(compute(b), kind), kind, bits))

    return step


def _kind(instruction: Instruction) -> str:
    """The type, of an instruction whose other words are known modifiers."""
    parts = instruction.parts
    unknown = [part for part in parts[1:-1] if part not in _MODIFIERS]
    if unknown or parts[-1] not in DTYPES:
        raise PtxError(f"the interpreter does not know .{(unknown or parts[-1:])[0]} here")
    return parts[-1]


def _finish(instruction: Instruction, kind: str, compute: Callable[..., Array]) -> Callable[..., Array]:
    """Flushing and saturation as the instruction asks."""
    parts = instruction.parts
    flushed = "ftz" in parts and kind in ("f32", "f32x2")
    saturated, rectified = "sat" in parts, "relu" in parts

    def finished(*values: Array) -> Array:
        result = compute(*(alu.flush(v) for v in values)) if flushed else compute(*values)
        if flushed:
            result = alu.flush(result)
        if saturated:
            result = np.where(np.isnan(result), F32(0), np.clip(result, 0, 1)).astype(result.dtype)
        if rectified:
            result = np.maximum(result, result.dtype.type(0))
        return result

    return finished if flushed or saturated or rectified else compute


@compiles(
    "neg",
    "abs",
    "not",
    "popc",
    "clz",
    "brev",
    "sqrt",
    "rcp",
    "ex2",
    "lg2",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "cnot",
)
def _unary(program: Program, instruction: Instruction) -> Step:
    kind = _kind(instruction)
    target, operand = instruction.operands
    read = _typed(program, operand, kind)
    function = UNARY[instruction.parts[0]]
    if kind == "f64" and instruction.parts[0] in alu.UNARY_F64:
        function = alu.UNARY_F64[instruction.parts[0]]
    compute = _finish(instruction, kind, function)
    out = "u32" if instruction.parts[0] in ("popc", "clz") else kind
    return _emit(program, target, out, lambda b: compute(read(b)))


@compiles("add", "sub", "mul", "and", "or", "xor", "min", "max", "div", "rem", "shl", "shr", "copysign")
def _binary(program: Program, instruction: Instruction) -> Step:
    word, parts = instruction.parts[0], instruction.parts
    target, first, second = instruction.operands[:3]
    if len(parts) > 2 and parts[-2] in DTYPES and parts[-1] in _SMALL:  # add.f32.bf16: a narrow first operand
        narrow_first, wide = _typed(program, first, parts[-1]), _typed(program, second, parts[-2])
        mixed = BINARY[word]
        return _emit(program, target, parts[-2], lambda b: mixed(narrow_first(b), wide(b)))
    kind = _kind(instruction)
    if len(instruction.operands) == 4:
        if word not in ("min", "max"):
            raise PtxError("the interpreter knows three sources of min and max only")
        reads = [_typed(program, operand, kind) for operand in instruction.operands[1:]]
        pick = BINARY[word]
        return _emit(program, target, kind, lambda b: pick(pick(reads[0](b), reads[1](b)), reads[2](b)))
    a, c = _typed(program, first, kind), _typed(program, second, "u32" if word in ("shl", "shr") else kind)
    if word == "mul" and "wide" in parts:
        wide_type = f"{kind[0]}{2 * int(kind[1:])}"
        dtype = DTYPES[wide_type]
        return _emit(program, target, wide_type, lambda b: a(b).astype(dtype) * c(b).astype(dtype))
    function = BINARY["mul.hi" if word == "mul" and "hi" in parts else word]
    if word in ("min", "max") and "NaN" in parts:
        function = np.minimum if word == "min" else np.maximum
    compute = _finish(instruction, kind, function)
    return _emit(program, target, kind, lambda b: compute(a(b), c(b)))


@compiles("fma", "mad")
def _multiply_add(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    if len(parts) > 2 and parts[-2] == "f32" and parts[-1] in _SMALL:  # fma.rn.f32.bf16: narrow factors
        x, y = (_typed(program, operand, parts[-1]) for operand in instruction.operands[1:3])
        z = _typed(program, instruction.operands[3], "f32")
        return _emit(program, instruction.operands[0], "f32", lambda b: alu.fma_f32(x(b), y(b), z(b)))
    kind = _kind(instruction)
    target = instruction.operands[0]
    wide = "wide" in parts
    out = f"{kind[0]}{2 * int(kind[1:])}" if wide else kind
    a, b_, c = (
        _typed(program, operand, k)
        for operand, k in zip(instruction.operands[1:], (kind, kind, out), strict=True)
    )
    if wide:
        dtype = DTYPES[out]
        return _emit(program, target, out, lambda b: a(b).astype(dtype) * b_(b).astype(dtype) + c(b))
    if kind[0] in "usb" and kind not in _SMALL:
        multiply = BINARY["mul.hi" if "hi" in parts else "mul"]
        return _emit(program, target, kind, lambda b: multiply(a(b), b_(b)) + c(b))
    compute = _finish(instruction, kind, alu.fma_f64 if kind == "f64" else alu.fma_f32)
    return _emit(program, target, kind, lambda b: compute(a(b), b_(b), c(b)))


@compiles("lop3", "prmt", "shf", "bfe", "bfi", "sad")
def _bit_field(program: Program, instruction: Instruction) -> Step:
    word, parts, kind = instruction.parts[0], instruction.parts, instruction.parts[-1]
    target, *sources = instruction.operands
    if word == "lop3":
        table = program.integer(sources.pop())
        if table is None:
            raise PtxError("lop3 needs an immediate table")
        a, b_, c = (_typed(program, operand, kind) for operand in sources)
        return _emit(program, target, kind, lambda b: alu.lop3(a(b), b_(b), c(b), table))
    kinds = {
        "prmt": ("u32", "u32", "u32"),
        "shf": ("u32", "u32", "u32"),
        "bfe": (kind, "u32", "u32"),
        "bfi": (kind, kind, "u32", "u32"),
        "sad": (kind, kind, kind),
    }[word]
    if word == "prmt" and parts[1:] != ["b32"]:
        raise PtxError("the interpreter knows prmt.b32 only")
    reads = [_typed(program, operand, k) for operand, k in zip(sources, kinds, strict=True)]
    functions: dict[str, Callable[..., Array]] = {
        "prmt": alu.permute_bytes,
        "bfe": alu.extract_bits,
        "bfi": alu.insert_bits,
        "shf": lambda low, high, count: alu.funnel(low, high, count, parts[1] == "l", parts[2] == "wrap"),
        "sad": lambda x, y, z: z + np.where(x > y, x - y, y - x),
    }
    function = functions[word]
    return _emit(program, target, kind, lambda b: function(*(read(b) for read in reads)))


@compiles("setp")
def _set_predicate(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    kind, compare = parts[-1], COMPARE[parts[1]]
    combine = BINARY[parts[2]] if parts[2] in ("and", "or", "xor") else None
    target, first, second, *rest = instruction.operands
    a, c = _typed(program, first, kind), _typed(program, second, kind)
    extra = _typed(program, rest[0], "pred") if rest else None
    targets = target.parts if target.kind == "pair" else (target,)
    slots = [program.register(t.name) if t.kind == "register" else None for t in targets]

    def step(b: Bundle, m: Mask) -> None:
        held = compare(a(b), c(b))
        for slot, value in zip(slots, (held, ~held) if len(slots) > 1 else (held,), strict=True):
            if combine is not None and extra is not None:
                value = combine(value, extra(b))
            if slot is not None:
                assign(b, m, slot, value)

    return step


@compiles("selp")
def _select(program: Program, instruction: Instruction) -> Step:
    kind = instruction.parts[-1]
    target, yes, no, predicate = instruction.operands
    y, n, p = program.source(yes, kind), program.source(no, kind), _typed(program, predicate, "pred")
    slot = program.register(target.name)
    return lambda b, m: assign(b, m, slot, np.where(p(b), b.r[y], b.r[n]))


@compiles("mov")
def _move(program: Program, instruction: Instruction) -> Step:
    kind = instruction.parts[-1]
    target, source = instruction.operands
    if source.kind == "vector":
        return _pack(program, target, source)
    if target.kind == "vector":
        return _unpack(program, target, source, kind)
    if kind == "pred" and source.kind == "register":
        return _emit(program, target, kind, _typed(program, source, "pred"))
    slot, value, bits = program.register(target.name), program.source(source, kind), program.bits(target)
    return lambda b, m: assign(b, m, slot, extend(b.r[value], kind, bits))


def _pack(program: Program, target: Operand, source: Operand) -> Step:
    slot, bits = program.register(target.name), program.bits(target)
    width = np.dtype(bits).itemsize // len(source.parts)
    values = [program.source(part, f"b{8 * width}") for part in source.parts]

    def step(b: Bundle, m: Mask) -> None:
        assign(b, m, slot, np.stack([b.r[value] for value in values], axis=1).reshape(-1).view(bits))

    return step


def _unpack(program: Program, target: Operand, source: Operand, kind: str) -> Step:
    value = program.source(source, kind)
    width = WIDTH[kind] // len(target.parts)
    slots = [program.register(part.name) if part.kind == "register" else None for part in target.parts]

    def step(b: Bundle, m: Mask) -> None:
        words = b.r[value].view(f"u{width}").reshape(b.n, -1)
        for index, slot in enumerate(slots):
            if slot is not None:
                assign(b, m, slot, np.ascontiguousarray(words[:, index]))

    return step


# --- conversions ---

_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


@compiles("cvt")
def _convert(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    to, source = parts[-2], parts[-1]
    target, *operands = instruction.operands
    modifiers = set(parts[1:-2])
    if unknown := modifiers - {"rn", "rz", "rna", "ftz", "sat", "relu", "satfinite", *_ROUNDINGS}:
        raise PtxError(f"the interpreter does not know .{sorted(unknown)[0]} here")
    if to in ("bf16x2", "f16x2") and source == "f32":
        high, low = (_typed(program, operand, "f32") for operand in operands)
        half = _to_small(to, modifiers)
        return _emit_bits(
            program, target, lambda b: np.stack([half(low(b)), half(high(b))], axis=1).reshape(-1).view(U32)
        )
    read = _typed(program, operands[0], source)
    if to in ("bf16", "f16"):
        half = _to_small(to, modifiers)
        return _emit_bits(program, target, lambda b: half(read(b).astype(F32)))
    if to == "tf32":
        if "rna" not in modifiers:
            raise PtxError("the interpreter knows cvt.rna.tf32 only")
        return _emit_bits(program, target, lambda b: alu.f32_to_tf32(read(b)))
    if to in ("f32", "f64"):
        return _emit(program, target, to, _to_float(to, modifiers, read))
    if source in ("f32", "f64", "bf16", "f16"):
        return _emit(program, target, to, _to_integer(to, modifiers, read))
    dtype: Any = DTYPES[to]
    if "sat" in modifiers:
        limits = np.iinfo(dtype)
        return _emit(program, target, to, lambda b: read(b).clip(limits.min, limits.max).astype(dtype))
    return _emit(program, target, to, lambda b: read(b).astype(dtype))


def _emit_bits(program: Program, target: Operand, compute: Callable[[Bundle], Array]) -> Step:
    slot, bits = program.register(target.name), program.bits(target)

    def step(b: Bundle, m: Mask) -> None:
        value = compute(b)
        assign(b, m, slot, value if value.dtype == bits else value.astype(bits))

    return step


def _to_small(to: str, modifiers: set[str]) -> Callable[[Array], Array]:
    if to.startswith("bf16"):
        half = alu.f32_to_bf16_toward_zero if "rz" in modifiers else alu.f32_to_bf16
    elif "rz" in modifiers:
        raise PtxError("the interpreter does not know .rz for f16")
    else:

        def half(values: Array) -> Array:
            return values.astype(np.float16).view(np.uint16)

    if "relu" in modifiers:
        return lambda values: half(np.fmax(values, F32(0)))
    return half


def _to_float(to: str, modifiers: set[str], read: Callable[[Bundle], Array]) -> Callable[[Bundle], Array]:
    dtype = F32 if to == "f32" else F64
    if "rz" in modifiers:
        raise PtxError("the interpreter does not know .rz for floats")
    rounding = next((_ROUNDINGS[m] for m in modifiers if m in _ROUNDINGS), None)

    def convert(b: Bundle) -> Array:
        value = read(b)
        if rounding is not None:
            value = rounding(value)
        value = value.astype(dtype)
        return np.fmax(np.clip(value, 0, 1), dtype(0)) if "sat" in modifiers else value

    return convert


def _to_integer(to: str, modifiers: set[str], read: Callable[[Bundle], Array]) -> Callable[[Bundle], Array]:
    """Rounded as asked, clamped to the type; NaN is zero."""
    dtype: Any = DTYPES[to]
    limits = np.iinfo(dtype)
    rounding = next(_ROUNDINGS[m] for m in modifiers if m in _ROUNDINGS)

    def convert(b: Bundle) -> Array:
        value = rounding(read(b)).astype(F64)
        value = np.where(np.isnan(value), 0.0, value)
        inside = np.clip(value, float(limits.min), np.nextafter(float(limits.max) + 1.0, 0.0))
        result = inside.astype(dtype)
        return np.where(value >= float(limits.max), dtype(limits.max), result)

    return convert
