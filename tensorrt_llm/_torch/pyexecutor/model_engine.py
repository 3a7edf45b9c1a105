# SPDX-License-Identifier: Apache-2.0
"""Runs the model on a scheduled batch: requests in, logits out."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.metadata import (
    ContextChunk,
    ForwardMetadata,
    LayerCaches,
    VerifyGroup,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.device_copy import to_device
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.pyexecutor.sampler import LogitRows
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests


class CausalModel(Protocol):
    """What the engine runs (`models.load_model` builds one)."""

    def forward(self, input_ids: Tensor, metadata: ForwardMetadata, cache: LayerCaches) -> Tensor:
        """Hidden states [rows, hidden] of input_ids int64 [rows]; writes keys, values and states to
        the cache.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [n, vocab] of hidden states [n, hidden]."""
        ...


class CacheViews(LayerCaches, Protocol):
    """The cache manager as the engine reads it, once `prepare_resources` has placed the batch."""

    def get_state_indices(self, request_ids: Sequence[int], is_padding: Sequence[bool]) -> Sequence[int]:
        """The slot of each request."""
        ...

    def get_batch_cache_indices(self, request_ids: Sequence[int], layer_idx: int) -> Sequence[Sequence[int]]:
        """The page ids of each request in an attention layer's buffer, in order of position."""
        ...


class StepLogits(NamedTuple):
    """Logits fp32 [n, vocab], and which rows belong to whom; a prompt that goes on has none."""

    logits: Tensor
    rows: list[LogitRows]


class ModelEngine:
    """Lays a batch out in rows, runs the model, and computes the logits that are wanted.

    `attention_layer` is an attention layer's global index; requests have the same pages in all of them. What
    is copied to the device goes through pinned memory: the host does not wait for the step before.
    """

    def __init__(
        self, model: CausalModel, cache: CacheViews, attention_layer: int, device: torch.device
    ) -> None:
        self.model = model
        self._cache = cache
        self._attention_layer = attention_layer
        self._device = device
        self._pages: dict[int, tuple[Sequence[int], Tensor]] = {}

    @torch.inference_mode()
    def forward(self, batch: ScheduledRequests) -> StepLogits:
        """Run one chunk of each prompt and one verify round of each generation.

        Mutates the cache. Raises whatever the model raises; the batch's requests are lost then.
        """
        groups = [
            (num_drafts + 1, list(members))
            for num_drafts, members in groupby(
                sorted(batch.generation_requests, key=_num_drafts), key=_num_drafts
            )
        ]
        order = [*batch.context_requests, *(req for _, members in groups for req in members)]
        input_ids, metadata = self._lay_out(order, batch.context_requests, groups)
        hidden = self.model.forward(input_ids, metadata, self._cache)
        wanted = list(_wanted_rows(metadata, batch.context_requests))
        first_generation_row = metadata.groups[0].row_start if metadata.groups else metadata.num_tokens
        rows = [LogitRows(req, i, ()) for i, (req, _) in enumerate(wanted)]
        start = len(rows)
        for req in order[len(batch.context_requests) :]:
            rows.append(LogitRows(req, start, req.py_draft_tokens))
            start = rows[-1].stop
        if metadata.contexts:
            ends = to_device([row for _, row in wanted], hidden.device)
            hidden = torch.cat((hidden[ends], hidden[first_generation_row:]))
        return StepLogits(self.model.compute_logits(hidden), rows)

    def forget(self, request_id: int) -> None:
        """Drop what is kept of a request; unknown ids are allowed."""
        self._pages.pop(request_id, None)

    def _lay_out(
        self,
        order: Sequence[LlmRequest],
        contexts: Sequence[LlmRequest],
        groups: Sequence[tuple[int, list[LlmRequest]]],
    ) -> tuple[Tensor, ForwardMetadata]:
        ids = [req.py_request_id for req in order]
        slots = self._cache.get_state_indices(ids, [False] * len(ids))
        pages = self._page_tensors(ids)
        tokens: list[int] = []
        chunks = []
        for i, req in enumerate(contexts):
            chunks.append(_chunk(req, len(tokens), slots[i], pages[i]))
            start = req.context_current_position
            tokens += req.get_tokens()[start : start + req.context_chunk_size]
        rounds, first = [], len(contexts)
        for num_tokens, members in groups:
            span = slice(first, first + len(members))
            slots_on_device = to_device(slots[span], self._device, torch.int32)
            rounds.append(
                _group(members, num_tokens, len(tokens), slots_on_device, tuple(slots[span]), pages[span])
            )
            for req in members:
                tokens.append(req.get_tokens()[-1])
                tokens += req.py_draft_tokens
            first = span.stop
        input_ids = to_device(tokens, self._device)
        return input_ids, ForwardMetadata(
            contexts=tuple(chunks), groups=tuple(rounds), num_tokens=len(tokens)
        )

    def _page_tensors(self, request_ids: Sequence[int]) -> list[Tensor]:
        """Page ids int64 of each request on the device; made anew only when they have changed."""
        result = []
        for request_id, pages in zip(
            request_ids,
            self._cache.get_batch_cache_indices(request_ids, self._attention_layer),
            strict=True,
        ):
            known = self._pages.get(request_id)
            if known is None or known[0] != pages:
                known = (list(pages), to_device(pages, self._device))
                self._pages[request_id] = known
            result.append(known[1])
        return result


def _num_drafts(req: LlmRequest) -> int:
    return len(req.py_draft_tokens)


def _chunk(req: LlmRequest, row_start: int, slot: int, pages: Tensor) -> ContextChunk:
    return ContextChunk(
        request_id=req.py_request_id,
        row_start=row_start,
        num_tokens=req.context_chunk_size,
        position_start=req.context_current_position,
        slot=slot,
        pages=pages,
    )


def _group(
    members: Sequence[LlmRequest],
    num_tokens: int,
    row_start: int,
    slots: Tensor,
    slot_ids: tuple[int, ...],
    pages: Sequence[Tensor],
) -> VerifyGroup:
    return VerifyGroup(
        num_tokens=num_tokens,
        row_start=row_start,
        request_ids=tuple(req.py_request_id for req in members),
        slots=slots,
        slot_ids=slot_ids,
        positions_start=tuple(req.num_tokens - 1 for req in members),
        pages=tuple(pages),
    )


def _wanted_rows(
    metadata: ForwardMetadata, contexts: Sequence[LlmRequest]
) -> Iterator[tuple[LlmRequest, int]]:
    """Each prompt that ends in this step, with its last row."""
    for chunk, req in zip(metadata.contexts, contexts, strict=True):
        if req.is_last_context_chunk:
            yield req, chunk.row_start + chunk.num_tokens - 1
