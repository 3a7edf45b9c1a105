# SPDX-License-Identifier: Apache-2.0
"""Who runs in the next step: continuous batching with chunked prefill, bounded by slots, pages and tokens.

A capacity policy says who is admitted and who gives way when pages run out; the rest wait in order of
arrival. Each step runs every generating request (one verify round, charged 1 + K tokens) and as much of the
waiting prompts as fits.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tensorrt_llm._torch.modules.metadata import PREFILL_ALIGNMENT_TOKENS
from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacityPolicy, Relief
from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits as SchedulerLimits
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

    def revert_allocate_generation(self, req: LlmRequest) -> None:
        """Give back the room of a round that does not run."""
        ...

    def suspend_request(self, req: LlmRequest) -> None:
        """Let the request's pages and state move."""
        ...

    def resume_request(self, req: LlmRequest) -> bool:
        """Make a suspended request usable again."""
        ...

    def free_resources(self, req: LlmRequest) -> None:
        """Take back the request's slot and pages."""
        ...


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
    rest = req.context_len - req.context_current_position
    return min(rest, PREFILL_ALIGNMENT_TOKENS) if may_split(req, limits) else rest


def may_split(req: LlmRequest, limits: SchedulerLimits) -> bool:
    """Whether a prompt may be read in parts.

    One that is read again with its output may be longer than a step, though prompts must not be.
    """
    return limits.enable_chunked_prefill or req.context_len > limits.max_num_tokens


def plan_chunks(
    contexts: Iterable[LlmRequest], budget_tokens: int, limits: SchedulerLimits
) -> list[ContextStep]:
    """The prompts' next chunks, in order, until the budget is spent.

    A chunk is the prompt's rest or a multiple of 64 tokens, so that chunks start at multiples of 64 whatever
    the budget was: a prompt's result does not depend on its company.
    """
    steps = []
    for req in contexts:
        rest = req.context_len - req.context_current_position
        chunk = rest
        if rest > budget_tokens:
            aligned = budget_tokens // PREFILL_ALIGNMENT_TOKENS * PREFILL_ALIGNMENT_TOKENS
            chunk = aligned if may_split(req, limits) else 0
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

    def keep(self, ids: Container[int]) -> None:
        """Drop the requests that are not among these."""
        self.context_requests = [req for req in self.context_requests if req.py_request_id in ids]
        self.generation_requests = [req for req in self.generation_requests if req.py_request_id in ids]


