# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorrt_llm import envs

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "environment.md"

READERS: dict[str, Callable[[], object]] = {
    "TLLM_LOG_LEVEL": envs.log_level,
    "TRTLLM_ENABLE_PDL": envs.enable_pdl,
    "TRTLLM_SERVER_DISABLE_GC": envs.server_disable_gc,
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": envs.force_num_accepted_tokens,
    "TRTLLM_KDA_IMPLEMENTATION": envs.kda_implementation,
    "TRTLLM_KERNEL_PACK": envs.kernel_pack,
    "TRTLLM_USE_PY_MAMBA": envs.use_py_mamba,
    "TLLM_MAMBA_MANAGER_PREFERENCE": envs.mamba_manager_preference,
}


def test_every_variable_has_a_reader() -> None:
    assert [variable.name for variable in envs.VARIABLES] == list(READERS)


@pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("text", [None, "", "  "])
def test_unset_or_empty_is_the_default(
    variable: envs.EnvVar[object], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    if text is not None:
        monkeypatch.setenv(variable.name, text)
    assert READERS[variable.name]() == variable.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TLLM_LOG_LEVEL", "warning", "warning"),
        ("TLLM_LOG_LEVEL", "INFO", "info"),
        ("TRTLLM_ENABLE_PDL", "0", False),
        ("TRTLLM_ENABLE_PDL", " 1 ", True),
        ("TRTLLM_SERVER_DISABLE_GC", "1", True),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "2.6", 2.6),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "3", 3.0),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "0", None),
        ("TRTLLM_KDA_IMPLEMENTATION", "cute", "cute"),
        ("TRTLLM_USE_PY_MAMBA", "1", True),
        ("TLLM_MAMBA_MANAGER_PREFERENCE", "MIXED", "MIXED"),
    ],
)
def test_value_is_typed(name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert READERS[name]() == value


def test_kernel_pack_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_KERNEL_PACK", str(tmp_path))
    assert envs.kernel_pack() == tmp_path
    monkeypatch.setenv("TRTLLM_KERNEL_PACK", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="TRTLLM_KERNEL_PACK is .*absent.*there is no such directory"):
        envs.kernel_pack()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TLLM_LOG_LEVEL", "loud"),
        ("TRTLLM_ENABLE_PDL", "yes"),
        ("TRTLLM_SERVER_DISABLE_GC", "2"),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "many"),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "-1"),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "nan"),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "inf"),
        ("TRTLLM_KDA_IMPLEMENTATION", "cuda"),
        ("TRTLLM_USE_PY_MAMBA", "true"),
        ("TLLM_MAMBA_MANAGER_PREFERENCE", "mixed"),
    ],
)
def test_malformed_value_is_refused(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    accepted = next(variable.accepts for variable in envs.VARIABLES if variable.name == name)
    with pytest.raises(ValueError) as error:
        READERS[name]()
    assert f"environment variable {name} is {text!r}; it must be {accepted}" in str(error.value)


def test_change_between_two_calls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_ENABLE_PDL", "0")
    before = envs.enable_pdl()
    monkeypatch.setenv("TRTLLM_ENABLE_PDL", "1")
    assert (before, envs.enable_pdl()) == (False, True)


def test_document_is_the_table() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert rows == [_row(variable) for variable in envs.VARIABLES]


def _row(variable: envs.EnvVar[object]) -> str:
    default = {True: "1", False: "0", None: "unset"}.get(variable.default, variable.default)  # type: ignore[call-overload]
    return f"| `{variable.name}` | {variable.accepts} | {default} | {variable.purpose} |"
