# SPDX-License-Identifier: Apache-2.0
"""What a router and an operator can see: events, iteration statistics, request statistics."""

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    CacheLevel,
    KVCacheEventManager,
    KVCacheManager,
    LayerGroupId,
    MisuseError,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.events import (
    CreatedEvent,
    RemovedEvent,
    StoredEvent,
    UpdatedEvent,
)
from tests.unittest.kv_cache_manager_v2.builders import (
    PAGE_BYTES,
    STATE_BYTES,
    attention,
    make_manager,
    run_prompt,
    ssm,
)

TEXT = list(range(500, 540))


class Router:
    """Follows the events: which blocks each layer group offers, and where."""

    def __init__(self, events: KVCacheEventManager) -> None:
        self.events = events
        self.offered: dict[tuple[int, int], StoredEvent] = {}
        self.level: dict[tuple[int, int], int] = {}
        self.next_id = 0

    def catch_up(self) -> None:
        for event in self.events.get_latest_events():
            assert event.event_id == self.next_id
            self.next_id += 1
            data = event.data
            if isinstance(data, CreatedEvent):
                continue
            key = (int(event.layer_group or 0), data.block_hash)
            if isinstance(data, StoredEvent):
                assert key not in self.offered
                self.offered[key], self.level[key] = data, data.level
            elif isinstance(data, RemovedEvent):
                del self.offered[key], self.level[key]
            else:
                assert self.level[key] == data.old_level
                self.level[key] = data.new_level


def offered_in_tree(manager: KVCacheManager) -> list[tuple[int, int, int]]:
    return sorted(
        (page.life_cycle, page.level, manager.tree.packer.num_tokens(block.tokens))
        for block in manager.tree.blocks()
        for page in block.pages()
    )


def seen(router: Router) -> list[tuple[int, int, int]]:
    return sorted(
        (group, router.level[group, block], len(stored.tokens))
        for (group, block), stored in router.offered.items()
    )


def test_a_router_that_follows_the_events_knows_the_tree() -> None:
    events = KVCacheEventManager(1000)
    manager = make_manager([attention(), ssm()], events, num_grains=2, num_states=3, num_host_pages=12)
    router = Router(events)
    for step in range(12):
        cache = run_prompt(manager, [step % 3, *TEXT[: 6 + step]], commit_at=(5, 6 + step))
        router.catch_up()
        assert seen(router) == offered_in_tree(manager)
        cache.close()
        router.catch_up()
        assert seen(router) == offered_in_tree(manager)
    assert any(level == 1 for level in router.level.values())
    manager.clear_reusable_blocks()
    router.catch_up()
    assert not router.offered
    manager.shutdown()


def test_events_name_equal_prefixes_equally_and_tell_parents() -> None:
    streams = []
    for _ in range(2):
        events = KVCacheEventManager(100)
        manager = make_manager([attention(window=30, layer=4)], events)
        run_prompt(manager, TEXT[:8]).close()
        streams.append(events.get_latest_events())
        manager.shutdown()
    assert streams[0] == streams[1]
    created, first, second = streams[0]
    assert created.data == CreatedEvent(num_slots=((16,),))
    assert isinstance(first.data, StoredEvent) and isinstance(second.data, StoredEvent)
    assert (first.data.parent_hash, second.data.parent_hash) == (None, first.data.block_hash)
    assert second.data.tokens == tuple(TEXT[4:8])
    assert (first.layer_group, first.window_size, created.layer_group) == (0, 30, None)


def test_a_move_to_the_host_is_an_update() -> None:
    events = KVCacheEventManager(100)
    manager = make_manager([attention()], events, num_host_pages=4)
    run_prompt(manager, TEXT[:4]).close()
    events.get_latest_events()
    taker = manager.create_kv_cache()
    assert taker.resume() and taker.resize(64)
    (moved,) = events.get_latest_events()
    assert isinstance(moved.data, UpdatedEvent)
    assert (moved.data.old_level, moved.data.new_level) == (0, 1)
    taker.close()
    manager.shutdown()


def test_a_full_buffer_gives_up_the_oldest_and_counts_it() -> None:
    events = KVCacheEventManager(2)
    manager = make_manager([attention()], events)
    run_prompt(manager, TEXT[:16]).close()
    assert [event.event_id for event in events.get_latest_events()] == [3, 4]
    assert events.num_lost == 3
    manager.shutdown()


def test_an_event_manager_serves_one_manager_and_needs_a_buffer() -> None:
    events = KVCacheEventManager(8)
    manager = make_manager([attention()], events)
    with pytest.raises(MisuseError, match="give each its own"):
        make_manager([attention()], events)
    with pytest.raises(MisuseError, match="max_events is 0"):
        KVCacheEventManager(0)
    manager.shutdown()


