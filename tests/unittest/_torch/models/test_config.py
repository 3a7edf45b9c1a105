# SPDX-License-Identifier: Apache-2.0
"""Reading config.json."""

from copy import deepcopy
from pathlib import Path

import pytest

from tensorrt_llm._torch.models.config import load_config, parse_config
from tests.unittest._torch.kimi_small import KIMI_LINEAR_CONFIG, RAW_CONFIG


def test_schedule_is_counted_from_one_in_the_file_and_from_zero_inside() -> None:
    config = parse_config(RAW_CONFIG)
    assert config.attention_layers == (2, 4)
    assert config.kda_layers == (0, 1, 3)


def test_the_multimodal_wrapper_is_looked_through() -> None:
    wrapped = {"model_type": "kimi_k3", "eos_token_id": [7, 8], "text_config": RAW_CONFIG}
    assert parse_config(wrapped).eos_token_ids == (0, 7, 8)
    assert parse_config(wrapped).kda == parse_config(RAW_CONFIG).kda


def test_kimi_linear_differs_by_switches_only() -> None:
    config = parse_config(KIMI_LINEAR_CONFIG)
    assert config.attn_res_block_size is None
    assert config.moe.latent_dim is None
    assert config.kda.lower_bound is None and not config.kda.full_rank_gate
    assert config.mla.q_lora_rank is None and not config.mla.output_gate
    assert config.activation.situ_beta is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size=0 must be a positive whole number"),
        ({"num_hidden_layers": 6}, "must name each of the layers 1..6 exactly once"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported: use 'silu' or 'situ'"),
        ({"mla_use_nope": False}, "mla_use_nope must be true"),
        ({"num_expert_group": 4}, "num_expert_group=4 is not supported"),
        ({"num_experts_per_token": 9}, "num_experts_per_token=9 exceeds num_experts=4"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=true is not supported"),
    ],
)
def test_each_mistake_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(RAW_CONFIG | change)


def test_a_positive_gate_bound_is_refused() -> None:
    raw = deepcopy(RAW_CONFIG)
    raw["linear_attn_config"]["gate_lower_bound"] = 5.0
    with pytest.raises(ValueError, match="gate_lower_bound=5.0 must be negative"):
        parse_config(raw)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_config(tmp_path)
