# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` through its CuTe DSL kernels."""

import torch
from torch import Tensor

from tensorrt_llm import envs
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.choice import choose_config
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig


class CompiledVerify:
    """Callable with the op's arguments."""

    def __init__(self, kernels: KernelCache) -> None:
        self.kernels = kernels

    def __call__(
        self, proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
        dt_bias: Tensor,
        onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
        slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
        g_ext: Tensor | None = None, *, config: VerifyConfig | None = None,
    ) -> Tensor:  # fmt: skip
        requests, heads = slots.shape[0], a_log.shape[0]
        if config is None:
            config = choose_config(
                requests=requests, heads=heads, external_gate=g_ext is not None, pdl=envs.enable_pdl()
            )
        out = torch.empty((proj.shape[0], heads, onorm_w.shape[0]), dtype=proj.dtype, device=proj.device)
        self.kernels.launcher(config)(
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, state_tok, slots,
            pending,
            g_ext, out, proj.shape[0] // requests, lower_bound, scale, eps,
        )  # fmt: skip
        return out
