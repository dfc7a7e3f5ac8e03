"""What is cut out of a trace of a whole session: by time, work of devices by its launch."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from traceloom.capture.cut import TracePart, cut_trace

BASE = 1_790_857_026_000_000_000
LAYOUTS = ("2.13", "2.8")
"""Which PyTorch wrote it: one field a line, or several."""


def write_event(event: dict[str, Any], layout: str) -> str:
    """One event as PyTorch puts it into its file."""
    text = {**event, "ts": "@"} if "ts" in event else dict(event)
    arguments = text.pop("args", None)
    fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in text.items()]
    if "ts" in event:
        fields = [field.replace('"@"', f"{event['ts']:.3f}") for field in fields]
    lines = ",\n    ".join(fields) if layout == "2.13" else ", ".join(fields)
    if arguments is not None:
        lines += f'\n    ,\n    "args": {{\n      {json.dumps(arguments)[1:-1]}\n    }}'
    return f"  {{\n    {lines}\n  }}"


def write_trace(path: Path, events: list[dict[str, Any]], layout: str) -> Path:
    head = (
        '\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA"\n    }\n  ],\n'
        f'  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {BASE},\n  "traceEvents": [\n'
    )
    body = ",\n".join(write_event(event, layout) for event in events)
    path.write_text(f'{{{head}{body}\n  ],"traceName": "x.json" }}')
    return path


def event(category: str, name: str, ts: float, **more: Any) -> dict[str, Any]:
    number = more.pop("correlation", None)
    arguments = {"args": {"External id": 7} if number is None else {"correlation": number}}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 5,
        "tid": 6,
        "ts": ts,
        **more,
        **arguments,
    }


def cut(
    path: Path, start_us: float, end_us: float, steps: tuple[tuple[int, float], ...] = ()
) -> tuple[dict[str, Any], int, int | None]:
    """The document that is cut, and what is said of it; times are those of the events."""
    part = TracePart(
        start_ns=BASE + round(start_us * 1000) if start_us else 0,
        end_ns=BASE + round(end_us * 1000),
        steps=tuple((number, BASE + round(at * 1000)) for number, at in steps),
        thread=6,
        process=5,
    )
    sink = io.BytesIO()
    operators, first_ns = cut_trace(path, sink, part)
    return json.loads(sink.getvalue()), operators, first_ns


def names(document: dict[str, Any]) -> list[str]:
    return [event["name"] for event in document["traceEvents"] if event.get("ph") != "M"]


THREAD = {
    "ph": "M",
    "name": "thread_name",
    "ts": 1.0,
    "pid": 5,
    "tid": 6,
    "args": {"name": "python"},
}
SPAN = event("Trace", "PyTorch Profiler (0)", 1.0, dur=900.0)
OPERATORS = [event("cpu_op", f"aten::{number}", 100.0 * number) for number in range(1, 9)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_began_within_the_window_is_kept_and_the_head_stays(
    tmp_path: Path, layout: str
) -> None:
    path = write_trace(tmp_path / "x.json", [THREAD, *OPERATORS, SPAN], layout)
    document, operators, first_ns = cut(path, 300.0, 500.0)
    assert names(document) == ["aten::3", "aten::4", "PyTorch Profiler (0)"]
    assert document["traceEvents"][0] == THREAD
    assert (operators, first_ns) == (2, BASE + 300_000)
    assert (document["baseTimeNanoseconds"], document["traceName"]) == (BASE, "x.json")
    assert document["deviceProperties"] == [{"id": 0, "name": "NVIDIA"}]
    kept = {event["name"]: event for event in document["traceEvents"]}
    assert kept["aten::3"] == OPERATORS[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_beginning_everything_is_kept(tmp_path: Path, layout: str) -> None:
    path = write_trace(tmp_path / "x.json", [THREAD, *OPERATORS, SPAN], layout)
    document, operators, first_ns = cut(path, 0, 200.0)
    assert document == json.loads(path.read_text())
    assert (operators, first_ns) == (8, BASE + 100_000)


def test_a_time_is_read_to_the_nanosecond(tmp_path: Path) -> None:
    events = [event("cpu_op", f"at {ts}", ts) for ts in (99.999, 100.0, 100.001, 199.999, 200.0)]
    document, *_ = cut(write_trace(tmp_path / "x.json", events, "2.13"), 100.0, 200.0)
    assert names(document) == ["at 100.0", "at 100.001", "at 199.999"]


def test_steps_are_marked_at_their_beginnings_on_the_thread_that_makes_them(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "x.json", OPERATORS, "2.13")
    document, *_ = cut(path, 300.0, 500.0, ((3, 300.0), (4, 400.123), (5, 500.0)))
    marks = [one for one in document["traceEvents"] if one["name"].startswith("traceloom.step#")]
    assert [(mark["name"], mark["ts"]) for mark in marks] == [
        ("traceloom.step#3", 300.0),
        ("traceloom.step#4", 400.123),
        ("traceloom.step#5", 500.0),
    ]
    assert {(mark["ph"], mark["cat"], mark["pid"], mark["tid"], mark["dur"]) for mark in marks} == {
        ("X", "user_annotation", 5, 6, 0.0)
    }


@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "gpu_memset"])
@pytest.mark.parametrize("launch", ["cuda_runtime", "cuda_driver", "xpu_runtime"])
def test_work_of_a_device_stays_where_its_launch_stays(
    tmp_path: Path, category: str, launch: str
) -> None:
    events = [
        event(launch, "launch before", 290.0, correlation=1),
        event(launch, "launch within", 310.0, correlation=2),
        event(launch, "launch behind", 510.0, correlation=3),
        event(category, "of before", 350.0, correlation=1, tid=7),
        event(category, "of within", 900.0, correlation=2, tid=7),
        event(category, "of behind", 910.0, correlation=3, tid=7),
    ]
    document, *_ = cut(write_trace(tmp_path / "x.json", events, "2.13"), 300.0, 500.0)
    assert names(document) == ["launch within", "of within"]


def test_an_arrow_stays_with_both_of_its_ends(tmp_path: Path) -> None:
    def arrow(phase: str, number: int, ts: float, **more: Any) -> dict[str, Any]:
        ends = {"ph": phase, "id": number, "pid": 5, "tid": 6, "ts": ts}
        return {**ends, "cat": "ac2g", "name": f"{phase}{number}", **more}

    events = [
        event("cuda_runtime", "launch before", 290.0, correlation=1),
        event("cuda_runtime", "launch within", 310.0, correlation=2),
        arrow("s", 1, 290.0),
        arrow("s", 2, 310.0),
        event("kernel", "of before", 350.0, correlation=1, tid=7),
        arrow("f", 1, 350.0, bp="e"),
        event("kernel", "of within", 900.0, correlation=2, tid=7),
        arrow("f", 2, 900.0, bp="e"),
        arrow("s", 1 << 40, 400.0),  # of a CUDA graph: no launch has this number
        arrow("s", 1 << 41, 600.0),
    ]
    for layout in LAYOUTS:
        document, *_ = cut(write_trace(tmp_path / "x.json", events, layout), 300.0, 500.0)
        assert names(document) == ["launch within", "s2", "of within", "f2", f"s{1 << 40}"]


def test_frames_of_the_recorder_are_none_of_the_program(tmp_path: Path) -> None:
    frames = [
        event("python_function", "/site-packages/traceloom/capture/recorder.py(9): guarded", 310.0),
        event("python_function", "train.py(3): step", 320.0),
    ]
    document, *_ = cut(write_trace(tmp_path / "x.json", frames, "2.13"), 300.0, 500.0)
    assert names(document) == ["train.py(3): step"]
    document, *_ = cut(tmp_path / "x.json", 0, 500.0)
    assert names(document) == ["train.py(3): step"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_that_runs_all_the_time_is_cut_to_the_window(
    tmp_path: Path, layout: str
) -> None:
    frames = [
        event("python_function", "train.py(14): <module>", 20.0, dur=880.0),
        event("python_function", "train.py(3): step", 290.0, dur=200.0),  # ends within
        event("python_function", "train.py(5): before", 30.0, dur=40.0),
        event("cpu_op", "aten::mm", 20.0, dur=880.0),
        event("python_function", "train.py(3): step", 495.0, dur=200.0),
    ]
    document, *_ = cut(write_trace(tmp_path / "x.json", frames, layout), 300.125, 500.0)
    kept = [(one["name"], one["ts"], one["dur"]) for one in document["traceEvents"]]
    assert kept == [
        ("train.py(14): <module>", 300.125, 199.875),
        ("train.py(3): step", 495.0, 200.0),
    ]


@pytest.mark.parametrize(
    "name",
    ['say "hi"', '"ts": 1.000', "  }", '{\n  {\n  },"', '"cat": "kernel"', "back\\slash", "漢字"],
)
def test_any_name_is_kept_as_it_is(tmp_path: Path, name: str) -> None:
    events = [event("cpu_op", name, 310.0), event("cpu_op", name, 610.0)]
    document, operators, _ = cut(write_trace(tmp_path / "x.json", events, "2.13"), 300.0, 500.0)
    assert (names(document), operators) == ([name], 1)


def test_a_trace_that_holds_nothing_of_the_window_is_whole_json(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "x.json", OPERATORS, "2.13")
    document, operators, first_ns = cut(path, 5000.0, 6000.0, ((1, 5000.0),))
    assert names(document) == ["traceloom.step#1"]
    assert (operators, first_ns) == (0, None)
    document, *_ = cut(path, 5000.0, 6000.0)
    assert names(document) == []


def test_what_this_pytorch_writes_is_read_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "real.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(20):
            torch.ones(3) + 1
    profiler.export_chrome_trace(str(path))
    whole = json.loads(path.read_text())
    added = [one for one in whole["traceEvents"] if one["name"] == "aten::add"]
    document, operators, _ = cut(path, 0, 0)
    assert document == whole
    assert operators == sum(one.get("cat") == "cpu_op" for one in whole["traceEvents"])
    base = whole["baseTimeNanoseconds"] - BASE
    document, *_ = cut(path, added[5]["ts"] + base / 1000, added[9]["ts"] + base / 1000)
    # a double holds nanoseconds since the boot, not since 1970
    assert [one["name"] for one in document["traceEvents"]].count("aten::add") in {3, 4, 5}
