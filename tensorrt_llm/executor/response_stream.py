# SPDX-License-Identifier: Apache-2.0
"""The way back from the loop's thread to the one who waits for a request."""

import asyncio
import contextlib
import threading
from collections import deque
from dataclasses import dataclass

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResponse:
    """A response and the choice of the request that it belongs to."""

    choice: int
    response: ExecutorResponse


class ResponseStream:
    """Responses in the order they came, for one reader: a thread (`get`) or a coroutine (`aget`).

    The loop's thread puts and never waits.
    """

    def __init__(self) -> None:
        self._arrived: deque[ChoiceResponse] = deque()
        self._changed = threading.Condition()
        self._sleeper: asyncio.Future[None] | None = None

    def put(self, arrival: ChoiceResponse) -> None:
        """Add a response and wake the reader. Thread-safe."""
        with self._changed:
            self._arrived.append(arrival)
            self._changed.notify()
            sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            _wake(sleeper)

    def get(self, timeout: float | None = None) -> ChoiceResponse:
        """The next response; blocks at most `timeout` seconds, then raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived, timeout):
                raise TimeoutError(f"no response from the engine within {timeout} seconds")
            return self._arrived.popleft()

    async def aget(self) -> ChoiceResponse:
        """The next response, on whatever event loop runs the caller."""
        while True:
            with self._changed:
                if self._arrived:
                    return self._arrived.popleft()
                sleeper = asyncio.get_running_loop().create_future()
                self._sleeper = sleeper
            await sleeper


def _wake(sleeper: "asyncio.Future[None]") -> None:
    loop = sleeper.get_loop()

    def resolve() -> None:
        if not sleeper.done():
            sleeper.set_result(None)

    # RuntimeError means a closed event loop: its reader gave up, and there is nobody to wake.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(resolve)
