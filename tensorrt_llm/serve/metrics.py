# SPDX-License-Identifier: Apache-2.0
"""Prometheus series under TensorRT-LLM's names: requests as they end, and the engine's gauges."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tensorrt_llm._torch.pyexecutor.llm_request import RequestTimestamps
from tensorrt_llm._torch.pyexecutor.stats import EngineSnapshot
from tensorrt_llm.llmapi import CompletionOutput, RequestOutput

PREFIX = "trtllm_"
LABELS = ("model_name", "engine_type")
ENGINE_TYPE = "trtllm"

_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
_PER_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_PREFILL_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_CACHED_BUCKETS_TOKENS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_DURATIONS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS_S),
    ("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS_S),
    ("time_per_output_token_seconds", "Decode time per token after the first.", _PER_TOKEN_BUCKETS_S),
    ("request_queue_time_seconds", "From arrival to the first step.", _REQUEST_BUCKETS_S),
    ("request_prefill_time_seconds", "From the first step to the first token.", _PREFILL_BUCKETS_S),
    ("request_decode_time_seconds", "From the first token to the last.", _REQUEST_BUCKETS_S),
    ("request_inference_time_seconds", "From the first step to the last token.", _REQUEST_BUCKETS_S),
)

_GAUGES: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
    ("num_requests_running", "Requests that hold a slot.", lambda s: s.num_requests_running),
    ("num_requests_waiting", "Requests in the queue.", lambda s: s.num_requests_waiting),
    ("num_paused_requests", "Requests that gave way to others.", lambda s: s.num_requests_paused),
    ("max_num_active_requests", "Requests that may run at once.", lambda s: s.max_batch_size),
    ("max_batch_size_static", "Requests that may run at once.", lambda s: s.max_batch_size),
    ("max_batch_size_runtime", "Requests that may run at once.", lambda s: s.max_batch_size),
    ("max_num_tokens_runtime", "Tokens that one step may run.", lambda s: s.max_num_tokens),
    ("iteration_latency_seconds", "Duration of the last step.", lambda s: s.iteration_latency_s),
    ("kv_cache_hit_rate", "Reused share of the pages asked for.", lambda s: s.cache_hit_rate),
    (
        "kv_cache_utilization",
        "Used share of the attention pages.",
        lambda s: _share(s.used_pages, s.max_pages),
    ),
    ("kv_cache_max_blocks", "Attention pages.", lambda s: s.max_pages),
    ("kv_cache_used_blocks", "Attention pages in use.", lambda s: s.used_pages),
    ("kv_cache_free_blocks", "Attention pages not in use.", lambda s: s.max_pages - s.used_pages),
    ("kv_cache_tokens_per_block", "Tokens of an attention page.", lambda s: s.tokens_per_page),
    ("spec_decode_acceptance_length", "Mean tokens of a round with drafts.", lambda s: s.acceptance_length),
)

_TOTALS: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
    ("num_requests_completed", "Requests that ended.", lambda s: s.num_requests_completed_total),
    ("spec_decode_num_draft_tokens", "Drafts verified.", lambda s: s.draft_tokens_total),
    ("spec_decode_num_accepted_tokens", "Drafts accepted.", lambda s: s.accepted_tokens_total),
    ("kv_cache_reused_blocks", "Attention pages reused.", lambda s: s.reused_pages_total),
    ("kv_cache_missed_blocks", "Attention pages that could not be reused.", lambda s: s.missed_pages_total),
)


class ServerMetrics:
    """One server's series, in a registry of their own."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._labels = (model_name, ENGINE_TYPE)
        self._registry = CollectorRegistry()
        self._durations = {
            name: self._histogram(name, about, buckets).labels(*self._labels)
            for name, about, buckets in _DURATIONS
        }
        self._cached = self._histogram(
            "prompt_cached_tokens_per_request", "Prompt tokens not computed.", _CACHED_BUCKETS_TOKENS
        ).labels(*self._labels)
        self._succeeded = self._counter(
            "request_success", "Choices that ended, by reason.", "finished_reason"
        )
        self._failed = self._counter("request_error", "Requests refused or failed, by status.", "http_code")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._cached_tokens = self._counter("prompt_cached_tokens", "Prompt tokens that were not computed.")
        self._generated_tokens = self._counter("generation_tokens", "Generated tokens of ended requests.")
        self._registry.register(_EngineCollector(self._labels, snapshot))

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """Note the end of a request: what has neither ended nor failed was given up by its client."""
        for output in outputs:
            if output.error is not None:
                continue
            self._prompt_tokens.labels(*self._labels).inc(len(output.prompt_token_ids))
            self._cached_tokens.labels(*self._labels).inc(output.cached_tokens)
            self._cached.observe(output.cached_tokens)
            for choice in output.outputs:
                reason = choice.finish_reason or "cancelled"
                self._succeeded.labels(*self._labels, reason).inc()
                self._generated_tokens.labels(*self._labels).inc(choice.length)
                if choice.request_perf_metrics is not None and choice.finish_reason is not None:
                    self._observe_times(choice, choice.request_perf_metrics.timestamps, len(output.outputs))

    def observe_error(self, status: int) -> None:
        """Note a request that was answered with an error status."""
        self._failed.labels(*self._labels, str(status)).inc()

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)

    def _observe_times(self, choice: CompletionOutput, times: RequestTimestamps, num_choices: int) -> None:
        if times.first_scheduled is None or times.first_token is None or times.last_token is None:
            return
        decode = times.last_token - times.first_token
        observed = {
            "e2e_request_latency_seconds": times.last_token - times.arrival,
            "time_to_first_token_seconds": times.first_token - times.arrival,
            "request_prefill_time_seconds": times.first_token - times.first_scheduled,
            "request_decode_time_seconds": decode,
            "request_inference_time_seconds": times.last_token - times.first_scheduled,
        }
        if num_choices == 1 and choice.length > 1:
            observed["time_per_output_token_seconds"] = decode / (choice.length - 1)
        for name, seconds in observed.items():
            if seconds > 0:
                self._durations[name].observe(seconds)
        self._durations["request_queue_time_seconds"].observe(max(0.0, times.first_scheduled - times.arrival))

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, about, LABELS, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, about, (*LABELS, *labels), registry=self._registry)


class _EngineCollector:
    """Reads the engine's snapshot whenever the series are read."""

    def __init__(self, labels: Sequence[str], snapshot: Callable[[], EngineSnapshot]) -> None:
        self._labels = labels
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        for name, about, read in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, about, labels=LABELS)
            gauge.add_metric(self._labels, read(snapshot))
            yield gauge
        for name, about, read in _TOTALS:
            total = CounterMetricFamily(PREFIX + name, about, labels=LABELS)
            total.add_metric(self._labels, read(snapshot))
            yield total
        yield self._by_position("spec_decode_drafted_tokens", snapshot.drafted_by_position)
        yield self._by_position("spec_decode_accepted_tokens", snapshot.accepted_by_position)

    def _by_position(self, name: str, counts: Sequence[int]) -> Metric:
        about = "Drafts by their place in the round."
        family = CounterMetricFamily(PREFIX + name, about, labels=(*LABELS, "token_position"))
        for position, count in enumerate(counts):
            if count:
                family.add_metric((*self._labels, str(position)), count)
        return family


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
