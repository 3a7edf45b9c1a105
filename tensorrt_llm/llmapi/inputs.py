# SPDX-License-Identifier: Apache-2.0
"""What a caller asks, as values: prompts in their several forms, and the engine's requests for one prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, SamplingSpec
from tensorrt_llm.llmapi.stop_strings import StopStringChecker
from tensorrt_llm.llmapi.tokenizer import Tokenizer
from tensorrt_llm.sampling_params import SamplingParams

# Far below any logit, and finite, so that sums with it stay finite in float32.
BANNED_LOGIT_BIAS = -1e9
NUM_SEEDS = 2**63


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


PromptInputs = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as the engine takes it; `text` is None where it came as token ids."""

    text: str | None
    token_ids: tuple[int, ...]


def is_single_prompt(inputs: object) -> bool:
    """Whether `inputs` is one prompt, as opposed to a sequence of prompts."""
    if isinstance(inputs, str | Mapping):
        return True
    return isinstance(inputs, Sequence) and len(inputs) > 0 and isinstance(inputs[0], int)


def read_prompt(inputs: PromptInputs, params: SamplingParams, tokenizer: Tokenizer | None) -> Prompt:
    """Encode a prompt. Raises ValueError for an empty one, TypeError for one of no known form."""
    text, token_ids = _split(inputs)
    if token_ids is None:
        if tokenizer is None:
            raise ValueError(
                "the prompt is text, and there is no tokenizer (skip_tokenizer_init): give token ids"
            )
        token_ids = tuple(tokenizer.encode(text or "", add_special_tokens=params.add_special_tokens))
    if not token_ids:
        raise ValueError(f"the prompt {inputs!r} has no tokens; give at least one")
    keep = params.truncate_prompt_tokens
    return Prompt(text=text, token_ids=token_ids if keep is None else token_ids[-keep:])


def _split(inputs: object) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, token ids)."""
    if isinstance(inputs, Mapping):
        if len(inputs) != 1 or not {"prompt", "prompt_token_ids"} & set(inputs):
            raise TypeError(f"a prompt mapping holds 'prompt' or 'prompt_token_ids', this one {list(inputs)}")
        (inputs,) = inputs.values()
    if isinstance(inputs, str):
        return inputs, None
    if not isinstance(inputs, Sequence) or not all(type(token) is int for token in inputs):
        raise TypeError(
            f"a prompt is text, token ids or a mapping of one of them, not {type(inputs).__name__}"
        )
    return None, tuple(inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What requests are held to before the loop holds them to the rest, and the tokens that end a text."""

    max_batch_size: int
    max_seq_len: int
    end_ids: tuple[int, ...]


def build_requests(
    prompt: Prompt, params: SamplingParams, limits: RequestLimits, tokenizer: Tokenizer | None
) -> list[ExecutorRequest]:
    """One request per choice, without ids. Raises ValueError naming the limit that is broken.

    The loop cuts `max_tokens` to what `max_seq_len` leaves behind the prompt.
    """
    if params.n > limits.max_batch_size:
        raise ValueError(
            f"SamplingParams.n={params.n}: at most max_batch_size={limits.max_batch_size} choices run"
        )
    if params.stop_strings and tokenizer is None:
        raise ValueError("SamplingParams.stop needs a tokenizer (skip_tokenizer_init): use stop_token_ids")
    end_ids = limits.end_ids if params.end_id is None else () if params.end_id == -1 else (params.end_id,)
    return [
        ExecutorRequest(
            request_id=0,
            prompt_token_ids=prompt.token_ids,
            max_tokens=limits.max_seq_len if params.max_tokens is None else params.max_tokens,
            sampling=_sampling_spec(params, choice),
            end_id=end_ids[0] if end_ids else None,
            stop_token_ids=(*(params.stop_token_ids or ()), *(() if params.ignore_eos else end_ids[1:])),
            ignore_eos=params.ignore_eos,
            stop=StopStringChecker(tokenizer, params) if tokenizer and params.stop_strings else None,
        )
        for choice in range(params.n)
    ]


def _sampling_spec(params: SamplingParams, choice: int) -> SamplingSpec:
    bias = {**(params.logit_bias or {}), **dict.fromkeys(params.bad_token_ids or (), BANNED_LOGIT_BIAS)}
    return SamplingSpec(
        temperature=params.temperature,
        top_k=params.top_k or None,
        top_p=params.top_p,
        min_p=params.min_p or 0.0,
        seed=None if params.seed is None else (params.seed + choice) % NUM_SEEDS,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=bias,
        num_logprobs=params.logprobs,
    )
