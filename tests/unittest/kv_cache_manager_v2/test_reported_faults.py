# SPDX-License-Identifier: Apache-2.0
"""Faults that users of comparable systems reported, each as its whole kind, named after a report.

TRT is TensorRT-LLM, SGL is SGLang.
"""

import math
import random
from collections.abc import Callable

import pytest
import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheLevel,
    GpuCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerGroupId,
    LayerId,
    MisuseError,
    OutOfPagesError,
    SsmLayerConfig,
    _KVCache,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import float32
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import slots_to_keep, split_gpu_quota
from tests.unittest.kv_cache_manager_v2.builders import (
    MIB,
    PAGE_BYTES,
    attention,
    make_config,
    make_manager,
    pages_view,
    read_slot,
    run_prompt,
    slots,
    ssm,
)

ATTENTION, SSM = LayerGroupId(0), LayerGroupId(1)
TEXT = list(range(1000, 1100))
EMPTY = KVCacheDesc(0, 0)


def hybrid_config(quota: int, floor: int, max_util: float, state_bytes: int) -> KVCacheManagerConfig:
    return KVCacheManagerConfig(
        tokens_per_block=16,
        cache_tiers=[GpuCacheTierConfig(quota)],
        layers=[
            AttentionLayerConfig(LayerId(0), [BufferConfig("key", 16 * KIB_PER_TOKEN)]),
            SsmLayerConfig(
                LayerId(1), [BufferConfig("ssm_state", state_bytes), BufferConfig("conv_state", 9000)]
            ),
        ],
        max_util_for_resume=max_util,
        constraints=[BatchDesc([EMPTY] * floor)],
        typical_step=BatchDesc([KVCacheDesc(2**30, 0)]),
        commit_min_snapshot=True,
    )


KIB_PER_TOKEN = 1 << 10


def test_trt_19817_side_buffers_and_pools_stay_within_the_quota_to_one_grain() -> None:
    """Records live outside the quota: reserved for the slots that the floor's grains really hold (a fixed
    point, since the smaller quota sets the grain), whatever the quota, the floor, the ratio and the
    sizes."""
    rng = random.Random(19817)
    for _ in range(300):
        floor = rng.randrange(1, 40)
        max_util = rng.choice([0.5, 0.9, 0.95, 0.97, 1.0])
        state_bytes = rng.choice([100_000, 1 << 20, 5_000_000])
        records = rng.choice([1000, 50_000, 400_000])
        quota = rng.randrange(1 << 28, 1 << 34)
        num_slots, split = slots_to_keep(floor, max_util), None
        while split is None or num_slots < split.num_slots[1]:
            num_slots = num_slots if split is None else split.num_slots[1]
            split = split_gpu_quota(hybrid_config(quota - num_slots * records, floor, max_util, state_bytes))
        assert split.num_slots[1] >= slots_to_keep(floor, max_util)
        assert split.pool_bytes + split.num_slots[1] * records < quota + split.grain


def test_trt_19989_one_rounding_rule_for_the_kept_slots() -> None:
    """Whenever a state fills a grain, the pool has exactly the slots that the rule says are kept."""
    for max_util in (0.9, 0.95, 0.97, float32(0.95)):
        for floor in range(1, 60):
            kept = slots_to_keep(floor, max_util)
            assert kept == math.ceil(floor / float32(max_util))
            config = hybrid_config(1 << 32, floor, max_util, 8 << 20)
            assert split_gpu_quota(config).num_slots[1] == kept
    assert (slots_to_keep(19, 0.95), math.ceil(19 / 0.95)) == (21, 20)


