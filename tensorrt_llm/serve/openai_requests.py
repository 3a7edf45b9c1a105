# SPDX-License-Identifier: Apache-2.0
"""The bodies of OpenAI requests, with TensorRT-LLM's extensions; unknown fields are refused.

A null stands for an absent field, as clients send it. Fields that OpenAI defines and this server does not
serve are declared only where clients send them by habit, and then only with the values that change nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from tensorrt_llm.llmapi.strict_model import StrictBaseModel
from tensorrt_llm.sampling_params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
OPENAI_TEMPERATURE = 1.0
OPENAI_TOP_P = 1.0

_NOT_OFFERED_IN_CHAT = """
    audio cache_salt documents function_call functions guided_choice guided_json guided_regex
    logits_processors modalities prediction prompt_logprobs reasoning_effort service_tier store
    thinking thinking_token_budget verbosity web_search_options
"""
_NOT_OFFERED_IN_COMPLETIONS = (
    "guided_choice guided_json guided_regex priority prompt_logprobs use_beam_search"
)


def _check_strings(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError("must be a string or a list of strings")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int for item in value)


def _check_prompt(value: object) -> object:
    if isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_ids(item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


Prompt = str | list[str] | list[int] | list[list[int]]
Stop = str | list[str] | None


class StreamOptions(StrictBaseModel):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage on every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(StrictBaseModel):
    """Only plain text: without a grammar backend nothing could hold a text to a schema."""

    type: Literal["text"] = "text"

    @model_validator(mode="before")
    @classmethod
    def _refuse_grammars(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("type") != "text":
            raise ValueError(
                f"type {data.get('type')!r} is not supported: no grammar backend is built in; ask for text"
            )
        return data


class SamplingFields(StrictBaseModel):
    """What both endpoints share. `user` is accepted and has no effect."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[Stop, BeforeValidator(_check_strings)] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def usage_in_stream(self) -> StreamOptions:
        """What the stream says about usage."""
        return self.stream_options or StreamOptions()

    def sampling_values(self) -> dict[str, Any]:
        """Keywords of `SamplingParams` that were given, with OpenAI's defaults for temperature and top_p."""
        names = (
            "n top_k min_p seed stop stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
            "presence_penalty frequency_penalty repetition_penalty logit_bias skip_special_tokens "
            "spaces_between_special_tokens truncate_prompt_tokens"
        )
        values = {name: getattr(self, name) for name in names.split()}
        given = {name: value for name, value in values.items() if value is not None}
        given["temperature"] = OPENAI_TEMPERATURE if self.temperature is None else self.temperature
        given["top_p"] = OPENAI_TOP_P if self.top_p is None else self.top_p
        return given


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    not_offered: ClassVar[frozenset[str]] = frozenset(_NOT_OFFERED_IN_COMPLETIONS.split())

    prompt: Annotated[Prompt, BeforeValidator(_check_prompt)]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    detokenize: bool | None = None
    add_special_tokens: bool | None = None

    @field_validator("suffix")
    @classmethod
    def _refuse_suffix(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("the models complete a text and cannot fill one in: leave suffix out")
        return value

    @model_validator(mode="after")
    def _check_echo(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: prompts have no log probabilities")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list of texts or of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if _is_ids(prompt) else prompt  # type: ignore[return-value]

    def to_sampling_params(self) -> SamplingParams:
        """Raises ValueError for a value out of range."""
        values = self.sampling_values()
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        for name in ("logprobs", "best_of", "detokenize", "add_special_tokens"):
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        return SamplingParams(**values)


class ContentPart(StrictBaseModel):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("type") not in ("text", "input_text", "output_text"):
            raise ValueError(f"content of type {data.get('type')!r} is not supported: send text")
        return data


def _check_content(value: object) -> object:
    if value is None or isinstance(value, str | list):
        return value
    raise ValueError("must be a string or a list of text parts")


class ChatMessage(BaseModel):
    """A message. Other fields are allowed, since clients echo back what servers added; templates see them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[ContentPart] | None, BeforeValidator(_check_content)] = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: content is one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    not_offered: ClassVar[frozenset[str]] = frozenset(_NOT_OFFERED_IN_CHAT.split())

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tools")
    @classmethod
    def _refuse_tools(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if value:
            raise ValueError("tools are not supported: no tool-call parser is built in; leave tools out")
        return value

    @model_validator(mode="after")
    def _check_pairs(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        given = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        if len(set(given)) > 1:
            raise ValueError("max_tokens and max_completion_tokens are the same limit: give one of them")
        return self

    def to_sampling_params(self) -> SamplingParams:
        """Raises ValueError for a value out of range. Without a limit the answer may fill the context."""
        values = self.sampling_values()
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return SamplingParams(**values, max_tokens=limit, logprobs=logprobs, add_special_tokens=False)
