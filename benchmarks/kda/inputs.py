# SPDX-License-Identifier: Apache-2.0
"""Arguments of any op of the catalog at a size, by name: layers in stacked memory, and a float64 result."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from benchmarks.kda.sizes import Size, pending_counts
from tensorrt_llm._torch.modules.kda.ops.registry import OpEntry

SHARED = ("slots", "pending")
"""What the layers of a model share; everything else is a layer's own."""
_ALIGNMENT_ELEMENTS = 128

Arguments = dict[str, Any]
"""By the names of the reference's parameters, in the op's order."""


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


def make_arguments(
    entry: OpEntry, size: Size, device: str, **options: Any
) -> tuple[Arguments, tuple[str, ...]]:
    """The op's arguments at a size, with P of it, and the names of those that it writes."""
    inputs = entry.make_inputs(make_shape(entry, size), device=device, **options)
    found = dict(zip(signature(entry.reference).parameters, inputs.arguments(), strict=False))
    if "pending" in found:
        counts = torch.tensor(pending_counts(size.n, size.p), dtype=torch.int32, device=device)
        found["pending"].zero_()
        found["pending"][found["slots"].long()] = counts
    return found, tuple(inputs.mutable())


def expected(entry: OpEntry, arguments: Arguments, verify: Callable[..., Any]) -> tuple[Any, Arguments]:
    """The result in float64 on the CPU, and the twin of the arguments, written as the op would.

    Products that the ops round to the dtype of the rows are rounded likewise: the projection of an op that
    takes x and w (whose reference is then `verify` on the rows), and that with f_b.
    """
    double = {name: _to_double(x) for name, x in arguments.items()}
    run, given, dtype = entry.reference, double, None
    if {"x", "w"} <= double.keys():
        run, dtype = verify, arguments["x"].dtype
        given = double | {"proj": (double["x"] @ double["w"].T).to(dtype).double()}
    elif "proj" in double:
        dtype = arguments["proj"].dtype
    if dtype is not None and given.get("g_ext") is None:
        D, K = given["w_fb"].shape
        product = given["proj"][:, 4 * D : 4 * D + K] @ given["w_fb"].T
        given = given | {"g_ext": product.to(dtype).double()}
    return run(**{name: given[name] for name in signature(run).parameters if name in given}), double


def _to_double(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.cpu().double() if x.is_floating_point() else x.cpu().clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Copies of a layer: `stacked` holds their tensors [layers, ...], `arguments` those of each as views."""

    arguments: list[Arguments]
    stacked: dict[str, Tensor]


def _stack(x: Tensor, copies: int) -> Tensor:
    """[copies, *x.shape] filled with x, each copy laid out as x and aligned."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    extent += -extent % _ALIGNMENT_ELEMENTS
    memory = torch.zeros(copies, extent, dtype=x.dtype, device=x.device)
    return memory.as_strided((copies, *x.shape), (extent, *x.stride())).copy_(x)


def make_layers(entry: OpEntry, size: Size, copies: int, device: str, **options: Any) -> Layers:
    """Copies of a layer with rows (or activations) and states of their own."""
    first, _ = make_arguments(entry, size, device, **options)
    stacked = {
        name: _stack(x, copies) for name, x in first.items() if isinstance(x, Tensor) and name not in SHARED
    }
    for name in ("proj", "x", "ssm"):
        if name in stacked:
            stacked[name].normal_()
    layers = [first | {name: x[i] for name, x in stacked.items()} for i in range(copies)]
    return Layers(arguments=layers, stacked=stacked)
