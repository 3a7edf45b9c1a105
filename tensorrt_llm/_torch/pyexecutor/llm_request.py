# SPDX-License-Identifier: Apache-2.0
"""A request: what is asked of the executor, what it answers, and where the request stands in between.

`ExecutorRequest` and `ExecutorResponse` are values that cross threads. `LlmRequest` is the loop's own
record: it is read by the cache managers and changed by the loop alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import isfinite
from typing import ClassVar, Literal, Protocol

FinishReason = Literal["stop", "length", "cancelled"]


class StopChecker(Protocol):
    """Finds stop strings in one request's output; it has seen every token pushed before."""

    def push(self, token_id: int) -> str | None:
        """Add an output token; return the stop string that its text completes, if any."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How one request's tokens are chosen.

    Greedy when temperature, top_k and top_p are all None, when temperature or top_p is 0, or when top_k is
    1. Otherwise the token is drawn at `temperature` (1 when None) from the `top_k` best (None or 0: all),
    of these the smallest set that reaches `top_p` (None: all), of these the ones at least `min_p` times as
    likely as the best. `seed` None lets the executor choose. Penalties as in OpenAI's API: repetition (1 =
    none) over prompt and output, presence and frequency over the output. End and stop tokens are impossible
    before `min_tokens` output tokens. `num_logprobs` None returns no log-probabilities; n returns the
    chosen token's and those of the n best, of the model's own distribution before any change by the above.

    Raises ValueError for a value outside its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.temperature is None or _at_least_zero(self.temperature), "temperature", self, ">= 0")
        _require(self.top_k is None or self.top_k >= 0, "top_k", self, ">= 0 (0 = all tokens)")
        _require(self.top_p is None or 0 <= self.top_p <= 1, "top_p", self, "in [0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self, "in [0, 1]")
        _require(self.min_tokens >= 0, "min_tokens", self, ">= 0")
        positive = isfinite(self.repetition_penalty) and self.repetition_penalty > 0
        _require(positive, "repetition_penalty", self, "finite and > 0 (1 = none)")
        _require(isfinite(self.presence_penalty), "presence_penalty", self, "finite")
        _require(isfinite(self.frequency_penalty), "frequency_penalty", self, "finite")
        _require(all(map(isfinite, self.logit_bias.values())), "logit_bias", self, "finite for every token")
        _require(self.num_logprobs is None or self.num_logprobs >= 0, "num_logprobs", self, ">= 0")

    @property
    def is_greedy(self) -> bool:
        """True when the token is the most likely one, after penalties and bias."""
        unset = self.temperature is None and self.top_k is None and self.top_p is None
        return unset or self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def has_penalties(self) -> bool:
        """True when the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """True when the logits are changed before the token is chosen."""
        return self.has_penalties or self.min_tokens > 0 or bool(self.logit_bias)


def _at_least_zero(value: float) -> bool:
    return isfinite(value) and value >= 0


