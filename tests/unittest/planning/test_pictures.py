# SPDX-License-Identifier: Apache-2.0
"""Reports and pictures show what the plans say: lengths in proportion, nothing beyond the paper."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tensorrt_llm.planning.models import PlannedModel, find_model
from tensorrt_llm.planning.parts import BESIDE, INSIDE, part_bytes, used
from tensorrt_llm.planning.plan import SCHEME_NAMES, SchemePlan, plan_scheme
from tensorrt_llm.planning.report import full_report
from tensorrt_llm.planning.request import PlanRequest
from tensorrt_llm.planning.svg import MARGIN, WIDTH, nice_step, split_picture
from tensorrt_llm.planning.sweep import Axis, Point, parse_axes, run_sweep
from tensorrt_llm.planning.sweep_svg import sweep_picture
from tests.unittest.planning.helpers import GIB, MIB, gpu, small_model

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def k3() -> PlannedModel:
    return find_model("kimi-k3")


REQUEST = PlanRequest(tp=16, max_seq_len=65_536, gpu_quota_bytes=int(15.35 * GIB))


def plans_of(model: PlannedModel, request: PlanRequest) -> list[SchemePlan]:
    return [plan_scheme(model, request, scheme) for scheme in SCHEME_NAMES]


def bars(picture: str) -> list[list[float]]:
    """Widths of the coloured rectangles, line by line; the legend's squares are left out."""
    rows: dict[float, list[float]] = {}
    for element in ET.fromstring(picture).iter(f"{SVG}rect"):
        if element.get("fill") and float(element.get("height", 0)) > 12:
            rows.setdefault(float(element.get("y", 0)), []).append(float(element.get("width", 0)))
    return list(rows.values())


def test_bars_are_in_proportion(k3: PlannedModel) -> None:
    plans = plans_of(k3, REQUEST)
    drawn = bars(split_picture(k3, REQUEST, plans))
    assert len(drawn) == 3
    scale = sum(drawn[2]) / sum(part_bytes(plans[2]).values())
    for plan, widths in zip(plans, drawn, strict=True):
        wanted = [size * scale for size in part_bytes(plan).values() if size]
        assert widths == pytest.approx(wanted, abs=0.11)


def test_parts_are_the_quota_and_what_lies_beside_it(k3: PlannedModel) -> None:
    for plan in plans_of(k3, REQUEST):
        sizes = part_bytes(plan)
        inside = sum(sizes[part.key] for part in INSIDE)
        assert inside == max(plan.quota_bytes, inside if plan.left_over_bytes < 0 else 0)
        assert sum(sizes[part.key] for part in BESIDE) == plan.outside_quota_bytes
    assert [part.key for part in used(BESIDE, plans_of(k3, REQUEST)[:1])] == ["conv"]


def assert_on_paper(picture: str) -> None:
    root = ET.fromstring(picture)
    height = float(root.get("height", 0))
    for element in root.iter():
        for name, limit in (("x", WIDTH), ("x1", WIDTH), ("x2", WIDTH), ("y", height), ("y1", height)):
            value = element.get(name)
            assert value is None or -0.1 <= float(value) <= limit, (element.tag, name, value)
        if element.tag == f"{SVG}rect":
            assert float(element.get("x", 0)) + float(element.get("width", 0)) <= WIDTH + 0.1
        for x, y in re.findall(r"([\d.-]+),([\d.-]+)", element.get("points", "")):
            assert MARGIN <= float(x) <= WIDTH - MARGIN + 0.1 and 0 <= float(y) <= height


def test_nothing_leaves_the_paper(k3: PlannedModel, tmp_path: Path) -> None:
    assert_on_paper(split_picture(k3, REQUEST, plans_of(k3, REQUEST)))
    small = small_model(tmp_path)
    request = PlanRequest(gpu=gpu(64 * MIB), max_seq_len=64, drafts=2)
    for schemes in (SCHEME_NAMES, ("records",)):
        assert_on_paper(split_picture(small, request, [plan_scheme(small, request, s) for s in schemes]))
    axes = parse_axes(["tp=8,16,24,32", "drafts=1,3", "batch=1..5"])
    assert_on_paper(sweep_picture(k3, REQUEST, axes, run_sweep(k3, REQUEST, ["records", "replay"], axes)))


def test_names_are_escaped(tmp_path: Path) -> None:
    model = replace(small_model(tmp_path), name='<b> & "quotes"')
    request = PlanRequest(gpu_quota_bytes=16 * MIB, max_seq_len=64)
    picture = split_picture(model, request, plans_of(model, request))
    title = ET.fromstring(picture).find(f"{SVG}title")
    assert title is not None and title.text == '<b> & "quotes": the cache on one of 1 ranks'


