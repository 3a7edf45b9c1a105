# SPDX-License-Identifier: Apache-2.0
"""The KDA block (Kimi Delta Attention): projections, short convolution, recurrence, gated norm, output.

The fused projection's row is q | k | v | gate | f_a | b | pad, the layout the kernels read; Kimi Linear's
low-rank gate has g_a in place of the gate columns. Prompts run in blocks of 64 tokens from their start
through the chunked form, generation rounds through the verify scheme (or, without speculation, through one-
token decode).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensorrt_llm._torch.modules.kda.chunk import chunk_kda, chunked_prompt
from tensorrt_llm._torch.modules.kda.ops import kda_prefill
from tensorrt_llm._torch.modules.kda.recurrence import KdaWeights, gated_norm, prepare_tokens
from tensorrt_llm._torch.modules.kda.verify_scheme import (
    KdaGeometry,
    KdaRows,
    VerifyScheme,
    decode,
)
from tensorrt_llm._torch.modules.kda.windows import sync_window
from tensorrt_llm._torch.modules.linear import FusedLinear
from tensorrt_llm._torch.modules.metadata import ContextChunk, ForwardMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaConfig:
    """Linear-attention layers. `lower_bound` None is the softplus gate; head_dim is K = V."""

    num_heads: int
    head_dim: int
    conv_width: int
    full_rank_gate: bool
    lower_bound: float | None

    def geometry(self, num_spec: int) -> KdaGeometry:
        """The sizes of the slot buffers for M = num_spec drafts."""
        return KdaGeometry(
            num_heads=self.num_heads, head_dim=self.head_dim, conv_width=self.conv_width, num_spec=num_spec
        )


class KimiDeltaAttention(nn.Module):
    """One KDA layer. `verify_scheme` None means that no drafts are verified: generation runs one token a
    step."""

    def __init__(self, config: KdaConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.eps = eps
        self.verify_scheme: VerifyScheme | None = None
        self._prepared: KdaWeights | None = None
        H, K, W = config.num_heads, config.head_dim, config.conv_width
        D = H * K
        gate = {"gate": D} if config.full_rank_gate else {"g_a": K}
        self.in_proj = FusedLinear(hidden_size, {"q": D, "k": D, "v": D, **gate, "f_a": K, "b": H}, dtype)
        if not config.full_rank_gate:
            self.g_b = nn.Parameter(torch.zeros(D, K, dtype=dtype))
        self.f_b = nn.Parameter(torch.zeros(D, K, dtype=dtype))
        self.conv = nn.Parameter(torch.zeros(W, 3 * D))
        self.a_log = nn.Parameter(torch.zeros(H))
        self.dt_bias = nn.Parameter(torch.zeros(D))
        self.norm = nn.Parameter(torch.ones(K))
        self.o_proj = nn.Parameter(torch.zeros(hidden_size, D, dtype=dtype))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the tensor it is loaded into, relative to the block."""
        names = {f"{part}_proj.weight": self.in_proj.part(part) for part in ("q", "k", "v", "f_a", "b")}
        for part, taps in zip("qkv", self.conv.chunk(3, dim=1), strict=True):
            names[f"{part}_conv1d.weight"] = taps.T.unsqueeze(1)
        if self.config.full_rank_gate:
            names["g_proj.weight"] = self.in_proj.part("gate")
        else:
            names |= {"g_a_proj.weight": self.in_proj.part("g_a"), "g_b_proj.weight": self.g_b}
        return names | {
            "f_b_proj.weight": self.f_b,
            "A_log": self.a_log,
            "dt_bias": self.dt_bias,
            "o_norm.weight": self.norm,
            "o_proj.weight": self.o_proj,
        }

    def weights(self) -> KdaWeights:
        """What the layer's core needs beside its rows; views of the parameters."""
        return self._prepared or self._core_weights(None)

    def prepare(self) -> None:
        """Fix the core's weights after loading and moving; on a GPU also as the kernels read them."""
        taps = None
        config = self.config
        if self.conv.is_cuda and config.full_rank_gate and config.lower_bound is not None:
            q, k, v = (part.T.contiguous() for part in self.conv.detach().chunk(3, dim=1))
            taps = (q, k, v)
        self._prepared = self._core_weights(taps)

    def _core_weights(self, kernel_taps: tuple[Tensor, Tensor, Tensor] | None) -> KdaWeights:
        return KdaWeights(
            num_heads=self.config.num_heads,
            head_dim=self.config.head_dim,
            conv=self.conv,
            f_b=self.f_b,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            norm=self.norm,
            lower_bound=self.config.lower_bound,
            norm_eps=self.eps,
            kernel_taps=kernel_taps,
        )

    def _rows(self, proj: Tensor) -> KdaRows:
        """The core's input rows from projection rows [R, columns]; R a multiple of 4 for exact repeats."""
        parts = self.in_proj.split(proj)
        D = self.config.num_heads * self.config.head_dim
        gate = parts["gate"] if self.config.full_rank_gate else F.linear(parts["g_a"], self.g_b)
        return KdaRows(
            proj=proj, qkv=proj[..., : 3 * D], gate=gate, f=F.linear(parts["f_a"], self.f_b), b=parts["b"]
        )

    def forward(self, x: Tensor, metadata: ForwardMetadata, cache: Any) -> Tensor:
        """x [R, hidden], R a multiple of 4 -> [R, hidden]; updates the slots of the batch's requests in
        `cache`."""
        rows, weights = self._rows(self.in_proj(x)), self.weights()
        out = x.new_zeros(x.shape[0], self.config.num_heads, self.config.head_dim)
        if weights.kernel_taps is not None and metadata.contexts:
            first, last = metadata.contexts[0], metadata.contexts[-1]
            span = slice(first.row_start, last.row_start + last.num_tokens)
            out[span] = self._prefill_together(rows.span(span), weights, metadata.contexts, cache)
        else:
            for chunk in metadata.contexts:
                span = slice(chunk.row_start, chunk.row_start + chunk.num_tokens)
                out[span] = self._prefill(rows.span(span), weights, chunk, cache)
        for group in metadata.groups:
            part = rows.span(group.rows)
            if self.verify_scheme is None:
                out[group.rows] = decode(part, weights, cache, group.slots)
            else:
                out[group.rows] = self.verify_scheme.verify(
                    part, weights, cache, group.slots, group.num_tokens
                )
        return F.linear(out.flatten(1), self.o_proj)

    def _prefill(self, rows: KdaRows, weights: KdaWeights, chunk: ContextChunk, cache: Any) -> Tensor:
        """One prompt chunk: outputs [T, H, V]; writes the slot's state and conv window (zeros before token
        0)."""
        slot, width = chunk.slot, weights.conv_width
        if chunk.position_start == 0:
            state = torch.zeros_like(cache.temporal[slot])
            window = rows.qkv.new_zeros(width - 1, rows.qkv.shape[1])
        else:
            state, window = cache.temporal[slot], cache.conv[slot].T.to(rows.qkv.dtype)
        sequence = torch.cat((window, rows.qkv))
        o, state = chunked_prompt(sequence, rows.f, rows.b, weights, state)
        cache.temporal[slot] = state
        cache.conv[slot] = sequence[sequence.shape[0] - (width - 1) :].T.to(cache.conv.dtype)
        if self.verify_scheme is not None:
            sync_window(cache, (slot,))
        gate = rows.gate.view(chunk.num_tokens, weights.num_heads, weights.head_dim)
        return gated_norm(o, gate, weights)

    def _prefill_together(
        self, rows: KdaRows, weights: KdaWeights, chunks: Sequence[ContextChunk], cache: Any
    ) -> Tensor:
        """All prompt chunks of a step through the op: outputs [rows, H, V]; writes what `_prefill` writes."""
        if weights.kernel_taps is None or weights.lower_bound is None:
            raise AssertionError("the layer was prepared for kernels without a gate that they serve")
        slots = [chunk.slot for chunk in chunks]
        out = kda_prefill(
            rows.proj,
            weights.f_b,
            *weights.kernel_taps,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            cache.conv,
            cache.temporal,
            slots=slots,
            lengths=[chunk.num_tokens for chunk in chunks],
            positions=[chunk.position_start for chunk in chunks],
            lower_bound=weights.lower_bound,
            scale=weights.scale,
            eps=weights.norm_eps,
        )
        if self.verify_scheme is not None:
            sync_window(cache, slots)
        return out

    def forward_dense(self, x: Tensor) -> Tensor:
        """Whole sequences at once without a cache, for training: x [B, T, hidden] -> [B, T, hidden]."""
        B, T, _ = x.shape
        rows, weights = self._rows(self.in_proj(x)), self.weights()
        H, K = weights.num_heads, weights.head_dim
        with torch.autocast(x.device.type, enabled=False):
            sequence = F.pad(rows.qkv, (0, 0, weights.conv_width - 1, 0))
            tokens = prepare_tokens(sequence, rows.f, rows.b, weights)
            state = torch.zeros(B, H, K, K, device=x.device, dtype=tokens.q.dtype)
            o, _ = chunk_kda(tokens, state, weights.lower_bound)
            gated = gated_norm(o, rows.gate.view(B, T, H, K), weights)
        return F.linear(gated.flatten(2), self.o_proj)
