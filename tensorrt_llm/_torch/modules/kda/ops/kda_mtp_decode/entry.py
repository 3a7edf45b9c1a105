# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_mtp_decode`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.entry import ENTRY as VERIFY
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.inputs import make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.launch import ReplayConfig, packed_configs
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.reference import kda_mtp_decode_reference
from tensorrt_llm._torch.modules.kda.ops.registry import (
    CUTE_ARCHITECTURES,
    CompiledKernels,
    Implementation,
    OpEntry,
)


def _load_reference() -> Callable[..., Any]:
    return kda_mtp_decode_reference


def _load_triton() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.triton import kda_mtp_decode_triton

    return kda_mtp_decode_triton


def _load_cute() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.compiled import CompiledReplay

    return CompiledReplay


def _compile(config: ReplayConfig, arch: str | None, options: str) -> Any:
    from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.cute import compile_replay

    return compile_replay(config, arch, options)


ENTRY = OpEntry(
    name="kda_mtp_decode",
    reference=kda_mtp_decode_reference,
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
                "kda_mtp_decode/compiled.py",
                "kda_mtp_decode/cute.py",
                "kda_mtp_decode/launch.py",
            ),
        ),
        Implementation(
            name="triton",
            architectures=("cuda",),
            load=_load_triton,
            sources=(
                "k3_kda_verify/triton.py",
                "k3_kda_verify/triton_round.py",
                "kda_mtp_decode/triton.py",
            ),
        ),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("k3_kda_verify/reference.py", "kda_mtp_decode/reference.py"),
        ),
    ),
    make_inputs=make_inputs,
    shapes=VERIFY.shapes,
    # As for the records: replay adds P serial updates in fp32 to a round.
    tolerance=VERIFY.tolerance,
    kernels=CompiledKernels(configs=packed_configs, compile=_compile),
)
