# SPDX-License-Identifier: Apache-2.0
"""The quota split: every number that it decides for Kimi K3, and its rules one by one."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    AttnLifeCycle,
    BatchDesc,
    BufferConfig,
    CacheTier,
    GpuCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerConfig,
    LayerId,
    MisuseError,
    OutOfPagesError,
    SsmLayerConfig,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import cdiv, float32
from tensorrt_llm.runtime.kv_cache_manager_v2.life_cycle import LifeCycleRegistry
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import (
    Sizing,
    batch_slots,
    distribute,
    grain_bytes,
    grains_of,
    make_sizing,
    slots_in,
    slots_to_keep,
    split_gpu_quota,
    split_tier,
    usable_quota_bytes,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EMPTY = KVCacheDesc(capacity=0, history_length=0)
CAPACITY_CAP = 2**30


def attention_layers(page_bytes: Sequence[int], window: int | None = None) -> list[LayerConfig]:
    return [
        AttentionLayerConfig(LayerId(1000 + index), [BufferConfig("key", size)], sliding_window_size=window)
        for index, size in enumerate(page_bytes)
    ]


def ssm_layers(num_layers: int, ssm_bytes: int, conv_bytes: int) -> list[LayerConfig]:
    buffers = [BufferConfig("ssm_state", ssm_bytes), BufferConfig("conv_state", conv_bytes)]
    return [SsmLayerConfig(LayerId(index), buffers) for index in range(num_layers)]


def hybrid_config(
    layers: list[LayerConfig],
    *,
    quota: int,
    tokens_per_block: int,
    residents: int,
    dummies: int,
    typical_capacity: int,
    max_util: float,
) -> KVCacheManagerConfig:
    """What the hybrid manager hands the runtime: zero-capacity descs reserve recurrent states (facts 3.7)."""
    typical = KVCacheDesc(capacity=typical_capacity, history_length=max(0, typical_capacity - 1))
    return KVCacheManagerConfig(
        tokens_per_block=tokens_per_block,
        cache_tiers=[GpuCacheTierConfig(quota)],
        layers=layers,
        max_util_for_resume=max_util,
        constraints=[BatchDesc([EMPTY] * (residents + dummies))],
        typical_step=BatchDesc([typical] * residents + [EMPTY] * dummies),
        commit_min_snapshot=True,
    )


def quota_filling_capacity(quota: int, residents: int, attention_bytes_per_token: int) -> int:
    """Tokens per resident request at which attention alone fills the quota."""
    return min(cdiv(quota, residents * attention_bytes_per_token), CAPACITY_CAP)


class TestSmallHybrid:
    """128 MiB, one KDA layer of 2 MiB + 64 KiB per slot, one attention layer of 256-byte pages, floor 3."""

    LAYERS = attention_layers([256]) + ssm_layers(1, 2 * MIB, 64 * KIB)
    RECORDS_PER_SLOT = 1 * 3 * 2 * 8 * 256 * 4

    def config(self, quota: int, typical_capacity: int) -> KVCacheManagerConfig:
        return hybrid_config(
            self.LAYERS,
            quota=quota,
            tokens_per_block=1,
            residents=2,
            dummies=1,
            typical_capacity=typical_capacity,
            max_util=0.97,
        )

    def test_by_ratio(self) -> None:
        split = split_gpu_quota(self.config(128 * MIB, 64))
        assert split.num_slots == (106_496, 49)

    def test_at_the_floor(self) -> None:
        kept = slots_to_keep(3, 0.97)
        quota = 128 * MIB - kept * self.RECORDS_PER_SLOT
        assert (kept, quota) == (4, 134_021_120)
        split = split_gpu_quota(self.config(quota, quota_filling_capacity(quota, 2, 256)))
        assert split.num_slots == (483_328, 4)
        assert split.pool_bytes + split.num_slots[1] * self.RECORDS_PER_SLOT < 128 * MIB + split.grain

    @pytest.mark.parametrize(
        ("quota", "typical_capacity", "slots"),
        [(128 * MIB, 64, (106_496, 49)), (134_021_120, 262_144, (483_328, 4))],
    )
    def test_the_runtime_builds_what_the_split_says(
        self, quota: int, typical_capacity: int, slots: tuple[int, int]
    ) -> None:
        manager = KVCacheManager(self.config(quota, typical_capacity), device="cpu")
        assert tuple(one.total for one in manager.get_storage_statistics()) == slots
        assert manager.get_quota() == quota
        for layer, role, rows in ((1000, "key", slots[0]), (0, "ssm_state", slots[1])):
            scale = manager.get_page_index_scale(LayerId(layer), role)
            assert cdiv(manager.get_page_index_upper_bound(LayerId(layer), role), scale) == rows
        manager.shutdown()

    def test_full_quota_for_the_typical_capacity_pins_the_same_floor(self) -> None:
        quota = 128 * MIB - 4 * self.RECORDS_PER_SLOT
        config = self.config(quota, quota_filling_capacity(128 * MIB, 2, 256))
        assert split_gpu_quota(config).num_slots == (483_328, 4)


class TestKimiK3:
    """69 KDA layers (H 6, K = V = 128, conv width 4, bf16), 24 MLA layers of 1,152 bytes per token."""

    RECORDS_PER_SLOT = 69 * 3 * 7 * 6 * 128 * 4

    def layers(self, tokens_per_block: int) -> list[LayerConfig]:
        return attention_layers([1152 * tokens_per_block] * 24) + ssm_layers(
            69, 6 * 128 * 128 * 4, 3 * 6 * 128 * 3 * 2
        )

    def test_bytes_per_slot(self) -> None:
        sizing = make_sizing(
            KVCacheManagerConfig(
                tokens_per_block=1,
                cache_tiers=[GpuCacheTierConfig(GIB)],
                layers=self.layers(1),
                commit_min_snapshot=True,
            )
        )
        assert [sum(pools) for pools in sizing.slot_sizes] == [27_648, 28_085_760]
        assert self.RECORDS_PER_SLOT == 4_451_328

    def test_by_ratio_at_13_2_gib(self) -> None:
        config = hybrid_config(
            self.layers(64),
            quota=int(13.2 * GIB),
            tokens_per_block=64,
            residents=8,
            dummies=1,
            typical_capacity=33 * 64,
            max_util=0.95,
        )
        assert split_gpu_quota(config).num_slots[1] == 183

    @pytest.mark.parametrize("tokens_per_block", [32, 64])
    @pytest.mark.parametrize(("batch", "slots", "tokens"), [(8, 10, 583_744), (18, 21, 571_008)])
    def test_at_the_floor_at_15_35_gib(
        self, tokens_per_block: int, batch: int, slots: int, tokens: int
    ) -> None:
        kept = slots_to_keep(batch + 1, 0.95)
        quota = int(15.35 * GIB) - kept * self.RECORDS_PER_SLOT
        config = hybrid_config(
            self.layers(tokens_per_block),
            quota=quota,
            tokens_per_block=tokens_per_block,
            residents=batch,
            dummies=1,
            typical_capacity=quota_filling_capacity(int(15.35 * GIB), batch, 27_648),
            max_util=0.95,
        )
        split = split_gpu_quota(config)
        assert (split.num_slots[0] * tokens_per_block, split.num_slots[1]) == (tokens, slots)
        manager = KVCacheManager(config, device="cpu")
        assert tuple(one.total for one in manager.get_storage_statistics()) == split.num_slots
        manager.shutdown()
        assert split.pool_bytes + slots * self.RECORDS_PER_SLOT < int(15.35 * GIB) + split.grain

    @pytest.mark.parametrize(("tokens_per_block", "tokens"), [(32, 17_408), (64, 17_344)])
    def test_estimation_quota_resumes_its_tokens(self, tokens_per_block: int, tokens: int) -> None:
        """834,222,619 bytes, at the floor: pages that may be in use while a cache resumes, in tokens."""
        quota = 834_222_619
        config = hybrid_config(
            self.layers(tokens_per_block),
            quota=quota - 10 * self.RECORDS_PER_SLOT,
            tokens_per_block=tokens_per_block,
            residents=8,
            dummies=1,
            typical_capacity=quota_filling_capacity(quota, 8, 27_648),
            max_util=0.95,
        )
        split = split_gpu_quota(config)
        assert split.num_slots[1] == 10
        resumable_pages = int(split.num_slots[0] * float32(0.95))
        assert resumable_pages * tokens_per_block == tokens


@pytest.mark.parametrize(
    ("floor", "max_util", "kept"),
    [(3, 0.97, 4), (9, 0.95, 10), (19, 0.95, 21), (19, float32(0.95), 21), (1, 1.0, 1), (0, 0.5, 0)],
)
def test_kept_slots_divide_by_the_float32_ratio(floor: int, max_util: float, kept: int) -> None:
    assert slots_to_keep(floor, max_util) == kept


@pytest.mark.parametrize(
    ("quota", "grain"),
    [
        (1, 2 * MIB),
        (GIB, 2 * MIB),
        (2 * GIB - 1, 2 * MIB),
        (2 * GIB, 4 * MIB),
        (4 * GIB - 1, 4 * MIB),
        (4 * GIB, 8 * MIB),
        (8 * GIB, 16 * MIB),
        (16 * GIB - 1, 16 * MIB),
        (16 * GIB, 32 * MIB),
        (1024 * GIB, 32 * MIB),
    ],
)
def test_gpu_grain_doubles_with_the_quota(quota: int, grain: int) -> None:
    assert grain_bytes(CacheTier.GPU_MEM, quota) == grain


def test_cold_grains_do_not_depend_on_the_quota() -> None:
    assert grain_bytes(CacheTier.HOST_MEM, 64 * GIB) == 4 * KIB
    assert grain_bytes(CacheTier.DISK, 64 * GIB) == 2 * MIB


@pytest.mark.parametrize("slot_sizes", [(7,), (300, 1), (4096, 4096), (5000, 3000, 17)])
@pytest.mark.parametrize("grain", [1, 64, 4096])
def test_slots_in_is_the_largest_count_that_fits(slot_sizes: tuple[int, ...], grain: int) -> None:
    for num_grains in range(60):
        slots = slots_in(num_grains, slot_sizes, grain)
        assert grains_of(slots, slot_sizes, grain) <= num_grains
        assert grains_of(slots + 1, slot_sizes, grain) > num_grains


def test_distribution_rounds_half_to_even() -> None:
    one_grain_slots = [(1,), (1,)]
    assert distribute(5, [0.5, 0.5], [0, 0], one_grain_slots, 1) == [2, 3]
    assert distribute(7, [0.5, 0.5], [0, 0], one_grain_slots, 1) == [4, 3]


def test_a_group_at_its_floor_is_pinned_and_the_rest_shares_the_rest() -> None:
    assert distribute(100, [0.01, 0.33, 0.66], [10, 1, 1], [(1,), (1,), (1,)], 1) == [10, 30, 60]


def test_a_pinned_group_fills_the_grains_of_its_floor() -> None:
    assert distribute(100, [0.001, 0.999], [3, 1], [(3,), (10,)], 10) == [3, 99]
    assert distribute(100, [0.001, 0.999], [1, 1], [(3,), (10,)], 10) == [3, 99]


def test_floors_beyond_the_grains_are_refused() -> None:
    with pytest.raises(OutOfPagesError, match="floors"):
        distribute(4, [0.5, 0.5], [3, 3], [(1,), (1,)], 1)


def test_every_grain_is_used_or_too_small_for_another_slot() -> None:
    sizes = [(2 * MIB, 64 * KIB), (256,), (3 * MIB,)]
    for num_grains in range(20, 90):
        slots = distribute(num_grains, [0.2, 0.5, 0.3], [1, 1, 1], sizes, 2 * MIB)
        used = sum(grains_of(count, pools, 2 * MIB) for count, pools in zip(slots, sizes, strict=True))
        assert used <= num_grains
        for index, pools in enumerate(sizes):
            more = grains_of(slots[index] + 1, pools, 2 * MIB) - grains_of(slots[index], pools, 2 * MIB)
            assert more >= 1


def test_quota_is_rounded_up_to_grains_and_up_to_the_floors() -> None:
    sizing = Sizing(slot_sizes=((100,),), floors=(5,), typical_slots=(5,))
    assert usable_quota_bytes(1, 64, sizing) == 8 * 64
    assert usable_quota_bytes(1000, 64, sizing) == 1024


def one_layer_config(**changes: object) -> KVCacheManagerConfig:
    base: dict[str, object] = {
        "tokens_per_block": 32,
        "cache_tiers": [GpuCacheTierConfig(64 * MIB)],
        "layers": attention_layers([1024]) + ssm_layers(1, MIB, 4096),
        "commit_min_snapshot": True,
    }
    return KVCacheManagerConfig(**{**base, **changes})  # type: ignore[arg-type]


def test_a_recurrent_state_is_one_slot_at_any_capacity() -> None:
    config = one_layer_config()
    sizing_step = BatchDesc([EMPTY, EMPTY, KVCacheDesc(100, 50)])
    life_cycles = tuple(LifeCycleRegistry(config.layers, 32))
    assert batch_slots(sizing_step, life_cycles, 32) == [4, 3]


def test_system_prompt_blocks_are_counted_once() -> None:
    full = (AttnLifeCycle(),)
    step = BatchDesc([KVCacheDesc(320, 0)] * 4, system_prompt_length=100)
    assert batch_slots(step, full, 32) == [4 * (10 - 3) + 3]
    shorter_than_the_prompt = BatchDesc([KVCacheDesc(32, 0)], system_prompt_length=100)
    assert batch_slots(shorter_than_the_prompt, full, 32) == [3]


def test_stale_blocks_of_a_window_are_not_counted() -> None:
    windowed = (AttnLifeCycle(window_size=64, num_sink_blocks=1),)
    assert batch_slots(BatchDesc([KVCacheDesc(1024, 1023)]), windowed, 32) == [32 - (30 - 1)]


def test_floor_of_a_window_holds_every_block_it_can_touch() -> None:
    config = one_layer_config(layers=attention_layers([1024], window=64), commit_min_snapshot=False)
    assert make_sizing(config).floors == (0 + (64 + 32 - 2) // 32 + 1,)


def test_constraints_are_floors_scaled_by_the_resume_ratio() -> None:
    sizing = make_sizing(one_layer_config(max_util_for_resume=0.95, constraints=[BatchDesc([EMPTY] * 19)]))
    assert sizing.floors == (1, 21)


def test_ratio_falls_back_to_floors_then_to_one_request() -> None:
    with_constraints = make_sizing(one_layer_config(constraints=[BatchDesc([EMPTY] * 8)]))
    assert with_constraints.typical_slots == with_constraints.floors
    assert make_sizing(one_layer_config()).typical_slots == (65, 1)


def test_given_ratio_wins_over_the_typical_step_but_not_over_floors() -> None:
    config = one_layer_config(
        initial_pool_ratio=[0.75, 0.25],
        constraints=[BatchDesc([EMPTY] * 20)],
        typical_step=BatchDesc([EMPTY]),
    )
    sizing = make_sizing(config)
    assert sizing.ratio(2 * MIB) == (0.75, 0.25)
    assert split_gpu_quota(config).num_slots[1] >= sizing.floors[1] == 21


def test_given_ratio_of_wrong_length_names_both_counts() -> None:
    with pytest.raises(MisuseError, match=r"3 weights.*layer group \(2\).*pool\s+group \(2\)"):
        make_sizing(one_layer_config(initial_pool_ratio=[0.5, 0.25, 0.25]))


def test_cold_tier_has_no_floors() -> None:
    sizing = make_sizing(one_layer_config(constraints=[BatchDesc([EMPTY] * 30)]))
    split = split_tier(CacheTier.HOST_MEM, 8 * MIB, sizing)
    assert split.num_slots[1] < 30
    assert split.pool_bytes <= 8 * MIB


def test_sizing_loads_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tensorrt_llm.runtime.kv_cache_manager_v2 import quota, KVCacheManagerConfig\n"
        "print(quota.slots_to_keep(19, 0.95))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["21"], done.stderr
