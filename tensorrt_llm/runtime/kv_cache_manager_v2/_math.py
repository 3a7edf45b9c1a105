# SPDX-License-Identifier: Apache-2.0
"""Integer and float32 arithmetic shared by the cache core."""

import struct
from typing import NamedTuple


def cdiv(numerator: int, denominator: int) -> int:
    """Return ceil(numerator / denominator) in exact integer arithmetic; `denominator` is positive."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return cdiv(value, multiple) * multiple


def float32(value: float) -> float:
    """Return `value` rounded to the nearest IEEE single, as a Python float."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


class HalfOpenRange(NamedTuple):
    """The integers start, start + 1, ..., stop - 1; empty when stop <= start."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: "HalfOpenRange") -> "HalfOpenRange":
        start = max(self.start, other.start)
        return HalfOpenRange(start, max(start, min(self.stop, other.stop)))
