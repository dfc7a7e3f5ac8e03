"""The recorder's own decisions: whose an error is, and how much memory recording may take."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
from traceloom.capture import recorder
from traceloom.capture.recorder import (
    choose_budget,
    guard_errors,
    is_of_program,
)
from traceloom.capture.settings import Settings


class Timeout(Exception):  # noqa: N818  (what programs call it)
    """What a program's own handler raises."""


def handler(number: int, _: object) -> None:
    raise Timeout(number)


def deep(number: int, frame: object) -> None:
    handler(number, frame)


class Handlers:
    def method(self, number: int, _: object) -> None:
        raise Timeout(number)

    def __call__(self, number: int, _: object) -> None:
        raise Timeout(number)

    @staticmethod
    def static(number: int, _: object) -> None:
        raise Timeout(number)


def with_more(_more: str, number: int, _: object) -> None:
    raise Timeout(number)


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": handler,
    "function that calls another": deep,
    "bound method": Handlers().method,
    "static method": Handlers.static,
    "object": Handlers(),
    "partial": functools.partial(with_more, "more"),
    "partial of a partial": functools.partial(functools.partial(with_more), "more"),
    "lambda": lambda number, _: (_ for _ in ()).throw(Timeout(number)),
}


@pytest.fixture(params=HANDLERS)
def of_program(request: pytest.FixtureRequest) -> Any:
    """A program with a handler that raises."""
    before = signal.signal(signal.SIGUSR1, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGUSR1, before)


class Guarded:
    """What the guard needs of a recorder."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.broken = False
        self._half_done = False
        self.lock = threading.RLock()
        self.gave_up = 0
        self._work = work

    def give_up(self) -> None:
        self.broken = True
        self.gave_up += 1

    run = guard_errors(lambda self: self._work())


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(1000):
        pass


@pytest.mark.usefixtures("of_program")
def test_what_a_handler_of_the_program_raises_is_the_programs() -> None:
    with pytest.raises(Timeout) as raised:
        interrupted()
    assert is_of_program(raised.value)
    guarded = Guarded(interrupted)
    with pytest.raises(Timeout):
        guarded.run()
    assert guarded.gave_up == 0, "between two steps nothing is half done"
    guarded._half_done = True
    with pytest.raises(Timeout):
        guarded.run()
    assert guarded.gave_up == 1
    assert guarded.run() is None, "nothing is done any more"


def test_what_else_fails_is_ours_and_ends_the_recording(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise Timeout("of ours")

    with pytest.raises(Timeout) as raised:
        fail()
    assert not is_of_program(raised.value)
    guarded = Guarded(fail)
    assert guarded.run() is None
    assert guarded.gave_up == 1
    assert Guarded(lambda: 3).run() == 3
    assert capfd.readouterr().err.count("[recorder-failed]") <= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_ends_it(error: type[BaseException]) -> None:
    def end() -> None:
        raise error

    guarded = Guarded(end)
    guarded._half_done = True
    with pytest.raises(error):
        guarded.run()
    assert guarded.gave_up == 1


def test_the_lock_is_free_after_an_error() -> None:
    guarded = Guarded(lambda: 1 / 0)
    guarded.run()
    taken = []
    thread = threading.Thread(target=lambda: taken.append(guarded.lock.acquire(timeout=5)))
    thread.start()
    thread.join()
    assert taken == [True]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (None, 512_000_000),
        (0, 0),
        (1_000_000_000, 50_000_000),
        (10_240_000_000, 512_000_000),
        (10**13, 512_000_000),
    ],
)
def test_recording_takes_a_twentieth_of_what_is_free_and_never_much(
    free: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "get_free_memory", lambda: free)
    assert choose_budget(Settings("x")) == expected
    assert choose_budget(Settings("x", max_memory=7)) == 7
    assert choose_budget(Settings("x", max_memory=10**12)) == 10**12
    assert choose_budget(Settings("x", max_memory=0)) == 0
