# SPDX-License-Identifier: Apache-2.0
"""An engine that answers from a script, with the loop's own rules for where a request ends."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tensorrt_llm._torch.pyexecutor.description import ExecutorDescription
from tensorrt_llm._torch.pyexecutor.llm_request import (
    ExecutorRequest,
    ExecutorResponse,
    FailureKind,
    Finish,
    LlmRequest,
    RequestFailure,
    TokenLogprob,
)
from tensorrt_llm._torch.pyexecutor.stats import EngineSnapshot
from tensorrt_llm.llmapi.tokenizer import Tokenizer

PATIENCE_S = 20.0


def fake_description(max_seq_len: int = 64) -> ExecutorDescription:
    return ExecutorDescription(
        model="toy",
        device="cpu",
        dtype="float32",
        max_batch_size=4,
        max_num_tokens=256,
        max_seq_len=max_seq_len,
        vocab_size=300,
        max_draft_len=3,
        verify_scheme="records",
        attention_pages=11,
        tokens_per_page=32,
        ssm_slots=5,
        pool_bytes=1 << 20,
        records_bytes=3 << 20,
        other_side_bytes=5 << 19,
    )


def fake_snapshot(**changes: object) -> EngineSnapshot:
    """Gauges that differ from each other, so that one shown in another's place is seen."""
    numbers = {field.name: 100 + place for place, field in enumerate(fields(EngineSnapshot))}
    by_position = {"drafted_by_position": (7, 3), "accepted_by_position": (5, 0)}
    return EngineSnapshot(**{**numbers, **by_position, **changes})


@dataclass(eq=False)
class _Job:
    record: LlmRequest
    on_response: Callable[[ExecutorResponse], None]
    cancelled: bool = False
    is_answered: bool = False


