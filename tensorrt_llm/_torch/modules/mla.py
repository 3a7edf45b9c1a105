# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention without rotary embedding, over a paged cache of latents.

A token's cache row is [c | k_r]: the normalised latent c [rank] and the rope key k_r [rope] that all heads
share and nobody rotates (NoPE). Attention runs in the absorbed form: the query's nope half goes through the
key half of kv_b, and the latent-space output through its value half, so one latent row serves every head.

Scores are taken page by page, and the pages' partial sums are added in order, so that a token's result does
not depend on how many tokens or requests run beside it: a page that lies wholly in a token's future adds
exact zeros.

Shapes: R rows, H heads, T tokens of one request, n pages of p tokens, L = rank + rope.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensorrt_llm._torch.modules.linear import FusedLinear, pad_rows
from tensorrt_llm._torch.modules.metadata import ForwardMetadata
from tensorrt_llm._torch.modules.pointwise import exp, sigmoid
from tensorrt_llm._torch.modules.rms_norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Latent-attention layers; q_lora_rank None is a plain query projection. No rotary embedding (NoPE)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool

    @property
    def latent_dim(self) -> int:
        """Values cached per token: the normalised latent and the shared rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class LatentAttention(nn.Module):
    """The MLA block of Kimi K3 (output gate, low-rank query) and Kimi Linear (neither)."""

    def __init__(self, config: MlaConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.config = config
        H, rank = config.num_heads, config.kv_lora_rank
        query_width = H * config.qk_head_dim
        parts = {"kv_a": config.latent_dim, "q": config.q_lora_rank or query_width}
        if config.output_gate:
            parts["gate"] = H * config.v_head_dim
        self.in_proj = FusedLinear(hidden_size, parts, dtype)
        self.kv_norm = RMSNorm(rank, eps, dtype)
        if config.q_lora_rank is not None:
            self.q_norm = RMSNorm(config.q_lora_rank, eps, dtype)
            self.q_b = nn.Parameter(torch.zeros(query_width, config.q_lora_rank, dtype=dtype))
        self.kv_b = nn.Parameter(
            torch.zeros(H * (config.qk_nope_head_dim + config.v_head_dim), rank, dtype=dtype)
        )
        self.o_proj = nn.Parameter(torch.zeros(hidden_size, H * config.v_head_dim, dtype=dtype))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the tensor it is loaded into, relative to the block."""
        query = "q_proj" if self.config.q_lora_rank is None else "q_a_proj"
        names = {
            f"{query}.weight": self.in_proj.part("q"),
            "kv_a_proj_with_mqa.weight": self.in_proj.part("kv_a"),
            "kv_a_layernorm.weight": self.kv_norm.weight,
            "kv_b_proj.weight": self.kv_b,
            "o_proj.weight": self.o_proj,
        }
        if self.config.q_lora_rank is not None:
            names |= {"q_a_layernorm.weight": self.q_norm.weight, "q_b_proj.weight": self.q_b}
        if self.config.output_gate:
            names["g_proj.weight"] = self.in_proj.part("gate")
        return names

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [R, hidden] -> queries [R, H, nope + rope], cache rows [R, L], gate [R, H * v] or None."""
        c = self.config
        parts = self.in_proj.split(self.in_proj(x))
        latent, rope_key = parts["kv_a"].split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        row = torch.cat((self.kv_norm(latent), rope_key), dim=-1)
        query = parts["q"]
        if c.q_lora_rank is not None:
            query = F.linear(self.q_norm(query), self.q_b)
        return query.unflatten(-1, (c.num_heads, c.qk_head_dim)), row, parts.get("gate")

    def _kv_b_halves(self) -> tuple[Tensor, Tensor]:
        """The key half [H, nope, rank] and the value half [H, v, rank] of kv_b."""
        c = self.config
        halves = self.kv_b.view(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        return halves.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)

    def _finish(self, heads: Tensor, gate: Tensor | None) -> Tensor:
        """heads [R, H * v] -> [R, hidden]."""
        if gate is not None:
            heads = heads * sigmoid(gate)
        return F.linear(heads, self.o_proj)

    def forward(self, x: Tensor, metadata: ForwardMetadata, pool: Tensor) -> Tensor:
        """x [R, hidden], R a multiple of 4 -> [R, hidden]; writes the rows' latents into the pool's pages.

        pool [pages, 1, p, 1, L]. Rows beyond `metadata.num_tokens` are padding and give finite values.
        """
        query, row, gate = self._project(x)
        to_latent, to_value = self._kv_b_halves()
        nope, rope = query.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        latent_query = torch.bmm(nope.transpose(0, 1), to_latent).transpose(0, 1)
        query = torch.cat((latent_query, rope), dim=-1) * self.config.qk_head_dim**-0.5
        latents = pool[:, 0, :, 0]
        out = query.new_zeros(x.shape[0], self.config.num_heads, self.config.kv_lora_rank)
        for start, num_tokens, position, pages in _request_spans(metadata):
            rows = slice(start, start + num_tokens)
            _store_latents(latents, pages, position, row[rows])
            out[rows] = self._attend(query[rows], latents, pages, position)
        heads = torch.bmm(out.transpose(0, 1), to_value.mT).transpose(0, 1)
        return self._finish(heads.flatten(1), gate)

    def _attend(self, query: Tensor, latents: Tensor, pages: Tensor, position: int) -> Tensor:
        """query [T, H, L] at positions `position`.. over its pages -> latent outputs [T, H, rank]."""
        T, H, L = query.shape
        p = latents.shape[1]
        n = -(-(position + T) // p)
        keys = latents.index_select(0, pages[:n])
        keys.view(n * p, L)[position + T :] = 0  # a page's unwritten rest may hold anything, NaN included
        rows = pad_rows(query.reshape(T * H, L))
        scores = torch.bmm(rows.expand(n, -1, -1), keys.mT)[:, : T * H].float().view(n, T, H, p)
        device = query.device
        key_position = torch.arange(n * p, device=device).view(n, 1, 1, p)
        token_position = torch.arange(position, position + T, device=device).view(1, T, 1, 1)
        scores = scores.masked_fill(key_position > token_position, -torch.inf)
        weights = exp(scores - scores.amax(dim=(0, 3), keepdim=True))
        weighted = pad_rows(weights.view(n, T * H, p).transpose(0, 1)).transpose(0, 1).to(keys.dtype)
        values = torch.bmm(weighted.contiguous(), keys[..., : self.config.kv_lora_rank])[:, : T * H].float()
        partial = torch.cat((values.view(n, T, H, -1), weights.sum(-1, keepdim=True)), dim=-1)
        total = partial[0]
        for page in range(1, n):
            total = total + partial[page]
        return (total[..., :-1] / total[..., -1:]).to(query.dtype)

    def forward_dense(self, x: Tensor) -> Tensor:
        """Whole sequences at once without a cache, for training: x [B, T, hidden] -> [B, T, hidden].

        Causal, differentiable.
        """
        B, T, _ = x.shape
        c = self.config
        query, row, gate = self._project(x.flatten(0, 1))
        latent, rope_key = row.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = F.linear(latent, self.kv_b).view(B * T, c.num_heads, -1)
        nope, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        key = torch.cat((nope, rope_key.unsqueeze(1).expand(-1, c.num_heads, -1)), dim=-1)
        query, key, value = (t.view(B, T, c.num_heads, -1).transpose(1, 2) for t in (query, key, value))
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=c.qk_head_dim**-0.5)
        return self._finish(heads.transpose(1, 2).reshape(B * T, -1), gate).view(B, T, -1)


def _request_spans(metadata: ForwardMetadata) -> list[tuple[int, int, int, Tensor]]:
    """(first row, tokens, position of the first token, pages) of every request in the batch."""
    spans = [(c.row_start, c.num_tokens, c.position_start, c.pages) for c in metadata.contexts]
    for group in metadata.groups:
        T = group.num_tokens
        spans += [
            (group.row_start + r * T, T, group.positions_start[r], group.pages[r])
            for r in range(group.num_requests)
        ]
    return spans


def _store_latents(latents: Tensor, pages: Tensor, position: int, rows: Tensor) -> None:
    """Write rows [T, L] to the slots of positions `position`.. in the pages; nothing else changes."""
    p = latents.shape[1]
    positions = torch.arange(position, position + rows.shape[0], device=rows.device)
    latents[pages[positions // p], positions % p] = rows.to(latents.dtype)
