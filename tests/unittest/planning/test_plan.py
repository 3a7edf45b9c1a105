# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused at the door, and what a plan says beside the managers' own numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm.planning.models import PlannedModel, find_model
from tensorrt_llm.planning.plan import SCHEME_NAMES, plan_scheme, plan_unfitted
from tensorrt_llm.planning.request import GpuMemory, PlanRequest
from tensorrt_llm.planning.sizes_only import size_cache
from tests.unittest.planning.helpers import GIB, MIB, gpu, layers, small_model


@pytest.fixture(scope="module")
def k3() -> PlannedModel:
    return find_model("kimi-k3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, "--tp is 0; it must be at least 1"),
        ({"pp": -1}, "--pp is -1; it must be at least 1"),
        ({"ep": -2}, "--ep is -2; it must be at least 1"),
        ({"drafts": -1}, "--drafts is -1; it must be at least 0"),
        ({"max_batch_size": 0}, "--max-batch-size is 0; it must be at least 1"),
        ({"max_seq_len": -5}, "--max-seq-len is -5; it must be at least 1"),
        ({"tokens_per_block": 0}, "--tokens-per-block is 0; it must be at least 1"),
        ({"max_util": 0.0}, "--max-util is 0.0; it must be above 0 and at most 1"),
        ({"max_util": 1.5}, "--max-util is 1.5; it must be above 0 and at most 1"),
        ({"max_util": float("nan")}, "--max-util is nan; it must be above 0 and at most 1"),
        ({"max_tokens": 0}, "--max-tokens is 0; it must be at least 1"),
        ({"gpu_quota_bytes": 0}, "--gpu-quota is 0; it must be at least 1"),
        ({"gpu_quota_bytes": None}, "give either the cache's quota"),
        ({"gpu": gpu(GIB)}, "give either the cache's quota"),
        (
            {"gpu_quota_bytes": None, "gpu": gpu(GIB, free_fraction=-0.5)},
            "--free-fraction is -0.5; it must be above 0",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanRequest(**{"gpu_quota_bytes": GIB, **change})


def test_a_gpu_that_the_weights_fill(k3: PlannedModel) -> None:
    memory = GpuMemory(total_bytes=GIB, free_fraction=0.9, workspace_bytes=4 * 10**9)
    with pytest.raises(
        ValueError,
        match=r"108\.28 GB of weights per rank and 4 GB of workspace leave nothing of 1\.07 GB for the cache",
    ):
        plan_scheme(k3, PlanRequest(tp=16, gpu=memory), "records")


def test_a_gpu_leaves_its_share_of_the_rest_to_the_cache_and_what_lies_beside_it(k3: PlannedModel) -> None:
    """Exactly but for the side buffers of the small cache that is measured, which the share counts too."""
    memory = GpuMemory(total_bytes=141 * 10**9, free_fraction=0.9, workspace_bytes=4 * 10**9)
    for scheme in SCHEME_NAMES:
        plan = plan_scheme(k3, PlanRequest(tp=16, gpu=memory), scheme)
        rest = memory.total_bytes - memory.workspace_bytes - plan.weights.total_bytes
        spent = plan.quota_bytes + plan.outside_quota_bytes
        per_slot = plan.conv_cache_bytes_per_slot + plan.rollback_bytes_per_slot
        assert abs(spent - 0.9 * rest) < 12 * per_slot + plan.grain_bytes


def test_without_drafts_the_schemes_are_one(k3: PlannedModel) -> None:
    plans = [
        plan_scheme(k3, PlanRequest(tp=16, drafts=0, gpu_quota_bytes=8 * GIB), scheme)
        for scheme in SCHEME_NAMES
    ]
    assert len({replace(plan, scheme="") for plan in plans}) == 1
    assert plans[0].rollback_bytes_per_slot == plans[0].conv_cache_bytes_per_slot == 0


def test_more_drafts_cost_the_records_scheme_records_alone(k3: PlannedModel) -> None:
    few, many = (
        plan_scheme(k3, PlanRequest(tp=16, drafts=drafts, gpu_quota_bytes=8 * GIB), "records")
        for drafts in (1, 7)
    )
    assert many.records_bytes_per_slot == 7 * few.records_bytes_per_slot
    assert many.state_bytes_per_slot == few.state_bytes_per_slot


def test_requests_are_counted_as_the_loop_admits_them(k3: PlannedModel) -> None:
    """At most the batch; of the pages, those of a whole life but its last token."""
    request = PlanRequest(tp=16, gpu_quota_bytes=int(15.35 * GIB), max_seq_len=2280 * 64 + 1)
    plan = plan_scheme(k3, request, "records")
    assert plan.attention_pages == 9121 and 9121 // 2280 == 4 > 9121 // 2281
    assert plan.full_length_requests == plan.page_bound_requests == 4
    longer = plan_scheme(k3, replace(request, max_seq_len=152_000), "records")
    assert longer.full_length_requests == 9121 // 2375 == 3
    small = plan_scheme(k3, replace(request, max_batch_size=2), "records")
    assert small.full_length_requests == 2 and small.page_bound_requests == 4


def test_pipelined_batches_are_all_resident(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    request = PlanRequest(pp=2, max_batch_size=3, max_seq_len=64, gpu_quota_bytes=16 * MIB)
    plan = plan_scheme(model, request, "records")
    assert (plan.num_resident, plan.floor_slots, plan.full_length_requests) == (6, 7, 6)


def test_the_tightest_stage_is_described(tmp_path: Path) -> None:
    """The stage with two attention layers holds half the tokens of the other."""
    linear = layers(kda=(1, 2, 4), attention=(3, 5, 6))
    model = small_model(tmp_path, linear_attn_config=linear)
    request = PlanRequest(pp=2, max_seq_len=64, gpu_quota_bytes=16 * MIB)
    plan = plan_scheme(model, request, "replay")
    assert (plan.stage, plan.num_kda_layers, plan.num_attention_layers) == (1, 1, 2)


def test_a_stage_without_kda_layers_keeps_no_slots(tmp_path: Path) -> None:
    model = small_model(tmp_path, linear_attn_config=layers(kda=(4, 5), attention=(1, 2, 3, 6)))
    request = PlanRequest(pp=2, max_seq_len=64, gpu_quota_bytes=16 * MIB)
    attention, hybrid = (size_cache(request.cache_plan(model, "records", stage), None, 0) for stage in (0, 1))
    assert (attention.num_state_slots, attention.side_bytes) == (0, 0)
    assert attention.num_attention_pages > 0 and hybrid.num_state_slots >= 17
    assert plan_scheme(model, request, "records").stage == 1


def test_a_sequence_that_all_pages_do_not_hold(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    request = PlanRequest(max_seq_len=10**6, gpu_quota_bytes=16 * MIB)
    held = plan_unfitted(model, request, "records").attention_tokens
    with pytest.raises(ValueError, match=f"max_seq_len is reduced from 1000000 to {held}, which is all the"):
        plan_scheme(model, request, "records")
