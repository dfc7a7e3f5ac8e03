"""Sections of the host half: what they say, draw and leave out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from traceloom.report import ReportOptions, build
from traceloom.report.sections import load_extra_sections
from traceloom.report.sections.modules import collapse_call_chains
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

BY_KEY = {section.key: section for section in load_extra_sections()}
KEYS = ("flame", "blocking_calls", "threads", "compile")


def program() -> TraceBuilder:
    return (
        TraceBuilder()
        .step(1, 0, 200)
        .python("lib/train.py(3): main", 0, 200)
        .python("torch/nn/modules/module.py(1): _call_impl", 1, 198)
        .python("nn.Module: Net_0", 2, 196)
        .op("aten::item", 10, 100)
        .launch("cudaStreamSynchronize", 20, 80, correlation=7)
        .launch("cudaLaunchKernel", 2.5, 2, correlation=1)
        .kernel("gemm", 12, 40, correlation=1)
        .op("<b>evil</b>", 160, 5)
        .op("Torch-Compiled Region: 0/0", 120, 30)
        .op("CompiledFunction", 121, 20)
        .python("<built-in method acquire of _thread.lock object at 0x7f>", 0, 200, thread=5)
    )


def document(*builders: TraceBuilder) -> dict[str, Any]:
    return build(Session(tuple(one.build() for one in builders), "made"), ReportOptions())


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return document(program())


def summary(told: dict[str, Any], key: str) -> str | None:
    said: str | None = BY_KEY[key].summary(told[key])
    return said


def test_each_section_has_a_sentence_with_its_main_figure(told: dict[str, Any]) -> None:
    assert (
        summary(told, "flame")
        == "the main thread spends the most time of its own, 80.0 µs, in cudaStreamSynchronize"
    )
    assert summary(told, "blocking_calls") == (
        "80.0 µs of host time in calls that wait; 100 % of it for reads of a value (.item()) at "
        "train.py(3): main: aten::item, cudaStreamSynchronize"
    )
    assert str(summary(told, "threads")).startswith("2 threads; none is active 40")
    assert summary(told, "compile") == "compiled graphs take 20.0 µs of host time"


def test_what_is_not_there_is_null_with_a_reason() -> None:
    empty = document(TraceBuilder().kernel("k", 0, 5))
    reasons = {entry["path"]: entry["reason"] for entry in empty["absent"]}
    for key in KEYS:
        assert empty[key] is None
        assert reasons[key] == BY_KEY[key].reasons[key]


def test_the_picture_leaves_threads_out_that_only_wait_and_escapes_names(
    told: dict[str, Any],
) -> None:
    picture = BY_KEY["flame"].picture(told["flame"])
    (island,) = re.findall(r'<script type="application/json">(.*?)</script>', picture)
    names = [node[1] for node in json.loads(island)["nodes"]]
    assert names[0] == "main thread"
    assert not any("acquire" in name for name in names)
    assert "not drawn" in picture
    assert any("evil" in name for name in names)
    assert "<b>" not in picture


def test_chains_of_single_calls_are_one_box_with_the_name_that_says_most() -> None:
    def row(
        parent: int | None, kind: str, name: str, total: int, file: str | None = None
    ) -> dict[str, Any]:
        place = {"file": file, "line": 3 if file else None}
        return {
            "parent": parent,
            "kind": kind,
            "name": name,
            "total_ns": total,
            "device_ns": 0,
            **place,
        }

    tree = [
        row(None, "thread", "main thread", 100),
        row(0, "python", "main", 100, "train.py"),
        row(1, "python", "inner", 99, "contextlib.py"),
        row(2, "op", "aten::mm", 60),
        row(2, "op", "aten::add", 30),
        row(3, "module", "nn.Module: Net_0", 60),
    ]
    assert [(one["parent"], one["name"]) for one in collapse_call_chains(tree)] == [
        (None, "main thread"),
        (0, "main train.py:3 (+1)"),
        (1, "Net_0 (+1)"),
        (1, "aten::add"),
    ]


def test_the_tree_of_the_document_is_closed_upwards_and_its_parents_stand_first() -> None:
    builder = TraceBuilder()
    for k in range(1500):
        builder.python(f"f.py({k}): f", 10 * k, 9).op(f"op{k}", 10 * k + 1, 5)
    flame = document(builder)["flame"]
    assert flame["tree_frame_count"] == 3001
    assert len(flame["tree"]) <= 1000
    for number, row in enumerate(flame["tree"]):
        assert row["node"] == number
        assert row["parent"] is None or row["parent"] < number


def test_ranks_are_told_apart(told: dict[str, Any]) -> None:
    both = document(program(), TraceBuilder(rank=1, world_size=2).op("aten::mm", 0, 5))
    assert {row["rank"] for row in both["flame"]["functions"]} == {0, 1}
    assert both["flame"]["tree_rank"] == 0
    assert both["flame"]["busy_ns"] == told["flame"]["busy_ns"] + 5000
    for key in KEYS:
        for table in BY_KEY[key].tables(both[key]):
            assert table.rows
            assert all(
                column.key in table.rows[0] or column.key == "share" for column in table.columns
            )
