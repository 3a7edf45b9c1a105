# SPDX-License-Identifier: Apache-2.0
"""Implementations of the catalog's ops as callables, by name and variant, and whether they are right."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kda.inputs import expected, make_arguments
from benchmarks.kda.sizes import Size
from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.registry import OpEntry
from tensorrt_llm._torch.modules.kda.ops.selection import architecture_of

CHECKED_REQUESTS = 5
CHECKED_HEADS = 2
CHECKED_TOKENS = 200
TRITON_VARIANTS = {
    "k3_kda_verify": ("rows=16,warps=4", "rows=32,warps=4", "rows=32,warps=8", "rows=64,warps=8", "chunked=0")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the arms run. `implementations`: the ones wanted, () for all that run here but the reference.

    An implementation's name may go on with a variant: `cute/split2_pdl`, a kernel of the op by its symbol, or
    `triton/rows=32,warps=8`, keywords of the callable. `variants` adds every kernel of a pack with
    measurements, and what TRITON_VARIANTS lists. copies: of a layer, 0 for as many as make it cold.
    """

    device: str
    pack: Path | None = None
    implementations: tuple[str, ...] = ()
    variants: bool = False
    copies: int = 0

    @property
    def architecture(self) -> str:
        return architecture_of(torch.device(self.device))


def get_entry(op: str) -> OpEntry:
    """The catalog's entry; ValueError names the ops there are."""
    if op not in OPS:
        raise ValueError(f"the catalog has no op {op!r}, only {', '.join(OPS)}")
    return OPS[op]


def _suits(kernel: str, bf16_conv: bool) -> bool:
    """Whether a kernel of this symbol runs on the arms' inputs: without g_ext, conv caches in their dtype."""
    return "gext" not in kernel and ("bf16conv" in kernel or "conv16" in kernel) == bf16_conv


def implementation_names(op: str, machine: Machine, bf16_conv: bool = False) -> list[str]:
    """What to measure of an op: what is wanted of what it has, the fastest first.

    ValueError for an op that is not there, or has no kernel where a GPU is.
    """
    entry = get_entry(op)
    runnable = [x.name for x in entry.implementations if x.runs_on(machine.architecture)]
    if machine.implementations:
        return [name for name in machine.implementations if name.partition("/")[0] in runnable]
    names: list[str] = [name for name in runnable if name != "torch" or machine.device == "cpu"]
    if not names:
        raise ValueError(f"{op} has nothing but its torch reference on {machine.architecture}")
    if machine.variants and "cute" in names and entry.kernels is not None:
        kernels = [config.name.removeprefix(f"{op}_") for config in entry.kernels.configs(True)]
        names += [f"cute/{kernel}" for kernel in kernels if _suits(kernel, bf16_conv)]
    if machine.variants and "triton" in names:
        names += [f"triton/{variant}" for variant in TRITON_VARIANTS.get(op, ())]
    return names


@cache
def load_run(op: str, name: str, machine: Machine) -> Callable[..., Any]:
    """The callable of an implementation's name; ValueError for a variant that it does not have."""
    entry = get_entry(op)
    base, _, variant = name.partition("/")
    run = entry.implementation(base).load()
    if base == "cute" and entry.kernels is not None:
        pack = None
        if machine.pack is not None:
            pack = packs.open_pack(machine.pack, machine.architecture, op, entry.kernel_sources)
        run = run(KernelCache(entry.kernels, pack))
        if variant:
            configs = {x.name.removeprefix(f"{op}_"): x for x in entry.kernels.configs(True)}
            if variant not in configs:
                raise ValueError(f"{op} has no kernel {variant!r}, only {', '.join(configs)}")
            run = partial(run, config=configs[variant])
    elif variant:
        keywords = parse_keywords(variant)
        known = [x.name for x in signature(run).parameters.values() if x.kind == x.KEYWORD_ONLY]
        if unknown := set(keywords) - set(known):
            raise ValueError(
                f"{op} in {base} has no keyword {min(unknown)!r}, only {', '.join(known) or 'none'}"
            )
        run = partial(run, **keywords)
    return run


def parse_keywords(text: str) -> dict[str, int | str]:
    """`rows=32,precision=tf32` as keywords."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and separator for name, separator, _ in pairs):
        raise ValueError(f"{text!r} is no variant: write name=value,name=value")
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, _, value in pairs}


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||, infinite for anything not finite."""
    wanted = reference.double().cpu()
    difference = (value.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float(difference) if difference.isfinite() else float("inf")


@cache
def checked_run(
    op: str, name: str, size: Size, machine: Machine, conv_dtype: torch.dtype | None = None
) -> Callable[..., Any]:
    """The callable, after one call of a few requests at the size was compared with the float64 reference.

    AssertionError gives the errors. `conv_dtype`: of the conv caches, where the op's inputs offer it.
    """
    run, options = load_run(op, name, machine), {} if conv_dtype is None else {"conv_dtype": conv_dtype}
    entry = get_entry(op)
    arguments, written = make_arguments(entry, size, machine.device, **options)
    want, exact = expected(entry, arguments, OPS["k3_kda_verify"].reference)
    got = run(*arguments.values())
    errors = {} if got is None else {"output": relative_error(got, want.to(got.dtype))}
    errors |= {name: relative_error(arguments[name], exact[name]) for name in written}
    limits = dict.fromkeys(errors, entry.tolerance.folded) | {"output": entry.tolerance.output}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if error > limits[name]}
    assert not wrong, f"it differs from the reference in {wrong}"
    return run


def small_size(size: Size) -> Size:
    """What an arm is compared at before it is timed: few requests and heads, the same tokens and drafts."""
    n, h = (1, size.h) if size.n == 1 else (CHECKED_REQUESTS, min(size.h, CHECKED_HEADS))
    return replace(size, n=n, h=h, t=min(size.t, CHECKED_TOKENS))
