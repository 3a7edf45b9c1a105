# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_intermediate_verify`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.entry import ENTRY as VERIFY
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.inputs import make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_intermediate_verify.reference import (
    kda_intermediate_verify_reference,
)
from tensorrt_llm._torch.modules.kda.ops.registry import Implementation, OpEntry


def _load_reference() -> Callable[..., Any]:
    return kda_intermediate_verify_reference


ENTRY = OpEntry(
    name="kda_intermediate_verify",
    reference=kda_intermediate_verify_reference,
    implementations=(
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("k3_kda_verify/reference.py", "kda_intermediate_verify/reference.py"),
        ),
    ),
    make_inputs=make_inputs,
    shapes=VERIFY.shapes,
    # As for the records: the states after the drafts are sums of the same products.
    tolerance=VERIFY.tolerance,
)
