# SPDX-License-Identifier: Apache-2.0
"""How `k3_kda_verify` is launched: a pure function of shape, dtype and architecture, without the DSL."""

from collections.abc import Iterator
from dataclasses import dataclass

MAX_TOKENS = 8
MAX_DRAFTS = MAX_TOKENS - 1
HEAD_DIM = 128
CONV_WIDTH = 4
SPLITS = (1, 2, 4, 8)
# The chunk divides keys by the decay since its start, exp(8 * lower_bound) at least: this keeps 1 / D in fp32.
MIN_LOWER_BOUND = -10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """What a compiled kernel is specialised for; heads, tokens, drafts, strides and scalars stay dynamic.

    split: CTAs per head (1, 2, 4, 8). external_gate: the f_b product comes as `g_ext`. pdl: launched as a
    programmatic dependent. chunked False runs token by token (split 1 or 2), for measurements.
    """

    split: int
    external_gate: bool = False
    pdl: bool = True
    late_trigger: bool = False
    chunked: bool = True

    @property
    def name(self) -> str:
        flags = ("_gext" if self.external_gate else "") + ("_pdl" if self.pdl else "")
        flags += "_late" if self.late_trigger else ""
        return f"k3_kda_verify_split{self.split}{flags}{'' if self.chunked else '_serial'}"


def choose_split(requests: int, heads: int) -> int:
    """CTAs per head: few requests are latency, split to shorten the chain; many fill the SMs undivided."""
    tiles = requests * heads
    if tiles <= 16:
        return 8
    if tiles <= 48:
        return 4
    if tiles <= 192:
        return 2
    return 1


def choose_config(*, requests: int, heads: int, external_gate: bool, pdl: bool) -> VerifyConfig:
    """The launch for a batch."""
    return VerifyConfig(split=choose_split(requests, heads), external_gate=external_gate, pdl=pdl)


def packed_configs(measurements: bool = False) -> Iterator[VerifyConfig]:
    """Every configuration that `choose_config` may name; with `measurements`, those only benchmarks run too."""
    for split in SPLITS:
        for external_gate in (False, True):
            for pdl in (False, True):
                yield VerifyConfig(split=split, external_gate=external_gate, pdl=pdl)
    if measurements:
        for split in SPLITS:
            yield VerifyConfig(split=split, late_trigger=True)
        for split in (1, 2):
            yield VerifyConfig(split=split, chunked=False)
