# SPDX-License-Identifier: Apache-2.0
"""A verify round of any scheme in Triton in one launch: a program owns a request's head.

It starts the loads of the state, prepares the tokens (convolutions, norms, gate, couplings), takes the state
through replay and chunk in blocks of V rows, and ends with the output's norm, which needs all of them. What
changes its layout in between goes through scratch memory that the program alone reads: rows v, beta k, log
decay, o and x, and couplings [8 j, 16 r]. The mathematics and the 16 rows of tokens are those of `triton.py`,
which cuts the round into three launches; pairwise decays are sums of log decays, so that no row is extracted
across warps.

KEEPS says what is kept of the drafts: "records", "inputs" or "states".
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.triton import (
    HEAD_DIM,
    MAX_TOKENS,
    _column,
    _sigmoid,
    _store_window,
)

SCRATCH_ROWS = 7 * MAX_TOKENS  # v, beta k, log decay, o, x in 16 rows, couplings in one of the last 8
REPLAY_STAGES = tl.constexpr(3)


@triton.jit
def replay_records(s, state_tok, plane_stride, draft_stride, keys, values, count):
    """`triton.replay`, the next records being loaded meanwhile."""
    for r in tl.range(count, num_stages=REPLAY_STAGES):
        record = state_tok + r * draft_stride
        vn = tl.load(record + values)
        bk = tl.load(record + plane_stride + keys)
        decay = tl.load(record + 2 * plane_stride + keys)
        s = tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :])
    return s


@triton.jit
def replay_inputs(s, qkg, qkg_draft, plane_stride, v, v_draft, beta, beta_draft, keys, values, count):
    """S [V, K] after the first `count` drafts, alone read, computed again from their inputs.

    The pointers are at the slot's draft 0, this head; `values` are the V rows of `s`. Each draft does
    vn = v - S (decay k) and then what `replay_records` does with its record.
    """
    for r in tl.range(count, num_stages=REPLAY_STAGES):
        inputs = qkg + r * qkg_draft + keys
        k = tl.load(inputs + plane_stride)
        decay = tl.exp(tl.load(inputs + 2 * plane_stride))
        vn = tl.load(v + r * v_draft + values) - tl.sum(s * (decay * k)[None, :], axis=1)
        bk = tl.load(beta + r * beta_draft) * k
        s = tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :])
    return s


@triton.jit
def _conv(
    rows, row_stride, cache_a, column_a, w_a, cache_b, column_b, w_b, section, in_a, ch, token, pending,
    num_tokens,
):  # fmt: skip
    """Activated inputs [R, K] of two sections at once: rows with `in_a` of the first, the others of the
    second, `section` channels further on. `rows` points at token 0, the head's first channel of the first."""
    acc = tl.zeros([token.shape[0], ch.shape[0]], dtype=tl.float32)
    first = (token * row_stride + tl.where(in_a, 0, section))[:, None] + ch[None, :]
    for tap in tl.static_range(4):
        index = token - 3 + tap
        here = (index >= 0) & (index < num_tokens)
        x = tl.load(rows + first + (tap - 3) * row_stride, mask=here[:, None], other=0.0).to(tl.float32)
        back = pending + 3 + index
        past_a = ((index < 0) & in_a)[:, None]
        past_b = ((index < 0) & (in_a == 0))[:, None]
        at = cache_a + back[:, None] * column_a + ch[None, :]
        x += tl.load(at, mask=past_a, other=0.0).to(tl.float32)
        at = cache_b + back[:, None] * column_b + ch[None, :]
        x += tl.load(at, mask=past_b, other=0.0).to(tl.float32)
        taps_a, taps_b = tl.load(w_a + ch * 4 + tap), tl.load(w_b + ch * 4 + tap)
        acc += x * tl.where(in_a[:, None], taps_a[None, :], taps_b[None, :])
    return acc * _sigmoid(acc)


