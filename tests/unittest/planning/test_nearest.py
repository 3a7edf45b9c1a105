# SPDX-License-Identifier: Apache-2.0
"""The nearest configuration that works: it does, one step nearer does not, and the order is kept."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tensorrt_llm.planning.models import PlannedModel, find_model
from tensorrt_llm.planning.nearest import find_nearest
from tensorrt_llm.planning.plan import SCHEME_NAMES, plan_scheme
from tensorrt_llm.planning.request import GpuMemory, PlanRequest
from tests.unittest.planning.helpers import (
    GIB,
    MIB,
    gpu,
    layers,
    random_models,
    random_request,
    small_model,
)


@pytest.fixture(scope="module")
def k3() -> PlannedModel:
    return find_model("kimi-k3")


def works(model: PlannedModel, request: PlanRequest, scheme: str) -> bool:
    try:
        plan_scheme(model, request, scheme)
    except ValueError:
        return False
    return True


def test_a_smaller_batch_comes_first(k3: PlannedModel) -> None:
    request = PlanRequest(tp=16, gpu_quota_bytes=5 * GIB, max_batch_size=200)
    change = find_nearest(k3, ["records"], request)
    assert change is not None and change.request == replace(request, max_batch_size=149)
    assert change.text == "--max-batch-size 149"
    assert works(k3, change.request, "records")
    assert not works(k3, replace(request, max_batch_size=150), "records")


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_a_shorter_sequence_comes_next(k3: PlannedModel, scheme: str) -> None:
    request = PlanRequest(tp=16, gpu_quota_bytes=15 * GIB, max_seq_len=1 << 20)
    change = find_nearest(k3, [scheme], request)
    assert change is not None and change.text == f"--max-seq-len {change.request.max_seq_len}"
    assert works(k3, change.request, scheme)
    longer = change.request.max_seq_len + 1
    assert not works(k3, replace(request, max_seq_len=longer), scheme)


def test_then_a_larger_quota(k3: PlannedModel) -> None:
    request = PlanRequest(tp=16, gpu_quota_bytes=20 * MIB, max_batch_size=1)
    change = find_nearest(k3, SCHEME_NAMES, request)
    assert change is not None and change.request.gpu_quota_bytes is not None
    assert change.text == f"--gpu-quota {change.request.gpu_quota_bytes // MIB}MiB"
    assert all(works(k3, change.request, scheme) for scheme in SCHEME_NAMES)
    nearer = replace(request, gpu_quota_bytes=change.request.gpu_quota_bytes - MIB)
    assert not all(works(k3, nearer, scheme) for scheme in SCHEME_NAMES)


def test_or_a_larger_gpu(k3: PlannedModel) -> None:
    memory = GpuMemory(total_bytes=GIB, free_fraction=0.9, workspace_bytes=4 * 10**9)
    request = PlanRequest(tp=16, gpu=memory)
    change = find_nearest(k3, ["records"], request)
    assert change is not None and change.request.gpu is not None
    total = change.request.gpu.total_bytes
    assert change.text == f"--gpu-memory {total / 10**9:.1f}GB" and total % 10**8 == 0
    assert works(k3, change.request, "records")
    nearer = replace(request, gpu=replace(memory, total_bytes=total - 10**8))
    assert not works(k3, nearer, "records")


def test_block_reuse_is_dropped_where_memory_does_not_help(k3: PlannedModel) -> None:
    request = PlanRequest(tp=16, gpu_quota_bytes=15 * GIB, block_reuse=True)
    change = find_nearest(k3, ["records"], request)
    assert change is not None and change.text == "no --block-reuse"
    assert not change.request.block_reuse and works(k3, request, "replay")


@pytest.mark.parametrize(
    ("tp", "ep", "text"), [(7, 1, "--tp 6"), (16, 3, "--ep 2"), (64, 1, "--tp 48"), (5, 5, "--ep 4")]
)
def test_ranks_that_do_not_divide(k3: PlannedModel, tp: int, ep: int, text: str) -> None:
    change = find_nearest(k3, ["records"], PlanRequest(tp=tp, ep=ep, gpu_quota_bytes=15 * GIB))
    # 5 ranks divide neither the heads nor the experts, and no single number mends both.
    assert (change.text if change else None) == (None if tp == 5 else text)


def test_a_stage_without_attention_asks_for_fewer_stages(tmp_path: Path) -> None:
    model = small_model(tmp_path, linear_attn_config=layers(kda=(1, 2, 3, 4), attention=(5, 6)))
    request = PlanRequest(pp=2, gpu_quota_bytes=16 * MIB, max_seq_len=64)
    with pytest.raises(ValueError, match="this rank has no attention layer to take the rest of the quota"):
        plan_scheme(model, request, "records")
    change = find_nearest(model, ["records"], request)
    assert change is not None and change.text == "--pp 1"


def test_block_reuse_and_a_length_may_both_have_to_go(k3: PlannedModel) -> None:
    request = PlanRequest(tp=16, gpu_quota_bytes=15 * GIB, max_seq_len=1 << 20, block_reuse=True)
    change = find_nearest(k3, ["records"], request)
    assert change is not None and not change.request.block_reuse
    assert change.text == f"no --block-reuse and --max-seq-len {change.request.max_seq_len}"
    assert works(k3, change.request, "records")


def test_nothing_helps_where_a_round_is_longer_than_a_step(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    request = PlanRequest(gpu_quota_bytes=16 * MIB, drafts=9000)
    with pytest.raises(ValueError, match="max_num_tokens is 8192; it must be >= 9065"):
        plan_scheme(model, request, "replay")
    assert find_nearest(model, ["replay"], request) is None


def test_what_is_suggested_works(tmp_path: Path) -> None:
    """Whatever is refused at random: the suggestion is not, under any scheme asked for."""
    rng, suggested = random.Random(3), 0
    models = random_models(rng, tmp_path, 12)
    while suggested < 60:
        model = rng.choice(models)
        request = random_request(rng, gpu_quota_bytes=rng.randrange(1, 4 * MIB), max_tokens=None)
        schemes = rng.choice((["records"], ["replay"], list(SCHEME_NAMES)))
        if all(works(model, request, scheme) for scheme in schemes):
            continue
        change = find_nearest(model, schemes, request)
        assert change is not None
        assert change.request != request
        assert all(works(model, change.request, scheme) for scheme in schemes), change.text
        suggested += 1


def test_gpus_at_random(tmp_path: Path) -> None:
    rng, suggested = random.Random(4), 0
    models = random_models(rng, tmp_path, 6)
    while suggested < 15:
        model, memory = rng.choice(models), gpu(rng.randrange(MIB, 8 * MIB))
        request = random_request(rng, gpu_quota_bytes=None, gpu=memory, max_tokens=None, block_reuse=False)
        if works(model, request, "replay"):
            continue
        change = find_nearest(model, ["replay"], request)
        assert change is not None and works(model, change.request, "replay"), change
        suggested += 1
