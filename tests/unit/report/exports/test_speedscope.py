"""Export to speedscope: what is written follows its schema and holds the trace's time."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import Phase, given, settings, strategies as st

from support.sessions import EVIL, hostile, made, several_devices, training
from support.strategies import builders
from traceloom.analyze.flame import flame
from traceloom.cli import main
from traceloom.report.exports import speedscope
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session


def run() -> TraceBuilder:
    """A thread with recursion, names that need care, GPU work of a known and of an unknown launch."""
    return (
        TraceBuilder()
        .step(1, 0, 100)
        .python('train "x".py(3): main', 0, 100)
        .python("train.py(7): walk", 10, 50)
        .python("train.py(7): walk", 20, 20)
        .op("aten::mm", 25, 10)
        .launch("cudaLaunchKernel", 27, 2, correlation=1)
        .kernel("gemm", 40, 30, correlation=1)
        .kernel("orphan", 80, 5, correlation=99)
        .op("aten::add", 5, 30, thread=2)
    )


def of(*builders: TraceBuilder) -> Session:
    return Session(tuple(builder.build() for builder in builders), "a run")


def speedscope_of(session: Session) -> Any:
    handle = io.BytesIO()
    speedscope.write(session, handle)
    return json.loads(handle.getvalue())


def check_speedscope(document: Any) -> dict[str, Counter[str]]:
    """Hold the document against the rules of file-format-schema.json; self time by profile and frame name."""
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = document["shared"]["frames"]
    assert all(
        isinstance(frame["name"], str) and set(frame) <= {"name", "file", "line", "col"}
        for frame in frames
    )
    assert 0 <= document["activeProfileIndex"] < len(document["profiles"])
    found: dict[str, Counter[str]] = {}
    for profile in document["profiles"]:
        assert profile["unit"] == "nanoseconds"
        spent = found[profile["name"]] = Counter()
        if profile["type"] == "sampled":
            assert len(profile["samples"]) == len(profile["weights"])
            for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
                spent[frames[stack[-1]]["name"]] += weight
            assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
            continue
        assert profile["type"] == "evented"
        stack: list[int] = []
        before = profile["startValue"]
        for event in profile["events"]:
            assert event["at"] >= before
            if stack:
                spent[frames[stack[-1]]["name"]] += event["at"] - before
            before = event["at"]
            if event["type"] == "O":
                stack.append(event["frame"])
            else:
                assert event["type"] == "C"
                assert stack.pop() == event["frame"]
        assert not stack
        assert before == profile["endValue"]
    return found


def test_speedscope_holds_every_thread_in_order_and_the_gpu_time_by_stack() -> None:
    found = check_speedscope(speedscope_of(of(run())))
    assert list(found) == ["main thread", "thread 2", "GPU time by launching stack"]
    assert found["main thread"] == {
        "main": 50_000,
        "walk": 40_000,
        "aten::mm": 8000,
        "cudaLaunchKernel": 2000,
        "ProfilerStep#": 0,
    }
    assert found["thread 2"] == {"aten::add": 30_000}
    assert found["GPU time by launching stack"] == {
        "cudaLaunchKernel": 30_000,
        "(launch not recorded)": 5000,
    }


def test_speedscope_frames_know_their_file_and_line() -> None:
    frames = speedscope_of(of(run()))["shared"]["frames"]
    assert {"name": "walk", "file": "train.py", "line": 7} in frames
    assert {"name": "aten::mm"} in frames


def test_ranks_are_told_apart_and_share_frames_and_the_zero_of_time() -> None:
    document = speedscope_of(of(run(), TraceBuilder(rank=1, world_size=2).op("aten::mm", 500, 10)))
    assert [profile["name"] for profile in document["profiles"]] == [
        "rank 0: main thread",
        "rank 0: thread 2",
        "rank 0: GPU time by launching stack",
        "rank 1: main thread",
    ]
    assert document["profiles"][-1]["startValue"] == 500_000
    assert [frame["name"] for frame in document["shared"]["frames"]].count("aten::mm") == 1
    check_speedscope(document)


def test_threads_of_one_name_are_told_apart() -> None:
    trace = TraceBuilder().op("aten::mm", 0, 5).op("aten::mm", 0, 7, thread=2).build()
    same = replace(trace, lanes=trace.lanes.with_columns(name=pl.lit("worker")))
    document = speedscope_of(Session((same,), "a run"))
    assert [profile["name"] for profile in document["profiles"]] == [
        "worker (1, 1)",
        "worker (1, 2)",
    ]


@pytest.mark.parametrize(
    "builder", [TraceBuilder(), TraceBuilder().kernel("k", 0, 5)], ids=["empty", "gpu-only"]
)
def test_runs_without_host_events_make_files_that_still_open(builder: TraceBuilder) -> None:
    check_speedscope(speedscope_of(of(builder)))


def test_two_writings_of_one_run_are_equal_bytes() -> None:
    first, second = io.BytesIO(), io.BytesIO()
    for handle in (first, second):
        speedscope.write(of(run()), handle)
    assert first.getvalue() == second.getvalue()


def test_the_command_line_chooses_the_format_by_the_ending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "x.speedscope.json"
    run().write(source)
    assert main(["report", str(source), "-o", str(target), "--no-cache", "--quiet"]) == 0
    assert "main thread" in check_speedscope(json.loads(target.read_bytes()))
    assert capsys.readouterr().out == ""


def stacks_of(document: Any) -> tuple[Counter[tuple[str, ...]], Counter[tuple[str, ...]]]:
    """Host time by stack below the thread, and GPU time by the whole stack, of a speedscope document; innermost last."""
    names = [frame["name"] for frame in document["shared"]["frames"]]
    host, gpu = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for profile in document["profiles"]:
        if profile["type"] == "sampled":
            for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
                gpu[tuple(names[frame] for frame in stack)] += weight
            continue
        stack, before = [], 0
        for event in profile["events"]:
            if stack and event["at"] > before:
                host[tuple(stack)] += event["at"] - before
            before = event["at"]
            if event["type"] == "O":
                stack.append(names[event["frame"]])
            else:
                stack.pop()
    return host, gpu


def check_times(session: Session) -> None:
    """The profiles of threads, written from the events in order, have the times of the folded call stacks."""
    host, gpu = stacks_of(speedscope_of(session))
    of_host, of_gpu = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for trace in session.traces:
        folded = flame(trace)
        paths: list[tuple[str, ...]] = []
        for row in folded.frames.select("parent", "name", "self_ns", "self_device_ns").iter_rows(
            named=True
        ):
            above = () if row["parent"] is None else paths[row["parent"]]
            paths.append((*above, row["name"]))
            of_host[paths[-1][1:]] += row["self_ns"]
            of_gpu[paths[-1]] += row["self_device_ns"]
        of_gpu["(launch not recorded)",] += folded.unattributed_device_ns
    assert +host == +of_host
    assert +gpu == +of_gpu
    assert sum(gpu.values()) == sum(
        trace.gpu_work()["duration_ns"].sum() for trace in session.traces
    )


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(builders(max_events=15), min_size=1, max_size=2))
def test_every_stack_of_a_random_run_has_its_time(traces: list[TraceBuilder]) -> None:
    check_times(of(*traces))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sort", [training, several_devices, hostile], ids=lambda sort: sort.__name__
)
def test_every_stack_has_its_time(sort: Any) -> None:
    check_times(made(sort)[0])


def test_names_of_strangers_are_kept_as_they_are_in_profiles() -> None:
    """A profile is data for another tool, which escapes what it shows."""
    session = made(hostile)[0]
    frames = {frame["name"] for frame in speedscope_of(session)["shared"]["frames"]}
    assert f"{EVIL}aten::mm" in frames
