# SPDX-License-Identifier: Apache-2.0
"""Every op of this package, by name: what tests, benchmarks and the pack builder go through."""

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.entry import ENTRY as _ATTN
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.entry import ENTRY as _VERIFY
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.entry import ENTRY as _COMMIT
from tensorrt_llm._torch.modules.kda.ops.kda_commit_replay.entry import ENTRY as _COMMIT_REPLAY
from tensorrt_llm._torch.modules.kda.ops.kda_decode.entry import ENTRY as _DECODE
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.entry import ENTRY as _INTERMEDIATE
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.entry import ENTRY as _REPLAY
from tensorrt_llm._torch.modules.kda.ops.kda_prefill.entry import ENTRY as _PREFILL
from tensorrt_llm._torch.modules.kda.ops.kda_promote.entry import ENTRY as _PROMOTE
from tensorrt_llm._torch.modules.kda.ops.registry import OpEntry

OPS: dict[str, OpEntry] = {
    entry.name: entry
    for entry in (
        _VERIFY,
        _ATTN,
        _REPLAY,
        _INTERMEDIATE,
        _COMMIT,
        _COMMIT_REPLAY,
        _PROMOTE,
        _DECODE,
        _PREFILL,
    )
}
