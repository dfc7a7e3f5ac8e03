"""Export to speedscope and pprof: what is written is read by an independent decoder and holds the trace's time."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.sessions import EVIL, hostile, made, several_devices, training
from support.strategies import builders
from traceloom.cli import main
from traceloom.model import Session
from traceloom.report.exports import pprof, speedscope
from traceloom.testing import TraceBuilder

# profile.proto of github.com/google/pprof, as far as it is used: (name, number, type, repeated, message)
_INT, _STRING, _MESSAGE = 3, 9, 11
_PROFILE = {
    "ValueType": [("type", 1, _INT, False, ""), ("unit", 2, _INT, False, "")],
    "Label": [("key", 1, _INT, False, ""), ("str", 2, _INT, False, ""), ("num", 3, _INT, False, "")],
    "Sample": [
        ("location_id", 1, _INT, True, ""),
        ("value", 2, _INT, True, ""),
        ("label", 3, _MESSAGE, True, "Label"),
    ],
    "Line": [("function_id", 1, _INT, False, ""), ("line", 2, _INT, False, "")],
    "Location": [("id", 1, _INT, False, ""), ("line", 4, _MESSAGE, True, "Line")],
    "Function": [("id", 1, _INT, False, ""), ("name", 2, _INT, False, ""), ("filename", 4, _INT, False, "")],
    "Profile": [
        ("sample_type", 1, _MESSAGE, True, "ValueType"),
        ("sample", 2, _MESSAGE, True, "Sample"),
        ("location", 4, _MESSAGE, True, "Location"),
        ("function", 5, _MESSAGE, True, "Function"),
        ("string_table", 6, _STRING, True, ""),
        ("time_nanos", 9, _INT, False, ""),
        ("duration_nanos", 10, _INT, False, ""),
        ("comment", 13, _INT, True, ""),
        ("default_sample_type", 14, _INT, False, ""),
    ],
}


def decoded(raw: bytes) -> Any:
    """A profile read by the protobuf runtime from the published field numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="t", syntax="proto3")
    for message, fields in _PROFILE.items():
        kind = file.message_type.add(name=message)
        for name, number, of, repeated, inner in fields:
            field = kind.field.add(name=name, number=number, type=of, label=3 if repeated else 1)
            if inner:
                field.type_name = f".t.{inner}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Profile")).FromString(gzip.decompress(raw))


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
    assert all(isinstance(frame["name"], str) and set(frame) <= {"name", "file", "line", "col"} for frame in frames)
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
    assert found["GPU time by launching stack"] == {"cudaLaunchKernel": 30_000, "(launch not recorded)": 5000}


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
    assert [profile["name"] for profile in document["profiles"]] == ["worker (1, 1)", "worker (1, 2)"]


@pytest.mark.parametrize("builder", [TraceBuilder(), TraceBuilder().kernel("k", 0, 5)], ids=["empty", "gpu-only"])
def test_runs_without_host_events_make_files_that_still_open(builder: TraceBuilder) -> None:
    check_speedscope(speedscope_of(of(builder)))
    handle = io.BytesIO()
    pprof.write(of(builder), handle)
    assert decoded(handle.getvalue()).string_table[0] == ""


def told(session: Session) -> tuple[Any, Counter[tuple[str, ...]], Counter[str]]:
    """The decoded profile, host time by stack (innermost first), and GPU time by innermost frame."""
    handle = io.BytesIO()
    pprof.write(session, handle)
    profile = decoded(handle.getvalue())
    texts = profile.string_table
    function = {one.id: texts[one.name] for one in profile.function}
    location = {one.id: function[one.line[0].function_id] for one in profile.location}
    host: Counter[tuple[str, ...]] = Counter()
    gpu: Counter[str] = Counter()
    for sample in profile.sample:
        stack = tuple(location[at] for at in sample.location_id)
        host[stack] += sample.value[1]
        gpu[stack[0]] += sample.value[2]
    return profile, host, gpu


