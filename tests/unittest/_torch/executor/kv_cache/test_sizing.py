# SPDX-License-Identifier: Apache-2.0
"""Bytes and slots without memory: the figures of Kimi K3, refusals, and the linear model of
tokens.
"""

import math
import random

import pytest
import torch

from tensorrt_llm._torch.modules.kda.verify_scheme import (
    INTERMEDIATE,
    RECORDS,
    REPLAY,
    KdaGeometry,
    VerifyScheme,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.config import (
    CacheType,
    KvCacheSettings,
    MambaStateSettings,
    SpecSettings,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.create import create_manager
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import VerifyPlan
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import (
    UNLIMITED_TOKENS,
    AttentionSizing,
    CacheCost,
    cache_limits,
    gpu_quota_bytes,
    largest_fitting,
    local_layers,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.storage_builder import cache_tiers
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import KVCacheManagerConfig
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import TierSplit, split_gpu_quota
from tests.unittest._torch.executor.kv_cache.helpers import (
    GIB,
    MIB,
    Kda,
    Traits,
    k3_plan,
    settings,
    side_tensors,
)

R = 4_451_328
B = 28_085_760


def built(plan: CachePlan) -> KVCacheManagerConfig:
    """The configuration the storage of `plan` would be built with."""
    sizing, config = plan.sizing(), plan.kv_cache_config
    tiers = cache_tiers(config, gpu_quota_bytes(config, sizing), plan.mapping, "cpu")
    return sizing.build_config(sizing.base_config(config, tiers, enable_stats=False), config)


def split_of(plan: CachePlan) -> dict[str, int]:
    """State slots and attention pages of `plan`."""
    config, sizing = built(plan), plan.sizing()
    assert isinstance(sizing, HybridSizing)
    split: TierSplit = split_gpu_quota(config)
    states = split.slot_sizes.index(sizing.states.pool_slot_bytes)
    return {"slots": split.num_slots[states], "pages": split.num_slots[1 - states]}


def hybrid(plan: CachePlan) -> HybridSizing:
    sizing = plan.sizing()
    assert isinstance(sizing, HybridSizing)
    return sizing


def test_k3_bytes_per_slot_and_token() -> None:
    sizing = hybrid(k3_plan())
    assert sizing.states.reserved_bytes_per_slot == R
    assert sizing.states.pool_bytes_per_slot == B
    assert sizing.bytes_per_token == 27_648


def test_k3_side_buffers_per_slot() -> None:
    verify = hybrid(k3_plan()).verify
    assert verify is not None
    per_layer = {
        scheme.name: {b.name: b.bytes_per_slot_layer for b in scheme.slot_buffers(verify.geometry)}
        for scheme in (RECORDS, REPLAY, INTERMEDIATE)
    }
    conv = {name: size for name, size in per_layer["records"].items() if name.startswith("kda_conv")}
    assert sum(conv.values()) == 92_160
    assert sum(conv.values()) * 69 == 6_359_040
    replay = sum(size for name, size in per_layer["replay"].items() if name not in conv)
    assert (replay, replay * 69) == (86_240, 5_950_560)
    assert sum(s for n, s in per_layer["intermediate"].items() if n not in conv) * 69 == 189_923_328
    assert 10 * R == 44_513_280 and 10 * replay * 69 == 59_505_600


def test_k3_quota_of_max_tokens() -> None:
    plan = k3_plan(max_tokens=16_896, max_gpu_total_bytes=0, max_util_for_resume=0.95)
    quota = gpu_quota_bytes(plan.kv_cache_config, plan.sizing())
    assert quota == math.ceil((10 * (B + R) + 27_648 * 16_896) / 0.95) == 834_222_619
    assert int((quota - 10 * (B + R)) / 27_648 * 0.95) == 17_484


@pytest.mark.parametrize(("tokens_per_block", "tokens"), [(32, 17_408), (64, 17_344)])
def test_k3_quota_of_max_tokens_resumes_them(tokens_per_block: int, tokens: int) -> None:
    split = split_of(
        k3_plan(
            tokens_per_block=tokens_per_block,
            max_tokens=16_896,
            max_gpu_total_bytes=0,
            max_util_for_resume=0.95,
        )
    )
    assert split["slots"] == 10
    assert int(split["pages"] * 0.95) * tokens_per_block == tokens


@pytest.mark.parametrize("tokens_per_block", [32, 64])
@pytest.mark.parametrize(("batch", "slots", "tokens"), [(8, 10, 583_744), (18, 21, 571_008)])
def test_k3_at_the_live_floor(batch: int, slots: int, tokens: int, tokens_per_block: int) -> None:
    plan = k3_plan(
        batch=batch,
        tokens_per_block=tokens_per_block,
        max_gpu_total_bytes=int(15.35 * GIB),
        max_util_for_resume=0.95,
    )
    split = split_of(plan)
    assert (split["slots"], split["pages"] * tokens_per_block) == (slots, tokens)


def test_k3_by_ratio() -> None:
    plan = k3_plan(
        records=False, max_seq_len=4096, max_gpu_total_bytes=int(13.2 * GIB), max_util_for_resume=0.95
    )
    assert split_of(plan)["slots"] == 183


def test_minimum_quota_differs_by_four_records_and_one_state() -> None:
    """F = 3 at 0.97 keeps 4: with records all kept slots are paid for, without them the three live ones."""
    with_records, without = (
        hybrid(k3_plan(batch=2, max_util_for_resume=0.97, records=records)) for records in (True, False)
    )
    assert with_records.minimum_quota() - without.minimum_quota() == 4 * R + B
    for tokens in (0, 1, 1000, 100_000):
        gap = with_records.quota_from_max_tokens(tokens) - without.quota_from_max_tokens(tokens)
        assert gap == 4 * R + B


def cache_cost(cls: type[KVCacheManagerV2], plan: CachePlan, **keywords: object) -> CacheCost:
    """What the class says of the plan's cache, by the name that TensorRT-LLM has for it."""
    return cls.get_cache_size_per_token(
        plan.traits,
        plan.mapping,
        kv_cache_config=plan.kv_cache_config,
        tokens_per_block=plan.tokens_per_block,
        max_seq_len=plan.max_seq_len,
        max_batch_size=plan.max_batch_size,
        spec_config=plan.spec_config,
        **keywords,
    )


@pytest.mark.parametrize(("records", "fixed"), [(True, 10 * (B + R)), (False, 9 * B)])
def test_the_fixed_part_of_the_cost_is_the_states_quota(records: bool, fixed: int) -> None:
    plan = k3_plan(records=records, max_util_for_resume=0.95)
    slope, intercept = cache_cost(MambaHybridCacheManagerV2, plan, kda_token_states=records)
    assert (slope, intercept) == (27_648, fixed)
    sizing = plan.sizing()
    assert isinstance(sizing, HybridSizing)
    assert intercept == sizing.state_quota()
    assert cache_cost(KVCacheManagerV2, plan) == (27_648, 0)


def test_the_fixed_part_leaves_out_what_grains_hold_beyond_the_kept_slots() -> None:
    """The quota of max_tokens has it; a line through tokens cannot."""
    plan = CachePlan(
        traits=Traits(),
        mapping=Mapping(),
        kv_cache_config=settings(),
        tokens_per_block=4,
        max_seq_len=64,
        max_batch_size=2,
        spec_config=SpecSettings(max_draft_len=2),
        kda_token_states=True,
    )
    sizing = plan.sizing()
    assert isinstance(sizing, HybridSizing)
    cost = cache_cost(MambaHybridCacheManagerV2, plan, kda_token_states=True)
    assert cost.intercept_bytes == sizing.state_quota() < sizing.quota_from_max_tokens(0)
    draft = cache_cost(MambaHybridCacheManagerV2, plan, kda_token_states=True, is_draft=True)
    assert draft.intercept_bytes == 3 * sizing.states.pool_bytes_per_slot


def test_snapshots_are_part_of_the_cost() -> None:
    """Fixed ones of every resident request with a partial page each, periodic ones by the token."""
    rules = MambaStateSettings(
        periodic_snapshot_interval=1024, additional_snapshot_offsets_from_start=(512, 2048)
    )
    plan = k3_plan(records=False, enable_block_reuse=True, mamba_state_config=rules)
    slope, intercept = cache_cost(MambaHybridCacheManagerV2, plan)
    assert slope == 27_648 + B / 1024
    assert intercept == 9 * B + 8 * 2 * B + 8 * 64 * 27_648


@pytest.mark.parametrize("scheme", [RECORDS, REPLAY, INTERMEDIATE])
def test_the_quota_pays_for_what_the_buffers_say(scheme: VerifyScheme) -> None:
    geometry = KdaGeometry(num_heads=6, head_dim=128, conv_width=4, num_spec=7)
    paid = [buffer.name for buffer in scheme.slot_buffers(geometry) if buffer.paid_by_quota]
    assert paid == (["kda_state_tok"] if scheme is RECORDS else [])
    plan = VerifyPlan(scheme=scheme, geometry=geometry)
    assert 69 * plan.quota_bytes_per_slot_layer == (R if scheme is RECORDS else 0)


def test_max_tokens_quota_and_its_inverse() -> None:
    for records in (True, False):
        sizing = k3_plan(records=records).sizing()
        for tokens in (0, 1, 63, 64, 10_000, 1_000_000):
            quota = sizing.quota_from_max_tokens(tokens)
            assert sizing.max_tokens_from_quota(quota) == tokens
            assert sizing.max_tokens_from_quota(quota - 1) == max(0, tokens - 1)


def test_largest_fitting() -> None:
    assert largest_fitting(lambda n: 3 * n + 5, 4) == 0
    assert largest_fitting(lambda n: 3 * n + 5, 5) == 0
    assert largest_fitting(lambda n: 3 * n + 5, 305) == 100
    assert largest_fitting(lambda n: 3 * n + 5, 304) == 99
    assert largest_fitting(lambda n: 5, 5) == UNLIMITED_TOKENS


def test_a_model_without_attention_has_states_alone() -> None:
    traits = Traits(num_layers=2, attention_layers=(), kda_layers=(0, 1), latent_dim=0)
    plan = CachePlan(
        traits=traits,
        mapping=Mapping(),
        kv_cache_config=settings(),
        tokens_per_block=4,
        max_seq_len=64,
        max_batch_size=2,
    )
    sizing = hybrid(plan)
    assert sizing.bytes_per_token == 0
    # Two requests and a dummy; no attention page is reserved.
    assert sizing.minimum_quota() == 3 * sizing.states.pool_bytes_per_slot
    assert sizing.max_tokens_from_quota(sizing.minimum_quota()) == UNLIMITED_TOKENS
    manager = create_manager(plan, MambaHybridCacheManagerV2, device="cpu")
    assert manager.num_attention_pages == 0 and manager.num_state_slots >= 3
    manager.shutdown()


def test_windowed_layers_pay_for_context_and_windows() -> None:
    layers = local_layers(
        num_layers=2,
        num_kv_heads=1,
        head_dim=10,
        dtype=torch.float32,
        mapping=Mapping(),
        max_attention_window=(16, 1000),
        max_seq_len=1000,
    )
    sizing = AttentionSizing(
        layers=layers,
        kv_type=CacheType.SELFKONLY,
        limits=cache_limits(1000, 3, 50, 4, 1, None),
        max_util_for_resume=1.0,
    )
    assert layers.windows == (16, None)
    assert sizing.quota_from_max_tokens(200) == 40 * (200 + 50 + 3 * 16)
    assert sizing.max_tokens_from_quota(40 * (200 + 50 + 3 * 16)) == 200


def test_lowest_of_the_limits_wins() -> None:
    plan = k3_plan(max_tokens=1000, max_gpu_total_bytes=1 << 40)
    by_tokens = gpu_quota_bytes(plan.kv_cache_config, plan.sizing())
    assert by_tokens == math.ceil(plan.sizing().quota_from_max_tokens(1000) / 0.95)
    lower = settings(max_tokens=1000, max_gpu_total_bytes=by_tokens - 1)
    assert gpu_quota_bytes(lower, plan.sizing()) == by_tokens - 1
    with pytest.raises(ValueError, match="neither max_tokens nor max_gpu_total_bytes"):
        gpu_quota_bytes(settings(max_gpu_total_bytes=0), plan.sizing())


def test_snapshots_are_paid_for_with_reuse_alone() -> None:
    rules = MambaStateSettings(
        periodic_snapshot_interval=256, additional_snapshot_offsets_from_start=(128, 128, 9_999)
    )

    def quota(reuse: bool, tokens: int) -> int:
        plan = k3_plan(records=False, enable_block_reuse=reuse, mamba_state_config=rules)
        return plan.sizing().quota_from_max_tokens(tokens)

    live, pages = 9 * B, 8 * 64 * 27_648
    assert quota(False, 1024) == live + 1024 * 27_648
    assert quota(True, 1024) == live + 1024 * 27_648 + (8 * 1 + 4) * B + pages


def test_a_rank_without_kda_layers_is_plain_attention() -> None:
    traits = Traits(num_layers=4, attention_layers=(0, 1), kda_layers=(2, 3))
    plan = CachePlan(
        traits=traits,
        mapping=Mapping(world_size=2, rank=0, pp_size=2),
        kv_cache_config=settings(enable_block_reuse=True, enable_kv_pool_rebalance=True),
        tokens_per_block=4,
        max_seq_len=64,
        max_batch_size=2,
        kda_token_states=True,
    )
    sizing = hybrid(plan)
    assert not sizing.reserves_side_bytes and sizing.states.pool_bytes_per_slot == 0
    assert len(built(plan).layers) == 2


@pytest.mark.parametrize("records", [True, False])
def test_predicted_quota_is_never_exceeded_by_a_grain(records: bool) -> None:
    rng = random.Random(records)
    for _ in range(150):
        plan = k3_plan(
            batch=rng.randrange(1, 40),
            num_spec=rng.choice((1, 2, 7)),
            tokens_per_block=rng.choice((32, 64, 128)),
            max_seq_len=rng.choice((1024, 4096, 65_536)),
            records=records,
            max_gpu_total_bytes=int(rng.uniform(0.2, 40) * GIB),
            max_util_for_resume=rng.choice((0.9, 0.95, 0.97, 1.0)),
        )
        sizing, config = hybrid(plan), plan.kv_cache_config
        if config.max_gpu_total_bytes < sizing.minimum_quota():
            with pytest.raises(ValueError, match="too small for live recurrent states"):
                built(plan)
            continue
        split = split_gpu_quota(built(plan))
        slots = split.num_slots[split.slot_sizes.index(sizing.states.pool_slot_bytes)]
        side = slots * sizing.states.reserved_bytes_per_slot
        assert slots >= sizing.states.kept_slots
        assert split.pool_bytes + side < config.max_gpu_total_bytes + split.grain


def test_records_off_leave_every_number_as_it_is() -> None:
    """The option is inert without speculation, in bytes too."""
    plain, inert = (
        k3_plan(num_spec=None, records=records, max_gpu_total_bytes=GIB) for records in (False, True)
    )
    assert built(plain) == built(inert)
    assert plain.sizing() == inert.sizing()


def test_limits_are_checked() -> None:
    for name in ("max_seq_len", "max_batch_size", "max_num_tokens", "tokens_per_block"):
        values = {"max_seq_len": 1, "max_batch_size": 1, "max_num_tokens": 1, "tokens_per_block": 1}
        values[name] = 0
        with pytest.raises(ValueError, match=f"{name} is 0"):
            cache_limits(*values.values(), 1, None)
    with pytest.raises(ValueError, match="max_beam_width is 2"):
        cache_limits(1, 1, 1, 1, 2, None)


def test_max_tokens_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        gpu_quota_bytes(KvCacheSettings(max_tokens=0), k3_plan().sizing())


def random_plan(rng: random.Random) -> CachePlan:
    """A small model under a small configuration."""
    num_layers = rng.randrange(1, 7)
    kda_layers = tuple(i for i in range(num_layers) if rng.random() < 0.6)
    traits = Traits(
        num_layers=num_layers,
        attention_layers=tuple(i for i in range(num_layers) if i not in kda_layers),
        kda_layers=kda_layers,
        kda=Kda(
            num_heads=2 * rng.randrange(1, 4),
            head_dim=rng.choice((2, 4, 6, 16)),
            conv_width=rng.randrange(2, 6),
        ),
        latent_dim=rng.randrange(1, 40),
        dtype=rng.choice((torch.float32, torch.bfloat16)),
    )
    tp_size, pp_size = rng.choice((1, 2)), rng.choice((1, 1, 2))
    world = tp_size * pp_size
    scheme = rng.choice((None, "records", "replay", "intermediate"))
    return CachePlan(
        traits=traits,
        mapping=Mapping(
            world_size=world,
            rank=rng.randrange(world),
            tp_size=tp_size,
            pp_size=pp_size,
            enable_attention_dp=rng.random() < 0.2,
        ),
        kv_cache_config=settings(
            enable_block_reuse=rng.random() < 0.3,
            max_gpu_total_bytes=rng.randrange(2 * MIB, 24 * MIB),
            max_tokens=rng.choice((None, rng.randrange(1, 500))),
            max_util_for_resume=rng.choice((0.5, 0.9, 0.95, 1.0)),
        ),
        tokens_per_block=rng.choice((1, 4, 8)),
        max_seq_len=rng.randrange(8, 200),
        max_batch_size=rng.randrange(1, 9),
        spec_config=SpecSettings(max_draft_len=rng.randrange(1, 6)) if rng.random() < 0.8 else None,
        kda_token_states=scheme == "records",
        kda_verify_scheme=scheme,
    )


def test_predicted_bytes_are_what_is_allocated() -> None:
    """200 random small configurations: pools, state views and side buffers, byte for byte."""
    rng, built_ones, refused = random.Random(4), 0, 0
    while built_ones < 200:
        plan = random_plan(rng)
        sizing = hybrid(plan)
        try:
            config = built(plan)
        except ValueError:
            refused += 1
            continue
        manager = create_manager(plan, MambaHybridCacheManagerV2, device="cpu")
        assert isinstance(manager, MambaHybridCacheManagerV2)
        slots = sizing.num_state_slots(config)
        split = split_gpu_quota(config)
        pools = sum(n * sum(sizes) for n, sizes in zip(split.num_slots, split.slot_sizes, strict=True))
        views = [*manager.mamba_layer_offsets]
        states = [
            manager.get_ssm_states(layer).nbytes + manager.get_conv_states(layer).nbytes for layer in views
        ]
        pages = [
            manager.get_buffers(layer).nbytes
            for layer, shape in zip(manager.pp_layers, manager.layers.shapes, strict=True)
            if shape.num_kv_heads
        ]
        side = side_tensors(manager)
        # A padded row takes more than its view shows.
        nbytes = {name: tensor.untyped_storage().nbytes() for name, tensor in side.items()}
        assert manager.num_state_slots == slots
        assert sum(states) == slots * sizing.states.pool_bytes_per_slot
        assert sum(states) + sum(pages) == pools == manager.allocated_bytes
        in_quota = slots * sizing.states.reserved_bytes_per_slot
        assert nbytes.get("kda_state_tok", 0) == manager.side_bytes_in_quota == in_quota
        predicted = in_quota + slots * sizing.free_side_bytes_per_slot
        assert sum(nbytes.values()) == predicted == manager.side_bytes
        manager.shutdown()
        built_ones += 1
    assert refused < 200
