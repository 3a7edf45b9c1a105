# SPDX-License-Identifier: Apache-2.0
"""Who owns which slot of a pool group: ids 0, 1, 2, ..., handed out low first and recycled."""

from collections import deque
from collections.abc import Sequence

from ._types import SlotId
from .errors import LogicError, OutOfPagesError
from .streams import Event


class SlotAllocator:
    """Free slots of one pool group at one cache level.

    Order of preference: a recycled slot whose last use is done, a slot never used, a recycled slot still in
    use by a stream (the next user must then wait for `events_of` it).
    """

    __slots__ = ("_events", "_is_live", "_num_fresh_used", "_pending", "_ready", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_fresh_used = 0
        self._is_live = bytearray(num_slots)
        self._ready: deque[SlotId] = deque()
        self._pending: deque[SlotId] = deque()
        self._events: dict[SlotId, list[Event]] = {}

    @property
    def num_free(self) -> int:
        return self.num_slots - self._num_fresh_used + len(self._ready) + len(self._pending)

    @property
    def num_live(self) -> int:
        return self.num_slots - self.num_free

    def is_live(self, slot: SlotId) -> bool:
        """Return whether `slot` is owned by someone."""
        return 0 <= slot < self.num_slots and bool(self._is_live[slot])

    def allocate(self, num_slots: int) -> list[SlotId]:
        """Take `num_slots` slots. Raises OutOfPagesError, with nothing taken, when fewer are free."""
        if num_slots > self.num_free:
            raise OutOfPagesError(
                f"{num_slots} slots asked for, {self.num_free} of {self.num_slots} are free"
            )
        self._settle_events()
        return [self._take() for _ in range(num_slots)]

    def take_below(self, bound: int) -> SlotId:
        """Take a free slot with an id below `bound`, for a shrink. LogicError when there is none."""
        if self._num_fresh_used < bound:
            slot = SlotId(self._num_fresh_used)
            self._num_fresh_used += 1
        else:
            queue = next(
                (queue for queue in (self._ready, self._pending) if any(s < bound for s in queue)), None
            )
            if queue is None:
                raise LogicError(f"no free slot below {bound} of {self.num_slots}, {self.num_free} are free")
            slot = next(slot for slot in queue if slot < bound)
            queue.remove(slot)
        self._is_live[slot] = 1
        return slot

    def free(self, slot: SlotId) -> None:
        """Give `slot` back; add the events of its last uses before."""
        if not self.is_live(slot):
            raise LogicError(f"slot {slot} of {self.num_slots} is freed but not live")
        self._is_live[slot] = 0
        (self._pending if slot in self._events else self._ready).append(slot)

    def events_of(self, slot: SlotId) -> Sequence[Event]:
        """Return the ends of the last uses of `slot`, at most one per stream that used it lately."""
        return self._events.get(slot, ())

    def add_event(self, slot: SlotId, event: Event | None) -> None:
        """Note that a use of `slot` ends at `event`; None is a use that is done."""
        if event is not None:
            pending = [earlier for earlier in self._events.get(slot, ()) if not earlier.query()]
            self._events[slot] = [*pending, event]

    def shrink_or_grow(self, num_slots: int) -> None:
        """Change the number of slots. No live slot may lie at or above `num_slots`."""
        live_above = [slot for slot in range(num_slots, self.num_slots) if self._is_live[slot]]
        if live_above:
            raise LogicError(
                f"slots {live_above} are live, cannot go from {self.num_slots} to {num_slots} slots"
            )
        self._ready = deque(slot for slot in self._ready if slot < num_slots)
        self._pending = deque(slot for slot in self._pending if slot < num_slots)
        self._num_fresh_used = min(self._num_fresh_used, num_slots)
        self._events = {slot: events for slot, events in self._events.items() if slot < num_slots}
        self._is_live = self._is_live[:num_slots] + bytearray(max(0, num_slots - self.num_slots))
        self.num_slots = num_slots

    def synchronize(self, first_slot: SlotId) -> None:
        """Block until every use of slots at or above `first_slot` is done."""
        for slot, events in self._events.items():
            if slot >= first_slot:
                for event in events:
                    event.synchronize()

    def check_integrity(self) -> None:
        """Raise LogicError unless every slot is exactly one of live, recycled or never used."""
        recycled = [*self._ready, *self._pending]
        live = [slot for slot in range(self.num_slots) if self._is_live[slot]]
        never_used = range(self._num_fresh_used, self.num_slots)
        if sorted([*recycled, *live, *never_used]) != list(range(self.num_slots)):
            raise LogicError(
                f"{self.num_slots} slots, but {len(live)} live, {len(recycled)} recycled and "
                f"{len(never_used)} never used"
            )

    def _settle_events(self) -> None:
        while self._pending and self._is_done(self._pending[0]):
            self._ready.append(self._pending.popleft())

    def _is_done(self, slot: SlotId) -> bool:
        if not all(event.query() for event in self._events.get(slot, ())):
            return False
        self._events.pop(slot, None)
        return True

    def _take(self) -> SlotId:
        if self._ready:
            slot = self._ready.popleft()
        elif self._num_fresh_used < self.num_slots:
            slot = SlotId(self._num_fresh_used)
            self._num_fresh_used += 1
        else:
            slot = self._pending.popleft()
        self._is_live[slot] = 1
        return slot
