# SPDX-License-Identifier: Apache-2.0
"""Faults between steps that users of other systems met: what comes late, what is cancelled half way, what a
live dummy blocks, what ranks must do alike.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.pyexecutor.kv_cache.config import MambaStateSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import num_reserved_dummy_slots
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.transfer import TensorRank
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import GPU_LEVEL, ResourceBusyError
from tests.unittest._torch.executor.kv_cache.helpers import (
    MIB,
    Batch,
    Metadata,
    Request,
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

SCHEMES = ("records", "replay", "intermediate")


def pools_and_sides(manager: MambaHybridCacheManagerV2) -> list[Tensor]:
    pools = [
        view
        for layer in manager.mamba_layer_offsets
        for view in (manager.get_ssm_states(layer), manager.get_conv_states(layer))
    ]
    return [tensor.clone() for tensor in (*pools, *side_tensors(manager).values())]


@pytest.mark.parametrize("in_flight", [0, 1, 3, 5])
@pytest.mark.parametrize("way", ["host", "device", "device with slots"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_acceptance_that_comes_after_the_suspend_is_dropped(scheme: str, way: str, in_flight: int) -> None:
    """The round was called off and its request gave way; its slot may be another's by now."""
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(head_dim=32, num_spec=5, kda_verify_scheme=scheme,
                           decoding_type="NGram" if way == "host" else "MTP")  # fmt: skip
    req, other = Request(0), Request(1)
    admit(manager, req, other)
    literal = Literal(toy)
    for one in (req, other):
        toy.prefill(manager, slot_of(manager, one), 0, one.tokens)
    literal.feed(req.tokens)
    rows = [slot_of(manager, req), slot_of(manager, other)]
    launch(manager, req, other, num_drafts=in_flight)
    for one in (req, other):
        manager.revert_allocate_generation(one)
    manager.suspend_request(req)
    req.py_num_accepted_draft_tokens = other.py_num_accepted_draft_tokens = in_flight
    manager.free_resources(other)
    newcomer = Request(2)
    admit(manager, newcomer)
    before = pools_and_sides(manager)
    if way == "host":
        manager.update_resources(Batch(generation_requests=[req, other]))
    else:
        slots = None if way == "device" else torch.tensor(rows, dtype=torch.int32)
        manager.update_mamba_states(Metadata(0, [0, 1]), torch.tensor([in_flight + 1] * 2), slots)
    assert all(torch.equal(a, b) for a, b in zip(before, pools_and_sides(manager), strict=True))
    req.py_draft_tokens = []
    assert manager.try_allocate_generation(req)
    manager.prepare_resources(Batch(generation_requests=[req]))
    assert manager.num_cached_tokens(0) == len(req.tokens)
    layers = logical_layers(manager, slot_of(manager, req))
    for (state, window), true in zip(layers, literal.layers, strict=True):
        assert torch.equal(state, true[0]) and torch.equal(window, true[1])
    manager.check_integrity()
    manager.shutdown()


@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_transfer_cancelled_half_way_gives_its_slot_back_once(scheme: str, num_parts: int) -> None:
    """What was sent stays in nobody's way, late parts are refused, and the next one is served."""
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(head_dim=32, kda_verify_scheme=scheme, batch=1)
    baseline = [(s.total, s.free) for s in manager.impl.get_storage_statistics()]
    req = Request(5)
    assert manager.prepare_context(req) and manager.resize_context(req, req.prompt_len)
    conv, ssm = torch.full((192, 3), 7.0), torch.full((2, 32, 32), 7.0)
    for layer in range(num_parts):
        manager.load_transferred_state(5, layer, conv, ssm, TensorRank(rank=0, size=1))
    manager.free_resources(req)
    manager.free_resources(req)
    assert [(s.total, s.free) for s in manager.impl.get_storage_statistics()] == baseline
    before = pools_and_sides(manager)
    with pytest.raises(RuntimeError, match="request 5 has no recurrent state slot"):
        manager.load_transferred_state(5, 2, conv, ssm, TensorRank(rank=0, size=1))
    manager.seed_kda_replay_caches_for_disagg_gen([5])
    assert all(torch.equal(a, b) for a, b in zip(before, pools_and_sides(manager), strict=True))
    probe, literal = Request(6), Literal(toy)
    admit(manager, probe)
    toy.prefill(manager, slot_of(manager, probe), 0, probe.tokens)
    batch = launch(manager, probe)
    toy.verify(manager, [slot_of(manager, probe)], [[3, 1, 4]])
    literal.feed([*probe.tokens, 3, 1, 4])
    accept(manager, batch, 2)
    layers = logical_layers(manager, slot_of(manager, probe))
    for (state, window), true in zip(layers, literal.layers, strict=True):
        assert torch.equal(state, true[0]) and torch.equal(window, true[1])
    manager.shutdown()