@pytest.mark.parametrize("max_util", [0.5, 0.9, 0.95, 0.97, 1.0])
@pytest.mark.parametrize("floor", [1, 2, 3, 9, 19])
def test_trt_13151_every_resident_and_dummy_gets_its_own_slot(floor: int, max_util: float) -> None:
    """All that the constraint promised are resident together, suspended and resumed in any order."""
    manager = KVCacheManager(hybrid_config(256 * MIB, floor, max_util, 3 << 20), device="cpu")
    caches = [manager.create_kv_cache(id=index) for index in range(floor)]
    assert all(cache.resume() for cache in caches)
    state_slots = [cache.get_ssm_block_base_index(SSM) for cache in caches]
    assert len(set(state_slots)) == floor and min(state_slots) >= 0
    for cache in random.Random(floor).sample(caches, floor):
        cache.suspend()
        assert cache.resume()
    for cache in caches:
        cache.close()
    manager.shutdown()


def test_trt_18253_resume_is_not_vetoed_by_a_full_ssm_pool() -> None:
    """A pool of states is full when the batch is complete; only pools that grow need headroom."""
    manager = make_manager([attention(), ssm()], num_grains=4, num_states=8, max_util_for_resume=0.5)
    total = slots(manager)[1][2]
    caches = [manager.create_kv_cache(id=index) for index in range(total)]
    assert all(cache.resume() for cache in caches)
    assert slots(manager)[1][0] == 0
    caches[0].suspend()
    assert caches[0].resume()
    for cache in caches:
        cache.close()
    manager.shutdown()


def test_trt_16484_a_ratio_of_zero_is_refused() -> None:
    for max_util in (0.0, -0.1, 1.01, 1e-60):
        with pytest.raises(MisuseError, match="max_util_for_resume"):
            make_config([attention()], max_util_for_resume=max_util)


def test_trt_17211_admission_is_bound_by_every_pool_and_someone_can_always_finish() -> None:
    """Pages for hundreds of requests, states for six: the seventh is refused, not parked without progress.
    And however full the pools are, the caches that stay can go on once the others are suspended or
    closed."""
    manager = make_manager([attention(), ssm()], num_grains=6, num_states=6, max_util_for_resume=0.9)
    num_states = slots(manager)[1][2]
    num_pages = slots(manager)[0][2]
    caches: list[_KVCache] = []
    while True:
        cache = manager.create_kv_cache(id=len(caches))
        if not cache.resume():
            cache.close()
            break
        caches.append(cache)
    assert len(caches) == num_states < num_pages
    while caches:
        for cache in caches[1:]:
            if cache.is_active:
                cache.suspend()
        lone = caches.pop(0)
        if not lone.is_active:
            assert lone.resume()
        assert lone.resize(num_pages * manager.tokens_per_block)
        lone.suspend()
        assert lone.resume(), "its own pages are no reason to refuse it"
        lone.close()
    manager.shutdown()


