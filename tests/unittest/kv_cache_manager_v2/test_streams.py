# SPDX-License-Identifier: Apache-2.0
"""Ordering between streams, with streams that only write down what waits for what.

The rule: whoever touches a slot on a stream has made that stream wait for the earlier uses on others that
matter. `Trace` checks it at each copy and at each step of work.
"""

from dataclasses import dataclass, field

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import KVCacheManager, LayerGroupId, SlotId, _KVCache
from tensorrt_llm.runtime.kv_cache_manager_v2.pools import Pool
from tests.unittest.kv_cache_manager_v2.builders import attention, make_manager, slots, ssm

TEXT = list(range(700, 760))
ATTENTION, SSM = LayerGroupId(0), LayerGroupId(1)


@dataclass(eq=False)
class Recorded:
    """An event that is never done by itself: `stream` has come to `tick`."""

    stream: int
    tick: int

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        return None


@dataclass
class Trace:
    """Streams as vector clocks. `seen[a][b]` = how much of stream b's work precedes a's next work."""

    clock: dict[int, int] = field(default_factory=dict)
    seen: dict[int, dict[int, int]] = field(default_factory=dict)
    uses: dict[tuple[int, int], dict[tuple[int, bool], int]] = field(default_factory=dict)
    num_checked: int = 0
    is_async: bool = True

    def record(self, stream: int) -> Recorded:
        return Recorded(stream, self.clock.get(stream, 0))

    def wait(self, stream: int, event: object) -> None:
        if isinstance(event, Recorded):
            known = self.seen.setdefault(stream, {})
            inherited = {**self.seen.get(event.stream, {}), event.stream: event.tick}
            for other, tick in inherited.items():
                known[other] = max(known.get(other, 0), tick)

    def use(self, stream: int, pool: Pool, slot: int, *, writes: bool) -> None:
        """`stream` works on a slot: others' writes (before a write, their reads too) must be behind it."""
        history = self.uses.setdefault((id(pool), slot), {})
        for (other, has_written), tick in history.items():
            if other != stream and (writes or has_written):
                self.num_checked += 1
                is_behind = self.seen.get(stream, {}).get(other, 0) >= tick
                assert is_behind, f"stream {stream} did not wait for {other}"
        self.clock[stream] = self.clock.get(stream, 0) + 1
        history[stream, writes] = self.clock[stream]


def traced(**options: object) -> tuple[KVCacheManager, Trace]:
    manager = make_manager([attention(), ssm()], num_states=4, **options)
    trace = Trace()
    manager.storage.streams = trace
    copy = manager.storage.backend.copy_slot

    def traced_copy(dst: Pool, dst_slot: SlotId, src: Pool, src_slot: SlotId, stream: int) -> None:
        trace.use(stream, src, src_slot, writes=False)
        trace.use(stream, dst, dst_slot, writes=True)
        copy(dst, dst_slot, src, src_slot, stream)

    manager.storage.backend.copy_slot = traced_copy  # type: ignore[method-assign]
    return manager, trace


def work(manager: KVCacheManager, trace: Trace, cache: _KVCache) -> None:
    """A step of the model on the cache's stream: writes private pages and the state, reads shared pages."""
    for group in (ATTENTION, SSM):
        store = manager.storage.group(group)
        for index in cache.get_base_page_indices(group):
            page = store.owners[index]
            assert page is not None
            for pool in store.pools:
                trace.use(cache.cuda_stream, pool, index, writes=page.block is None)


def start(manager: KVCacheManager, trace: Trace, stream: int, tokens: list[int]) -> _KVCache:
    cache = manager.create_kv_cache(input_tokens=tokens)
    assert cache.resume(stream) and cache.resize(len(tokens))
    work(manager, trace, cache)
    return cache


def test_a_recycled_slot_waits_for_its_last_user() -> None:
    manager, trace = traced(num_grains=2)
    for stream in (1, 2, 3, 2):
        cache = start(manager, trace, stream, TEXT[:50])
        assert cache.resize(20)
        assert cache.resize(60)
        work(manager, trace, cache)
        cache.close()
    assert trace.num_checked > 20
    manager.shutdown()


def test_a_reused_prefix_waits_for_its_writer_and_both_readers_hold_it_back() -> None:
    manager, trace = traced(num_grains=2)
    writer = start(manager, trace, 1, TEXT[:10])
    writer.commit(TEXT[:10])
    readers = [start(manager, trace, stream, TEXT[: 20 + stream]) for stream in (2, 3)]
    assert all(reader.num_committed_tokens == 10 for reader in readers)
    for cache in (writer, *readers):
        work(manager, trace, cache)
        cache.close()
    manager.clear_reusable_blocks()
    last = start(manager, trace, 4, [1] * 60)
    last.close()
    assert trace.num_checked > 10
    manager.shutdown()


def test_pages_that_went_to_the_host_and_back_are_ordered_all_the_way() -> None:
    manager, trace = traced(num_grains=2, num_host_pages=40)
    parked = start(manager, trace, 1, TEXT[:30])
    parked.suspend()
    takers = []
    for stream in (2, 3, 4, 5, 6):
        taker = manager.create_kv_cache()
        if taker.resume(stream) and taker.resize(12):
            work(manager, trace, taker)
        takers.append(taker)
    assert slots(manager, 1)[0][0] < slots(manager, 1)[0][2]
    for taker in takers:
        taker.close()
    assert parked.resume(7)
    work(manager, trace, parked)
    assert trace.num_checked > 10
    parked.close()
    manager.shutdown()


def test_a_block_that_is_shared_at_commit_waits_for_the_one_who_wrote_it() -> None:
    manager, trace = traced(num_grains=2)
    first = start(manager, trace, 1, TEXT[:9])
    second = manager.create_kv_cache()
    assert second.resume(2) and second.resize(9)
    work(manager, trace, second)
    first.commit(TEXT[:8])
    second.commit(TEXT[:8])
    assert (
        list(second.get_base_page_indices(ATTENTION))[:2] == list(first.get_base_page_indices(ATTENTION))[:2]
    )
    first.close()
    work(manager, trace, second)
    second.close()
    third = start(manager, trace, 3, [5] * 60)
    third.close()
    manager.shutdown()


def test_the_trace_notices_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, trace = traced(num_grains=2)
    monkeypatch.setattr(trace, "wait", lambda stream, event: None)
    start(manager, trace, 1, TEXT[:50]).close()
    manager.clear_reusable_blocks()
    with pytest.raises(AssertionError, match="stream 2 did not wait for 1"):
        start(manager, trace, 2, [3] * 60)
