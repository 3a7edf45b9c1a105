# SPDX-License-Identifier: Apache-2.0
"""Global memory of registered tensors and the shared memory of a batch of CTAs, bounds-checked per access."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.ptx.parse import SHARED_BASE, PtxError

Array = npt.NDArray[Any]

# shared::cluster addresses: a window per rank; a shared::cta address is its own CTA's.
CLUSTER_WINDOW = 1 << 24
# Generic addresses of shared memory; tensors lie far below.
GENERIC_SHARED = 1 << 60
# Offsets keep the alignment of addresses up to this.
_LINE = 128

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class AccessError(PtxError):
    """An access outside of memory that the thread may touch, or not aligned to its width."""

    def __init__(self, what: str, lane: int, address: int) -> None:
        super().__init__(f"{what} at address {address:#x}")
        self.lane, self.address = lane, address


class Bytes:
    """A flat byte array seen in units of every width, single or as vectors."""

    def __init__(self, data: Array) -> None:
        self.data = data
        self._views: dict[tuple[int, int], Array] = {}

    def view(self, width: int, count: int) -> Array:
        key = width, count
        view = self._views.get(key)
        if view is None:
            usable = self.data.size // (width * count) * (width * count)
            view = self.data[:usable].view(_UNSIGNED[width])
            self._views[key] = view = view.reshape(-1, count) if count > 1 else view
        return view

    def read(self, offset: Array, width: int, count: int) -> list[Array]:
        """`count` values of `width` bytes from each offset, which is aligned to all of them."""
        rows = self.view(width, count).take(offset // (width * count), axis=0)
        return [rows] if count == 1 else list(np.ascontiguousarray(rows.T))

    def write(self, offset: Array, width: int, values: list[Array]) -> None:
        index = offset // (width * len(values))
        view = self.view(width, len(values))
        if len(values) == 1:
            view[index] = values[0]
        else:
            view[index] = np.stack(values, axis=1)


class GlobalMemory:
    """The elements of tensors at their own addresses; what lies between, as in strided views, is refused."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        runs = [run for tensor in tensors for run in _runs(tensor)]
        if not runs:
            runs = [(0, 0)]
        merged: list[list[int]] = []
        for start, end in sorted(runs):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts = np.array([run[0] for run in merged], dtype=np.int64)
        self._ends = np.array([run[1] for run in merged], dtype=np.int64)
        # Where each run would start if nothing lay between.
        self._dense = np.concatenate([[0], np.cumsum(self._ends - self._starts)])
        self._base = int(self._starts[0]) // _LINE * _LINE
        # The span between the tensors is never touched: every access is checked first.
        size = int(self._ends[-1]) - self._base
        window = (ctypes.c_uint8 * size).from_address(self._base) if size else (ctypes.c_uint8 * 0)()
        self._bytes = Bytes(np.frombuffer(memoryview(window), dtype=np.uint8))
        self._kept = tensors

    def offsets(self, address: Array, size: int, lanes: Array | None) -> Array:
        """Checked byte offsets of accesses of `size` bytes; `lanes` names the threads for messages."""
        where = address.view(np.int64)
        run = self._starts.searchsorted(where, side="right") - 1
        wrong = (run < 0) | (where + size > self._ends[run]) | ((where & (size - 1)) != 0)
        if wrong.any():
            at = int(wrong.argmax())
            inside = run[at] >= 0 and where[at] + size <= self._ends[run[at]]
            what = "misaligned" if inside else "outside every tensor"
            lane = at if lanes is None else int(lanes[at])
            raise AccessError(f"global access of {size} bytes {what}", lane, int(address[at]))
        return where - self._base

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return int(self._dense[-1])

    def dense(self, address: Array) -> Array:
        """Positions of valid addresses among the elements."""
        where = address.view(np.int64)
        run = self._starts.searchsorted(where, side="right") - 1
        return where - self._starts[run] + self._dense[run]

    def read(self, address: Array, width: int, count: int, lanes: Array | None) -> list[Array]:
        return self._bytes.read(self.offsets(address, width * count, lanes), width, count)

    def write(self, address: Array, width: int, values: list[Array], lanes: Array | None) -> None:
        self._bytes.write(self.offsets(address, width * len(values), lanes), width, values)


def _runs(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """[start, end) addresses of a tensor's elements, dense dimensions merged."""
    if tensor.numel() == 0:
        return []
    size = tensor.element_size()
    dims = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s != 0)
    length = 1
    while dims and dims[0][0] <= length:
        stride, extent = dims.pop(0)
        length = max(length, (extent - 1) * stride + length)
    starts = np.array([tensor.data_ptr()], dtype=np.int64)
    for stride, extent in dims:
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride * size).reshape(-1)
    return [(int(start), int(start) + length * size) for start in starts]


class SharedMemory:
    """The shared memory of CTAs side by side. `cta` gives, for every lane, the index of its CTA.

    Every byte starts as 0xff, a NaN in every format.
    """

    def __init__(self, ctas: int, size: int, cluster: int) -> None:
        self.size, self.cluster = size, cluster
        self.pitch = -(-size // _LINE) * _LINE
        self.bytes = Bytes(np.full(max(ctas * self.pitch, _LINE), 0xFF, dtype=np.uint8))

    def resolve(self, address: Array, cta: Array) -> tuple[Array, Array]:
        """(CTA, address within it) of shared::cluster or shared::cta addresses."""
        address = address.astype(np.int64)
        window = address // CLUSTER_WINDOW
        target = np.where(window == 0, cta, cta // self.cluster * self.cluster + window - 1)
        return target, address % CLUSTER_WINDOW

    def offsets(self, address: Array, size: int, cta: Array, lanes: Array | None, remote: bool) -> Array:
        """Checked byte offsets into `bytes`."""
        target, local = self.resolve(address, cta) if remote else (cta, address.astype(np.int64))
        where = local - SHARED_BASE
        wrong = (where < 0) | (where > self.size - size) | ((where & (size - 1)) != 0)
        if remote:
            wrong |= target // self.cluster != cta // self.cluster
        if wrong.any():
            at = int(wrong.argmax())
            inside = 0 <= where[at] <= self.size - size
            what = "misaligned" if inside else f"outside its {self.size} bytes"
            lane = at if lanes is None else int(lanes[at])
            raise AccessError(f"shared access of {size} bytes {what}", lane, int(address[at]))
        return target * self.pitch + where
