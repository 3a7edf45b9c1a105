# SPDX-License-Identifier: Apache-2.0
"""What arithmetic instructions compute, on arrays of lanes. Registers hold bits; types are views of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

F32, F64, U32, U64, I64 = np.float32, np.float64, np.uint32, np.uint64, np.int64

# PTX type to numpy. bf16 registers are uint16 and are widened by what uses them.
DTYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": U32, "u32": U32, "s32": np.int32, "b64": U64, "u64": U64, "s64": I64, "f16": np.float16,
    "f32": F32, "f64": F64, "pred": np.bool_, "bf16": np.uint16, "bf16x2": U32, "f16x2": U32, "tf32": U32,
    "f32x2": U64,
}  # fmt: skip
BITS: dict[str, Any] = {"pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": U32, "b64": U64}
WIDTH = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(values: Array) -> Array:
    """Round to nearest even; NaN stays NaN."""
    bits = values.view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def f32_to_bf16_toward_zero(values: Array) -> Array:
    kept = (values.view(U32) >> U32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), kept)


def f32_to_tf32(values: Array) -> Array:
    """Round to nearest, ties away from zero, as bits."""
    bits = values.view(U32)
    rounded = (bits + U32(0x1000)) & U32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, bits & U32(0xFFFFE000) | np.isnan(values) * U32(0x400000))


def flush(values: Array) -> Array:
    """Subnormal numbers to zeros of their sign."""
    return np.where(np.abs(values) < F32(2.0**-126), np.copysign(F32(0), values), values)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """Rounded once. The product is exact in double; the sum is rounded to odd where that can matter."""
    product, addend = a.astype(F64) * b, c.astype(F64)
    total = product + addend
    bits = total.view(I64)
    tie = (bits & 0x1FFFFFFF) == 0x10000000
    tie |= np.abs(total) < 2.0**-125
    if tie.any():
        back = total - product
        error = (product - (total - back)) + (addend - back)
        odd = tie & (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
        step = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(odd & (total != 0), bits + step, bits).view(F64)
    return total.astype(F32)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """Rounded once, through long double: close, and exact unless the 64-bit sum lands on a tie."""
    return (a.astype(np.longdouble) * b + c).astype(F64)


def _double(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A float32 function evaluated in double."""
    return lambda x: function(x.astype(F64)).astype(F32)


def _popcount(x: Array) -> Array:
    return np.bitwise_count(x).astype(U32)


def _leading_zeros(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    shift = bits // 2
    x, count = x.copy(), np.full(x.shape, bits, dtype=U32)
    while shift:
        high = x >> x.dtype.type(shift)
        set_ = high != 0
        count = np.where(set_, count - U32(shift), count)
        x = np.where(set_, high, x)
        shift //= 2
    return count - x.astype(U32)


def _reverse_bits(x: Array) -> Array:
    bits, result = x.dtype.itemsize * 8, np.zeros_like(x)
    one = x.dtype.type(1)
    for index in range(bits):
        result |= ((x >> x.dtype.type(index)) & one) << x.dtype.type(bits - 1 - index)
    return result


def _maximum(a: Array, b: Array) -> Array:
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def _minimum(a: Array, b: Array) -> Array:
    return np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def _quotient(a: Array, b: Array) -> Array:
    """C division: toward zero."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, a.dtype.type(1), b)
    floor = a // safe
    return floor + ((floor < 0) & (floor * safe != a)).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return a - _quotient(a, b) * b


def _high(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    if a.dtype.itemsize <= 4:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)
    product = a.astype(object) * b.astype(object)
    mask = (1 << 64) - 1
    return np.array([(int(p) >> 64) & mask for p in product], dtype=U64).view(a.dtype)


def _shift(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Counts are unsigned 32 bit and clamped to the width, where numpy gives what PTX defines."""

    def shift(a: Array, count: Array) -> Array:
        count = np.minimum(count.view(U32), U32(8 * a.dtype.itemsize))
        return function(a, count.astype(a.dtype))

    return shift


UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative, "abs": np.abs, "not": np.invert, "popc": _popcount, "clz": _leading_zeros,
    "brev": _reverse_bits, "sqrt": _double(np.sqrt), "rcp": _double(np.reciprocal), "ex2": _double(np.exp2),
    "lg2": _double(np.log2), "rsqrt": _double(lambda x: 1 / np.sqrt(x)), "sin": _double(np.sin),
    "cos": _double(np.cos), "tanh": _double(np.tanh), "cnot": lambda x: (x == 0).astype(x.dtype),
}  # fmt: skip

