# SPDX-License-Identifier: Apache-2.0
"""What the tests of `k3_kda_attn` share: its implementations, and the float64 round on its exact rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.inputs import AttnInputs, AttnShape
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.launch import ProjectionConfig
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import VerifyInputs, as_float64
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES
from tensorrt_llm._torch.modules.kda.ops.selection import architecture_of
from tensorrt_llm.envs import kernel_pack
from tests.ptx import EmulatedKernels
from tests.unittest._torch.modules.kda.ops.harness import (
    DEVICE,
    VERIFY,
    Run,
    output_error,
    relative_error,
)

ATTN = OPS["k3_kda_attn"]
TOLERANCE = ATTN.tolerance
# Triton's interpreter truncates where a GPU rounds to bf16.
OUTPUT_TOLERANCE = TOLERANCE.output * (1 if DEVICE == "cuda" else 2)
# The default, and the launches that only benchmarks run.
CONFIGS = {
    "rows48": ProjectionConfig(),
    "rows32": ProjectionConfig(rows=32, key_ctas=1),
    "rows96": ProjectionConfig(rows=96, key_ctas=4),
}


def attn_runs() -> list[Any]:
    """pytest parameters: what can run here, named. On a CPU the CuTe projection's PTX is interpreted."""
    names = ["torch", "triton"]
    if DEVICE == "cpu" or architecture_of(torch.device("cuda")) in CUTE_ARCHITECTURES:
        names = [*names, *(f"cute-{launch}" for launch in CONFIGS)]
    slow = {"cute-rows32", "cute-rows96"} if DEVICE == "cpu" else set()
    return [pytest.param(name, id=name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


def attn_kernels() -> Any:
    """The projection's kernels on this machine: interpreted without a GPU, else from a pack or compiled."""
    assert ATTN.kernels is not None
    if DEVICE == "cpu":
        return EmulatedKernels(ATTN.kernels)
    directory, architecture = kernel_pack(), architecture_of(torch.device("cuda"))
    pack = packs.open_pack(directory, architecture, ATTN.name, ATTN.kernel_sources) if directory else None
    return KernelCache(ATTN.kernels, pack)


def load_attn(name: str) -> Run:
    """The callable behind a name of `attn_runs`."""
    base, _, launch = name.partition("-")
    run: Callable[..., Any] = ATTN.implementation(base).load()
    if base != "cute":
        return run
    pytest.importorskip("cutlass")
    compiled = run(attn_kernels())
    return lambda *arguments: compiled(*arguments, config=CONFIGS[launch])


def shape_of(tokens: int, heads: int = 1, **sizes: int) -> AttnShape:
    """A short hidden state: three turns of the projection's loop and a part of one."""
    return AttnShape(tokens=tokens, heads=heads, **{"hidden": 864} | sizes)


def exact_round(inputs: AttnInputs) -> tuple[VerifyInputs, Tensor]:
    """The float64 twin's pools and output after the round on the exact rows."""
    exact = as_float64(inputs.round)
    return exact, VERIFY.reference(*exact.arguments())


def assert_close(
    inputs: AttnInputs, output: Tensor, exact: VerifyInputs, want: Tensor, *, state: float
) -> None:
    """Outputs, states, records and conv columns within what the rows' rounding moves."""
    assert output_error(output, want) <= OUTPUT_TOLERANCE
    slot = int(inputs.round.slots[0])
    assert relative_error(inputs.round.ssm[slot], exact.ssm[slot]) <= state
    assert relative_error(inputs.round.state_tok[slot], exact.state_tok[slot]) <= 10 * state
    for name in ("cs_q", "cs_k", "cs_v"):
        got, wanted = getattr(inputs.round, name)[slot], getattr(exact, name)[slot]
        assert relative_error(got, wanted) <= TOLERANCE.folded, name
