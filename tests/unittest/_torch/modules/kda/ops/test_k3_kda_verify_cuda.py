# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify` on a GPU: long chains, many shapes, graphs, far pools, few SMs."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    VerifyInputs,
    VerifyShape,
    as_float64,
    make_inputs,
    make_rows,
    move,
)
from tests.unittest._torch.modules.kda.ops.harness import (
    TOLERANCE,
    VERIFY,
    Chain,
    assert_close,
    chain_schedule,
    load_run,
    output_error,
    relative_error,
    same_bits,
    shape_of,
    verify_runs,
    with_gate,
)

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


@pytest.fixture(params=verify_runs())
def run(request: pytest.FixtureRequest):
    return load_run(request.param)


@cache
def _exact_round(shape: VerifyShape) -> tuple[VerifyInputs, VerifyInputs, torch.Tensor]:
    """Inputs on the CPU, and the float64 twin's pools and output after the round."""
    inputs = make_inputs(shape, seed=shape.requests + shape.tokens)
    exact = as_float64(inputs)
    return inputs, exact, VERIFY.reference(*exact.arguments())


@pytest.mark.parametrize("shape", VERIFY.shapes, ids=lambda s: f"n{s.requests}-t{s.tokens}-h{s.heads}")
def test_every_shape_matches_float64(run, shape: VerifyShape) -> None:
    inputs, exact, want = _exact_round(shape)
    inputs = with_gate(move(inputs, DEVICE), exact)
    assert_close(inputs, run(*inputs.arguments()), exact, want, state=TOLERANCE.state)


@pytest.mark.parametrize("requests", [1, 3, 16])
def test_chains_of_other_batches_follow_float64(run, requests: int) -> None:
    chain = Chain.start(run, shape_of(requests, 8), seed=requests)
    for tokens, accepted in chain_schedule(requests, (8, 8, 5, 8, 1, 8, 2, 8, 8, 3, 8)):
        output, want = chain.round(tokens)
        assert output_error(output, want) <= TOLERANCE.output
        assert chain.state_error() <= TOLERANCE.chained
        chain.accept(accepted)


