# SPDX-License-Identifier: Apache-2.0
"""Memory of the pools, on a CPU: address space is reserved once, memory comes and goes behind a base that
stays.

Anonymous memory is zero when first touched and costs nothing before. CUDA memory lives in `cuda_pools`.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from ._math import round_up
from ._types import MemAddress, SlotId
from .errors import HostOOMError, LogicError
from .streams import StreamHandle

_MAP_NORESERVE = 0x4000
"""Linux: do not count the reserved range against the memory limit before it is touched (mmap.h)."""


class Pool(Protocol):
    """Slots of one size in one kind of memory. The base address never changes while the pool lives."""

    slot_size: int
    num_slots: int

    @property
    def base_address(self) -> MemAddress:
        """Address of slot 0."""

    def resize(self, num_slots: int) -> None:
        """Map or unmap whole grains for `num_slots` slots. Slots below both counts keep their bytes.

        Raises OutOfMemoryError, with the pool as it was.
        """

    def bytes_view(self) -> torch.Tensor:
        """Return uint8 [num_slots * slot_size] over the pool's own memory."""

    def close(self) -> None:
        """Give all memory back. Views must not be used afterwards."""


class CpuPool:
    """Anonymous memory, for the GPU tier of a CPU-only run and for host tiers."""

    __slots__ = ("_grain", "_memory", "_reserved_bytes", "_tensor", "num_slots", "slot_size", "view")

    def __init__(self, slot_size: int, num_slots: int, grain: int, reserved_slots: int) -> None:
        self.slot_size = slot_size
        self.num_slots = 0
        self._grain = grain
        self._reserved_bytes = round_up(max(1, num_slots, reserved_slots) * slot_size, grain)
        self._memory = _reserve(self._reserved_bytes)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self.resize(num_slots)

    @property
    def base_address(self) -> MemAddress:
        return MemAddress(self._tensor.data_ptr())

    def resize(self, num_slots: int) -> None:
        if num_slots * self.slot_size > self._reserved_bytes:
            raise HostOOMError(
                f"{num_slots} slots of {self.slot_size} bytes exceed {self._reserved_bytes} reserved"
            )
        mapped, wanted = (
            round_up(count * self.slot_size, self._grain) for count in (self.num_slots, num_slots)
        )
        if wanted < mapped:
            self._memory.madvise(mmap.MADV_DONTNEED, wanted, mapped - wanted)
        self.num_slots = num_slots

    def bytes_view(self) -> torch.Tensor:
        return self._tensor[: self.num_slots * self.slot_size]

    def close(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self.view = memoryview(b"")
        self._reserved_bytes = self.num_slots = 0


def _reserve(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise HostOOMError(f"cannot reserve {num_bytes} bytes of address space: {error}") from error


def total_host_bytes() -> int:
    """Return the physical memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Copier(Protocol):
    """Moves slots between pools of equal slot size."""

    def copy_slot(
        self, dst: Pool, dst_slot: SlotId, src: Pool, src_slot: SlotId, stream: StreamHandle
    ) -> None:
        """Copy one slot on `stream`. On failure raises, and only the destination slot may be changed."""


class CpuCopier:
    """Copies between CPU pools at once."""

    def copy_slot(
        self, dst: Pool, dst_slot: SlotId, src: Pool, src_slot: SlotId, stream: StreamHandle
    ) -> None:
        if not isinstance(dst, CpuPool) or not isinstance(src, CpuPool):
            raise LogicError(f"cannot copy from {type(src).__name__} to {type(dst).__name__}")
        size = dst.slot_size
        begin = src_slot * size
        dst.view[dst_slot * size : (dst_slot + 1) * size] = src.view[begin : begin + size]


def copy_slots(
    copier: Copier,
    dst: Sequence[Pool],
    dst_slot: SlotId,
    src: Sequence[Pool],
    src_slot: SlotId,
    stream: StreamHandle,
) -> None:
    """Copy one slot in all pools of a group."""
    for dst_pool, src_pool in zip(dst, src, strict=True):
        copier.copy_slot(dst_pool, dst_slot, src_pool, src_slot, stream)
