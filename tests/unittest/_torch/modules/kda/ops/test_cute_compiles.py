# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels compile for every target without a GPU, and nothing spills."""

from pathlib import Path

import pytest

from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import SPLITS, VerifyConfig
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES
from tensorrt_llm.commands.kernels import compile_kernel

pytest.importorskip("cutlass")
VERIFY = OPS["k3_kda_verify"]


@pytest.mark.parametrize("architecture", CUTE_ARCHITECTURES)
def test_every_split_compiles_without_spills(architecture: str, tmp_path: Path) -> None:
    for split in SPLITS:
        _, record = compile_kernel(VERIFY, VerifyConfig(split=split), architecture, tmp_path)
        assert record.stack_bytes == 0, record
        # Three CTAs of 128 threads to an SM.
        assert 0 < record.registers <= 168, record


def test_the_token_by_token_form_is_for_few_splits() -> None:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.cute import VerifyKernel

    with pytest.raises(ValueError, match="split 1 or 2"):
        VerifyKernel(VerifyConfig(split=8, chunked=False))
