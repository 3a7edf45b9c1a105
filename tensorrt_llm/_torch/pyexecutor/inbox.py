# SPDX-License-Identifier: Apache-2.0
"""Where other threads leave requests and cancellations for the loop."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorResponse, LlmRequest

ResponseCallback = Callable[[ExecutorResponse], None]


class ExecutorUnhealthyError(RuntimeError):
    """The executor has stopped, by a fatal error or by shutdown, and takes no requests."""


class Submission(NamedTuple):
    """A new request and where its responses go."""

    request: LlmRequest
    on_response: ResponseCallback


class Mail(NamedTuple):
    """What the loop found in its inbox."""

    submissions: list[Submission]
    cancelled_ids: list[int]


class Inbox:
    """Thread-safe; knows the ids of all open requests, so that none is used twice."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._submissions: deque[Submission] = deque()
        self._cancelled_ids: set[int] = set()
        self._open_ids: set[int] = set()
        self._closed_because: str | None = None

    def submit(self, submission: Submission) -> None:
        """Leave a request. Raises ValueError if its id is open, ExecutorUnhealthyError if the inbox
        is closed.
        """
        request_id = submission.request.py_request_id
        with self._condition:
            if self._closed_because is not None:
                raise ExecutorUnhealthyError(self._closed_because)
            if request_id in self._open_ids:
                raise ValueError(f"request_id {request_id} is in use by an open request; give each its own")
            self._open_ids.add(request_id)
            self._submissions.append(submission)
            self._condition.notify()

    def cancel(self, request_id: int) -> None:
        """Ask for a request's end; ids that are not open are ignored."""
        with self._condition:
            if request_id in self._open_ids:
                self._cancelled_ids.add(request_id)
                self._condition.notify()

    def close(self, reason: str) -> None:
        """Refuse what comes from now on, for the first reason given, and wake the loop."""
        with self._condition:
            if self._closed_because is None:
                self._closed_because = reason
            self._condition.notify()

    @property
    def is_closed(self) -> bool:
        return self._closed_because is not None

    @property
    def num_submissions(self) -> int:
        """Requests that the loop has not taken yet."""
        return len(self._submissions)

    def wait(self) -> None:
        """Sleep until there is mail or the inbox is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self.is_closed or self._submissions or self._cancelled_ids)

    def take(self) -> Mail:
        """All mail. Submissions are to be handled first: a cancellation never overtakes its request."""
        if not (self._submissions or self._cancelled_ids):
            return Mail([], [])
        with self._condition:
            mail = Mail(list(self._submissions), sorted(self._cancelled_ids))
            self._submissions.clear()
            self._cancelled_ids.clear()
        return mail

    def release(self, request_id: int) -> None:
        """A request has ended; its id may be used again, and a cancellation that came too late is void."""
        with self._condition:
            self._open_ids.discard(request_id)
            self._cancelled_ids.discard(request_id)
