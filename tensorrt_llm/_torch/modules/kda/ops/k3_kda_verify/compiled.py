# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` through its CuTe DSL kernels, and the launch that the other verify ops share with it."""

from typing import Any, Generic

import torch
from torch import Tensor

from tensorrt_llm import envs
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.choice import choose_config
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import Config, VerifyConfig


class CompiledRound(Generic[Config]):
    """Launches a verify round; `kind` is the configuration of the op's kernels."""

    kind: type[Config]

    def __init__(self, kernels: KernelCache) -> None:
        self.kernels = kernels

    def launch(
        self, proj: Tensor, shared: tuple[Tensor, ...], slots: Tensor, history: tuple[Tensor, ...],
        counts: tuple[Tensor, ...], scalars: tuple[float, float, float], g_ext: Tensor | None,
        config: Config | None,
    ) -> Tensor:  # fmt: skip
        """The output [N T, H, V] of the kernel that `config` names, None: the chosen one.

        shared: w_fb .. ssm; history: the caches of drafts; counts: pending, if the op has it; scalars:
        lower_bound, scale, eps.
        """
        a_log, onorm_w, cs_q = shared[4], shared[6], shared[7]
        requests, heads = slots.shape[0], a_log.shape[0]
        if config is None:
            config = choose_config(
                self.kind,
                requests=requests,
                heads=heads,
                external_gate=g_ext is not None,
                pdl=envs.enable_pdl(),
                bf16_conv=cs_q.dtype == torch.bfloat16,
            )
        out = torch.empty((proj.shape[0], heads, onorm_w.shape[0]), dtype=proj.dtype, device=proj.device)
        launcher: Any = self.kernels.launcher(config)
        launcher(proj, *shared, *history, slots, *counts, g_ext, out, proj.shape[0] // requests, *scalars)
        return out


class CompiledVerify(CompiledRound[VerifyConfig]):
    """Callable with the op's arguments."""

    kind = VerifyConfig

    def __call__(
        self, proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
        dt_bias: Tensor, onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor,
        state_tok: Tensor, slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float,
        eps: float, g_ext: Tensor | None = None, *, config: VerifyConfig | None = None,
    ) -> Tensor:  # fmt: skip
        shared = (w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm)
        scalars = (lower_bound, scale, eps)
        return self.launch(proj, shared, slots, (state_tok,), (pending,), scalars, g_ext, config)
