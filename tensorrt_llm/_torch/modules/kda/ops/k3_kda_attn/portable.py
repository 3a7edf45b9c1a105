# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_attn` on any CUDA GPU: torch's projection, then the verify round in Triton."""

from torch import Tensor
from torch.nn.functional import linear


def k3_kda_attn_portable(
    x: Tensor, w: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor, slots: Tensor,
    pending: Tensor, p1: Tensor | None, part: Tensor | None, epoch: Tensor | None, num_spec: int,
    lower_bound: float, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op."""
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.triton import k3_kda_verify_triton

    return k3_kda_verify_triton(
        linear(x, w), w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, state_tok, slots,
        pending, num_spec, lower_bound, scale, eps,
    )  # fmt: skip
