# SPDX-License-Identifier: Apache-2.0
"""The text model's configuration, read from a checkpoint's `config.json`.

One class covers Kimi K3 and Kimi Linear; what differs between them are the fields below, never a model's
name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm._torch.modules.activation import GatedActivation
from tensorrt_llm._torch.modules.kda.attention import KdaConfig
from tensorrt_llm._torch.modules.mla import MlaConfig
from tensorrt_llm._torch.modules.moe import MoeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiTextConfig:
    """The whole text model; layer sets hold 0-based indices."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    dense_intermediate_size: int
    num_dense_layers: int
    attn_res_block_size: int | None
    kda_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    kda: KdaConfig | None
    mla: MlaConfig | None
    moe: MoeConfig | None
    activation: GatedActivation = field(default_factory=GatedActivation)
    eos_token_ids: tuple[int, ...] = ()

    def is_attention_layer(self, layer_idx: int) -> bool:
        return layer_idx in self.attention_layers

    def is_dense_layer(self, layer_idx: int) -> bool:
        return layer_idx < self.num_dense_layers


class _Fields:
    """Reads typed values of a JSON object and names the key in every complaint."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def require(self, key: str) -> Any:
        if self._values.get(key) is None:
            raise ValueError(f"{self._where}{key} is missing: the model cannot be built without it")
        return self._values[key]

    def positive(self, key: str) -> int:
        value = self.require(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{self._where}{key}={value!r} must be a positive whole number")
        return value

    def child(self, key: str) -> "_Fields":
        return _Fields(self._values.get(key) or {}, f"{self._where}{key}.")


def _layer_schedule(linear: _Fields, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The 1-based lists of the file as 0-based tuples, each layer in exactly one."""
    kda = tuple(sorted(i - 1 for i in linear.get("kda_layers") or ()))
    full = tuple(sorted(i - 1 for i in linear.get("full_attn_layers") or ()))
    if sorted((*kda, *full)) != list(range(num_layers)):
        raise ValueError(
            "linear_attn_config.kda_layers and full_attn_layers must name each of the layers "
            f"1..{num_layers} exactly once (counted from 1), but give {len(kda)} and {len(full)} of them"
        )
    return kda, full


def _activation(text: _Fields) -> GatedActivation:
    act = text.get("hidden_act", "silu")
    if act == "silu":
        return GatedActivation()
    if act == "situ":
        beta, linear = text.require("activation_situ_beta"), text.get("activation_situ_linear_beta")
        return GatedActivation(
            situ_beta=float(beta), situ_linear_beta=None if linear is None else float(linear)
        )
    raise ValueError(f"hidden_act={act!r} is not supported: use 'silu' or 'situ'")


def _kda_config(linear: _Fields) -> KdaConfig:
    bound = linear.get("gate_lower_bound")
    if bound is not None and bound >= 0:
        raise ValueError(f"linear_attn_config.gate_lower_bound={bound} must be negative")
    return KdaConfig(
        num_heads=linear.positive("num_heads"),
        head_dim=linear.positive("head_dim"),
        conv_width=linear.positive("short_conv_kernel_size"),
        full_rank_gate=bool(linear.get("use_full_rank_gate", False)),
        lower_bound=None if bound is None else float(bound),
    )


def _mla_config(text: _Fields) -> MlaConfig:
    if not text.get("mla_use_nope", False):
        raise ValueError("mla_use_nope must be true: rotary latent attention is not implemented")
    return MlaConfig(
        num_heads=text.positive("num_attention_heads"),
        q_lora_rank=text.get("q_lora_rank"),
        kv_lora_rank=text.positive("kv_lora_rank"),
        qk_nope_head_dim=text.positive("qk_nope_head_dim"),
        qk_rope_head_dim=text.positive("qk_rope_head_dim"),
        v_head_dim=text.positive("v_head_dim"),
        output_gate=bool(text.get("mla_use_output_gate", False)),
    )


def _moe_config(text: _Fields) -> MoeConfig | None:
    if not text.get("num_experts"):
        return None
    router, groups = text.get("moe_router_activation_func", "sigmoid"), text.get("num_expert_group", 1)
    if router != "sigmoid" or (groups or 1) != 1:
        raise ValueError(
            f"moe_router_activation_func={router!r} with num_expert_group={groups} is not supported: "
            "only the sigmoid router over one group is"
        )
    width = text.positive("moe_intermediate_size")
    config = MoeConfig(
        num_experts=text.positive("num_experts"),
        experts_per_token=text.positive("num_experts_per_token"),
        intermediate_size=width,
        shared_intermediate_size=width * int(text.get("num_shared_experts", 0) or 0),
        latent_dim=text.get("routed_expert_hidden_size"),
        latent_norm=bool(text.get("latent_moe_use_norm", False)),
        renormalize=bool(text.get("moe_renormalize", True)),
        routed_scaling_factor=float(text.get("routed_scaling_factor", 1.0)),
    )
    if config.experts_per_token > config.num_experts:
        raise ValueError(
            f"num_experts_per_token={config.experts_per_token} exceeds num_experts={config.num_experts}"
        )
    return config


def _eos_ids(*sources: _Fields) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))


def parse_config(raw: Mapping[str, Any]) -> KimiTextConfig:
    """The configuration from `config.json`'s object, multimodal wrapper or text model alone.

    ValueError names the key that is missing or out of range.
    """
    top = _Fields(raw, "config.json: ")
    text = _Fields(raw.get("text_config") or raw, "config.json: ")
    linear = text.child("linear_attn_config")
    num_layers = text.positive("num_hidden_layers")
    kda_layers, attention_layers = _layer_schedule(linear, num_layers)
    moe = _moe_config(text)
    if text.get("tie_word_embeddings", False):
        raise ValueError("tie_word_embeddings=true is not supported: the head has a weight of its own")
    return KimiTextConfig(
        hidden_size=text.positive("hidden_size"),
        vocab_size=text.positive("vocab_size"),
        num_layers=num_layers,
        max_position_embeddings=int(text.get("max_position_embeddings", 1 << 20)),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-5)),
        dense_intermediate_size=text.positive("intermediate_size"),
        num_dense_layers=int(text.get("first_k_dense_replace", 0)) if moe else num_layers,
        attn_res_block_size=text.get("attn_res_block_size"),
        kda_layers=kda_layers,
        attention_layers=attention_layers,
        kda=_kda_config(linear) if kda_layers else None,
        mla=_mla_config(text) if attention_layers else None,
        moe=moe,
        activation=_activation(text),
        eos_token_ids=_eos_ids(text, top),
    )


def load_config(folder: Path) -> KimiTextConfig:
    """`parse_config` of the folder's config.json; ValueError when the file is absent or no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no config.json: give the folder of a Kimi K3 or Kimi Linear checkpoint"
        )
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return parse_config(raw)
