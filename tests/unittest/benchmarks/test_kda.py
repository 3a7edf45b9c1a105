# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the KDA ops, as far as it goes without a GPU; its figures are no matter for tests."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import plot
from benchmarks.kda import command, comparisons, rows, runs
from benchmarks.kda.goals import GOALS, goals_table
from benchmarks.kda.inputs import make_layers
from benchmarks.kda.rows import Row, findings, merge, parse_row, read_rows, source_hash, write_rows
from benchmarks.kda.runs import Machine, parse_keywords
from benchmarks.kda.sizes import (
    REQUESTS,
    STANDARD,
    Size,
    copies_of,
    decode_bytes,
    intermediate_bytes,
    layer_copies,
    pending_counts,
    prefill_bytes,
    records_bytes,
    replay_bytes,
)
from benchmarks.kda.table import ratios, table
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.verify_scheme import INTERMEDIATE, RECORDS, REPLAY, KdaGeometry

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "kda_h200.json"
GEOMETRY = KdaGeometry(num_heads=6, head_dim=128, conv_width=4, num_spec=7)
HERE = [name for name, ops in comparisons.OPS_OF.items() if all(op in OPS for op in ops)]


def make_row(**changes) -> Row:
    row = Row(
        op="k3_kda_verify", arm="records", implementation="triton", n=8, h=6, t=8, p="mixed", us=8.5,
        us_spread=0.1, bytes=9, tokens=64, source_hash=source_hash("k3_kda_verify", "records", "triton"),
    )  # fmt: skip
    return replace(row, **changes)


def test_bytes_are_those_of_the_shapes() -> None:
    """H 6, T 8: 1,034,368 bytes a request, 9,216 a replayed draft, 237 KB of weights a layer."""
    one, two = records_bytes(Size(n=1, p=0)), records_bytes(Size(n=2, p=0))
    assert two - one == 1_034_368 - 8 * 4  # rows without their two columns of padding
    assert records_bytes(Size(n=1, p=7)) - one == 7 * 9_216
    assert one - (two - one) == 196_608 + 36_864 + 3_072 + 24 + 512


def test_schemes_differ_by_what_a_slot_holds_of_drafts() -> None:
    """A full round writes every draft of a slot; the beta rows' padding is not written."""
    held = {
        scheme.name: sum(
            x.bytes_per_slot_layer for x in scheme.slot_buffers(GEOMETRY) if "conv" not in x.name
        )
        for scheme in (RECORDS, REPLAY, INTERMEDIATE)
    }
    none = Size(n=1, p=0)
    assert replay_bytes(none) - records_bytes(none) == held["replay"] - 7 * 8 - held["records"]
    assert intermediate_bytes(none) - records_bytes(none) == held["intermediate"] - held["records"]
    promoted = intermediate_bytes(Size(n=3, p=1)) - intermediate_bytes(Size(n=3, p=0))
    assert promoted == 3 * (2 * 393_216 + 2 * 3 * 768 * 3 * 4)
    assert records_bytes(none) - records_bytes(none, conv_bytes=2) == (27_648 + 92_160) // 2


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
def test_a_graph_touches_240_megabytes(n: int) -> None:
    assert layer_copies(n) * records_bytes(Size(n=n)) >= 240e6
    assert layer_copies(n) * decode_bytes(Size(n=n, t=1, p=0)) >= 240e6
    assert {1: 283, 2: 164, 4: 90}.get(n, 48) == layer_copies(n)
    prompt = prefill_bytes(Size(n=1, t=128 * n, p=0))
    assert copies_of(prompt) * prompt >= 240e6


def test_mixed_acceptance_covers_every_count() -> None:
    assert sorted(pending_counts(8, "mixed")) == list(range(8))
    assert pending_counts(2, 7) == [7, 7]


def test_the_standard_sizes_are_those_that_the_goals_name() -> None:
    verify = set(STANDARD["verify"])
    assert {(size.n, size.p) for size in verify if size.h == 6} == {
        (n, p) for n in REQUESTS for p in (0, 3, 7, "mixed")
    }
    assert {size.h for size in verify} == {6, 12}
    assert [size.t for size in STANDARD["prefill"]] == [128 << i for i in range(7)]


