# SPDX-License-Identifier: Apache-2.0
"""A guard that notes whatever would make the host wait for a device, and so works without one.

Two kinds of call wait: those that need a tensor's numbers (`item`, `tolist`, a condition, a boolean mask,
operators whose result's size depends on them) and copies through memory that is not pinned (`torch.tensor` of
a list, an index that is a list).
"""

import sys
from collections.abc import Callable, Sequence
from types import CodeType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from tensorrt_llm._torch.modules import moe
from tensorrt_llm._torch.modules.kda import verify_scheme
from tensorrt_llm._torch.pyexecutor.kv_cache.device_copy import to_device
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.index_buffers import StateIndexBuffers

READERS_OF_HOST_VALUES = (moe, verify_scheme)
"""Modules that have a form for numbers in host memory and one for numbers on a device."""

PINNED_COPIES: tuple[CodeType, ...] = (to_device.__code__, StateIndexBuffers._copy.__code__)
"""Where numbers go to a device: through pinned memory, and the host goes on."""

DEFINITIONS = "reference.py"
"""Files of the ops' definitions in torch, which may read numbers: on a GPU kernels stand for them."""

_READS = frozenset(
    f"torch.Tensor.{name}"
    for name in (
        "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "__array__", "cpu",
        "equal", "is_nonzero", "item", "numpy", "tolist",
    )
)  # fmt: skip
_COPIES = frozenset({"torch.tensor", "torch.as_tensor", "torch.from_numpy", "torch.Tensor.new_tensor"})
_DATA_DEPENDENT = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "equal",
     "is_nonzero", "repeat_interleave", "histc")
)  # fmt: skip


def _has_list_or_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list | range) or (isinstance(part, Tensor) and part.dtype == torch.bool)
        for part in parts
    )


class _DataDependent(TorchDispatchMode):
    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _DATA_DEPENDENT:
            self._found(name)
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchFunctionMode):
    """Notes in `found` what would wait; the functions `reads` may read numbers, `num_reads` times so far."""

    def __init__(self, reads: Sequence[Callable[..., object]] = ()) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_reads = 0
        self._allowed_reads = tuple(function.__code__ for function in reads)
        self._dispatch = _DataDependent(self._note)

    def __enter__(self) -> Self:
        super().__enter__()
        self._dispatch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatch.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = resolve_name(func) or str(func)
        if name in _READS and sys._getframe(1).f_code in self._allowed_reads:
            self.num_reads += 1
            return func(*args, **(kwargs or {}))
        if name in _READS or (name in _COPIES and sys._getframe(1).f_code not in PINNED_COPIES):
            self._note(name)
        elif name.endswith(("__getitem__", "__setitem__")) and _has_list_or_mask(args[1]):
            self._note(f"{name} with a list or a mask")
        elif name == "torch.Tensor.to" and any(str(part) == "cpu" for part in args[1:]):
            self._note(f"{name} cpu")
        return func(*args, **(kwargs or {}))

    def _note(self, name: str) -> None:
        frame = sys._getframe(1)
        while frame is not None and not _is_of_the_package(frame.f_code):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and frame.f_code.co_filename.endswith(DEFINITIONS):
            return
        place = "" if frame is None else f" in {frame.f_code.co_qualname}:{frame.f_lineno}"
        self.found.append(name + place)


def _is_of_the_package(code: CodeType) -> bool:
    return "tensorrt_llm" in code.co_filename and "tests" not in code.co_filename
