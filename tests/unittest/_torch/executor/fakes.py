# SPDX-License-Identifier: Apache-2.0
"""A model and a cache small enough to check every read: logits depend on the whole prefix, read twice.

The cache keeps token ids in its pages, and in its slots a hash of the tokens up to the golden one with the
drafts behind it, as the real recurrent state does. The model reads a prefix both ways and asserts that they
agree, so a wrong page, slot, position, rewind or acceptance count shows at once or in the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.metadata import PREFILL_ALIGNMENT_TOKENS, ContextChunk, ForwardMetadata
from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy, create_capacity_policy
from tensorrt_llm._torch.pyexecutor.description import ExecutorDescription
from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits
from tensorrt_llm._torch.pyexecutor.llm_request import (
    ExecutorRequest,
    ExecutorResponse,
    LlmRequest,
    SamplingSpec,
)
from tensorrt_llm._torch.pyexecutor.model_engine import ModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import LoopOptions, PyExecutor
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tensorrt_llm._torch.speculative.interface import Drafter, DraftTarget, SpeculationSpec
from tensorrt_llm._torch.speculative.speculator import Speculator

VOCAB_SIZE = 50
EMPTY = 7919
_POISON = -(10**12)


def extend_hash(prefix: int, token: int) -> int:
    """A hash of the prefix with one more token."""
    return (prefix * 31 + token + 1) % 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeKvCacheStats:
    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """What a suspended request has on the host."""

    pages: list[Tensor]
    state: int


class FakeCache:
    """Pages and slots with an owner each. `refuse` is asked before capacity is given; True = none now.

    A suspended request's pages and state go to the host at once while `num_host_pages` last, else they stay
    where they are.
    """

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        tokens_per_page: int = 8,
        max_drafts: int = 7,
        num_host_pages: int = 0,
    ) -> None:
        self.tokens_per_page = tokens_per_page
        self.num_pages = num_pages
        self.tokens = torch.full((num_pages, tokens_per_page), _POISON, dtype=torch.int64)
        self.state = [_POISON] * num_slots
        self.drafts = [[_POISON] * max_drafts for _ in range(num_slots)]
        self.count = [_POISON] * num_slots
        self.refuse: Callable[[LlmRequest], bool] = lambda req: False
        self.is_shut_down = False
        self.snapshot_interval: int | None = None
        self._free_pages = list(range(num_pages))[::-1]
        self._free_slots = list(range(num_slots))[::-1]
        self._pages: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}
        self._history: dict[int, int] = {}
        self._pending: set[int] = set()
        self._allocated = 0
        self._free_host_pages = num_host_pages
        self._num_host_pages = num_host_pages
        self._suspended: set[int] = set()
        self._on_host: dict[int, HostCopy] = {}
        self.num_suspended = self.num_offloaded = self.num_resumed = 0

    def prepare_context(self, req: LlmRequest) -> bool:
        assert req.py_request_id not in self._suspended
        if req.py_request_id in self._slots:
            return True
        if self.refuse(req) or not self._free_slots:
            return False
        slot = self._slots[req.py_request_id] = self._free_slots.pop()
        self._pages[req.py_request_id] = []
        self._history[req.py_request_id] = 0
        self.state[slot] = _POISON
        return True

    def num_reused_tokens(self, request_id: int) -> int:
        return 0

    def clip_context_chunk(self, req: LlmRequest, num_tokens: int) -> int:
        if self.snapshot_interval is None:
            return num_tokens
        return min(num_tokens, self.snapshot_interval - req.context_current_position % self.snapshot_interval)

    def resize_context(self, req: LlmRequest, num_tokens: int) -> bool:
        return self._grow(req, req.context_current_position + num_tokens)

    def try_allocate_generation(self, req: LlmRequest) -> bool:
        return self._grow(req, self._history[req.py_request_id] + 1 + len(req.py_draft_tokens))

    def revert_allocate_generation(self, req: LlmRequest) -> None:
        self._shrink(req)

    def suspend_request(self, req: LlmRequest) -> None:
        request_id = req.py_request_id
        assert request_id not in self._pending, "the round's acceptance has not been stored"
        assert request_id not in self._suspended, "a request is suspended once"
        self._suspended.add(request_id)
        self.num_suspended += 1
        slot, pages = self._slots[request_id], self._pages[request_id]
        if req.in_generation:
            needed = -(-self._history[request_id] // self.tokens_per_page)
            assert len(pages) == needed, "a round that does not run keeps its room"
            for draft in self.drafts[slot][: max(self.count[slot], 0)]:
                self.state[slot] = extend_hash(self.state[slot], draft)
            self.count[slot] = 0
        if len(pages) > self._free_host_pages:
            return
        self.num_offloaded += 1
        self._free_host_pages -= len(pages)
        copies = [self.tokens[page].clone() for page in pages]
        self._on_host[request_id] = HostCopy(pages=copies, state=self.state[slot])
        self._give_back(request_id)

    def resume_request(self, req: LlmRequest) -> bool:
        request_id = req.py_request_id
        assert request_id in self._suspended
        copy = self._on_host.get(request_id)
        if self.refuse(req):
            return False
        if copy is not None:
            if len(copy.pages) > len(self._free_pages) or not self._free_slots:
                return False
            # The longest free slot and page: not the ones that it had.
            slot = self._slots[request_id] = self._free_slots.pop(0)
            self.state[slot], self.count[slot] = copy.state, 0
            self._pages[request_id] = [self._free_pages.pop(0) for _ in copy.pages]
            for page, tokens in zip(self._pages[request_id], copy.pages, strict=True):
                self.tokens[page] = tokens
            self._free_host_pages += len(copy.pages)
            del self._on_host[request_id]
        self._suspended.remove(request_id)
        self.num_resumed += 1
        return True

    def _grow(self, req: LlmRequest, capacity: int) -> bool:
        assert req.py_request_id not in self._suspended
        pages = self._pages[req.py_request_id]
        missing = -(-capacity // self.tokens_per_page) - len(pages)
        if self.refuse(req) or missing > len(self._free_pages):
            return False
        for _ in range(missing):
            pages.append(self._free_pages.pop())
            self._allocated += 1
        return True

    def prepare_resources(self, batch: ScheduledRequests) -> None:
        for req in batch.context_requests:
            self.count[self._slots[req.py_request_id]] = 0
        self._pending.update(req.py_request_id for req in batch.generation_requests)

    def update_context_resources(self, batch: ScheduledRequests) -> None:
        for req in batch.context_requests:
            self._history[req.py_request_id] = req.context_current_position + req.context_chunk_size

    def update_resources(self, batch: ScheduledRequests) -> None:
        for req in batch.generation_requests:
            assert len(req.py_draft_tokens) == req.py_num_accepted_draft_tokens + req.py_rewind_len
            self._history[req.py_request_id] += 1 + req.py_num_accepted_draft_tokens
            self.count[self._slots[req.py_request_id]] = req.py_num_accepted_draft_tokens
            self._shrink(req)
            self._pending.remove(req.py_request_id)

    def _shrink(self, req: LlmRequest) -> None:
        pages, history = self._pages[req.py_request_id], self._history[req.py_request_id]
        while len(pages) > -(-history // self.tokens_per_page):
            self._release(pages.pop())
        if history % self.tokens_per_page:
            self.tokens[pages[-1], history % self.tokens_per_page :] = _POISON

    def _release(self, page: int) -> None:
        self.tokens[page] = _POISON
        self._free_pages.append(page)

    def free_resources(self, req: LlmRequest) -> None:
        request_id = req.py_request_id
        assert request_id not in self._pending, "the round's acceptance has not been stored"
        copy = self._on_host.pop(request_id, None)
        if copy is None:
            self._give_back(request_id)
        else:
            self._free_host_pages += len(copy.pages)
        self._suspended.discard(request_id)
        del self._history[request_id]

    def _give_back(self, request_id: int) -> None:
        for page in self._pages.pop(request_id):
            self._release(page)
        slot = self._slots.pop(request_id)
        self.state[slot] = self.count[slot] = _POISON
        self._free_slots.append(slot)

    def get_state_indices(self, request_ids: Sequence[int], is_padding: Sequence[bool]) -> list[int]:
        return [self._slots[request_id] for request_id in request_ids]

    def get_batch_cache_indices(self, request_ids: Sequence[int], layer_idx: int) -> list[list[int]]:
        return [list(self._pages[request_id]) for request_id in request_ids]

    def get_buffers(self, layer_idx: int) -> Tensor:
        return self.tokens

    def mamba_layer_cache(self, layer_idx: int) -> "FakeCache":
        return self

    def get_kv_cache_stats(self) -> FakeKvCacheStats:
        return FakeKvCacheStats(
            max_num_blocks=self.num_pages,
            free_num_blocks=len(self._free_pages),
            used_num_blocks=self.num_pages - len(self._free_pages),
            tokens_per_block=self.tokens_per_page,
            alloc_total_blocks=self._allocated,
        )

    @property
    def num_used_slots(self) -> int:
        return len(self._slots)

    def check_integrity(self) -> None:
        """Every page and slot is free or has one owner."""
        owned = [page for pages in self._pages.values() for page in pages]
        assert sorted(owned + self._free_pages) == list(range(self.num_pages))
        assert sorted([*self._slots.values(), *self._free_slots]) == list(range(len(self.state)))
        on_host = sum(len(copy.pages) for copy in self._on_host.values())
        assert on_host + self._free_host_pages == self._num_host_pages

    def check_empty(self) -> None:
        """Everything has come back."""
        self.check_integrity()
        assert not self._pages and not self._slots and not self._history and not self._pending
        assert not self._suspended and not self._on_host
        assert self._free_host_pages == self._num_host_pages

    def shutdown(self) -> None:
        self.is_shut_down = True


class FakeModel:
    """Logits are a pure function of the prefix: mostly of its last two tokens, so that texts repeat
    themselves.
    """

    def __init__(self, whole_prefix_weight: float = 0.6) -> None:
        random = torch.Generator().manual_seed(11)
        self._by_pair = torch.randn(97, VOCAB_SIZE, generator=random)
        self._by_prefix = whole_prefix_weight * torch.randn(211, VOCAB_SIZE, generator=random)
        self.num_forwards = 0
        self.fail_on_forward = -1
        self.nan_positions: set[int] = set()
        self.group_sizes: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, metadata: ForwardMetadata, cache: FakeCache) -> Tensor:
        if self.num_forwards == self.fail_on_forward:
            raise RuntimeError("planted model failure")
        self.num_forwards += 1
        assert input_ids.shape == (metadata.num_tokens,)
        self.group_sizes.append(tuple(group.num_tokens for group in metadata.groups))
        hidden = torch.full((metadata.num_tokens, 3), _POISON, dtype=torch.int64)
        ids = input_ids.tolist()
        for chunk in metadata.contexts:
            self._run_chunk(ids, chunk, cache, hidden)
        for group in metadata.groups:
            for r, slot in enumerate(group.slot_ids):
                start = group.row_start + r * group.num_tokens
                span = ids[start : start + group.num_tokens]
                self._run_round(span, group.positions_start[r], slot, group.pages[r], cache, hidden[start:])
        assert (hidden != _POISON).all(), "a row belongs to nobody"
        return hidden

    def _run_chunk(self, ids: list[int], chunk: ContextChunk, cache: FakeCache, hidden: Tensor) -> None:
        assert chunk.position_start % PREFILL_ALIGNMENT_TOKENS == 0
        assert cache.count[chunk.slot] == 0
        prefix = EMPTY if chunk.position_start == 0 else cache.state[chunk.slot]
        for i in range(chunk.num_tokens):
            token = ids[chunk.row_start + i]
            prefix = extend_hash(prefix, token)
            self._put(cache, chunk.pages, chunk.position_start + i, token)
            row = self._row(cache, chunk.pages, chunk.position_start + i, prefix)
            hidden[chunk.row_start + i] = torch.tensor(row)
        cache.state[chunk.slot] = prefix

    def _run_round(
        self,
        span: list[int],
        position: int,
        slot: int,
        pages: Tensor,
        cache: FakeCache,
        hidden: Tensor,
    ) -> None:
        prefix = cache.state[slot]
        for draft in cache.drafts[slot][: cache.count[slot]]:
            prefix = extend_hash(prefix, draft)
        cache.count[slot] = _POISON
        for t, token in enumerate(span):
            prefix = extend_hash(prefix, token)
            if t == 0:
                cache.state[slot] = prefix
            else:
                cache.drafts[slot][t - 1] = token
            self._put(cache, pages, position + t, token)
            hidden[t] = torch.tensor(self._row(cache, pages, position + t, prefix))

    def _put(self, cache: FakeCache, pages: Tensor, position: int, token: int) -> None:
        cache.tokens[pages[position // cache.tokens_per_page], position % cache.tokens_per_page] = token

    def _row(self, cache: FakeCache, pages: Tensor, position: int, prefix: int) -> tuple[int, int, int]:
        attended = cache.tokens[pages].flatten()[: position + 1].tolist()
        seen = EMPTY
        for token in attended:
            seen = extend_hash(seen, token)
        assert seen == prefix, f"attention and state disagree about the prefix at position {position}"
        before = attended[-2] if position else 0
        return prefix, before * VOCAB_SIZE + attended[-1], position

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self._by_pair[hidden[:, 1] % 97] + self._by_prefix[hidden[:, 0] % 211]
        for row, position in enumerate(hidden[:, 2].tolist()):
            if position in self.nan_positions:
                logits[row, 3] = float("nan")
        return logits


class ScriptedDrafter:
    """Forces acceptance: the n-th round of a request has script[n mod len] = (drafts, of which right).

    `texts` holds each request's output as it is without drafts. A wrong draft is never what the text has.
    """

    def __init__(self, texts: dict[int, Sequence[int]], script: Sequence[tuple[int, int]]) -> None:
        self._texts = texts
        self._script = script
        self._rounds: dict[int, int] = {}
        self._prompt_lens: dict[int, int] = {}
        self.finished: list[int] = []

    def propose(self, request: DraftTarget, max_draft_len: int, num_generating: int) -> list[int]:
        request_id = request.py_request_id
        # The first call comes after the first output token.
        prompt_len = self._prompt_lens.setdefault(request_id, len(request.get_tokens()) - 1)
        round_index = self._rounds[request_id] = self._rounds.get(request_id, -1) + 1
        num_drafts, num_right = self._script[round_index % len(self._script)]
        at = len(request.get_tokens()) - prompt_len
        truth = list(self._texts[request_id][at : at + min(num_drafts, max_draft_len)])
        return [t if j < num_right else (t + 1 + j) % VOCAB_SIZE for j, t in enumerate(truth)]

    def finish(self, request_id: int) -> None:
        self.finished.append(request_id)


@dataclass(slots=True, kw_only=True)
class Collected:
    """Everything one request was sent."""

    responses: list[ExecutorResponse] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for response in self.responses for token in response.token_ids]

    @property
    def last(self) -> ExecutorResponse:
        return self.responses[-1]

    @property
    def is_final(self) -> bool:
        return bool(self.responses) and self.last.is_final


@dataclass(slots=True, kw_only=True)
class Rig:
    """An executor on fakes, stepped by hand; the cache is checked after every step."""

    executor: PyExecutor
    cache: FakeCache
    model: FakeModel
    answers: dict[int, Collected] = field(default_factory=dict)

    def submit(self, request: ExecutorRequest) -> Collected:
        answer = self.answers[request.request_id] = Collected()
        self.executor.submit(request, answer.responses.append)
        return answer

    def step(self) -> bool:
        busy = self.executor.run_step()
        self.cache.check_integrity()
        return busy

    def run(self, max_steps: int = 5000) -> dict[int, list[int]]:
        """Step until idle; the texts by request id."""
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"still busy after {max_steps} steps")
        for request_id, answer in self.answers.items():
            assert answer.is_final, f"request {request_id} was never answered"
            assert [response.is_final for response in answer.responses].count(True) == 1
        self.cache.check_empty()
        return {request_id: answer.token_ids for request_id, answer in self.answers.items()}


def make_limits(cache: FakeCache, **changes: int | bool) -> SchedulerLimits:
    values: dict[str, int | bool] = {
        "max_batch_size": len(cache.state),
        "max_num_tokens": 512,
        "max_seq_len": 400,
        "max_pages": cache.num_pages,
        "tokens_per_page": cache.tokens_per_page,
        "tokens_per_gen_step": 1,
    }
    return SchedulerLimits(**{**values, **changes})  # type: ignore[arg-type]


def make_description(limits: SchedulerLimits) -> ExecutorDescription:
    return ExecutorDescription(
        model="fake",
        device="cpu",
        dtype="float32",
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        vocab_size=VOCAB_SIZE,
    )


def make_rig(
    *,
    num_pages: int = 400,
    num_slots: int = 8,
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    num_host_pages: int = 0,
    spec: SpeculationSpec | None = None,
    drafter: Drafter | None = None,
    forced_mean: float | None = None,
    max_stats_len: int = 1000,
    **limits: int | bool,
) -> Rig:
    """An executor on fakes; `limits` change those of `make_limits`."""
    cache, model = FakeCache(num_pages, num_slots, num_host_pages=num_host_pages), FakeModel()
    width = 1 if spec is None else spec.tokens_per_gen_step
    step_limits = make_limits(cache, **{"tokens_per_gen_step": width, **limits})
    return Rig(
        executor=PyExecutor(
            engine=ModelEngine(model, cache, attention_layer=0, device=torch.device("cpu")),
            cache=cache,
            limits=step_limits,
            capacity_policy=create_capacity_policy(policy, offloads=num_host_pages > 0),
            description=make_description(step_limits),
            speculator=Speculator(VOCAB_SIZE, spec, drafter, forced_mean),
            options=LoopOptions(random_seed=5, max_stats_len=max_stats_len),
        ),
        cache=cache,
        model=model,
    )


def make_request(
    request_id: int = 0,
    prompt_len: int = 5,
    max_tokens: int = 20,
    end_id: int | None = None,
    sampling: SamplingSpec | None = None,
    **more: object,
) -> ExecutorRequest:
    """A request whose prompt depends on its id."""
    prompt = tuple((request_id * 17 + i * i * 3 + i) % VOCAB_SIZE for i in range(prompt_len))
    return ExecutorRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        end_id=end_id,
        sampling=SamplingSpec() if sampling is None else sampling,
        **more,  # type: ignore[arg-type]
    )
