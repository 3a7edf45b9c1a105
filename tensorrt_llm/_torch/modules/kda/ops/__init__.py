# SPDX-License-Identifier: Apache-2.0
"""The kernels of Kimi delta attention, each beside its reference.

Importing this registers the torch ops under `trtllm::` and loads neither Triton nor the CuTe DSL;
`catalog.OPS` lists what there is.
"""

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.op import k3_kda_attn as k3_kda_attn
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.op import k3_kda_verify as k3_kda_verify
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.op import kda_commit_pending as kda_commit_pending
from tensorrt_llm._torch.modules.kda.ops.kda_commit_replay.op import kda_commit_replay as kda_commit_replay
from tensorrt_llm._torch.modules.kda.ops.kda_decode.op import kda_decode as kda_decode
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.op import (
    kda_intermediate_verify as kda_intermediate_verify,
)
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.op import kda_mtp_decode as kda_mtp_decode
from tensorrt_llm._torch.modules.kda.ops.kda_prefill.op import kda_prefill as kda_prefill
from tensorrt_llm._torch.modules.kda.ops.kda_promote.op import kda_promote as kda_promote

__all__ = [
    "k3_kda_attn",
    "k3_kda_verify",
    "kda_commit_pending",
    "kda_commit_replay",
    "kda_decode",
    "kda_intermediate_verify",
    "kda_mtp_decode",
    "kda_prefill",
    "kda_promote",
]
