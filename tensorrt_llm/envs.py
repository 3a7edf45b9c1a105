# SPDX-License-Identifier: Apache-2.0
"""Every environment variable the package reads, typed and documented; nothing else looks at the environment.

Each has one function that reads it when called, so a change between two calls is seen. An unset or empty
variable means its default; a malformed one is a ValueError that names it, its value and what it may be.
`docs/environment.md` is this table for readers.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar, cast

T = TypeVar("T", covariant=True)

LogLevel = Literal["trace", "debug", "verbose", "info", "warning", "error", "internal_error"]
KdaImplementation = Literal["auto", "torch", "triton", "cute"]
MambaManagerPreference = Literal["MIXED", "CPP"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar(Generic[T]):
    """One variable: how its text becomes a value, the value when it is unset, and what it is for.

    `parse` raises ValueError with the reason alone; `read` adds the name and the text.
    """

    name: str
    accepts: str
    default: T
    purpose: str
    parse: Callable[[str], T]

    def read(self) -> T:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(
                f"environment variable {self.name} is {text!r}; it must be {self.accepts} ({error})"
            ) from None


def _switch(text: str) -> bool:
    values = {"0": False, "1": True}
    if text not in values:
        raise ValueError("neither 0 nor 1")
    return values[text]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("not one of these")
        return text

    return parse


def _forced_acceptance(text: str) -> float | None:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError("negative or not finite")
    return number or None


def _directory(text: str) -> Path | None:
    path = Path(text)
    if not path.is_dir():
        raise ValueError("there is no such directory")
    return path


_LOG_LEVELS: tuple[str, ...] = ("trace", "debug", "verbose", "info", "warning", "error", "internal_error")

_LOG_LEVEL: EnvVar[str] = EnvVar(
    name="TLLM_LOG_LEVEL",
    accepts=" or ".join(_LOG_LEVELS),
    default="info",
    purpose="Least severe messages that the logger writes until `set_level` or `--log_level` says otherwise.",
    parse=lambda text: _one_of(*_LOG_LEVELS)(text.lower()),
)
_ENABLE_PDL: EnvVar[bool] = EnvVar(
    name="TRTLLM_ENABLE_PDL",
    accepts="0 or 1",
    default=True,
    purpose="Programmatic dependent launch (sm_90 on): a kernel's prologue overlaps the kernel before it.",
    parse=_switch,
)
_SERVER_DISABLE_GC: EnvVar[bool] = EnvVar(
    name="TRTLLM_SERVER_DISABLE_GC",
    accepts="0 or 1",
    default=False,
    purpose="Turns Python's garbage collector off in the server, against pauses in the loop.",
    parse=_switch,
)
_FORCE_NUM_ACCEPTED_TOKENS: EnvVar[float | None] = EnvVar(
    name="TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS",
    accepts="a number >= 0, such as 3 or 2.6",
    default=None,
    purpose="For measurements only: drafts accepted per round whatever the model says; 2.6 is always 2 and a "
    "third with probability 0.6; 0 is off.",
    parse=_forced_acceptance,
)
_KDA_IMPLEMENTATION: EnvVar[str] = EnvVar(
    name="TRTLLM_KDA_IMPLEMENTATION",
    accepts="auto or torch or triton or cute",
    default="auto",
    purpose="Implementation of the KDA ops; auto takes the fastest that serves shape and device.",
    parse=_one_of("auto", "torch", "triton", "cute"),
)
_KERNEL_PACK: EnvVar[Path | None] = EnvVar(
    name="TRTLLM_KERNEL_PACK",
    accepts="an existing directory",
    default=None,
    purpose="Directory of kernels that `trtllm-kernels` compiled; unset, kernels compile on first use.",
    parse=_directory,
)
_USE_PY_MAMBA: EnvVar[bool] = EnvVar(
    name="TRTLLM_USE_PY_MAMBA",
    accepts="0 or 1",
    default=False,
    purpose="TensorRT-LLM's switch to its Python state manager; refused where the configuration differs.",
    parse=_switch,
)
_MAMBA_MANAGER_PREFERENCE: EnvVar[str | None] = EnvVar(
    name="TLLM_MAMBA_MANAGER_PREFERENCE",
    accepts="MIXED or CPP",
    default=None,
    purpose="TensorRT-LLM's choice of an older state manager; refused where the configuration differs.",
    parse=_one_of("MIXED", "CPP"),
)

VARIABLES: tuple[EnvVar[object], ...] = (
    _LOG_LEVEL,
    _ENABLE_PDL,
    _SERVER_DISABLE_GC,
    _FORCE_NUM_ACCEPTED_TOKENS,
    _KDA_IMPLEMENTATION,
    _KERNEL_PACK,
    _USE_PY_MAMBA,
    _MAMBA_MANAGER_PREFERENCE,
)


def log_level() -> LogLevel:
    """`TLLM_LOG_LEVEL`."""
    return cast(LogLevel, _LOG_LEVEL.read())


def enable_pdl() -> bool:
    """`TRTLLM_ENABLE_PDL`."""
    return _ENABLE_PDL.read()


def server_disable_gc() -> bool:
    """`TRTLLM_SERVER_DISABLE_GC`."""
    return _SERVER_DISABLE_GC.read()


def force_num_accepted_tokens() -> float | None:
    """`TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`; None when acceptance is the model's."""
    return _FORCE_NUM_ACCEPTED_TOKENS.read()


def kda_implementation() -> KdaImplementation:
    """`TRTLLM_KDA_IMPLEMENTATION`."""
    return cast(KdaImplementation, _KDA_IMPLEMENTATION.read())


def kernel_pack() -> Path | None:
    """`TRTLLM_KERNEL_PACK`; None when kernels compile on first use."""
    return _KERNEL_PACK.read()


def use_py_mamba() -> bool:
    """`TRTLLM_USE_PY_MAMBA`."""
    return _USE_PY_MAMBA.read()


def mamba_manager_preference() -> MambaManagerPreference | None:
    """`TLLM_MAMBA_MANAGER_PREFERENCE`; None when unset."""
    return cast(MambaManagerPreference | None, _MAMBA_MANAGER_PREFERENCE.read())
