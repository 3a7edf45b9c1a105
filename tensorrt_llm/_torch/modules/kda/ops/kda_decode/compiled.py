# SPDX-License-Identifier: Apache-2.0
"""`kda_decode` through its CuTe DSL kernels."""

import torch
from torch import Tensor

from tensorrt_llm import envs
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.kda_decode.choice import choose_config
from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import DecodeConfig


class CompiledDecode:
    """Callable with the op's arguments."""

    def __init__(self, kernels: KernelCache) -> None:
        self.kernels = kernels

    def __call__(
        self, proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
        dt_bias: Tensor, onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Tensor, lower_bound: float,
        scale: float, eps: float, g_ext: Tensor | None = None, *, config: DecodeConfig | None = None,
    ) -> Tensor:  # fmt: skip
        requests, heads = slots.shape[0], a_log.shape[0]
        if config is None:
            config = choose_config(
                requests=requests, heads=heads, external_gate=g_ext is not None, pdl=envs.enable_pdl()
            )
        out = torch.empty((requests, heads, onorm_w.shape[0]), dtype=proj.dtype, device=proj.device)
        self.kernels.launcher(config)(
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, conv_pool, ssm, slots, g_ext, out,
            lower_bound, scale, eps,
        )  # fmt: skip
        return out