def test_trt_14203_pools_are_zero_at_first() -> None:
    """A dummy row never prefills, so what it reads must be finite."""
    manager = make_manager([attention(), ssm()], num_grains=4)
    for layer, role in ((LayerId(0), "key"), (LayerId(9), "ssm_state")):
        size = manager.get_page_stride(layer, role)
        assert not manager.get_buffer_view(layer, role, torch.float32, (size // 4,)).any()
    manager.shutdown()


@pytest.mark.parametrize("num_reused", [0, 4, 5, 8])
def test_tpu_2431_a_reused_slot_starts_from_the_prefix_and_not_from_its_previous_owner(
    num_reused: int,
) -> None:
    manager = make_manager([attention(), ssm()], num_grains=3, num_states=2)
    donor = manager.create_kv_cache()
    assert donor.resume() and donor.resize(8)
    states = pages_view(manager, 1)
    if num_reused:
        states[donor.get_ssm_block_base_index(SSM)] = 40 + num_reused
        donor.commit(TEXT[:num_reused])
    states[donor.get_ssm_block_base_index(SSM)] = 999
    slot = donor.get_ssm_block_base_index(SSM)
    donor.close()
    user = manager.create_kv_cache(input_tokens=TEXT[:20])
    assert user.resume()
    assert user.num_committed_tokens == num_reused
    if num_reused:
        assert states[user.get_ssm_block_base_index(SSM)] == 40 + num_reused
    else:
        assert user.get_ssm_block_base_index(SSM) == slot, (
            "the same slot; its content is the new owner's to set"
        )
        assert user.history_length == 0
    user.close()
    manager.shutdown()


@pytest.mark.parametrize("num_trips", [1, 2])
def test_sgl_38485_suspend_and_offload_keep_every_byte(num_trips: int) -> None:
    """States and pages go to the host and come back in other slots, twice, while others use the old ones."""
    manager = make_manager([attention(), ssm()], num_grains=2, num_states=4, num_host_pages=48)
    parked = manager.create_kv_cache()
    assert parked.resume() and parked.resize(40)
    generator = torch.Generator().manual_seed(7)
    for layer, role, group in ((LayerId(0), "key", ATTENTION), (LayerId(9), "ssm_state", SSM)):
        view = manager.get_buffer_view(layer, role, torch.uint8, (manager.get_page_stride(layer, role),))
        for index in parked.get_base_page_indices(group):
            view[index] = torch.randint(0, 256, view.shape[1:], generator=generator, dtype=torch.uint8)

    def contents() -> list[bytes]:
        return [
            read_slot(manager, group, 0, index)
            for group in (ATTENTION, SSM)
            for index in parked.get_base_page_indices(group)
        ]

    before = contents()
    for _ in range(num_trips):
        parked.suspend()
        others: list[_KVCache] = []
        while (other := manager.create_kv_cache()).resume():
            others.append(other)
        other.close()
        assert others[0].resize(16 * 4)
        assert slots(manager, 1)[0][0] < slots(manager, 1)[0][2]
        for other in others:
            other.close()
        assert parked.resume()
        assert contents() == before
    parked.close()
    manager.shutdown()


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_block", "num_blocks"),
    [(11_520, 1152, 10), (11_519, 1152, 10), (11_521, 1152, 11)],
)
def test_vllm_55600_blocks_are_counted_in_the_blocks_own_size(
    num_tokens: int, tokens_per_block: int, num_blocks: int
) -> None:
    """The kernel may see pages of 16 tokens; the table still counts blocks of 1,152."""
    config = KVCacheManagerConfig(
        tokens_per_block=tokens_per_block,
        cache_tiers=[GpuCacheTierConfig(2 * MIB)],
        layers=[
            AttentionLayerConfig(LayerId(0), [BufferConfig("key", 1152 * 16, tokens_per_block_override=16)]),
            AttentionLayerConfig(LayerId(1), [BufferConfig("key", 1152 * 16, tokens_per_block_override=16)]),
        ],
    )
    manager = KVCacheManager(config, device="cpu")
    cache = manager.create_kv_cache()
    assert cache.resume() and cache.resize(num_tokens)
    indices = cache.get_base_page_indices(ATTENTION)
    assert (len(indices), cache.num_blocks) == (num_blocks, num_blocks)
    converter = manager.get_page_index_converter(LayerId(1), "key")
    pages = converter(indices)
    assert len(pages) == num_blocks * 72
    assert pages[72:74] == [indices[1] * 2 * 72, indices[1] * 2 * 72 + 1]
    assert manager.get_page_stride(LayerId(1), "key") == 16 * 16
    total = manager.get_storage_statistics()[0].total
    assert manager.get_page_index_upper_bound(LayerId(1), "key") == (2 * total - 1) * 72
    assert max(pages) < manager.get_page_index_upper_bound(LayerId(1), "key")
    cache.close()
    manager.shutdown()


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_vllm_56196_a_short_chunk_behind_a_prefix_writes_only_its_own_slots(chunk: int) -> None:
    """What the tree offers is bit-identical after others computed `chunk` tokens behind the prefix."""
    manager = make_manager([attention(), ssm()], num_grains=3, num_states=4)
    owner = run_prompt(manager, TEXT[:6])
    pages_view(manager)[list(owner.get_base_page_indices(ATTENTION))] = torch.tensor([11, 22])
    owner.close()
    offered = [page for block in manager.tree.blocks() for page in block.pages()]
    before = [read_slot(manager, page.life_cycle, page.level, page.slot) for page in offered]
    user = manager.create_kv_cache(input_tokens=TEXT[: 6 + chunk])
    assert user.num_committed_tokens == 6 and user.resume() and user.resize(6 + chunk)
    for ordinal in range(1, user.num_blocks):
        index = user.get_base_page_indices(ATTENTION)[ordinal]
        manager.get_buffer_view(LayerId(0), "key", torch.uint8, (PAGE_BYTES,))[index, 64:] = 255
    pages_view(manager, 1)[user.get_ssm_block_base_index(SSM)] = -1
    assert before == [read_slot(manager, page.life_cycle, page.level, page.slot) for page in offered]
    user.close()
    manager.shutdown()


ABORT_POINTS: dict[str, Callable[[_KVCache], object]] = {
    "created": lambda cache: None,
    "resumed": lambda cache: cache.resume(),
    "between_chunks": lambda cache: (cache.resume(), cache.resize(14)),
    "after_a_failed_resize": lambda cache: (cache.resume(), cache.resize(10_000)),
    "committed": lambda cache: (cache.resume(), cache.resize(30), cache.commit([1, 2, 3, 4, 5])),
    "suspended": lambda cache: (cache.resume(), cache.resize(14), cache.suspend()),
    "prefetched": lambda cache: (cache.resume(), cache.suspend(), cache.prefetch(CacheLevel(1))),
    "stopped": lambda cache: (cache.resume(), cache.resize(14), cache.stop_committing()),
}


@pytest.mark.parametrize("point", ABORT_POINTS)
def test_sgl_20182_used_slots_return_to_the_baseline_after_every_abort_point(point: str) -> None:
    """An aborted request gives back each slot once: nothing is lost and nothing is freed twice."""
    manager = make_manager([attention(), ssm()], num_grains=2, num_states=3, num_host_pages=24)
    run_prompt(manager, TEXT[:6]).close()
    baseline = [one.unavailable for one in manager.get_storage_statistics()]
    for _ in range(30):
        cache = manager.create_kv_cache(input_tokens=TEXT[:20])
        assert cache.num_committed_tokens >= 6
        ABORT_POINTS[point](cache)
        manager.check_integrity()
        cache.close()
        manager.check_integrity()
        assert [one.unavailable for one in manager.get_storage_statistics()] == baseline == [0, 0]
    with pytest.raises(MisuseError, match="closed already"):
        cache.close()
    manager.shutdown()


def test_sgl_20182_a_refused_resume_holds_nothing_but_its_prefix() -> None:
    manager = make_manager([attention(), ssm()], num_grains=2, num_states=2)
    run_prompt(manager, TEXT[:6]).close()
    residents = []
    while (cache := manager.create_kv_cache(input_tokens=TEXT[:20])).resume():
        residents.append(cache)
    for _ in range(5):
        assert cache.resume() is False
        manager.check_integrity()
    cache.close()
    for resident in residents:
        resident.close()
    assert all(one.available == one.total for one in manager.get_storage_statistics())
    manager.shutdown()


def test_sgl_33666_a_rank_without_attention_or_without_states_is_an_ordinary_manager() -> None:
    for layers in ([ssm()], [attention()]):
        manager = make_manager(layers)
        caches = []
        while (cache := manager.create_kv_cache()).resume() and cache.resize(8):
            caches.append(cache)
        for one in [cache, *caches]:
            one.close()
        assert caches
        manager.check_integrity()
        manager.shutdown()


def test_trt_14524_live_states_and_snapshots_add_up() -> None:
    """Live states are never given to snapshots: with only live slots, a commit goes on without a snapshot."""
    manager = make_manager([attention(), ssm()], num_grains=2, num_states=8)
    caches = []
    while (cache := manager.create_kv_cache()).resume():
        caches.append(cache)
    cache.close()
    first = caches[0]
    assert first.resize(8)
    first.commit(TEXT[:8])
    assert (first.num_committed_tokens, first.num_skipped_snapshots) == (8, 1)
    assert len({one.get_ssm_block_base_index(SSM) for one in caches}) == slots(manager)[1][2]
    assert manager.probe_reuse(None, TEXT[:9]) == 0
    caches.pop().close()
    assert first.resize(12)
    first.commit(TEXT[8:12])
    assert manager.probe_reuse(None, TEXT[:13]) == 12
    for one in caches:
        one.close()
    manager.shutdown()


def test_trt_14524_a_quota_below_the_floors_is_raised_and_an_impossible_split_is_refused() -> None:
    """The floors win over a tiny quota, openly: the pools say what they hold."""
    config = hybrid_config(1, 3, 0.97, 3 << 20)
    split = split_gpu_quota(config)
    assert split.num_slots[0] >= 1 and split.num_slots[1] >= 4
    assert split.pool_bytes > 1
    manager = make_manager([attention()])
    assert manager.clamp_max_seq_len_for_mem(1, 1 << 20) == 64
    assert manager.clamp_max_seq_len_for_mem(3, 1 << 20) == 20
    assert manager.clamp_max_seq_len_for_mem(17, 1 << 20) == 0
    assert manager.clamp_max_seq_len_for_mem(1, 10) == 10
    manager.shutdown()


def test_vllm_40691_slot_counts_are_conserved_in_every_state() -> None:
    """free + evictable + unavailable = total, whatever is open, parked or cached."""
    manager = make_manager([attention(), ssm()], num_grains=2, num_states=3, num_host_pages=20)
    rng = random.Random(40691)
    caches: list[_KVCache] = []
    for _ in range(200):
        choice = rng.random()
        if choice < 0.4 and len(caches) < 5:
            caches.append(manager.create_kv_cache(input_tokens=TEXT[: rng.randrange(1, 30)]))
        elif choice < 0.8 and caches:
            cache = rng.choice(caches)
            if not cache.is_active:
                cache.resume()
            elif cache.resize(cache.capacity + 5):
                cache.commit(TEXT[cache.num_committed_tokens : cache.capacity])
        elif caches:
            caches.pop(rng.randrange(len(caches))).close()
        for level in range(2):
            for one in manager.get_storage_statistics(CacheLevel(level)):
                assert one.free + one.evictable + one.unavailable == one.total
                assert min(one.free, one.evictable, one.unavailable) >= 0
    for cache in caches:
        cache.close()
    manager.shutdown()


def test_llama_cpp_24536_ratios_are_sums_divided_once() -> None:
    """Shares of pool bytes come from sums over all samples, not from averages of ratios."""
    config = make_config(
        [attention(), ssm()],
        num_grains=40,
        rebalance_moving_average_decay=0.999999,
        rebalance_target_ratio_update_interval=1,
    )
    manager = KVCacheManager(config, device="cpu")
    for num_blocks in (2, 10):
        cache = manager.create_kv_cache()
        assert cache.resume() and cache.resize(num_blocks * 4)
        cache.close()
    assert manager.adjust()
    pages, states = manager.get_storage_statistics()
    page_share = pages.total * PAGE_BYTES / (80 * MIB)
    assert abs(page_share - 12 * PAGE_BYTES / (12 * PAGE_BYTES + 2 * 2 * PAGE_BYTES)) < 0.02
    assert states.total > 0
    manager.shutdown()


def test_sgl_38846_the_pool_gives_exactly_the_slots_it_says() -> None:
    manager = make_manager([ssm()], num_grains=3)
    stated = manager.get_storage_statistics()[0]
    caches = []
    while (cache := manager.create_kv_cache()).resume():
        caches.append(cache)
    cache.close()
    assert len(caches) == stated.total == stated.free == stated.available
    for one in caches:
        one.close()
    manager.shutdown()


def test_capacity_errors_are_told_from_mistakes() -> None:
    """Lack of room never looks like the caller's fault, nor the other way round."""
    assert not issubclass(OutOfPagesError, ValueError)
    assert not issubclass(MisuseError, OutOfPagesError)
