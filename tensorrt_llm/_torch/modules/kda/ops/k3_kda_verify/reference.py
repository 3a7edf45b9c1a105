# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` in torch: the definition. Runs in the dtype it is given, float64 included."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.recurrence import (
    KdaRecord,
    KdaWeights,
    apply_record,
    gated_norm,
    make_record,
    prepare_tokens,
    read_out,
)


def k3_kda_verify_reference(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op; f_b and o are rounded to the dtype of `proj`."""
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
        P = min(max(int(pending[slot]), 0), num_spec)
        history = torch.cat([cache[slot, :, P : P + W - 1] for cache in caches]).T
        sequence = torch.cat((history, qkv.to(history.dtype)))
        for cache, part in zip(caches, sequence[1:].chunk(3, dim=1), strict=True):
            cache[slot, :, : T + W - 2] = part.T
        tokens = prepare_tokens(sequence, f, b, weights)
        queries = tokens.q * (scale / weights.scale)
        state = ssm[slot]
        for record in state_tok[slot, :, :P].unbind(dim=1):
            state = apply_record(state, KdaRecord(*record))
        outputs = []
        for t in range(T):
            made = make_record(state, tokens.k[t], tokens.v[t], tokens.log_decay[t], tokens.beta[t])
            state = apply_record(state, made)
            outputs.append(read_out(state, queries[t]))
            if t == 0:
                ssm[slot] = state
            else:
                state_tok[slot, :, t - 1] = torch.stack(made)
        out[chunk] = gated_norm(torch.stack(outputs), gate.reshape(T, H, K), weights)
    return out
