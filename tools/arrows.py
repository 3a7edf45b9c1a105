# SPDX-License-Identifier: Apache-2.0
"""Reads the package's sources and finds what its architecture forbids, without importing any of them.

Every detector takes parsed sources and returns one line per finding, so that a test can feed it planted ones.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "tensorrt_llm"

_BASE = {"version", "envs", "logger", "mapping"}
_CACHE_CORE = _BASE | {"runtime.kv_cache_manager_v2"}
_MODULES = _BASE | {"_torch.modules", "_torch.modules.kda.verify_scheme"}
_LOOP = (
    _CACHE_CORE
    | _MODULES
    | {"_torch.pyexecutor.kv_cache", "_torch.models", "_torch.speculative", "_torch.pyexecutor"}
)
_API = _LOOP | {"sampling_params", "executor", "llmapi"}

# Room -> rooms it may import, itself aside. A module belongs to the room with the longest matching name.
ARROWS: Mapping[str, set[str]] = {
    "version": set(),
    "envs": set(),
    "logger": {"envs"},
    "mapping": set(),
    "runtime": set(),
    "runtime.kv_cache_manager_v2": _BASE,
    "_torch": set(),
    "_torch.modules": _MODULES,
    "_torch.modules.kda.verify_scheme": _MODULES,
    "_torch.models": _MODULES,
    "_torch.speculative": _MODULES,
    "_torch.pyexecutor.kv_cache": _CACHE_CORE | {"_torch.modules.kda.verify_scheme"},
    "_torch.pyexecutor": _LOOP,
    "planning": _LOOP,
    "sampling_params": _BASE,
    "executor": _LOOP | {"sampling_params"},
    "llmapi": _API,
    "serve": _API,
    "commands": _API | {"serve", "planning"},
}

# What starts a compiler or needs an optional package: only kernel modules import it when they are imported.
HEAVY = {"triton", "cutlass", "cuda", "fla", "tvm_ffi"}
# The one other that may: the pools in CUDA memory call the driver.
_DRIVER_MODULES = {f"{PACKAGE}.runtime.kv_cache_manager_v2.cuda_pools"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A parsed module; `name` is dotted and starts with the package."""

    name: str
    tree: ast.Module
    is_package: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """`target` as written, made absolute; `local` inside a function; `typing` under `if TYPE_CHECKING`."""

    target: str
    line: int
    local: bool
    typing: bool


def parse(name: str, text: str, *, is_package: bool = False) -> Source:
    return Source(name=name, tree=ast.parse(text, name), is_package=is_package)


