"""`traceloom memory` on snapshots, timelines and reports of memory that ran out; the document is as its schema says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.reports import check_schema
from support.snapshots import SnapshotBuilder
from traceloom.analyze.memory import memory as summary
from traceloom.cli import main
from traceloom.report.memory import build, build_document
from traceloom.report.memory_sources import MemoryOptions, read_memory_sources
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

STEP, MAIN = ("/u/train.py", 10, "step"), ("/u/train.py", 99, "<module>")
ADAM = ("/x/torch/optim/adam.py", 4, "update")
LINEAR = ("??", 0, "at::_ops::linear::call(at::Tensor const&)")


def _checked(document: dict[str, Any]) -> dict[str, Any]:
    check_schema(document, "memory.schema.json")
    return json.loads(json.dumps(document))


def _snapshot(path: Path, **options: Any) -> Path:
    builder = SnapshotBuilder()
    builder.alloc(1000, STEP, MAIN)
    builder.forget()
    builder.free(builder.alloc(5000, LINEAR, STEP, MAIN))
    builder.alloc(300_000, ADAM, STEP, MAIN)
    builder.out_of_memory(1 << 40, 100, STEP, MAIN)
    return builder.write(path, **options)


def test_a_snapshot_is_explained_by_its_stacks(tmp_path: Path) -> None:
    document = _checked(
        build_document(
            read_memory_sources([str(_snapshot(tmp_path / "a.bin"))]), MemoryOptions(by="stack")
        )
    )
    (memory,) = document["ranks"][0]["memories"]
    assert (memory["device_type"], memory["peak_bytes"], memory["unseen_bytes"]) == (
        "cuda",
        301_000,
        0,
    )
    assert (
        memory["tree"][0]["bytes"]
        == memory["peak_bytes"]
        == sum(row["self_bytes"] for row in memory["tree"])
    )
    assert {row["name"]: row["bytes"] for row in memory["parts"]} == {
        "/x/torch/optim/adam.py(4): update < /u/train.py(10): step < /u/train.py(99): <module>": 300_000,
        "(before the recording)": 1000,
    }
    assert [row["name"] for row in memory["largest"]] == [
        "<module>.step.update.none.1",
        "before./u/train.py(10): step",
    ]
    assert [(row["category"], row["bytes"]) for row in memory["categories"]] == [
        ("optimizer_state", 300_000),
        ("before_recording", 1000),
    ]


def test_a_snapshot_tells_fragmentation_and_where_memory_ran_out(tmp_path: Path) -> None:
    document = _checked(
        build_document(read_memory_sources([str(_snapshot(tmp_path / "rank3.memory.pickle"))]))
    )
    allocator = document["ranks"][0]["memories"][0]["allocator"]
    # blocks are rounded to 512: 1024 + (5120 given back) + 300032, in one segment of 2 MiB
    assert allocator["reserved_bytes"] == 1 << 21
    assert (allocator["allocated_bytes"], allocator["requested_bytes"]) == (1024 + 300_032, 301_000)
    assert allocator["free_bytes"] == allocator["split_bytes"] == (1 << 21) - 1024 - 300_032
    assert allocator["largest_free_bytes"] == (1 << 21) - 1024 - 5120 - 300_032
    (end,) = document["out_of_memory"]
    assert (end["rank"], end["asked_bytes"], end["where"]) == (3, 1 << 40, "/u/train.py(10): step")
    assert (end["bytes"], end["advice"][0]["action"]) == (301_000, "shrink-request")


def test_a_snapshot_without_a_history_shows_what_was_alive(tmp_path: Path) -> None:
    document = _checked(
        build_document(read_memory_sources([str(_snapshot(tmp_path / "s.pickle", history=False))]))
    )
    (memory,) = document["ranks"][0]["memories"]
    assert (memory["peak_bytes"], memory["end_bytes"], memory["allocation_count"]) == (
        301_000,
        301_000,
        2,
    )


def test_the_allocations_of_a_snapshot_as_a_file(tmp_path: Path) -> None:
    target = tmp_path / "all.csv"
    assert (
        main(["memory", str(_snapshot(tmp_path / "s.pickle")), "-o", str(target), "--quiet"]) == 0
    )
    assert target.read_text().splitlines() == [
        "name,bytes",
        "<module>.step.linear.1,5000",
        "<module>.step.update.none.1,300000",
    ]


def test_a_hostile_snapshot_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n\x8c\x05false\x85R.")
    assert main(["memory", str(path), "--quiet"]) == 3
    shown = capsys.readouterr().err
    assert "os.system" in shown
    assert "nothing of it was run" in shown
    assert "Traceback" not in shown


def test_a_timeline_has_a_curve_and_a_peak_by_category(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([[-1, 1, 100, 0], [10, 2, 50, 4], [12, 4, -50, 4], [20, 2, 30, 7]]))
    document = _checked(build_document(read_memory_sources([str(path)])))
    (memory,) = document["ranks"][0]["memories"]
    assert (memory["peak_bytes"], memory["end_bytes"], memory["peak_time_ns"]) == (150, 130, 0)
    assert {row["category"]: row["bytes"] for row in memory["categories"]} == {
        "parameter": 100,
        "activation": 50,
    }
    assert memory["tree"][0]["bytes"] == 150
    assert main(["memory", str(path), "--at", "step 3", "--quiet"]) == 2


def _report(path: Path, **changes: Any) -> Path:
    live = [
        (1, 4000, "parameter", "Net.fc.weight"),
        (2, 8000, "optimizer_state", "Adam.exp_avg of Net.fc.weight"),
        (3, 60_000, "activation", "kept for backward by ReluBackward0"),
        (4, 20_000, "other", "Tensor [5000]"),
    ]
    document = {
        "format": "traceloom-out-of-memory",
        "version": 1,
        "time_ns": 5,
        "step": 7,
        "asked_bytes": 10_000,
        "message": "no more",
        "stack": ["/u/train.py(3): main", "/x/site-packages/torch/nn/modules/module.py(1): f"],
        "devices": [
            {
                "device_type": "cuda",
                "device": 0,
                "allocated_bytes": 92_000,
                "reserved_bytes": 110_000,
                "free_bytes": 0,
                "total_bytes": 200_000,
                "retries": 2,
            }
        ],
        "live_storages": {
            "address": [row[0] for row in live],
            "bytes": [row[1] for row in live],
            "device_type": ["cuda"] * 4,
            "device": [0] * 4,
            "owner": [row[2] for row in live],
            "name": [row[3] for row in live],
        },
    }
    path.write_text(json.dumps(document | changes))
    return path


def test_a_report_says_who_held_memory_and_what_to_try_first(tmp_path: Path) -> None:
    document = _checked(
        build_document(read_memory_sources([str(_report(tmp_path / "rank0.oom.json"))]))
    )
    (end,) = document["out_of_memory"]
    assert (end["bytes"], end["where"], end["step"]) == (92_000, "/u/train.py(3): main", 7)
    paths = {row["path"]: row["bytes"] for row in end["tree"]}
    assert paths["parameters.Net.fc.weight"] == 4000
    assert paths["kept for backward.ReluBackward0"] == 60_000
    assert {row["action"]: row["bytes"] for row in end["advice"]} == {
        "other-processes": 90_000,
        "checkpoint-activations": 60_000,
        "smaller-batch": 30_000,
        "drop-kept-tensors": 20_000,
        "expandable-segments": 18_000,
    }
    assert [row["bytes"] for row in end["advice"]] == sorted(
        (row["bytes"] for row in end["advice"]), reverse=True
    )


def test_a_run_that_left_a_report_on_memory_alone_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    _report(run / "rank0.oom.json")
    part = {"rank": 0, "world_size": 1, "window": None, "out_of_memory": {"file": "rank0.oom.json"}}
    capture = {"format": "traceloom-capture", "version": 1, "ranks": [part]}
    (run / "capture.json").write_text(json.dumps(capture))
    assert main(["report", str(run), "-o", str(tmp_path / "out.html")]) == 0
    out, err = capsys.readouterr()
    assert "memory ran out before a window was recorded" in err
    assert "out.html" in out
    assert "Net.fc.weight" in (tmp_path / "out.html").read_text()
    assert main(["report", str(run), "--json", "--quiet"]) == 0
    _checked(json.loads(capsys.readouterr().out))


def test_advice_needs_data_that_supports_it(tmp_path: Path) -> None:
    live = {
        "address": [1],
        "bytes": [5],
        "device_type": ["cpu"],
        "device": [-1],
        "owner": ["parameter"],
        "name": ["N.w"],
    }
    document = _checked(
        build_document(
            read_memory_sources([str(_report(tmp_path / "o.json", live_storages=live, devices=[]))])
        )
    )
    assert [row["action"] for row in document["out_of_memory"][0]["advice"]] == ["shrink-request"]


@pytest.mark.parametrize(
    "changes",
    [
        {"live_storages": 5},
        {"live_storages": {"address": ["x"]}},
        {"stack": {}},
        {"stack": [None, 5]},
        {"devices": [5, {"free_bytes": -1}, {"total_bytes": "x"}]},
        {"asked_bytes": 2**80},
        {"time_ns": "now"},
        {"message": None},
        {"step": -1},
        {"live_storages": {"address": [1], "bytes": [2**70]}},
    ],
)
def test_odd_values_of_a_report_do_no_harm(changes: dict[str, Any], tmp_path: Path) -> None:
    path = str(_report(tmp_path / "rank0.oom.json", **changes))
    _checked(build_document(read_memory_sources([path])))
    assert main(["memory", path, "--quiet"]) == 0


def test_a_mark_of_a_trace_is_explained_by_its_blocks(tmp_path: Path) -> None:
    builder = TraceBuilder().annotation("traceloom.scope:loop", 0, 100).op("aten::zeros", 5, 50)
    builder.allocation(10, 4000, address=1).out_of_memory(20, 10**9).allocation(30, 100, address=2)
    document = _checked(build(Session((builder.build(),), "made")))
    (end,) = document["out_of_memory"]
    assert (end["asked_bytes"], end["bytes"], end["where"]) == (10**9, 4000, "loop.zeros")


def _growing(memory_bytes: int | None) -> Trace:
    builder = TraceBuilder()
    for step in range(6):
        start = 100.0 * step
        builder.step(step, start, 100).python("train.py(7): keep", start + 1, 50)
        builder.op("aten::add", start + 2, 5)
        builder.allocation(
            start + 3,
            1000,
            address=step + 1,
            device_type=1,
            device=0,
            total_allocated=1000 * (step + 1),
        )
    trace = builder.build()
    devices = (
        []
        if memory_bytes is None
        else [{"device": 0, "kind": "cuda", "memory_bytes": memory_bytes}]
    )
    return replace(
        trace, meta=replace(trace.meta, capture={"devices": devices}), devices=trace.devices.clear()
    )


def test_growth_says_its_stack_and_when_the_device_is_full() -> None:
    memory = _checked(build(Session((_growing(20_500),), "made")))["ranks"][0]["memories"][0]
    (row,) = memory["growth"]
    # 6000 bytes in step 5; 14 more steps of 1000 fit, the one after that does not
    assert (row["stack"], row["full_at_step"], memory["capacity_bytes"]) == (
        "train.py(7): keep",
        20,
        20_500,
    )
    unknown = build(Session((_growing(None),), "made"))["ranks"][0]["memories"][0]
    assert (unknown["growth"][0]["full_at_step"], unknown["capacity_bytes"]) == (None, None)


def test_without_steps_nobody_says_that_nothing_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = TraceBuilder().op("aten::mm", 0, 10).allocation(1, 50, address=1)
    path, page = builder.write(tmp_path / "trace.json"), tmp_path / "memory.html"
    assert main(["memory", str(path), "-o", str(page), "--quiet"]) == 0
    assert main(["memory", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (shown, page.read_text(encoding="utf-8")):
        assert "cannot be determined: it takes at least 4 steps, and none was recorded." in text
        assert "Nothing grows" not in text
    (why,) = [
        one["reason"]
        for one in build(Session((builder.build(),), "made"))["absent"]
        if "growth" in one["path"]
    ]
    assert "none was recorded" in why


def test_with_steps_it_is_said_that_nothing_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = TraceBuilder()
    for step in range(4):
        builder.step(step, 100.0 * step, 100).op("aten::mm", 100 * step + 1, 10)
        builder.allocation(100 * step + 2, 50, address=1).allocation(100 * step + 3, -50, address=1)
    path, page = builder.write(tmp_path / "trace.json"), tmp_path / "memory.html"
    assert main(["memory", str(path), "-o", str(page), "--quiet"]) == 0
    assert main(["memory", str(path)]) == 0
    assert "cannot be determined" not in capsys.readouterr().out
    assert "Nothing grows from step to step." in page.read_text(encoding="utf-8")


def test_activations_of_a_module_are_all_but_its_last_output() -> None:
    builder = TraceBuilder().annotation("traceloom.module:Net", 0, 100)
    builder.annotation("traceloom.module:Net.block", 10, 60)
    builder.op("aten::linear", 11, 10, sequence=1).allocation(12, 300, address=1)
    builder.op("aten::relu", 30, 10, sequence=2).allocation(31, 200, address=2)
    evaluate = "autograd::engine::evaluate_function: ReluBackward0"
    builder.op(evaluate, 120, 20, sequence=2, forward_thread=1).allocation(125, -300, address=1)
    builder.allocation(126, -200, address=2)
    memory = _checked(build(Session((builder.build(),), "made")))["ranks"][0]["memories"][0]
    found = {
        row["module"]: (row["bytes"], row["saved_bytes"], row["host_ns"])
        for row in memory["activations"]
    }
    assert found == {"Net": (500, 300, 100_000), "Net.block": (500, 300, 60_000)}


def test_bad_pairs_are_notices_of_the_document() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 100)
    builder.allocation(1, -7, address=9).allocation(2, 10, address=5).allocation(3, 20, address=5)
    builder.allocation(4, -21, address=5)
    slugs = {
        notice["slug"] for notice in _checked(build(Session((builder.build(),), "made")))["notices"]
    }
    assert {"freed-from-before", "lost-frees", "resized-frees"} <= slugs


def test_the_two_ways_to_follow_memory_agree() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 100)
    for k in range(20):
        builder.allocation(1 + k, 100 * (k % 7 + 1), address=k)
        if k % 3:
            builder.allocation(1.5 + k, -100 * (k % 7 + 1), address=k)
    trace = builder.build()
    memory = build(Session((trace,), "made"))["ranks"][0]["memories"][0]
    assert summary(trace).devices.select("peak_bytes", "end_bytes").rows() == [
        (memory["peak_bytes"], memory["end_bytes"])
    ]
