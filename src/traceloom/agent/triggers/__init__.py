"""Traces that nobody asked for: rules of agent.toml, what they watch for, whom they trace, and what that may cost.

values.py (the board by metric) ─► metric.py ┐
              events.py, regression.py, cadence.py ┴─► engine.py ─► requests/desk.py
                     targets.py (whom), ledger.py (how much), store.py (SQLite) ┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol


class Firing(NamedTuple):
    """What a rule watches for is so now.

    `labels` say whom it is about: `process` (a key), `device` (a uuid), `cgroup`, or `job` and perhaps `rank`; without
    any it is the whole host. `episode` is the same text for as long as it is the same occurrence. `what` is the
    sentence that the request carries. `lasts`: whether another trace is worth having while it goes on.
    """

    labels: Mapping[str, str]
    episode: str
    what: str
    lasts: bool = False


class Watch(Protocol):
    """What a rule watches for. Called in the agent's loop, about once a second."""

    def look(self, now_ns: int) -> Iterable[Firing]:
        """What is so now; what merely happened is given once.

        Args:
            now_ns: Nanoseconds since the epoch, of a clock that never jumps.
        """

    def trouble(self) -> str:
        """Why it cannot fire as things are; "" where it can."""
