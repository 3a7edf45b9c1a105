# SPDX-License-Identifier: Apache-2.0
"""What compiled kernels of `kda_mtp_decode` are specialised for, without the DSL."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig, chosen_configs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(VerifyConfig):
    """As of `k3_kda_verify`, whose launches are taken over; there is no form but the chunk."""

    OP: ClassVar[str] = "kda_mtp_decode"


def packed_configs(measurements: bool = False) -> Iterator[ReplayConfig]:
    """Every configuration that may be chosen; nothing else is measured."""
    for bf16_conv in (False, True):
        yield from chosen_configs(ReplayConfig, bf16_conv=bf16_conv)
