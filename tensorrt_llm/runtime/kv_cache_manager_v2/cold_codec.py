# SPDX-License-Identifier: Apache-2.0
"""Another form of pages off the GPU: smaller, so that a host or disk tier holds more of them.

A page is encoded on its way from the GPU and decoded on its way back; between cold tiers it moves as it is.
Cold slots have one size per pool, because a slot must be able to take any page of its group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from ._types import GPU_LEVEL, CacheLevel, LifeCycleId, PoolIndex
from .errors import MisuseError
from .layout import PoolGroupDesc, StorageLayout

SlotSizes = tuple[tuple[int, ...], ...]
"""Bytes of a slot, `[pool_group][pool]`."""

Convert = Callable[[torch.Tensor, torch.Tensor], None]
"""Overwrites its second argument with the other form of its first; both uint8, one slot of one pool."""


@runtime_checkable
class ColdPageCodec(Protocol):
    """How pages look off the GPU. Contents come back as `decode` makes them, exact or not.

    On CUDA `encode` and `decode` run with the stream of the copy as the current one and may leave work on
    it; cold tensors are in pinned host memory, or in pageable memory on their way to or from a file. An
    error raised in them passes to the caller with the page where it was.
    """

    def cold_slot_sizes(self, group: PoolGroupDesc) -> Sequence[int]:
        """Return the bytes that a slot of each pool of `group` takes off the GPU. Asked once."""

    def encode(self, life_cycle: LifeCycleId, pool: PoolIndex, hot: torch.Tensor, cold: torch.Tensor) -> None:
        """Overwrite `cold`, uint8 [cold slot bytes], with the form of `hot`, uint8 [slot bytes]."""

    def decode(self, life_cycle: LifeCycleId, pool: PoolIndex, cold: torch.Tensor, hot: torch.Tensor) -> None:
        """Overwrite `hot` with the page whose form is `cold`."""


def slot_sizes_by_level(codec: object, layout: StorageLayout, num_levels: int) -> list[SlotSizes]:
    """Return the slot sizes of each level. MisuseError for a codec that is none or gives no sizes."""
    hot = tuple(group.slot_sizes for group in layout.pool_groups)
    if codec is None:
        return [hot] * num_levels
    if not isinstance(codec, ColdPageCodec):
        raise MisuseError(
            f"cold_page_codec is a {type(codec).__name__}; give an object with cold_slot_sizes, encode and "
            "decode, or None"
        )
    cold = tuple(_checked(codec.cold_slot_sizes(group), group) for group in layout.pool_groups)
    return [hot, *[cold] * (num_levels - 1)]


def _checked(sizes: Sequence[int], group: PoolGroupDesc) -> tuple[int, ...]:
    is_sound = len(sizes) == len(group.slot_sizes) and all(
        isinstance(size, int) and size > 0 for size in sizes
    )
    if not is_sound:
        raise MisuseError(
            f"cold_page_codec gives pool group {group.pool_group_index} the slot sizes {list(sizes)}; give "
            f"one positive number of bytes for each of its pools, which have {list(group.slot_sizes)}"
        )
    return tuple(sizes)


def conversion(
    codec: ColdPageCodec | None,
    life_cycle: LifeCycleId,
    pool: PoolIndex,
    source: CacheLevel,
    destination: CacheLevel,
) -> Convert | None:
    """Return what a slot goes through between two levels, None if it moves as it is."""
    if codec is None or (source == GPU_LEVEL) == (destination == GPU_LEVEL):
        return None
    return partial(codec.encode if source == GPU_LEVEL else codec.decode, life_cycle, pool)
