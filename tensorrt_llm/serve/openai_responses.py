# SPDX-License-Identifier: Apache-2.0
"""The bodies that the server answers with, in OpenAI's shapes."""

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """A response body."""

    model_config = ConfigDict(frozen=True)

    def to_chunk(self) -> str:
        """One server-sent event; nulls are left out."""
        return f"data: {self.model_dump_json(exclude_none=True)}\n\n"


class PromptTokensDetails(Body):
    cached_tokens: int = 0


class UsageInfo(Body):
    """Tokens of all prompts, of all choices, and of both."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Body):
    """The older form: parallel lists. A token that is no valid text reads `bytes:\\xe2\\x82`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    avg_decoded_tokens_per_iter: float | None = None


class CompletionBody(Body):
    """A whole completion, or one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class TopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    content: list[TokenLogprobBody]


class AssistantMessage(Body):
    role: Literal["assistant"] = "assistant"
    content: str | None


class ChatChoice(Body):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    avg_decoded_tokens_per_iter: float | None = None


class ChatBody(Body):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class Delta(Body):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Body):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    avg_decoded_tokens_per_iter: float | None = None


class ChatChunk(Body):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None


class ModelCard(Body):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tensorrt_llm"


class ModelList(Body):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ResponseHead(Body):
    """What every chunk of a response has in common."""

    id: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str

    @classmethod
    def new(cls, prefix: Literal["cmpl", "chatcmpl"], model: str) -> "ResponseHead":
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", model=model)

    def fields(self) -> dict[str, Any]:
        """Keywords of a body."""
        return {"id": self.id, "created": self.created, "model": self.model}
