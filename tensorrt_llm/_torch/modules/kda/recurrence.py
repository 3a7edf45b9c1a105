# SPDX-License-Identifier: Apache-2.0
"""The KDA recurrence, token by token: the definition that every faster form is checked against.

Shapes: N requests, T tokens, H heads, K = V = head width, D = H * K channels, W conv width, M drafts.
A state S is [..., H, V, K], K contiguous, fp32. One token does (arXiv 2510.26692, with the decay folded into
the dot product)

    vn = v - S (decay * k)          row innovation,  [H, V]
    S  = fma(decay, S, vn * (beta k)^T)              the product is rounded first
    o  = S q

and (vn, beta k, decay) is the token's RECORD: `apply_record` replays it without q, k or v. Decode, verify,
replay and commit all go through `apply_record`, which is what makes their states equal bit for bit.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.pointwise import exp, sigmoid, silu, softplus

L2_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaWeights:
    """What a layer's core needs beside its input rows.

    conv [W, 3D] fp32: taps of q | k | v, oldest first. f_b [D, K] in the model's dtype. a_log [H], dt_bias
    [D] and norm [V] fp32. `lower_bound` None selects the softplus gate of Kimi Linear, a negative number the
    bounded gate of Kimi K3. `kernel_taps` are the taps of q, k and v [D, W] as the kernels read them; None
    where no kernel serves the layer.
    """

    num_heads: int
    head_dim: int
    conv: Tensor
    f_b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    lower_bound: float | None
    norm_eps: float
    kernel_taps: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.conv.shape[0]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class KdaTokens(NamedTuple):
    """Per-token operands, fp32: q, k and log_decay [..., H, K], v [..., H, V], beta [..., H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


class KdaRecord(NamedTuple):
    """What undoes and redoes one token: vn [..., H, V], beta_k and decay [..., H, K], fp32."""

    vn: Tensor
    beta_k: Tensor
    decay: Tensor


def _fma_in_double(decay: Tensor, state: Tensor, product: Tensor) -> Tensor:
    return (decay.double() * state.double() + product.double()).to(state.dtype)


@cache
def _addcmul_is_fused(device_type: str) -> bool:
    """Whether `torch.addcmul` rounds once on this device, found by trying it on the recurrence's shapes."""
    gen = torch.Generator().manual_seed(0)
    decay, state, product = (
        torch.randn(shape, generator=gen) for shape in ((2, 1, 128), (2, 128, 128), (2, 128, 128))
    )
    decay, state, product = (x.to(device_type) for x in (decay, state, product))
    return torch.equal(torch.addcmul(product, decay, state), _fma_in_double(decay, state, product))


def fma(decay: Tensor, state: Tensor, product: Tensor) -> Tensor:
    """decay * state + product with one rounding, decay broadcast; plain arithmetic for float64."""
    if state.dtype == torch.float64 or _addcmul_is_fused(state.device.type):
        return torch.addcmul(product, decay, state)
    return _fma_in_double(decay, state, product)


def apply_record(state: Tensor, record: KdaRecord) -> Tensor:
    """The state [..., H, V, K] after the record's token; the input is left as it was."""
    product = record.vn.unsqueeze(-1) * record.beta_k.unsqueeze(-2)
    return fma(record.decay.unsqueeze(-2), state, product)


def make_record(state: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> KdaRecord:
    """The record of one token that arrives at `state` [..., H, V, K]."""
    decay = exp(log_decay)
    vn = v - (state * (decay * k).unsqueeze(-2)).sum(-1)
    return KdaRecord(vn, beta.unsqueeze(-1) * k, decay)


def read_out(state: Tensor, q: Tensor) -> Tensor:
    """o [..., H, V] = S q, the state being the one after the token."""
    return (state * q.unsqueeze(-2)).sum(-1)


def recurrent_kda(tokens: KdaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """o [..., T, H, V] and the last state of T tokens [..., T, H, K] that start at `state` [..., H, V, K]."""
    outputs = []
    for t in range(tokens.q.shape[-3]):
        q, k, v, log_decay = (x[..., t, :, :] for x in tokens[:4])
        state = apply_record(state, make_record(state, k, v, log_decay, tokens.beta[..., t, :]))
        outputs.append(read_out(state, q))
    return torch.stack(outputs, dim=-3), state


def log_decay(f: Tensor, weights: KdaWeights) -> Tensor:
    """The log of the decay [..., H, K] in (lower_bound, 0), from the decay logits f [..., D]."""
    shape = (*f.shape[:-1], weights.num_heads, weights.head_dim)
    logits = (f.to(weights.dt_bias.dtype) + weights.dt_bias).view(shape)
    slope = weights.a_log.exp().unsqueeze(-1)
    if weights.lower_bound is None:
        return -slope * softplus(logits)
    return weights.lower_bound * sigmoid(slope * logits)


def short_conv(sequence: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution, then SiLU.

    sequence [..., W-1+T, C], W-1 rows of history first; taps [W, C] -> [..., T, C].
    """
    width = taps.shape[0]
    num_tokens = sequence.shape[-2] - (width - 1)
    out = sequence[..., :num_tokens, :] * taps[0]
    for w in range(1, width):
        out = torch.addcmul(out, sequence[..., w : w + num_tokens, :], taps[w])
    return silu(out)


def _l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def prepare_tokens(sequence: Tensor, f: Tensor, b: Tensor, weights: KdaWeights) -> KdaTokens:
    """Operands of the recurrence.

    sequence [..., W-1+T, 3D]: raw q | k | v projections, W-1 rows of history first. f [..., T, D] decay
    logits (the f_b output), b [..., T, H] beta logits. Accumulation in the dtype of `weights.conv`.
    """
    H, K = weights.num_heads, weights.head_dim
    mixed = short_conv(sequence.to(weights.conv.dtype), weights.conv)
    mixed = mixed.view(*mixed.shape[:-1], 3, H, K)
    qk = _l2_normalize(mixed[..., :2, :, :])
    return KdaTokens(
        q=qk[..., 0, :, :] * weights.scale,
        k=qk[..., 1, :, :],
        v=mixed[..., 2, :, :],
        log_decay=log_decay(f, weights),
        beta=sigmoid(b.to(weights.conv.dtype)),
    )


def gated_norm(o: Tensor, gate: Tensor, weights: KdaWeights) -> Tensor:
    """RMSNorm over V, then times sigmoid(gate): o [..., H, V] fp32, gate [..., H, V] in the model's dtype,
    which the result has.

    o is rounded to the model's dtype before the norm, as the unfused path does.
    """
    rounded = o.to(gate.dtype).to(weights.norm.dtype)
    variance = rounded.square().mean(-1, keepdim=True)
    normed = rounded * torch.rsqrt(variance + weights.norm_eps) * weights.norm
    return (normed * sigmoid(gate.to(weights.norm.dtype))).to(gate.dtype)
