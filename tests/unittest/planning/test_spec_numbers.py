# SPDX-License-Identifier: Apache-2.0
"""The figures of Kimi K3 on one of 16 tensor ranks, to the byte, as the planner gives them."""

import json
import math

import pytest

from tensorrt_llm._torch.modules.kda.verify_scheme import get_scheme
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm.planning.models import PlannedModel, find_model
from tensorrt_llm.planning.plan import SCHEME_NAMES, SchemePlan, plan_scheme
from tensorrt_llm.planning.request import PlanRequest
from tests.unittest.planning.helpers import GIB, run

R = 4_451_328
B = 28_085_760
TOKEN = 27_648
QUOTA = 16_481_936_998
"""15.35 GiB."""


@pytest.fixture(scope="module")
def k3() -> PlannedModel:
    return find_model("kimi-k3")


def plan(k3: PlannedModel, scheme: str = "records", **changes: object) -> SchemePlan:
    numbers = {"tp": 16, "max_seq_len": 4096, "gpu_quota_bytes": QUOTA, **changes}
    return plan_scheme(k3, PlanRequest(**numbers), scheme)


def sizing(k3: PlannedModel, scheme: str, **changes: object) -> HybridSizing:
    request = PlanRequest(**{"tp": 16, "gpu_quota_bytes": QUOTA, **changes})
    found = request.cache_plan(k3, scheme, 0).sizing()
    assert isinstance(found, HybridSizing)
    return found


def test_bytes_per_slot(k3: PlannedModel) -> None:
    plans = {scheme: plan(k3, scheme) for scheme in SCHEME_NAMES}
    assert {p.state_bytes_per_slot for p in plans.values()} == {B}
    assert {p.conv_cache_bytes_per_slot for p in plans.values()} == {6_359_040}
    found = {
        scheme: (p.records_bytes_per_slot, p.replay_cache_bytes_per_slot, p.intermediate_bytes_per_slot)
        for scheme, p in plans.items()
    }
    assert found == {
        "records": (R, 0, 0),
        "replay": (0, 5_950_560, 0),
        "intermediate": (0, 0, 189_923_328),
    }


def test_bytes_per_slot_and_layer(k3: PlannedModel) -> None:
    for scheme, per_layer in (("records", 64_512), ("replay", 86_240)):
        p = plan(k3, scheme)
        assert p.num_kda_layers == 69 and p.num_heads == 6
        assert p.rollback_bytes_per_slot == 69 * per_layer
        assert p.conv_cache_bytes_per_slot == 69 * 92_160


def test_extended_windows_in_bfloat16_take_half_beside_the_same_quota(k3: PlannedModel) -> None:
    for scheme in SCHEME_NAMES:
        wide, narrow = (plan(k3, scheme, kda_conv_dtype=name) for name in ("float32", "bfloat16"))
        assert narrow.conv_cache_bytes_per_slot == 69 * 46_080
        assert narrow.ssm_slots == wide.ssm_slots and narrow.attention_pages == wide.attention_pages
        saved = wide.ssm_slots * 69 * 46_080
        assert wide.outside_quota_bytes - narrow.outside_quota_bytes == saved


def test_attention_bytes_per_token(k3: PlannedModel) -> None:
    p = plan(k3)
    assert (p.num_attention_layers, p.attention_bytes_per_token) == (24, TOKEN)


@pytest.mark.parametrize(
    ("batch", "floor", "max_util", "kept"), [(2, 3, 0.97, 4), (8, 9, 0.95, 10), (18, 19, 0.95, 21)]
)
def test_slots_kept(k3: PlannedModel, batch: int, floor: int, max_util: float, kept: int) -> None:
    p = plan(k3, max_batch_size=batch, max_util=max_util)
    assert (p.floor_slots, p.slots_kept) == (floor, kept)


