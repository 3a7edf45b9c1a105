# SPDX-License-Identifier: Apache-2.0
"""`kda_decode`: every implementation against float64, and what it must not read or write."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.reference import k3_kda_verify_reference
from tensorrt_llm._torch.modules.kda.ops.kda_decode.choice import choose_config, choose_split
from tensorrt_llm._torch.modules.kda.ops.kda_decode.contract import why_not_compiled
from tensorrt_llm._torch.modules.kda.ops.kda_decode.inputs import (
    DecodeInputs,
    as_float64,
    make_inputs,
    move,
)
from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import SPLITS, DecodeConfig, packed_configs
from tensorrt_llm._torch.modules.kda.ops.kda_decode.op import kda_decode
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES
from tensorrt_llm._torch.modules.kda.recurrence import KdaWeights
from tensorrt_llm._torch.modules.kda.verify_scheme import KdaRows, decode
from tensorrt_llm.commands.kernels import compile_kernel
from tests.ptx import Emulated, EmulatedKernels, emulated
from tests.unittest._torch.modules.kda.ops.decode_harness import (
    DECODE,
    OUTPUT_TOLERANCE,
    TOLERANCE,
    Steps,
    assert_close,
    cute_run,
    decode_runs,
    load_decode,
    shape_of,
    with_gate,
)
from tests.unittest._torch.modules.kda.ops.harness import DEVICE, output_error, relative_error, same_bits


@pytest.fixture(params=decode_runs())
def run(request: pytest.FixtureRequest):
    return load_decode(request.param)


@pytest.mark.parametrize(("requests", "heads"), [(1, 1), (2, 2), (3, 1)])
def test_a_step_matches_float64(run, requests: int, heads: int) -> None:
    inputs = make_inputs(shape_of(requests, heads), seed=requests, device=DEVICE)
    exact = as_float64(inputs)
    inputs = with_gate(inputs, exact)
    want = DECODE.reference(*exact.arguments())
    assert_close(inputs, run(*inputs.arguments()), exact, want, state=TOLERANCE.state)


def test_the_folded_gate_matches_float64(run) -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    exact = as_float64(inputs)
    want = DECODE.reference(*exact.arguments())
    output = run(*inputs.arguments())
    assert output_error(output, want) <= OUTPUT_TOLERANCE
    assert relative_error(inputs.ssm, exact.ssm) <= TOLERANCE.folded


def test_a_chain_of_steps_follows_float64(run) -> None:
    steps = Steps.start(run, shape_of(2))
    for _ in range(8 if DEVICE == "cpu" else 64):
        output, want = steps.step()
        assert output_error(output, want) <= OUTPUT_TOLERANCE
        assert steps.state_error() <= TOLERANCE.chained
    assert relative_error(steps.inputs.conv_pool, steps.exact.conv_pool) == 0.0


def test_the_reference_is_a_verify_round_of_one_token() -> None:
    """Nothing pending: the same state, window and output, bit for bit on one device."""
    inputs = make_inputs(shape_of(3), dtype=torch.float32)
    before, width = move(inputs, "cpu"), inputs.w_fb.shape[0]
    output = DECODE.reference(*inputs.arguments())
    windows = [part.float().clone() for part in before.conv_pool.split(width, dim=1)]
    records = torch.full((before.ssm.shape[0], 3, 0, 2, 128), torch.nan)
    verified = k3_kda_verify_reference(
        *before.arguments()[:8], *windows, before.ssm, records, before.slots,
        torch.zeros(before.ssm.shape[0], dtype=torch.int32), 0, *before.arguments()[11:],
    )  # fmt: skip
    assert relative_error(output, verified) < 1e-6
    assert relative_error(inputs.ssm, before.ssm) < 1e-6
    assert same_bits(inputs.conv_pool, torch.cat(windows, dim=1))


def test_a_layer_with_kernel_taps_runs_the_op() -> None:
    """`decode` of a layer's cache gives what its torch form gives, through the op."""
    inputs = make_inputs(shape_of(3), dtype=torch.float32, device=DEVICE)
    D, (qkv, gate, f_a, b) = 256, inputs.proj[:, : 4 * 256 + 130].split((768, 256, 128, 2), dim=1)
    rows = KdaRows(proj=inputs.proj, qkv=qkv, gate=gate, f=f_a @ inputs.w_fb.T, b=b)
    taps = (inputs.w_q, inputs.w_k, inputs.w_v)
    plain = KdaWeights(
        num_heads=2, head_dim=D // 2, conv=torch.cat(taps).T, f_b=inputs.w_fb, a_log=inputs.a_log,
        dt_bias=inputs.dt_bias, norm=inputs.onorm_w, lower_bound=-5.0, norm_eps=1e-5,
    )  # fmt: skip
    results = []
    for kernel_taps in (None, taps, tuple(torch.zeros_like(part) for part in taps)):
        moved = move(inputs, DEVICE)
        cache = SimpleNamespace(conv=moved.conv_pool, temporal=moved.ssm)
        output = decode(rows, replace(plain, kernel_taps=kernel_taps), cache, inputs.slots)
        results.append((output, moved.ssm, moved.conv_pool))
    torch_form, op, without_taps = results
    assert relative_error(op[0], torch_form[0]) < 1e-6
    assert relative_error(op[1], torch_form[1]) < 1e-6
    assert same_bits(op[2], torch_form[2])
    assert not without_taps[0].any()


