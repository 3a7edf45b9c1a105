# SPDX-License-Identifier: Apache-2.0
"""Arguments of any op of the catalog at a size: copies of a layer in stacked memory, and a float64 twin."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from benchmarks.kda.sizes import Size, pending_counts
from tensorrt_llm._torch.modules.kda.ops.registry import OpEntry

SHARED = ("slots", "pending")
"""What the layers of a model share; everything else is a layer's own."""
_ALIGNMENT_ELEMENTS = 128


def make_shape(entry: OpEntry, size: Size) -> Any:
    """The op's shape of a size: of the fields that a size gives, those that it has."""
    kind = type(entry.shapes[0])
    known = {field.name for field in fields(kind)}
    given = {
        "requests": size.n,
        "tokens": size.t,
        "heads": size.h,
        "lengths": (size.t,) * size.n,
        "layers": 1,
    }
    return kind(**{name: value for name, value in given.items() if name in known})


def make_inputs(entry: OpEntry, size: Size, device: str, **options: Any) -> Any:
    """The op's inputs at a size, with P of it."""
    inputs = entry.make_inputs(make_shape(entry, size), device=device, **options)
    if "pending" in {field.name for field in fields(inputs)}:
        counts = torch.tensor(pending_counts(size.n, size.p), dtype=torch.int32, device=device)
        inputs.pending.zero_()
        inputs.pending[inputs.slots.long()] = counts
    return inputs


def as_float64(inputs: Any) -> Any:
    """A float64 twin on the CPU. A folded f_b product is rounded to the dtype of the rows, as the ops do."""
    names = {field.name for field in fields(inputs)}
    double = _mapped(inputs, lambda x: x.cpu().double() if x.is_floating_point() else x.cpu().clone())
    if not {"proj", "g_ext"} <= names or double.g_ext is not None:
        return double
    D, K = inputs.w_fb.shape
    product = double.proj[:, 4 * D : 4 * D + K] @ double.w_fb.T
    return replace(double, g_ext=product.to(inputs.proj.dtype).double())


def _mapped(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: change(x) for name, x in values.items() if isinstance(x, Tensor)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Copies of a layer: `stacked` holds their tensors [layers, ...], `inputs` the arguments of each."""

    inputs: list[Any]
    stacked: dict[str, Tensor]


def _stack(x: Tensor, copies: int) -> Tensor:
    """[copies, *x.shape] filled with x, each copy laid out as x and aligned."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    extent += -extent % _ALIGNMENT_ELEMENTS
    memory = torch.zeros(copies, extent, dtype=x.dtype, device=x.device)
    return memory.as_strided((copies, *x.shape), (extent, *x.stride())).copy_(x)


def make_layers(entry: OpEntry, size: Size, copies: int, device: str, **options: Any) -> Layers:
    """Copies of a layer with rows (or activations) and states of their own."""
    first = make_inputs(entry, size, device, **options)
    values = {field.name: getattr(first, field.name) for field in fields(first)}
    stacked = {
        name: _stack(x, copies) for name, x in values.items() if isinstance(x, Tensor) and name not in SHARED
    }
    for name in ("proj", "x", "ssm"):
        if name in stacked:
            stacked[name].normal_()
    inputs = [replace(first, **{name: x[i] for name, x in stacked.items()}) for i in range(copies)]
    return Layers(inputs=inputs, stacked=stacked)


def named_arguments(run: Callable[..., Any], inputs: Any, **others: Any) -> tuple[Any, ...]:
    """The values that another op's inputs hold for a callable's positional parameters, `others` first."""
    known = {field.name: getattr(inputs, field.name) for field in fields(inputs)} | others
    parameters = signature(run).parameters.values()
    return tuple(known.get(x.name, x.default) for x in parameters if x.kind != x.KEYWORD_ONLY)