def test_pprof_holds_calls_host_time_and_gpu_time_by_path() -> None:
    profile, host, gpu = told(of(run()))
    texts = profile.string_table
    assert texts[0] == ""
    assert [(texts[one.type], texts[one.unit]) for one in profile.sample_type] == [
        ("calls", "count"),
        ("host", "nanoseconds"),
        ("gpu", "nanoseconds"),
    ]
    assert texts[profile.default_sample_type] == "host"
    base = ("main", "ProfilerStep#", "main thread")
    assert host[("walk", *base)] == 30_000
    assert host[("walk", "walk", *base)] == 10_000
    assert host[("cudaLaunchKernel", "aten::mm", "walk", "walk", *base)] == 2000
    assert sum(host.values()) == 130_000
    assert gpu["cudaLaunchKernel"] == 30_000
    assert gpu["(launch not recorded)"] == 5000
    assert sum(sample.value[0] for sample in profile.sample) == 7
    labels = {texts[label.key]: texts[label.str] for label in profile.sample[0].label if label.str}
    assert labels == {"thread": "main thread"}
    places = {texts[one.name]: texts[one.filename] for one in profile.function}
    assert places["walk"] == "train.py"
    lines = {one.line[0].line for one in profile.location}
    assert {3, 7} <= lines


def test_two_writings_of_one_run_are_equal_bytes() -> None:
    first, second = io.BytesIO(), io.BytesIO()
    for handle in (first, second):
        pprof.write(of(run()), handle)
    assert first.getvalue() == second.getvalue()


@pytest.mark.parametrize("name", ["x.speedscope.json", "x.pprof.pb.gz"])
def test_the_command_line_chooses_the_format_by_the_ending(
    name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "trace.json"
    run().write(source)
    assert main(["report", str(source), "-o", str(tmp_path / name), "--no-cache", "--quiet"]) == 0
    raw = (tmp_path / name).read_bytes()
    if name.endswith(".json"):
        assert "main thread" in check_speedscope(json.loads(raw))
    else:
        assert len(decoded(raw).sample) > 0
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


def check_both(session: Session) -> None:
    """Two formats, written by different code, tell the same time of every stack."""
    host, gpu = stacks_of(speedscope_of(session))
    profile, _, _ = told(session)
    texts = profile.string_table
    function = {one.id: texts[one.name] for one in profile.function}
    location = {one.id: function[one.line[0].function_id] for one in profile.location}
    of_host, of_gpu, calls = Counter[tuple[str, ...]](), Counter[tuple[str, ...]](), 0
    for sample in profile.sample:
        stack = tuple(location[at] for at in reversed(sample.location_id))
        calls += sample.value[0]
        of_host[stack[1:]] += sample.value[1]
        of_gpu[stack] += sample.value[2]
    assert +of_host == +host
    assert +of_gpu == +gpu
    events = sum(trace.events.height for trace in session.traces)
    assert calls <= events
    assert sum(of_gpu.values()) == sum(trace.gpu_work()["duration_ns"].sum() for trace in session.traces)
    starts = [trace.start_ns for trace in session.traces if trace.events.height]
    ends = [trace.end_ns for trace in session.traces if trace.events.height]
    assert profile.time_nanos == min(starts, default=0)
    assert profile.duration_nanos == max(ends, default=0) - min(starts, default=0)


@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(builders(most_events=15), min_size=1, max_size=2))
def test_both_formats_tell_the_same_time_of_every_stack_of_a_random_run(traces: list[TraceBuilder]) -> None:
    check_both(of(*traces))


@pytest.mark.parametrize("sort", [training, several_devices, hostile], ids=lambda sort: sort.__name__)
def test_both_formats_tell_the_same_time_of_every_stack(sort: Any) -> None:
    check_both(made(sort)[0])


def test_labels_say_the_thread_and_the_rank_of_every_sample() -> None:
    session = made(training)[0]
    profile, _, _ = told(session)
    texts = profile.string_table
    ranks = Counter[int]()
    for sample in profile.sample:
        labels = {texts[label.key]: texts[label.str] or label.num for label in sample.label}
        ranks[labels.get("rank", 0)] += sample.value[1]
        assert labels.get("thread") or sample.value[2]
    assert set(ranks) == {0, 1, 2, 3}
    host, _ = stacks_of(speedscope_of(session))
    assert sum(ranks.values()) == sum(host.values())


def test_names_of_strangers_are_kept_as_they_are_in_profiles() -> None:
    """A profile is data for another tool, which escapes what it shows."""
    session = made(hostile)[0]
    frames = {frame["name"] for frame in speedscope_of(session)["shared"]["frames"]}
    assert f"{EVIL}aten::mm" in frames
    assert f"{EVIL}aten::mm" in set(told(session)[0].string_table)
