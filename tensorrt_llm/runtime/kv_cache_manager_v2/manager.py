# SPDX-License-Identifier: Apache-2.0
"""`KVCacheManager`: the storage of one rank, its sizes and addresses, and the caches of its requests."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from ._math import float32
from ._types import GPU_LEVEL, CacheLevel, CacheTier, LayerGroupId, LayerId, MemAddress, PageIndexMode
from .cache import PriorityCallback, _KVCache
from .config import KVCacheManagerConfig
from .errors import LogicError, MisuseError, ResourceBusyError
from .layout import BufferAttr, PageIndexConverter, PoolGroupDesc, build_layout
from .life_cycle import AttnLifeCycle, LifeCycleRegistry
from .storage import Storage, StorageStatistics


class KVCacheManager:
    """Owns the memory of all tiers and hands out per-request caches.

    `device`: where level 0 lives, "cuda" or "cpu". Raises MisuseError (a ValueError) for a configuration
    that cannot work and OutOfMemoryError when memory is refused; then nothing stays allocated.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        event_manager: None = None,
        cold_page_codec: None = None,
        *,
        device: str = "cuda",
    ) -> None:
        if cold_page_codec is not None:
            raise MisuseError(
                "cold_page_codec is not supported: cold pages keep the hot layout; leave it at None"
            )
        self._config = replace(config, max_util_for_resume=float32(config.max_util_for_resume))
        self.device = torch.device(device)
        self.life_cycles = LifeCycleRegistry(config.layers, config.tokens_per_block)
        self._layout = build_layout(config.layers, self.life_cycles, config.tokens_per_block)
        self.storage = Storage(self._config, self._layout)
        self._growing_groups = {
            self._layout.group_of[index]
            for index, value in self.life_cycles.items()
            if isinstance(value, AttnLifeCycle)
        }
        self._caches: dict[int, _KVCache] = {}
        self._is_open = True

    @property
    def init_config(self) -> KVCacheManagerConfig:
        """The configuration in use; max_util_for_resume is rounded to float32."""
        return self._config

    @property
    def tokens_per_block(self) -> int:
        return self._config.tokens_per_block

    @property
    def cache_tier_list(self) -> tuple[CacheTier, ...]:
        return tuple(tier.tier for tier in self._config.cache_tiers)

    @property
    def layer_grouping(self) -> tuple[tuple[LayerId, ...], ...]:
        """Layer ids per layer group (life cycle)."""
        return self.life_cycles.grouping

    @property
    def pool_group_descs(self) -> tuple[PoolGroupDesc, ...]:
        return self._layout.pool_groups

    @property
    def num_open_caches(self) -> int:
        return len(self._caches)

    def create_kv_cache(
        self,
        reuse_scope: Hashable = None,
        input_tokens: Sequence[int] | None = None,
        id: Hashable = None,
        custom_priority_callback: PriorityCallback | None = None,
        expected_prompt_length: int | None = None,
        text_only: bool = False,
        enable_request_stats: bool = False,
    ) -> _KVCache:
        """Return a new, suspended cache."""
        self._require_open()
        cache = _KVCache(self, id, custom_priority_callback)
        self._caches[builtin_id(cache)] = cache
        return cache

    def forget(self, cache: _KVCache) -> None:
        """Called by a cache that closes."""
        del self._caches[builtin_id(cache)]

    def shutdown(self) -> None:
        """Give all memory back. ResourceBusyError while a cache is open; nothing happens after the first
        time.
        """
        if not self._is_open:
            return
        self._require_no_open_cache("shutdown")
        self._is_open = False
        self.storage.close()

    def get_layer_group_id(self, layer: LayerId) -> LayerGroupId:
        return self.life_cycles.of_layer(layer)

    def get_storage_statistics(self, level: CacheLevel = GPU_LEVEL) -> list[StorageStatistics]:
        """Return slot counts per pool group."""
        return self.storage.statistics(level)

    def get_quota(self, level: CacheLevel = GPU_LEVEL) -> int:
        """Return the bytes a level was given; its pools may take up to a grain more."""
        return self.storage.quotas[level]

    def get_mem_pool_base_address(
        self, layer: LayerId, role: str, index_mode: PageIndexMode = PageIndexMode.SHARED
    ) -> MemAddress:
        """Return the address page index 0 refers to; in SHARED mode the layer's offset is inside."""
        buffer = self._layout.buffer(layer, role)
        offset = buffer.offset if index_mode is PageIndexMode.SHARED else 0
        return MemAddress(self._pool_tensor_address(buffer) + offset)

    def get_page_stride(self, layer: LayerId, role: str) -> int:
        """Return the bytes from one page index to the next."""
        return self._layout.buffer(layer, role).page_stride_bytes

    def get_page_index_scale(self, layer: LayerId, role: str) -> int:
        """Return the buffers per slot: a block in slot s starts at page index s * scale (times its
        expansion).
        """
        return self._layout.buffer(layer, role).scale

    def get_page_index_upper_bound(self, layer: LayerId, role: str) -> int:
        """Return the bound on page indices from this buffer's own base; slots = ceil(bound / scale)."""
        buffer = self._layout.buffer(layer, role)
        return buffer.page_index_upper_bound(self._num_slots(buffer))

    def get_page_index_converter(
        self, layer: LayerId, role: str, index_mode: PageIndexMode = PageIndexMode.SHARED
    ) -> PageIndexConverter:
        buffer = self._layout.buffer(layer, role)
        is_shared = index_mode is PageIndexMode.SHARED
        layer_offset = 0 if is_shared else buffer.offset // buffer.size
        return PageIndexConverter(buffer.scale, buffer.expansion, layer_offset)

    def get_buffer_view(
        self, layer: LayerId, role: str, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return [num_slots, *shape] over the pool's memory; row s is this buffer's part of slot s.

        `shape` must fill the buffer exactly, or this buffer and the ones of the same layer right behind it
        (key and value together). Inner strides are dense, the row stride is scale * elements of one buffer.
        """
        buffer = self._layout.buffer(layer, role)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes % buffer.size or not buffer.size <= num_bytes <= buffer.run_bytes:
            raise MisuseError(
                f"shape {tuple(shape)} of {dtype} takes {num_bytes} bytes; {role!r} of layer {layer} has "
                f"{buffer.size}, with its neighbours {buffer.run_bytes}"
            )
        pool = self.storage.group(buffer.life_cycle).pools[buffer.pool]
        rows = pool.bytes_view().view(pool.num_slots, buffer.slot_bytes)
        part = rows[:, buffer.offset : buffer.offset + num_bytes].view(dtype)
        return part.as_strided((pool.num_slots, *shape), (part.stride(0), *_dense_strides(shape)))

    def check_integrity(self) -> None:
        """Raise LogicError unless every slot has one owner and every count is right."""
        live: dict[tuple[int, int], set[int]] = {}
        for cache in self._caches.values():
            for page in cache.get_held_pages():
                owned = live.setdefault((page.level, self._layout.group_of[page.life_cycle]), set())
                owned.add(page.slot)
        for level, groups in enumerate(self.storage.levels):
            for index, group in enumerate(groups):
                group.allocator.check_integrity()
                held = len(live.get((level, index), ()))
                if held != group.allocator.num_live:
                    raise LogicError(
                        f"level {level} group {index}: {group.allocator.num_live} slots are live, "
                        f"caches hold {held}"
                    )

    def is_too_full_to_resume(self, own_slots: Sequence[int]) -> bool:
        """Return whether others use more than max_util_for_resume of a pool group that grows with tokens.

        `own_slots`: GPU slots per pool group that the asking cache itself holds.
        """
        limit = self._config.max_util_for_resume
        statistics = self.storage.statistics(GPU_LEVEL)
        return any(
            statistics[group].unavailable - own_slots[group] > limit * statistics[group].total
            for group in self._growing_groups
        )

    def _num_slots(self, buffer: BufferAttr) -> int:
        return self.storage.group(buffer.life_cycle).allocator.num_slots

    def _pool_tensor_address(self, buffer: BufferAttr) -> int:
        return self.storage.group(buffer.life_cycle).pools[buffer.pool].base_address

    def _require_open(self) -> None:
        if not self._is_open:
            raise MisuseError("the manager is shut down; create a new one")

    def _require_no_open_cache(self, call: str) -> None:
        if self._caches:
            names = [cache.id for cache in self._caches.values()]
            raise ResourceBusyError(
                f"{call}() while {len(names)} caches are open ({names[:8]}); close them first"
            )


def _dense_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


builtin_id = id
