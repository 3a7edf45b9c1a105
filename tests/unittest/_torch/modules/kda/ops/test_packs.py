# SPDX-License-Identifier: Apache-2.0
"""Kernel packs: what is refused, and why."""

import json
from pathlib import Path

import pytest

from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm.commands import kernels

VERIFY = OPS["k3_kda_verify"]


def _write_pack(directory: Path, **changes: object) -> None:
    """A pack for sm_90a whose libraries are two short files."""
    for name in ("kda.so", "runtime.so"):
        (directory / name).write_bytes(name.encode())
    manifest = packs.Manifest(
        format=packs.FORMAT,
        source_hashes={VERIFY.name: packs.source_hash(VERIFY.kernel_sources)},
        versions={"torch": "0"},
        libraries={
            "sm_90a": packs.Library(file="kda.so", sha256=packs.file_hash(directory / "kda.so")),
            "runtime": packs.Library(file="runtime.so", sha256=packs.file_hash(directory / "runtime.so")),
        },
        kernels=(),
    )
    data = json.loads(manifest.dump()) | changes
    (directory / packs.MANIFEST).write_text(json.dumps(data))


def _check(directory: Path, architecture: str = "sm_90a") -> packs.Manifest:
    return packs.check_pack(directory, architecture, VERIFY.name, VERIFY.kernel_sources)


def test_a_matching_pack_passes_and_reads_back(tmp_path: Path) -> None:
    _write_pack(tmp_path)
    manifest = _check(tmp_path)
    assert manifest == packs.read_manifest(tmp_path)
    assert manifest.libraries["sm_90a"].file == "kda.so"


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(packs.PackRefused, match=r"no manifest\.json"):
        _check(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 0}', '{"format": 1}', '{"format": 1, "libraries": 3}']
)
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / packs.MANIFEST).write_text(text)
    with pytest.raises(packs.PackRefused, match="manifest"):
        _check(tmp_path)


def test_a_pack_of_other_sources_is_refused(tmp_path: Path) -> None:
    _write_pack(tmp_path, source_hashes={VERIFY.name: "0" * 64})
    with pytest.raises(packs.PackRefused, match="compiled from other sources.*build it again"):
        _check(tmp_path)


def test_a_pack_without_the_op_is_refused(tmp_path: Path) -> None:
    _write_pack(tmp_path, source_hashes={"kda_other": "0" * 64})
    with pytest.raises(packs.PackRefused, match="no kernels of k3_kda_verify, only of kda_other"):
        _check(tmp_path)


def test_kernels_of_different_ops_have_different_names() -> None:
    names = [
        config.name for op in OPS.values() if op.kernels is not None for config in op.kernels.configs(True)
    ]
    assert len(names) == len(set(names)) > 0


def test_every_source_named_is_a_file() -> None:
    for op in OPS.values():
        for source in op.sources:
            assert (packs.PACKAGE_ROOT / source).is_file(), (op.name, source)


def test_an_op_without_kernels_is_not_compiled(tmp_path: Path) -> None:
    without = next(op for op in OPS.values() if op.kernels is None)
    with pytest.raises(ValueError, match=f"{without.name} has no kernels to compile: choose from k3_kda_"):
        kernels.compile_kernel(without, None, "sm_90a", tmp_path)


def test_a_pack_for_another_architecture_is_refused(tmp_path: Path) -> None:
    _write_pack(tmp_path)
    with pytest.raises(packs.PackRefused, match="no kernels for sm_100a, only for sm_90a"):
        _check(tmp_path, "sm_100a")


@pytest.mark.parametrize("name", ["kda.so", "runtime.so"])
def test_a_damaged_or_missing_library_is_refused(tmp_path: Path, name: str) -> None:
    _write_pack(tmp_path)
    (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(packs.PackRefused, match=f"{name} is not what the manifest says"):
        _check(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(packs.PackRefused, match="is missing"):
        _check(tmp_path)


def test_a_library_that_does_not_load_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tvm_ffi")
    _write_pack(tmp_path)
    with pytest.raises(packs.PackRefused, match="cannot be loaded"):
        packs.open_pack(tmp_path, "sm_90a", VERIFY.name, VERIFY.kernel_sources)


def test_the_hash_follows_every_byte_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.py").write_text("two")
    before = packs.source_hash(("a.py", "b.py"), tmp_path)
    assert packs.source_hash(("b.py", "a.py"), tmp_path) == before
    (tmp_path / "b.py").write_text("tvo")
    assert packs.source_hash(("a.py", "b.py"), tmp_path) != before


def test_the_command_says_why_a_pack_cannot_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels.main(["show", str(tmp_path)]) == 1
    assert "there is no manifest.json" in capsys.readouterr().err
    _write_pack(tmp_path)
    assert kernels.main(["show", str(tmp_path)]) == 0


def test_the_command_refuses_unknown_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["build", "--arch", "sm_90a,sm_42", "--out", str(tmp_path)])
    assert "sm_42" in capsys.readouterr().err


def test_the_command_refuses_unknown_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["build", "--op", "kda_other", "--out", str(tmp_path)])
    assert "kda_other; choose from k3_kda_verify" in capsys.readouterr().err


@pytest.mark.slow
def test_a_built_pack_loads_without_the_dsl(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    manifest = kernels.build(("sm_90a",), tmp_path)
    assert all(kernel.stack_bytes == 0 for kernel in manifest.kernels)
    pack = packs.open_pack(tmp_path, "sm_90a", VERIFY.name, VERIFY.kernel_sources)
    assert all(pack.kernel(kernel.symbol) is not None for kernel in manifest.kernels)
    assert pack.kernel("no_such_kernel") is None
