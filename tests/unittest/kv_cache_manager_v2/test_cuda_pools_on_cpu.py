# SPDX-License-Identifier: Apache-2.0
"""The whole manager on CUDA pools whose GPU is host memory."""

from pathlib import Path

import pytest
import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    CacheLevel,
    CuError,
    CuOOMError,
    DiskCacheTierConfig,
    HostOOMError,
    KVCacheManager,
    LayerGroupId,
    LayerId,
)
from tests.unittest.kv_cache_manager_v2.builders import (
    MIB,
    attention,
    make_config,
    read_slot,
    run_prompt,
    slots,
    ssm,
)
from tests.unittest.kv_cache_manager_v2.fake_cuda import (
    GRANULARITY,
    OUT_OF_MEMORY,
    TOTAL_BYTES,
    UNKNOWN,
    FakeDriver,
    FakeEvent,
    FakeStream,
    FakeTorch,
)
from tests.unittest.kv_cache_manager_v2.test_cold_codec import Quarter

cuda_pools = pytest.importorskip("tensorrt_llm.runtime.kv_cache_manager_v2.cuda_pools")
TEXT = list(range(40, 90))
GROUPS = (LayerGroupId(0), LayerGroupId(1))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_pools, "driver", fake)
    monkeypatch.setattr(cuda_pools, "torch", FakeTorch(fake))
    monkeypatch.setattr(cuda_pools, "_new_event", FakeEvent)
    monkeypatch.setattr(cuda_pools, "_external_stream", lambda handle, device: FakeStream())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return fake


def make(**options: object) -> KVCacheManager:
    chosen: dict[str, object] = {"num_grains": 4, "num_states": 4, "num_host_pages": 40, **options}
    return KVCacheManager(make_config([attention(), ssm()], **chosen), device="cuda")  # type: ignore[arg-type]


def view(manager: KVCacheManager, group: int) -> torch.Tensor:
    layer, role = ((LayerId(0), "key"), (LayerId(9), "ssm_state"))[group]
    return manager.get_buffer_view(layer, role, torch.uint8, (manager.get_page_stride(layer, role),))


def test_the_pools_are_whole_grains_of_zeros_at_a_base_that_stays(driver: FakeDriver) -> None:
    manager = make()
    bases = [manager.get_mem_pool_base_address(LayerId(0), "key"), view(manager, 1).data_ptr()]
    assert not view(manager, 0).any() and not view(manager, 1).any()
    assert sum(driver.handles.values()) == 8 * MIB == len(driver.mapped) * GRANULARITY
    view(manager, 0).fill_(5)
    num_pages = len(view(manager, 0))
    for quota in (32 * MIB, 8 * MIB, 16 * MIB):
        assert manager.resize(CacheLevel(0), quota)
        assert sum(driver.handles.values()) == quota
        assert [view(manager, 0).data_ptr(), view(manager, 1).data_ptr()] == bases
        kept = min(num_pages, len(view(manager, 0)))
        assert view(manager, 0)[:kept].eq(5).all() and not view(manager, 0)[num_pages:].any()
    manager.check_integrity()
    manager.shutdown()
    assert driver.is_empty()


@pytest.mark.parametrize("codec", [None, Quarter()])
def test_caches_go_to_host_and_disk_and_back(driver: FakeDriver, codec: object, tmp_path: Path) -> None:
    disk = DiskCacheTierConfig(16 * MIB, str(tmp_path))
    ratio = {"initial_pool_ratio": [0.5, 0.5]}
    config = make_config([attention(), ssm()], num_grains=4, num_host_pages=8, cold_tiers=[disk], **ratio)
    manager = KVCacheManager(config, cold_page_codec=codec, device="cuda")  # type: ignore[arg-type]
    total = slots(manager)[0][2]
    parked = manager.create_kv_cache()
    assert parked.resume(7) and parked.resize(80)
    for group in GROUPS:
        for ordinal, index in enumerate(parked.get_base_page_indices(group)):
            view(manager, group)[index] = 10 * group + ordinal

    def contents() -> list[bytes]:
        indices = [(group, index) for group in GROUPS for index in parked.get_base_page_indices(group)]
        return [read_slot(manager, group, 0, index) for group, index in indices]

    before = contents()
    parked.suspend()
    takers = []
    while (taker := manager.create_kv_cache()).resume(8):
        takers.append(taker)
    taker.close()
    assert takers[0].resize((total - 2) * 4)
    assert (
        slots(manager, 1)[0][0] < slots(manager, 1)[0][2] or slots(manager, 2)[0][0] < slots(manager, 2)[0][2]
    )
    for taker in takers:
        taker.close()
    assert parked.resume(7) and contents() == before
    parked.close()
    manager.check_integrity()
    manager.shutdown()
    assert driver.is_empty() and list(tmp_path.iterdir()) == []


def count_calls(driver: FakeDriver) -> int:
    manager = make()
    num_calls = len(driver.calls)
    manager.shutdown()
    assert driver.is_empty()
    return num_calls


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, UNKNOWN])
def test_a_construction_that_fails_at_any_call_leaves_nothing(driver: FakeDriver, status: int) -> None:
    num_calls = count_calls(driver)
    assert num_calls > 15
    for call in range(1, num_calls + 1):
        driver.calls.clear()
        driver.fails = {call: status}
        with pytest.raises((CuOOMError, CuError, HostOOMError)):
            make()
        assert driver.is_empty(), f"call {call} of {num_calls}"


@pytest.mark.parametrize("level", [0, 1])
def test_a_resize_that_is_refused_at_any_call_changes_nothing(driver: FakeDriver, level: int) -> None:
    """Growth of the GPU and of the pinned host tier, with a prefix that must survive."""
    quota = (24 * MIB, 12 * MIB)[level]
    call = 0
    while True:
        call += 1
        manager = make()
        run_prompt(manager, TEXT[:20]).close()
        sizes = [slots(manager, one) for one in range(2)]
        held = (len(driver.handles), dict(driver.pinned))
        driver.fails = {len(driver.calls) + call: OUT_OF_MEMORY}
        is_grown = manager.resize(CacheLevel(level), quota)
        if not is_grown:
            assert [slots(manager, one) for one in range(2)] == sizes
            assert (len(driver.handles), driver.pinned) == held
        assert manager.probe_reuse(None, TEXT[:21]) == 20
        manager.check_integrity()
        was_reached, driver.fails = not driver.fails, {}
        manager.shutdown()
        assert driver.is_empty()
        if not was_reached:
            break
    assert call > 2


def test_more_than_the_gpu_has_is_a_lack_of_memory(driver: FakeDriver) -> None:
    with pytest.raises(CuOOMError):
        make(num_grains=TOTAL_BYTES // GRANULARITY + 1)
    assert driver.is_empty()
    manager = make()
    assert manager.resize(CacheLevel(0), TOTAL_BYTES + GRANULARITY) is False
    manager.check_integrity()
    manager.shutdown()
    assert driver.is_empty()


def test_ten_start_stop_cycles_free_all_memory_of_every_tier(driver: FakeDriver, tmp_path: Path) -> None:
    for _ in range(10):
        manager = make(cold_tiers=[DiskCacheTierConfig(2 * MIB, str(tmp_path))])
        run_prompt(manager, TEXT[:30]).close()
        manager.shutdown()
        assert driver.is_empty() and list(tmp_path.iterdir()) == []
