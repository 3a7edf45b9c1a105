# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_prefill`, for tests and benchmarks."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

HEAD_DIM = 128
CONV_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShape:
    """Prompts of `lengths` tokens, of which `positions` tokens ran before (none: all start), and H heads."""

    lengths: tuple[int, ...]
    positions: tuple[int, ...] = ()
    heads: int = 6

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def columns(self) -> int:
        """Columns of a projection row: q | k | v | gate | f_a | b, padded to a multiple of 8."""
        return (4 * self.width + HEAD_DIM + self.heads + 7) // 8 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInputs:
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
    slots: list[int]
    lengths: list[int]
    positions: list[int]
    lower_bound: float = -5.0
    scale: float = HEAD_DIM**-0.5
    eps: float = 1e-5
    g_ext: Tensor | None = None

    def arguments(self) -> tuple[Tensor | list[int] | float | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes beside its result."""
        return {"conv_pool": self.conv_pool, "ssm": self.ssm}


def make_inputs(
    shape: PrefillShape, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> PrefillInputs:
    """Arguments with filled pools of a slot more than prompts; slots are a random permutation of rows."""
    gen = torch.Generator().manual_seed(seed)
    D, pool = shape.width, len(shape.lengths) + 1

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    inputs = PrefillInputs(
        proj=normal(sum(shape.lengths), shape.columns).to(dtype),
        w_fb=(normal(D, HEAD_DIM) * HEAD_DIM**-0.5).to(dtype),
        w_q=normal(D, CONV_WIDTH) / 2,
        w_k=normal(D, CONV_WIDTH) / 2,
        w_v=normal(D, CONV_WIDTH) / 2,
        a_log=torch.rand(shape.heads, generator=gen) - 1.0,
        dt_bias=normal(D) - 2.0,
        onorm_w=1 + normal(HEAD_DIM) / 8,
        conv_pool=normal(pool, 3 * D, CONV_WIDTH - 1).to(dtype),
        ssm=normal(pool, shape.heads, HEAD_DIM, HEAD_DIM),
        slots=torch.randperm(pool, generator=gen)[: len(shape.lengths)].tolist(),
        lengths=list(shape.lengths),
        positions=list(shape.positions) or [0] * len(shape.lengths),
    )
    return move(inputs, device)


def move(inputs: PrefillInputs, device: str | torch.device) -> PrefillInputs:
    """A copy on another device that shares nothing with the inputs."""
    return _mapped(inputs, lambda x: x.clone().to(device))


def as_float64(inputs: PrefillInputs) -> PrefillInputs:
    """A float64 CPU copy. The f_b product is rounded to the dtype of the rows and passed as `g_ext`."""
    double = _mapped(inputs, lambda x: x.cpu().double())
    if double.g_ext is not None:
        return double
    D = inputs.w_fb.shape[0]
    product = double.proj[:, 4 * D : 4 * D + HEAD_DIM] @ double.w_fb.T
    return replace(double, g_ext=product.to(inputs.proj.dtype).double())


def _mapped(inputs: PrefillInputs, change) -> PrefillInputs:
    tensors = {
        field.name: change(value)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
    return replace(inputs, **tensors)