def read_sources(root: Path) -> list[Source]:
    """Every module of the package under `root`, the repository."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(
            parse(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package=is_package)
        )
    return found


def room_of(module: str) -> str | None:
    """The room of a dotted module name; None for the package itself and for names without a room."""
    inner = module.removeprefix(PACKAGE).lstrip(".")
    rooms = [room for room in ARROWS if inner == room or inner.startswith(room + ".")]
    return max(rooms, key=len, default=None)


def imports_of(source: Source, modules: frozenset[str] = frozenset()) -> Iterator[Import]:
    """Imports anywhere in the module; `from a import b` is an import of `a.b` where that is in `modules`."""
    yield from _imports_in(source, source.tree, modules, local=False, typing=False)


def _imports_in(
    source: Source, node: ast.AST, modules: frozenset[str], *, local: bool, typing: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for target in _targets(source, child, modules):
                yield Import(target=target, line=child.lineno, local=local, typing=typing)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        yield from _imports_in(source, child, modules, local=local or is_function, typing=typing or is_typing)


def _targets(source: Source, node: ast.Import | ast.ImportFrom, modules: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    origin = _origin(source, node)
    return [
        f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules else origin for alias in node.names
    ]


def _origin(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    levels_up = node.level - (1 if source.is_package else 0)
    parts = source.name.split(".")
    return ".".join([*parts[: len(parts) - levels_up], *([node.module] if node.module else [])])


def _ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + ".")


def find_forbidden_arrows(sources: Sequence[Source]) -> list[str]:
    """Imports, local and typing ones too, from a room that the importing room may not know."""
    modules = frozenset(source.name for source in sources)
    found = []
    for source in sources:
        if source.name == PACKAGE:
            continue
        room = room_of(source.name)
        if room is None:
            found.append(f"{source.name}: no room has this module; give it one in tools/arrows.py")
            continue
        for imported in imports_of(source, modules):
            target = room_of(imported.target)
            if _ours(imported.target) and target != room and target not in ARROWS[room]:
                found.append(
                    f"{source.name}:{imported.line}: {room} may not import {imported.target} ({target})"
                )
    return found


def find_dodged_circles(sources: Sequence[Source]) -> list[str]:
    """Circles among modules: of imports as modules load, and function-local imports that would close one."""
    modules = frozenset(source.name for source in sources)
    graph = {
        source.name: {i.target for i in _imports_at_load(source, modules) if i.target in modules}
        for source in sources
    }
    found = []
    for source in sources:
        for imported in imports_of(source, modules):
            if imported.typing or imported.target not in modules or imported.target == source.name:
                continue
            if source.name in _reachable(graph, imported.target):
                kind = "local import dodges" if imported.local else "import closes"
                found.append(f"{source.name}:{imported.line}: {kind} a circle through {imported.target}")
    return found


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(graph[module])
    return seen


def loads_a_compiler(source: Source) -> bool:
    """Whether the module is a kernel module, or like one: it imports one of `HEAVY` as it loads."""
    return any(imported.target.split(".")[0] in HEAVY for imported in _imports_at_load(source))


def _imports_at_load(source: Source, modules: frozenset[str] = frozenset()) -> list[Import]:
    return [i for i in imports_of(source, modules) if not i.local and not i.typing]


def find_heavy_imports(sources: Sequence[Source]) -> list[str]:
    """Modules that load `HEAVY` as they load: kernel modules out of their place, and whoever imports one."""
    modules = frozenset(source.name for source in sources)
    kernels = {source.name for source in sources if loads_a_compiler(source)}
    found = [
        f"{name}: imports a compiler or the driver as it loads, outside an `ops` package"
        for name in sorted(kernels - _DRIVER_MODULES)
        if ".ops." not in name
    ]
    found.extend(
        f"{source.name}:{imported.line}: loads the kernels of {imported.target}; import them where called"
        for source in sources
        if source.name not in kernels
        for imported in _imports_at_load(source, modules)
        if imported.target in kernels
    )
    return found


def find_environment_reads(sources: Sequence[Source]) -> list[str]:
    """Uses of the process environment outside `envs`."""
    return [
        f"{source.name}:{node.lineno}: uses the environment; declare the variable in envs.py"
        for source in sources
        if source.name != f"{PACKAGE}.envs"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute | ast.ImportFrom) and _touches_environment(node)
    ]


def _touches_environment(node: ast.Attribute | ast.ImportFrom) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and not names.isdisjoint(alias.name for alias in node.names)
    return node.attr in names and ast.unparse(node.value) == "os"


def find_open_keywords(sources: Sequence[Source]) -> list[str]:
    """Public functions and constructors that swallow unknown keywords."""
    return [
        f"{source.name}:{function.lineno}: {function.name} takes **{function.args.kwarg.arg}; "
        "spell the keywords out"
        for source in sources
        for function in _public_functions(source.tree)
        if function.args.kwarg is not None
    ]


def _public_functions(scope: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            yield from _public_functions(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            dunder = node.name.startswith("__") and node.name.endswith("__")
            if dunder or not node.name.startswith("_"):
                yield node


def find_defaulted_getattr(sources: Sequence[Source]) -> list[str]:
    """`getattr` with a default, which reads a misspelt name as absent.

    One attribute is exempt: the factory asks a foreign backbone for `kda_token_states`.
    """
    return [
        f"{source.name}:{node.lineno}: {ast.unparse(node)} hides a misspelt name; give the class a default"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) == 3
        and not (isinstance(node.args[1], ast.Constant) and node.args[1].value == "kda_token_states")
    ]
