# SPDX-License-Identifier: Apache-2.0
"""Memory of the pools on CUDA. Imported only when a manager is made for a CUDA device.

A GPU pool reserves an address range once and maps physical grains into it, so that views and CUDA graphs
survive a resize. Host tiers are pinned, so that copies overlap with other work.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver

from ._math import cdiv, round_up
from ._types import MemAddress, SlotId
from .cold_codec import Convert
from .config import CacheTierConfig, GpuCacheTierConfig, HostCacheTierConfig
from .errors import CuError, CuOOMError, HostOOMError
from .pools import (
    CpuPool,
    DiskPool,
    Pool,
    close_pools,
    convert_slot,
    make_cold_or_cpu_pool,
    total_host_bytes,
)
from .streams import Event, StreamHandle, StreamOps


def _call(result: tuple[Any, ...], what: str) -> Any:
    """Return the value of a driver call. Raises CuOOMError or CuError."""
    status = result[0]
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise CuOOMError(f"the GPU has no memory left: {what}")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CuError(f"{what} failed with {status}")
    return result[1] if len(result) > 1 else None


class _RawMemory:
    """Device memory as torch can see it without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class VirtualMemoryPool:
    """Slots in a reserved address range of one GPU, backed by whole grains that come and go at its end."""

    def __init__(
        self, device: torch.device, slot_size: int, num_slots: int, grain: int, reserved_slots: int
    ) -> None:
        self.slot_size = slot_size
        self.num_slots = 0
        self._device = device
        self._grain = grain
        self._reserved_bytes = round_up(max(1, num_slots, reserved_slots) * slot_size, grain)
        self._handles: list[object] = []
        self._address = int(
            _call(driver.cuMemAddressReserve(self._reserved_bytes, 0, 0, 0), "cuMemAddressReserve")
        )
        try:
            self.resize(num_slots)
        except BaseException:
            self.close()
            raise

    @property
    def base_address(self) -> MemAddress:
        return MemAddress(self._address)

    def resize(self, num_slots: int) -> None:
        if num_slots * self.slot_size > self._reserved_bytes:
            raise CuOOMError(
                f"{num_slots} slots of {self.slot_size} bytes exceed the {self._reserved_bytes} bytes "
                "reserved, which are this GPU's memory; give the tier less"
            )
        old_grains, new_grains = len(self._handles), cdiv(num_slots * self.slot_size, self._grain)
        try:
            while len(self._handles) < new_grains:
                self._push_grain()
        except BaseException:
            self._pop_grains(old_grains)
            raise
        self._pop_grains(new_grains)
        torch.cuda.synchronize(self._device)
        self.num_slots = num_slots

    def _push_grain(self) -> None:
        """Map one more grain of zeros."""
        address = self._address + len(self._handles) * self._grain
        location = _device_location(self._device)
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = location
        access = driver.CUmemAccessDesc()
        access.location = location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        handle = _call(driver.cuMemCreate(self._grain, properties, 0), f"cuMemCreate of {self._grain} bytes")
        is_mapped = False
        try:
            _call(driver.cuMemMap(address, self._grain, 0, handle, 0), "cuMemMap")
            is_mapped = True
            _call(driver.cuMemSetAccess(address, self._grain, [access], 1), "cuMemSetAccess")
            _call(driver.cuMemsetD8(address, 0, self._grain), "cuMemsetD8")
        except BaseException:
            if is_mapped:
                driver.cuMemUnmap(address, self._grain)
            driver.cuMemRelease(handle)
            raise
        self._handles.append(handle)

    def _pop_grains(self, num_grains: int) -> None:
        """Unmap the grains from `num_grains` on, after all work on them is done."""
        if len(self._handles) > num_grains:
            torch.cuda.synchronize(self._device)
        while len(self._handles) > num_grains:
            handle = self._handles.pop()
            address = self._address + len(self._handles) * self._grain
            _call(driver.cuMemUnmap(address, self._grain), "cuMemUnmap")
            _call(driver.cuMemRelease(handle), "cuMemRelease")

    def bytes_view(self) -> torch.Tensor:
        num_bytes = self.num_slots * self.slot_size
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_RawMemory(self._address, num_bytes), device=self._device)

    def slot_view(self, slot: SlotId) -> torch.Tensor:
        return torch.as_tensor(
            _RawMemory(self._address + slot * self.slot_size, self.slot_size), device=self._device
        )

    def read_slot(self, slot: SlotId) -> memoryview | bytes:
        """Return a host copy, after the current stream's work."""
        return bytes(self.slot_view(slot).cpu().numpy())

    def write_slot(self, slot: SlotId, content: memoryview | bytes) -> None:
        """Overwrite a slot from host memory, after the current stream's work."""
        self.slot_view(slot).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def close(self) -> None:
        self._pop_grains(0)
        self.num_slots = 0
        if self._address:
            _call(driver.cuMemAddressFree(self._address, self._reserved_bytes), "cuMemAddressFree")
        self._address = 0


