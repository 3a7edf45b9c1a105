# SPDX-License-Identifier: Apache-2.0
"""`kda_intermediate_verify` through its CuTe DSL kernels."""

from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.compiled import CompiledRound
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.launch import IntermediateConfig


class CompiledIntermediate(CompiledRound[IntermediateConfig]):
    """Callable with the op's arguments."""

    kind = IntermediateConfig

    def __call__(
        self, proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
        dt_bias: Tensor, onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor,
        intermediate: Tensor, slots: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
        g_ext: Tensor | None = None, *, config: IntermediateConfig | None = None,
    ) -> Tensor:  # fmt: skip
        shared = (w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm)
        scalars = (lower_bound, scale, eps)
        return self.launch(proj, shared, slots, (intermediate,), (), scalars, g_ext, config)
