# SPDX-License-Identifier: Apache-2.0
import inspect
from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm import LLM, TorchLlmArgs
from tensorrt_llm.llmapi import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)
from tensorrt_llm.llmapi.llm_args import read_yaml
from tensorrt_llm.llmapi.strict_model import parse

NGRAM = {"decoding_type": "NGram", "max_draft_len": 3}

REFUSED = [
    ({"max_batchsize": 3}, r"^max_batchsize: there is no 'max_batchsize'; .*'max_batch_size'$"),
    ({"enable_lora": True}, r"^enable_lora: 'enable_lora' is not offered here$"),
    ({"max_batch_size": 0}, r"^max_batch_size: .*greater than 0 \(it is 0\)$"),
    ({"max_seq_len": "long"}, r"^max_seq_len: .*\(it is 'long'\)$"),
    ({"device": "tpu"}, r"^device: .*'auto', 'cpu' or 'cuda'.*'tpu'"),
    ({"dtype": "int4"}, r"^dtype: "),
    ({"tensor_parallel_size": 2}, r"^tensor_parallel_size: it is 2.*one rank"),
    ({"tokenizer": 3}, r"^tokenizer is a int"),
    ({"tokenizer": "x", "skip_tokenizer_init": True}, "contradict"),
    ({"kv_cache_config": 3}, r"^kv_cache_config: "),
    (
        {"kv_cache_config": {"free_gpu_memory_fracton": 0.5}},
        r"^kv_cache_config\.free_gpu_memory_fracton: there is no .*'free_gpu_memory_fraction'$",
    ),
    ({"kv_cache_config": {"free_gpu_memory_fraction": 0}}, r"^kv_cache_config\.free_gpu_memory_fraction: "),
    ({"kv_cache_config": {"max_util_for_resume": 1.5}}, r"^kv_cache_config\.max_util_for_resume: "),
    ({"kv_cache_config": {"pool_ratio": [0.5, 0.4]}}, r"^kv_cache_config\.pool_ratio: .*sum to 0\.9"),
    ({"kv_cache_config": {"pool_ratio": [1.5, -0.5]}}, r"^kv_cache_config\.pool_ratio\[1\]: "),
    ({"kv_cache_config": {"disk_cache_size": 5}}, r"^kv_cache_config: disk_cache_size needs disk_cache_path"),
    ({"kv_cache_config": {"disk_cache_path": "/no/such"}}, r"^kv_cache_config: .*not an existing folder"),
    ({"kv_cache_config": {"dtype": "fp8"}}, r"^kv_cache_config\.dtype: .*not offered"),
    (
        {"kv_cache_config": {"mamba_state_config": {"interval": 3}}},
        r"^kv_cache_config\.mamba_state_config\.interval: .*'periodic_snapshot_interval'",
    ),
    ({"kv_cache_config": {"host_cache_size": 5}}, r"^kv_cache_config\.host_cache_size: .*MAX_UTILIZATION"),
    (
        {"scheduler_config": {"capacity_scheduler_policy": "STATIC"}},
        r"^scheduler_config\.capacity_scheduler_pol",
    ),
    (
        {"scheduler_config": {"waiting_queue_policy": 1}},
        r"^scheduler_config\.waiting_queue_policy: .*not offered",
    ),
    (
        {"kv_cache_config": {"max_attention_window": [9]}},
        r"^kv_cache_config\.max_attention_window is not offered",
    ),
    (
        {"kv_cache_config": {"enable_kv_pool_rebalance": True}},
        r"^kv_cache_config\.enable_kv_pool_rebalance is not",
    ),
    (
        {"kv_cache_config": {"use_kv_cache_manager_v2": False}},
        r"^kv_cache_config\.use_kv_cache_manager_v2=False",
    ),
    ({"speculative_config": {"max_draft_len": 3}}, r"^speculative_config: .*decoding_type"),
    ({"speculative_config": {"decoding_type": "Eagle3"}}, r"^speculative_config: .*'Eagle3'.*'NGram'"),
    (
        {"speculative_config": {"decoding_type": "NGram"}},
        r"^speculative_config\.max_draft_len: Field required",
    ),
    ({"speculative_config": {**NGRAM, "max_draft_len": 0}}, r"^speculative_config\.max_draft_len: "),
    ({"speculative_config": {**NGRAM, "ngram": 3}}, r"^speculative_config\.ngram: there is no 'ngram'"),
    (
        {"speculative_config": {**NGRAM, "draft_len_schedule": {2: 1}}},
        r"^speculative_config: draft_len_schedule is \{2: 1\}",
    ),
    (
        {"speculative_config": {**NGRAM, "max_concurrency": 4, "draft_len_schedule": {1: 3}}},
        r"^speculative_config: max_concurrency and draft_len_schedule",
    ),
    ({"model_kwargs": {"kda_token_state": True}}, r"^model_kwargs\.kda_token_state: .*'kda_token_states'$"),
    ({"model_kwargs": {"kda_verify_scheme": "undo"}}, r"^model_kwargs\.kda_verify_scheme: .*'undo'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_faults_are_named_by_their_full_path(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(TorchLlmArgs, {"model": "m", **options})


def test_several_faults_are_told_together() -> None:
    with pytest.raises(ValueError, match=r"max_batch_size: .*; kv_cache_config\.max_tokens: "):
        parse(TorchLlmArgs, {"model": "m", "max_batch_size": -1, "kv_cache_config": {"max_tokens": -1}})


def test_llm_refuses_before_it_looks_for_the_model() -> None:
    with pytest.raises(TypeError, match="no 'max_batchsize'; the nearest valid name is 'max_batch_size'"):
        LLM("/no/such/model", max_batchsize=3)
    with pytest.raises(TypeError, match="'enable_lora' is not offered"):
        LLM("/no/such/model", enable_lora=True)
    with pytest.raises(ValueError, match="^max_batch_size: .*greater than 0"):
        LLM("/no/such/model", max_batch_size=0)
    with pytest.raises(ValueError, match=r"/no/such/model.*neither a folder nor a packaged model"):
        LLM("/no/such/model")


def test_what_says_off_is_allowed() -> None:
    off = {"host_cache_size": 0, "disk_cache_size": 0, "enable_kv_pool_rebalance": False}
    assert parse(TorchLlmArgs, {"model": "m", "kv_cache_config": off}).kv_cache_config.host_cache_size == 0


def test_classes_refuse_by_themselves() -> None:
    with pytest.raises(ValueError, match="nearest valid name is 'max_tokens'"):
        KvCacheConfig(max_token=3)
    with pytest.raises(ValueError, match="Instance is frozen"):
        KvCacheConfig().max_tokens = 3


def test_keywords_of_llm_are_the_arguments() -> None:
    keywords = {
        name: p.default for name, p in inspect.signature(LLM.__init__).parameters.items() if name != "self"
    }
    assert set(keywords) == set(TorchLlmArgs.model_fields)
    by_default = TorchLlmArgs(model="m")
    given = {name: value for name, value in keywords.items() if name != "model" and value is not None}
    assert TorchLlmArgs(model="m", **given) == by_default


def test_executor_config_takes_everything_over() -> None:
    args = parse(
        TorchLlmArgs,
        {
            "model": "m",
            "device": "cpu",
            "dtype": "float32",
            "max_batch_size": 3,
            "max_num_tokens": 100,
            "max_seq_len": 50,
            "enable_chunked_prefill": True,
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
            "speculative_config": {**NGRAM, "max_matching_ngram_size": 5},
            "kv_cache_config": {
                "max_tokens": 7,
                "host_cache_size": 9,
                "block_reuse_config": {"policy": "per_request"},
            },
            "model_kwargs": {"kda_token_states": True},
            "max_stats_len": 5,
            "enable_iter_perf_stats": False,
        },
    )
    config = args.to_executor_config(Path("folder"))
    assert (config.model, config.device, config.dtype) == ("folder", "cpu", "float32")
    assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len) == (3, 100, 50)
    assert config.enable_chunked_prefill and not config.enable_iter_perf_stats and config.max_stats_len == 5
    assert config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    assert config.kv_cache_config.host_cache_size == 9
    assert config.speculation is not None
    assert (config.speculation.max_draft_len, config.speculation.max_matching_ngram_size) == (3, 5)
    assert config.kv_cache_config.max_tokens == 7
    assert config.kv_cache_config.block_reuse_config.policy == "per_request"
    assert dict(config.model_kwargs) == {"kda_token_states": True}


@pytest.mark.parametrize(("options", "told"), [({}, None), ({"enable_block_reuse": True}, True)])
def test_block_reuse_tells_whether_it_was_set(options: dict[str, bool], told: bool | None) -> None:
    args = TorchLlmArgs(model="m", kv_cache_config=KvCacheConfig(**options))
    assert args.to_executor_config(Path("m")).enable_block_reuse is told


def test_a_user_s_drafter_reaches_the_executor() -> None:
    class Drafter:
        def prepare_draft_tokens(self, scheduled_requests: list[object]) -> list[list[int]]:
            return [[] for _ in scheduled_requests]

    drafter = Drafter()
    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=drafter)
    args = TorchLlmArgs(model="m", speculative_config=config)
    speculation = args.to_executor_config(Path("m")).speculation
    assert speculation is not None and speculation.drafter is drafter
    with pytest.raises(ValueError, match="prepare_draft_tokens"):
        UserProvidedDecodingConfig(max_draft_len=2, drafter=object())


def test_spec_of_ngram_drafting() -> None:
    config = NGramDecodingConfig(max_draft_len=4, draft_len_schedule={1: 4, 8: 1})
    assert config.to_spec().draft_len_at(9) == 0
    assert config.to_spec().draft_len_at(8) == 1


def test_yaml_wins_over_other_arguments(tmp_path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max_batch_size: 2\nspeculative_config:\n  decoding_type: NGram\n  max_draft_len: 5\n")
    args = TorchLlmArgs.from_yaml(file, {"model": "m", "max_batch_size": 9, "max_seq_len": 32})
    assert (args.max_batch_size, args.max_seq_len) == (2, 32)
    assert isinstance(args.speculative_config, NGramDecodingConfig)


@pytest.mark.parametrize(
    ("content", "message"),
    [("- 1\n", "must be a mapping"), ("a: [1", "is not YAML"), ("a: 1\na: 2\n", "'a' twice")],
)
def test_malformed_yaml_is_named(tmp_path, content: str, message: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"options\.yaml.*{message}"):
        read_yaml(file)


def test_missing_and_empty_yaml(tmp_path) -> None:
    with pytest.raises(ValueError, match="none.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "empty.yaml") == {}
