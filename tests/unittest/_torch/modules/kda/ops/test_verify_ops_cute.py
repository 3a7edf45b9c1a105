# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels of the verify ops of the replay and intermediate schemes.

Without a GPU they are compiled for sm_90a and run on the CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    RoundInputs,
    as_float64,
    make_rows,
    move,
)
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES, OpEntry
from tensorrt_llm._torch.modules.kda.ops.selection import architecture_of
from tests.ptx import EmulatedKernels
from tests.unittest._torch.modules.kda.ops.harness import (
    DEVICE,
    TOLERANCE,
    output_error,
    relative_error,
    same_bits,
    shape_of,
    with_gate,
)

pytest.importorskip("cutlass")
if DEVICE == "cuda" and architecture_of(torch.device("cuda")) not in CUTE_ARCHITECTURES:
    pytest.skip("no CuTe DSL kernels for this GPU", allow_module_level=True)

# What takes long on the CPU.
thorough = pytest.mark.slow if DEVICE == "cpu" else pytest.mark.cuda
REPLAY, INTERMEDIATE = OPS["kda_mtp_decode"], OPS["kda_intermediate_verify"]
# T, and P of requests 0, 2 and 3; request 1 is padding.
ROUNDS = ((8, (7, 0, 3)), (2, (1, 6, 2)), (1, (4, 5, 7)), (4, (0, 1, 6)))
WINDOW = 3


def run_of(entry: OpEntry, seed: int | None = None, **config: Any) -> Callable[..., Tensor]:
    """The op's CuTe form under a configuration; `seed` is a schedule of warps on the CPU."""
    compiled = entry.implementation("cute").load()
    assert entry.kernels is not None
    kernels: Any = EmulatedKernels(entry.kernels, seed=seed)
    if DEVICE == "cuda":
        kernels = KernelCache(entry.kernels, None)
    run = compiled(kernels)
    return lambda *arguments: run(*arguments, config=compiled.kind(**config))


def poisoned_inputs(entry: OpEntry, tokens: int, counts: tuple[int, ...], **sizes: Any) -> RoundInputs:
    """Four requests, the second of them padding; NaN in all that the round does not read."""
    inputs = entry.make_inputs(shape_of(4, tokens, num_slots=6), seed=tokens, device=DEVICE, **sizes)
    inputs.slots[1] = -1
    named = inputs.slots[inputs.slots >= 0].tolist()
    if entry is INTERMEDIATE:
        counts = (0, 0, 0)
    for name, tensor in inputs.mutable().items():
        tensor[[slot for slot in range(6) if slot not in named]] = torch.nan
        for slot, count in zip(named, counts, strict=True):
            if name in inputs.DRAFTS:
                tensor[slot, count:] = torch.nan
            elif name != "ssm":
                tensor[slot, :, :count] = tensor[slot, :, count + WINDOW :] = torch.nan
    if "pending" in inputs.DRAFTS:
        inputs.pending.fill_(100)
        inputs.pending[named] = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    return inputs


def assert_round(run: Callable[..., Tensor], entry: OpEntry, inputs: RoundInputs, exact: RoundInputs) -> None:
    """What the round writes is close to float64, and what it does not write has the bits from before."""
    before, named = move(inputs, "cpu"), inputs.slots[inputs.slots >= 0].long().cpu()
    output, want = run(*inputs.arguments()), entry.reference(*exact.arguments())
    inputs = move(inputs, "cpu")
    tokens = inputs.proj.shape[0] // inputs.slots.shape[0]
    assert output_error(output, want) <= TOLERANCE.output
    assert not output[tokens : 2 * tokens].any()
    others = [slot for slot in range(inputs.ssm.shape[0]) if slot not in named.tolist()]
    for name, tensor in inputs.mutable().items():
        old, twin = before.mutable()[name], exact.mutable()[name]
        assert same_bits(tensor[others], old[others]), name
        if name == "ssm":
            assert relative_error(tensor[named], twin[named]) <= TOLERANCE.state
        elif name in inputs.DRAFTS:
            drafts = tokens - 1
            assert drafts == 0 or relative_error(tensor[named, :drafts], twin[named, :drafts]) <= 1e-5, name
            assert same_bits(tensor[named, drafts:], old[named, drafts:]), name
        else:
            columns = tokens + WINDOW - 1
            assert relative_error(tensor[named, :, :columns], twin[named, :, :columns]) == 0.0, name
            assert same_bits(tensor[named, :, columns:], old[named, :, columns:]), name


def assert_rounds(entry: OpEntry, **config: Any) -> None:
    run = run_of(entry, **config)
    for tokens, counts in ROUNDS:
        inputs = poisoned_inputs(entry, tokens, counts)
        exact = as_float64(inputs)
        if config.get("external_gate"):
            inputs = with_gate(inputs, exact)
        assert_round(run, entry, inputs, exact)