def _require(condition: bool, name: str, owner: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {getattr(owner, name)!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRequest:
    """What is asked for. `request_id` is unique among the executor's open requests.

    The output ends with `end_id` (unless None or `ignore_eos`), a token of `stop_token_ids`, a stop string
    found by `stop`, `max_tokens` tokens, or the executor's max_seq_len, whichever comes first; the ending
    token is part of the output. Raises ValueError for an empty prompt or max_tokens < 1.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    end_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: StopChecker | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty; a prompt needs at least one token")
        _require(self.max_tokens >= 1, "max_tokens", self, ">= 1")

    @property
    def ending_ids(self) -> frozenset[int]:
        """Tokens that end the output."""
        end = () if self.end_id is None or self.ignore_eos else (self.end_id,)
        return frozenset((*end, *self.stop_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability and its rank (1 = most likely) in the model's distribution."""

    token_id: int
    logprob: float
    rank: int


class FailureKind(StrEnum):
    """Why a request failed: no room for it, a fault of its own, the executor's end by a fault, or by
    shutdown.
    """

    CAPACITY = "capacity"
    REQUEST = "request"
    FATAL = "fatal"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """The error that ended one request; `message` is for the person who sent it."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimestamps:
    """Seconds of `time.monotonic()`; None for what has not happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorResponse:
    """New tokens of one request, and at its end why it ended: the last response has `finish_reason` or
    `error`.

    `logprobs` has one entry per new token when they were asked for (the token itself first, then the best
    ones), else it is empty. `stop_reason` is the stop string or stop token id; None for the end token.
    `cached_tokens` are prompt tokens that were not computed. The counters run over the request's life:
    model steps that gave it tokens, drafts verified, drafts accepted and kept.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestFailure | None = None
    cached_tokens: int = 0
    decode_iterations: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    timestamps: RequestTimestamps

    @property
    def is_final(self) -> bool:
        """True when nothing follows."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a request's output ended."""

    reason: FinishReason
    stop_reason: str | int | None = None


class LlmRequestState(Enum):
    """QUEUED (holds nothing) -> CONTEXT_INIT (admitted, prompt being read) -> GENERATION_IN_PROGRESS ->
    GENERATION_COMPLETE (resources freed). A request whose cache was given up is QUEUED again.
    """

    QUEUED = 0
    CONTEXT_INIT = 1
    GENERATION_IN_PROGRESS = 2
    GENERATION_COMPLETE = 3


@dataclass(slots=True, kw_only=True, eq=False)
class LlmRequest:
    """One open request, in the names the cache managers read.

    Tokens [0, context_current_position) are in the cache; a step of the context phase, which reads tokens
    [0, context_len), runs the next `context_chunk_size`. `context_len` is the prompt's length, or more where
    the cache was given up and output is read again. In generation all tokens but the last are in the cache; a
    step runs that last (golden) token and `py_draft_tokens`. After it `py_num_accepted_draft_tokens` of them
    were kept and `py_rewind_len` rejected.
    """

    is_dummy: ClassVar[bool] = False
    is_attention_dp_dummy: ClassVar[bool] = False
    is_cuda_graph_dummy: ClassVar[bool] = False

    request: ExecutorRequest
    py_request_id: int
    prompt_len: int
    context_len: int
    max_new_tokens: int
    seed: int
    arrival: float
    state: LlmRequestState = LlmRequestState.QUEUED
    context_current_position: int = 0
    context_chunk_size: int = 0
    context_start: int = 0
    cached_tokens: int = 0
    py_draft_tokens: list[int] = field(default_factory=list)
    py_num_accepted_draft_tokens: int = 0
    py_rewind_len: int = 0
    promised_pages: int = 0
    last_scheduled_iter: int = -1
    decode_iterations: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    is_plain_greedy: bool = False
    ending_ids: frozenset[int] = frozenset()
    _tokens: list[int] = field(default_factory=list)

    @classmethod
    def admit(cls, request: ExecutorRequest, *, max_seq_len: int, seed: int, arrival: float) -> "LlmRequest":
        """The record of a request that has just arrived; its output is cut so that all tokens fit in
        max_seq_len.
        """
        sampling, prompt_len = request.sampling, len(request.prompt_token_ids)
        return cls(
            request=request,
            py_request_id=request.request_id,
            prompt_len=prompt_len,
            context_len=prompt_len,
            max_new_tokens=min(request.max_tokens, max_seq_len - prompt_len),
            seed=seed if sampling.seed is None else sampling.seed,
            arrival=arrival,
            is_plain_greedy=sampling.is_greedy and not sampling.changes_logits,
            ending_ids=request.ending_ids,
            _tokens=list(request.prompt_token_ids),
        )

    def get_tokens(self, beam: int = 0) -> list[int]:
        """Prompt and output tokens. The list is the request's own: read it, do not change it."""
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self._tokens)

    @property
    def num_generated(self) -> int:
        """Output tokens."""
        return len(self._tokens) - self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_new_tokens + self.prompt_len - len(self._tokens)

    @property
    def is_first_context_chunk(self) -> bool:
        """True while no token has been computed since the request has its cache."""
        return self.context_current_position == self.context_start

    @property
    def is_last_context_chunk(self) -> bool:
        """True when the step's chunk is the context's last."""
        return self.context_current_position + self.context_chunk_size >= self.context_len

    @property
    def in_context(self) -> bool:
        """True while the prompt is being read."""
        return self.state is LlmRequestState.CONTEXT_INIT

    @property
    def in_generation(self) -> bool:
        """True from the prompt's end to the output's."""
        return self.state is LlmRequestState.GENERATION_IN_PROGRESS

    @property
    def holds_cache(self) -> bool:
        """True while the request has pages and a slot, or has them suspended."""
        return self.in_context or self.in_generation

    def start_context(self, cached_tokens: int) -> None:
        """The request has its cache, in which the prompt's first `cached_tokens` tokens stand already."""
        assert 0 <= cached_tokens < self.prompt_len, f"{cached_tokens} of {self.prompt_len} tokens cached"
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_start = self.context_current_position = cached_tokens
        if self.first_scheduled is None:
            self.cached_tokens = cached_tokens

    def restart(self) -> None:
        """The request's cache was given up: it queues, and will read its tokens, output included, again."""
        self.state = LlmRequestState.QUEUED
        self.context_len = self.num_tokens
        self.context_current_position = self.context_chunk_size = 0
        self.py_draft_tokens = []

    def advance_context(self) -> None:
        """The step's chunk is in the cache: move behind it, into generation if it was the last."""
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0
        if self.context_current_position >= self.context_len:
            self.state = LlmRequestState.GENERATION_IN_PROGRESS

    def append_output(self, token_id: int) -> Finish | None:
        """Add an output token and say whether it ends the request, and why."""
        self._tokens.append(token_id)
        stopped = self._stopped_by(token_id)
        if stopped is not None:
            return stopped
        return Finish(reason="length") if self.num_remaining <= 0 else None

    def _stopped_by(self, token_id: int) -> Finish | None:
        request = self.request
        # Pushed even where its answer does not count, since the checker must see every token.
        found = None if request.stop is None else request.stop.push(token_id)
        if self.num_generated < request.sampling.min_tokens:
            return None
        if token_id in self.ending_ids:
            is_end = token_id == request.end_id and not request.ignore_eos
            return Finish(reason="stop", stop_reason=None if is_end else token_id)
        return None if found is None else Finish(reason="stop", stop_reason=found)

    def record_round(self, num_drafts: int, num_accepted: int) -> None:
        """Note a generation step of which `num_accepted` of `num_drafts` drafts were kept."""
        self.py_num_accepted_draft_tokens = num_accepted
        self.py_rewind_len = num_drafts - num_accepted
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    @property
    def timestamps(self) -> RequestTimestamps:
        return RequestTimestamps(
            arrival=self.arrival,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
        )

    def response(
        self,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[tuple[TokenLogprob, ...], ...] = (),
        finish: Finish | None = None,
        error: RequestFailure | None = None,
    ) -> ExecutorResponse:
        """An answer carrying the request's counters as they are now."""
        return ExecutorResponse(
            request_id=self.py_request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
            error=error,
            cached_tokens=self.cached_tokens,
            decode_iterations=self.decode_iterations,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            timestamps=self.timestamps,
        )
