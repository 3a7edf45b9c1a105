# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` in Triton, for any CUDA GPU and for Triton's interpreter: three launches.

Programs cannot wait for each other, and a head's rows are too much for one, so the round is cut where parts
meet: `_prepare_kernel` per head (convolutions, gate, couplings, conv columns), `_state_kernel` per block of V
rows (replay, solve, golden state, vn), `_finish_kernel` per head (output norm, and the records that every
block of rows has read by then). What they hand on goes through scratch memory.

Tokens sit in 16 rows, r = t for the key of token t and r = 8 + t for its query, so the state is multiplied
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
    """S [V, K] after the first `count` records, alone read: fma(decay, S, vn bk), the product rounded first.

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
    """Activated inputs [R, K]; `proj` points at token 0, first channel,
    `cache` and `weight` at the latter."""
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
def _prepare_kernel(
    proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, cs_q, cs_k, cs_v, slots, pending, g_ext, operands, coefs,
    row_stride, q_slot, q_column, k_slot, k_column, v_slot, v_column, slots_stride, pending_stride, g_stride,
    num_tokens, num_spec, lower_bound, scale,
    HEADS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, HAS_G: tl.constexpr, CHUNKED: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Scratch of a head: operands [keys, queries, v, beta k, decays] as 40 rows of K, couplings [8 j,
    16 r]."""
    n, h = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    if slot >= 0:
        rows = tl.arange(0, 2 * TOKENS)
        ch = tl.arange(0, K)
        token = rows % TOKENS
        is_key = rows < TOKENS
        valid = token < num_tokens
        here = valid[:, None] & (ch[None, :] >= 0)
        first_row = n.to(tl.int64) * num_tokens
        D: tl.constexpr = HEADS * K
        p = tl.minimum(tl.maximum(tl.load(pending + slot * pending_stride), 0), num_spec)
        base = proj + first_row * row_stride + h * K
        conv_q = cs_q + slot * q_slot + h * K
        conv_k = cs_k + slot * k_slot + h * K
        conv_v = cs_v + slot * v_slot + h * K

        q = _conv_silu(base, row_stride, conv_q, q_column, w_q + h * K * 4, ch, token, p, num_tokens)
        k = _conv_silu(base + D, row_stride, conv_k, k_column, w_k + h * K * 4, ch, token, p, num_tokens)
        v = _conv_silu(base + 2 * D, row_stride, conv_v, v_column, w_v + h * K * 4, ch, token, p, num_tokens)
        x = tl.where(is_key[:, None], k, q)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
        x = tl.where(is_key[:, None], x, x * scale)

        if HAS_G:
            at = (first_row + token)[:, None] * g_stride + (h * K + ch)[None, :]
            g = tl.load(g_ext + at, mask=here, other=0.0).to(tl.float32)
        else:
            at = (first_row + token)[:, None] * row_stride + (4 * D + ch)[None, :]
            f_a = tl.load(proj + at, mask=here, other=0.0)
            fb = tl.load(w_fb + (h * K + ch)[None, :] * K + ch[:, None])  # [key of f_a, channel]
            if WIDEN:
                f_a, fb = f_a.to(tl.float32), fb.to(tl.float32)
            g = tl.dot(f_a, fb, out_dtype=tl.float32, input_precision="ieee")
            g = g.to(proj.dtype.element_ty).to(tl.float32)
        rate = tl.exp(tl.load(a_log + h))
        log_decay = lower_bound * _sigmoid(rate * (g + tl.load(dt_bias + h * K + ch)[None, :]))
        b = tl.load(proj + (first_row + token) * row_stride + (4 * D + K) + h, mask=valid, other=0.0)
        bk = x * _sigmoid(b.to(tl.float32))[:, None]

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
        # Every thread has read the windows before one overwrites them.
        tl.debug_barrier()
        write = is_key & valid
        _store_window(base, row_stride, conv_q, q_column, ch, token, write, first_q, second_q)
        _store_window(base + D, row_stride, conv_k, k_column, ch, token, write, first_k, second_k)
        _store_window(base + 2 * D, row_stride, conv_v, v_column, ch, token, write, first_v, second_v)

        scratch = operands + (n * HEADS + h) * (5 * TOKENS * K) + ch[None, :]
        keys_alone = is_key[:, None] & (ch[None, :] >= 0)
        tl.store(scratch + (2 * TOKENS + token)[:, None] * K, v, mask=keys_alone)
        tl.store(scratch + (3 * TOKENS + token)[:, None] * K, bk, mask=keys_alone)
        tl.store(scratch + (4 * TOKENS + token)[:, None] * K, tl.exp(log_decay), mask=keys_alone)
        if CHUNKED:
            # Two sums, so that a broken draft does not reach the queries of earlier tokens.
            keys_total = tl.cumsum(tl.where(is_key[:, None], log_decay, 0.0), axis=0)
            queries_total = tl.cumsum(tl.where(is_key[:, None], 0.0, log_decay), axis=0)
            total = tl.where(is_key[:, None], keys_total, queries_total)
            tl.store(scratch + rows[:, None] * K, x * tl.exp(total))
            for j in tl.static_range(TOKENS):
                pair = (
                    tl.exp(tl.minimum(total - _row(total, rows, j)[None, :], 0.0))
                    * _row(bk, rows, j)[None, :]
                )
                coef = tl.sum(x * pair, axis=1)
                at = ((n * HEADS + h) * TOKENS + j) * (2 * TOKENS) + rows
                tl.store(coefs + at, tl.where(is_key, -coef, coef))
        else:
            tl.store(scratch + rows[:, None] * K, x)


