"""The decisions of a recording, without torch."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from traceloom.capture.plan import Action, Phase, RecordingPlan
from traceloom.capture.settings import Settings


def plan(**options: Any) -> RecordingPlan:
    return RecordingPlan(Settings("x", **options), now=100.0)


def steps(machine: RecordingPlan, *numbers: int) -> list[tuple[int, Action]]:
    return [
        (number, action)
        for number in numbers
        for action in machine.step_starts(number, 100.0 + number)
    ]


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


def test_recording_begins_when_torch_is_there_and_goes_on_through_the_first_call() -> None:
    machine = plan()
    assert machine.torch_imported(100.0) == [Action.START]
    assert machine.first_call(101.0) == []
    assert machine.deadline == 161.0, "the cap counts from the first call on"
    assert steps(machine, 1, 2, 3) == [(3, Action.DISCARD), (3, Action.START)]


def test_what_came_long_before_the_first_call_is_set_aside() -> None:
    machine = plan()
    machine.torch_imported(100.0)
    assert machine.first_call(130.0) == [Action.SET_ASIDE, Action.START]
    assert machine.first_call(140.0) == [], "there is one first call"
    machine = plan(memory=True)
    machine.torch_imported(100.0)
    assert machine.first_call(130.0) == [], "allocations are only whole from the start"
    assert plan_on_another_thread() == [Action.SET_ASIDE, Action.START]


def plan_on_another_thread() -> list[Action]:
    machine = plan(memory=True)
    machine.torch_imported(100.0)
    return machine.first_call(100.5, elsewhere=True)


def test_the_early_part_ends_after_its_cap_and_the_window_still_comes() -> None:
    machine = plan()
    machine.torch_imported(100.0)
    assert machine.deadline == 160.0
    assert machine.at_time(159.0) == []
    assert machine.at_time(160.0) == [Action.HOLD]
    assert machine.deadline is None
    assert machine.held(160.0, enough=True) == []
    assert steps(machine, 1, 2, 3) == [(3, Action.START)]


def test_an_early_part_that_held_next_to_nothing_is_followed_by_the_next_one() -> None:
    machine = plan()
    machine.torch_imported(100.0)
    machine.at_time(160.0)
    assert machine.held(160.0, enough=False) == [Action.START]
    assert machine.at_time(220.0) == [Action.HOLD]
    machine.held(220.0, enough=True)
    assert machine.first_call(300.0) == [Action.START], (
        "what loads for minutes is recorded when it begins to work"
    )


def test_where_something_is_still_open_the_early_part_becomes_the_beginning_of_the_window() -> None:
    machine = RecordingPlan(Settings("x"), 100.0, may_cross=lambda: False)
    machine.torch_imported(100.0)
    assert machine.first_call(130.0) == []
    assert steps(machine, *range(1, 10)) == [
        (3, Action.ADOPT),
        (8, Action.KEEP),
        (8, Action.GRAPH_START),
        (9, Action.GRAPH_KEEP),
    ]


def test_with_stacks_the_window_waits_for_a_moment_at_which_nothing_is_open() -> None:
    free = False
    machine = RecordingPlan(Settings("x", stacks=True), 100.0, may_cross=lambda: free)
    machine.torch_imported(100.0)
    assert steps(machine, 3, 4) == []
    free = True
    assert steps(machine, 5) == [(5, Action.DISCARD), (5, Action.START)]


def test_a_recorder_that_may_not_begin_yet_begins_later() -> None:
    machine = plan(after=5.0, duration=2.0)
    machine.torch_imported(100.0)
    assert machine.at_time(105.0) == [Action.START]
    machine.refused(105.0)
    assert machine.deadline == 105.25
    assert machine.at_time(105.25) == [Action.START]
    machine = plan(first_step=2, step_count=1)
    assert steps(machine, 2) == [(2, Action.START)]
    machine.refused(102.0)
    assert machine.deadline is None
    assert steps(machine, 3, 4) == [(3, Action.START), (4, Action.KEEP), (4, Action.GRAPH_START)]
    machine.refused(104.0)
    assert steps(machine, 5, 6) == [(5, Action.GRAPH_START), (6, Action.GRAPH_KEEP)]


def test_chosen_steps_begin_exactly_there_and_step_zero_begins_with_the_first_call() -> None:
    machine = plan(first_step=20, step_count=5, graph_step=False)
    assert machine.first_call(100.0) == []
    assert steps(machine, *range(1, 30)) == [(20, Action.START), (25, Action.KEEP)]
    machine = plan(first_step=0, step_count=1)
    assert machine.first_call(100.0) == [Action.START]
    assert steps(machine, 1, 2) == [
        (1, Action.KEEP),
        (1, Action.GRAPH_START),
        (2, Action.GRAPH_KEEP),
    ]


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


EVENTS = st.lists(
    st.sampled_from(
        ["import", "call", "elsewhere", "step", "time", "foreign", "ended", "renumber", "refused"]
    ),
    max_size=60,
)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"first_step": 2, "step_count": 3},
    {"after": 3.0},
    {"whole": True},
    {"stacks": True},
]


@given(EVENTS, st.sampled_from(OPTIONS), st.booleans())
def test_whatever_happens_recorders_start_and_stop_in_turns(
    events: list[str], options: dict[str, Any], may_cross: bool
) -> None:
    machine = RecordingPlan(Settings("x", **options), 100.0, may_cross=lambda: may_cross)
    running, graph, refuses, number, now = False, False, False, 0, 100.0
    for event in [*events, "finish"]:
        now += 1.0
        number = 0 if event == "renumber" else number + (event == "step")
        actions = {
            "import": lambda now=now: machine.torch_imported(now),
            "call": lambda now=now: machine.first_call(now),
            "elsewhere": lambda now=now: machine.first_call(now, elsewhere=True),
            "refused": list,
            "step": lambda now=now, number=number: machine.step_starts(number, now),
            "time": lambda now=now: machine.at_time(now),
            "foreign": machine.foreign_profiler,
            "ended": lambda now=now: machine.foreign_profiler_ended(now),
            "renumber": lambda now=now: machine.renumber(now),
            "finish": machine.finish,
        }[event]()
        refuses = refuses or event == "refused"
        for action in actions:
            if action in (Action.START, Action.GRAPH_START):
                assert not running
                assert not graph
                if refuses:
                    machine.refused(now)
                    refuses = False
                    break
                running, graph = action is Action.START, action is Action.GRAPH_START
            elif action in (Action.HOLD, Action.SET_ASIDE, Action.DISCARD, Action.KEEP):
                assert running
                running = False
            elif action is Action.ADOPT:
                assert running
            else:
                assert graph
                graph = False
        assert machine.recording == running
    assert not running
    assert not graph
