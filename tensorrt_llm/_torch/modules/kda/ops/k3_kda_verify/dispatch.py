# SPDX-License-Identifier: Apache-2.0
"""From a verify op's checked arguments to the implementation that serves them."""

from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import (
    DraftCache,
    check_round,
    why_not_compiled,
    why_only_reference,
)
from tensorrt_llm._torch.modules.kda.ops.registry import OpEntry
from tensorrt_llm._torch.modules.kda.ops.selection import select
from tensorrt_llm.logger import logger


def run_round(
    entry: OpEntry, drafts: tuple[DraftCache, ...], proj: Tensor, w_fb: Tensor, w_q: Tensor, w_k: Tensor,
    w_v: Tensor, a_log: Tensor, dt_bias: Tensor, onorm_w: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor,
    ssm: Tensor, slots: Tensor, pending: Tensor | None, num_spec: int, lower_bound: float, scale: float,
    eps: float, g_ext: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run the op of `entry`, whose arguments are these in this order, `drafts` between ssm and slots.

    `pending` None: the op has no such argument. Raises as the ops do.
    """
    geometry = check_round(
        entry.name, proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, drafts, slots,
        pending, num_spec, g_ext,
    )  # fmt: skip
    kept = tuple(cache.tensor for cache in drafts)
    arguments = (
        proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, cs_q, cs_k, cs_v, ssm, *kept, slots,
        *(() if pending is None else (pending,)), num_spec, lower_bound, scale, eps, g_ext,
    )  # fmt: skip
    selection = select(entry, proj.device)
    name, run = selection.choice.name, selection.run
    if name != "torch" and (reason := why_only_reference(geometry, proj)):
        logger.info_once(f"{entry.name} runs its torch reference: {reason}")
        run = entry.reference
    elif name == "cute":
        weights, caches = (w_fb, w_q, w_k, w_v, onorm_w), (cs_q, cs_k, cs_v)
        if reason := why_not_compiled(proj, weights, (ssm, *kept), caches, lower_bound):
            logger.info_once(f"{entry.name} runs its Triton form: {reason}")
            run = entry.implementation("triton").load()
    output: Tensor = run(*arguments)
    return output
