# SPDX-License-Identifier: Apache-2.0
"""The command line: its outputs, and one helpful line with exit code 2 for everything that does not work."""

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import click
import pytest

from tensorrt_llm.commands import kv_plan
from tensorrt_llm.planning.plan import JSON_KEYS
from tests.unittest.planning.helpers import layers, run, small_config, write_config

K3 = ("kimi-k3", "--tp", 16, "--gpu-quota", "15.35GiB")
ISSUE_KEYS = (
    "scheme slots_kept ssm_slots state_bytes_per_slot records_bytes_per_slot replay_cache_bytes_per_slot "
    "intermediate_bytes_per_slot conv_cache_bytes_per_slot rollback_bytes outside_quota_bytes "
    "attention_bytes_per_token attention_pages attention_tokens quota_bytes pool_bytes full_length_requests"
)


def refusal(*words: object) -> str:
    """The one line on stderr of a run that must fail, without its prefix."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def test_the_report() -> None:
    result = run(*K3, "--max-seq-len", 65536)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "kimi-k3 on one of 16 ranks (tp 16, pp 1, ep 1)"
    text = " ".join(result.stdout.split())
    assert "slots kept: 10 = ceil(9 / 0.949999988). 8 requests and 1 dummy can be live" in text
    assert "records 4,451,328 - -" in text and "replay caches * - 5,950,560 -" in text
    assert "attention tokens 583,744" in text and "weights 108.28 GB" in text
    assert all(len(line) <= 110 for line in lines)


def test_one_scheme_alone() -> None:
    result = run(*K3, "--scheme", "records")
    assert result.exit_code == 0
    assert "replay" not in result.stdout and "intermediate" not in result.stdout


def test_json_has_exactly_the_keys() -> None:
    assert tuple(ISSUE_KEYS.split()) == JSON_KEYS
    for scheme, names in (("all", ["records", "replay", "intermediate"]), ("replay", ["replay"])):
        result = run(*K3, "--scheme", scheme, "--json")
        parsed = json.loads(result.stdout)
        assert list(parsed) == ["schemes"]
        assert [entry["scheme"] for entry in parsed["schemes"]] == names
        for entry in parsed["schemes"]:
            assert tuple(entry) == JSON_KEYS
            assert all(isinstance(value, int) for key, value in entry.items() if key != "scheme")


def test_quota_from_a_gpu() -> None:
    result = run("kimi-k3", "--tp", 16, "--gpu-memory", "141GB", "--workspace", "6GB", "--json")
    (records, *_) = json.loads(result.stdout)["schemes"]
    more = run(
        "kimi-k3", "--tp", 16, "--gpu-memory", "141GB", "--workspace", "6GB", "--free-fraction", 0.8, "--json"
    )
    assert json.loads(more.stdout)["schemes"][0]["quota_bytes"] < records["quota_bytes"]
    none = run("kimi-k3", "--tp", 16, "--gpu-memory", "141GB", "--workspace", 0, "--json")
    assert json.loads(none.stdout)["schemes"][0]["quota_bytes"] > records["quota_bytes"]
    assert records["quota_bytes"] == pytest.approx(0.9 * (141e9 - 6e9 - 108_279_344_248), rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("kimi-k3", "--gpu-memory", "1GiB"),
            "1,559.97 GB of weights per rank and 4 GB of workspace leave nothing of 1.07 GB for the cache. "
            "Nearest that works: --gpu-memory",
        ),
        (("kimi-k3", "--tp", -1, "--gpu-quota", "1GB"), "--tp is -1; it must be at least 1"),
        (("kimi-k3", "--drafts", -7, "--gpu-quota", "1GB"), "--drafts is -7; it must be at least 0"),
        (("kimi-k3", "--max-util", -1, "--gpu-quota", "1GB"), "--max-util is -1.0; it must be above 0"),
        (("kimi-k3", "--gpu-quota", "-1GB"), "'-1GB' is -1000000000 bytes: give a positive amount"),
        (("kimi-k3", "--gpu-quota", "15.35GX"), "'15.35GX' has the unknown unit 'GX': use one of B, KB"),
        (("kimi-k3", "--workspace", "much", "--gpu-memory", "1TB"), "'much' is not an amount of memory"),
        (("kimi-k3", "--tp", "many", "--gpu-quota", "1GB"), "'many' is not a valid integer"),
        (("kimi-k3", "--scheme", "ring", "--gpu-quota", "1GB"), "'ring' is not one of 'records'"),
        (("kimi-k3", "--no-such-option"), "No such option"),
        (("kimi-k3",), "give either the cache's quota, such as --gpu-quota 15.35GiB"),
        (("kimi-k3", "--gpu-quota", "1GB", "--gpu-memory", "1TB"), "give either the cache's quota"),
        (("kimi-k5", "--gpu-quota", "1GB"), "'kimi-k5' is neither a model known here (kimi-k3,"),
        (("--gpu-quota", "1GB"), "MODEL is missing: give kimi-k3, kimi-linear-48b"),
        (("kimi-k3", "tp=8", "--gpu-quota", "1GB"), "'tp=8' is one word too many: axes need --sweep"),
        ((*K3, "--csv", "a.csv"), "--csv lists a sweep: add --sweep"),
        ((*K3, "--sweep"), "--sweep needs at least one axis, such as tp=8,16,32"),
        ((*K3, "--sweep", "heads=3"), "'heads=3' is one word too many: with --sweep, an axis is one of tp=,"),
        ((*K3, "--sweep", "tp=8..4"), "the range 8..4 is empty"),
        ((*K3, "--sweep", "tp=a"), "'a' is neither a number nor a range, such as tp=8,16,32"),
        ((*K3, "--sweep", "tp=8", "tp=16"), "--sweep has the axis tp twice"),
        ((*K3, "--sweep", "tp=0"), "--tp is 0; it must be at least 1"),
        ((*K3, "--sweep", "batch=1..9999"), "--sweep asks for 29,997 plans; at most 20,000 are made"),
        ((*K3, "--sweep", "tp=16", "--json"), "--json is one configuration's: take --csv"),
        ((*K3, "--sweep", "tp=7,11"), "nothing in this sweep works; its first configuration: mamba_num"),
        ((*K3, "--svg", "/no/such/folder/a.svg", "--sweep", "tp=16"), "/no/such/folder/a.svg cannot be"),
    ],
)  # fmt: skip
def test_one_helpful_line(words: tuple[object, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ") and message in line, line


def test_models_that_are_not_hybrid(tmp_path: Path) -> None:
    every = (1, 2, 3, 4, 5, 6)
    attention = write_config(
        tmp_path / "attention", small_config(linear_attn_config=layers(kda=(), attention=every))
    )
    recurrent = write_config(
        tmp_path / "recurrent", small_config(linear_attn_config=layers(kda=every, attention=()))
    )
    assert "has no KDA layers, so it keeps no state" in refusal(attention, "--gpu-quota", "1GB")
    assert "has no attention layers to take what the states leave" in refusal(recurrent, "--gpu-quota", "1GB")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--max-batch-size", 200, "--gpu-quota", "5GiB", "--scheme", "records"),
            "a GPU cache quota of 5368709120 bytes is too small for live recurrent states: 201 of them (200 "
            "requests, 1 dummies) and one attention page need 6899632128 bytes. Raise max_gpu_total_bytes, "
            "max_tokens or free_gpu_memory_fraction, or lower max_batch_size. Nearest that works: "
            "--max-batch-size 149.",
        ),
        (
            ("--max-seq-len", 1 << 20, "--gpu-quota", "15.35GiB", "--scheme", "records"),
            "max_seq_len is reduced from 1048576 to 583744, which is all the KV cache holds. Nearest that "
            "works: --max-seq-len 583744.",
        ),
        (
            ("--block-reuse", "--gpu-quota", "15.35GiB", "--scheme", "records"),
            "kda_token_states=True needs a number of state slots that is known beforehand, but block reuse "
            "keeps snapshots in the state pool: set kv_cache_config.enable_block_reuse=False, or set "
            "kda_token_states=False. Nearest that works: no --block-reuse.",
        ),
        (
            ("--ep", 5, "--gpu-quota", "15.35GiB"),
            "Mapping: moe_tp_size 3 * moe_ep_size 5 must equal tp_size 16; leave one of them out and it "
            "follows from the other. Nearest that works: --ep 4.",
        ),
    ],
)  # fmt: skip
def test_the_runtimes_message_and_the_nearest_that_works(words: tuple[object, ...], line: str) -> None:
    assert refusal("kimi-k3", "--tp", 16, *words) == line


def test_a_quota_that_no_batch_fits() -> None:
    line = refusal("kimi-k3", "--tp", 16, "--gpu-quota", "20MiB", "--max-batch-size", 1)
    assert "too small for live recurrent states" in line
    quota = line.partition("--gpu-quota ")[2].rstrip(".")
    fits = run("kimi-k3", "--tp", 16, "--gpu-quota", quota, "--max-batch-size", 1)
    assert fits.exit_code == 0, fits.output


def test_schemes_that_work_are_shown_beside_one_that_is_refused(tmp_path: Path) -> None:
    picture = tmp_path / "split.svg"
    result = run(*K3, "--block-reuse", "--json", "--svg", picture)
    assert result.exit_code == 2
    assert [entry["scheme"] for entry in json.loads(result.stdout)["schemes"]] == ["replay", "intermediate"]
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: records: kda_token_states=True needs") and picture.exists()


def test_the_picture_of_a_plan(tmp_path: Path) -> None:
    picture = tmp_path / "split.svg"
    assert run(*K3, "--svg", picture).exit_code == 0
    root = ET.fromstring(picture.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in ("records", "replay", "intermediate")] == [
        "records",
        "replay",
        "intermediate",
    ]
    assert any("583,744 tokens in pages" in (text or "") for text in texts)


def test_a_sweep_as_table_csv_and_picture(tmp_path: Path) -> None:
    points, picture = tmp_path / "points.csv", tmp_path / "sweep.svg"
    result = run(*K3, "--sweep", "tp=8,16,7", "drafts=1,7", "batch=1..4", "--csv", points, "--svg", picture)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(points.open()))
    assert len(rows) == 3 * 2 * 4 * 3
    assert list(rows[0]) == ["tp", "drafts", "batch", *JSON_KEYS, "refusal"]
    of_seven = [row for row in rows if row["tp"] == "7"]
    assert all("tensor parallelism of 7 ranks does not divide" in row["refusal"] for row in of_seven)
    assert all(row["attention_tokens"] and not row["refusal"] for row in rows if row["tp"] != "7")
    tables = [part.splitlines() for part in result.stdout.split("\n\n")[1:]]
    assert [table[0] for table in tables] == ["records", "replay", "intermediate"]
    for table in tables:
        assert [line.split()[0] for line in table[1:]] == ["tp", "drafts", "batch", "1", "2", "3", "4"]
        assert table[1].split()[1:] == ["8", "8", "16", "16", "7", "7"]
        assert all(line.endswith("-  -") for line in table[4:])
    ET.fromstring(picture.read_text())


def test_a_points_numbers_are_the_plans(tmp_path: Path) -> None:
    points = tmp_path / "points.csv"
    assert run(*K3, "--sweep", "batch=8", "--scheme", "records", "--csv", points).exit_code == 0
    (row,) = csv.DictReader(points.open())
    (plan,) = json.loads(run(*K3, "--scheme", "records", "--json").stdout)["schemes"]
    assert {key: row[key] for key in plan} == {key: str(value) for key, value in plan.items()}


def test_axes_may_stand_anywhere() -> None:
    one = run("--sweep", "tp=16", "kimi-k3", "batch=1,2", "--gpu-quota", "2GiB")
    other = run("kimi-k3", "--gpu-quota", "2GiB", "--sweep", "tp=16 batch=1,2")
    assert one.exit_code == other.exit_code == 0
    assert one.stdout == other.stdout


def test_packaged_and_smaller_models() -> None:
    for model in ("kimi-k3-tiny", "kimi-linear-48b"):
        result = run(model, "--gpu-quota", "2GiB", "--max-seq-len", 4096)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"{model} on one rank (tp 1, pp 1, ep 1)")


def test_every_option_of_the_issue_exists() -> None:
    parameters: dict[str, Any] = {
        name: parameter for parameter in kv_plan.main.params for name in parameter.opts
    }
    wanted = "tp pp ep drafts max-batch-size max-seq-len tokens-per-block max-util gpu-quota gpu-memory"
    wanted += " free-fraction workspace scheme block-reuse svg json sweep"
    assert {f"--{name}" for name in wanted.split()} <= set(parameters)
    described = [p for p in parameters.values() if isinstance(p, click.Option)]
    assert all(option.help for option in described)
