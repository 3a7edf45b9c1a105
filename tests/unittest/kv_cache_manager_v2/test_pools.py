# SPDX-License-Identifier: Apache-2.0
"""Memory of the pools on a CPU and in files: zero at first, stable base, given back at the end."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    HostOOMError,
    KVCacheManager,
    LayerId,
    MisuseError,
    SlotId,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.backends import make_backend
from tensorrt_llm.runtime.kv_cache_manager_v2.pools import CpuPool, DiskPool, total_host_bytes
from tests.unittest.kv_cache_manager_v2.builders import MIB, attention, make_config, make_manager, ssm


def memory_bytes() -> tuple[int, int]:
    """(address space, resident) of this process."""
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(size) * page, int(resident) * page


def test_memory_is_zero_and_keeps_its_base_and_contents_through_resizes() -> None:
    pool = CpuPool(slot_size=5000, num_slots=10, grain=4096, reserved_slots=100)
    base = pool.base_address
    assert not pool.bytes_view().any()
    pool.bytes_view().fill_(7)
    pool.resize(60)
    assert pool.base_address == base and pool.bytes_view().numel() == 300_000
    assert pool.bytes_view()[:50_000].eq(7).all() and not pool.bytes_view()[50_000:].any()
    pool.resize(1)
    pool.resize(10)
    assert pool.bytes_view()[:5000].eq(7).all()
    assert not pool.bytes_view()[round(5000 / 4096 + 0.5) * 4096 :].any(), (
        "unmapped grains come back as zeros"
    )
    pool.close()


def test_slots_are_read_and_written_alone() -> None:
    pool = CpuPool(slot_size=16, num_slots=4, grain=4096, reserved_slots=4)
    pool.write_slot(SlotId(2), b"x" * 16)
    assert [bytes(pool.read_slot(SlotId(slot)))[:1] for slot in range(4)] == [b"\0", b"\0", b"x", b"\0"]
    with pytest.raises(ValueError):
        pool.write_slot(SlotId(2), b"y" * 15)
    pool.close()


def test_more_than_the_reserved_range_is_a_lack_of_memory() -> None:
    pool = CpuPool(slot_size=4096, num_slots=1, grain=4096, reserved_slots=4)
    with pytest.raises(HostOOMError, match="4096 bytes exceed"):
        pool.resize(5)
    assert pool.num_slots == 1
    pool.close()


def test_slots_behind_4_gib_are_addressed_in_64_bits() -> None:
    """Address space costs nothing until touched; slot 4096 of 1.5 MiB lies beyond 2**32 bytes."""
    manager = KVCacheManager(make_config([ssm()], num_grains=1), device="cpu")
    pool = CpuPool(slot_size=3 * MIB // 2, num_slots=4200, grain=4096, reserved_slots=4200)
    pool.write_slot(SlotId(4096), bytes([9]) * (3 * MIB // 2))
    assert pool.bytes_view()[4096 * (3 * MIB // 2)] == 9
    assert not pool.bytes_view()[: 2 * MIB].any() and not pool.bytes_view()[4095 * (3 * MIB // 2)]
    pool.close()
    manager.shutdown()


def test_disk_slots_read_back_and_the_file_has_no_name(tmp_path: Path) -> None:
    pool = DiskPool(4096, 3, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    pool.write_slot(SlotId(1), b"d" * 4096)
    pool.resize(5)
    assert bytes(pool.read_slot(SlotId(1))) == b"d" * 4096
    assert bytes(pool.read_slot(SlotId(4))) == bytes(4096)
    for ask in (lambda: pool.base_address, pool.bytes_view):
        with pytest.raises(MisuseError, match="level 0"):
            ask()
    pool.close()
    pool.close()


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(MisuseError, match=f"device is {device}; use 'cpu'"):
        make_backend(torch.device(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(MisuseError, match="working GPU"):
        KVCacheManager(make_config([attention()]))


def test_ten_start_stop_cycles_free_all_memory() -> None:
    """Each cycle touches 24 MiB and reserves more address space than the machine has memory."""

    def cycle() -> weakref.ref[KVCacheManager]:
        manager = make_manager([attention(), ssm()], num_grains=12, num_states=8)
        for layer, role in ((LayerId(0), "key"), (LayerId(9), "ssm_state")):
            size = manager.get_page_stride(layer, role)
            manager.get_buffer_view(layer, role, torch.uint8, (size,)).fill_(1)
        cache = manager.create_kv_cache(input_tokens=range(40))
        assert cache.resume() and cache.resize(40)
        cache.commit(range(40))
        cache.close()
        manager.shutdown()
        return weakref.ref(manager)

    cycle()
    gc.collect()
    before = memory_bytes()
    managers = [cycle() for _ in range(10)]
    gc.collect()
    after = memory_bytes()
    assert not any(manager() for manager in managers)
    assert after[0] - before[0] < total_host_bytes() // 2
    assert after[1] - before[1] < 24 * MIB


def test_shutdown_frees_memory_although_a_view_is_kept() -> None:
    manager = make_manager([attention()], num_grains=16)
    size = manager.get_page_stride(LayerId(0), "key")
    view = manager.get_buffer_view(LayerId(0), "key", torch.uint8, (size,))
    view.fill_(1)
    before = memory_bytes()
    manager.shutdown()
    assert before[1] - memory_bytes()[1] > 24 * MIB
    assert not view[0].any(), "a kept view reads zeros"
