# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `k3_kda_verify` and of the verify ops beside it, for tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

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
class RoundInputs:
    """What the verify ops take alike; a subclass names its caches of drafts in their order."""

    DRAFTS: ClassVar[tuple[str, ...]] = ()

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
    slots: Tensor
    num_spec: int
    lower_bound: float = -5.0
    scale: float = HEAD_DIM**-0.5
    eps: float = 1e-5
    g_ext: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """In the op's order."""
        shared = [field.name for field in fields(RoundInputs)]
        cut = shared.index("slots")
        mine = [name for name in self.DRAFTS if name != "pending"]
        after = ["pending"] if "pending" in self.DRAFTS else []
        names = (*shared[:cut], *mine, "slots", *after, *shared[cut + 1 :])
        return tuple(getattr(self, name) for name in names)

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes beside its result."""
        names = ("cs_q", "cs_k", "cs_v", "ssm", *self.DRAFTS)
        return {name: getattr(self, name) for name in names if name != "pending"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyInputs(RoundInputs):
    """Arguments of `k3_kda_verify`."""

    DRAFTS: ClassVar[tuple[str, ...]] = ("state_tok", "pending")

    state_tok: Tensor
    pending: Tensor


Inputs = TypeVar("Inputs", bound=RoundInputs)


def _interleaved(slots: int, layers: int, *shape: int, generator: torch.Generator) -> Tensor:
    """Layer 0 of memory [slots, layers, *shape]."""
    return torch.randn(slots, layers, *shape, generator=generator)[:, 0]


def make_rows(shape: VerifyShape, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Projection rows [N T, columns]: unit normal, as behind a trained projection of normed activations."""
    return torch.randn(shape.requests * shape.tokens, shape.columns, generator=generator).to(dtype)


def shared_fields(
    shape: VerifyShape, generator: torch.Generator, dtype: torch.dtype, conv_dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of `RoundInputs` on the CPU, every pool filled, slots a random permutation of rows."""
    gen = generator
    D, M, slots = shape.width, shape.num_spec, shape.pool_slots

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    def conv_cache() -> Tensor:
        # Raw inputs come from rows of `dtype`.
        memory = _interleaved(slots, shape.layers, CONV_WIDTH - 1 + M, D, generator=gen)
        return memory.to(dtype).to(conv_dtype).transpose(1, 2)

    return {
        "proj": make_rows(shape, gen, dtype),
        "w_fb": (normal(D, HEAD_DIM) * HEAD_DIM**-0.5).to(dtype),
        "w_q": normal(D, CONV_WIDTH) / 2,
        "w_k": normal(D, CONV_WIDTH) / 2,
        "w_v": normal(D, CONV_WIDTH) / 2,
        "a_log": torch.rand(shape.heads, generator=gen) - 1.0,
        "dt_bias": normal(D) - 2.0,
        "onorm_w": 1 + normal(HEAD_DIM) / 8,
        "cs_q": conv_cache(),
        "cs_k": conv_cache(),
        "cs_v": conv_cache(),
        "ssm": _interleaved(slots, shape.layers, shape.heads, HEAD_DIM, HEAD_DIM, generator=gen),
        "slots": torch.randperm(slots, generator=gen)[: shape.requests].to(torch.int32),
        "num_spec": M,
    }


def make_pending(shape: VerifyShape, generator: torch.Generator) -> Tensor:
    """Counts [pool] in [0, M]."""
    high = shape.num_spec + 1
    return torch.randint(0, high, (shape.pool_slots,), generator=generator, dtype=torch.int32)


def make_inputs(
    shape: VerifyShape, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
    conv_dtype: torch.dtype = torch.float32,
) -> VerifyInputs:  # fmt: skip
    """Arguments of `k3_kda_verify` with pending counts in [0, M]."""
    gen = torch.Generator().manual_seed(seed)
    size = (shape.pool_slots, shape.num_spec, shape.heads, HEAD_DIM)
    records = torch.randn(size[0], 3, *size[1:], generator=gen) * HEAD_DIM**-0.5
    records[:, 2] = torch.rand(size, generator=gen)
    shared = shared_fields(shape, gen, dtype, conv_dtype)
    return move(VerifyInputs(**shared, state_tok=records, pending=make_pending(shape, gen)), device)


def move(inputs: Inputs, device: str | torch.device) -> Inputs:
    """A copy on another device: nothing is shared, strides are kept."""
    return _mapped(
        inputs, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    )


def as_float64(inputs: Inputs, *, f_b: bool = True) -> Inputs:
    """A float64 CPU copy. The f_b product is rounded to the dtype of the rows and passed as `g_ext`."""
    double = _mapped(inputs, lambda x: x.cpu().double() if x.is_floating_point() else x.cpu().clone())
    if double.g_ext is not None or not f_b:
        return double
    width = inputs.w_fb.shape[0]
    f_a = double.proj[:, 4 * width : 4 * width + HEAD_DIM]
    return replace(double, g_ext=(f_a @ double.w_fb.T).to(inputs.proj.dtype).double())


def _mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    values: dict[str, Any] = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    values = {k: change(v) if isinstance(v, Tensor) else v for k, v in values.items()}
    return type(inputs)(**values)
