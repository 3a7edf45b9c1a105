# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `k3_kda_verify`, for tests and benchmarks."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

HEAD_DIM = 128
CONV_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyShape:
    """N requests of T tokens, H heads, M drafts, `num_slots` rows in the pools (0: a row more than requests).

    `layers`: pools are views of layer 0 in memory that interleaves so many layers per slot.
    """

    requests: int
    tokens: int
    heads: int = 6
    num_spec: int = 7
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
class VerifyInputs:
    """Arguments of the op in its order; `clone` copies what the op mutates too."""

    proj: Tensor
    w_fb: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    a_log: Tensor
    dt_bias: Tensor
    onorm_w: Tensor
    cs_q: Tensor
    cs_k: Tensor
    cs_v: Tensor
    ssm: Tensor
    state_tok: Tensor
    slots: Tensor
    pending: Tensor
    num_spec: int
    lower_bound: float = -5.0
    scale: float = HEAD_DIM**-0.5
    eps: float = 1e-5
    g_ext: Tensor | None = None

    def arguments(self) -> tuple[Tensor | int | float | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes beside its result."""
        return {name: getattr(self, name) for name in ("cs_q", "cs_k", "cs_v", "ssm", "state_tok")}


def _interleaved(slots: int, layers: int, *shape: int, generator: torch.Generator) -> Tensor:
    """Layer 0 of memory [slots, layers, *shape]."""
    return torch.randn(slots, layers, *shape, generator=generator)[:, 0]


def make_rows(shape: VerifyShape, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Projection rows [N T, columns]: unit normal, as behind a trained projection of normed activations."""
    return torch.randn(shape.requests * shape.tokens, shape.columns, generator=generator).to(dtype)


def make_inputs(
    shape: VerifyShape, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> VerifyInputs:
    """Arguments with every pool filled, slots a random permutation of rows and pending counts in [0, M]."""
    gen = torch.Generator().manual_seed(seed)
    D, M, slots = shape.width, shape.num_spec, shape.pool_slots

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    def conv_cache() -> Tensor:
        # Raw inputs come from rows of `dtype`.
        memory = _interleaved(slots, shape.layers, CONV_WIDTH - 1 + M, D, generator=gen)
        return memory.to(dtype).float().transpose(1, 2)

    records = normal(slots, 3, M, shape.heads, HEAD_DIM) * HEAD_DIM**-0.5
    records[:, 2] = torch.rand(slots, M, shape.heads, HEAD_DIM, generator=gen)
    inputs = VerifyInputs(
        proj=make_rows(shape, gen, dtype),
        w_fb=(normal(D, HEAD_DIM) * HEAD_DIM**-0.5).to(dtype),
        w_q=normal(D, CONV_WIDTH) / 2,
        w_k=normal(D, CONV_WIDTH) / 2,
        w_v=normal(D, CONV_WIDTH) / 2,
        a_log=torch.rand(shape.heads, generator=gen) - 1.0,
        dt_bias=normal(D) - 2.0,
        onorm_w=1 + normal(HEAD_DIM) / 8,
        cs_q=conv_cache(),
        cs_k=conv_cache(),
        cs_v=conv_cache(),
        ssm=_interleaved(slots, shape.layers, shape.heads, HEAD_DIM, HEAD_DIM, generator=gen),
        state_tok=records,
        slots=torch.randperm(slots, generator=gen)[: shape.requests].to(torch.int32),
        pending=torch.randint(0, M + 1, (slots,), generator=gen, dtype=torch.int32),
        num_spec=M,
    )
    return move(inputs, device)


def move(inputs: VerifyInputs, device: str | torch.device) -> VerifyInputs:
    """A copy on another device: nothing is shared, strides are kept."""
    return _mapped(
        inputs, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    )


def as_float64(inputs: VerifyInputs, *, f_b: bool = True) -> VerifyInputs:
    """A float64 CPU copy. The f_b product is rounded to the dtype of the rows and passed as `g_ext`."""
    double = _mapped(inputs, lambda x: x.cpu().double() if x.is_floating_point() else x.cpu().clone())
    if double.g_ext is not None or not f_b:
        return double
    width = inputs.w_fb.shape[0]
    f_a = double.proj[:, 4 * width : 4 * width + HEAD_DIM]
    return replace(double, g_ext=(f_a @ double.w_fb.T).to(inputs.proj.dtype).double())


def _mapped(inputs: VerifyInputs, change) -> VerifyInputs:
    return VerifyInputs(
        **{
            field.name: change(value) if isinstance(value := getattr(inputs, field.name), Tensor) else value
            for field in fields(inputs)
        }
    )