@triton.jit
def _couple(x, is_key, token, rows, head, ch, TOKENS: tl.constexpr, K: tl.constexpr):
    """x [16, K] decayed since the round's start; couplings with the tokens before into the head's scratch."""
    total = tl.zeros(x.shape, dtype=tl.float32)
    for j in tl.static_range(TOKENS):
        log_decay = tl.load(head + (2 * TOKENS + j) * K + ch)
        # A sum of selected rows: a broken draft does not reach the tokens before it.
        total += tl.where((token >= j)[:, None], log_decay[None, :], 0.0)
    until = tl.zeros([K], dtype=tl.float32)
    for j in tl.static_range(TOKENS):
        until += tl.load(head + (2 * TOKENS + j) * K + ch)
        bk = tl.load(head + (TOKENS + j) * K + ch)
        coef = tl.sum(x * (tl.exp(tl.minimum(total - until[None, :], 0.0)) * bk[None, :]), axis=1)
        tl.store(head + 6 * TOKENS * K + j * (2 * TOKENS) + rows, tl.where(is_key, -coef, coef))
    return x * tl.exp(total)


@triton.jit
def _solve(u, head, columns, token, is_key, everywhere, TOKENS: tl.constexpr, K: tl.constexpr):
    """vn and o in the columns of u [V, 16], from v - S k and S q there."""
    for j in tl.static_range(TOKENS):
        vn = _column(u, columns, j)
        coef = tl.load(head + 6 * TOKENS * K + j * (2 * TOKENS) + columns)
        reached = (is_key & (token > j)) | ((columns >= TOKENS) & (token >= j))
        u = tl.where(reached[None, :] & everywhere, u + vn[:, None] * coef[None, :], u)
    return u


