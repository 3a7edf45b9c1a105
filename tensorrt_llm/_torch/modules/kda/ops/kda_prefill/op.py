# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_prefill`: prompt tokens through a KDA layer's core, from projection rows to gated output."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_prefill.entry import ENTRY
from tensorrt_llm._torch.modules.kda.ops.selection import select
from tensorrt_llm.logger import logger

MAX_HEAD_DIM = 256
MAX_CONV_WIDTH = 4


def kda_prefill(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Sequence[int], lengths: Sequence[int],
    positions: Sequence[int], lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated, normed core output [tokens, H, V] of the next tokens of N prompts.

    H heads, K = V head width, D = H K, W conv width, tokens = sum(lengths). What a prompt gives does not
    depend on the others, nor on where it is cut if that is at multiples of 64 tokens.

    Args:
        proj: [tokens, >= 4 D + K + H], q | k | v | output gate | f_a | b | padding, prompt after prompt.
        w_fb: [D, K], in the dtype of proj. w_q, w_k, w_v: [D, W] fp32 taps, oldest first.
        a_log: [H]; dt_bias: [D]; onorm_w: [V]; fp32.
        conv_pool: [pool, 3 D, W - 1], raw inputs q | k | v of the last tokens, oldest first.
        ssm: [pool, H, V, K] fp32 states, any slot stride.
        slots: [N], distinct rows of the pools. lengths: [N], tokens of each prompt in proj.
        positions: [N], tokens of each prompt that ran before; 0 starts from zeros, whatever the slot holds.
        lower_bound, scale, eps: of the gate, of q, of the output norm.
        g_ext: [tokens, D], an f_b product to use in place of f_a w_fb^T.

    The three lists are of the host, so that nothing waits for the device. Mutates ssm and conv_pool of the
    slots named: the states and windows after the last token.

    Raises ValueError for shapes, dtypes or numbers outside the above.
    """
    _check(
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, conv_pool, ssm, slots, lengths, positions, g_ext
    )
    selection = select(ENTRY, proj.device)
    run = selection.run
    if selection.choice.name != "torch" and (reason := why_only_reference(proj, onorm_w, w_q)):
        logger.info_once(f"kda_prefill runs its torch reference: {reason}")
        run = ENTRY.reference
    return run(
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, conv_pool, ssm, slots, lengths, positions,
        lower_bound, scale, eps, g_ext,
    )  # fmt: skip


def why_only_reference(proj: Tensor, onorm_w: Tensor, w_q: Tensor) -> str:
    """Why fla-core does not serve this call; empty if it does."""
    if proj.dtype != torch.bfloat16:
        return f"the projection rows are {proj.dtype}, not bfloat16"
    if onorm_w.numel() > MAX_HEAD_DIM or w_q.shape[1] > MAX_CONV_WIDTH:
        return f"head width {onorm_w.numel()} is above 256 or conv width {w_q.shape[1]} above 4"
    return ""


def _refuse(name: str, value: object, remedy: str) -> None:
    raise ValueError(f"kda_prefill: {name} is {value}; {remedy}")


def _check(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Sequence[int], lengths: Sequence[int],
    positions: Sequence[int], g_ext: Tensor | None,
) -> None:  # fmt: skip
    H, K, W, pool = a_log.numel(), onorm_w.numel(), w_q.shape[-1], ssm.shape[0]
    D, tokens = H * K, sum(lengths)
    if not len(slots) == len(lengths) == len(positions) > 0:
        _refuse(
            "the number of slots, lengths and positions", (len(slots), len(lengths), len(positions)),
            "there must be one of each for every prompt",
        )  # fmt: skip
    if min(lengths) < 1 or min(positions) < 0:
        _refuse("lengths, positions", (list(lengths), list(positions)), "a prompt runs at least one token")
    if len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= pool:
        _refuse("slots", list(slots), f"they must be distinct and in 0 .. {pool - 1}")
    if proj.dim() != 2 or proj.shape[0] != tokens or proj.shape[1] < 4 * D + K + H:
        _refuse("the shape of proj", tuple(proj.shape), f"it must be ({tokens}, >= {4 * D + K + H})")
    for name, tensor, shape in (
        ("w_fb", w_fb, (D, K)), ("w_q", w_q, (D, W)), ("w_k", w_k, (D, W)), ("w_v", w_v, (D, W)),
        ("dt_bias", dt_bias, (D,)), ("conv_pool", conv_pool, (pool, 3 * D, W - 1)),
        ("ssm", ssm, (pool, H, K, K)), ("g_ext", g_ext, (tokens, D)),
    ):  # fmt: skip
        if tensor is not None and tuple(tensor.shape) != shape:
            _refuse(f"the shape of {name}", tuple(tensor.shape), f"it must be {shape}")


_op = torch.library.custom_op("trtllm::kda_prefill", kda_prefill, mutates_args=("conv_pool", "ssm"))


@_op.register_fake
def _(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Sequence[int], lengths: Sequence[int],
    positions: Sequence[int], lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return proj.new_empty((proj.shape[0], a_log.shape[0], onorm_w.shape[0]))
