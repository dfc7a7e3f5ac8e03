"""When to record: a state machine without torch, clocks or files.

Events go in (the first torch call, a step that starts, a moment in time, a foreign profiler), actions come out.

    idle ──first call──► early ──step `first`──► window ──last step──► graph ──next step──► done
      └────────────────step `first`──────────────┘ │                    ▲
                                                   └─a foreign profiler─┘ held back: try again afterwards

`early` is what a short run keeps: everything from the first torch call on, at most `early_cap` seconds. It is thrown
away when the window begins; where allocations are recorded, it becomes the beginning of the window.
"""

from __future__ import annotations

from enum import Enum

from traceloom.capture.settings import DEFAULT_DURATION_SECONDS, Settings


class Action(Enum):
    """What the recorder has to do now, in the order given."""

    START = "start"  # begin to record with Kineto
    HOLD = "hold"  # stop; keep the result in case nothing better follows
    DISCARD = "discard"  # stop, and forget what was recorded and what is held
    KEEP = "keep"  # stop; this is the window, write it
    ADOPT = "adopt"  # go on: what was recorded so far is the beginning of the window
    GRAPH_START = "graph-start"
    GRAPH_KEEP = "graph-keep"
    GRAPH_DISCARD = "graph-discard"


class Phase(Enum):
    """Where a recording stands."""

    IDLE = "idle"
    EARLY = "early"
    WINDOW = "window"
    GRAPH_PENDING = "graph-pending"
    GRAPH = "graph"
    DONE = "done"


class Plan:
    """The decisions of one recording in one process. Times are seconds of any one clock."""

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._origin = now
        self._first, self._count = settings.window
        self._window_from = 0  # step or, for time windows, unused
        self._window_since = now
        self._blocked = False
        self._called = False
        self.phase = Phase.IDLE

    @property
    def recording(self) -> bool:
        """Whether Kineto runs for the timed part."""
        return self.phase in (Phase.EARLY, Phase.WINDOW)

    @property
    def deadline(self) -> float | None:
        """The next moment at which `at_time` has something to do."""
        settings = self._settings
        if self._blocked:
            return None
        if self.phase is Phase.IDLE and settings.by_time:
            return self._origin + (settings.after or 0.0)
        if self.phase is Phase.EARLY:
            return self._window_since + settings.early_cap
        if self.phase is Phase.WINDOW and settings.by_time:
            return self._window_since + (settings.duration or DEFAULT_DURATION_SECONDS)
        return None

    def first_call(self, now: float) -> list[Action]:
        """The process uses torch for the first time."""
        self._called = True
        if self._blocked or self.phase is not Phase.IDLE:
            return []
        if self._settings.whole or (self._settings.first_step == 0 and not self._settings.by_time):
            return self._begin(Phase.WINDOW, now, 0)
        if self._settings.early:
            return self._begin(Phase.EARLY, now, 0)
        return []

    def step_starts(self, number: int, now: float) -> list[Action]:
        """Step `number` begins, and the one before it has ended."""
        if self._blocked:
            return []
        if self.phase is Phase.GRAPH:
            self.phase = Phase.DONE
            return [Action.GRAPH_KEEP]
        if self.phase is Phase.GRAPH_PENDING:
            self.phase = Phase.GRAPH
            return [Action.GRAPH_START]
        if self._settings.by_time or self._settings.whole:
            return []
        if self.phase is Phase.WINDOW:
            return self._end(pending=False) if number >= self._window_from + self._count else []
        if self.phase is Phase.EARLY and self._settings.from_the_start and number >= self._first:
            self.phase, self._window_from = Phase.WINDOW, number
            return [Action.ADOPT]
        if self.phase in (Phase.IDLE, Phase.EARLY) and number >= self._first:
            before = [Action.DISCARD] if self.phase is Phase.EARLY else []
            return before + self._begin(Phase.WINDOW, now, number)
        return []

    def at_time(self, now: float) -> list[Action]:
        """Time has passed."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        if self.phase is Phase.IDLE:
            return self._begin(Phase.WINDOW, now, 0)
        if self.phase is Phase.EARLY:
            self.phase = Phase.IDLE
            self._called = True
            return [Action.HOLD]
        return self._end(pending=True)

    def renumber(self, now: float) -> list[Action]:
        """What counts as a step has changed: the numbers begin anew."""
        if self._settings.by_time or self._settings.whole:
            return []
        before, self.phase = self.phase, Phase.IDLE
        if before in (Phase.EARLY, Phase.WINDOW):
            again = self._begin(Phase.EARLY, now, 0) if self._settings.early else []
            return [Action.DISCARD, *again]
        return [Action.GRAPH_DISCARD] if before is Phase.GRAPH else []

    def foreign_profiler(self) -> list[Action]:
        """The user's own profiler is about to start."""
        if self._blocked:
            return []
        self._blocked = True
        if self.recording:
            self.phase = Phase.IDLE
            return [Action.HOLD]
        if self.phase is Phase.GRAPH:
            self.phase = Phase.GRAPH_PENDING
            return [Action.GRAPH_DISCARD]
        return []

    def foreign_profiler_ended(self, now: float) -> list[Action]:
        """The user's own profiler is gone."""
        if not self._blocked:
            return []
        self._blocked = False
        return self.first_call(now) if self._called else []

    def finish(self) -> list[Action]:
        """The process, or the recording, ends."""
        phase, self.phase = self.phase, Phase.DONE
        if phase is Phase.GRAPH:
            return [Action.GRAPH_DISCARD]
        if phase in (Phase.EARLY, Phase.WINDOW):
            return [Action.HOLD]
        return []

    def _begin(self, phase: Phase, now: float, step: int) -> list[Action]:
        self.phase, self._window_since, self._window_from = phase, now, step
        return [Action.START]

    def _end(self, *, pending: bool) -> list[Action]:
        """The window is full. Only between two steps can the graph step begin at once."""
        if not self._settings.graph_step:
            self.phase = Phase.DONE
            return [Action.KEEP]
        self.phase = Phase.GRAPH_PENDING if pending else Phase.GRAPH
        return [Action.KEEP] if pending else [Action.KEEP, Action.GRAPH_START]