def test_iteration_statistics_are_deltas() -> None:
    manager = make_manager([attention(), ssm()], num_grains=4, num_states=4)
    first = run_prompt(manager, TEXT[:10], commit_at=(8, 10))
    stats = manager.get_iteration_stats()
    pages, states = stats.by_life_cycle
    assert (pages.alloc_blocks, states.intra_device_copy_bytes) == (3, 2 * STATE_BYTES)
    assert (stats.num_resumed, stats.num_suspended, stats.snapshot_lookups) == (1, 0, 0)
    assert stats.peak_blocks[0] == 3
    first.suspend()
    first.close()
    second = manager.create_kv_cache(input_tokens=TEXT[:20], enable_request_stats=True)
    assert second.resume()
    second.commit_pending_stats()
    second.commit_pending_stats()
    stats = manager.get_iteration_stats()
    pages = stats.by_life_cycle[0]
    assert (pages.full_reused_blocks, pages.partial_reused_blocks, pages.missed_blocks) == (2, 1, 3 + 2)
    assert pages.reused_blocks == 3 and pages.intra_device_copy_bytes == PAGE_BYTES
    assert (stats.snapshot_lookups, stats.snapshot_hits, stats.cached_tokens_by_level) == (2, 1, (8,))
    assert (stats.num_resumed, stats.num_suspended) == (1, 1)
    assert second.request_stats.hit_rate == 3 / 5
    second.close()
    idle = manager.get_iteration_stats()
    assert idle.by_life_cycle[0].reused_blocks == 0 and idle.snapshot_lookups == 0
    manager.shutdown()


def test_a_discarded_look_up_is_not_counted() -> None:
    manager = make_manager([attention()])
    cache = manager.create_kv_cache(input_tokens=TEXT)
    cache.discard_pending_stats()
    cache.close()
    assert manager.get_total_stats()[0].missed_blocks == 0
    manager.shutdown()


def test_traffic_between_tiers_is_counted_in_bytes() -> None:
    manager = make_manager([attention()], num_host_pages=4)
    parked = manager.create_kv_cache()
    assert parked.resume() and parked.resize(8)
    parked.suspend()
    taker = manager.create_kv_cache()
    assert taker.resume() and taker.resize(64)
    taker.close()
    assert parked.resume()
    totals = manager.get_total_stats()[0]
    assert (totals.offload_bytes, totals.onboard_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    parked.close()
    manager.shutdown()


def test_drops_are_counted_by_where_they_happen() -> None:
    manager = make_manager([attention()], num_host_pages=2)
    run_prompt(manager, TEXT[:16]).close()
    taker = manager.create_kv_cache()
    assert taker.resume() and taker.resize(64)
    totals = manager.get_total_stats()[0]
    assert totals.dropped_blocks == 2
    taker.close()
    manager.shutdown()


def test_a_requests_statistics_are_kept_on_demand() -> None:
    manager = make_manager([attention(), ssm()], num_grains=4, num_states=4)
    run_prompt(manager, TEXT[:10]).close()
    asked = manager.create_kv_cache(input_tokens=TEXT[:20], id="asked", enable_request_stats=True)
    assert asked.resume() and asked.resize(24)
    stats = asked.request_stats
    assert (stats.alloc_blocks, stats.reused_blocks, stats.missed_blocks) == (3, 3, 2)
    asked.close()
    assert asked.request_stats is stats and stats.hit_rate == 3 / 5
    silent = manager.create_kv_cache(input_tokens=TEXT[:20], id="silent")
    with pytest.raises(MisuseError, match="'silent' keeps no statistics; .* enable_request_stats=True"):
        _ = silent.request_stats
    silent.close()
    fresh = manager.create_kv_cache(enable_request_stats=True)
    assert fresh.request_stats.hit_rate == 0
    fresh.close()
    manager.shutdown()


def test_statistics_can_be_off() -> None:
    manager = make_manager([attention()], enable_stats=False)
    with pytest.raises(MisuseError, match="enable_stats is False"):
        manager.get_iteration_stats()
    manager.shutdown()


def test_questions_change_nothing() -> None:
    """Every question is asked twice; answers and the whole state stay equal."""
    manager = make_manager([attention(), ssm()], num_grains=4, num_states=3)
    cache = run_prompt(manager, TEXT[:10])
    group = LayerGroupId(0)

    def ask() -> list[object]:
        return [
            manager.get_storage_statistics(CacheLevel(0)),
            manager.probe_reuse(None, TEXT[:20]),
            manager.get_quota(),
            manager.need_adjustment,
            manager.clamp_max_seq_len_for_mem(1, 1 << 20),
            manager.get_total_stats(),
            list(cache.get_base_page_indices(group)),
            list(cache.get_aggregated_page_indices(group)),
            cache.plan_committed_block_drop().num_droppable,
            [(page.slot, page.num_holders) for page in manager.storage.group(group).queue],
        ]

    assert ask() == ask()
    cache.close()
    manager.shutdown()
