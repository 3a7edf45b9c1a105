# SPDX-License-Identifier: Apache-2.0
"""What importing the package loads, and what it refuses to stand beside."""

import subprocess
import sys
from pathlib import Path

import pytest

import tensorrt_llm
from tools import arrows

ROOT = Path(__file__).resolve().parents[2]

# Each loaded by some module of the package, so that their absence says something.
DOOR_PACKAGES = "pydantic fastapi uvicorn tokenizers"
# torch itself loads `cuda.bindings` where it finds them, so they are no sign of anything.
COMPILERS = "triton cutlass fla tvm_ffi"


def run_python(program: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run `program` in a fresh interpreter with `path` in front of this repository and the environment."""
    lines = [f"import sys; sys.path[:0] = {[*map(str, path), str(ROOT)]!r}", program]
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def loaded_by(statements: str, packages: str) -> set[str]:
    """Those of `packages` that a fresh interpreter has loaded after `statements`, and CUDA if it started."""
    result = run_python(
        f"{statements}\n"
        f"loaded = [name for name in {packages.split()!r} if name in sys.modules]\n"
        "if 'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized(): loaded.append('CUDA')\n"
        "print(*loaded)"
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_package_alone_loads_nothing_heavy() -> None:
    assert loaded_by("import tensorrt_llm", f"torch numpy {DOOR_PACKAGES} {COMPILERS}") == set()


@pytest.mark.parametrize("package", DOOR_PACKAGES.split())
def test_detector_of_loaded_packages_works(package: str) -> None:
    assert loaded_by(f"import {package}", DOOR_PACKAGES) >= {package}


def test_caches_and_kernels_load_without_the_door() -> None:
    rooms = ["runtime", "_torch"]
    modules = [name for name in _modules_that_load_anywhere() if name.split(".")[1] in rooms]
    assert loaded_by("\n".join(f"import {name}" for name in modules), DOOR_PACKAGES) == set()


def test_no_module_loads_a_compiler_or_starts_cuda() -> None:
    statements = "\n".join(f"import {name}" for name in _modules_that_load_anywhere())
    assert loaded_by(statements, COMPILERS) == set()


def _modules_that_load_anywhere() -> list[str]:
    """All modules of the package but the kernels, which load their compiler."""
    return [
        source.name
        for source in arrows.read_sources(ROOT)
        if source.name != arrows.PACKAGE and not arrows.loads_a_compiler(source)
    ]


def _plant_distribution(folder: Path, name: str) -> None:
    information = folder / f"{name.replace('-', '_')}-1.3.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.3.0\n")


@pytest.mark.parametrize("name", ["tensorrt_llm", "tensorrt-llm"])
def test_upstream_beside_us_is_refused(tmp_path: Path, name: str) -> None:
    _plant_distribution(tmp_path, name)
    result = run_python("import tensorrt_llm", tmp_path)
    assert result.returncode != 0
    assert "ImportError: tensorrt-llm-kda and TensorRT-LLM 1.3.0 are both installed" in result.stderr
    assert "environment of its own" in result.stderr


def test_our_own_distribution_is_not_refused(tmp_path: Path) -> None:
    _plant_distribution(tmp_path, "tensorrt-llm-kda")
    assert run_python("import tensorrt_llm", tmp_path).returncode == 0


def test_public_names_agree() -> None:
    """`__all__`, `dir` and what can be fetched are the same names."""
    for name in tensorrt_llm.__all__:
        assert getattr(tensorrt_llm, name) is not None
    assert set(tensorrt_llm.__all__) <= set(dir(tensorrt_llm))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'LLMM'; it has LLM, Mapping"):
        _ = tensorrt_llm.LLMM


def test_logger_stays_the_object_after_its_module_is_imported() -> None:
    result = run_python("import tensorrt_llm.logger\nfrom tensorrt_llm import logger\nlogger.info('here')")
    assert result.returncode == 0, result.stderr
    assert result.stderr.rstrip().endswith("[TRT-LLM] [I] here")
