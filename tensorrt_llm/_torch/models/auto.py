# SPDX-License-Identifier: Apache-2.0
"""From a model's name or folder to the model."""

from importlib import resources
from pathlib import Path

import torch

from tensorrt_llm._torch.models.checkpoint import load_weights
from tensorrt_llm._torch.models.config import load_config
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM

PACKAGED_MODELS = ("kimi-k3-tiny",)


def resolve_model_folder(model: str | Path) -> Path:
    """The folder of a packaged model's name or of a path; ValueError says what is known."""
    path = Path(model)
    if path.is_dir():
        return path
    if str(model) in PACKAGED_MODELS:
        return Path(str(resources.files("tensorrt_llm") / "assets" / str(model)))
    raise ValueError(
        f"model={str(model)!r} is neither a folder nor a packaged model ({', '.join(PACKAGED_MODELS)}): "
        "give the folder of a checkpoint with config.json and *.safetensors"
    )


def load_model(model: str | Path, dtype: torch.dtype, device: str) -> KimiForCausalLM:
    """Build and load the model in `dtype` on `device`, ready for inference."""
    folder = resolve_model_folder(model)
    config = load_config(folder)
    causal_lm = KimiForCausalLM(config, dtype)
    load_weights(causal_lm, folder)
    causal_lm.to(device).eval().requires_grad_(False).prepare()
    return causal_lm
