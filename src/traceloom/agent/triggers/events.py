"""Rules on what happens: a process is killed for want of memory, a device has an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from traceloom.agent.board import Board
from traceloom.agent.config import XidRule
from traceloom.agent.triggers import Firing
from traceloom.model.units import counted

Event = TypeVar("Event")


class OomKillWatch:
    """Gives each kill once; of its job those are meant who are left.

    Args:
        board: Where kills are noted.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._last = board.oom_kills[-1] if board.oom_kills else None

    def look(self, now_ns: int) -> Iterator[Firing]:  # noqa: ARG002  (of the protocol)
        """Kills since the last look."""
        kills, last = self._board.oom_kills, self._last
        self._last = kills[-1] if kills else last
        for kill in _since(kills, last):
            yield Firing(
                {"job": kill.job} if kill.job else {"cgroup": kill.cgroup}, f"{kill.cgroup}@{kill.at_ns}",
                f"{counted(kill.kills, 'process')} killed for want of memory in {kill.cgroup}",
            )  # fmt: skip

    def trouble(self) -> str:
        """Whether kills are counted here."""
        counted_here = any(metric == "oom_kills_total" for (metric, _), _, _ in self._board.values())
        return "" if counted_here else "no collector counts processes that are killed for want of memory"


class XidWatch:
    """Gives each error of a device once.

    Args:
        rule: Which errors.
        board: Where events of devices are noted.
    """

    def __init__(self, rule: XidRule, board: Board) -> None:
        self._rule, self._board = rule, board
        self._last = board.events[-1] if board.events else None

    def look(self, now_ns: int) -> Iterator[Firing]:  # noqa: ARG002  (of the protocol)
        """Errors since the last look."""
        events, last = self._board.events, self._last
        self._last = events[-1] if events else last
        for event in _since(events, last):
            if event.kind == "xid" and (not self._rule.codes or event.code in self._rule.codes):
                code = "" if event.code is None else f" {event.code}"
                text = f": {event.text}" if event.text else ""
                yield Firing(
                    {"device": event.device}, f"{event.device}@{event.at_ns}{code}",
                    f"Xid{code} of device {event.device}{text}",
                )  # fmt: skip

    def trouble(self) -> str:
        """Whether there are devices that have such errors."""
        nvidia = any(device.vendor == "nvidia" for device in self._board.devices.values())
        return "" if nvidia else "no device of NVIDIA is here, and only those have Xid errors"


def _since(events: Sequence[Event], last: Event | None) -> Sequence[Event]:
    """Those after the last that was seen; all where it is no longer there."""
    for index in range(len(events) - 1, -1, -1):
        if events[index] is last:
            return events[index + 1 :]
    return events