def lines_of(picture: str) -> int:
    """Lines in the panels: the legend draws each look once more, in two points."""
    polylines = ET.fromstring(picture).iter(f"{SVG}polyline")
    return sum(len(line.get("points", "").split()) > 2 for line in polylines)


def sweep_of(model: PlannedModel, words: str, schemes: Sequence[str]) -> tuple[tuple[Axis, ...], list[Point]]:
    axes = parse_axes([words])
    return axes, run_sweep(model, REQUEST, schemes, axes)


def test_a_line_per_scheme_panel_and_rest(k3: PlannedModel) -> None:
    axes, points = sweep_of(k3, "tp=8,16,32 drafts=1,7 batch=1..4", SCHEME_NAMES)
    picture = sweep_picture(k3, REQUEST, axes, points)
    assert lines_of(picture) == 3 * 2 * 3
    assert all(f">tp {tp}<" in picture for tp in (8, 16, 32))
    assert "records drafts 1" in picture and "intermediate drafts 7" in picture
    assert "A quota of 16.48 GB, sequences of 65,536 tokens." in picture


def test_one_scheme_has_colours_by_the_rest(k3: PlannedModel) -> None:
    axes, points = sweep_of(k3, "tp=8,16 drafts=1,3,7 batch=1..4", ["records"])
    picture = sweep_picture(k3, REQUEST, axes, points)
    assert lines_of(picture) == 2 * 3 and "stroke-dasharray" not in picture


def test_a_sweep_of_one_axis_and_of_one_point(k3: PlannedModel) -> None:
    axes, points = sweep_of(k3, "batch=1..4", ["records"])
    assert lines_of(sweep_picture(k3, REQUEST, axes, points)) == 1
    axes, points = sweep_of(k3, "tp=16", ["records"])
    assert "<circle" in sweep_picture(k3, REQUEST, axes, points)


def test_a_line_ends_where_nothing_fits(k3: PlannedModel) -> None:
    """A quarter of the quota at 600 requests: what is refused is not drawn."""
    axes, points = sweep_of(k3, "batch=300,400,500,600,700", ["records"])
    fitting = [point for point in points if point.plan]
    assert 0 < len(fitting) < 5
    polyline = next(iter(ET.fromstring(sweep_picture(k3, REQUEST, axes, points)).iter(f"{SVG}polyline")))
    assert len(polyline.get("points", "").split()) == len(fitting)


def test_a_sweep_in_which_nothing_fits_is_not_drawn(k3: PlannedModel) -> None:
    axes, points = sweep_of(k3, "tp=7", ["records"])
    with pytest.raises(ValueError, match="nothing to draw"):
        sweep_picture(k3, REQUEST, axes, points)


@pytest.mark.parametrize(
    ("largest", "most", "step"),
    [(27.3, 8, 5), (8, 8, 1), (9, 8, 2), (0.004, 5, 0.001), (2_700_000, 5, 10**6)],
)
def test_steps_are_round(largest: float, most: int, step: float) -> None:
    assert nice_step(largest, most) == pytest.approx(step)


def test_bars_of_the_report_are_in_proportion(k3: PlannedModel) -> None:
    plans = plans_of(k3, REQUEST)
    lines = full_report(k3, REQUEST, plans).splitlines()
    drawn = [
        line.split(maxsplit=1)[1] for line in lines if "█" in line and "|" in line and "attention" not in line
    ]
    longest = max(plan.quota_bytes + plan.outside_quota_bytes for plan in plans)
    for plan, bar in zip(plans, drawn, strict=True):
        inside, beside = bar.split("|")
        assert len(inside) == pytest.approx(64 * plan.quota_bytes / longest, abs=2)
        assert len(beside) == pytest.approx(64 * plan.outside_quota_bytes / longest, abs=2)
        assert ("▒" in inside) == (plan.scheme == "records")


def test_the_report_of_a_gpu_and_of_stages(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    request = PlanRequest(tp=2, pp=2, gpu=gpu(64 * MIB), max_seq_len=64, max_batch_size=3)
    report = full_report(model, request, plans_of(model, request))
    assert "on one of 4 ranks (tp 2, pp 2, ep 1, stage 0 of 2, which holds the fewest tokens)" in report
    assert "GPU 67.1 MB, workspace 1 MB; the cache and what lies beside it get 0.9 of the rest" in report
    assert "2 KDA layers with 2 of 4 heads, 1 attention layers with 32 bytes a token" in report
    assert "6 requests and 1 dummy can be live" in report


def test_a_report_without_drafts_has_no_rollback(k3: PlannedModel) -> None:
    request = replace(REQUEST, drafts=0)
    report = full_report(k3, request, [plan_scheme(k3, request, "records")])
    assert "records of all slots" not in report and "conv windows" not in report
    assert "beside it" not in report.splitlines()[-1]
