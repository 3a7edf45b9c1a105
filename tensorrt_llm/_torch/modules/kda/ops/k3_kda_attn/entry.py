# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `k3_kda_attn`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.inputs import AttnShape, make_inputs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.launch import ProjectionConfig, packed_configs
from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.reference import k3_kda_attn_reference
from tensorrt_llm._torch.modules.kda.ops.registry import (
    CUTE_ARCHITECTURES,
    CompiledKernels,
    Implementation,
    OpEntry,
    Tolerance,
)


def _load_reference() -> Callable[..., Any]:
    return k3_kda_attn_reference


def _load_portable() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.portable import k3_kda_attn_portable

    return k3_kda_attn_portable


def _load_cute() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.compiled import CompiledAttn

    return CompiledAttn


def _compile(config: ProjectionConfig, arch: str | None, options: str) -> Any:
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.cute import compile_projection

    return compile_projection(config, arch, options)


ENTRY = OpEntry(
    name="k3_kda_attn",
    reference=k3_kda_attn_reference,
    implementations=(
        Implementation(
            name="cute",
            architectures=CUTE_ARCHITECTURES,
            load=_load_cute,
            sources=(
                "k3_kda_attn/compiled.py",
                "k3_kda_attn/cute.py",
                "k3_kda_attn/launch.py",
                "k3_kda_verify/cute_primitives.py",
            ),
        ),
        Implementation(
            name="triton",
            architectures=("cuda",),
            load=_load_portable,
            sources=("k3_kda_attn/portable.py", "k3_kda_verify/triton.py"),
        ),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("k3_kda_attn/reference.py", "k3_kda_verify/reference.py"),
        ),
    ),
    make_inputs=make_inputs,
    shapes=tuple(AttnShape(tokens=t, heads=h) for h in (6, 12) for t in (1, 2, 4, 8)),
    # The projection sums in fp32 and is rounded to bf16, which falls the other way for about one element in a
    # thousand; conv columns, gates and keys follow it. The rest as in k3_kda_verify.
    tolerance=Tolerance(output=5e-3, state=5e-4, chained=1e-3, folded=5e-4),
    kernels=CompiledKernels(configs=packed_configs, compile=_compile),
)
