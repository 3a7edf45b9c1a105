# SPDX-License-Identifier: Apache-2.0
"""`kda_mtp_decode` in CuTe DSL: `cute_body` with the drafts' inputs as history.

They lie in qkg (slots, M, 3, D), v (slots, M, D) and beta (slots, M, H), fp32. The pending ones are solved as
a chunk like the tokens: with S the pool's state, D_m the product of their decays and U = S (D_m k_m),
    vn_m = v_m - U_m - sum_{j<m} A[m,j] vn_j,      A[m,j] = (D_m k_m) . (beta_j k_j / D_j)
and (vn, beta k, decay), their records, are then replayed one by one, in the same fma as anywhere else.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify import cute_primitives as ptx
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.cute_body import (
    MAX_TOKENS,
    THREADS,
    WARPS,
    Extents,
    K,
    V,
    VerifyBody,
    fake_arguments,
    free_stride,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import MAX_DRAFTS
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.launch import ReplayConfig

# Floats between warps, and between groups of warps, in the memory for the coupling of drafts and its factors.
COUPLING_PITCH = 128
COEF = 64


class ReplayKernel(VerifyBody):
    """Traces `kda_mtp_decode` for one `ReplayConfig`."""

    keeps_innovations = False
    keeps_log_decay = True
    waits_between_passes = True
    loads_history_first = True

    @cute.jit
    def __call__(
        self,
        proj: cute.Tensor,
        w_fb: cute.Tensor,
        w_q: cute.Tensor,
        w_k: cute.Tensor,
        w_v: cute.Tensor,
        a_log: cute.Tensor,
        dt_bias: cute.Tensor,
        onorm_w: cute.Tensor,
        cs_q: cute.Tensor,
        cs_k: cute.Tensor,
        cs_v: cute.Tensor,
        ssm: cute.Tensor,
        qkg_cache: cute.Tensor,
        v_cache: cute.Tensor,
        beta_cache: cute.Tensor,
        slots: cute.Tensor,
        pending: cute.Tensor,
        g_ext: cute.Tensor | None,
        out: cute.Tensor,
        num_tokens: Int32,
        lower_bound: Float32,
        scale: Float32,
        eps: Float32,
        stream: CUstream,
    ):
        history = (qkg_cache, v_cache, beta_cache)
        arguments = (
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, history, slots,
            pending, g_ext, out, num_tokens, lower_bound, scale, eps,
        )  # fmt: skip
        self.launch(arguments, ssm, slots, stream)

    def pending_drafts(self, history, pending, slot):
        return cutlass.max(cutlass.min(pending[slot], history[0].shape[1]), Int32(0))

    def allocate_history(self, smem):
        """Rows of beta k, then of decays; by draft v, v less the partial U of another warp, and vn."""
        s_keys = smem.allocate_tensor(Float32, cute.make_layout((4, 2 * MAX_DRAFTS * 32)), 128)
        s_vn = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.v_pitch), 128)
        return s_keys, s_vn

    def overlay_history(self, s_history, smem, s_kinv, s_taps):
        """Decayed keys lie over the taps of q and k, each warp's over its own; beta k / D over k / D.

        An undivided head, whose memory is short, has the coupling over the taps of v, warp by warp as well.
        Four warps to a row exchange their sums apart.
        """
        s_decayed = cute.make_tensor(s_taps.iterator, cute.make_layout((4, 2 * K)))
        coupling = s_taps.iterator + 8 * K
        if self.split > 1:
            coupling = smem.allocate_tensor(Float32, cute.make_layout(WARPS * COUPLING_PITCH), 128).iterator
        s_coupling = cute.make_tensor(coupling, cute.make_layout(WARPS * COUPLING_PITCH))
        s_sums = s_kinv
        if self.k_warps == 4:
            s_sums = smem.allocate_tensor(Float32, cute.make_layout((4, WARPS * self.tiles * 32)), 128)
        return *s_history, s_decayed, s_kinv, s_coupling, s_sums

    @cute.jit
    def prefetch_history(self, history, slot, head, draft, channel):
        qkg, v_cache, _ = history
        if draft < qkg.shape[1]:
            for plane in cutlass.range_constexpr(1, 3):
                ptx.prefetch_line(qkg[slot, draft, plane, None].iterator + (head * K + channel))
            ptx.prefetch_line(v_cache[slot, draft, None].iterator + (head * V + channel))

    @cute.jit
    def load_history(self, history, s_history, slot, head, rank, pending, lane, warp):
        """This warp's channels of k and log decay, in whose place beta k and decay will lie; v for vn.

        Returns beta of the draft `lane`.
        """
        qkg, v_cache, beta_cache = history
        s_keys, s_vn = s_history[:2]
        for step in cutlass.range_constexpr(4):
            plane, draft = step // 2, step % 2 * 4 + lane // 8
            if draft < pending:
                row = qkg[slot, draft, 1 + plane, None].iterator
                target = (plane * MAX_DRAFTS + draft) * K + warp * 32 + lane % 8 * 4
                ptx.copy_16_bytes(s_keys.iterator + target, row + (head * K + warp * 32 + lane % 8 * 4))
        quarter = self.rows // 4
        for step in cutlass.range_constexpr(-(-MAX_DRAFTS * quarter // THREADS)):
            index = step * THREADS + warp * 32 + lane
            draft, at = index // quarter, index % quarter * 4
            if draft < pending:
                row = v_cache[slot, draft, None].iterator
                ptx.copy_16_bytes(
                    s_vn.iterator + (draft * self.v_pitch + at), row + (head * V + rank * self.rows + at)
                )
        beta = Float32(0.0)
        if lane < pending:
            beta = beta_cache[slot, lane, head]
        return beta

    @cute.jit
    def prepare_history(self, s_history, beta, pending, d, lane, warp):
        """What lies beyond `pending` is anything, and stays in its own columns."""
        s_keys, _, s_decayed, s_inverse, s_coupling, _ = s_history
        flat_keys = cute.make_tensor(s_keys.iterator, cute.make_layout(2 * MAX_DRAFTS * K))
        flat_decayed = cute.make_tensor(s_decayed.iterator, cute.make_layout(MAX_TOKENS * K))
        flat_inverse = cute.make_tensor(s_inverse.iterator, cute.make_layout(MAX_TOKENS * K))
        if pending > 0:
            cute.arch.sync_warp()  # the keys over D_t have been read
            total = Float32(1.0)
            for m in cutlass.range_constexpr(MAX_TOKENS):
                at = m * K + warp * 32 + lane
                key, beta_k, swizzled = Float32(0.0), Float32(0.0), lane ^ (16 * (m & 1))
                if cutlass.const_expr(m < MAX_DRAFTS):
                    key, decay = flat_keys[at], ptx.exp(flat_keys[MAX_DRAFTS * K + at])
                    beta_k = cute.arch.shuffle_sync(beta, offset=m) * key
                    total = total * decay
                    flat_keys[at], flat_keys[MAX_DRAFTS * K + at] = beta_k, decay
                flat_decayed[m // 4 * 512 + warp * 128 + m % 4 * 32 + swizzled] = total * key
                flat_inverse[m * K + warp * 32 + swizzled] = beta_k * cute.arch.rcp_approx(total)
            cute.arch.sync_warp()
            self._couple_drafts(s_decayed, s_inverse, s_coupling, warp, lane // 4, lane % 4)

    @cute.jit
    def _couple_drafts(self, s_decayed, s_inverse, s_coupling, warp, quad, col):
        """Decayed key of draft t against columns j over this warp's keys, into [warp][t][j]."""
        low_high, high_low, high_high = ptx.zeros(), ptx.zeros(), ptx.zeros()
        for block in cutlass.range_constexpr(2):
            swizzled = (block * 4 + col) ^ ((quad & 1) * 4)
            fk = s_decayed[None, self._decayed_row(quad) + warp * 32 + swizzled].load()
            fi = s_inverse[None, quad * 32 + warp * 8 + swizzled].load()
            for half in cutlass.range_constexpr(2):
                a = [ptx.split_tf32(fk[2 * half]), ptx.split_tf32(fk[2 * half + 1])]
                b = [ptx.split_tf32(fi[2 * half]), ptx.split_tf32(fi[2 * half + 1])]
                a_hi, a_lo = [[a[0][z], Int32(0), a[1][z], Int32(0)] for z in range(2)]
                b_hi, b_lo = [x[0] for x in b], [x[1] for x in b]
                low_high = ptx.mma_tf32(low_high, a_lo, b_hi)
                high_low = ptx.mma_tf32(high_low, a_hi, b_lo)
                high_high = ptx.mma_tf32(high_high, a_hi, b_hi)
        for i in cutlass.range_constexpr(2):
            at = warp * COUPLING_PITCH + quad * MAX_TOKENS + 2 * col + i
            s_coupling[at] = high_high[i] + (low_high[i] + high_low[i])

    def _decayed_row(self, draft):
        """First 16-byte chunk of a draft among decayed keys: [draft / 4][warp][draft % 4][8 chunks]."""
        return draft // 4 * 128 + draft % 4 * 8

    def replay(self, s, s_history, loaded, count, row, first_chunk, lane, warp, step):
        """Both groups of a pass wait here, whatever their count: what they exchange is used again later."""
        if step == 0:
            self._draft_coefficients(s_history, count, lane, warp)
        self._recompute(s, s_history, count, row, lane, warp)
        self._wait_for_row_sharers(warp)
        self._apply_records(s, s_history, count, row, first_chunk)

    def _wait_for_row_sharers(self, warp):
        cute.arch.barrier(barrier_id=1 + warp // self.k_warps, number_of_threads=32 * self.k_warps)

    @cute.jit
    def _draft_coefficients(self, s_history, count, lane, warp):
        """A[t, j] as [j][t], once for the warps that share rows."""
        s_coupling = s_history[4]
        index = warp % self.k_warps * 32 + lane
        if count > 0 and index < COEF:
            total = s_coupling[index]
            for w in cutlass.range_constexpr(1, WARPS):
                total = total + s_coupling[w * COUPLING_PITCH + index]
            s_coupling[self._coefficients_of(warp) + index % 8 * 8 + index // 8] = total

    def _coefficients_of(self, warp):
        return warp // self.k_warps * (self.k_warps * COUPLING_PITCH) + COEF

    @cute.jit
    def _recompute(self, s, s_history, count, row, lane, warp):
        """vn of the pending drafts for the rows of a pass: U by tensor cores, then forward substitution."""
        _, s_vn, s_decayed, _, s_coupling, s_sums = s_history
        key_group, col = warp % self.k_warps, lane % 4
        if count > 0:
            sums = self._project_drafts(s, s_decayed, key_group, lane // 4, col)
            mine_is_0 = key_group == 0
            at = [(2 * col + i % 2) * self.v_pitch + row + 8 * (i // 2) for i in range(4)]
            if cutlass.const_expr(self.k_warps == 2):
                for i in cutlass.range_constexpr(4):
                    other = at[i] + 16 * (1 - key_group)
                    s_vn[other] = s_vn[other] - ptx.select(mine_is_0, sums[1][i], sums[0][i])
            else:
                for tile in cutlass.range_constexpr(self.tiles):
                    ptx.store_vector(s_sums, (warp * self.tiles + tile) * 32 + lane, sums[tile])
            self._wait_for_row_sharers(warp)
            if key_group < self.tiles:
                u = [s_vn[at[i] + 16 * key_group] for i in range(4)]
                if cutlass.const_expr(self.k_warps == 2):
                    u = [u[i] - ptx.select(mine_is_0, sums[0][i], sums[1][i]) for i in range(4)]
                else:
                    for w in cutlass.range_constexpr(self.k_warps):
                        part = s_sums[None, (w * self.tiles + key_group) * 32 + lane].load()
                        u = [u[i] - part[i] for i in range(4)]
                first = self._coefficients_of(warp) + 2 * col
                # Selects, as for the tokens: a draft that is not finite must not reach earlier ones.
                for n in cutlass.range_constexpr(MAX_DRAFTS):
                    vn = [
                        cute.arch.shuffle_sync(u[2 * h + n % 2], offset=(lane & 28) + n // 2)
                        for h in range(2)
                    ]
                    for i in cutlass.range_constexpr(4):
                        after = 2 * col + i % 2 > n
                        factor = s_coupling[first + n * 8 + i % 2]
                        u[i] = ptx.select(after, u[i] - factor * vn[i // 2], u[i])
                for i in cutlass.range_constexpr(4):
                    s_vn[at[i] + 16 * key_group] = u[i]

    def _project_drafts(self, s, s_decayed, key_group, quad, col):
        """Partial U of this warp's keys, in 3xTF32: four sums of each tile, in fragment order."""
        sums = [[ptx.zeros() for _ in range(3)] for _ in range(self.tiles)]
        for block in range(self.key_blocks):
            chunk = self._decayed_row(quad) + (key_group * (self.key_blocks // 2) + block // 2) * 32
            fk = s_decayed[None, chunk + ((block % 2 * 4 + col) ^ ((quad & 1) * 4))].load()
            for half in range(2):
                b = [ptx.split_tf32(fk[2 * half]), ptx.split_tf32(fk[2 * half + 1])]
                b_hi, b_lo = [x[0] for x in b], [x[1] for x in b]
                for tile in range(self.tiles):
                    at = [self._at(tile, block, i % 2, 2 * half + i // 2) for i in range(4)]
                    a = [ptx.split_tf32(s[i]) for i in at]
                    a_hi, a_lo = [x[0] for x in a], [x[1] for x in a]
                    sums[tile][0] = ptx.mma_tf32(sums[tile][0], a_hi, b_lo)
                    sums[tile][1] = ptx.mma_tf32(sums[tile][1], a_lo, b_hi)
                    sums[tile][2] = ptx.mma_tf32(sums[tile][2], a_hi, b_hi)
        return [[part[2][i] + (part[0][i] + part[1][i]) for i in range(4)] for part in sums]

    @cute.jit
    def _apply_records(self, s, s_history, count, row, first_chunk):
        for r in cutlass.range(count, unroll=1):
            vn = [s_history[1][r * self.v_pitch + row + 8 * i] for i in range(2 * self.tiles)]
            self.apply_record(s, vn, s_history[0], r, MAX_DRAFTS + r, first_chunk)

    def share_keys(
        self, history, s_history, slot, head, kept, s_beta, s_part, s_q2, scale, num_tokens, lane, warp
    ):
        """An undivided head has read the history, and its registers are short: it stores inputs now."""
        if self.split == 1:
            norms = self.norms_by_lane(s_part, s_q2, scale, lane)
            q_norms, k_norms = [
                [cute.arch.shuffle_sync(norms, offset=z * MAX_TOKENS + n) for n in range(MAX_TOKENS)]
                for z in (1, 0)
            ]
            key = warp * 32 + lane
            self._store_inputs(history, slot, head, key, kept, q_norms, k_norms, s_beta, num_tokens)

    def store_keys(self, history, slot, head, key, kept, s_beta, s_norm, num_tokens):
        if self.split > 1:
            k_norms = [s_norm[n] for n in range(MAX_TOKENS)]
            q_norms = [s_norm[MAX_TOKENS + n] for n in range(MAX_TOKENS)]
            self._store_inputs(history, slot, head, key, kept, q_norms, k_norms, s_beta, num_tokens)

    @cute.jit
    def _store_inputs(self, history, slot, head, key, kept, q_norms, k_norms, s_beta, num_tokens):
        qkg, _, beta_cache = history
        qs, ks, _, log_decay = kept
        for n in cutlass.range_constexpr(1, MAX_TOKENS):
            if n < num_tokens:
                qkg[slot, n - 1, 0, head * K + key] = q_norms[n] * qs[n]
                qkg[slot, n - 1, 1, head * K + key] = k_norms[n] * ks[n]
                qkg[slot, n - 1, 2, head * K + key] = log_decay[n]
                if key == 0:
                    beta_cache[slot, n - 1, head] = s_beta[n]

    @cute.jit
    def store_rows(self, history, s_v, slot, head, rank, tid, num_tokens):
        quarter = self.rows // 4
        vectors = cute.make_tensor(s_v.iterator, cute.make_layout((4, MAX_TOKENS * self.v_pitch // 4)))
        for step in cutlass.range_constexpr(MAX_DRAFTS * quarter // THREADS + 1):
            index = step * THREADS + tid
            draft = index // quarter
            if draft + 1 < num_tokens:
                at = (draft + 1) * (self.v_pitch // 4) + index % quarter
                row_out = history[1][slot, draft, None]
                cute.make_tensor(row_out.iterator, cute.make_layout((4, history[1].shape[2] // 4)))[
                    None, (head * V + rank * self.rows) // 4 + index % quarter
                ].store(vectors[None, at].load())


def fake_caches(extents: Extents) -> tuple[Any, ...]:
    """Placeholders of qkg_cache, v_cache and beta_cache."""
    pool, drafts, width = extents.pool, extents.drafts, extents.width
    qkg_strides = (free_stride(4), free_stride(4), free_stride(4), 1)
    return (
        make_fake_tensor(Float32, (pool, drafts, 3, width), qkg_strides, assumed_align=16),
        make_fake_tensor(
            Float32, (pool, drafts, width), (free_stride(4), free_stride(4), 1), assumed_align=16
        ),
        make_fake_tensor(
            Float32, (pool, drafts, extents.heads), (free_stride(), free_stride(), 1), assumed_align=4
        ),
    )


def compile_replay(config: ReplayConfig, arch: str | None = None, options: str = "") -> Any:
    """The compiled launcher; call it with torch tensors and without the stream."""
    target = f" --gpu-arch {arch}" if arch else ""
    return cute.compile(
        ReplayKernel(config),
        *fake_arguments(config, fake_caches),
        options=f"--enable-tvm-ffi{target} {options}".strip(),
    )
