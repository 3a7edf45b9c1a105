# SPDX-License-Identifier: Apache-2.0
"""What `k3_kda_verify` accepts: checked before any work, in words that name argument, value and remedy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import (
    CONV_WIDTH,
    HEAD_DIM,
    MAX_DRAFTS,
    MIN_LOWER_BOUND,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyGeometry:
    """Sizes read off the arguments: N requests, T tokens each, H heads of width K, M drafts."""

    requests: int
    tokens: int
    heads: int
    head_dim: int
    conv_width: int
    drafts: int


def _refuse(name: str, value: object, remedy: str) -> None:
    raise ValueError(f"k3_kda_verify: {name} is {value}; {remedy}")


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        _refuse(f"the shape of {name}", tuple(tensor.shape), f"it must be {shape}")


def check_arguments(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, state_tok: Tensor,
    slots: Tensor, pending: Tensor, num_spec: int, g_ext: Tensor | None,
) -> VerifyGeometry:  # fmt: skip
    """The sizes; ValueError for shapes, dtypes or strides that the op does not define."""
    N, H, K, W, M = slots.numel(), a_log.numel(), onorm_w.numel(), w_q.shape[-1], num_spec
    D, pool = H * K, ssm.shape[0]
    if proj.dim() != 2 or N == 0 or proj.shape[0] == 0 or proj.shape[0] % N:
        _refuse("the shape of proj", tuple(proj.shape), f"its rows must be T >= 1 for each of the {N} slots")
    T = proj.shape[0] // N
    if not 1 <= T <= M + 1:
        _refuse("the number of tokens per request", T, f"it must be 1 to num_spec + 1 = {M + 1}")
    if proj.shape[1] < 4 * D + K + H:
        _refuse("the columns of proj", proj.shape[1], f"q | k | v | og | f_a | b take {4 * D + K + H}")
    if proj.stride(1) != 1:
        _refuse("the strides of proj", proj.stride(), "columns must be contiguous")
    for name, tensor, shape in (
        ("w_fb", w_fb, (D, K)), ("w_q", w_q, (D, W)), ("w_k", w_k, (D, W)), ("w_v", w_v, (D, W)),
        ("dt_bias", dt_bias, (D,)), ("cs_q", cs_q, (pool, D, W - 1 + M)), ("cs_k", cs_k, (pool, D,
        W - 1 + M)),
        ("cs_v", cs_v, (pool, D, W - 1 + M)), ("ssm", ssm, (pool, H, K, K)),
        ("state_tok", state_tok, (pool, 3, M, H, K)), ("pending", pending, (pool,)),
    ):  # fmt: skip
        _require_shape(name, tensor, shape)
    if ssm.stride()[1:] != (K * K, K, 1):
        _refuse("the strides of ssm", ssm.stride(), f"a slot's state must be dense, {(K * K, K, 1)}")
    for name, index in (("slots", slots), ("pending", pending)):
        if index.dtype != torch.int32:
            _refuse(f"the dtype of {name}", index.dtype, "it must be torch.int32")
    if g_ext is not None:
        _require_shape("g_ext", g_ext, (proj.shape[0], D))
    return VerifyGeometry(requests=N, tokens=T, heads=H, head_dim=K, conv_width=W, drafts=M)


def why_only_reference(geometry: VerifyGeometry, proj: Tensor) -> str:
    """Why no kernel serves this call; empty if kernels do."""
    if geometry.drafts > MAX_DRAFTS:
        return f"num_spec={geometry.drafts} is above {MAX_DRAFTS}"
    if geometry.head_dim != HEAD_DIM or geometry.conv_width != CONV_WIDTH:
        return f"head width {geometry.head_dim} and conv width {geometry.conv_width} are not 128 and 4"
    if proj.dtype != torch.bfloat16:
        return f"the projection rows are {proj.dtype}, not bfloat16"
    return ""


def why_not_compiled(
    proj: Tensor,
    weights: tuple[Tensor, ...],
    ssm: Tensor,
    state_tok: Tensor,
    caches: tuple[Tensor, ...],
    lower_bound: float,
) -> str:
    """Why the CuTe DSL kernel does not serve this call, whose vectors are 16 bytes; empty if it does."""
    if lower_bound < MIN_LOWER_BOUND:
        return f"lower_bound={lower_bound} is below {MIN_LOWER_BOUND}"
    if proj.stride(0) % 8 or proj.data_ptr() % 16:
        return "projection rows are not aligned to 16 bytes"
    if any(not weight.is_contiguous() or weight.data_ptr() % 16 for weight in weights):
        return "a weight is not contiguous or not aligned to 16 bytes"
    if any(x.data_ptr() % 16 or any(s % 4 for s in x.stride()[:-2]) for x in (ssm, state_tok)):
        return "states or records are not aligned to 16 bytes"
    if any(cache.stride(1) != 1 for cache in caches):
        return "the channels of a conv cache are not contiguous"
    return ""
