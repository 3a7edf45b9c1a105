# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose rows do not depend on how many rows run beside them.

A CPU GEMM picks another kernel for one row, and for the rows left over by its tile: the same row then rounds
differently alone and in a batch. With the row count a multiple of 4 every row takes the same path (a test
checks it on the machine that runs), so the model pads its batch once, and whoever gathers rows pads again.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROW_ALIGNMENT = 4


def pad_rows(x: Tensor) -> Tensor:
    """x [rows, ...] with zero rows appended up to a multiple of 4; x itself when it is one already."""
    extra = -x.shape[0] % ROW_ALIGNMENT
    if not extra:
        return x
    return torch.cat((x, x.new_zeros(extra, *x.shape[1:])))


def aligned_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] @ weight [out, in]^T for any row count; see the module's comment."""
    rows = x.shape[0]
    return F.linear(pad_rows(x), weight)[:rows]


class FusedLinear(nn.Module):
    """Several projections of the same input as one weight [sum of widths padded to 8, in], without bias.

    `parts` maps each part's name to its width; `part(name)` is the view of its rows, which checkpoints load
    into and save from. The rows of the padding are zero.
    """

    def __init__(self, in_features: int, parts: dict[str, int], dtype: torch.dtype):
        super().__init__()
        self.widths = dict(parts)
        used = sum(parts.values())
        self.padding = -used % 8
        self.weight = nn.Parameter(torch.zeros(used + self.padding, in_features, dtype=dtype))

    def part(self, name: str) -> Tensor:
        """The weight rows [width, in] of one part, a view."""
        start = 0
        for other, width in self.widths.items():
            if other == name:
                return self.weight[start : start + width]
            start += width
        raise KeyError(name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def split(self, y: Tensor) -> dict[str, Tensor]:
        """Views of the output's columns by part."""
        sizes = [*self.widths.values(), self.padding]
        return dict(zip(self.widths, y.split(sizes, dim=-1), strict=False))
