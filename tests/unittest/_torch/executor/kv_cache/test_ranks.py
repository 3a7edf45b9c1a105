# SPDX-License-Identifier: Apache-2.0
"""Two real processes: managers with unequal quotas agree on the smaller, and on going without a host tier."""

import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tensorrt_llm._torch.pyexecutor.kv_cache.storage_builder import min_over_ranks
from tensorrt_llm.mapping import Mapping
from tests.unittest._torch.executor.kv_cache.helpers import MIB, make_manager, settings


def _run_rank(rank: int, port: int, results: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    manager = make_manager(
        mapping=Mapping(world_size=2, rank=rank, tp_size=2),
        config=settings(max_gpu_total_bytes=(48 - 16 * rank) * MIB),
        kda_token_states=True,
    )
    results.put(
        (rank, manager._sizing.max_tokens_from_quota(manager.impl.get_quota()), min_over_ranks(5 + rank))
    )
    manager.shutdown()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_agree_on_the_smaller_quota() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    mp.spawn(_run_rank, args=(port, results), nprocs=2)
    found = sorted(results.get(timeout=60) for _ in range(2))
    assert [smallest for _, _, smallest in found] == [5, 5]
    alone = make_manager(
        mapping=Mapping(world_size=2, rank=1, tp_size=2),
        config=settings(max_gpu_total_bytes=32 * MIB),
        kda_token_states=True,
    )
    limit = alone._sizing.max_tokens_from_quota(alone.impl.get_quota())
    assert all(abs(tokens - limit) <= 2 for _, tokens, _ in found)
    alone.shutdown()


def test_a_single_process_agrees_with_itself() -> None:
    assert min_over_ranks(7) == 7
