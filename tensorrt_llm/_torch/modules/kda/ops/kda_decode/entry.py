# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_decode`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.kda_decode.inputs import DecodeShape, make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import DecodeConfig, packed_configs
from tensorrt_llm._torch.modules.kda.ops.kda_decode.reference import kda_decode_reference
from tensorrt_llm._torch.modules.kda.ops.registry import (
    CUTE_ARCHITECTURES,
    CompiledKernels,
    Implementation,
    OpEntry,
    Tolerance,
)


def _load_reference() -> Callable[..., Any]:
    return kda_decode_reference


def _load_triton() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_decode.triton import kda_decode_triton

    return kda_decode_triton


def _load_cute() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_decode.compiled import CompiledDecode

    return CompiledDecode


def _compile(config: DecodeConfig, arch: str | None, options: str) -> Any:
    from tensorrt_llm._torch.modules.kda.ops.kda_decode.cute import compile_decode

    return compile_decode(config, arch, options)


ENTRY = OpEntry(
    name="kda_decode",
    reference=kda_decode_reference,
    implementations=(
        Implementation(
            name="cute",
            architectures=CUTE_ARCHITECTURES,
            load=_load_cute,
            sources=(
                "k3_kda_verify/cute_primitives.py",
                "kda_decode/compiled.py",
                "kda_decode/cute.py",
                "kda_decode/launch.py",
            ),
        ),
        Implementation(
            name="triton",
            architectures=("cuda",),
            load=_load_triton,
            sources=("kda_decode/triton.py",),
        ),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("kda_decode/reference.py",),
        ),
    ),
    make_inputs=make_inputs,
    shapes=tuple(DecodeShape(requests=n, heads=h) for h in (2, 6, 12) for n in (1, 3, 8, 16, 64)),
    # Outputs: o is rounded to bf16 before the norm. States: fp32 sums. Folded: the bf16 rounding of f_b moves
    # a decay by up to 2^-9 where an fp32 sum lands on the other side of a tie.
    tolerance=Tolerance(output=5e-3, state=2e-5, chained=1e-4, folded=5e-4),
    kernels=CompiledKernels(configs=packed_configs, compile=_compile),
)
