# SPDX-License-Identifier: Apache-2.0
"""`kda_prefill`: fla-core's kernels agree with float64, prompts keep apart and may be cut at 64.

Without a GPU fla-core's own kernels run in Triton's interpreter, on fp32 rows: it mishandles bf16 products.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.attention import KdaConfig, KimiDeltaAttention
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.kda_prefill.inputs import (
    PrefillInputs,
    PrefillShape,
    as_float64,
    make_inputs,
    move,
)
from tensorrt_llm._torch.modules.kda.ops.kda_prefill.op import kda_prefill, why_only_reference
from tensorrt_llm._torch.modules.metadata import ContextChunk, ForwardMetadata
from tests.unittest._torch.modules.kda.ops.harness import DEVICE, output_error, relative_error, same_bits

PREFILL = OPS["kda_prefill"]
# The interpreter multiplies in fp32; on a GPU operands of products are bf16.
FLA_DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
FLA_STATE = PREFILL.tolerance.state if DEVICE == "cuda" else 1e-5
FLA_OUTPUT = PREFILL.tolerance.output if DEVICE == "cuda" else 1e-5
CUT = PrefillShape(lengths=(1, 70, 2), positions=(64, 0, 128), heads=1)


class _Step(int):
    """A loop index that takes the casts of Triton's tensors, which the interpreter's own does not."""

    def to(self, dtype: object) -> int:
        return int(self)


@pytest.fixture
def run_fla(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """fla-core's implementation; in the interpreter with one configuration, since nothing can be timed."""
    pytest.importorskip("fla.ops.kda")
    if DEVICE == "cpu":
        from fla.ops.common import chunk_delta_h
        from fla.ops.kda import chunk_intra
        from triton.runtime.autotuner import Autotuner

        tuned = Autotuner.run

        def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.configs = self.configs[:1]
            return tuned(self, *args, **kwargs)

        monkeypatch.setattr(Autotuner, "run", run_first)
        monkeypatch.setattr(chunk_delta_h, "range", lambda n: map(_Step, range(n)), raising=False)
        monkeypatch.setattr(chunk_intra, "IS_GATHER_SUPPORTED", False)
    return PREFILL.implementation("fla").load()


def run_exact(inputs: PrefillInputs) -> tuple[Tensor, PrefillInputs]:
    exact = as_float64(inputs)
    return PREFILL.reference(*exact.arguments()), exact


@pytest.mark.parametrize("lower_bound", [-5.0, -8.0])
def test_fla_agrees_with_float64(run_fla, lower_bound: float) -> None:
    """Prompts begun and continued, with a bound that is safe for tensor cores and one that is not."""
    inputs = replace(make_inputs(CUT, device=DEVICE, dtype=FLA_DTYPE), lower_bound=lower_bound)
    want, exact = run_exact(inputs)
    got = run_fla(*inputs.arguments())
    assert got.dtype == FLA_DTYPE
    assert output_error(got, want) <= FLA_OUTPUT
    for slot in inputs.slots:
        assert relative_error(inputs.ssm[slot], exact.ssm[slot]) <= FLA_STATE
    assert relative_error(inputs.conv_pool, exact.conv_pool) == 0.0


def test_fla_takes_an_external_gate_and_a_strided_pool(run_fla) -> None:
    inputs = make_inputs(
        PrefillShape(lengths=(66,), positions=(64,), heads=2), device=DEVICE, dtype=FLA_DTYPE
    )
    layers = torch.stack((inputs.ssm, torch.full_like(inputs.ssm, torch.nan)), dim=1)
    gate = torch.randn(66, 256, generator=torch.Generator().manual_seed(3)).to(DEVICE, FLA_DTYPE)
    inputs = replace(inputs, ssm=layers[:, 0], g_ext=gate, scale=0.25)
    want, exact = run_exact(inputs)
    assert output_error(run_fla(*inputs.arguments()), want) <= FLA_OUTPUT
    (slot,) = inputs.slots
    assert relative_error(layers[slot, 0], exact.ssm[slot]) <= FLA_STATE
    assert layers[:, 1].isnan().all()


