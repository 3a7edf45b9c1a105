# SPDX-License-Identifier: Apache-2.0
"""Which launch of `k3_kda_verify` serves a batch: pure functions, apart from the kernels' sources."""

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig


def choose_split(requests: int, heads: int) -> int:
    """CTAs per head: few requests are latency, split to shorten the chain; many fill the SMs undivided."""
    tiles = requests * heads
    if tiles <= 24:
        return 8
    if tiles <= 48:
        return 4
    if tiles <= 96:
        return 2
    return 1


def choose_config(*, requests: int, heads: int, external_gate: bool, pdl: bool) -> VerifyConfig:
    """The launch for a batch. Dependents start late: CTAs that only wait take SMs from those that work."""
    split = choose_split(requests, heads)
    return VerifyConfig(split=split, external_gate=external_gate, pdl=pdl, late_trigger=pdl)
