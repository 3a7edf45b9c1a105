# SPDX-License-Identifier: Apache-2.0
"""`LLM` on a real loop, cache and model, whose weights are random."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig, MambaStateConfig, NGramDecodingConfig, RequestOutput
from tests.unittest.executor_api.fake_engine import PATIENCE_S
from tests.unittest.executor_api.toy_checkpoint import write_toy_checkpoint

NGRAM = NGramDecodingConfig(max_draft_len=3, round_cost_per_token=0.0)
PROMPTS = ["def x", "abab" * 10, "#", "ST" * 40 + "x"]
LIMITS: dict[str, Any] = {"device": "cpu", "max_batch_size": 3, "max_seq_len": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    """Without speculation."""
    with LLM(checkpoint, **LIMITS) as llm:
        yield llm


def generate(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert isinstance(outputs, list)
    return outputs


@pytest.mark.parametrize("scheme", ["records", "replay", "intermediate"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5, n=2),
        SamplingParams(max_tokens=60, stop=["\ufffd\ufffd", "a"], logprobs=2),
    ],
    ids=["greedy", "sampled", "stopped"],
)
def test_drafts_change_nothing_but_the_number_of_steps(
    checkpoint: Path, plain: LLM, scheme: str, params: SamplingParams
) -> None:
    expected = generate(plain, params)
    with LLM(
        checkpoint, speculative_config=NGRAM, model_kwargs={"kda_verify_scheme": scheme}, **LIMITS
    ) as llm:
        assert (llm.description.verify_scheme, llm.description.max_draft_len) == (scheme, 3)
        outputs = generate(llm, params)
        assert llm.snapshot().draft_tokens_total > 0
    for output, reference in zip(outputs, expected, strict=True):
        for choice, known in zip(output.outputs, reference.outputs, strict=True):
            assert choice.token_ids == known.token_ids and choice.text == known.text
            assert (choice.finish_reason, choice.stop_reason) == (known.finish_reason, known.stop_reason)
            assert choice.logprobs == known.logprobs


def test_a_tokenizer_of_one_s_own_and_none(checkpoint: Path, plain: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    known = plain.generate("def x", params)
    for tokenizer in (checkpoint / "tokenizer.json", str(checkpoint), plain.tokenizer):
        with LLM(checkpoint, tokenizer, **LIMITS) as llm:
            assert llm.generate("def x", params).outputs[0].text == known.outputs[0].text
    with LLM(checkpoint, skip_tokenizer_init=True, **LIMITS) as llm:
        choice = llm.generate(known.prompt_token_ids, params).outputs[0]
        assert (choice.token_ids, choice.text) == (known.outputs[0].token_ids, "")


def test_records_are_kept_when_asked_and_described(checkpoint: Path) -> None:
    with LLM(checkpoint, speculative_config=NGRAM, model_kwargs={"kda_token_states": True}, **LIMITS) as llm:
        assert llm.description.verify_scheme == "records" and llm.description.records_bytes > 0
    with LLM(checkpoint, speculative_config=NGRAM, model_kwargs={"kda_token_states": False}, **LIMITS) as llm:
        assert llm.description.verify_scheme == "replay" and llm.description.records_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kda_token_states": True, "kda_verify_scheme": "replay"}, "contradicts"),
        ({"kda_token_states": False, "kda_verify_scheme": "records"}, "contradicts"),
    ],
)
def test_contradictions_are_refused(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, speculative_config=NGRAM, model_kwargs=options, **LIMITS)
    with pytest.raises(ValueError, match="enable_block_reuse=True cannot be combined with draft records"):
        LLM(
            checkpoint,
            speculative_config=NGRAM,
            model_kwargs={"kda_token_states": True},
            kv_cache_config=KvCacheConfig(enable_block_reuse=True),
            **LIMITS,
        )


def test_logprobs_are_those_of_the_model(plain: LLM) -> None:
    choice = plain.generate("def x", SamplingParams(max_tokens=5, logprobs=3, ignore_eos=True)).outputs[0]
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert (next(iter(entry)), entry[token_id].rank, len(entry)) == (token_id, 1, 3)
        assert sum(math.exp(value.logprob) for value in entry.values()) < 1


def test_limits_are_named_and_the_next_request_runs(plain: LLM) -> None:
    with pytest.raises(ValueError, match="256 tokens; with max_seq_len=256"):
        plain.generate("a" * 256)
    with pytest.raises(ValueError, match="prompt_token_ids has a token outside the vocabulary"):
        plain.generate([1, 9999])
    with pytest.raises(ValueError, match="logit_bias"):
        plain.generate("a", SamplingParams(bad_token_ids=[9999]))
    longest = plain.generate("a" * 250, SamplingParams(max_tokens=None, ignore_eos=True)).outputs[0]
    assert (longest.length, longest.finish_reason) == (6, "length")


def test_banned_tokens_are_not_sampled(plain: LLM) -> None:
    first = plain.generate("def x", SamplingParams(max_tokens=1)).outputs[0].token_ids[0]
    params = SamplingParams(max_tokens=20, bad_token_ids=[first], ignore_eos=True)
    assert first not in plain.generate("def x", params).outputs[0].token_ids


def test_abort_gives_the_slot_back(plain: LLM) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    before = plain.snapshot().generation_tokens_total
    running = [plain.generate_async("a", params, streaming=True) for _ in range(3)]
    for output in running:
        next(iter(output))
        output.abort()
    for output in running:
        assert output.result(PATIENCE_S).outputs[0].finish_reason == "cancelled"
    assert plain.snapshot().generation_tokens_total - before < 600
    assert plain.generate("def x").finished
    snapshot = plain.snapshot()
    assert (snapshot.num_requests_running, snapshot.used_pages) == (0, 0)


def test_statistics_have_the_names_users_know(plain: LLM) -> None:
    plain.get_stats()
    plain.generate("def x", SamplingParams(max_tokens=4, ignore_eos=True))
    stats = plain.get_stats()
    assert len(stats) == 4 and plain.get_stats() == []
    assert {"iter", "iterLatencyMS", "kvCacheStats", "inflightBatchingStats"} <= set(stats[0])


def test_one_llm_s_end_leaves_others_alone(checkpoint: Path, plain: LLM) -> None:
    llm = LLM(checkpoint, **LIMITS)
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("a")
    assert plain.generate("a").finished


@pytest.mark.parametrize(
    ("snapshots", "cached_tokens"),
    [
        ({"periodic_snapshot_interval": 64}, 128),
        ({"additional_snapshot_offsets_from_start": (64,)}, 64),
        ({}, 0),
    ],
    ids=["periodic", "offset", "none"],
)
@pytest.mark.parametrize("scheme", ["replay", "intermediate"])
def test_a_prompt_is_reused_up_to_its_last_snapshot(
    checkpoint: Path, plain: LLM, scheme: str, snapshots: dict[str, Any], cached_tokens: int
) -> None:
    prompt, params = "#x" * 75, SamplingParams(max_tokens=30, ignore_eos=True)
    cache = KvCacheConfig(enable_block_reuse=True, mamba_state_config=MambaStateConfig(**snapshots))
    options: dict[str, Any] = {"speculative_config": NGRAM, "model_kwargs": {"kda_verify_scheme": scheme}}
    with LLM(checkpoint, kv_cache_config=cache, **options, **LIMITS) as llm:
        outputs = [llm.generate(prompt, params, use_tqdm=False) for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, cached_tokens]
    known = plain.generate(prompt, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [known.outputs[0].token_ids] * 2
