# SPDX-License-Identifier: Apache-2.0
"""What `kda_decode` accepts: checked before any work, in words that name argument, value and remedy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import CONV_WIDTH, HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGeometry:
    """Sizes read off the arguments: N requests, H heads of width K."""

    requests: int
    heads: int
    head_dim: int
    conv_width: int


def _refuse(name: str, value: object, remedy: str) -> None:
    raise ValueError(f"kda_decode: {name} is {value}; {remedy}")


def check_arguments(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, conv_pool: Tensor, ssm: Tensor, slots: Tensor, g_ext: Tensor | None,
) -> DecodeGeometry:  # fmt: skip
    """The sizes; ValueError for shapes, dtypes or strides that the op does not define."""
    N, H, K, W = slots.numel(), a_log.numel(), onorm_w.numel(), w_q.shape[-1]
    D, pool = H * K, ssm.shape[0]
    if proj.dim() != 2 or N == 0 or proj.shape[0] != N:
        _refuse("the shape of proj", tuple(proj.shape), f"it must have one row for each of the {N} slots")
    if proj.shape[1] < 4 * D + K + H:
        _refuse("the columns of proj", proj.shape[1], f"q | k | v | og | f_a | b take {4 * D + K + H}")
    if proj.stride(1) != 1:
        _refuse("the strides of proj", proj.stride(), "columns must be contiguous")
    for name, tensor, shape in (
        ("w_fb", w_fb, (D, K)), ("w_q", w_q, (D, W)), ("w_k", w_k, (D, W)), ("w_v", w_v, (D, W)),
        ("dt_bias", dt_bias, (D,)), ("conv_pool", conv_pool, (pool, 3 * D, W - 1)),
        ("ssm", ssm, (pool, H, K, K)), ("slots", slots, (N,)),
    ):  # fmt: skip
        if tuple(tensor.shape) != shape:
            _refuse(f"the shape of {name}", tuple(tensor.shape), f"it must be {shape}")
    if ssm.stride()[1:] != (K * K, K, 1):
        _refuse("the strides of ssm", ssm.stride(), f"a slot's state must be dense, {(K * K, K, 1)}")
    if slots.dtype != torch.int32:
        _refuse("the dtype of slots", slots.dtype, "it must be torch.int32")
    if g_ext is not None and tuple(g_ext.shape) != (N, D):
        _refuse("the shape of g_ext", tuple(g_ext.shape), f"it must be {(N, D)}")
    return DecodeGeometry(requests=N, heads=H, head_dim=K, conv_width=W)


def why_only_reference(geometry: DecodeGeometry, proj: Tensor) -> str:
    """Why no kernel serves this call; empty if kernels do."""
    if geometry.head_dim != HEAD_DIM or geometry.conv_width != CONV_WIDTH:
        return f"head width {geometry.head_dim} and conv width {geometry.conv_width} are not 128 and 4"
    if proj.dtype != torch.bfloat16:
        return f"the projection rows are {proj.dtype}, not bfloat16"
    return ""


def why_not_compiled(proj: Tensor, weights: tuple[Tensor, ...], conv_pool: Tensor, ssm: Tensor) -> str:
    """Why the CuTe DSL kernel does not serve this call, whose vectors are 16 bytes; empty if it does."""
    if conv_pool.dtype != torch.bfloat16:
        return f"the conv pool is {conv_pool.dtype}, not bfloat16"
    if proj.stride(0) % 8 or proj.data_ptr() % 16:
        return "projection rows are not aligned to 16 bytes"
    if any(not weight.is_contiguous() or weight.data_ptr() % 16 for weight in weights):
        return "a weight is not contiguous or not aligned to 16 bytes"
    if ssm.data_ptr() % 16 or ssm.stride(0) % 4:
        return "states are not aligned to 16 bytes"
    return ""
