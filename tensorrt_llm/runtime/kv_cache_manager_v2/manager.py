# SPDX-License-Identifier: Apache-2.0
"""`KVCacheManager`: the storage of one rank, its sizes and addresses, and the caches of its requests."""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from ._math import float32
from ._types import (
    GPU_LEVEL,
    CacheLevel,
    CacheTier,
    LayerGroupId,
    LayerId,
    MemAddress,
    PageIndexMode,
)
from .backends import make_backend
from .cache import CacheOptions, _KVCache
from .cold_codec import ColdPageCodec, slot_sizes_by_level
from .committer import PriorityCallback
from .config import BatchDesc, KVCacheDesc, KVCacheManagerConfig
from .errors import MisuseError, OutOfMemoryError, ResourceBusyError
from .events import KVCacheEventManager, StatsAndEvents
from .integrity import check_storage, check_tree
from .layout import BufferAttr, PageIndexConverter, PoolGroupDesc, build_layout
from .life_cycle import AttnLifeCycle, LifeCycleRegistry
from .matching import PrefixMatch, PrefixMatcher
from .quota import batch_slots, split_tier
from .rebalance import RatioTracker
from .reuse_tree import ReuseTree, SilentTreeListener
from .scratch import make_scratch_plan
from .stats import KVCacheIterationStats, LifeCycleStats, LookupStats, StatsCollector, describe_lookup
from .storage import Storage, StorageStatistics
from .storage_resize import set_num_slots
from .tokens import TokenIds, TokenPacker


