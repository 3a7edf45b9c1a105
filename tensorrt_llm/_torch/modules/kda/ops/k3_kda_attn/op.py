# SPDX-License-Identifier: Apache-2.0
"""`trtllm::k3_kda_attn`: input projection and verify round of one request, the two overlapped."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.contract import (
    check_projection,
    why_not_compiled,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.entry import ENTRY
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import (
    DraftCache,
    check_round,
    why_only_reference,
)
from tensorrt_llm._torch.modules.kda.ops.selection import select
from tensorrt_llm.logger import logger


def k3_kda_attn(
    x: Tensor, w: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor, slots: Tensor,
    pending: Tensor, p1: Tensor | None, part: Tensor | None, epoch: Tensor | None, num_spec: int,
    lower_bound: float, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """Gated, normed core output [T, H, V] of T = 1 .. M + 1 tokens of one request, from hidden states.

    Args:
        x: [T, hidden]. w: [columns, hidden] in the dtype of x, the fused projection's weight with the rows
            q | k | v | output gate | f_a | b | padding; the kernels want a multiple of 8.
        p1, part, epoch: scratch of TensorRT-LLM's kernel for this op, not used here; None serves.
        The rest as `k3_kda_verify` has it, slots: [1].

    Mutates what `k3_kda_verify` mutates, on the rows x w^T rounded to the dtype of x.

    Raises:
        ValueError: shapes, dtypes or strides outside the above.
        RuntimeError: a kernel would have to be compiled inside a graph capture.
    """
    check_projection(x, w, slots)
    drafts = DraftCache("state_tok", state_tok, (3, num_spec, a_log.shape[0], onorm_w.shape[0]), 2)
    rows = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device="meta")
    geometry = check_round(
        ENTRY.name, rows, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, (drafts,),
        slots, pending, num_spec, None,
    )  # fmt: skip
    arguments = (
        x, w, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, state_tok, slots, pending,
        p1, part, epoch, num_spec, lower_bound, scale, eps,
    )  # fmt: skip
    selection = select(ENTRY, x.device)
    name, run = selection.choice.name, selection.run
    if name != "torch" and (reason := why_only_reference(geometry, rows)):
        logger.info_once(f"k3_kda_attn runs its torch reference: {reason}")
        run = ENTRY.reference
    elif name == "cute" and (reason := why_not_compiled(x, w, (ssm, state_tok), (cs_q, cs_k, cs_v))):
        logger.info_once(f"k3_kda_attn runs its Triton form: {reason}")
        run = ENTRY.implementation("triton").load()
    output: Tensor = run(*arguments)
    return output


_op = torch.library.custom_op(
    "trtllm::k3_kda_attn", k3_kda_attn, mutates_args=("cs_q", "cs_k", "cs_v", "ssm", "state_tok")
)


@_op.register_fake
def _(
    x: Tensor, w: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor, slots: Tensor,
    pending: Tensor, p1: Tensor | None, part: Tensor | None, epoch: Tensor | None, num_spec: int,
    lower_bound: float, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], a_log.shape[0], onorm_w.shape[0]))
