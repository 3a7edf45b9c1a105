# SPDX-License-Identifier: Apache-2.0
"""The index buffers of fixed address from which kernels read the slots of a step's rows."""

from collections.abc import Sequence

import torch
from torch import Tensor


def index_tensor(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The numbers on `device`, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class StateIndexBuffers:
    """int32 [capacity] slots of the rows of a step and bool [capacity] "is a dummy or padding", on the host
    and the device.

    The device tensors are allocated once: their address is part of captured graphs.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host_slots = torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned)
        self.slots = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.is_dummy = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.intermediate = torch.arange(capacity, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        return len(self.host_slots)

    def store_slots(self, slots: Sequence[int]) -> None:
        """Rows 0..len(slots) of the slot buffers.

        The copy goes through memory of its own, so the host can go on.
        """
        assert len(slots) <= self.capacity, f"{len(slots)} rows for {self.capacity} state indices"
        self.host_slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self._copy(self.slots, slots, torch.int32)

    def store_dummy_mask(self, mask: Sequence[bool]) -> None:
        """Rows 0..len(mask) of the dummy mask."""
        self._copy(self.is_dummy, mask, torch.bool)

    def _copy(self, target: Tensor, values: Sequence[int] | Sequence[bool], dtype: torch.dtype) -> None:
        # A staging tensor per call: the one before may still be in flight to the device.
        staging = torch.tensor(values, dtype=dtype, pin_memory=target.device.type == "cuda")
        target[: len(values)].copy_(staging, non_blocking=True)
