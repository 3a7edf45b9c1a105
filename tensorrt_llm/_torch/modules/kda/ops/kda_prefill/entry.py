# SPDX-License-Identifier: Apache-2.0
"""The registry entry of `kda_prefill`."""

from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.modules.kda.ops.kda_prefill.inputs import PrefillShape, make_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_prefill.reference import kda_prefill_reference
from tensorrt_llm._torch.modules.kda.ops.registry import Implementation, OpEntry, Tolerance


def _load_reference() -> Callable[..., Any]:
    return kda_prefill_reference


def _load_fla() -> Callable[..., Any]:
    from tensorrt_llm._torch.modules.kda.ops.kda_prefill.fla import kda_prefill_fla

    return kda_prefill_fla


ENTRY = OpEntry(
    name="kda_prefill",
    reference=kda_prefill_reference,
    implementations=(
        Implementation(name="fla", architectures=("cuda",), load=_load_fla, sources=("kda_prefill/fla.py",)),
        Implementation(
            name="torch",
            architectures=("cpu", "cuda"),
            load=_load_reference,
            sources=("kda_prefill/reference.py", "../chunk.py"),
        ),
    ),
    make_inputs=make_inputs,
    shapes=(
        PrefillShape(lengths=(1, 63, 64, 65), heads=2),
        PrefillShape(lengths=(128, 200), positions=(64, 0)),
        PrefillShape(lengths=(1024,), heads=12),
    ),
    # fla-core rounds the operands of products to bf16, which costs 4e-3 in outputs and states; its formulas
    # on fp32 operands are within 1e-6.
    tolerance=Tolerance(output=1e-2, state=1e-2, chained=1e-2, folded=1e-2),
)
