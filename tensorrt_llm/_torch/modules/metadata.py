# SPDX-License-Identifier: Apache-2.0
"""What one forward pass runs: the rows of the batch, where each row's request stands, and where its cache
lies.

Rows: the context chunks first, one after the other, then the verify groups. A group holds generation requests
that run the same number of tokens T this round; inside it request r owns rows `row_start + r * T` up to `+
T`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

PREFILL_ALIGNMENT_TOKENS = 64
"""Prompts are cut at multiples of this from their start, so that a prompt's result does not depend on the
chunk size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextChunk:
    """Tokens [position_start, position_start + num_tokens) of one prompt; position_start is a multiple of 64.

    `pages` int64 [>= pages of the tokens up to the chunk's end] are page ids of the attention pool, `slot`
    the SSM row.
    """

    request_id: int
    row_start: int
    num_tokens: int
    position_start: int
    slot: int
    pages: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyGroup:
    """Generation requests with T = num_tokens each: the golden token at `positions_start[r]`, then T - 1
    drafts.

    slots int32 [requests] on the model's device, `slot_ids` the same on the host; pages[r] int64, page ids of
    request r.
    """

    num_tokens: int
    row_start: int
    request_ids: tuple[int, ...]
    slots: Tensor
    slot_ids: tuple[int, ...]
    positions_start: tuple[int, ...]
    pages: tuple[Tensor, ...]

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)

    @property
    def rows(self) -> slice:
        return slice(self.row_start, self.row_start + self.num_requests * self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMetadata:
    """One step's batch; num_tokens counts all rows."""

    contexts: tuple[ContextChunk, ...]
    groups: tuple[VerifyGroup, ...]
    num_tokens: int


class LayerCaches(Protocol):
    """What a model reads of a cache manager; layer indices are global."""

    def get_buffers(self, layer_idx: int) -> Tensor:
        """The paged attention cache of a layer: [pages, kv_factor, tokens_per_block, heads, head_dim]."""
        ...

    def mamba_layer_cache(self, layer_idx: int) -> Any:
        """The recurrent state and conv buffers of a layer, one row a slot
        (`kda.windows.KdaLayerCache`)."""
        ...
