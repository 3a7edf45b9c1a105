# SPDX-License-Identifier: Apache-2.0
"""Sliding windows and sinks: which blocks have pages, and how tight a pool they can live in."""

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    KVCacheManager,
    KVCacheManagerConfig,
    LayerGroupId,
    _KVCache,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import make_sizing
from tests.unittest.kv_cache_manager_v2.builders import (
    TOKENS_PER_BLOCK,
    attention,
    make_config,
    make_manager,
    pages_view,
    slots,
    ssm,
)

TEXT = list(range(300, 400))
GROUP = LayerGroupId(0)


def has_page(cache: _KVCache) -> list[bool]:
    return [index >= 0 for index in cache.get_base_page_indices(GROUP)]


def test_history_lets_go_of_what_the_window_left_behind() -> None:
    manager = make_manager([attention(window=6, sink=4)])
    cache = manager.create_kv_cache()
    assert cache.resume() and cache.resize(20)
    assert has_page(cache) == [True] * 5
    assert cache.resize(history_length=12)
    assert has_page(cache) == [True, True, True, True, True]
    assert cache.resize(history_length=13)
    assert has_page(cache) == [True, False, True, True, True]
    assert cache.resize(24, 20)
    assert has_page(cache) == [True, False, False, True, True, True]
    assert slots(manager)[0][0] == 16 - 4
    cache.close()
    manager.shutdown()


def test_blocks_that_are_stale_at_once_get_no_page() -> None:
    manager = make_manager([attention(window=6, sink=4)])
    cache = manager.create_kv_cache()
    assert cache.resume() and cache.resize(capacity=400, history_length=398)
    assert has_page(cache) == [True, *[False] * 97, True, True]
    cache.close()
    manager.shutdown()


def one_request_pool(window: int, sink: int) -> KVCacheManagerConfig:
    """A grain of pages, and the default floor: what one decoding sequence needs."""
    return make_config([attention(window=window, sink=sink)], constraints=[], typical_step=None)


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize(("window", "sink"), [(1, 0), (4, 0), (5, 0), (6, 4), (9, 7), (16, 1)])
def test_one_sequence_decodes_for_ever_in_the_floors_slots(window: int, sink: int, commits: bool) -> None:
    """The page that becomes stale serves the block that is added in the same call, offered or not."""
    manager = KVCacheManager(one_request_pool(window, sink), device="cpu")
    floor = make_sizing(manager.init_config).floors[0]
    taker = manager.create_kv_cache()
    assert taker.resume() and taker.resize((16 - floor) * TOKENS_PER_BLOCK)
    cache = manager.create_kv_cache()
    assert cache.resume()
    view = pages_view(manager)
    for position in range(120):
        assert cache.resize(position + 1, position), f"no page for position {position}"
        indices = cache.get_base_page_indices(GROUP)
        view[indices[position // TOKENS_PER_BLOCK]] = position // TOKENS_PER_BLOCK
        if commits:
            cache.commit([position])
        manager.check_integrity()
        for ordinal, index in enumerate(cache.get_base_page_indices(GROUP)):
            assert index < 0 or view[index] == ordinal
    cache.close()
    taker.close()
    manager.shutdown()


def test_a_stale_page_that_another_cache_holds_is_not_taken_from_it() -> None:
    manager = make_manager([attention(window=5)], commit_min_snapshot=False)
    writer = manager.create_kv_cache()
    assert writer.resume() and writer.resize(8)
    view = pages_view(manager)
    for ordinal, index in enumerate(writer.get_base_page_indices(GROUP)):
        view[index] = 70 + ordinal
    writer.commit(TEXT[:8])
    assert writer.resize(history_length=8)
    reader = manager.create_kv_cache(input_tokens=TEXT[:9])
    assert reader.resume()
    shared = reader.get_base_page_indices(GROUP)[1]
    taker = manager.create_kv_cache()
    assert taker.resume() and taker.resize(sum(slots(manager)[0][:2]) * TOKENS_PER_BLOCK)
    assert writer.resize(12, 12) is False
    assert view[shared] == 71 and writer.history_length == 8
    taker.close()
    assert writer.resize(13, 13)
    assert reader.get_base_page_indices(GROUP)[1] == shared and view[shared] == 71
    for cache in (writer, reader):
        cache.close()
    manager.check_integrity()
    manager.shutdown()


def test_a_stale_page_that_the_tree_offers_leaves_it_before_it_serves_again() -> None:
    """Without any other room the page is taken back; nobody may find its old content under its old tokens."""
    manager = make_manager([attention(window=5)], commit_min_snapshot=False)
    writer = manager.create_kv_cache()
    assert writer.resume() and writer.resize(8)
    writer.commit(TEXT[:8])
    (page,) = [index for index in writer.get_base_page_indices(GROUP) if index >= 0]
    taker = manager.create_kv_cache()
    assert taker.resume() and taker.resize(sum(slots(manager)[0][:2]) * TOKENS_PER_BLOCK)
    assert manager.probe_reuse(None, TEXT[:9]) == 8
    assert writer.resize(12, 12)
    assert list(writer.get_base_page_indices(GROUP)) == [-1, -1, page]
    manager.check_integrity()
    assert manager.probe_reuse(None, TEXT[:9]) == 0
    for cache in (writer, taker):
        cache.close()
    manager.shutdown()


def test_full_attention_and_window_share_a_pool_group_of_equal_slots() -> None:
    manager = make_manager([attention(), attention(window=5, layer=1), ssm()], num_grains=3, num_states=2)
    assert [desc.life_cycles for desc in manager.pool_group_descs] == [(0, 1), (2,)]
    cache = manager.create_kv_cache()
    assert cache.resume() and cache.resize(24, 20)
    full, windowed = (list(cache.get_base_page_indices(LayerGroupId(group))) for group in (0, 1))
    assert min(full) >= 0 and windowed[:4] == [-1] * 4
    assert not set(full) & set(windowed[4:])
    cache.close()
    manager.check_integrity()
    manager.shutdown()
