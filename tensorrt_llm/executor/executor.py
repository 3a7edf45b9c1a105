# SPDX-License-Identifier: Apache-2.0
"""Hands requests to the loop and sorts its answers back to those who wait for them."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from tensorrt_llm._torch.pyexecutor.llm_request import (
    ExecutorRequest,
    ExecutorResponse,
    FailureKind,
    RequestFailure,
    RequestTimestamps,
)
from tensorrt_llm.executor.engine import Engine
from tensorrt_llm.executor.response_stream import ChoiceResponse, ResponseStream


class SubmittedRequest:
    """A prompt's choices on their way through the engine."""

    def __init__(self, engine: Engine, request_ids: range) -> None:
        self._engine = engine
        self.request_ids = request_ids
        self.responses = ResponseStream()

    def cancel(self) -> None:
        """Ask the engine to end every choice; those under way are answered as cancelled. Thread-safe."""
        for request_id in self.request_ids:
            self._engine.cancel(request_id)


class GenerationExecutor:
    """The one door to an engine. Every request submitted here is answered, even if the engine goes down."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next_id = 1
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, SubmittedRequest]] = {}
        self._is_shut_down = False
        engine.start()

    @property
    def num_open_requests(self) -> int:
        """Choices that were submitted and have not ended."""
        return len(self._open)

    def submit(self, choices: Sequence[ExecutorRequest]) -> SubmittedRequest:
        """Queue the choices of one prompt; their request ids are given here.

        Raises ValueError if one can never run (none is then left behind), RuntimeError after shutdown.
        """
        submitted = self._register(len(choices))
        try:
            for request_id, request in zip(submitted.request_ids, choices, strict=True):
                self.engine.submit(replace(request, request_id=request_id), self._deliver)
        except BaseException:
            self._forget(submitted)
            submitted.cancel()
            raise
        return submitted

    def shutdown(self) -> None:
        """Stop the engine and fail what it left unanswered. A second call does nothing."""
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
        self.engine.shutdown()
        failure = RequestFailure(kind=FailureKind.SHUTDOWN, message="the engine was shut down")
        for request_id in list(self._open):
            times = RequestTimestamps(arrival=0.0)
            self._deliver(ExecutorResponse(request_id=request_id, error=failure, timestamps=times))

    def _register(self, num_choices: int) -> SubmittedRequest:
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the engine was shut down; no request can be submitted")
            submitted = SubmittedRequest(self.engine, range(self._next_id, self._next_id + num_choices))
            self._next_id += num_choices
            self._open.update((key, (choice, submitted)) for choice, key in enumerate(submitted.request_ids))
        return submitted

    def _forget(self, submitted: SubmittedRequest) -> None:
        with self._lock:
            for request_id in submitted.request_ids:
                self._open.pop(request_id, None)

    def _deliver(self, response: ExecutorResponse) -> None:
        with self._lock:
            found = self._open.get(response.request_id)
            if found is not None and response.is_final:
                del self._open[response.request_id]
        # What comes after the end, or after a failed submission, has no reader.
        if found is not None:
            choice, submitted = found
            submitted.responses.put(ChoiceResponse(choice=choice, response=response))
