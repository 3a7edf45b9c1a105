# SPDX-License-Identifier: Apache-2.0
"""A small random Kimi model and literal layer caches, for tests of modules and models."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.models.config import KimiTextConfig, parse_config
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tensorrt_llm._torch.modules.kda.recurrence import KdaWeights
from tensorrt_llm._torch.modules.kda.verify_scheme import (
    KdaGeometry,
    KdaRows,
    VerifyScheme,
)
from tensorrt_llm._torch.modules.linear import FusedLinear
from tensorrt_llm._torch.modules.metadata import ContextChunk, ForwardMetadata, VerifyGroup

RAW_CONFIG: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "vocab_size": 96,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
    },
    "attn_res_block_size": 2,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "eos_token_id": 0,
}

KIMI_LINEAR_CONFIG: dict[str, Any] = RAW_CONFIG | {
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "linear_attn_config": RAW_CONFIG["linear_attn_config"]
    | {"use_full_rank_gate": False, "gate_lower_bound": None},
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "hidden_act": "silu",
    "routed_scaling_factor": 2.446,
}

_OPTIONAL = (
    "kda_conv_q",
    "kda_conv_k",
    "kda_conv_v",
    "kda_state_tok",
    "kda_qkg_cache",
    "kda_v_cache",
    "kda_beta_cache",
    "intermediate_ssm",
)


@dataclass
class LayerCache:
    """One layer's slots, as a manager would hand them out."""

    conv: Tensor
    temporal: Tensor
    prev_num_accepted_tokens: Tensor
    kda_conv_q: Tensor | None = None
    kda_conv_k: Tensor | None = None
    kda_conv_v: Tensor | None = None
    kda_state_tok: Tensor | None = None
    kda_qkg_cache: Tensor | None = None
    kda_v_cache: Tensor | None = None
    kda_beta_cache: Tensor | None = None
    intermediate_ssm: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        names = ("conv", "temporal", *_OPTIONAL)
        return {name: value for name in names if (value := self.__dict__[name]) is not None}

    def as_all_layers(self) -> "LayerCache":
        """The view of all layers at once, of which this is the only one."""
        return replace(self, **{name: tensor.unsqueeze(0) for name, tensor in self.tensors().items()})

    def accept(self, scheme: VerifyScheme, slot: int, count: int) -> None:
        """Accept so many drafts of the slot's round."""
        device = self.temporal.device
        slots, counts = (torch.tensor([value], dtype=torch.int32, device=device) for value in (slot, count))
        done = scheme.promote(self.as_all_layers(), slots, counts)
        self.prev_num_accepted_tokens[slot] = 0 if done else count


def make_layer_cache(geometry: KdaGeometry, scheme: VerifyScheme | None, num_slots: int) -> LayerCache:
    H, K = geometry.num_heads, geometry.head_dim
    cache = LayerCache(
        conv=torch.zeros(num_slots, 3 * geometry.channels, geometry.conv_width - 1),
        temporal=torch.zeros(num_slots, H, K, K),
        prev_num_accepted_tokens=torch.zeros(num_slots, dtype=torch.int32),
    )
    for buffer in scheme.slot_buffers(geometry) if scheme else ():
        setattr(cache, buffer.name, buffer.allocate(1, num_slots, "cpu")[0])
    return cache


@dataclass
class ModelCaches:
    """Every layer's cache: pages in a row, slots numbered as they come."""

    config: KimiTextConfig
    scheme: VerifyScheme | None
    num_slots: int
    num_pages: int
    num_spec: int = 7
    tokens_per_block: int = 64
    layers: dict[int, LayerCache] = field(default_factory=dict)
    pools: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        geometry = self.config.kda.geometry(self.num_spec)
        for i in self.config.kda_layers:
            self.layers[i] = make_layer_cache(geometry, self.scheme, self.num_slots)
        for i in self.config.attention_layers:
            shape = (self.num_pages, 1, self.tokens_per_block, 1, self.config.mla.latent_dim)
            self.pools[i] = torch.full(shape, torch.nan)

    def get_buffers(self, layer_idx: int) -> Tensor:
        return self.pools[layer_idx]

    def mamba_layer_cache(self, layer_idx: int) -> LayerCache:
        return self.layers[layer_idx]

    def accept(self, slot: int, count: int) -> None:
        for cache in self.layers.values():
            cache.accept(self.scheme, slot, count)


def random_model(raw: dict[str, Any] = RAW_CONFIG, seed: int = 0) -> KimiForCausalLM:
    torch.manual_seed(seed)
    model = KimiForCausalLM(parse_config(raw))
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            std = 0.5 if name.endswith(".conv") else parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, std=std)
    for module in model.modules():
        if isinstance(module, FusedLinear) and module.padding:
            module.weight.data[-module.padding :] = 0
    return model.eval().requires_grad_(False)


def context(num_tokens: int, start: int, slot: int, pages: Tensor) -> ForwardMetadata:
    chunk = ContextChunk(
        request_id=0, row_start=0, num_tokens=num_tokens, position_start=start, slot=slot, pages=pages
    )
    return ForwardMetadata(contexts=(chunk,), groups=(), num_tokens=num_tokens)


def make_group(
    request_ids: Sequence[int],
    num_tokens: int,
    row_start: int,
    slots: Tensor,
    positions_start: Sequence[int],
    pages: Sequence[Tensor],
) -> VerifyGroup:
    """A VerifyGroup from the slots tensor int32 [requests]; reads its values to the host once."""
    return VerifyGroup(
        num_tokens=num_tokens,
        row_start=row_start,
        request_ids=tuple(request_ids),
        slots=slots,
        slot_ids=tuple(slots.tolist()),
        positions_start=tuple(positions_start),
        pages=tuple(pages),
    )


def round_of(
    T: int, slots: list[int], starts: list[int], pages: list[Tensor], device: str = "cpu"
) -> ForwardMetadata:
    on_device = torch.tensor(slots, dtype=torch.int32, device=device)
    group = make_group(range(len(slots)), T, 0, on_device, starts, pages)
    return ForwardMetadata(contexts=(), groups=(group,), num_tokens=T * len(slots))


def random_weights(geometry: KdaGeometry, dtype: torch.dtype = torch.float32) -> KdaWeights:
    H, K, D = geometry.num_heads, geometry.head_dim, geometry.channels
    return KdaWeights(
        num_heads=H,
        head_dim=K,
        conv=torch.randn(geometry.conv_width, 3 * D, dtype=torch.float64).to(dtype) * 0.5,
        f_b=torch.randn(D, K).to(dtype),
        a_log=torch.randn(H).to(dtype) * 0.3,
        dt_bias=torch.randn(D).to(dtype) - 3,
        norm=(1 + 0.1 * torch.randn(K)).to(dtype),
        lower_bound=-5.0,
        norm_eps=1e-5,
    )


def random_rows(geometry: KdaGeometry, num_rows: int) -> KdaRows:
    D = geometry.channels
    qkv, gate, f = torch.randn(num_rows, 3 * D), torch.randn(num_rows, D), torch.randn(num_rows, D)
    return KdaRows(proj=qkv, qkv=qkv, gate=gate, f=f, b=torch.randn(num_rows, geometry.num_heads))
