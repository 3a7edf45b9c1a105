# SPDX-License-Identifier: Apache-2.0
"""Which launch of `kda_decode` serves a batch: pure functions, apart from the kernels' sources."""

from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import DecodeConfig


def choose_split(requests: int, heads: int) -> int:
    """CTAs per head, by arithmetic and the order found for `k3_kda_verify`: not measured yet.

    Few requests are latency: divided heads shorten it. But every CTA reads the head's 32 KB of w_fb beside
    its part of the 64 KB of state, so parts end where they fill the SMs anyway.
    Three CTAs of 128 threads fit an SM, 396 on the 132 of an H200: in two parts, 64 requests of 6 heads take
    1.9 waves. An undivided head is a CTA of 256 threads, two to an SM.
    """
    tiles = requests * heads
    if tiles <= 24:
        return 8
    if tiles <= 48:
        return 4
    if tiles <= 512:
        return 2
    return 1


def choose_config(*, requests: int, heads: int, external_gate: bool, pdl: bool) -> DecodeConfig:
    """The launch for a batch."""
    return DecodeConfig(split=choose_split(requests, heads), external_gate=external_gate, pdl=pdl)
