# SPDX-License-Identifier: Apache-2.0
"""Ordering of work on pool memory. On a CPU work is done when the call returns, so there is nothing to order.

On CUDA each slot remembers the event of its last use; whoever touches the slot next makes its stream wait
for it.
"""

from typing import Protocol

StreamHandle = int
"""A CUDA stream as the driver's integer handle; any integer on a CPU, where it is only carried along."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether all work before the event is done."""

    def synchronize(self) -> None:
        """Block the calling thread until the event is done."""


class StreamOps(Protocol):
    """Records and awaits events; None stands for "already done"."""

    is_async: bool
    """Whether work may still run when the call that submitted it has returned."""

    def record(self, stream: StreamHandle) -> Event | None:
        """Return an event after the work submitted to `stream` so far."""

    def wait(self, stream: StreamHandle, event: Event | None) -> None:
        """Make later work of `stream` wait for `event`."""


class CpuStreamOps:
    """Everything is done at once."""

    is_async = False

    def record(self, stream: StreamHandle) -> Event | None:
        return None

    def wait(self, stream: StreamHandle, event: Event | None) -> None:
        return None
