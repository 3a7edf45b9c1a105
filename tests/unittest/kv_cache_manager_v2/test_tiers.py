# SPDX-License-Identifier: Apache-2.0
"""Eviction order, migration between tiers and back, and what the tiers never do to held pages."""

from pathlib import Path

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    CacheLevel,
    DiskCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    LayerGroupId,
    LifeCycle,
    MisuseError,
    Priority,
    _KVCache,
)
from tests.unittest.kv_cache_manager_v2.builders import (
    MIB,
    PAGE_BYTES,
    attention,
    make_config,
    make_manager,
    pages_view,
    run_prompt,
    slots,
    ssm,
)

TEXT = list(range(200, 400))
ATTENTION, SSM = LayerGroupId(0), LayerGroupId(1)


def fill(manager: KVCacheManager, cache: _KVCache, base: int) -> None:
    """Write base + ordinal into every page."""
    view = pages_view(manager)
    for ordinal, index in enumerate(cache.get_base_page_indices(ATTENTION)):
        view[index] = base + ordinal


def content(manager: KVCacheManager, cache: _KVCache) -> list[int]:
    return pages_view(manager)[list(cache.get_base_page_indices(ATTENTION))].tolist()


def active_with(manager: KVCacheManager, num_blocks: int) -> _KVCache:
    cache = manager.create_kv_cache()
    assert cache.resume() and cache.resize(num_blocks * 4)
    return cache


class TestEvictionOrder:
    def test_least_recently_used_goes_first_and_deep_blocks_before_shallow(self) -> None:
        manager = make_manager([attention()])
        run_prompt(manager, TEXT[:20]).close()
        run_prompt(manager, TEXT[100:120]).close()
        assert manager.probe_reuse(None, TEXT[:21]) == 20
        taker = active_with(manager, 9)
        assert manager.probe_reuse(None, TEXT[:21]) == 8, "its three deepest blocks went first"
        assert manager.probe_reuse(None, TEXT[100:121]) == 20
        taker.close()
        manager.shutdown()

    def test_reuse_makes_recent(self) -> None:
        manager = make_manager([attention()])
        for begin in (0, 100):
            run_prompt(manager, TEXT[begin : begin + 20]).close()
        manager.create_kv_cache(input_tokens=TEXT[:21]).close()
        taker = active_with(manager, 9)
        assert manager.probe_reuse(None, TEXT[:21]) == 20
        assert manager.probe_reuse(None, TEXT[100:121]) == 8
        taker.close()
        manager.shutdown()

    def test_low_priority_goes_before_least_recently_used(self) -> None:
        manager = make_manager([attention()])

        def low(ordinal: int, value: LifeCycle) -> Priority:
            return Priority(1)

        run_prompt(manager, TEXT[:20]).close()
        cache = manager.create_kv_cache(custom_priority_callback=low)
        assert cache.resume() and cache.resize(20)
        cache.commit(TEXT[100:120])
        cache.close()
        taker = active_with(manager, 9)
        assert manager.probe_reuse(None, TEXT[:21]) == 20
        assert manager.probe_reuse(None, TEXT[100:121]) == 8
        taker.close()
        manager.shutdown()

    def test_a_dropped_block_takes_what_lies_below_it_along(self) -> None:
        """A first block of low priority is evicted: nothing behind it can be reached, so nothing stays."""
        manager = make_manager([attention()])

        def low_at_the_start(ordinal: int, value: LifeCycle) -> Priority:
            return Priority(1 if ordinal == 0 else 90)

        cache = manager.create_kv_cache(custom_priority_callback=low_at_the_start)
        assert cache.resume() and cache.resize(40)
        cache.commit(TEXT[:40])
        cache.close()
        taker = active_with(manager, 7)
        assert slots(manager) == [(9, 0, 16)]
        assert manager.probe_reuse(None, TEXT[:41]) == 0
        manager.check_integrity()
        taker.close()
        manager.shutdown()

    def test_prefixes_of_open_caches_stay(self) -> None:
        manager = make_manager([attention()])
        reader = run_prompt(manager, TEXT[:32])
        reader.suspend()
        taker = active_with(manager, 8)
        assert taker.resize(9 * 4) is False
        assert slots(manager) == [(0, 0, 16)]
        assert manager.probe_reuse(None, TEXT[:33]) == 32
        taker.close()
        reader.close()
        manager.shutdown()


