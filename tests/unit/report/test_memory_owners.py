"""Whose memory it is, as a section of the report and as a page: everything adds up, names are text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.reports import check_schema
from traceloom.report import ReportOptions, build
from traceloom.report.figure import encode_level_changes
from traceloom.report.memory import build as memory, collapse_chains
from traceloom.report.views.page import render as memory_page, render_report_page as report_page
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

ROOT = Path(__file__).resolve().parents[3]
EVIL = "</script><b>kernel\x1b[31m"


def trace(rank: int, *, allocations: bool = True, stacks: bool = False) -> Trace:
    """Five steps; in each an activation of 3000 B comes and goes and 100 B stay; 7000 B are there from before."""
    builder = TraceBuilder(rank=rank, world_size=2)
    total = 7000
    for step in range(5):
        at = 1000.0 * step
        builder.step(step, at, 1000)
        if stacks:
            builder.python("train.py(7): step", at + 1, 900)
        builder.annotation("traceloom.scope:net." + EVIL, at + 10, 500)
        builder.op("aten::relu", at + 20, 80)
        builder.op("aten::add", at + 120, 80)
        if not allocations:
            continue
        for time, size, address in (
            (at + 30, 3000, 77),
            (at + 130, 100, 1000 + step),
            (at + 600, -3000, 77),
        ):
            total += size
            builder.allocation(
                time, size, address=address, total_allocated=total, total_reserved=20_000
            )
    return builder.build()


def session(**options: Any) -> Session:
    return Session(tuple(trace(rank, **options) for rank in (0, 1)), EVIL)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build(session(), ReportOptions(only=("memory_owners",)))


def test_every_division_adds_up_to_what_the_allocator_says(document: dict[str, Any]) -> None:
    memories = document["memory_owners"]["memories"]
    peaks = {row["rank"]: row["peak_bytes"] for row in document["memory"]["devices"]}
    assert {row["rank"]: row["peak_bytes"] for row in memories} == peaks == {0: 10_500, 1: 10_500}
    for row in memories:
        assert (
            sum(one["self_bytes"] for one in row["tree"])
            == row["tree"][0]["bytes"]
            == row["peak_bytes"]
        )
        for part in ("modules", "categories"):
            assert sum(one["bytes"] for one in row[part]) == row["peak_bytes"]
        curve = row["curve"]
        for by in ("categories", "scopes"):
            totals = [
                sum(levels) for levels in zip(*(one["bytes"] for one in curve[by]), strict=True)
            ]
            assert max(totals) == row["peak_bytes"]
            assert len(totals) == len(curve["time_ns"])
            assert totals[0] == 7000
            assert totals[-1] == 7500


def test_it_fits_the_published_schema(document: dict[str, Any]) -> None:
    check_schema(document)
    paths = {entry["path"] for entry in document["absent"]}
    assert "memory_owners.memories[*].curve.stacks" in paths  # no Python frames here


def test_without_allocations_it_says_why() -> None:
    found = build(session(allocations=False), ReportOptions(only=("memory_owners",)))
    assert found["memory_owners"] is None
    reasons = {entry["path"]: entry["reason"] for entry in found["absent"]}
    assert "--memory" in reasons["memory_owners"]


def test_times_count_from_the_epoch_of_the_report(document: dict[str, Any]) -> None:
    row = document["memory_owners"]["memories"][0]
    assert row["peak_time_ns"] == 4_130_000
    assert row["steps"][1]["start_ns"] == 1_000_000
    assert row["peak_time_ns"] in row["curve"]["time_ns"]


def test_with_frames_the_curve_is_told_by_stack_too() -> None:
    curve = memory(session(stacks=True))["ranks"][0]["memories"][0]["curve"]
    stack = next(one for one in curve["stacks"] if "train.py(7): step" in one["name"])
    assert max(stack["bytes"]) == 3500
    totals = {
        by: [sum(levels) for levels in zip(*(one["bytes"] for one in curve[by]), strict=True)]
        for by in ("categories", "scopes", "stacks")
    }
    assert totals["stacks"] == totals["scopes"] == totals["categories"]


def test_only_one_memory_of_a_picture_is_open_and_small_ones_are_left_out(
    document: dict[str, Any],
) -> None:
    page = report_page(document, session())
    assert page.count('<details class="other-owners" open>') == 1
    assert page.count('class="owners"') == 2


def test_names_of_strangers_are_text_on_both_pages(document: dict[str, Any]) -> None:
    for page in (report_page(document, session()), memory_page(memory(session()))):
        assert "<b>kernel" not in page
        assert "\x1b" not in page
        assert "kernel\\x1b[31m" in page or "kernel\\\\x1b[31m" in page


def test_the_page_alone_is_small_and_loads_nothing() -> None:
    page = memory_page(memory(session()))
    assert len(page.encode()) < 400_000
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)


def test_a_run_without_allocations_gets_a_page_that_says_so() -> None:
    page = memory_page(memory(session(allocations=False)))
    assert "No allocations were recorded" in page
    assert "record with --memory" in page


@pytest.mark.parametrize(
    ("levels", "pairs"),
    [([5, 5, 5], [0, 5]), ([0, 0, 7, 7, 2], [2, 7, 2, -5]), ([], []), ([0, 0], [])],
)
def test_levels_are_kept_as_changes(levels: list[int], pairs: list[int]) -> None:
    assert encode_level_changes(levels) == pairs


def test_a_scope_that_holds_one_other_alone_shares_its_row() -> None:
    def row(node: int, parent: int | None, name: str, size: int, own: int) -> dict[str, Any]:
        return {"node": node, "parent": parent, "name": name, "bytes": size, "self_bytes": own}

    tree = [
        row(0, None, "total", 10, 0),
        row(1, 0, "ddp", 10, 0),
        row(2, 1, "net", 10, 2),
        row(3, 2, "mm", 5, 5),
        row(4, 2, "relu", 3, 3),
    ]
    assert [(one["name"].strip(), one["depth"], one["bytes"]) for one in collapse_chains(tree)] == [
        ("total", 0, 10),
        ("ddp.net", 1, 10),
        ("mm", 2, 5),
        ("relu", 2, 3),
    ]
