# SPDX-License-Identifier: Apache-2.0
"""Who runs in the next step: continuous batching with chunked prefill, bounded by slots, pages and tokens.

A request is admitted when a slot and the pages of its whole life are free, so that every admitted request can
finish without another one giving anything up; the rest wait in order of arrival. Each step runs every
generating request (one verify round, charged 1 + K tokens) and as much of the waiting prompts as fits.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tensorrt_llm._torch.modules.metadata import PREFILL_ALIGNMENT_TOKENS
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, LlmRequestState


class CapacityManager(Protocol):
    """What the scheduler asks of the cache manager; False means "no capacity now" and that nothing
    changed.
    """

    def prepare_context(self, req: LlmRequest) -> bool:
        """Give the request its slot and an empty cache, or make the one it has usable again."""
        ...

    def num_reused_tokens(self, request_id: int) -> int:
        """Prompt tokens that `prepare_context` found in the cache: the first chunk starts behind them."""
        ...

    def clip_context_chunk(self, req: LlmRequest, num_tokens: int) -> int:
        """How many of the next `num_tokens` prompt tokens run in one chunk: up to a snapshot point."""
        ...

    def resize_context(self, req: LlmRequest, num_tokens: int) -> bool:
        """Make room for the next `num_tokens` prompt tokens."""
        ...

    def try_allocate_generation(self, req: LlmRequest) -> bool:
        """Make room for the golden token and the request's drafts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What bounds a step and the requests that run at once.

    `max_pages` are the attention pages that live requests may hold, of `tokens_per_page` tokens each;
    `tokens_per_gen_step` is 1 + K. Raises ValueError where a step could not run one request of each phase.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_pages: int
    tokens_per_page: int
    tokens_per_gen_step: int = 1
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}; it must be >= 1")
        least = PREFILL_ALIGNMENT_TOKENS + self.tokens_per_gen_step
        if self.max_num_tokens < least:
            raise ValueError(
                f"max_num_tokens is {self.max_num_tokens}; it must be >= {least}: one prefill chunk of "
                f"{PREFILL_ALIGNMENT_TOKENS} tokens and one verify round of {self.tokens_per_gen_step}"
            )

    def pages_of(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.tokens_per_page)

    def pages_for_life(self, req: LlmRequest) -> int:
        """Pages at the request's longest: all its tokens but the last one, which is never computed."""
        return self.pages_of(req.prompt_len + req.max_new_tokens - 1)

    def check_can_run(self, prompt_len: int, max_tokens: int) -> None:
        """Raise ValueError, naming the limit, for a request that could not run on an idle executor."""
        if prompt_len + 1 > self.max_seq_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; with max_seq_len={self.max_seq_len} for prompt and "
                f"output it may have {self.max_seq_len - 1}"
            )
        if not self.enable_chunked_prefill and prompt_len > self.max_num_tokens:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; without enable_chunked_prefill it may have "
                f"max_num_tokens={self.max_num_tokens}"
            )
        new_tokens = min(max_tokens, self.max_seq_len - prompt_len)
        pages = self.pages_of(prompt_len + new_tokens - 1)
        if pages > self.max_pages:
            raise ValueError(
                f"prompt ({prompt_len} tokens) and max_tokens ({new_tokens}) need {pages} cache pages of "
                f"{self.tokens_per_page} tokens; there are {self.max_pages}: shorten them or give the cache "
                "more memory"
            )


class ContextStep(NamedTuple):
    """One prompt's part of a step: its next `num_tokens` tokens."""

    request: LlmRequest
    num_tokens: int


class StepPlan(NamedTuple):
    """What the next step should run, before capacity is asked for; `held_back` counts generations
    left out.
    """

    contexts: list[ContextStep]
    generations: list[LlmRequest]
    held_back: int


def plan_step(
    contexts: Sequence[LlmRequest], generations: Sequence[LlmRequest], limits: SchedulerLimits
) -> StepPlan:
    """Share the step's token budget; changes nothing.

    Both phases always make progress: the first prompt's smallest chunk is set aside before generations are
    taken, and generations that do not fit come first next time (`last_scheduled_iter`).
    """
    set_aside = smallest_chunk(contexts[0], limits) if contexts else 0
    room = (limits.max_num_tokens - set_aside) // limits.tokens_per_gen_step
    chosen = list(generations)
    if room < len(chosen):
        chosen = sorted(chosen, key=lambda req: req.last_scheduled_iter)[:room]
    budget = limits.max_num_tokens - len(chosen) * limits.tokens_per_gen_step
    return StepPlan(plan_chunks(contexts, budget, limits), chosen, len(generations) - len(chosen))


def smallest_chunk(req: LlmRequest, limits: SchedulerLimits) -> int:
    """Tokens without which a step cannot advance this prompt: the rest of it, or one aligned chunk."""
    rest = req.prompt_len - req.context_current_position
    return min(rest, PREFILL_ALIGNMENT_TOKENS) if limits.enable_chunked_prefill else rest


