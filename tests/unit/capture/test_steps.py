"""What counts as a step."""

from __future__ import annotations

import gc

from hypothesis import given, strategies as st

from traceloom.capture.steps import SILENCE, Instant, Mark, StepClock, StepLog, Tick


class Optimizer:
    pass


def ticks(clock: StepClock, optimizers: dict[str, Optimizer], sequence: str) -> str:
    letters = {Tick.NOTHING: ".", Tick.STEP: "S", Tick.RESTART: "R"}
    return "".join(letters[clock.optimizer_stepped(optimizers[name])] for name in sequence)


def pair() -> dict[str, Optimizer]:
    return {"a": Optimizer(), "b": Optimizer()}


def test_one_optimizer_is_the_step() -> None:
    assert ticks(StepClock(), pair(), "aaaa") == "SSSS"


def test_of_two_that_take_turns_the_first_one_seen_is_the_step() -> None:
    assert ticks(StepClock(), pair(), "ababab") == "S.S.S."


def test_the_slowest_of_alternating_optimizers_is_the_step_whoever_begins() -> None:
    assert ticks(StepClock(), pair(), "aaabaaab") == "SSSR...S"
    assert ticks(StepClock(), pair(), "baaabaaa") == "S...S..."


def test_one_optimizer_per_parameter_makes_one_step_per_round() -> None:
    many = {name: Optimizer() for name in "abcdef"}
    assert ticks(StepClock(), many, "abcdef" * 3) == "S....." * 3


def test_an_optimizer_made_anew_takes_over_from_the_one_that_is_gone() -> None:
    clock, both = StepClock(), pair()
    assert ticks(clock, both, "aa") == "SS"
    del both["a"]
    gc.collect()
    assert ticks(clock, both, "bb") == "SS"


def test_an_optimizer_that_is_kept_but_silent_is_given_up() -> None:
    clock, both = StepClock(), pair()
    clock.optimizer_stepped(both["a"])
    clock.frozen = True
    assert ticks(clock, both, "b" * (SILENCE + 3)) == "." * SILENCE + "SSS"


def test_a_full_window_is_not_given_up_for_a_slower_optimizer_but_for_the_users_word() -> None:
    clock, both = StepClock(), pair()
    ticks(clock, both, "aaaa")
    clock.frozen = True
    assert ticks(clock, both, "b") == "."
    assert clock.profiler_stepped() is Tick.NOTHING
    assert clock.called() is Tick.RESTART
    assert clock.called() is Tick.STEP
    assert ticks(clock, both, "a") == "."


def test_the_users_profiler_overrules_the_optimizer() -> None:
    clock, both = StepClock(), pair()
    assert ticks(clock, both, "a") == "S"
    assert clock.profiler_stepped() is Tick.RESTART
    assert ticks(clock, both, "a") == "."
    assert clock.profiler_stepped() is Tick.STEP
    assert clock.source == "profiler"


def test_without_an_optimizer_backward_passes_are_the_steps_until_there_is_one() -> None:
    clock, both = StepClock(), pair()
    assert [clock.backward_began() for _ in range(3)] == [Tick.STEP] * 3
    assert clock.source == "backward"
    assert ticks(clock, both, "aa") == "RS"
    assert clock.backward_began() is Tick.NOTHING


@given(st.lists(st.integers(1, 10**12), max_size=30), st.integers(0, 29))
def test_a_restart_makes_the_steps_so_far_part_of_the_running_one(
    durations: list[int], at: int
) -> None:
    def now() -> Instant:
        return Instant(clock_ns - 4000, clock_ns, thread=1, ran_ns=clock_ns // 2)

    clock_ns = 5000
    log = StepLog(now())
    for number, duration in enumerate(durations):
        clock_ns += duration
        log.end(now(), Mark.PLAIN)
        log.begin(now())
        if number == at:
            log.restart()
            assert log.number == 0
    total = sum(log.durations(log.numbers(Mark.PLAIN)))
    clock_ns += 7
    log.end(now(), Mark.GRAPH)
    assert total + 7 <= sum(durations) + 7
    assert sum(log.to_dict()["duration_ns"]) == sum(durations) + 7
    assert log.to_dict()["start_ns"][0] == 1000


def test_the_table_of_steps_has_start_duration_and_state() -> None:
    log = StepLog(Instant(100, 0, thread=1, ran_ns=0))
    log.end(Instant(110, 10, thread=1, ran_ns=4), Mark.EARLY)
    log.begin(Instant(120, 20, thread=1, ran_ns=5))
    log.end(Instant(150, 50, thread=2, ran_ns=900), Mark.RECORDED, 1_000)
    assert log.to_dict() == {
        "start_ns": [100, 120],
        "duration_ns": [10, 30],
        "cpu_ns": [4, None],
        "memory_bytes": [None, 1_000],
        "device_memory_bytes": [None, None],
        "state": ["early", "recorded"],
    }
    assert log.processor_times(log.numbers(Mark.RECORDED)) == [], (
        "a step that ends on another thread has no processor time"
    )
    log.relabel(0, 2, Mark.EARLY, Mark.RECORDED)
    assert log.durations(log.numbers(Mark.RECORDED)) == [10, 30]
    assert log.durations(log.numbers(Mark.RECORDED, skip=1)) == [30]
