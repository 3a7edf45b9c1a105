# SPDX-License-Identifier: Apache-2.0
"""Calls the host code of a compiled CuTe DSL function with CPU tensors and records what it would launch.

The function is exported as an object file and linked with `capture.c`, which takes the place of the CUDA
runtime; so grid, cluster, shared memory and the bytes of every parameter are those of a real launch.
"""

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_CUDA = 2  # kDLCUDA: the launcher refuses other devices
_NONE, _INT, _BOOL, _FLOAT, _TENSOR = 0, 1, 2, 3, 7  # TVMFFITypeIndex
_CODES = {  # DLDataTypeCode
    torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0, torch.uint8: 1, torch.float16: 2,
    torch.float32: 2, torch.float64: 2, torch.bfloat16: 4, torch.bool: 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `parameters` holds the bytes of each kernel parameter."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    parameters: tuple[bytes, ...]


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Value(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    """TVMFFIAny."""

    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value)]


_UINT3 = ctypes.POINTER(ctypes.c_uint32)
_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, _UINT3, _UINT3, _UINT3, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
)


class HostLauncher:
    """The host code of a compiled function. `parameter_bytes`: the sizes of a kernel's parameters."""

    def __init__(self, compiled: Any, parameter_bytes: dict[str, tuple[int, ...]]) -> None:
        self._sizes = parameter_bytes
        self._launches: list[Launch] = []
        self._callback = _CALLBACK(self._record)
        with tempfile.TemporaryDirectory() as directory:
            self._library = ctypes.CDLL(str(_link(compiled, Path(directory))))
        self._library.capture_error.restype = ctypes.c_char_p
        self._library.capture_set_callback(self._callback)
        self._call = self._library["__tvm_ffi_function"]

    def _record(self, name: bytes, grid: Any, block: Any, cluster: Any, shared: int, parameters: Any) -> None:
        sizes = self._sizes[name.decode()]
        self._launches.append(
            Launch(
                name.decode(), tuple(grid[:3]), tuple(block[:3]), tuple(cluster[:3]), shared,
                tuple(ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)),
            )
        )  # fmt: skip

    def launches(self, arguments: tuple[Any, ...]) -> list[Launch]:
        """What a call launches, in order. Raises ValueError with the launcher's words where it refuses."""
        values = (_Any * len(arguments))()
        kept = [_fill(values[i], argument, i) for i, argument in enumerate(arguments)]
        result = _Any()
        self._launches = []
        code = self._call(None, values, ctypes.c_int32(len(arguments)), ctypes.byref(result))
        del kept
        if code != 0:
            raise ValueError(self._library.capture_error().decode())
        return self._launches


def _link(compiled: Any, directory: Path) -> Path:
    target, source = directory / "function.so", Path(__file__).with_name("capture.c")
    compiled.export_to_c(str(directory / "function.o"), function_name="function")
    command = [
        "gcc",
        "-shared",
        "-Wl,-Bsymbolic",  # the process may hold the real tvm-ffi
        "-fPIC",
        "-O1",
        "-w",
        "-o",
        str(target),
        str(source),
        f"{directory}/function.o",
    ]
    subprocess.run(command, check=True)
    return target


def _fill(slot: _Any, argument: Any, position: int) -> Any:
    """Write an argument; the result has to live as long as the call."""
    if argument is None:
        slot.type_index = _NONE
    elif isinstance(argument, bool):
        slot.type_index, slot.value.integer = _BOOL, int(argument)
    elif isinstance(argument, int):
        slot.type_index, slot.value.integer = _INT, argument
    elif isinstance(argument, float):
        slot.type_index, slot.value.real = _FLOAT, argument
    elif isinstance(argument, torch.Tensor):
        tensor = _as_cuda(argument)
        slot.type_index, slot.value.pointer = _TENSOR, ctypes.addressof(tensor)
        return tensor
    else:
        raise TypeError(f"argument {position} is {type(argument).__name__}; give tensors, numbers or None")
    return None


def _as_cuda(tensor: torch.Tensor) -> _Tensor:
    extents = ctypes.c_int64 * max(tensor.dim(), 1)
    return _Tensor(
        data=tensor.data_ptr(), device_type=_CUDA, device_id=0, ndim=tensor.dim(), code=_CODES[tensor.dtype],
        bits=8 * tensor.element_size(), lanes=1, shape=extents(*tensor.shape),
        strides=extents(*tensor.stride()), byte_offset=0,
    )  # fmt: skip
