# SPDX-License-Identifier: Apache-2.0
"""From a model, a manager class and the user's limits to a cache manager."""

from typing import Any

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import CacheType, KvCacheConfigLike, SpecConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.legacy import MixedMambaHybridCacheManager
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import EngineWithModel, ModelTraits
from tensorrt_llm.mapping import Mapping


def wants_token_states(model_engine: EngineWithModel | None) -> bool:
    """Whether the engine's backbone asks for its drafts' records. False without an engine."""
    if model_engine is None:
        return False
    # The backbone may be anybody's, so the one attribute that is read of it has a default.
    return bool(getattr(model_engine.model.model, "kda_token_states", False))


def device_or_default(device: str | None) -> str:
    """`device`, or CUDA where there is a GPU."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def create_manager(
    plan: CachePlan,
    manager_cls: type[Any],
    *,
    kv_connector_manager: object | None = None,
    is_estimating_kv_cache: bool = False,
    execution_stream: torch.cuda.Stream | None = None,
    is_disagg: bool = False,
    enable_stats: bool = False,
    device: str | None = None,
) -> KVCacheManagerV2:
    """Build `plan` as a `manager_cls`. Raises ValueError for limits or a configuration that cannot work."""
    if kv_connector_manager is not None and not is_estimating_kv_cache:
        raise NotImplementedError("a KV connector does not work with recurrent states yet: leave it out")
    takes_records = issubclass(manager_cls, MambaHybridCacheManagerV2) and not issubclass(
        manager_cls, MixedMambaHybridCacheManager
    )
    manager: KVCacheManagerV2 = manager_cls(
        *plan.recurrent_arguments(),
        plan.kv_cache_config,
        CacheType.SELFKONLY,
        is_estimating_kv_cache=is_estimating_kv_cache,
        execution_stream=execution_stream,
        is_disagg=is_disagg,
        enable_stats=enable_stats,
        device=device_or_default(device),
        **plan.keyword_arguments(takes_records),
    )
    return manager


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
    kda_conv_dtype: torch.dtype = torch.float32,
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
    plan = CachePlan(
        traits=traits,
        mapping=mapping,
        kv_cache_config=kv_cache_config,
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        spec_config=spec_config,
        max_num_tokens=max_num_tokens,
        max_beam_width=max_beam_width,
        dtype=dtype,
        is_draft=is_draft,
        kda_token_states=wants_token_states(model_engine),
        kda_verify_scheme=kda_verify_scheme,
        kda_conv_dtype=kda_conv_dtype,
    )
    return create_manager(
        plan,
        kv_cache_manager_cls,
        kv_connector_manager=kv_connector_manager,
        is_estimating_kv_cache=estimating_kv_cache,
        execution_stream=execution_stream,
        is_disagg=is_disagg,
        enable_stats=enable_stats,
        device=device,
    )
