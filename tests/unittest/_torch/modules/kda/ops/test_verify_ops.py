# SPDX-License-Identifier: Apache-2.0
"""The verify ops of the three schemes against float64, the schemes' torch rounds and each other."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda import ops
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import RoundInputs, as_float64, move
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.triton_round import k3_kda_verify_one_launch
from tensorrt_llm._torch.modules.kda.ops.registry import OpEntry
from tensorrt_llm._torch.modules.kda.recurrence import KdaWeights
from tensorrt_llm._torch.modules.kda.verify_scheme import SCHEMES, KdaGeometry, KdaRows
from tests.unittest._torch.kimi_small import make_layer_cache
from tests.unittest._torch.modules.kda.ops.harness import (
    DEVICE,
    OUTPUT_TOLERANCE,
    TOLERANCE,
    assert_close,
    output_error,
    relative_error,
    same_bits,
    shape_of,
    with_gate,
)

OF_SCHEME = {
    "records": "k3_kda_verify",
    "replay": "kda_mtp_decode",
    "intermediate": "kda_intermediate_verify",
}
BUFFERS = {"state_tok": "kda_state_tok", "intermediate": "intermediate_ssm"}
TOKENS = (1, 2, 8) if DEVICE == "cpu" else (1, 2, 3, 4, 5, 6, 7, 8)


def _runs(name: str) -> dict[str, Callable[..., Tensor]]:
    """What can run here of an op, but CuTe DSL kernels; of `k3_kda_verify` the launch of its own too."""
    found = {x.name: x.load() for x in OPS[name].implementations if x.name in ("torch", "triton")}
    return found | ({"one_launch": k3_kda_verify_one_launch} if name == "k3_kda_verify" else {})


# `test_k3_kda_verify.py` has the others of this op.
_PARAMETERS = [pytest.param((OPS["k3_kda_verify"], k3_kda_verify_one_launch), id="k3_kda_verify-one_launch")]
_PARAMETERS += [
    pytest.param((OPS[name], run), id=f"{name}-{kind}")
    for name in ("kda_mtp_decode", "kda_intermediate_verify")
    for kind, run in _runs(name).items()
]


@pytest.fixture(params=_PARAMETERS)
def op(request: pytest.FixtureRequest) -> tuple[OpEntry, Callable[..., Tensor]]:
    return request.param


def _with_pending(inputs: RoundInputs, count: int) -> RoundInputs:
    if "pending" in inputs.DRAFTS:
        inputs.pending.fill_(count)
    return inputs


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_round_matches_float64(op, tokens: int) -> None:
    entry, run = op
    inputs = entry.make_inputs(shape_of(2, tokens), seed=tokens, device=DEVICE)
    exact = as_float64(inputs)
    inputs = with_gate(inputs, exact)
    want = entry.reference(*exact.arguments())
    assert_close(inputs, run(*inputs.arguments()), exact, want, state=TOLERANCE.state)


def test_the_folded_gate_matches_float64(op) -> None:
    entry, run = op
    inputs = entry.make_inputs(shape_of(1, 8), device=DEVICE)
    exact = as_float64(inputs)
    want = entry.reference(*exact.arguments())
    assert output_error(run(*inputs.arguments()), want) <= OUTPUT_TOLERANCE
    assert relative_error(inputs.ssm, exact.ssm) <= TOLERANCE.folded


def test_other_slots_and_padding_rows_and_unread_drafts_stay(op) -> None:
    """NaN in every draft that is not pending, and in what belongs to others, changes nothing and stays."""
    entry, run = op
    inputs = _with_pending(entry.make_inputs(shape_of(2, 2, num_slots=3), device=DEVICE), 0)
    inputs.slots[0] = -1
    used = int(inputs.slots[1])
    others = [slot for slot in range(3) if slot != used]
    clean = move(inputs, DEVICE)
    for name, tensor in inputs.mutable().items():
        tensor[others] = torch.nan
        if name in inputs.DRAFTS:
            tensor[used] = torch.nan
        elif name != "ssm":
            tensor[used, :, 3:] = torch.nan
    before = move(inputs, DEVICE)
    output = run(*inputs.arguments())
    assert same_bits(output, run(*clean.arguments()))
    assert not output[:2].any()
    assert output[2:].any()
    for name, tensor in inputs.mutable().items():
        old, new = before.mutable()[name], clean.mutable()[name]
        assert same_bits(tensor[others], old[others]), name
        if name in inputs.DRAFTS:
            # The axis of drafts is the second one of records, the first of the others.
            now, was, wanted = (x[used].movedim(int(name == "state_tok"), 0) for x in (tensor, old, new))
            assert same_bits(now[:1], wanted[:1]), name
            assert same_bits(now[1:], was[1:]), name
        elif name == "ssm":
            assert same_bits(tensor[used], new[used])
        else:
            assert same_bits(tensor[used, :, :4], new[used, :, :4]), name
            assert same_bits(tensor[used, :, 4:], old[used, :, 4:]), name


def test_pending_drafts_are_clamped_and_read_up_to_their_count() -> None:
    entry = OPS["kda_mtp_decode"]
    inputs = entry.make_inputs(shape_of(1, 2), device=DEVICE)
    for run in _runs("kda_mtp_decode").values():
        wild, tame = (_with_pending(move(inputs, DEVICE), count) for count in (100, 7))
        assert same_bits(run(*wild.arguments()), run(*tame.arguments()))
        some, poisoned = (_with_pending(move(inputs, DEVICE), 3) for _ in range(2))
        for name in ("qkg_cache", "v_cache", "beta_cache"):
            getattr(poisoned, name)[:, 3:] = torch.nan
        assert same_bits(run(*some.arguments()), run(*poisoned.arguments()))
        assert same_bits(some.ssm, poisoned.ssm)
        assert not same_bits(some.ssm, tame.ssm)


@pytest.mark.parametrize("scheme", OF_SCHEME, ids=str)
def test_the_reference_equals_the_scheme_s_torch_round(scheme: str) -> None:
    """Bit for bit, in fp32: outputs, states, windows and drafts, counts differing by slot."""
    entry = OPS[OF_SCHEME[scheme]]
    inputs = entry.make_inputs(shape_of(3, 5), dtype=torch.float32)
    D, K, H = 256, 128, 2
    cache = make_layer_cache(
        KdaGeometry(num_heads=H, head_dim=K, conv_width=4, num_spec=7), SCHEMES[scheme], 4
    )
    cache.temporal.copy_(inputs.ssm)
    if scheme != "intermediate":
        cache.prev_num_accepted_tokens.copy_(inputs.pending)
    named = {"cs_q": "kda_conv_q", "cs_k": "kda_conv_k", "cs_v": "kda_conv_v", "ssm": "temporal"} | BUFFERS
    buffers = {name: getattr(cache, named.get(name, f"kda_{name}")) for name in inputs.mutable()}
    for name, buffer in buffers.items():
        buffer.copy_(inputs.mutable()[name])
    qkv, gate, f_a, b = inputs.proj[:, : 4 * D + K + H].split((3 * D, D, K, H), dim=1)
    f = f_a @ inputs.w_fb.T
    weights = KdaWeights(
        num_heads=H, head_dim=K, conv=torch.cat((inputs.w_q, inputs.w_k, inputs.w_v)).T.contiguous(),
        f_b=inputs.w_fb, a_log=inputs.a_log, dt_bias=inputs.dt_bias, norm=inputs.onorm_w,
        lower_bound=inputs.lower_bound, norm_eps=inputs.eps,
    )  # fmt: skip
    rows = KdaRows(proj=inputs.proj, qkv=qkv, gate=gate, f=f, b=b)
    by_op, other = replace(weights, kernel_taps=(inputs.w_q, inputs.w_k, inputs.w_v)), deepcopy(cache)
    want = SCHEMES[scheme].verify(rows, weights, cache, inputs.slots, 5)
    # The op forms f_b itself, request by request.
    assert relative_error(SCHEMES[scheme].verify(rows, by_op, other, inputs.slots, 5), want) < 1e-5
    assert relative_error(other.temporal, cache.temporal) < 1e-5
    assert same_bits(entry.reference(*replace(inputs, g_ext=f).arguments()), want)
    for name, tensor in inputs.mutable().items():
        assert same_bits(tensor, buffers[name]), name


@pytest.mark.parametrize("name", OF_SCHEME.values())
def test_bf16_conv_caches_give_the_bits_of_fp32_ones(name: str) -> None:
    entry = OPS[name]
    for kind, run in _runs(name).items():
        wide = entry.make_inputs(shape_of(1, 2), device=DEVICE)
        narrow = entry.make_inputs(shape_of(1, 2), device=DEVICE, conv_dtype=torch.bfloat16)
        assert same_bits(run(*narrow.arguments()), run(*wide.arguments()))
        assert narrow.cs_k.dtype == torch.bfloat16
        for part, tensor in narrow.mutable().items():
            assert same_bits(tensor.float(), wide.mutable()[part]), (kind, part)


@pytest.mark.parametrize("name", ["kda_mtp_decode", "kda_intermediate_verify"])
def test_the_torch_op_runs_what_the_function_runs(name: str) -> None:
    inputs = OPS[name].make_inputs(shape_of(2, 2), device=DEVICE)
    direct, by_op = move(inputs, DEVICE), move(inputs, DEVICE)
    want = getattr(ops, name)(*direct.arguments())
    registered = getattr(torch.ops.trtllm, name)
    assert same_bits(registered(*by_op.arguments()), want)
    for part, tensor in direct.mutable().items():
        assert same_bits(tensor, by_op.mutable()[part]), part
        assert not same_bits(tensor, inputs.mutable()[part]), part
    torch.library.opcheck(
        registered.default,
        move(inputs, DEVICE).arguments(),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kda_mtp_decode", lambda x: {"qkg_cache": x.qkg_cache[:, :, :2]}, "shape of qkg_cache"),
        ("kda_mtp_decode", lambda x: {"v_cache": x.v_cache[:, :3]}, "shape of v_cache"),
        ("kda_mtp_decode", lambda x: {"beta_cache": x.beta_cache[..., :1]}, "shape of beta_cache"),
        ("kda_mtp_decode", lambda x: {"pending": x.pending.long()}, "dtype of pending"),
        ("kda_intermediate_verify", lambda x: {"intermediate": x.intermediate[0]}, "shape of intermediate"),
        ("kda_intermediate_verify", lambda x: {"intermediate": x.intermediate.mT}, "strides of intermediate"),
        ("kda_intermediate_verify", lambda x: {"cs_v": x.cs_v.half()}, "dtype of cs_q, cs_k, cs_v"),
        ("k3_kda_verify", lambda x: {"cs_v": x.cs_v.bfloat16()}, "dtype of cs_q, cs_k, cs_v"),
    ],
)
def test_what_an_op_does_not_define_is_refused_in_its_name(name: str, change, message: str) -> None:
    inputs = OPS[name].make_inputs(shape_of(2, 2))
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        getattr(ops, name)(*replace(inputs, **change(inputs)).arguments())
