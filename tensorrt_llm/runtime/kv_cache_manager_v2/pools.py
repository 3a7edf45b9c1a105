# SPDX-License-Identifier: Apache-2.0
"""Memory of the pools: an address range (or file) is reserved once, memory comes and goes behind it.

Anonymous memory and files are zero when first touched and cost nothing before. CUDA memory lives in
`cuda_pools`.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ._math import round_up
from ._types import MemAddress, SlotId
from .cold_codec import Convert
from .config import CacheTierConfig, DiskCacheTierConfig
from .errors import DiskOOMError, HostOOMError, MisuseError
from .streams import CpuStreamOps, StreamHandle, StreamOps

_MAP_NORESERVE = 0x4000
"""Linux: do not count the reserved range against the memory limit before it is touched (mmap.h)."""


class Pool(Protocol):
    """Slots of one size in one kind of memory. The base address never changes while the pool lives."""

    slot_size: int
    num_slots: int

    @property
    def base_address(self) -> MemAddress:
        """Address of slot 0; MisuseError for a file."""

    def resize(self, num_slots: int) -> None:
        """Map or unmap whole grains for `num_slots` slots. Slots below both counts keep their bytes.

        Raises OutOfMemoryError, with the pool as it was.
        """

    def bytes_view(self) -> torch.Tensor:
        """Return uint8 [num_slots * slot_size] over the pool's own memory; MisuseError for a file."""

    def slot_view(self, slot: SlotId) -> torch.Tensor:
        """Return uint8 [slot_size] over the memory of a slot; of a file, a copy."""

    def read_slot(self, slot: SlotId) -> memoryview | bytes:
        """Return the bytes of a slot, valid until the slot changes."""

    def write_slot(self, slot: SlotId, content: memoryview | bytes) -> None:
        """Overwrite a slot."""

    def close(self) -> None:
        """Give all memory back. Views must not be used afterwards."""


class CpuPool:
    """Anonymous memory, for the GPU tier of a CPU-only run and for host tiers."""

    __slots__ = ("_grain", "_memory", "_reserved_bytes", "_tensor", "_view", "num_slots", "slot_size")

    def __init__(self, slot_size: int, num_slots: int, grain: int, reserved_slots: int) -> None:
        self.slot_size = slot_size
        self.num_slots = 0
        self._grain = grain
        self._reserved_bytes = round_up(max(1, num_slots, reserved_slots) * slot_size, grain)
        self._memory = _reserve(self._reserved_bytes)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._view = memoryview(self._memory)
        self.resize(num_slots)

    @property
    def base_address(self) -> MemAddress:
        return MemAddress(self._tensor.data_ptr())

    def resize(self, num_slots: int) -> None:
        if num_slots * self.slot_size > self._reserved_bytes:
            raise HostOOMError(
                f"{num_slots} slots of {self.slot_size} bytes exceed the {self._reserved_bytes} bytes "
                "reserved, which are this machine's memory; give the tier less"
            )
        mapped, wanted = (
            round_up(count * self.slot_size, self._grain) for count in (self.num_slots, num_slots)
        )
        if wanted < mapped:
            self._memory.madvise(mmap.MADV_DONTNEED, wanted, mapped - wanted)
        self.num_slots = num_slots

    def bytes_view(self) -> torch.Tensor:
        return self._tensor[: self.num_slots * self.slot_size]

    def slot_view(self, slot: SlotId) -> torch.Tensor:
        return self._tensor[slot * self.slot_size : (slot + 1) * self.slot_size]

    def read_slot(self, slot: SlotId) -> memoryview | bytes:
        return self._view[slot * self.slot_size : (slot + 1) * self.slot_size]

    def write_slot(self, slot: SlotId, content: memoryview | bytes) -> None:
        self._view[slot * self.slot_size : (slot + 1) * self.slot_size] = content

    def close(self) -> None:
        """Give the memory back at once; the address range follows when the last view of it is gone."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._reserved_bytes = self.num_slots = 0


def _reserve(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise HostOOMError(f"cannot reserve {num_bytes} bytes of address space: {error}") from error


class DiskPool:
    """Slots in an unnamed file, which vanishes with its descriptor."""

    __slots__ = ("_descriptor", "num_slots", "slot_size")

    def __init__(self, slot_size: int, num_slots: int, directory: str) -> None:
        self.slot_size = slot_size
        self.num_slots = 0
        try:
            descriptor, name = tempfile.mkstemp(dir=directory)
        except OSError as error:
            raise MisuseError(
                f"DiskCacheTierConfig.path {directory!r} cannot hold a file: {error}"
            ) from error
        os.unlink(name)
        self._descriptor = descriptor
        self.resize(num_slots)

    @property
    def base_address(self) -> MemAddress:
        raise MisuseError("a disk pool has no address; ask for level 0")

    def resize(self, num_slots: int) -> None:
        old_bytes, new_bytes = self.num_slots * self.slot_size, num_slots * self.slot_size
        try:
            if new_bytes > old_bytes:
                os.posix_fallocate(self._descriptor, old_bytes, new_bytes - old_bytes)
            else:
                os.ftruncate(self._descriptor, new_bytes)
        except OSError as error:
            os.ftruncate(self._descriptor, old_bytes)
            raise _disk_error(error, new_bytes) from error
        self.num_slots = num_slots

    def bytes_view(self) -> torch.Tensor:
        raise MisuseError("a disk pool cannot be viewed; ask for level 0")

    def slot_view(self, slot: SlotId) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.read_slot(slot)), dtype=torch.uint8)

    def read_slot(self, slot: SlotId) -> memoryview | bytes:
        return os.pread(self._descriptor, self.slot_size, slot * self.slot_size)

    def write_slot(self, slot: SlotId, content: memoryview | bytes) -> None:
        written = os.pwrite(self._descriptor, content, slot * self.slot_size)
        if written != self.slot_size:
            raise DiskOOMError(f"only {written} of {self.slot_size} bytes could be written to the disk tier")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self.num_slots = 0


def _disk_error(error: OSError, num_bytes: int) -> Exception:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return DiskOOMError(f"the disk tier cannot hold {num_bytes} bytes: {error}") if is_full else error


def total_host_bytes() -> int:
    """Return the physical memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class MemoryBackend(Protocol):
    """Makes pools and moves slots between them."""

    streams: StreamOps

    def make_pools(
        self, tier: CacheTierConfig, slot_sizes: Sequence[int], num_slots: int, grain: int
    ) -> list[Pool]:
        """Return the pools of one pool group. Raises OutOfMemoryError with nothing allocated."""

    def copy_slot(
        self, dst: Pool, dst_slot: SlotId, src: Pool, src_slot: SlotId, stream: StreamHandle
    ) -> None:
        """Copy one slot on `stream`. On failure raises, and only the destination slot may be changed."""

    def convert_slot(
        self,
        convert: Convert,
        dst: Pool,
        dst_slot: SlotId,
        src: Pool,
        src_slot: SlotId,
        stream: StreamHandle,
    ) -> None:
        """Overwrite one slot with the other form of another, as `copy_slot` does with the same form."""


