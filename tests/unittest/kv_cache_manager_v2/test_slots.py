# SPDX-License-Identifier: Apache-2.0
"""The slot allocator and the eviction queue, alone."""

import random

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    GPU_LEVEL,
    LifeCycleId,
    LogicError,
    OutOfPagesError,
    Priority,
    SlotId,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.eviction import EvictionQueue
from tensorrt_llm.runtime.kv_cache_manager_v2.page import Page
from tensorrt_llm.runtime.kv_cache_manager_v2.slots import SlotAllocator


class FakeEvent:
    def __init__(self) -> None:
        self.is_done = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.num_waits += 1


def test_low_ids_first_and_recycled_before_never_used() -> None:
    slots = SlotAllocator(5)
    assert slots.allocate(3) == [0, 1, 2]
    slots.free(SlotId(1))
    assert slots.allocate(2) == [1, 3]
    assert (slots.num_free, slots.num_live) == (1, 4)
    slots.check_integrity()


def test_a_slot_in_use_by_a_stream_is_the_last_choice_and_keeps_its_events() -> None:
    slots = SlotAllocator(3)
    slots.allocate(2)
    first, second = FakeEvent(), FakeEvent()
    slots.add_event(SlotId(0), first)
    slots.add_event(SlotId(0), second)
    slots.free(SlotId(0))
    assert slots.allocate(1) == [2]
    assert slots.allocate(1) == [0]
    assert list(slots.events_of(SlotId(0))) == [first, second]
    first.is_done = True
    slots.add_event(SlotId(0), None)
    assert second in slots.events_of(SlotId(0))
    slots.synchronize(SlotId(0))
    assert second.num_waits == 1


def test_a_done_event_makes_a_slot_ready_again() -> None:
    slots = SlotAllocator(3)
    slots.allocate(1)
    event = FakeEvent()
    slots.add_event(SlotId(0), event)
    slots.free(SlotId(0))
    event.is_done = True
    assert slots.allocate(1) == [0]
    assert not slots.events_of(SlotId(0))


def test_all_or_nothing() -> None:
    slots = SlotAllocator(3)
    slots.allocate(1)
    with pytest.raises(OutOfPagesError, match="3 slots asked for, 2 of 3"):
        slots.allocate(3)
    assert slots.num_free == 2


def test_freeing_twice_is_our_bug() -> None:
    slots = SlotAllocator(2)
    slots.allocate(1)
    slots.free(SlotId(0))
    with pytest.raises(LogicError, match="not live"):
        slots.free(SlotId(0))
    with pytest.raises(LogicError, match="not live"):
        slots.free(SlotId(9))


def test_shrink_and_grow_keep_the_law() -> None:
    rng = random.Random(3)
    slots = SlotAllocator(8)
    live: set[int] = set()
    for _ in range(3000):
        choice = rng.random()
        if choice < 0.45 and slots.num_free:
            (taken,) = slots.allocate(1)
            assert taken not in live
            live.add(taken)
        elif choice < 0.85 and live:
            slot = rng.choice(sorted(live))
            live.remove(slot)
            slots.free(SlotId(slot))
        else:
            slots.shrink_or_grow(rng.randrange(max(live, default=-1) + 1, 16))
        slots.check_integrity()
        assert slots.num_live == len(live)
    with pytest.raises(LogicError, match="are live"):
        slots.shrink_or_grow(max(live))


def test_take_below_finds_any_low_slot() -> None:
    slots = SlotAllocator(6)
    slots.allocate(6)
    slots.free(SlotId(4))
    slots.free(SlotId(2))
    assert slots.take_below(3) == 2
    with pytest.raises(LogicError, match="below 3"):
        slots.take_below(3)
    slots.check_integrity()


def page(slot: int, priority: int, num_holders: int = 0) -> Page:
    made = Page(LifeCycleId(0), GPU_LEVEL, SlotId(slot))
    made.priority = Priority(priority)
    made.num_holders = num_holders
    return made


def test_order_is_priority_then_age() -> None:
    queue = EvictionQueue()
    pages = [page(0, 50), page(1, 10), page(2, 50), page(3, 0), page(4, 10)]
    for one in pages:
        queue.push(one)
    assert [one.slot for one in queue] == [3, 1, 4, 0, 2]
    queue.discard(pages[1])
    queue.push(pages[1])
    queue.discard(pages[3])
    queue.discard(pages[3])
    assert [one.slot for one in queue] == [4, 1, 0, 2]
    queue.check_integrity()
    assert not pages[3].is_queued and pages[4].is_queued


def test_victims_pass_over_held_pages_beyond_the_room_below() -> None:
    queue = EvictionQueue()
    for slot, num_holders in enumerate([1, 1, 0, 1, 0]):
        queue.push(page(slot, 35, num_holders))
    assert (queue.num_held, queue.num_droppable, len(queue)) == (3, 2, 5)
    assert [one.slot for one in queue.victims(3, 1)] == [0, 2, 4]
    assert [one.slot for one in queue.victims(2, 0)] == [2, 4]
    assert [one.slot for one in queue.victims(4, 9)] == [0, 1, 2, 3]


def test_a_page_that_changes_inside_the_queue_is_noticed() -> None:
    queue = EvictionQueue()
    one = page(0, 35)
    queue.push(one)
    one.num_holders = 1
    with pytest.raises(LogicError, match="1 held"):
        queue.check_integrity()
