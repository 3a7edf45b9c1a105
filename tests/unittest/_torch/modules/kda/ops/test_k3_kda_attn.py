# SPDX-License-Identifier: Apache-2.0
"""`k3_kda_attn`: every implementation against the exact projection and a float64 round."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.contract import why_not_compiled
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.inputs import AttnInputs, make_inputs, move
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.launch import ProjectionConfig, packed_configs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.op import k3_kda_attn
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.op import k3_kda_verify
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES
from tensorrt_llm.commands.kernels import compile_kernel
from tests.ptx import Emulated, EmulatedKernels, emulated
from tests.unittest._torch.modules.kda.ops.attn_harness import (
    ATTN,
    CONFIGS,
    assert_close,
    attn_kernels,
    attn_runs,
    exact_round,
    load_attn,
    shape_of,
)
from tests.unittest._torch.modules.kda.ops.harness import DEVICE, VERIFY, relative_error, same_bits


@pytest.fixture(params=attn_runs())
def run(request: pytest.FixtureRequest):
    return load_attn(request.param)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("name", attn_runs())
def test_a_round_from_hidden_states_matches_float64(name: str, tokens: int) -> None:
    inputs = make_inputs(shape_of(tokens), seed=tokens, device=DEVICE)
    exact, want = exact_round(inputs)
    output = load_attn(name)(*inputs.arguments())
    # Triton's interpreter truncates f_b's product where a GPU rounds it.
    slack = 4 if name == "triton" and DEVICE == "cpu" else 1
    assert_close(inputs, output, exact, want, state=slack * ATTN.tolerance.state)


def test_another_weight_is_far_off(run) -> None:
    """The negative control: two rows of the weight's keys swapped."""
    inputs = make_inputs(shape_of(2), device=DEVICE)
    _, want = exact_round(inputs)
    inputs.w[:128] = inputs.w[128:256]
    assert relative_error(run(*inputs.arguments()), want) > 0.05


def test_the_compiled_round_is_the_verify_op_on_the_projected_rows() -> None:
    pytest.importorskip("cutlass")
    inputs = make_inputs(shape_of(4), device=DEVICE)
    apart = move(inputs, DEVICE)
    compiled = ATTN.implementation("cute").load()(attn_kernels())
    x = apart.round
    rows = compiled.project(
        apart.x, apart.w, (x.cs_q, x.cs_k, x.cs_v), x.ssm, x.state_tok, x.slots, x.pending
    )
    assert same_bits(compiled(*inputs.arguments()), k3_kda_verify(*replace(x, proj=rows).arguments()))
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, apart.mutable()[name]), name


def test_what_is_not_the_slots_stays_and_what_is_not_pending_is_not_read(run) -> None:
    inputs = make_inputs(shape_of(2, num_slots=4, layers=2), device=DEVICE)
    slot = int(inputs.round.slots[0])
    others = [other for other in range(4) if other != slot]
    inputs.round.pending.fill_(2)
    inputs.round.state_tok[:, :, 2:] = torch.nan
    for tensor in inputs.mutable().values():
        tensor[others] = torch.nan
    before = {name: tensor.clone() for name, tensor in inputs.mutable().items()}
    assert run(*inputs.arguments()).isfinite().all()
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor[others], before[name][others]), name
        assert not same_bits(tensor[slot], before[name][slot]), name
    assert same_bits(inputs.round.state_tok[slot, :, 1:], before["state_tok"][slot, :, 1:])


def test_a_padding_slot_gives_zeros_and_changes_nothing(run) -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    inputs.round.slots.fill_(-1)
    before = {name: tensor.clone() for name, tensor in inputs.mutable().items()}
    assert not run(*inputs.arguments()).any()
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, before[name]), name


def test_rows_of_a_wider_tensor_serve(run) -> None:
    inputs = make_inputs(shape_of(3), device=DEVICE)
    wide = torch.full((3, inputs.x.shape[1] + 64), torch.nan, dtype=inputs.x.dtype, device=DEVICE)
    wide[:, 32:-32] = inputs.x
    strided = replace(move(inputs, DEVICE), x=wide[:, 32:-32])
    want = run(*inputs.arguments())
    got = run(*strided.arguments())
    assert relative_error(got, want) < 5e-3
    assert got.isfinite().all()


def test_a_repeat_gives_the_same_bits(run) -> None:
    inputs = make_inputs(shape_of(4), device=DEVICE)
    first, second = move(inputs, DEVICE), move(inputs, DEVICE)
    assert same_bits(run(*first.arguments()), run(*second.arguments()))
    for name, tensor in first.mutable().items():
        assert same_bits(tensor, second.mutable()[name]), name


@pytest.mark.parametrize(
    ("hidden", "narrow"), [(96, False), (1056, True), pytest.param(7168, False, marks=pytest.mark.slow)]
)
def test_the_compiled_projection_rounds_the_exact_one(hidden: int, narrow: bool) -> None:
    """Keys that end inside the first turn of the loop, after a few, and K3's; bf16 and fp32 conv caches."""
    pytest.importorskip("cutlass")
    conv = torch.bfloat16 if narrow else torch.float32
    inputs = make_inputs(shape_of(8, hidden=hidden), device=DEVICE, conv_dtype=conv)
    x = inputs.round
    compiled = ATTN.implementation("cute").load()(attn_kernels())
    rows = compiled.project(
        inputs.x, inputs.w, (x.cs_q, x.cs_k, x.cs_v), x.ssm, x.state_tok, x.slots, x.pending
    )
    assert relative_error(rows, x.proj) <= 1e-4
    # Halfway cases, where a sum in fp32 may fall to the other side.
    assert (rows != x.proj).float().mean() <= 5e-3


