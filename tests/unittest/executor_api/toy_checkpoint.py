# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder with a Kimi model of random weights and the toy tokenizer."""

import json
from pathlib import Path

import torch

from tensorrt_llm._torch.models.checkpoint import save_weights
from tensorrt_llm._torch.models.config import parse_config
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tests.unittest._torch.executor.tiny_kimi import TINY_CONFIG
from tests.unittest.executor_api.toy_tokenizer import eos_id, toy_backend, toy_tokenizer

TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
WEIGHT_SCALE = 1.6


def write_toy_checkpoint(folder: Path) -> Path:
    """Weights, config, tokenizer and chat template in `folder`."""
    tokenizer = toy_tokenizer()
    config = {**TINY_CONFIG, "vocab_size": tokenizer.vocab_size, "eos_token_id": eos_id(tokenizer)}
    model = KimiForCausalLM(parse_config(config), torch.float32)
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.data.copy_(torch.randn(parameter.shape, generator=random) * WEIGHT_SCALE / fan_in**0.5)
    save_weights(model, folder / "model.safetensors", torch.float32)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    toy_backend().save(str(folder / "tokenizer.json"))
    return folder