def test_records_and_replay_caches_of_ten_slots(k3: PlannedModel) -> None:
    records, replay = plan(k3), plan(k3, "replay")
    assert records.slots_kept == replay.slots_kept == records.ssm_slots == 10
    assert records.rollback_bytes == 44_513_280
    assert replay.slots_kept * replay.replay_cache_bytes_per_slot == 59_505_600
    assert replay.rollback_bytes == replay.ssm_slots * 5_950_560


def test_minimum_quota_differs_by_four_records_and_one_state(k3: PlannedModel) -> None:
    floor_three = {"max_batch_size": 2, "max_util": 0.97}
    with_records, without = (sizing(k3, scheme, **floor_three) for scheme in ("records", "replay"))
    assert with_records.minimum_quota() - without.minimum_quota() == 4 * R + B


@pytest.mark.parametrize(("tokens_per_block", "resumable"), [(32, 17_408), (64, 17_344)])
def test_quota_of_max_tokens(k3: PlannedModel, tokens_per_block: int, resumable: int) -> None:
    p = plan(k3, max_tokens=16_896, tokens_per_block=tokens_per_block, max_seq_len=1024)
    assert p.quota_bytes == math.ceil((10 * (B + R) + TOKEN * 16_896) / 0.95) == 834_222_619
    assert int((p.quota_bytes - p.slots_kept * (B + R)) / TOKEN * 0.95) == 17_484
    assert p.resumable_tokens == resumable


def test_slots_by_ratio(k3: PlannedModel) -> None:
    p = plan(k3, "replay", gpu_quota_bytes=int(13.2 * GIB))
    assert (p.ssm_slots, p.is_at_live_floor) == (183, False)


@pytest.mark.parametrize("tokens_per_block", [32, 64])
@pytest.mark.parametrize(("batch", "slots", "tokens"), [(8, 10, 583_744), (18, 21, 571_008)])
def test_tokens_at_the_live_floor(
    k3: PlannedModel, batch: int, slots: int, tokens: int, tokens_per_block: int
) -> None:
    p = plan(k3, max_batch_size=batch, tokens_per_block=tokens_per_block)
    assert (p.ssm_slots, p.attention_tokens, p.is_at_live_floor) == (slots, tokens, True)


def test_slot_from_which_offsets_need_64_bits(k3: PlannedModel) -> None:
    states = sizing(k3, "records").spec
    elements_per_slot = 69 * states.ssm_bytes // states.ssm_dtype.itemsize
    assert next(slot for slot in range(1000) if slot * elements_per_slot > 2**31 - 1) == 317


def test_json_of_the_command() -> None:
    result = run("kimi-k3", "--tp", 16, "--gpu-quota", "15.35GiB", "--max-seq-len", 4096, "--json")
    assert result.exit_code == 0, result.output
    records, replay, intermediate = json.loads(result.stdout)["schemes"]
    assert records == {
        "scheme": "records",
        "slots_kept": 10,
        "ssm_slots": 10,
        "state_bytes_per_slot": 28_085_760,
        "records_bytes_per_slot": 4_451_328,
        "replay_cache_bytes_per_slot": 0,
        "intermediate_bytes_per_slot": 0,
        "conv_cache_bytes_per_slot": 6_359_040,
        "rollback_bytes": 44_513_280,
        "outside_quota_bytes": 10 * (6_359_040 + 4),
        "attention_bytes_per_token": 27_648,
        "attention_pages": 9_121,
        "attention_tokens": 583_744,
        "quota_bytes": QUOTA,
        "pool_bytes": 490 * (32 << 20),
        "full_length_requests": 8,
    }
    assert list(replay) == list(intermediate) == list(records)
    assert (replay["scheme"], intermediate["scheme"]) == ("replay", "intermediate")


def test_schemes_are_the_runtimes() -> None:
    assert SCHEME_NAMES == ("records", "replay", "intermediate")
    assert [get_scheme(name).name for name in SCHEME_NAMES] == list(SCHEME_NAMES)
