# SPDX-License-Identifier: Apache-2.0
"""Host time that the hybrid cache manager takes of one generation step, on a CPU or with its pools on a GPU.

python benchmarks/kv_cache_host.py [--device cuda] [--requests 1 8 64 256 1024]

A step: the scheduler allocates each request's verify round, `prepare_resources` finds their slots, acceptance
is stored, `update_resources` shrinks and advances. Every eighth token or so a request crosses into a new
page. The budget of prepare and update together is 60 us + 3 us per request; medians of `--steps` steps are
printed. `--clock cpu` counts the thread's own time, for a machine that others use as well.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import CacheType, KvCacheSettings, SpecSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm.mapping import Mapping

NUM_SPEC = 7
TOKENS_PER_BLOCK = 64
FIXED_BUDGET_US = 60.0
BUDGET_PER_REQUEST_US = 3.0


@dataclass(eq=False, slots=True)
class Request:
    """What the manager reads of a request."""

    py_request_id: int
    prompt_len: int = 100
    context_current_position: int = 0
    context_chunk_size: int = 0
    py_draft_tokens: list[int] = field(default_factory=lambda: [1] * NUM_SPEC)
    py_num_accepted_draft_tokens: int = 0
    is_dummy: bool = False
    is_first_context_chunk: bool = True
    is_last_context_chunk: bool = True

    def get_tokens(self, beam: int = 0) -> list[int]:
        return [1] * self.prompt_len


@dataclass(slots=True)
class Batch:
    context_requests: list[Request] = field(default_factory=list)
    generation_requests: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians in microseconds."""

    allocate_us: float
    prepare_us: float
    update_us: float

    @property
    def prepare_and_update_us(self) -> float:
        return self.prepare_us + self.update_us


def make_manager(num_requests: int, num_steps: int, device: str) -> MambaHybridCacheManagerV2:
    """Two KDA layers of one small head, one attention layer; pages for all requests' whole length."""
    max_seq_len = 100 + (num_steps + 1) * (NUM_SPEC + 1)
    config = KvCacheSettings(
        enable_block_reuse=False,
        host_cache_size=0,
        max_tokens=num_requests * (max_seq_len + TOKENS_PER_BLOCK),
        max_util_for_resume=0.95,
    )
    return MambaHybridCacheManagerV2(
        8,
        4,
        1,
        1,
        8,
        2,
        [True, True, False],
        torch.float32,
        torch.float32,
        config,
        CacheType.SELFKONLY,
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        tokens_per_block=TOKENS_PER_BLOCK,
        max_seq_len=max_seq_len,
        max_batch_size=num_requests,
        mapping=Mapping(),
        dtype=torch.float32,
        spec_config=SpecSettings(max_draft_len=NUM_SPEC),
        layer_mask=[False, False, True],
        conv_state_layout="q_k_v",
        kda_replay_num_spec=NUM_SPEC,
        kda_token_states=True,
        device=device,
    )


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


def measure(num_requests: int, num_steps: int, device: str, clock: Callable[[], float]) -> StepTime:
    """Run `num_steps` steps of `num_requests` requests after as many for warming up."""
    manager = make_manager(num_requests, 2 * num_steps, device)
    requests = [Request(i) for i in range(num_requests)]
    for req in requests:
        if not (manager.prepare_context(req) and manager.resize_context(req, req.prompt_len)):
            raise RuntimeError(f"request {req.py_request_id} found no capacity")
        req.context_chunk_size = req.prompt_len
    prompts = Batch(context_requests=requests)
    manager.prepare_resources(prompts)
    manager.update_context_resources(prompts)
    batch = Batch(generation_requests=requests)
    times: list[tuple[float, float, float]] = []
    gc.collect()
    gc.disable()
    for step in range(2 * num_steps):
        for i, req in enumerate(requests):
            req.py_num_accepted_draft_tokens = (step + i) % (NUM_SPEC + 1)
        start = clock()
        allocated = [manager.try_allocate_generation(req) for req in requests]
        allocated_at = clock()
        manager.prepare_resources(batch)
        prepared_at = clock()
        manager.update_resources(batch)
        updated_at = clock()
        if not all(allocated):
            raise RuntimeError("a round found no capacity")
        if step >= num_steps:
            times.append((allocated_at - start, prepared_at - allocated_at, updated_at - prepared_at))
    gc.enable()
    manager.shutdown()
    return StepTime(*(1e6 * statistics.median(column) for column in zip(*times, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, device {args.device}, medians of {args.steps} steps, "
        f"us of {args.clock} time"
    )
    print(
        f"{'requests':>8} {'allocate':>9} {'prepare':>9} {'update':>9} {'prepare+update':>15} {'budget':>8}"
    )
    within = True
    for num_requests in args.requests:
        found = measure(num_requests, args.steps, args.device, CLOCKS[args.clock])
        budget = FIXED_BUDGET_US + BUDGET_PER_REQUEST_US * num_requests
        within &= found.prepare_and_update_us <= budget
        print(
            f"{num_requests:8} {found.allocate_us:9.1f} {found.prepare_us:9.1f} {found.update_us:9.1f} "
            f"{found.prepare_and_update_us:15.1f} {budget:8.0f}"
        )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
