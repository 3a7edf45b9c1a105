# SPDX-License-Identifier: Apache-2.0
"""Building the storage: its tiers, and agreement between ranks about its size."""

import math
import os
import resource
from dataclasses import replace
from typing import NamedTuple

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import AttentionSizing
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    OutOfMemoryError,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.config import CacheTierConfig

_MEMLOCK_SHARE = 0.8
"""Of the process's limit on locked memory, the part that the cache may pin; the rest is left to staging
buffers.
"""


def min_over_ranks(value: int) -> int:
    """The smallest `value` of all ranks of the default process group; `value` itself where there is none.

    Ranks must agree on sizes, or a request fits on one and not on another.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    smallest = torch.tensor(value, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
    return int(smallest.item())


def host_tier_bytes(config: KvCacheConfigLike, gpu_quota_bytes: int, mapping: Mapping, device: str) -> int:
    """Bytes of the host tier: as configured, else automatic; 0 is none.

    Automatic on CUDA: the GPU quota, but at most half of the free host memory shared between the node's ranks
    and most of what may be locked. On a CPU the hot tier is host memory already, so none.
    """
    if config.host_cache_size is not None and config.host_cache_size >= 0:
        return config.host_cache_size
    if device == "cpu":
        return 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks_here = min(mapping.world_size, mapping.gpus_per_node)
    limits = [gpu_quota_bytes, free // (2 * ranks_here)]
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if lockable != resource.RLIM_INFINITY:
        limits.append(int(_MEMLOCK_SHARE * lockable))
    return min_over_ranks(min(limits))


def cache_tiers(
    config: KvCacheConfigLike, gpu_quota_bytes: int, mapping: Mapping, device: str
) -> tuple[CacheTierConfig, ...]:
    """The tiers from near to far: GPU, host where there is any, disk where configured."""
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(quota=gpu_quota_bytes)]
    host = host_tier_bytes(config, gpu_quota_bytes, mapping, device)
    if host:
        tiers.append(HostCacheTierConfig(quota=host))
    if config.disk_cache_size:
        if not config.disk_cache_path:
            raise ValueError(
                f"kv_cache_config.disk_cache_size is {config.disk_cache_size}, but disk_cache_path is not "
                "set: name an existing directory"
            )
        tiers.append(DiskCacheTierConfig(quota=config.disk_cache_size, path=config.disk_cache_path))
    return tuple(tiers)


def agreed_quota_bytes(sizing: AttentionSizing, quota_bytes: int) -> int:
    """The quota with which this rank holds as many tokens as the rank with the fewest.

    Never more than `quota_bytes`.
    """
    ratio = sizing.max_util_for_resume
    own = sizing.max_tokens_from_quota(int(quota_bytes * ratio))
    tokens = min_over_ranks(own)
    if tokens == own:
        return quota_bytes
    return min(quota_bytes, math.ceil(sizing.quota_from_max_tokens(tokens) / ratio))


class BuiltStorage(NamedTuple):
    """A storage and the configuration it was built with."""

    impl: KVCacheManager
    config: KVCacheManagerConfig


def build_storage(config: KVCacheManagerConfig, device: str) -> BuiltStorage:
    """The storage of `config`, on all ranks without a host tier where one rank cannot have it.

    Raises OutOfMemoryError where the GPU tier itself is refused.
    """
    kept = [tier for tier in config.cache_tiers if not isinstance(tier, HostCacheTierConfig)]
    if len(kept) == len(config.cache_tiers):
        return BuiltStorage(KVCacheManager(config, device=device), config)
    impl = _storage_or_none(config, device)
    if min_over_ranks(int(impl is not None)) and impl is not None:
        return BuiltStorage(impl, config)
    if impl is not None:
        impl.shutdown()
    logger.warning("the KV cache's host tier could not be allocated on every rank; going on without it")
    fallback = replace(config, cache_tiers=kept)
    return BuiltStorage(KVCacheManager(fallback, device=device), fallback)


def _storage_or_none(config: KVCacheManagerConfig, device: str) -> KVCacheManager | None:
    try:
        return KVCacheManager(config, device=device)
    except OutOfMemoryError:
        return None
