# SPDX-License-Identifier: Apache-2.0
"""`trtllm-kernels`: compile the CuTe DSL kernels ahead of time, on a machine that needs no GPU.

    trtllm-kernels build --arch sm_90a,sm_100a,sm_103a --out DIR [--op NAME,NAME]
    trtllm-kernels show DIR

Set TRTLLM_KERNEL_PACK=DIR to use a pack. Building needs nvidia-cutlass-dsl and a C compiler for linking.
"""

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES, OpEntry

BUILDABLE = tuple(name for name, op in OPS.items() if op.kernels is not None)
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a kernel takes per thread: registers, and bytes of stack (spills or indexed arrays)."""

    registers: int
    stack_bytes: int


def read_usage(cubin: bytes) -> Usage:
    """The largest figures over the functions of a cubin, from the `.nv.info` section of its ELF file.

    Entries are (format 4, attribute, size 8, symbol, value); 0x2f is the register count, 0x11 the frame.
    """
    info = _elf_section(cubin, b".nv.info")
    registers = stack = at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:
            if size == 8 and attribute in (0x2F, 0x11):
                value = struct.unpack_from("<I", info, at + 4)[0]
                registers = max(registers, value) if attribute == 0x2F else registers
                stack = max(stack, value) if attribute == 0x11 else stack
            at += size
    return Usage(registers=registers, stack_bytes=stack)


def _elf_section(data: bytes, name: bytes) -> bytes:
    offset, size, count, names = (
        struct.unpack_from("<Q10xHHH", data, 0x28)[0],
        *struct.unpack_from("<HHH", data, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    for header in headers:
        start = strings + header[0]
        if data[start : data.index(b"\0", start)] == name:
            return data[header[4] : header[4] + header[5]]
    return b""


def compile_kernel(op: OpEntry, config: Any, arch: str, work: Path) -> tuple[Path, packs.KernelRecord]:
    """An object file in `work` and what is in it. Needs the DSL; ValueError for an op without kernels."""
    if op.kernels is None:
        raise ValueError(f"{op.name} has no kernels to compile: choose from {', '.join(BUILDABLE)}")
    dump = work / f"{config.name}.{arch}"
    dump.mkdir()
    compiled = op.kernels.compile(config, arch, f"--keep-cubin --dump-dir {dump}")
    target = work / f"{config.name}.{arch}.o"
    compiled.export_to_c(str(target), function_name=config.name)
    usage = read_usage(next(dump.glob("*.cubin")).read_bytes())
    record = packs.KernelRecord(
        op=op.name, architecture=arch, symbol=config.name, config=asdict(config),
        registers=usage.registers, stack_bytes=usage.stack_bytes,
    )  # fmt: skip
    return target, record


def _runtime_libraries() -> tuple[Path, list[str]]:
    """The DSL's runtime library and everything that a kernel library links with."""
    from cutlass.cute.runtime import find_runtime_libraries

    libraries = [str(path) for path in find_runtime_libraries(enable_tvm_ffi=True)]
    return next(Path(path) for path in libraries if "cute_dsl_runtime" in path), libraries


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def build(
    architectures: Sequence[str], out: Path, *, names: Sequence[str] = BUILDABLE, measurements: bool = False
) -> packs.Manifest:
    """Compile the ops `names` for every architecture into `out`, and write the manifest last."""
    ops = [OPS[name] for name in names]
    out.mkdir(parents=True, exist_ok=True)
    (out / packs.MANIFEST).unlink(missing_ok=True)
    runtime, link_with = _runtime_libraries()
    shutil.copy2(runtime, out / runtime.name)
    libraries = {"runtime": packs.Library(file=runtime.name, sha256=packs.file_hash(out / runtime.name))}
    kernels: list[packs.KernelRecord] = []
    with tempfile.TemporaryDirectory() as scratch:
        for arch in architectures:
            built = [
                compile_kernel(op, config, arch, Path(scratch))
                for op in ops
                if op.kernels is not None
                for config in op.kernels.configs(measurements)
            ]
            kernels.extend(record for _, record in built)
            library = out / f"kda_{arch}.so"
            objects = [str(target) for target, _ in built]
            subprocess.run(
                ["gcc", "-shared", "-o", str(library), *objects, *link_with, "-Wl,-rpath,$ORIGIN"], check=True
            )
            libraries[arch] = packs.Library(file=library.name, sha256=packs.file_hash(library))
    manifest = packs.Manifest(
        format=packs.FORMAT,
        source_hashes={op.name: packs.source_hash(op.kernel_sources) for op in ops},
        versions=_versions(),
        libraries=libraries,
        kernels=tuple(kernels),
    )
    (out / packs.MANIFEST).write_text(manifest.dump())
    return manifest


def _table(manifest: packs.Manifest) -> str:
    lines = [f"{'architecture':<13}{'registers':>10}{'stack':>7}  kernel"]
    lines.extend(
        f"{kernel.architecture:<13}{kernel.registers:>10}{kernel.stack_bytes:>7}  {kernel.symbol}"
        for kernel in manifest.kernels
    )
    return "\n".join(lines)


def _names_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Reads a comma-separated list of names among those `known`."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return read


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 and a message on stderr if a pack is unusable or the DSL is missing."""
    parser = argparse.ArgumentParser(prog="trtllm-kernels", description="Compile kernels ahead of time.")
    commands = parser.add_subparsers(dest="command", required=True)
    builder: Any = commands.add_parser("build", help="compile into a pack")
    builder.add_argument(
        "--arch", type=_names_of(CUTE_ARCHITECTURES), default=CUTE_ARCHITECTURES,
        help="comma-separated targets, all unless named",
    )  # fmt: skip
    builder.add_argument(
        "--op", type=_names_of(BUILDABLE), default=BUILDABLE, help="comma-separated ops, all unless named"
    )
    builder.add_argument("--out", type=Path, required=True, help="directory of the pack")
    builder.add_argument("--measurements", action="store_true", help="add kernels that only benchmarks run")
    shower: Any = commands.add_parser("show", help="list what a pack holds")
    shower.add_argument("pack", type=Path)
    options = parser.parse_args(argv)
    try:
        if options.command == "build":
            manifest = build(options.arch, options.out, names=options.op, measurements=options.measurements)
        else:
            manifest = packs.read_manifest(options.pack)
    except (packs.PackRefused, ImportError) as error:
        print(f"trtllm-kernels: {error}", file=sys.stderr)
        return 1
    print(_table(manifest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
