# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest
import torch

from tensorrt_llm import logger
from tensorrt_llm._torch.modules.kda.ops.selection import Choice
from tensorrt_llm._torch.pyexecutor import py_executor_creator
from tensorrt_llm._torch.pyexecutor.verify_op import explain_reference, find_missing_kernel, op_runs_on
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.tiny_kimi import make_tiny_rig

CPU = torch.device("cpu")
TRITON = Choice(name="triton", source="", reason="no CuTe DSL")
TORCH = Choice(name="torch", source="", reason="no Triton")
NGRAM = SpeculationSpec(decoding_type="NGram", max_draft_len=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    num_heads: int = 6
    head_dim: int = 128
    conv_width: int = 4


def test_the_reference_serves_every_device() -> None:
    assert op_runs_on(CPU)


def test_a_cpu_misses_no_kernel() -> None:
    assert find_missing_kernel(Heads(head_dim=60), torch.float32, 7, CPU) == ""


@pytest.mark.parametrize(
    ("heads", "dtype", "choice", "reason"),
    [
        (Heads(), torch.bfloat16, TRITON, ""),
        (Heads(), torch.bfloat16, TORCH, "no Triton"),
        (Heads(head_dim=60), torch.bfloat16, TRITON, "head width 60"),
        (Heads(conv_width=3), torch.bfloat16, TRITON, "conv width 3"),
        (Heads(), torch.float32, TRITON, "float32"),
    ],
)
def test_why_only_the_reference_runs(heads: Heads, dtype: torch.dtype, choice: Choice, reason: str) -> None:
    found = explain_reference(heads, dtype, 7, choice)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_missing_kernel_is_told_once_and_records_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What this process has logged once already is forgotten for this test.
    monkeypatch.setattr(logger, "_seen", set())
    monkeypatch.setattr(py_executor_creator, "find_missing_kernel", lambda *about: "head width 16")
    for _ in range(2):
        rig = make_tiny_rig(spec=NGRAM)
        assert rig.executor.description.verify_scheme == "records"
        rig.run()
    assert [record.message.endswith(": head width 16") for record in caplog.records].count(True) == 1
    caplog.clear()
    make_tiny_rig(spec=NGRAM, scheme="replay").run()
    make_tiny_rig().run()
    assert not [record for record in caplog.records if "head width 16" in record.message]
