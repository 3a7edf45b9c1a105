# SPDX-License-Identifier: Apache-2.0
"""Compiles a kernel's instructions to steps: closures over register indices, one per instruction."""

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.alu import BITS, DTYPES, WIDTH
from tests.ptx.machine import Bundle, Control, Mask, Step, special_registers
from tests.ptx.memory import Array
from tests.ptx.parse import Instruction, Kernel, Operand, PtxError

Compile = Callable[["Program", Instruction], "Step | None"]

# Compilers of instructions, by the opcode's first word; the modules of this package register theirs.
COMPILERS: dict[str, Compile] = {}
# Of control steps, which end a stretch.
CONTROLS: dict[str, Callable[["Program", Instruction], Control]] = {}


def compiles(*words: str) -> Callable[[Compile], Compile]:
    """Registers the compiler of opcodes that start with one of `words`."""

    def register(function: Compile) -> Compile:
        COMPILERS.update(dict.fromkeys(words, function))
        return function

    return register


def controls(*words: str) -> Callable[[Any], Any]:
    """Registers the compiler of control steps."""

    def register(function: Any) -> Any:
        CONTROLS.update(dict.fromkeys(words, function))
        return function

    return register


class Program:
    """A kernel's steps. Constants, special registers and parameters live in registers of their own."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._slots: dict[tuple[str, str], int] = {}
        self._values: list[tuple[str, Any, Any]] = []
        self.steps: list[Step] = []
        self.controls: dict[int, Control] = {}
        for index, instruction in enumerate(kernel.instructions):
            self._compile(index, instruction)
        self.stretch_end = self._stretches()
        accesses = [
            i.parts[-1] for i in kernel.instructions if i.parts[0] in ("ld", "st") and "param" not in i.parts
        ]
        self.unit = min((WIDTH[kind] for kind in accesses), default=4)

    def _compile(self, index: int, instruction: Instruction) -> None:
        word = _control_word(instruction)
        try:
            if word in CONTROLS:
                self.controls[index] = CONTROLS[word](self, instruction)
                self.steps.append(_unreachable)
                return
            step = COMPILERS[instruction.parts[0]](self, instruction)
        except PtxError as error:
            raise PtxError(f"line {instruction.line}: {instruction.text}: {error}") from error
        except (KeyError, IndexError, ValueError) as error:
            message = (
                f"line {instruction.line}: the interpreter does not know {instruction.text!r} ({error!r})"
            )
            raise PtxError(message) from error
        self.steps.append(_nothing if step is None else self._guard(instruction, step))

    def _guard(self, instruction: Instruction, step: Step) -> Step:
        """The step under the instruction's predicate."""
        if instruction.guard is None:
            return step
        name, wanted = instruction.guard
        slot = self.register(name)

        def guarded(b: Bundle, m: Mask) -> None:
            active = b.r[slot] if wanted else ~b.r[slot]
            if m is not None:
                active = active & m
            if active.all():
                step(b, None)
            elif active.any():
                step(b, active)

        return guarded

    def active(self, instruction: Instruction) -> Callable[[Bundle, Array], Array]:
        """The lanes of a control step that its predicate selects."""
        if instruction.guard is None:
            return lambda b, m: m
        name, wanted = instruction.guard
        slot = self.register(name)
        return lambda b, m: m & (b.r[slot] if wanted else ~b.r[slot])

    def _stretches(self) -> list[int]:
        leaders = set(self.kernel.labels.values()) | {len(self.steps)}
        leaders |= {index + 1 for index in self.controls}
        ends, end = [0] * len(self.steps), len(self.steps)
        for index in reversed(range(len(self.steps))):
            ends[index] = index if index in self.controls else end
            if index in self.controls or index in leaders:
                end = index
        return ends

    # --- operands ---

    def register(self, name: str) -> int:
        """The slot of a declared register."""
        return self._slot("register", name, BITS[self.kernel.registers[name]], None)

    def bits(self, operand: Operand) -> Any:
        """The dtype that a destination register holds."""
        return BITS[self.kernel.registers[operand.name]]

    def _slot(self, kind: str, name: str, dtype: Any, value: Any) -> int:
        key = kind, f"{name}:{np.dtype(dtype)}"
        if key not in self._slots:
            self._slots[key] = len(self._values)
            self._values.append((kind, dtype, name if value is None else value))
        return self._slots[key]

    def source(self, operand: Operand, kind: str) -> int:
        """The slot of a source operand; immediates and symbols are of the PTX type `kind`."""
        if operand.kind == "register":
            return self.register(operand.name)
        bits = np.dtype(np.bool_) if kind == "pred" else np.dtype(f"u{WIDTH[kind]}")
        if operand.kind == "immediate":
            value = immediate(operand.value, kind)
            return self._slot("constant", str(value), bits, value)
        if operand.kind == "special":
            return self._slot("special", operand.name, bits, None)
        if operand.kind == "symbol":
            address = self.address_of(operand.name)
            return self._slot("constant", str(address), bits, address)
        raise PtxError(f"unknown operand {operand}")

    def address_of(self, name: str) -> int:
        if name in self.kernel.shared:
            return self.kernel.shared[name].address
        if name in self.kernel.local:
            return self.kernel.local[name].address
        raise PtxError(f"unknown symbol {name}")

    def parameter(self, name: str, offset: int, kind: str) -> int:
        """The slot of a value in the parameters."""
        position = list(self.kernel.parameters).index(name)
        width = WIDTH[kind]
        size = self.kernel.parameters[name].size
        if offset < 0 or offset + width > size:
            raise PtxError(f"bytes {offset} to {offset + width} of a parameter of {size}")
        return self._slot(
            "parameter", f"{position}+{offset}", np.dtype(f"u{width}"), (position, offset, width)
        )

    def integer(self, operand: Operand) -> int | None:
        """The value of an immediate, None for registers."""
        return immediate(operand.value, "b64") if operand.kind == "immediate" else None

    def registers(self, bundle: Bundle) -> list[Array]:
        """Start values of every slot. What no instruction has set is all ones."""
        special = special_registers(bundle)
        blobs = bundle.machine.geometry.parameters
        result = []
        for kind, dtype, value in self._values:
            if kind == "register":
                result.append(np.full(bundle.n, _ones(dtype), dtype=dtype))
            elif kind == "special":
                if value not in special:
                    raise PtxError(f"the interpreter does not know the register {value}")
                result.append(np.broadcast_to(np.asarray(special[value]), (bundle.n,)).astype(dtype))
            else:
                if kind == "parameter":
                    position, offset, width = value
                    value = int.from_bytes(blobs[position][offset : offset + width], "little")
                result.append(np.full(bundle.n, value, dtype=dtype))
        return result


