# SPDX-License-Identifier: Apache-2.0
"""`cold_page_codec`: pages take another form off the GPU, and come back as the codec makes them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    CacheLevel,
    ColdPageCodec,
    DiskCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    LayerGroupId,
    MisuseError,
    PoolGroupDesc,
    _KVCache,
)
from tests.unittest.kv_cache_manager_v2.builders import (
    MIB,
    PAGE_BYTES,
    STATE_BYTES,
    attention,
    make_config,
    read_slot,
    run_prompt,
    slots,
    ssm,
)

TEXT = list(range(900, 1000))
ATTENTION, SSM = LayerGroupId(0), LayerGroupId(1)


class Quarter:
    """Keeps every fourth byte, plus one; decoding repeats it. Exact where four neighbours are equal."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def cold_slot_sizes(self, group: PoolGroupDesc) -> list[int]:
        return [size // 4 for size in group.slot_sizes]

    def encode(self, life_cycle: int, pool: int, hot: torch.Tensor, cold: torch.Tensor) -> None:
        assert hot.dtype == cold.dtype == torch.uint8 and hot.numel() == 4 * cold.numel()
        self.calls.append(("encode", life_cycle, pool))
        cold.copy_(hot[::4] + 1)

    def decode(self, life_cycle: int, pool: int, cold: torch.Tensor, hot: torch.Tensor) -> None:
        self.calls.append(("decode", life_cycle, pool))
        hot.view(-1, 4).copy_((cold - 1).unsqueeze(1).expand(-1, 4))


def manager_with(codec: object, num_host_pages: int = 4, **options: object) -> KVCacheManager:
    config = make_config([attention()], num_host_pages=num_host_pages, **options)  # type: ignore[arg-type]
    return KVCacheManager(config, cold_page_codec=codec, device="cpu")  # type: ignore[arg-type]


def active_with(manager: KVCacheManager, num_blocks: int) -> _KVCache:
    cache = manager.create_kv_cache()
    assert cache.resume() and cache.resize(num_blocks * 4)
    return cache


def fill(manager: KVCacheManager, cache: _KVCache) -> None:
    for ordinal, index in enumerate(cache.get_base_page_indices(ATTENTION)):
        store = manager.storage.group(ATTENTION)
        store.pools[0].slot_view(index).fill_(ordinal + 1)


def contents(manager: KVCacheManager, cache: _KVCache) -> list[set[int]]:
    store = manager.storage.group(ATTENTION)
    return [set(store.pools[0].slot_view(i).tolist()) for i in cache.get_base_page_indices(ATTENTION)]


def test_a_host_tier_holds_four_times_the_pages_and_they_come_back() -> None:
    manager = manager_with(codec := Quarter())
    assert isinstance(codec, ColdPageCodec)
    assert slots(manager, 1) == [(16, 0, 16)], "four pages' bytes hold sixteen of a quarter"
    parked = active_with(manager, 10)
    fill(manager, parked)
    parked.suspend()
    taker = active_with(manager, 16)
    assert slots(manager, 1) == [(6, 0, 16)] and codec.calls == [("encode", 0, 0)] * 10
    taker.close()
    codec.calls.clear()
    assert parked.resume()
    assert codec.calls == [("decode", 0, 0)] * 10
    assert contents(manager, parked) == [{ordinal + 1} for ordinal in range(10)]
    totals = manager.get_total_stats()[0]
    assert totals.offload_bytes == totals.onboard_bytes == 10 * PAGE_BYTES // 4
    parked.close()
    manager.check_integrity()
    manager.shutdown()


def test_pages_move_between_cold_tiers_as_they_are(tmp_path: Path) -> None:
    disk = DiskCacheTierConfig(2 * MIB, str(tmp_path))
    manager = manager_with(codec := Quarter(), num_host_pages=1, cold_tiers=[disk])
    assert [slots(manager, level)[0][2] for level in range(3)] == [16, 4, 64]
    parked = active_with(manager, 12)
    fill(manager, parked)
    parked.suspend()
    taker = active_with(manager, 16)
    assert [call[0] for call in codec.calls] == ["encode"] * 12
    assert slots(manager, 2) == [(64 - 8, 0, 64)]
    taker.close()
    assert parked.prefetch(CacheLevel(1)) is False
    assert parked.resume()
    assert [call[0] for call in codec.calls[12:]] == ["decode"] * 12
    assert contents(manager, parked) == [{ordinal + 1} for ordinal in range(12)]
    parked.close()
    manager.shutdown()


def test_a_codec_may_lose_what_it_does_not_keep() -> None:
    manager = manager_with(Quarter())
    parked = active_with(manager, 1)
    (index,) = parked.get_base_page_indices(ATTENTION)
    manager.storage.group(ATTENTION).pools[0].slot_view(index)[:8] = torch.arange(8, dtype=torch.uint8)
    parked.suspend()
    active_with(manager, 16).close()
    assert parked.resume()
    (index,) = parked.get_base_page_indices(ATTENTION)
    assert list(read_slot(manager, 0, 0, index)[:8]) == [0, 0, 0, 0, 4, 4, 4, 4]
    parked.close()
    manager.shutdown()


def test_states_and_pages_are_told_apart_and_copies_on_the_gpu_are_not_encoded() -> None:
    config = make_config([attention(), ssm()], num_grains=2, num_host_pages=40, initial_pool_ratio=[0.5, 0.5])
    manager = KVCacheManager(config, cold_page_codec=(codec := Quarter()), device="cpu")
    sizes = [one.slot_sizes for one in manager.get_storage_statistics(CacheLevel(1))]
    assert sizes == [(PAGE_BYTES // 4,), (STATE_BYTES // 4,)]
    run_prompt(manager, TEXT[:6]).close()
    reader = manager.create_kv_cache(input_tokens=TEXT[:9])
    assert reader.resume() and codec.calls == [], "a snapshot and a partial block were copied as they are"
    reader.suspend()
    others = []
    while (other := manager.create_kv_cache()).resume():
        others.append(other)
    other.close()
    assert ("encode", 1, 0) in codec.calls
    for one in (*others, reader):
        one.close()
    manager.check_integrity()
    manager.shutdown()


def test_a_rebalance_shares_cold_bytes_so_that_slots_stay_in_proportion() -> None:
    """States keep their size off the GPU, pages a quarter: the host's bytes must follow."""

    class PagesOnly(Quarter):
        def cold_slot_sizes(self, group: PoolGroupDesc) -> list[int]:
            return [size if size == STATE_BYTES else size // 4 for size in group.slot_sizes]

    config = make_config(
        [attention(), ssm()],
        num_grains=40,
        cold_tiers=[HostCacheTierConfig(40 * MIB)],
        rebalance_moving_average_decay=0.5,
    )
    manager = KVCacheManager(config, cold_page_codec=PagesOnly(), device="cpu")
    cache = active_with(manager, 6)
    cache.close()
    assert manager.adjust()
    hot, cold = ([one.total for one in manager.get_storage_statistics(CacheLevel(level))] for level in (0, 1))
    assert abs(hot[0] / hot[1] / (cold[0] / cold[1]) - 1) < 0.05
    manager.shutdown()


class _Failing(Quarter):
    def encode(self, life_cycle: int, pool: int, hot: torch.Tensor, cold: torch.Tensor) -> None:
        if len(self.calls) == 3:
            raise RuntimeError("no scratch memory")
        super().encode(life_cycle, pool, hot, cold)


def test_an_error_of_the_codec_passes_with_every_page_where_it_was() -> None:
    manager = manager_with(codec := _Failing())
    parked = active_with(manager, 10)
    fill(manager, parked)
    parked.suspend()
    taker = manager.create_kv_cache()
    assert taker.resume()
    with pytest.raises(RuntimeError, match="no scratch memory"):
        taker.resize(64)
    assert (taker.capacity, slots(manager, 1)[0][0]) == (0, 16 - 3)
    manager.check_integrity()
    codec.calls.append(("past", 0, 0))
    assert taker.resize(64)
    taker.close()
    assert parked.resume()
    assert contents(manager, parked) == [{ordinal + 1} for ordinal in range(10)]
    parked.close()
    manager.shutdown()


def _with_sizes(sizes: list[object]) -> Quarter:
    codec = Quarter()
    codec.cold_slot_sizes = lambda group: sizes  # type: ignore[method-assign, assignment, return-value]
    return codec


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "no_codec": (lambda: "zstd", r"is a str; give an object with cold_slot_sizes, encode and decode"),
    "too_many": (lambda: _with_sizes([8, 8]), r"slot sizes \[8, 8\]; give one positive number.*\[131072\]"),
    "zero": (lambda: _with_sizes([0]), r"slot sizes \[0\]"),
    "half_a_byte": (lambda: _with_sizes([0.5]), r"slot sizes \[0.5\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_codec_is_refused_before_anything_is_allocated(name: str) -> None:
    make, message = MISTAKES[name]
    with pytest.raises(MisuseError, match=message):
        manager_with(make())


def test_without_a_cold_tier_a_codec_has_nothing_to_do() -> None:
    manager = manager_with(codec := Quarter(), num_host_pages=0)
    active_with(manager, 16).close()
    assert codec.calls == []
    manager.shutdown()
