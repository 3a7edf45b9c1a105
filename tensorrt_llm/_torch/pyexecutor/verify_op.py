# SPDX-License-Identifier: Apache-2.0
"""What the verify op that writes draft records can do for a model on a device."""

import torch

from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import VerifyGeometry, why_only_reference
from tensorrt_llm._torch.modules.kda.ops.selection import Choice, architecture_of, select
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import KdaTraits

_OP = OPS["k3_kda_verify"]


def op_runs_on(device: torch.device) -> bool:
    """Whether any implementation runs there. The reference does everywhere, for heads of any size."""
    architecture = architecture_of(device)
    return any(implementation.runs_on(architecture) for implementation in _OP.implementations)


def find_missing_kernel(kda: KdaTraits, dtype: torch.dtype, max_draft_len: int, device: torch.device) -> str:
    """Why no kernel, only the op's torch reference, serves these layers on a GPU; empty where one does, and
    on a CPU.
    """
    if device.type != "cuda":
        return ""
    return explain_reference(kda, dtype, max_draft_len, select(_OP, device).choice)


def explain_reference(kda: KdaTraits, dtype: torch.dtype, max_draft_len: int, choice: Choice) -> str:
    """Why the reference runs although `choice` was made for the device; empty where a kernel runs."""
    if choice.name == "torch":
        return choice.reason
    geometry = VerifyGeometry(
        requests=1,
        tokens=max_draft_len + 1,
        heads=kda.num_heads,
        head_dim=kda.head_dim,
        conv_width=kda.conv_width,
        drafts=max_draft_len,
    )
    # Of the rows only the element type is read.
    return why_only_reference(geometry, torch.empty(0, dtype=dtype))