def test_a_live_dummy_in_the_way_of_a_resize_can_be_suspended() -> None:
    """A slot that would go away is refused while it is in use; suspended, the dummy moves and comes back."""
    manager = make_manager(num_spec=2, kda_verify_scheme="replay", config=settings(host_cache_size=4 * MIB))
    others = [Request(i) for i in range(manager.num_state_slots - 1)]
    for other in others:
        assert manager.prepare_context(other)
    made = manager.add_dummy_requests([10_000], is_gen=True, max_num_draft_tokens=2)
    assert made is not None
    last = slot_of(manager, made[0])
    assert last == manager.num_state_slots - 1
    for other in others:
        manager.free_resources(other)
    quota = manager.impl.get_quota(GPU_LEVEL)
    with pytest.raises(ResourceBusyError):
        manager.impl.resize(GPU_LEVEL, quota // 2)
    manager.suspend_request(made[0])
    assert manager.impl.resize(GPU_LEVEL, quota // 2)
    assert manager.resume_request(made[0])
    manager.prepare_resources(Batch(generation_requests=made))
    assert slot_of(manager, made[0]) < last
    manager.impl.check_integrity()
    manager.shutdown()


@pytest.mark.parametrize("attention_dp", [False, True])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_request_holds_one_slot_and_as_many_run_as_are_told(
    scheme: str, batch: int, pp_size: int, attention_dp: bool
) -> None:
    """The cap and the use count in the same unit: every micro-batch's requests and every dummy, one each."""
    mapping = Mapping(world_size=pp_size, rank=0, pp_size=pp_size, enable_attention_dp=attention_dp)
    manager = make_manager(
        batch=batch,
        mapping=mapping,
        kda_verify_scheme=scheme,
        num_state_layers=4,
        num_attention_layers=4,
        mamba_layer_mask=[True, False] * 4,
        layer_mask=[False, True] * 4,
    )
    assert manager.get_max_resource_count() == batch
    states = manager._sizing.states  # type: ignore[attr-defined]
    residents = batch * pp_size
    dummies = num_reserved_dummy_slots(manager.spec_config, batch, mapping)
    assert states.floor_slots == residents + dummies <= manager.num_state_slots
    group = manager._ssm_group
    assert group is not None
    statistics = manager._group_statistics(group)
    for i in range(residents):
        assert manager.prepare_context(Request(i))
        now = manager._group_statistics(group)
        assert statistics.free - now.free == i + 1
    ids = [1000 + i for i in range(dummies)]
    assert manager.add_dummy_requests(ids, is_gen=True, max_num_draft_tokens=2) is not None
    assert statistics.free - manager._group_statistics(group).free == residents + dummies
    manager.check_integrity()
    manager.shutdown()


def one_life(manager: MambaHybridCacheManagerV2, seed: int) -> list[object]:
    """What a manager answers to 300 random things that a loop asks of it, and where requests lie."""
    rng, answers = random.Random(seed), []
    live: dict[int, Request] = {}
    suspended: set[int] = set()
    for step in range(300):
        action = rng.choice(("admit", "round", "round", "round", "suspend", "resume", "free"))
        if action == "admit" and len(live) < 4:
            req = Request(step, [rng.randrange(50) for _ in range(rng.randrange(1, 12))])
            req.context_chunk_size = req.prompt_len
            gets_in = manager.prepare_context(req) and manager.resize_context(req, req.prompt_len)
            answers.append(gets_in)
            if gets_in:
                batch = Batch(context_requests=[req])
                manager.prepare_resources(batch)
                manager.update_context_resources(batch)
                req.context_current_position, req.context_chunk_size = req.prompt_len, 0
                live[step] = req
            else:
                manager.free_resources(req)
        running = [req for i, req in live.items() if i not in suspended]
        if action == "round" and running:
            members = rng.sample(running, rng.randrange(1, len(running) + 1))
            for req in members:
                req.py_draft_tokens = [1] * rng.randrange(3)
            ready = [req for req in members if manager.try_allocate_generation(req)]
            answers.append(len(ready))
            batch = Batch(generation_requests=ready)
            manager.prepare_resources(batch)
            counts = [rng.randrange(len(req.py_draft_tokens) + 1) for req in ready]
            ids = [req.py_request_id for req in ready]
            manager.update_mamba_states(Metadata(0, ids), torch.tensor(counts, dtype=torch.int32) + 1)
            for req, count in zip(ready, counts, strict=True):
                req.py_num_accepted_draft_tokens = count
            manager.update_resources(batch)
        if action == "suspend" and running:
            req = rng.choice(running)
            manager.suspend_request(req)
            suspended.add(req.py_request_id)
        if action == "resume" and suspended:
            request_id = rng.choice(sorted(suspended))
            resumed = manager.resume_request(live[request_id])
            answers.append(resumed)
            if resumed:
                suspended.discard(request_id)
        if action == "free" and live:
            request_id = rng.choice(sorted(live))
            manager.free_resources(live.pop(request_id))
            suspended.discard(request_id)
        assert manager.prev_num_accepted_tokens is not None
        answers.append(dict(manager._map.state_index))
        answers.append(manager.prev_num_accepted_tokens.tolist())
        answers.append({i: list(manager.get_batch_cache_indices([i])[0]) for i in live if i not in suspended})
    return answers


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_answer_and_place_alike(scheme: str, seed: int) -> None:
    """Both tensor ranks of a server see the same requests and counts, so slots, counts and pages agree."""
    lives = []
    for rank in range(2):
        manager = make_manager(
            batch=4,
            mapping=Mapping(world_size=2, rank=rank, tp_size=2),
            kda_verify_scheme=scheme,
            decoding_type="MTP",
            config=settings(host_cache_size=MIB, max_gpu_total_bytes=8 * MIB),
        )
        randomize(manager)
        lives.append(one_life(manager, seed))
        manager.shutdown()
    assert lives[0] == lives[1] and len(lives[0]) > 900


def snapshot_prompt(
    manager: MambaHybridCacheManagerV2, req: Request, write: Callable[[int, int], None]
) -> int:
    """Run the request's prompt by chunks; returns the tokens it found. `write(slot, tokens)` is the model."""
    assert manager.prepare_context(req)
    found = position = manager.num_reused_tokens(req.py_request_id)
    while position < req.prompt_len:
        req.context_current_position = position
        chunk = manager.clip_context_chunk(req, req.prompt_len - position)
        assert manager.resize_context(req, chunk)
        req.context_chunk_size = chunk
        batch = Batch(context_requests=[req])
        manager.prepare_resources(batch)
        position += chunk
        write(slot_of(manager, req), position)
        manager.update_context_resources(batch)
    return found


@pytest.mark.parametrize(
    ("tokens_per_block", "interval", "length"), [(16, 1152, 11_521), (4, 12, 61), (8, 8, 33)]
)
def test_a_snapshot_is_found_at_its_own_token_count(
    tokens_per_block: int, interval: int, length: int
) -> None:
    """The state's period and the attention page's are different numbers, and neither stands for the other."""
    config = settings(
        enable_block_reuse=True,
        mamba_state_config=MambaStateSettings(periodic_snapshot_interval=interval),
        max_gpu_total_bytes=64 * MIB,
    )
    manager = make_manager(
        kda_verify_scheme="replay",
        tokens_per_block=tokens_per_block,
        max_seq_len=2 * length,
        config=config,
        max_num_tokens=length,
    )
    layers = list(manager.mamba_layer_offsets)

    def write(slot: int, tokens: int) -> None:
        for layer in layers:
            manager.get_ssm_states(layer)[slot] = tokens + 0.25 * layer

    prompt = [i % 89 for i in range(length)]
    first = Request(0, prompt)
    assert snapshot_prompt(manager, first, write) == 0
    manager.free_resources(first)
    for request_id, kept in enumerate((length, length - interval, interval + 1), start=1):
        req = Request(request_id, [*prompt[:kept], 90])
        expected = kept // interval * interval
        assert manager.prepare_context(req)
        assert manager.num_reused_tokens(request_id) == expected
        manager.resize_context(req, 1)
        slot = manager._slot_of(request_id)
        for layer in layers:
            assert bool((manager.get_ssm_states(layer)[slot] == expected + 0.25 * layer).all())
        manager.free_resources(req)
    manager.check_integrity()
    manager.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_prompts_last_token_alone_is_no_round(scheme: str) -> None:
    """A one-token tail beside another request's full round: the state after that token, nothing pending."""
    toy = ToyKda(num_layers=3, H=2, K=32)
    manager = make_manager(head_dim=32, num_spec=7, kda_verify_scheme=scheme)
    randomize(manager)
    other, req = Request(0), Request(1, [3, 1, 4, 1, 5])
    admit(manager, other)
    toy.prefill(manager, slot_of(manager, other), 0, other.tokens)
    req.context_chunk_size = 4
    assert manager.prepare_context(req) and manager.resize_context(req, 4)
    whole, literal = Batch(context_requests=[req]), Literal(toy)
    manager.prepare_resources(whole)
    toy.prefill(manager, slot_of(manager, req), 0, req.tokens[:4])
    manager.update_context_resources(whole)
    req.context_current_position, req.context_chunk_size = 4, 1
    assert manager.resize_context(req, 1)
    other.py_draft_tokens = [7] * 7
    assert manager.try_allocate_generation(other)
    mixed = Batch(context_requests=[req], generation_requests=[other])
    manager.prepare_resources(mixed)
    toy.prefill(manager, slot_of(manager, req), 4, req.tokens[4:])
    toy.verify(manager, [slot_of(manager, other)], [[2, *other.py_draft_tokens]])
    other.py_num_accepted_draft_tokens = 5
    manager.update_context_resources(mixed)
    manager.update_resources(mixed)
    literal.feed(req.tokens)
    for (state, window), true in zip(
        logical_layers(manager, slot_of(manager, req)), literal.layers, strict=True
    ):
        assert torch.equal(state, true[0]) and torch.equal(window, true[1])
    assert manager.num_cached_tokens(1) == 5 and manager.num_cached_tokens(0) == 5 + 6
    manager.shutdown()
