# SPDX-License-Identifier: Apache-2.0
"""Runs the CuTe DSL kernel, from a pack or compiled at first use; the DSL is imported only to compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm import envs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.choice import choose_config
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig
from tensorrt_llm._torch.modules.kda.ops.packs import Pack


class CompiledVerify:
    """Callable with the op's arguments. Kernels come from `pack`; what it lacks is compiled."""

    def __init__(self, pack: Pack | None) -> None:
        self._pack = pack
        self._kernels: dict[VerifyConfig, Callable[..., Any]] = {}

    def prepare(self, configs: tuple[VerifyConfig, ...]) -> None:
        """Load or compile before the first call. Raises RuntimeError inside a graph capture."""
        for config in configs:
            self.kernel(config)

    def kernel(self, config: VerifyConfig) -> Callable[..., Any]:
        """The launcher of a configuration. RuntimeError where it would be compiled inside a capture."""
        kernel = self._kernels.get(config)
        if kernel is None:
            kernel = self._kernels[config] = self._find(config)
        return kernel

    def _find(self, config: VerifyConfig) -> Callable[..., Any]:
        packed = self._pack.kernel(config.name) if self._pack is not None else None
        if packed is not None:
            return packed
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{config.name} would be compiled inside a CUDA graph capture: run the batch once before "
                "capturing it, or set TRTLLM_KERNEL_PACK"
            )
        from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.cute import compile_verify

        return compile_verify(config)

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
        self.kernel(config)(
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, state_tok, slots,
            pending,
            g_ext, out, proj.shape[0] // requests, lower_bound, scale, eps,
        )  # fmt: skip
        return out
