# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels compile for every target without a GPU, and nothing spills."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import SPLITS, VerifyConfig
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.launch import IntermediateConfig
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.launch import ReplayConfig
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES
from tensorrt_llm.commands.kernels import compile_kernel

pytest.importorskip("cutlass")
# Three CTAs of 128 threads to an SM; two where the f_b product comes from outside.
REGISTERS, REGISTERS_EXTERNAL = 168, 255


def assert_compiles(configs: Iterable[VerifyConfig], architecture: str, directory: Path) -> None:
    """No spills, and as many CTAs to an SM as the launch is made for."""
    for config in configs:
        _, record = compile_kernel(OPS[config.OP], config, architecture, directory)
        assert record.stack_bytes == 0, record
        limit = REGISTERS_EXTERNAL if config.external_gate else REGISTERS
        assert 0 < record.registers <= limit, record


@pytest.mark.parametrize("architecture", CUTE_ARCHITECTURES)
def test_every_split_compiles_without_spills(architecture: str, tmp_path: Path) -> None:
    assert_compiles((VerifyConfig(split=split) for split in SPLITS), architecture, tmp_path)


@pytest.mark.parametrize("kind", [ReplayConfig, IntermediateConfig])
def test_the_other_schemes_compile_without_spills(kind: type[VerifyConfig], tmp_path: Path) -> None:
    """An undivided head and the split that takes the most registers; the others are slow."""
    assert_compiles((kind(split=1),), "sm_90a", tmp_path)
    for architecture in CUTE_ARCHITECTURES:
        assert_compiles((kind(split=2),), architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CUTE_ARCHITECTURES)
@pytest.mark.parametrize("kind", [VerifyConfig, ReplayConfig, IntermediateConfig])
def test_everything_packed_compiles_without_spills(
    kind: type[VerifyConfig], architecture: str, tmp_path: Path
) -> None:
    kernels = OPS[kind.OP].kernels
    assert kernels is not None
    assert_compiles(kernels.configs(True), architecture, tmp_path)


def test_the_token_by_token_form_is_for_few_splits() -> None:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.cute import VerifyKernel
    from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.cute import ReplayKernel

    with pytest.raises(ValueError, match="split 1 or 2"):
        VerifyKernel(VerifyConfig(split=8, chunked=False))
    with pytest.raises(ValueError, match="kda_mtp_decode_split1_pdl_serial"):
        ReplayKernel(ReplayConfig(split=1, chunked=False))


def test_early_reads_are_of_programmatic_launches_that_replay_no_inputs() -> None:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.cute import VerifyKernel
    from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.cute import ReplayKernel

    with pytest.raises(ValueError, match="k3_kda_verify_split1_early: early reads"):
        VerifyKernel(VerifyConfig(split=1, pdl=False, early_reads=True))
    with pytest.raises(ValueError, match="kda_mtp_decode_split1_pdl_early: early reads"):
        ReplayKernel(ReplayConfig(split=1, early_reads=True))
