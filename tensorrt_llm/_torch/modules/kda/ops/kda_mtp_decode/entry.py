# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_mtp_decode`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.entry import ENTRY as VERIFY
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.inputs import make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.reference import kda_mtp_decode_reference
from tensorrt_llm._torch.modules.kda.ops.registry import Implementation, OpEntry


def _load_reference() -> Callable[..., Any]:
    return kda_mtp_decode_reference


ENTRY = OpEntry(
    name="kda_mtp_decode",
    reference=kda_mtp_decode_reference,
    implementations=(
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("k3_kda_verify/reference.py", "kda_mtp_decode/reference.py"),
        ),
    ),
    make_inputs=make_inputs,
    shapes=VERIFY.shapes,
    # As for the records: replay adds P serial updates in fp32 to a round.
    tolerance=VERIFY.tolerance,
)
