# SPDX-License-Identifier: Apache-2.0
"""`KVCacheManagerV2`: pages over a request's life, reuse, suspension, dummies, limits."""

from dataclasses import replace

import pytest
import torch

from tensorrt_llm._torch.pyexecutor.kv_cache import storage_builder
from tensorrt_llm._torch.pyexecutor.kv_cache.config import CacheType, KvCacheSettings, SpecSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.stats import KvCacheStats
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    HostCacheTierConfig,
    HostOOMError,
    KVCacheManager,
    OutOfPagesError,
)
from tests.unittest._torch.executor.kv_cache.helpers import MIB, Batch, Request, settings

TPB = 4
PAGES = 16
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)]


def make(
    *,
    kv_type: CacheType = CacheType.SELF,
    pages: int = PAGES,
    config: KvCacheSettings | None = None,
    device: str = "cpu",
    **changes: object,
) -> KVCacheManagerV2:
    """Two layers of 2 heads in fp16, with pages so large that a grain of 2 MiB holds one for all layers."""
    head_dim = 2 * MIB // (2 * 2 * 2 * TPB * 2)
    base = config or settings()
    arguments = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": head_dim if kv_type is CacheType.SELF else 2 * head_dim,
        "tokens_per_block": TPB,
        "max_seq_len": 200,
        "max_batch_size": 4,
        "mapping": Mapping(),
        "dtype": torch.float16,
        "device": device,
    }
    sized = replace(base, max_gpu_total_bytes=2 * MIB * pages)
    return KVCacheManagerV2(sized, kv_type, **{**arguments, **changes})


def run_prompt(manager: KVCacheManagerV2, req: Request, value: float = 0.0) -> None:
    """The whole prompt in one chunk; writes `value` plus the position into every page row."""
    start = manager.num_reused_tokens(req.py_request_id)
    req.context_current_position, req.context_chunk_size = start, req.prompt_len - start
    assert manager.resize_context(req, req.context_chunk_size)
    batch = Batch(context_requests=[req])
    manager.prepare_resources(batch)
    write(manager, req, range(start, req.prompt_len), value)
    manager.update_context_resources(batch)
    req.context_current_position, req.context_chunk_size = req.prompt_len, 0


