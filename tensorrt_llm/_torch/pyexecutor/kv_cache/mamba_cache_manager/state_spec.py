# SPDX-License-Identifier: Apache-2.0
"""The shape of a recurrent layer's state on one rank: SSM state, convolution window, their bytes."""

from dataclasses import dataclass, fields
from math import prod

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import check_dtype
from tensorrt_llm.mapping import Mapping

CONV_STATE_LAYOUTS: tuple[str, ...] = ("x_b_c", "q_k_v")


class MambaRole:
    """Names of a recurrent layer's buffers in the storage."""

    SSM_STATE = "ssm_state"
    CONV_STATE = "conv_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaStateSpec:
    """Per slot and layer: SSM state [H, V, K] (K contiguous) and window [sections * D, W-1] (oldest input
    first).

    `conv_section_dims` are the channels of each section: q | k | v, or x | B | C.
    """

    num_heads: int
    head_dim: int
    d_state: int
    conv_columns: int
    conv_section_dims: tuple[int, ...]
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype

    @property
    def ssm_state_shape(self) -> tuple[int, int, int]:
        return (self.num_heads, self.head_dim, self.d_state)

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        return (sum(self.conv_section_dims), self.conv_columns)

    @property
    def ssm_bytes(self) -> int:
        return prod(self.ssm_state_shape) * self.ssm_dtype.itemsize

    @property
    def conv_bytes(self) -> int:
        return prod(self.conv_state_shape) * self.conv_dtype.itemsize

    def pool_slot_bytes(self, num_layers: int) -> tuple[int, ...]:
        """Slot sizes of the storage's pools, largest first: buffers of equal size lie in one pool."""
        sizes: dict[int, int] = {}
        for size in (self.ssm_bytes, self.conv_bytes):
            sizes[size] = sizes.get(size, 0) + num_layers * size
        return tuple(sorted(sizes.values(), reverse=True))

    @property
    def has_equal_sections(self) -> bool:
        return len(self.conv_section_dims) == 3 and len(set(self.conv_section_dims)) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDtypes:
    """Element types of the convolution's window and of the SSM state."""

    conv: torch.dtype
    ssm: torch.dtype


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A model's recurrent layer before the split over ranks, in the order of TensorRT-LLM's arguments."""

    d_state: int
    d_conv: int
    num_heads: int
    n_groups: int
    head_dim: int


def mamba_effective_tp_size(mapping: Mapping) -> int:
    """Ranks that share the heads of a recurrent layer: 1 where attention is data parallel."""
    return 1 if mapping.enable_attention_dp else mapping.tp_size


def linear_state_spec(
    shape: RecurrentShape, tp_size: int, conv_state_layout: str, dtypes: StateDtypes
) -> MambaStateSpec:
    """The state of one rank: heads and groups are split over `tp_size`, as the channels of each section are.

    Raises ValueError for an unknown layout, a window without history, or sizes that do not divide.
    """
    if conv_state_layout not in CONV_STATE_LAYOUTS:
        choices = ", ".join(map(repr, CONV_STATE_LAYOUTS))
        raise ValueError(f"conv_state_layout is {conv_state_layout!r}; it must be one of {choices}")
    check_dtype("mamba_cache_dtype", dtypes.conv)
    check_dtype("mamba_ssm_cache_dtype", dtypes.ssm)
    for field in fields(shape):
        if getattr(shape, field.name) < 1:
            raise ValueError(f"mamba_{field.name} is {getattr(shape, field.name)}; it must be at least 1")
    if shape.d_conv < 2:
        raise ValueError(
            f"mamba_d_conv is {shape.d_conv}; a causal convolution with a window has at least 2 taps"
        )
    for name, value in (("mamba_num_heads", shape.num_heads), ("mamba_n_groups", shape.n_groups)):
        if value % tp_size:
            raise ValueError(
                f"{name} is {value}, which tensor parallelism of {tp_size} ranks does not divide"
            )
    inner, group = shape.num_heads * shape.head_dim // tp_size, shape.n_groups * shape.d_state // tp_size
    return MambaStateSpec(
        num_heads=shape.num_heads // tp_size,
        head_dim=shape.head_dim,
        d_state=shape.d_state,
        conv_columns=shape.d_conv - 1,
        conv_section_dims=(inner, group, group) if conv_state_layout == "x_b_c" else (group, group, inner),
        conv_dtype=dtypes.conv,
        ssm_dtype=dtypes.ssm,
    )
