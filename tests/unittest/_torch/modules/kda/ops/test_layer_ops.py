# SPDX-License-Identifier: Apache-2.0
"""`kda_commit_replay` and `kda_promote`: all layers against the schemes' torch forms, layer by layer."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tensorrt_llm._torch.modules.kda import ops
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.inputs import CommitShape, LayerInputs
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.inputs import ReplayInputs
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.inputs import make_inputs as make_replay_inputs
from tensorrt_llm._torch.modules.kda.ops.registry import OpEntry
from tensorrt_llm._torch.modules.kda.verify_scheme import SCHEMES, KdaGeometry
from tests.unittest._torch.kimi_small import make_layer_cache
from tests.unittest._torch.modules.kda.ops.harness import (
    DEVICE,
    output_error,
    relative_error,
    same_bits,
    shape_of,
)

SHAPE = CommitShape(layers=2, requests=2, heads=2)
SMALL = CommitShape(layers=1, requests=2, heads=1)
NAMES = ("kda_commit_replay", "kda_promote")
DRAFTS = {
    "kda_commit_replay": ("qkg_cache", "v_cache", "beta_cache"),
    "kda_promote": ("intermediate",),
}


@pytest.fixture(
    params=[
        pytest.param((OPS[name], found.load()), id=f"{name}-{found.name}")
        for name in NAMES
        for found in OPS[name].implementations
    ]
)
def op(request: pytest.FixtureRequest) -> tuple[OpEntry, Callable[..., Any]]:
    return request.param


def _inputs(entry: OpEntry, counts: list[int], shape: CommitShape = SMALL) -> LayerInputs:
    inputs = entry.make_inputs(shape, device=DEVICE)
    inputs.counts.copy_(torch.tensor(counts))
    return inputs


def test_states_and_windows_equal_the_reference(op) -> None:
    entry, run = op
    inputs = _inputs(entry, [7, 3], SHAPE)
    expected = inputs.copy()
    entry.reference(*expected.arguments())
    run(*inputs.arguments())
    # The dot product of a replayed draft is summed in another order.
    assert relative_error(inputs.ssm, expected.ssm) < (1e-6 if entry.name == "kda_commit_replay" else 1e-30)
    for name, tensor in inputs.mutable().items():
        assert name == "ssm" or same_bits(tensor, expected.mutable()[name]), name


@pytest.mark.parametrize("count", [0, 3, 7])
def test_only_what_the_count_names_is_read(op, count: int) -> None:
    entry, run = op
    inputs = _inputs(entry, [count, count])
    clean = inputs.copy()
    for name in DRAFTS[entry.name]:
        getattr(inputs, name)[:, :, count:] = torch.nan
    if entry.name == "kda_commit_replay":
        for cache in (inputs.cs_q, inputs.cs_k, inputs.cs_v):
            cache[..., :count] = torch.nan
            cache[..., count + 3 :] = torch.nan
    run(*inputs.arguments())
    run(*clean.arguments())
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, clean.mutable()[name]), name


def test_counts_are_per_request_and_other_slots_stay(op) -> None:
    entry, run = op
    inputs = _inputs(entry, [0, 99])
    before = inputs.copy()
    run(*inputs.arguments())
    first, second = inputs.slots.tolist()
    third = ({0, 1, 2} - {first, second}).pop()
    for slot, changed in ((first, False), (second, True), (third, False)):
        assert same_bits(inputs.ssm[:, slot], before.ssm[:, slot]) is not changed
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor[:, third], before.mutable()[name][:, third]), name
        assert not same_bits(tensor[:, second], before.mutable()[name][:, second]), name
    clamped = before.copy()
    clamped.counts.copy_(torch.tensor([0, 7]))
    run(*clamped.arguments())
    assert same_bits(clamped.ssm, inputs.ssm)


def test_a_slot_of_minus_one_and_a_negative_count_change_nothing(op) -> None:
    entry, run = op
    inputs = _inputs(entry, [5, -3])
    inputs.slots[0] = -1
    before = inputs.copy()
    run(*inputs.arguments())
    for name, tensor in inputs.mutable().items():
        if name != "conv_pool":
            assert same_bits(tensor, before.mutable()[name]), name
    untouched = [slot for slot in range(3) if slot != int(inputs.slots[1])]
    if entry.name == "kda_commit_replay":
        assert same_bits(inputs.conv_pool[:, untouched], before.conv_pool[:, untouched])


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_promotion_moves_columns_that_overlap(name: str) -> None:
    entry = OPS["kda_promote"]
    run = entry.implementation(name).load()
    inputs = _inputs(entry, [1, 2])
    before = inputs.copy()
    run(*inputs.arguments())
    for slot, count in zip(inputs.slots.tolist(), (1, 2), strict=True):
        for part in ("cs_q", "cs_k", "cs_v"):
            now, old = getattr(inputs, part)[:, slot], getattr(before, part)[:, slot]
            assert same_bits(now[..., :3], old[..., count : count + 3]), part
            assert same_bits(now[..., 3:], old[..., 3:]), part
        assert same_bits(inputs.ssm[:, slot], before.intermediate[:, slot, count - 1])


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_committed_slot_verifies_to_the_bits_of_a_pending_one(name: str) -> None:
    """A suspend's commit equals the replay of the next round: same state and output whichever comes first.

    On a GPU two kernels may add a dot product in two orders.
    """
    verify = OPS["kda_mtp_decode"].implementation(name).load()
    commit = OPS["kda_commit_replay"].implementation(name).load()
    pending: ReplayInputs = make_replay_inputs(shape_of(1, 2), device=DEVICE)
    pending.pending.fill_(5)
    caches = ("cs_q", "cs_k", "cs_v")
    drafts = ("qkg_cache", "v_cache", "beta_cache")
    committed = replace(
        pending,
        pending=torch.zeros_like(pending.pending),
        ssm=pending.ssm.clone(),
        **{part: getattr(pending, part).mT.clone().mT for part in caches},
        **{part: getattr(pending, part).clone() for part in drafts},
    )
    window = torch.zeros(1, 2, 3 * 256, 3, dtype=torch.bfloat16, device=DEVICE)
    commit(
        committed.ssm.unsqueeze(0), window, *(getattr(committed, part).unsqueeze(0) for part in caches),
        *(getattr(committed, part).unsqueeze(0) for part in drafts), committed.slots,
        torch.full((1,), 5, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    for part, section in zip(caches, window[0].chunk(3, dim=1), strict=True):
        getattr(committed, part)[:, :, :3] = section.float()
    output, wanted = verify(*committed.arguments()), verify(*pending.arguments())
    slot = int(pending.slots[0])
    if DEVICE == "cpu":
        assert same_bits(output, wanted)
        assert same_bits(committed.ssm[slot], pending.ssm[slot])
    assert output_error(output, wanted) < 1e-3
    assert relative_error(committed.ssm[slot], pending.ssm[slot]) < 1e-6


@pytest.mark.parametrize("name", ["replay", "intermediate"])
def test_the_references_equal_the_round_s_own_way_to_a_draft(name: str) -> None:
    """Bit for bit: `replay_pending` starts the torch round of both schemes."""
    scheme = SCHEMES[name]
    op_name = "kda_commit_replay" if name == "replay" else "kda_promote"
    inputs = _inputs(OPS[op_name], [7, 2], SHAPE).copy("cpu")
    cache = make_layer_cache(KdaGeometry(num_heads=2, head_dim=128, conv_width=4, num_spec=7), None, 3)
    drafts = {
        "intermediate_ssm" if part == "intermediate" else f"kda_{part}": part for part in DRAFTS[op_name]
    }
    for layer in range(SHAPE.layers):
        view = replace(cache, **{to: getattr(inputs, part)[layer] for to, part in drafts.items()})
        want = scheme.replay_pending(view, inputs.slots, inputs.counts, inputs.ssm[layer][inputs.slots])
        promoted = inputs.copy()
        OPS[op_name].reference(*promoted.arguments())
        assert same_bits(promoted.ssm[layer][promoted.slots], want)


@pytest.mark.parametrize("name", NAMES)
def test_the_torch_op_runs_what_the_function_runs(name: str) -> None:
    inputs = OPS[name].make_inputs(SHAPE, device=DEVICE)
    direct, by_op = inputs.copy(), inputs.copy()
    getattr(ops, name)(*direct.arguments())
    getattr(torch.ops.trtllm, name)(*by_op.arguments())
    for part, tensor in direct.mutable().items():
        assert same_bits(tensor, by_op.mutable()[part]), part
    torch.library.opcheck(
        getattr(torch.ops.trtllm, name).default, inputs.copy().arguments(), test_utils=("test_schema",)
    )
    nothing = replace(inputs, slots=inputs.slots[:0], counts=inputs.counts[:0])
    getattr(ops, name)(*nothing.arguments())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kda_commit_replay", lambda x: {"ssm": x.ssm[0]}, "dimensions of ssm"),
        ("kda_commit_replay", lambda x: {"qkg_cache": x.qkg_cache[:, :, :2]}, "shape of qkg_cache"),
        ("kda_commit_replay", lambda x: {"beta_cache": x.beta_cache[..., :1]}, "shape of beta_cache"),
        ("kda_commit_replay", lambda x: {"conv_pool": x.conv_pool[:, :, :9]}, "shape of conv_pool"),
        ("kda_promote", lambda x: {"intermediate": x.intermediate[0]}, "dimensions of intermediate"),
        ("kda_promote", lambda x: {"intermediate": x.intermediate.mT}, "strides of intermediate"),
        ("kda_promote", lambda x: {"cs_k": x.cs_k.contiguous()}, "strides of cs_q, cs_k, cs_v"),
        ("kda_promote", lambda x: {"counts": x.counts.long()}, "dtype of counts"),
    ],
)
def test_malformed_arguments_are_refused_in_the_op_s_name(name: str, change, message: str) -> None:
    inputs = OPS[name].make_inputs(SHAPE)
    arguments = replace(inputs, **change(inputs)).arguments()
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        getattr(ops, name)(*arguments)


def test_inputs_are_copied_with_their_strides() -> None:
    inputs = OPS["kda_commit_replay"].make_inputs(SHAPE)
    for field in fields(inputs):
        old, new = getattr(inputs, field.name), getattr(inputs.copy(), field.name)
        assert old.stride() == new.stride()
        assert old.data_ptr() != new.data_ptr()
