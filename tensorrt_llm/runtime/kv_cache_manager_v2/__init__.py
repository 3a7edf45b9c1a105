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

if TYPE_CHECKING:
    from .cache import _KVCache as _KVCache
    from .manager import KVCacheManager as KVCacheManager
    from .storage import StorageStatistics as StorageStatistics

_HOME_OF = {"KVCacheManager": ".manager", "StorageStatistics": ".storage", "_KVCache": ".cache"}

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
    "CuError",
    "CuOOMError",
    "DiskCacheTierConfig",
    "DiskOOMError",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "HostOOMError",
    "KVCacheDesc",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "LayerConfig",
    "LayerGroupId",
    "LayerId",
    "LifeCycle",
    "LifeCycleId",
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
    "ResourceBusyError",
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
