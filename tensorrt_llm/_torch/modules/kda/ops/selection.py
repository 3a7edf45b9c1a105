# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs here, a pack, the CuTe DSL, Triton, fla-core or torch; said once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tensorrt_llm import envs
from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES, Name, OpEntry
from tensorrt_llm.logger import logger


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a choice depends on. pack: a usable one is there; pack_refusal: why the one named is not."""

    architecture: str
    wanted: str
    pack: bool
    pack_refusal: str
    has_dsl: bool
    has_triton: bool
    has_fla: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`source` tells compiled kernels apart: "pack", "jit" or "" for the rest."""

    name: Name
    source: str
    reason: str


def choose(facts: Facts, names: tuple[str, ...]) -> Choice:
    """The fastest of an op's implementations `names` that runs there.

    Raises ValueError when the implementation asked for by TRTLLM_KDA_IMPLEMENTATION is one of them and cannot
    run; the variable says nothing to ops that lack it.
    """
    options = _options(facts, names)
    if facts.wanted not in names:
        return options[0]
    for option in options:
        if option.name == facts.wanted:
            return option
    available = ", ".join(dict.fromkeys(option.name for option in options))
    raise ValueError(
        f"TRTLLM_KDA_IMPLEMENTATION={facts.wanted} cannot run on {facts.architecture}"
        f"{facts.pack_refusal and f' ({facts.pack_refusal})'}: here there is {available}"
    )


def _options(facts: Facts, names: tuple[str, ...]) -> list[Choice]:
    on_gpu = facts.architecture != "cpu"
    found: list[Choice] = []
    why = facts.pack_refusal or "no kernel pack (TRTLLM_KERNEL_PACK)"
    if "cute" in names and facts.architecture in CUTE_ARCHITECTURES:
        if facts.pack:
            found.append(Choice(name="cute", source="pack", reason="the kernel pack matches"))
        if facts.has_dsl:
            found.append(Choice(name="cute", source="jit", reason=f"{why}; the CuTe DSL compiles"))
        why += "" if facts.has_dsl else "; no CuTe DSL"
    elif on_gpu:
        why = f"no CuTe DSL kernel for {facts.architecture}"
    if "triton" in names and on_gpu and facts.has_triton:
        found.append(Choice(name="triton", source="", reason=why))
    if "fla" in names and on_gpu and facts.has_triton and facts.has_fla:
        found.append(Choice(name="fla", source="", reason="fla-core is installed"))
    missing = "fla-core" if "fla" in names and facts.has_triton else "Triton"
    reason = f"{why}; no {missing}" if on_gpu else "the device is a CPU"
    found.append(Choice(name="torch", source="", reason=reason))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A choice made, and the callable that it stands for."""

    choice: Choice
    run: Callable[..., Any]


def architecture_of(device: torch.device) -> str:
    """ "cpu", or the name of a CUDA device's architecture such as sm_90a."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def select(entry: OpEntry, device: torch.device) -> Selection:
    """The implementation for a device and the two variables that name one and a pack; cached by these."""
    return _selected(entry, architecture_of(device), envs.kda_implementation(), envs.kernel_pack())


@cache
def _selected(entry: OpEntry, architecture: str, wanted: str, directory: Path | None) -> Selection:
    pack, refusal = None, ""
    if directory is not None and entry.kernels is not None and architecture in CUTE_ARCHITECTURES:
        try:
            pack = packs.open_pack(directory, architecture, entry.name, entry.kernel_sources)
        except packs.PackRefused as error:
            refusal = str(error)
            logger.warning_once(f"Kernel pack {directory} is not used: {refusal}")
    facts = Facts(
        architecture=architecture,
        wanted=wanted,
        pack=pack is not None,
        pack_refusal=refusal,
        has_dsl=find_spec("cutlass") is not None and find_spec("tvm_ffi") is not None,
        has_triton=find_spec("triton") is not None,
        has_fla=find_spec("fla") is not None,
    )
    choice = choose(facts, tuple(implementation.name for implementation in entry.implementations))
    run = entry.implementation(choice.name).load()
    if choice.name == "cute" and entry.kernels is not None:
        run = run(KernelCache(entry.kernels, pack))
    label = f"{choice.name}{f' ({choice.source})' if choice.source else ''}"
    logger.info_once(f"{entry.name} on {architecture}: {label}: {choice.reason}")
    return Selection(choice=choice, run=run)
