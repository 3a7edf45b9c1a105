# SPDX-License-Identifier: Apache-2.0
"""`swa_scratch_reuse`: blocks that a step makes stale before it ends share slots between the layers."""

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    AttnLifeCycle,
    BatchDesc,
    BufferConfig,
    KVCacheDesc,
    KVCacheManager,
    LayerConfig,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    MisuseError,
    PageIndexConverter,
    PageIndexMode,
    ScratchDesc,
    SlotId,
    SwaScratchReuseConfig,
    _KVCache,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import batch_slots, make_sizing
from tensorrt_llm.runtime.kv_cache_manager_v2.scratch import LayerShare, ScratchPlan
from tests.unittest.kv_cache_manager_v2.builders import (
    KIB,
    attention,
    make_config,
    make_manager,
    run_prompt,
    slots,
    ssm,
)

GROUP = LayerGroupId(0)
NUM_LAYERS = 4
TEXT = list(range(100, 200))


def windowed(window: int = 6, num_layers: int = NUM_LAYERS) -> list[LayerConfig]:
    """Layers with a key and a value of equal size, so a layer has 1 / num_layers of a slot."""
    buffers = [BufferConfig("key", 16 * KIB), BufferConfig("value", 16 * KIB)]
    return [AttentionLayerConfig(LayerId(layer), buffers, window) for layer in range(num_layers)]


def sharing_manager(rewind: int = 0, **options: object) -> KVCacheManager:
    """Blocks of 4 tokens, a window of 6, 16 slots."""
    return make_manager(windowed(), swa_scratch_reuse=SwaScratchReuseConfig(rewind), **options)


def has_page(cache: _KVCache) -> list[bool]:
    return [index >= 0 for index in cache.get_base_page_indices(GROUP)]


def scratch_of(cache: _KVCache) -> tuple[list[int], int]:
    """Blocks that share slots, and the number of slots."""
    desc = cache.get_scratch_desc(GROUP)
    return ([], 0) if desc is None else (list(desc.ordinals), len(desc.slots))


def active(manager: KVCacheManager) -> _KVCache:
    cache = manager.create_kv_cache()
    assert cache.resume()
    return cache


def test_a_long_step_takes_a_slot_per_layer_count_of_its_stale_blocks() -> None:
    """Of 10 blocks the window at the end sees 2 (tokens 35 to 39); the other 8 share 8 / 4 slots."""
    manager = sharing_manager()
    cache = active(manager)
    assert cache.resize(40)
    assert has_page(cache) == [False] * 8 + [True] * 2
    assert scratch_of(cache) == (list(range(8)), 2)
    assert slots(manager)[0][0] == 16 - 4
    assert cache.resize(history_length=40)
    assert scratch_of(cache) == ([], 0) and slots(manager)[0][0] == 16 - 2
    manager.check_integrity()
    cache.close()
    manager.shutdown()


def test_a_step_longer_than_the_pool_fits_and_is_refused_without_sharing() -> None:
    shared, own = sharing_manager(), make_manager(windowed())
    for manager, fits in ((shared, True), (own, False)):
        cache = active(manager)
        assert cache.resize(4 * 40) is fits
        assert cache.capacity == (160 if fits else 0)
        cache.close()
        manager.shutdown()


