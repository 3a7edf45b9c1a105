# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_promote`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.inputs import CommitShape
from tensorrt_llm._torch.modules.kda.ops.kda_promote.inputs import make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_promote.reference import kda_promote_reference
from tensorrt_llm._torch.modules.kda.ops.registry import Implementation, OpEntry, Tolerance


def _load_reference() -> Callable[..., Any]:
    return kda_promote_reference


def _load_triton() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_promote.triton import kda_promote_triton

    return kda_promote_triton


ENTRY = OpEntry(
    name="kda_promote",
    reference=kda_promote_reference,
    implementations=(
        Implementation(
            name="triton",
            architectures=("cuda",),
            load=_load_triton,
            sources=("kda_promote/triton.py",),
        ),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("kda_promote/reference.py",),
        ),
    ),
    make_inputs=make_inputs,
    shapes=(CommitShape(layers=1, requests=1), CommitShape(layers=3, requests=5, heads=2)),
    # Bytes are copied.
    tolerance=Tolerance(output=0.0, state=0.0, chained=0.0, folded=0.0),
)
