# SPDX-License-Identifier: Apache-2.0
"""Writes outputs of the engine as OpenAI bodies and chunks."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from tensorrt_llm.llmapi import CompletionOutput, Logprob, RequestOutput, Tokenizer
from tensorrt_llm.serve.openai_responses import (
    AssistantMessage,
    Body,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptTokensDetails,
    ResponseHead,
    TokenLogprobBody,
    TopLogprob,
    UsageInfo,
)

TokenLogprobs = dict[int, Logprob]


class BodyWriter(Protocol):
    """One endpoint's way to write outputs. `first_index` is the index of the output's choice 0."""

    def body(self, outputs: Sequence[RequestOutput]) -> Body:
        """The whole answer, once all outputs are finished."""
        ...

    def chunks(self, first_index: int, output: RequestOutput, usage: UsageInfo | None) -> Iterator[Body]:
        """What the last step of a streaming output adds."""
        ...

    def usage_chunk(self, usage: UsageInfo) -> Body:
        """The last chunk of a stream that was asked for usage."""
        ...


def usage_of(outputs: Sequence[RequestOutput]) -> UsageInfo:
    """Tokens so far; a prompt counts once, however many choices it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(choice.length for output in outputs for choice in output.outputs)
    cached = sum(output.cached_tokens for output in outputs)
    return UsageInfo(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


class CompletionWriter:
    """/v1/completions. `echoes` are the prompts' texts to put before each choice, or None."""

    def __init__(
        self, head: ResponseHead, tokenizer: Tokenizer, logprobs: int | None, echoes: Sequence[str] | None
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echoes = echoes
        self._text_offsets: dict[int, int] = {}

    def body(self, outputs: Sequence[RequestOutput]) -> Body:
        choices = [
            self._choice(place * len(output.outputs) + choice.index, choice, choice.text, choice.logprobs)
            for place, output in enumerate(outputs)
            for choice in output.outputs
        ]
        if self._echoes is not None:
            per_prompt = len(choices) // len(self._echoes)
            choices = [
                choice.model_copy(update={"text": self._echoes[choice.index // per_prompt] + choice.text})
                for choice in choices
            ]
        return CompletionBody(**self._head.fields(), choices=choices, usage=usage_of(outputs))

    def chunks(self, first_index: int, output: RequestOutput, usage: UsageInfo | None) -> Iterator[Body]:
        choice = output.changed
        assert choice is not None, "a streaming output that yields has a changed choice"
        index = first_index + choice.index
        text = choice.text_diff
        if self._echoes is not None and choice.length == len(choice.token_ids_diff):
            text = self._echoes[first_index // len(output.outputs)] + text
        entry = self._choice(index, choice, text, choice.logprobs_diff)
        yield CompletionBody(**self._head.fields(), choices=[entry], usage=usage)

    def usage_chunk(self, usage: UsageInfo) -> Body:
        return CompletionBody(**self._head.fields(), choices=[], usage=usage)

    def _choice(
        self, index: int, choice: CompletionOutput, text: str, logprobs: Sequence[TokenLogprobs]
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=None if self._logprobs is None else self._token_lists(index, self._logprobs, logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            avg_decoded_tokens_per_iter=_tokens_per_iteration(choice),
        )

    def _token_lists(
        self, index: int, num_best: int, logprobs: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs:
        sampled = [next(iter(entry)) for entry in logprobs]
        tokens = [token_text(self._tokenizer, token_id) for token_id in sampled]
        offset = self._text_offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._text_offsets[index] = offset
        best = [
            {token_text(self._tokenizer, token_id): value.logprob for token_id, value in entry.items()}
            for entry in logprobs
        ]
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[
                entry[token_id].logprob for token_id, entry in zip(sampled, logprobs, strict=True)
            ],
            top_logprobs=best if num_best else None,
            text_offset=offsets,
        )


class ChatWriter:
    """/v1/chat/completions."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer, top_logprobs: int | None) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs
        self._begun: set[int] = set()

    def body(self, outputs: Sequence[RequestOutput]) -> Body:
        choices = [
            ChatChoice(
                index=choice.index,
                message=AssistantMessage(content=choice.text),
                logprobs=self._chat_logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                avg_decoded_tokens_per_iter=_tokens_per_iteration(choice),
            )
            for output in outputs
            for choice in output.outputs
        ]
        return ChatBody(**self._head.fields(), choices=choices, usage=usage_of(outputs))

    def chunks(self, first_index: int, output: RequestOutput, usage: UsageInfo | None) -> Iterator[Body]:
        choice = output.changed
        assert choice is not None, "a streaming output that yields has a changed choice"
        index = first_index + choice.index
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")), usage)
        if choice.token_ids_diff:
            delta = Delta(content=choice.text_diff)
            logprobs = self._chat_logprobs(choice.logprobs_diff)
            yield self._chunk(ChatChunkChoice(index=index, delta=delta, logprobs=logprobs), usage)
        if choice.finish_reason is not None:
            end = ChatChunkChoice(
                index=index,
                delta=Delta(),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                avg_decoded_tokens_per_iter=_tokens_per_iteration(choice),
            )
            yield self._chunk(end, usage)

    def usage_chunk(self, usage: UsageInfo) -> Body:
        return ChatChunk(**self._head.fields(), choices=[], usage=usage)

    def _chunk(self, choice: ChatChunkChoice, usage: UsageInfo | None) -> Body:
        return ChatChunk(**self._head.fields(), choices=[choice], usage=usage)

    def _chat_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._top_logprobs is None:
            return None
        return ChatLogprobs(content=[self._token_entry(entry, self._top_logprobs) for entry in logprobs])

    def _token_entry(self, entry: TokenLogprobs, num_best: int) -> TokenLogprobBody:
        sampled_id, sampled = next(iter(entry.items()))
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        best = [self._top_entry(token_id, value) for token_id, value in ranked if value.rank <= num_best]
        return TokenLogprobBody(**dict(self._top_entry(sampled_id, sampled)), top_logprobs=best)

    def _top_entry(self, token_id: int, value: Logprob) -> TopLogprob:
        return TopLogprob(
            token=token_text(self._tokenizer, token_id),
            logprob=value.logprob,
            bytes=list(self._tokenizer.token_bytes(token_id)),
        )


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; one that is no whole UTF-8 text is spelt in bytes: `bytes:\\xe2\\x82`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _tokens_per_iteration(choice: CompletionOutput) -> float | None:
    """Tokens per model step, once the choice has ended: above 1 where drafts were accepted."""
    metrics = choice.request_perf_metrics
    if choice.finish_reason is None or metrics is None or metrics.decode_iterations == 0:
        return None
    return choice.length / metrics.decode_iterations
