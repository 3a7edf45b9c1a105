# SPDX-License-Identifier: Apache-2.0
"""PTX text to kernels: instructions with their operands and lines, parameters, registers, shared symbols."""

import re
from dataclasses import dataclass, field

SHARED_BASE = 1024  # shared addresses below are the system's: a null pointer is out of bounds

_NAME = re.compile(r"[%$_A-Za-z][\w$.]*")
_DECLARATION = re.compile(r"\.align\s+(\d+)")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


class PtxError(Exception):
    """Something the PTX does that it must not, or that the interpreter does not know."""


@dataclass(slots=True)
class Operand:
    """kind: register, vector, address, immediate or symbol. `offset` belongs to addresses and symbols."""

    kind: str
    name: str = ""
    parts: "tuple[Operand, ...]" = ()
    offset: int = 0
    negated: bool = False
    value: str = ""


@dataclass(slots=True)
class Instruction:
    """`guard`: predicate register and the value under which the instruction runs."""

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    text: str
    guard: tuple[str, bool] | None = None

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass(slots=True)
class Symbol:
    """A variable. Bytes 0: extern, of the size that the launch gives."""

    size: int
    align: int
    address: int = 0


@dataclass(slots=True)
class Kernel:
    """An entry. Registers map to types such as b32 and pred; labels to instruction indices."""

    name: str
    parameters: dict[str, Symbol] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, Symbol] = field(default_factory=dict)
    local: dict[str, Symbol] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    static_shared_bytes: int = 0
    threads: tuple[int, int, int] | None = None

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        return tuple(symbol.size for symbol in self.parameters.values())


