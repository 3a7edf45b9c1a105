# SPDX-License-Identifier: Apache-2.0
"""The Python sources that kimi-k3-tiny is trained and judged on, and which of them are held out.

Standard library of the running Python without its tests, and installed packages under BSD, MIT or Apache
licences. Hold-out rule: a standard-library file is held out when the first byte of sha256(its path below the
library, with forward slashes) is below 20 (about 8 %). A training file is dropped when half of its long lines
stand in a held-out file: backports and vendored copies would otherwise leak.
"""

import hashlib
import importlib.metadata
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "anyio", "apache-tvm-ffi", "click", "einops", "fastapi", "filelock", "fla-core", "fsspec", "h11",
    "httpcore", "httpx", "huggingface_hub", "idna", "Jinja2", "mpmath", "mypy", "networkx", "numpy", "openai",
    "packaging", "pluggy", "prometheus_client", "pydantic", "Pygments", "pytest", "PyYAML", "setuptools",
    "sortedcontainers", "starlette", "sympy", "torch", "triton", "uvicorn",
)  # fmt: skip
_TEST_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "lib2to3", "turtledemo"}
)
_TABLE_FOLDERS = frozenset({"encodings", "pydoc_data"})
"""Character maps and help topics: tables, no code, and they compress to almost nothing."""
_HELD_OUT_BELOW = 20
_MIN_LINE_CHARACTERS = 30
_MAX_FILE_BYTES = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One text; `name` is its path below the library or the package folder."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


def is_held_out(name: str) -> bool:
    """The hold-out rule for standard-library paths."""
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT_BELOW


def _read(path: Path, name: str) -> SourceFile | None:
    """None for what is no UTF-8 text, empty, or a table too long to be code."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return SourceFile(name=name, text=text) if 0 < len(text) < _MAX_FILE_BYTES else None


def standard_library() -> Iterator[SourceFile]:
    """Every source of the standard library that is no test, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not (_TEST_FOLDERS | _TABLE_FOLDERS).intersection(relative.parts[:-1]):
            source = _read(path, relative.as_posix())
            if source:
                yield source


def held_out_files() -> list[SourceFile]:
    """The standard-library files that no training ever saw."""
    return [source for source in standard_library() if is_held_out(source.name)]


def package_files(package: str) -> Iterator[SourceFile]:
    """Every source of an installed distribution that is no test; nothing when it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in sorted(files):
        if file.suffix == ".py" and not _TEST_FOLDERS.intersection(file.parts[:-1]):
            path = Path(str(file.locate()))
            source = _read(path, f"{package}/{file.as_posix()}") if path.is_file() else None
            if source:
                yield source


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= _MIN_LINE_CHARACTERS]


def training_files() -> tuple[list[SourceFile], list[SourceFile]]:
    """(standard library, packages) without the held-out files and whatever repeats them."""
    held_out = {line for source in held_out_files() for line in _long_lines(source.text)}

    def is_leak(source: SourceFile) -> bool:
        lines = _long_lines(source.text)
        return len(lines) > 4 and sum(line in held_out for line in lines) * 2 >= len(lines)

    library = [s for s in standard_library() if not is_held_out(s.name) and not is_leak(s)]
    packages = [s for name in PACKAGES for s in package_files(name) if not is_leak(s)]
    return library, packages


def describe() -> dict[str, object]:
    """What a training run should record: the Python, and every package's version and licence."""
    versions = {}
    for package in PACKAGES:
        try:
            meta = importlib.metadata.metadata(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        classifiers = [c for c in meta.get_all("Classifier", []) if c.startswith("License")]
        licence = meta.get("License-Expression") or " ".join(classifiers) or (meta.get("License") or "")[:60]
        versions[package] = {"version": meta["Version"], "licence": licence.split("\n")[0]}
    python = sysconfig.get_config_var("VERSION")
    return {"python": sysconfig.get_config_var("py_version") or python, "packages": versions}
