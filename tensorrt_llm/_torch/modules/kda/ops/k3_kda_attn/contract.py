# SPDX-License-Identifier: Apache-2.0
"""What `k3_kda_attn` accepts beside what `k3_kda_verify` checks."""

from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.launch import BLOCK_KEYS


def _refuse(name: str, value: object, remedy: str) -> None:
    raise ValueError(f"k3_kda_attn: {name} is {value}; {remedy}")


def check_projection(x: Tensor, w: Tensor, slots: Tensor) -> None:
    """ValueError for shapes and dtypes of the projection that the op does not define."""
    if slots.numel() != 1:
        _refuse("the number of slots", slots.numel(), "the op serves one request: run k3_kda_verify")
    if x.dim() != 2 or x.shape[0] == 0:
        _refuse("the shape of x", tuple(x.shape), "it must be [tokens, hidden] with at least one token")
    if w.dim() != 2 or w.shape[1] != x.shape[1]:
        _refuse("the shape of w", tuple(w.shape), f"it must be [columns, {x.shape[1]}] as x has it")
    if w.dtype != x.dtype:
        _refuse("the dtype of w", w.dtype, f"it must be that of x, {x.dtype}")


def why_not_compiled(x: Tensor, w: Tensor, states: tuple[Tensor, ...], caches: tuple[Tensor, ...]) -> str:
    """Why the CuTe DSL projection does not serve this call; empty if it does.

    `states` are the SSM states and the records, `caches` those of the convolutions, which it prefetches.
    """
    if x.shape[1] % BLOCK_KEYS or w.shape[0] % 8:
        return f"w is {tuple(w.shape)}: not columns by 8 and keys by {BLOCK_KEYS}"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "the rows of x are not aligned to 16 bytes"
    if not w.is_contiguous() or w.data_ptr() % 16:
        return "w is not contiguous or not aligned to 16 bytes"
    if any(s.data_ptr() % 16 or any(stride % 4 for stride in s.stride()[:-2]) for s in states):
        return "states or records are not aligned to 16 bytes"
    if any(cache.stride(1) != 1 for cache in caches) or len({cache.dtype for cache in caches}) > 1:
        return "the channels of a conv cache are not contiguous"
    return ""
