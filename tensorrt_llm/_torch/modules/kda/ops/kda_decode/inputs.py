# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_decode`, for tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import CONV_WIDTH, HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """N requests, H heads, `num_slots` rows in the pools (0: a row more than requests).

    `layers`: pools are views of layer 0 in memory that interleaves so many layers per slot.
    """

    requests: int
    heads: int = 6
    num_slots: int = 0
    layers: int = 1

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def columns(self) -> int:
        """Columns of a projection row: q | k | v | gate | f_a | b, padded to a multiple of 8."""
        return (4 * self.width + HEAD_DIM + self.heads + 7) // 8 * 8

    @property
    def pool_slots(self) -> int:
        return self.num_slots or self.requests + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Arguments of the op in its order."""

    proj: Tensor
    w_fb: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    a_log: Tensor
    dt_bias: Tensor
    onorm_w: Tensor
    conv_pool: Tensor
    ssm: Tensor
    slots: Tensor
    lower_bound: float = -5.0
    scale: float = HEAD_DIM**-0.5
    eps: float = 1e-5
    g_ext: Tensor | None = None

    def arguments(self) -> tuple[Tensor | int | float | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes beside its result."""
        return {"conv_pool": self.conv_pool, "ssm": self.ssm}


def make_rows(shape: DecodeShape, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Projection rows [N, columns]: unit normal, as behind a trained projection of normed activations."""
    return torch.randn(shape.requests, shape.columns, generator=generator).to(dtype)


def make_inputs(
    shape: DecodeShape, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> DecodeInputs:
    """Arguments with every pool filled, slots a random permutation of rows."""
    gen = torch.Generator().manual_seed(seed)
    D, slots = shape.width, shape.pool_slots

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    inputs = DecodeInputs(
        proj=make_rows(shape, gen, dtype),
        w_fb=(normal(D, HEAD_DIM) * HEAD_DIM**-0.5).to(dtype),
        w_q=normal(D, CONV_WIDTH) / 2,
        w_k=normal(D, CONV_WIDTH) / 2,
        w_v=normal(D, CONV_WIDTH) / 2,
        a_log=torch.rand(shape.heads, generator=gen) - 1.0,
        dt_bias=normal(D) - 2.0,
        onorm_w=1 + normal(HEAD_DIM) / 8,
        conv_pool=normal(slots, shape.layers, 3 * D, CONV_WIDTH - 1)[:, 0].to(dtype),
        ssm=normal(slots, shape.layers, shape.heads, HEAD_DIM, HEAD_DIM)[:, 0],
        slots=torch.randperm(slots, generator=gen)[: shape.requests].to(torch.int32),
    )
    return move(inputs, device)


def move(inputs: DecodeInputs, device: str | torch.device) -> DecodeInputs:
    """A copy on another device: nothing is shared, strides are kept."""
    return _mapped(
        inputs, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    )


def as_float64(inputs: DecodeInputs, *, f_b: bool = True) -> DecodeInputs:
    """A float64 CPU copy. The f_b product is rounded to the dtype of the rows and passed as `g_ext`."""
    double = _mapped(inputs, lambda x: x.cpu().double() if x.is_floating_point() else x.cpu().clone())
    if double.g_ext is not None or not f_b:
        return double
    width = inputs.w_fb.shape[0]
    f_a = double.proj[:, 4 * width : 4 * width + HEAD_DIM]
    return replace(double, g_ext=(f_a @ double.w_fb.T).to(inputs.proj.dtype).double())


def _mapped(inputs: DecodeInputs, change: Callable[[Tensor], Tensor]) -> DecodeInputs:
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    changed: dict[str, Any] = {name: change(x) for name, x in values.items() if isinstance(x, Tensor)}
    return replace(inputs, **changed)
