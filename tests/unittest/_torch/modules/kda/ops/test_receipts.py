# SPDX-License-Identifier: Apache-2.0
"""The receipts of kernel tests, as far as they need no GPU."""

import json
from pathlib import Path

from tests import gpu_receipt


def test_receipts_of_other_sources_and_of_cut_runs_are_named(tmp_path: Path) -> None:
    current = {"source_hash": gpu_receipt.source_hash(), "date": "2026-01-01", "complete": True}
    (tmp_path / "cut.json").write_text(json.dumps(current | {"complete": False, "counts": {"passed": 7}}))
    (tmp_path / "new.json").write_text(json.dumps(current))
    (tmp_path / "old.json").write_text(json.dumps(current | {"source_hash": "0"}))
    cut, old = gpu_receipt.receipt_findings(tmp_path)
    assert cut.startswith("cut.json: the run was ended after 7 tests")
    assert old.startswith("old.json: the kernels have moved on") and "make test-gpu" in old
