# SPDX-License-Identifier: Apache-2.0
"""What compiled kernels of `k3_kda_verify` are specialised for, without the DSL."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

MAX_TOKENS = 8
MAX_DRAFTS = MAX_TOKENS - 1
HEAD_DIM = 128
CONV_WIDTH = 4
SPLITS = (1, 2, 4, 8)
# What `choice` chooses from: splits, and with PDL whether dependents start late.
CHOSEN_SPLITS = (1, 2, 8)
CHOSEN_TRIGGERS = ((1, False), (2, False), (2, True), (8, True))
# The chunk divides keys by the decay since its start, exp(8 * lower_bound) at least: 1 / D stays in fp32.
MIN_LOWER_BOUND = -10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """What a compiled kernel is specialised for; heads, tokens, drafts, strides and scalars stay dynamic.

    split: CTAs per head (1, 2, 4, 8). external_gate: the f_b product comes as `g_ext`. pdl: launched as a
    programmatic dependent; late_trigger: its own dependents may start at its end, not at once. chunked False
    runs token by token (split 1 or 2), for measurements. bf16_conv: the conv caches are bf16, as the raw
    inputs in them are anyway.

    early_reads, for measurements: slot, count, state, drafts and conv windows are read before the wait for
    earlier launches, only `proj` after it. Sound only where each of those triggers its dependents after its
    own wait and none writes these pools or indices: a launch of this op without `late_trigger` is none.
    """

    OP: ClassVar[str] = "k3_kda_verify"

    split: int
    external_gate: bool = False
    pdl: bool = True
    late_trigger: bool = False
    chunked: bool = True
    bf16_conv: bool = False
    early_reads: bool = False

    @property
    def name(self) -> str:
        flags = ("_gext" if self.external_gate else "") + ("_pdl" if self.pdl else "")
        flags += ("_late" if self.late_trigger else "") + ("_bf16conv" if self.bf16_conv else "")
        flags += "_early" if self.early_reads else ""
        return f"{self.OP}_split{self.split}{flags}{'' if self.chunked else '_serial'}"


Config = TypeVar("Config", bound=VerifyConfig)


def chosen_configs(kind: type[Config], *, bf16_conv: bool) -> Iterator[Config]:
    """Every launch that `choice.choose_config` may choose of a kind."""
    for gate in (False, True):
        for split in CHOSEN_SPLITS:
            yield kind(split=split, external_gate=gate, pdl=False, bf16_conv=bf16_conv)
        for split, late in CHOSEN_TRIGGERS:
            yield kind(split=split, external_gate=gate, late_trigger=late, bf16_conv=bf16_conv)


def packed_configs(measurements: bool = False) -> Iterator[VerifyConfig]:
    """Every configuration that may be chosen; with `measurements`, those that only benchmarks run too."""
    for split in SPLITS:
        for external_gate in (False, True):
            yield VerifyConfig(split=split, external_gate=external_gate, pdl=False)
            for late_trigger in (False, True):
                yield VerifyConfig(split=split, external_gate=external_gate, late_trigger=late_trigger)
    yield from chosen_configs(VerifyConfig, bf16_conv=True)
    if measurements:
        for split in (1, 2):
            yield VerifyConfig(split=split, chunked=False)
        for split, late_trigger in CHOSEN_TRIGGERS:
            yield VerifyConfig(split=split, late_trigger=late_trigger, early_reads=True)
