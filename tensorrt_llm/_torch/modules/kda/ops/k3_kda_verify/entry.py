# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `k3_kda_verify`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import VerifyShape, make_inputs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig, packed_configs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.reference import k3_kda_verify_reference
from tensorrt_llm._torch.modules.kda.ops.registry import (
    CUTE_ARCHITECTURES,
    CompiledKernels,
    Implementation,
    OpEntry,
    Tolerance,
)


def _load_reference() -> Callable[..., Any]:
    return k3_kda_verify_reference


def _load_triton() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.triton import k3_kda_verify_triton

    return k3_kda_verify_triton


def _load_cute() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.compiled import CompiledVerify

    return CompiledVerify


def _compile(config: VerifyConfig, arch: str | None, options: str) -> Any:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.cute import compile_verify

    return compile_verify(config, arch, options)


ENTRY = OpEntry(
    name="k3_kda_verify",
    reference=k3_kda_verify_reference,
    implementations=(
        Implementation(
            name="cute",
            architectures=CUTE_ARCHITECTURES,
            load=_load_cute,
            sources=(
                "k3_kda_verify/compiled.py",
                "k3_kda_verify/cute.py",
                "k3_kda_verify/cute_body.py",
                "k3_kda_verify/cute_primitives.py",
                "k3_kda_verify/launch.py",
            ),
        ),
        Implementation(
            name="triton",
            architectures=("cuda",),
            load=_load_triton,
            sources=("k3_kda_verify/triton.py",),
        ),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("k3_kda_verify/reference.py",),
        ),
    ),
    make_inputs=make_inputs,
    shapes=tuple(
        VerifyShape(requests=n, tokens=t, heads=h)
        for h in (2, 6, 12)
        for n in (1, 8, 64)
        for t in (1, 2, 4, 6, 8)
    ),
    # Outputs: q is rounded to TF32 and o to bf16 before the norm. States: fp32 sums, 3xTF32 products. Folded:
    # the bf16 rounding of f_b moves a decay by up to 2^-9 where an fp32 sum lands on the other side of a tie.
    tolerance=Tolerance(output=5e-3, state=2e-5, chained=1e-4, folded=5e-4),
    kernels=CompiledKernels(configs=packed_configs, compile=_compile),
)
