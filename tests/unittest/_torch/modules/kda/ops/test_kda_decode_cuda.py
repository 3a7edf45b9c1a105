# SPDX-License-Identifier: Apache-2.0
"""`kda_decode` on a GPU: many shapes, long chains, graphs, far pools, few SMs."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.kda_decode.inputs import (
    DecodeInputs,
    DecodeShape,
    as_float64,
    make_inputs,
    make_rows,
    move,
)
from tests.unittest._torch.modules.kda.ops.decode_harness import (
    DECODE,
    TOLERANCE,
    Steps,
    assert_close,
    decode_runs,
    load_decode,
    shape_of,
    with_gate,
)
from tests.unittest._torch.modules.kda.ops.harness import output_error, relative_error, same_bits

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


@pytest.fixture(params=decode_runs())
def run(request: pytest.FixtureRequest):
    return load_decode(request.param)


@cache
def _exact_step(shape: DecodeShape) -> tuple[DecodeInputs, DecodeInputs, torch.Tensor]:
    """Inputs on the CPU, and the float64 twin's pools and output after the step."""
    inputs = make_inputs(shape, seed=shape.requests)
    exact = as_float64(inputs)
    return inputs, exact, DECODE.reference(*exact.arguments())


@pytest.mark.parametrize("shape", DECODE.shapes, ids=lambda s: f"n{s.requests}-h{s.heads}")
def test_every_shape_matches_float64(run, shape: DecodeShape) -> None:
    inputs, exact, want = _exact_step(shape)
    inputs = with_gate(move(inputs, DEVICE), exact)
    assert_close(inputs, run(*inputs.arguments()), exact, want, state=TOLERANCE.state)


@pytest.mark.parametrize("requests", [1, 16])
def test_chains_of_other_batches_follow_float64(run, requests: int) -> None:
    steps = Steps.start(run, shape_of(requests), seed=requests)
    for _ in range(12):
        output, want = steps.step()
        assert output_error(output, want) <= TOLERANCE.output
        assert steps.state_error() <= TOLERANCE.chained


@cache
def _exact_chain(
    steps: int,
) -> tuple[DecodeInputs, list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Start, rows and f_b products of every step, and the float64 twin's last state and output."""
    shape = shape_of(2, heads=1)
    start, generator = make_inputs(shape), torch.Generator().manual_seed(1)
    pools, history = as_float64(start).mutable(), []
    for _ in range(steps):
        rows = make_rows(shape, generator)
        exact = replace(as_float64(replace(start, proj=rows)), **pools)
        want = DECODE.reference(*exact.arguments())
        history.append((rows, exact.g_ext.to(rows.dtype)))
    return start, history, pools["ssm"][start.slots.long()], want


def test_five_hundred_steps_stay_close(run) -> None:
    start, steps, exact_state, want = _exact_chain(500)
    inputs = move(start, DEVICE)
    for rows, gate in steps:
        output = run(*replace(inputs, proj=rows.to(DEVICE), g_ext=gate.to(DEVICE)).arguments())
    assert relative_error(inputs.ssm[inputs.slots.long()], exact_state) <= TOLERANCE.chained
    assert output_error(output, want) <= TOLERANCE.output


def test_graph_replays_give_the_bits_of_eager_calls(run) -> None:
    inputs = make_inputs(shape_of(5, num_slots=9), device=DEVICE)
    eager, graphed = move(inputs, DEVICE), move(inputs, DEVICE)
    run(*move(inputs, DEVICE).arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(*graphed.arguments())
    for name, tensor in graphed.mutable().items():
        tensor.copy_(inputs.mutable()[name])
    for step in range(4):
        want = run(*eager.arguments())
        graph.replay()
        assert same_bits(output, want)
        for name, tensor in graphed.mutable().items():
            assert same_bits(tensor, eager.mutable()[name]), name
        slots = torch.randperm(9)[:5].to(torch.int32)
        slots[step] = -1
        for x in (eager, graphed):
            x.slots.copy_(slots)
            x.proj.copy_(inputs.proj.flip(0))


def test_launches_that_follow_each_other_on_one_pool_give_the_bits_of_separate_ones(run) -> None:
    """Under programmatic launch a step must not read the state before the step before has written it."""
    inputs = make_inputs(shape_of(64, heads=6), device=DEVICE)
    apart, together = move(inputs, DEVICE), move(inputs, DEVICE)
    want = []
    for _ in range(20):
        want.append(run(*apart.arguments()))
        torch.cuda.synchronize()
    outputs = [run(*together.arguments()) for _ in range(20)]
    assert all(same_bits(a, b) for a, b in zip(outputs, want, strict=True))
    assert same_bits(together.ssm, apart.ssm)
    assert same_bits(together.conv_pool, apart.conv_pool)


def test_slots_beyond_two_to_the_31_elements(run) -> None:
    """A slot stride that puts the last slot's state past 2^31 elements, neighbours untouched."""
    inputs = make_inputs(shape_of(2, num_slots=4), device=DEVICE)
    inputs.slots.copy_(torch.tensor([3, 0], dtype=torch.int32))
    stride = (2**31 // 3 // 4 + 4096) * 4
    memory = torch.full((3 * stride + inputs.ssm[0].numel(),), torch.nan, device=DEVICE)
    far = memory.as_strided(inputs.ssm.shape, (stride, *inputs.ssm.stride()[1:]))
    far.copy_(inputs.ssm)
    assert 3 * stride > 2**31
    near, distant = move(inputs, DEVICE), replace(move(inputs, DEVICE), ssm=far)
    assert same_bits(run(*distant.arguments()), run(*near.arguments()))
    assert same_bits(far, near.ssm)


def test_windows_beyond_two_to_the_31_elements(run) -> None:
    inputs = make_inputs(shape_of(1, num_slots=2), device=DEVICE)
    inputs.slots.fill_(1)
    stride = 2**31 + 4096
    memory = torch.empty(stride + inputs.conv_pool[0].numel(), dtype=torch.bfloat16, device=DEVICE)
    far = memory.as_strided(inputs.conv_pool.shape, (stride, *inputs.conv_pool.stride()[1:]))
    far.copy_(inputs.conv_pool)
    near, distant = move(inputs, DEVICE), replace(move(inputs, DEVICE), conv_pool=far)
    assert same_bits(run(*distant.arguments()), run(*near.arguments()))
    assert same_bits(far, near.conv_pool)


def test_repeats_under_load_give_the_same_bits(run) -> None:
    """A race shows as bits that change from call to call."""
    inputs = make_inputs(shape_of(33, heads=6), device=DEVICE)
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
from tests.unittest._torch.modules.kda.ops.decode_harness import load_decode, shape_of
from tests.unittest._torch.modules.kda.ops.harness import same_bits
from tensorrt_llm._torch.modules.kda.ops.kda_decode.inputs import make_inputs, move
run, inputs = load_decode(sys.argv[1]), make_inputs(shape_of(24, heads=6), device="cuda")
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


@pytest.mark.parametrize("name", decode_runs())
def test_on_eight_sms_tiles_come_in_waves_and_bits_stay(name: str) -> None:
    """Whoever moves a shared window before a later tile has read it fails here."""
    pytest.importorskip("torch.cuda.green_contexts")
    root = Path(__file__).parents[6]
    command = [sys.executable, "-c", CONFINED, name]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    if result.returncode == 77:
        pytest.skip(f"no green context here: {result.stdout.strip()}")
    assert result.returncode == 0, result.stderr[-2000:]
