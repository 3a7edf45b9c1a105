# SPDX-License-Identifier: Apache-2.0
"""What the cache core costs on the host, as ratios inside one run. Needs no GPU.

    python benchmarks/cache.py            # all figures, about two minutes
    python benchmarks/cache.py --blocks 100000

Prints no figure unless a reuse, read back through the manager, is right first.
"""

import argparse
import gc
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerId,
    SsmLayerConfig,
    _KVCache,
)

PAGE_BYTES = 64
STATE_BYTES = 1024
BLOCKS_PER_PROMPT = 100
LONG_PROMPT_TOKENS = 100_000


def make_manager(num_blocks: int, tokens_per_block: int) -> KVCacheManager:
    """A hybrid model with room for `num_blocks` attention pages and a snapshot per prompt."""
    num_states = num_blocks // BLOCKS_PER_PROMPT + 64
    quota = 2 * (num_blocks * PAGE_BYTES + num_states * STATE_BYTES) + (16 << 20)
    config = KVCacheManagerConfig(
        tokens_per_block=tokens_per_block,
        cache_tiers=[GpuCacheTierConfig(quota)],
        layers=[
            AttentionLayerConfig(LayerId(0), [BufferConfig("key", PAGE_BYTES)]),
            SsmLayerConfig(LayerId(1), [BufferConfig("ssm_state", STATE_BYTES)]),
        ],
        initial_pool_ratio=[0.75, 0.25],
        commit_min_snapshot=True,
        text_only=True,
    )
    return KVCacheManager(config, device="cpu")


def prompt(index: int, num_tokens: int) -> list[int]:
    return random.Random(index).choices(range(160_000), k=num_tokens)