@triton.jit
def _state_kernel(
    ssm, state_tok, slots, pending, operands, coefs, o,
    ssm_slot, tok_slot, plane_stride, draft_stride, slots_stride, pending_stride, num_tokens, num_spec,
    HEADS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of V rows: replay, the tokens, the golden state; vn into the records, o into scratch [8, V]."""
    n, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    if slot >= 0:
        columns = tl.arange(0, 2 * TOKENS)
        ch = tl.arange(0, K)
        values = block * ROWS + tl.arange(0, ROWS)
        token = columns % TOKENS
        is_key = columns < TOKENS
        p = tl.minimum(tl.maximum(tl.load(pending + slot * pending_stride), 0), num_spec)
        state = ssm + slot * ssm_slot + h * (K * K) + values[:, None] * K + ch[None, :]
        records = state_tok + slot * tok_slot + h * K
        s = replay(tl.load(state), records, plane_stride, draft_stride, ch, values, p)

        head = operands + (n * HEADS + h) * (5 * TOKENS * K)
        v = tl.load(head + (2 * TOKENS + token)[None, :] * K + values[:, None])
        everywhere = values[:, None] >= 0
        if CHUNKED:
            x = tl.load(head + columns[None, :] * K + ch[:, None])
            u = tl.dot(s, x, input_precision=PRECISION)
            u = tl.where(is_key[None, :] & everywhere, v - u, u)
            vn = _column(u, columns, 0)
            decay = tl.load(head + 4 * TOKENS * K + ch)
            bk = tl.load(head + 3 * TOKENS * K + ch)
            tl.store(state, tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :]))
            for j in tl.static_range(TOKENS):
                vn = _column(u, columns, j)
                coef = tl.load(coefs + ((n * HEADS + h) * TOKENS + j) * (2 * TOKENS) + columns)
                reached = (is_key & (token > j)) | ((columns >= TOKENS) & (token >= j))
                u = tl.where(reached[None, :] & everywhere, u + vn[:, None] * coef[None, :], u)
        else:
            u = tl.zeros([ROWS, 2 * TOKENS], dtype=tl.float32)
            for t in range(num_tokens):
                decay = tl.load(head + (4 * TOKENS + t) * K + ch)
                bk = tl.load(head + (3 * TOKENS + t) * K + ch)
                key, query = tl.load(head + t * K + ch), tl.load(head + (TOKENS + t) * K + ch)
                vn = _column(v, columns, t) - tl.sum(s * (decay * key)[None, :], axis=1)
                s = tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :])
                u = tl.where((columns == t)[None, :], vn[:, None], u)
                u = tl.where((columns == TOKENS + t)[None, :], tl.sum(s * query[None, :], axis=1)[:, None], u)
                if t == 0:
                    tl.store(state, s)
        drafts = is_key & (token > 0) & (token < num_tokens)
        at = (token - 1)[None, :] * draft_stride + values[:, None]
        tl.store(records + at, u, mask=drafts[None, :] & everywhere)
        at = ((n * HEADS + h) * TOKENS + token)[None, :] * K + values[:, None]
        tl.store(o + at, u.to(o.dtype.element_ty), mask=(columns >= TOKENS)[None, :] & everywhere)


@triton.jit
def _finish_kernel(
    proj, onorm_w, state_tok, slots, operands, o, out,
    row_stride, tok_slot, plane_stride, draft_stride, slots_stride, num_tokens, eps,
    HEADS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    token = tl.arange(0, TOKENS)
    ch = tl.arange(0, K)
    valid = (token < num_tokens)[:, None] & (ch[None, :] >= 0)
    first_row = n.to(tl.int64) * num_tokens
    answer = out + first_row * (HEADS * K) + h * K + token[:, None] * (HEADS * K) + ch[None, :]
    if slot < 0:
        tl.store(answer, tl.zeros([TOKENS, K], dtype=out.dtype.element_ty), mask=valid)
    else:
        at = ((n * HEADS + h) * TOKENS + token)[:, None] * K + ch[None, :]
        y = tl.load(o + at).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) / K + eps)[:, None] * tl.load(onorm_w + ch)[None, :]
        gate = proj + (first_row + token)[:, None] * row_stride + (3 * HEADS * K + h * K + ch)[None, :]
        y = y * _sigmoid(tl.load(gate, mask=valid, other=0.0).to(tl.float32))
        tl.store(answer, y.to(out.dtype.element_ty), mask=valid)
        head = operands + (n * HEADS + h) * (5 * TOKENS * K) + token[:, None] * K + ch[None, :]
        records = state_tok + slot * tok_slot + h * K + (token - 1)[:, None] * draft_stride + ch[None, :]
        drafts = valid & (token > 0)[:, None]
        tl.store(records + plane_stride, tl.load(head + 3 * TOKENS * K), mask=drafts)
        tl.store(records + 2 * plane_stride, tl.load(head + 4 * TOKENS * K), mask=drafts)


def choose_rows(requests: int, heads: int) -> int:
    """V rows of a state program: few programs want small blocks, many fewer loads of the shared operands."""
    return 16 if requests * heads <= 24 else 32


def k3_kda_verify_triton(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None = None, *, chunked: bool = True, precision: str = "tf32x3", rows: int = 0,
    warps: int = 4,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op.

    For measurements: `chunked` False runs token by token; `rows` (of V,
    per program) and `warps` set the launch.
    """
    N, H, K = slots.shape[0], a_log.shape[0], onorm_w.shape[0]
    T = proj.shape[0] // N
    out = torch.empty(proj.shape[0], H, K, dtype=proj.dtype, device=proj.device)
    operands = torch.empty(N, H, 5 * MAX_TOKENS, K, dtype=torch.float32, device=proj.device)
    coefs = torch.empty(N, H, MAX_TOKENS, 2 * MAX_TOKENS, dtype=torch.float32, device=proj.device)
    o = torch.empty(N, H, MAX_TOKENS, K, dtype=proj.dtype, device=proj.device)
    caches = (cs_q.stride(0), cs_q.stride(2), cs_k.stride(0), cs_k.stride(2), cs_v.stride(0), cs_v.stride(2))
    token_strides = state_tok.stride()[:3]
    _prepare_kernel[(N, H)](
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, cs_q, cs_k, cs_v, slots, pending,
        proj if g_ext is None else g_ext, operands, coefs,
        proj.stride(0), *caches, slots.stride(0), pending.stride(0), 0 if g_ext is None else g_ext.stride(0),
        T, num_spec, lower_bound, scale,
        HEADS=H, K=K, TOKENS=MAX_TOKENS, HAS_G=g_ext is not None, CHUNKED=chunked,
        # The interpreter multiplies the bit patterns of bf16 operands.
        WIDEN=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    rows = rows or choose_rows(N, H)
    _state_kernel[(N, H, K // rows)](
        ssm, state_tok, slots, pending, operands, coefs, o,
        ssm.stride(0), *token_strides, slots.stride(0), pending.stride(0), T, num_spec,
        HEADS=H, K=K, TOKENS=MAX_TOKENS, ROWS=rows, CHUNKED=chunked, PRECISION=precision, num_warps=warps,
    )  # fmt: skip
    _finish_kernel[(N, H)](
        proj, onorm_w, state_tok, slots, operands, o, out,
        proj.stride(0), *token_strides, slots.stride(0), T, eps,
        HEADS=H, K=K, TOKENS=MAX_TOKENS, num_warps=4,
    )  # fmt: skip
    return out
