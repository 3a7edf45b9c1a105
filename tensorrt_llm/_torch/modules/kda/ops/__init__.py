# SPDX-License-Identifier: Apache-2.0
"""The kernels of Kimi delta attention, each beside its reference.

Importing this registers the torch ops under `trtllm::` and loads neither Triton nor the CuTe DSL;
`catalog.OPS` lists what there is.
"""

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.op import k3_kda_verify as k3_kda_verify
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.op import kda_commit_pending as kda_commit_pending
from tensorrt_llm._torch.modules.kda.ops.kda_decode.op import kda_decode as kda_decode
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.op import (
    kda_intermediate_verify as kda_intermediate_verify,
)
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.op import kda_mtp_decode as kda_mtp_decode

__all__ = [
    "k3_kda_verify",
    "kda_commit_pending",
    "kda_decode",
    "kda_intermediate_verify",
    "kda_mtp_decode",
    "kda_prefill",
]
