# SPDX-License-Identifier: Apache-2.0
"""`MambaHybridCacheManagerV2` by behaviour: what is allocated, moved, seeded, committed, refused; and the
factory.
"""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.verify_scheme import KdaGeometry
from tensorrt_llm._torch.pyexecutor._util import _create_kv_cache_manager
from tensorrt_llm._torch.pyexecutor.kv_cache.config import (
    CacheType,
    KvCacheSettings,
    SpecSettings,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import (
    MambaHybridCacheManagerV2,
    MixedMambaHybridCacheManager,
    SpeculativeState,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import MambaStateSpec
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import plan_verify
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import cache_limits, gpu_quota_bytes, local_layers
from tensorrt_llm._torch.pyexecutor.kv_cache.storage_builder import cache_tiers
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
)
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import split_gpu_quota
from tests.unittest._torch.executor.kv_cache.helpers import (
    MIB,
    Batch,
    Metadata,
    Request,
    Traits,
    accept,
    admit,
    launch,
    make_manager,
    randomize,
    settings,
    side_tensors,
    slot_of,
)
from tests.unittest._torch.executor.kv_cache.toy_kda import Literal, ToyKda, logical_layers

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


class RecordingManager(MambaHybridCacheManagerV2):
    """Notes what it is called with, and allocates nothing."""

    def __init__(self, *args: object, **keywords: object) -> None:
        self.args, self.keywords = args, keywords


class NotV2(MixedMambaHybridCacheManager):
    def __init__(self, *args: object, **keywords: object) -> None:
        self.args, self.keywords = args, keywords


def engine(**backbone: object) -> SimpleNamespace:
    model = SimpleNamespace(model=SimpleNamespace(**backbone), traits=Traits())
    return SimpleNamespace(model=model, _max_cuda_graph_batch_size=0, is_multimodal=False)


def create(model_engine: object, cls: type = RecordingManager, **changes: object) -> RecordingManager:
    arguments = {
        "mapping": Mapping(),
        "kv_cache_config": settings(),
        "tokens_per_block": 4,
        "max_seq_len": 64,
        "max_batch_size": 2,
        "spec_config": SpecSettings(max_draft_len=3),
        "model_config": None if model_engine else Traits(),
        "device": "cpu",
    }
    return _create_kv_cache_manager(model_engine, cls, **{**arguments, **changes})


@pytest.mark.parametrize("wants_records", [True, False])
def test_kimi_explicit_v2_manager_kda_token_states_follow_the_model(wants_records: bool) -> None:
    keywords = create(engine(kda_token_states=wants_records)).keywords
    if wants_records:
        assert keywords["kda_token_states"] is True
    else:
        assert "kda_token_states" not in keywords
    for others in (
        create(None),
        create(engine()),
        create(engine(kda_token_states=wants_records), cls=NotV2),
        create(engine(kda_token_states=wants_records), spec_config=None),
    ):
        assert "kda_token_states" not in others.keywords


def test_kimi_explicit_v2_manager_enables_kda_replay() -> None:
    keywords = create(engine(), spec_config=SpecSettings(max_draft_len=5)).keywords
    assert keywords["kda_replay_num_spec"] == 5
    assert keywords["conv_state_layout"] == "q_k_v"
    assert "kda_token_states" not in keywords and "kda_verify_scheme" not in keywords
    assert "kda_replay_num_spec" not in create(engine(), spec_config=None).keywords


def test_kimi_explicit_v2_manager_geometry() -> None:
    manager = create(engine(), spec_config=None)
    masks = [True, True, True, False], [False, False, False, True]
    assert manager.args[:9] == (8, 4, 2, 2, 8, 3, masks[0], torch.float32, torch.float32)
    assert manager.args[10] is CacheType.SELFKONLY
    assert manager.keywords["layer_mask"] == masks[1]
    assert (manager.keywords["num_kv_heads"], manager.keywords["head_dim"]) == (1, 12)
    assert manager.keywords["vocab_size"] == 97


def test_v2_manager_rejects_unknown_keywords() -> None:
    with pytest.raises(TypeError, match="model_type.*conv_state_layout"):
        make_manager(model_type="qwen3_next")
    with pytest.raises(TypeError, match="kda_token_state"):
        make_manager(kda_token_state=True)


@on_each_device
@pytest.mark.parametrize("num_spec", [2, None])
def test_v2_kda_token_states_replace_the_replay_caches(num_spec: int | None, device: str) -> None:
    manager = make_manager(num_spec=num_spec, kda_token_states=True, device=device)
    view = manager.mamba_layer_cache(1)
    names = ("kda_qkg_cache", "kda_v_cache", "kda_beta_cache")
    if num_spec is None:
        assert not side_tensors(manager) and manager.side_bytes == 0
        assert not manager.keeps_kda_token_states and not view.has_kda_replay_caches
        plain = make_manager(num_spec=None, device=device)
        assert plain.num_state_slots == manager.num_state_slots
        assert plain.allocated_bytes == manager.allocated_bytes
        return
    L, N, H, K = 3, manager.num_state_slots, 2, 8
    records = manager.kda_state_tok
    assert records is not None and records.shape == (L, N, 3, num_spec, H, K)
    assert records.dtype is torch.float32 and records.is_contiguous() and not records.any()
    assert isinstance(view, SpeculativeState) and view.kda_state_tok is not None
    assert view.kda_state_tok.is_contiguous()
    assert view.kda_state_tok.data_ptr() == records[1].data_ptr()
    assert view.kda_state_tok.shape == (N, 3, num_spec, H, K)
    for name in names:
        assert getattr(manager, name) is None and getattr(view, name) is None
    for name in ("kda_conv_q", "kda_conv_k", "kda_conv_v"):
        assert getattr(manager, name).shape == (L, N, H * K, 3 + num_spec)
        assert getattr(view, name) is not None
    assert view.has_kda_replay_caches and manager.keeps_kda_token_states
    manager.shutdown()


@on_each_device
def test_v2_kda_replay_allocates_logical_slot_caches(device: str) -> None:
    manager = make_manager(num_heads=6, head_dim=8, conv_width=5, num_spec=2, device=device)
    N, D, M = manager.num_state_slots, 48, 2
    view = manager.mamba_layer_cache(0)
    for name in ("kda_conv_q", "kda_conv_k", "kda_conv_v"):
        conv = getattr(view, name)
        assert conv.shape == (N, D, 6) and conv.stride() == (6 * D, 1, D)
    assert view.kda_qkg_cache.shape == (N, M, 3, D) and view.kda_qkg_cache.is_contiguous()
    assert view.kda_v_cache.shape == (N, M, D) and view.kda_v_cache.is_contiguous()
    beta = manager.kda_beta_cache
    assert beta is not None and beta.shape == (3, N, M, 6) and beta.stride()[-2:] == (8, 1)
    rows = beta.data_ptr() + 4 * torch.arange(0, 3 * N * M * 8, 8)
    assert not (rows % 16).any()
    assert [beta[i, j, k].data_ptr() % 16 for i in range(3) for j in range(N) for k in range(M)] == [0] * (
        3 * N * M
    )
    assert manager.kda_state_tok is None and view.kda_state_tok is None
    assert manager.intermediate_ssm_states is None and manager.intermediate_conv_states is None
    manager.shutdown()


def snapshot(manager: MambaHybridCacheManagerV2) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in side_tensors(manager).items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def move_slots(manager: MambaHybridCacheManagerV2, moves: dict[Request, int]) -> None:
    """Let the storage report these slots for these requests, as after a defragmentation."""
    moved = {req.py_request_id: slot for req, slot in moves.items()}
    actual = manager._map.slot_of
    manager._map.slot_of = lambda request_id: moved.get(request_id) or actual(request_id)


@on_each_device
@pytest.mark.parametrize("keywords", [{"kda_token_states": True}, {}, {"kda_verify_scheme": "intermediate"}])
def test_v2_kda_token_states_relocate_with_their_slot(keywords: dict[str, object], device: str) -> None:
    manager = make_manager(batch=4, device=device, **keywords)
    requests = [Request(i) for i in range(4)]
    admit(manager, *requests)
    for req in requests:
        accept(manager, launch(manager, req), 1)
    randomize(manager)
    assert [slot_of(manager, req) for req in requests] == [0, 1, 2, 3]
    for name, tensor in side_tensors(manager).items():
        if name != "counts":
            tensor[:, 2:] = torch.nan
    manager.prev_num_accepted_tokens[:] = torch.arange(manager.num_state_slots, device=device)
    before = snapshot(manager)
    # A chain: the state of 0 lies in 1 now, that of 1 in 2. Both are read before either is written.
    manager.free_resources(requests[2])
    move_slots(manager, {requests[0]: 1, requests[1]: 2})
    for req in requests[:2]:
        assert manager.try_allocate_generation(req)
    manager.prepare_resources(Batch(generation_requests=requests[:2]))
    for name, tensor in side_tensors(manager).items():
        assert same_bits(tensor[:, 1], before[name][:, 0]), name
        assert same_bits(tensor[:, 2], before[name][:, 1]), name
        others = [slot for slot in range(manager.num_state_slots) if slot not in (1, 2)]
        assert same_bits(tensor[:, others], before[name][:, others]), name
    manager._map.slot_of = manager._slot_of
    manager.shutdown()
    for name in before:
        assert name == "counts" or getattr(manager, name) is None
    assert manager.prev_num_accepted_tokens is None


@on_each_device
def test_v2_kda_token_states_seed_disaggregated_generation_slots(device: str) -> None:
    manager = make_manager(kda_token_states=True, device=device)
    requests = [Request(0), Request(1)]
    admit(manager, *requests)
    randomize(manager)
    manager.prev_num_accepted_tokens[:] = 2
    slot, other = slot_of(manager, requests[0]), slot_of(manager, requests[1])
    before = snapshot(manager)
    manager.seed_kda_replay_caches_for_disagg_gen([0, 0, 77])
    for layer in manager.mamba_layer_offsets:
        conv, view = manager.get_conv_states(layer)[slot], manager.mamba_layer_cache(layer)
        for section, name in zip(conv.chunk(3), ("kda_conv_q", "kda_conv_k", "kda_conv_v"), strict=True):
            assert torch.equal(getattr(view, name)[slot, :, :3], section)
            assert not getattr(view, name)[slot, :, 3:].any()
    assert manager.prev_num_accepted_tokens[slot] == 0
    assert same_bits(manager.kda_state_tok, before["kda_state_tok"])
    for name, tensor in side_tensors(manager).items():
        assert same_bits(tensor[:, other], before[name][:, other]), name
    manager.shutdown()


def test_kda_replay_path_stays_on_with_the_drafts_records() -> None:
    some = torch.zeros(1)
    plain = {"conv": some, "temporal": some}
    conv = {"kda_conv_q": some, "kda_conv_k": some, "kda_conv_v": some}
    with_caches = SpeculativeState(**plain, **conv, kda_qkg_cache=some)
    with_records = SpeculativeState(**plain, **conv, kda_state_tok=some)
    neither = SpeculativeState(**plain)
    assert with_caches.has_kda_replay_caches is True
    assert with_records.has_kda_replay_caches is True
    assert neither.has_kda_replay_caches is False


@pytest.mark.parametrize("num_spec", [1, 2, 7, None])
def test_v2_kda_token_states_count_in_the_per_slot_budget(num_spec: int | None) -> None:
    with_records, without = (
        make_manager(num_spec=num_spec, kda_token_states=records) for records in (True, False)
    )
    gap = with_records._mamba_state_bytes_per_slot() - without._mamba_state_bytes_per_slot()
    assert gap == (0 if num_spec is None else 3 * 3 * num_spec * 2 * 8 * 4)
    if num_spec is not None:
        assert with_records._kda_draft_records_shape() == (3, num_spec, 2, 8)
        assert with_records.kda_state_tok is not None
        assert gap * with_records.num_state_slots == with_records.kda_state_tok.nbytes
    with_records.shutdown()
    without.shutdown()


def floor_sizing(
    *,
    records: bool = True,
    block_reuse: bool = False,
    ratio: float = 0.97,
    batch: int = 2,
    pool_ratio: tuple[float, ...] | None = None,
    bytes_per_token: int = 64,
    quota: int = 128 * MIB,
    max_tokens: int | None = None,
) -> HybridSizing:
    """One recurrent layer of 2 MiB + 64 KiB a slot (H 8, K 256, M 2), one attention layer with pages of 256
    B.
    """
    spec = MambaStateSpec(
        num_heads=8,
        head_dim=256,
        d_state=256,
        conv_columns=4,
        conv_section_dims=(4096, 2048, 2048),
        conv_dtype=torch.bfloat16,
        ssm_dtype=torch.float32,
    )
    config = settings(
        enable_block_reuse=block_reuse,
        max_util_for_resume=ratio,
        pool_ratio=pool_ratio,
        max_gpu_total_bytes=quota,
        max_tokens=max_tokens,
    )
    layers = local_layers(
        num_layers=1,
        num_kv_heads=1,
        head_dim=bytes_per_token // 2,
        dtype=torch.bfloat16,
        mapping=Mapping(),
        layer_mask=[False, bytes_per_token > 0],
        recurrent_mask=[True, False],
        num_recurrent_layers=1,
        max_seq_len=1024,
    )
    spec_config = SpecSettings(max_draft_len=2)
    verify = plan_verify(spec, 2, records, None, is_draft=False)
    limits = cache_limits(1024, batch, 512, 4, 1, spec_config)
    return HybridSizing.plan(
        config, CacheType.SELFKONLY, limits, layers, spec, verify, Mapping(), spec_config
    )


def floor_config(sizing: HybridSizing, quota: int = 128 * MIB, **changes: object) -> KVCacheManagerConfig:
    config = settings(enable_block_reuse=sizing.enable_block_reuse, max_gpu_total_bytes=quota, **changes)
    return sizing.base_config(config, cache_tiers(config, quota, Mapping(), "cpu"), enable_stats=False)


def build(sizing: HybridSizing, quota: int = 128 * MIB, **changes: object) -> KVCacheManagerConfig:
    config = settings(enable_block_reuse=sizing.enable_block_reuse, max_gpu_total_bytes=quota, **changes)
    return sizing.build_config(floor_config(sizing, quota, **changes), config)


@on_each_device
@pytest.mark.parametrize(
    ("records", "block_reuse", "at_floor"), [(True, False, True), (False, False, False), (False, True, False)]
)
def test_v2_kda_token_states_keep_ssm_pool_at_live_floor(
    records: bool, block_reuse: bool, at_floor: bool, device: str
) -> None:
    sizing = floor_sizing(records=records, block_reuse=block_reuse)
    config = build(sizing)
    storage = KVCacheManager(config, device=device)
    slots, pages = (statistics.total for statistics in storage.get_storage_statistics())
    handed = storage.get_quota()
    storage.shutdown()
    assert sizing.is_at_live_floor is at_floor
    if at_floor:
        assert (slots, pages) == (4, 483_328)
        assert handed == 134_021_120
        return
    assert handed == 128 * MIB
    if not block_reuse:
        assert (slots, pages) == (49, 106_496)
    assert slots > 10 * sizing.states.kept_slots


def test_v2_kda_token_states_reserve_quota_before_sizing(caplog: pytest.LogCaptureFixture) -> None:
    with_records, without = floor_sizing(), floor_sizing(records=False)
    base = floor_config(with_records, host_cache_size=8 * MIB)
    tiers = base.cache_tiers
    with caplog.at_level(logging.INFO, logger="tensorrt_llm"):
        config = with_records.build_config(base, settings(host_cache_size=8 * MIB))
    assert (
        base.cache_tiers
        == tiers
        == (
            GpuCacheTierConfig(quota=128 * MIB),
            HostCacheTierConfig(quota=8 * MIB),
        )
    )
    assert config.cache_tiers == (GpuCacheTierConfig(quota=134_021_120), HostCacheTierConfig(quota=8 * MIB))
    assert "records of 4 slots" in caplog.text
    R, B = 49_152, 2 * MIB + (64 << 10)
    assert with_records.minimum_quota() - without.minimum_quota() == 4 * R + B
    for tokens in (0, 100, 4096):
        gap = with_records.quota_from_max_tokens(tokens) - without.quota_from_max_tokens(tokens)
        assert gap == 4 * R + B


@pytest.mark.parametrize("ratio", [0.95, float(np.float32(0.95))])
def test_v2_kda_token_states_reserve_the_slots_the_runtime_keeps(ratio: float) -> None:
    sizing = floor_sizing(batch=18, ratio=ratio)
    R, B = 49_152, 2 * MIB + (64 << 10)
    assert sizing.states.floor_slots == 19
    assert sizing.states.kept_slots == 21
    assert sizing.state_quota() == 21 * (B + R)
    assert sizing.quota_from_max_tokens(10) == 21 * (B + R) + 640
    assert sizing.minimum_quota() == 21 * (B + R) + 256
    config = build(sizing)
    assert config.cache_tiers[0].quota == 128 * MIB - 21 * R
    split = split_gpu_quota(config)
    assert split.num_slots[split.slot_sizes.index((2 * MIB, 64 << 10))] == 21


OFF_FLOOR: dict[str, tuple[dict[str, object], str]] = {
    "block_reuse": (
        {"config": settings(enable_block_reuse=True)},
        "block reuse keeps snapshots in the state pool: set kv_cache_config.enable_block_reuse=False",
    ),
    "pool_ratio": (
        {"config": settings(pool_ratio=(0.5, 0.5))},
        "kv_cache_config.pool_ratio sizes the state pool: leave pool_ratio out",
    ),
    "no_attention": (
        {"num_attention_layers": 0},
        "this rank has no attention layer to take the rest of the quota: choose another pp_size",
    ),
}


def last_stage(**keywords: object) -> MambaHybridCacheManagerV2:
    """The second of two pipeline ranks: two attention layers, and none that keeps a state."""
    layers = [True, True, False, False]
    return make_manager(
        mamba_num_layers=2,
        mamba_layer_mask=layers,
        num_layers=2,
        layer_mask=[not layer for layer in layers],
        mapping=Mapping(world_size=2, rank=1, pp_size=2),
        **keywords,
    )


@on_each_device
@pytest.mark.parametrize("cause", list(OFF_FLOOR))
def test_v2_kda_token_states_refuse_a_pool_off_the_live_floor(
    cause: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[KVCacheManagerConfig] = []
    original = KVCacheManager.__init__

    def noting(self: KVCacheManager, config: KVCacheManagerConfig, *args: object, **keywords: object) -> None:
        pools.append(config)
        original(self, config, *args, **keywords)

    monkeypatch.setattr(KVCacheManager, "__init__", noting)
    arguments, message = OFF_FLOOR[cause]
    with pytest.raises(ValueError, match=re.escape(message) + ".*or set kda_token_states=False"):
        make_manager(kda_token_states=True, device=device, **arguments)
    assert not pools
    make_manager(kda_token_states=False, device=device, **arguments).shutdown()
    assert len(pools) == 1
    # A rank without KDA layers keeps no records: nothing has to be known beforehand.
    config = arguments.get("config", settings())
    assert isinstance(config, KvCacheSettings)
    if config.pool_ratio is not None:
        config = replace(config, pool_ratio=(1.0,))
    without_states = last_stage(kda_token_states=True, config=config, device=device)
    assert len(pools) == 2 and without_states.kda_state_tok is None and without_states.side_bytes == 0
    without_states.shutdown()


def test_v2_kda_token_states_never_refuse_a_rank_without_kda_layers() -> None:
    config = settings(enable_block_reuse=True, enable_kv_pool_rebalance=True)
    manager = last_stage(kda_token_states=True, config=config)
    assert manager.num_state_slots == 0 and manager.side_bytes == 0
    assert not manager.keeps_kda_token_states
    req = Request(5)
    admit(manager, req)
    batch = launch(manager, req)
    accept(manager, batch, 1)
    assert manager.get_state_indices([5]) == [0]
    manager.suspend_request(req)
    assert manager.try_allocate_generation(req)
    manager.seed_kda_replay_caches_for_disagg_gen([5])
    manager.check_integrity()
    manager.shutdown()


class Replayed:
    """A slot's state and window as a serial replay of its records gives them."""

    def __init__(self, manager: MambaHybridCacheManagerV2, slot: int, count: int) -> None:
        self.states, self.windows = [], []
        for layer in manager.mamba_layer_offsets:
            view = manager.mamba_layer_cache(layer)
            state = view.temporal[slot].clone()
            for vn, beta_k, decay in zip(*view.kda_state_tok[slot, :, :count], strict=True):
                product = vn.unsqueeze(-1) * beta_k.unsqueeze(-2)
                state = (decay.unsqueeze(-2).double() * state.double() + product.double()).float()
            self.states.append(state)
            columns = [
                c[slot, :, count : count + 3] for c in (view.kda_conv_q, view.kda_conv_k, view.kda_conv_v)
            ]
            self.windows.append(torch.cat(columns).clone())


@on_each_device
@pytest.mark.parametrize("count", range(4))
def test_v2_kda_replay_commit_and_relocation_without_the_replay_caches(count: int, device: str) -> None:
    manager = make_manager(num_spec=3, kda_token_states=True, device=device)
    req, other = Request(1), Request(2)
    admit(manager, req, other)
    accept(manager, launch(manager, req, other, num_drafts=3), count, 2)
    randomize(manager)
    slot, neighbour = slot_of(manager, req), slot_of(manager, other)
    manager.kda_state_tok[:, slot, :, count:] = torch.nan
    expected, kept = Replayed(manager, slot, count), snapshot(manager)
    pools = [manager.get_ssm_states(layer)[neighbour].clone() for layer in manager.mamba_layer_offsets]
    manager.suspend_request(req)
    for layer, local in manager.mamba_layer_offsets.items():
        assert same_bits(manager.get_ssm_states(layer)[slot], expected.states[local])
        assert same_bits(manager.get_conv_states(layer)[slot], expected.windows[local])
        assert same_bits(manager.get_ssm_states(layer)[neighbour], pools[local])
    assert manager.prev_num_accepted_tokens[slot] == 0
    for name, tensor in side_tensors(manager).items():
        assert same_bits(tensor[:, neighbour], kept[name][:, neighbour]), name
    relocate_to_another_slot(manager, req, count)
    manager.shutdown()


def relocate_to_another_slot(manager: MambaHybridCacheManagerV2, req: Request, count: int) -> None:
    """Resume, accept `count` drafts, and have the storage report another slot: what lies beside follows, bit
    for bit, drafts beyond the count, which are NaN, included; every neighbour is NaN and stays it.
    """
    accept(manager, launch(manager, req, num_drafts=3), count)
    old = slot_of(manager, req)
    new = manager.num_state_slots - 1
    assert new > old and manager.prev_num_accepted_tokens[old] == count
    for name, tensor in side_tensors(manager).items():
        if name == "counts":
            tensor[0, :old], tensor[0, old + 1 :] = 3 - count, 3 - count
            continue
        kept = torch.randn(tensor[:, old].shape)
        tensor[:] = torch.nan
        tensor[:, old] = kept
    manager.kda_state_tok[:, old, :, count:] = torch.nan
    before = snapshot(manager)
    pools = [(manager.get_ssm_states(i).clone(), manager.get_conv_states(i).clone()) for i in range(3)]
    move_slots(manager, {req: new})
    launch(manager, req, num_drafts=3)
    assert slot_of(manager, req) == new
    for name, tensor in side_tensors(manager).items():
        assert same_bits(tensor[:, new], before[name][:, old]), name
        assert same_bits(tensor[:, :new], before[name][:, :new]), name
    for layer, (states, windows) in enumerate(pools):
        assert same_bits(manager.get_ssm_states(layer), states)
        assert same_bits(manager.get_conv_states(layer), windows)
    manager._map.slot_of = manager._slot_of


def run_rounds(
    manager: MambaHybridCacheManagerV2, toy: ToyKda, req: Request, rounds: list[tuple[list[int], int]]
) -> list[Tensor]:
    """Run verify rounds of these tokens, accept so many drafts of each, and return the rounds' outputs and
    what the slot is worth after each.
    """
    worth: list[Tensor] = []
    for tokens, accepted in rounds:
        req.py_draft_tokens = tokens[1:]
        assert manager.try_allocate_generation(req)
        batch = Batch(generation_requests=[req])
        manager.prepare_resources(batch)
        worth += toy.verify(manager, [slot_of(manager, req)], [tokens])
        accept(manager, batch, accepted)
        for state, window in logical_layers(manager, slot_of(manager, req)):
            worth += [state.clone(), window.clone()]
    return worth


def start_prompt(manager: MambaHybridCacheManagerV2, toy: ToyKda, req: Request) -> None:
    admit(manager, req)
    toy.prefill(manager, slot_of(manager, req), 0, req.tokens)


@on_each_device
@pytest.mark.parametrize("scheme", ["records", "replay", "intermediate"])
@pytest.mark.parametrize("slot", ["slot_taken", "slot_kept"])
def test_v2_kda_replay_suspend_resume_matches_an_unsuspended_run(slot: str, scheme: str, device: str) -> None:
    toy = ToyKda(num_layers=3, H=2, K=32, device=device)
    before = [([3, 9, 1], 2), ([5, 6, 6], 1)]
    after = [([7, 8, 2], 2), ([4], 0), ([1, 2, 3], 1)]
    worth = []
    for is_suspended in (False, True):
        manager = make_manager(
            head_dim=32,
            kda_verify_scheme=scheme,
            config=settings(host_cache_size=8 * MIB),
            device=device,
        )
        req = Request(1)
        start_prompt(manager, toy, req)
        run_rounds(manager, toy, req, before)
        old_slot = slot_of(manager, req)
        if is_suspended:
            manager.suspend_request(req)
            manager.suspend_request(req)
            if slot == "slot_taken":
                take_every_slot(manager)
        worth.append(run_rounds(manager, toy, req, after))
        moved = slot_of(manager, req) != old_slot
        assert moved is (is_suspended and slot == "slot_taken")
        manager.check_integrity()
        manager.shutdown()
    # Per round the outputs of all layers, and state and window of each.
    assert len(worth[0]) == len(after) * 3 * toy.num_layers
    assert worth[0][0].shape == (3, 2, 32) and not worth[0][0].isnan().any()
    assert all(torch.equal(one, other) for one, other in zip(*worth, strict=True))


def take_every_slot(manager: MambaHybridCacheManagerV2) -> None:
    """Fill all state slots with others' states, so that suspended ones go to the host; free one."""
    others = [Request(100 + i, [1]) for i in range(manager.num_state_slots)]
    for other in others:
        assert manager.prepare_context(other)
        slot = manager._slot_of(other.py_request_id)
        for layer in manager.mamba_layer_offsets:
            manager.get_ssm_states(layer)[slot] = torch.nan
            manager.get_conv_states(layer)[slot] = torch.nan
    for tensor in side_tensors(manager).values():
        if tensor.is_floating_point():
            tensor[:] = torch.nan
    # Any slot but the one that the suspended request had.
    freed = next(other for other in others if manager._slot_of(other.py_request_id) > 1)
    manager.free_resources(freed)


def test_a_suspended_prompt_goes_on_where_it_was() -> None:
    """Between two chunks nothing is beside the pool: stale columns must not become the window."""
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(head_dim=32, kda_token_states=True)
    randomize(manager)
    req = Request(1, [3, 1, 4, 1, 5, 9])
    assert manager.prepare_context(req) and manager.resize_context(req, 4)
    req.context_chunk_size = 4
    batch = Batch(context_requests=[req])
    manager.prepare_resources(batch)
    manager.suspend_request(req)
    assert manager.prepare_context(req)
    manager.prepare_resources(batch)
    toy.prefill(manager, slot_of(manager, req), 0, req.tokens[:4])
    manager.update_context_resources(batch)
    req.context_current_position, req.context_chunk_size = 4, 2
    manager.suspend_request(req)
    assert manager.prepare_context(req) and manager.resize_context(req, 2)
    manager.prepare_resources(batch)
    toy.prefill(manager, slot_of(manager, req), 4, req.tokens[4:])
    manager.update_context_resources(batch)
    req.context_current_position, req.context_chunk_size = 6, 0
    manager.suspend_request(req)
    literal = Literal(toy)
    literal.feed(req.tokens)
    literal.feed([8, 2])
    worth = run_rounds(manager, toy, req, [([8, 2, 6], 1)])[toy.num_layers :]
    expected = [part for layer in literal.layers for part in layer]
    assert all(torch.equal(one, other) for one, other in zip(worth, expected, strict=True))
    manager.shutdown()


@pytest.mark.parametrize("path", ["kda_replay", "no_replay"])
def test_v2_kda_replay_refuses_kv_pool_rebalance(path: str) -> None:
    config = settings(enable_kv_pool_rebalance=True)
    if path == "no_replay":
        make_manager(num_spec=None, config=config).shutdown()
        last_stage(num_spec=None, config=config).shutdown()
        return
    for keywords in ({}, {"kda_token_states": True}, {"kda_verify_scheme": "intermediate"}):
        with pytest.raises(ValueError, match="enable_kv_pool_rebalance=False"):
            make_manager(config=config, **keywords)
        last_stage(config=config, **keywords).shutdown()


@on_each_device
def test_v2_kda_replay_records_acceptance_and_skips_dummy_rows(device: str) -> None:
    manager = make_manager(num_spec=7, batch=3, kda_token_states=True, device=device)
    context, generation = Request(0), Request(1)
    admit(manager, context, generation)
    (dummy,) = manager.add_dummy_requests([99], [1], is_gen=True, max_num_draft_tokens=7)
    context.context_chunk_size = 1
    generation.py_draft_tokens = [7] * 7
    assert manager.try_allocate_generation(generation)
    manager.prepare_resources(Batch(context_requests=[context], generation_requests=[generation, dummy]))
    ids = [0, 1, 99]
    slots = manager.get_state_indices(ids)
    manager.prev_num_accepted_tokens[slots] = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
    accepted = torch.tensor([5, 3, 4], dtype=torch.int32, device=device)
    manager.update_mamba_states(Metadata(1, ids), accepted)
    assert manager.prev_num_accepted_tokens[slots].tolist() == [7, 2, 9]
    manager.shutdown()


@on_each_device
@pytest.mark.parametrize("keywords", [{"kda_token_states": True}, {}])
def test_v2_kda_replay_resets_context_slots(keywords: dict[str, object], device: str) -> None:
    manager = make_manager(device=device, **keywords)
    req = Request(0)
    admit(manager, req)
    randomize(manager)
    manager.prev_num_accepted_tokens[:] = 2
    before = snapshot(manager)
    states = [manager.get_ssm_states(layer).clone() for layer in manager.mamba_layer_offsets]
    manager.prepare_resources(Batch(context_requests=[req]))
    slot = slot_of(manager, req)
    assert manager.prev_num_accepted_tokens.tolist() == [
        0 if row == slot else 2 for row in range(manager.num_state_slots)
    ]
    for name, tensor in side_tensors(manager).items():
        assert name == "counts" or same_bits(tensor, before[name]), name
    for layer, local in manager.mamba_layer_offsets.items():
        assert same_bits(manager.get_ssm_states(layer), states[local])
    manager.shutdown()


@on_each_device
@pytest.mark.parametrize("way_out", ["update_resources", "update_mamba_states", "revert_allocate_generation"])
def test_v2_kda_replay_refuses_a_suspend_before_the_host_drafter_acceptance(
    way_out: str, device: str
) -> None:
    manager = make_manager(kda_token_states=True, device=device)
    req, other = Request(41), Request(42)
    admit(manager, req, other)
    batch = launch(manager, req, other)
    with pytest.raises(RuntimeError, match="suspend request 41.*acceptance"):
        manager.suspend_request(req)
    assert manager.kda_state_tok is not None and slot_of(manager, req) >= 0
    if way_out == "update_resources":
        accept(manager, batch, 1, 0)
    elif way_out == "update_mamba_states":
        manager.update_mamba_states(Metadata(0, [41, 42]), torch.tensor([2, 1], device=device))
    else:
        manager.revert_allocate_generation(req)
    manager.suspend_request(req)
    with pytest.raises(KeyError):
        slot_of(manager, req)
    manager.check_integrity()
    manager.shutdown()


def test_moves_and_seeds_are_refused_before_acceptance() -> None:
    manager = make_manager(kda_token_states=True)
    req = Request(7)
    admit(manager, req)
    launch(manager, req)
    with pytest.raises(RuntimeError, match="seed request 7"):
        manager.seed_kda_replay_caches_for_disagg_gen([7])
    move_slots(manager, {req: 2})
    with pytest.raises(RuntimeError, match="relocate request 7"):
        manager.prepare_resources(Batch(generation_requests=[req]))
    manager._map.slot_of = manager._slot_of
    manager.shutdown()


def test_a_draft_manager_keeps_no_records_and_an_estimation_manager_does() -> None:
    draft = make_manager(kda_token_states=True, is_draft=True)
    assert draft.kda_state_tok is None and draft.kda_qkg_cache is not None
    estimation = make_manager(kda_token_states=True, is_estimating_kv_cache=True)
    assert estimation.kda_state_tok is not None
    draft.shutdown()
    estimation.shutdown()


def test_intermediate_states_are_kept_per_draft() -> None:
    manager = make_manager(kda_verify_scheme="intermediate")
    states = manager.intermediate_ssm_states
    assert states is not None and states.shape == (3, manager.num_state_slots, 2, 2, 8, 8)
    assert manager.kda_state_tok is None and manager.kda_qkg_cache is None
    assert manager.mamba_layer_cache(0).has_kda_replay_caches
    manager.shutdown()


def test_state_views_start_at_their_layer_and_stride_over_all_of_them() -> None:
    manager = make_manager(num_state_layers=3)
    state = manager.get_ssm_states(1)
    assert state.shape == (manager.num_state_slots, 2, 8, 8)
    assert state.stride() == (3 * 128, 64, 8, 1)
    state[2] = 5
    assert not manager.get_ssm_states(0).any() and not manager.get_ssm_states(2).any()
    assert KdaGeometry(num_heads=2, head_dim=8, conv_width=4, num_spec=2).channels == 16
    assert replace(settings(), max_tokens=1).max_tokens == 1
    assert gpu_quota_bytes(settings(), manager._sizing) == 16 * MIB
    manager.shutdown()
