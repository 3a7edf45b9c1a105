# SPDX-License-Identifier: Apache-2.0
"""Extended windows in bfloat16: half the bytes, and every bit of what comes out of them."""

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.verify_scheme import SCHEMES, KdaGeometry, bytes_per_slot_layer
from tensorrt_llm._torch.pyexecutor._util import _create_kv_cache_manager
from tensorrt_llm._torch.pyexecutor.kv_cache.config import SpecSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.transfer import TensorRank
from tensorrt_llm.mapping import Mapping
from tests.unittest._torch.executor.kv_cache.helpers import (
    MIB,
    Request,
    Traits,
    accept,
    admit,
    k3_plan,
    launch,
    make_manager,
    settings,
    slot_of,
)
from tests.unittest._torch.executor.kv_cache.toy_kda import Literal, ToyKda, logical_layers

WINDOWS = ("kda_conv_q", "kda_conv_k", "kda_conv_v")
on_each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def bf16_toy() -> ToyKda:
    """Its projections are bfloat16 values, as those of a model that runs in bfloat16 are."""
    toy = ToyKda(num_layers=3, H=2, K=32)
    toy.qkv = [table.bfloat16().float() for table in toy.qkv]
    return toy


def manager_of(scheme: str, dtype: torch.dtype, **keywords: object) -> MambaHybridCacheManagerV2:
    return make_manager(
        head_dim=32,
        conv_dtype=torch.bfloat16,
        kda_verify_scheme=scheme,
        kda_conv_dtype=dtype,
        config=settings(host_cache_size=8 * MIB),
        **keywords,
    )


def run_rounds(
    manager: MambaHybridCacheManagerV2, toy: ToyKda, req: Request, rounds: list[tuple[list[int], int]]
) -> list[Tensor]:
    """Outputs of these rounds, with what the slot is worth after each."""
    worth: list[Tensor] = []
    for tokens, count in rounds:
        batch = launch(manager, req, num_drafts=len(tokens) - 1)
        worth += toy.verify(manager, [slot_of(manager, req)], [tokens])
        accept(manager, batch, count)
        worth += [part.clone() for layer in logical_layers(manager, slot_of(manager, req)) for part in layer]
    return worth


def whole_life(scheme: str, dtype: torch.dtype) -> list[Tensor]:
    """Prefill, rounds, a suspend with the slot taken by another, rounds, a relocation, rounds."""
    toy, manager = bf16_toy(), manager_of(scheme, dtype)
    req = Request(1)
    admit(manager, req)
    toy.prefill(manager, slot_of(manager, req), 0, req.tokens)
    worth = run_rounds(manager, toy, req, [([3, 9, 1], 2), ([5, 6, 6], 1), ([8], 0)])
    first = slot_of(manager, req)
    manager.suspend_request(req)
    others = [Request(100 + i, [1]) for i in range(manager.num_state_slots)]
    assert all(manager.prepare_context(other) for other in others)
    manager.free_resources(next(o for o in others if manager._slot_of(o.py_request_id) != first))
    worth += run_rounds(manager, toy, req, [([7, 8, 2], 2), ([1, 2, 3], 1)])
    assert slot_of(manager, req) != first
    here = slot_of(manager, req)
    there = next(slot for slot in range(manager.num_state_slots) if slot not in (first, here))
    for layer in manager.mamba_layer_offsets:
        for pool in (manager.get_ssm_states(layer), manager.get_conv_states(layer)):
            pool[there] = pool[here]
    actual = manager._slot_of
    manager._map.slot_of = lambda request_id: there if request_id == 1 else actual(request_id)
    worth += run_rounds(manager, toy, req, [([4, 4, 4], 2), ([6, 1], 1)])
    assert slot_of(manager, req) == there
    manager.shutdown()
    return worth


@on_each_scheme
def test_a_whole_life_is_the_same_bit_for_bit(scheme: str) -> None:
    wide, narrow = whole_life(scheme, torch.float32), whole_life(scheme, torch.bfloat16)
    assert len(wide) == len(narrow) == 7 * 9
    assert all(torch.equal(one, other) for one, other in zip(wide, narrow, strict=True))


