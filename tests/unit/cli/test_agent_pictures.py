"""What the agent answers, as lines of a terminal: its state, what happens now, its rules, stacks and metrics."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from rich.text import Text

from support.filled import filled
from traceloom.agent import api
from traceloom.agent.metrics import METRICS
from traceloom.cli import agent_views as views

SECOND = 10**9
NOW = 1_790_000_000 * SECOND
EVIL = "\x1b[31mrm -rf\u202e"
WIDTHS = pytest.mark.parametrize("width", [80, 100, 200])


def shown(lines: Iterable[Text], width: int = 0) -> list[str]:
    """The lines as they stand there: harmless, and no longer than the terminal is wide."""
    out = [line.plain.rstrip() for line in lines]
    assert not any(re.search(r"[\x00-\x1f\x7f\u202e]", line) for line in out), out
    if width:
        assert all(len(line) <= width for line in out), out
    return out


def state(**changes: Any) -> dict[str, Any]:
    return {
        "host": "node1",
        "now_ns": NOW,
        "started_ns": NOW - (86_400 + 3_661) * SECOND,
        "pid": 7,
        "version": "1.2",
        "devices": 8,
        "stale_devices": 0,
        "processes": 2,
        "series": 1234,
        "history": {"bytes": 5e6},
        "history_error": "",
        "publishers": {},
        "collectors": [],
        **changes,
    }


def collector(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "period_seconds": 0.5,
        "seconds": 0.0025,
        "runs": 10,
        "failures": {},
        "last_error": "",
        **changes,
    }


@WIDTHS
def test_the_state_of_an_agent_says_how_long_it_runs_and_what_fails(width: int) -> None:
    collectors = [
        collector("gpu"),
        collector("cpu", runs=0, period_seconds=10.0),
        collector(EVIL, runs=1500, failures={"a": 1, "b": 2}, last_error=f"no permission {EVIL}"),
    ]
    lines = shown(
        views.status(filled(api.StatusResponse, state(collectors=collectors)), width), width
    )
    assert lines[:3] == [
        "Agent of node1: up 1 day, 1:01:01, pid 7, version 1.2",
        "8 devices, 2 processes that matter, 1\u202f234 series",
        "History: 5.00 MB on disk",
    ]
    gpu, cpu, odd = lines[-3:]
    assert gpu.split() == ["gpu", "0.5", "s", "2.50", "ms", "10", "0"]
    assert cpu.split() == ["cpu", "10", "s", "–", "0", "0"], "what never ran took no time"
    assert "1\u202f500" in odd
    assert re.search(r"\b3\b", odd), "failures of all kinds"


def test_what_is_wrong_with_an_agent_is_said() -> None:
    wrong = state(
        host=EVIL,
        stale_devices=2,
        history={"bytes": 0, "lost_ticks": 3.0},
        history_error="the disk is full",
        publishers={"otlp": "", "service": EVIL},
    )
    lines = shown(views.status(filled(api.StatusResponse, wrong), 100), 100)
    assert "8 devices, 2 stale, 2 processes" in lines[1]
    assert lines[2] == "History: 0 B on disk, 3 ticks lost"
    assert "in memory alone: the disk is full" in lines[3]
    assert any(line.strip() == "otlp: publishes" for line in lines)


def event(**changes: Any) -> dict[str, Any]:
    return {
        "at_ns": NOW,
        "job": "",
        "device": "",
        "kind": "xid",
        "code": 79,
        "text": "fallen off the bus",
        **changes,
    }


@WIDTHS
def test_events_say_when_of_what_and_which(width: int) -> None:
    rows = [
        event(device="GPU-0"),
        event(job=f"job {EVIL}" + "x" * 40, kind="oom", code=None),
        event(code=0, text=EVIL * 30),
    ]
    lines = shown(views.render_events(filled(list[api.EventResponse], rows), width), width)[-3:]
    when = (
        dt.datetime.fromtimestamp(NOW / 1e9, tz=dt.timezone.utc)
        .astimezone()
        .strftime("%d %b %H:%M:%S")
    )
    assert all(when in line for line in lines)
    assert "GPU-0" in lines[0]
    assert "xid 79: fallen" in lines[0]
    assert "oom:" in lines[1]
    assert "xid 0:" in lines[2], "0 is a code"
    assert shown(views.render_events([], width)) == ["Nothing happened in this time."]


def value(metric: str, number: float, **labels: str) -> dict[str, Any]:
    return {"metric": f"traceloom_{metric}", "value": number, "labels": labels}


def picture(devices: list[dict[str, Any]], **host: Any) -> views.HostSnapshot:
    return filled(
        views.HostSnapshot,
        {
            "status": state(),
            "host": {"cpu": None, "memory": None, **host},
            "devices": {"devices": devices},
            "processes": {"processes": [], "hidden": 3},
        },
    )


@WIDTHS
def test_what_happens_now_has_a_bar_for_what_is_measured_and_none_for_what_is_not(
    width: int,
) -> None:
    devices = [
        {
            "index": "0",
            "uuid": "GPU-0",
            "model": "H100",
            "stale": "",
            "jobs": ["a", "b"],
            "values": [
                value("gpu_busy_ratio", 0.5),
                value("gpu_sm_active_ratio", 0.25),
                value("gpu_memory_used_bytes", 40e9),
                value("gpu_power_watts", 699.6),
                value("gpu_flops", 1e14, bound="low"),
                value("gpu_flops", 2e14, bound="high"),
            ],
        },
        {"index": "1", "uuid": "GPU-1", "model": "H100", "stale": EVIL, "jobs": [], "values": []},
        {
            "index": "2",
            "uuid": "GPU-2",
            "model": "A100",
            "stale": "",
            "jobs": [],
            "values": [
                value("gpu_busy_ratio", 1.0),
                value("gpu_flops", 1e14, bound="low"),
                value("gpu_flops", 1e14, bound="high"),
            ],
        },
    ]
    lines = shown(views.render_top(picture(devices, cpu=0.25, memory=[3e9, 12e9]), width), width)
    text = "\n".join(lines)
    assert "processors" in text
    assert "25.0 % busy" in text
    assert "3.00 GB of 12.0 GB" in text
    assert "2 x H100, 1 x A100" in text
    first, second, third = (
        next(line for line in lines if line.split()[:1] == [number]) for number in "012"
    )
    for part in ("50.0 %", "25.0 %", "40.0 GB", "700 W", "100 – 200 TFLOP/s"):
        assert part in first
    assert "100 TFLOP/s" in third
    assert "– 1" not in third, "both bounds are the same"
    assert not re.search(r"\d %|GB| W", second), "nothing is measured of it"
    bars = [re.search(r"[█▉▊▋▌▍▎▏·━╸╺─]+", line) for line in (first, third)]
    assert all(bars)
    assert "3 processes of other users are not shown; root sees them." in text
    assert "No process of yours uses a device" in " ".join(lines)
    alone = shown(views.render_top(picture([]), width), width)
    assert not any("Devices" in line or "processors" in line for line in alone)


def rule(**changes: Any) -> dict[str, Any]:
    return {
        "name": "loader",
        "on": "metric",
        "target": "job",
        "fired": 0,
        "traced_seconds": 0.0,
        "kept_bytes": 0,
        "last": None,
        "refusals": {},
        "last_refusal": None,
        "problem": "",
        **changes,
    }


def rules(*of: dict[str, Any], **changes: Any) -> api.TriggersResponse:
    return filled(
        api.TriggersResponse,
        {
            "rules": list(of),
            "bytes_left": 5_000_000,
            "bytes_per_day": 20_000_000,
            "share": 0.01,
            "last_error": "",
            **changes,
        },
    )


@WIDTHS
def test_rules_say_what_they_did_and_why_they_did_not(width: int) -> None:
    fired = rule(
        name=EVIL,
        fired=2,
        traced_seconds=1.5,
        kept_bytes=3_000_000,
        refusals={"busy": 1, "budget": 1200},
        last={"at_ns": NOW, "request": "r1", "target": "job a", "what": EVIL},
        last_refusal={
            "at_ns": NOW,
            "target": "job b",
            "reason": "budget",
            "detail": "nothing is left",
        },
        problem="nobody measures it",
    )
    lines = shown(views.triggers(rules(fired, rule(), last_error=EVIL), width), width)
    text = " ".join(" ".join(lines).split())
    assert (
        "5.00 MB of 20.0 MB a day are left; a process is traced for at most 1.0 % of its time."
        in text
    )
    assert "2 requests: 1.50 s traced, 3.00 MB kept" in text
    assert "refused: 1 200 budget, 1 busy" in text
    assert "job b: nothing is left (budget)" in text
    assert "as things are it cannot fire: nobody measures it" in text
    assert lines[-1] == "  0 requests", "what never fired cost nothing"


def test_where_there_are_no_rules_there_is_one_that_can_be_used() -> None:
    lines = shown(views.triggers(rules(), 100), 100)
    begin = lines.index("  [[triggers]]")
    example = "\n".join(line.strip() for line in lines[begin : lines.index("", begin)])
    assert msgspec.toml.decode(example)["triggers"][0]["on"] == "metric"
    assert example == views.EXAMPLE_RULES.strip()


def group(
    role: str, ranks: list[int], frames: list[tuple[str, str, int]], **changes: Any
) -> dict[str, Any]:
    return {
        "role": role,
        "ranks": ranks,
        "pids": [100 + rank for rank in ranks],
        "frames": frames,
        "thread": "",
        "elsewhere": False,
        **changes,
    }


@WIDTHS
def test_stacks_go_from_the_outermost_call_to_the_innermost(width: int) -> None:
    groups = [
        group(
            "rank",
            [0, 1, 2, 5],
            [("<module>", "train.py", 1), ("main", "/a/train.py", 10), ("step<int>", "x.cc", 0)],
        ),
        group(
            "rank", [3], [("main", "/a/train.py", 10), ("load", "/b/data.py", 7)], elsewhere=True
        ),
        group("worker", [4], [("fetch", "/b/w.py", 3)], pids=[900]),
        group("thread", [], [], pids=[11, 12], thread=EVIL),
    ]
    answer = {"sentence": "rank 3 waits for data", "groups": groups}
    lines = shown(
        views.render_stacks(filled(api.StacksResponse, answer), width, native=False), width
    )
    text = " ".join(" ".join(lines).split())
    assert lines[0].strip() == "rank 3 waits for data"
    assert "ranks 0-2, 5: main > step (train.py:10)" in text
    assert "rank 3: main > load (data.py:7)" in text
    assert "process 900 of rank 4: fetch (w.py:3)" in text
    assert "no call that can be seen" in text
    assert "--native tells which" in text
    assert "--native" not in " ".join(
        shown(views.render_stacks(filled(api.StacksResponse, answer), width, native=True), width)
    )


def test_a_trace_tells_what_it_makes_possible_and_what_it_lacks() -> None:
    answer = {
        "job": "a",
        "dtype_mix": {"float32": 1.0, "bfloat16": 3.0},
        "flops_per_step": 2.5e15,
        "roofline_ratio": 0.625,
        "copied_bytes_per_step": 1e6,
    }
    _, flops, types, roofline, copied = shown(
        views.render_job_facts(filled(api.TraceResponse, answer))
    )
    assert flops.split()[:3] == ["FLOPs", "2.50", "PFLOP"]
    assert "bfloat16 75%, float32 25%" in types, "the most first"
    assert "62.5%" in roofline
    assert "1.00 MB" in copied
    nothing = {
        "job": "a",
        "dtype_mix": {},
        "flops_per_step": None,
        "roofline_ratio": None,
        "copied_bytes_per_step": None,
    }
    lines = shown(views.render_job_facts(filled(api.TraceResponse, nothing)))
    assert sum("not in the trace" in line for line in lines) == 4
    assert "--shapes" in lines[-1]
    measured = {
        **nothing,
        "flops_per_step": 0.0,
        "roofline_ratio": 0.0,
        "copied_bytes_per_step": 0.0,
    }
    zero = shown(views.render_job_facts(filled(api.TraceResponse, measured)))
    assert sum("not in the trace" in line for line in zero) == 1, (
        "measured to be nothing is not unknown"
    )


@WIDTHS
def test_every_metric_is_listed_with_its_labels(width: int) -> None:
    lines = shown(views.render_metrics(width))
    assert all(len(line) <= width for line in lines if line.startswith(" "))
    heads = [line for line in lines if line and not line.startswith(" ")]
    assert [re.split(r"[{]", line)[0] for line in heads] == [
        metric.name for metric in METRICS.values()
    ]
    document = views.build_metrics_document()
    assert [entry["name"] for entry in document] == [
        metric.full_name for metric in METRICS.values()
    ]
    assert all(entry["help"] and entry["kind"] for entry in document)


@pytest.mark.parametrize(
    ("unit", "number", "written"),
    [
        ("bytes", 1.5e6, "1.50 MB"),
        ("bytes/s", 1.5e6, "1.50 MB/s"),
        ("ratio", 0.0004, "<0.1 %"),
        ("seconds", 0.25, "250 ms"),
        ("watts", 699.6543, "699.7"),
        ("", 1234567.0, "1.235e+06"),
    ],
)
def test_numbers_of_curves_have_their_unit(unit: str, number: float, written: str) -> None:
    answer = {
        "metric": "m",
        "unit": unit,
        "since_ns": NOW,
        "until_ns": NOW,
        "series": [
            {"labels": {}, "times_ns": [NOW], "values": [number]},
            {"labels": {}, "times_ns": [], "values": []},
        ],
    }
    line = shown(views.render_query(filled(api.QueryResponse, answer), {}, 100), 100)[-1]
    assert line.count(written) == 3, "last, least and most"


def test_of_a_metric_that_nothing_is_known_of_it_is_said_who_knows_why() -> None:
    answer = {"metric": "m", "unit": "", "since_ns": NOW, "until_ns": NOW, "series": []}
    assert "traceloom agent doctor" in " ".join(
        shown(views.render_query(filled(api.QueryResponse, answer), {}, 100), 100)
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_a_curve_is_highest_where_its_values_are(values: list[float]) -> None:
    answer = {
        "metric": "m",
        "unit": "",
        "since_ns": 0,
        "until_ns": len(values) * SECOND,
        "series": [
            {"labels": {}, "times_ns": [at * SECOND for at in range(len(values))], "values": values}
        ],
    }
    line = shown(views.render_query(filled(api.QueryResponse, answer), {}, 120), 120)[-1]
    curve = re.findall(r"[▁▂▃▄▅▆▇█]+$", line)
    assert curve, line
    assert len(curve[0]) <= min(60, len(values))
    if len(values) <= 60:
        spread = max(values) - min(values)
        if spread > 1e-3:
            assert curve[0][values.index(max(values))] == "█"
        assert curve[0][values.index(min(values))] == "▁"
