# SPDX-License-Identifier: Apache-2.0
"""Small models as files, requests for them, and the planner's command line in a process of its own making."""

import json
import random
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tensorrt_llm import logger
from tensorrt_llm.commands import kv_plan
from tensorrt_llm.planning.models import PlannedModel, find_model
from tensorrt_llm.planning.request import GpuMemory, PlanRequest

GIB = 1 << 30
MIB = 1 << 20


def small_config(**changes: Any) -> dict[str, Any]:
    """A config.json of 6 layers, sizes that 1, 2 and 4 ranks divide; changes replace keys."""
    config = {
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": layers(kda=(1, 2, 4, 5), attention=(3, 6)),
        "attn_res_block_size": 2,
        "intermediate_size": 48,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "routed_expert_hidden_size": 24,
        "latent_moe_use_norm": True,
    }
    return config | changes


def layers(
    kda: tuple[int, ...], attention: tuple[int, ...], num_heads: int = 4, head_dim: int = 16, width: int = 4
) -> dict[str, Any]:
    """A linear_attn_config whose layers are counted from 1."""
    return {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "short_conv_kernel_size": width,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": list(kda),
        "full_attn_layers": list(attention),
    }


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def small_model(folder: Path, **changes: Any) -> PlannedModel:
    return find_model(str(write_config(folder, small_config(**changes))))


def random_models(rng: random.Random, folder: Path, count: int = 20) -> list[PlannedModel]:
    return [random_model(rng, folder) for _ in range(count)]


def random_model(rng: random.Random, folder: Path) -> PlannedModel:
    """A hybrid model of up to 7 small layers."""
    num_layers = rng.randrange(2, 8)
    kinds = [rng.random() < 0.6 for _ in range(num_layers)]
    kinds[rng.randrange(num_layers)] = True
    if all(kinds):
        kinds[rng.randrange(num_layers)] = False
    numbered = list(enumerate(kinds, start=1))
    linear = layers(
        tuple(i for i, is_kda in numbered if is_kda),
        tuple(i for i, is_kda in numbered if not is_kda),
        num_heads=4 * rng.randrange(1, 3),
        head_dim=rng.choice((2, 4, 6, 16, 24)),
        width=rng.randrange(2, 6),
    )
    config = small_config(
        num_hidden_layers=num_layers, linear_attn_config=linear, kv_lora_rank=rng.randrange(1, 40)
    )
    return find_model(str(write_config(folder, config)))


def random_request(rng: random.Random, **changes: Any) -> PlanRequest:
    """A small configuration with a quota of its own, unless changed."""
    numbers: dict[str, Any] = {
        "tp": rng.choice((1, 2, 4)),
        "drafts": rng.randrange(0, 6),
        "max_batch_size": rng.randrange(1, 9),
        "max_seq_len": rng.choice((rng.randrange(8, 3000), rng.randrange(10_000, 2_000_000))),
        "tokens_per_block": rng.choice((1, 4, 8, 32)),
        "max_util": rng.choice((0.5, 0.9, 0.95, 0.97, 1.0)),
        "block_reuse": rng.random() < 0.2,
        "kda_conv_dtype": rng.choice(["float32", "bfloat16"]),
        "gpu_quota_bytes": rng.randrange(2 * MIB, 7 * MIB),
        "max_tokens": rng.choice((None, None, rng.randrange(1, 2000))),
    }
    return PlanRequest(**numbers | changes)


def gpu(total_bytes: int, free_fraction: float = 0.9, workspace_bytes: int = MIB) -> GpuMemory:
    return GpuMemory(total_bytes=total_bytes, free_fraction=free_fraction, workspace_bytes=workspace_bytes)


def run(*words: object) -> Result:
    """`trtllm-kv-plan` with these words; the level of the log, which it changes, is put back."""
    level = logger.level
    try:
        return CliRunner().invoke(kv_plan.main, [str(word) for word in words])
    finally:
        logger.set_level(level)
