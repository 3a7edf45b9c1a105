# SPDX-License-Identifier: Apache-2.0
"""How many slots are kept, and how a quota is split at the live floor."""

import random

import numpy as np
import pytest

from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.live_floor import (
    LiveStates,
    gpu_grain_bytes,
    live_floor_slots,
)
from tests.unittest._torch.executor.kv_cache.helpers import GIB, MIB


def states(
    floor: int = 3, ratio: float = 0.97, pools: tuple[int, ...] = (2 * MIB, 64 << 10), reserved: int = 49_152
) -> LiveStates:
    return LiveStates(
        floor_slots=floor,
        max_util_for_resume=ratio,
        pool_slot_bytes=pools,
        reserved_bytes_per_slot=reserved,
    )


@pytest.mark.parametrize(
    ("floor", "ratio", "kept"), [(3, 0.97, 4), (9, 0.95, 10), (19, 0.95, 21), (8, 1.0, 8), (1, 0.5, 2)]
)
def test_kept_slots(floor: int, ratio: float, kept: int) -> None:
    assert states(floor, ratio).kept_slots == kept


def test_kept_slots_read_the_ratio_as_float32_whatever_it_is_given() -> None:
    assert states(19, float(np.float32(0.95))).kept_slots == states(19, 0.95).kept_slots == 21


def test_floor_counts_every_micro_batch_and_dummy() -> None:
    assert live_floor_slots(max_batch_size=8, pp_size=2, num_reserved_dummy_slots=3) == 19


def test_quota_of_live_states() -> None:
    with_records, without = states(), states(reserved=0)
    per_slot = 2 * MIB + (64 << 10)
    assert with_records.quota_bytes == 4 * (per_slot + 49_152)
    assert without.quota_bytes == 3 * per_slot
    assert with_records.quota_bytes - without.quota_bytes == 4 * 49_152 + per_slot


def test_reservation_of_slots_larger_than_a_grain_is_the_kept_ones() -> None:
    split = states().reserve(128 * MIB)
    assert (split.slots, split.tier_bytes, split.reserved_bytes) == (4, 134_021_120, 196_608)


def test_reservation_of_slots_smaller_than_a_grain_is_what_the_grains_hold() -> None:
    split = states(pools=(100_000, 9_000), reserved=5_000).reserve(64 * MIB)
    assert split.slots == 2 * MIB // 100_000
    assert split.tier_bytes == 64 * MIB - split.slots * 5_000


def test_the_reduced_quota_sets_the_grain() -> None:
    """2 GiB + 1 byte: the reservation brings the tier under 2 GiB, where grains are 2 MiB and hold fewer
    slots.
    """
    split = states(pools=(700_000,), reserved=300_000).reserve(2 * GIB + 1)
    assert gpu_grain_bytes(split.tier_bytes) == 2 * MIB
    assert split.slots == 4 * MIB // 700_000


def test_a_quota_without_a_fixed_point_ends_below_the_border() -> None:
    """4 MiB grains would hold more slots, whose records leave less than 2 GiB; 2 MiB grains hold fewer, whose
    records leave more.
    """
    live = states(floor=1, ratio=1.0, pools=(1_000_000,), reserved=1_000_000)
    quota = 2 * GIB + 3_000_000
    assert live.held_slots(4 * MIB) * 1_000_000 > 3_000_000 > live.held_slots(2 * MIB) * 1_000_000
    split = live.reserve(quota)
    assert (split.tier_bytes, split.slots) == (2 * GIB - 1, live.held_slots(2 * MIB))


def test_a_quota_below_the_kept_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for live recurrent states.*Raise max_gpu_total_bytes"):
        states().reserve(4 * 49_152)


def test_reservations_are_consistent() -> None:
    rng = random.Random(0)
    for _ in range(2_000):
        pools = tuple(sorted((rng.randrange(1, 40 * MIB) for _ in range(rng.choice((1, 2)))), reverse=True))
        live = states(rng.randrange(1, 40), rng.uniform(0.5, 1.0), pools, rng.randrange(1, 6 * MIB))
        quota = (
            rng.randrange(1, 20 * GIB)
            if rng.random() < 0.5
            else rng.choice((2, 4, 8, 16)) * GIB + rng.randrange(64 * MIB)
        )
        if quota < live.quota_bytes:
            continue
        try:
            split = live.reserve(quota)
        except ValueError:
            slots = live.held_slots(gpu_grain_bytes(quota))
            assert slots * live.reserved_bytes_per_slot >= quota, "refused although the records fit"
            continue
        assert split.slots == live.held_slots(gpu_grain_bytes(split.tier_bytes)) >= live.kept_slots
        assert split.tier_bytes + split.reserved_bytes <= quota


def test_max_tokens_quota_pays_for_the_slots_beyond_the_kept_ones() -> None:
    live = states(pools=(100_000,), reserved=5_000)
    base = 50 * MIB
    extra = live.reserved_beyond_kept_bytes(base, 0.95)
    assert extra == (live.reserve(int((base + extra) / 0.95) + 1).slots - live.kept_slots) * 5_000 > 0
    assert states().reserved_beyond_kept_bytes(base, 0.95) == 0
    assert states(reserved=0).reserved_beyond_kept_bytes(base, 0.95) == 0
