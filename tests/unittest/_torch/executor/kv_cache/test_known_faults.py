# SPDX-License-Identifier: Apache-2.0
"""Faults that users of other systems met, each as the behaviour that is right, over its whole kind."""

import itertools
import random

import pytest
import torch

from tensorrt_llm._torch.pyexecutor.kv_cache import storage_builder
from tensorrt_llm._torch.pyexecutor.kv_cache.config import MambaStateSettings, SpecSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.create import create_manager
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import (
    MambaHybridCacheManagerV2,
    MixedMambaHybridCacheManager,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import (
    num_padding_dummies,
    num_reserved_dummy_slots,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import (
    RecurrentShape,
    StateDtypes,
    linear_state_spec,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.transfer import (
    TensorRank,
    copy_ranges,
    section_copies,
)
from tensorrt_llm.mapping import Mapping
from tests.unittest._torch.executor.kv_cache.helpers import (
    GIB,
    K3_TRAITS,
    Batch,
    Metadata,
    Request,
    accept,
    admit,
    k3_plan,
    launch,
    make_manager,
    randomize,
    settings,
    side_tensors,
    slot_of,
)
from tests.unittest._torch.executor.kv_cache.toy_kda import Literal, ToyKda, logical_layers


@pytest.mark.parametrize(
    ("spec", "batch", "dummies"),
    [
        (None, 8, 1),
        (SpecSettings(max_draft_len=3), 8, 1),
        (SpecSettings(max_draft_len=3, draft_len_schedule={4: 3}), 4, 1),
        (SpecSettings(max_draft_len=3, draft_len_schedule={4: 3}), 8, 2),
        (SpecSettings(max_draft_len=3, draft_len_schedule={2: 3, 8: 1}), 8, 2),
        (SpecSettings(max_draft_len=3, draft_len_schedule={2: 3, 8: 1}), 9, 3),
        (SpecSettings(max_draft_len=3, draft_len_schedule={2: 3, 8: 1}), 2, 1),
        (SpecSettings(max_draft_len=3, draft_len_schedule={2: 3, 4: 3, 8: 0}), 16, 2),
        (SpecSettings(max_draft_len=3, acceptance_rate_window_size=9, acceptance_rate_threshold=0.5), 8, 2),
        (SpecSettings(max_draft_len=3, acceptance_rate_window_size=9, acceptance_rate_threshold=0.0), 8, 1),
    ],
)
def test_one_padding_dummy_per_reachable_draft_length(
    spec: SpecSettings | None, batch: int, dummies: int
) -> None:
    assert num_padding_dummies(spec, batch) == dummies
    assert num_reserved_dummy_slots(spec, batch, Mapping(enable_attention_dp=True)) == dummies + 1


@pytest.mark.parametrize("records", [True, False])
def test_a_full_batch_and_every_dummy_have_slots_of_their_own(records: bool) -> None:
    """Also while some of the batch are parked outside the step, and whatever the step's rows are."""
    spec = SpecSettings(max_draft_len=2, draft_len_schedule={1: 2, 2: 1})
    manager = make_manager(
        batch=4,
        spec_config=spec,
        mapping=Mapping(enable_attention_dp=True),
        kda_token_states=records,
    )
    requests = [Request(i) for i in range(4)]
    admit(manager, *requests)
    dummy_ids = [90, 91, 92, 93]
    made = manager.add_dummy_requests(dummy_ids, is_gen=True, max_num_draft_tokens=2)
    assert made is not None and len(made) == num_reserved_dummy_slots(spec, 4, manager.mapping)
    live = [slot_of(manager, req) for req in requests]
    assert len({*live, *manager.get_state_indices(dummy_ids)}) == 8
    for req in requests[:1]:
        req.py_draft_tokens = [7]
        assert manager.try_allocate_generation(req)
    manager.prepare_resources(Batch(generation_requests=[requests[0], *made[:3]]))
    rows = manager.get_state_indices([0, 90, 91, 92], [False, True, True, True])
    assert rows[0] == live[0] and not set(rows[1:]) & set(live)
    assert manager.cuda_state_indices[:4].tolist() == rows
    assert manager._rows.is_dummy[:4].tolist() == [False, True, True, True]
    manager.shutdown()


def test_the_index_buffer_never_moves() -> None:
    manager = make_manager(batch=3, kda_token_states=True)
    address = manager.cuda_state_indices.data_ptr()
    requests = [Request(i) for i in range(3)]
    admit(manager, *requests)
    for members in itertools.permutations(requests, 2):
        accept(manager, launch(manager, *members), 0, 1)
        assert manager.cuda_state_indices.data_ptr() == address == manager.get_state_indices().data_ptr()
        assert manager.cuda_state_indices[:2].tolist() == [slot_of(manager, req) for req in members]
    assert manager.intermediate_state_indices.tolist() == list(range(len(manager.cuda_state_indices)))
    manager.shutdown()


@pytest.mark.parametrize("accepted", [0, 1])
def test_counts_of_nothing_accepted_are_zero_and_change_no_state(accepted: int) -> None:
    """`num_accepted` counts the golden token; 0 of it must not become -1."""
    manager = make_manager(kda_token_states=True)
    req = Request(3)
    admit(manager, req)
    randomize(manager)
    before = [part.clone() for layer in (0, 1, 2) for part in _pool(manager, layer)]
    launch(manager, req)
    manager.update_mamba_states(Metadata(0, [3]), torch.tensor([accepted]))
    assert manager.prev_num_accepted_tokens is not None
    assert not manager.prev_num_accepted_tokens.any()
    after = [part for layer in (0, 1, 2) for part in _pool(manager, layer)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    manager.shutdown()


def _pool(manager: MambaHybridCacheManagerV2, layer: int) -> list[torch.Tensor]:
    return [manager.get_ssm_states(layer), manager.get_conv_states(layer)]


def test_a_count_beyond_the_drafts_is_clamped() -> None:
    manager = make_manager(num_spec=2, kda_token_states=True)
    req = Request(3)
    admit(manager, req)
    launch(manager, req)
    manager.update_mamba_states(Metadata(0, [3]), torch.tensor([9]))
    assert manager.prev_num_accepted_tokens is not None
    assert manager.prev_num_accepted_tokens[slot_of(manager, req)] == 2
    manager.shutdown()


def test_counts_go_by_slot_whatever_the_rows_are() -> None:
    """Rows are reordered between two steps; the count on the device belongs to the slot."""
    manager = make_manager(batch=4, num_spec=3, kda_token_states=True, decoding_type="MTP")
    requests = [Request(i) for i in range(4)]
    admit(manager, *requests)
    rng, expected = random.Random(1), {}
    for _ in range(20):
        members = rng.sample(requests, rng.randrange(1, 5))
        batch = launch(manager, *members, num_drafts=3)
        counts = [rng.randrange(4) for _ in members]
        for req, count in zip(members, counts, strict=True):
            expected[slot_of(manager, req)] = count
            req.py_num_accepted_draft_tokens = 0
        ids = [req.py_request_id for req in members]
        manager.update_mamba_states(Metadata(0, ids), torch.tensor(counts) + 1)
        manager.update_resources(batch)
        for slot, count in expected.items():
            assert manager.prev_num_accepted_tokens is not None
            assert manager.prev_num_accepted_tokens[slot] == count
    manager.shutdown()


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("scheme", ["records", "intermediate"])
def test_acceptance_may_name_the_slots_of_its_rows(scheme: str, as_tensor: bool) -> None:
    manager = make_manager(kda_verify_scheme=scheme, decoding_type="MTP")
    requests = [Request(0), Request(1)]
    admit(manager, *requests)
    launch(manager, *requests)
    slots = [slot_of(manager, req) for req in requests]
    given = torch.tensor(slots, dtype=torch.int32) if as_tensor else slots
    manager.update_mamba_states(Metadata(0, [0, 1]), torch.tensor([3, 2]), given)
    assert manager.prev_num_accepted_tokens is not None
    # The intermediate scheme is at the accepted draft already.
    expected = [2, 1] if scheme == "records" else [0, 0]
    assert manager.prev_num_accepted_tokens[slots].tolist() == expected
    with pytest.raises(ValueError, match="accepted_leaf_positions"):
        manager.update_mamba_states(Metadata(0, [0]), torch.tensor([1]), None, torch.tensor([0]))
    manager.shutdown()


def test_the_next_step_may_be_prepared_before_the_last_ones_host_work_ends() -> None:
    """Overlap: acceptance is on the device, prepare of step n + 1 comes before update_resources of step n."""
    manager = make_manager(num_spec=2, kda_token_states=True, decoding_type="MTP")
    req = Request(0)
    admit(manager, req)
    first = launch(manager, req)
    manager.update_mamba_states(Metadata(0, [0]), torch.tensor([3]))
    manager.prepare_resources(first)
    req.py_num_accepted_draft_tokens = 2
    manager.update_resources(first)
    slot = slot_of(manager, req)
    assert manager.prev_num_accepted_tokens is not None
    assert manager.prev_num_accepted_tokens[slot] == 2
    with pytest.raises(RuntimeError, match="suspend request 0"):
        manager.suspend_request(req)
    manager.shutdown()


def test_a_new_owner_starts_with_nothing_pending() -> None:
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(head_dim=32, batch=1, kda_token_states=True)
    for request_id in range(2 * manager.num_state_slots):
        req = Request(request_id, [request_id % 60, 5, 9])
        admit(manager, req)
        slot = slot_of(manager, req)
        toy.prefill(manager, slot, 0, req.tokens)
        literal = Literal(toy)
        literal.feed(req.tokens)
        for (state, window), true in zip(logical_layers(manager, slot), literal.layers, strict=True):
            assert torch.equal(state, true[0]) and torch.equal(window, true[1])
        accept(manager, launch(manager, req), 2)
        for tensor in side_tensors(manager).values():
            tensor[:, slot] = torch.nan if tensor.is_floating_point() else 2
        for layer in range(3):
            for pool in _pool(manager, layer):
                pool[slot] = torch.nan
        manager.free_resources(req)
    manager.shutdown()


@pytest.mark.parametrize("is_gen", [True, False])
def test_dummies_hold_no_nan_of_a_slots_last_owner(is_gen: bool) -> None:
    manager = make_manager(kda_token_states=True)
    for layer in range(3):
        for pool in _pool(manager, layer):
            pool.fill_(torch.nan)
    made = manager.add_dummy_requests([5], is_gen=is_gen, max_num_draft_tokens=2)
    assert made is not None
    slot = slot_of(manager, made[0])
    assert all(
        (pool[slot] == 0).all().item() is is_gen for layer in range(3) for pool in _pool(manager, layer)
    )
    manager.shutdown()


def test_a_full_cache_refuses_a_dummy_now_and_not_for_ever() -> None:
    manager = make_manager(batch=2, max_seq_len=64)
    pages = manager.num_attention_pages * manager.tokens_per_block
    req = Request(0, [1] * pages)
    assert manager.prepare_context(req) and manager.resize_context(req, pages)
    assert manager.add_dummy_requests([9], is_gen=True, max_num_draft_tokens=2) is None
    manager.free_resources(req)
    assert manager.add_dummy_requests([9], is_gen=True, max_num_draft_tokens=2) is not None
    manager.shutdown()


@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.95, 0.97, 1.0])
@pytest.mark.parametrize("records", [True, False])
def test_a_complete_batch_can_give_way_and_come_back(ratio: float, records: bool) -> None:
    """A pool of states is full by nature: its use is no reason to refuse a resume."""
    manager = make_manager(batch=5, kda_token_states=records, config=settings(max_util_for_resume=ratio))
    requests = [Request(i) for i in range(5)]
    admit(manager, *requests)
    assert manager.add_dummy_requests([50], is_gen=True, max_num_draft_tokens=2) is not None
    for req in requests:
        manager.suspend_request(req)
        assert manager.resume_request(req)
    manager.shutdown()


ABORT_POINTS = ("created", "allocated", "prepared", "between chunks", "generating", "launched", "suspended")


@pytest.mark.parametrize("point", ABORT_POINTS)
def test_an_abort_at_any_point_gives_everything_back(point: str) -> None:
    manager = make_manager(kda_token_states=True)
    baseline = [(s.total, s.free) for s in manager.impl.get_storage_statistics()]
    req = Request(4, [1] * 8)
    batch = Batch(context_requests=[req])
    req.context_chunk_size = 4
    steps = {
        "created": lambda: manager.prepare_context(req),
        "allocated": lambda: manager.resize_context(req, 4),
        "prepared": lambda: manager.prepare_resources(batch),
        "between chunks": lambda: manager.update_context_resources(batch),
        "generating": lambda: admit(manager, req),
        "launched": lambda: launch(manager, req),
        "suspended": lambda: (
            accept(manager, Batch(generation_requests=[req]), 1),
            manager.suspend_request(req),
        ),
    }
    for name, step in steps.items():
        step()
        if name == point:
            break
    manager.free_resources(req)
    manager.check_integrity()
    assert [(s.total, s.free) for s in manager.impl.get_storage_statistics()] == baseline
    assert not manager._map.state_index and not manager._map.suspended and not manager._map.acceptance_pending
    manager.shutdown()


@pytest.mark.parametrize(("senders", "receivers"), [(1, 4), (4, 1), (4, 2), (2, 4), (3, 3), (6, 4)])
def test_states_from_another_tensor_split_are_taken_by_section(senders: int, receivers: int) -> None:
    H, K, W = 12, 2, 4
    shape = RecurrentShape(K, W, H, H, K)
    dtypes = StateDtypes(conv=torch.float32, ssm=torch.float32)
    conv, ssm = torch.randn(3, H * K, W - 1), torch.randn(H, K, K)
    for rank in range(receivers):
        receiver = TensorRank(rank=rank, size=receivers)
        spec = linear_state_spec(shape, receivers, "q_k_v", dtypes)
        got_conv = torch.full(spec.conv_state_shape, torch.nan)
        got_ssm = torch.full(spec.ssm_state_shape, torch.nan)
        for source in range(senders):
            sender = TensorRank(rank=source, size=senders)
            sent_conv = torch.cat([part.chunk(senders)[source] for part in conv])
            sent_ssm = ssm.chunk(senders)[source]
            copy_ranges(got_conv, sent_conv, section_copies(spec.conv_section_dims, sender, receiver))
            copy_ranges(got_ssm, sent_ssm, section_copies([spec.num_heads], sender, receiver))
        assert torch.equal(got_conv, torch.cat([part.chunk(receivers)[rank] for part in conv]))
        assert torch.equal(got_ssm, ssm.chunk(receivers)[rank])
    with pytest.raises(ValueError, match="cannot be split over 5 tensor ranks"):
        section_copies([spec.num_heads], TensorRank(rank=0, size=5), receiver)
    with pytest.raises(ValueError, match="tensor rank is 2"):
        TensorRank(rank=2, size=2)


def test_a_transferred_request_generates_from_its_own_slot() -> None:
    """The sender's state reaches the slot of the same request, nothing is pending, and its first round is
    right.
    """
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(head_dim=32, kda_token_states=True, decoding_type="MTP")
    randomize(manager)
    other, req = Request(1), Request(2)
    admit(manager, other, req)
    manager.prev_num_accepted_tokens[:] = 2  # type: ignore[index]
    literal = Literal(toy)
    literal.feed(req.tokens)
    untouched = [
        part[slot_of(manager, other)].clone() for layer in range(3) for part in _pool(manager, layer)
    ]
    for layer, (state, window) in enumerate(literal.layers):
        for rank in range(2):
            conv = torch.cat([part.chunk(2)[rank] for part in window.T.chunk(3)])
            manager.load_transferred_state(
                2, layer, conv, state.chunk(2)[rank], TensorRank(rank=rank, size=2)
            )
    manager.seed_kda_replay_caches_for_disagg_gen([2])
    slot = slot_of(manager, req)
    launch(manager, req, num_drafts=1)
    toy.verify(manager, [slot], [[8, 4]])
    manager.update_mamba_states(Metadata(0, [2]), torch.tensor([2]))
    literal.feed([8])
    literal.feed([4])
    for (state, window), true in zip(logical_layers(manager, slot), literal.layers, strict=True):
        assert torch.equal(state, true[0]) and torch.equal(window, true[1])
    now = [part[slot_of(manager, other)] for layer in range(3) for part in _pool(manager, layer)]
    assert all(torch.equal(one, two) for one, two in zip(untouched, now, strict=True))
    manager.shutdown()


@pytest.mark.parametrize("way", ["straight", "suspended", "moved"])
def test_a_transferred_request_that_was_in_no_step_yet_does_not_start_from_its_slots_last_owner(
    way: str,
) -> None:
    """As a generation server gets it: a cache, pages, the state, and then a verify round for a first step."""
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(head_dim=32, kda_token_states=True, config=settings(host_cache_size=8 << 20))
    randomize(manager)
    manager.prev_num_accepted_tokens[:] = 2  # type: ignore[index]
    req = Request(2)
    assert manager.prepare_context(req) and manager.resize_context(req, req.prompt_len)
    literal = Literal(toy)
    literal.feed(req.tokens)
    for layer, (state, window) in enumerate(literal.layers):
        manager.load_transferred_state(2, layer, window.T, state, TensorRank(rank=0, size=1))
    manager.seed_kda_replay_caches_for_disagg_gen([2, 77])
    first_slot = manager._slot_of(2)
    if way != "straight":
        manager.suspend_request(req)
    if way == "moved":
        others = [Request(100 + i, [1]) for i in range(manager.num_state_slots)]
        assert all(manager.prepare_context(other) for other in others)
        manager.free_resources(next(o for o in others if manager._slot_of(o.py_request_id) != first_slot))
    for tokens, count in (([8, 4], 1), ([5], 0)):
        batch = launch(manager, req, num_drafts=len(tokens) - 1)
        toy.verify(manager, [slot_of(manager, req)], [tokens])
        accept(manager, batch, count)
        for token in tokens[: count + 1]:
            literal.feed([token])
    assert (slot_of(manager, req) != first_slot) is (way == "moved")
    assert not manager._map.suspended
    layers = logical_layers(manager, slot_of(manager, req))
    for (state, window), true in zip(layers, literal.layers, strict=True):
        assert torch.equal(state, true[0]) and torch.equal(window, true[1])
    manager.shutdown()


def test_nothing_is_loaded_or_prefilled_into_a_slot_before_its_acceptance() -> None:
    manager = make_manager(kda_token_states=True)
    req, other = Request(7), Request(8)
    admit(manager, req, other)
    batch = launch(manager, req)
    conv, ssm = torch.ones(48, 3), torch.ones(2, 8, 8)
    before = [part.clone() for layer in range(3) for part in _pool(manager, layer)]
    with pytest.raises(RuntimeError, match="load a transferred state into request 7.*acceptance"):
        manager.load_transferred_state(7, 0, conv, ssm, TensorRank(rank=0, size=1))
    req.context_chunk_size = 1
    with pytest.raises(RuntimeError, match="prefill chunk of request 7.*acceptance"):
        manager.prepare_resources(Batch(context_requests=[req]))
    after = [part for layer in range(3) for part in _pool(manager, layer)]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    manager.load_transferred_state(8, 0, conv, ssm, TensorRank(rank=0, size=1))
    accept(manager, batch, 1)
    manager.load_transferred_state(7, 0, conv, ssm, TensorRank(rank=0, size=1))
    assert bool((manager.get_ssm_states(0)[slot_of(manager, req)] == 1).all())
    manager.shutdown()


@pytest.mark.parametrize(
    ("size", "conv", "ssm", "message"),
    [
        (1, (48, 2), (2, 8, 8), r"conv has shape \(48, 2\).*\(48, 3\)"),
        (1, (96, 3), (2, 8, 8), r"conv has shape \(96, 3\).*\(48, 3\)"),
        (2, (48, 3), (1, 8, 8), r"conv has shape \(48, 3\), but rank 0 of 2 .*\(24, 3\)"),
        (2, (24, 3), (2, 8, 8), r"ssm has shape \(2, 8, 8\), but rank 0 of 2 .*\(1, 8, 8\)"),
        (1, (48, 3), (2, 8, 4), r"ssm has shape \(2, 8, 4\).*\(2, 8, 8\)"),
        (1, (48, 1), (2, 8, 1), r"conv has shape \(48, 1\)"),
        (1, (48, 3), (2, 1, 1), r"ssm has shape \(2, 1, 1\)"),
    ],
)
def test_a_senders_tensor_of_another_shape_is_refused_and_not_broadcast(
    size: int, conv: tuple[int, ...], ssm: tuple[int, ...], message: str
) -> None:
    manager = make_manager(kda_token_states=True)
    req = Request(1)
    admit(manager, req)
    before = [part.clone() for layer in range(3) for part in _pool(manager, layer)]
    with pytest.raises(ValueError, match=message):
        manager.load_transferred_state(1, 0, torch.ones(conv), torch.ones(ssm), TensorRank(rank=0, size=size))
    after = [part for layer in range(3) for part in _pool(manager, layer)]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    manager.shutdown()


@pytest.mark.parametrize("num_spec", [2, None])
def test_a_dummy_neither_grows_nor_loses_the_room_of_its_drafts(num_spec: int | None) -> None:
    manager = make_manager(kda_token_states=True, num_spec=num_spec)
    req = Request(1)
    admit(manager, req)
    made = manager.add_dummy_requests([99], [5], is_gen=True, max_num_draft_tokens=num_spec or 0)
    assert made is not None
    cache, free = manager.kv_cache_map[99], manager.get_num_free_blocks()
    room = (cache.history_length, cache.capacity)
    assert room == (4, 5 + (num_spec or 0))
    for _ in range(3 * manager.tokens_per_block):
        batch = Batch(generation_requests=made)
        manager.prepare_resources(batch)
        manager.update_resources(batch)
        assert (cache.history_length, cache.capacity) == room
    assert manager.get_num_free_blocks() == free
    accept(manager, launch(manager, req, num_drafts=num_spec or 0), 0)
    assert manager.num_cached_tokens(1) == 6
    manager.shutdown()


@pytest.mark.parametrize("pp_size", [1, 2, 4, 8])
def test_every_stage_pays_for_its_own_layers_and_all_hold_equally_many_tokens(
    pp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """93 layers, 69 of them recurrent, over stages: the stage that holds fewest tokens decides for all."""
    plans = [
        CachePlan(
            traits=K3_TRAITS,
            mapping=Mapping(world_size=pp_size, rank=rank, pp_size=pp_size),
            kv_cache_config=settings(max_gpu_total_bytes=64 * GIB),
            tokens_per_block=64,
            max_seq_len=4096,
            max_batch_size=4,
        )
        for rank in range(pp_size)
    ]
    sizings = [plan.sizing() for plan in plans]
    assert sum(len(sizing.layers.recurrent) for sizing in sizings) == 69
    limit = int(64 * GIB * 0.95)
    fewest = min(sizing.max_tokens_from_quota(limit) for sizing in sizings)
    monkeypatch.setattr(storage_builder, "min_over_ranks", lambda value: fewest)
    held = [
        sizing.max_tokens_from_quota(int(storage_builder.agreed_quota_bytes(sizing, 64 * GIB) * 0.95))
        for sizing in sizings
    ]
    assert all(0 <= tokens - fewest <= 1 for tokens in held)


def test_slots_beyond_2_to_the_31_elements_are_their_own() -> None:
    """69 interleaved fp32 layers of 6 heads: 32-bit element offsets would wrap at slot 317."""
    plan = k3_plan(num_spec=None, max_gpu_total_bytes=28 * GIB, max_util_for_resume=0.95)
    manager = create_manager(plan, MambaHybridCacheManagerV2, device="cpu")
    assert isinstance(manager, MambaHybridCacheManagerV2)
    assert manager.num_state_slots > 330
    view = manager.get_ssm_states(0)
    assert view.stride(0) * 317 > 2**31
    wrapped = (view.stride(0) * 330 - 2**32) // view.stride(0)
    view[330] = 3
    assert not view[wrapped].any() and not view[0].any() and bool((view[330] == 3).all())
    manager.shutdown()


@pytest.mark.parametrize("scheme", ["replay", "intermediate"])
def test_a_shared_snapshot_is_not_written_by_who_reuses_it(scheme: str) -> None:
    toy = ToyKda(num_layers=3, H=2, K=32)
    config = settings(
        enable_block_reuse=True,
        mamba_state_config=MambaStateSettings(
            periodic_snapshot_interval=8, additional_snapshot_offsets_from_end=(1,)
        ),
        max_gpu_total_bytes=64 << 20,
    )
    manager = make_manager(head_dim=32, kda_verify_scheme=scheme, config=config)
    prompt = list(range(20))
    for request_id, tail in enumerate(([], [40], [41, 42], [43, 44, 45], [46])):
        req = Request(request_id, [*prompt, *tail])
        assert manager.prepare_context(req)
        start = manager.num_reused_tokens(request_id)
        # The second request leaves a snapshot one page before its end, which the later ones reach.
        assert start == {0: 0, 1: 16}.get(request_id, 20)
        literal = Literal(toy)
        literal.feed(req.tokens[:start])
        while start < req.prompt_len:
            req.context_current_position = start
            chunk = manager.clip_context_chunk(req, req.prompt_len - start)
            assert manager.resize_context(req, chunk)
            req.context_chunk_size = chunk
            batch = Batch(context_requests=[req])
            manager.prepare_resources(batch)
            toy.prefill(manager, slot_of(manager, req), start, req.tokens[start : start + chunk])
            literal.feed(req.tokens[start : start + chunk])
            manager.update_context_resources(batch)
            start += chunk
        for (state, window), true in zip(
            logical_layers(manager, slot_of(manager, req)), literal.layers, strict=True
        ):
            assert torch.equal(state, true[0]) and torch.equal(window, true[1])
        manager.check_integrity()
        manager.free_resources(req)
    manager.shutdown()


def test_a_batch_beyond_what_the_quota_holds_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match="too small for live recurrent states.*lower max_batch_size"):
        make_manager(batch=400, head_dim=64, kda_token_states=True)


def test_the_number_of_requests_that_can_have_a_slot_is_told() -> None:
    for batch in (1, 3, 9):
        manager = make_manager(batch=batch, kda_token_states=True)
        assert manager.get_max_resource_count() == batch
        assert manager.num_state_slots > batch
        manager.shutdown()


@pytest.mark.parametrize(
    ("keywords", "config"), [({"kda_token_states": True}, {}), ({}, {"enable_block_reuse": True})]
)
def test_the_mixed_manager_refuses_what_it_does_not_have(
    keywords: dict[str, object], config: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="needs MambaHybridCacheManagerV2"):
        make_manager(cls=MixedMambaHybridCacheManager, config=settings(**config), **keywords)


def test_the_mixed_manager_runs_verify_rounds_with_replay_caches() -> None:
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(cls=MixedMambaHybridCacheManager, head_dim=32)
    assert manager.kda_qkg_cache is not None and manager.kda_state_tok is None
    req, literal = Request(0), Literal(toy)
    admit(manager, req)
    toy.prefill(manager, slot_of(manager, req), 0, req.tokens)
    literal.feed(req.tokens)
    for tokens, count in (([3, 1, 4], 2), ([1, 5], 0)):
        batch = launch(manager, req, num_drafts=len(tokens) - 1)
        toy.verify(manager, [slot_of(manager, req)], [tokens])
        accept(manager, batch, count)
        literal.feed(tokens[: count + 1])
    for (state, window), true in zip(
        logical_layers(manager, slot_of(manager, req)), literal.layers, strict=True
    ):
        assert torch.equal(state, true[0]) and torch.equal(window, true[1])
    manager.shutdown()