def _ones(dtype: Any) -> Any:
    return False if np.dtype(dtype) == np.bool_ else np.iinfo(dtype).max


def _control_word(instruction: Instruction) -> str:
    parts = instruction.parts
    if parts[0] in ("barrier", "bar") and parts[1] in ("warp", "cluster"):
        return ".".join(parts[:3]) if parts[1] == "cluster" else ""
    if parts[0] == "mbarrier":
        return ".".join(parts[:2])
    return parts[0]


def _nothing(b: Bundle, m: Mask) -> None:
    pass


def _unreachable(b: Bundle, m: Mask) -> None:
    raise AssertionError("a control step was run as a plain one")


def immediate(text: str, kind: str) -> int | bool:
    """The bits of a literal of a PTX type."""
    if kind == "pred":
        return int(text, 0) != 0
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        bits = int(match[1], 16)
        if kind == "f64":
            return struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
        return bits
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        bits = int(match[1], 16)
        if kind == "f32":
            return struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]))[0]
        return bits
    value = int(text.rstrip("Uu"), 0)
    return value & ((1 << 8 * WIDTH[kind]) - 1)


def assign(b: Bundle, m: Mask, slot: int, value: Array) -> None:
    """Set a register in the active lanes; arrays of other lanes' values are never changed in place."""
    b.r[slot] = value if m is None else np.where(m, value, b.r[slot])


def scatter(b: Bundle, lanes: Array | None, slot: int, value: Array) -> None:
    """Set a register in the lanes named."""
    if lanes is None:
        b.r[slot] = value
    else:
        new = b.r[slot].copy()
        new[lanes] = value
        b.r[slot] = new


def extend(value: Array, kind: str, bits: Any) -> Array:
    """Bits of a PTX type in a register that may be wider."""
    if value.dtype.itemsize == np.dtype(bits).itemsize:
        return value.view(bits)
    typed = value.view(DTYPES[kind])
    if typed.dtype.kind == "i":
        return typed.astype(f"i{np.dtype(bits).itemsize}").view(bits)
    return value.view(f"u{value.dtype.itemsize}").astype(bits)


def narrow(value: Array, width: int) -> Array:
    """The low bytes of a register."""
    return value if value.dtype.itemsize == width else value.astype(f"u{width}")