def write(manager: KVCacheManagerV2, req: Request, positions: range, value: float) -> None:
    for layer in (0, 1):
        pages = manager.get_batch_cache_indices([req.py_request_id], layer)[0]
        for position in positions:
            manager.get_buffers(layer)[pages[position // TPB], :, position % TPB] = (
                value + position + layer / 2
            )


def rows(manager: KVCacheManagerV2, req: Request, layer: int) -> list[float]:
    pages = manager.get_batch_cache_indices([req.py_request_id], layer)[0]
    return manager.get_buffers(layer)[torch.tensor(pages), 0, :, 0, 0].flatten().tolist()


def test_pages_over_a_life() -> None:
    manager = make()
    assert manager.num_attention_pages == PAGES == manager.get_num_free_blocks()
    req = Request(1, list(range(10)))
    assert manager.prepare_context(req) and manager.prepare_context(req)
    run_prompt(manager, req)
    assert manager.num_cached_tokens(1) == 10
    assert len(manager.get_batch_cache_indices([1], 0)[0]) == 3
    req.py_draft_tokens = [1, 2, 3, 4]
    assert manager.try_allocate_generation(req)
    assert manager.kv_cache_map[1].capacity == 15
    manager.revert_allocate_generation(req)
    assert manager.kv_cache_map[1].capacity == 10
    assert manager.try_allocate_generation(req)
    req.py_num_accepted_draft_tokens = 1
    manager.update_resources(Batch(generation_requests=[req]))
    assert (manager.kv_cache_map[1].capacity, manager.num_cached_tokens(1)) == (12, 12)
    assert manager.get_num_free_blocks() == PAGES - 3
    assert manager.get_num_available_tokens() == (PAGES - 3) * TPB
    assert manager.get_num_available_tokens(max_num_draft_tokens=7) == (PAGES - 3) * TPB - 7
    manager.free_resources(req)
    manager.free_resources(req)
    assert manager.get_num_free_blocks() == PAGES
    manager.check_integrity()
    manager.shutdown()
    manager.shutdown()


@pytest.mark.parametrize("kv_type", [CacheType.SELF, CacheType.SELFKONLY])
@pytest.mark.parametrize("device", DEVICES)
def test_buffers_are_views_of_the_pool(kv_type: CacheType, device: str) -> None:
    manager = make(kv_type=kv_type, pages=3, device=device)
    first, second = manager.get_buffers(0), manager.get_buffers(1)
    factor = 2 if kv_type is CacheType.SELF else 1
    head_dim = manager.layers.shapes[0].head_dim
    assert first.shape == (3, factor, TPB, 2, head_dim)
    assert first.stride()[1:] == (TPB * 2 * head_dim, 2 * head_dim, head_dim, 1)
    assert first.stride(0) == 2 * factor * TPB * 2 * head_dim
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    assert manager.get_buffers(0, "HND").shape == (3, factor, 2, TPB, head_dim)
    assert manager.get_buffers(0, "HND").data_ptr() == first.data_ptr()
    with pytest.raises(ValueError, match="kv_layout is 'DNH'"):
        manager.get_buffers(0, "DNH")
    assert manager.impl.get_mem_pool_base_address(0, "key") == first.data_ptr()
    manager.shutdown()


def test_no_capacity_changes_nothing() -> None:
    manager = make(pages=4)
    one, two = Request(1, list(range(12))), Request(2, list(range(12)))
    assert manager.prepare_context(one)
    run_prompt(manager, one)
    assert manager.prepare_context(two)
    assert not manager.resize_context(two, 12)
    assert manager.kv_cache_map[2].capacity == 0
    assert manager.resize_context(two, 4)
    three = Request(3, [1])
    assert not manager.prepare_context(three)
    assert 3 not in manager.kv_cache_map
    one.py_draft_tokens = [1]
    assert not manager.try_allocate_generation(one)
    assert manager.kv_cache_map[1].capacity == 12
    manager.check_integrity()
    manager.shutdown()


def test_a_failed_allocation_leaves_a_suspended_request_suspended() -> None:
    manager = make(pages=4, config=settings(max_util_for_resume=1.0))
    one, two = Request(1, list(range(8))), Request(2, list(range(8)))
    for req in (one, two):
        assert manager.prepare_context(req)
        run_prompt(manager, req)
    manager.suspend_request(one)
    manager.suspend_request(one)
    assert not manager.try_allocate_generation(one)
    assert not manager.kv_cache_map[1].is_active
    manager.free_resources(two)
    assert manager.try_allocate_generation(one)
    assert manager.resume_request(one)
    manager.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_a_suspended_request_keeps_its_content_wherever_it_goes(device: str) -> None:
    manager = make(pages=4, config=settings(host_cache_size=64 * MIB, max_util_for_resume=1.0), device=device)
    one, two = Request(1, list(range(8))), Request(2, list(range(16)))
    assert manager.prepare_context(one)
    run_prompt(manager, one, value=100)
    before = [rows(manager, one, layer) for layer in (0, 1)]
    manager.suspend_request(one)
    assert manager.prepare_context(two)
    run_prompt(manager, two, value=500)
    assert not manager.resume_request(one)
    manager.free_resources(two)
    assert manager.resume_request(one)
    assert [rows(manager, one, layer) for layer in (0, 1)] == before
    manager.shutdown()


def test_update_skips_a_request_that_was_suspended_meanwhile() -> None:
    """A round whose request gave way before its end leaves no trace; it runs again."""
    manager = make()
    req = Request(1, list(range(6)))
    assert manager.prepare_context(req)
    run_prompt(manager, req)
    assert manager.try_allocate_generation(req)
    manager.suspend_request(req)
    manager.update_resources(Batch(generation_requests=[req, Request(77)]))
    assert manager.num_cached_tokens(1) == 6
    manager.shutdown()


def test_prompts_and_outputs_are_reused() -> None:
    manager = make(config=settings(enable_block_reuse=True))
    one = Request(1, list(range(10)))
    assert manager.prepare_context(one) and manager.num_reused_tokens(1) == 0
    run_prompt(manager, one, value=50)
    one.tokens = [*one.tokens, 70, 71, 72]
    one.py_draft_tokens = [71]
    assert manager.try_allocate_generation(one)
    write(manager, one, range(10, 12), 50)
    one.py_num_accepted_draft_tokens = 1
    manager.update_resources(Batch(generation_requests=[one]))
    manager.free_resources(one)
    two = Request(2, [*range(10), 70, 71, 5, 5])
    assert manager.prepare_context(two)
    assert manager.num_reused_tokens(2) == 12
    assert rows(manager, two, 0)[:12] == [50 + i for i in range(12)]
    run_prompt(manager, two)
    stats = manager.get_kv_cache_stats()
    assert (stats.reused_blocks, stats.missed_blocks, stats.alloc_total_blocks) == (3, 3 + 1, 3 + 1)
    manager.check_integrity()
    manager.free_resources(two)
    assert manager.num_reused_tokens(2) == 0
    assert manager.get_num_free_blocks() == PAGES
    manager.shutdown()


def test_a_prompt_that_waits_is_counted_once() -> None:
    manager = make(pages=4, config=settings(enable_block_reuse=True))
    one, two = Request(1, list(range(16))), Request(2, list(range(8)))
    assert manager.prepare_context(one)
    run_prompt(manager, one)
    for _ in range(5):
        assert not manager.prepare_context(two)
    manager.free_resources(one)
    assert manager.prepare_context(two)
    stats = manager.get_kv_cache_stats()
    assert (stats.reused_blocks, stats.missed_blocks) == (2, 4)
    manager.shutdown()


def test_nothing_is_reused_where_reuse_is_off() -> None:
    manager = make()
    for request_id in (1, 2):
        req = Request(request_id, list(range(8)))
        assert manager.prepare_context(req)
        assert manager.num_reused_tokens(request_id) == 0
        run_prompt(manager, req)
        manager.free_resources(req)
    manager.shutdown()


def test_a_draft_manager_follows_its_target() -> None:
    manager = make(pages=4, is_draft=True)
    req = Request(1, list(range(8)), context_chunk_size=8)
    manager.prepare_resources(Batch(context_requests=[req]))
    manager.update_context_resources(Batch(context_requests=[req]))
    req.context_current_position, req.context_chunk_size = 8, 0
    req.py_draft_tokens = [1, 2]
    manager.prepare_resources(Batch(generation_requests=[req]))
    assert manager.kv_cache_map[1].capacity == 11
    with pytest.raises(OutOfPagesError, match="request 2"):
        manager.prepare_resources(Batch(context_requests=[Request(2, list(range(9)), context_chunk_size=9)]))
    manager.shutdown()


def test_dummies_are_all_or_nothing_in_both_managers() -> None:
    target, draft = make(pages=8), make(pages=2)
    assert target.add_dummy_requests([1, 2], [5, 9], draft_kv_cache_manager=draft) is None
    assert not target.kv_cache_map and not draft.kv_cache_map
    made = target.add_dummy_requests(
        [1], [5], is_gen=True, max_num_draft_tokens=2, draft_kv_cache_manager=draft
    )
    assert made is not None and made[0].is_dummy and made[0].py_draft_tokens == [1, 1]
    assert target.kv_cache_map[1].capacity == draft.kv_cache_map[1].capacity == 7
    assert target.num_cached_tokens(1) == 4
    unprepared = target.add_dummy_requests([5, 6], prepare_resource=False)
    assert unprepared is not None and [d.token_num for d in unprepared] == [1, 1]
    assert 5 not in target.kv_cache_map
    for manager in (target, draft):
        manager.check_integrity()
        manager.shutdown()


def test_max_seq_len_is_what_the_pages_hold(caplog: pytest.LogCaptureFixture) -> None:
    assert make(pages=60).max_seq_len == 200
    with caplog.at_level("WARNING", logger="tensorrt_llm"):
        small = make(pages=5)
    assert small.max_seq_len == 20 and "reduced from 200 to 20" in caplog.text
    assert small.max_blocks_per_seq == 8
    small.shutdown()


def test_the_host_tier_is_given_up_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.__init__

    def refusing(self: KVCacheManager, config: object, *args: object, **keywords: object) -> None:
        if any(isinstance(tier, HostCacheTierConfig) for tier in config.cache_tiers):  # type: ignore[attr-defined]
            raise HostOOMError("refused")
        original(self, config, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCacheManager, "__init__", refusing)
    manager = make(config=settings(host_cache_size=64 * MIB))
    assert len(manager.kv_cache_manager_py_config.cache_tiers) == 1
    assert manager.num_attention_pages == PAGES
    manager.shutdown()


def test_all_ranks_go_without_a_host_tier_that_one_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        storage_builder, "min_over_ranks", lambda value: min(value, 0) if value == 1 else value
    )
    manager = make(config=settings(host_cache_size=64 * MIB))
    assert len(manager.kv_cache_manager_py_config.cache_tiers) == 1
    manager.shutdown()


