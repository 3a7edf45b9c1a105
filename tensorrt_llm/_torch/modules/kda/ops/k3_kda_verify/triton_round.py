# SPDX-License-Identifier: Apache-2.0
"""Device functions of the verify ops' drafts in Triton."""

import triton
import triton.language as tl


@triton.jit
def replay_inputs(
    s, qkg, qkg_draft, plane_stride, v, v_draft, beta, beta_draft, keys, values, count
):  # fmt: skip
    """S [V, K] after the first `count` drafts, alone read, computed again from their inputs.

    The pointers are at the slot's draft 0, this head; `values` are the V rows of `s`. Each draft does
    vn = v - S (decay k) and then what `replay` does with its record.
    """
    for r in range(count):
        inputs = qkg + r * qkg_draft + keys
        k = tl.load(inputs + plane_stride)
        decay = tl.exp(tl.load(inputs + 2 * plane_stride))
        vn = tl.load(v + r * v_draft + values) - tl.sum(s * (decay * k)[None, :], axis=1)
        bk = tl.load(beta + r * beta_draft) * k
        s = tl.fma(tl.broadcast_to(decay[None, :], s.shape), s, vn[:, None] * bk[None, :])
    return s
