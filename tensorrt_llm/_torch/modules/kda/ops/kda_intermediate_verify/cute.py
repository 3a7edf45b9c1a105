# SPDX-License-Identifier: Apache-2.0
"""`kda_intermediate_verify` in CuTe DSL: `cute_body` that writes the state after every token.

Nothing is pending, so nothing is replayed. The chunk gives vn and outputs of all tokens; the states follow
from vn in the serial fma by which records are replayed, and are written on the way: the golden token's to the
pool, the drafts' to intermediate (slots, M, H, V, K), fp32.
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
    Extents,
    K,
    V,
    VerifyBody,
    fake_arguments,
    free_stride,
)
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.launch import IntermediateConfig


class IntermediateKernel(VerifyBody):
    """Traces `kda_intermediate_verify` for one `IntermediateConfig`."""

    commits_before_solving = False

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
        intermediate: cute.Tensor,
        slots: cute.Tensor,
        g_ext: cute.Tensor | None,
        out: cute.Tensor,
        num_tokens: Int32,
        lower_bound: Float32,
        scale: Float32,
        eps: Float32,
        stream: CUstream,
    ):
        arguments = (
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, (intermediate,), slots,
            None, g_ext, out, num_tokens, lower_bound, scale, eps,
        )  # fmt: skip
        self.launch(arguments, ssm, slots, stream)

    def pending_drafts(self, history, pending, slot):
        return Int32(0)

    def allocate_history(self, smem):
        """Rows of beta k of the round's tokens, then of their decays."""
        return (smem.allocate_tensor(Float32, cute.make_layout((4, 2 * MAX_TOKENS * 32)), 128),)

    def _flat(self, s_history):
        return cute.make_tensor(s_history[0].iterator, cute.make_layout(2 * MAX_TOKENS * K))

    def prepare_history(self, s_history, loaded, pending, d, lane, warp):
        flat = self._flat(s_history)
        for t in range(MAX_TOKENS):
            flat[(MAX_TOKENS + t) * K + warp * 32 + lane] = d[t]

    def share_keys(
        self, history, s_history, slot, head, kept, s_beta, s_part, s_q2, scale, num_tokens, lane, warp
    ):
        flat = self._flat(s_history)
        norms = self.norms_by_lane(s_part, s_q2, scale, lane)
        for t in range(MAX_TOKENS):
            norm = cute.arch.shuffle_sync(norms, offset=t)
            flat[t * K + warp * 32 + lane] = s_beta[t] * norm * kept[1][t]

    @cute.jit
    def store_states(
        self, s, history, s_history, s_v, state, slot, head, num_tokens, cta_row, row, first_chunk
    ):
        self._step(s, s_history, s_v, state, Int32(0), cta_row, row, first_chunk)
        for t in cutlass.range(1, num_tokens, unroll=1):
            draft = history[0][slot, t - 1, head, None, None]
            target = cute.make_tensor(draft.iterator, cute.make_layout((4, V * 32)))
            self._step(s, s_history, s_v, target, t, cta_row, row, first_chunk)

    def _step(self, s, s_history, s_v, target, t, cta_row, row, first_chunk):
        """The state's registers after token t, and their copy in `target` (4, V K / 4)."""
        vn = [s_v[t * self.v_pitch + row + 8 * i] for i in range(2 * self.tiles)]
        self.apply_record(s, vn, s_history[0], t, MAX_TOKENS + t, first_chunk)
        for block in range(self.key_blocks):
            for i in range(2 * self.tiles):
                values = [s[self._at(i // 2, block, i % 2, e)] for e in range(4)]
                ptx.store_vector(target, (cta_row + row + 8 * i) * 32 + first_chunk + block * 4, values)


def fake_states(extents: Extents) -> tuple[Any, ...]:
    """Placeholder of intermediate."""
    shape = (extents.pool, extents.drafts, extents.heads, V, K)
    strides = (free_stride(4), free_stride(4), V * K, K, 1)
    return (make_fake_tensor(Float32, shape, strides, assumed_align=16),)


def compile_intermediate(config: IntermediateConfig, arch: str | None = None, options: str = "") -> Any:
    """The compiled launcher; call it with torch tensors and without the stream."""
    target = f" --gpu-arch {arch}" if arch else ""
    return cute.compile(
        IntermediateKernel(config),
        *fake_arguments(config, fake_states, pending=False),
        options=f"--enable-tvm-ffi{target} {options}".strip(),
    )
