"""The agent's answers as lines of a terminal: curves over time, narrow terminals, the doctor's summary."""

from __future__ import annotations

from typing import Any

import pytest

from support.filled import filled
from traceloom.agent import api
from traceloom.cli import agent, agent_views as views
from traceloom.errors import InputError

SECOND = 10**9


def shown(lines: Any) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def answer(series: dict[str, tuple[list[int], list[float]]]) -> api.QueryResponse:
    return filled(
        api.QueryResponse,
        {
            "metric": "traceloom_gpu_power_watts",
            "unit": "watts",
            "since_ns": 0,
            "until_ns": 600 * SECOND,
            "series": [
                {
                    "labels": {"device": device},
                    "times_ns": [at * SECOND for at in times],
                    "values": values,
                }
                for device, (times, values) in series.items()
            ],
        },
    )


def hang(**changes: Any) -> dict[str, Any]:
    return {
        "id": "1",
        "job": "slurm-42",
        "state": "hangs",
        "since_ns": 0,
        "over_ns": None,
        "directory": "/t/0/hangs/1",
        "sentence": "rank 3 is in `load_batch` (train.py:7)",
        "no_bundle": "",
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, "hangs", "/t/0/hangs/1"),
        ({"state": "recovered", "over_ns": 90 * SECOND}, "went on after 90.0 s", "/t/0/hangs/1"),
        ({"state": "ended", "over_ns": 90 * SECOND}, "ended after 90.0 s", "/t/0/hangs/1"),
        ({"state": "unknown"}, "hung when the host or the agent ended", "/t/0/hangs/1"),
        (
            {"directory": "", "no_bundle": "bundles are switched off"},
            "hangs",
            "no bundle: bundles are switched off",
        ),
        ({"directory": ""}, "hangs", "no bundle: not yet"),
    ],
    ids=["hangs", "recovered", "ended", "unknown", "off", "not-yet"],
)
def test_a_hang_is_told_with_what_became_of_it(
    changes: dict[str, Any], first: str, last: str
) -> None:
    lines = shown(
        views.hangs(
            filled(api.HangsResponse, {"hangs": [hang(**changes)], "watched": ["slurm-42"]}), 100
        )
    )
    assert lines[0].startswith("slurm-42  since ")
    assert lines[0].endswith(first)
    assert lines[1:] == ["  rank 3 is in `load_batch` (train.py:7)", f"  {last}"]


def test_without_a_hang_it_is_said_of_how_many_jobs_that_is_known() -> None:
    assert shown(
        views.hangs(filled(api.HangsResponse, {"hangs": [], "watched": ["a", "b"]}), 100)
    ) == [" No job of yours hangs; steps are known of 2 jobs."]
    lines = " ".join(
        shown(views.hangs(filled(api.HangsResponse, {"hangs": [], "watched": []}), 100))
    )
    assert "as far as is known" in lines
    assert "traceloom agent doctor" in lines


def test_a_process_that_hangs_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views.time, "time_ns", lambda: 100 * SECOND)
    rows = [
        process(1, rank=0) | {"hung_since_ns": 10 * SECOND},
        process(2, rank=1) | {"steps_per_second": 2.5},
    ]
    _, first, second = shown(
        views.render_processes(
            filled(api.ProcessesResponse, {"processes": rows, "hidden": 0}), [], 140
        )
    )
    assert "hangs 90.0 s" in first
    assert "2.5" in second


def test_curves_have_one_axis_of_time_and_are_blank_where_nothing_is_known() -> None:
    late = answer({"GPU-a": ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 8]), "GPU-b": ([4, 5], [0, 7])})
    first, second = shown(views.render_query(late, {"GPU-a": "0"}, 100))[-2:]
    assert first.split() == ["GPU", "0", "8", "1", "8", "▁▂▃▄▅█"]
    assert second.split()[:4] == ["GPU-b", "7", "0", "7"]
    assert second.index("█") - second.index("▁") == 1
    gap = answer({"GPU-a": ([0, 1, 2, 8, 9], [1, 1, 1, 2, 2])})
    assert shown(views.render_query(gap, {}, 100))[-1].endswith("  ▁▁  █")


def test_a_short_dip_is_seen_in_a_long_curve() -> None:
    values = [600.0] * 600
    values[300:310] = [100.0] * 10
    curve = shown(views.render_query(answer({"GPU-a": (list(range(600)), values)}), {}, 100))[
        -1
    ].split()[-1]
    assert len(curve) == 60
    assert curve[30] == "▁"
    assert set(curve[:29] + curve[32:]) == {"█"}


def process(pid: int, **owner: Any) -> dict[str, Any]:
    facts = {
        "job": "",
        "rank": None,
        "world_size": None,
        "user": "anna",
        "framework": "",
        "framework_version": "",
        **owner,
    }
    return {
        "pid": pid,
        "uid": 1000,
        "owner": facts,
        "values": [],
        "devices": [],
        "steps_per_second": None,
        "unreadable": "",
        "hung_since_ns": None,
        "command": "/a/very/long/way/to/the/environment/bin/python train.py --steps 10",
    }


@pytest.mark.parametrize("width", [80, 140])
def test_a_narrow_terminal_has_room_for_the_command(width: int) -> None:
    rows = [
        process(1),
        process(
            2, job="torchelastic-e8071123-9f1c-4e02", rank=0, world_size=8, framework="pytorch"
        ),
    ]
    lines = shown(
        views.render_processes(
            filled(api.ProcessesResponse, {"processes": rows, "hidden": 0}), [], width
        )
    )
    assert all(len(line) <= width for line in lines)
    assert all("python train.py" in line for line in lines[1:])
    assert "GPUs" not in lines[0]  # nobody has one
    assert "0/8" in lines[2]


def test_the_doctor_says_first_how_much_works() -> None:
    checks = [
        {"area": area, "name": name, "works": works, "why": "for a reason " * 12, "help": "do this"}
        for area, name, works in (
            ("extras", "otlp", "no"),
            ("collect", "cpu", "yes"),
            ("rights", "user", "partly"),
        )
    ]
    lines = shown(
        views.render_doctor(filled(api.DoctorResponse, {"checks": checks}), 80, running=True)
    )
    assert lines[0] == " Of 3 things, 1 work, 1 work in part, 1 do not work."
    areas = [line for line in lines if line and not line.startswith(" ")]
    assert areas == ["rights", "collect", "extras"]
    assert all(line.startswith("   ") for line in lines if "reason" in line or "→" in line)


@pytest.mark.parametrize(
    "labels", [{}, {"job": "j" * 60}, {f"label{number}": "v" * 60 for number in range(13)}]
)
def test_labels_leave_room_for_the_curve_where_there_is_any(labels: dict[str, str]) -> None:
    document = answer({"GPU-a": (list(range(50)), [float(number) for number in range(50)])})
    document.series[0].labels.clear()
    document.series[0].labels.update(labels)
    line = shown(views.render_query(document, {}, 80))[-1]
    assert ("▁▁" in line) == (len(labels) < 3)


@pytest.mark.parametrize(
    "said",
    [[], {"hangs": []}, {"hangs": [{"job": "a"}], "watched": []}, {"hangs": 3, "watched": []}],
)
def test_what_is_no_answer_of_an_agent_is_refused(said: Any) -> None:
    with pytest.raises(InputError) as refused:
        agent._read(said, api.HangsResponse)
    assert refused.value.slug == "agent-unclear"
