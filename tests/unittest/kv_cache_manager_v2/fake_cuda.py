# SPDX-License-Identifier: Apache-2.0
"""A GPU made of host memory: the driver calls and the parts of torch that `cuda_pools` uses.

The driver refuses what the real one refuses (addresses outside a reservation or off the granularity, a second
mapping, access or memset without a mapping, a release or unmap of what is not there) and any of its calls can
be made to fail. Tensors may only look at memory that is mapped and accessible.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import torch

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN = 0, 1, 2, 999
GRANULARITY = 2 << 20
TOTAL_BYTES = 256 << 20


class FakeDriver:
    """`fails[n]` is the status of the n-th call from the start, which then does nothing."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS, CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace

    def __init__(self) -> None:
        self.memory: dict[int, mmap.mmap] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.pinned: dict[int, int] = {}
        self.fails: dict[int, int] = {}
        self.calls: list[str] = []
        self._num_handles = 0

    def is_empty(self) -> bool:
        return not (self.memory or self.handles or self.mapped or self.accessible or self.pinned)

    def _status(self, call: str) -> int:
        self.calls.append(call)
        return self.fails.pop(len(self.calls), SUCCESS)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int, int]:
        assert size > 0 and size % GRANULARITY == 0
        status, start = self._status("reserve"), 0
        if status == SUCCESS:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self.memory[start] = memory
        return status, start

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        assert len(self.memory[address]) == size, "only a whole reservation is freed"
        assert not any(address <= one < address + size for one in self.mapped), "something is still mapped"
        status = self._status("address free")
        if status == SUCCESS:
            del self.memory[address]
        return (status,)

    def cuMemCreate(self, size: int, properties: SimpleNamespace, flags: int) -> tuple[int, int]:
        assert size > 0 and size % GRANULARITY == 0 and properties.location.id == 0
        status = self._status("create")
        if status == SUCCESS and sum(self.handles.values()) + size > TOTAL_BYTES:
            status = OUT_OF_MEMORY
        if status != SUCCESS:
            return status, 0
        self._num_handles += 1
        self.handles[self._num_handles] = size
        return status, self._num_handles

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        assert self.handles[handle] == size and offset == 0
        start = self._reservation_of(address, size)
        assert (address - start) % GRANULARITY == 0
        ranges = [(one, one + length) for one, (length, _) in self.mapped.items()]
        assert all(address + size <= begin or end <= address for begin, end in ranges), "mapped already"
        assert handle not in [used for _, used in self.mapped.values()]
        status = self._status("map")
        if status == SUCCESS:
            self.mapped[address] = (size, handle)
        return (status,)

    def cuMemSetAccess(
        self, address: int, size: int, access: list[SimpleNamespace], count: int
    ) -> tuple[int]:
        assert self.mapped[address][0] == size and len(access) == count == 1 and access[0].flags == 3
        status = self._status("set access")
        if status == SUCCESS:
            self.accessible.add(address)
            ctypes.memset(address, 0xEE, size)
        return (status,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[int]:
        self.check_access(address, size)
        status = self._status("memset")
        if status == SUCCESS:
            ctypes.memset(address, value, size)
        return (status,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        assert self.mapped[address][0] == size, "only a whole mapping is unmapped"
        status = self._status("unmap")
        if status == SUCCESS:
            del self.mapped[address]
            self.accessible.discard(address)
            ctypes.memset(address, 0xDD, size)
        return (status,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        assert handle not in [used for _, used in self.mapped.values()], "released while mapped"
        status = self._status("release")
        if status == SUCCESS:
            del self.handles[handle]
        return (status,)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        assert size > 0 and address not in self.pinned
        status = self._status("host register")
        if status == SUCCESS:
            self.pinned[address] = size
        return (status,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        assert address in self.pinned
        status = self._status("host unregister")
        if status == SUCCESS:
            del self.pinned[address]
        return (status,)

    def _reservation_of(self, address: int, size: int) -> int:
        for start, memory in self.memory.items():
            if start <= address and address + size <= start + len(memory):
                return start
        raise AssertionError(f"{size} bytes at {address:#x} are in no reservation")

    def check_access(self, address: int, size: int) -> None:
        """Every byte must lie in an accessible mapping."""
        at = address
        while at < address + size:
            found = [one for one in self.accessible if one <= at < one + self.mapped[one][0]]
            assert found, f"byte {at:#x} is not accessible"
            at = found[0] + self.mapped[found[0]][0]


class FakeEvent:
    """Done at once: work on the fake GPU is done when its call returns."""

    def record(self, stream: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class FakeStream:
    def synchronize(self) -> None:
        return None

    def wait_event(self, event: FakeEvent) -> None:
        return None


@contextlib.contextmanager
def _current(stream: FakeStream) -> Iterator[None]:
    yield


class FakeTorch:
    """Stands for the module `torch` in `cuda_pools`."""

    Tensor, device, uint8 = torch.Tensor, torch.device, torch.uint8
    frombuffer = staticmethod(torch.frombuffer)

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.cuda = SimpleNamespace(
            Event=FakeEvent,
            Stream=FakeStream,
            current_device=lambda: 0,
            default_stream=lambda device: FakeStream(),
            get_device_properties=lambda device: SimpleNamespace(total_memory=TOTAL_BYTES),
            stream=_current,
            synchronize=lambda device=None: None,
        )

    def as_tensor(self, raw: object, device: torch.device) -> torch.Tensor:
        interface = raw.__cuda_array_interface__  # type: ignore[attr-defined]
        (size,), (address, _) = interface["shape"], interface["data"]
        self._driver.check_access(address, size)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def zeros(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(size)
