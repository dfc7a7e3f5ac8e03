"""The decisions of a recording, without torch."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from traceloom.capture.plan import Action, Phase, Plan
from traceloom.capture.settings import Settings


def plan(**options: Any) -> Plan:
    return Plan(Settings("x", **options), now=100.0)


def steps(machine: Plan, *numbers: int) -> list[tuple[int, Action]]:
    return [(number, action) for number in numbers for action in machine.step_starts(number, 100.0 + number)]


def test_the_default_records_early_discards_it_at_the_fourth_step_and_adds_a_graph_step() -> None:
    machine = plan()
    assert machine.first_call(100.0) == [Action.START]
    assert steps(machine, *range(1, 12)) == [
        (3, Action.DISCARD),
        (3, Action.START),
        (8, Action.KEEP),
        (8, Action.GRAPH_START),
        (9, Action.GRAPH_KEEP),
    ]
    assert machine.phase is Phase.DONE
    assert machine.finish() == []


def test_a_run_that_ends_early_or_within_the_window_holds_what_there_is() -> None:
    for last in (0, 2, 5):
        machine = plan()
        machine.first_call(100.0)
        steps(machine, *range(1, last + 1))
        assert machine.finish() == [Action.HOLD]


def test_the_early_part_ends_after_its_cap_and_the_window_still_comes() -> None:
    machine = plan()
    machine.first_call(100.0)
    assert machine.deadline == 160.0
    assert machine.at_time(159.0) == []
    assert machine.at_time(160.0) == [Action.HOLD]
    assert machine.deadline is None
    assert steps(machine, 1, 2, 3) == [(3, Action.START)]


def test_chosen_steps_begin_exactly_there_and_step_zero_begins_with_the_first_call() -> None:
    machine = plan(first_step=20, step_count=5, graph_step=False)
    assert machine.first_call(100.0) == []
    assert steps(machine, *range(1, 30)) == [(20, Action.START), (25, Action.KEEP)]
    machine = plan(first_step=0, step_count=1)
    assert machine.first_call(100.0) == [Action.START]
    assert steps(machine, 1, 2) == [(1, Action.KEEP), (1, Action.GRAPH_START), (2, Action.GRAPH_KEEP)]


def test_a_window_by_time_needs_no_steps_and_takes_its_graph_step_from_the_next_one() -> None:
    machine = plan(after=5.0, duration=2.0)
    assert machine.first_call(100.0) == []
    assert machine.at_time(104.9) == []
    assert machine.at_time(105.0) == [Action.START]
    assert machine.at_time(107.0) == [Action.KEEP]
    assert steps(machine, 7, 8) == [(7, Action.GRAPH_START), (8, Action.GRAPH_KEEP)]


def test_ours_yields_and_begins_again_after_the_users_profiler() -> None:
    machine = plan()
    machine.first_call(100.0)
    steps(machine, 1, 2, 3, 4)
    assert machine.foreign_profiler() == [Action.HOLD]
    assert machine.foreign_profiler() == []
    assert steps(machine, 5, 6) == []
    assert machine.foreign_profiler_ended(107.0) == [Action.START]
    assert steps(machine, 7, 8, 9, 10, 11, 12) == [
        (7, Action.DISCARD),
        (7, Action.START),
        (12, Action.KEEP),
        (12, Action.GRAPH_START),
    ]
    assert machine.foreign_profiler() == [Action.GRAPH_DISCARD]
    machine.foreign_profiler_ended(120.0)
    assert steps(machine, 14, 15) == [(14, Action.GRAPH_START), (15, Action.GRAPH_KEEP)]


def test_other_steps_begin_the_numbers_and_the_recording_anew() -> None:
    machine = plan()
    machine.first_call(100.0)
    steps(machine, 1, 2, 3, 4)
    assert machine.renumber(105.0) == [Action.DISCARD, Action.START]
    assert steps(machine, 1, 2, 3) == [(3, Action.DISCARD), (3, Action.START)]


EVENTS = st.lists(st.sampled_from(["call", "step", "time", "foreign", "ended", "renumber"]), max_size=60)


@given(EVENTS, st.sampled_from([{}, {"first_step": 2, "step_count": 3}, {"after": 3.0}, {"whole": True}]))
def test_whatever_happens_recorders_start_and_stop_in_turns(events: list[str], options: dict[str, Any]) -> None:
    machine, running, graph, number, now = plan(**options), False, False, 0, 100.0
    for event in [*events, "finish"]:
        now += 1.0
        number = 0 if event == "renumber" else number + (event == "step")
        actions = {
            "call": lambda now=now: machine.first_call(now),
            "step": lambda now=now, number=number: machine.step_starts(number, now),
            "time": lambda now=now: machine.at_time(now),
            "foreign": machine.foreign_profiler,
            "ended": lambda now=now: machine.foreign_profiler_ended(now),
            "renumber": lambda now=now: machine.renumber(now),
            "finish": machine.finish,
        }[event]()
        for action in actions:
            if action is Action.START:
                assert not running
                assert not graph
                running = True
            elif action in (Action.HOLD, Action.DISCARD, Action.KEEP):
                assert running
                running = False
            elif action is Action.GRAPH_START:
                assert not running
                assert not graph
                graph = True
            else:
                assert graph
                graph = False
        assert machine.recording == running
    assert not running
    assert not graph
