# SPDX-License-Identifier: Apache-2.0
"""Numbers of the host's, brought to a device without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """The numbers [n] on `device`, through pinned memory: the host goes on while they are copied."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