@dataclass(eq=False)
class FakeEngine:
    """Every request is answered with `text` and an end token, in runs of `run_lengths` tokens (repeated).

    A gated engine waits for `release(n)` before each of the next n runs. `failure` ends requests after their
    first run. Each request has a thread of its own, which ends with the request, or at `shutdown` and `die`.
    """

    tokenizer: Tokenizer
    text: str = "def x"
    run_lengths: Sequence[int] = (1,)
    end_id: int | None = None
    gated: bool = False
    failure: RequestFailure | None = None
    description: ExecutorDescription = field(default_factory=fake_description)
    stats: list[dict[str, Any]] = field(default_factory=list)
    fatal_error: BaseException | None = None
    requests: list[ExecutorRequest] = field(default_factory=list)
    cancelled_ids: list[int] = field(default_factory=list)
    is_started: bool = False
    is_shut_down: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._permits = 0

    @property
    def is_healthy(self) -> bool:
        return self.fatal_error is None and not self.is_shut_down

    def start(self) -> None:
        self.is_started = True

    def submit(self, request: ExecutorRequest, on_response: Callable[[ExecutorResponse], None]) -> None:
        if not self.is_healthy:
            raise RuntimeError("the engine is down")
        num_tokens, limit = len(request.prompt_token_ids), self.description.max_seq_len
        if num_tokens >= limit:
            raise ValueError(f"the prompt has {num_tokens} tokens; max_seq_len={limit}")
        record = LlmRequest.admit(request, max_seq_len=limit, seed=0, arrival=1.0)
        job = _Job(record, on_response)
        with self._changed:
            self.requests.append(request)
            self._jobs[request.request_id] = job
            self._changed.notify_all()
        threading.Thread(target=self._serve, args=(job,), name="fake_engine", daemon=True).start()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            job = self._jobs.get(request_id)
            if job is not None and not job.cancelled:
                job.cancelled = True
                self.cancelled_ids.append(request_id)
            self._changed.notify_all()

    def get_stats(self) -> list[dict[str, Any]]:
        drained, self.stats = self.stats, []
        return drained

    def snapshot(self) -> EngineSnapshot:
        return fake_snapshot(num_requests_running=len(self._jobs))

    def shutdown(self) -> None:
        self.is_shut_down = True
        self._fail_all(RequestFailure(kind=FailureKind.SHUTDOWN, message="the engine was shut down"))

    def release(self, num_runs: int) -> None:
        """Let a gated engine answer `num_runs` runs more."""
        with self._changed:
            self._permits += num_runs
            self._changed.notify_all()

    def die(self, error: BaseException) -> None:
        """Go down as the loop does on a fault of its own: every open request is answered."""
        self.fatal_error = error
        self._fail_all(RequestFailure(kind=FailureKind.FATAL, message=f"the engine stopped: {error}"))

    def wait_for(self, condition: Callable[["FakeEngine"], bool]) -> None:
        """Block until `condition` holds; it is looked at whenever something changes here."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE_S)

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    def _fail_all(self, failure: RequestFailure) -> None:
        with self._changed:
            jobs, self._jobs = list(self._jobs.values()), {}
            for job in jobs:
                job.cancelled = job.is_answered = True
            self._changed.notify_all()
        for job in jobs:
            job.on_response(job.record.response(error=failure))

    def _serve(self, job: _Job) -> None:
        for number, run in enumerate(self._runs(job.record.request)):
            if not self._may_go_on(job):
                if not job.is_answered:
                    self._answer(job, (), Finish(reason="cancelled"))
                return
            if self.failure is not None and number == 1:
                self._finish(job)
                job.on_response(job.record.response(error=self.failure))
                return
            if self._run(job, run):
                return

    def _runs(self, request: ExecutorRequest) -> Iterator[list[int]]:
        script = [*self.tokenizer.encode(self.text), *([] if self.end_id is None else [self.end_id])]
        tokens = iter(script) if self.end_id in request.ending_ids else itertools.cycle(script)
        for length in itertools.cycle(self.run_lengths):
            run = list(itertools.islice(tokens, length))
            if not run:
                return
            yield run

    def _run(self, job: _Job, run: list[int]) -> bool:
        """Answer the run up to where the request ends; True if it did."""
        job.record.decode_iterations += 1
        job.record.record_round(len(run) - 1, len(run) - 1)
        emitted: list[int] = []
        for token_id in run:
            finish = job.record.append_output(token_id)
            emitted.append(token_id)
            if finish is not None:
                self._answer(job, tuple(emitted), finish)
                return True
        self._answer(job, tuple(emitted), None)
        return False

    def _may_go_on(self, job: _Job) -> bool:
        with self._changed:
            # Whoever asked waits with patience; here it would only run out after the test.
            self._changed.wait_for(lambda: job.cancelled or not self.gated or self._permits > 0)
            if self.gated and not job.cancelled:
                self._permits -= 1
            return not job.cancelled

    def _answer(self, job: _Job, token_ids: tuple[int, ...], finish: Finish | None) -> None:
        job.record.first_token = job.record.first_token or 1.5
        job.record.first_scheduled, job.record.last_token = 1.25, 2.0
        if finish is not None:
            self._finish(job)
        logprobs = self._logprobs(job.record.request, token_ids)
        job.on_response(job.record.response(token_ids, logprobs, finish))

    def _finish(self, job: _Job) -> None:
        with self._changed:
            self._jobs.pop(job.record.py_request_id, None)
            self._changed.notify_all()

    def _logprobs(
        self, request: ExecutorRequest, token_ids: tuple[int, ...]
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Token t itself with -1.5 at rank 2, then the best: t - 1 with -0.5, t with -1.5, t + 1..."""
        count = request.sampling.num_logprobs
        if count is None:
            return ()
        return tuple(
            (self._ranked(t, 2), *(self._ranked(t, k) for k in range(1, count + 1))) for t in token_ids
        )

    @staticmethod
    def _ranked(token_id: int, rank: int) -> TokenLogprob:
        return TokenLogprob(token_id=token_id + rank - 2, logprob=0.5 - rank, rank=rank)
