# SPDX-License-Identifier: Apache-2.0
"""Small managers on CPU memory, easy to count: 128 KiB pages, 256 KiB states, grains of 2 MiB."""

from collections.abc import Sequence

import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheLevel,
    CacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerConfig,
    LayerGroupId,
    LayerId,
    SlotId,
    SsmLayerConfig,
    _KVCache,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.events import KVCacheEventManager

KIB, MIB = 1 << 10, 1 << 20
PAGE_BYTES, STATE_BYTES = 128 * KIB, 256 * KIB
PAGES_PER_GRAIN = 2 * MIB // PAGE_BYTES
TOKENS_PER_BLOCK = 4


def attention(window: int | None = None, sink: int | None = None, layer: int = 0) -> LayerConfig:
    return AttentionLayerConfig(LayerId(layer), [BufferConfig("key", PAGE_BYTES)], window, sink)


def ssm(layer: int = 9) -> LayerConfig:
    return SsmLayerConfig(LayerId(layer), [BufferConfig("ssm_state", STATE_BYTES)])


def make_config(
    layers: Sequence[LayerConfig],
    *,
    num_grains: int = 1,
    num_states: int = 1,
    num_host_pages: int = 0,
    cold_tiers: Sequence[CacheTierConfig] = (),
    **options: object,
) -> KVCacheManagerConfig:
    """`num_states`: recurrent states that must fit; attention has the rest of the grains."""
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(num_grains * 2 * MIB)]
    if num_host_pages:
        tiers.append(HostCacheTierConfig(num_host_pages * PAGE_BYTES))
    chosen: dict[str, object] = {
        "tokens_per_block": TOKENS_PER_BLOCK,
        "cache_tiers": [*tiers, *cold_tiers],
        "layers": layers,
        "max_util_for_resume": 1.0,
        "constraints": [BatchDesc([KVCacheDesc(0, 0)] * num_states)],
        "typical_step": BatchDesc([KVCacheDesc(1 << 20, 0)]),
        "commit_min_snapshot": True,
    }
    return KVCacheManagerConfig(**{**chosen, **options})  # type: ignore[arg-type]


def make_manager(
    layers: Sequence[LayerConfig], event_manager: KVCacheEventManager | None = None, **options: object
) -> KVCacheManager:
    return KVCacheManager(make_config(layers, **options), event_manager, device="cpu")  # type: ignore[arg-type]


def pages_view(manager: KVCacheManager, group: int = 0) -> torch.Tensor:
    """The first 8 bytes of every slot of a group, as integers."""
    layer = manager.layer_grouping[group][0]
    is_state = LayerGroupId(group) == manager.life_cycles.ssm_id
    size = STATE_BYTES if is_state else PAGE_BYTES
    role = "ssm_state" if is_state else "key"
    return manager.get_buffer_view(layer, role, torch.int64, (size // 8,))[:, 0]


def run_prompt(manager: KVCacheManager, tokens: Sequence[int], *, commit_at: Sequence[int] = ()) -> _KVCache:
    """Compute a prompt (whatever is not reused), committing at the given lengths or once at the end."""
    cache = manager.create_kv_cache(input_tokens=tokens)
    assert cache.resume()
    assert cache.resize(len(tokens))
    for length in commit_at or [len(tokens)]:
        if length > cache.num_committed_tokens:
            cache.commit(tokens[cache.num_committed_tokens : length])
    return cache


def slots(manager: KVCacheManager, level: int = 0) -> list[tuple[int, int, int]]:
    """(free, evictable, total) per pool group."""
    statistics = manager.get_storage_statistics(CacheLevel(level))
    return [(one.free, one.evictable, one.total) for one in statistics]


def read_slot(manager: KVCacheManager, group: int, level: int, slot: int) -> bytes:
    pools = manager.storage.group(LayerGroupId(group), CacheLevel(level)).pools
    return b"".join(bytes(pool.read_slot(SlotId(slot))) for pool in pools)
