# SPDX-License-Identifier: Apache-2.0
"""Runs the kernel tests on this machine's GPU and keeps a receipt of what passed.

python -m tests.gpu_receipt            run them and write tests/receipts/<gpu>.json
python -m tests.gpu_receipt --check    name receipts of other sources, or of cut runs; always exits 0
"""

import argparse
import json
import platform
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorrt_llm import envs
from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.selection import architecture_of

ROOT = Path(__file__).parents[1]
RECEIPTS = ROOT / "tests" / "receipts"
TESTS = ROOT / "tests" / "unittest" / "_torch" / "modules" / "kda" / "ops"
PACKAGES = ("torch", "triton", "apache-tvm-ffi", "nvidia-cutlass-dsl")


class Outcomes:
    """A pytest plugin that keeps every test's outcome."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.split("/")[-1]
            self.tests[name] = report.outcome


def source_hash() -> str:
    """What a receipt vouches for: sha256 over the sources of every implementation of every op."""
    return packs.source_hash(tuple({source for op in OPS.values() for source in op.sources}))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def run(out: Path | None) -> int:
    """Run the tests; the receipt is written whatever their outcome. Returns pytest's exit code."""
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 1
    outcomes = Outcomes()
    # `timeout` ends a run like this; what passed until then is still worth a receipt.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended from outside"))
    code = pytest.main([str(TESTS), "-q", "-m", "not slow", "-p", "no:cacheprovider"], plugins=[outcomes])
    counts = {name: list(outcomes.tests.values()).count(name) for name in ("passed", "failed", "skipped")}
    pack = envs.kernel_pack()
    name = torch.cuda.get_device_name()
    receipt = {
        "gpu": name,
        "architecture": architecture_of(torch.device("cuda")),
        "date": datetime.now(UTC).date().isoformat(),
        "source_hash": source_hash(),
        "versions": _versions(),
        "pack": packs.read_manifest(pack).versions if pack else None,
        "complete": code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        "counts": counts,
        "tests": dict(sorted(outcomes.tests.items())),
    }
    target = out or RECEIPTS / f"{name.lower().replace(' ', '_')}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(receipt, indent=1) + "\n")
    print(f"{target}: {counts}")
    return int(code)


def receipt_findings(directory: Path = RECEIPTS) -> list[str]:
    """One line per receipt of other sources than these, or of a run that did not reach its end."""
    current = source_hash()
    findings = []
    for path in sorted(directory.glob("*.json")):
        receipt = json.loads(path.read_text())
        again = "run make test-gpu on that GPU"
        if receipt["source_hash"] != current:
            findings.append(f"{path.name}: the kernels have moved on since {receipt['date']}; {again}")
        elif not receipt["complete"]:
            passed = receipt["counts"]["passed"]
            findings.append(f"{path.name}: the run was ended after {passed} tests had passed; {again}")
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu_receipt", description="Kernel tests with a receipt.")
    parser.add_argument("--check", action="store_true", help="name receipts of other sources, or of cut runs")
    parser.add_argument("--out", type=Path, help="where to write the receipt")
    options = parser.parse_args(argv)
    if not options.check:
        return run(options.out)
    for line in receipt_findings():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
