# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_mtp_decode`: one verify round of a KDA layer that computes accepted drafts again."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import DraftCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.dispatch import run_round
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.entry import ENTRY


def kda_mtp_decode(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, qkg_cache: Tensor,
    v_cache: Tensor, beta_cache: Tensor, slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float,
    scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated, normed core output [N T, H, V] of T tokens (golden first, then drafts) for N requests.

    The replay scheme: as `k3_kda_verify` but for what it keeps of a draft, its inputs. The P accepted ones
    run through the recurrence once more before the golden token.

    Args:
        qkg_cache: [pool, M, 3, D] fp32, q (times `scale`), k and log decay of the last round's drafts.
        v_cache: [pool, M, D] fp32; beta_cache: [pool, M, H] fp32, any row stride.
        The others are those of `k3_kda_verify`.

    Mutates for the slots named: ssm (the state after the golden token), drafts 0 .. T - 2 of the three
    caches, conv columns 0 .. W - 3 + T. Drafts at P and beyond are never read; the rest is left bit for bit.

    Raises:
        ValueError: shapes, dtypes or strides outside the above.
        RuntimeError: the kernel would have to be compiled inside a graph capture.
    """
    H, D = a_log.shape[0], a_log.shape[0] * onorm_w.shape[0]
    drafts = (
        DraftCache("qkg_cache", qkg_cache, (num_spec, 3, D), 2),
        DraftCache("v_cache", v_cache, (num_spec, D), 1),
        DraftCache("beta_cache", beta_cache, (num_spec, H), 1),
    )
    return run_round(
        ENTRY, drafts, proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, slots,
        pending, num_spec, lower_bound, scale, eps, g_ext,
    )  # fmt: skip


_op = torch.library.custom_op(
    "trtllm::kda_mtp_decode",
    kda_mtp_decode,
    mutates_args=("cs_q", "cs_k", "cs_v", "ssm", "qkg_cache", "v_cache", "beta_cache"),
)


@_op.register_fake
def _(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, qkg_cache: Tensor,
    v_cache: Tensor, beta_cache: Tensor, slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float,
    scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return proj.new_empty((proj.shape[0], a_log.shape[0], onorm_w.shape[0]))