def _device_location(device: torch.device) -> object:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = torch.cuda.current_device() if device.index is None else device.index
    return location


class PinnedHostPool(CpuPool):
    """Host memory that the GPU can copy to and from without waiting."""

    __slots__ = ("_pinned_bytes",)

    def __init__(self, slot_size: int, num_slots: int, grain: int, reserved_slots: int) -> None:
        self._pinned_bytes = 0
        super().__init__(slot_size, num_slots, grain, reserved_slots)

    def resize(self, num_slots: int) -> None:
        old_num_slots = self.num_slots
        self._unpin()
        super().resize(num_slots)
        try:
            self._pin()
        except HostOOMError:
            super().resize(old_num_slots)
            self._pin()
            raise

    def _pin(self) -> None:
        num_bytes = self.num_slots * self.slot_size
        if num_bytes:
            status = driver.cuMemHostRegister(self.base_address, num_bytes, 0)[0]
            if status != driver.CUresult.CUDA_SUCCESS:
                raise HostOOMError(f"{num_bytes} bytes of the host tier cannot be pinned: {status}")
        self._pinned_bytes = num_bytes

    def _unpin(self) -> None:
        if self._pinned_bytes:
            torch.cuda.synchronize()
            _call(driver.cuMemHostUnregister(self.base_address), "cuMemHostUnregister")
        self._pinned_bytes = 0

    def close(self) -> None:
        self._unpin()
        super().close()


_external_stream: Callable[..., torch.cuda.Stream] = torch.cuda.ExternalStream
_new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event


class CudaStreamOps:
    """Events of torch on streams given as driver handles; 0 is the default stream."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, handle: StreamHandle) -> torch.cuda.Stream:
        if handle == 0:
            return torch.cuda.default_stream(self._device)
        return _external_stream(handle, device=self._device)

    def record(self, stream: StreamHandle) -> Event | None:
        event = _new_event()
        event.record(self.stream(stream))
        return event

    def wait(self, stream: StreamHandle, event: Event | None) -> None:
        if isinstance(event, torch.cuda.Event):
            self.stream(stream).wait_event(event)


class CudaBackend:
    """GPU tier in virtual memory, host tiers pinned, disk tiers in files."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        torch.zeros(1, device=self._device)  # makes the device's context current, as driver calls need it
        self._stream_ops = CudaStreamOps(self._device)
        self.streams: StreamOps = self._stream_ops

    def make_pools(
        self, tier: CacheTierConfig, slot_sizes: Sequence[int], num_slots: int, grain: int
    ) -> list[Pool]:
        pools: list[Pool] = []
        try:
            for size in slot_sizes:
                pools.append(self._make_pool(tier, size, num_slots, grain, sum(slot_sizes)))
        except BaseException:
            close_pools(pools)
            raise
        return pools

    def _make_pool(
        self, tier: CacheTierConfig, size: int, num_slots: int, grain: int, group_slot_bytes: int
    ) -> Pool:
        if isinstance(tier, GpuCacheTierConfig):
            total_bytes = torch.cuda.get_device_properties(self._device).total_memory
            return VirtualMemoryPool(self._device, size, num_slots, grain, total_bytes // group_slot_bytes)
        reserved_slots = total_host_bytes() // group_slot_bytes
        if isinstance(tier, HostCacheTierConfig):
            return PinnedHostPool(size, num_slots, grain, reserved_slots)
        return make_cold_or_cpu_pool(tier, size, num_slots, grain, reserved_slots)

    def copy_slot(
        self, dst: Pool, dst_slot: SlotId, src: Pool, src_slot: SlotId, stream: StreamHandle
    ) -> None:
        torch_stream = self._stream_ops.stream(stream)
        with torch.cuda.stream(torch_stream):
            if isinstance(dst, DiskPool) or isinstance(src, DiskPool):
                # Files are read and written by this thread: earlier copies into host slots must be done.
                torch_stream.synchronize()
                dst.write_slot(dst_slot, src.read_slot(src_slot))
                torch_stream.synchronize()
            elif isinstance(dst, VirtualMemoryPool | PinnedHostPool) and isinstance(
                src, VirtualMemoryPool | PinnedHostPool
            ):
                dst.slot_view(dst_slot).copy_(src.slot_view(src_slot), non_blocking=True)

    def convert_slot(
        self,
        convert: Convert,
        dst: Pool,
        dst_slot: SlotId,
        src: Pool,
        src_slot: SlotId,
        stream: StreamHandle,
    ) -> None:
        torch_stream = self._stream_ops.stream(stream)
        with torch.cuda.stream(torch_stream):
            touches_file = isinstance(dst, DiskPool) or isinstance(src, DiskPool)
            if touches_file:
                torch_stream.synchronize()
            convert_slot(convert, dst, dst_slot, src, src_slot, torch_stream.synchronize)
            if touches_file:
                # The pageable copy of what was read lives until here.
                torch_stream.synchronize()
