# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark and of the receipts that need no GPU."""

import json
from pathlib import Path

import pytest

from benchmarks.kda import Row, algorithm_bytes, layer_copies, parse_variant, pending_counts, table
from benchmarks.plot import after_predecessor_table, draw, read_points
from benchmarks.plot import table as plot_table
from tests import gpu_receipt


def test_bytes_are_those_of_the_shapes() -> None:
    """H 6, T 8: 1,034,368 bytes a request, 9,216 a replayed draft, 237 KB of weights a layer."""
    one, two = algorithm_bytes(1, 6, 8, 0), algorithm_bytes(2, 6, 8, 0)
    assert two - one == 1_034_368 - 8 * 4  # rows without their two columns of padding
    assert algorithm_bytes(1, 6, 8, 7) - one == 7 * 9_216
    assert one - (two - one) == 196_608 + 36_864 + 3_072 + 24 + 512


@pytest.mark.parametrize("requests", [1, 2, 4, 8, 64])
def test_a_graph_touches_240_megabytes(requests: int) -> None:
    assert layer_copies(requests) * algorithm_bytes(requests, 6, 8, "mixed") >= 240e6


def test_mixed_acceptance_covers_every_count() -> None:
    assert sorted(pending_counts(8, "mixed")) == list(range(8))
    assert pending_counts(2, 7) == [7, 7]


def test_variants_name_launches() -> None:
    assert parse_variant("split2_late").name == "k3_kda_verify_split2_pdl_late"
    assert parse_variant("split1_serial").chunked is False
    assert parse_variant("split8_nopdl").pdl is False


def test_the_committed_figures_draw_and_tabulate() -> None:
    path = Path(gpu_receipt.ROOT, "benchmarks", "results", "kda_h200.json")
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert {row.arm for row in rows} >= {"records", "copy", "fla_states", "fla_replay"}
    points = read_points(path)
    assert set(points["records", "cute"]) == {1, 2, 4, 8, 16, 32, 64, 128}
    assert draw(points).startswith("<svg") and "| 64 |" in plot_table(points)
    assert "| 64 | 6 |" in table(rows)


def test_the_documents_show_the_committed_figures() -> None:
    path = Path(gpu_receipt.ROOT, "benchmarks", "results", "kda_h200.json")
    text = Path(gpu_receipt.ROOT, "docs", "benchmarks.md").read_text()
    assert plot_table(read_points(path)) in text
    assert plot_table(read_points(path, heads=12)) in text
    assert after_predecessor_table(path) in text
    assert draw(read_points(path)) == path.with_suffix(".svg").read_text()


def test_receipts_of_other_sources_and_of_cut_runs_are_named(tmp_path: Path) -> None:
    current = {"source_hash": gpu_receipt.source_hash(), "date": "2026-01-01", "complete": True}
    (tmp_path / "cut.json").write_text(json.dumps(current | {"complete": False, "counts": {"passed": 7}}))
    (tmp_path / "new.json").write_text(json.dumps(current))
    (tmp_path / "old.json").write_text(json.dumps(current | {"source_hash": "0"}))
    cut, old = gpu_receipt.receipt_findings(tmp_path)
    assert cut.startswith("cut.json: the run was ended after 7 tests")
    assert old.startswith("old.json: the kernels have moved on") and "make test-gpu" in old
