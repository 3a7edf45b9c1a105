# SPDX-License-Identifier: Apache-2.0
"""Transcendental functions that give an element the same bits wherever it lies in a tensor.

On a CPU torch computes exp and its kin by a vector routine, and the rest of a loop (what is left of 32
elements, at the end of each thread's part) by the scalar library, which rounds differently. So elements are
taken in whole vectors and in parts that one thread takes alone. On a GPU, and where gradients are recorded,
nothing changes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_VECTOR_ELEMENTS = 32
_SERIAL_ELEMENTS = 32_768
"""torch's grain size: loops of at most this many elements are not split between threads."""


def pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an elementwise function; same shape and dtype as x."""
    if x.is_cuda or x.requires_grad:
        return function(x)
    n = x.numel()
    if n <= _SERIAL_ELEMENTS and n % _VECTOR_ELEMENTS == 0:
        return function(x.contiguous())
    flat = F.pad(x.reshape(-1), (0, -n % _VECTOR_ELEMENTS))
    return torch.cat([function(part) for part in flat.split(_SERIAL_ELEMENTS)])[:n].view(x.shape)


def exp(x: Tensor) -> Tensor:
    return pointwise(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    return pointwise(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    return pointwise(F.silu, x)


def softplus(x: Tensor) -> Tensor:
    return pointwise(F.softplus, x)


def tanh(x: Tensor) -> Tensor:
    return pointwise(torch.tanh, x)
