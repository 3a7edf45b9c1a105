# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_attn` through its CuTe DSL projection, the verify round launched as its programmatic dependent."""

from collections.abc import Callable

import torch
from torch import Tensor

from tensorrt_llm import envs
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.launch import ProjectionConfig
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.op import k3_kda_verify


class CompiledAttn:
    """Callable with the op's arguments; `verify` is `k3_kda_verify` or one implementation of it."""

    def __init__(self, kernels: KernelCache, verify: Callable[..., Tensor] = k3_kda_verify) -> None:
        self.kernels = kernels
        self._verify = verify

    def project(
        self, x: Tensor, w: Tensor, caches: tuple[Tensor, ...], ssm: Tensor, state_tok: Tensor, slots: Tensor,
        pending: Tensor, config: ProjectionConfig | None = None,
    ) -> Tensor:  # fmt: skip
        """x w^T [T, columns], with what the round reads of its slot on the way into L2."""
        if config is None:
            narrow = caches[0].dtype == torch.bfloat16
            config = ProjectionConfig(narrow_conv=narrow, pdl=envs.enable_pdl())
        proj = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
        self.kernels.launcher(config)(x, w, *caches, ssm, state_tok, slots, pending, proj)
        return proj

    def __call__(
        self, x: Tensor, w: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
        dt_bias: Tensor, onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor,
        state_tok: Tensor, slots: Tensor, pending: Tensor, p1: Tensor | None, part: Tensor | None,
        epoch: Tensor | None, num_spec: int, lower_bound: float, scale: float, eps: float,
        *, config: ProjectionConfig | None = None,
    ) -> Tensor:  # fmt: skip
        proj = self.project(x, w, (cs_q, cs_k, cs_v), ssm, state_tok, slots, pending, config)
        return self._verify(
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, state_tok, slots,
            pending, num_spec, lower_bound, scale, eps,
        )  # fmt: skip