@cache
def _exact_chain(
    rounds: int, accepted: int
) -> tuple[VerifyInputs, list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Start, rows and f_b products of every round, and the float64 twin's last state and output."""
    start = make_inputs(shape_of(2, 8, heads=1))
    start.pending.zero_()
    generator = torch.Generator().manual_seed(accepted)
    pools, history = as_float64(start).mutable(), []
    for _ in range(rounds):
        rows = make_rows(shape_of(2, 8, heads=1), generator)
        exact = replace(as_float64(replace(start, proj=rows)), **pools)
        want = VERIFY.reference(*exact.arguments())
        history.append((rows, exact.g_ext.to(rows.dtype)))
        start.pending.fill_(accepted)
    start.pending.zero_()
    return start, history, pools["ssm"][start.slots.long()], want


@pytest.mark.parametrize("accepted", [0, 7], ids=["rejection", "acceptance"])
def test_five_hundred_rounds_stay_close(run, accepted: int) -> None:
    start, rounds, exact_state, want = _exact_chain(500, accepted)
    inputs = move(start, DEVICE)
    for rows, gate in rounds:
        output = run(*replace(inputs, proj=rows.to(DEVICE), g_ext=gate.to(DEVICE)).arguments())
        inputs.pending.fill_(accepted)
    assert relative_error(inputs.ssm[inputs.slots.long()], exact_state) <= TOLERANCE.chained
    assert output_error(output, want) <= TOLERANCE.output


def test_graph_replays_give_the_bits_of_eager_calls(run) -> None:
    inputs = make_inputs(shape_of(5, 8), device=DEVICE)
    eager, graphed = move(inputs, DEVICE), move(inputs, DEVICE)
    run(*move(inputs, DEVICE).arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(*graphed.arguments())
    for name, tensor in graphed.mutable().items():
        tensor.copy_(inputs.mutable()[name])
    for _ in range(3):
        want = run(*eager.arguments())
        graph.replay()
        assert same_bits(output, want)
        for name, tensor in graphed.mutable().items():
            assert same_bits(tensor, eager.mutable()[name]), name
        accepted = torch.randint(0, 8, (5,), dtype=torch.int32, device=DEVICE)
        for x in (eager, graphed):
            x.pending[inputs.slots.long()] = accepted
            x.proj.copy_(inputs.proj.flip(0))


def test_slots_beyond_two_to_the_31_elements(run) -> None:
    """A slot stride that puts the last slot's state past 2^31 elements, neighbours untouched."""
    shape = shape_of(2, 4, num_slots=4)
    inputs = make_inputs(shape, device=DEVICE)
    inputs.slots.copy_(torch.tensor([3, 0], dtype=torch.int32))
    stride = (2**31 // 3 // 4 + 4096) * 4
    memory = torch.full((3 * stride + inputs.ssm[0].numel(),), torch.nan, device=DEVICE)
    far = memory.as_strided(inputs.ssm.shape, (stride, *inputs.ssm.stride()[1:]))
    far.copy_(inputs.ssm)
    assert 3 * stride > 2**31
    near, distant = move(inputs, DEVICE), replace(move(inputs, DEVICE), ssm=far)
    assert same_bits(run(*distant.arguments()), run(*near.arguments()))
    assert same_bits(far, near.ssm)


def test_records_beyond_two_to_the_31_elements(run) -> None:
    inputs = make_inputs(shape_of(1, 4, num_slots=2), device=DEVICE)
    inputs.slots.fill_(1)
    stride = 2**31 + 4096
    memory = torch.empty(stride + inputs.state_tok[0].numel(), device=DEVICE)
    far = memory.as_strided(inputs.state_tok.shape, (stride, *inputs.state_tok.stride()[1:]))
    far.copy_(inputs.state_tok)
    near, distant = move(inputs, DEVICE), replace(move(inputs, DEVICE), state_tok=far)
    assert same_bits(run(*distant.arguments()), run(*near.arguments()))
    assert same_bits(far, near.state_tok)


def test_repeats_under_load_give_the_same_bits(run) -> None:
    """A race shows as bits that change from call to call."""
    inputs = make_inputs(shape_of(33, 8, heads=6), device=DEVICE)
    reference = move(inputs, DEVICE)
    want = run(*reference.arguments())
    for _ in range(30):
        again = move(inputs, DEVICE)
        assert same_bits(run(*again.arguments()), want)
        for name, tensor in again.mutable().items():
            assert same_bits(tensor, reference.mutable()[name]), name


CONFINED = """
import sys, torch
from torch.cuda.green_contexts import GreenContext
from tests.unittest._torch.modules.kda.ops.harness import load_run, same_bits, shape_of
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import make_inputs, move
run, inputs = load_run(sys.argv[1]), make_inputs(shape_of(24, 8, heads=6), device="cuda")
free, confined = move(inputs, "cuda"), move(inputs, "cuda")
want = run(*free.arguments())
torch.cuda.synchronize()
try:
    context = GreenContext.create(num_sms=8, device_id=0)
    context.set_context()
except (RuntimeError, TypeError, AttributeError) as error:
    print(error)
    sys.exit(77)
output = run(*confined.arguments())
torch.cuda.synchronize()
context.pop_context()
assert same_bits(output, want)
for name, tensor in confined.mutable().items():
    assert same_bits(tensor, free.mutable()[name]), name
"""


@pytest.mark.parametrize("name", verify_runs()[:3])
def test_on_eight_sms_tiles_come_in_waves_and_bits_stay(name: str) -> None:
    """Whoever writes shared columns or records before a later tile has read them fails here."""
    pytest.importorskip("torch.cuda.green_contexts")
    root = Path(__file__).parents[6]
    command = [sys.executable, "-c", CONFINED, name]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    if result.returncode == 77:
        pytest.skip(f"no green context here: {result.stdout.strip()}")
    assert result.returncode == 0, result.stderr[-2000:]
