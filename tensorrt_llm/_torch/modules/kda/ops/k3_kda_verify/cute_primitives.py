# SPDX-License-Identifier: Apache-2.0
"""Device helpers of kernels: single instructions with their rounding spelled out, vectors, barriers."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LOG2E = math.log2(math.e)
# The mantissa bits that TF32 keeps.
TF32_MASK = -8192


def fma(a: Any, b: Any, c: Any) -> Any:
    """fma.rn, written out: replay is defined bit for bit."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def mul(a: Any, b: Any) -> Any:
    """mul.rn: never contracted."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def mma_tf32(acc: Any, a: Any, b: Any) -> Any:
    """acc + a b for m16n8k8: a four, b two 32-bit words, acc four floats."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *acc],
    )


def mma_bf16(acc: Any, a: Any, b: Any) -> Any:
    """acc + a b for m16n8k16, bf16 pairs in 32-bit words."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *acc],
    )


def load_words(pointer: Any) -> Any:
    """Four 32-bit words from a 16-byte aligned global address."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer],
    )


def store_words(pointer: Any, words: Any) -> None:
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *words]
    )


def store_vector(target: Any, index: Any, values: list[Any]) -> None:
    """Four floats to column `index` of a (4, n) tensor, as one 16-byte store."""
    vector = cute.make_rmem_tensor((4,), Float32)
    for e in range(4):
        vector[e] = values[e]
    target[None, index].store(vector.load())


def load_float(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_float(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_bf16(address: Any) -> Any:
    word = cute.arch.inline_ptx(
        "ld.global.u16 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )
    return (word << Int32(16)).bitcast(Float32)


def store_bf16(address: Any, value: Any) -> None:
    """The upper half of a float that bf16 holds exactly."""
    word = value.bitcast(Int32) >> Int32(16)
    cute.arch.inline_ptx("st.global.u16 [{$r0}], {$r1};", read_only_args=[address, word])


def prefetch_line(pointer: Any) -> None:
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer])


def copy_16_bytes(target: Any, source: Any) -> None:
    """cp.async of one vector, in the open group."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])


def split_tf32(x: Any) -> Any:
    """The words of hi and lo, x = hi + lo, hi exact in TF32."""
    hi = x.bitcast(Int32) & Int32(TF32_MASK)
    return hi, (x - hi.bitcast(Float32)).bitcast(Int32)


def select(condition: Any, yes: Any, no: Any) -> Any:
    return Float32(cutlass.select_(condition, yes, no))


def round_tf32(x: Any) -> Any:
    return Int32(cute.arch.cvt_f32_tf32(x)).bitcast(Float32)


def zeros() -> list[Any]:
    return [Float32(0.0) for _ in range(4)]


def sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2E), fastmath=True))


def exp(x: Any) -> Any:
    return cute.math.exp2(x * Float32(LOG2E), fastmath=True)


def rsqrt(x: Any) -> Any:
    return cute.math.rsqrt(x, fastmath=True)


def bf16_words_to_floats(words: Any) -> list[Any]:
    """Eight floats of four words of bf16 pairs."""
    floats = []
    for word in words:
        floats.append((word << Int32(16)).bitcast(Float32))
        floats.append((word & Int32(-65536)).bitcast(Float32))
    return floats


def floats_to_bf16_words(values: list[Any]) -> list[Any]:
    return [
        cute.arch.inline_ptx(
            "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
            write_only_types=[Int32],
            read_only_args=[values[i], values[i + 1]],
        )
        for i in range(0, len(values), 2)
    ]


@cute.jit
def wait_for_peers(mbar: cute.Pointer) -> None:
    """Phase 0 of an mbarrier with acquire at cluster scope: peers wrote the data."""
    done = Int32(0)
    while done == 0:
        done = cute.arch.inline_ptx(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], {$r1}; "
            "selp.b32 {$w0}, 1, 0, p; }",
            write_only_types=[Int32],
            read_only_args=[mbar, Int32(0)],
        )
