# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_attn` on a GPU: K3's widths, graphs, launches that follow each other, repeats under load."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.inputs import (
    AttnInputs,
    AttnShape,
    make_inputs,
    move,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import VerifyInputs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.op import k3_kda_verify
from tests.unittest._torch.modules.kda.ops.attn_harness import (
    ATTN,
    CONFIGS,
    assert_close,
    attn_kernels,
    attn_runs,
    exact_round,
    load_attn,
)
from tests.unittest._torch.modules.kda.ops.harness import relative_error, same_bits

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


@pytest.fixture(params=attn_runs())
def run(request: pytest.FixtureRequest):
    return load_attn(request.param)


@cache
def _exact(shape: AttnShape) -> tuple[AttnInputs, VerifyInputs, torch.Tensor]:
    """Inputs on the CPU, and the float64 twin's pools and output after the round."""
    inputs = make_inputs(shape, seed=shape.tokens)
    return inputs, *exact_round(inputs)


@pytest.mark.parametrize("shape", ATTN.shapes, ids=lambda s: f"t{s.tokens}-h{s.heads}")
def test_every_shape_matches_float64(run, shape: AttnShape) -> None:
    inputs, exact, want = _exact(shape)
    inputs = move(inputs, DEVICE)
    assert_close(inputs, run(*inputs.arguments()), exact, want, state=ATTN.tolerance.state)


@pytest.mark.parametrize("launch", CONFIGS)
@pytest.mark.parametrize("narrow", [False, True])
def test_the_compiled_projection_rounds_the_exact_one(launch: str, narrow: bool) -> None:
    conv = torch.bfloat16 if narrow else torch.float32
    inputs = make_inputs(AttnShape(tokens=8), device=DEVICE, conv_dtype=conv)
    x = inputs.round
    compiled = ATTN.implementation("cute").load()(attn_kernels())
    pools = ((x.cs_q, x.cs_k, x.cs_v), x.ssm, x.state_tok, x.slots, x.pending)
    config = replace(CONFIGS[launch], narrow_conv=narrow)
    rows = compiled.project(inputs.x, inputs.w, *pools, config)
    assert relative_error(rows, x.proj) <= 1e-4
    assert (rows != x.proj).float().mean() <= 5e-3
    for _ in range(20):
        assert same_bits(compiled.project(inputs.x, inputs.w, *pools, config), rows)


def test_the_compiled_round_is_the_verify_op_on_the_projected_rows() -> None:
    """Launched as a dependent or on its own after a wait, bit for bit."""
    inputs = make_inputs(AttnShape(tokens=8), device=DEVICE)
    apart = move(inputs, DEVICE)
    compiled = ATTN.implementation("cute").load()(attn_kernels())
    x = apart.round
    pools = ((x.cs_q, x.cs_k, x.cs_v), x.ssm, x.state_tok, x.slots, x.pending)
    for _ in range(10):
        rows = compiled.project(apart.x, apart.w, *pools)
        torch.cuda.synchronize()
        want = k3_kda_verify(*replace(x, proj=rows).arguments())
        torch.cuda.synchronize()
        assert same_bits(compiled(*inputs.arguments()), want)
        for name, tensor in inputs.mutable().items():
            assert same_bits(tensor, apart.mutable()[name]), name


def test_graph_replays_give_the_bits_of_eager_calls(run) -> None:
    inputs = make_inputs(AttnShape(tokens=8, num_slots=4), device=DEVICE)
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
        for x in (eager, graphed):
            x.round.pending.fill_(2 * step)
            x.round.slots.fill_(3 - step)
            x.x.copy_(inputs.x.roll(step + 1, 0))


def test_launches_that_follow_each_other_give_the_bits_of_separate_ones(run) -> None:
    """The next projection must not write rows that the round before still reads."""
    inputs = make_inputs(AttnShape(tokens=8), device=DEVICE)
    apart, together = move(inputs, DEVICE), move(inputs, DEVICE)
    want = []
    for _ in range(20):
        want.append(run(*apart.arguments()))
        torch.cuda.synchronize()
    outputs = [run(*together.arguments()) for _ in range(20)]
    assert all(same_bits(a, b) for a, b in zip(outputs, want, strict=True))
    for name, tensor in together.mutable().items():
        assert same_bits(tensor, apart.mutable()[name]), name
