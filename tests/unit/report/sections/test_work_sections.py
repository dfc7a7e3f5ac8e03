"""The sections about GPU work: kinds, kernels by shapes, copies, counters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from traceloom.report import ReportOptions, build
from traceloom.report.sections import load_extra_sections
from traceloom.report.sections.kernels import draw_stacked_bars
from traceloom.report.views.terminal import render
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

KEYS = ("kinds", "kernel_shapes", "copies", "counters")
SECTION = {section.key: section for section in load_extra_sections()}


def rank(number: int | None, gemm_us: float, kernels: int = 1) -> TraceBuilder:
    made = TraceBuilder(rank=number, world_size=8).step(1, 0, 1000)
    for k in range(kernels):
        made = made.op("aten::mm", 10 * k, 8, shapes=[[2 + k, 2], [2, 2]])
        made = made.launch("cudaLaunchKernel", 10 * k + 1, 2, correlation=k + 1)
        made = made.kernel(
            "ampere_sgemm_128x64_nn", 10 * k + 5, gemm_us / kernels, correlation=k + 1, stream=7 + k
        )
    return made.copy("Memcpy HtoD (Pageable -> Device)", 900, 10, bytes=1000).counter(
        "power", 5, 3.0
    )


def report(*made: TraceBuilder) -> dict[str, Any]:
    return build(Session(tuple(one.build() for one in made), "made"), ReportOptions(only=KEYS))


def test_kinds_of_several_ranks_are_told_over_all_of_them() -> None:
    value = report(rank(0, 100), rank(1, 300))["kinds"]
    job = {row["kind"]: row for row in value["job"]}
    assert (job["gemm"]["sum_ns"], job["gemm"]["mean_exclusive_ns"]) == (400_000, 200_000)
    assert (
        job["gemm"]["min_exclusive_ns"],
        job["gemm"]["max_exclusive_ns"],
        job["gemm"]["max_rank"],
    ) == (
        100_000,
        300_000,
        1,
    )
    assert next(table.key for table in SECTION["kinds"].tables(value)) == "kinds-job"


def test_a_rank_without_a_kind_counts_as_none_of_it() -> None:
    bare = TraceBuilder(rank=1, world_size=8).copy("Memcpy HtoD (Pinned -> Device)", 0, 5, bytes=8)
    job = {row["kind"]: row for row in report(rank(0, 100), bare)["kinds"]["job"]}
    assert (
        job["gemm"]["rank_count"],
        job["gemm"]["min_exclusive_ns"],
        job["gemm"]["mean_exclusive_ns"],
    ) == (
        1,
        0,
        50_000,
    )


@pytest.mark.parametrize("key", KEYS)
def test_summaries_and_tables_of_one_rank(key: str) -> None:
    value = report(rank(0, 100))[key]
    section = SECTION[key]
    assert section.summary(value)
    tables = list(section.tables(value))
    assert tables
    assert len({table.key for table in tables}) == len(tables)


@pytest.mark.parametrize("key", KEYS)
def test_a_trace_without_a_gpu_shows_nothing_and_says_why(key: str) -> None:
    document = build(
        Session((TraceBuilder().op("aten::add", 0, 5).build(),), "made"), ReportOptions(only=KEYS)
    )
    section = SECTION[key]
    assert section.summary(document[key]) is None
    assert [
        table
        for table in section.tables(document[key])
        if table.rows and table.key != "kinds-matrix"
    ] == []
    assert any(entry["path"].startswith(key) for entry in document["absent"])


def test_rows_left_out_for_their_number_are_added_up() -> None:
    value = report(rank(0, 1000, kernels=140))["kernel_shapes"]
    rest = value["ranks"][0]
    assert rest["row_count"] == len(value["rows"]) == 100
    assert sum(row["total_ns"] for row in value["rows"]) + rest["rest_ns"] == rest["total_ns"]
    many = report(*(rank(number, 1000, kernels=140) for number in range(20)))["kernel_shapes"]
    assert len(many["rows"]) == 20 * 40
    for row in many["ranks"]:
        mine = [one["total_ns"] for one in many["rows"] if one["rank"] == row["rank"]]
        assert sum(mine) + row["rest_ns"] == row["total_ns"]


def test_unknown_ranks_are_told_apart_from_none() -> None:
    document = report(rank(None, 100))
    assert document["kinds"]["job"][0]["max_rank"] is None
    assert json.dumps(document)
    assert render(document, ReportOptions(only=KEYS), 100)


def test_the_picture_is_to_scale_and_escapes_names() -> None:
    colours = {"gemm": "compute", "idle": "idle"}
    svg = draw_stacked_bars(
        [("<b>", [("gemm", 750), ("idle", 250)]), ("GPU 1", [("gemm", 500)])], colours
    )
    assert "<b>" not in svg
    assert "&lt;b&gt;" in svg
    assert (
        '<rect class="f-compute" x="130.0" y="0" width="844.5"' in svg
    )  # three quarters of the bar's room
    assert "gemm: 750 ns, 75.0 %" in svg
    assert "style=" not in svg  # the page allows none
    assert draw_stacked_bars([("GPU 0", [])], colours) == ""
