# SPDX-License-Identifier: Apache-2.0
"""Models by name and by file, and what is refused about them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm.planning.models import GroupQuantization, find_model
from tests.unittest.planning.helpers import layers, small_config, write_config


def test_kimi_k3() -> None:
    model = find_model("kimi-k3")
    traits, kda = model.traits, model.traits.kda
    assert kda is not None
    assert (len(traits.kda_layers), len(traits.attention_layers), traits.num_layers) == (69, 24, 93)
    assert traits.attention_layers[-3:] == (87, 91, 92) and traits.latent_dim == 576
    assert (kda.num_heads, kda.head_dim, kda.conv_width) == (96, 128, 4)
    assert model.quantization == GroupQuantization(num_bits=4, group_size=32)


def test_kimi_linear_48b() -> None:
    model = find_model("kimi-linear-48b")
    kda, mla = model.config.kda, model.config.mla
    assert kda is not None and mla is not None
    assert (len(model.config.kda_layers), len(model.config.attention_layers)) == (20, 7)
    assert not kda.full_rank_gate and kda.lower_bound is None and mla.q_lora_rank is None
    assert model.quantization is None and model.config.attn_res_block_size is None


def test_the_packaged_model_is_known() -> None:
    assert find_model("kimi-k3-tiny").traits.num_layers == 9


def test_file_folder_and_wrapper_are_one_model(tmp_path: Path) -> None:
    path = write_config(tmp_path / "mine", small_config())
    wrapped = write_config(tmp_path / "other", {"text_config": small_config()})
    by_file, by_folder = find_model(str(path)), find_model(str(path.parent))
    assert by_file == by_folder and by_file.name == "mine"
    assert find_model(str(wrapped)).config == by_file.config


def test_a_config_of_another_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny-hybrid.json"
    path.write_text(json.dumps(small_config()))
    assert find_model(str(path)).name == "tiny-hybrid"


def test_quantisation_is_found_beside_and_inside_the_text_config(tmp_path: Path) -> None:
    form = {
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}},
    }
    inside = write_config(tmp_path / "a", small_config(quantization_config=form))
    beside = write_config(
        tmp_path / "b", {"text_config": small_config(), "quantization_config": {"format": form["format"]}}
    )
    assert find_model(str(inside)).quantization == GroupQuantization(num_bits=4, group_size=16)
    assert find_model(str(beside)).quantization == GroupQuantization(num_bits=4, group_size=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"linear_attn_config": layers(kda=(), attention=(1, 2, 3, 4, 5, 6))},
            "has no KDA layers, so it keeps no state and has no drafts to undo",
        ),
        (
            {"linear_attn_config": layers(kda=(1, 2, 3, 4, 5, 6), attention=())},
            "has no attention layers to take what the states leave",
        ),
        ({"linear_attn_config": None}, "must name each of the layers 1..6 exactly once"),
        ({"hidden_size": -1}, "hidden_size=-1 must be a positive whole number"),
        (
            {"quantization_config": {"format": "nvfp4-pack-quantized"}},
            "quantization_config.format is 'nvfp4-pack-quantized', whose sizes are not known",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.format is 'fp8'"),
    ],
)
def test_a_config_that_cannot_be_planned(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_config(tmp_path, small_config(**change))
    with pytest.raises(ValueError, match=message) as refused:
        find_model(str(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[1]", "holds a list: a config.json is an object")],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        find_model(str(path))


def test_unknown_name_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'kimi-k4' is neither a model known here \(kimi-k3, kimi-linear"):
        find_model("kimi-k4")
    with pytest.raises(ValueError, match=r"config\.json cannot be read: No such file"):
        find_model(str(tmp_path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read: it is not text"):
        find_model(str(path))
