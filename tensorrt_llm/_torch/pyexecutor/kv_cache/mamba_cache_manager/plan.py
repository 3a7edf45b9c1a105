# SPDX-License-Identifier: Apache-2.0
"""What a model's cache is made from, and from it the cache's sizes."""

from dataclasses import dataclass, replace

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import CacheType, KvCacheConfigLike, SpecConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import (
    RecurrentShape,
    StateDtypes,
    linear_state_spec,
    mamba_effective_tp_size,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import plan_verify
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import AttentionSizing, cache_limits
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import ModelTraits, latent_layers, layer_mask
from tensorrt_llm.mapping import Mapping

_CONV_STATE_LAYOUT = "q_k_v"
"""Sections of a KDA layer's convolution window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What a model's cache is made from. Attention is latent: one vector per token and layer, one head.

    `kda_token_states` and `kda_verify_scheme` say how rejected drafts are undone
    (`MambaHybridCacheManagerV2`), `kda_conv_dtype` is the extended windows' element type; all are inert
    without speculation. A recurrent state is fp32, its window in the model's dtype.
    """

    traits: ModelTraits
    mapping: Mapping
    kv_cache_config: KvCacheConfigLike
    tokens_per_block: int
    max_seq_len: int
    max_batch_size: int
    spec_config: SpecConfigLike | None = None
    max_num_tokens: int = 8192
    max_beam_width: int = 1
    dtype: torch.dtype | None = None
    is_draft: bool = False
    kda_token_states: bool = False
    kda_verify_scheme: str | None = None
    kda_conv_dtype: torch.dtype = torch.float32

    @property
    def num_spec(self) -> int | None:
        """M, the drafts of a full round; None where no verify rounds run."""
        if self.spec_config is None or self.spec_config.tokens_per_gen_step < 2 or self.traits.kda is None:
            return None
        return self.spec_config.tokens_per_gen_step - 1

    @property
    def attention_mask(self) -> list[bool]:
        return layer_mask(self.traits.attention_layers, self.traits.num_layers)

    @property
    def recurrent_mask(self) -> list[bool]:
        return layer_mask(self.traits.kda_layers, self.traits.num_layers)

    @property
    def attention_dtype(self) -> torch.dtype:
        return self.traits.dtype if self.dtype is None else self.dtype

    def with_config(self, kv_cache_config: KvCacheConfigLike) -> "CachePlan":
        """The same cache under another configuration."""
        return replace(self, kv_cache_config=kv_cache_config)

    def sizing(self) -> AttentionSizing:
        """The sizes the manager would have, without building it."""
        config, traits, kda = self.kv_cache_config, self.traits, self.traits.kda
        limits = cache_limits(
            self.max_seq_len,
            self.max_batch_size,
            self.max_num_tokens,
            self.tokens_per_block,
            self.max_beam_width,
            self.spec_config,
        )
        layers = latent_layers(
            traits, self.mapping, self.attention_dtype, config.max_attention_window, self.max_seq_len
        )
        kv_type, ratio = CacheType.SELFKONLY, config.max_util_for_resume
        if kda is None:
            return AttentionSizing(layers=layers, kv_type=kv_type, limits=limits, max_util_for_resume=ratio)
        shape = RecurrentShape(kda.head_dim, kda.conv_width, kda.num_heads, kda.num_heads, kda.head_dim)
        dtypes = StateDtypes(conv=traits.dtype, ssm=torch.float32)
        tp_size = mamba_effective_tp_size(self.mapping)
        spec = linear_state_spec(shape, tp_size, _CONV_STATE_LAYOUT, dtypes)
        verify = plan_verify(
            spec,
            self.num_spec,
            self.kda_token_states,
            self.kda_verify_scheme,
            self.is_draft,
            self.kda_conv_dtype,
        )
        return HybridSizing.plan(
            config, kv_type, limits, layers, spec, verify, self.mapping, self.spec_config
        )

    def recurrent_arguments(self) -> tuple[object, ...]:
        """The leading positional arguments of a hybrid manager; none for a model of attention alone."""
        kda, traits = self.traits.kda, self.traits
        if kda is None:
            return ()
        shape = (kda.head_dim, kda.conv_width, kda.num_heads, kda.num_heads, kda.head_dim)
        return (*shape, len(traits.kda_layers), self.recurrent_mask, traits.dtype, torch.float32)

    def keyword_arguments(self, takes_records: bool) -> dict[str, object]:
        """The manager's keywords. What does not apply is absent, not False."""
        arguments: dict[str, object] = {
            "num_layers": len(self.traits.attention_layers),
            "num_kv_heads": 1,
            "head_dim": self.traits.latent_dim,
            "layer_mask": self.attention_mask,
            "tokens_per_block": self.tokens_per_block,
            "max_seq_len": self.max_seq_len,
            "max_batch_size": self.max_batch_size,
            "mapping": self.mapping,
            "dtype": self.attention_dtype,
            "spec_config": self.spec_config,
            "max_num_tokens": self.max_num_tokens,
            "max_beam_width": self.max_beam_width,
            "is_draft": self.is_draft,
            "vocab_size": self.traits.vocab_size,
        }
        if self.traits.kda is not None:
            arguments["conv_state_layout"] = _CONV_STATE_LAYOUT
        if self.num_spec is None:
            return arguments
        arguments["kda_replay_num_spec"] = self.num_spec
        if self.kda_conv_dtype is not torch.float32:
            arguments["kda_conv_dtype"] = self.kda_conv_dtype
        if takes_records and self.kda_token_states:
            arguments["kda_token_states"] = True
        if takes_records and self.kda_verify_scheme is not None:
            arguments["kda_verify_scheme"] = self.kda_verify_scheme
        return arguments
