# SPDX-License-Identifier: Apache-2.0
"""How one request samples its tokens and where it ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

MAX_LOGPROBS = 20
# The loop looks for all of them at every token, between the steps of all requests.
MAX_STOP_STRINGS = 64

_UNSUPPORTED = {
    "use_beam_search": "beam search is not offered: sample n choices instead",
    "embedding_bias": "give the biases by token id in logit_bias",
    "logits_processor": "only logit_bias and the penalties change logits",
    "length_penalty": "it ranks beams, and beam search is not offered",
    "early_stopping": "it ends beams, and beam search is not offered",
    "top_p_min": "top_p stays constant over a request",
    "top_p_reset_ids": "top_p stays constant over a request",
    "top_p_decay": "top_p stays constant over a request",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    "bad": "words of several tokens cannot be banned: give single tokens in bad_token_ids",
    "prompt_logprobs": "only generated tokens have log probabilities",
    "return_context_logits": "logits are not returned: ask for logprobs",
    "return_generation_logits": "logits are not returned: ask for logprobs",
    "additional_model_outputs": "the models have no other outputs",
    "guided_decoding": "no grammar backend is built in: validate the text yourself",
    "thinking_token_budget": "no reasoning parser is built in: bound the text with max_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop conditions of a request, checked when constructed (`ValueError`).

    Without temperature, top_k and top_p a request is greedy, and so it is with temperature 0,
    top_p 0 or top_k 1.

    max_tokens: most tokens to generate per choice; None means up to the model's `max_seq_len`.
    min_tokens: no EOS, stop token or stop string ends a choice earlier.
    end_id: the token that ends a choice; None means the model's own, -1 none.
    stop, stop_token_ids: strings and tokens that end a choice. Text stops before them unless
        `include_stop_str_in_output`; token ids end with the token that completed them.
    bad_token_ids: tokens that are never sampled. logit_bias: amounts added to the logits, by token id.
    n: choices per prompt. best_of: accepted when it equals n. seed: that of choice 0; choice i uses seed + i.
    top_k: 0 means all. top_p, min_p: from 0 to 1.
    logprobs: how many of the most likely tokens to report per step besides the sampled one (0 to 20).
    detokenize: False leaves texts empty. skip_special_tokens: leave special tokens out of texts.
    spaces_between_special_tokens: byte-level tokenizers never put spaces there; both values give one text.
    truncate_prompt_tokens: keep only so many last tokens of the prompt.
    exclude_input_from_output: False is refused; outputs hold generated tokens only.
    return_perf_metrics: inert; every output carries its times.
    The others stand for options of TensorRT-LLM that are refused unless left at None (or False).
    """

    max_tokens: int | None = 32
    min_tokens: int = 0
    end_id: int | None = None
    pad_id: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad: str | Sequence[str] | None = None
    bad_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    embedding_bias: object = None
    logits_processor: object = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    additional_model_outputs: object = None
    guided_decoding: object = None
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        _refuse_unsupported(self)
        for check in (_check_lengths, _check_stops, _check_choices, _check_distribution, _check_penalties):
            check(self)

    @property
    def greedy(self) -> bool:
        """Whether every step takes the most likely token."""
        if self.temperature == 0 or self.top_p == 0 or self.top_k == 1:
            return True
        return self.temperature is None and not self.top_k and self.top_p is None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form they were given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"SamplingParams.{name}={value!r}: {rule}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_unsupported(params: SamplingParams) -> None:
    inert = {field.name: field.default for field in fields(params)}
    for name, remedy in _UNSUPPORTED.items():
        value = getattr(params, name)
        if value is not None and value is not inert[name]:
            raise ValueError(f"SamplingParams.{name}={value!r} is not supported: {remedy}")
    if not params.exclude_input_from_output:
        raise ValueError(
            "SamplingParams.exclude_input_from_output=False is not supported: join prompt and text yourself"
        )


