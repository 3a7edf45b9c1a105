# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_verify`: every implementation against float64, and what it must not read or write."""

from dataclasses import replace

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import why_not_compiled
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    VerifyInputs,
    as_float64,
    make_inputs,
    move,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.op import k3_kda_verify
from tests.unittest._torch.modules.kda.ops.harness import (
    DEVICE,
    OUTPUT_TOLERANCE,
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

TOKENS = (1, 2, 8) if DEVICE == "cpu" else (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.fixture(params=verify_runs())
def run(request: pytest.FixtureRequest):
    return load_run(request.param)


def _snapshot(inputs: VerifyInputs) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.mutable().items()}


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_round_matches_float64(run, tokens: int) -> None:
    inputs = make_inputs(shape_of(2, tokens), seed=tokens, device=DEVICE)
    exact = as_float64(inputs)
    inputs = with_gate(inputs, exact)
    want = VERIFY.reference(*exact.arguments())
    assert_close(inputs, run(*inputs.arguments()), exact, want, state=TOLERANCE.state)


def test_the_folded_gate_matches_float64(run) -> None:
    inputs = make_inputs(shape_of(2, 8), device=DEVICE)
    exact = as_float64(inputs)
    want = VERIFY.reference(*exact.arguments())
    output = run(*inputs.arguments())
    assert output_error(output, want) <= OUTPUT_TOLERANCE
    assert relative_error(inputs.ssm, exact.ssm) <= TOLERANCE.folded


def test_a_chain_of_rounds_follows_float64(run) -> None:
    lengths = (8, 2, 8, 1, 4, 8, 6) if DEVICE == "cpu" else (8, 2, 8, 1, 4, 8, 6, 8, 8, 3, 8, 8, 5, 8, 7, 8)
    requests = 2 if DEVICE == "cpu" else 5
    chain = Chain.start(run, shape_of(requests, 8))
    for tokens, accepted in chain_schedule(requests, lengths):
        output, want = chain.round(tokens)
        assert output_error(output, want) <= OUTPUT_TOLERANCE
        assert chain.state_error() <= TOLERANCE.chained
        chain.accept(accepted)


def test_a_round_of_another_history_is_far_off(run) -> None:
    """The negative control of the chain: acceptances swapped between two requests."""
    chain = Chain.start(run, shape_of(2, 8))
    chain.round(8)
    chain.accept([7, 1])
    chain.exact = as_float64(replace(chain.inputs, g_ext=None))
    chain.inputs.pending.copy_(chain.inputs.pending.flip(0))
    exact = replace(as_float64(chain.inputs), **chain.exact.mutable())
    chain.inputs.pending.copy_(chain.inputs.pending.flip(0))
    want = VERIFY.reference(*exact.arguments())
    assert relative_error(run(*chain.inputs.arguments()), want) > 0.05


def test_records_past_the_pending_count_and_later_columns_are_not_read(run) -> None:
    inputs = make_inputs(shape_of(2, 2), device=DEVICE)
    inputs.pending.fill_(3)
    clean = move(inputs, DEVICE)
    inputs.state_tok[:, :, 3:] = torch.nan
    for cache in (inputs.cs_q, inputs.cs_k, inputs.cs_v):
        cache[:, :, 6:] = torch.nan
        cache[:, :, :3] = torch.inf
    poisoned = move(inputs, DEVICE)
    assert same_bits(run(*inputs.arguments()), run(*clean.arguments()))
    slots = inputs.slots.long()
    assert same_bits(inputs.ssm[slots], clean.ssm[slots])
    assert same_bits(inputs.state_tok[slots, :, :1], clean.state_tok[slots, :, :1])
    assert same_bits(inputs.state_tok[:, :, 1:], poisoned.state_tok[:, :, 1:])
    assert same_bits(inputs.cs_k[slots][:, :, :4], clean.cs_k[slots][:, :, :4])
    assert same_bits(inputs.cs_k[:, :, 4:], poisoned.cs_k[:, :, 4:])


def test_nothing_pending_reads_no_record(run) -> None:
    inputs = make_inputs(shape_of(2, 4), device=DEVICE)
    inputs.pending.zero_()
    inputs.state_tok.fill_(torch.nan)
    assert run(*inputs.arguments()).isfinite().all()
    assert inputs.ssm.isfinite().all()


def test_a_count_out_of_range_is_clamped(run) -> None:
    inputs = make_inputs(shape_of(2, 2), device=DEVICE)
    wanted = {}
    for count, clamped in ((100, 7), (-5, 0)):
        wild, tame = move(inputs, DEVICE), move(inputs, DEVICE)
        wild.pending.fill_(count)
        tame.pending.fill_(clamped)
        assert same_bits(run(*wild.arguments()), run(*tame.arguments()))
        assert same_bits(wild.ssm, tame.ssm)
        wanted[count] = tame.ssm
    assert not same_bits(wanted[100], wanted[-5])


def test_other_slots_and_padding_rows_stay(run) -> None:
    inputs = make_inputs(shape_of(3, 2, num_slots=6), device=DEVICE)
    inputs.slots[1] = -1
    used = [slot for slot in inputs.slots.tolist() if slot >= 0]
    others = [slot for slot in range(6) if slot not in used]
    for tensor in inputs.mutable().values():
        tensor[others] = torch.nan
    before = _snapshot(inputs)
    output = run(*inputs.arguments())
    assert not output[2:4].any() and output[:2].any() and output[4:].any()
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor[others], before[name][others]), name
        assert not same_bits(tensor[used], before[name][used]), name


