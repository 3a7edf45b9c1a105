# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_intermediate_verify`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.entry import ENTRY as VERIFY
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.inputs import make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.launch import (
    IntermediateConfig,
    packed_configs,
)
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.reference import (
    kda_intermediate_verify_reference,
)
from tensorrt_llm._torch.modules.kda.ops.registry import (
    CUTE_ARCHITECTURES,
    CompiledKernels,
    Implementation,
    OpEntry,
)


def _load_reference() -> Callable[..., Any]:
    return kda_intermediate_verify_reference


def _load_triton() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.triton import (
        kda_intermediate_verify_triton,
    )

    return kda_intermediate_verify_triton


def _load_cute() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.compiled import CompiledIntermediate

    return CompiledIntermediate


def _compile(config: IntermediateConfig, arch: str | None, options: str) -> Any:
    from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.cute import compile_intermediate

    return compile_intermediate(config, arch, options)


ENTRY = OpEntry(
    name="kda_intermediate_verify",
    reference=kda_intermediate_verify_reference,
    implementations=(
        Implementation(
            name="cute",
            architectures=CUTE_ARCHITECTURES,
            load=_load_cute,
            sources=(
                "k3_kda_verify/compiled.py",
                "k3_kda_verify/cute_body.py",
                "k3_kda_verify/cute_primitives.py",
                "k3_kda_verify/launch.py",
                "kda_intermediate_verify/compiled.py",
                "kda_intermediate_verify/cute.py",
                "kda_intermediate_verify/launch.py",
            ),
        ),
        Implementation(
            name="triton",
            architectures=("cuda",),
            load=_load_triton,
            sources=(
                "k3_kda_verify/triton.py",
                "k3_kda_verify/triton_round.py",
                "kda_intermediate_verify/triton.py",
            ),
        ),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("k3_kda_verify/reference.py", "kda_intermediate_verify/reference.py"),
        ),
    ),
    make_inputs=make_inputs,
    shapes=VERIFY.shapes,
    # As for the records: the states after the drafts are sums of the same products.
    tolerance=VERIFY.tolerance,
    kernels=CompiledKernels(configs=packed_configs, compile=_compile),
)
