"""Sections about launching, graphs, patterns and inference: what the command shows, and what stands in the document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from traceloom.cli import main
from traceloom.report import ReportOptions, build
from traceloom.report.sections import load_extra_sections
from traceloom.report.sections.launches import draw_step_curves
from traceloom.report.views.page import render_report_page as page
from traceloom.report.views.terminal import render as terminal
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

EVIL = "</script><b>kernel\x1b[31m"
OURS = ("idle_gaps", "launches", "graph_launches", "patterns", "anti_patterns", "inference")


def server(rank: int = 0) -> TraceBuilder:
    """Two decode steps; each replays a graph of three kernels after the host took its time."""
    builder = TraceBuilder(rank=rank, world_size=2)
    for number in range(3):
        start = 1000.0 * number
        builder.annotation("step[DECODE bs=4]", start, 300).python(
            "serve.py(3): loop", start + 1, 250
        )
        builder.launch("cudaGraphLaunch", start + 200, 20, correlation=number + 1)
        for place, name in enumerate(("gemm", EVIL, "norm")):
            builder.kernel(name, start + 230 + 20 * place, 19, correlation=number + 1)
    return builder


def eager() -> TraceBuilder:
    builder = TraceBuilder().python("nn.Module: Model_0", 0, 900)
    for number, name in enumerate(("gemm", EVIL, "norm"), start=1):
        builder.op(f"op of {number}", 100.0 * number, 80, external_id=number)
        builder.launch(
            "cudaLaunchKernel",
            100.0 * number + 10,
            5,
            correlation=number,
            **{"External id": number},
        )
        builder.kernel(name, 100.0 * number + 30, 9, correlation=number, **{"External id": number})
    return builder


def document(*ranks: int, **options: Any) -> dict[str, Any]:
    return build(
        Session(tuple(server(rank).build() for rank in ranks or (0,)), "made"),
        ReportOptions(only=OURS, **options),
    )


def test_every_section_has_its_main_figure() -> None:
    told = document()
    said = {
        one.key: one.summary(told[one.key])
        for one in load_extra_sections()
        if one.key in OURS and told[one.key]
    }
    assert said["idle_gaps"] == "the longest gap is 941 µs, mostly host unobserved"
    assert said["graph_launches"] == "3 replays of 1 graph hold 171 µs of GPU work; none deviates"
    assert (
        said["patterns"]
        == "a sequence of 3 kernels occurs 3 times and holds 100 % of the GPU's work"
    )
    assert said["inference"].startswith(
        "3 decode steps of 57.0 µs (1.00 ms between tokens) on the GPU; "
    )
    assert "could not be checked" in said["anti_patterns"]
    assert said["launches"].startswith("median launch latency: 10.0 µs")


def test_several_ranks_are_added_up_and_told_apart() -> None:
    told = document(0, 1)
    assert [row["rank"] for row in told["launches"]["totals"]] == [0, 1]
    (job,) = [row for row in told["patterns"]["job"] if row["kind"] == "sequence"]
    assert (job["rank_count"], job["count"], job["fraction"]) == (2, 6, 1.0)
    assert {row["rank"] for row in told["patterns"]["ranks"]} == {0, 1}
    assert len(told["anti_patterns"]["job"]) == 8
    assert [row["duration_ns"] for row in told["idle_gaps"]] == sorted(
        (row["duration_ns"] for row in told["idle_gaps"]), reverse=True
    )


def test_where_there_is_nothing_the_reason_is_said() -> None:
    told = build(
        Session((TraceBuilder().op("aten::mm", 0, 5).build(),), "made"), ReportOptions(only=OURS)
    )
    reasons = {entry["path"]: entry["reason"] for entry in told["absent"]}
    assert all(not told[key] for key in OURS if key != "anti_patterns")
    assert all(reasons[key] for key in OURS if key != "anti_patterns")
    lines = [line.plain for line in terminal(told, ReportOptions(only=OURS), 80)]
    assert sum("Nothing to show" in line for line in lines) == 5


def test_names_of_the_trace_are_harmless_everywhere() -> None:
    session = Session((server().build(),), "made")
    told = build(session)
    assert "</script><b>" not in page(told, session)
    assert not any("\x1b" in line.plain for line in terminal(told, ReportOptions(only=OURS), 120))
    assert "<b>" not in draw_step_curves({"<b>x": [(0, 1), (5, 2)]}, "depth")
    assert not draw_step_curves({}, "depth")
    assert not draw_step_curves({"empty": []}, "depth")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_tables_fit_the_terminal(width: int) -> None:
    options = ReportOptions(only=OURS)
    lines = [line.plain for line in terminal(document(0, 1), options, width)]
    assert all(len(line) <= width for line in lines)


def test_the_command_maps_graphs_and_counts_what_is_declared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, capture = server().write(tmp_path / "run.json"), eager().write(tmp_path / "eager.json")
    more = [
        "--graph-capture",
        str(capture),
        "--tokens-per-step",
        "12",
        "--samples-per-step",
        "2",
        "--no-cache",
    ]
    assert main(["report", str(run), "--only", "inference", *more]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "100 % of the graphs' time has an operator" in shown
    assert "op of 2" in shown
    assert main(["report", str(run), "--json", *more]) == 0
    told = json.loads(capsys.readouterr().out)["inference"]
    declared = {row["what"]: row["count"] for row in told["rates"] if row["evidence"] == "declared"}
    assert declared == {"tokens": 36, "samples": 6}
    assert told["mapped_fraction"] == 1.0
    assert {row["op_name"] for row in told["nodes"]} == {"op of 1", "op of 2", "op of 3"}


def test_what_cannot_be_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(server().write(tmp_path / "run.json"))
    assert main(["report", run, "--graph-capture", str(tmp_path / "none.json")]) == 3
    assert "there is no such file" in capsys.readouterr().err
    assert main(["report", run, "--tokens-per-step", "0"]) == 2
    assert "`0` is not a whole number above 0" in capsys.readouterr().err
