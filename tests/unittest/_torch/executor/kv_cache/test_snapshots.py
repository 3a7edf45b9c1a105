# SPDX-License-Identifier: Apache-2.0
"""At which token counts snapshots are kept, and how many of them are paid for."""

from dataclasses import replace

import pytest

from tensorrt_llm._torch.pyexecutor.kv_cache.config import BlockReuseSettings, MambaStateSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.snapshots import (
    SnapshotRules,
    next_chunk_end,
)
from tests.unittest._torch.executor.kv_cache.helpers import Request, make_manager, settings

STATE = MambaStateSettings(
    periodic_snapshot_interval=16,
    additional_snapshot_offsets_from_start=(8, 10, 99),
    additional_snapshot_offsets_from_end=(0, 1, 50),
)
CONFIG = settings(enable_block_reuse=True, mamba_state_config=STATE)


@pytest.mark.parametrize(
    ("prompt_len", "points"),
    [(0, []), (1, []), (7, [4]), (8, [4, 8]), (40, [8, 16, 32, 36, 40]), (60, [8, 16, 32, 48, 56, 60])],
)
def test_points_of_a_prompt(prompt_len: int, points: list[int]) -> None:
    assert SnapshotRules.of(CONFIG, 4).points(prompt_len) == points


def test_fixed_points_are_counted_once_and_only_where_a_prompt_reaches_them() -> None:
    rules = SnapshotRules.of(CONFIG, 4)
    assert rules.exists
    assert rules.num_fixed(40) == 1 + 2
    assert rules.num_fixed(200) == 2 + 3
    assert SnapshotRules().num_fixed(200) == 0 and not SnapshotRules().exists


def test_no_reuse_no_points() -> None:
    rules = SnapshotRules.of(replace(CONFIG, enable_block_reuse=False), 4)
    assert rules == SnapshotRules() and rules.points(100) == []


def test_conversations_have_no_periodic_points() -> None:
    config = replace(CONFIG, block_reuse_config=BlockReuseSettings(policy="per_conversation"))
    assert SnapshotRules.of(config, 4).interval_tokens == 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (MambaStateSettings(periodic_snapshot_interval=18), "interval is 18; it must be a multiple"),
        (MambaStateSettings(enable_branch_snapshot=True), "enable_branch_snapshot is not supported"),
    ],
)
def test_what_cannot_be_kept_is_refused(state: MambaStateSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SnapshotRules.of(replace(CONFIG, mamba_state_config=state), 4)


def test_a_chunk_ends_at_the_next_point() -> None:
    assert next_chunk_end(0, 40, [8, 16]) == 8
    assert next_chunk_end(8, 40, [8, 16]) == 16
    assert next_chunk_end(16, 40, [8, 16]) == 40
    assert next_chunk_end(0, 8, [8, 16]) == 8
    assert next_chunk_end(0, 5, [8, 16]) == 5


def test_a_manager_cuts_chunks_there_and_always_goes_on() -> None:
    manager = make_manager(config=replace(CONFIG, max_gpu_total_bytes=64 << 20), kda_verify_scheme="replay")
    req, ends = Request(0, list(range(43))), []
    while req.context_current_position < req.prompt_len:
        rest = req.prompt_len - req.context_current_position
        chunk = manager.clip_context_chunk(req, rest)
        assert 1 <= chunk <= rest
        req.context_current_position += chunk
        ends.append(req.context_current_position)
    assert ends == [8, 16, 32, 40, 43]
    assert manager.expect_snapshot_points(req) == [8, 16, 32, 40]
    req.is_dummy = True
    assert manager.expect_snapshot_points(req) == []
    manager.shutdown()
