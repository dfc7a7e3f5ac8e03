"""Answers that are kept: once for all who wait, anew when they are old or of something else, and a few at once."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from support.waiting import until
from traceloom.errors import UsageError
from traceloom.fleet.questions.answering import MAX_CONCURRENT, AnswerCache

WAIT_S = 60.0


class Counting:
    """Work that says how often it was done."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> int:
        self.times += 1
        return self.times


def test_an_answer_is_worked_out_anew_when_it_is_old() -> None:
    seconds, work = 0.0, Counting()
    recent = AnswerCache[int](3, lambda: seconds)

    def answer(question: str) -> int:
        return recent.get(question, work, seconds=10.0)

    assert [answer("a"), answer("a"), answer("b")] == [1, 1, 2]
    seconds = 9.9
    assert answer("a") == 1
    seconds = 10.0
    assert [answer("a"), answer("b")] == [3, 4]


def test_an_answer_of_the_same_tables_is_kept_however_old_and_one_of_others_only_for_who_takes_it() -> (
    None
):
    seconds, work = 0.0, Counting()
    recent = AnswerCache[int](3, lambda: seconds)
    assert recent.get("a", work, basis=1) == 1
    seconds = 1000.0
    assert recent.get("a", work, basis=1) == 1
    assert recent.get("a", work, basis=2, seconds=1001.0) == 1, "who takes it"
    assert recent.get("a", work, basis=2) == 2
    assert recent.get("a", work, basis=1) == 3
    assert recent.get("a", work) == 4, "of nothing that is known, and not for a second"


def test_the_answer_that_nobody_asked_for_longest_is_dropped() -> None:
    work = Counting()
    recent = AnswerCache[int](2)
    for question in ("a", "b", "a", "c"):
        recent.get(question, work, basis=1)
    assert work.times == 3
    assert recent.get("a", work, basis=1) == 1
    assert recent.get("b", work, basis=1) == 4


def test_who_asks_the_same_waits_for_one_answer_and_who_asks_something_else_does_not() -> None:
    recent, release, other = AnswerCache[str](9), threading.Event(), Counting()
    begun = 0

    def slow() -> str:
        nonlocal begun
        begun += 1
        assert release.wait(WAIT_S)
        return "slow"

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(recent.get, "slow", slow, basis=1) for _ in range(4)]
        until(lambda: begun == 1)
        quick = threads.submit(recent.get, "quick", lambda: f"quick {other()}", basis=1)
        assert quick.result(WAIT_S) == "quick 1"
        assert not any(future.done() for future in asked)
        release.set()
        assert {future.result(WAIT_S) for future in asked} == {"slow"}
    assert begun == 1


def test_no_more_are_worked_out_at_once_than_may_be() -> None:
    recent, lock, release = AnswerCache[int](99), threading.Lock(), threading.Event()
    running, most = 0, 0

    def work() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert release.wait(WAIT_S)
        with lock:
            running -= 1
        return 7

    asked: list[Future[int]] = []
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(recent.get, question, work, basis=1) for question in range(12)]
        until(lambda: running == MAX_CONCURRENT)
        release.set()
        assert [future.result(WAIT_S) for future in asked] == [7] * 12
    assert most == MAX_CONCURRENT


def test_what_cannot_be_answered_is_said_to_all_who_wait_and_tried_again() -> None:
    recent, release = AnswerCache[int](9), threading.Event()
    begun = threading.Event()

    def fail() -> int:
        begun.set()
        assert release.wait(WAIT_S)
        raise UsageError("no such dimension", slug="no-such-dimension")

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(recent.get, "a", fail, basis=1)]
        assert begun.wait(WAIT_S)
        asked += [threads.submit(recent.get, "a", fail, basis=1) for _ in range(2)]
        release.set()
        for future in asked:
            with pytest.raises(UsageError, match="no such dimension"):
                future.result(WAIT_S)
    assert recent.get("a", lambda: 5, basis=1) == 5
