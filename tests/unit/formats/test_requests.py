"""Requests of a program that waits for them, and how long threads ran."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import traceloom
from traceloom.analyze import answer
from traceloom.findings import findings
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session, ThreadClock, read_thread_clocks
from traceloom.trace.trace import Meta

BASE = 1_700_000_000 * 10**9
MS = 1_000_000


def served(
    folder: Path, *, every_us: int, running: float, threads: bool = False, count: int = 40
) -> Session:
    """A capture of a server: requests of 2 ms in five operators; a share of the time its threads run."""
    built = TraceBuilder(base_ns=BASE, generation="2026")
    for number in range(count):
        thread = 10 + number if threads else 1
        at = number * every_us + 37 * (number % 5)
        for op, name in enumerate(
            ("aten::randn", "aten::linear", "aten::relu", "aten::linear", "aten::sum")
        ):
            built.op(name, at + 400 * op, 380, thread=thread)
    end = count * every_us
    samples = range(0, end + 20_001, 20_000)
    thread_cpu = {
        "thread": [1] * len(samples),
        "time_ns": [BASE + 1000 * time for time in samples],
        "cpu_ns": [round(1000 * time * running) for time in samples],
    }
    folder.mkdir()
    built.write(folder / "rank0.kineto.json")
    entry = {
        "rank": 0,
        "world_size": 1,
        "name": "rank0",
        "thread_cpu": thread_cpu,
        "notices": [],
        "steps": None,
        "window": {
            "file": "rank0.kineto.json",
            "kind": "time",
            "first_step": None,
            "step_count": 0,
            "start_ns": BASE,
            "end_ns": BASE + 1000 * end,
        },
        "graph_step": None,
        "step_source": "none",
        "collectives": None,
    }
    document = {
        "format": "traceloom-capture",
        "version": 1,
        "traceloom": "made",
        "run": {},
        "ranks": [entry],
    }
    (folder / "capture.json").write_text(json.dumps(document))
    return traceloom.load(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("every_us", [200_000, 3_300])
def test_a_server_is_told_by_its_requests(tmp_path: Path, every_us: int, threads: bool) -> None:
    session = served(tmp_path / "run", every_us=every_us, running=2_100 / every_us, threads=threads)
    steps = session.traces[0].steps
    assert steps.height == 40
    assert set(steps["evidence"].cast(pl.String)) == {"request"}
    assert (steps["end_ns"] - steps["start_ns"] == 1_980_000).all()
    assert "requests-assumed" in {notice.slug for notice in session.all_notices()}
    told = answer(session)
    assert told.sentence.startswith("40 requests of 1.98 ms")
    assert told.parts.filter(pl.col("kind") == "op")["fraction"].sum() > 0.9
    assert told.parts["ns"].sum() == told.whole_ns == 40 * 1_980_000
    assert all((finding.saving_fraction or 0) < 0.05 for finding in findings(session).time)


def test_a_program_that_runs_all_the_time_serves_nobody(tmp_path: Path) -> None:
    session = served(tmp_path / "run", every_us=3_300, running=1.0)
    assert not session.traces[0].steps.height
    assert "no-steps" in {notice.slug for notice in session.all_notices()}


def test_bursts_that_do_not_begin_alike_are_no_requests(tmp_path: Path) -> None:
    built = TraceBuilder(base_ns=BASE)
    for number in range(40):
        built.op(f"op {number}", number * 50_000, 2_000)
    path = built.write(tmp_path / "rank0.kineto.json")
    samples = {"thread": [1, 1], "time_ns": [BASE, BASE + 2_000 * MS], "cpu_ns": [0, 80 * MS]}
    trace = traceloom.formats.kineto.read_kineto(path, capture={"thread_cpu": samples, "rank": 0})
    assert not trace.steps.height


def paused(folder: Path, *, running: float, stepped: bool) -> Session:
    """One thread with 60 ms of nothing before each operator of 40 ms."""
    built = TraceBuilder(base_ns=BASE)
    for number in range(6):
        if stepped:
            built.mark(number, 100_000 * number)
        built.op(f"aten::op{number}", 100_000 * number + 60_000, 39_900)
    path = built.write(folder / "rank0.kineto.json")
    edges, ran = [], []
    for number in range(6):  # around the pause, and inside of it
        edges += [BASE + (100_000 * number + at) * 1000 for at in (-50, 100, 59_900, 60_050)]
        before = round(number * (40 + 60 * running) * MS)
        ran += [before, before, *[before + round(60 * MS * running)] * 2]
    samples = {"thread": [1] * len(edges), "time_ns": edges, "cpu_ns": ran}
    trace = traceloom.formats.kineto.read_kineto(
        path, capture={"thread_cpu": samples, "rank": 0, "world_size": 1}
    )
    return Session((trace,), "made")


@pytest.mark.parametrize(("running", "word"), [(0.0, "waits"), (0.97, "works"), (0.35, "spends")])
def test_a_pause_of_a_step_says_whether_the_host_worked(
    tmp_path: Path, running: float, word: str
) -> None:
    first = findings(paused(tmp_path, running=running, stepped=True)).time[0]
    assert first.slug == "host-pause"
    assert first.title.startswith(f"the host {word} 60")


def test_what_a_program_without_steps_waits_for_costs_nothing(tmp_path: Path) -> None:
    ranked = findings(paused(tmp_path, running=0.0, stepped=False))
    assert not ranked.time
    assert {"host-pause", "python-bound"} <= {abstention.slug for abstention in ranked.abstentions}
    (tmp_path / "busy").mkdir()
    busy = findings(paused(tmp_path / "busy", running=0.97, stepped=False))
    assert [finding.slug for finding in busy.time] == ["host-pause"]


def test_a_thread_that_sleeps_beside_busy_ones_makes_no_pause(tmp_path: Path) -> None:
    built = TraceBuilder(base_ns=BASE).op("aten::last", 900_000, 100)
    for number in range(8):
        built.op(f"aten::first{number}", 10 * number, 9)
    for number in range(59):  # threads that serve for most of the time
        built.op(f"aten::op{number}", 10_000 * number, 9_800, thread=10 + number % 2)
    path = built.write(tmp_path / "rank0.kineto.json")
    times = list(range(-20, 1_000, 20))
    columns = [
        (thread, time, ran)
        for time in times
        for thread, ran in ((1, 0), (10, 0.4 * (time + 20)), (11, 0.4 * (time + 20)))
    ]
    samples = {
        "thread": [row[0] for row in columns],
        "time_ns": [BASE + row[1] * MS for row in columns],
        "cpu_ns": [round(row[2] * MS) for row in columns],
    }
    trace = traceloom.formats.kineto.read_kineto(
        path, capture={"thread_cpu": samples, "rank": 0, "world_size": 1}
    )
    assert not trace.steps.height
    assert "host-pause" not in {
        finding.slug for finding in findings(Session((trace,), "made")).time
    }
    unknown = traceloom.formats.kineto.read_kineto(path, capture=None)
    assert "host-pause" in {finding.slug for finding in findings(Session((unknown,), "made")).time}


def test_samples_bound_what_a_thread_ran() -> None:
    samples = ThreadClock(np.array([0, 20, 40, 60]) * MS, np.array([0, 10, 10, 30]) * MS)
    low, high = np.array([0, 20, 25, 70]) * MS, np.array([20, 40, 35, 80]) * MS
    least, most = samples.bound_cpu_time(low, high)
    assert (least // MS).tolist() == [10, 0, 0, 0]
    assert (most // MS).tolist() == [10, 0, 0, 10]  # nothing is known after the last sample


@pytest.mark.parametrize(
    "table",
    [
        None,
        [],
        {"thread": [1]},
        {"thread": [1, 1], "time_ns": [1], "cpu_ns": [1, 2]},
        {"thread": [1, 1], "time_ns": [1, None], "cpu_ns": [1, 2]},
        {"thread": [1], "time_ns": [1], "cpu_ns": [1]},
    ],
)
def test_tables_that_do_not_fit_tell_nothing(table: object) -> None:
    assert read_thread_clocks(Meta(path="", capture={"thread_cpu": table})) == {}
