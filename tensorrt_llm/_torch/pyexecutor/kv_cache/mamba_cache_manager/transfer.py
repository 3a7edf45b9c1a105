# SPDX-License-Identifier: Apache-2.0
"""States that come from a server with another tensor parallelism: which part of a sender's goes where. Pure.

A convolution's window is q | k | v (or x | B | C), and each section is split over the ranks on its own: the
sender's part of a section is one range of channels, never one range over all three.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRank:
    """One rank of a server: its place among `size` tensor ranks."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"tensor rank is {self.rank}; of {self.size} ranks it must be 0 to {self.size - 1}"
            )


@dataclass(frozen=True, slots=True)
class RangeCopy:
    """`length` rows from `source` in the sender's tensor to `target` in the receiver's."""

    source: int
    target: int
    length: int


def overlap(total: int, sender: TensorRank, receiver: TensorRank) -> RangeCopy | None:
    """What the sender has of the receiver's part of `total` rows that both split evenly; None where nothing.

    Raises ValueError where a number of ranks does not divide them.
    """
    for side in (sender, receiver):
        if total % side.size:
            raise ValueError(f"{total} rows cannot be split over {side.size} tensor ranks")
    sent, wanted = total // sender.size, total // receiver.size
    start = max(sender.rank * sent, receiver.rank * wanted)
    stop = min((sender.rank + 1) * sent, (receiver.rank + 1) * wanted)
    if start >= stop:
        return None
    return RangeCopy(start - sender.rank * sent, start - receiver.rank * wanted, stop - start)


def section_copies(
    section_dims: Sequence[int], sender: TensorRank, receiver: TensorRank
) -> tuple[RangeCopy, ...]:
    """One copy per section of a window. `section_dims` are the receiver's channels of each section."""
    copies, source_start, target_start = [], 0, 0
    for dim in section_dims:
        total = dim * receiver.size
        found = overlap(total, sender, receiver)
        if found is not None:
            copies.append(RangeCopy(source_start + found.source, target_start + found.target, found.length))
        source_start += total // sender.size
        target_start += dim
    return tuple(copies)


def copy_ranges(target: Tensor, source: Tensor, copies: Sequence[RangeCopy]) -> None:
    """Copy ranges of the first axis; what no range names stays as it is."""
    for one in copies:
        target[one.target : one.target + one.length] = source[one.source : one.source + one.length]


def check_sent(
    name: str, sent: Tensor, own_shape: Sequence[int], sender: TensorRank, receiver: TensorRank
) -> None:
    """Raise ValueError unless `sent` is a sender rank's whole part of a state, whose part here has
    `own_shape`.

    Ranks split the first axis evenly.
    """
    expected = (own_shape[0] * receiver.size // sender.size, *own_shape[1:])
    if tuple(sent.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(sent.shape)}, but rank {sender.rank} of {sender.size} tensor ranks has "
            f"{expected}: send the rank's whole part of the layer, and the sender's own rank and size"
        )
