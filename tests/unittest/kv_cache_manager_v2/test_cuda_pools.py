# SPDX-License-Identifier: Apache-2.0
"""CUDA pools: the driver calls against a driver that keeps books, and (marked `cuda`) the real thing."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    CacheLevel,
    CuError,
    CuOOMError,
    KVCacheManager,
    LayerGroupId,
    LayerId,
    SlotId,
)
from tests.unittest.kv_cache_manager_v2.builders import (
    MIB,
    PAGE_BYTES,
    attention,
    make_config,
    slots,
    ssm,
)

cuda_pools = pytest.importorskip("tensorrt_llm.runtime.kv_cache_manager_v2.cuda_pools")
GRAIN = 2 * MIB
SUCCESS, OUT_OF_MEMORY, UNKNOWN = 0, 2, 999


class BookkeepingDriver:
    """Answers the calls that a pool makes; the n-th of them can fail."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS, CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.num_calls = 0
        self.fails: dict[int, int] = {}
        self.num_handles = 0

    def _status(self) -> int:
        self.num_calls += 1
        return self.fails.pop(self.num_calls, SUCCESS)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int, int]:
        self.reserved[1 << 40] = size
        return self._status(), 1 << 40

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        assert self.reserved.pop(address) == size and not self.mapped
        return (SUCCESS,)

    def cuMemCreate(self, size: int, properties: object, flags: int) -> tuple[int, int]:
        status = self._status()
        if status == SUCCESS:
            self.num_handles += 1
            self.handles.add(self.num_handles)
        return status, self.num_handles

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        status = self._status()
        if status == SUCCESS:
            assert address not in self.mapped and handle in self.handles
            self.mapped[address] = handle
        return (status,)

    def cuMemSetAccess(self, address: int, size: int, access: list[object], count: int) -> tuple[int]:
        status = self._status()
        if status == SUCCESS:
            self.accessible.add(address)
        return (status,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[int]:
        assert address in self.accessible and value == 0
        return (self._status(),)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        del self.mapped[address]
        self.accessible.discard(address)
        return (SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        self.handles.remove(handle)
        return (SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> BookkeepingDriver:
    fake = BookkeepingDriver()
    monkeypatch.setattr(cuda_pools, "driver", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return fake


def make_pool(num_slots: int) -> "cuda_pools.VirtualMemoryPool":
    return cuda_pools.VirtualMemoryPool(torch.device("cuda", 0), 3 * MIB, num_slots, GRAIN, 100)


def test_grains_come_and_go_at_the_end_of_a_range_that_stays(driver: BookkeepingDriver) -> None:
    pool = make_pool(3)
    assert driver.reserved == {pool.base_address: 300 * MIB}
    for num_slots, num_grains in ((3, 5), (10, 15), (1, 2), (0, 0), (4, 6)):
        pool.resize(num_slots)
        assert sorted(driver.mapped) == [pool.base_address + index * GRAIN for index in range(num_grains)]
        assert len(driver.handles) == num_grains and pool.num_slots == num_slots
    with pytest.raises(CuOOMError, match="give the tier less"):
        pool.resize(101)
    pool.close()
    assert not driver.reserved and not driver.handles


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, UNKNOWN])
@pytest.mark.parametrize("call", range(1, 9))
def test_a_failed_driver_call_leaves_the_pool_as_it_was(
    driver: BookkeepingDriver, call: int, status: int
) -> None:
    pool = make_pool(2)
    before = (dict(driver.mapped), set(driver.handles))
    driver.fails = {driver.num_calls + call: status}
    with pytest.raises(CuOOMError if status == OUT_OF_MEMORY else CuError):
        pool.resize(4)
    assert (driver.mapped, driver.handles, pool.num_slots) == (*before, 2)
    pool.resize(4)
    pool.close()
    assert not driver.reserved and not driver.handles


@pytest.mark.parametrize("call", range(2, 10))
def test_a_failed_construction_leaves_nothing(driver: BookkeepingDriver, call: int) -> None:
    driver.fails = {call: OUT_OF_MEMORY}
    with pytest.raises(CuOOMError):
        make_pool(2)
    assert not driver.reserved and not driver.mapped and not driver.handles


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    config = make_config([attention(), ssm()], num_grains=4, num_states=4, num_host_pages=40)
    manager = KVCacheManager(config, device="cuda")
    yield manager
    manager.check_integrity()
    manager.shutdown()


def view(manager: KVCacheManager, group: int) -> torch.Tensor:
    layer, role = ((LayerId(0), "key"), (LayerId(9), "ssm_state"))[group]
    size = manager.get_page_stride(layer, role)
    return manager.get_buffer_view(layer, role, torch.uint8, (size,))


@pytest.mark.cuda
def test_pools_on_a_gpu_are_zero_and_keep_their_base(manager: KVCacheManager) -> None:
    pages = view(manager, 0)
    assert pages.is_cuda and not pages.any()
    pages.fill_(5)
    base = pages.data_ptr()
    assert manager.resize(CacheLevel(0), 16 * MIB)
    grown = view(manager, 0)
    assert grown.data_ptr() == base == manager.get_mem_pool_base_address(LayerId(0), "key")
    assert grown[: len(pages)].eq(5).all() and not grown[len(pages) :].any()
    pages[0] = 6
    assert grown[0].eq(6).all(), "an old view still shows the pool"


@pytest.mark.cuda
def test_a_gpu_cache_goes_to_the_host_and_back_between_streams(manager: KVCacheManager) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    parked = manager.create_kv_cache()
    assert parked.resume(first.cuda_stream) and parked.resize(80)
    expected: list[torch.Tensor] = []
    with torch.cuda.stream(first):
        for group in (0, 1):
            for index in parked.get_base_page_indices(LayerGroupId(group)):
                torch.cuda._sleep(1_000_000)
                content = torch.randint(
                    0, 256, view(manager, group).shape[1:], dtype=torch.uint8, device="cuda"
                )
                view(manager, group)[index] = content
                expected.append(content)
    parked.suspend()
    takers = []
    while (taker := manager.create_kv_cache()).resume(second.cuda_stream):
        takers.append(taker)
    taker.close()
    total = manager.get_storage_statistics()[0].total
    assert takers[0].resize((total - 4) * 4)
    with torch.cuda.stream(second):
        for group in (0, 1):
            for index in takers[0].get_base_page_indices(LayerGroupId(group)):
                view(manager, group)[index] = 255
    assert slots(manager, 1)[0][0] < slots(manager, 1)[0][2]
    for taker in takers:
        taker.close()
    assert parked.resume(first.cuda_stream)
    with torch.cuda.stream(first):
        found = [
            view(manager, group)[index].clone()
            for group in (0, 1)
            for index in parked.get_base_page_indices(LayerGroupId(group))
        ]
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    parked.close()


@pytest.mark.cuda
def test_start_stop_cycles_give_gpu_memory_back() -> None:
    config = make_config([attention(), ssm()], num_grains=64, num_states=4, num_host_pages=40)
    KVCacheManager(config, device="cuda").shutdown()
    free_bytes = torch.cuda.mem_get_info()[0]
    for _ in range(10):
        KVCacheManager(config, device="cuda").shutdown()
    assert free_bytes - torch.cuda.mem_get_info()[0] < 64 * MIB


@pytest.mark.cuda
def test_more_than_the_gpu_has_is_a_lack_of_memory() -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    config = make_config([attention()], num_grains=total_bytes // (2 * MIB) - 1)
    with pytest.raises(CuOOMError):
        KVCacheManager(config, device="cuda")
    assert free_bytes - torch.cuda.mem_get_info()[0] < 64 * MIB


@pytest.mark.cuda
def test_gpu_slots_are_read_and_written_for_files() -> None:
    pool = cuda_pools.VirtualMemoryPool(torch.device("cuda", 0), PAGE_BYTES, 4, GRAIN, 8)
    pool.write_slot(SlotId(2), b"z" * PAGE_BYTES)
    assert bytes(pool.read_slot(SlotId(2))) == b"z" * PAGE_BYTES
    assert bytes(pool.read_slot(SlotId(1))) == bytes(PAGE_BYTES)
    pool.close()
