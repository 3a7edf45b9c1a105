# SPDX-License-Identifier: Apache-2.0
"""Ids and enumerations of the cache core. Every index has a type of its own, so none can be swapped."""

import enum
from typing import Final, NewType

LayerId = NewType("LayerId", int)
LifeCycleId = NewType("LifeCycleId", int)
LayerGroupId = LifeCycleId
PoolGroupIndex = NewType("PoolGroupIndex", int)
PoolIndex = NewType("PoolIndex", int)
CacheLevel = NewType("CacheLevel", int)
SlotId = NewType("SlotId", int)
BlockOrdinal = NewType("BlockOrdinal", int)
BeamIndex = NewType("BeamIndex", int)
MemAddress = NewType("MemAddress", int)
Priority = NewType("Priority", int)

GPU_LEVEL: Final = CacheLevel(0)
BAD_PAGE_INDEX: Final = -1
DEFAULT_BEAM_INDEX: Final = BeamIndex(0)
PRIORITY_MIN: Final = Priority(0)
PRIORITY_MAX: Final = Priority(100)
PRIORITY_DEFAULT: Final = Priority(35)


class CacheTier(enum.IntEnum):
    """Kinds of memory a cache level can live in."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2


class PageIndexMode(enum.Enum):
    """How a layer's offset inside a slot reaches the kernel.

    SHARED: the base address already contains it, all layers of a group share one index table.
    PER_LAYER: the base address is the pool's, the offset is added to each page index.
    """

    SHARED = "shared"
    PER_LAYER = "per_layer"


class CacheStatus(enum.Enum):
    """Life of one request's cache: SUSPENDED <-> ACTIVE -> CLOSED."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    CLOSED = "closed"
