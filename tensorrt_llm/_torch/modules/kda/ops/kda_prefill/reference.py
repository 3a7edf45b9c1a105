# SPDX-License-Identifier: Apache-2.0
"""`kda_prefill` in torch: the definition. Runs in the dtype it is given, float64 included."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.chunk import chunked_prompt
from tensorrt_llm._torch.modules.kda.recurrence import KdaWeights, gated_norm


def kda_prefill_reference(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Sequence[int], lengths: Sequence[int],
    positions: Sequence[int], lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op; f_b and o are rounded to the dtype of `proj`."""
    H, K, W = a_log.shape[0], onorm_w.shape[0], w_q.shape[1]
    D = H * K
    weights = KdaWeights(
        num_heads=H, head_dim=K, conv=torch.cat((w_q, w_k, w_v)).T, f_b=w_fb, a_log=a_log, dt_bias=dt_bias,
        norm=onorm_w, lower_bound=lower_bound, norm_eps=eps,
    )  # fmt: skip
    outputs = []
    chunks = [x.split(list(lengths)) for x in (proj, proj if g_ext is None else g_ext)]
    for slot, position, rows, external in zip(slots, positions, *chunks, strict=True):
        qkv, gate, f_a, b = rows[:, : 4 * D + K + H].split((3 * D, D, K, H), dim=1)
        f = f_a @ w_fb.T if g_ext is None else external
        if position == 0:
            state, window = torch.zeros_like(ssm[slot]), qkv.new_zeros(W - 1, 3 * D)
        else:
            state, window = ssm[slot], conv_pool[slot].T.to(qkv.dtype)
        sequence = torch.cat((window, qkv))
        o, ssm[slot] = chunked_prompt(sequence, f, b, weights, state)
        conv_pool[slot] = sequence[sequence.shape[0] - (W - 1) :].T.to(conv_pool.dtype)
        outputs.append(gated_norm(o * (scale / weights.scale), gate.reshape(-1, H, K), weights))
    return torch.cat(outputs)
