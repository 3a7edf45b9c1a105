# SPDX-License-Identifier: Apache-2.0
"""`kda_mtp_decode` through its CuTe DSL kernels."""

from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.compiled import CompiledRound
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.launch import ReplayConfig


class CompiledReplay(CompiledRound[ReplayConfig]):
    """Callable with the op's arguments."""

    kind = ReplayConfig

    def __call__(
        self, proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
        dt_bias: Tensor, onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor,
        qkg_cache: Tensor, v_cache: Tensor, beta_cache: Tensor, slots: Tensor, pending: Tensor, num_spec: int,
        lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None, *,
        config: ReplayConfig | None = None,
    ) -> Tensor:  # fmt: skip
        shared = (w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm)
        history, scalars = (qkg_cache, v_cache, beta_cache), (lower_bound, scale, eps)
        return self.launch(proj, shared, slots, history, (pending,), scalars, g_ext, config)
