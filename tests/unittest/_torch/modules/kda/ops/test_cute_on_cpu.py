# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of `k3_kda_verify` on the CPU: their PTX, interpreted, against float64."""

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    VerifyInputs,
    VerifyShape,
    as_float64,
    make_inputs,
    move,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import SPLITS, VerifyConfig
from tests.ptx import Emulated, EmulatedKernels, PtxError, emulated
from tests.unittest._torch.modules.kda.ops.harness import (
    TOLERANCE,
    VERIFY,
    Run,
    assert_close,
    output_error,
    relative_error,
    same_bits,
    shape_of,
    with_gate,
)

pytest.importorskip("cutlass")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="capturing launches takes gcc")

CACHES = ("cs_q", "cs_k", "cs_v")


def _run(config: VerifyConfig, seed: int | None = None, architecture: str = "sm_90a") -> Run:
    assert VERIFY.kernels is not None
    run = VERIFY.implementation("cute").load()(EmulatedKernels(VERIFY.kernels, architecture, seed))
    return lambda *arguments: run(*arguments, config=config)


def _mixed(tokens: int, heads: int = 2) -> VerifyInputs:
    """Strided pools, a padding row, slots nobody uses, counts 0, 3 and 7; NaN where nothing may be read."""
    inputs = make_inputs(shape_of(4, tokens, heads, num_slots=6, layers=3), seed=tokens)
    inputs.slots[1] = -1
    used = [0, 2, 3]
    inputs.pending.fill_(5)
    inputs.pending[inputs.slots[used].long()] = torch.tensor([0, 3, 7], dtype=torch.int32)
    for slot in range(6):
        count = int(inputs.pending[slot]) if slot in inputs.slots.tolist() else 0
        inputs.state_tok[slot, :, count:] = torch.nan
        for name in CACHES:
            getattr(inputs, name)[slot, :, count + 3 :] = torch.nan
            getattr(inputs, name)[slot, :, :count] = torch.inf
    return inputs


def _assert_round(run: Run, inputs: VerifyInputs, architecture: str = "sm_90a") -> None:
    """One round against its float64 twin; what the op does not write keeps its bits."""
    before, tokens = move(inputs, "cpu"), inputs.proj.shape[0] // inputs.slots.shape[0]
    exact = as_float64(inputs)
    want = VERIFY.reference(*exact.arguments())
    output = run(*inputs.arguments())
    assert output_error(output, want) <= TOLERANCE.output
    state = TOLERANCE.folded if inputs.g_ext is None else TOLERANCE.state
    for slot in range(inputs.ssm.shape[0]):
        used = slot in inputs.slots.tolist()
        written = tokens - 1 if used else 0
        columns = tokens + 2 if used else 0
        assert same_bits(inputs.state_tok[slot, :, written:], before.state_tok[slot, :, written:])
        if used:
            assert relative_error(inputs.ssm[slot], exact.ssm[slot]) <= state
            if written:
                records = inputs.state_tok[slot, :, :written]
                assert relative_error(records, exact.state_tok[slot, :, :written]) <= 10 * state
        else:
            assert same_bits(inputs.ssm[slot], before.ssm[slot])
        for name in CACHES:
            cache, old, twin = (getattr(x, name)[slot] for x in (inputs, before, exact))
            assert same_bits(cache[:, columns:], old[:, columns:]), name
            assert torch.equal(cache[:, :columns], twin[:, :columns].float()), name


@pytest.mark.parametrize("split", SPLITS)
def test_a_round_matches_float64_and_touches_nothing_else(split: int) -> None:
    for tokens in (1, 2, 8):
        _assert_round(_run(VerifyConfig(split=split)), _mixed(tokens))


@pytest.mark.parametrize("split", [2])
def test_an_external_gate_matches_float64(split: int) -> None:
    inputs = _mixed(8)
    inputs = with_gate(inputs, as_float64(inputs))
    _assert_round(_run(VerifyConfig(split=split, external_gate=True)), inputs)


def test_every_count_of_accepted_drafts_replays() -> None:
    inputs = make_inputs(shape_of(8, 4, heads=1))
    inputs.pending[inputs.slots.long()] = torch.arange(8, dtype=torch.int32)
    exact = as_float64(inputs)
    want = VERIFY.reference(*exact.arguments())
    output = _run(VerifyConfig(split=8))(*inputs.arguments())
    assert_close(inputs, output, exact, want, state=TOLERANCE.folded)


def test_a_token_by_token_kernel_matches_float64() -> None:
    _assert_round(_run(VerifyConfig(split=2, chunked=False)), _mixed(8))