@pytest.mark.parametrize(
    ("launch", "seed"), [("rows48", 0), *(pytest.param(x, 1, marks=pytest.mark.slow) for x in CONFIGS)]
)
def test_no_order_of_the_warps_changes_a_bit(launch: str, seed: int) -> None:
    """The interpreted projection under random schedules, CTAs of a cluster starting apart."""
    pytest.importorskip("cutlass")
    inputs = make_inputs(shape_of(2, hidden=544))
    lockstep, apart = move(inputs, "cpu"), move(inputs, "cpu")
    implementation = ATTN.implementation("cute").load()

    def launcher(config: ProjectionConfig) -> Emulated:
        return emulated(ATTN.kernels.compile, config).with_seed(seed, apart=True)

    config = CONFIGS[launch]
    want = implementation(EmulatedKernels(ATTN.kernels))(*lockstep.arguments(), config=config)
    got = implementation(SimpleNamespace(launcher=launcher))(*apart.arguments(), config=config)
    assert same_bits(got, want)


@pytest.mark.slow
def test_both_compiled_kernels_together_match_float64() -> None:
    """The projection and the verify round, both interpreted."""
    pytest.importorskip("cutlass")
    verify = VERIFY.implementation("cute").load()(EmulatedKernels(VERIFY.kernels))
    both = ATTN.implementation("cute").load()(EmulatedKernels(ATTN.kernels), verify)
    inputs = make_inputs(shape_of(8, heads=2))
    exact, want = exact_round(inputs)
    assert_close(inputs, both(*inputs.arguments()), exact, want, state=ATTN.tolerance.state)


def test_scratch_of_the_other_kernel_is_left_alone() -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    given = list(move(inputs, DEVICE).arguments())
    given[16:19] = [torch.full((4,), 7.0, device=DEVICE) for _ in range(3)]
    assert same_bits(k3_kda_attn(*given), k3_kda_attn(*inputs.arguments()))
    assert all(bool((x == 7.0).all()) for x in given[16:19])


def test_the_torch_op_runs_what_the_function_runs() -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    direct, by_op = move(inputs, DEVICE), move(inputs, DEVICE)
    want = k3_kda_attn(*direct.arguments())
    assert same_bits(torch.ops.trtllm.k3_kda_attn(*by_op.arguments()), want)
    assert same_bits(direct.round.ssm, by_op.round.ssm)
    torch.library.opcheck(
        torch.ops.trtllm.k3_kda_attn.default,
        move(inputs, DEVICE).arguments(),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: replace(x, x=x.x[0]), "shape of x"),
        (lambda x: replace(x, w=x.w[:, :100]), "shape of w"),
        (lambda x: replace(x, w=x.w.float()), "dtype of w"),
        (lambda x: replace(x, w=x.w[:100]), "k3_kda_attn: the columns of proj"),
        (lambda x: replace(x, x=x.x.repeat(9, 1)), "k3_kda_attn: the number of tokens"),
        (lambda x: replace(x, round=replace(x.round, slots=x.round.slots.repeat(2))), "number of slots"),
        (lambda x: replace(x, round=replace(x.round, slots=x.round.slots.long())), "dtype of slots"),
        (lambda x: replace(x, round=replace(x.round, num_spec=3)), "shape of cs_q"),
    ],
)
def test_what_the_op_does_not_define_is_refused_before_any_work(change, message: str) -> None:
    inputs = make_inputs(shape_of(2), device=DEVICE)
    before = {name: tensor.clone() for name, tensor in inputs.mutable().items()}
    with pytest.raises(ValueError, match=message):
        k3_kda_attn(*change(inputs).arguments())
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, before[name])


def test_compiled_kernels_leave_other_widths_and_unaligned_rows_to_triton() -> None:
    inputs = make_inputs(shape_of(2))

    def why(x: AttnInputs) -> str:
        caches = (x.round.cs_q, x.round.cs_k, x.round.cs_v)
        return why_not_compiled(x.x, x.w, (x.round.ssm, x.round.state_tok), caches)

    assert why(inputs) == ""
    assert "keys by 32" in why(replace(inputs, x=inputs.x[:, :850], w=inputs.w[:, :850]))
    assert "w is" in why(replace(inputs, w=inputs.w[:645]))
    assert "rows of x" in why(replace(inputs, x=inputs.x[:, 1:33], w=inputs.w[:, :32]))
    assert "w is not contiguous" in why(replace(inputs, w=inputs.w[:, :832], x=inputs.x[:, :832]))


@pytest.mark.parametrize("architecture", CUTE_ARCHITECTURES)
def test_the_projection_compiles_without_spills(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    for config in (CONFIGS["rows48"], CONFIGS["rows96"]):
        _, record = compile_kernel(ATTN, config, architecture, tmp_path)
        assert record.stack_bytes == 0, record
        # Two CTAs of 256 threads to an SM: 134 of them have to be resident on 132 SMs.
        assert 0 < record.registers <= 128, record


def test_the_launches_that_may_be_chosen_are_packed() -> None:
    packed = set(packed_configs())
    assert {ProjectionConfig(narrow_conv=a, pdl=b) for a in (False, True) for b in (False, True)} <= packed
    assert set(CONFIGS.values()) <= set(packed_configs(measurements=True))


def test_a_cluster_shares_its_rows_evenly() -> None:
    pytest.importorskip("cutlass")
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.cute import ProjectionKernel

    with pytest.raises(ValueError, match="rows40.*multiple of 16"):
        ProjectionKernel(ProjectionConfig(rows=40))