def _check_lengths(params: SamplingParams) -> None:
    max_tokens, min_tokens = params.max_tokens, params.min_tokens
    if max_tokens is not None:
        _require(
            _is_int(max_tokens) and max_tokens >= 1, "max_tokens", max_tokens, "must be a whole number >= 1"
        )
    _require(_is_int(min_tokens) and min_tokens >= 0, "min_tokens", min_tokens, "must be a whole number >= 0")
    if max_tokens is not None:
        _require(
            min_tokens <= max_tokens, "min_tokens", min_tokens, f"must not exceed max_tokens={max_tokens}"
        )
    keep = params.truncate_prompt_tokens
    if keep is not None:
        _require(_is_int(keep) and keep >= 1, "truncate_prompt_tokens", keep, "must be a whole number >= 1")


def _check_stops(params: SamplingParams) -> None:
    if params.end_id is not None:
        _require(
            _is_int(params.end_id) and params.end_id >= -1,
            "end_id",
            params.end_id,
            "must be a token id or -1",
        )
    stop = params.stop
    if stop is not None and not isinstance(stop, str):
        _require(isinstance(stop, Sequence), "stop", stop, "must be a string or a list of strings")
    few = len(params.stop_strings) <= MAX_STOP_STRINGS
    _require(
        few, "stop", f"[{len(params.stop_strings)} strings]", f"at most {MAX_STOP_STRINGS} are looked for"
    )
    for text in params.stop_strings:
        _require(
            isinstance(text, str) and text != "", "stop", stop, "every stop string must be a non-empty string"
        )
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("bad_token_ids", params.bad_token_ids)):
        for token_id in ids or ():
            _require(
                _is_int(token_id) and token_id >= 0, name, ids, "must hold token ids (whole numbers >= 0)"
            )
    if params.stop_strings:
        _require(
            params.detokenize, "detokenize", False, "stop strings are found in text: drop stop or detokenize"
        )


def _check_choices(params: SamplingParams) -> None:
    _require(_is_int(params.n) and params.n >= 1, "n", params.n, "must be a whole number >= 1")
    if params.best_of is not None and params.best_of != params.n:
        raise ValueError(
            f"SamplingParams.best_of={params.best_of!r} is not supported beside n={params.n}: "
            "candidates are not ranked, so ask for n choices"
        )
    if params.seed is not None:
        within = _is_int(params.seed) and -(2**63) <= params.seed < 2**63
        _require(within, "seed", params.seed, "must be a whole number that fits 64 bits")
    if params.logprobs is not None:
        within = _is_int(params.logprobs) and 0 <= params.logprobs <= MAX_LOGPROBS
        _require(within, "logprobs", params.logprobs, f"must be a whole number from 0 to {MAX_LOGPROBS}")


def _check_distribution(params: SamplingParams) -> None:
    temperature, top_k, top_p, min_p = params.temperature, params.top_k, params.top_p, params.min_p
    if temperature is not None:
        _require(
            _is_finite(temperature) and temperature >= 0, "temperature", temperature, "must be a number >= 0"
        )
    if top_k is not None:
        _require(_is_int(top_k) and top_k >= 0, "top_k", top_k, "must be a whole number >= 0 (0 means all)")
    if top_p is not None:
        _require(_is_finite(top_p) and 0 <= top_p <= 1, "top_p", top_p, "must be a number from 0 to 1")
    if min_p is not None:
        _require(_is_finite(min_p) and 0 <= min_p <= 1, "min_p", min_p, "must be a number from 0 to 1")


def _check_penalties(params: SamplingParams) -> None:
    repetition = params.repetition_penalty
    _require(
        _is_finite(repetition) and repetition > 0, "repetition_penalty", repetition, "must be a number > 0"
    )
    for name, value in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        _require(_is_finite(value) and -2 <= value <= 2, name, value, "must be a number from -2 to 2")
    for token_id, bias in (params.logit_bias or {}).items():
        _require(_is_int(token_id) and token_id >= 0, "logit_bias", token_id, "keys must be token ids")
        _require(_is_finite(bias), "logit_bias", bias, "values must be finite numbers")