@pytest.mark.parametrize("split", [1, 8])
def test_no_order_of_warps_changes_a_bit(split: int) -> None:
    inputs, launcher = (
        make_inputs(shape_of(1, 3, heads=1)),
        emulated(VERIFY.kernels.compile, VerifyConfig(split=split)),
    )
    want = _outputs(launcher, inputs)
    for seed in range(2):
        outputs = _outputs(launcher.with_seed(seed), inputs)
        assert all(same_bits(a, b) for a, b in zip(outputs, want, strict=True))


def _arguments(inputs: VerifyInputs) -> tuple[Any, ...]:
    """A launcher's, with pools of its own and an output of NaN."""
    x = move(inputs, "cpu")
    out = torch.full((x.proj.shape[0], x.a_log.shape[0], 128), torch.nan, dtype=torch.bfloat16)
    tokens = x.proj.shape[0] // x.slots.shape[0]
    return (*x.arguments()[:15], x.g_ext, out, tokens, x.lower_bound, x.scale, x.eps)


def _outputs(run: Callable[..., None], inputs: VerifyInputs) -> list[Tensor]:
    """Everything a launcher writes: the output, the conv caches, the states, the records."""
    arguments = _arguments(inputs)
    run(*arguments)
    return [arguments[16], *arguments[8:13]]


@pytest.mark.parametrize("removed", [r"bar\.sync\s+0;", r"cp\.async\.wait_group\s+0;"])
def test_a_missing_barrier_or_wait_is_found(removed: str) -> None:
    """The negative control of the orders: without the barrier or the wait, results change."""
    inputs = make_inputs(shape_of(1, 3, heads=1))
    launcher = emulated(VERIFY.kernels.compile, VerifyConfig(split=8))
    want = _outputs(launcher, inputs)
    assert re.search(removed, launcher.ptx)
    broken = launcher.with_ptx(re.sub(removed, "", launcher.ptx, count=1))
    outputs = _outputs(broken.with_seed(0), inputs)
    assert not all(same_bits(a, b) for a, b in zip(outputs, want, strict=True))


def test_a_slot_outside_the_pool_is_found() -> None:
    inputs = make_inputs(shape_of(2, 2))
    inputs.slots[0] = 7
    with pytest.raises(PtxError, match=r"line \d+: .*thread \d+ of CTA \(0, 0, 0\).*outside every tensor"):
        _run(VerifyConfig(split=1))(*inputs.arguments())


def _races(launcher: Emulated) -> list[str]:
    """Races of a round that replays three drafts, but the one that the last test here is about."""
    inputs = make_inputs(shape_of(2, 3, heads=1))
    inputs.pending.fill_(3)
    return [race for race in launcher.races(*_arguments(inputs)) if "uses an mbarrier" not in race]


@pytest.mark.parametrize("split", SPLITS)
def test_every_access_has_its_order(split: int) -> None:
    assert _races(emulated(VERIFY.kernels.compile, VerifyConfig(split=split))) == []


@pytest.mark.parametrize(
    "removed",
    [
        r"bar\.sync\s+0;",
        r"bar\.warp\.sync\s+-1;",
        r"cp\.async\.wait_group\s+1;",
        r"barrier\.cluster\.(arrive|wait);",
    ],
)
def test_a_race_is_found_without_a_barrier(removed: str) -> None:
    launcher = emulated(VERIFY.kernels.compile, VerifyConfig(split=8))
    assert re.search(removed, launcher.ptx)
    count = 2 if "cluster" in removed else 1
    assert _races(launcher.with_ptx(re.sub(removed, "", launcher.ptx, count=count)))


@pytest.mark.xfail(reason="the first st.async precedes the cluster's first wait", strict=True)
def test_peers_have_started_before_they_are_written() -> None:
    """CTAs of a cluster start together on hardware; PTX leaves it to the cluster's barrier."""
    launcher = emulated(VERIFY.kernels.compile, VerifyConfig(split=8))
    assert launcher.races(*_arguments(make_inputs(shape_of(1, 2, heads=1)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("external_gate", [False, True], ids=["folded", "gate"])
@pytest.mark.parametrize("split", SPLITS)
def test_every_launch_matches_float64(split: int, external_gate: bool, architecture: str) -> None:
    for late in (False, True):
        config = VerifyConfig(split=split, external_gate=external_gate, late_trigger=late)
        for tokens in range(1, 9):
            inputs = _mixed(tokens)
            if external_gate:
                inputs = with_gate(inputs, as_float64(inputs))
            _assert_round(_run(config, None if tokens % 2 else 1, architecture), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_larger_batches_match_float64(split: int) -> None:
    shape = VerifyShape(requests=9, tokens=8, heads=6)
    inputs = make_inputs(shape)
    exact = as_float64(inputs)
    want = VERIFY.reference(*exact.arguments())
    inputs = with_gate(inputs, exact)
    output = _run(VerifyConfig(split=split, external_gate=True))(*inputs.arguments())
    assert_close(inputs, output, exact, want, state=TOLERANCE.state)