def parse(text: str) -> dict[str, Kernel]:
    """Every entry of a module, by name."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    shared: dict[str, Symbol] = {}
    kernels: dict[str, Kernel] = {}
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(", text))
    for match in re.finditer(
        r"^\s*(?:\.\w+\s+)*?\.shared\s[^;{]*;", text[: _body_start(text, entries)], re.M
    ):
        name, symbol = _variable(match[0])
        shared[name] = symbol
    for match in entries:
        kernel = _parse_entry(text, match, shared)
        kernels[kernel.name] = kernel
    if not kernels:
        raise PtxError("the PTX holds no .entry")
    return kernels


def _body_start(text: str, entries: list[re.Match[str]]) -> int:
    return entries[0].start() if entries else len(text)


def _variable(statement: str) -> tuple[str, Symbol]:
    """`.shared .align 16 .b8 name[64]` and the like."""
    statement = statement.strip().rstrip(";")
    align = _DECLARATION.search(statement)
    match = re.search(r"\.[busf](\d+)\s+([\w$%.]+)\s*((?:\[\d*\])*)\s*$", statement)
    if match is None:
        raise PtxError(f"unknown declaration: {statement}")
    size = _SIZES[match[1]]
    alignment = int(align[1]) if align else size
    for extent in re.findall(r"\[(\d*)\]", match[3]):
        size *= int(extent) if extent else 0
    return match[2], Symbol(size, alignment)


def _parse_entry(text: str, match: re.Match[str], shared: dict[str, Symbol]) -> Kernel:
    kernel = Kernel(match[1])
    close = text.index(")", match.end())
    for declaration in filter(None, map(str.strip, text[match.end() : close].split(","))):
        name, symbol = _variable(declaration)
        kernel.parameters[name] = symbol
    start = text.index("{", close)
    if threads := re.search(r"\.reqntid\s+([\d\s,]+)", text[close:start]):
        sizes = [int(size) for size in threads[1].split(",")]
        kernel.threads = (sizes + [1, 1])[0], (sizes + [1, 1])[1], (sizes + [1, 1])[2]
    kernel.shared = {name: Symbol(symbol.size, symbol.align) for name, symbol in shared.items()}
    _Body(kernel, text, start).read()
    _place_shared(kernel)
    return kernel


def _place_shared(kernel: Kernel) -> None:
    """Static symbols first, then the extern ones, which share the dynamic part."""
    at = SHARED_BASE
    for symbol in sorted(kernel.shared.values(), key=lambda s: s.size == 0):
        symbol.address = at = -(-at // symbol.align) * symbol.align
        at += symbol.size
    kernel.static_shared_bytes = at - SHARED_BASE


class _Body:
    """Reads the statements between an entry's braces; inner braces are scopes of registers and labels."""

    def __init__(self, kernel: Kernel, text: str, start: int) -> None:
        self.kernel, self.text, self.at = kernel, text, start + 1
        self.line = text.count("\n", 0, start) + 1
        self.scopes: list[tuple[int, set[str]]] = [(0, set())]
        self.ranges: dict[str, str] = {}
        self.count = 0
        self.pending: list[tuple[int, list[int]]] = []
        self.local_labels: dict[tuple[int, str], int] = {}

    def read(self) -> None:
        while True:
            self._skip_space()
            rest = self.text[self.at]
            if rest == "{":
                self.count += 1
                self.scopes.append((self.count, set()))
                self.at += 1
            elif rest == "}":
                self.scopes.pop()
                self.at += 1
                if not self.scopes:
                    break
            elif label := re.compile(r"([\w$]+)\s*:(?!:)").match(self.text, self.at):
                self.local_labels[self.scopes[-1][0], label[1]] = len(self.kernel.instructions)
                self.at = label.end()
            else:
                self._statement()
        self._resolve_labels()

    def _skip_space(self) -> None:
        while self.text[self.at] in " \t\r\n;":
            self.line += self.text[self.at] == "\n"
            self.at += 1

    def _statement(self) -> None:
        end = self.text.index(";", self.at)
        statement, line = self.text[self.at : end], self.line
        self.line += statement.count("\n")
        self.at = end + 1
        if not statement.startswith("."):
            self._instruction(" ".join(statement.split()), line)
        elif statement.startswith(".reg"):
            self._registers(statement)
        elif statement.startswith((".shared", ".local")):
            name, symbol = _variable(statement)
            (self.kernel.shared if statement.startswith(".shared") else self.kernel.local)[name] = symbol
        elif not statement.startswith((".pragma", ".loc", ".file")):
            raise PtxError(f"line {line}: unknown directive: {statement}")

    def _registers(self, statement: str) -> None:
        scope, names = self.scopes[-1]
        match = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)", statement, re.S)
        assert match is not None
        for declared in match[2].split(","):
            name, _, count = declared.strip().partition("<")
            if count:
                for index in range(int(count.rstrip(">"))):
                    self.kernel.registers[f"{name}{index}"] = match[1]
            else:
                names.add(name)
                self.kernel.registers[self._scoped(name, scope)] = match[1]

    @staticmethod
    def _scoped(name: str, scope: int) -> str:
        return f"{name}@{scope}" if scope else name

    def _resolve(self, name: str) -> str:
        for scope, names in reversed(self.scopes):
            if name in names:
                return self._scoped(name, scope)
        return name

    def _instruction(self, text: str, line: int) -> None:
        guard, rest = None, text
        if match := re.match(r"@(!?)([\w$%]+)\s+", text):
            guard, rest = (self._resolve(match[2]), not match[1]), text[match.end() :]
        opcode, _, tail = rest.partition(" ")
        operands = tuple(self._operand(part, line) for part in _split(tail))
        index = len(self.kernel.instructions)
        self.kernel.instructions.append(Instruction(opcode, operands, line, text, guard))
        if opcode.startswith(("bra", "brx")):
            self.pending.append((index, [scope for scope, _ in self.scopes]))

    def _operand(self, text: str, line: int) -> Operand:
        if text.startswith("{"):
            return Operand("vector", parts=tuple(self._operand(part, line) for part in _split(text[1:-1])))
        if text.startswith("["):
            inner = text[1:-1].strip()
            match = re.fullmatch(r"(.+?)\s*\+\s*(-?\d\w*)", inner)
            base = self._operand(match[1] if match else inner, line)
            offset = int(match[2], 0) if match else 0
            return Operand("address", parts=(base,), offset=offset)
        if text.startswith("!"):
            inner_operand = self._operand(text[1:], line)
            inner_operand.negated = True
            return inner_operand
        if "|" in text:
            return Operand("pair", parts=tuple(self._operand(p.strip(), line) for p in text.split("|")))
        if text == "_" or text[0].isdigit() or text[0] == "-":
            return Operand("sink" if text == "_" else "immediate", value=text)
        if not _NAME.fullmatch(text):
            raise PtxError(f"line {line}: unknown operand {text}")
        name = self._resolve(text)
        if name in self.kernel.registers:
            return Operand("register", name=name)
        return Operand("special" if name.startswith("%") else "symbol", name=name)

    def _resolve_labels(self) -> None:
        for index, scopes in self.pending:
            for operand in self.kernel.instructions[index].operands:
                if operand.kind != "symbol":
                    continue
                for scope in reversed(scopes):
                    target = self.local_labels.get((scope, operand.name))
                    if target is not None:
                        operand.name = f"{operand.name}@{scope}"
                        self.kernel.labels[operand.name] = target
                        break
                else:
                    line = self.kernel.instructions[index].line
                    raise PtxError(f"line {line}: unknown label {operand.name}")


def _split(text: str) -> list[str]:
    """Operands, split at commas outside braces and brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part for part in map(str.strip, parts) if part]