def fill(manager: KVCacheManager, num_blocks: int) -> None:
    """Commit distinct prompts of `BLOCKS_PER_PROMPT` blocks each."""
    num_tokens = BLOCKS_PER_PROMPT * manager.tokens_per_block
    for index in range(num_blocks // BLOCKS_PER_PROMPT):
        tokens = prompt(index, num_tokens)
        cache = manager.create_kv_cache(input_tokens=tokens)
        if not (cache.resume() and cache.resize(num_tokens)):
            raise SystemExit("the benchmark's pools are too small for its prompts")
        cache.commit(tokens)
        cache.close()


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def touch_pools(manager: KVCacheManager) -> None:
    """Make the pools resident, so that what grows afterwards is the bookkeeping alone."""
    for group in manager.storage.levels[0]:
        for pool in group.pools:
            pool.bytes_view().fill_(1)


def lookup_seconds(manager: KVCacheManager, num_blocks: int) -> float:
    """Median look-up of a prompt of 100 cached blocks, over prompts spread through all that are cached.

    Up to 300 prompts take turns, so that a large tree is looked up out of the processor's caches.
    """
    num_prompts = num_blocks // BLOCKS_PER_PROMPT
    num_tokens = BLOCKS_PER_PROMPT * manager.tokens_per_block
    num_chosen = min(300, num_prompts)
    prompts = [[*prompt(i * num_prompts // num_chosen, num_tokens), 7] for i in range(num_chosen)]
    seconds = []
    for _ in range(max(1, 300 // num_chosen)):
        for tokens in prompts:
            start = time.perf_counter()
            num_found = manager.probe_reuse(None, tokens)
            seconds.append(time.perf_counter() - start)
            if num_found != num_tokens:
                raise SystemExit("a committed prompt was not found; no figures")
    return statistics.median(seconds)


def report_lookup(num_blocks: int, tokens_per_block: int) -> None:
    few = make_manager(1000, tokens_per_block)
    fill(few, 1000)
    many = make_manager(num_blocks, tokens_per_block)
    touch_pools(many)
    gc.collect()
    before = resident_bytes()
    fill(many, num_blocks)
    gc.collect()
    per_block = (resident_bytes() - before) / num_blocks
    small, large = lookup_seconds(few, 1000), lookup_seconds(many, num_blocks)
    print(f"look-up of 100 cached blocks: {small * 1e6:.1f} us among 1,000 blocks")
    print(f"look-up of 100 cached blocks: {large * 1e6:.1f} us among {num_blocks:,} blocks")
    print(f"ratio {large / small:.2f} (bound 1.5)")
    print(f"host memory per committed block: {per_block:.0f} B (bound 400)")
    few.shutdown()
    many.shutdown()


def report_admission(tokens_per_block: int) -> None:
    manager = make_manager(2 * LONG_PROMPT_TOKENS // tokens_per_block, tokens_per_block)
    tokens = prompt(0, LONG_PROMPT_TOKENS)
    num_cached = (LONG_PROMPT_TOKENS - 1) // tokens_per_block * tokens_per_block
    first = manager.create_kv_cache(input_tokens=tokens)
    if not (first.resume() and first.resize(LONG_PROMPT_TOKENS)):
        raise SystemExit("the benchmark's pools are too small for a long prompt")
    first.commit(tokens[:num_cached])
    first.close()

    def admit() -> None:
        cache = manager.create_kv_cache(input_tokens=tokens)
        if cache.num_committed_tokens != num_cached or not cache.resume():
            raise SystemExit("a cached prompt was not reused; no figures")
        opened.append(cache)

    opened: list[_KVCache] = []
    seconds, cpu_seconds = [], []
    for _ in range(11):
        start = time.process_time()
        seconds.append(median_seconds(admit, 1))
        cpu_seconds.append(time.process_time() - start)
        opened.pop().close()
    wall, cpu = (statistics.median(samples) * 1e3 for samples in (seconds, cpu_seconds))
    print(f"admission of a cached {LONG_PROMPT_TOKENS:,}-token prompt: {wall:.1f} ms (bound 20)")
    # Long enough to be preempted: on a busy machine the first figure has others' time in it.
    print(f"of which this process computed {cpu:.1f} ms")
    manager.shutdown()


def grow_seconds(manager: KVCacheManager, start_tokens: int) -> float:
    """Median time of growing a cache by one block, from `start_tokens` on."""
    cache = manager.create_kv_cache()
    if not (cache.resume() and cache.resize(start_tokens)):
        raise SystemExit("the benchmark's pools are too small to grow a cache")
    size = manager.tokens_per_block
    sizes = iter(range(start_tokens + size, start_tokens + 2000 * size, size))
    seconds = median_seconds(lambda: cache.resize(next(sizes)), 1000)
    cache.close()
    return seconds


def report_resize(tokens_per_block: int) -> None:
    """A resize that adds one block, in a cache of a few blocks and in one of thousands."""
    manager = make_manager(3 * LONG_PROMPT_TOKENS // tokens_per_block, tokens_per_block)
    medians = [grow_seconds(manager, start) for start in (tokens_per_block, LONG_PROMPT_TOKENS)]
    short, long = (median * 1e6 for median in medians)
    print(f"resize by one block: {short:.1f} us in a short cache, {long:.1f} us in a long one")
    print(f"over the fixed 20 us: {max(0.0, short - 20, long - 20):.1f} us (bound 3)")
    manager.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="committed blocks of the large tree")
    parser.add_argument("--tokens-per-block", type=int, nargs="+", default=[32, 64])
    options = parser.parse_args()
    if len(options.tokens_per_block) > 1:
        # A process each: memory that one run has given back to Python would hide what the next one takes.
        for tokens_per_block in options.tokens_per_block:
            sizes = ["--blocks", str(options.blocks), "--tokens-per-block", str(tokens_per_block)]
            subprocess.run([sys.executable, __file__, *sizes], check=True)
        return
    (tokens_per_block,) = options.tokens_per_block
    print(f"blocks of {tokens_per_block} tokens", flush=True)
    report_lookup(options.blocks, tokens_per_block)
    report_admission(tokens_per_block)
    report_resize(tokens_per_block)


if __name__ == "__main__":
    main()
