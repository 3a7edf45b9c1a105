# SPDX-License-Identifier: Apache-2.0
"""What the executor needs of a loop: `PyExecutor` has it, and so has a fake in tests."""

from collections.abc import Callable
from typing import Protocol

from tensorrt_llm._torch.pyexecutor.description import ExecutorDescription
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, ExecutorResponse
from tensorrt_llm._torch.pyexecutor.stats import EngineSnapshot


class Engine(Protocol):
    """Takes requests on any thread and answers each on its own, until `ExecutorResponse.is_final`."""

    @property
    def description(self) -> ExecutorDescription: ...
    @property
    def is_healthy(self) -> bool: ...
    @property
    def fatal_error(self) -> BaseException | None: ...

    def start(self) -> None: ...

    def submit(self, request: ExecutorRequest, on_response: Callable[[ExecutorResponse], None]) -> None:
        """Queue a request. Raises ValueError for one that can never run."""
        ...

    def cancel(self, request_id: int) -> None:
        """End a request early; it is answered with finish_reason "cancelled". Unknown ids are allowed."""
        ...

    def get_stats(self) -> list[dict[str, object]]:
        """Statistics of the iterations since the last call."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Gauges of this moment; reading them changes nothing."""
        ...

    def shutdown(self) -> None: ...
