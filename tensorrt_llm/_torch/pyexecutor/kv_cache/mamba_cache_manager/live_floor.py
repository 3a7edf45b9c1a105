# SPDX-License-Identifier: Apache-2.0
"""How many state slots are kept for live requests, and what they cost the quota. Pure arithmetic.

F = requests that can be resident plus the dummies' slots, u = float32(max_util_for_resume): a request resumes
only while the pool's use is at most u, so kept = ceil(F / u) slots let all F be resident. B = a slot's bytes
in the pools, R = a slot's bytes beside the pools that the quota pays for.
"""

import math
from dataclasses import dataclass

from tensorrt_llm.runtime.kv_cache_manager_v2 import CacheTier
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import (
    GIB,
    grain_bytes,
    grains_of,
    slots_in,
    slots_to_keep,
)

MAX_CAPACITY_TOKENS = 1 << 30
"""Largest capacity put into a KVCacheDesc: TensorRT-LLM's C++ storage keeps it in 32 bits."""

_GRAIN_CLASS_ENDS_BYTES = tuple(GIB << k for k in (4, 3, 2, 1))
"""Quotas at which the storage's grain doubles, descending; a quota just below keeps the smaller grain."""


def live_floor_slots(max_batch_size: int, pp_size: int, num_reserved_dummy_slots: int) -> int:
    """F: a slot for each request of each of the pipeline's pp_size micro-batches, and one per dummy."""
    return max_batch_size * pp_size + num_reserved_dummy_slots


def gpu_grain_bytes(quota_bytes: int) -> int:
    """The storage's allocation unit for a GPU tier of this size."""
    return grain_bytes(CacheTier.GPU_MEM, quota_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The split of a quota at the live floor: `slots` state slots, and what the storage's GPU tier is built
    with.
    """

    slots: int
    reserved_bytes: int
    tier_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStates:
    """The live states of a rank: F, u, B, R, and the pools' slot sizes (their sum is B)."""

    floor_slots: int
    max_util_for_resume: float
    pool_slot_bytes: tuple[int, ...]
    reserved_bytes_per_slot: int

    @property
    def kept_slots(self) -> int:
        """ceil(F / u), divided in double on the float32 value: 19 at 0.95 keeps 21 (a double alone would say
        20).
        """
        return slots_to_keep(self.floor_slots, self.max_util_for_resume)

    @property
    def pool_bytes_per_slot(self) -> int:
        return sum(self.pool_slot_bytes)

    @property
    def quota_bytes(self) -> int:
        """Bytes of quota that the live states need: kept * (B + R) where something is reserved, F * B
        otherwise.
        """
        if self.reserved_bytes_per_slot:
            return self.kept_slots * (self.pool_bytes_per_slot + self.reserved_bytes_per_slot)
        return self.floor_slots * self.pool_bytes_per_slot

    def held_slots(self, grain: int) -> int:
        """Slots that the grains of the kept ones hold: more than these where a slot is less than a grain."""
        return slots_in(grains_of(self.kept_slots, self.pool_slot_bytes, grain), self.pool_slot_bytes, grain)

    def reserve(self, quota_bytes: int) -> Reservation:
        """Split a quota at the live floor: the largest tier whose own grains hold exactly the slots reserved
        for.

        The tier's size sets its grain, the grain the slots, the slots the tier's size. Grain classes are
        tried from the largest; where the reservation itself would cross into a smaller class, the tier ends
        just below the border.
        """
        split = self._split(quota_bytes)
        if split is None:
            slot_bytes = self.pool_bytes_per_slot + self.reserved_bytes_per_slot
            raise ValueError(
                f"a GPU cache quota of {quota_bytes} bytes is too small for live recurrent states: "
                f"{self.kept_slots} slots of {slot_bytes} bytes are kept. Raise max_gpu_total_bytes or "
                "max_tokens, or lower max_batch_size."
            )
        return split

    def reserved_beyond_kept_bytes(self, base_bytes: int, max_util_for_resume: float) -> int:
        """(n - kept) * R of the quota that `base_bytes / max_util_for_resume` leads to, whose floor grains
        hold n slots.
        """
        kept, R = self.kept_slots, self.reserved_bytes_per_slot
        slots = kept
        while R:
            quota = math.ceil((base_bytes + (slots - kept) * R) / max_util_for_resume)
            split = self._split(quota)
            held = self.held_slots(gpu_grain_bytes(quota)) if split is None else split.slots
            if held <= slots:
                break
            slots = held
        return (slots - kept) * R

    def _split(self, quota_bytes: int) -> Reservation | None:
        R = self.reserved_bytes_per_slot
        largest = quota_bytes - self.kept_slots * R
        for ceiling in (largest, *(end - 1 for end in _GRAIN_CLASS_ENDS_BYTES if end - 1 < largest)):
            slots = self.held_slots(gpu_grain_bytes(ceiling))
            tier = min(quota_bytes - slots * R, ceiling)
            if tier > 0 and gpu_grain_bytes(tier) == gpu_grain_bytes(ceiling):
                return Reservation(slots=slots, reserved_bytes=slots * R, tier_bytes=tier)
        return None
