# SPDX-License-Identifier: Apache-2.0
"""What compiled kernels of `kda_decode` are specialised for, without the DSL."""

from collections.abc import Iterator
from dataclasses import dataclass

HEAD_DIM = 128
CONV_WIDTH = 4
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """What a compiled kernel is specialised for; heads, strides and scalars stay dynamic.

    split: CTAs per head (1, 2, 4, 8). external_gate: the f_b product comes as `g_ext`. pdl: launched as a
    programmatic dependent; early_trigger: its own dependents may start at once, not when its states are in
    registers, for measurements.
    """

    split: int
    external_gate: bool = False
    pdl: bool = True
    early_trigger: bool = False

    @property
    def name(self) -> str:
        flags = ("_gext" if self.external_gate else "") + ("_pdl" if self.pdl else "")
        return f"kda_decode_split{self.split}{flags}{'_early' if self.early_trigger else ''}"


def packed_configs(measurements: bool = False) -> Iterator[DecodeConfig]:
    """Every configuration that may be chosen; with `measurements`, those that only benchmarks run too."""
    for split in SPLITS:
        for external_gate in (False, True):
            for pdl in (False, True):
                yield DecodeConfig(split=split, external_gate=external_gate, pdl=pdl)
        if measurements:
            yield DecodeConfig(split=split, early_trigger=True)
