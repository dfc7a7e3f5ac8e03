"""Events that are written as a beginning and an end are those that were written whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom import Trace

CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "python_function")


def build_events(seed: int) -> list[dict[str, Any]]:
    """Nested events on several threads."""
    chance = random.Random(seed)
    events: list[dict[str, Any]] = []

    def fill(low: int, high: int, thread: int, depth: int) -> None:
        at = low
        while at < high - 3 and depth < 4:
            start = at + chance.randint(1, 20)
            end = min(start + chance.randint(2, 200), high - 1)
            if end <= start:
                return
            common = {"pid": 7, "tid": thread, "name": f"e{len(events)}"}
            common["cat"] = chance.choice(CATEGORIES)
            events.append({"ph": "X", "ts": start, "dur": end - start, **common})
            fill(start, end, thread, depth + 1)
            at = end

    for thread in range(1, 4):
        fill(1000, 3000, thread, 0)
    return events


def split(events: list[dict[str, Any]], *, asynchronous: bool = False) -> list[dict[str, Any]]:
    """The same as beginnings and ends, in the order of time; of equal times what ends first comes first."""
    halves = []
    for number, event in enumerate(events):
        whole = {key: value for key, value in event.items() if key not in ("ph", "dur")}
        begin, end = "be" if asynchronous else "BE"
        identity = {"id": number} if asynchronous else {}
        halves.append((event["ts"], 1, number, {**whole, **identity, "ph": begin}))
        last = event["ts"] + event["dur"]
        bare = {"pid": event["pid"], "tid": event["tid"], "ph": end, "ts": last}
        bare |= {"cat": event["cat"], "id": number} if asynchronous else {}
        halves.append((last, 0, -number, bare))
    return [half for *_, half in sorted(halves, key=lambda row: row[:3])]


def load(folder: Path, events: list[dict[str, Any]]) -> Trace:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    (trace,) = traceloom.load(path, cache=False).traces
    return trace


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    columns = trace.events.select("name", "category", "thread", "start_ns", "duration_ns", "depth")
    return sorted(columns.rows())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_the_whole_events(tmp_path: Path, seed: int, asynchronous: bool) -> None:
    events = build_events(seed)
    expected = rows(load(tmp_path, events))
    found = load(tmp_path, split(events, asynchronous=asynchronous))
    assert rows(found) == expected
    assert not {"missing-duration", "missing-time", "unknown-phase"} & {
        notice.slug for notice in found.notices
    }


def test_what_has_no_end_or_no_beginning_is_counted(tmp_path: Path) -> None:
    events = split(build_events(1))
    first = next(index for index, half in enumerate(events) if half["ph"] == "E")
    alone = load(tmp_path, [{**events[first], "tid": 99, "ts": 1}, *events[:-1]])
    counts = {notice.slug: notice.count for notice in alone.notices}
    assert (counts["missing-time"], counts["missing-duration"]) == (1, 1)


@pytest.mark.parametrize("phase", ["", "BE", "N"])
def test_what_is_of_no_phase_is_no_half(tmp_path: Path, phase: str) -> None:
    whole = build_events(1)
    trace = load(tmp_path, [*whole, {**whole[0], "ph": phase}])
    assert trace.events.height == len(whole)
    assert {notice.slug: notice.count for notice in trace.notices}["unknown-phase"] == 1


def test_halves_without_a_time_are_counted(tmp_path: Path) -> None:
    halves = split(build_events(1))
    trace = load(tmp_path, [*halves, {key: halves[0][key] for key in halves[0] if key != "ts"}])
    assert {notice.slug: notice.count for notice in trace.notices}["missing-time"] == 1
