# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the host never waits for the device outside a suspend, and work on two streams stays in order."""

from collections.abc import Iterator

import pytest
import torch

from tests.unittest._torch.executor.kv_cache.helpers import (
    MIB,
    Batch,
    Metadata,
    Request,
    admit,
    launch,
    make_manager,
    randomize,
    settings,
    slot_of,
)
from tests.unittest._torch.executor.kv_cache.toy_kda import Literal, ToyKda, logical_layers

pytestmark = pytest.mark.cuda


@pytest.fixture
def restored_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scheme", ["records", "replay", "intermediate"])
@pytest.mark.parametrize("decoding_type", ["NGram", "MTP"])
def test_a_step_does_not_wait_for_the_device(
    scheme: str, decoding_type: str, restored_sync_mode: None
) -> None:
    manager = make_manager(batch=4, device="cuda", decoding_type=decoding_type, kda_verify_scheme=scheme)
    requests = [Request(i) for i in range(4)]
    counts = torch.ones(3, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    admit(manager, *requests)
    batch = launch(manager, *requests[:3])
    if decoding_type == "MTP":
        manager.update_mamba_states(Metadata(0, [0, 1, 2]), counts)
    manager.update_resources(batch)
    # A state that has moved.
    manager._map.slot_of = lambda request_id: 5 if request_id == 0 else manager._slot_of(request_id)
    launch(manager, requests[0])
    manager.revert_allocate_generation(requests[0])
    manager.seed_kda_replay_caches_for_disagg_gen([1])
    manager.free_resources(requests[3])
    torch.cuda.set_sync_debug_mode("default")
    manager.shutdown()


def delay() -> None:
    """Work on the current stream that takes longer than anything the host does meanwhile."""
    torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize("scheme", ["records", "replay", "intermediate"])
def test_a_suspend_comes_after_the_round_and_before_the_next_use(scheme: str) -> None:
    """Caches on a stream of their own; the round before the suspend is still running when it is asked for."""
    toy = ToyKda(num_layers=3, H=2, K=32, device="cuda")
    manager = make_manager(
        head_dim=32,
        kda_verify_scheme=scheme,
        decoding_type="MTP",
        device="cuda",
        execution_stream=torch.cuda.Stream(),
        config=settings(host_cache_size=16 * MIB, max_gpu_total_bytes=32 * MIB),
    )
    randomize(manager)
    req, literal = Request(0), Literal(toy)
    admit(manager, req)
    delay()
    toy.prefill(manager, slot_of(manager, req), 0, req.tokens)
    literal.feed(req.tokens)
    for tokens, count in (([3, 1, 4], 2), ([1, 5], 1), ([9], 0)):
        req.py_draft_tokens = tokens[1:]
        assert manager.try_allocate_generation(req)
        batch = Batch(generation_requests=[req])
        manager.prepare_resources(batch)
        delay()
        toy.verify(manager, [slot_of(manager, req)], [tokens])
        manager.update_mamba_states(Metadata(0, [0]), torch.tensor([count + 1], device="cuda"))
        req.py_num_accepted_draft_tokens = count
        manager.update_resources(batch)
        literal.feed(tokens[: count + 1])
        manager.suspend_request(req)
        others = [Request(100 + i, [1]) for i in range(manager.num_state_slots)]
        for other in others:
            assert manager.prepare_context(other)
        for other in others:
            manager.free_resources(other)
        assert manager.resume_request(req)
    req.py_draft_tokens = []
    assert manager.try_allocate_generation(req)
    manager.prepare_resources(Batch(generation_requests=[req]))
    for (state, window), true in zip(
        logical_layers(manager, slot_of(manager, req)), literal.layers, strict=True
    ):
        # Sums of a round and of the token-by-token form differ in their last bits on a GPU.
        torch.testing.assert_close(state, true[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(window, true[1])
    manager.shutdown()
