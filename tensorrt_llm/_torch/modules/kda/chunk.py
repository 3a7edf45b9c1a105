# SPDX-License-Identifier: Apache-2.0
"""KDA over many tokens at once: the chunked form of `recurrence.recurrent_kda`, for prefill and training.

Inside a chunk of C tokens that starts at state S0, with G the cumulative log-decay and Gamma = exp(G),

    vn_t = v_t - S0 (Gamma_t k_t) - sum_{j<t} A[t, j] vn_j       A[t, j] = beta_j sum_k k_t k_j exp(G_t - G_j)
    o_t  = S0 (Gamma_t q_t) + sum_{j<=t} B[t, j] vn_j            B[t, j] = beta_j sum_k q_t k_j exp(G_t - G_j)
    S_C  = S0 diag(Gamma_C) + sum_j vn_j (beta_j k_j exp(G_C - G_j))^T

so (I + A) vn = v - (Gamma k) S0^T is one unit-lower-triangular solve per value column (the WY or UT form of
arXiv 2412.06464, with a decay per key as in arXiv 2510.26692).

Shapes: B leading axes, T tokens, H heads, K = V head width, C = 16 tokens a chunk.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorrt_llm._torch.modules.kda.recurrence import KdaTokens, KdaWeights, prepare_tokens
from tensorrt_llm._torch.modules.metadata import PREFILL_ALIGNMENT_TOKENS
from tensorrt_llm._torch.modules.pointwise import exp

CHUNK_TOKENS = 16
_MAX_EXPONENT = 80.0
"""exp of this, and the product of two such numbers' halves, stays inside fp32."""


def _unit_lower_inverse(strict_lower: Tensor) -> Tensor:
    """(I + A)^-1 of A [..., C, C] strictly lower, C a power of two, by joining inverses of diagonal blocks.

    [[X, 0], [Z, Y]]^-1 = [[X^-1, 0], [-Y^-1 Z X^-1, Y^-1]]: log2(C) steps of batched products,
    differentiable.
    """
    C = strict_lower.shape[-1]
    lead = strict_lower.shape[:-2]
    inverse = torch.ones(*lead, C, 1, 1, dtype=strict_lower.dtype, device=strict_lower.device)
    size = 1
    while size < C:
        blocks = C // (2 * size)
        tiles = strict_lower.view(*lead, blocks, 2 * size, blocks, 2 * size)
        diagonal = torch.stack([tiles[..., i, :, i, :] for i in range(blocks)], dim=-3)
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        coupling = -(lower @ diagonal[..., size:, :size] @ upper)
        top = torch.cat((upper, torch.zeros_like(upper)), dim=-1)
        inverse = torch.cat((top, torch.cat((coupling, lower), dim=-1)), dim=-2)
        size *= 2
    return inverse.squeeze(-3)


def _pair_products(left: Tensor, right: Tensor, G: Tensor, factored: bool) -> Tensor:
    """sum_k left_t right_j exp(G_t - G_j) [..., C, C]; meaningful for j <= t only.

    `factored` splits the exponent about the chunk's middle, which fp32 allows when the log-decay is bounded;
    otherwise the exponents, all <= 0 where they matter, are formed pair by pair.
    """
    if factored:
        middle = G[..., CHUNK_TOKENS // 2 - 1 : CHUNK_TOKENS // 2, :]
        return (left * exp(G - middle)) @ (right * exp(middle - G)).mT
    decay = exp((G.unsqueeze(-2) - G.unsqueeze(-3)).clamp(max=0))
    return (left.unsqueeze(-2) * right.unsqueeze(-3) * decay).sum(-1)


def _chunked(x: Tensor) -> Tensor:
    """[..., T, H, K] -> [..., H, T / C, C, K]."""
    return x.unflatten(-3, (-1, CHUNK_TOKENS)).movedim(-2, -4)


def chunk_kda(tokens: KdaTokens, state: Tensor, lower_bound: float | None = None) -> tuple[Tensor, Tensor]:
    """The outputs [..., T, H, V] and the last state [..., H, V, K] of T tokens that start at `state`.

    `lower_bound` is the least log-decay of one token where the gate has one. Differentiable; nothing is
    mutated. A T that is no multiple of 16 is filled up with tokens that change nothing (k = 0, no decay).
    """
    T = tokens.q.shape[-3]
    fill = -T % CHUNK_TOKENS
    if fill:
        q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, fill)) for x in tokens[:4])
        tokens = KdaTokens(q, k, v, g, F.pad(tokens.beta, (0, 0, 0, fill)))
    q, k, v, g = (_chunked(x) for x in tokens[:4])
    beta_k = k * _chunked(tokens.beta.unsqueeze(-1))
    G = g.cumsum(-2)
    factored = lower_bound is not None and -lower_bound * CHUNK_TOKENS / 2 <= _MAX_EXPONENT / 2
    A = _pair_products(k, beta_k, G, factored).tril(-1)
    B = _pair_products(q, beta_k, G, factored).tril()
    inverse = _unit_lower_inverse(A)
    gamma = exp(G)
    U, W = inverse @ v, inverse @ (gamma * k)
    last = G[..., -1:, :]
    keys_out = beta_k * exp(last - G)
    gamma_last = exp(last)
    states, innovations = [], []
    for c in range(G.shape[-3]):
        vn = U[..., c, :, :] - W[..., c, :, :] @ state.mT
        states.append(state)
        innovations.append(vn)
        state = state * gamma_last[..., c, :, :] + vn.mT @ keys_out[..., c, :, :]
    vn, starts = torch.stack(innovations, dim=-3), torch.stack(states, dim=-3)
    o = (gamma * q) @ starts.mT + B @ vn
    return o.movedim(-4, -2).flatten(-4, -3)[..., :T, :, :], state


def chunked_prompt(
    sequence: Tensor, f: Tensor, b: Tensor, weights: KdaWeights, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs [T, H, V] of T tokens of one prompt and its state [H, V, K] after them, block by block.

    sequence [W-1+T, 3D]: raw q | k | v projections behind the window before them; f [T, D] decay logits, b
    [T, H] beta logits. Blocks of 64 tokens start at the first token, so that a prompt that is cut at
    multiples of 64 has the bits of one that is not.
    """
    T, outputs = f.shape[0], []
    for start in range(0, T, PREFILL_ALIGNMENT_TOKENS):
        end = min(start + PREFILL_ALIGNMENT_TOKENS, T)
        rows = sequence[start : end + weights.conv_width - 1]
        tokens = prepare_tokens(rows, f[start:end], b[start:end], weights)
        o, state = chunk_kda(tokens, state, weights.lower_bound)
        outputs.append(o)
    return torch.cat(outputs), state
