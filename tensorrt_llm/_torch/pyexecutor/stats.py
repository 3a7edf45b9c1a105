# SPDX-License-Identifier: Apache-2.0
"""What the loop counts: iteration statistics in TensorRT-LLM's JSON keys, and gauges that reading
does not drain.
"""

from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from resource import getpagesize
from threading import Lock
from typing import Protocol

import torch

from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests


class KvCacheStats(Protocol):
    """The cache manager's counters; blocks are attention pages on the device."""

    @property
    def max_num_blocks(self) -> int: ...
    @property
    def free_num_blocks(self) -> int: ...
    @property
    def used_num_blocks(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def alloc_total_blocks(self) -> int: ...
    @property
    def reused_blocks(self) -> int: ...
    @property
    def missed_blocks(self) -> int: ...
    @property
    def cache_hit_rate(self) -> float: ...


@dataclass(slots=True, kw_only=True)
class StepSummary:
    """One iteration of the loop, filled in as it goes. `running`, `paused` and `waiting` are requests after
    it; the paused ones have run before and gave way to others.

    `prompt_tokens`, and the `cached_tokens` among them, are of prompts that ran for the first time.
    """

    iteration: int
    started_at: float
    latency_s: float = 0.0
    draft_s: float = 0.0
    num_new: int = 0
    queue_s: float = 0.0
    num_completed: int = 0
    running: int = 0
    paused: int = 0
    waiting: int = 0
    waiting_prompt_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_contexts: int = 0
    context_tokens: int = 0
    context_kv_tokens: int = 0
    num_generations: int = 0
    generation_kv_tokens: int = 0
    emitted_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_drafted: int = 0
    kv_cache: KvCacheStats | None = None
    new_blocks: int = 0

    def note_schedule(self, batch: ScheduledRequests, now: float) -> None:
        """Count the batch before it runs, and stamp the requests that run for the first time."""
        self.num_contexts = len(batch.context_requests)
        self.num_generations = len(batch.generation_requests)
        for req in batch.context_requests:
            self.context_tokens += req.context_chunk_size
            self.context_kv_tokens += req.context_current_position + req.context_chunk_size
            if req.first_scheduled is None:
                req.first_scheduled = now
                self.queue_s += now - req.arrival
                self.prompt_tokens += req.prompt_len
                self.cached_tokens += req.cached_tokens
        for req in batch.generation_requests:
            self.generation_kv_tokens += req.num_tokens

    def note_round(self, num_drafts: int, num_accepted: int) -> None:
        """Count one request's verify round."""
        if num_drafts:
            self.draft_tokens += num_drafts
            self.accepted_tokens += num_accepted
            self.num_drafted += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Gauges and running totals at one moment. `*_total` only grow; the others are as of now.

    Pages are attention pages on the device, of `tokens_per_page` tokens. drafted/accepted_by_position[j]
    count drafts in place j of their round.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_requests_paused: int = 0
    num_requests_completed_total: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_pages: int
    used_pages: int
    tokens_per_page: int
    cache_hit_rate: float
    reused_pages_total: int
    missed_pages_total: int
    iterations_total: int
    iteration_latency_s: float
    prompt_tokens_total: int
    prompt_cached_tokens_total: int
    generation_tokens_total: int
    draft_tokens_total: int
    accepted_tokens_total: int
    drafted_rounds_total: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round that had drafts: 1 + accepted drafts / rounds, sums first."""
        if self.drafted_rounds_total == 0:
            return 1.0
        return 1 + self.accepted_tokens_total / self.drafted_rounds_total


class StatsRecorder:
    """Keeps what the loop records; `drain` and `snapshot` may be called from any thread."""

    def __init__(self, limits: SchedulerLimits, max_draft_len: int, max_stats_len: int) -> None:
        self._limits = limits
        self._max_draft_len = max_draft_len
        self._steps: deque[StepSummary] = deque(maxlen=max_stats_len)
        self._lock = Lock()
        self._last = StepSummary(iteration=0, started_at=0.0)
        self._completed = self._iterations = 0
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._draft_tokens = self._accepted_tokens = self._drafted_rounds = 0
        self._drafted_by_position = [0] * max_draft_len
        self._accepted_by_position = [0] * max_draft_len

    def record(self, step: StepSummary) -> None:
        """Add an iteration, and take over its gauges. One that ran nothing only updates the gauges."""
        with self._lock:
            if self._last.kv_cache is not None and step.kv_cache is not None:
                step.new_blocks = step.kv_cache.alloc_total_blocks - self._last.kv_cache.alloc_total_blocks
            self._last = step
            self._completed += step.num_completed
            if step.num_contexts + step.num_generations == 0:
                return
            self._steps.append(step)
            self._iterations += 1
            self._prompt_tokens += step.prompt_tokens
            self._cached_tokens += step.cached_tokens
            self._generation_tokens += step.emitted_tokens
            self._draft_tokens += step.draft_tokens
            self._accepted_tokens += step.accepted_tokens
            self._drafted_rounds += step.num_drafted

    def record_round(self, num_drafts: int, num_accepted: int) -> None:
        """Add one request's verify round to the counts by position."""
        for position in range(num_drafts):
            self._drafted_by_position[position] += 1
        for position in range(num_accepted):
            self._accepted_by_position[position] += 1

    def drain(self) -> list[dict[str, object]]:
        """The iterations since the last call (at most max_stats_len), oldest first, as JSON values."""
        with self._lock:
            steps = list(self._steps)
            self._steps.clear()
        memory = _memory_usage() if steps else {}
        return [{**_iteration_json(step, self._limits, self._max_draft_len), **memory} for step in steps]

    def snapshot(self, num_submitted: int) -> EngineSnapshot:
        """The gauges after the last iteration; `num_submitted` requests have come since and wait as well."""
        with self._lock:
            last, kv_cache = self._last, self._last.kv_cache
            assert kv_cache is not None, "the loop records the cache's counters before anyone reads them"
            return EngineSnapshot(
                num_requests_running=last.running,
                num_requests_waiting=last.waiting + num_submitted,
                num_requests_paused=last.paused,
                num_requests_completed_total=self._completed,
                max_batch_size=self._limits.max_batch_size,
                max_num_tokens=self._limits.max_num_tokens,
                max_seq_len=self._limits.max_seq_len,
                max_pages=kv_cache.max_num_blocks,
                used_pages=kv_cache.used_num_blocks,
                tokens_per_page=kv_cache.tokens_per_block,
                cache_hit_rate=kv_cache.cache_hit_rate,
                reused_pages_total=kv_cache.reused_blocks,
                missed_pages_total=kv_cache.missed_blocks,
                iterations_total=self._iterations,
                iteration_latency_s=last.latency_s,
                prompt_tokens_total=self._prompt_tokens,
                prompt_cached_tokens_total=self._cached_tokens,
                generation_tokens_total=self._generation_tokens,
                draft_tokens_total=self._draft_tokens,
                accepted_tokens_total=self._accepted_tokens,
                drafted_rounds_total=self._drafted_rounds,
                drafted_by_position=tuple(self._drafted_by_position),
                accepted_by_position=tuple(self._accepted_by_position),
            )


def _memory_usage() -> dict[str, object]:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return {
        "gpuMemUsage": on_gpu,
        "cpuMemUsage": resident_pages * getpagesize(),
        "pinnedMemUsage": 0,
    }


def _iteration_json(step: StepSummary, limits: SchedulerLimits, max_draft_len: int) -> dict[str, object]:
    """One iteration in the keys of `GET /metrics` (facts of TensorRT-LLM; absent groups are left out)."""
    result: dict[str, object] = {
        "timestamp": datetime.fromtimestamp(step.started_at).strftime("%m-%d-%Y %H:%M:%S.%f"),
        "iter": step.iteration,
        "iterLatencyMS": step.latency_s * 1e3,
        "newActiveRequestsQueueLatencyMS": step.queue_s * 1e3,
        "numNewActiveRequests": step.num_new,
        "numActiveRequests": step.running + step.paused,
        "numQueuedRequests": step.waiting,
        "numCompletedRequests": step.num_completed,
        "maxNumActiveRequests": limits.max_batch_size,
        "maxBatchSizeStatic": limits.max_batch_size,
        "maxBatchSizeTunerRecommended": 0,
        "maxBatchSizeRuntime": limits.max_batch_size,
        "maxNumTokensStatic": limits.max_num_tokens,
        "maxNumTokensTunerRecommended": 0,
        "maxNumTokensRuntime": limits.max_num_tokens,
        "inflightBatchingStats": _inflight_json(step),
        **_queue_json(step),
    }
    if step.kv_cache is not None:
        result["kvCacheStats"] = _kv_cache_json(step.kv_cache, step.new_blocks)
    if max_draft_len > 0:
        result["specDecodingStats"] = _speculation_json(step)
    return result


def _inflight_json(step: StepSummary) -> dict[str, object]:
    sampled = max(step.num_generations, 1)
    return {
        "numScheduledRequests": step.num_contexts + step.num_generations,
        "numContextRequests": step.num_contexts,
        "numGenRequests": step.num_generations,
        "numPausedRequests": step.paused,
        "numCtxTokens": step.context_tokens,
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": (step.accepted_tokens + step.num_generations) / sampled,
    }


def _queue_json(step: StepSummary) -> dict[str, object]:
    return {
        "scheduledNumPrefillRequests": step.num_contexts,
        "scheduledSumPrefillTokens": step.context_tokens,
        "scheduledSumPrefillKvTokens": step.context_kv_tokens,
        "scheduledNumDecodeRequests": step.num_generations,
        "scheduledSumDecodeKvTokens": step.generation_kv_tokens,
        "queuedNumPrefillRequests": step.waiting,
        "queuedSumPrefillTokens": step.waiting_prompt_tokens,
        "queuedNumDecodeRequests": 0,
        "queuedSumDecodeKvTokens": 0,
    }


def _kv_cache_json(stats: KvCacheStats, new_blocks: int) -> dict[str, object]:
    return {
        "maxNumBlocks": stats.max_num_blocks,
        "freeNumBlocks": stats.free_num_blocks,
        "usedNumBlocks": stats.used_num_blocks,
        "tokensPerBlock": stats.tokens_per_block,
        "allocTotalBlocks": stats.alloc_total_blocks,
        "allocNewBlocks": new_blocks,
        "reusedBlocks": stats.reused_blocks,
        "missedBlocks": stats.missed_blocks,
        "cacheHitRate": stats.cache_hit_rate,
    }


def _speculation_json(step: StepSummary) -> dict[str, object]:
    accepted_per_request = step.accepted_tokens / step.num_drafted if step.num_drafted else 0.0
    return {
        "numDraftTokens": step.draft_tokens,
        "numAcceptedTokens": step.accepted_tokens,
        "numRequestsWithDraftTokens": step.num_drafted,
        "acceptanceLength": 1 + accepted_per_request,
        "iterLatencyMS": step.draft_s * 1e3,
        "draftOverhead": step.draft_s / step.latency_s if step.latency_s > 0 else 0.0,
    }