def test_another_history_is_far_off(run) -> None:
    """The negative control: the windows of two requests swapped."""
    inputs = make_inputs(shape_of(2), device=DEVICE)
    exact = as_float64(inputs)
    inputs.conv_pool[inputs.slots.long()] = inputs.conv_pool[inputs.slots.long().flip(0)]
    want = DECODE.reference(*exact.arguments())
    assert relative_error(run(*inputs.arguments()), want) > 0.05


def test_other_slots_and_padding_rows_stay(run) -> None:
    inputs = make_inputs(shape_of(3, num_slots=6), device=DEVICE)
    inputs.slots[1] = -1
    used = [slot for slot in inputs.slots.tolist() if slot >= 0]
    others = [slot for slot in range(6) if slot not in used]
    for tensor in inputs.mutable().values():
        tensor[others] = torch.nan
    before = {name: tensor.clone() for name, tensor in inputs.mutable().items()}
    output = run(*inputs.arguments())
    assert not output[1].any() and output[0].any() and output[2].any()
    assert output.isfinite().all()
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor[others], before[name][others]), name
        assert not same_bits(tensor[used], before[name][used]), name


def test_a_batch_of_padding_gives_zeros(run) -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    inputs.slots.fill_(-1)
    before = inputs.ssm.clone()
    assert not run(*inputs.arguments()).any()
    assert same_bits(inputs.ssm, before)


def test_columns_past_the_row_are_not_read(run) -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    wide = torch.full((2, inputs.proj.shape[1] + 16), torch.nan, dtype=inputs.proj.dtype, device=DEVICE)
    wide[:, : inputs.proj.shape[1]] = inputs.proj
    wide[:, 4 * 256 + 128 + 2 :] = torch.nan
    clean = move(inputs, DEVICE)
    assert same_bits(run(*replace(inputs, proj=wide).arguments()), run(*clean.arguments()))
    assert same_bits(inputs.ssm, clean.ssm)


def test_slots_may_start_anywhere_and_have_strides(run) -> None:
    inputs = make_inputs(shape_of(3), device=DEVICE)
    expected = move(inputs, DEVICE)
    want = run(*expected.arguments())
    for offset in range(1, 4):
        slots = torch.full((offset + 3,), -7, dtype=torch.int32, device=DEVICE)
        slots[offset:] = inputs.slots
        moved = replace(move(inputs, DEVICE), slots=slots[offset:])
        assert same_bits(run(*moved.arguments()), want)
    table = torch.full((3, 8), -7, dtype=torch.int32, device=DEVICE)
    table[:, 0] = inputs.slots
    strided = replace(move(inputs, DEVICE), slots=table[:, 0])
    assert same_bits(run(*strided.arguments()), want)
    assert same_bits(strided.ssm, expected.ssm)


def test_strided_pools_give_the_bits_of_dense_ones(run) -> None:
    strided = make_inputs(shape_of(2, layers=3), device=DEVICE)
    moved = move(strided, DEVICE)
    window = moved.conv_pool.mT.contiguous().mT
    dense = replace(moved, ssm=strided.ssm.contiguous(), conv_pool=window)
    assert strided.ssm.stride(0) == 3 * dense.ssm.stride(0)
    assert strided.conv_pool.stride()[1:] == (3, 1) and window.stride()[1:] == (1, 768)
    assert same_bits(run(*strided.arguments()), run(*dense.arguments()))
    assert same_bits(strided.ssm, dense.ssm)
    assert same_bits(strided.conv_pool, dense.conv_pool)


def test_a_repeat_gives_the_same_bits(run) -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    first, second = move(inputs, DEVICE), move(inputs, DEVICE)
    assert same_bits(run(*first.arguments()), run(*second.arguments()))
    for name, tensor in first.mutable().items():
        assert same_bits(tensor, second.mutable()[name]), name