class TestHostTier:
    def test_suspended_pages_move_away_and_come_back_in_other_slots(self) -> None:
        manager = make_manager([attention(), ssm()], num_grains=2, num_host_pages=64)
        parked = active_with(manager, 6)
        fill(manager, parked, 50)
        state_slot = parked.get_ssm_block_base_index(SSM)
        pages_view(manager, 1)[state_slot] = 77
        old_indices = list(parked.get_base_page_indices(ATTENTION))
        parked.suspend()
        takers = [active_with(manager, 16)]
        while (taker := manager.create_kv_cache()).resume():
            takers.append(taker)
        taker.close()
        manager.check_integrity()
        assert slots(manager, 1)[0][0] < slots(manager, 1)[0][2]
        for other in takers[:-1]:
            other.close()
        assert parked.resume()
        assert content(manager, parked) == [50, 51, 52, 53, 54, 55]
        assert pages_view(manager, 1)[parked.get_ssm_block_base_index(SSM)] == 77
        assert (list(parked.get_base_page_indices(ATTENTION)), parked.get_ssm_block_base_index(SSM)) != (
            old_indices,
            state_slot,
        )
        parked.close()
        takers[-1].close()
        manager.shutdown()

    def test_cached_prefixes_move_to_the_host_and_serve_from_there(self) -> None:
        manager = make_manager([attention()], num_host_pages=20)
        first = run_prompt(manager, TEXT[:20])
        fill(manager, first, 10)
        first.close()
        active_with(manager, 16).close()
        assert manager.probe_reuse(None, TEXT[:21]) == 20
        assert slots(manager, 1) == [(15, 5, 20)]
        again = manager.create_kv_cache(input_tokens=TEXT[:21])
        assert again.resume()
        assert content(manager, again) == [10, 11, 12, 13, 14]
        assert slots(manager, 1) == [(20, 0, 20)]
        again.close()
        manager.shutdown()

    def test_a_full_host_drops_its_oldest_prefix_for_the_next(self) -> None:
        manager = make_manager([attention()], num_host_pages=6)
        for begin in (0, 50):
            run_prompt(manager, TEXT[begin : begin + 20]).close()
            active_with(manager, 16).close()
        assert manager.probe_reuse(None, TEXT[50:71]) == 20
        assert manager.probe_reuse(None, TEXT[:21]) == 4
        manager.check_integrity()
        manager.shutdown()

    def test_held_pages_are_never_dropped(self) -> None:
        """Six host slots cannot take ten held pages, so the GPU can give away only six of theirs."""
        manager = make_manager([attention()], num_host_pages=6)
        parked = active_with(manager, 10)
        fill(manager, parked, 30)
        parked.suspend()
        taker = active_with(manager, 12)
        assert taker.resize(13 * 4) is False
        assert taker.capacity == 48
        manager.check_integrity()
        taker.close()
        assert parked.resume()
        assert content(manager, parked) == list(range(30, 40))
        parked.close()
        manager.shutdown()

    def test_prefetch_brings_pages_up_before_resume(self) -> None:
        manager = make_manager([attention()], num_host_pages=16)
        parked = active_with(manager, 8)
        fill(manager, parked, 60)
        parked.suspend()
        taker = active_with(manager, 16)
        assert parked.prefetch(CacheLevel(0)) is False
        taker.close()
        assert parked.prefetch(CacheLevel(0))
        assert slots(manager, 1) == [(16, 0, 16)]
        assert parked.resume()
        assert content(manager, parked) == list(range(60, 68))
        with pytest.raises(MisuseError, match="suspended"):
            parked.prefetch(CacheLevel(0))
        parked.suspend()
        with pytest.raises(MisuseError, match="levels 0 to 1"):
            parked.prefetch(CacheLevel(2))
        parked.close()
        manager.shutdown()

    def test_a_prefix_on_the_host_anchors_a_request_that_computes_it_again(self) -> None:
        """The second request never looked the prefix up; the blocks above its own must stay all the same."""
        manager = make_manager([attention()], num_host_pages=8)
        run_prompt(manager, TEXT[:8]).close()
        active_with(manager, 16).close()
        second = manager.create_kv_cache()
        assert second.resume() and second.resize(16)
        second.commit(TEXT[:16])
        manager.check_integrity()
        assert manager.probe_reuse(None, TEXT[:17]) == 16
        second.close()
        manager.check_integrity()
        manager.shutdown()


