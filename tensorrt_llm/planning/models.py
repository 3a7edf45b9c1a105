# SPDX-License-Identifier: Apache-2.0
"""The models that can be planned for: built-in configurations by name, or a checkpoint's config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tensorrt_llm._torch.models.auto import PACKAGED_MODELS, resolve_model_folder
from tensorrt_llm._torch.models.config import KimiTextConfig, parse_config
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM, ModelTraits
from tensorrt_llm.runtime.kv_cache_manager_v2._math import cdiv

BUILT_IN = ("kimi-k3", "kimi-linear-48b")

DTYPE = torch.bfloat16
"""Of weights that are not quantised, of attention pages and of convolution windows: what a GPU runs."""

_MXFP4 = "mxfp4-pack-quantized"
_SCALE_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuantization:
    """Routed experts' matrices: `weight_packed`, num_bits a value, and `weight_scale`, a byte per group."""

    num_bits: int
    group_size: int

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a [rows, columns] matrix, whose groups run along a row."""
        return rows * (cdiv(columns * self.num_bits, 8) + cdiv(columns, self.group_size) * _SCALE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model without its weights. `quantization` is that of the routed experts; None is DTYPE."""

    name: str
    config: KimiTextConfig
    quantization: GroupQuantization | None
    traits: ModelTraits


def skeleton(config: KimiTextConfig) -> KimiForCausalLM:
    """The model with tensors that have shapes and no memory."""
    with torch.device("meta"):
        return KimiForCausalLM(config, DTYPE)


def find_model(name: str) -> PlannedModel:
    """The model of a built-in name, a packaged model's name, a config.json or a folder with one.

    ValueError, in one line, where there is none, where it is malformed, or where it is not a hybrid model.
    """
    raw = _read(name)
    config = parse_config(raw)
    if not config.kda_layers:
        raise ValueError(
            f"{name} has no KDA layers, so it keeps no state and has no drafts to undo: plan for a hybrid "
            f"model, such as {BUILT_IN[0]}"
        )
    if not config.attention_layers:
        raise ValueError(
            f"{name} has no attention layers to take what the states leave of the quota: name some in "
            "linear_attn_config.full_attn_layers"
        )
    return PlannedModel(
        name=_short_name(name),
        config=config,
        quantization=_quantization(raw),
        traits=skeleton(config).traits,
    )


def _short_name(name: str) -> str:
    """What the report calls the model: a path's last folder."""
    path = Path(name)
    if path.is_file():
        path = path.resolve().parent if path.name == "config.json" else path.with_suffix("")
    return path.resolve().name if path.is_dir() else path.name


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if name in BUILT_IN:
        text = (resources.files("tensorrt_llm.planning") / "configs" / f"{name}.json").read_text()
    elif path.is_file():
        text = _read_text(path)
    elif path.is_dir() or name in PACKAGED_MODELS:
        text = _read_text(resolve_model_folder(name) / "config.json")
    else:
        raise ValueError(
            f"{name!r} is neither a model known here ({', '.join((*BUILT_IN, *PACKAGED_MODELS))}) nor a "
            "config.json nor a checkpoint folder"
        )
    return _parse_json(text, name)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _parse_json(text: str, name: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{name} holds a {type(raw).__name__}: a config.json is an object")
    return raw


def _quantization(raw: Mapping[str, Any]) -> GroupQuantization | None:
    text = raw.get("text_config") or raw
    quantization = text.get("quantization_config") or raw.get("quantization_config")
    if not quantization:
        return None
    form = quantization.get("format") or quantization.get("quant_method")
    if form != _MXFP4:
        raise ValueError(
            f"quantization_config.format is {form!r}, whose sizes are not known here: plan for {_MXFP4!r} "
            "(of the routed experts) or remove quantization_config"
        )
    groups = (quantization.get("config_groups") or {}).values()
    weights: Mapping[str, Any] = next((group.get("weights") or {} for group in groups), {})
    return GroupQuantization(num_bits=weights.get("num_bits", 4), group_size=weights.get("group_size", 32))
