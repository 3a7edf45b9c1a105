# SPDX-License-Identifier: Apache-2.0
"""Which state slot belongs to which request, and what a request owes its slot between two steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.slot_buffers import SlotBuffers


@dataclass(slots=True, kw_only=True)
class SlotMap:
    """Requests and their slots as of their last scheduled step, with the buffers beside these slots.

    `slot_of` gives the slot where the storage has a request's state now. `buffers` is None where no verify
    rounds run: slots then carry nothing between steps. state_index: request id -> slot; is_dummy: request id
    -> whether it is the executor's own. generating: scheduled for generation since it was mapped, so that its
    extended windows follow the pool's. acceptance_pending: a verify round was launched and its acceptance is
    not stored: the old count is spent. suspended: the pool has all of its state: suspended here, or sent
    by another server; when it generates next, what lies beside its slot is seeded from the pool.
    """

    slot_of: Callable[[int], int]
    buffers: SlotBuffers | None = None
    state_index: dict[int, int] = field(default_factory=dict)
    is_dummy: dict[int, bool] = field(default_factory=dict)
    generating: set[int] = field(default_factory=set)
    acceptance_pending: set[int] = field(default_factory=set)
    suspended: set[int] = field(default_factory=set)

    def place(self, ids: Sequence[int], num_contexts: int) -> list[int]:
        """Note and return where the storage has these requests' states, context first; bring their drafts
        there.

        RuntimeError where a request has moved, or starts a prompt, whose acceptance is not stored yet, or has
        no slot.
        """
        self.check_acceptance_stored(ids[:num_contexts], "run a prefill chunk of")
        slots = [self.slot_of(request_id) for request_id in ids]
        known = self.state_index
        changed = {i: slot for i, slot in zip(ids, slots, strict=True) if known.get(i) != slot}
        if changed:
            self._resettle(changed, frozenset(ids[:num_contexts]))
        self.suspended.difference_update(ids)
        self.generating.difference_update(ids[:num_contexts])
        self.generating.update(ids[num_contexts:])
        return slots

    def _resettle(self, changed: dict[int, int], contexts: frozenset[int]) -> None:
        known = self.state_index
        moved = {i: slot for i, slot in changed.items() if i in known and i not in contexts}
        moved |= self._find_displaced(changed)
        if self.buffers is not None:
            self._move(self.buffers, moved)
            fresh = {i: slot for i, slot in changed.items() if i not in known and i not in contexts}
            self.buffers.reset([slot for i, slot in fresh.items() if i not in self.suspended])
            self.buffers.seed([slot for i, slot in fresh.items() if i in self.suspended])
        known.update(moved)
        known.update(changed)

    def _find_displaced(self, changed: dict[int, int]) -> dict[int, int]:
        """Requests whose slot has another owner now, and where their states are, scheduled or not.

        A slot that is taken over was left by its last owner, which may have taken over another's in turn.
        """
        displaced: dict[int, int] = {}
        taken = set(changed.values())
        while taken:
            owners = [i for i, slot in self.state_index.items() if slot in taken]
            found = {i: self.slot_of(i) for i in owners if i not in changed and i not in displaced}
            displaced |= found
            taken = set(found.values())
        return displaced

    def _move(self, buffers: SlotBuffers, moved: dict[int, int]) -> None:
        if moved:
            self.check_acceptance_stored(moved, "relocate")
            buffers.move([self.state_index[i] for i in moved], list(moved.values()))

    def start_prompts(self, ids: Sequence[int]) -> None:
        """These requests run a prefill chunk: nothing is pending in their slots."""
        if self.buffers is not None:
            self.buffers.reset([self.state_index[request_id] for request_id in ids])

    def launch_rounds(self, ids: Iterable[int]) -> None:
        """These requests run a verify round: their counts are spent until acceptance is stored."""
        if self.buffers is not None:
            self.acceptance_pending.update(ids)

    def store_acceptance(self, ids: Sequence[int], slots: Sequence[int] | Tensor, num_drafts: Tensor) -> None:
        """The rounds of these requests accepted `num_drafts` int [len(ids)] drafts each."""
        if self.buffers is not None and ids:
            self.buffers.record_acceptance(slots, num_drafts)
        self.acceptance_pending.difference_update(ids)

    def check_acceptance_stored(self, ids: Iterable[int], action: str) -> None:
        """RuntimeError if a round of one of these was launched and its acceptance is not stored yet."""
        late = sorted(self.acceptance_pending.intersection(ids))
        if late:
            raise RuntimeError(
                f"cannot {action} request {', '.join(map(str, late))}: its verify round was launched and "
                "its acceptance is not stored yet. Call update_resources or update_mamba_states for the "
                "round first, or revert_allocate_generation if it does not run."
            )

    def suspend(self, request_id: int) -> None:
        """Apply the request's pending drafts to its state, and take its slot from it.

        RuntimeError while its acceptance is pending. Waits for the device only where no kernel commits.
        """
        if request_id not in self.state_index:
            return
        self.check_acceptance_stored([request_id], "suspend")
        if self.buffers is not None:
            self.place([request_id], num_contexts=request_id not in self.generating)
            # A prompt's state and window are in the pool already; only rounds leave something beside it.
            if request_id in self.generating:
                self.buffers.commit([self.state_index[request_id]])
            self.suspended.add(request_id)
        del self.state_index[request_id]
        self.generating.discard(request_id)

    def seed(self, ids: Iterable[int]) -> None:
        """The states of these requests have come from elsewhere: start what lies beside their slots from
        them.

        A request that was in no step yet is seeded in its first one: until then its slot may move, and what
        lies beside the slot may be its last owner's still. One without a slot is skipped.
        """
        ids = list(dict.fromkeys(ids))
        self.check_acceptance_stored(ids, "seed")
        if self.buffers is None:
            return
        ids = [i for i in ids if self._has_slot(i)]
        mapped = [i for i in ids if i in self.state_index]
        self.suspended.update(set(ids) - set(mapped))
        for request_id in mapped:
            self.place([request_id], num_contexts=request_id not in self.generating)
        self.buffers.seed([self.state_index[i] for i in mapped])

    def _has_slot(self, request_id: int) -> bool:
        try:
            self.slot_of(request_id)
        except RuntimeError:
            return False
        return True

    def forget(self, request_id: int) -> None:
        """Forget the request altogether."""
        self.state_index.pop(request_id, None)
        self.is_dummy.pop(request_id, None)
        self.generating.discard(request_id)
        self.acceptance_pending.discard(request_id)
        self.suspended.discard(request_id)

    def check_integrity(self) -> None:
        """AssertionError where two requests share a slot."""
        slots = list(self.state_index.values())
        assert len(set(slots)) == len(slots), f"a state slot has two owners: {self.state_index}"
