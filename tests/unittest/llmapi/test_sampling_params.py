# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from tensorrt_llm import SamplingParams

REFUSED = [
    ("max_tokens", 0, "whole number >= 1"),
    ("max_tokens", 2.5, "whole number >= 1"),
    ("max_tokens", True, "whole number >= 1"),
    ("min_tokens", -1, "whole number >= 0"),
    ("min_tokens", 33, "must not exceed max_tokens=32"),
    ("truncate_prompt_tokens", 0, "whole number >= 1"),
    ("end_id", -2, "token id or -1"),
    ("stop", "", "non-empty"),
    ("stop", ["a", ""], "non-empty"),
    ("stop", ["a", 3], "non-empty"),
    ("stop", 3, "list of strings"),
    ("stop", ["a"] * 65, "at most 64"),
    ("stop_token_ids", [-1], "token ids"),
    ("bad_token_ids", ["a"], "token ids"),
    ("n", 0, "whole number >= 1"),
    ("seed", 2**63, "64 bits"),
    ("seed", 1.5, "64 bits"),
    ("logprobs", 21, "from 0 to 20"),
    ("logprobs", True, "from 0 to 20"),
    ("temperature", -0.1, "number >= 0"),
    ("temperature", float("nan"), "number >= 0"),
    ("top_k", -1, "0 means all"),
    ("top_p", -0.1, "from 0 to 1"),
    ("top_p", 1.1, "from 0 to 1"),
    ("min_p", 1.5, "from 0 to 1"),
    ("repetition_penalty", 0.0, "> 0"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("logit_bias", {-1: 1.0}, "keys must be token ids"),
    ("logit_bias", {1: float("inf")}, "finite"),
    ("best_of", 2, "beside n=1"),
    ("use_beam_search", True, "not supported: beam search"),
    ("embedding_bias", object(), "not supported: give the biases"),
    ("logits_processor", object(), "not supported"),
    ("length_penalty", 1.0, "not supported"),
    ("early_stopping", 1, "not supported"),
    ("top_p_min", 0.1, "not supported"),
    ("top_p_reset_ids", 1, "not supported"),
    ("top_p_decay", 0.5, "not supported"),
    ("no_repeat_ngram_size", 3, "not supported"),
    ("bad", ["word"], "not supported: .*bad_token_ids"),
    ("prompt_logprobs", 1, "not supported"),
    ("return_context_logits", True, "not supported"),
    ("return_generation_logits", True, "not supported"),
    ("exclude_input_from_output", False, "not supported"),
    ("additional_model_outputs", ["x"], "not supported"),
    ("guided_decoding", {"json": {}}, "not supported"),
    ("thinking_token_budget", 5, "not supported"),
]


@pytest.mark.parametrize(
    ("name", "value", "rule"), REFUSED, ids=[f"{name}={str(value)[:20]}" for name, value, _ in REFUSED]
)
def test_what_is_wrong_or_not_supported_is_named_with_a_remedy(name: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^SamplingParams\.{name}=.*{rule}"):
        SamplingParams(**{name: value})


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="found in text"):
        SamplingParams(stop="a", detokenize=False)


def test_unknown_parameter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)


@pytest.mark.parametrize(
    ("given", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0, "top_p": 0.5}, True),
        ({"top_k": 1, "temperature": 2.0}, True),
        ({"top_k": 0}, True),
        ({"top_p": 0.0, "temperature": 1.0}, True),
        ({"temperature": 1.0}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
    ],
)
def test_greedy(given: dict[str, float], greedy: bool) -> None:
    assert SamplingParams(**given).greedy is greedy


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_stop_strings_are_a_tuple(stop: object, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


def test_replace_checks_again_and_values_stay() -> None:
    params = SamplingParams(max_tokens=None, min_tokens=100, best_of=1)
    assert dataclasses.replace(params, max_tokens=100).max_tokens == 100
    with pytest.raises(ValueError, match="must not exceed"):
        dataclasses.replace(params, max_tokens=99)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 0
