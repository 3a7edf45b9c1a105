# SPDX-License-Identifier: Apache-2.0
"""The receipts of kernel tests, as far as they need no GPU."""

import json
import subprocess
import sys
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


def test_a_run_out_of_time_goes_on_from_its_receipt(tmp_path: Path) -> None:
    """Three tests, of which a run without time does one; all runs in one process beside this one."""
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        tests = "".join(f"def test_{i}(): pass\n" for i in range(3))
        (tmp_path / name / "test_three.py").write_text(tests)
    (tmp_path / "broken" / "test_broken.py").write_text("import nothing_of_this_name\n")
    first = {"test_three.py::test_0": "passed"}
    everything = {f"test_three.py::test_{i}": "passed" for i in range(3)}
    runs = [("whole", {}, -1), ("whole", first, 99), ("whole", everything, 99), ("broken", everything, 99)]
    code = (
        "import sys, json, pathlib\n"
        "from tests.gpu_receipt import Outcomes, run_tests\n"
        "for name, known, seconds in json.loads(sys.argv[2]):\n"
        "    outcomes = Outcomes(known, seconds)\n"
        "    code = run_tests(pathlib.Path(sys.argv[1], name), outcomes)\n"
        "    print('=', json.dumps([code, outcomes.complete, outcomes.tests]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(runs)]
    found = subprocess.run(command, cwd=gpu_receipt.ROOT, capture_output=True, text=True, check=True)
    results = [json.loads(line[2:]) for line in found.stdout.splitlines() if line.startswith("= ")]
    assert results[0] == [gpu_receipt.OUT_OF_TIME, False, first]
    assert results[1] == results[2] == [0, True, everything]
    assert results[3][:2] == [1, False]


def test_what_failed_or_was_found_on_other_sources_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert gpu_receipt.known_outcomes(path, "GPU") == {}
    receipt = {
        "gpu": "GPU",
        "source_hash": gpu_receipt.source_hash(),
        "versions": gpu_receipt._versions(),
        "tests": {"a": "passed", "b": "failed", "c": "skipped"},
    }
    path.write_text(json.dumps(receipt))
    assert gpu_receipt.known_outcomes(path, "GPU") == {"a": "passed", "c": "skipped"}
    assert gpu_receipt.known_outcomes(path, "another") == {}
    path.write_text(json.dumps(receipt | {"source_hash": "0"}))
    assert gpu_receipt.known_outcomes(path, "GPU") == {}
