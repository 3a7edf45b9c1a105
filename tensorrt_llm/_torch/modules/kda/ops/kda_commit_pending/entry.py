# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_commit_pending`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.inputs import CommitShape, make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.reference import kda_commit_pending_reference
from tensorrt_llm._torch.modules.kda.ops.registry import Implementation, OpEntry, Tolerance


def _load_reference() -> Callable[..., Any]:
    return kda_commit_pending_reference


def _load_triton() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.triton import kda_commit_pending_triton

    return kda_commit_pending_triton


ENTRY = OpEntry(
    name="kda_commit_pending",
    reference=kda_commit_pending_reference,
    implementations=(
        Implementation(
            name="triton",
            architectures=("cuda",),
            load=_load_triton,
            sources=("k3_kda_verify/triton.py", "kda_commit_pending/triton.py"),
        ),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("kda_commit_pending/reference.py",),
        ),
    ),
    make_inputs=make_inputs,
    shapes=(CommitShape(layers=1, requests=1), CommitShape(layers=3, requests=5, heads=2)),
    # Replay is defined bit for bit, and the window is copied.
    tolerance=Tolerance(output=0.0, state=0.0, chained=0.0, folded=0.0),
)
