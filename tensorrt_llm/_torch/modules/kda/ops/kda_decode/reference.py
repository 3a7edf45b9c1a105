# SPDX-License-Identifier: Apache-2.0
"""`kda_decode` in torch: the definition. Runs in the dtype it is given, float64 included."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.recurrence import (
    KdaWeights,
    gated_norm,
    prepare_tokens,
    recurrent_kda,
)


def kda_decode_reference(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Tensor, lower_bound: float, scale: float,
    eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op; f_b and o are rounded to the dtype of `proj`."""
    H, K = a_log.shape[0], onorm_w.shape[0]
    D = H * K
    weights = KdaWeights(
        num_heads=H, head_dim=K, conv=torch.cat((w_q, w_k, w_v)).T, f_b=w_fb, a_log=a_log, dt_bias=dt_bias,
        norm=onorm_w, lower_bound=lower_bound, norm_eps=eps,
    )  # fmt: skip
    # A row of padding repeats another row's work, so that nobody asks the device which rows those are.
    used = slots >= 0
    rows = torch.where(used, torch.arange(len(slots), device=slots.device), used.int().argmax())
    at = slots[rows].long().clamp(min=0)
    qkv, gate, f_a, b = proj[rows, : 4 * D + K + H].split((3 * D, D, K, H), dim=1)
    f = f_a @ w_fb.T if g_ext is None else g_ext[rows]
    window, before = conv_pool[at], ssm[at]
    sequence = torch.cat((window.mT.to(weights.conv.dtype), qkv.unsqueeze(1).to(weights.conv.dtype)), dim=1)
    tokens = prepare_tokens(sequence, f.unsqueeze(1), b.unsqueeze(1), weights)
    tokens = tokens._replace(q=tokens.q * (scale / weights.scale))
    o, state = recurrent_kda(tokens, before)
    any_used = used.any()
    ssm[at] = torch.where(any_used, state, before)
    conv_pool[at] = torch.where(any_used, sequence[:, 1:].mT.to(conv_pool.dtype), window)
    out = gated_norm(o[:, 0], gate.reshape(-1, H, K), weights)
    return torch.where(used[:, None, None], out, torch.zeros_like(out))
