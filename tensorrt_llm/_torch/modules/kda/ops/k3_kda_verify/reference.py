# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` in torch, and the round that the other verify ops share with it: the definition.

A recurrent state cannot be rewound, so a round commits only the state after its first (golden) token, and a
memory of the drafts keeps what leads from there to any of them. Everything runs in the dtype it is given,
float64 included.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.recurrence import (
    KdaRecord,
    KdaTokens,
    KdaWeights,
    apply_record,
    gated_norm,
    make_record,
    prepare_tokens,
    read_out,
)


class DraftMemory(Protocol):
    """What one layer keeps of the drafts of every slot."""

    def replay(self, slot: int, state: Tensor, count: int) -> Tensor:
        """The state [H, V, K] after the slot's first `count` drafts; what lies beyond is never read."""
        ...

    def keep(self, slot: int, draft: int, token: KdaTokens, record: KdaRecord, state: Tensor) -> None:
        """Store a draft: its operands and its record [H, ...], and the state after it."""
        ...


@dataclass(frozen=True, slots=True)
class RecordMemory:
    """Records: `state_tok` [pool, 3, M, H, K] of vn, beta k, decay."""

    state_tok: Tensor

    def replay(self, slot: int, state: Tensor, count: int) -> Tensor:
        for record in self.state_tok[slot, :, :count].unbind(dim=1):
            state = apply_record(state, KdaRecord(*record))
        return state

    def keep(self, slot: int, draft: int, token: KdaTokens, record: KdaRecord, state: Tensor) -> None:
        self.state_tok[slot, :, draft] = torch.stack(record)


def verify_reference(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, memory: DraftMemory,
    slots: Tensor, pending: Tensor | None, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None,
) -> Tensor:  # fmt: skip
    """The round of any verify op, its draft caches as a `memory`; without `pending` nothing is pending.

    f_b and o are rounded to the dtype of `proj`.
    """
    H, K, W = a_log.shape[0], onorm_w.shape[0], w_q.shape[1]
    D, T = H * K, proj.shape[0] // slots.shape[0]
    weights = KdaWeights(
        num_heads=H, head_dim=K, conv=torch.cat((w_q, w_k, w_v)).T, f_b=w_fb, a_log=a_log, dt_bias=dt_bias,
        norm=onorm_w, lower_bound=lower_bound, norm_eps=eps,
    )  # fmt: skip
    caches = (cs_q, cs_k, cs_v)
    out = proj.new_zeros(proj.shape[0], H, K)
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        chunk = slice(i * T, (i + 1) * T)
        qkv, gate, f_a, b = proj[chunk, : 4 * D + K + H].split((3 * D, D, K, H), dim=1)
        f = f_a @ w_fb.T if g_ext is None else g_ext[chunk]
        P = 0 if pending is None else min(max(int(pending[slot]), 0), num_spec)
        history = torch.cat([cache[slot, :, P : P + W - 1] for cache in caches]).T
        sequence = torch.cat((history.to(weights.conv.dtype), qkv.to(weights.conv.dtype)))
        for cache, part in zip(caches, sequence[1:].chunk(3, dim=1), strict=True):
            cache[slot, :, : T + W - 2] = part.T
        tokens = prepare_tokens(sequence, f, b, weights)
        tokens = tokens._replace(q=tokens.q * (scale / weights.scale))
        state = memory.replay(slot, ssm[slot], P)
        outputs = []
        for t in range(T):
            token = KdaTokens(*(x[t] for x in tokens))
            record = make_record(state, token.k, token.v, token.log_decay, token.beta)
            state = apply_record(state, record)
            outputs.append(read_out(state, token.q))
            if t == 0:
                ssm[slot] = state
            else:
                memory.keep(slot, t - 1, token, record, state)
        out[chunk] = gated_norm(torch.stack(outputs), gate.reshape(T, H, K), weights)
    return out


def k3_kda_verify_reference(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op."""
    return verify_reference(
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, RecordMemory(state_tok),
        slots, pending, num_spec, lower_bound, scale, eps, g_ext,
    )  # fmt: skip
