# SPDX-License-Identifier: Apache-2.0
"""`kda_prefill` through fla-core: convolution, chunked recurrence and gated norm of all prompts at once.

fla-core's layouts are [1, tokens of all prompts, H, K] with boundaries, and states [N, H, V, K] when they are
asked for V first. Its kernels take q, k, v, gate and beta as logits and apply norms, gate and sigmoid
themselves; operands of the chunks' products are bf16, states and decays fp32.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.kda import chunk_kda
from torch import Tensor
from torch.nn import functional as F

SAFE_LOWER_BOUND = -5.0
"""From here up a decay's exponent over 16 tokens stays in fp32, and fla-core uses tensor cores throughout."""


@lru_cache(maxsize=4)
def _boundaries(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """[N + 1] first rows of the prompts on the device and the host.

    Kept, since fla-core keeps the chunks' indices by the identity of these tensors: the layers of a step
    share them.
    """
    host = torch.tensor([0, *lengths]).cumsum(0)
    if device.type != "cuda":
        return host, host
    return host.pin_memory().to(device, non_blocking=True), host


def _starts(
    conv_pool: Tensor, ssm: Tensor, slots: Sequence[int], positions: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """States [N, H, V, K] and last raw inputs [N, 3D, W], zeros before a prompt's first token."""
    states, windows = ssm.new_zeros(len(slots), *ssm.shape[1:]), []
    for i, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if position:
            states[i] = ssm[slot]
        windows.append(conv_pool[slot] if position else torch.zeros_like(conv_pool[slot]))
    # fla-core keeps W inputs; the oldest is of no effect.
    return states, F.pad(torch.stack(windows).to(dtype), (1, 0))


@torch.no_grad()
def kda_prefill_fla(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Sequence[int], lengths: Sequence[int],
    positions: Sequence[int], lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op."""
    H, K, W = a_log.shape[0], onorm_w.shape[0], w_q.shape[1]
    D = H * K
    qkv, gate, f_a, b = proj[:, : 4 * D + K + H].split((3 * D, D, K, H), dim=1)
    bounds, host_bounds = _boundaries(tuple(lengths), proj.device)
    states, windows = _starts(conv_pool, ssm, slots, positions, proj.dtype)
    q, k, v = (
        causal_conv1d(
            x.unsqueeze(0), taps, initial_state=window, activation="silu", cu_seqlens=bounds,
            cu_seqlens_cpu=host_bounds,
        )[0].unflatten(-1, (H, K))
        for x, taps, window in zip(
            qkv.split(D, dim=1), (w_q, w_k, w_v), windows.split(D, dim=1), strict=True
        )
    )  # fmt: skip
    o, last = chunk_kda(
        q, k, v,
        g=(F.linear(f_a, w_fb) if g_ext is None else g_ext).reshape(1, -1, H, K),
        beta=b.unsqueeze(0),
        scale=scale,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=lower_bound >= SAFE_LOWER_BOUND,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=bounds,
        cu_seqlens_cpu=host_bounds,
        A_log=a_log,
        dt_bias=dt_bias,
    )  # fmt: skip
    for i, (slot, rows) in enumerate(zip(slots, qkv.split(list(lengths)), strict=True)):
        ssm[slot] = last[i]
        newest = rows[-(W - 1) :].T
        kept = W - 1 - newest.shape[1]
        conv_pool[slot] = torch.cat((windows[i, :, W - kept :], newest), dim=1).to(conv_pool.dtype)
    return rms_norm_gated(o[0], gate.reshape(-1, H, K), onorm_w, None, activation="sigmoid", eps=eps)