@triton.jit
def _keep_draft_rows(
    kept, draft_stride, plane_stride, kept_v, v_draft, kept_beta, beta_draft, head, proj_b, row_stride,
    drafts, token, ch, TOKENS: tl.constexpr, K: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Of the drafts, what does not depend on the state: rows [8, K] from scratch; pointers at draft 0."""
    mask = drafts[:, None] & (ch[None, :] >= 0)
    row = head + token[:, None] * K + ch[None, :]
    at = (token - 1)[:, None] * draft_stride + ch[None, :]
    log_decay = tl.load(row + 2 * TOKENS * K)
    if KEEPS == "records":
        tl.store(kept + plane_stride + at, tl.load(row + TOKENS * K), mask=mask)
        tl.store(kept + 2 * plane_stride + at, tl.exp(log_decay), mask=mask)
    else:
        tl.store(kept + at, tl.load(row + 5 * TOKENS * K), mask=mask)
        tl.store(kept + plane_stride + at, tl.load(row + 4 * TOKENS * K), mask=mask)
        tl.store(kept + 2 * plane_stride + at, log_decay, mask=mask)
        tl.store(kept_v + (token - 1)[:, None] * v_draft + ch[None, :], tl.load(row), mask=mask)
        beta = _sigmoid(tl.load(proj_b + token * row_stride, mask=drafts, other=0.0).to(tl.float32))
        tl.store(kept_beta + (token - 1) * beta_draft, beta, mask=drafts)


@triton.jit
def _round_kernel(
    proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, kept, kept_v, kept_beta, slots,
    pending, g_ext, scratch, out,
    row_stride, q_slot, q_column, k_slot, k_column, v_slot, v_column, ssm_slot, kept_slot, draft_stride,
    plane_stride, kept_v_slot, v_draft, beta_slot, beta_draft, slots_stride, pending_stride, g_stride,
    num_tokens, num_spec, lower_bound, scale, eps,
    HEADS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEEPS: tl.constexpr,
    HAS_G: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    eight = tl.arange(0, TOKENS)
    ch = tl.arange(0, K)
    D: tl.constexpr = HEADS * K
    first_row = n.to(tl.int64) * num_tokens
    base = proj + first_row * row_stride + h * K
    valid = (eight < num_tokens)[:, None] & (ch[None, :] >= 0)
    answer = out + first_row * D + h * K + eight[:, None] * D + ch[None, :]
    if slot < 0:
        tl.store(answer, tl.zeros([TOKENS, K], dtype=out.dtype.element_ty), mask=valid)
    else:
        p = 0
        if KEEPS != "states":
            p = tl.minimum(tl.maximum(tl.load(pending + slot * pending_stride), 0), num_spec)
        block_rows = tl.arange(0, ROWS)
        state = ssm + slot * ssm_slot + h * (K * K) + block_rows[:, None] * K + ch[None, :]
        # In flight while the tokens are prepared.
        following = tl.load(state)

        rows = tl.arange(0, 2 * TOKENS)
        token, is_key = rows % TOKENS, rows < TOKENS
        here = (token < num_tokens)[:, None] & (ch[None, :] >= 0)
        conv_q = cs_q + slot * q_slot + h * K
        conv_k = cs_k + slot * k_slot + h * K
        conv_v = cs_v + slot * v_slot + h * K
        taps_q, taps_k, taps_v = w_q + h * K * 4, w_k + h * K * 4, w_v + h * K * 4
        x = _conv(
            base, row_stride, conv_q, q_column, taps_q, conv_k, k_column, taps_k, D, is_key == 0, ch, token,
            p, num_tokens,
        )  # fmt: skip
        v = _conv(
            base + 2 * D, row_stride, conv_v, v_column, taps_v, conv_v, v_column, taps_v, 0, eight >= 0, ch,
            eight, p, num_tokens,
        )  # fmt: skip
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
        proj_b = proj + first_row * row_stride + (4 * D + K) + h
        b = tl.load(proj_b + token * row_stride, mask=token < num_tokens, other=0.0).to(tl.float32)
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

        head = scratch + (n * HEADS + h) * (7 * TOKENS * K)
        keys_alone = is_key[:, None] & (ch[None, :] >= 0)
        tl.store(head + eight[:, None] * K + ch[None, :], v)
        tl.store(
            head + (TOKENS + token)[:, None] * K + ch[None, :], x * _sigmoid(b)[:, None], mask=keys_alone
        )
        tl.store(head + (2 * TOKENS + token)[:, None] * K + ch[None, :], log_decay, mask=keys_alone)
        if KEEPS == "inputs":
            tl.store(head + (4 * TOKENS + rows)[:, None] * K + ch[None, :], x)
        # Every thread has read the windows before one overwrites them, and scratch is written.
        tl.debug_barrier()
        write = eight < num_tokens
        _store_window(base, row_stride, conv_q, q_column, ch, eight, write, first_q, second_q)
        _store_window(base + D, row_stride, conv_k, k_column, ch, eight, write, first_k, second_k)
        _store_window(base + 2 * D, row_stride, conv_v, v_column, ch, eight, write, first_v, second_v)
        operands = tl.trans(_couple(x, is_key, token, rows, head, ch, TOKENS, K))
        tl.debug_barrier()

        drafts = (token > 0) & is_key & (token < num_tokens)
        golden_bk = tl.load(head + TOKENS * K + ch)
        golden_decay = tl.exp(tl.load(head + 2 * TOKENS * K + ch))
        kept_here = kept + slot * kept_slot
        for block in range(K // ROWS):
            s = following
            values = block * ROWS + block_rows
            if ROWS < K:
                next_values = (values + ROWS)[:, None]
                following = tl.load(state + (block + 1) * ROWS * K, mask=next_values < K, other=0.0)
            if KEEPS == "records":
                s = replay_records(s, kept_here + h * K, plane_stride, draft_stride, ch, values, p)
            elif KEEPS == "inputs":
                s = replay_inputs(
                    s, kept_here + h * K, draft_stride, plane_stride, kept_v + slot * kept_v_slot + h * K,
                    v_draft, kept_beta + slot * beta_slot + h, beta_draft, ch, values, p,
                )  # fmt: skip
            everywhere = values[:, None] >= 0
            u = tl.dot(s, operands, input_precision="tf32x3")
            v_rows = tl.load(head + token[None, :] * K + values[:, None])
            u = tl.where(is_key[None, :] & everywhere, v_rows - u, u)
            vn = _column(u, rows, 0)
            s = tl.fma(tl.broadcast_to(golden_decay[None, :], s.shape), s, vn[:, None] * golden_bk[None, :])
            tl.store(state + block * ROWS * K, s)
            u = _solve(u, head, rows, token, is_key, everywhere, TOKENS, K)
            o_at = (3 * TOKENS + token)[None, :] * K + values[:, None]
            rounded = u.to(out.dtype.element_ty).to(tl.float32)
            tl.store(head + o_at, rounded, mask=(rows >= TOKENS)[None, :] & everywhere)
            if KEEPS == "records":
                # Every thread has replayed the old records before one overwrites them.
                tl.debug_barrier()
                vn_at = (token - 1)[None, :] * draft_stride + values[:, None]
                tl.store(kept_here + h * K + vn_at, u, mask=drafts[None, :] & everywhere)
            elif KEEPS == "states":
                target = kept_here + h * (K * K) + values[:, None] * K + ch[None, :]
                for t in range(1, num_tokens):
                    decay = tl.exp(tl.load(head + (2 * TOKENS + t) * K + ch))
                    bk = tl.load(head + (TOKENS + t) * K + ch)
                    vn = _column(u, rows, t)
                    s = tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :])
                    tl.store(target + (t - 1) * draft_stride, s)

        tl.debug_barrier()
        y = tl.load(head + (3 * TOKENS + eight)[:, None] * K + ch[None, :])
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) / K + eps)[:, None] * tl.load(onorm_w + ch)[None, :]
        gate = tl.load(base + 3 * D + eight[:, None] * row_stride + ch[None, :], mask=valid, other=0.0)
        tl.store(answer, (y * _sigmoid(gate.to(tl.float32))).to(out.dtype.element_ty), mask=valid)
        if KEEPS != "states":
            _keep_draft_rows(
                kept_here + h * K, draft_stride, plane_stride, kept_v + slot * kept_v_slot + h * K, v_draft,
                kept_beta + slot * beta_slot + h, beta_draft, head, proj_b, row_stride,
                (eight > 0) & (eight < num_tokens), eight, ch, TOKENS, K, KEEPS,
            )  # fmt: skip


# Shared memory of a program whose blocks are whole heads is 144 KiB; with 64 rows it is 80 KiB.
_WHOLE_HEAD_BYTES = 147_456


def _rows_that_fit(device: torch.device) -> int:
    """V rows of a block: a whole head in registers has the shortest chain, where shared memory allows it."""
    if device.type != "cuda":
        return HEAD_DIM
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return HEAD_DIM if properties["max_shared_mem"] >= _WHOLE_HEAD_BYTES else HEAD_DIM // 2


def verify_round(
    keeps: str, proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
    dt_bias: Tensor, onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor,
    drafts: tuple[Tensor, ...], slots: Tensor, pending: Tensor | None, num_spec: int, lower_bound: float,
    scale: float, eps: float, g_ext: Tensor | None, *, rows: int, warps: int,
) -> Tensor:  # fmt: skip
    """The round of the op whose caches of drafts are `drafts`; see the ops.

    `rows` (of V, a block; 0: as many as fit) and `warps` set the launch.
    """
    N, H, K = slots.shape[0], a_log.shape[0], onorm_w.shape[0]
    out = torch.empty(proj.shape[0], H, K, dtype=proj.dtype, device=proj.device)
    scratch = torch.empty(N, H, SCRATCH_ROWS, K, dtype=torch.float32, device=proj.device)
    kept, kept_v, kept_beta = drafts if keeps == "inputs" else (drafts[0],) * 3
    slot_stride, *strides = kept.stride()
    draft_stride, plane_stride = {
        "records": (strides[1], strides[0]),
        "inputs": (strides[0], strides[1]),
        "states": (strides[0], 0),
    }[keeps]
    _round_kernel[(N, H)](
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, kept, kept_v, kept_beta,
        slots, slots if pending is None else pending, proj if g_ext is None else g_ext, scratch, out,
        proj.stride(0), cs_q.stride(0), cs_q.stride(2), cs_k.stride(0), cs_k.stride(2), cs_v.stride(0),
        cs_v.stride(2), ssm.stride(0), slot_stride, draft_stride, plane_stride, *kept_v.stride()[:2],
        *kept_beta.stride()[:2], slots.stride(0), 0 if pending is None else pending.stride(0),
        0 if g_ext is None else g_ext.stride(0), proj.shape[0] // N, num_spec, lower_bound, scale, eps,
        HEADS=H, K=K, TOKENS=MAX_TOKENS, ROWS=rows or _rows_that_fit(proj.device), KEEPS=keeps,
        HAS_G=g_ext is not None,
        # The interpreter multiplies the bit patterns of bf16 operands.
        WIDEN=triton.knobs.runtime.interpret, num_warps=warps,
    )  # fmt: skip
    return out


def k3_kda_verify_one_launch(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None = None, *, rows: int = 0, warps: int = 8,
) -> Tensor:  # fmt: skip
    """`k3_kda_verify` in one launch, to be measured beside the three of `triton.py`, the op's form."""
    return verify_round(
        "records", proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, (state_tok,),
        slots, pending, num_spec, lower_bound, scale, eps, g_ext, rows=rows, warps=warps,
    )  # fmt: skip