class Scheduler:
    """The queue of waiting requests, the running and the paused ones, and the pages promised to them.

    `capacity_policy` says what its module's head explains: running requests are older than paused ones, and
    these than waiting ones.
    """

    def __init__(
        self, limits: SchedulerLimits, manager: CapacityManager, capacity_policy: CapacityPolicy
    ) -> None:
        self.limits = limits
        self._manager = manager
        self._policy = capacity_policy
        self._waiting: deque[LlmRequest] = deque()
        self._running: dict[int, LlmRequest] = {}
        self._paused: list[LlmRequest] = []
        self.promised_pages = 0

    @property
    def waiting(self) -> Sequence[LlmRequest]:
        """Requests that have not been admitted, in order of arrival."""
        return self._waiting

    @property
    def running(self) -> Collection[LlmRequest]:
        """Requests that hold a slot, in order of admission."""
        return self._running.values()

    @property
    def paused(self) -> Sequence[LlmRequest]:
        """Requests that gave way and are to resume, the youngest first."""
        return self._paused

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting or self._paused)

    def find(self, request_id: int) -> LlmRequest | None:
        """The open request of this id."""
        if request_id in self._running:
            return self._running[request_id]
        others = (*self._paused, *self._waiting)
        return next((req for req in others if req.py_request_id == request_id), None)

    def enqueue(self, req: LlmRequest) -> None:
        """Let a request wait its turn."""
        self._waiting.append(req)

    def admit(self) -> int:
        """Let paused requests go on, then give resources to waiting ones, in order, while slots and pages
        last; return how many of the latter got them.
        """
        if self._paused and not self._resume_all():
            return 0
        admitted, limits = 0, self.limits
        while self._waiting and len(self._running) < limits.max_batch_size:
            req = self._waiting[0]
            may_start = self._policy.may_admit(req, self.running, self.promised_pages, limits)
            if not may_start or not self._start(req):
                break
            self._waiting.popleft()
            self._running[req.py_request_id] = req
            req.promised_pages = self._policy.promised_pages(req, limits)
            self.promised_pages += req.promised_pages
            admitted += 1
        return admitted

    def _start(self, req: LlmRequest) -> bool:
        if not self._manager.prepare_context(req):
            return False
        req.start_context(self._manager.num_reused_tokens(req.py_request_id))
        return True

    def _resume_all(self) -> bool:
        """Let paused requests go on, the oldest first; True when none is left."""
        while self._paused:
            req = self._paused[-1]
            if not self._policy.may_resume(req, self.running, self._paused, self.limits):
                return False
            # Those that run are older: nobody gives way for a younger one.
            if not self._reenter(req) and (self._running or not self._make_room(req, self._reenter)):
                return False
            self._paused.pop()
            self._running[req.py_request_id] = req
        return True

    def _reenter(self, req: LlmRequest) -> bool:
        return self._manager.resume_request(req) if req.holds_cache else self._start(req)

    def schedule(self, iteration: int) -> ScheduledRequests:
        """Choose the step's requests and allocate what they need in it; empty if nothing could get
        capacity.
        """
        while True:
            num_paused = len(self._paused)
            batch = self._place_step()
            if len(self._paused) == num_paused:
                break
            batch.keep(self._running)
            if batch.batch_size:
                break
        for req in batch.context_requests:
            req.last_scheduled_iter = iteration
        for req in batch.generation_requests:
            req.last_scheduled_iter = iteration
        return batch

    def _place_step(self) -> ScheduledRequests:
        """One attempt at a step. What is paused on the way may be in it."""
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
        batch.generation_requests = self._place_generations(plan.generations)
        return batch

    def _place_generations(self, requests: Iterable[LlmRequest]) -> list[LlmRequest]:
        allocate = self._manager.try_allocate_generation
        running, paused = self._running, self._paused
        # Those of the plan that have given way on the way are passed over.
        return [
            req
            for req in requests
            if (not paused or req.py_request_id in running)
            and (allocate(req) or self._make_room(req, allocate))
        ]

    def _place_context(self, step: ContextStep) -> bool:
        def allocate(req: LlmRequest) -> bool:
            return self._allocate_context(req, step.num_tokens)

        req = step.request
        still_runs = req.py_request_id in self._running
        return still_runs and (allocate(req) or self._make_room(req, allocate))

    def _allocate_context(self, req: LlmRequest, num_tokens: int) -> bool:
        if not self._manager.prepare_context(req):
            return False
        num_tokens = self._manager.clip_context_chunk(req, num_tokens)
        if not self._manager.resize_context(req, num_tokens):
            return False
        req.context_chunk_size = num_tokens
        return True

    def _make_room(self, needy: LlmRequest, attempt: Callable[[LlmRequest], bool]) -> bool:
        """`attempt` found no capacity: let others give way until it does; False if `needy` has to, or
        nobody can.
        """
        while True:
            relief = self._policy.relieve(needy, list(self.running), self._paused)
            if relief is None:
                return False
            self._give_way(relief)
            if relief.request is needy:
                return False
            if attempt(needy):
                return True

    def _give_way(self, relief: Relief) -> None:
        req = relief.request
        if self._running.pop(req.py_request_id, None) is not None:
            self._paused.append(req)
        req.context_chunk_size = 0
        if not relief.keeps_state:
            self._manager.free_resources(req)
            req.restart()
            return
        if req.in_generation:
            # It may have been placed in this step.
            self._manager.revert_allocate_generation(req)
        self._manager.suspend_request(req)

    def find_victim(self) -> LlmRequest | None:
        """The request to give up when a step could run nothing: the last one admitted, else the first one
        waiting.
        """
        if self._running:
            return next(reversed(self._running.values()))
        return next(iter((*self._paused, *self._waiting)), None)

    def remove(self, req: LlmRequest) -> bool:
        """Forget an open request and its promised pages; True when it holds resources."""
        if self._running.pop(req.py_request_id, None) is not None:
            self.promised_pages -= req.promised_pages
            req.promised_pages = 0
        elif req in self._paused:
            self._paused.remove(req)
        else:
            self._waiting.remove(req)
        holds_cache = req.holds_cache
        req.state = LlmRequestState.GENERATION_COMPLETE
        return holds_cache