def test_the_layers_of_a_step_share_boundaries_and_the_gate_is_safe_from_minus_five(
    run_fla, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fla-core finds the chunks of prompts again by the identity of what it was given."""
    from tensorrt_llm._torch.modules.kda.ops.kda_prefill import fla

    calls: list[dict[str, Any]] = []

    def chunk_kda(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        calls.append(keywords | {"q": q})
        return torch.zeros_like(v), keywords["initial_state"]

    monkeypatch.setattr(fla, "chunk_kda", chunk_kda)
    for lower_bound in (-5.0, -6.0):
        inputs = replace(make_inputs(CUT, device=DEVICE, dtype=FLA_DTYPE), lower_bound=lower_bound)
        run_fla(*inputs.arguments())
    first, second = calls
    assert first["q"].shape == (1, 73, 1, 128) and first["g"].shape == (1, 73, 1, 128)
    assert first["beta"].shape == (1, 73, 1)
    assert first["cu_seqlens"] is second["cu_seqlens"] and first["cu_seqlens"].tolist() == [0, 1, 71, 73]
    assert first["cu_seqlens_cpu"] is second["cu_seqlens_cpu"]
    assert (first["safe_gate"], second["safe_gate"]) == (True, False)
    assert first["initial_state"].shape == (3, 1, 128, 128)
    assert not first["initial_state"][1].any() and first["initial_state"][[0, 2]].all(dim=(1, 2)).any()


@pytest.fixture(params=["torch", "fla"])
def run(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    if request.param == "fla":
        return request.getfixturevalue("run_fla")
    return PREFILL.implementation("torch").load()


def test_a_prompt_has_the_bits_of_one_alone_and_uncut(run) -> None:
    """Whole beside another, against alone in two pieces cut at 64."""
    both = make_inputs(PrefillShape(lengths=(72, 3), heads=1), device=DEVICE, dtype=FLA_DTYPE)
    cut = move(both, DEVICE)
    slot = both.slots[0]
    together = run(*both.arguments())
    pieces = [
        run(*replace(cut, proj=rows, slots=[slot], lengths=[rows.shape[0]], positions=[position]).arguments())
        for rows, position in ((cut.proj[:64], 0), (cut.proj[64:72], 64))
    ]
    assert same_bits(torch.cat(pieces), together[:72])
    assert same_bits(cut.ssm[slot], both.ssm[slot])
    assert same_bits(cut.conv_pool[slot], both.conv_pool[slot])


def test_what_a_slot_held_is_not_read_at_a_start_and_others_stay(run) -> None:
    inputs = make_inputs(PrefillShape(lengths=(5,), heads=1), device=DEVICE, dtype=FLA_DTYPE)
    poisoned = move(inputs, DEVICE)
    (slot,) = inputs.slots
    poisoned.ssm[slot] = torch.nan
    poisoned.conv_pool[slot] = torch.nan
    before = move(poisoned, DEVICE)
    assert same_bits(run(*poisoned.arguments()), run(*inputs.arguments()))
    for name, tensor in poisoned.mutable().items():
        assert same_bits(tensor[slot], getattr(inputs, name)[slot]), name
        assert same_bits(tensor[1 - slot], getattr(before, name)[1 - slot]), name


def test_the_op_runs_what_is_selected_and_writes_its_pools() -> None:
    inputs = make_inputs(CUT, device=DEVICE)
    want, exact = run_exact(inputs)
    got = torch.ops.trtllm.kda_prefill(*inputs.arguments())
    assert output_error(got, want) <= PREFILL.tolerance.output
    assert relative_error(inputs.ssm, exact.ssm) <= PREFILL.tolerance.state


def test_a_layer_with_kernel_taps_runs_the_op_over_all_chunks_of_a_step() -> None:
    """One call for two prompts, one begun and one continued, gives what the layer's own form gives each."""
    torch.manual_seed(0)
    config = KdaConfig(num_heads=2, head_dim=32, conv_width=4, full_rank_gate=True, lower_bound=-5.0)
    layer = KimiDeltaAttention(config, hidden_size=64, eps=1e-5, dtype=torch.float32).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    pages = torch.zeros(0, dtype=torch.int64)
    chunks = tuple(
        ContextChunk(
            request_id=slot, row_start=row, num_tokens=tokens, position_start=position, slot=slot, pages=pages
        )
        for slot, row, tokens, position in ((2, 0, 70, 64), (0, 70, 10, 0))
    )
    metadata = ForwardMetadata(contexts=chunks, groups=(), num_tokens=80)
    x, conv, temporal = torch.randn(80, 64), torch.randn(3, 192, 3), torch.randn(3, 2, 32, 32)
    results = []
    for taps in (None, tuple(part.T.contiguous() for part in layer.conv.chunk(3, dim=1))):
        cache = SimpleNamespace(conv=conv.clone(), temporal=temporal.clone())
        layer._prepared = replace(layer.weights(), kernel_taps=taps)
        results.append((layer(x, metadata, cache), cache.conv, cache.temporal))
    for plain, together in zip(*results, strict=True):
        assert relative_error(together, plain) < 1e-6
    assert same_bits(results[1][1][1], conv[1]) and same_bits(results[1][2][1], temporal[1])


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", PREFILL.shapes, ids=lambda shape: f"{shape.lengths}-{shape.heads}")
def test_fla_agrees_with_float64_at_every_shape(run_fla, shape: PrefillShape) -> None:
    inputs = make_inputs(shape, device="cuda")
    want, exact = run_exact(inputs)
    assert output_error(run_fla(*inputs.arguments()), want) <= FLA_OUTPUT
    assert relative_error(inputs.ssm, exact.ssm) <= FLA_STATE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [0, 1]}, "number of slots"),
        ({"lengths": [1, 0, 72]}, "at least one token"),
        ({"slots": [0, 1, 1]}, "distinct"),
        ({"slots": [0, 1, 4]}, r"in 0 \.\. 3"),
        ({"lengths": [1, 1, 1]}, "proj"),
        ({"g_ext": torch.zeros(73, 1)}, "g_ext"),
        ({"conv_pool": torch.zeros(4, 384, 4)}, "conv_pool"),
    ],
)
def test_malformed_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"kda_prefill: .*{message}"):
        kda_prefill(*replace(make_inputs(CUT), **change).arguments())


def test_what_fla_does_not_serve_is_named() -> None:
    inputs = make_inputs(CUT)
    assert why_only_reference(inputs.proj, inputs.onorm_w, inputs.w_q) == ""
    assert "float32" in why_only_reference(inputs.proj.float(), inputs.onorm_w, inputs.w_q)
    assert "conv width 5" in why_only_reference(inputs.proj, inputs.onorm_w, torch.zeros(128, 5))
