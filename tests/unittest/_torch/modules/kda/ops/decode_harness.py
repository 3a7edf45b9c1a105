# SPDX-License-Identifier: Apache-2.0
"""What the tests of `kda_decode` share: implementations, and a float64 twin of a chain of steps."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.kda_decode.inputs import (
    DecodeInputs,
    DecodeShape,
    as_float64,
    make_inputs,
    make_rows,
)
from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import SPLITS, DecodeConfig
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES
from tensorrt_llm._torch.modules.kda.ops.selection import architecture_of
from tensorrt_llm.envs import kernel_pack
from tests.ptx import EmulatedKernels
from tests.unittest._torch.modules.kda.ops.harness import (
    DEVICE,
    Run,
    output_error,
    relative_error,
)

DECODE = OPS["kda_decode"]
TOLERANCE = DECODE.tolerance
# Triton's interpreter truncates where a GPU rounds to bf16.
OUTPUT_TOLERANCE = TOLERANCE.output * (1 if DEVICE == "cuda" else 2)


def decode_runs() -> list[Any]:
    """pytest parameters: what can run here, named.

    The CuTe kernel comes in every launch; on a CPU its PTX is interpreted, the outermost launches in every
    run and the rest where there is time.
    """
    if DEVICE == "cuda":
        cute = architecture_of(torch.device("cuda")) in CUTE_ARCHITECTURES
        names = ["triton", *(f"cute-split{split}" for split in SPLITS)] if cute else ["triton", "torch"]
        return [pytest.param(name, id=name) for name in names]
    interpreted = [
        pytest.param(
            f"cute-split{split}",
            id=f"cute-split{split}",
            marks=[pytest.mark.slow] if split in (2, 4) else [],
        )
        for split in SPLITS
    ]
    return [pytest.param("torch", id="torch"), pytest.param("triton", id="triton"), *interpreted]


def _kernels() -> Any:
    """The CuTe kernels of this machine: interpreted without a GPU, else from a pack or compiled."""
    assert DECODE.kernels is not None
    if DEVICE == "cpu":
        return EmulatedKernels(DECODE.kernels)
    directory, architecture = kernel_pack(), architecture_of(torch.device("cuda"))
    pack = packs.open_pack(directory, architecture, DECODE.name, DECODE.kernel_sources) if directory else None
    return KernelCache(DECODE.kernels, pack)


def load_decode(name: str) -> Run:
    """The callable behind a name of `decode_runs`."""
    base, _, launch = name.partition("-")
    if base != "cute":
        return DECODE.implementation(base).load()
    pytest.importorskip("cutlass")
    return cute_run(int(launch[5:]), _kernels())


def cute_run(split: int, kernels: Any) -> Run:
    """The op through one launch of its CuTe kernels."""
    compiled = DECODE.implementation("cute").load()(kernels)

    def call(*arguments: Any) -> Tensor:
        external = len(arguments) > 14 and arguments[14] is not None
        return compiled(*arguments, config=DecodeConfig(split=split, external_gate=external))

    return call


def shape_of(requests: int, heads: int = 2, **sizes: int) -> DecodeShape:
    return DecodeShape(requests=requests, heads=heads, **sizes)


def with_gate(inputs: DecodeInputs, exact: DecodeInputs) -> DecodeInputs:
    """The inputs with the twin's f_b product, so that its rounding is the same on both sides."""
    assert exact.g_ext is not None
    return replace(inputs, g_ext=exact.g_ext.to(inputs.proj.dtype).to(inputs.proj.device))


def assert_close(
    inputs: DecodeInputs, output: Tensor, exact: DecodeInputs, want: Tensor, *, state: float
) -> None:
    """Outputs and states within tolerance; the window, a copy of inputs, exactly."""
    assert output_error(output, want) <= OUTPUT_TOLERANCE
    used = inputs.slots[inputs.slots >= 0].long().cpu()
    assert relative_error(inputs.ssm.cpu()[used], exact.ssm[used]) <= state
    assert relative_error(inputs.conv_pool, exact.conv_pool) == 0.0


@dataclass
class Steps:
    """Steps of one implementation and of its float64 twin, on the same rows."""

    run: Run
    inputs: DecodeInputs
    exact: DecodeInputs
    generator: torch.Generator

    @classmethod
    def start(cls, run: Run, shape: DecodeShape, seed: int = 0) -> "Steps":
        inputs = make_inputs(shape, seed=seed, device=DEVICE)
        return cls(run, inputs, as_float64(inputs), torch.Generator().manual_seed(seed + 1))

    def step(self) -> tuple[Tensor, Tensor]:
        """One token for every request on fresh rows; (output, float64 output)."""
        shape = shape_of(self.inputs.slots.shape[0], self.inputs.a_log.shape[0])
        rows = make_rows(shape, self.generator)
        inputs = replace(self.inputs, proj=rows.to(DEVICE))
        # The twin keeps its own pools; only rows and gate come from the step.
        exact = replace(as_float64(replace(inputs, proj=rows)), **self.exact.mutable())
        want = DECODE.reference(*exact.arguments())
        return self.run(*with_gate(inputs, exact).arguments()), want

    def state_error(self) -> float:
        used = self.inputs.slots.long().cpu()
        return relative_error(self.inputs.ssm.cpu()[used], self.exact.ssm[used])
