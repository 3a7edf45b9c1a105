# SPDX-License-Identifier: Apache-2.0
"""The PTX interpreter on texts of its own: rounding, divergence, bounds, deadlocks."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx import alu
from tests.ptx.capture import Launch
from tests.ptx.launch import run_launch
from tests.ptx.memory import GlobalMemory
from tests.ptx.parse import PtxError, parse
from tests.ptx.program import Program

F32 = np.float32


def _run(body: str, out: torch.Tensor, threads: int = 32) -> None:
    """Runs a body whose %rd1 is the address of `out` plus four bytes per thread, and %r1 the thread."""
    text = f"""
.visible .entry kernel(.param .u64 kernel_param_0) .reqntid {threads}, 1, 1 {{
    .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
    .shared .align 4 .b8 words[128];
    mov.u32 %r1, %tid.x;
    ld.param.b64 %rd1, [kernel_param_0];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    {body}
    ret;
}}"""
    pointer = out.data_ptr().to_bytes(8, "little")
    launch = Launch("kernel", (1, 1, 1), (threads, 1, 1), (1, 1, 1), 0, (pointer,))
    run_launch(Program(parse(text)["kernel"]), launch, GlobalMemory([out]))


def _words(threads: int = 32) -> torch.Tensor:
    return torch.zeros(threads, dtype=torch.int32)


def test_fma_rounds_the_exact_sum_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (F32(rng.standard_normal(4000)) for _ in range(2))
    c = F32(-a.astype(np.float64) * b)
    # A product that ends in a tie, which the addend's last bits decide.
    a[0], b[0], c[0] = F32(1 + 2**-12), F32(1 + 2**-12), F32(2.0**-60)
    result = alu.fma_f32(a, b, c)
    for x, y, z, got in zip(a, b, c, result, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [got, np.nextafter(got, F32(np.inf)), np.nextafter(got, F32(-np.inf))]
        errors = [abs(Fraction(float(n)) - exact) for n in near]
        assert errors[0] == min(errors)
    assert result[0] == F32(1 + 2**-11 + 2**-23)


def test_conversions_round_as_ptx_says() -> None:
    values = F32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2.0**-133, np.inf])
    assert torch.equal(
        torch.from_numpy(alu.bf16_to_f32(alu.f32_to_bf16(values))),
        torch.from_numpy(values).bfloat16().float(),
    )
    ties = F32([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11])
    away = F32([1 + 2**-10, 1 + 2 * 2**-10, -1 - 2**-10])
    assert np.array_equal(alu.f32_to_tf32(ties).view(F32), away)


def test_lanes_of_a_branch_meet_again() -> None:
    out = _words()
    _run(
        """
    mov.b32 %r2, 0;
    mov.b32 %r3, 0;
LOOP:
    setp.ge.s32 %p1, %r2, %r1;
    @%p1 bra DONE;
    add.s32 %r3, %r3, %r2;
    add.s32 %r2, %r2, 1;
    bra LOOP;
DONE:
    shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
    st.global.b32 [%rd1], %r4;""",
        out,
    )
    assert out.tolist() == [(i ^ 1) * ((i ^ 1) - 1) // 2 for i in range(32)]


def test_scoped_registers_and_guards() -> None:
    out = _words()
    _run(
        """
    { .reg .pred p; setp.lt.u32 p, %r1, 7; selp.b32 %r2, 1, 2, p; @!p st.global.b32 [%rd1], %r2; }""",
        out,
    )
    assert out.tolist() == [0] * 7 + [2] * 25


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd1+4], %r1;", "thread 31 of CTA .*global access of 4 bytes outside every tensor"),
        ("st.global.b32 [%rd1+2], %r1;", "misaligned"),
        ("st.shared.b32 [words+128], %r1;", "shared access of 4 bytes outside its 128 bytes"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 bra A; bar.warp.sync -1; A:", "deadlock: .* the rest of its warp"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 bra A; bar.sync 1, 64; A:", "deadlock: .* waits for"),
        ("frobnicate.b32 %r1, %r2;", "does not know 'frobnicate.b32 %r1, %r2'"),
        ("ld.shared.b32 %r2, [%r1+words];", "line 9: unknown operand"),
    ],
)
def test_what_a_kernel_must_not_do_is_named(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        _run(body, _words())
