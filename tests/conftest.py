# SPDX-License-Identifier: Apache-2.0
"""What every test has: its seed, and `cuda` tests left out where there is no GPU."""

import random

import numpy as np
import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers alone as among others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
