# SPDX-License-Identifier: Apache-2.0
"""Kernel packs: kernels that `trtllm-kernels` compiled ahead of time, and a manifest of what is in them.

A pack is a directory: `manifest.json`, one library per architecture and the DSL's runtime library, which
the others find beside them. Loading one needs torch and apache-tvm-ffi, not the DSL.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
PACKAGE_ROOT = Path(__file__).parent


class PackRefused(Exception):
    """The pack cannot be used; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """One compiled kernel: `config` is what it is specialised for; stack bytes above 0 mean spills."""

    op: str
    architecture: str
    symbol: str
    config: dict[str, Any]
    registers: int
    stack_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A file of the pack and what it must hash to."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """source_hashes by op; libraries by architecture, "runtime" for the DSL's; versions of the compilers."""

    format: int
    source_hashes: dict[str, str]
    versions: dict[str, str]
    libraries: dict[str, Library]
    kernels: tuple[KernelRecord, ...]

    def dump(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def source_hash(sources: tuple[str, ...], root: Path = PACKAGE_ROOT) -> str:
    """sha256 over names and texts of source files relative to `root`."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a pack; PackRefused where it is missing or not one of this format."""
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise PackRefused(f"there is no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise PackRefused(f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PackRefused(f"{MANIFEST} is not of format {FORMAT}")
    try:
        return Manifest(
            format=FORMAT,
            source_hashes=dict(data["source_hashes"]),
            versions=data["versions"],
            libraries={name: Library(**library) for name, library in data["libraries"].items()},
            kernels=tuple(KernelRecord(**kernel) for kernel in data["kernels"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise PackRefused(f"{MANIFEST} lacks or misnames a field ({error})") from None


def check_pack(directory: Path, architecture: str, op: str, sources: tuple[str, ...]) -> Manifest:
    """The manifest, known to fit an op's sources, an architecture and its own files; else PackRefused."""
    manifest = read_manifest(directory)
    expected, found = source_hash(sources), manifest.source_hashes.get(op)
    if found is None:
        known = ", ".join(sorted(manifest.source_hashes)) or "nothing"
        raise PackRefused(f"it has no kernels of {op}, only of {known}")
    if found != expected:
        raise PackRefused(
            f"its {op} was compiled from other sources ({found[:12]}, these are {expected[:12]}); build it "
            "again with trtllm-kernels"
        )
    if architecture not in manifest.libraries:
        known = ", ".join(name for name in manifest.libraries if name != "runtime")
        raise PackRefused(f"it has no kernels for {architecture}, only for {known}")
    for name in (architecture, "runtime"):
        library = manifest.libraries.get(name)
        if library is None or not (directory / library.file).is_file():
            raise PackRefused(f"the library for {name} is missing")
        if file_hash(directory / library.file) != library.sha256:
            raise PackRefused(f"{library.file} is not what the manifest says it is (damaged or replaced)")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """An open pack: kernels of one architecture, by symbol."""

    manifest: Manifest
    module: Any

    def kernel(self, symbol: str) -> Callable[..., Any] | None:
        """The launcher of this symbol, None if the pack has none."""
        return self.module[symbol] if symbol in self._symbols() else None

    def _symbols(self) -> set[str]:
        return {kernel.symbol for kernel in self.manifest.kernels}


def open_pack(directory: Path, architecture: str, op: str, sources: tuple[str, ...]) -> Pack:
    """Check and load a pack for an op. Raises PackRefused with the reason."""
    manifest = check_pack(directory, architecture, op, sources)
    try:
        import tvm_ffi
    except ImportError:
        raise PackRefused("apache-tvm-ffi is not installed") from None
    try:
        module = tvm_ffi.load_module(str((directory / manifest.libraries[architecture].file).resolve()))
    except (OSError, RuntimeError) as error:
        raise PackRefused(f"its library cannot be loaded ({error})") from None
    return Pack(manifest=manifest, module=module)
