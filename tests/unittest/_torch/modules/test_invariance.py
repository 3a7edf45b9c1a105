# SPDX-License-Identifier: Apache-2.0
"""A row's bits do not depend on its neighbours: what a batch-invariant model rests on, on this machine."""

import pytest
import torch

from tensorrt_llm._torch.modules.linear import FusedLinear, aligned_linear, pad_rows
from tensorrt_llm._torch.modules.pointwise import exp, sigmoid, silu, softplus, tanh


@pytest.mark.parametrize(("inner", "outer"), [(256, 1160), (256, 1536), (128, 192), (96, 128), (64, 256)])
def test_rows_of_a_product_do_not_depend_on_the_batch(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(517, inner), torch.randn(outer, inner)
    whole = aligned_linear(x, weight)
    for start, count in ((0, 1), (3, 8), (16, 5), (100, 64), (5, 512), (511, 6)):
        part = aligned_linear(x[start : start + count], weight)
        assert torch.equal(part, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("batch", [1, 2, 5, 16, 64])
def test_matrices_of_a_batched_product_do_not_depend_on_the_batch(batch: int) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(64, 4, 128), torch.randn(64, 128, 64)
    assert torch.equal(torch.bmm(left[:batch], right[:batch]), torch.bmm(left, right)[:batch])
    rows = torch.randn(64, 32, 128)
    assert torch.equal(torch.bmm(rows[:, :4].contiguous(), right), torch.bmm(rows, right)[:, :4])


@pytest.mark.parametrize("function", [exp, sigmoid, silu, softplus, tanh])
def test_elements_do_not_depend_on_where_they_lie(function) -> None:  # noqa: ANN001
    torch.manual_seed(0)
    x = torch.randn(70_001) * 3
    whole = function(x)
    for start, count in ((0, 1), (0, 2), (7, 31), (7, 33), (32_760, 20), (1, 70_000), (69_990, 11)):
        assert torch.equal(function(x[start : start + count]), whole[start : start + count]), (start, count)
    strided = x[:70_000].view(700, 100)[:, 3:9]
    assert torch.equal(function(strided), whole[:70_000].view(700, 100)[:, 3:9])


def test_pad_rows_leaves_whole_batches_alone() -> None:
    x = torch.ones(8, 3)
    assert pad_rows(x) is x
    padded = pad_rows(x[:5])
    assert padded.shape == (8, 3) and padded[5:].abs().sum() == 0


def test_fused_linear_names_its_parts() -> None:
    linear = FusedLinear(4, {"a": 3, "b": 2}, torch.float32)
    assert linear.weight.shape == (8, 4)
    linear.part("a").data.fill_(1.0)
    linear.part("b").data.fill_(2.0)
    parts = linear.split(linear(torch.ones(1, 4)))
    assert parts["a"].tolist() == [[4.0] * 3] and parts["b"].tolist() == [[8.0] * 2]
    with pytest.raises(KeyError):
        linear.part("c")
