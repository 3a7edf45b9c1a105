# SPDX-License-Identifier: Apache-2.0
"""The storage below the cache managers: pages, recurrent state slots, prefix reuse and memory tiers.

`config`, `life_cycle`, `layout` and `quota` are pure and load without torch; `KVCacheManager` and what
stands on memory load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._types import (
    BAD_PAGE_INDEX,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    BeamIndex,
    BlockOrdinal,
    CacheLevel,
    CacheStatus,
    CacheTier,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    MemAddress,
    PageIndexMode,
    PoolGroupIndex,
    PoolIndex,
    Priority,
    SlotId,
)
from .config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    LayerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from .errors import (
    CuError,
    CuOOMError,
    DiskOOMError,
    HostOOMError,
    LogicError,
    MisuseError,
    OutOfMemoryError,
    OutOfPagesError,
    ResourceBusyError,
)
from .layout import PageIndexConverter, PoolGroupDesc
from .life_cycle import AttnLifeCycle, LifeCycle, SsmLifeCycle
from .scratch import ScratchDesc

if TYPE_CHECKING:
    from .cache import _KVCache as _KVCache
    from .cold_codec import ColdPageCodec as ColdPageCodec
    from .drop_plan import CommittedBlockDropPlan as CommittedBlockDropPlan
    from .events import KVCacheEvent as KVCacheEvent
    from .events import KVCacheEventManager as KVCacheEventManager
    from .manager import KVCacheManager as KVCacheManager
    from .stats import KVCacheIterationStats as KVCacheIterationStats
    from .stats import LifeCycleStats as LifeCycleStats
    from .stats import RequestStats as RequestStats
    from .storage import StorageStatistics as StorageStatistics

_HOME_OF = {
    "ColdPageCodec": ".cold_codec",
    "CommittedBlockDropPlan": ".drop_plan",
    "KVCacheEvent": ".events",
    "KVCacheEventManager": ".events",
    "KVCacheIterationStats": ".stats",
    "KVCacheManager": ".manager",
    "LifeCycleStats": ".stats",
    "RequestStats": ".stats",
    "StorageStatistics": ".storage",
    "_KVCache": ".cache",
}

__all__ = [
    "BAD_PAGE_INDEX",
    "DEFAULT_BEAM_INDEX",
    "GPU_LEVEL",
    "PRIORITY_DEFAULT",
    "PRIORITY_MAX",
    "PRIORITY_MIN",
    "AttentionLayerConfig",
    "AttnLifeCycle",
    "BatchDesc",
    "BeamIndex",
    "BlockOrdinal",
    "BufferConfig",
    "CacheLevel",
    "CacheStatus",
    "CacheTier",
    "CacheTierConfig",
    "ColdPageCodec",
    "CommittedBlockDropPlan",
    "CuError",
    "CuOOMError",
    "DiskCacheTierConfig",
    "DiskOOMError",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "HostOOMError",
    "KVCacheDesc",
    "KVCacheEvent",
    "KVCacheEventManager",
    "KVCacheIterationStats",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "LayerConfig",
    "LayerGroupId",
    "LayerId",
    "LifeCycle",
    "LifeCycleId",
    "LifeCycleStats",
    "LogicError",
    "MemAddress",
    "MisuseError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PageIndexConverter",
    "PageIndexMode",
    "PoolGroupDesc",
    "PoolGroupIndex",
    "PoolIndex",
    "Priority",
    "RequestStats",
    "ResourceBusyError",
    "ScratchDesc",
    "SlotId",
    "SsmLayerConfig",
    "SsmLifeCycle",
    "StorageStatistics",
    "SwaScratchReuseConfig",
    "_KVCache",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name], __name__), name)
    globals()[name] = value
    return value
