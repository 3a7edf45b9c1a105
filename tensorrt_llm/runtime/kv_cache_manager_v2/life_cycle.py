# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps of a sequence, as a value: attention (full or windowed, with sinks) and recurrent state.

Layers whose values are equal form one life cycle (layer group) and share pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ._math import HalfOpenRange, cdiv
from ._types import LayerId, LifeCycleId
from .config import AttentionLayerConfig, LayerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnLifeCycle:
    """Attention over the last `window_size` tokens (None: all), plus the first `num_sink_blocks` blocks."""

    window_size: int | None = None
    num_sink_blocks: int = 0

    def stale_range(self, history_length: int, tokens_per_block: int) -> HalfOpenRange:
        """Return the blocks that no query at position `history_length` (0-based) or later can see.

        The query at position p sees tokens p + 1 - window .. p, itself included, hence the + 1::

            | sink | stale ........ | window .......... p |
            0      sink_blocks      (p + 1 - window) // tokens_per_block
        """
        start = self.num_sink_blocks
        if self.window_size is None:
            return HalfOpenRange(start, start)
        stop = (history_length + 1 - self.window_size) // tokens_per_block
        return HalfOpenRange(start, max(start, stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmLifeCycle:
    """A recurrent state: one slot per sequence, whatever its length."""


LifeCycle = AttnLifeCycle | SsmLifeCycle


def life_cycle_of(layer: LayerConfig, tokens_per_block: int) -> LifeCycle:
    """Return the life cycle value of one layer's configuration."""
    if isinstance(layer, AttentionLayerConfig):
        sink_blocks = cdiv(layer.num_sink_tokens or 0, tokens_per_block)
        return AttnLifeCycle(window_size=layer.sliding_window_size, num_sink_blocks=sink_blocks)
    return SsmLifeCycle()


class LifeCycleRegistry:
    """The distinct life cycles of a model, numbered in order of first appearance in the layer list.

    attention: those that keep pages of tokens; windowed: those of them with a window. ssm_id: the one of
    recurrent states, or None.
    """

    __slots__ = ("_of_layer", "_values", "attention", "ssm_id", "windowed")

    def __init__(self, layers: Sequence[LayerConfig], tokens_per_block: int) -> None:
        ids: dict[LifeCycle, LifeCycleId] = {}
        self._of_layer: dict[LayerId, LifeCycleId] = {}
        for layer in layers:
            value = life_cycle_of(layer, tokens_per_block)
            self._of_layer[layer.layer_id] = ids.setdefault(value, LifeCycleId(len(ids)))
        self._values = tuple(ids)
        self.attention = tuple(
            (index, value) for index, value in self.items() if isinstance(value, AttnLifeCycle)
        )
        self.windowed = tuple(
            (index, value) for index, value in self.attention if value.window_size is not None
        )
        self.ssm_id = next((index for index, value in self.items() if isinstance(value, SsmLifeCycle)), None)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, life_cycle: LifeCycleId) -> LifeCycle:
        return self._values[life_cycle]

    def __iter__(self) -> Iterator[LifeCycle]:
        return iter(self._values)

    def items(self) -> Iterator[tuple[LifeCycleId, LifeCycle]]:
        return ((LifeCycleId(index), value) for index, value in enumerate(self._values))

    def of_layer(self, layer: LayerId) -> LifeCycleId:
        """Return the life cycle of `layer`; KeyError for an unknown layer."""
        return self._of_layer[layer]

    @property
    def grouping(self) -> tuple[tuple[LayerId, ...], ...]:
        """Layer ids per life cycle, in configuration order."""
        return tuple(
            tuple(layer for layer, owner in self._of_layer.items() if owner == index)
            for index, _ in self.items()
        )
