# SPDX-License-Identifier: Apache-2.0
"""What compiled projection kernels of `k3_kda_attn` are specialised for, without the DSL."""

from collections.abc import Iterator
from dataclasses import dataclass

MAX_TOKENS = 8
# The weight streams in blocks of 32 keys; rows of x and w are read 16 bytes at a time.
BLOCK_KEYS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionConfig:
    """What a compiled kernel is specialised for; tokens, widths, strides and pools stay dynamic.

    rows: of the weight, per cluster, a multiple of 16. key_ctas: CTAs of a cluster, which share the keys.
    narrow_conv: the conv caches, prefetched for the verify round, are bf16. pdl: launched as a programmatic
    dependent.
    """

    rows: int = 48
    key_ctas: int = 2
    narrow_conv: bool = False
    pdl: bool = True

    @property
    def name(self) -> str:
        flags = ("_conv16" if self.narrow_conv else "") + ("_pdl" if self.pdl else "")
        return f"k3_kda_attn_rows{self.rows}_keys{self.key_ctas}{flags}"


def packed_configs(measurements: bool = False) -> Iterator[ProjectionConfig]:
    """Every configuration that may be chosen; with `measurements`, those that only benchmarks run too."""
    for narrow_conv in (False, True):
        for pdl in (False, True):
            yield ProjectionConfig(narrow_conv=narrow_conv, pdl=pdl)
    if measurements:
        for rows, key_ctas in ((32, 1), (96, 4)):
            yield ProjectionConfig(rows=rows, key_ctas=key_ctas)