@pytest.mark.parametrize(
    ("split", "seed"), [(8, 0), *(pytest.param(s, 1, marks=pytest.mark.slow) for s in SPLITS)]
)
def test_no_order_of_the_warps_changes_a_bit(split: int, seed: int) -> None:
    """The interpreted kernel under random schedules, CTAs of a cluster starting apart, -1 among the slots."""
    pytest.importorskip("cutlass")
    inputs = make_inputs(shape_of(3, heads=1, layers=2))
    inputs.slots[1] = -1
    lockstep, apart = move(inputs, "cpu"), move(inputs, "cpu")
    want = cute_run(split, EmulatedKernels(DECODE.kernels))(*lockstep.arguments())

    def launcher(config: DecodeConfig) -> Emulated:
        return emulated(DECODE.kernels.compile, config).with_seed(seed, apart=True)

    assert same_bits(cute_run(split, SimpleNamespace(launcher=launcher))(*apart.arguments()), want)
    for name, tensor in lockstep.mutable().items():
        assert same_bits(tensor, apart.mutable()[name]), name


def test_the_torch_op_runs_what_the_function_runs() -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    direct, by_op = move(inputs, DEVICE), move(inputs, DEVICE)
    want = kda_decode(*direct.arguments())
    assert same_bits(torch.ops.trtllm.kda_decode(*by_op.arguments()), want)
    assert same_bits(direct.ssm, by_op.ssm)
    torch.library.opcheck(
        torch.ops.trtllm.kda_decode.default,
        move(inputs, DEVICE).arguments(),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_model_in_fp32_runs_the_reference() -> None:
    inputs = make_inputs(shape_of(2), dtype=torch.float32, device=DEVICE)
    exact = as_float64(inputs, f_b=False)
    want = DECODE.reference(*exact.arguments())
    assert relative_error(kda_decode(*inputs.arguments()), want) < 1e-5
    assert relative_error(inputs.ssm, exact.ssm) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"proj": x.proj[:1]}, "shape of proj"),
        (lambda x: {"proj": x.proj[:, :100]}, "columns of proj"),
        (lambda x: {"proj": x.proj.T.contiguous().T}, "strides of proj"),
        (lambda x: {"slots": x.slots.long()}, "dtype of slots"),
        (lambda x: {"ssm": x.ssm.transpose(2, 3)}, "strides of ssm"),
        (lambda x: {"conv_pool": x.conv_pool[:, :, :2]}, "shape of conv_pool"),
        (lambda x: {"conv_pool": x.conv_pool[:2]}, "shape of conv_pool"),
        (lambda x: {"w_fb": x.w_fb[:100]}, "shape of w_fb"),
        (lambda x: {"g_ext": x.proj[:, :10]}, "shape of g_ext"),
    ],
)
def test_what_the_op_does_not_define_is_refused_before_any_work(change, message: str) -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    before = {name: tensor.clone() for name, tensor in inputs.mutable().items()}
    with pytest.raises(ValueError, match=message):
        kda_decode(*replace(inputs, **change(inputs)).arguments())
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, before[name])


def test_compiled_kernels_leave_unaligned_arguments_to_triton() -> None:
    inputs = make_inputs(shape_of(2))

    def why(**changes: torch.Tensor) -> str:
        x: DecodeInputs = replace(inputs, **changes)
        return why_not_compiled(x.proj, (x.w_fb, x.w_q, x.w_k, x.w_v, x.onorm_w), x.conv_pool, x.ssm)

    assert why() == ""
    unaligned = torch.empty(inputs.w_fb.numel() + 1, dtype=torch.bfloat16)[1:].view_as(inputs.w_fb)
    assert "aligned" in why(w_fb=unaligned)
    assert "conv pool" in why(conv_pool=inputs.conv_pool.float())
    assert "rows" in why(proj=inputs.proj[:, 1:])


@pytest.mark.parametrize("architecture", CUTE_ARCHITECTURES)
def test_every_split_compiles_without_spills(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    for split in (1, 2, 8):
        _, record = compile_kernel(DECODE, DecodeConfig(split=split), architecture, tmp_path)
        assert record.stack_bytes == 0, record
        # Two CTAs of 256 threads or three of 128 to an SM.
        assert 0 < record.registers <= (128 if split == 1 else 168), record


def test_every_launch_that_may_be_chosen_is_packed() -> None:
    packed = set(packed_configs())
    for requests in range(1, 300):
        for heads in (1, 2, 6, 12, 24):
            assert choose_split(requests, heads) in SPLITS
            for gate in (False, True):
                for pdl in (False, True):
                    config = choose_config(requests=requests, heads=heads, external_gate=gate, pdl=pdl)
                    assert config in packed, config
    splits = [choose_split(requests, 6) for requests in range(1, 200)]
    assert splits == sorted(splits, reverse=True)
