# SPDX-License-Identifier: Apache-2.0
"""What a verify scheme keeps per state slot beside the storage's pools: allocated, moved, seeded, committed
and freed here.

The scheme names the buffers; nothing in this module knows which scheme it is. Every tensor is [L, N, ...]:
local recurrent layers, slots of the state pool.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.verify_scheme import (
    KdaGeometry,
    SlotBuffer,
    VerifyScheme,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.device_copy import to_device
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import COUNT_DTYPE
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.views import SpeculativeState


def stack_layers(views: Sequence[Tensor]) -> Tensor:
    """One view [L, N, ...] over the views [N, ...] of L layers, which lie equally far apart in one pool."""
    first = views[0]
    addresses = [view.data_ptr() for view in views]
    steps = {after - before for before, after in pairwise(addresses)}
    assert len(steps) <= 1 and not any(step % first.itemsize for step in steps), (
        f"layers' states lie {sorted(steps)} bytes apart; one view takes equal steps"
    )
    step = next(iter(steps)) // first.itemsize if steps else 0
    return first.as_strided((len(views), *first.shape), (step, *first.stride()))


class _SlotIndex(NamedTuple):
    """Slots [n] on the device: int32 for the schemes' ops, int64 for torch's."""

    int32: Tensor
    int64: Tensor


class SlotBuffers:
    """The side buffers of one scheme, and the count of pending drafts of every slot.

    `num_accepted` int32 [N]: drafts accepted in the last round and not yet applied. 0 means that nothing is
    pending and no draft buffer is read. `conv` and `temporal` are the pool's views, one per local layer: [N,
    3D, W-1], [N, H, V, K].
    """

    def __init__(
        self,
        *,
        scheme: VerifyScheme,
        geometry: KdaGeometry,
        conv: Sequence[Tensor],
        temporal: Sequence[Tensor],
    ) -> None:
        device, num_slots = temporal[0].device, temporal[0].shape[0]
        self.scheme = scheme
        self.geometry = geometry
        self.num_slots = num_slots
        self._specs: tuple[SlotBuffer, ...] = scheme.slot_buffers(geometry)
        self.tensors: dict[str, Tensor] = {
            spec.name: spec.allocate(len(temporal), num_slots, device) for spec in self._specs
        }
        self.num_accepted = torch.zeros(num_slots, dtype=COUNT_DTYPE, device=device)
        self._last_slots: list[int] = []
        self._last_index = self._index_of(to_device([], device, torch.int32))
        self._all_layers = SpeculativeState(
            conv=stack_layers(conv),
            temporal=stack_layers(temporal),
            prev_num_accepted_tokens=self.num_accepted,
            **self.tensors,
        )
        self._layers = [self._all_layers.at_layer_idx(layer) for layer in range(len(temporal))]

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind the buffers, padding included, and the counts'."""
        per_slot = len(self._layers) * sum(spec.bytes_per_slot_layer for spec in self._specs)
        return self.num_slots * (per_slot + self.num_accepted.itemsize)

    def at_layer(self, layer: int) -> SpeculativeState:
        """The view of one local layer."""
        return self._layers[layer]

    def move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Bring what belongs to slots `old` to slots `new`: all sources are read before any target is
        written.

        A chain such as [0, 1] -> [1, 2] is right for that reason. Slots that are no target keep every bit.
        """
        if not old:
            return
        sources, targets = self._index(old).int64, self._index(new).int64
        for tensor in self.tensors.values():
            tensor[:, targets] = tensor[:, sources]
        self.num_accepted[targets] = self.num_accepted[sources]

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing is pending in these slots any more. Writes the counts alone."""
        if slots:
            self.num_accepted.index_fill_(0, self._index(slots).int64, 0)

    def seed(self, slots: Sequence[int]) -> None:
        """Start these slots over from the pool: committed windows copied in, draft columns zeroed, nothing
        pending.

        Each of the sections q | k | v goes to its own window. Buffers of drafts are zeroed where the scheme
        asks for it.
        """
        if not slots:
            return
        index = self._index(slots).int64
        for spec in self._specs:
            if spec.reseeded:
                self.tensors[spec.name].index_fill_(1, index, 0)
        self._all_layers.commit_conv_window(index, self._all_layers.conv)
        self.num_accepted.index_fill_(0, index, 0)

    def commit(self, slots: Sequence[int]) -> None:
        """Apply the pending drafts of these slots to the pool's states and windows, all layers at once; then
        nothing is pending.
        """
        index = self._index(slots)
        counts = self.num_accepted[index.int64].clamp_(0, self.geometry.num_spec)
        self.scheme.commit(self._all_layers, index.int32, counts)
        self.num_accepted.index_fill_(0, index.int64, 0)

    def record_acceptance(self, slots: Sequence[int] | Tensor, num_drafts: Tensor) -> None:
        """Store how many drafts of the round were accepted (int [n], clamped to [0, M]) in each of n slots.

        A scheme that goes to the accepted draft at once does so here, and leaves nothing pending. The host
        does not wait for the device.
        """
        index = self._index_of(slots) if isinstance(slots, Tensor) else self._index(slots)
        counts = num_drafts.to(self.num_accepted).clamp(0, self.geometry.num_spec)
        self.num_accepted.index_copy_(0, index.int64, counts)
        if self.scheme.promote(self._all_layers, index.int32, counts):
            self.num_accepted.index_fill_(0, index.int64, 0)

    def _index(self, slots: Sequence[int]) -> _SlotIndex:
        # A batch that goes on generating has the same slots step after step: its index stays on the device.
        if slots != self._last_slots:
            self._last_slots = list(slots)
            self._last_index = self._index_of(to_device(slots, self.num_accepted.device, torch.int32))
        return self._last_index

    def _index_of(self, slots: Tensor) -> _SlotIndex:
        return _SlotIndex(int32=slots.to(torch.int32), int64=slots.to(torch.int64))


class HasSideBuffers(Protocol):
    """A manager that has buffers beside its slots."""

    def side_buffer(self, name: str) -> Tensor | None: ...


class SideBuffer:
    """An attribute of a manager that is one of its side buffers [L, N, ...]; None where it has none of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, manager: HasSideBuffers, owner: type | None = None) -> Tensor | None:
        return manager.side_buffer(self._name)
