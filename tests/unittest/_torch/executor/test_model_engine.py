# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.metadata import ForwardMetadata
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, LlmRequestState
from tensorrt_llm._torch.pyexecutor.model_engine import ModelEngine
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tests.unittest._torch.executor.fakes import FakeCache, make_request


class RowModel:
    """Hidden states and logits name their row; keeps what it was given."""

    def forward(self, input_ids: Tensor, metadata: ForwardMetadata, cache: object) -> Tensor:
        self.ids, self.metadata = input_ids.tolist(), metadata
        return torch.arange(metadata.num_tokens)[:, None]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


def request_of(
    cache: FakeCache, request_id: int, prompt_len: int, drafts: list[int] | None = None
) -> LlmRequest:
    """A generation with one output token if drafts are given, else a prompt."""
    req = LlmRequest.admit(make_request(request_id, prompt_len), max_seq_len=400, seed=0, arrival=0.0)
    assert cache.prepare_context(req)
    req.state = LlmRequestState.CONTEXT_INIT
    req.context_chunk_size = prompt_len
    assert cache.resize_context(req, prompt_len)
    if drafts is not None:
        cache.update_context_resources(ScheduledRequests(context_requests=[req]))
        req.append_output(40 + request_id)
        req.advance_context()
        req.py_draft_tokens = drafts
        assert cache.try_allocate_generation(req)
    return req


def test_rows_positions_slots_and_pages() -> None:
    cache, model = FakeCache(100, 8), RowModel()
    engine = ModelEngine(model, cache, attention_layer=0, device=torch.device("cpu"))
    whole = request_of(cache, 0, 70)
    part = request_of(cache, 1, 200)
    part.context_current_position, part.context_chunk_size = 64, 64
    long = request_of(cache, 2, 10, [7, 8, 9])
    short = request_of(cache, 3, 12, [])
    other = request_of(cache, 4, 14, [5, 6, 4])
    batch = ScheduledRequests(context_requests=[whole, part], generation_requests=[long, short, other])
    step = engine.forward(batch)

    chunks, groups = model.metadata.contexts, model.metadata.groups
    assert [(c.request_id, c.row_start, c.num_tokens, c.position_start) for c in chunks] == [
        (0, 0, 70, 0),
        (1, 70, 64, 64),
    ]
    assert [(g.num_tokens, g.row_start, g.request_ids, g.positions_start) for g in groups] == [
        (1, 134, (3,), (12,)),
        (4, 135, (2, 4), (10, 14)),
    ]
    assert model.metadata.num_tokens == 143
    assert model.ids == [
        *whole.get_tokens(),
        *part.get_tokens()[64:128],
        43,
        42,
        7,
        8,
        9,
        44,
        5,
        6,
        4,
    ]
    for chunk in chunks:
        assert [chunk.slot] == cache.get_state_indices([chunk.request_id], [False])
        assert chunk.pages.tolist() == cache.get_batch_cache_indices([chunk.request_id], 0)[0]
    for group in groups:
        assert list(group.slot_ids) == cache.get_state_indices(group.request_ids, [])
        assert group.slots.tolist() == list(group.slot_ids)
        assert group.slots.dtype == torch.int32
        assert [p.tolist() for p in group.pages] == cache.get_batch_cache_indices(group.request_ids, 0)

    assert [(r.request.py_request_id, r.start, r.stop, list(r.drafts)) for r in step.rows] == [
        (0, 0, 1, []),
        (3, 1, 2, []),
        (2, 2, 6, [7, 8, 9]),
        (4, 6, 10, [5, 6, 4]),
    ]
    assert step.logits[:, 0].tolist() == [69, 134, 135, 136, 137, 138, 139, 140, 141, 142]


def test_page_tensors_are_made_anew_only_when_pages_change() -> None:
    cache, model = FakeCache(100, 8), RowModel()
    engine = ModelEngine(model, cache, attention_layer=0, device=torch.device("cpu"))
    req = request_of(cache, 0, 6, [])
    batch = ScheduledRequests(generation_requests=[req])
    engine.forward(batch)
    before = model.metadata.groups[0].pages[0]
    engine.forward(batch)
    assert model.metadata.groups[0].pages[0] is before
    req.py_draft_tokens = [1, 2, 3]
    cache.try_allocate_generation(req)
    engine.forward(batch)
    assert model.metadata.groups[0].pages[0].tolist() == cache.get_batch_cache_indices([0], 0)[0]
    assert len(model.metadata.groups[0].pages[0]) == 2


def test_a_step_of_unfinished_prompts_has_no_logits() -> None:
    cache, model = FakeCache(100, 8), RowModel()
    engine = ModelEngine(model, cache, attention_layer=0, device=torch.device("cpu"))
    part = request_of(cache, 1, 200)
    part.context_chunk_size = 64
    step = engine.forward(ScheduledRequests(context_requests=[part]))
    assert step.rows == []
    assert step.logits.shape[0] == 0


class SilentModel:
    """Reads nothing back from the device."""

    def forward(self, input_ids: Tensor, metadata: ForwardMetadata, cache: object) -> Tensor:
        return input_ids[:, None].float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture
def errors_on_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_the_host_does_not_wait_for_the_device(errors_on_waiting: None) -> None:
    cache, device = FakeCache(100, 8), torch.device("cuda")
    engine = ModelEngine(SilentModel(), cache, attention_layer=0, device=device)
    batch = ScheduledRequests(
        context_requests=[request_of(cache, 0, 70)],
        generation_requests=[request_of(cache, 1, 12, []), request_of(cache, 2, 10, [7, 8, 9])],
    )
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.tensor([1], device=device)
    logits = engine.forward(batch).logits
    torch.cuda.set_sync_debug_mode("default")
    last = batch.context_requests[0].get_tokens()[-1]
    assert logits[:, 0].tolist() == [last, 41, 42, 7, 8, 9]
