# SPDX-License-Identifier: Apache-2.0
"""`kda_intermediate_verify` in torch: the definition. Runs in the dtype it is given, float64 included."""

from dataclasses import dataclass

from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.reference import verify_reference
from tensorrt_llm._torch.modules.kda.recurrence import KdaRecord, KdaTokens


@dataclass(frozen=True, slots=True)
class StateMemory:
    """States after the drafts: `states` [pool, M, H, V, K]."""

    states: Tensor

    def replay(self, slot: int, state: Tensor, count: int) -> Tensor:
        """The state after the first `count` drafts, as it lies there."""
        return self.states[slot, count - 1] if count else state

    def keep(self, slot: int, draft: int, token: KdaTokens, record: KdaRecord, state: Tensor) -> None:
        """Store the state after a draft."""
        self.states[slot, draft] = state


def kda_intermediate_verify_reference(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, intermediate: Tensor,
    slots: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op."""
    return verify_reference(
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, StateMemory(intermediate),
        slots, None, num_spec, lower_bound, scale, eps, g_ext,
    )  # fmt: skip
