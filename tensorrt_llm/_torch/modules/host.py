# SPDX-License-Identifier: Apache-2.0
"""Numbers that the host may look at for nothing."""

from torch import Tensor


def host_values(tensor: Tensor) -> list[int] | None:
    """The numbers of an integer tensor [n] that lies in host memory; None for one on a device.

    Reading the latter would make the host wait for all work before it. Whoever asks has a form that does
    without: the numbers only save work.
    """
    if tensor.device.type != "cpu":
        return None
    values: list[int] = tensor.numpy().tolist()
    return values
