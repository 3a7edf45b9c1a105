# SPDX-License-Identifier: Apache-2.0
"""What the verify ops accept: checked before any work, in words that name argument, value and remedy."""

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


@dataclass(frozen=True, slots=True)
class DraftCache:
    """A cache of drafts [pool, *shape], its last `dense` dimensions side by side in memory."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dense: int


class _Checker:
    """Raises ValueError in the name of an op."""

    def __init__(self, op: str) -> None:
        self._op = op

    def refuse(self, name: str, value: object, remedy: str) -> None:
        raise ValueError(f"{self._op}: {name} is {value}; {remedy}")

    def shape(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            self.refuse(f"the shape of {name}", tuple(tensor.shape), f"it must be {shape}")

    def dense(self, name: str, tensor: Tensor, dimensions: int) -> None:
        """The last dimensions lie as in a contiguous tensor."""
        wanted = [1]
        for size in reversed(tensor.shape[-dimensions + 1 :] if dimensions > 1 else ()):
            wanted.insert(0, wanted[0] * size)
        if list(tensor.stride()[-dimensions:]) != wanted:
            self.refuse(f"the strides of {name}", tensor.stride(), f"the last must be dense, {tuple(wanted)}")

    def index(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype != torch.int32:
            self.refuse(f"the dtype of {name}", tensor.dtype, "it must be torch.int32")

    def conv_dtypes(self, proj: Tensor, caches: tuple[Tensor, ...]) -> None:
        found = {cache.dtype for cache in caches}
        if len(found) > 1 or not found <= {torch.float32, proj.dtype}:
            names = ", ".join(str(cache.dtype) for cache in caches)
            self.refuse(
                "the dtype of cs_q, cs_k, cs_v",
                names,
                f"all must be torch.float32 or that of proj, {proj.dtype}",
            )


def check_round(
    op: str, proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor,
    dt_bias: Tensor, onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor,
    drafts: tuple[DraftCache, ...], slots: Tensor, pending: Tensor | None, num_spec: int,
    g_ext: Tensor | None,
) -> VerifyGeometry:  # fmt: skip
    """The sizes; ValueError in the name of `op` for shapes, dtypes or strides that no verify op defines."""
    check = _Checker(op)
    N, H, K, W, M = slots.numel(), a_log.numel(), onorm_w.numel(), w_q.shape[-1], num_spec
    D, pool = H * K, ssm.shape[0]
    if proj.dim() != 2 or N == 0 or proj.shape[0] == 0 or proj.shape[0] % N:
        check.refuse(
            "the shape of proj", tuple(proj.shape), f"its rows must be T >= 1 for each of the {N} slots"
        )
    T = proj.shape[0] // N
    if not 1 <= T <= M + 1:
        check.refuse("the number of tokens per request", T, f"it must be 1 to num_spec + 1 = {M + 1}")
    if proj.shape[1] < 4 * D + K + H:
        check.refuse("the columns of proj", proj.shape[1], f"q | k | v | og | f_a | b take {4 * D + K + H}")
    if proj.stride(1) != 1:
        check.refuse("the strides of proj", proj.stride(), "columns must be contiguous")
    for name, tensor, shape in (
        ("w_fb", w_fb, (D, K)), ("w_q", w_q, (D, W)), ("w_k", w_k, (D, W)), ("w_v", w_v, (D, W)),
        ("dt_bias", dt_bias, (D,)), ("cs_q", cs_q, (pool, D, W - 1 + M)),
        ("cs_k", cs_k, (pool, D, W - 1 + M)), ("cs_v", cs_v, (pool, D, W - 1 + M)),
        ("ssm", ssm, (pool, H, K, K)), *((x.name, x.tensor, (pool, *x.shape)) for x in drafts),
    ):  # fmt: skip
        check.shape(name, tensor, shape)
    check.dense("ssm", ssm, 3)
    for cache in drafts:
        check.dense(cache.name, cache.tensor, cache.dense)
    check.conv_dtypes(proj, (cs_q, cs_k, cs_v))
    check.index("slots", slots)
    if pending is not None:
        check.shape("pending", pending, (pool,))
        check.index("pending", pending)
    if g_ext is not None:
        check.shape("g_ext", g_ext, (proj.shape[0], D))
    return VerifyGeometry(requests=N, tokens=T, heads=H, head_dim=K, conv_width=W, drafts=M)


def check_layers(
    op: str, ssm: Tensor, conv_pool: Tensor | None, caches: tuple[Tensor, Tensor, Tensor],
    drafts: tuple[DraftCache, ...], slots: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """What the ops over all layers take: every tensor [L, pool, ...], `drafts` with shapes after that.

    ValueError in the name of `op` for shapes, dtypes or strides that it does not define.
    """
    check = _Checker(op)
    wanted = {"ssm": (ssm, 5)} | {x.name: (x.tensor, 2 + len(x.shape)) for x in drafts}
    if conv_pool is not None:
        wanted["conv_pool"] = (conv_pool, 4)
    for name, (tensor, dimensions) in wanted.items():
        if tensor.dim() != dimensions:
            check.refuse(
                f"the number of dimensions of {name}", tensor.dim(), f"it must be {dimensions}, layers first"
            )
    L, pool, H, V, K = ssm.shape
    columns = caches[0].shape[-1]
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        f"cs_{part}": (cache, (L, pool, H * K, columns)) for part, cache in zip("qkv", caches, strict=True)
    }
    shapes |= {x.name: (x.tensor, (L, pool, *x.shape)) for x in drafts}
    shapes["counts"] = (counts, tuple(slots.shape))
    if conv_pool is not None:
        shapes["conv_pool"] = (conv_pool, (L, pool, 3 * H * K, conv_pool.shape[-1]))
    for name, (tensor, shape) in shapes.items():
        check.shape(name, tensor, shape)
    check.dense("ssm", ssm, 3)
    for cache in drafts:
        check.dense(cache.name, cache.tensor, cache.dense)
    strides = [cache.stride() for cache in caches]
    if len(set(strides)) > 1 or strides[0][2] != 1:
        check.refuse("the strides of cs_q, cs_k, cs_v", strides, "they must be equal, channels contiguous")
    check.index("slots", slots)
    check.index("counts", counts)


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
    states: tuple[Tensor, ...],
    caches: tuple[Tensor, ...],
    lower_bound: float,
) -> str:
    """Why a CuTe DSL kernel, whose vectors are 16 bytes, does not serve this call; empty if it does.

    `states` are the SSM states and the caches of drafts, `caches` those of the convolutions.
    """
    if lower_bound < MIN_LOWER_BOUND:
        return f"lower_bound={lower_bound} is below {MIN_LOWER_BOUND}"
    if proj.stride(0) % 8 or proj.data_ptr() % 16:
        return "projection rows are not aligned to 16 bytes"
    if any(not weight.is_contiguous() or weight.data_ptr() % 16 for weight in weights):
        return "a weight is not contiguous or not aligned to 16 bytes"
    if any(x.data_ptr() % 16 or any(s % 4 for s in x.stride()[:-1]) for x in states):
        return "states or drafts are not aligned to 16 bytes"
    if any(cache.stride(1) != 1 for cache in caches):
        return "the channels of a conv cache are not contiguous"
    return ""
