# SPDX-License-Identifier: Apache-2.0
"""Which kind of memory a device's pools live in."""

import torch

from .errors import MisuseError
from .pools import CpuBackend, MemoryBackend


def make_backend(device: torch.device) -> MemoryBackend:
    """Return the backend of a device. MisuseError for a device that is not there."""
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda" and torch.cuda.is_available():
        # Needs cuda-bindings and a GPU, so it loads only where both are asked for.
        from .cuda_pools import CudaBackend

        return CudaBackend(device)
    raise MisuseError(f"device is {device}; use 'cpu', or 'cuda' on a machine with a working GPU")
