# SPDX-License-Identifier: Apache-2.0
"""A literal model of the cache core: it stores every token and every byte it has written, and compares.

Each token's cell in an attention page holds a hash of all tokens up to it, and a recurrent state holds the
hash of all tokens it has seen. So two pages are equal exactly when their prefixes are, and any mix-up of
slots, tiers, snapshots or partial copies reads back wrong. `Machine` has one method per rule; `drive` and
the hypothesis test call them.
"""

import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheLevel,
    CacheStatus,
    CacheTierConfig,
    CommittedBlockDropPlan,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerConfig,
    LayerGroupId,
    LayerId,
    PageIndexMode,
    PoolGroupDesc,
    Priority,
    SsmLayerConfig,
    SwaScratchReuseConfig,
    _KVCache,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import round_up
from tensorrt_llm.runtime.kv_cache_manager_v2.life_cycle import AttnLifeCycle, LifeCycle, SsmLifeCycle
from tensorrt_llm.runtime.kv_cache_manager_v2.storage import Storage

KIB, MIB = 1 << 10, 1 << 20
TOKENS_PER_BLOCK = 4
MAX_OPEN_CACHES = 6
STATE_LAYER = LayerId(2)
_HASH_BITS = 62


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kind of model and machine. Slots are large, so that a few MiB hold a few of them.

    `num_host_slots` counts attention pages; the GPU tier has two grains of 2 MiB or what the floors need.
    `rewind`: tokens that a step may take back where its stale blocks share slots, None where they do not.
    """

    has_full: bool = True
    window: int | None = None
    num_window_layers: int = 1
    sink: int | None = None
    rewind: int | None = None
    has_codec: bool = False
    text_only: bool = True
    has_ssm: bool = True
    num_host_slots: int = 0
    num_disk_grains: int = 0
    allows_partial: bool = True
    keeps_minimum: bool = True
    has_priorities: bool = False
    backoff: int = 0
    page_bytes: int = 128 * KIB
    state_bytes: int = 192 * KIB

    def layers(self) -> list[LayerConfig]:
        layers: list[LayerConfig] = []
        key = [BufferConfig("key", self.page_bytes)]
        if self.has_full:
            layers.append(AttentionLayerConfig(LayerId(0), key))
        if self.window is not None:
            for layer in range(10, 10 + self.num_window_layers):
                layers.append(AttentionLayerConfig(LayerId(layer), key, self.window, self.sink))
        if self.has_ssm:
            layers.append(SsmLayerConfig(STATE_LAYER, [BufferConfig("ssm_state", self.state_bytes)]))
        return layers

    def config(self, directory: str) -> KVCacheManagerConfig:
        tiers: list[CacheTierConfig] = [GpuCacheTierConfig(4 * MIB)]
        if self.num_host_slots:
            tiers.append(HostCacheTierConfig(self.num_host_slots * self.page_bytes))
        if self.num_disk_grains:
            tiers.append(DiskCacheTierConfig(self.num_disk_grains * 2 * MIB, directory))
        return KVCacheManagerConfig(
            tokens_per_block=TOKENS_PER_BLOCK,
            cache_tiers=tiers,
            layers=self.layers(),
            constraints=[BatchDesc([KVCacheDesc(0, 0)] * 3)],
            enable_partial_reuse=self.allows_partial,
            commit_min_snapshot=self.keeps_minimum or self.has_ssm,
            reuse_match_backoff=self.backoff,
            rebalance_target_ratio_update_interval=5,
            swa_scratch_reuse=None if self.rewind is None else SwaScratchReuseConfig(self.rewind),
            text_only=self.text_only,
        )


VARIANTS: tuple[Variant, ...] = (
    Variant(has_ssm=False),
    Variant(),
    Variant(num_host_slots=12),
    Variant(num_host_slots=10, num_disk_grains=2),
    Variant(window=6, sink=3),
    Variant(window=6, num_host_slots=14, has_priorities=True),
    Variant(has_ssm=False, window=9, sink=4, num_host_slots=8, keeps_minimum=False),
    Variant(has_full=False, window=5, has_ssm=False, keeps_minimum=False),
    Variant(has_full=False, window=5, num_host_slots=6),
    Variant(has_full=False, num_host_slots=6),
    Variant(allows_partial=False, num_host_slots=9),
    Variant(has_ssm=False, allows_partial=False, backoff=3, has_priorities=True, text_only=False),
    Variant(has_ssm=False, num_host_slots=4, num_disk_grains=1, backoff=1),
    Variant(page_bytes=8 * KIB, state_bytes=8 * KIB),
    Variant(page_bytes=8 * KIB, has_ssm=False),
    Variant(page_bytes=256 * KIB, state_bytes=512 * KIB),
    Variant(page_bytes=512 * KIB, state_bytes=512 * KIB, num_host_slots=5),
    Variant(page_bytes=256 * KIB, state_bytes=700 * KIB, window=5, num_host_slots=6),
    Variant(page_bytes=512 * KIB, window=4, sink=4, has_ssm=False, keeps_minimum=False),
    Variant(page_bytes=512 * KIB, window=7, has_full=False, has_ssm=False, keeps_minimum=False),
    Variant(window=6, num_window_layers=3, rewind=6, page_bytes=32 * KIB, state_bytes=64 * KIB),
    Variant(
        window=5, sink=3, num_window_layers=2, rewind=9, num_host_slots=28, has_ssm=False,
        page_bytes=64 * KIB,
    ),
    Variant(has_full=False, window=5, num_window_layers=4, rewind=6, num_host_slots=24, keeps_minimum=False),
    Variant(num_host_slots=8, has_codec=True),
    Variant(
        window=6, num_window_layers=3, rewind=7, num_host_slots=8, num_disk_grains=1, has_codec=True,
        page_bytes=64 * KIB, text_only=False,
    ),
)  # fmt: skip


class HalvingCodec:
    """Keeps the first half of every 4 KiB, which is all that the model writes to, each byte plus 17."""

    def cold_slot_sizes(self, group: PoolGroupDesc) -> list[int]:
        return [size // 2 for size in group.slot_sizes]

    def encode(self, life_cycle: int, pool: int, hot: torch.Tensor, cold: torch.Tensor) -> None:
        cold.view(-1, 2 * KIB).copy_(hot.view(-1, 4 * KIB)[:, : 2 * KIB] + 17)

    def decode(self, life_cycle: int, pool: int, cold: torch.Tensor, hot: torch.Tensor) -> None:
        hot.fill_(0xEE)
        hot.view(-1, 4 * KIB)[:, : 2 * KIB] = cold.view(-1, 2 * KIB) - 17


class InjectedFailure(Exception):
    """Stands for any failure below the cache core, such as a driver error."""


class FaultInjector:
    """Makes the n-th allocation or copy from now on fail. Sits around a storage's own two ways down."""

    def __init__(self, storage: Storage) -> None:
        self.countdown: int | None = None
        self.num_calls = 0
        backend = storage.backend
        backend.copy_slot = self._wrap(backend.copy_slot)  # type: ignore[method-assign]
        backend.convert_slot = self._wrap(backend.convert_slot)  # type: ignore[method-assign]
        for level in storage.levels:
            for store in level:
                store.allocator = _FaultyAllocator(store.allocator, self)  # type: ignore[assignment]

    def _wrap(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            self.tick()
            function(*args)

        return call

    def tick(self) -> None:
        self.num_calls += 1
        if self.countdown is None:
            return
        self.countdown -= 1
        if self.countdown < 0:
            self.countdown = None
            raise InjectedFailure


class _FaultyAllocator:
    """A slot allocator whose `allocate` may fail."""

    def __init__(self, allocator: object, injector: FaultInjector) -> None:
        object.__setattr__(self, "_allocator", allocator)
        object.__setattr__(self, "_injector", injector)

    def __getattr__(self, name: str) -> object:
        return getattr(self._allocator, name)

    def allocate(self, num_slots: int) -> object:
        if num_slots:
            self._injector.tick()
        return self._allocator.allocate(num_slots)  # type: ignore[attr-defined]


def rolling_hashes(tokens: Sequence[int], start: int = 0) -> list[int]:
    """Return, for each token, a hash of all tokens up to it."""
    hashes: list[int] = []
    value = start
    for token in tokens:
        value = hash((value, token, 0x5EED)) & ((1 << _HASH_BITS) - 1)
        hashes.append(value)
    return hashes


@dataclass(eq=False)
class Request:
    """What the model knows of one open cache. `tokens[:num_written]` are in its pages.

    step_end: tokens up to which the next step has its room already.
    """

    cache: _KVCache
    scope: Hashable
    tokens: list[int]
    num_written: int = 0
    num_committed: int = 0
    step_end: int = 0
    has_state: bool = False
    may_commit: bool = True
    hashes: list[int] = field(default_factory=list)

    def rehash(self) -> None:
        self.hashes = rolling_hashes(self.tokens)

    def continue_text(self, *, noise: bool) -> None:
        """Append the token that the text so far determines (equal prefixes go on equally), or another."""
        last = self.hashes[-1] if self.hashes else 0
        self.tokens.append((last + noise) % 2)
        self.hashes += rolling_hashes(self.tokens[-1:], last)


class Machine:
    """Runs rules on a manager and on the model side by side; whoever drives it calls `check` after each."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._directory = tempfile.TemporaryDirectory()
        codec = HalvingCodec() if variant.has_codec else None
        config = variant.config(self._directory.name)
        self.manager = KVCacheManager(config, cold_page_codec=codec, device="cpu")
        self.faults = FaultInjector(self.manager.storage)
        self.requests: list[Request] = []
        self.history: list[tuple[Hashable, tuple[int, ...]]] = []
        self.snapshots: set[tuple[Hashable, tuple[int, ...]]] = set()
        self.offered: set[tuple[Hashable, tuple[int, ...]]] = set()
        self._plans: list[CommittedBlockDropPlan] = []
        self._views: dict[tuple[int, bool], np.ndarray] = {}
        self.counts: dict[str, int] = {}
        self._num_dropped_at_clear = 0

    # Rules. `pick` arguments are any non-negative integers.

    def create(self, scope: Hashable, tokens: Sequence[int]) -> None:
        """Open a cache for a prompt; what is reused must have been offered, with a token to spare."""
        if len(self.requests) >= MAX_OPEN_CACHES or not tokens:
            return
        callback = self._priority if self.variant.has_priorities else None
        expected = self.manager.probe_reuse(scope, tokens)
        cache = self.manager.create_kv_cache(scope, tokens, len(self.history), callback)
        num_reused = cache.num_committed_tokens
        assert num_reused == expected == cache.capacity == cache.history_length
        assert 0 <= num_reused < len(tokens)
        self._check_reuse(scope, tuple(tokens), num_reused)
        request = Request(cache, scope, list(tokens), num_reused, num_reused)
        request.rehash()
        self.requests.append(request)
        self._count("reused", num_reused > 0)

    def fork(self, pick: int, length: int, suffix: Sequence[int]) -> None:
        """Open a cache for a prefix of an earlier sequence and other tokens behind it."""
        if self.history:
            scope, tokens = self.history[pick % len(self.history)]
            kept = len(tokens) if pick % 2 else length % (len(tokens) + 1)
            self.create(scope, [*tokens[:kept], *suffix])

    def resume(self, pick: int) -> None:
        request = self._pick(pick, CacheStatus.SUSPENDED)
        if request is None:
            return
        if request.cache.resume(pick):
            request.has_state = request.has_state or request.num_written > 0
            self._check_content(request)
            self._count("resumed", True)
        else:
            assert request.cache.status is CacheStatus.SUSPENDED
            self._count("resume_refused", True)

    def compute(self, pick: int, num_tokens: int, num_drafts: int) -> None:
        """Write tokens and drafts behind what is written; the drafts are given back."""
        request = self._pick(pick, CacheStatus.ACTIVE)
        if request is None:
            return
        cache, begin = request.cache, request.num_written
        end = request.step_end or self._step_end(request, pick, num_tokens)
        before = self._observe(cache)
        history = max(cache.history_length, begin if pick % 2 and not request.step_end else 0)
        if not cache.resize(max(cache.capacity, end + num_drafts), history):
            assert self._observe(cache) == before
            self._count("grow_refused", True)
            return
        self._count("shared", any(cache.get_scratch_desc(group) for group in self._groups()))
        self._write(request, begin, end)
        self._write_drafts(request, end, end + num_drafts)
        # An engine may say only with the next step's room how far the last one came.
        came_to = cache.history_length if pick % 2 == 0 else end - pick % 3
        assert cache.resize(end, max(cache.history_length, came_to))
        request.num_written, request.step_end = end, 0

    def _step_end(self, request: Request, pick: int, num_tokens: int) -> int:
        """Return where the next step of the request ends, its text continued up to there."""
        end = request.num_written + num_tokens * (1 if self.variant.rewind is None else 3)
        if pick % 3:
            end = round_up(end, TOKENS_PER_BLOCK)
        while len(request.tokens) < end:
            request.continue_text(noise=pick % 7 == 0)
        return end

    def reserve(self, pick: int, num_tokens: int) -> None:
        """Take the room of a step that is computed later, or give it back before that."""
        request = self._pick(pick, CacheStatus.ACTIVE)
        if request is None:
            return
        cache, begin = request.cache, request.num_written
        if request.step_end:
            assert cache.resize(begin)
            request.step_end = 0
            return
        before, end = self._observe(cache), self._step_end(request, pick, num_tokens)
        if cache.resize(end, max(begin, cache.history_length)):
            request.step_end = end
        else:
            assert self._observe(cache) == before

    def commit(self, pick: int, is_end: bool) -> None:
        """Commit everything that is written."""
        request = self._pick(pick, CacheStatus.ACTIVE)
        if request is None or not request.may_commit or not request.has_state:
            return
        tokens = request.tokens[request.num_committed : request.num_written]
        skipped = request.cache.num_skipped_snapshots
        request.cache.commit(tokens, is_end)
        request.num_committed = request.num_written
        self._remember(request, request.num_committed)
        self._offer(request, request.cache.num_skipped_snapshots == skipped)
        if is_end:
            self._finish(request)

    def stop_committing(self, pick: int) -> None:
        if self.requests:
            request = self.requests[pick % len(self.requests)]
            request.cache.stop_committing()
            if request.may_commit:
                self._finish(request)

    def suspend(self, pick: int) -> None:
        request = self._pick(pick, CacheStatus.ACTIVE)
        if request is not None:
            request.cache.suspend()

    def prefetch(self, pick: int, level: int) -> None:
        request = self._pick(pick, CacheStatus.SUSPENDED)
        if request is not None:
            request.cache.prefetch(CacheLevel(level % len(self.manager.cache_tier_list)))

    def close(self, pick: int) -> None:
        if not self.requests:
            return
        request = self.requests.pop(pick % len(self.requests))
        self._plans.append(request.cache.plan_committed_block_drop())
        request.cache.close()
        self._remember(request, request.num_written)

    def drop_committed(self, pick: int) -> None:
        """Carry out the drop plan of some closed cache."""
        if self._plans:
            plan = self._plans.pop(pick % len(self._plans))
            self._num_dropped_at_clear -= plan.drop()
            assert plan.num_droppable == 0
            self._plans = self._plans[-20:]

    def rebalance(self) -> None:
        for request in self.requests:
            if request.cache.is_active:
                request.cache.suspend()
        self.manager.adjust()
        self._views.clear()

    def resize_tier(self, level: int, quota_slots: int) -> None:
        """Change a quota. Active caches must be suspended for the GPU tier to shrink."""
        tiers = self.manager.cache_tier_list
        chosen = CacheLevel(level % len(tiers))
        if chosen == 0:
            for request in self.requests:
                if request.cache.is_active:
                    request.cache.suspend()
        self.manager.resize(chosen, quota_slots * self.variant.page_bytes)
        self._views.clear()

    def clear(self) -> None:
        """Close everything and forget every prefix: all slots must be free."""
        while self.requests:
            self.close(0)
        for level in range(len(self.manager.cache_tier_list)):
            for statistics in self.manager.get_storage_statistics(CacheLevel(level)):
                assert statistics.available == statistics.total
        self.manager.clear_reusable_blocks()
        self.offered.clear()
        self.snapshots.clear()
        self._plans.clear()
        self._num_dropped_at_clear = self._num_dropped()
        for level in range(len(self.manager.cache_tier_list)):
            for statistics in self.manager.get_storage_statistics(CacheLevel(level)):
                assert statistics.free == statistics.total

    def with_fault(self, countdown: int, rule: Callable[[], None]) -> None:
        """Run a rule while the n-th allocation or copy fails; if it does, nothing may have changed."""
        before = [self._observe(request.cache) for request in self.requests]
        observed = list(self.requests)
        self.faults.countdown = countdown
        try:
            rule()
        except InjectedFailure:
            self._count("injected", True)
            self._views.clear()
            assert [request for request in observed if request in self.requests] == observed
            for request, seen in zip(observed, before, strict=True):
                now = self._observe(request.cache)
                if now["status"] is seen["status"]:
                    assert now == seen
        finally:
            self.faults.countdown = None

    def end(self) -> None:
        """Close everything and shut down."""
        self.clear()
        self.manager.check_integrity()
        self.manager.shutdown()
        self._directory.cleanup()

    # Checks

    def check(self) -> None:
        """Compare everything with the model."""
        self.manager.check_integrity()
        for request in self.requests:
            cache = request.cache
            assert cache.num_committed_tokens == request.num_committed
            assert request.num_committed <= cache.history_length <= cache.capacity
            if cache.is_active:
                self._check_content(request)

    def _check_content(self, request: Request) -> None:
        for group, value in self.manager.life_cycles.items():
            if isinstance(value, SsmLifeCycle):
                slot = request.cache.get_ssm_block_base_index(group)
                assert slot >= 0
                if request.has_state and request.num_written:
                    found = int(self._view(STATE_LAYER)[slot, 0])
                    assert found == request.hashes[request.num_written - 1], "recurrent state"
            else:
                self._check_pages(request, group, value)

    def _check_pages(self, request: Request, group: LayerGroupId, value: AttnLifeCycle) -> None:
        cache = request.cache
        indices = list(cache.get_base_page_indices(group))
        scratch = cache.get_scratch_desc(group)
        shared = set(scratch.ordinals) if scratch else set()
        stale = value.stale_range(cache.history_length, TOKENS_PER_BLOCK)
        over = value.stale_range(request.num_written, TOKENS_PER_BLOCK)
        assert len(indices) == cache.num_blocks
        live = [index for index in indices if index >= 0] + list(scratch.slots if scratch else ())
        assert len(set(live)) == len(live)
        for ordinal, index in enumerate(indices):
            begin = ordinal * TOKENS_PER_BLOCK
            if index < 0:
                is_shared = ordinal in shared and (begin >= request.num_written or ordinal < over.stop)
                assert is_shared or stale.start <= ordinal < stale.stop, "a page is missing"
                continue
            expected = request.hashes[begin : min(begin + TOKENS_PER_BLOCK, request.num_written)]
            for layer in self.manager.layer_grouping[group]:
                found = self._view(layer)[index, : len(expected)].tolist()
                assert found == expected, f"layer {layer}, tokens from {begin}"

    def _check_reuse(self, scope: Hashable, tokens: tuple[int, ...], num_reused: int) -> None:
        if num_reused and self.variant.has_ssm:
            assert (scope, tokens[:num_reused]) in self.snapshots, "reused a length nobody snapshotted"
        if num_reused:
            assert any(
                owner == scope and sequence[:num_reused] == tokens[:num_reused]
                for owner, sequence in self.offered
            ), "reused tokens that nobody committed"
        if self.variant.window is not None or self._num_dropped() != self._num_dropped_at_clear:
            return
        if not self.variant.has_ssm:
            assert num_reused == self._best_offer(scope, tokens), "a longer prefix was offered"
        else:
            assert num_reused >= self._best_aligned_snapshot(scope, tokens), "a deeper snapshot was offered"

    def _num_dropped(self) -> int:
        return sum(counts.dropped_blocks for counts in self.manager.get_total_stats())

    def _best_offer(self, scope: Hashable, tokens: tuple[int, ...]) -> int:
        """Return the reuse that full attention alone allows when nothing was ever dropped."""
        best = 0
        for owner, sequence in self.offered:
            if owner == scope:
                common = _num_common(sequence, tokens[:-1])
                best = max(
                    best, common if self.variant.allows_partial else common - common % TOKENS_PER_BLOCK
                )
        best = max(0, best - self.variant.backoff)
        return best if self.variant.allows_partial else best - best % TOKENS_PER_BLOCK

    def _best_aligned_snapshot(self, scope: Hashable, tokens: tuple[int, ...]) -> int:
        """Return the longest snapshot at a block's end: such a one stays until it is dropped."""
        lengths = [
            len(sequence)
            for owner, sequence in self.snapshots
            if owner == scope
            and len(sequence) % TOKENS_PER_BLOCK == 0
            and sequence == tokens[: len(sequence)]
        ]
        return max((length for length in lengths if length < len(tokens)), default=0)

    # The model

    def _remember(self, request: Request, num_tokens: int) -> None:
        self.history = [*self.history[-20:], (request.scope, tuple(request.tokens[:num_tokens]))]

    def _offer(self, request: Request, has_snapshot: bool) -> None:
        tokens = tuple(request.tokens[: request.num_committed])
        full = tokens[: len(tokens) - len(tokens) % TOKENS_PER_BLOCK]
        self.offered.add((request.scope, tokens if self.variant.has_ssm else full))
        if self.variant.has_ssm and has_snapshot:
            self.snapshots.add((request.scope, tokens))

    def _finish(self, request: Request) -> None:
        request.may_commit = False
        if self.variant.allows_partial and request.has_state and request.num_committed:
            self.offered.add((request.scope, tuple(request.tokens[: request.num_committed])))

    def _write(self, request: Request, begin: int, end: int) -> None:
        self._write_cells(request.cache, begin, request.hashes[begin:end])
        request.has_state = True
        ssm_id = self.manager.life_cycles.ssm_id
        if ssm_id is not None and end:
            slot = request.cache.get_ssm_block_base_index(ssm_id)
            self._view(STATE_LAYER)[slot, 0] = request.hashes[end - 1]

    def _write_drafts(self, request: Request, begin: int, end: int) -> None:
        self._write_cells(request.cache, begin, [-1 - step for step in range(end - begin)])

    def _write_cells(self, cache: _KVCache, begin: int, cells: Sequence[int]) -> None:
        """Write a step's cells as a model does, one layer after the other, each reading what it wrote."""
        for group in self._groups():
            for layer in self.manager.layer_grouping[group]:
                view, pages = self._pool_view(layer), self._pages_of(cache, group, layer)
                places = [divmod(begin + step, TOKENS_PER_BLOCK) for step in range(len(cells))]
                for (ordinal, offset), cell in zip(places, cells, strict=True):
                    if pages[ordinal] >= 0:
                        view[pages[ordinal], offset] = cell
                for (ordinal, offset), cell in zip(places, cells, strict=True):
                    assert pages[ordinal] < 0 or view[pages[ordinal], offset] == cell, "a shared place"

    def _pages_of(self, cache: _KVCache, group: LayerGroupId, layer: LayerId) -> list[int]:
        converter = self.manager.get_page_index_converter(layer, "key", PageIndexMode.PER_LAYER)
        return converter(cache.get_base_page_indices(group), cache.get_scratch_desc(group))

    def _groups(self) -> list[LayerGroupId]:
        return [group for group, _ in self.manager.life_cycles.attention]

    def _view(self, layer: LayerId) -> np.ndarray:
        """Return a layer's own buffer in every slot, int64 [num_slots, 8-byte words]."""
        if (layer, False) not in self._views:
            is_state = layer == STATE_LAYER
            role = "ssm_state" if is_state else "key"
            size = self.variant.state_bytes if is_state else self.variant.page_bytes
            view = self.manager.get_buffer_view(layer, role, torch.int64, (size // 8,)).numpy()
            self._views[layer, False] = view
        return self._views[layer, False]

    def _pool_view(self, layer: LayerId) -> np.ndarray:
        """Return all buffers of a layer's pool, int64 [page index per layer, 8-byte words]."""
        if (layer, True) not in self._views:
            buffer = self.manager.storage.layout.buffer(layer, "key")
            pool = self.manager.storage.group(buffer.life_cycle).pools[buffer.pool]
            words = pool.bytes_view().view(torch.int64).view(-1, self.variant.page_bytes // 8)
            self._views[layer, True] = words.numpy()
        return self._views[layer, True]

    def _pick(self, pick: int, status: CacheStatus) -> Request | None:
        candidates = [request for request in self.requests if request.cache.status is status]
        return candidates[pick % len(candidates)] if candidates else None

    def _observe(self, cache: _KVCache) -> dict[str, object]:
        seen: dict[str, object] = {
            "status": cache.status,
            "lengths": (cache.capacity, cache.history_length, cache.num_committed_tokens),
        }
        if cache.is_active:
            groups = range(len(self.manager.life_cycles))
            seen["pages"] = [list(cache.get_base_page_indices(LayerGroupId(group))) for group in groups]
            seen["shared"] = [cache.get_scratch_desc(LayerGroupId(group)) for group in groups]
        return seen

    def _priority(self, ordinal: int, value: LifeCycle) -> Priority:
        return Priority(20 if ordinal % 3 else 60)

    def _count(self, name: str, happened: bool) -> None:
        self.counts[name] = self.counts.get(name, 0) + happened


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
