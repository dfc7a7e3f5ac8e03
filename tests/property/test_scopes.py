"""A scope around a generator or a coroutine changes nothing of what it does, whatever it is sent."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from typing import Any

from hypothesis import given, strategies as st

import traceloom

# What a generator does at each of its yields with what comes back: goes on, ends, raises, or yields once more when it
# is to close.
REACTIONS = st.lists(
    st.sampled_from(["go on", "catch", "return", "raise", "stay", "wrap"]), min_size=1, max_size=6
)
# What whoever drives it does.
DRIVES = st.lists(
    st.sampled_from(["next", "send", "throw", "stop", "close"]), min_size=1, max_size=8
)


class OddError(Exception):
    """Of the test alone."""


def made(reactions: list[str], log: list[object]) -> Callable[[], Generator[Any, Any, Any]]:
    """A generator function that reacts so, and writes down what reaches it."""

    def generator() -> Generator[Any, Any, Any]:
        with traceloom.scope("probe") as probe:
            log.append(("inside", probe.path))
        try:
            for number, reaction in enumerate(reactions):
                try:
                    value = yield number
                    log.append(("came", value))
                except OddError as error:
                    log.append(("thrown", str(error)))
                    if reaction == "wrap":
                        raise ValueError("another one") from error
                    if reaction != "catch":
                        raise
                except GeneratorExit:
                    log.append("closing")
                    if reaction == "stay":
                        yield "not yet"
                    raise
                if reaction == "return":
                    return f"result {number}"
                if reaction == "raise":
                    raise OddError(f"at {number}")
        finally:
            if "stay" not in reactions:  # when that one is over is the garbage collector's choice
                log.append("over")
        return "at its end"

    return generator


def transcript(
    generator: Generator[Any, Any, Any], drives: list[str], log: list[object]
) -> list[object]:
    """What comes out of it, and what is open outside of it while it is suspended."""
    events: list[object] = []
    for number, drive in enumerate(drives):
        try:
            if drive == "next":
                events.append(next(generator))
            elif drive == "send":
                events.append(generator.send(None if number == 0 else number))
            elif drive == "throw":
                events.append(generator.throw(OddError(f"drive {number}")))
            elif drive == "stop":
                events.append(generator.throw(StopIteration("not its own")))
            else:
                generator.close()
                events.append("closed")
        except BaseException as error:  # noqa: BLE001  (whatever it is, it has to be the same)
            events.append((type(error).__name__, str(error), type(error.__cause__).__name__))
        with traceloom.scope("outside") as outside:
            events.append(outside.path)
    try:
        generator.close()
    except RuntimeError as error:
        events.append(str(error))
    return [*events, *log]


def delegating(function: Callable[[], Generator[Any, Any, Any]]) -> Generator[Any, Any, Any]:
    """What Python itself does where a generator stands around another one."""
    return (yield from function())


@given(REACTIONS, DRIVES)
def test_a_generator_in_a_scope_does_what_it_does_without(
    reactions: list[str], drives: list[str]
) -> None:
    log: list[object] = []
    scoped = traceloom.scope("around")(made(reactions, log))
    events = transcript(scoped(), drives, log)
    log_without: list[object] = []
    expected = transcript(delegating(made(reactions, log_without)), drives, log_without)
    assert [
        ("inside", "probe") if event == ("inside", "around.probe") else event for event in events
    ] == expected
    assert ("inside", "probe") not in events


@given(REACTIONS, DRIVES)
def test_a_coroutine_in_a_scope_does_what_it_does_without(
    reactions: list[str], drives: list[str]
) -> None:
    def run(scoped: bool) -> list[object]:
        log: list[object] = []
        inner = types.coroutine(made(reactions, log))

        async def coroutine() -> object:
            return await inner()

        function = traceloom.scope("around")(coroutine) if scoped else coroutine
        made_coroutine: Any = function()
        return transcript(
            made_coroutine, ["send" if drive == "next" else drive for drive in drives], log
        )

    events = run(scoped=True)
    assert [
        ("inside", "probe") if event == ("inside", "around.probe") else event for event in events
    ] == run(False)
