# SPDX-License-Identifier: Apache-2.0
"""The life of one request's cache, without reuse and with one tier."""

from array import array
from collections.abc import Iterator

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    DEFAULT_BEAM_INDEX,
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheStatus,
    GpuCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerGroupId,
    LayerId,
    MisuseError,
    SsmLayerConfig,
    _KVCache,
)

MIB = 1 << 20
ATTENTION, SSM = LayerGroupId(0), LayerGroupId(1)
TOKENS_PER_BLOCK = 8


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    config = KVCacheManagerConfig(
        tokens_per_block=TOKENS_PER_BLOCK,
        cache_tiers=[GpuCacheTierConfig(12 * MIB)],
        layers=[
            AttentionLayerConfig(LayerId(0), [BufferConfig("key", MIB // 2)]),
            SsmLayerConfig(LayerId(1), [BufferConfig("ssm_state", MIB)]),
        ],
        constraints=[BatchDesc([KVCacheDesc(0, 0)] * 4)],
        typical_step=BatchDesc([KVCacheDesc(1 << 20, 0)]),
        commit_min_snapshot=True,
    )
    manager = KVCacheManager(config, device="cpu")
    yield manager
    manager.check_integrity()
    assert not manager.num_open_caches
    manager.shutdown()


def active(manager: KVCacheManager, name: str = "a") -> _KVCache:
    cache = manager.create_kv_cache(id=name)
    assert cache.resume(0)
    return cache


def free_slots(manager: KVCacheManager) -> list[int]:
    return [statistics.free for statistics in manager.get_storage_statistics()]


def test_pools_have_the_expected_slots(manager: KVCacheManager) -> None:
    assert [statistics.total for statistics in manager.get_storage_statistics()] == [12, 6]


def test_created_suspended_without_any_slot(manager: KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    assert cache.status is CacheStatus.SUSPENDED
    assert cache.get_ssm_block_base_index(SSM) == BAD_PAGE_INDEX
    assert free_slots(manager) == [12, 6]
    cache.close()
    assert cache.status is CacheStatus.CLOSED


def test_each_active_cache_owns_one_recurrent_state_slot(manager: KVCacheManager) -> None:
    caches = [active(manager, str(index)) for index in range(6)]
    assert [cache.get_ssm_block_base_index(SSM) for cache in caches] == list(range(6))
    extra = manager.create_kv_cache()
    assert extra.resume(0) is False
    assert extra.status is CacheStatus.SUSPENDED
    for cache in [*caches, extra]:
        cache.close()
    assert free_slots(manager) == [12, 6]


def test_resize_takes_and_frees_blocks(manager: KVCacheManager) -> None:
    cache = active(manager)
    assert cache.resize(capacity=17)
    assert list(cache.get_base_page_indices(ATTENTION)) == [0, 1, 2]
    assert cache.resize(capacity=24, history_length=20)
    assert cache.num_blocks == 3
    assert cache.resize(capacity=20)
    assert (cache.capacity, cache.history_length, free_slots(manager)) == (20, 20, [9, 5])
    cache.close()


def test_resize_beyond_the_pool_returns_false_and_changes_nothing(manager: KVCacheManager) -> None:
    cache = active(manager)
    assert cache.resize(capacity=5 * TOKENS_PER_BLOCK)
    before = (list(cache.get_base_page_indices(ATTENTION)), free_slots(manager), cache.capacity)
    assert cache.resize(capacity=13 * TOKENS_PER_BLOCK, history_length=3) is False
    assert before == (list(cache.get_base_page_indices(ATTENTION)), free_slots(manager), cache.capacity)
    assert cache.history_length == 0
    cache.close()


@pytest.mark.parametrize(("capacity", "history"), [(None, 1), (8, 9), (4, None), (None, 17), (20.5, None)])
def test_contradictory_lengths_are_refused(
    manager: KVCacheManager, capacity: int | None, history: int | None
) -> None:
    cache = active(manager)
    assert cache.resize(capacity=16, history_length=6)
    with pytest.raises(MisuseError, match="history"):
        cache.resize(capacity, history)
    assert (cache.capacity, cache.history_length) == (16, 6)
    cache.close()


def test_page_index_buffer_follows_until_suspend(manager: KVCacheManager) -> None:
    cache = active(manager)
    buffer = array("i", [7] * 4)
    cache.set_base_page_index_buf(DEFAULT_BEAM_INDEX, ATTENTION, memoryview(buffer))
    assert cache.resize(capacity=9)
    assert list(buffer) == [0, 1, -1, -1]
    with pytest.raises(MisuseError, match="longer one"):
        cache.resize(capacity=5 * TOKENS_PER_BLOCK)
    assert cache.resize(capacity=3)
    assert list(buffer) == [0, -1, -1, -1]
    cache.suspend()
    assert cache.resume(0)
    assert cache.resize(capacity=32)
    assert list(buffer) == [0, -1, -1, -1]
    cache.close()


def test_suspended_cache_keeps_its_slots_and_resumes(manager: KVCacheManager) -> None:
    cache = active(manager)
    assert cache.resize(capacity=30)
    cache.suspend()
    assert free_slots(manager) == [8, 5]
    with pytest.raises(MisuseError, match="resize"):
        cache.resize(capacity=40)
    assert cache.resume(3)
    assert cache.cuda_stream == 3
    assert list(cache.get_aggregated_page_indices(ATTENTION, valid_only=True)) == [0, 1, 2, 3]
    cache.close()


def test_resume_is_refused_while_others_fill_a_growing_pool(manager: KVCacheManager) -> None:
    first, second = active(manager, "first"), manager.create_kv_cache(id="second")
    assert first.resize(capacity=12 * TOKENS_PER_BLOCK)
    assert second.resume(0) is False
    first.suspend()
    assert first.resume(0), "its own pages must not keep a cache from resuming"
    assert first.resize(capacity=11 * TOKENS_PER_BLOCK)
    assert second.resume(0), "a full SSM pool is no reason, and 11 of 12 pages are below the limit"
    first.close()
    second.close()


def test_misuse_names_the_cache_and_its_state(manager: KVCacheManager) -> None:
    cache = active(manager, "twice")
    with pytest.raises(MisuseError, match=r"resume\(\) needs cache 'twice' suspended, but it is active"):
        cache.resume(0)
    with pytest.raises(MisuseError, match="SSM group"):
        cache.get_ssm_block_base_index(ATTENTION)
    cache.close()
    with pytest.raises(MisuseError, match="closed already"):
        cache.close()


def test_commit_counts_tokens_and_raises_history(manager: KVCacheManager) -> None:
    cache = active(manager)
    assert cache.resize(capacity=20)
    cache.commit(list(range(10)))
    assert (cache.num_committed_tokens, cache.history_length) == (10, 10)
    with pytest.raises(MisuseError, match="resize first"):
        cache.commit(list(range(11)))
    cache.stop_committing()
    with pytest.raises(MisuseError, match="commit no more"):
        cache.commit([1])
    cache.close()
