# SPDX-License-Identifier: Apache-2.0
"""The index buffers of fixed address from which kernels read the slots of a step's rows."""

from collections.abc import Sequence

import torch
from torch import Tensor


class StateIndexBuffers:
    """int32 [capacity] slots of the rows of a step and bool [capacity] "is a dummy or padding".

    The tensors are allocated once: their address is part of captured graphs. Rows that stay as they are, as
    those of a batch that goes on generating do, are not copied again.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.slots = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.is_dummy = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.intermediate = torch.arange(capacity, dtype=torch.int32, device=device)
        self._stored_slots: list[int] = []
        self._stored_mask: list[bool] = []

    @property
    def capacity(self) -> int:
        return len(self.slots)

    def store_slots(self, slots: Sequence[int]) -> None:
        """Rows 0..len(slots) of the slot buffer.

        The copy goes through memory of its own, so the host can go on.
        """
        assert len(slots) <= self.capacity, f"{len(slots)} rows for {self.capacity} state indices"
        if self._stored_slots[: len(slots)] != slots:
            self._stored_slots = list(slots)
            self._copy(self.slots, slots)

    def store_dummy_mask(self, mask: Sequence[bool]) -> None:
        """Rows 0..len(mask) of the dummy mask."""
        if self._stored_mask[: len(mask)] != mask:
            self._stored_mask = list(mask)
            self._copy(self.is_dummy, mask)

    def _copy(self, target: Tensor, values: Sequence[int] | Sequence[bool]) -> None:
        # A staging tensor per call: the one before may still be in flight to the device.
        staging = torch.tensor(values, dtype=target.dtype, pin_memory=target.device.type == "cuda")
        target[: len(values)].copy_(staging, non_blocking=True)
