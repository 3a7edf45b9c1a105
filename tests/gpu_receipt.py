# SPDX-License-Identifier: Apache-2.0
"""Runs the kernel tests on this machine's GPU and keeps a receipt of what passed.

python -m tests.gpu_receipt            run them and write tests/receipts/<gpu>.json
python -m tests.gpu_receipt --seconds 120
                                       begin none after so long; code 3: run again to go on from the receipt
python -m tests.gpu_receipt --check    name receipts of other sources, or of cut runs; always exits 0
"""

import argparse
import json
import math
import platform
import signal
import sys
import time
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
OUT_OF_TIME = 3


class Outcomes:
    """A pytest plugin that keeps every test's outcome, begins none after `seconds` and leaves out the known.

    tests: outcomes by name; at first those `known` from an earlier run. collected: the names of all.
    """

    def __init__(self, known: dict[str, str], seconds: float = math.inf) -> None:
        self.tests = dict(known)
        self.collected: set[str] = set()
        self.is_broken = False
        self._known = frozenset(known)
        self._end = time.monotonic() + seconds

    @property
    def complete(self) -> bool:
        return bool(self.collected) and self.collected <= self.tests.keys() and not self.is_broken

    def pytest_collectreport(self, report: Any) -> None:
        self.is_broken = self.is_broken or report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        self.collected = {_name(item.nodeid) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if _name(item.nodeid) in self._known])
        items[:] = [item for item in items if _name(item.nodeid) not in self._known]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests[_name(report.nodeid)] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: Any) -> None:
        if time.monotonic() > self._end:
            item.session.shouldstop = "time is up"


def _name(nodeid: str) -> str:
    return nodeid.split("/")[-1]


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


def known_outcomes(path: Path, gpu: str) -> dict[str, str]:
    """What an earlier run on the same GPU, sources and versions found passed or skipped; else nothing."""
    if not path.exists():
        return {}
    receipt = json.loads(path.read_text())
    same = {"gpu": gpu, "source_hash": source_hash(), "versions": _versions()}
    if any(receipt[name] != value for name, value in same.items()):
        return {}
    return {name: outcome for name, outcome in receipt["tests"].items() if outcome != "failed"}


def run_tests(directory: Path, outcomes: Outcomes) -> int:
    """0 when all of a directory's tests passed, 1 when one failed, OUT_OF_TIME when some were not run."""
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    code = pytest.main([str(directory), *options], plugins=[outcomes])
    usual = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.INTERRUPTED)
    if code not in usual or outcomes.is_broken or "failed" in outcomes.tests.values():
        return 1
    return 0 if outcomes.complete else OUT_OF_TIME


def run(out: Path | None, seconds: float = math.inf) -> int:
    """Run the tests; the receipt is written whatever their outcome. Returns the exit code of `run_tests`.

    With a limit of time, tests that the receipt has from the same sources are not run again.
    """
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name()
    target = out or RECEIPTS / f"{name.lower().replace(' ', '_')}.json"
    outcomes = Outcomes(known_outcomes(target, name) if seconds < math.inf else {}, seconds)
    # `timeout` ends a run like this; what passed until then is still worth a receipt.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended from outside"))
    code = run_tests(TESTS, outcomes)
    counts = {name: list(outcomes.tests.values()).count(name) for name in ("passed", "failed", "skipped")}
    pack = envs.kernel_pack()
    receipt = {
        "gpu": name,
        "architecture": architecture_of(torch.device("cuda")),
        "date": datetime.now(UTC).date().isoformat(),
        "source_hash": source_hash(),
        "versions": _versions(),
        "pack": packs.read_manifest(pack).versions if pack else None,
        "complete": outcomes.complete,
        "counts": counts,
        "tests": dict(sorted(outcomes.tests.items())),
    }
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
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no test after so long")
    options = parser.parse_args(argv)
    if not options.check:
        return run(options.out, options.seconds)
    for line in receipt_findings():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
