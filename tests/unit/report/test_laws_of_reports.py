"""What must not change a report, and what must change it in a certain way: clocks, orders, names, lengths, ranks."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from typing import Any

import polars as pl
import pytest

from support.hand_job import STEPS, hand_job
from support.pages import Elements, of_markdown, tables, words
from traceloom.report import ReportOptions, build
from traceloom.report.document import Table
from traceloom.report.sections import load_core_sections, select_visible_sections
from traceloom.report.views.files import build_table_frames, encode, write
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.page import render_report_page as page
from traceloom.report.views.terminal import render as terminal
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

EVIL = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e|`*_&amp;\"'"
EVERYTHING = ReportOptions(top=1_000)


@cache
def usual() -> dict[str, Any]:
    return build(hand_job())


def tables_of(document: dict[str, Any]) -> dict[str, Table]:
    sections = (
        (section, section.value(document))
        for section in (*load_core_sections(), *select_visible_sections(document))
    )
    return {
        table.key: table for section, value in sections if value for table in section.tables(value)
    }


def rows_of(document: dict[str, Any]) -> dict[str, list[str]]:
    """Every table as it is exported, its rows in an order of their own."""
    return {
        name: sorted(map(str, frame.select(sorted(frame.columns)).rows()))
        for name, frame in build_table_frames(document)
    }


def test_when_a_clock_begins_changes_nothing() -> None:
    begin_us = 12_345.678
    moved = build(hand_job(begin_us=begin_us))
    assert rows_of(moved) == rows_of(usual())
    assert int(moved["epoch_ns"]) - int(usual()["epoch_ns"]) == round(begin_us * 1000)
    assert markdown(moved, EVERYTHING) == markdown(usual(), EVERYTHING)


@pytest.mark.thorough
def test_in_which_order_files_are_named_changes_no_number() -> None:
    session = hand_job()
    turned = build(Session(tuple(reversed(session.traces)), "by hand"))
    other, rows = rows_of(turned), rows_of(usual())
    assert set(other) == set(rows)
    by_place = {"steps-0": "steps-1", "steps-1": "steps-0", "idle-0": "idle-1", "idle-1": "idle-0"}
    for name in set(rows) - {"critical-path-stretches"}:  # either rank decides: both take as long
        assert other[by_place.get(name, name)] == rows[name], name


def test_a_rank_stands_only_where_a_row_is_of_that_rank() -> None:
    """Of each table with ranks: the rows of a rank are those that a report of this rank alone has."""
    session = hand_job()
    alone = {
        rank: dict(build_table_frames(build(Session((session.traces[rank],), "one"))))
        for rank in (0, 1)
    }
    compared = 0
    for name, frame in build_table_frames(usual()):
        if "rank" not in frame.columns or name.startswith(
            ("across", "rank-matrix", "imbalance", "critical")
        ):
            continue
        if frame.schema["rank"] == pl.String:  # a name of it
            continue
        for rank in (0, 1):
            rows = frame.filter(rank=rank).drop("rank")
            other = alone[rank].get(name)
            assert other is not None, name
            of_all = {
                "link",
                "link_fraction",
                *(["share"] if name == "flame" else []),
            }  # seen where all ranks are
            names = [
                column
                for column in rows.columns
                if column in other.columns and column not in of_all
            ]
            assert sorted(map(str, rows.select(names).rows())) == sorted(
                map(str, other.select(names).rows())
            ), name
            compared += 1
    assert compared >= 30


LINEAR = (
    "breakdown",
    "main-thread-phase",
    "steps-by-rank",
    "steps-0",
    "steps-1",
    "kernel-table",
    "operator-table",
    "collective-table",
    "per-step-kernels",
    "per-step-operators",
    "kinds-job",
    "kinds-kinds",
    "copies-kinds",
    "copies-per-step",
    "collectives-summary",
    "collectives-calls",
    "groups-groups",
    "rank-matrix-cells",
    "flame-functions",
    "threads-threads",
    "threads-concurrency",
    "launches-queues",
    "launches-calls",
    "launches-steps",
    "host-0",
    "host-1",
    "critical-path-classes",
    "critical-path-names",
    "idle-gaps-longest",
    "across-ranks-ranks",
)
"""Tables in which nothing is told apart by how long it takes."""


@pytest.mark.thorough
def test_what_lasts_longer_is_longer_by_as_much_and_has_the_same_share() -> None:
    times = 7
    slow, fast = tables_of(build(hand_job(times=times))), tables_of(usual())
    assert set(slow) == set(fast)
    for key in LINEAR:
        assert len(slow[key].rows) == len(fast[key].rows)
        for column in fast[key].columns:
            for long, short in zip(slow[key].rows, fast[key].rows, strict=True):
                value, expected = long.get(column.key), short.get(column.key)
                if column.kind == "time" and expected is not None:
                    assert value == pytest.approx(expected * times), (key, column.key)
                elif column.kind == "byte_rate" and expected is not None:
                    assert value == pytest.approx(expected / times), (key, column.key)
                elif (
                    column.kind in {"share", "number"}
                    and column.key != "link_fraction"
                    and expected is not None
                ):
                    assert value == pytest.approx(expected), (key, column.key)
                elif column.kind in {"count", "bytes", "text", "name"}:
                    assert value == expected, (key, column.key)


def test_a_name_changes_nothing_but_the_name() -> None:
    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        return (
            [renamed(item) for item in value]
            if isinstance(value, list)
            else "?"
            if isinstance(value, str)
            else value
        )

    odd = build(hand_job("gemm" + EVIL))
    assert renamed({key: odd[key] for key in odd if key != "capture"}) == renamed(
        {key: usual()[key] for key in usual() if key != "capture"}
    )
    assert "gemm" + EVIL in {row["name"] for row in odd["kernels"]}, "data has the name as it is"


def test_an_odd_name_is_harmless_in_every_view_and_whole_in_every_file() -> None:
    session = hand_job("gemm" + EVIL)
    document = build(session)
    shown_page = page(document, session)
    elements = Elements(shown_page)
    assert elements.tags["img"] == 0
    assert not any(name.startswith("on") for _, name, _ in elements.attributes)
    assert "\x1b" not in words(shown_page)
    assert "\u202e" not in words(shown_page)
    assert any(
        "gemm" in str(row) and "\\u202e" in str(row).replace("\\\\", "\\")
        for row in tables(shown_page)["kernel-table"]
    )
    rendered = markdown(document, EVERYTHING)
    assert of_markdown(rendered).tags["img"] == 0
    assert not re.search(r"[\x1b\u202e]", rendered)
    lines = [line.plain for line in terminal(document, EVERYTHING, 200)]
    assert not re.search(r"[\x1b\u202e]", "\n".join(lines))
    assert json.loads(encode(document))["kernels"][0]["name"] == "gemm" + EVIL
    for name, frame in build_table_frames(document):
        for ending in (".csv", ".parquet"):
            handle = io.BytesIO()
            write(frame, ending, handle)
            handle.seek(0)
            types = {
                column: pl.String if kind == pl.Null else kind
                for column, kind in frame.schema.items()
            }
            again = (
                pl.read_csv(handle, schema=types) if ending == ".csv" else pl.read_parquet(handle)
            )
            assert again.rows() == frame.rows(), (name, ending)


SMALL = {
    "nothing": TraceBuilder,
    "one op": lambda: TraceBuilder().op("aten::mm", 5, 7),
    "one kernel": lambda: TraceBuilder().kernel("gemm", 5, 7),
    "one launch": lambda: (
        TraceBuilder()
        .launch("cudaLaunchKernel", 1, 2, correlation=1)
        .kernel("gemm", 5, 7, correlation=1)
    ),
    "one step": lambda: TraceBuilder().step(0, 0, 100),
    "no time": lambda: TraceBuilder().op("aten::mm", 5, 0).kernel("gemm", 5, 0),
    "one mark": lambda: TraceBuilder().mark(3, 5),
    "one copy": lambda: TraceBuilder().copy("Memcpy DtoH (Device -> Pinned)", 5, 7, bytes=0),
    "one allocation": lambda: TraceBuilder().allocation(5, 1024, address=1),
    "one counter": lambda: TraceBuilder().counter("power", 5, 1.5),
}


def views(session: Session) -> Iterator[tuple[str, str]]:
    document = build(session)
    yield "json", encode(document).decode()
    yield "page", page(document, session)
    yield "markdown", unescape(markdown(document, EVERYTHING))
    for width in (40, 200):
        lines = [line.plain for line in terminal(document, EVERYTHING, width)]
        assert all(len(line) <= max(width, 60) for line in lines), width
        yield f"terminal {width}", "\n".join(lines)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", SMALL)
def test_the_smallest_recordings_have_every_view_and_nothing_is_made_up(what: str) -> None:
    session = Session((SMALL[what]().build(),), "small")
    for view, text in views(session):
        assert not re.search(r"\b(nan|inf)\b", text), view
        assert "NaN" not in text.replace("isNaN", "") or view == "page", view
        assert "None" not in text or view == "page", view
        if view.startswith("terminal"):
            assert text.strip(), view
    document = build(session)
    for name, frame in build_table_frames(document):
        assert frame.height, name
    kernels = {row["name"]: row["total_ns"] for row in document["kernels"]}
    expected = {
        "one kernel": {"gemm": 7000},
        "one launch": {"gemm": 7000},
        "no time": {"gemm": 0},
        "one copy": {"Memcpy DtoH (Device -> Pinned)": 7000},
    }
    assert kernels == expected.get(what, {})
    assert sum(row["count"] for row in document["operators"]) == (what in {"one op", "no time"})


@pytest.mark.thorough
def test_many_ranks_are_all_there_and_add_up() -> None:
    """Twenty ranks, one kernel of its own length on each."""
    ranks = range(20)
    session = Session(
        tuple(
            TraceBuilder(rank=rank, world_size=20)
            .step(0, 0, 200)
            .kernel("gemm", 10, 100 + rank)
            .build()
            for rank in ranks
        ),
        "many",
    )
    document = build(session, ReportOptions(only=("core",)))
    [row] = document["kernels"]
    assert row["total_ns"] == sum(1000 * (100 + rank) for rank in ranks)
    assert (row["count"], row["min_ns"], row["max_ns"]) == (20, 100_000, 119_000)
    table = tables_of(document)["breakdown"]
    assert [entry["rank"] for entry in table.rows] == [f"rank {rank}" for rank in ranks]
    drawn = tables(page(document, session), by="key")["breakdown"]
    assert [entry["rank"] for entry in drawn] == [f"rank {rank}" for rank in ranks]
    few = [line.plain for line in terminal(document, ReportOptions(top=5), 100)]
    assert len(few) < 100, "a terminal is not flooded"


def test_numbers_of_some_steps_are_those_of_the_steps() -> None:
    whole = usual()
    for first, last in ((1, 2), (0, STEPS - 1)):
        document = build(hand_job(), ReportOptions(steps=(first, last), only=("core",)))
        count = last - first + 1
        for now, before in zip(document["kernels"], whole["kernels"], strict=True):
            assert now["name"] == before["name"]
            assert now["total_ns"] * STEPS == before["total_ns"] * count
            assert now["count"] * STEPS == before["count"] * count
            assert now["fraction"] == pytest.approx(before["fraction"])
        assert [step["step"] for step in document["ranks"][0]["steps"]] == list(
            range(first, last + 1)
        )
        assert document["ranks"][0]["step_times"]["median_ns"] == 1_000_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "generation", ["2021", pytest.param("rocm", marks=pytest.mark.thorough), "cuspy"]
)
def test_who_wrote_the_file_changes_no_number(generation: str) -> None:
    """The same job as different versions of the recorder spell it; some name calls and copies otherwise."""
    spelled = {
        "rocm": ("hip", "cuda"),
        "cuspy": ('"Memcpy"', '"Memcpy HtoD (Pageable -> Device)"'),
    }.get(generation)
    written = dict(build_table_frames(build(hand_job(generation=generation))))
    compared = 0
    for name, frame in build_table_frames(usual()):
        if (
            name == "anti_patterns" and generation == "rocm"
        ):  # of which some are of NVIDIA's devices alone
            continue
        assert written[name].columns == frame.columns, name
        for row, expected in zip(written[name].to_dicts(), frame.to_dicts(), strict=True):
            for key, value in expected.items():
                if isinstance(value, str) and spelled is not None:
                    text = json.dumps(row[key]).replace(*spelled)
                    assert text == json.dumps(value) or "Memcpy" in value, (name, key)
                else:
                    assert row[key] == value, (name, key)
                compared += 1
    assert compared > 2_500
