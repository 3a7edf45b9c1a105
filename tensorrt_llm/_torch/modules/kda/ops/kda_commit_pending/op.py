# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_commit_pending`: apply accepted drafts to the states of all layers, at a suspend or a move."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.entry import ENTRY
from tensorrt_llm._torch.modules.kda.ops.selection import select
from tensorrt_llm.logger import logger

HEAD_DIM = 128


def kda_commit_pending(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, state_tok: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """Replay the first P records of each slot into its states, and copy its conv window to the pool.

    L layers, n requests. One layer's tensors serve with `x.unsqueeze(0)`.

    Args:
        ssm: [L, pool, H, V, K] fp32, any layer and slot stride; conv_pool: [L, pool, 3 D, W - 1], q | k | v.
        cs_q, cs_k, cs_v: [L, pool, D, W - 1 + M] fp32; state_tok: [L, pool, 3, M, H, K] fp32.
        slots: [n] int32, distinct, -1 skips. counts: [n] int32, P per REQUEST, clamped to [0, M].

    Mutates ssm and conv_pool of the slots named: S = fma(decay, S, vn bk) record by record, bit for bit as
    the next verify round would; conv columns P .. P + W - 2. The caller zeroes the pending counts.

    Raises ValueError for shapes or dtypes outside the above.
    """
    _check(ssm, conv_pool, cs_q, cs_k, cs_v, state_tok, slots, counts)
    if slots.numel() == 0:
        return
    selection = select(ENTRY, ssm.device)
    run = selection.run
    if selection.choice.name != "torch" and ssm.shape[-1] != HEAD_DIM:
        logger.info_once(
            f"kda_commit_pending runs its torch reference: head width {ssm.shape[-1]} is not 128"
        )
        run = ENTRY.reference
    run(ssm, conv_pool, cs_q, cs_k, cs_v, state_tok, slots, counts)


def _check(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, state_tok: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    if ssm.dim() != 5 or state_tok.dim() != 6 or conv_pool.dim() != 4:
        raise ValueError(
            f"kda_commit_pending: ssm, state_tok and conv_pool have {ssm.dim()}, {state_tok.dim()} and "
            f"{conv_pool.dim()} dimensions; they must have 5, 6 and 4, layers first"
        )
    L, pool, H, V, K = ssm.shape
    M, columns = state_tok.shape[3], conv_pool.shape[-1]
    wanted = {
        "state_tok": (state_tok, (L, pool, 3, M, H, K)),
        "conv_pool": (conv_pool, (L, pool, 3 * H * K, columns)),
        "cs_q": (cs_q, (L, pool, H * K, columns + M)),
        "cs_k": (cs_k, (L, pool, H * K, columns + M)),
        "cs_v": (cs_v, (L, pool, H * K, columns + M)),
        "counts": (counts, tuple(slots.shape)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"kda_commit_pending: the shape of {name} is {tuple(tensor.shape)}; it must be {shape}"
            )
    if ssm.stride()[2:] != (V * K, K, 1) or state_tok.stride()[-2:] != (K, 1):
        raise ValueError(
            "kda_commit_pending: states and records of a slot must be dense in their last dimensions"
        )
    if not cs_q.stride() == cs_k.stride() == cs_v.stride() or cs_q.stride(2) != 1:
        raise ValueError(
            f"kda_commit_pending: the strides of cs_q, cs_k, cs_v are {cs_q.stride()}, {cs_k.stride()}, "
            f"{cs_v.stride()}; they must be equal, channels contiguous"
        )
    if slots.dtype != torch.int32 or counts.dtype != torch.int32:
        raise ValueError(
            f"kda_commit_pending: slots and counts are {slots.dtype}, {counts.dtype}; pass torch.int32"
        )


torch.library.custom_op("trtllm::kda_commit_pending", kda_commit_pending, mutates_args=("ssm", "conv_pool"))
