# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` in CuTe DSL: `cute_body` with the drafts' records as history, (slots, 3, M, H, K) fp32."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify import cute_primitives as ptx
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.cute_body import (
    MAX_TOKENS,
    THREADS,
    Extents,
    K,
    V,
    VerifyBody,
    fake_arguments,
    free_stride,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import MAX_DRAFTS, VerifyConfig


class VerifyKernel(VerifyBody):
    """Traces `k3_kda_verify` for one `VerifyConfig`."""

    has_serial_form = True

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
        state_tok: cute.Tensor,
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
        arguments = (
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, (state_tok,), slots,
            pending, g_ext, out, num_tokens, lower_bound, scale, eps,
        )  # fmt: skip
        self.launch(arguments, ssm, slots, stream)

    def pending_drafts(self, history, pending, slot):
        return cutlass.max(cutlass.min(pending[slot], history[0].shape[2]), Int32(0))

    def allocate_history(self, smem):
        return (smem.allocate_tensor(Float32, cute.make_layout((4, 3 * MAX_DRAFTS * 32)), 128),)

    @cute.jit
    def prefetch_history(self, history, slot, head, draft, channel):
        state_tok = history[0]
        if draft < state_tok.shape[2]:
            for plane in cutlass.range_constexpr(3):
                ptx.prefetch_line(state_tok[slot, plane, draft, head, None].iterator + channel)

    @cute.jit
    def load_history(self, history, s_history, slot, head, rank, pending, lane, warp):
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
        )
        chunks = Int32(K // 4)
        first = Int32(0)
        if warp == 0:
            chunks = Int32(self.rows // 4)
            first = rank * (self.rows // 4)
        for j in cutlass.range_constexpr(MAX_DRAFTS):
            if j < pending and warp < 3 and lane < chunks:
                record = history[0][slot, warp, j, head, None]
                source = cute.make_tensor(record.iterator, cute.make_layout((4, K // 4)))
                cute.copy(
                    atom, source[None, first + lane], s_history[0][None, (warp * MAX_DRAFTS + j) * 32 + lane]
                )

    @cute.jit
    def replay(self, s, s_history, loaded, count, row, first_chunk, lane, warp, step):
        innovations = cute.make_tensor(s_history[0].iterator, cute.make_layout(MAX_DRAFTS * K))
        for r in cutlass.range(count, unroll=1):
            vn = [
                innovations[r * K + row + 16 * tile + 8 * half]
                for tile in range(self.tiles)
                for half in range(2)
            ]
            self.apply_record(s, vn, s_history[0], MAX_DRAFTS + r, 2 * MAX_DRAFTS + r, first_chunk)

    @cute.jit
    def store_keys(self, history, slot, head, key, kept, s_beta, s_norm, num_tokens):
        _, ks, d, _ = kept
        for n in cutlass.range_constexpr(1, MAX_TOKENS):
            if n < num_tokens:
                history[0][slot, 1, n - 1, head, key] = s_beta[n] * s_norm[n] * ks[n]
                history[0][slot, 2, n - 1, head, key] = d[n]

    @cute.jit
    def store_rows(self, history, s_v, slot, head, rank, tid, num_tokens):
        quarter = self.rows // 4
        vectors = cute.make_tensor(s_v.iterator, cute.make_layout((4, MAX_TOKENS * self.v_pitch // 4)))
        for step in cutlass.range_constexpr(MAX_DRAFTS * quarter // THREADS + 1):
            index = step * THREADS + tid
            record = index // quarter
            if record + 1 < num_tokens:
                at = (record + 1) * (self.v_pitch // 4) + index % quarter
                row_out = history[0][slot, 0, record, head, None]
                cute.make_tensor(row_out.iterator, cute.make_layout((4, V // 4)))[
                    None, rank * quarter + index % quarter
                ].store(vectors[None, at].load())


def fake_records(extents: Extents) -> tuple[Any, ...]:
    """Placeholder of state_tok."""
    shape = (extents.pool, 3, extents.drafts, extents.heads, K)
    strides = (free_stride(4), free_stride(4), free_stride(4), K, 1)
    return (make_fake_tensor(Float32, shape, strides, assumed_align=16),)


def compile_verify(config: VerifyConfig, arch: str | None = None, options: str = "") -> Any:
    """The compiled launcher; call it with torch tensors and without the stream."""
    target = f" --gpu-arch {arch}" if arch else ""
    return cute.compile(
        VerifyKernel(config),
        *fake_arguments(config, fake_records),
        options=f"--enable-tvm-ffi{target} {options}".strip(),
    )
