# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_intermediate_verify`: a verify round of a KDA layer that keeps every draft's state."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import DraftCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.dispatch import run_round
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.entry import ENTRY


def kda_intermediate_verify(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, intermediate: Tensor,
    slots: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated, normed core output [N T, H, V] of T tokens (golden first, then drafts) for N requests.

    The scheme of whole states: as `k3_kda_verify` but that nothing is ever pending, because `kda_promote`
    brings a slot to its accepted draft before the next round.

    Args:
        intermediate: [pool, M, H, V, K] fp32, the state after each draft of the round.
        The others are those of `k3_kda_verify`.

    Mutates for the slots named: ssm (the state after the golden token), states 0 .. T - 2, conv columns
    0 .. W - 3 + T. `intermediate` is never read; the rest is left bit for bit.

    Raises:
        ValueError: shapes, dtypes or strides outside the above.
        RuntimeError: the kernel would have to be compiled inside a graph capture.
    """
    H, K = a_log.shape[0], onorm_w.shape[0]
    drafts = (DraftCache("intermediate", intermediate, (num_spec, H, K, K), 3),)
    return run_round(
        ENTRY, drafts, proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, slots,
        None, num_spec, lower_bound, scale, eps, g_ext,
    )  # fmt: skip


_op = torch.library.custom_op(
    "trtllm::kda_intermediate_verify",
    kda_intermediate_verify,
    mutates_args=("cs_q", "cs_k", "cs_v", "ssm", "intermediate"),
)


@_op.register_fake
def _(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, intermediate: Tensor,
    slots: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return proj.new_empty((proj.shape[0], a_log.shape[0], onorm_w.shape[0]))
