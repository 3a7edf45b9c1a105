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
    out = proj.new_zeros(proj.shape[0], H, K)
    used = (slots >= 0).nonzero().flatten()
    at = slots[used].long()
    qkv, gate, f_a, b = proj[used, : 4 * D + K + H].split((3 * D, D, K, H), dim=1)
    f = f_a @ w_fb.T if g_ext is None else g_ext[used]
    history = conv_pool[at].mT.to(weights.conv.dtype)
    sequence = torch.cat((history, qkv.unsqueeze(1).to(history.dtype)), dim=1)
    tokens = prepare_tokens(sequence, f.unsqueeze(1), b.unsqueeze(1), weights)
    tokens = tokens._replace(q=tokens.q * (scale / weights.scale))
    o, state = recurrent_kda(tokens, ssm[at])
    ssm[at] = state
    conv_pool[at] = sequence[:, 1:].mT.to(conv_pool.dtype)
    out[used] = gated_norm(o[:, 0], gate.reshape(-1, H, K), weights)
    return out
