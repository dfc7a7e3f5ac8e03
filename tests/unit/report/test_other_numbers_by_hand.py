"""Memory, counters, slow steps, groups of ranks, sweeps and attributes of nodes: shown as they were worked out by hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.page_contents import EVIL
from support.workload import node, write_set
from traceloom.report import ReportOptions, build, sweep
from traceloom.report.document import Table, UnknownValues
from traceloom.report.memory import build_document
from traceloom.report.memory_sources import build_timeline_row, read_memory_sources
from traceloom.report.sections import (
    load_core_sections,
    load_extra_sections,
    select_visible_sections,
)
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.terminal import render as terminal
from traceloom.report.workload import read_attributes
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.workload.simulate.sweep import SweepTable, list_points, parse_axis

US = 1_000  # ns


def tables_of(document: dict[str, Any]) -> dict[str, Table]:
    sections = (
        (section, section.value(document))
        for section in (*load_core_sections(), *select_visible_sections(document))
    )
    return {
        table.key: table for section, value in sections if value for table in section.tables(value)
    }


def summary(document: dict[str, Any], key: str) -> str | None:
    [section] = [
        section for section in (*load_core_sections(), *load_extra_sections()) if section.key == key
    ]
    return section.summary(section.value(document))


MOVES = (
    (10, 1000, 1),
    (20, 2000, 2),
    (30, -1000, 1),
    (60, 500, 3),
    (110, 4000, 4),
    (150, -4000, 4),
)
"""When, how many bytes, of which block."""


@cache
def remembered() -> dict[str, Any]:
    trace = TraceBuilder().step(0, 0, 100).step(1, 100, 100)
    for time_us, size, address in MOVES:
        trace.allocation(time_us, size, address=address)
    for time_us, watts in ((5, 100.0), (50, 300.0), (150, 200.0)):
        trace.counter("power", time_us, watts)
    trace.counter(EVIL, 20, -0.5)
    return build(Session((trace.build(),), "made"))


def test_memory_rises_and_falls_with_its_blocks() -> None:
    level, levels = 0, []
    for _, size, _ in MOVES:
        level += size
        levels.append(level)
    assert levels == [1000, 3000, 2000, 2500, 6500, 2500]
    [row] = tables_of(remembered())["memory-table"].rows
    expected = {
        "peak_bytes": 6500,
        "peak_time_ns": 110 * US,
        "start_bytes": 0,
        "end_bytes": 2500,
        "allocation_count": 4,
        "free_count": 2,
        "over_time": levels,
    }
    assert {name: row[name] for name in expected} == expected
    [curve] = remembered()["memory"]["curve"]
    assert (curve["time_ns"], curve["allocated_bytes"]) == (
        [time_us * US for time_us, *_ in MOVES],
        levels,
    )
    # At its peak are blocks 2 and 3, which are never freed, and block 4, which is.
    kinds = {
        row["kind"]: (row["bytes"], row["block_count"])
        for row in tables_of(remembered())["memory-categories"].rows
    }
    assert kinds == {"temporary": (4000, 1), "unknown": (2500, 2)}
    lines = [line.plain for line in terminal(remembered(), ReportOptions(only=("memory",)), 120)]
    assert any("6.50 kB" in line and "2.50 kB" in line for line in lines)


def test_counters_have_the_mean_of_their_samples() -> None:
    rows = tables_of(remembered())["counters-series"].rows
    assert {
        row["counter"]: (row["samples"], row["min"], row["mean"], row["max"]) for row in rows
    } == {
        "power": (3, 100.0, 200.0, 300.0),
        EVIL: (1, -0.5, -0.5, -0.5),
    }
    assert summary(remembered(), "counters") == "2 recorded over time"
    options = ReportOptions(only=("counters",))
    assert "\u202e" not in "\n".join(line.plain for line in terminal(remembered(), options, 120))
    assert "\u202e" not in markdown(remembered(), options)


@cache
def paced(*ranks: int | None) -> dict[str, Any]:
    """Eleven steps of 300 µs and one of 900 µs, in all but 100 µs of which a kernel runs."""
    traces = []
    for position, rank in enumerate(ranks):
        trace = TraceBuilder(rank=rank, world_size=4, process=position + 1)
        trace.group("0", [0, 1, 2, 3]).group("pairs", [0, 2]).group("unused", list(range(0, 90, 2)))
        at = 0
        for step in range(12):
            length = 900 if step == 11 else 300
            trace.step(step, at, length).op("aten::mm", at + 5, 20)
            trace.launch("cudaLaunchKernel", at + 8, 4, correlation=step + 1)
            trace.kernel("gemm", at + 30, length - 100, correlation=step + 1)
            at += length
        traces.append(trace.build())
    return build(Session(tuple(traces), "paced"))


def test_a_slow_step_is_held_against_the_usual_one() -> None:
    document = paced(0, 2)
    [row] = tables_of(document)["slow-steps-steps"].rows
    assert (row["step"], row["duration_ns"], row["median_ns"], row["over_ns"]) == (
        11,
        900 * US,
        300 * US,
        600 * US,
    )
    assert row["limit_ns"] is not None
    assert 300 * US < row["limit_ns"] < 900 * US
    differences = tables_of(document)["slow-steps-differences"].rows
    assert next((of["class"], of["more_ns"], of["usual_ns"]) for of in differences) == (
        "compute",
        600 * US,
        200 * US,
    )
    for rank in {of["rank"] for of in differences}:
        assert sum(of["more_ns"] for of in differences if of["rank"] == rank) == 600 * US, (
            "they add up to it"
        )
    sentence = summary(document, "slow_steps")
    assert sentence is not None
    assert sentence.startswith(
        "1 of 12 steps; step 11 takes 600 µs longer than the median, mostly compute of rank "
    )
    alone = summary(paced(0), "slow_steps")
    assert (
        alone
        == "1 of 12 steps; step 11 takes 600 µs longer than the median, mostly compute (+600 µs)"
    )


def test_steps_of_a_run_have_their_median_and_their_ends() -> None:
    assert summary(paced(0), "steps") == "12 whole steps; median 300 µs, 300 µs to 900 µs"
    assert summary(paced(0, 2), "steps") == "12 whole steps of each of 2 ranks; median 300 µs"
    [usual] = [row for row in tables_of(paced(0))["per-step-kernels"].rows if row["name"] == "gemm"]
    mean = (11 * 200 + 800) / 12
    assert usual["mean_total_ns"] == pytest.approx(mean * US)
    assert (usual["min_total_ns"], usual["max_total_ns"]) == (200 * US, 800 * US)
    assert (
        summary(paced(0), "per_step") == "the largest is gemm: 250 µs per step (200 µs to 800 µs)"
    )


def test_groups_that_nobody_called_are_listed_with_few_of_their_members() -> None:
    rows = {row["group"]: row for row in tables_of(paced(0, 2))["groups-groups"].rows}
    assert {name: row["who"] for name, row in rows.items()} == {
        "0": "0–3",
        "pairs": "0, 2",
        "unused": "0, 2, 4, 6, 8, 10, …",
    }
    assert all((row["count"], row["total_ns"]) == (0, None) for row in rows.values()), (
        "not called is not no time"
    )
    assert summary(paced(0, 2), "groups") is None


TIMELINE = [[-1, 1, 100, 0], [10, 2, 50, 4], [12, 4, -50, 4], [20, 2, 30, 7]]


@pytest.mark.parametrize(
    ("at", "size"),
    [
        ("start", 100),
        ("end", 130),
        ("peak", 150),
        ("10", 150),
        ("12", 100),
        ("99", 130),
        ("0", 100),
    ],
)
def test_a_timeline_holds_what_it_holds_at_an_instant(at: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(TIMELINE))
    [timeline] = read_memory_sources([str(path)]).timelines
    memory = build_timeline_row(timeline, at, UnknownValues(0))["memories"][0]
    assert memory["instant"]["bytes"] == size
    assert sum(part["bytes"] for part in memory["parts"]) == size
    assert sum(part["fraction"] for part in memory["parts"]) == pytest.approx(1)
    document = build_document(read_memory_sources([str(path)]))
    assert document["ranks"][0]["memories"][0]["peak_bytes"] == 150


def swept(*axes: str, refused: str = "") -> list[str]:
    """A sweep on a terminal; times fall with the bandwidth, and ranks cost."""
    parsed = [parse_axis(text) for text in axes]
    rows = []
    for point in list_points(parsed):
        width = float(str(point["network.0.bandwidth"]))
        answer = {"time_ns": round(1e9 / width), "cost": 2.5}
        rows.append(
            {**point, "ranks": 8, **({"reason": refused} if refused and width > 20 else answer)}
        )
    document = sweep.build(SweepTable.of(parsed, rows), EVIL)
    lines = [line.plain.rstrip() for line in sweep.render_sweep(document, 100)]
    assert all(len(line) <= 100 for line in lines)
    assert "\u202e" not in "\n".join(lines)
    return lines


def test_the_points_of_a_sweep_that_none_beats_stand_first() -> None:
    lines = swept("network.0.bandwidth=10,20,40")
    assert any("1 of 3 that none beats" in line for line in lines)
    rows = [line.split() for line in lines if " ms" in line]
    assert [row[0] == "*" for row in rows] == [True, False, False]
    assert [next(word for word in row if word in {"10", "20", "40"}) for row in rows] == [
        "40",
        "20",
        "10",
    ]
    assert [row[row.index("ms") - 1] for row in rows] == ["25.0", "50.0", "100"]
    # Twice the bandwidth is half the time: per cent by per cent, one less.
    assert any("-1.000" in line for line in lines), lines


def test_a_long_sweep_is_cut_and_what_has_no_answer_is_counted_by_its_reason() -> None:
    many = swept("network.0.bandwidth=1..40+1")
    assert sum(" ms" in line or " s " in f"{line} " for line in many) <= 22
    assert any("and 20 more: -o sweep.csv has all" in line for line in many)
    none = swept("network.0.bandwidth=10,20,40,80", refused=f"memory is full {EVIL}")
    assert any("2 points" in line for line in none)
    [why] = [line for line in none if "memory is full" in line]
    assert why.split()[0] == "2"


def test_attributes_of_a_node_are_its_values_as_text(tmp_path: Path) -> None:
    made = node(7, text=EVIL, flag=True, whole=("int64_val", -3), long=("string_val", "x" * 900))
    many = made.attr.add(name="many")
    many.int64_list.values.extend(range(30))
    made.attr.add(name="nothing")
    made.inputs.values, made.inputs.shapes, made.inputs.types = "[1]", "[[2]]", "['Tensor(float)']"
    home = write_set(tmp_path / "set", [node(1), made])
    attributes = dict(read_attributes(home / "w.0.et", 7))
    assert attributes["text"] == EVIL
    assert (attributes["flag"], attributes["whole"], attributes["nothing"]) == (
        "True",
        "-3",
        "(no value)",
    )
    assert attributes["many"] == "[" + ", ".join(map(str, range(12))) + ", … 18 more]"
    assert len(attributes["long"]) == 400
    assert attributes["long"].endswith("…")
    assert {name: text for name, text in attributes.items() if name.startswith("inputs.")} == {
        "inputs.values": "[1]",
        "inputs.shapes": "[[2]]",
        "inputs.types": "['Tensor(float)']",
    }
    assert read_attributes(home / "w.0.et", 99) == [], "there is no such node"
    cut = home / "w.0.et"
    cut.write_bytes(cut.read_bytes()[:-20])
    assert read_attributes(cut, 7) == [], "what is damaged is said elsewhere"