@pytest.mark.parametrize(("entry", "split"), [(REPLAY, 1), (REPLAY, 8), (INTERMEDIATE, 2)])
def test_rounds_match_float64_and_touch_nothing_else(entry: OpEntry, split: int) -> None:
    assert_rounds(entry, split=split)


@pytest.mark.parametrize(
    ("entry", "split"),
    [
        (REPLAY, 8),
        pytest.param(REPLAY, 1, marks=thorough),
        pytest.param(INTERMEDIATE, 2, marks=thorough),
        pytest.param(OPS["k3_kda_verify"], 2, marks=thorough),
        pytest.param(OPS["k3_kda_verify"], 8, marks=thorough),
    ],
)
def test_bf16_conv_caches_give_the_bits_of_fp32_ones(entry: OpEntry, split: int) -> None:
    """Raw inputs are bf16, so nothing is rounded; columns that are not written keep their bits."""
    tokens, counts = ROUNDS[3]
    wide = poisoned_inputs(entry, tokens, counts)
    narrow = poisoned_inputs(entry, tokens, counts, conv_dtype=torch.bfloat16)
    want = run_of(entry, split=split)(*wide.arguments())
    assert same_bits(run_of(entry, split=split, bf16_conv=True)(*narrow.arguments()), want)
    for name, tensor in narrow.mutable().items():
        assert same_bits(tensor.float(), wide.mutable()[name]), name


@thorough
@pytest.mark.parametrize("entry", [REPLAY, INTERMEDIATE], ids=lambda entry: entry.name)
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_rounds_of_every_split_and_both_gates(entry: OpEntry, split: int) -> None:
    for external_gate in (False, True):
        assert_rounds(entry, split=split, external_gate=external_gate, pdl=external_gate)


@thorough
@pytest.mark.parametrize("entry", [REPLAY, INTERMEDIATE], ids=lambda entry: entry.name)
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_no_schedule_of_warps_changes_a_bit(entry: OpEntry, split: int) -> None:
    """On a GPU: no repetition."""
    tokens, counts = ROUNDS[0]
    inputs = poisoned_inputs(entry, tokens, counts)
    first = move(inputs, DEVICE)
    want = run_of(entry, split=split)(*first.arguments())
    for seed in range(3):
        other = move(inputs, DEVICE)
        assert same_bits(run_of(entry, seed, split=split)(*other.arguments()), want)
        for name, tensor in other.mutable().items():
            assert same_bits(tensor, first.mutable()[name]), (seed, name)


@thorough
@pytest.mark.parametrize("split", [1, 8])
def test_reads_before_the_wait_give_the_same_bits(split: int) -> None:
    entry = OPS["k3_kda_verify"]
    for tokens, counts in ROUNDS[:2]:
        late, early = (poisoned_inputs(entry, tokens, counts) for _ in range(2))
        want = run_of(entry, split=split)(*late.arguments())
        assert same_bits(run_of(entry, split=split, early_reads=True)(*early.arguments()), want)
        for name, tensor in early.mutable().items():
            assert same_bits(tensor, late.mutable()[name]), name


def accept(inputs: RoundInputs, counts: list[int]) -> None:
    """Store counts, or bring state and window of whole states to the accepted draft."""
    if "pending" in inputs.DRAFTS:
        inputs.pending[inputs.slots.long()] = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
        return
    for slot, count in zip(inputs.slots.tolist(), counts, strict=True):
        if count:
            inputs.ssm[slot] = inputs.intermediate[slot, count - 1]
        for cache in (inputs.cs_q, inputs.cs_k, inputs.cs_v):
            cache[slot, :, :WINDOW] = cache[slot, :, count : count + WINDOW].clone()


@thorough
@pytest.mark.parametrize("entry", [REPLAY, INTERMEDIATE], ids=lambda entry: entry.name)
@pytest.mark.parametrize("split", [1, 8])
def test_chained_rounds_stay_close_to_float64(entry: OpEntry, split: int) -> None:
    generator = torch.Generator().manual_seed(1)
    run = run_of(entry, split=split, external_gate=True)
    inputs = entry.make_inputs(shape_of(3, 8), device=DEVICE)
    accept(inputs, [0, 0, 0])
    pools = as_float64(inputs).mutable()
    for index, tokens in enumerate((8, 8, 3, 8, 1, 6, 8, 2)):
        rows = make_rows(shape_of(3, tokens), generator).to(DEVICE)
        inputs = replace(inputs, proj=rows, g_ext=None)
        exact = replace(as_float64(inputs), **pools)
        want = entry.reference(*exact.arguments())
        output = run(*with_gate(inputs, exact).arguments())
        assert output_error(output, want) <= TOLERANCE.output
        counts = [(index + request) % tokens for request in range(3)]
        accept(inputs, counts)
        accept(exact, counts)
        used = exact.slots.long()
        assert relative_error(inputs.ssm.cpu()[used], exact.ssm[used]) <= TOLERANCE.chained
