# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` in Triton: one program per head and request, for any CUDA GPU and for Triton's interpreter.

Tokens sit in 16 rows, r = t for the key of token t and r = 8 + t for its query, so that the state is multiplied
once by [decayed keys | decayed queries]. Pairwise decays are exp(G_t - G_j) <= 1 throughout. The mathematics
is that of `cute.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 8
HEAD_DIM = 128


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _row(x, rows, index):
    """Row `index` of x [R, K]."""
    return tl.sum(tl.where((rows == index)[:, None], x, 0.0), axis=0)


@triton.jit
def _column(x, columns, index):
    """Column `index` of x [V, R]."""
    return tl.sum(tl.where((columns == index)[None, :], x, 0.0), axis=1)


@triton.jit
def replay(s, state_tok, plane_stride, draft_stride, keys, values, count):
    """S [V, K] after the first `count` records: fma(decay, S, vn bk), the product rounded first. No other is read.

    `state_tok` points at the slot's plane 0, draft 0, this head; `values` are the V rows of `s`.
    """
    for r in range(count):
        record = state_tok + r * draft_stride
        vn = tl.load(record + values)
        bk = tl.load(record + plane_stride + keys)
        decay = tl.load(record + 2 * plane_stride + keys)
        s = tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :])
    return s


@triton.jit
def _conv_silu(proj, row_stride, cache, column_stride, weight, channels, token, pending, num_tokens):
    """Activated inputs [R, K]. `proj` points at token 0, first channel; `cache` and `weight` at the first channel."""
    acc = tl.zeros([token.shape[0], channels.shape[0]], dtype=tl.float32)
    for tap in tl.static_range(4):
        index = token[:, None] - 3 + tap
        here = (index >= 0) & (index < num_tokens) & (channels[None, :] >= 0)
        fresh = tl.load(proj + index * row_stride + channels[None, :], mask=here, other=0.0).to(tl.float32)
        at = (pending + 3 + index) * column_stride + channels[None, :]
        past = tl.load(cache + at, mask=(index < 0) & (channels[None, :] >= 0), other=0.0)
        acc += tl.where(index < 0, past, fresh) * tl.load(weight + channels * 4 + tap)[None, :]
    return acc * _sigmoid(acc)


@triton.jit
def _store_window(proj, row_stride, cache, column_stride, channels, token, write, first, second):
    """Columns 0 and 1 are the inputs before the golden token; column 2 + t is token t."""
    mask = write[:, None] & (channels[None, :] >= 0)
    fresh = tl.load(proj + token[:, None] * row_stride + channels[None, :], mask=mask, other=0.0)
    tl.store(cache + channels, first)
    tl.store(cache + column_stride + channels, second)
    tl.store(
        cache + (2 + token)[:, None] * column_stride + channels[None, :], fresh.to(tl.float32), mask=mask
    )


@triton.jit
def _zero_rows(out, num_tokens, heads, rows, channels):
    at = rows[:, None] * (heads * channels.shape[0]) + channels[None, :]
    mask = (rows < num_tokens)[:, None] & (channels[None, :] >= 0)
    tl.store(out + at, tl.zeros([rows.shape[0], channels.shape[0]], dtype=out.dtype.element_ty), mask=mask)


@triton.jit
def _verify_kernel(
    proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, state_tok, slots, pending,
    g_ext, out,
    row_stride, q_slot, q_column, k_slot, k_column, v_slot, v_column, ssm_slot, tok_slot, plane_stride, draft_stride,
    slots_stride, pending_stride, g_stride, num_tokens, num_spec, lower_bound, scale, eps,
    HEADS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, HAS_G: tl.constexpr, CHUNKED: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, 2 * TOKENS)
    ch = tl.arange(0, K)
    token = rows % TOKENS
    is_key = rows < TOKENS
    first_row = n.to(tl.int64) * num_tokens
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    out_head = out + first_row * (HEADS * K) + h * K
    if slot < 0:
        _zero_rows(out_head, num_tokens, HEADS, rows, ch)
    else:
        D: tl.constexpr = HEADS * K
        p = tl.minimum(tl.maximum(tl.load(pending + slot * pending_stride), 0), num_spec)
        base = proj + first_row * row_stride + h * K
        conv_q, conv_k, conv_v = (
            cs_q + slot * q_slot + h * K,
            cs_k + slot * k_slot + h * K,
            cs_v + slot * v_slot + h * K,
        )
        state = ssm + slot * ssm_slot + h * (K * K) + ch[:, None] * K + ch[None, :]
        records = state_tok + slot * tok_slot + h * K

        s = replay(tl.load(state), records, plane_stride, draft_stride, ch, ch, p)

        q = _conv_silu(base, row_stride, conv_q, q_column, w_q + h * K * 4, ch, token, p, num_tokens)
        k = _conv_silu(base + D, row_stride, conv_k, k_column, w_k + h * K * 4, ch, token, p, num_tokens)
        v = _conv_silu(base + 2 * D, row_stride, conv_v, v_column, w_v + h * K * 4, ch, token, p, num_tokens)
        x = tl.where(is_key[:, None], k, q)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
        x = tl.where(is_key[:, None], x, x * scale)

        valid = token < num_tokens
        safe = (valid[:, None]) & (ch[None, :] >= 0)
        if HAS_G:
            at = (first_row + token)[:, None] * g_stride + (h * K + ch)[None, :]
            g = tl.load(g_ext + at, mask=safe, other=0.0).to(tl.float32)
        else:
            at = (first_row + token)[:, None] * row_stride + (4 * D + ch)[None, :]
            f_a = tl.load(proj + at, mask=safe, other=0.0)
            fb = tl.load(w_fb + (h * K + ch)[None, :] * K + ch[:, None])  # [key of f_a, channel]
            if WIDEN:
                f_a, fb = f_a.to(tl.float32), fb.to(tl.float32)
            g = (
                tl.dot(f_a, fb, out_dtype=tl.float32, input_precision="ieee")
                .to(proj.dtype.element_ty)
                .to(tl.float32)
            )
        rate = tl.exp(tl.load(a_log + h))
        log_decay = lower_bound * _sigmoid(rate * (g + tl.load(dt_bias + h * K + ch)[None, :]))
        beta = _sigmoid(
            tl.load(proj + (first_row + token) * row_stride + (4 * D + K) + h, mask=valid, other=0.0).to(
                tl.float32
            )
        )
        bk = x * beta[:, None]
        decay = tl.exp(log_decay)

        first_q, second_q = (
            tl.load(conv_q + (p + 1) * q_column + ch),
            tl.load(conv_q + (p + 2) * q_column + ch),
        )
        first_k, second_k = (
            tl.load(conv_k + (p + 1) * k_column + ch),
            tl.load(conv_k + (p + 2) * k_column + ch),
        )
        first_v, second_v = (
            tl.load(conv_v + (p + 1) * v_column + ch),
            tl.load(conv_v + (p + 2) * v_column + ch),
        )
        # Every thread has read windows and records before one overwrites them.
        tl.debug_barrier()
        write = is_key & valid
        _store_window(base, row_stride, conv_q, q_column, ch, token, write, first_q, second_q)
        _store_window(base + D, row_stride, conv_k, k_column, ch, token, write, first_k, second_k)
        _store_window(base + 2 * D, row_stride, conv_v, v_column, ch, token, write, first_v, second_v)
        drafts = write & (rows > 0)
        at = (token - 1)[:, None] * draft_stride + ch[None, :]
        tl.store(records + plane_stride + at, bk, mask=drafts[:, None] & (ch[None, :] >= 0))
        tl.store(records + 2 * plane_stride + at, decay, mask=drafts[:, None] & (ch[None, :] >= 0))

        vt = tl.trans(v)
        keep = is_key[None, :] & (ch[:, None] >= 0)
        if CHUNKED:
            total = tl.cumsum(log_decay, axis=0)
            total = tl.where(is_key[:, None], total, total - _row(total, rows, TOKENS - 1)[None, :])
            u = tl.dot(s, tl.trans(x * tl.exp(total)), input_precision=PRECISION)
            u = tl.where(keep, vt - u, u)
            vn = _column(u, rows, 0)
            s = tl.fma(
                tl.broadcast_to(_row(decay, rows, 0)[None, :], s.shape),
                s,
                vn[:, None] * _row(bk, rows, 0)[None, :],
            )
            tl.store(state, s)
            for j in tl.static_range(TOKENS):
                vn = _column(u, rows, j)
                pair = (
                    tl.exp(tl.minimum(total - _row(total, rows, j)[None, :], 0.0))
                    * _row(bk, rows, j)[None, :]
                )
                coef = tl.sum(x * pair, axis=1)
                reached = (is_key & (token > j)) | ((rows >= TOKENS) & (token >= j))
                coef = tl.where(is_key, -coef, coef)
                u = tl.where(reached[None, :] & (ch[:, None] >= 0), u + vn[:, None] * coef[None, :], u)
        else:
            u = tl.zeros([K, 2 * TOKENS], dtype=tl.float32)
            for t in range(num_tokens):
                d = _row(decay, rows, t)
                vn = _column(vt, rows, t) - tl.sum(s * (d * _row(x, rows, t))[None, :], axis=1)
                s = tl.fma(tl.broadcast_to(d[None, :], s.shape), s, vn[:, None] * _row(bk, rows, t)[None, :])
                o = tl.sum(s * _row(x, rows, TOKENS + t)[None, :], axis=1)
                u = tl.where((rows == t)[None, :], vn[:, None], u)
                u = tl.where((rows == TOKENS + t)[None, :], o[:, None], u)
                if t == 0:
                    tl.store(state, s)

        ut = tl.trans(u)
        at = (token - 1)[:, None] * draft_stride + ch[None, :]
        tl.store(records + at, ut, mask=drafts[:, None] & (ch[None, :] >= 0))
        o = ut.to(out.dtype.element_ty).to(tl.float32)
        o = o * tl.rsqrt(tl.sum(o * o, axis=1) / K + eps)[:, None] * tl.load(onorm_w + ch)[None, :]
        answers = (rows >= TOKENS) & valid
        mask = answers[:, None] & (ch[None, :] >= 0)
        gate = tl.load(base + 3 * D + token[:, None] * row_stride + ch[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        at = token[:, None] * (HEADS * K) + ch[None, :]
        tl.store(out_head + at, (o * _sigmoid(gate)).to(out.dtype.element_ty), mask=mask)


def k3_kda_verify_triton(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None = None, *, chunked: bool = True, precision: str = "tf32x3",
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op. `chunked` False runs token by token, for measurements."""
    N, H, K = slots.shape[0], a_log.shape[0], onorm_w.shape[0]
    out = torch.empty(proj.shape[0], H, K, dtype=proj.dtype, device=proj.device)
    _verify_kernel[(N, H)](
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, state_tok, slots, pending,
        proj if g_ext is None else g_ext, out,
        proj.stride(0), cs_q.stride(0), cs_q.stride(2), cs_k.stride(0), cs_k.stride(2), cs_v.stride(0),
        cs_v.stride(2), ssm.stride(0), state_tok.stride(0), state_tok.stride(1), state_tok.stride(2),
        slots.stride(0), pending.stride(0), 0 if g_ext is None else g_ext.stride(0),
        proj.shape[0] // N, num_spec, lower_bound, scale, eps,
        HEADS=H, K=K, TOKENS=MAX_TOKENS, HAS_G=g_ext is not None, CHUNKED=chunked, PRECISION=precision,
        # The interpreter multiplies the bit patterns of bf16 operands.
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=8,
    )  # fmt: skip
    return out