def test_ranks_agree_on_the_fewest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make()
    tokens = alone._sizing.max_tokens_from_quota(int(alone.impl.get_quota() * 0.95))
    monkeypatch.setattr(storage_builder, "min_over_ranks", lambda value: min(value, tokens // 2))
    other = make()
    assert other.impl.get_quota() < alone.impl.get_quota()
    assert other.num_attention_pages == 8
    alone.shutdown()
    other.shutdown()


def test_hit_rate_is_summed_then_divided() -> None:
    stats = KvCacheStats(
        max_num_blocks=0,
        free_num_blocks=0,
        used_num_blocks=0,
        tokens_per_block=4,
        alloc_total_blocks=0,
        reused_blocks=10,
        missed_blocks=2,
    )
    assert stats.cache_hit_rate == 10 / 12
    assert replace(stats, reused_blocks=0, missed_blocks=0).cache_hit_rate == 0


def test_queries_change_nothing() -> None:
    manager = make()
    req = Request(1, list(range(6)))
    assert manager.prepare_context(req)
    run_prompt(manager, req)

    def answers() -> list[object]:
        return [
            manager.get_num_free_blocks(),
            manager.get_num_available_tokens(3),
            manager.get_max_resource_count(),
            manager.get_needed_resource_to_completion(req),
            manager.get_kv_cache_stats(),
            manager.get_batch_cache_indices([1]),
            manager.num_cached_tokens(1),
            manager.clip_context_chunk(req, 5),
            manager.allocated_bytes,
            manager.side_bytes,
            manager.num_state_slots,
        ]

    assert answers() == answers()
    manager.shutdown()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_beam_width": 2}, "max_beam_width is 2"),
        ({"num_kv_heads": [1]}, "num_kv_heads has 1 entries for 2 layers"),
        ({"head_dim": [1, 2, 3]}, "head_dim has 3 entries"),
        ({"layer_mask": [True, True, True, False]}, "num_layers is 2, but layer_mask names 3"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"kv_events_config": object()}, "kv_events_config"),
        ({"config": settings(max_util_for_resume=0)}, "max_util_for_resume is 0"),
        ({"config": settings(max_tokens=-1)}, "max_tokens is -1"),
        ({"config": settings(disk_cache_size=1)}, "disk_cache_path is not set"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_heads_are_split_over_tensor_ranks() -> None:
    mapping = Mapping(world_size=2, rank=1, tp_size=2)
    manager = make(mapping=mapping, num_kv_heads=[2, None])
    assert [shape.num_kv_heads for shape in manager.layers.shapes] == [1, 0]
    with pytest.raises(ValueError, match="layer 1 is not an attention layer"):
        manager.get_buffers(1)
    manager.shutdown()
    data_parallel = make(mapping=replace(mapping, enable_attention_dp=True))
    assert [shape.num_kv_heads for shape in data_parallel.layers.shapes] == [2, 2]
    data_parallel.shutdown()


def test_spec_config_gives_headroom() -> None:
    manager = make(spec_config=SpecSettings(max_draft_len=7), max_seq_len=32)
    assert manager.max_blocks_per_seq == 12
    manager.shutdown()
