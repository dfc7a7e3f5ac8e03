"""The critical path in the report: document, tables, timeline payload, exported trace."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from support.jobs import Recipe, training_job
from traceloom.report import ReportOptions, build
from traceloom.report.exports.perfetto import write
from traceloom.report.sections import critical_path
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.page import render_report_page as page
from traceloom.report.views.terminal import render as terminal
from traceloom.report.views.timeline import build as timeline
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

EVIL = "</script><b>kernel\x1b[31m"
ONLY = ReportOptions(only=("critical_path",))


def one_rank() -> Session:
    """Three steps of 100, 120 and 140 us; in each the host waits for a kernel that takes half of the step."""
    builder = TraceBuilder()
    start = 0.0
    for number, length in ((7, 100.0), (8, 120.0), (9, 140.0)):
        builder.step(number, start, length).op("aten::mm", start + 5, 15)
        builder.launch("cudaLaunchKernel", start + 8, 4, correlation=2 * number)
        builder.kernel(EVIL, start + 14, length / 2, correlation=2 * number)
        builder.launch(
            "cudaDeviceSynchronize", start + 25, length / 2 - 5, correlation=2 * number + 1
        )
        start += length
    return Session((builder.build(),), "made")


def job() -> Session:
    run = training_job(Recipe(steps=3, layers=2, ranks=3, sync="stream", delay_us={1: 700})).run()
    return Session(tuple(trace.build() for trace in run.traces(sync_records=True)), "made")


def section(session: Session, options: ReportOptions = ONLY) -> dict[str, Any]:
    value = build(session, options)["critical_path"]
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("make", [one_rank, job])
def test_the_parts_add_up_to_the_step(make: Callable[[], Session]) -> None:
    value = section(make())
    for part in ("classes", "ranks", "stretches"):
        assert sum(row["duration_ns"] for row in value[part]) == value["window_ns"]
    at = value["start_ns"]
    for row in value["stretches"]:
        assert row["start_ns"] == at
        at += row["duration_ns"]
    assert value["law"]["exact_error_ns"] == 0


def test_times_count_from_the_epoch_of_the_document() -> None:
    session = one_rank()
    value = section(session)
    assert (value["step"], value["start_ns"], value["window_ns"]) == (8, 100_000, 120_000)
    assert [row["where"] for row in value["stretches"]] == [
        "main thread",
        "stream 7",
        "main thread",
    ]
    assert value["stretches"][1]["edge"] == "launch"
    names = session.traces[0].events["name"]
    assert names[value["stretches"][1]["first_event"]] == EVIL


def test_chosen_steps_have_a_path_of_one_of_them() -> None:
    assert section(one_rank(), ReportOptions(only=("critical_path",), steps=(9, 9)))["step"] == 9


def test_ranks_that_cannot_be_told_apart_are_a_reason_not_a_failure() -> None:
    twins = tuple(TraceBuilder(rank=None).op("aten::mm", 0, 5).build() for _ in range(2))
    document = build(Session(twins, "made"), ONLY)
    assert document["critical_path"] is None
    reason = next(
        entry["reason"] for entry in document["absent"] if entry["path"] == "critical_path"
    )
    assert "do not say their rank" in reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_tables_fit_the_terminal(width: int) -> None:
    lines = [line.plain for line in terminal(build(job(), ONLY), ONLY, width)]
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for title in (
        "What the path consists of",
        "Which ranks it goes through",
        "The path from lane to lane",
    ):
        assert title in text


def test_every_view_says_the_sentence_and_escapes_names() -> None:
    session = one_rank()
    document = build(session)
    sentence = section(session)["sentence"]
    shown = page(document, session)
    assert sentence.rstrip(".") in shown
    assert "</script><b>" not in shown
    assert "What decides" in markdown(document, ReportOptions()) or "what decides" in markdown(
        document, ReportOptions()
    )
    assert not any("\x1b" in line.plain for line in terminal(document, ReportOptions(), 100))


@pytest.mark.parametrize("make", [one_rank, job])
def test_the_timeline_holds_the_path_on_its_lanes(
    make: Callable[[], Session], unpacked: Callable[[str], tuple[dict[str, Any], Any]]
) -> None:
    session = make()
    value = section(session)
    header, _ = unpacked(timeline(session, set(), [], path=value).payload)
    path = header["path"]
    assert (path["step"], path["start"]) == (value["step"], value["start_ns"])
    assert path["end"] - path["start"] == value["window_ns"]
    placed = [row for row in value["stretches"] if row["where"]]
    assert len(path["stretches"]) == len(placed)
    for (lane, start, end), row in zip(path["stretches"], placed, strict=True):
        there = header["lanes"][lane]
        assert (start, end - start) == (row["start_ns"], row["duration_ns"])
        assert header["ranks"][there["trace"]]["rank"] == row["rank"]
        assert (there["kind"], there["thread"], there["stream"]) == (
            row["kind"],
            row["thread"],
            row["stream"],
        )


def test_without_a_path_the_timeline_has_none(
    unpacked: Callable[[str], tuple[dict[str, Any], Any]],
) -> None:
    header, _ = unpacked(timeline(one_rank(), set(), []).payload)
    assert header["path"] is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [one_rank, job])
def test_the_exported_trace_has_a_track_of_the_path_and_arrows_along_it(
    make: Callable[[], Session],
) -> None:
    session = make()
    value = section(session)
    out = io.BytesIO()
    write(session, session.epoch_ns, out, value)
    rows = [
        row
        for row in json.loads(out.getvalue())["traceEvents"]
        if row.get("cat") == "critical_path"
    ]
    slices = [row for row in rows if row["ph"] == "X"]
    assert len({(row["pid"], row["tid"]) for row in slices}) == 1
    assert sum(round(row["dur"] * 1000) for row in slices) == value["window_ns"]
    assert [round(row["ts"] * 1000) for row in slices] == [
        row["start_ns"] for row in value["stretches"]
    ]
    starts = {row["id"]: row for row in rows if row["ph"] == "s"}
    ends = {row["id"]: row for row in rows if row["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) >= 2
    if make is job:
        assert any(starts[number]["pid"] != ends[number]["pid"] for number in starts), (
            "it goes from rank to rank"
        )


def test_a_job_too_large_to_be_linked_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical_path, "_MAX_EVENTS", 5)
    document = build(one_rank(), ONLY)
    assert document["critical_path"] is None
    reason = next(
        entry["reason"] for entry in document["absent"] if entry["path"] == "critical_path"
    )
    assert "more than 5; choose ranks with --rank" in reason
