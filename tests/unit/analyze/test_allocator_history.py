"""Blocks of a trace get their lines from the allocator's history, or none where that is not certain."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, strategies as st

from traceloom.analyze.memory_answers import explain
from traceloom.formats.memory_files import parse_snapshot
from traceloom.testing import TraceBuilder
from traceloom.trace.session import MemorySnapshot
from traceloom.trace.trace import Trace

BEGIN_US = 1_000_000
AHEAD_US = 321  # of the history's clock
Event = tuple[float, int, int]
"""Time of the trace in µs, address, bytes; frees are negative."""


def _entry(time_us: float, address: int, size: int, ahead_us: int) -> dict[str, Any]:
    frames = [{"filename": "/u/train.py", "line": int(time_us), "name": "step"}] if size > 0 else []
    action = "alloc" if size > 0 else "free_requested"
    return {
        "action": action,
        "addr": address,
        "size": abs(size),
        "stream": 0,
        "frames": frames,
        "time_us": int(time_us) + ahead_us,
    }


def _snapshot(events: list[Event], *, ahead_us: int = AHEAD_US) -> MemorySnapshot:
    """The history of these events; the line of each is its time in µs."""
    entries = [_entry(*event, ahead_us) for event in events]
    return parse_snapshot({"segments": [], "device_traces": [entries]}, "s.pickle")


def _trace(events: list[Event]) -> Trace:
    """What the profiler has seen of them from `BEGIN_US` on; it rounds sizes to 512."""
    builder = TraceBuilder().op("aten::mm", BEGIN_US, 100_000)
    for time, address, size in events:
        if time >= BEGIN_US:
            rounded = -(-abs(size) // 512) * 512
            builder.allocation(
                time, rounded if size > 0 else -rounded, address=address, device_type=1, device=0
            )
    return builder.build()


def _lines(events: list[Event], history: MemorySnapshot) -> list[tuple[float | None, str | None]]:
    """Of each block when it was made in µs (None: before) and its stack."""
    known = explain(_trace(events), snapshot=history)
    blocks = known.named.blocks
    stacks = [known.lines[k] for k in range(blocks.made.size)] if known.lines is not None else []
    times = [
        None if made < 0 else start / 1000
        for made, start in zip(blocks.made, blocks.start_ns, strict=True)
    ]
    return list(zip(times, stacks, strict=True))


def _line(time_us: float) -> str:
    return f"/u/train.py({int(time_us)}): step"


REUSED: list[Event] = [
    (BEGIN_US + 10, 1, 700),
    (BEGIN_US + 20, 7, 700),
    (BEGIN_US + 30, 7, -700),
    (BEGIN_US + 40, 7, 600),
    (BEGIN_US + 50, 7, -600),
    (BEGIN_US + 60, 7, 500),
    (BEGIN_US + 90, 2, 900),
]


def test_an_address_that_is_given_out_again_has_the_line_of_each_time() -> None:
    found = _lines(REUSED, _snapshot(REUSED))
    made = [BEGIN_US + after for after in (10, 20, 40, 60, 90)]
    assert found == [(time, _line(time)) for time in made]


def test_without_a_measure_of_the_clocks_nothing_is_guessed() -> None:
    again = REUSED[1:-1]
    assert {stack for _, stack in _lines(again, _snapshot(again))} == {None}


def test_blocks_from_before_the_recording_have_the_last_line_before_it() -> None:
    before: list[Event] = [(100, 50, 300), (200, 50, -300), (5_000, 50, 400)]
    events = [*before, *REUSED, (BEGIN_US + 95, 50, -400)]
    found = _lines(events, _snapshot(events))
    assert (None, _line(5_000)) in found
    known = explain(_trace(events), snapshot=_snapshot(events))
    names, number = known.by("stack")
    by_stack = dict(zip((names[k] for k in number), known.named.blocks.bytes.tolist(), strict=True))
    assert by_stack[_line(5_000)] == 512
    assert "(before the recording)" not in by_stack
    assert known.has_stacks


def test_a_block_that_the_history_has_lost_stays_without_a_line() -> None:
    events: list[Event] = [(100, 50, 400), *REUSED, (BEGIN_US + 95, 50, -400)]
    assert (None, None) in _lines(events, _snapshot(events[1:]))


def test_a_smaller_block_is_not_taken_for_a_larger_one() -> None:
    larger = [
        (time, address, size * (10 if time == BEGIN_US + 40 else 1))
        for time, address, size in REUSED
    ]
    assert dict(_lines(REUSED, _snapshot(larger)))[BEGIN_US + 40] is None


def test_a_history_of_another_time_is_not_used() -> None:
    assert {stack for _, stack in _lines(REUSED, _snapshot(REUSED, ahead_us=60_000_000))} == {None}


def test_frames_of_the_trace_go_before_those_of_the_history() -> None:
    builder = TraceBuilder().python("model.py(1): forward", 0, 100).op("aten::mm", 5, 50)
    builder.allocation(10, 512, address=1, device_type=1, device=0)
    known = explain(builder.build(), snapshot=_snapshot([(10, 1, 500)], ahead_us=0))
    assert known.stack_reader()(known.named.blocks.made).to_list() == ["model.py(1): forward"]


@given(st.integers(0, 2**32), st.integers(-5000, 5000), st.integers(0, 3))
def test_a_line_is_the_right_one_or_none(seed: int, ahead_us: int, jitter_us: int) -> None:
    draw = random.Random(seed)
    time, live = BEGIN_US - 2_000.0, dict[int, int]()
    events: list[Event] = []
    for _ in range(300):
        time += draw.randrange(4, 40)
        address = draw.randrange(1, 60)
        if address in live:
            events.append((time, address, -live.pop(address)))
        else:
            live[address] = draw.randrange(1, 5000)
            events.append((time, address, live[address]))
    for address in range(100, 120):  # parameters and the like: made once
        time += 10
        events.append((time, address, 4096))
    entries = [_entry(*event, ahead_us + draw.randrange(jitter_us + 1)) for event in events]
    history = parse_snapshot({"segments": [], "device_traces": [entries]}, "s.pickle")
    found = [(time, stack) for time, stack in _lines(events, history) if time is not None]
    assert all(stack in (None, _line(time)) for time, stack in found)
    assert sum(stack is not None for _, stack in found) >= 0.9 * len(found)
