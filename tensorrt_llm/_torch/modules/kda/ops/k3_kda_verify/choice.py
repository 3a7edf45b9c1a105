# SPDX-License-Identifier: Apache-2.0
"""Which launch of `k3_kda_verify` serves a batch: pure functions, apart from the kernels' sources.

Figures are us per layer on one H200, HBM-cold, T 8, mixed acceptance: benchmarks/results/kda_h200.json.

Formulation. Tokens solved as one chunk against token by token, H 6, each in its best launch: 6.8 / 9.9 (N 1),
9.0 / 15.8 (N 8), 15.5 / 22.1 (N 32), 22.9 / 43.0 (N 64). The chunk reads the state once, on tensor cores;
token by token it is read twice and written once per token, and the issue slots run out (a copy of the same
bytes takes 2.0 / 3.9 / 9.9 / 17.9).
"""

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig


def choose_split(requests: int, heads: int) -> int:
    """CTAs per head: few requests are latency, split to shorten the chain; many fill the SMs undivided.

    A CTA that shares its head repeats the preparation of all 128 keys, so the split ends where 3 CTAs on each
    of 132 SMs are full: N 8 in 4 parts takes 9.0, in 8 parts 14.7; N 32 in 2 parts 15.5, in 4 parts 27.6.
    """
    tiles = requests * heads
    if tiles <= 16:
        return 8
    if tiles <= 64:
        return 4
    if tiles <= 256:
        return 2
    return 1


def starts_dependents_late(requests: int, heads: int) -> bool:
    """Whether dependents start at a launch's end: CTAs that only wait take SMs from those that work.

    N 16 undivided takes 15.8 when they start at once and 11.7 when late. Where all SMs are full they cannot
    start early, and a late start delays them: 45.8 against 46.9 at N 128.
    """
    return requests * heads <= 144


def choose_config(*, requests: int, heads: int, external_gate: bool, pdl: bool) -> VerifyConfig:
    """The launch for a batch."""
    return VerifyConfig(
        split=choose_split(requests, heads),
        external_gate=external_gate,
        pdl=pdl,
        late_trigger=pdl and starts_dependents_late(requests, heads),
    )