def test_layers_share_slots_and_counts_and_nothing_else() -> None:
    size = Size(n=3, h=1, t=2, p=5)
    layers = make_layers(OPS["kda_mtp_decode"], size, 2, "cpu")
    first, second = layers.arguments
    assert first["slots"] is second["slots"] and first["pending"] is second["pending"]
    assert first["pending"][first["slots"].long()].tolist() == [5, 5, 5]
    for name in ("proj", "ssm", "cs_q", "qkg_cache", "w_fb"):
        a, b = first[name], second[name]
        assert a.stride() == b.stride() and b.data_ptr() > a.data_ptr(), name
        assert (b.data_ptr() - a.data_ptr()) % 128 == 0, name
    assert first["cs_q"].stride(1) == 1 and not torch.equal(first["ssm"], second["ssm"])
    layers.stacked["ssm"][1] = 0
    assert not second["ssm"].any() and first["ssm"].any()


def test_a_dry_run_times_every_arm_and_its_rows_keep_the_schema(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert command.main(["--dry-run", "--op", *HERE, "--out", str(out)]) == command.DONE
    found = read_rows(out)
    names = {row.arm for row in found}
    wanted = {"records", "replay", "intermediate", "records_bf16_conv", "fla_states", "fla_replay", "copy"}
    assert names >= wanted | {"decode", "prefill", "fla_core", "after_predecessor"}
    assert all(parse_row(json.loads(row.dump())) == row and row.tokens >= 0 for row in found)
    assert {row.implementation for row in found if row.arm in comparisons.ARM_NAMES[:4]} == {"torch"}
    behind = {row.op for row in found if row.arm == "after_predecessor"}
    assert behind == {"k3_kda_verify", "kda_mtp_decode", "kda_intermediate_verify", "kda_decode"}
    assert findings(found) == []


def test_an_arm_that_fails_says_so_in_one_line_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An implementation with another result, an op that is not there, and a kernel that does not run."""
    runs.checked_run.cache_clear()
    runs.load_run.cache_clear()
    wrong = replace(
        OPS["kda_mtp_decode"],
        implementations=(
            replace(
                OPS["kda_mtp_decode"].implementation("torch"),
                load=lambda: lambda *x: OPS["kda_mtp_decode"].reference(*x) * 1.1,
            ),
        ),
    )
    monkeypatch.setitem(OPS, "kda_mtp_decode", wrong)
    monkeypatch.delitem(OPS, "kda_intermediate_verify")
    out = tmp_path / "rows.json"
    assert command.main(["--dry-run", "--op", "verify", "--out", str(out)]) == command.FAILED
    runs.checked_run.cache_clear()
    runs.load_run.cache_clear()
    names = {row.arm for row in read_rows(out)}
    assert {"records", "copy", "fla_states"} <= names and not names & {"replay", "intermediate"}
    errors = capsys.readouterr().err.splitlines()
    assert any(line.startswith("kda_mtp_decode replay torch: AssertionError: it differs") for line in errors)
    assert any(line.startswith("kda_intermediate_verify intermediate: ValueError") for line in errors)
    assert all(len(line) <= 300 for line in errors)


def test_a_limit_of_time_leaves_the_rest_to_the_next_run(tmp_path: Path) -> None:
    main = partial(
        command.main, ["--dry-run", "--op", "decode", "prefill", "--out", str(tmp_path / "x.json")]
    )
    arguments = ["--dry-run", "--op", "decode", "prefill", "--out", str(tmp_path / "rows.json")]
    assert command.main([*arguments, "--seconds", "-1"]) == command.OUT_OF_TIME
    assert main() == command.DONE
    assert command.main([*arguments[:-1], str(tmp_path / "x.json"), "--seconds", "-1"]) == command.DONE


def test_a_copy_that_is_slow_leaves_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "check_yardsticks", lambda device: None)
    monkeypatch.setattr(command, "copy_rate", lambda session: 3.5)
    monkeypatch.setattr(command, "run", lambda options, session: pytest.fail("it went on"))
    assert command.main([]) == command.FAILED
    assert "3.50 TB/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "kda_commit_pending"], "nothing measures"),
        (["--p", "5"], "no standard size"),
        (["--check"], "--out"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--dry-run", *arguments])
    assert words in capsys.readouterr().err


def test_every_op_and_comparison_is_named_once() -> None:
    assert comparisons.comparison_of("kda_mtp_decode") == comparisons.comparison_of("verify") == "verify"
    ops = [op for found in comparisons.OPS_OF.values() for op in found]
    assert len(set(ops)) == len(ops)
    assert set(comparisons.COMPARISONS) == set(comparisons.OPS_OF) == set(STANDARD)


def test_variants_are_kernels_by_symbol_or_keywords() -> None:
    assert parse_keywords("rows=32,precision=tf32") == {"rows": 32, "precision": "tf32"}
    with pytest.raises(ValueError, match="name=value"):
        parse_keywords("rows32")
    machine = Machine(device="cpu", variants=True)
    assert runs.implementation_names("k3_kda_verify", machine) == ["torch"]
    with pytest.raises(ValueError, match="no keyword 'speed'"):
        runs.load_run("kda_decode", "triton/speed=2", machine)
    with pytest.raises(ValueError, match="no kernel 'split3'.*split1"):
        runs.load_run("k3_kda_verify", "cute/split3", machine)


def test_on_a_gpu_kernels_are_measured_and_an_op_without_any_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "architecture_of", lambda device: "sm_90a")
    machine = Machine(device="cuda", variants=True)
    assert runs.implementation_names("kda_prefill", machine) == ["fla"]
    names = runs.implementation_names("k3_kda_verify", machine)
    assert names[0] == "cute" and {"cute/split1_serial", "triton/rows=32,warps=8"} <= {
        name.replace("split1_pdl_serial", "split1_serial") for name in names
    }
    assert not any("gext" in name or "bf16conv" in name for name in names) and "torch" not in names
    halves = runs.implementation_names("k3_kda_verify", machine, bf16_conv=True)
    assert {name for name in halves if name.startswith("cute/")} == {
        name for name in halves if "bf16conv" in name
    }
    prefill = OPS["kda_prefill"]
    bare = replace(prefill, implementations=(prefill.implementation("torch"),))
    monkeypatch.setitem(OPS, "kda_prefill", bare)
    (arm,) = comparisons.op_arms(comparisons.PREFILL_ARM, Size(n=1, t=64, p=0), 1, machine)
    with pytest.raises(ValueError, match="nothing but its torch reference on sm_90a"):
        arm.make()


@pytest.mark.parametrize("op", sorted({op for ops in comparisons.OPS_OF.values() for op in ops if op in OPS}))
def test_every_variant_that_is_listed_can_be_loaded(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "architecture_of", lambda device: "sm_90a")
    machine = Machine(device="cuda", variants=True)
    for name in runs.implementation_names(op, machine):
        assert callable(runs.load_run(op, name, machine)), name


def test_prompts_are_launched_one_by_one_and_everything_else_is_captured() -> None:
    machine = Machine(device="cpu", copies=1)
    for comparison, size in (("prefill", Size(n=1, h=1, t=65, p=0)), ("decode", Size(n=1, h=1, t=1, p=0))):
        captured = {arm.name: arm.is_captured for arm in comparisons.COMPARISONS[comparison](size, machine)}
        one_by_one = {"prefill", "fla_core"}
        assert captured == {name: name not in one_by_one for name in captured}


def test_goals_are_read_off_the_rows() -> None:
    lines = [line.strip("| ").split(" | ") for line in goals_table(read_rows(RESULTS)).splitlines()[2:]]
    verdicts = {cells[0]: cells[-1] for cells in lines}
    assert verdicts["verify, N 1: us"] == "met" and verdicts["verify, N 8: us"] == "missed"
    assert verdicts["verify, any N: Triton over CuTe DSL"] == "missed"
    replay = make_row(op="kda_mtp_decode", arm="replay", p=7, us=10.3)
    states = make_row(op="kda_intermediate_verify", arm="intermediate", n=16, us=17.0)
    found = [make_row(p=7), replay, make_row(n=16), states]
    values = {goal.name: goal.measure(found) for goal in GOALS}
    assert values["any N and P: us of records beyond replay and spread"] == pytest.approx(8.5 - 10.3 - 0.1)
    assert values["N <= 8, P 7: records over replay"] == pytest.approx(8.5 / 10.3) and 8.5 / 10.3 < 1 / 1.2
    assert values["N >= 16: records over intermediate states"] == 0.5
    assert values["decode, N 1: us"] is None


def test_rows_join_those_of_earlier_runs_and_old_ones_are_marked(tmp_path: Path) -> None:
    kept, measured = make_row(n=1), make_row(us=7.5)
    old, copy = make_row(n=2, source_hash="0" * 16), make_row(arm="copy", implementation="torch")
    joined = merge([make_row(), kept, old, copy], [measured, replace(copy, implementation="1024x4")])
    assert joined == [measured, kept, replace(old, stale=True), replace(copy, implementation="1024x4")]
    write_rows(tmp_path / "rows.json", joined)
    assert read_rows(tmp_path / "rows.json") == joined
    assert findings(joined)[1:] == ["k3_kda_verify, records triton: 1 figures are of other sources"]
    carried = rows.carry(joined, ["triton", "copy"])
    assert findings(carried) == [] and not any(row.stale for row in carried)
    assert rows.carry(joined, ["cute"]) == joined


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speed": 3}, "unknown field 'speed'"),
        ({"us": "fast"}, "us of a row"),
        ({"us": float("nan")}, "us of a row"),
        ({"p": "some"}, "p of a row"),
        ({"n": 1.5}, "n of a row"),
    ],
)
def test_rows_of_another_schema_are_refused(change, words: str) -> None:
    values = json.loads(make_row().dump()) | change
    with pytest.raises(ValueError, match=words):
        parse_row(values)
    values.pop("op")
    with pytest.raises(ValueError, match="unknown field|lacks 'op'"):
        parse_row(values)


def test_tables_and_ratios_show_bytes_and_tokens_beside_the_time() -> None:
    replay = make_row(op="kda_mtp_decode", arm="replay", us=17.0, bytes=2_000_000, tokens=96)
    text = ratios([make_row(), make_row(implementation="triton/rows=16", us=1.0), replay])
    assert "replay takes 2.00 times records (8.50 us, 0.00 MB, 64 tokens" in text
    assert "17.00 us, 2.00 MB, 96 tokens" in text
    behind = [
        make_row(op=op, arm="after_predecessor", us=us)
        for op, us in (("k3_kda_verify", 1), ("kda_decode", 2))
    ]
    assert "| 8 | 6 | 8 | mixed | 1.00 | 2.00 |" in table(behind)


def test_the_committed_figures_draw_and_tabulate() -> None:
    found = read_rows(RESULTS)
    assert {row.arm for row in found} >= {"records", "copy", "fla_states", "fla_replay"}
    assert len({row.key for row in found}) == len(found)
    points = plot.read_points(RESULTS)
    assert set(points["records", "cute"]) == {1, 2, 4, 8, 16, 32, 64, 128}
    assert plot.draw(points).startswith("<svg") and "| 64 |" in plot.table(points)
    assert "| 64 | 6 | 8 | mixed |" in table(found)


def test_the_documents_show_the_committed_figures() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert plot.table(plot.read_points(RESULTS)) in text
    assert plot.table(plot.read_points(RESULTS, heads=12)) in text
    assert plot.after_predecessor_table(RESULTS) in text
    for picture in plot.PICTURES.values():
        if points := plot.read_points(RESULTS, picture=picture):
            suffix = "" if picture is plot.VERIFY else f"-{picture.comparison}"
            assert (
                plot.draw(points, picture)
                == RESULTS.with_stem(f"kda_h200{suffix}").with_suffix(".svg").read_text()
            )


def test_new_arms_have_pictures_and_old_figures_a_dagger(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    prompts = [
        make_row(op="kda_prefill", arm="prefill", implementation="fla", n=1, t=t, p=0) for t in (128, 8192)
    ]
    replay = make_row(op="kda_mtp_decode", arm="replay", implementation="cute", us=12.0, stale=True)
    write_rows(path, [make_row(implementation="cute"), replay, make_row(arm="copy", us=4.0), *prompts])
    assert plot.main([str(path), str(tmp_path / "out.svg")]) == 0
    assert "replay verify" in (tmp_path / "out.svg").read_text()
    assert "8192" in (tmp_path / "out-prefill.svg").read_text() and not (tmp_path / "out-decode.svg").exists()
    assert "| 8 | 8.50 | 12.00† | 4.00 | 2.12 |" in plot.table(plot.read_points(path))


def test_names_of_curves_do_not_cover_each_other() -> None:
    points = {
        curve: {1: make_row(n=1), 128: make_row(n=128, us=100 + i)}
        for i, curve in enumerate(plot.VERIFY.curves)
    }
    heights = sorted(plot.label_heights(points, plot.VERIFY).values())
    assert all(b - a >= 12 for a, b in zip(heights, heights[1:], strict=False))


def test_the_predecessor_waits_and_lets_its_dependents_start() -> None:
    """Compiled for Hopper, in a process of its own: here Triton may be interpreted."""
    code = (
        "from triton import compile; from triton.compiler import ASTSource;"
        "from triton.backends.compiler import GPUTarget;"
        "from benchmarks.kda.yardstick_kernels import predecessor_kernel as kernel;"
        "signature = dict(source='*bf16', target='*bf16', size='i32', BLOCK='constexpr');"
        "source = ASTSource(fn=kernel, signature=signature, constexprs=dict(BLOCK=1024));"
        "print(compile(source, target=GPUTarget('cuda', 90, 32), options=dict(launch_pdl=True)).asm['ptx'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    wait, start = (found.stdout.index(f"griddepcontrol.{x}") for x in ("wait", "launch_dependents"))
    assert wait < start < found.stdout.index("ld.global")