def plan_chunks(
    contexts: Iterable[LlmRequest], budget_tokens: int, limits: SchedulerLimits
) -> list[ContextStep]:
    """The prompts' next chunks, in order, until the budget is spent.

    A chunk is the prompt's rest or a multiple of 64 tokens, so that chunks start at multiples of 64 whatever
    the budget was: a prompt's result does not depend on its company.
    """
    steps = []
    for req in contexts:
        rest = req.prompt_len - req.context_current_position
        chunk = rest
        if rest > budget_tokens:
            aligned = budget_tokens // PREFILL_ALIGNMENT_TOKENS * PREFILL_ALIGNMENT_TOKENS
            chunk = aligned if limits.enable_chunked_prefill else 0
        if chunk <= 0:
            break
        steps.append(ContextStep(req, chunk))
        budget_tokens -= chunk
    return steps


@dataclass(slots=True, kw_only=True)
class ScheduledRequests:
    """The requests of one step: prompts with their `context_chunk_size`, and generations with their
    drafts.
    """

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return len(self.context_requests) + len(self.generation_requests)

    def all_requests(self) -> list[LlmRequest]:
        return [*self.context_requests, *self.generation_requests]


class Scheduler:
    """The queue of waiting requests and the running ones, and the pages promised to them."""

    def __init__(self, limits: SchedulerLimits, manager: CapacityManager) -> None:
        self.limits = limits
        self._manager = manager
        self._waiting: deque[LlmRequest] = deque()
        self._running: dict[int, LlmRequest] = {}
        self.reserved_pages = 0

    @property
    def waiting(self) -> Sequence[LlmRequest]:
        """Requests without resources, in order of arrival."""
        return self._waiting

    @property
    def running(self) -> Iterable[LlmRequest]:
        """Requests that hold a slot, in order of admission."""
        return self._running.values()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    def find(self, request_id: int) -> LlmRequest | None:
        """The open request of this id."""
        if request_id in self._running:
            return self._running[request_id]
        return next((req for req in self._waiting if req.py_request_id == request_id), None)

    def enqueue(self, req: LlmRequest) -> None:
        """Let a request wait its turn."""
        self._waiting.append(req)

    def admit(self) -> int:
        """Give resources to waiting requests, in order, while slots and pages last; return how many got
        them.
        """
        admitted = 0
        while self._waiting and len(self._running) < self.limits.max_batch_size:
            req = self._waiting[0]
            pages = self.limits.pages_for_life(req)
            if self.reserved_pages + pages > self.limits.max_pages or not self._manager.prepare_context(req):
                break
            self._waiting.popleft()
            self._running[req.py_request_id] = req
            req.reserved_pages = pages
            self.reserved_pages += pages
            req.start_context(self._manager.num_reused_tokens(req.py_request_id))
            admitted += 1
        return admitted

    def schedule(self, iteration: int) -> ScheduledRequests:
        """Choose the step's requests and allocate what they need in it; empty if nothing could get
        capacity.
        """
        running = self._running.values()
        contexts = [req for req in running if req.state is LlmRequestState.CONTEXT_INIT]
        generations = [req for req in running if req.state is LlmRequestState.GENERATION_IN_PROGRESS]
        plan = plan_step(contexts, generations, self.limits)
        batch = ScheduledRequests(
            context_requests=[step.request for step in plan.contexts if self._place_context(step)]
        )
        if plan.held_back and not batch.context_requests:
            # The prompts that they made room for cannot run.
            plan = plan_step((), generations, self.limits)
        batch.generation_requests = [
            req for req in plan.generations if self._manager.try_allocate_generation(req)
        ]
        for req in batch.context_requests:
            req.last_scheduled_iter = iteration
        for req in batch.generation_requests:
            req.last_scheduled_iter = iteration
        return batch

    def _place_context(self, step: ContextStep) -> bool:
        req = step.request
        if not self._manager.prepare_context(req):
            return False
        num_tokens = self._manager.clip_context_chunk(req, step.num_tokens)
        if not self._manager.resize_context(req, num_tokens):
            return False
        req.context_chunk_size = num_tokens
        return True

    def find_victim(self) -> LlmRequest | None:
        """The request to give up when a step could run nothing: the last one admitted, else the first one
        waiting.
        """
        if self._running:
            return next(reversed(self._running.values()))
        return self._waiting[0] if self._waiting else None

    def remove(self, req: LlmRequest) -> bool:
        """Forget an open request and its promised pages; True when it was running, so that it holds
        resources.
        """
        was_running = self._running.pop(req.py_request_id, None) is not None
        if was_running:
            self.reserved_pages -= req.reserved_pages
            req.reserved_pages = 0
        else:
            self._waiting.remove(req)
        req.state = LlmRequestState.GENERATION_COMPLETE
        return was_running