def test_the_last_steps_shared_slots_serve_the_next_step() -> None:
    """Ten chunks of a prompt in the slots of one: 8 blocks sharing 2 slots, and 2 + 2 of the windows."""
    manager = sharing_manager()
    taker = active(manager)
    assert taker.resize(taker.capacity + 2) and taker.resize(2)
    cache = active(manager)
    for end in range(40, 440, 40):
        assert cache.resize(end, end - 40)
        first = max(0, end - 40)
        assert scratch_of(cache) == (list(range(first // 4, first // 4 + 8)), 2)
        manager.check_integrity()
    assert manager.get_iteration_stats().peak_blocks[0] <= 1 + 2 + 4
    for one in (cache, taker):
        one.close()
    manager.shutdown()


@pytest.mark.parametrize(("rewind", "num_sharing"), [(0, 8), (3, 8), (4, 7), (7, 7), (8, 6), (40, 0)])
def test_what_may_be_taken_back_keeps_its_window(rewind: int, num_sharing: int) -> None:
    """After a rewind of r the next query stands at 40 - r and sees tokens from 35 - r on."""
    manager = sharing_manager(rewind)
    cache = active(manager)
    assert cache.resize(40)
    assert scratch_of(cache)[0] == list(range(num_sharing))
    length = 40 - min(rewind, 40)
    assert cache.resize(length, length)
    first_seen = max(0, length + 1 - 6) // 4
    assert has_page(cache)[first_seen:] == [True] * (cache.num_blocks - first_seen)
    cache.close()
    manager.shutdown()


def test_to_take_back_more_is_misuse_and_changes_nothing() -> None:
    manager = sharing_manager(rewind=3)
    cache = active(manager)
    assert cache.resize(40)
    for lengths in ({"history_length": 20}, {"capacity": 30}, {"capacity": 30, "history_length": 30}):
        with pytest.raises(MisuseError, match="share slots in the step from 0 to 40.*raise .*max_rewind_len"):
            cache.resize(**lengths)
    with pytest.raises(MisuseError, match="share slots"):
        cache.commit(TEXT[:20])
    assert (cache.capacity, cache.history_length, cache.num_committed_tokens) == (40, 0, 0)
    assert scratch_of(cache)[0] == list(range(8))
    manager.check_integrity()
    assert cache.resize(0), "a step that was not computed can be given back"
    assert scratch_of(cache) == ([], 0) and slots(manager)[0][0] == 16
    cache.close()
    manager.shutdown()


def test_a_step_that_grows_keeps_what_it_shares() -> None:
    manager = sharing_manager()
    cache = active(manager)
    assert cache.resize(40)
    before = cache.get_scratch_desc(GROUP)
    assert before is not None and cache.resize(60)
    after = cache.get_scratch_desc(GROUP)
    assert after is not None
    assert after.slots[:2] == before.slots and after.ordinals == (*range(8), *range(10, 13))
    cache.close()
    manager.shutdown()


def test_shared_slots_go_to_the_host_and_back_with_their_step() -> None:
    manager = sharing_manager(num_host_pages=40)
    cache = active(manager)
    assert cache.resize(40)
    cache.suspend()
    with pytest.raises(MisuseError, match="active"):
        cache.get_scratch_desc(GROUP)
    taker = active(manager)
    assert taker.resize(4 * 56)
    manager.check_integrity()
    taker.close()
    assert cache.resume()
    assert scratch_of(cache) == (list(range(8)), 2)
    manager.check_integrity()
    cache.close()
    assert slots(manager)[0][0] == 16
    manager.shutdown()


def test_no_room_for_a_step_changes_nothing() -> None:
    manager = sharing_manager()
    taker = active(manager)
    assert taker.resize(4 * 40)
    cache = active(manager)
    free = slots(manager)[0][0]
    assert cache.resize(60) is False
    assert (cache.capacity, scratch_of(cache), slots(manager)[0][0]) == (0, ([], 0), free)
    manager.check_integrity()
    for one in (cache, taker):
        one.close()
    manager.shutdown()


@pytest.mark.parametrize("keeps_minimum", [True, False])
def test_what_was_shared_is_offered_to_nobody(keeps_minimum: bool) -> None:
    """The prefix is found at the length whose window has pages, and not where it has none."""
    manager = sharing_manager(commit_min_snapshot=keeps_minimum)
    run_prompt(manager, TEXT[:40]).close()
    assert manager.probe_reuse(None, TEXT[:41]) == 40
    assert manager.probe_reuse(None, TEXT[:30]) == 0
    manager.check_integrity()
    manager.shutdown()


def test_full_attention_states_and_lone_layers_share_nothing() -> None:
    layers = [attention(), attention(window=6, layer=1), ssm()]
    manager = make_manager(layers, num_grains=4, swa_scratch_reuse=SwaScratchReuseConfig())
    cache = active(manager)
    assert cache.resize(40)
    assert all(cache.get_scratch_desc(LayerGroupId(group)) is None for group in range(3))
    cache.close()
    manager.shutdown()


def test_pages_are_placed_per_layer_without_overlap() -> None:
    """Each layer reaches each of its blocks' keys and values in a place of its own, inside the slots."""
    manager = sharing_manager()
    cache = active(manager)
    assert cache.resize(44)
    desc = cache.get_scratch_desc(GROUP)
    assert desc is not None and desc.ordinals == tuple(range(9)) and len(desc.slots) == 3
    indices = cache.get_base_page_indices(GROUP)
    num_places = 2 * NUM_LAYERS
    for layer in range(NUM_LAYERS):
        places: list[int] = []
        for role in ("key", "value"):
            converter = manager.get_page_index_converter(LayerId(layer), role, PageIndexMode.PER_LAYER)
            pages = converter(indices, desc)
            assert converter(indices)[:9] == [-1] * 9
            own = manager.get_page_index_converter(LayerId(layer), role)(indices)
            offset = manager.storage.layout.buffer(LayerId(layer), role).offset // (16 * KIB)
            assert pages[9:] == [page + offset for page in own[9:]]
            assert {page // num_places for page in pages[:9]} <= set(desc.slots)
            places += pages
        assert len(set(places)) == len(places)
    with pytest.raises(MisuseError, match="PER_LAYER"):
        manager.get_page_index_converter(LayerId(0), "key")(indices, desc)
    cache.close()
    manager.shutdown()


def test_an_expanded_block_is_consecutive_pages_in_its_shared_place_too() -> None:
    """Two pages a block, three buffers a slot, one of them this layer's."""
    converter = PageIndexConverter(3, 2, layer_offset=1, is_shared=False)
    desc = ScratchDesc((0, 1, 2, 3), (SlotId(5), SlotId(9)))
    assert converter([-1, -1, -1, -1, 7], desc) == [30, 31, 32, 33, 34, 35, 54, 55, 44, 45]


@pytest.mark.parametrize(
    ("shares", "num_blocks", "num_slots"),
    [
        ([(2, 8)], 8, 2),
        ([(2, 8)], 9, 3),
        ([(2, 8)], 0, 0),
        ([(2, 5)], 5, 2),
        ([(1, 8), (1, 2)], 7, 4),
    ],
)
def test_the_largest_share_decides(shares: list[tuple[int, int]], num_blocks: int, num_slots: int) -> None:
    plan = ScratchPlan(
        max_rewind_len=0, shares=(tuple(LayerShare(num_own=own, num_buffers=of) for own, of in shares),)
    )
    assert plan.num_slots(LifeCycleId(0), num_blocks) == num_slots


def test_sizes_charge_shared_blocks_by_their_share() -> None:
    """Capacity 1,000 tokens from none: 250 blocks, of which the window's 3 have pages, 247 share 62 slots."""
    plan = ScratchPlan(max_rewind_len=4, shares=((LayerShare(num_own=2, num_buffers=8),),))
    window = [AttnLifeCycle(window_size=6)]
    whole = BatchDesc([KVCacheDesc(1000, 0)])
    assert batch_slots(whole, window, 4) == [250]
    assert batch_slots(whole, window, 4, plan) == [2 + 1 + 62]
    decode = BatchDesc([KVCacheDesc(1000, 996)] * 3)
    assert batch_slots(decode, window, 4, plan) == batch_slots(decode, window, 4) == [3 * 3]
    common = BatchDesc([KVCacheDesc(1000, 0)] * 2, system_prompt_length=400)
    assert batch_slots(common, window, 4, plan) == [100 + 2 * (3 + 37)]


def test_a_constraint_that_shares_is_what_the_runtime_can_serve() -> None:
    """As many requests as the constraint names take their step together, in a pool of exactly the floor."""
    batch = BatchDesc([KVCacheDesc(160, 0)] * 3)
    config = make_config(
        windowed(), swa_scratch_reuse=SwaScratchReuseConfig(), constraints=[batch], typical_step=None
    )
    floor = make_sizing(config).floors[0]
    assert floor == 3 * (2 + 10) < 3 * 40
    manager = KVCacheManager(config, device="cpu")
    assert floor <= manager.get_storage_statistics()[0].total < 3 * 40
    assert manager.clamp_max_seq_len_for_mem(3, 1000) >= 160
    caches = [active(manager) for _ in range(3)]
    assert all(cache.resize(160) for cache in caches)
    for cache in caches:
        cache.close()
    manager.shutdown()
