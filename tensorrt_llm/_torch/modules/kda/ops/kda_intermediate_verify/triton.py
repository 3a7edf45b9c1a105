# SPDX-License-Identifier: Apache-2.0
"""`kda_intermediate_verify` in Triton: the one launch of `triton_round.py`, then state after state."""

from torch import Tensor


def kda_intermediate_verify_triton(
    proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, a_log: Tensor, dt_bias: Tensor,
    onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, ssm: Tensor, intermediate: Tensor,
    slots: Tensor, num_spec: int, lower_bound: float, scale: float, eps: float, g_ext: Tensor | None = None,
    *, rows: int = 0, warps: int = 8,
) -> Tensor:  # fmt: skip
    """Same arguments, result and mutations as the op; `rows` and `warps` as in `verify_round`."""
    from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.triton_round import verify_round

    return verify_round(
        "states", proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, (intermediate,),
        slots, None, num_spec, lower_bound, scale, eps, g_ext, rows=rows, warps=warps,
    )  # fmt: skip