@on_each_scheme
def test_a_transferred_state_starts_the_same(scheme: str) -> None:
    worth = []
    for dtype in (torch.float32, torch.bfloat16):
        toy, manager = bf16_toy(), manager_of(scheme, dtype)
        req, literal = Request(2), Literal(bf16_toy())
        literal.feed(req.tokens)
        assert manager.prepare_context(req) and manager.resize_context(req, req.prompt_len)
        for layer, (state, window) in enumerate(literal.layers):
            sent = window.T.bfloat16()
            manager.load_transferred_state(2, layer, sent, state, TensorRank(rank=0, size=1))
        manager.seed_kda_replay_caches_for_disagg_gen([2])
        worth.append(run_rounds(manager, toy, req, [([3, 9, 1], 2), ([5, 6, 6], 1)]))
        manager.shutdown()
    assert all(torch.equal(one, other) for one, other in zip(*worth, strict=True))


@on_each_scheme
def test_windows_take_half_and_nothing_else_changes(scheme: str) -> None:
    wide, narrow = manager_of(scheme, torch.float32), manager_of(scheme, torch.bfloat16)
    for name in WINDOWS:
        one, other = getattr(wide, name), getattr(narrow, name)
        assert other.dtype is torch.bfloat16 and other.stride()[-2] == 1
        assert other.nbytes * wide.num_state_slots * 2 == one.nbytes * narrow.num_state_slots
    for manager in (wide, narrow):
        sizing = manager._sizing
        assert isinstance(sizing, HybridSizing)
        beside = manager.num_state_slots * sizing.free_side_bytes_per_slot
        assert manager.side_bytes == beside + manager.side_bytes_in_quota
    assert wide._sizing.quota_from_max_tokens(100) == narrow._sizing.quota_from_max_tokens(100)
    assert wide._sizing.minimum_quota() == narrow._sizing.minimum_quota()
    wide.shutdown()
    narrow.shutdown()


def test_kimi_k3_on_one_of_16_ranks() -> None:
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        k3 = KdaGeometry(num_heads=6, head_dim=128, conv_width=4, num_spec=7, conv_dtype=dtype)
        found = bytes_per_slot_layer(SCHEMES["records"], k3)
        sizes.append((sum(found[name] for name in WINDOWS), found["kda_state_tok"]))
    assert sizes[0] == (92_160, 64_512) and sizes[1] == (46_080, 64_512)
    quotas = []
    for dtype in (torch.float32, torch.bfloat16):
        sizing = k3_plan(kda_conv_dtype=dtype, max_gpu_total_bytes=1 << 34).sizing()
        assert isinstance(sizing, HybridSizing)
        quotas.append((sizing.state_quota(), sizing.quota_from_max_tokens(16_896)))
        assert sizing.free_side_bytes_per_slot == 69 * (92_160 if dtype is torch.float32 else 46_080) + 4
    assert quotas[0] == quotas[1]


def test_the_factory_names_it_only_where_it_is_asked_for() -> None:
    class Recording(MambaHybridCacheManagerV2):
        def __init__(self, *args: object, **keywords: object) -> None:
            self.keywords = keywords

    def keywords(**changes: object) -> dict[str, object]:
        arguments = (None, Recording, Mapping(), settings(), 4, 64, 2, SpecSettings(max_draft_len=3))
        made = _create_kv_cache_manager(*arguments, model_config=Traits(), device="cpu", **changes)
        assert isinstance(made, Recording)
        return made.keywords

    assert keywords(kda_conv_dtype=torch.bfloat16)["kda_conv_dtype"] is torch.bfloat16
    assert "kda_conv_dtype" not in keywords()


def test_without_verify_rounds_there_are_no_windows_to_round() -> None:
    manager = make_manager(num_spec=None, kda_conv_dtype=torch.bfloat16)
    assert manager.kda_conv_q is None and manager.side_bytes == 0
    manager.shutdown()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kda_conv_dtype": torch.float16}, "kda_conv_dtype is torch.float16; it must be torch.float32 or"),
        (
            {"kda_conv_dtype": torch.bfloat16},
            "kda_conv_dtype is torch.bfloat16, but .* are torch.float32.*set kda_conv_dtype=torch.float32",
        ),
    ],
)
def test_windows_that_would_round_are_refused(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_manager(**keywords)
