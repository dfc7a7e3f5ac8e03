"""The roofline section: its picture, its tables, its sentence, and the peaks that a user gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from traceloom.cli import main
from traceloom.report import ReportOptions, build
from traceloom.report.figure import draw_roofline
from traceloom.report.sections.device_rates import SECTION
from traceloom.system import units
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

BF = "c10::BFloat16"
EVIL = "</svg><script>alert(1)</script>\x1b[2J"


def builder(name: str = "aten::mm", device: str | None = "NVIDIA H100 80GB HBM3") -> TraceBuilder:
    """Two steps with one product of 1000³ each, and a copy in the second."""
    made = TraceBuilder(device_name=device).step(1, 0, 100).step(2, 100, 100)
    for step in range(2):
        made.op(name, 100 * step + 5, 8, shapes=[[1000, 1000], [1000, 1000]], types=[BF, BF])
        made.launch("cudaLaunchKernel", 100 * step + 6, 1, correlation=step + 1)
        made.kernel("sm90_gemm", 100 * step + 20, 40, correlation=step + 1)
    made.op("aten::copy_", 120, 8, shapes=[[1000], [1000], []], types=[BF, BF, "Scalar"])
    made.launch("cudaLaunchKernel", 121, 1, correlation=3)
    return made.kernel("copy", 170, 5, correlation=3)


def value(made: TraceBuilder, **options: Any) -> dict[str, Any]:
    document = build(Session((made.build(),), "run"), ReportOptions(only=("roofline",), **options))
    found: dict[str, Any] = document["roofline"]
    jsonschema.validate(found, SECTION.schema)
    return found


def circles(svg: str) -> list[ET.Element]:
    root = ET.fromstring(svg)
    return list(root.iter("circle"))


def test_the_picture_shows_each_operator_that_calculates_below_its_ceiling() -> None:
    svg = draw_roofline(value(builder())["operators"])
    (point,) = circles(svg)
    assert point.get("class") == "at-compute"
    told = point[0].text or ""
    assert told.splitlines()[0] == "aten::mm"
    assert "2 calls" in told
    names = [
        text.text for text in ET.fromstring(svg).iter("text") if text.get("class") == "roof-name"
    ]
    assert names == ["memory 3.35 TB/s", "bf16 989 TFLOP/s"]
    roof = next(path for path in ET.fromstring(svg).iter("path") if path[:])
    level = float(re.findall(r"M[\d.]+ ([\d.]+)H", roof.get("d", ""))[0])
    assert float(point.get("cy", "0")) > level  # further down is slower


def test_operators_that_only_move_data_are_counted_but_not_drawn() -> None:
    assert "1 that only move data, or take least time, are not drawn" in draw_roofline(
        value(builder())["operators"]
    )


def test_operators_of_a_rank_whose_gpu_work_is_not_recorded_are_counted_but_not_drawn() -> None:
    lost = (
        TraceBuilder(rank=1)
        .step(1, 0, 100)
        .op("aten::mm", 5, 8, shapes=[[64, 64]] * 2, types=[BF, BF])
    )
    lost.launch("cudaLaunchKernel", 6, 1, correlation=1)
    session = Session((builder().build(), lost.build()), "run")
    operators = build(session, ReportOptions(only=("roofline",)))["roofline"]["operators"]
    assert [row["shapes"] for row in operators if row["total_ns"] is None] == ["[[64,64],[64,64]]"]
    svg = draw_roofline(operators)
    assert len(circles(svg)) == 1
    assert "2 that only move data, or take least time, are not drawn" in svg


def test_without_peaks_points_are_drawn_without_ceilings() -> None:
    svg = draw_roofline(value(builder(device="AMD Radeon Graphics"))["operators"])
    assert [point.get("class") for point in circles(svg)] == ["at-unknown"]
    assert "The peaks are not known" in svg
    assert 'class="roof"' not in svg


def test_names_in_the_picture_are_only_text() -> None:
    row = {
        **value(builder())["operators"][0],
        "name": EVIL,
        "shapes": '"><img>',
        "arithmetic": "<b>",
    }
    svg = draw_roofline([row])
    assert "<script" not in svg
    assert "<img" not in svg
    assert "<b>" not in svg
    assert "\x1b" not in svg
    assert (circles(svg)[0][0].text or "").startswith("</svg><script>alert(1)</script>\\x1b[2J")


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e12, 1e18])
def test_points_stay_inside_the_picture(rate: float) -> None:
    row = {**value(builder())["operators"][0], "intensity": rate / 1e9, "flop_rate": rate}
    (point,) = circles(draw_roofline([row]))
    assert 0 <= float(point.get("cx", "-1")) <= 1000
    assert 0 <= float(point.get("cy", "-1")) <= 460


def test_nothing_to_draw_is_no_picture() -> None:
    assert draw_roofline([]) == ""
    empty = value(TraceBuilder())
    assert SECTION.picture(empty) == ""
    assert SECTION.summary(empty) is None


def test_the_sentence_tells_flops_roofline_and_what_models_cover() -> None:
    assert SECTION.summary(value(builder())) == (
        "2.00 GFLOP per step, 2.0 % of the roofline, 2.0 % MFU; models cover 100 % of the GPU work"
    )


def test_work_that_is_mostly_not_modelled_is_not_praised() -> None:
    made = (
        TraceBuilder()
        .step(1, 0, 500)
        .op("aten::mm", 5, 8, shapes=[[1000, 1000]] * 2, types=[BF, BF])
    )
    made.launch("cudaLaunchKernel", 6, 1, correlation=1).kernel("sm90_gemm", 20, 40, correlation=1)
    made.launch("cudaLaunchKernel", 15, 1, correlation=2).kernel("other", 60, 360, correlation=2)
    assert (
        SECTION.summary(value(made)) == "2.00 GFLOP per step; models cover 10.0 % of the GPU work"
    )


def test_given_peaks_take_the_place_of_those_of_the_device() -> None:
    found = value(builder(), peak="bf16=1e15,memory=1e15")
    product = next(row for row in found["operators"] if row["name"] == "aten::mm")
    assert (product["peak_flop_rate"], product["peak_byte_rate"]) == (1e15, 1e15)
    assert found["devices"][0]["peak"] == "given"


def test_operators_of_several_ranks_stand_by_their_time_and_are_one_point() -> None:
    traces = []
    for rank in range(3):
        made = TraceBuilder(rank=rank, world_size=3).op(
            "aten::mm", 5, 8, shapes=[[100, 100]] * 2, types=[BF, BF]
        )
        made.launch("cudaLaunchKernel", 6, 1, correlation=1).kernel(
            "sm90_gemm", 20, 10 * (rank + 1), correlation=1
        )
        traces.append(made.build())
    document = build(Session(tuple(traces), "run"), ReportOptions(only=("roofline",)))
    found = document["roofline"]
    assert [row["rank"] for row in found["operators"]] == [2, 1, 0]
    assert [row["rank"] for row in found["whole"]] == [0, 1, 2]
    (point,) = circles(SECTION.picture(found))
    lines = (point[0].text or "").splitlines()
    fractions = [100 * row["roofline_fraction"] for row in found["operators"]]
    assert "60.0 µs in 3 calls" in lines  # 10 + 20 + 30
    assert f"{units.format_flop_rate(3 * 2e6 / 60e-6)}, 33.3 FLOPs per byte" in lines
    assert "on 3 ranks" in lines
    assert (
        f"{min(fractions):.1f} to {max(fractions):.1f} % of the roofline, bound by memory" in lines
    )
    assert next(iter(SECTION.tables(found))).columns[0].key == "rank"


def test_long_shapes_are_cut() -> None:
    made = TraceBuilder()
    made.op(
        "aten::_foreach_add_",
        5,
        8,
        shapes=[[[1000, 1000]] * 200, []],
        types=["TensorList", "Scalar"],
    )
    made.launch("cudaLaunchKernel", 6, 1, correlation=1).kernel(
        "multi_tensor_apply<float, 4>", 20, 40, correlation=1
    )
    (row,) = value(made)["operators"]
    assert len(row["shapes"]) == 301
    assert row["flops"] == 200 * 1_000_000


def test_the_command_line_takes_a_device_or_peaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(builder(device="AMD Radeon Graphics").write(tmp_path / "trace.json"))
    assert main(["report", path, "--only", "roofline", "--no-cache", "--quiet"]) == 0
    assert (
        "MFU or HFU are missing: the peaks of the device are not known" in capsys.readouterr().out
    )
    assert (
        main(
            ["report", path, "--only", "roofline", "--no-cache", "--quiet", "--device", "h100 sxm"]
        )
        == 0
    )
    by_name = capsys.readouterr().out
    assert "2.0 % MFU" in by_name
    given = ["--peak", "bf16=989.4e12,fp32=66.9e12,memory=3.35e12"]
    assert main(["report", path, "--only", "roofline", "--no-cache", "--quiet", *given]) == 0
    assert capsys.readouterr().out == by_name


@pytest.mark.parametrize(
    ("option", "slug"),
    [
        (["--device", "H101"], "no-such-device"),
        (["--peak", "fast"], "bad-peak"),
        (["--peak", "bf16=-1"], "bad-peak"),
        (["--peak", "x=1"], "bad-peak"),
    ],
)
def test_peaks_that_make_no_sense_end_before_reading(
    option: list[str], slug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "not there.json"), *option]) == 2
    assert f"messages/#{slug}" in capsys.readouterr().err


def test_device_and_peak_exclude_each_other(tmp_path: Path) -> None:
    assert main(["report", str(tmp_path), "--device", "H20", "--peak", "bf16=1"]) == 2


def test_given_peaks_reach_what_bounds_the_kernels_too() -> None:
    run = Session((builder(device="a device of no table").build(),), "run")

    def bounds(**options: Any) -> dict[str, int]:
        rows = build(run, ReportOptions(only=("kinds",), **options))["kinds"]["bounds"]
        return {row["bound"]: row["count"] for row in rows if row["count"]}

    assert bounds() == {"unknown": 3}
    assert bounds(peak="bf16=1e14,memory=1e15") == {"compute": 2, "latency": 1}
    assert bounds(peak="bf16=1e15,memory=1e11") != bounds(peak="bf16=1e14,memory=1e15")
