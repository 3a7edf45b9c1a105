# SPDX-License-Identifier: Apache-2.0
"""The executor: one thread that runs the model step by step for all open requests.

A step: admit, schedule, place in the cache, forward, sample, accept, tell the cache, draft, answer.
Requests and cancellations arrive from other threads through an inbox that is emptied between steps, so
nobody touches a request while a step runs it.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tensorrt_llm import logger
from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacityPolicy
from tensorrt_llm._torch.pyexecutor.description import ExecutorDescription
from tensorrt_llm._torch.pyexecutor.emission import Emission, emit
from tensorrt_llm._torch.pyexecutor.inbox import Inbox, ResponseCallback, Submission
from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits
from tensorrt_llm._torch.pyexecutor.llm_request import (
    ExecutorRequest,
    ExecutorResponse,
    FailureKind,
    Finish,
    LlmRequest,
    RequestFailure,
)
from tensorrt_llm._torch.pyexecutor.model_engine import CacheViews, StepLogits
from tensorrt_llm._torch.pyexecutor.sampler import Sampler, mix64
from tensorrt_llm._torch.pyexecutor.scheduler import CapacityManager, ScheduledRequests, Scheduler
from tensorrt_llm._torch.pyexecutor.stats import EngineSnapshot, KvCacheStats, StatsRecorder, StepSummary
from tensorrt_llm._torch.speculative.speculator import Speculator

_SHUT_DOWN = "the executor was shut down"


class CacheManager(CapacityManager, CacheViews, Protocol):
    """The cache manager as the loop uses it."""

    def prepare_resources(self, batch: ScheduledRequests) -> None:
        """Place a scheduled batch: slots, and what moves or is zeroed with them."""
        ...

    def update_context_resources(self, batch: ScheduledRequests) -> None:
        """Take note of the prompt chunks that were computed."""
        ...

    def update_resources(self, batch: ScheduledRequests) -> None:
        """Store each generation's accepted drafts and shrink its attention cache by the rejected ones."""
        ...

    def get_kv_cache_stats(self) -> KvCacheStats:
        """The counters of the attention pages."""
        ...

    def shutdown(self) -> None:
        """Free all memory."""
        ...


