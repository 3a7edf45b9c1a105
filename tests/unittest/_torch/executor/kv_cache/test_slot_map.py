# SPDX-License-Identifier: Apache-2.0
"""Who owns which slot, when the storage moves states between a request's steps."""

import pytest
import torch

from tensorrt_llm._torch.modules.kda.verify_scheme import RECORDS, KdaGeometry
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.slot_buffers import SlotBuffers
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.slot_map import SlotMap


def make(num_slots: int = 6) -> tuple[SlotMap, dict[int, int]]:
    """A map over empty slots, and where the storage has the states."""
    geometry = KdaGeometry(num_heads=1, head_dim=2, conv_width=2, num_spec=3)
    pools = [torch.zeros(num_slots, 1, 2, 2)], [torch.zeros(num_slots, 6, 1)]
    buffers = SlotBuffers(scheme=RECORDS, geometry=geometry, temporal=pools[0], conv=pools[1])
    where: dict[int, int] = {}
    return SlotMap(slot_of=lambda request_id: where[request_id], buffers=buffers), where


def mark(slots: SlotMap) -> None:
    assert slots.buffers is not None
    for tensor in slots.buffers.tensors.values():
        for slot in range(tensor.shape[1]):
            tensor[:, slot] = slot
    slots.buffers.num_accepted[:] = torch.arange(len(slots.buffers.num_accepted)) % 4


def marks(slots: SlotMap) -> list[int]:
    assert slots.buffers is not None
    return [int(slots.buffers.tensors["kda_state_tok"][0, slot, 0, 0, 0, 0]) for slot in range(6)]


def test_what_lies_beside_a_slot_follows_its_request() -> None:
    slots, where = make()
    where |= {10: 0, 11: 1, 12: 2}
    slots.place([10, 11, 12], num_contexts=3)
    mark(slots)
    where |= {10: 1, 11: 2, 12: 4}
    assert slots.place([10, 11, 12], num_contexts=0) == [1, 2, 4]
    assert marks(slots) == [0, 0, 1, 3, 2, 5]
    assert slots.state_index == where
    slots.check_integrity()


def test_a_slot_taken_over_is_left_by_its_last_owner_first() -> None:
    """10 moved to slot 3 while it was not scheduled; 13 got its old slot and starts a prompt there."""
    slots, where = make()
    where |= {10: 0, 11: 1}
    slots.place([10, 11], num_contexts=2)
    slots.place([10, 11], num_contexts=0)
    mark(slots)
    where |= {10: 3, 13: 0}
    slots.place([13], num_contexts=1)
    slots.start_prompts([13])
    assert marks(slots) == [0, 1, 2, 0, 4, 5]
    assert slots.state_index == {10: 3, 11: 1, 13: 0}
    assert slots.buffers is not None and slots.buffers.num_accepted[3] == 0
    slots.check_integrity()


def test_owners_that_displaced_each_other_unseen_are_all_followed() -> None:
    """11 left slot 2 for 3, 10 left 0 for 2, and 13 starts in 0: only 13 is scheduled."""
    slots, where = make()
    where |= {10: 0, 11: 2}
    slots.place([10, 11], num_contexts=0)
    mark(slots)
    where |= {10: 2, 11: 3, 13: 0}
    slots.place([13], num_contexts=1)
    assert slots.state_index == where
    assert marks(slots) == [0, 1, 0, 2, 4, 5]
    slots.check_integrity()


def test_a_suspend_applies_drafts_where_the_state_is_now() -> None:
    slots, where = make()
    where[10] = 0
    slots.place([10], num_contexts=0)
    assert slots.buffers is not None
    slots.buffers.tensors["kda_state_tok"][:, 0] = 1
    slots.buffers.num_accepted[0] = 2
    where[10] = 5
    slots.suspend(10)
    state = slots.buffers.at_layer(0).temporal
    assert state[5].unique().tolist() == [2.0] and not state[0].any()
    assert slots.buffers.num_accepted[5] == 0 and 10 in slots.suspended and 10 not in slots.state_index


def test_a_new_generation_starts_with_nothing_pending_and_a_resumed_one_from_the_pool() -> None:
    slots, where = make()
    mark(slots)
    where |= {10: 1, 11: 2}
    slots.suspended.add(11)
    slots.place([10, 11], num_contexts=0)
    assert slots.buffers is not None
    assert slots.buffers.num_accepted[:3].tolist() == [0, 0, 0]
    windows = slots.buffers.tensors["kda_conv_q"]
    assert (windows[0, 1] == 1).all() and not windows[0, 2].any()
    assert marks(slots) == [0, 1, 2, 3, 4, 5]
    assert not slots.suspended


def test_a_seed_reaches_the_slot_where_the_state_is_now() -> None:
    """10 was last seen in 1 and lies in 4 now; 11 is seeded in its first step; 12 has no slot."""
    slots, where = make()
    where |= {10: 1, 11: 2}

    def slot_of(request_id: int) -> int:
        if request_id not in where:
            raise RuntimeError("no slot")
        return where[request_id]

    slots.slot_of = slot_of
    slots.place([10], num_contexts=1)
    mark(slots)
    where[10] = 4
    slots.seed([10, 10, 11, 12])
    assert slots.buffers is not None
    windows, counts = slots.buffers.tensors["kda_conv_q"], slots.buffers.num_accepted
    assert not windows[0, 4].any() and (windows[0, 1] == 1).all() and (windows[0, 2] == 2).all()
    assert (counts[4], counts[1], counts[2]) == (0, 1, 2)
    slots.place([11], num_contexts=0)
    assert not windows[0, 2].any() and counts[2] == 0
    assert slots.state_index == {10: 4, 11: 2} and not slots.suspended


def test_two_owners_of_a_slot_are_found() -> None:
    slots, _ = make()
    slots.state_index.update({10: 1, 11: 1})
    with pytest.raises(AssertionError, match="two owners"):
        slots.check_integrity()


def test_without_verify_rounds_slots_carry_nothing() -> None:
    where = {10: 0}
    slots = SlotMap(slot_of=where.__getitem__)
    slots.place([10], num_contexts=1)
    slots.start_prompts([10])
    slots.launch_rounds([10])
    slots.store_acceptance([10], [0], torch.tensor([1]))
    slots.seed([10])
    slots.suspend(10)
    assert not slots.state_index and not slots.acceptance_pending and not slots.suspended
