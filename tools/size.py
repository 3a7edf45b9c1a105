# SPDX-License-Identifier: Apache-2.0
"""Counts lines of modules and functions and compares them with `tools/budget.toml`.

    python tools/size.py            print the totals of each part
    python tools/size.py --check    also fail where something is over its budget

A kernel module is one that imports Triton or the CuTe DSL; a kernel body is a function that they compile.
"""

import argparse
import ast
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tensorrt_llm", "tools", "tests", "benchmarks", "examples")
COMPILED_BY = {"jit", "kernel", "autotune", "heuristics", "dsl_user_op"}

Kind = Literal["module", "kernel", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or method: `name` with what it is nested in, `lines` without its docstring."""

    name: str
    lines: int
    is_kernel_body: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    path: str
    kind: Kind
    lines: int
    functions: tuple[Function, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    """`lines` allowed to one function of the module at `path`; to the module itself if `function` is None."""

    path: str
    function: str | None
    lines: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    module_lines: int
    kernel_module_lines: int
    test_module_lines: int
    function_lines: int
    median_function_lines: int
    exemptions: tuple[Exemption, ...] = ()

    def module_limit(self, kind: Kind) -> int:
        limits = {
            "module": self.module_lines,
            "kernel": self.kernel_module_lines,
            "test": self.test_module_lines,
        }
        return limits[kind]


def read_budget(path: Path) -> Budget:
    """Raises ValueError for an exception without a reason, TypeError for a key that is unknown or missing."""
    table = tomllib.loads(path.read_text())
    exemptions = tuple(Exemption(**{"function": None, **entry}) for entry in table.pop("exception", []))
    for exemption in exemptions:
        if not exemption.reason.strip():
            raise ValueError(f"{path}: the exception for {exemption.path} has an empty reason; write why")
    return Budget(**table, exemptions=exemptions)


def measure(path: str, source: str) -> Module:
    """`path` is relative to the repository, with forward slashes; it and the imports decide the kind."""
    tree = ast.parse(source, path)
    kind: Kind = "test" if path.startswith("tests/") else "kernel" if _imports_a_dsl(tree) else "module"
    functions = tuple(_functions(tree, ""))
    return Module(path=path, kind=kind, lines=len(source.splitlines()), functions=functions)


def _imports_a_dsl(tree: ast.AST) -> bool:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return any(name.split(".")[0] in {"triton", "cutlass"} for name in names)


def _functions(node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(child, prefix)
            continue
        name = prefix + child.name
        if not isinstance(child, ast.ClassDef):
            yield Function(name=name, lines=_length(child), is_kernel_body=_is_kernel_body(child))
        yield from _functions(child, name + ".")


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring_lines = _span(first) if has_docstring else 0
    return _span(function) - docstring_lines


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_kernel_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    targets = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(ast.unparse(target).rpartition(".")[2] in COMPILED_BY for target in targets)


def find_excesses(modules: Sequence[Module], budget: Budget) -> list[str]:
    """One line for each thing over its budget and each exception that allows more than is needed."""
    over = dict(_over_budget(modules, budget))
    allowed = {(e.path, e.function): e.lines for e in budget.exemptions}
    found = [
        f"{path}: {function or 'the module'} has {lines} lines, {limit} are allowed; split it"
        for (path, function), (lines, limit) in over.items()
        if lines > allowed.get((path, function), limit)
    ]
    for (path, function), lines in allowed.items():
        now = over.get((path, function), (0, 0))[0]
        if now < lines:
            remedy = f"lower it to {now}" if now else "take it out"
            found.append(
                f"{path}: the exception for {function or 'the module'} allows {lines} lines; {remedy}"
            )
    median = _median(_package_functions(modules))
    if median >= budget.median_function_lines:
        found.append(
            f"the median function has {median:g} lines; it must be below {budget.median_function_lines}"
        )
    return found


def _over_budget(
    modules: Sequence[Module], budget: Budget
) -> Iterator[tuple[tuple[str, str | None], tuple[int, int]]]:
    for module in modules:
        limit = budget.module_limit(module.kind)
        if module.lines > limit:
            yield (module.path, None), (module.lines, limit)
        for function in module.functions:
            if function.lines > budget.function_lines and not function.is_kernel_body:
                yield (module.path, function.name), (function.lines, budget.function_lines)


def _package_functions(modules: Sequence[Module]) -> list[Function]:
    return [
        function
        for module in modules
        if module.path.startswith("tensorrt_llm/")
        for function in module.functions
        if not function.is_kernel_body
    ]


def _median(functions: Sequence[Function]) -> float:
    return statistics.median([function.lines for function in functions] or [0])


def describe(modules: Sequence[Module]) -> str:
    """A table: for each part of the repository its modules, lines, largest module and median function."""
    rows = [f"{'part':44}{'modules':>8}{'lines':>8}{'largest':>9}{'median fn':>11}"]
    for part in sorted({_part(module.path) for module in modules}):
        members = [module for module in modules if _part(module.path) == part]
        functions = [f for module in members for f in module.functions if not f.is_kernel_body]
        rows.append(_row(part, members, functions))
    package = [module for module in modules if module.path.startswith("tensorrt_llm/")]
    rows.append(_row("the package", package, _package_functions(modules)))
    return "\n".join(rows)


def _row(title: str, modules: Sequence[Module], functions: Sequence[Function]) -> str:
    lines = [module.lines for module in modules] or [0]
    return f"{title:44}{len(modules):8}{sum(lines):8}{max(lines):9}{_median(functions):11g}"


def _part(path: str) -> str:
    folders = path.split("/")[:-1]
    return "/".join(folders[:3]) if folders[0] == "tensorrt_llm" else folders[0]


def read_modules(root: Path) -> list[Module]:
    paths = sorted(path for part in PARTS for path in (root / part).rglob("*.py"))
    return [measure(path.relative_to(root).as_posix(), path.read_text()) for path in paths]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Lines of modules and functions against tools/budget.toml.")
    parser.add_argument("--check", action="store_true", help="fail where something is over its budget")
    check = parser.parse_args(argv).check
    modules = read_modules(ROOT)
    print(describe(modules))
    excesses = find_excesses(modules, read_budget(ROOT / "tools" / "budget.toml")) if check else []
    print("\n".join(excesses), file=sys.stderr, end="\n" if excesses else "")
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main())
