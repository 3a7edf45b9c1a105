# SPDX-License-Identifier: Apache-2.0
"""`kda_commit_pending`: replay bit for bit, the window, equality with the replay of a verify round."""

from dataclasses import replace

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import make_inputs as make_verify_inputs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import move
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.inputs import (
    CommitInputs,
    CommitShape,
    make_inputs,
)
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.op import kda_commit_pending
from tests.unittest._torch.modules.kda.ops.harness import (
    DEVICE,
    load_run,
    relative_error,
    same_bits,
    shape_of,
)

COMMIT = OPS["kda_commit_pending"]
SHAPE = CommitShape(layers=2, requests=2, heads=2)
FUSES = DEVICE == "cuda"  # Triton's interpreter rounds the product and the sum


@pytest.fixture(params=["torch", "triton"])
def run(request: pytest.FixtureRequest):
    return COMMIT.implementation(request.param).load()


def test_states_and_windows_equal_the_reference(run) -> None:
    inputs = make_inputs(SHAPE, device=DEVICE)
    inputs.counts.copy_(torch.tensor([7, 3]))
    expected = inputs.copy()
    COMMIT.reference(*expected.arguments())
    run(*inputs.arguments())
    if FUSES:
        assert same_bits(inputs.ssm, expected.ssm)
    assert relative_error(inputs.ssm, expected.ssm) < 1e-6
    assert same_bits(inputs.conv_pool, expected.conv_pool)


@pytest.mark.parametrize("count", range(8))
def test_only_records_below_the_count_and_their_window_are_read(run, count: int) -> None:
    inputs = make_inputs(SHAPE, device=DEVICE)
    inputs.counts.fill_(count)
    clean = inputs.copy()
    inputs.state_tok[:, :, :, count:] = torch.nan
    for cache in (inputs.cs_q, inputs.cs_k, inputs.cs_v):
        cache[..., :count] = torch.nan
        cache[..., count + 3 :] = torch.nan
    run(*inputs.arguments())
    run(*clean.arguments())
    assert same_bits(inputs.ssm, clean.ssm)
    assert same_bits(inputs.conv_pool, clean.conv_pool)


def test_counts_are_per_request_and_other_slots_stay(run) -> None:
    inputs = make_inputs(SHAPE, device=DEVICE)
    inputs.counts.copy_(torch.tensor([0, 99]))
    before = inputs.copy()
    run(*inputs.arguments())
    first, second = inputs.slots.tolist()
    third = ({0, 1, 2} - {first, second}).pop()
    for slot, changed in ((first, False), (second, True), (third, False)):
        assert same_bits(inputs.ssm[:, slot], before.ssm[:, slot]) is not changed
    assert same_bits(inputs.conv_pool[:, third], before.conv_pool[:, third])
    assert not same_bits(inputs.conv_pool[:, first], before.conv_pool[:, first])


def test_a_slot_of_minus_one_is_skipped(run) -> None:
    inputs = make_inputs(SHAPE, device=DEVICE)
    inputs.slots.fill_(-1)
    before = inputs.copy()
    run(*inputs.arguments())
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, getattr(before, name)), name


@pytest.mark.parametrize(
    "name", ["torch", "triton"] if DEVICE == "cpu" else ["triton", "cute-split1", "cute-split8"]
)
def test_a_committed_slot_verifies_to_the_bits_of_a_pending_one(name: str) -> None:
    """A suspend's commit equals the replay of the next round: same state and output whichever comes first."""
    run = load_run(name)
    commit = COMMIT.implementation("torch" if name == "torch" else "triton").load()
    pending = make_verify_inputs(shape_of(2, 2), device=DEVICE)
    pending.pending.fill_(5)
    committed = move(pending, DEVICE)
    slots = committed.slots.clone()
    window = torch.zeros(1, 3, 3 * 256, 3, dtype=torch.bfloat16, device=DEVICE)
    caches = (committed.cs_q, committed.cs_k, committed.cs_v)
    counts = torch.full((2,), 5, dtype=torch.int32, device=DEVICE)
    commit(
        committed.ssm.unsqueeze(0), window, *(cache.unsqueeze(0) for cache in caches),
        committed.state_tok.unsqueeze(0), slots, counts,
    )  # fmt: skip
    for index, cache in enumerate(caches):
        section = window[0, :, index * 256 : (index + 1) * 256].float()
        cache[slots.long(), :, :3] = section[slots.long()]
    committed = replace(committed, pending=torch.zeros_like(committed.pending))
    assert same_bits(run(*committed.arguments()), run(*pending.arguments()))
    assert same_bits(committed.ssm, pending.ssm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"ssm": x.ssm[0]}, "dimensions"),
        (lambda x: {"state_tok": x.state_tok[:, :, :2]}, "state_tok"),
        (lambda x: {"counts": x.counts[:1]}, "counts"),
        (lambda x: {"counts": x.counts.long()}, "torch.int32"),
        (lambda x: {"cs_k": x.cs_k.contiguous()}, "strides"),
    ],
)
def test_malformed_arguments_are_refused(change, message: str) -> None:
    inputs = make_inputs(SHAPE)
    arguments = {name: getattr(inputs, name) for name in CommitInputs.__dataclass_fields__} | change(inputs)
    with pytest.raises(ValueError, match=message):
        kda_commit_pending(**arguments)


def test_no_request_is_no_work() -> None:
    inputs = make_inputs(SHAPE)
    torch.ops.trtllm.kda_commit_pending(*inputs.arguments()[:6], inputs.slots[:0], inputs.counts[:0])
