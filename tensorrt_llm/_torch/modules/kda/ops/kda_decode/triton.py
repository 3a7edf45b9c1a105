# SPDX-License-Identifier: Apache-2.0
"""`kda_decode` in Triton, for any CUDA GPU and for Triton's interpreter: three launches.

Programs cannot wait for each other, so the step is cut where parts meet: `_prepare_kernel` per head
(convolutions, gate, conv window), `_state_kernel` per block of V rows (the state, read once and written
once), `_finish_kernel` per head (output norm and gate). What they hand on goes through scratch memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of K floats that `_prepare_kernel` hands on: decay * key, query, decay, beta * key, v.
OPERANDS = 5


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _conv_silu(proj, window, column_stride, weight):
    """Activated inputs [K] of one section; moves its window by a column. Pointers are to its channels."""
    first, second = tl.load(window), tl.load(window + column_stride)
    third, fresh = tl.load(window + 2 * column_stride), tl.load(proj)
    acc = first.to(tl.float32) * tl.load(weight) + second.to(tl.float32) * tl.load(weight + 1)
    acc += third.to(tl.float32) * tl.load(weight + 2) + fresh.to(tl.float32) * tl.load(weight + 3)
    # Every thread has read the window before one overwrites it.
    tl.debug_barrier()
    tl.store(window, second)
    tl.store(window + column_stride, third)
    tl.store(window + 2 * column_stride, fresh.to(window.dtype.element_ty))
    return acc * _sigmoid(acc)


@triton.jit
def _prepare_kernel(
    proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, conv_pool, slots, g_ext, operands,
    row_stride, pool_slot, pool_channel, pool_column, slots_stride, g_stride, lower_bound, scale,
    HEADS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, HAS_G: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    if slot >= 0:
        D: tl.constexpr = HEADS * K
        ch = tl.arange(0, K)
        channel = h * K + ch
        row = proj + n * row_stride
        window = conv_pool + slot * pool_slot + channel * pool_channel
        section = D * pool_channel
        q = _conv_silu(row + channel, window, pool_column, w_q + channel * 4)
        k = _conv_silu(row + D + channel, window + section, pool_column, w_k + channel * 4)
        v = _conv_silu(row + 2 * D + channel, window + 2 * section, pool_column, w_v + channel * 4)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        rate = tl.exp(tl.load(a_log + h))
        beta = _sigmoid(tl.load(row + (4 * D + K) + h).to(tl.float32))
        head = operands + (n * HEADS + h) * (OPERANDS * K)
        tl.store(head + K + ch, q)
        tl.store(head + 3 * K + ch, beta * k)
        tl.store(head + 4 * K + ch, v)
        if HAS_G:
            g = tl.load(g_ext + n * g_stride + channel).to(tl.float32)
            decay = tl.exp(lower_bound * _sigmoid(rate * (g + tl.load(dt_bias + channel))))
            tl.store(head + ch, decay * k)
            tl.store(head + 2 * K + ch, decay)
        else:
            tl.store(head + ch, k)
            # Its own keys, written by other threads.
            tl.debug_barrier()
            f_a = tl.load(row + 4 * D + ch).to(tl.float32)
            for block in tl.static_range(K // ROWS):
                at = block * ROWS + tl.arange(0, ROWS)
                fb = tl.load(w_fb + (h * K + at)[:, None] * K + ch[None, :]).to(tl.float32)
                g = tl.sum(fb * f_a[None, :], axis=1).to(proj.dtype.element_ty).to(tl.float32)
                decay = tl.exp(lower_bound * _sigmoid(rate * (g + tl.load(dt_bias + h * K + at))))
                tl.store(head + at, decay * tl.load(head + at))
                tl.store(head + 2 * K + at, decay)


@triton.jit
def _state_kernel(
    ssm, slots, operands, o, ssm_slot, slots_stride,
    HEADS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of V rows: vn = v - S (d k), S = fma(d, S, vn (beta k)), o = S q into scratch [V]."""
    n, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    if slot >= 0:
        ch = tl.arange(0, K)
        values = block * ROWS + tl.arange(0, ROWS)
        state = ssm + slot * ssm_slot + h * (K * K) + values[:, None] * K + ch[None, :]
        s = tl.load(state)
        head = operands + (n * HEADS + h) * (OPERANDS * K)
        key, query = tl.load(head + ch), tl.load(head + K + ch)
        decay, bk = tl.load(head + 2 * K + ch), tl.load(head + 3 * K + ch)
        vn = tl.load(head + 4 * K + values) - tl.sum(s * key[None, :], axis=1)
        s = tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :])
        tl.store(state, s)
        at = o + (n * HEADS + h) * K + values
        tl.store(at, tl.sum(s * query[None, :], axis=1).to(o.dtype.element_ty))


@triton.jit
def _finish_kernel(
    proj, onorm_w, slots, o, out, row_stride, slots_stride, eps, HEADS: tl.constexpr, K: tl.constexpr
):
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    ch = tl.arange(0, K)
    answer = out + (n * HEADS + h) * K + ch
    if slot < 0:
        tl.store(answer, tl.zeros([K], dtype=out.dtype.element_ty))
    else:
        y = tl.load(o + (n * HEADS + h) * K + ch).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, axis=0) / K + eps) * tl.load(onorm_w + ch)
        gate = tl.load(proj + n * row_stride + 3 * HEADS * K + h * K + ch).to(tl.float32)
        tl.store(answer, (y * _sigmoid(gate)).to(out.dtype.element_ty))


def choose_rows(requests: int, heads: int) -> int:
    """V rows of a state program: few programs want small blocks."""
    return 16 if requests * heads <= 48 else 32


def kda_decode_triton(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Tensor, lower_bound: float, scale: float,
    eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op."""
    N, H, K = slots.shape[0], a_log.shape[0], onorm_w.shape[0]
    out = torch.empty(N, H, K, dtype=proj.dtype, device=proj.device)
    o = torch.empty_like(out)
    operands = torch.empty(N, H, OPERANDS, K, dtype=torch.float32, device=proj.device)
    _prepare_kernel[(N, H)](
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, conv_pool, slots, proj if g_ext is None else g_ext,
        operands, proj.stride(0), *conv_pool.stride(), slots.stride(0),
        0 if g_ext is None else g_ext.stride(0), lower_bound, scale,
        HEADS=H, K=K, ROWS=32, HAS_G=g_ext is not None, num_warps=4,
    )  # fmt: skip
    rows = choose_rows(N, H)
    _state_kernel[(N, H, K // rows)](
        ssm, slots, operands, o, ssm.stride(0), slots.stride(0), HEADS=H, K=K, ROWS=rows, num_warps=4
    )
    _finish_kernel[(N, H)](
        proj, onorm_w, slots, o, out, proj.stride(0), slots.stride(0), eps, HEADS=H, K=K, num_warps=4
    )
    return out
