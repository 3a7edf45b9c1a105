# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_intermediate_verify`, for tests and benchmarks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    HEAD_DIM,
    RoundInputs,
    VerifyShape,
    move,
    shared_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntermediateInputs(RoundInputs):
    """Arguments of `kda_intermediate_verify`."""

    DRAFTS: ClassVar[tuple[str, ...]] = ("intermediate",)

    intermediate: Tensor


def make_inputs(
    shape: VerifyShape, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
    conv_dtype: torch.dtype = torch.float32,
) -> IntermediateInputs:  # fmt: skip
    """Arguments with every pool filled."""
    gen = torch.Generator().manual_seed(seed)
    size = (shape.pool_slots, shape.num_spec, shape.heads, HEAD_DIM, HEAD_DIM)
    states = torch.randn(size, generator=gen)
    return move(
        IntermediateInputs(**shared_fields(shape, gen, dtype, conv_dtype), intermediate=states), device
    )
