# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs where; nothing compiles inside a capture; importing loads no compiler."""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.choice import choose_config, choose_split
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import SPLITS, VerifyConfig
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.launch import IntermediateConfig
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.launch import ReplayConfig
from tensorrt_llm._torch.modules.kda.ops.selection import Facts, choose

VERIFY = OPS["k3_kda_verify"]
NAMES = ("cute", "triton", "torch")
HOPPER = Facts(
    architecture="sm_90a",
    wanted="auto",
    pack=True,
    pack_refusal="",
    has_dsl=True,
    has_triton=True,
    has_fla=True,
)


@pytest.mark.parametrize(
    ("changes", "name", "source", "words"),
    [
        ({}, "cute", "pack", "matches"),
        ({"pack": False}, "cute", "jit", "no kernel pack"),
        ({"pack": False, "pack_refusal": "it is stale"}, "cute", "jit", "it is stale"),
        ({"pack": False, "has_dsl": False}, "triton", "", "no CuTe DSL"),
        ({"pack": False, "has_dsl": False, "has_triton": False}, "torch", "", "no Triton"),
        ({"architecture": "sm_80", "pack": False}, "triton", "", "sm_80"),
        ({"architecture": "cpu", "pack": False}, "torch", "", "CPU"),
        ({"wanted": "triton"}, "triton", "", ""),
        ({"wanted": "torch"}, "torch", "", ""),
    ],
)
def test_the_fastest_that_runs_is_chosen_and_the_reason_given(changes, name, source, words) -> None:
    choice = choose(replace(HOPPER, **changes), NAMES)
    assert (choice.name, choice.source) == (name, source)
    assert words in choice.reason


def test_an_implementation_that_cannot_run_is_refused_by_name() -> None:
    facts = replace(HOPPER, architecture="cpu", wanted="cute", pack=False, has_triton=False)
    with pytest.raises(ValueError, match="TRTLLM_KDA_IMPLEMENTATION=cute cannot run on cpu.*torch"):
        choose(facts, NAMES)


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({}, "fla", "installed"),
        ({"architecture": "sm_80"}, "fla", "installed"),
        ({"wanted": "cute"}, "fla", "installed"),
        ({"wanted": "torch"}, "torch", ""),
        ({"has_fla": False}, "torch", "no fla-core"),
        ({"has_triton": False}, "torch", "no Triton"),
        ({"architecture": "cpu"}, "torch", "CPU"),
    ],
)
def test_fla_serves_the_ops_that_have_it_wherever_there_is_a_gpu(changes, name, words) -> None:
    choice = choose(replace(HOPPER, pack=False, **changes), ("fla", "torch"))
    assert choice.name == name
    assert words in choice.reason


def test_a_kernel_is_not_compiled_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="k3_kda_verify_split1_pdl would be compiled inside"):
        KernelCache(VERIFY.kernels, pack=None).prepare((VerifyConfig(split=1),))


@pytest.mark.parametrize("kind", [VerifyConfig, ReplayConfig, IntermediateConfig])
def test_every_launch_that_may_be_chosen_is_packed(kind: type[VerifyConfig]) -> None:
    kernels = OPS[kind.OP].kernels
    assert kernels is not None
    packed = set(kernels.configs(False))
    chosen = set()
    for requests in range(1, 300):
        for heads in (1, 2, 6, 12, 24):
            assert choose_split(requests, heads) in SPLITS
            for external_gate, pdl, bf16_conv in product((False, True), repeat=3):
                config = choose_config(
                    kind, requests=requests, heads=heads, external_gate=external_gate, pdl=pdl,
                    bf16_conv=bf16_conv,
                )  # fmt: skip
                assert config in packed, config
                chosen.add(config)
    # The packs of the others hold nothing that is never chosen.
    assert kind is VerifyConfig or chosen == packed


def test_more_requests_are_never_split_further() -> None:
    splits = [choose_split(requests, 6) for requests in range(1, 200)]
    assert splits == sorted(splits, reverse=True)


def test_importing_the_ops_loads_no_compiler() -> None:
    code = (
        "import sys, tensorrt_llm._torch.modules.kda.ops.catalog, tensorrt_llm._torch.modules.kda.ops;"
        "sys.exit(any(name in sys.modules for name in ('triton.language', 'cutlass', 'tvm_ffi')))"
    )
    root = Path(__file__).parents[6]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_entries_name_their_parts() -> None:
    for name, entry in OPS.items():
        assert entry.name == name
        assert entry.implementations[-1].name == "torch"
        assert entry.implementation("torch").runs_on("cpu")
        with pytest.raises(ValueError, match="choose one of"):
            entry.implementation("cuda")
