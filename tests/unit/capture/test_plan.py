"""The decisions of a recording, without torch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from traceloom.capture.plan import Action, Phase, RecordingPlan
from traceloom.capture.settings import Settings


def plan(**options: Any) -> RecordingPlan:
    return RecordingPlan(Settings("x", **options), now=100.0)


def begun(step: int = 0, **options: Any) -> RecordingPlan:
    """One whose session has begun with the first call, or where `step` begins."""
    machine = plan(**options)
    machine.start(100.0, step)
    return machine


def steps(machine: RecordingPlan, *numbers: int) -> list[tuple[int, Action]]:
    return [
        (number, action)
        for number in numbers
        if (action := machine.step_starts(number)) is not None
    ]


def test_the_default_begins_with_the_first_call_and_ends_behind_the_window() -> None:
    machine = plan()
    assert machine.starts_with_first_call
    assert machine.phase is Phase.WAITING
    machine.start(100.0, 0)
    assert machine.window == (3, 8)
    assert steps(machine, *range(1, 12)) == [(8, Action.STOP)]
    assert machine.phase is Phase.DONE
    assert machine.finish() is None


def test_the_graph_step_is_the_one_behind_the_window_and_only_when_asked_for() -> None:
    machine = begun(graph_step=True)
    assert steps(machine, *range(1, 12)) == [(8, Action.GRAPH), (9, Action.STOP)]
    machine = begun(graph_step=True)
    steps(machine, *range(1, 9))
    assert machine.phase is Phase.GRAPH
    assert machine.finish() is Action.STOP


def test_a_run_that_ends_early_or_within_the_window_stops_then() -> None:
    for last in (0, 2, 5):
        machine = begun()
        steps(machine, *range(1, last + 1))
        assert machine.finish() is Action.STOP
        assert machine.finish() is None
    assert plan().finish() is None, "nothing was begun"


def test_chosen_steps_begin_exactly_there_and_step_zero_begins_with_the_first_call() -> None:
    machine = plan(first_step=20, step_count=5)
    assert not machine.starts_with_first_call
    assert steps(machine, *range(1, 21)) == [(20, Action.START)]
    machine.start(120.0, 20)
    assert steps(machine, *range(21, 30)) == [(25, Action.STOP)]
    assert plan(first_step=0, step_count=1).starts_with_first_call


def test_a_recorder_that_may_not_begin_yet_begins_at_a_later_step_with_a_later_window() -> None:
    machine = plan(first_step=2, step_count=2)
    assert steps(machine, 1, 2, 3, 4) == [(2, Action.START), (3, Action.START), (4, Action.START)]
    machine.start(104.0, 4)
    assert (machine.window, machine.first_whole_step) == ((4, 6), 4)
    assert steps(machine, 5, 6) == [(6, Action.STOP)]


def test_a_session_that_began_within_the_window_makes_it_later_and_no_shorter() -> None:
    machine = begun(5)
    assert (machine.window, machine.first_whole_step) == ((5, 10), 5)
    assert steps(machine, *range(6, 12)) == [(10, Action.STOP)]
    assert begun(2).window == (3, 8), "a session from before the window does not move it"


@pytest.mark.parametrize(
    ("options", "begins", "ends"),
    [
        ({"after": 5.0, "duration": 2.0}, 105.0, 2.0),
        ({"after": 5.0}, 105.0, 10.0),
        ({"duration": 0.5}, 100.0, 0.5),
    ],
)
def test_a_window_by_time_needs_no_steps(
    options: dict[str, float], begins: float, ends: float
) -> None:
    machine = plan(**options)
    assert not machine.starts_with_first_call
    assert machine.deadline == begins
    assert machine.at_time(begins - 0.1) is None
    assert machine.at_time(begins) is Action.START
    assert machine.at_time(begins + 0.3) is Action.START, "until it has begun"
    machine.start(begins + 0.3, 7)
    assert steps(machine, 8, 9) == [], "no step is counted"
    assert machine.deadline == begins + 0.3 + ends
    assert machine.at_time(begins + ends) is None
    assert machine.at_time(begins + 0.3 + ends) is Action.STOP
    assert machine.deadline is None


def test_a_program_without_steps_is_recorded_for_so_long_and_one_with_steps_for_its_window() -> (
    None
):
    machine = begun(early_cap=60.0)
    assert machine.deadline == 160.0
    assert machine.at_time(159.0) is None
    assert machine.at_time(160.0) is Action.STOP
    machine = begun(early_cap=60.0)
    steps(machine, 1)
    assert machine.deadline is None
    assert machine.at_time(1000.0) is None


def test_a_whole_block_has_no_end_of_its_own() -> None:
    machine = begun(whole=True)
    assert machine.starts_with_first_call
    assert steps(machine, *range(1, 50)) == []
    assert machine.deadline is None
    assert machine.at_time(1e9) is None
    assert machine.finish() is Action.STOP


def test_other_steps_begin_the_numbers_anew_in_the_same_session() -> None:
    machine = begun(4)
    steps(machine, 5)
    machine.renumber()
    assert (machine.window, machine.first_whole_step) == ((3, 8), 0)
    assert steps(machine, *range(1, 9)) == [(8, Action.STOP)]
    machine.renumber()
    assert machine.phase is Phase.DONE, "a window that is over is not begun again"
    machine.renumber(resumes=True)
    assert steps(machine, *range(1, 9)) == [(8, Action.STOP)], "unless its session still records"


EVENTS = st.lists(
    st.sampled_from(["step", "time", "renumber", "refused", "finish", "full"]), max_size=60
)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"graph_step": True},
    {"first_step": 2, "step_count": 3, "graph_step": True},
    {"after": 3.0, "duration": 4.0},
    {"whole": True},
    {"early_cap": 2.0},
]


@given(EVENTS, st.sampled_from(OPTIONS), st.booleans())
def test_whatever_happens_a_session_begins_once_and_ends_once(
    events: list[str], options: dict[str, Any], called: bool
) -> None:
    machine = plan(**options)
    number, now, refuses = 0, 100.0, False
    actions: list[Action] = []

    def act(action: Action | None) -> None:
        nonlocal refuses
        if action is None:
            return
        if action is Action.START:
            assert machine.phase is Phase.WAITING
            if not refuses:
                actions.append(action)
                machine.start(now, number)
            refuses = False
            return
        actions.append(action)

    if called and machine.starts_with_first_call:
        act(Action.START)
    for event in [*events, "finish"]:
        now += 1.0
        if event == "step":
            number += 1
            act(machine.step_starts(number))
        elif event == "time":
            act(machine.at_time(now))
        elif event == "renumber":
            number = 0
            machine.renumber()
        elif event == "refused":
            refuses = True
        else:
            act(machine.finish())
        assert machine.first_whole_step <= max(number, 0) or machine.phase is Phase.DONE
    assert machine.phase is Phase.DONE
    expected = [[], [Action.START, Action.STOP], [Action.START, Action.GRAPH, Action.STOP]]
    assert actions in expected
    if not options.get("graph_step"):
        assert Action.GRAPH not in actions
