# SPDX-License-Identifier: Apache-2.0
"""The kernels of Kimi delta attention, each beside its reference.

Importing this registers the torch ops `trtllm::k3_kda_verify` and `trtllm::kda_commit_pending` and loads
neither Triton nor the CuTe DSL; `registry.OPS` lists what there is.
"""

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.op import k3_kda_verify as k3_kda_verify
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.op import kda_commit_pending as kda_commit_pending

__all__ = ["k3_kda_verify", "kda_commit_pending"]