UNARY_F64: dict[str, Callable[[Array], Array]] = {
    "sqrt": np.sqrt, "rcp": np.reciprocal, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip

BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "min": _minimum, "max": _maximum, "div": _quotient, "rem": _remainder,
    "shl": _shift(np.left_shift), "shr": _shift(np.right_shift), "mul.hi": _high,
    "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": lambda a, b: (a != b) & ~_unordered(a, b), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal, "equ": lambda a, b: (a == b) | _unordered(a, b), "neu": np.not_equal,
    "ltu": lambda a, b: (a < b) | _unordered(a, b), "leu": lambda a, b: (a <= b) | _unordered(a, b),
    "gtu": lambda a, b: (a > b) | _unordered(a, b), "geu": lambda a, b: (a >= b) | _unordered(a, b),
    "num": lambda a, b: ~_unordered(a, b), "nan": lambda a, b: _unordered(a, b),
}  # fmt: skip


def _unordered(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.zeros(a.shape, dtype=np.bool_)
    return np.isnan(a) | np.isnan(b)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [x if index >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt in its default mode."""
    source = (b.astype(U64) << U64(32)) | a
    result = np.zeros_like(a)
    for index in range(4):
        nibble = (selector >> U32(4 * index)) & U32(15)
        byte = ((source >> ((nibble & U32(7)).astype(U64) * U64(8))) & U64(255)).astype(U32)
        sign = np.where(byte & U32(128), U32(255), U32(0))
        result |= np.where(nibble & U32(8), sign, byte) << U32(8 * index)
    return result


def funnel(low: Array, high: Array, count: Array, left: bool, wrap: bool) -> Array:
    """shf of the 64-bit value high:low."""
    amount = (count & U32(31) if wrap else np.minimum(count, U32(32))).astype(U64)
    value = (high.astype(U64) << U64(32)) | low
    shifted = (value << amount) >> U64(32) if left else value >> amount
    return shifted.astype(U32)


def extract_bits(a: Array, position: Array, length: Array) -> Array:
    """bfe."""
    bits = 8 * a.dtype.itemsize
    unsigned = a.view(U32 if bits == 32 else U64)
    kind = unsigned.dtype.type
    start, size = (x.view(U32) & U32(255) for x in (position, length))
    field = _SHR(unsigned, start)
    kept = field & ~_ones_above(unsigned, size)
    if a.dtype.kind == "u":
        return kept
    last = np.minimum(start.astype(I64) + size - 1, bits - 1).clip(0).astype(U32)
    negative = (_SHR(unsigned, last) & kind(1)).astype(np.bool_) & (size != 0)
    return np.where(negative, kept | _ones_above(unsigned, size), kept).view(a.dtype)


def _ones_above(like: Array, count: Array) -> Array:
    """All bits but the lowest `count`."""
    return _SHL(np.full_like(like, np.iinfo(like.dtype).max), count)


def insert_bits(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: the low bits of a over b."""
    start, size = (x.view(U32) & U32(255) for x in (position, length))
    mask = _SHL(~_ones_above(a, size), start)
    return (b & ~mask) | (_SHL(a, start) & mask)


_SHL, _SHR = BINARY["shl"], BINARY["shr"]