class StepRunner(Protocol):
    """The model engine as the loop uses it."""

    def forward(self, batch: ScheduledRequests) -> StepLogits: ...
    def forget(self, request_id: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What the loop needs beside its parts. `random_seed` None draws one, for requests that bring none."""

    random_seed: int | None = None
    max_stats_len: int = 1000


class _Outgoing(NamedTuple):
    """A response and where it goes."""

    callback: ResponseCallback
    response: ExecutorResponse


class PyExecutor:
    """Runs requests on a model engine and a cache manager. All public methods but `run_step` are thread-safe.

    Responses go to each request's callback on the loop's thread: it should be quick, and what it raises ends
    that request. An error that cannot be laid at one request's door stops the executor: every open request is
    answered with it, `is_healthy` turns False and `fatal_error` holds it.
    """

    def __init__(
        self,
        *,
        engine: StepRunner,
        cache: CacheManager,
        limits: SchedulerLimits,
        capacity_policy: CapacityPolicy,
        description: ExecutorDescription,
        speculator: Speculator,
        options: LoopOptions,
    ) -> None:
        self.description = description
        self.fatal_error: Exception | None = None
        self._engine = engine
        self._cache = cache
        self._limits = limits
        self._seed = secrets.randbits(64) if options.random_seed is None else options.random_seed
        self._speculator = speculator
        self._scheduler = Scheduler(limits, cache, capacity_policy)
        self._sampler = Sampler()
        self._stats = StatsRecorder(limits, speculator.max_draft_len, options.max_stats_len)
        self._stats.record(
            StepSummary(iteration=0, started_at=time.time(), kv_cache=cache.get_kv_cache_stats())
        )
        self._inbox = Inbox()
        self._open: dict[int, Submission] = {}
        self._outgoing: deque[_Outgoing] = deque()
        self._iteration = 0
        self._thread: threading.Thread | None = None
        self._winds_up_itself = False

    def start(self) -> None:
        """Start the loop's thread."""
        assert self._thread is None, "the executor was started before"
        self._thread = threading.Thread(target=self._run, name="py_executor", daemon=True)
        self._thread.start()

    def submit(self, request: ExecutorRequest, on_response: ResponseCallback) -> None:
        """Queue a request. Its answers go to `on_response`; the last one has a finish reason or an error.

        Raises ValueError for a request that can never run, naming the limit, or whose id is in use, and
        ExecutorUnhealthyError when the executor has stopped.
        """
        self._limits.check_can_run(len(request.prompt_token_ids), request.max_tokens)
        _check_vocabulary(request, self.description.vocab_size)
        req = LlmRequest.admit(
            request,
            max_seq_len=self._limits.max_seq_len,
            seed=mix64(self._seed ^ mix64(request.request_id)),
            arrival=time.monotonic(),
        )
        self._inbox.submit(Submission(req, on_response))

    def cancel(self, request_id: int) -> None:
        """End a request with finish reason "cancelled", whatever it is doing; ids not open are ignored."""
        self._inbox.cancel(request_id)

    def get_stats(self) -> list[dict[str, object]]:
        """Statistics of the iterations since the last call, oldest first, in TensorRT-LLM's JSON keys."""
        return self._stats.drain()

    def snapshot(self) -> EngineSnapshot:
        """Gauges and totals after the last iteration; reading changes nothing."""
        return self._stats.snapshot(self._inbox.num_submissions)

    @property
    def is_healthy(self) -> bool:
        """False once the executor has stopped."""
        return not self._inbox.is_closed

    def shutdown(self) -> None:
        """Stop the loop, answer open requests with a shutdown failure, and free the cache. May be
        called again.

        Called by a response callback, on the loop's thread, it returns at once: the loop does all of this
        when the step is over.
        """
        is_on_loop = self._thread is threading.current_thread()
        self._winds_up_itself = self._winds_up_itself or is_on_loop
        self._inbox.close(_SHUT_DOWN)
        if is_on_loop:
            return
        if self._thread is not None:
            self._thread.join()
        self._wind_up()

    def _wind_up(self) -> None:
        self._answer_all(RequestFailure(kind=FailureKind.SHUTDOWN, message=_SHUT_DOWN))
        self._cache.shutdown()

    def _run(self) -> None:
        if self.description.device == "cpu":
            # A step is many small operators. The thread that loaded the model keeps OpenMP workers of its
            # own, and a second set leaves more threads than cores: every operator then waits for the system,
            # on two cores 20 ms a token against 8 alone. This thread's count changes, and that of threads
            # that torch first sees later.
            torch.set_num_threads(1)
        try:
            while not self._inbox.is_closed:
                if not self._scheduler.has_requests:
                    self._inbox.wait()
                self.run_step()
        except Exception as error:  # noqa: BLE001 - every open request is answered with it, whatever it is
            self._stop_on(error)
        if self._winds_up_itself:
            self._wind_up()

    def _stop_on(self, error: Exception) -> None:
        message = f"the executor failed: {type(error).__name__}: {error}"
        logger.error(message, "; it stops and answers every open request with this")
        self.fatal_error = error
        self._inbox.close(message)
        self._answer_all(RequestFailure(kind=FailureKind.FATAL, message=message))

    def run_step(self) -> bool:
        """Run one iteration on the caller's thread, for an executor that was not started. False if idle
        after it.

        Responses are sent last: whoever has one sees resources and statistics as they are after the step.
        """
        summary = StepSummary(iteration=self._iteration, started_at=time.time())
        started = time.perf_counter()
        self._take_mail(summary)
        summary.num_new = self._scheduler.admit()
        batch = self._scheduler.schedule(self._iteration)
        if batch.batch_size:
            self._run_batch(batch, summary)
            self._iteration += 1
        else:
            self._give_one_up(summary)
        summary.running = self._scheduler.num_running
        summary.paused = len(self._scheduler.paused)
        summary.waiting = len(self._scheduler.waiting)
        summary.waiting_prompt_tokens = sum(req.prompt_len for req in self._scheduler.waiting)
        summary.kv_cache = self._cache.get_kv_cache_stats()
        summary.latency_s = time.perf_counter() - started
        self._stats.record(summary)
        self._send_responses()
        return self._scheduler.has_requests

    def _take_mail(self, summary: StepSummary) -> None:
        mail = self._inbox.take()
        self._register(mail.submissions)
        for request_id in mail.cancelled_ids:
            req = self._scheduler.find(request_id)
            if req is not None:
                self._end(req, req.response(finish=Finish(reason="cancelled")), summary)

    def _register(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            self._open[submission.request.py_request_id] = submission
            self._scheduler.enqueue(submission.request)

    def _run_batch(self, batch: ScheduledRequests, summary: StepSummary) -> None:
        self._cache.prepare_resources(batch)
        summary.note_schedule(batch, time.monotonic())
        step = self._engine.forward(batch)
        targets = self._sampler.sample(step.logits, step.rows)
        now = time.monotonic()
        emissions = [
            emit(entry, tokens, step.logits, self._speculator, now)
            for entry, tokens in zip(step.rows, targets, strict=True)
        ]
        self._cache.update_context_resources(batch)
        self._cache.update_resources(batch)
        for req in batch.context_requests:
            req.advance_context()
        for req in batch.generation_requests:
            self._note_round(req, summary)
        for emission in emissions:
            self._answer(emission, summary)
        started = time.perf_counter()
        self._draft(batch, summary)
        summary.draft_s = time.perf_counter() - started

    def _note_round(self, req: LlmRequest, summary: StepSummary) -> None:
        num_drafts, num_accepted = len(req.py_draft_tokens), req.py_num_accepted_draft_tokens
        summary.note_round(num_drafts, num_accepted)
        self._stats.record_round(num_drafts, num_accepted)
        self._speculator.observe(num_drafts, num_accepted)

    def _answer(self, emission: Emission, summary: StepSummary) -> None:
        req = emission.request
        summary.emitted_tokens += len(emission.token_ids)
        response = req.response(emission.token_ids, emission.logprobs, emission.finish, emission.error)
        if response.is_final:
            self._end(req, response, summary)
        else:
            self._outgoing.append(_Outgoing(self._open[req.py_request_id].on_response, response))

    def _draft(self, batch: ScheduledRequests, summary: StepSummary) -> None:
        """Draft for the requests that go on generating."""
        if self._speculator.max_draft_len == 0:
            return
        requests = [req for req in batch.all_requests() if req.in_generation]
        num_generating = sum(req.in_generation for req in self._scheduler.running)
        for req in requests:
            try:
                self._speculator.draft(req, num_generating)
            except Exception as error:  # noqa: BLE001 - a drafter may be a user's code; the others go on
                logger.error(f"request {req.py_request_id} fails: its drafter raised", repr(error))
                failure = RequestFailure(kind=FailureKind.REQUEST, message=f"the drafter failed: {error}")
                self._end(req, req.response(error=failure), summary)

    def _give_one_up(self, summary: StepSummary) -> None:
        """Nothing could run: end one request, so that what it holds goes to the others."""
        victim = self._scheduler.find_victim()
        if victim is None:
            return
        message = (
            f"no cache capacity for a request of {victim.num_tokens} tokens although nothing else runs; "
            "shorten it or give the cache more memory"
        )
        failure = RequestFailure(kind=FailureKind.CAPACITY, message=message)
        self._end(victim, victim.response(error=failure), summary)

    def _end(self, req: LlmRequest, response: ExecutorResponse, summary: StepSummary) -> None:
        """Give back what the request holds and queue its last response."""
        self._outgoing.append(_Outgoing(self._open[req.py_request_id].on_response, response))
        self._release(req)
        summary.num_completed += 1

    def _send_responses(self) -> None:
        while self._outgoing:
            callback, response = self._outgoing.popleft()
            if _send(callback, response) or response.is_final:
                continue
            req = self._scheduler.find(response.request_id)
            if req is not None:
                self._release(req)

    def _release(self, req: LlmRequest) -> None:
        """Forget an open request everywhere and free its slot and pages.

        Whatever raises here, the request is not open afterwards: its last response is on its way.
        """
        request_id = req.py_request_id
        try:
            if self._scheduler.remove(req):
                self._cache.free_resources(req)
            self._engine.forget(request_id)
            self._sampler.forget(request_id)
            self._speculator.finish(request_id)
        finally:
            self._open.pop(request_id, None)
            self._inbox.release(request_id)

    def _answer_all(self, failure: RequestFailure) -> None:
        """Answer every open request with the failure. What they hold stays until the cache is shut down, so
        that nothing here can fail but a callback.
        """
        while self._outgoing:
            callback, response = self._outgoing.popleft()
            if not _send(callback, response):
                self._open.pop(response.request_id, None)
        self._register(self._inbox.take().submissions)
        while self._open:
            request_id = next(iter(self._open))
            submission = self._open.pop(request_id)
            _send(submission.on_response, submission.request.response(error=failure))
            self._inbox.release(request_id)


def _send(callback: ResponseCallback, response: ExecutorResponse) -> bool:
    """Hand over a response; False if the callback raised, which ends its request."""
    try:
        callback(response)
    except Exception as error:  # noqa: BLE001 - the callback is the caller's code; other requests go on
        logger.error(f"the response callback of request {response.request_id} raised", repr(error))
        return False
    return True


def _check_vocabulary(request: ExecutorRequest, vocab_size: int) -> None:
    for name, ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", tuple(request.sampling.logit_bias)),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"{name} has a token outside the vocabulary, which is 0 to {vocab_size - 1}")
