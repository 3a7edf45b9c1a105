# SPDX-License-Identifier: Apache-2.0
"""From a model, a manager class and the user's limits to a cache manager."""

from collections.abc import Mapping as Dict
from typing import Any

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import CacheType, KvCacheConfigLike, SpecConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import EngineWithModel, ModelTraits, layer_mask
from tensorrt_llm.mapping import Mapping


def _create_kv_cache_manager(
    model_engine: EngineWithModel | None,
    kv_cache_manager_cls: type[Any],
    mapping: Mapping,
    kv_cache_config: KvCacheConfigLike,
    tokens_per_block: int,
    max_seq_len: int,
    max_batch_size: int,
    spec_config: SpecConfigLike | None,
    max_num_tokens: int = 8192,
    max_beam_width: int = 1,
    kv_connector_manager: object | None = None,
    estimating_kv_cache: bool = False,
    execution_stream: torch.cuda.Stream | None = None,
    *,
    model_config: ModelTraits | None = None,
    dtype: torch.dtype | None = None,
    is_draft: bool = False,
    is_disagg: bool = False,
    enable_stats: bool = False,
    kda_verify_scheme: str | None = None,
    device: str | None = None,
) -> KVCacheManagerV2:
    """Build the cache of the engine's model (or of `model_config`, where there is no engine).

    `kda_token_states=True` is passed on only where verify rounds run, the class is a V2 one, and the engine's
    backbone, `model_engine.model.model`, asks for it. `device` None is CUDA where there is a GPU. Raises
    ValueError for limits or a configuration that cannot work.
    """
    traits = model_config
    if traits is None:
        if model_engine is None:
            raise ValueError("model_engine and model_config are both None: give one of them")
        traits = model_engine.model.traits
    if kv_connector_manager is not None and not estimating_kv_cache:
        raise NotImplementedError("a KV connector does not work with recurrent states yet: leave it out")
    common = {
        "tokens_per_block": tokens_per_block,
        "max_seq_len": max_seq_len,
        "max_batch_size": max_batch_size,
        "mapping": mapping,
        "dtype": traits.dtype if dtype is None else dtype,
        "spec_config": spec_config,
        "max_num_tokens": max_num_tokens,
        "max_beam_width": max_beam_width,
        "is_draft": is_draft,
        "is_estimating_kv_cache": estimating_kv_cache,
        "execution_stream": execution_stream,
        "vocab_size": traits.vocab_size,
        "is_disagg": is_disagg,
        "enable_stats": enable_stats,
        "device": device or ("cuda" if torch.cuda.is_available() else "cpu"),
        **_attention_arguments(traits),
    }
    if traits.kda is None:
        return _as_manager(kv_cache_manager_cls(kv_cache_config, CacheType.SELFKONLY, **common))
    return _as_manager(
        kv_cache_manager_cls(
            *_recurrent_arguments(traits),
            kv_cache_config,
            CacheType.SELFKONLY,
            **common,
            **_verify_arguments(model_engine, kv_cache_manager_cls, spec_config, kda_verify_scheme),
        )
    )


def _as_manager(manager: object) -> KVCacheManagerV2:
    assert isinstance(manager, KVCacheManagerV2), f"{type(manager).__name__} is no V2 manager"
    return manager


def _attention_arguments(traits: ModelTraits) -> dict[str, object]:
    """Latent attention: one vector per token and layer, keys and values in one."""
    return {
        "num_layers": len(traits.attention_layers),
        "num_kv_heads": 1,
        "head_dim": traits.latent_dim,
        "layer_mask": layer_mask(traits.attention_layers, traits.num_layers),
    }


def _recurrent_arguments(traits: ModelTraits) -> tuple[object, ...]:
    """The positional arguments of the hybrid managers.

    A KDA state is fp32, its window in the model's dtype.
    """
    kda = traits.kda
    assert kda is not None
    return (
        kda.head_dim,
        kda.conv_width,
        kda.num_heads,
        kda.num_heads,
        kda.head_dim,
        len(traits.kda_layers),
        layer_mask(traits.kda_layers, traits.num_layers),
        traits.dtype,
        torch.float32,
    )


def _verify_arguments(
    model_engine: EngineWithModel | None,
    manager_cls: type[Any],
    spec_config: SpecConfigLike | None,
    kda_verify_scheme: str | None,
) -> Dict[str, object]:
    """What says how rejected drafts are undone; the options are absent, not False, where they do not apply."""
    arguments: dict[str, object] = {"conv_state_layout": "q_k_v"}
    if spec_config is None or spec_config.tokens_per_gen_step < 2:
        return arguments
    arguments["kda_replay_num_spec"] = spec_config.tokens_per_gen_step - 1
    if not issubclass(manager_cls, MambaHybridCacheManagerV2):
        return arguments
    if kda_verify_scheme is not None:
        arguments["kda_verify_scheme"] = kda_verify_scheme
    # The backbone may be anybody's, so the one attribute that is read of it has a default.
    if model_engine is not None and getattr(model_engine.model.model, "kda_token_states", False):
        arguments["kda_token_states"] = True
    return arguments
