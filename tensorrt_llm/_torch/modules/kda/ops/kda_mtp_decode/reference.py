# SPDX-License-Identifier: Apache-2.0
"""`kda_mtp_decode` in torch: the definition. Runs in the dtype it is given, float64 included."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.reference import verify_reference
from tensorrt_llm._torch.modules.kda.recurrence import KdaRecord, KdaTokens, apply_record, make_record


@dataclass(frozen=True, slots=True)
class InputMemory:
    """Inputs of drafts: `qkg` [pool, M, 3, D] (q, k, log decay), `v` [pool, M, D], `beta` [pool, M, H]."""

    qkg: Tensor
    v: Tensor
    beta: Tensor

    def replay(self, slot: int, state: Tensor, count: int) -> Tensor:
        """The state after the first `count` drafts, computed again from k, log decay, v and beta."""
        H, V, K = state.shape
        for m in range(count):
            _, k, log_decay = self.qkg[slot, m].view(3, H, K)
            made = make_record(state, k, self.v[slot, m].view(H, V), log_decay, self.beta[slot, m])
            state = apply_record(state, made)
        return state

    def keep(self, slot: int, draft: int, token: KdaTokens, record: KdaRecord, state: Tensor) -> None:
        """Store the operands of a draft."""
        self.qkg[slot, draft] = torch.stack((token.q, token.k, token.log_decay)).flatten(1)
        self.v[slot, draft] = token.v.flatten()
        self.beta[slot, draft] = token.beta


def kda_mtp_decode_reference(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, qkg_cache: Tensor,
    v_cache: Tensor, beta_cache: Tensor, slots: Tensor, pending: Tensor, num_spec: int, lower_bound: float,
    scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op."""
    return verify_reference(
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm,
        InputMemory(qkg_cache, v_cache, beta_cache), slots, pending, num_spec, lower_bound, scale, eps, g_ext,
    )  # fmt: skip
