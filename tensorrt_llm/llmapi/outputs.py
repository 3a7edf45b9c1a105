# SPDX-License-Identifier: Apache-2.0
"""What a request gives back, filled as the engine answers."""

import time
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorResponse, RequestTimestamps, TokenLogprob
from tensorrt_llm.executor import ChoiceResponse, RequestError, SubmittedRequest
from tensorrt_llm.llmapi.stop_strings import TextStream
from tensorrt_llm.llmapi.tokenizer import Tokenizer
from tensorrt_llm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token's natural-log probability and its rank, 1 being the most likely."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPerfMetrics:
    """Seconds of `time.monotonic()`, model steps that gave tokens, drafts verified, and drafts kept."""

    timestamps: RequestTimestamps
    decode_iterations: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(slots=True)
class CompletionOutput:
    """One choice. It grows while a request streams; the `_diff` views are what the last step added.

    `logprobs` has one mapping per token, the sampled token first. `stop_reason` is the stop string or stop
    token that ended the choice, None for the model's own end token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "cancelled"] | None = None
    stop_reason: str | int | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _num_chars_before: int = 0
    _num_tokens_before: int = 0

    @property
    def length(self) -> int:
        """Generated tokens."""
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._num_chars_before :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._num_tokens_before :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._num_tokens_before :]

    def _begin_step(self) -> None:
        self._num_chars_before = len(self.text)
        self._num_tokens_before = len(self.token_ids)

    def _add(self, response: ExecutorResponse) -> None:
        self.token_ids.extend(response.token_ids)
        for entry in response.logprobs:
            self.logprobs.append(_logprob_mapping(entry))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry[0].logprob
        self.finish_reason = response.finish_reason
        self.stop_reason = response.stop_reason
        self.request_perf_metrics = RequestPerfMetrics(
            timestamps=response.timestamps,
            decode_iterations=response.decode_iterations,
            num_draft_tokens=response.num_draft_tokens,
            num_accepted_tokens=response.num_accepted_tokens,
        )


def _logprob_mapping(entry: tuple[TokenLogprob, ...]) -> dict[int, Logprob]:
    return {token.token_id: Logprob(logprob=token.logprob, rank=token.rank) for token in entry}


class _TextWriter:
    """Writes a choice's text from its responses."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = TextStream(tokenizer, params)
        self._shows_stop = params.include_stop_str_in_output

    def write(self, response: ExecutorResponse) -> str:
        """The text that the response adds."""
        by_string = isinstance(response.stop_reason, str)
        token_ids = response.token_ids
        if response.finish_reason == "stop" and not by_string and not self._shows_stop:
            token_ids = token_ids[:-1]
        text = "".join([self._stream.push(token_id).text for token_id in token_ids])
        return text + self._stream.flush() if response.is_final and not by_string else text


class RequestOutput:
    """A prompt's choices: a value once finished, before that something to wait for.

    `result()` and `aresult()` (or `await`) wait for the end; iterating, with `for` or `async for`, gives this
    object back after every step of a streaming request (`changed` is the choice that grew), and once at the
    end of another. `error` is what all of them raise. One reader at a time.
    """

    def __init__(
        self,
        *,
        submitted: SubmittedRequest,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        streaming: bool,
    ) -> None:
        self.request_id = submitted.request_ids[0]
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(index=index) for index in range(params.n)]
        self.cached_tokens = 0
        self.changed: CompletionOutput | None = None
        self._submitted = submitted
        self._streaming = streaming
        self._num_unfinished = params.n
        self.error: RequestError | None = None
        self._aborted = False
        writes = tokenizer is not None and params.detokenize
        self._writers = [_TextWriter(tokenizer, params) for _ in self.outputs] if tokenizer and writes else []

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_unfinished == 0

    def result(self, timeout: float | None = None) -> "RequestOutput":
        """Wait for the end. Raises RequestError if the engine failed, TimeoutError after `timeout` s."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.finished:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._apply(self._submitted.responses.get(left))
        return self._checked()

    async def aresult(self) -> "RequestOutput":
        """Wait for the end in a coroutine. Raises RequestError if the engine failed."""
        while not self.finished:
            self._apply(await self._submitted.responses.aget())
        return self._checked()

    def abort(self) -> None:
        """End the request early; what it has so far stays. Thread-safe; does nothing once finished."""
        if not self.finished:
            self._aborted = True
            self._submitted.cancel()

    def aborted(self) -> bool:
        """Whether `abort` ended the request."""
        return self._aborted

    def __await__(self) -> Generator[object, None, "RequestOutput"]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator["RequestOutput"]:
        while not self.finished:
            if self._streaming:
                self._apply(self._submitted.responses.get())
                yield self._checked()
            else:
                yield self.result()

    async def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        while not self.finished:
            if self._streaming:
                self._apply(await self._submitted.responses.aget())
                yield self._checked()
            else:
                yield await self.aresult()

    def _apply(self, arrival: ChoiceResponse) -> None:
        response = arrival.response
        for output in self.outputs:
            output._begin_step()
        if response.error is not None:
            self.error = RequestError(response.error)
            self._num_unfinished = 0
            self._submitted.cancel()
            return
        self.changed = output = self.outputs[arrival.choice]
        output._add(response)
        if self._writers:
            output.text += self._writers[arrival.choice].write(response)
        self.cached_tokens = max(self.cached_tokens, response.cached_tokens)
        self._num_unfinished -= response.is_final

    def _checked(self) -> "RequestOutput":
        if self.error is not None:
            raise self.error
        return self
