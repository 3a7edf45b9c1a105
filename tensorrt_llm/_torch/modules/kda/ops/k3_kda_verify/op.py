# SPDX-License-Identifier: Apache-2.0
"""`trtllm::k3_kda_verify`: one verify round of a KDA layer, from projection rows to gated output."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import DraftCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.dispatch import run_round
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.entry import ENTRY


def k3_kda_verify(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated, normed core output [N T, H, V] of T tokens (golden first, then drafts) for N requests.

    N requests, T = 1 .. M + 1 tokens each, H heads, K = V head width, D = H K, W conv width, M = num_spec.

    Args:
        proj: [N T, >= 4 D + K + H], q | k | v | output gate | f_a | b | padding; request r owns rows r T ...
        w_fb: [D, K], in the dtype of proj. w_q, w_k, w_v: [D, W] fp32 taps, oldest first.
        a_log: [H]; dt_bias: [D]; onorm_w: [V]; fp32.
        cs_q, cs_k, cs_v: [pool, D, W - 1 + M], fp32 or in the dtype of proj, channels contiguous; column c is
            the raw input at position c - (W - 2) around the golden token.
        ssm: [pool, H, V, K] fp32 states, any slot stride.
        state_tok: [pool, 3, M, H, K] fp32 records vn, beta k, decay of the last round's drafts.
        slots: [N] int32, distinct; -1 pads: its rows are zero and nothing is written.
        pending: [pool] int32, by slot: P, the accepted drafts to replay first, clamped to [0, M].
        lower_bound, scale, eps: of the gate, of q, of the output norm.
        g_ext: [N T, D], an f_b product to use in place of f_a w_fb^T.

    Mutates for the slots named: ssm (the state after the golden token), records 0 .. T - 2, conv columns
    0 .. W - 3 + T. Records at P and beyond are never read; the rest is left bit for bit.

    Raises:
        ValueError: shapes, dtypes or strides outside the above.
        RuntimeError: the kernel would have to be compiled inside a graph capture.
    """
    drafts = (DraftCache("state_tok", state_tok, (3, num_spec, a_log.shape[0], onorm_w.shape[0]), 2),)
    return run_round(
        ENTRY, drafts, proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, slots,
        pending, num_spec, lower_bound, scale, eps, g_ext,
    )  # fmt: skip


_op = torch.library.custom_op(
    "trtllm::k3_kda_verify", k3_kda_verify, mutates_args=("cs_q", "cs_k", "cs_v", "ssm", "state_tok")
)


@_op.register_fake
def _(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float,
    g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return proj.new_empty((proj.shape[0], a_log.shape[0], onorm_w.shape[0]))
