# SPDX-License-Identifier: Apache-2.0
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unittest.serve.running_server import ServeCall, Served, serve


@pytest.fixture
def serving() -> Iterator[ServeCall]:
    """`serving(script, **options)` starts a server; all stop after the test."""
    with contextlib.ExitStack() as stack:

        def start(script: dict[str, Any] | None = None, **options: Any) -> Served:
            return stack.enter_context(serve(script or {}, options))

        yield start


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for all tests of a module that leave it as it is."""
    with serve({"text": "x€ def", "run_lengths": (2, 1)}, {}) as server:
        yield server