class CpuBackend:
    """Everything in host memory and files; copies are done when the call returns."""

    def __init__(self) -> None:
        self.streams: StreamOps = CpuStreamOps()

    def make_pools(
        self, tier: CacheTierConfig, slot_sizes: Sequence[int], num_slots: int, grain: int
    ) -> list[Pool]:
        pools: list[Pool] = []
        reserved_slots = total_host_bytes() // sum(slot_sizes)
        try:
            for size in slot_sizes:
                pools.append(make_cold_or_cpu_pool(tier, size, num_slots, grain, reserved_slots))
        except BaseException:
            close_pools(pools)
            raise
        return pools

    def copy_slot(
        self, dst: Pool, dst_slot: SlotId, src: Pool, src_slot: SlotId, stream: StreamHandle
    ) -> None:
        dst.write_slot(dst_slot, src.read_slot(src_slot))

    def convert_slot(
        self,
        convert: Convert,
        dst: Pool,
        dst_slot: SlotId,
        src: Pool,
        src_slot: SlotId,
        stream: StreamHandle,
    ) -> None:
        convert_slot(convert, dst, dst_slot, src, src_slot)


def convert_slot(
    convert: Convert,
    dst: Pool,
    dst_slot: SlotId,
    src: Pool,
    src_slot: SlotId,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Convert a slot; what goes to a file is written when `wait` has seen the conversion done."""
    if isinstance(dst, DiskPool):
        staged = torch.empty(dst.slot_size, dtype=torch.uint8)
        convert(src.slot_view(src_slot), staged)
        wait()
        dst.write_slot(dst_slot, staged.numpy().data)
    else:
        convert(src.slot_view(src_slot), dst.slot_view(dst_slot))


def make_cold_or_cpu_pool(
    tier: CacheTierConfig, slot_size: int, num_slots: int, grain: int, reserved_slots: int
) -> Pool:
    """Return a pool in a file for a disk tier, in host memory else."""
    if isinstance(tier, DiskCacheTierConfig):
        return DiskPool(slot_size, num_slots, tier.path)
    return CpuPool(slot_size, num_slots, grain, reserved_slots)


def close_pools(pools: Sequence[Pool]) -> None:
    for pool in pools:
        pool.close()
