# SPDX-License-Identifier: Apache-2.0
"""Which launch of `k3_kda_verify` serves a batch: pure functions, apart from the kernels' sources.

Figures are us per layer on one H200, HBM-cold, T 8, mixed acceptance: benchmarks/results/kda_h200.json.

Formulation. Tokens solved as one chunk against token by token, H 6, each in its best launch: 5.4 / 9.3 (N 1),
8.7 / 14.0 (N 8), 15.8 / 23.4 (N 32), 23.3 / 43.8 (N 64). The chunk reads the state once, on tensor cores;
token by token it is read twice and written once per token, and the issue slots run out (a copy of the same
bytes takes 2.0 / 3.9 / 9.9 / 17.9).
"""

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import Config


def choose_split(requests: int, heads: int) -> int:
    """CTAs per head: few requests are latency, split to shorten the chain; many fill the SMs undivided.

    A CTA that shares its head repeats the preparation of all 128 keys, so the split ends where 3 CTAs on each
    of 132 SMs are full: N 4 in 8 parts takes 7.3, in 2 parts 8.2; N 8 in 2 parts 8.7, in 4 parts 9.2, in 8
    parts 13.6; N 32 in 2 parts 15.8, in 4 parts 26.4.
    """
    tiles = requests * heads
    if tiles <= 24:
        return 8
    if tiles <= 256:
        return 2
    return 1


def starts_dependents_late(requests: int, heads: int) -> bool:
    """Whether dependents start at a launch's end: CTAs that only wait take SMs from those that work.

    N 8 in 2 parts takes 10.7 when they start at once and 8.7 when late. Where the SMs are full they cannot
    start early, and the moment makes no difference beyond 0.6.
    """
    return requests * heads <= 144


def choose_config(
    kind: type[Config], *, requests: int, heads: int, external_gate: bool, pdl: bool, bf16_conv: bool
) -> Config:
    """The launch for a batch, of the op that `kind` belongs to."""
    return kind(
        split=choose_split(requests, heads),
        external_gate=external_gate,
        pdl=pdl,
        late_trigger=pdl and starts_dependents_late(requests, heads),
        bf16_conv=bf16_conv,
    )
