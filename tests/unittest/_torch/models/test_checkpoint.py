# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: names, shapes, padding, and what is missing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorrt_llm._torch.models.auto import resolve_model_folder
from tensorrt_llm._torch.models.checkpoint import load_weights, save_weights
from tensorrt_llm._torch.models.config import parse_config
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tests.unittest._torch.kimi_small import KIMI_LINEAR_CONFIG, RAW_CONFIG, random_model


@pytest.mark.parametrize("raw", [RAW_CONFIG, KIMI_LINEAR_CONFIG], ids=["k3", "kimi_linear"])
def test_saved_and_loaded_is_the_same_model(raw: dict, tmp_path: Path) -> None:
    model = random_model(raw)
    model.model.layers[0].self_attn.a_log.copy_(torch.tensor([0.25, -1.5]))
    save_weights(model, tmp_path / "model.safetensors", torch.float32, pad_heads_to=4)
    other = KimiForCausalLM(parse_config(raw))
    load_weights(other, tmp_path)
    for name, tensor in model.checkpoint_tensors().items():
        assert torch.equal(other.checkpoint_tensors()[name], tensor), name
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), f"{name} is covered by no checkpoint tensor"


def test_names_are_those_of_public_checkpoints(tmp_path: Path) -> None:
    model = random_model()
    names = set(model.checkpoint_tensors())
    for expected in (
        "model.layers.0.self_attn.q_conv1d.weight",
        "model.layers.0.self_attention_res_norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
        "model.layers.1.block_sparse_moe.routed_expert_norm.weight",
        "model.layers.2.self_attn.kv_a_proj_with_mqa.weight",
        "model.output_attn_res_proj.weight",
    ):
        assert expected in names
    shapes = {n: tuple(t.shape) for n, t in model.checkpoint_tensors().items()}
    assert shapes["model.layers.0.self_attn.q_conv1d.weight"] == (64, 1, 4)
    assert shapes["model.layers.0.self_attention_res_proj.weight"] == (1, 64)
    save_weights(model, tmp_path / "m.safetensors", torch.bfloat16, pad_heads_to=4)
    stored = load_file(tmp_path / "m.safetensors")
    assert stored["model.layers.0.self_attn.A_log"].shape == (4,)
    assert stored["model.layers.0.self_attn.A_log"].dtype == torch.float32
    assert stored["lm_head.weight"].dtype == torch.bfloat16


def _saved(tmp_path: Path) -> dict[str, torch.Tensor]:
    save_weights(random_model(), tmp_path / "model.safetensors", torch.float32, pad_heads_to=4)
    return load_file(tmp_path / "model.safetensors")


def test_missing_names_are_listed_before_anything_is_read(tmp_path: Path) -> None:
    stored = _saved(tmp_path)
    for i in range(2):
        del stored[f"model.layers.{i}.self_attn.dt_bias"]
    save_file(stored, tmp_path / "model.safetensors")
    model = KimiForCausalLM(parse_config(RAW_CONFIG))
    with pytest.raises(ValueError, match=r"2 tensors are missing: model.layers.0.self_attn.dt_bias, model"):
        load_weights(model, tmp_path)
    assert not model.lm_head.any()


def test_a_tail_of_a_log_that_is_no_padding_is_refused(tmp_path: Path) -> None:
    stored = _saved(tmp_path)
    stored["model.layers.0.self_attn.A_log"][3] = 1.0
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="A_log: elements beyond head 2 are padding and must be zero"):
        load_weights(KimiForCausalLM(parse_config(RAW_CONFIG)), tmp_path)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    stored = _saved(tmp_path)
    stored["lm_head.weight"] = torch.zeros(95, 64)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head.weight has shape \(95, 64\), but config.json asks for \(96, 64\)"
    ):
        load_weights(KimiForCausalLM(parse_config(RAW_CONFIG)), tmp_path)


def test_unknown_models_are_named() -> None:
    with pytest.raises(ValueError, match="model='kimi-k9' is neither a folder nor a packaged model"):
        resolve_model_folder("kimi-k9")