class TestDiskTier:
    def test_pages_go_down_two_tiers_and_come_back(self, tmp_path: Path) -> None:
        disk = DiskCacheTierConfig(2 * MIB, str(tmp_path))
        manager = make_manager([attention()], num_host_pages=4, cold_tiers=[disk])
        parked = active_with(manager, 12)
        fill(manager, parked, 90)
        parked.suspend()
        taker = active_with(manager, 16)
        assert [slots(manager, level)[0][0] for level in range(3)] == [0, 0, 16 - 8]
        assert parked.prefetch(CacheLevel(1)) is False
        taker.close()
        assert parked.resume()
        assert content(manager, parked) == list(range(90, 102))
        parked.close()
        manager.check_integrity()
        manager.shutdown()
        assert list(tmp_path.iterdir()) == []

    def test_a_tier_too_small_for_a_page_takes_nothing_and_passes_nothing_on(self, tmp_path: Path) -> None:
        cold = [HostCacheTierConfig(PAGE_BYTES // 2), DiskCacheTierConfig(2 * MIB, str(tmp_path))]
        manager = make_manager([attention()], cold_tiers=cold)
        assert slots(manager, 1) == [(0, 0, 0)]
        run_prompt(manager, TEXT[:8]).close()
        parked = active_with(manager, 10)
        parked.suspend()
        taker = active_with(manager, 6)
        assert taker.resize(7 * 4) is False
        assert manager.probe_reuse(None, TEXT[:9]) == 0, "droppable pages were dropped"
        manager.check_integrity()
        taker.close()
        parked.close()
        manager.shutdown()

    def test_a_missing_directory_is_the_users_mistake(self, tmp_path: Path) -> None:
        disk = DiskCacheTierConfig(2 * MIB, str(tmp_path / "missing"))
        with pytest.raises(MisuseError, match="missing"):
            make_manager([attention()], cold_tiers=[disk])


class TestResize:
    def test_growing_keeps_addresses_and_contents(self) -> None:
        manager = make_manager([attention()])
        cache = active_with(manager, 16)
        fill(manager, cache, 1)
        layer = manager.layer_grouping[0][0]
        address = manager.get_mem_pool_base_address(layer, "key")
        assert cache.resize(17 * 4) is False
        assert manager.resize(CacheLevel(0), 4 * MIB)
        assert manager.get_quota() == 4 * MIB
        assert manager.get_mem_pool_base_address(layer, "key") == address
        assert cache.resize(32 * 4)
        assert content(manager, cache)[:16] == list(range(1, 17))
        cache.close()
        manager.shutdown()

    def test_shrinking_moves_high_slots_down_and_evicts_prefixes(self) -> None:
        manager = make_manager([attention()], num_grains=2)
        run_prompt(manager, TEXT[:64]).close()
        parked = active_with(manager, 14)
        fill(manager, parked, 40)
        assert max(parked.get_base_page_indices(ATTENTION)) >= 16
        parked.suspend()
        assert manager.resize(CacheLevel(0), 2 * MIB)
        manager.check_integrity()
        assert slots(manager)[0][2] == 16
        assert parked.resume()
        assert content(manager, parked) == list(range(40, 54))
        parked.close()
        manager.shutdown()

    def test_shrinking_below_what_is_held_changes_nothing(self) -> None:
        manager = make_manager([attention()], num_grains=2)
        parked = active_with(manager, 20)
        fill(manager, parked, 5)
        parked.suspend()
        assert manager.resize(CacheLevel(0), 2 * MIB) is False
        assert (slots(manager)[0][2], manager.get_quota()) == (32, 4 * MIB)
        assert parked.resume()
        assert content(manager, parked) == list(range(5, 25))
        parked.close()
        manager.shutdown()

    def test_shrinking_under_an_active_cache_is_misuse(self) -> None:
        manager = make_manager([attention()], num_grains=2)
        cache = active_with(manager, 20)
        with pytest.raises(MisuseError, match="suspend"):
            manager.resize(CacheLevel(0), 2 * MIB)
        cache.close()
        manager.shutdown()

    def test_a_host_tier_can_shrink_while_caches_run(self) -> None:
        manager = make_manager([attention()], num_host_pages=16)
        run_prompt(manager, TEXT[:40]).close()
        cache = active_with(manager, 16)
        assert manager.resize(CacheLevel(1), 8 * PAGE_BYTES)
        assert slots(manager, 1)[0][2] == 8
        manager.check_integrity()
        cache.close()
        manager.shutdown()


class TestRebalance:
    def test_shares_follow_what_requests_used(self) -> None:
        now = [0.0]
        manager = _rebalancing_manager(now)
        before = [statistics.total for statistics in manager.get_storage_statistics()]
        for _ in range(4):
            cache = active_with(manager, 1)
            cache.close()
        assert not manager.need_adjustment, "the cooldown is not over"
        now[0] = 500.0
        assert manager.need_adjustment
        assert manager.adjust()
        after = [statistics.total for statistics in manager.get_storage_statistics()]
        assert after[1] > before[1] and after[0] < before[0]
        assert not manager.need_adjustment
        manager.check_integrity()
        manager.shutdown()

    def test_active_caches_forbid_it(self) -> None:
        manager = _rebalancing_manager([0.0])
        cache = active_with(manager, 1)
        with pytest.raises(MisuseError, match="suspend them first"):
            manager.adjust()
        cache.close()
        manager.shutdown()

    def test_without_samples_there_is_nothing_to_go_by(self) -> None:
        manager = _rebalancing_manager([0.0])
        assert manager.adjust() is False
        manager.shutdown()


def _rebalancing_manager(now: list[float]) -> KVCacheManager:
    config = make_config(
        [attention(), ssm()],
        num_grains=8,
        rebalance_min_sampled_kv_caches=4,
        rebalance_target_ratio_update_interval=2,
        rebalance_cooldown_secs=60,
    )
    return KVCacheManager(config, device="cpu", clock=lambda: now[0])
