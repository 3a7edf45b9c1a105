# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `k3_kda_attn`, for tests and benchmarks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify import inputs as verify_inputs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import VerifyInputs, VerifyShape

# Of Kimi K3.
HIDDEN = 7168


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnShape:
    """One request of T tokens; `hidden` is the width of x, `round` the sizes of the verify round."""

    tokens: int
    heads: int = 6
    hidden: int = HIDDEN
    num_spec: int = 7
    num_slots: int = 3
    layers: int = 1

    @property
    def round(self) -> VerifyShape:
        return VerifyShape(
            requests=1, tokens=self.tokens, heads=self.heads, num_spec=self.num_spec,
            num_slots=self.num_slots, layers=self.layers,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnInputs:
    """Arguments of the op in its order; `round` holds those of `k3_kda_verify`, its proj the exact rows."""

    x: Tensor
    w: Tensor
    round: VerifyInputs

    def arguments(self) -> tuple[Tensor | int | float | None, ...]:
        _, *weights_and_pools = self.round.arguments()[:15]
        numbers = self.round.arguments()[15:19]
        return (self.x, self.w, *weights_and_pools, None, None, None, *numbers)

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes beside its result."""
        return self.round.mutable()


def make_inputs(
    shape: AttnShape, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
    conv_dtype: torch.dtype = torch.float32,
) -> AttnInputs:  # fmt: skip
    """Arguments whose projection rows are unit normal; those of the padding are zero."""
    gen = torch.Generator().manual_seed(seed + 1)
    sizes = shape.round
    used = 4 * sizes.width + verify_inputs.HEAD_DIM + sizes.heads
    x = torch.randn(shape.tokens, shape.hidden, generator=gen).to(dtype)
    w = (torch.randn(sizes.columns, shape.hidden, generator=gen) * shape.hidden**-0.5).to(dtype)
    w[used:] = 0
    verify = verify_inputs.make_inputs(sizes, seed=seed, dtype=dtype, conv_dtype=conv_dtype)
    rows = (x.double() @ w.double().T).to(dtype)
    return move(AttnInputs(x=x, w=w, round=replace(verify, proj=rows)), device)


def move(inputs: AttnInputs, device: str | torch.device) -> AttnInputs:
    """A copy on another device: nothing is shared, strides are kept."""
    return AttnInputs(
        x=inputs.x.to(device, copy=True),
        w=inputs.w.to(device, copy=True),
        round=verify_inputs.move(inputs.round, device),
    )
