# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_decode`: one token of a KDA layer without drafts, from projection rows to gated output."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_decode.contract import (
    check_arguments,
    why_not_compiled,
    why_only_reference,
)
from tensorrt_llm._torch.modules.kda.ops.kda_decode.entry import ENTRY
from tensorrt_llm._torch.modules.kda.ops.selection import select
from tensorrt_llm.logger import logger


def kda_decode(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Tensor, lower_bound: float, scale: float,
    eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated, normed core output [N, H, V] of one token for N requests; legal only where nothing is pending.

    N requests, H heads, K = V head width, D = H K, W conv width.

    Args:
        proj: [N, >= 4 D + K + H], q | k | v | output gate | f_a | b | padding.
        w_fb: [D, K], in the dtype of proj. w_q, w_k, w_v: [D, W] fp32 taps, oldest first.
        a_log: [H]; dt_bias: [D]; onorm_w: [V]; fp32.
        conv_pool: [pool, 3 D, W - 1], q | k | v, the raw inputs before the token, oldest first, any strides.
        ssm: [pool, H, V, K] fp32 states, any slot stride.
        slots: [N] int32, distinct; -1 pads: its row is zero and nothing is written.
        lower_bound, scale, eps: of the gate, of q, of the output norm.
        g_ext: [N, D], an f_b product to use in place of f_a w_fb^T.

    Mutates for the slots named: ssm (the state after the token) and conv_pool (its window moved by one).

    Raises:
        ValueError: shapes, dtypes or strides outside the above.
        RuntimeError: the kernel would have to be compiled inside a graph capture.
    """
    geometry = check_arguments(
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, conv_pool, ssm, slots, g_ext
    )
    arguments = (
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, conv_pool, ssm, slots, lower_bound, scale, eps,
        g_ext,
    )  # fmt: skip
    selection = select(ENTRY, proj.device)
    name, run = selection.choice.name, selection.run
    if name != "torch" and (reason := why_only_reference(geometry, proj)):
        logger.info_once(f"kda_decode runs its torch reference: {reason}")
        return ENTRY.reference(*arguments)
    weights = (w_fb, w_q, w_k, w_v, onorm_w)
    if name == "cute" and (reason := why_not_compiled(proj, weights, conv_pool, ssm)):
        logger.info_once(f"kda_decode runs its Triton form: {reason}")
        run = ENTRY.implementation("triton").load()
    return run(*arguments)


_op = torch.library.custom_op("trtllm::kda_decode", kda_decode, mutates_args=("conv_pool", "ssm"))


@_op.register_fake
def _(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Tensor, lower_bound: float, scale: float,
    eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return proj.new_empty((proj.shape[0], a_log.shape[0], onorm_w.shape[0]))