def test_a_broken_draft_does_not_reach_the_golden_token(run) -> None:
    inputs = make_inputs(shape_of(2, 4), device=DEVICE)
    clean = move(inputs, DEVICE)
    inputs.proj[3] = torch.nan
    output, wanted = run(*inputs.arguments()), run(*clean.arguments())
    assert same_bits(output[:3], wanted[:3])
    assert same_bits(inputs.ssm, clean.ssm)
    assert output[3].isnan().any()


def test_index_tensors_may_start_anywhere_and_have_strides(run) -> None:
    inputs = make_inputs(shape_of(3, 2), device=DEVICE)
    expected = move(inputs, DEVICE)
    want = run(*expected.arguments())
    for offset in range(1, 4):
        moved = move(inputs, DEVICE)
        slots = torch.full((offset + 3,), -7, dtype=torch.int32, device=DEVICE)
        slots[offset:] = inputs.slots
        pending = torch.full((offset + 4,), -7, dtype=torch.int32, device=DEVICE)
        pending[offset:] = inputs.pending
        moved = replace(moved, slots=slots[offset:], pending=pending[offset:])
        assert same_bits(run(*moved.arguments()), want)
    table = torch.full((3, 8), -7, dtype=torch.int32, device=DEVICE)
    table[:, 0] = inputs.slots
    strided = replace(move(inputs, DEVICE), slots=table[:, 0])
    assert same_bits(run(*strided.arguments()), want)
    assert same_bits(strided.ssm, expected.ssm)


def test_strided_pools_give_the_bits_of_dense_ones(run) -> None:
    strided = make_inputs(shape_of(2, 2, layers=3), device=DEVICE)
    dense = replace(move(strided, DEVICE), ssm=strided.ssm.contiguous())
    assert strided.ssm.stride(0) == 3 * dense.ssm.stride(0)
    assert same_bits(run(*strided.arguments()), run(*dense.arguments()))
    assert same_bits(strided.ssm, dense.ssm)
    assert same_bits(strided.cs_v, dense.cs_v)


def test_a_repeat_gives_the_same_bits(run) -> None:
    inputs = make_inputs(shape_of(2, 4), device=DEVICE)
    first, second = move(inputs, DEVICE), move(inputs, DEVICE)
    assert same_bits(run(*first.arguments()), run(*second.arguments()))
    for name, tensor in first.mutable().items():
        assert same_bits(tensor, second.mutable()[name]), name


def test_the_torch_op_runs_what_the_function_runs() -> None:
    inputs = make_inputs(shape_of(2, 2), device=DEVICE)
    direct, by_op = move(inputs, DEVICE), move(inputs, DEVICE)
    want = k3_kda_verify(*direct.arguments())
    assert same_bits(torch.ops.trtllm.k3_kda_verify(*by_op.arguments()), want)
    assert same_bits(direct.ssm, by_op.ssm)
    torch.library.opcheck(
        torch.ops.trtllm.k3_kda_verify.default,
        move(inputs, DEVICE).arguments(),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_model_in_fp32_runs_on_a_cpu() -> None:
    inputs = make_inputs(shape_of(2, 3), dtype=torch.float32)
    exact = as_float64(inputs, f_b=False)
    want = VERIFY.reference(*exact.arguments())
    assert relative_error(k3_kda_verify(*inputs.arguments()), want) < 1e-5
    assert relative_error(inputs.ssm, exact.ssm) < 1e-6


def test_more_than_seven_drafts_run_the_reference() -> None:
    inputs = make_inputs(shape_of(1, 10, num_spec=9), device=DEVICE)
    expected = move(inputs, DEVICE)
    want = VERIFY.reference(*expected.arguments())
    assert same_bits(k3_kda_verify(*inputs.arguments()), want)
    assert same_bits(inputs.state_tok, expected.state_tok)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"proj": x.proj[:3]}, "proj"),
        (lambda x: {"proj": x.proj[:, :100]}, "columns of proj"),
        (lambda x: {"proj": x.proj.repeat(9, 1)}, "tokens per request"),
        (lambda x: {"slots": x.slots.long()}, "dtype of slots"),
        (lambda x: {"ssm": x.ssm.transpose(2, 3)}, "strides of ssm"),
        (lambda x: {"state_tok": x.state_tok[:, :2]}, "shape of state_tok"),
        (lambda x: {"cs_q": x.cs_q[:, :, :5]}, "shape of cs_q"),
        (lambda x: {"num_spec": 3}, "shape of cs_q"),
        (lambda x: {"g_ext": x.proj[:, :10]}, "shape of g_ext"),
    ],
)
def test_what_the_op_does_not_define_is_refused_before_any_work(change, message: str) -> None:
    inputs = make_inputs(shape_of(2, 2), device=DEVICE)
    before = _snapshot(inputs)
    with pytest.raises(ValueError, match=message):
        k3_kda_verify(*replace(inputs, **change(inputs)).arguments())
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, before[name])


def test_compiled_kernels_leave_unaligned_arguments_and_steep_gates_to_triton() -> None:
    inputs = make_inputs(shape_of(2, 2))
    caches = (inputs.cs_q, inputs.cs_k, inputs.cs_v)

    def why(lower_bound: float = -5.0, **changes: torch.Tensor) -> str:
        x = replace(inputs, **changes)
        weights = (x.w_fb, x.w_q, x.w_k, x.w_v, x.onorm_w)
        return why_not_compiled(x.proj, weights, (x.ssm, x.state_tok), caches, lower_bound)

    assert why() == ""
    assert "lower_bound" in why(lower_bound=-11.0)
    unaligned = torch.empty(inputs.w_fb.numel() + 1, dtype=torch.bfloat16)[1:].view_as(inputs.w_fb)
    assert "aligned" in why(w_fb=unaligned)