class KVCacheManager:
    """Owns the memory of all tiers and hands out per-request caches.

    `event_manager`: told about everything that can be reused. `cold_page_codec`: the form of pages off the
    GPU; None keeps them as they are. `device`: where level 0 lives, "cuda" or "cpu". `clock`: seconds, for
    the rebalance cooldown. Raises MisuseError (a ValueError) for a configuration that cannot work and
    OutOfMemoryError when memory is refused; then nothing stays allocated.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        event_manager: KVCacheEventManager | None = None,
        cold_page_codec: ColdPageCodec | None = None,
        *,
        device: str = "cuda",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = replace(config, max_util_for_resume=float32(config.max_util_for_resume))
        self.device = torch.device(device)
        self.life_cycles = LifeCycleRegistry(config.layers, config.tokens_per_block)
        self._layout = build_layout(config.layers, self.life_cycles, config.tokens_per_block)
        self.scratch_plan = make_scratch_plan(config.swa_scratch_reuse, self._layout.layer_shares)
        groups = self._layout.pool_groups
        slot_sizes = slot_sizes_by_level(cold_page_codec, self._layout, len(config.cache_tiers))
        self._stats = StatsCollector(
            [[sum(sizes[group]) for group in self._layout.group_of] for sizes in slot_sizes]
        )
        packer = TokenPacker(text_only=config.text_only)
        if event_manager is not None:
            windows = [
                value.window_size if isinstance(value, AttnLifeCycle) else None for value in self.life_cycles
            ]
            event_manager.bind(windows, packer)
        listener = self._stats if event_manager is None else StatsAndEvents(self._stats, event_manager)
        self.storage = Storage(
            self._config, self._layout, make_backend(self.device), listener, slot_sizes, cold_page_codec
        )
        self.tree = ReuseTree(
            config.tokens_per_block, self.life_cycles, packer, event_manager or SilentTreeListener()
        )
        self.storage.unlink = self.tree.unlink
        self._matcher = PrefixMatcher(
            self.tree,
            self.life_cycles,
            allows_partial=config.enable_partial_reuse,
            backoff_tokens=config.reuse_match_backoff,
        )
        self._ratios = RatioTracker(config, [group.slot_bytes for group in groups], clock)
        self._growing_groups = {self._layout.group_of[index] for index, _ in self.life_cycles.attention}
        self._caches: dict[_KVCache, None] = {}
        self._is_open = True
        if event_manager is not None:
            num_slots = [[store.allocator.num_slots for store in level] for level in self.storage.levels]
            event_manager.start(num_slots)

    # Configuration

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

    # Requests

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
        """Return a new, suspended cache that starts from the longest reusable prefix of `input_tokens`.

        The prefix never covers the whole prompt of `expected_prompt_length` tokens (default: the input
        tokens), since at least one token must be computed to get logits. Its length is
        `num_committed_tokens`. Prefixes are shared within a `reuse_scope`. Without `input_tokens` nothing
        is reused. `custom_priority_callback` ranks each block for eviction (0 goes first) when it is
        committed. `text_only` promises that prompt and commits are text, and holds the caller to it: ids of
        2**20 and more are refused. `enable_request_stats`: keep the cache's `request_stats`.
        """
        self._require_open()
        ids = self.tree.packer.parse(() if input_tokens is None else input_tokens, text_only=text_only)
        options = CacheOptions(
            id=id,
            reuse_scope=reuse_scope,
            priority_callback=custom_priority_callback,
            text_only=text_only,
            keeps_stats=enable_request_stats,
        )
        cache = _KVCache(self, options)
        if input_tokens is not None:
            match = self._match(reuse_scope, ids, expected_prompt_length)
            num_prompt_tokens = max(len(ids), expected_prompt_length or 0)
            lookup = describe_lookup(match, num_prompt_tokens, self.life_cycles, self.tokens_per_block)
            cache.adopt_match(match, ids, lookup)
        self._caches[cache] = None
        return cache

    def probe_reuse(
        self, reuse_scope: Hashable, input_tokens: Sequence[int], expected_prompt_length: int | None = None
    ) -> int:
        """Return the tokens that `create_kv_cache` would reuse now."""
        self._require_open()
        ids = self.tree.packer.parse(input_tokens)
        return self._match(reuse_scope, ids, expected_prompt_length).num_tokens

    def _match(self, scope: Hashable, ids: TokenIds, expected_prompt_length: int | None) -> PrefixMatch:
        prompt_length = len(ids) if expected_prompt_length is None else expected_prompt_length
        if prompt_length < 0:
            raise MisuseError(
                f"expected_prompt_length is {prompt_length}; give the prompt's number of tokens"
            )
        return self._matcher.match(scope, ids, min(len(ids), prompt_length - 1))

    def forget(self, cache: _KVCache) -> None:
        """Called by a cache that closes, while it still holds its pages."""
        del self._caches[cache]
        num_slots = [0] * len(self._layout.pool_groups)
        for page in cache.iter_holds():
            num_slots[self._layout.group_of[page.life_cycle]] += 1
        self._ratios.add_sample(num_slots)

    def is_too_full_to_resume(self, own_slots: Sequence[int]) -> bool:
        """Return whether others use more than max_util_for_resume of a pool group that grows with tokens.

        A group of recurrent states alone does not grow, so a full one is no reason to refuse. `own_slots`:
        GPU slots per pool group that the asking cache itself keeps from eviction.
        """
        limit = self._config.max_util_for_resume
        for group in self._growing_groups:
            statistics = self.storage.levels[GPU_LEVEL][group].statistics()
            if statistics.unavailable - own_slots[group] > limit * statistics.total:
                return True
        return False

    # End

    def clear_reusable_blocks(self) -> None:
        """Forget every prefix. ResourceBusyError while a cache is open."""
        self._require_open()
        self._require_no_open_cache("clear_reusable_blocks")
        for level in self.storage.levels:
            for group in level:
                for page in list(group.queue):
                    if page.block is not None:
                        self.storage.withdraw(page)

    def shutdown(self) -> None:
        """Give all memory back, once. ResourceBusyError while a cache is open."""
        if not self._is_open:
            return
        self._require_no_open_cache("shutdown")
        self.clear_reusable_blocks()
        self._is_open = False
        self.storage.close()

    # Sizes

    def get_storage_statistics(self, level: CacheLevel = GPU_LEVEL) -> list[StorageStatistics]:
        """Return slot counts per pool group."""
        return self.storage.statistics(self._checked(level))

    def get_quota(self, level: CacheLevel = GPU_LEVEL) -> int:
        """Return the bytes a level was given; its pools may take up to a grain more."""
        return self.storage.tiers[self._checked(level)].quota

    def clamp_max_seq_len_for_mem(self, batch_size: int, upper: int) -> int:
        """Return the most tokens, up to `upper`, at which `batch_size` requests fit level 0 together."""
        low, high = 0, upper + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(BatchDesc([KVCacheDesc(middle, max(0, middle - 1))] * batch_size)):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, batch: BatchDesc) -> bool:
        needed = [0] * len(self._layout.pool_groups)
        per_life_cycle = batch_slots(batch, tuple(self.life_cycles), self.tokens_per_block, self.scratch_plan)
        for index, slots in enumerate(per_life_cycle):
            needed[self._layout.group_of[index]] += slots
        totals = [store.allocator.num_slots for store in self.storage.levels[GPU_LEVEL]]
        return all(slots <= total for slots, total in zip(needed, totals, strict=True))

    def resize(self, level: CacheLevel, quota: int) -> bool:
        """Give a level another quota in bytes. Pools keep their base addresses, pages may change slots.

        False, with all sizes and contents kept, when open caches need more than the new quota holds or
        memory is refused. ResourceBusyError when a slot that would go away is in use by an active cache.
        """
        self._require_open()
        tier = replace(self.storage.tiers[self._checked(level)], quota=quota)
        if not self._split_again(level, quota, self._current_ratio(level)):
            return False
        self.storage.tiers[level] = tier
        return True

    @property
    def need_adjustment(self) -> bool:
        """Whether `adjust` would give the pool groups clearly better shares."""
        return self._ratios.needs_adjustment(self._current_ratio(GPU_LEVEL))

    def adjust(self) -> bool:
        """Share every level among the pool groups as recent requests used them. All caches must be suspended.

        False when there is nothing to go by, or open caches do not fit; the shares then stay.
        """
        self._require_open()
        active = [cache.id for cache in self._caches if cache.is_active]
        if active:
            raise ResourceBusyError(f"adjust() while caches {active[:8]} are active; suspend them first")
        self._ratios.update_target()
        ratio = self._ratios.target_ratio
        if ratio is None:
            return False
        levels = [CacheLevel(index) for index in range(len(self.storage.tiers))]
        is_done = all(
            [
                self._split_again(level, self.get_quota(level), self._ratio_at(level, ratio))
                for level in levels
            ]
        )
        self._ratios.on_adjusted()
        return is_done

    def _ratio_at(self, level: CacheLevel, ratio: Sequence[float]) -> Sequence[float]:
        """Return the shares of a level's bytes that hold as many slots as shares `ratio` of GPU bytes."""
        hot, cold = (self.storage.sizings[one].slot_sizes for one in (GPU_LEVEL, level))
        if hot == cold:
            return ratio
        shares = [share * sum(c) / sum(h) for share, h, c in zip(ratio, hot, cold, strict=True)]
        return [share / math.fsum(shares) for share in shares]

    def _split_again(self, level: CacheLevel, quota: int, ratio: Sequence[float]) -> bool:
        tier, grain = self.cache_tier_list[level], self.storage.grains[level]
        try:
            split = split_tier(tier, quota, self.storage.sizings[level], ratio=ratio, grain=grain)
            set_num_slots(self.storage, level, split.num_slots, 0)
        except OutOfMemoryError:
            return False
        return True

    def _current_ratio(self, level: CacheLevel) -> list[float]:
        sizes = [store.allocator.num_slots * store.slot_bytes for store in self.storage.levels[level]]
        total = max(1, sum(sizes))
        return [size / total for size in sizes]

    # Addresses

    def get_layer_group_id(self, layer: LayerId) -> LayerGroupId:
        return self.life_cycles.of_layer(layer)

    def get_mem_pool_base_address(
        self, layer: LayerId, role: str, index_mode: PageIndexMode = PageIndexMode.SHARED
    ) -> MemAddress:
        """Return the address page index 0 refers to; in SHARED mode the layer's offset is inside."""
        buffer = self._layout.buffer(layer, role)
        offset = buffer.offset if index_mode is PageIndexMode.SHARED else 0
        pool = self.storage.group(buffer.life_cycle).pools[buffer.pool]
        return MemAddress(pool.base_address + offset)

    def get_page_stride(self, layer: LayerId, role: str) -> int:
        """Return the bytes from one page index to the next."""
        return self._layout.buffer(layer, role).page_stride_bytes

    def get_page_index_scale(self, layer: LayerId, role: str) -> int:
        """Return the buffers per slot: a block in slot s starts at page index s * scale * expansion."""
        return self._layout.buffer(layer, role).scale

    def get_page_index_upper_bound(self, layer: LayerId, role: str) -> int:
        """Return the bound on page indices from this buffer's own base; slots = ceil(bound / scale)."""
        buffer = self._layout.buffer(layer, role)
        return buffer.page_index_upper_bound(self._num_slots(buffer))

    def get_page_index_converter(
        self, layer: LayerId, role: str, index_mode: PageIndexMode = PageIndexMode.SHARED
    ) -> PageIndexConverter:
        """Return the function from slot ids to page indices of a buffer."""
        buffer = self._layout.buffer(layer, role)
        is_shared = index_mode is PageIndexMode.SHARED
        return PageIndexConverter(
            buffer.scale,
            buffer.expansion,
            layer_offset=0 if is_shared else buffer.offset // buffer.size,
            is_shared=is_shared,
            num_layer_buffers=buffer.num_layer_buffers,
            index_in_layer=buffer.index_in_layer,
        )

    def get_buffer_view(
        self, layer: LayerId, role: str, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return [num_slots, *shape] over the pool's memory; row s is this buffer's part of slot s.

        `shape` must fill the buffer exactly, or this buffer and the ones of the same layer right behind it
        (key and value together). Inner strides are dense, the row stride is scale * elements of one buffer.
        Get a new view after `resize` or `adjust`: the address stays, the number of slots does not.
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
        dense = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return part.as_strided((pool.num_slots, *shape), (part.stride(0), *dense))

    def _num_slots(self, buffer: BufferAttr) -> int:
        return self.storage.group(buffer.life_cycle).allocator.num_slots

    # Statistics

    def get_iteration_stats(self) -> KVCacheIterationStats:
        """Return what happened since the last call. MisuseError when enable_stats is off."""
        if not self._config.enable_stats:
            raise MisuseError("enable_stats is False in the configuration; set it to read statistics")
        stores = self.storage.levels[GPU_LEVEL]
        peaks = tuple(store.peak_live for store in stores)
        for store in stores:
            store.peak_live = store.allocator.num_live
        return self._stats.drain(peaks)

    def get_total_stats(self) -> tuple[LifeCycleStats, ...]:
        """Return the counters since the start, per life cycle."""
        return self._stats.totals()

    def count_lookup(self, lookup: LookupStats) -> None:
        self._stats.add_lookup(lookup)

    def on_resumed(self) -> None:
        self._stats.num_resumed += 1

    def on_suspended(self) -> None:
        self._stats.num_suspended += 1

    # Checks

    def check_integrity(self) -> None:
        """Raise LogicError unless free + owned = total and all holders, locks, queues and offers add up."""
        check_storage(self.storage, list(self._caches))
        check_tree(self.storage, self.tree)

    def _checked(self, level: CacheLevel) -> CacheLevel:
        self._require_open()
        if not GPU_LEVEL <= level <= self.storage.last_level:
            raise MisuseError(f"level is {level}; this manager has levels 0 to {self.storage.last_level}")
        return level

    def _require_open(self) -> None:
        if not self._is_open:
            raise MisuseError("the manager is shut down; create a new one")

    def _require_no_open_cache(self, call: str) -> None:
        if self._caches:
            names = [cache.id for cache in self._caches]
            raise ResourceBusyError(
                f"{call}() while {len(names)} caches are open ({names[:8]}); close them first"
            )
