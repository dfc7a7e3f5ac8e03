"""When to record: a state machine without torch, clocks or files.

Events go in (torch was imported, the first call, a step that starts, a moment in time, a foreign
profiler), actions come out.

    idle ──torch is there──► early ──step `first`──► window ──last step──► graph ──next step──► done
      └────────────────step `first`──────────────────┘ │                     ▲
                                                       └─a foreign profiler──┘ held back: try again afterwards

`early` is what a short run keeps: everything from the import of torch on, up to `early_cap` seconds
before the first module is called and as many after it; while such a stretch held next to nothing,
the next one begins at once. What is early is thrown away when the window begins. Where allocations
are recorded, or where something is still open that began under it (see `crossing`), it becomes the
beginning of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from traceloom.capture.settings import DEFAULT_DURATION_SECONDS, Settings

FRESH_SECONDS = 2.0
"""What came longer than that before the first module call is set aside: imports and data, not the
work itself.
"""
MAX_POSTPONED = 10
RETRY_SECONDS = 0.25


class Action(Enum):
    """What the recorder has to do now, in the order given."""

    START = "start"  # begin to record with Kineto
    HOLD = "hold"  # stop; keep the result in case nothing better follows
    SET_ASIDE = "set-aside"  # stop; what came before the first call is kept beside what follows
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


class RecordingPlan:
    """The decisions of one recording in one process. Times are seconds of any one clock.

    Args:
        settings: What to record.
        now: The time at which the process began, as far as anybody knows.
        may_cross: Whether a recorder could stop now and another one begin at once; asked when that is wanted.
    """

    def __init__(
        self, settings: Settings, now: float, may_cross: Callable[[], bool] = lambda: True
    ) -> None:
        self._settings = settings
        self._origin = now
        self._may_cross = may_cross
        self._first, self._count = settings.window
        self._window_from = 0  # step or, for time windows, unused
        self._window_since = now
        self._retry: tuple[float, Phase] | None = None
        self._postponed = 0
        self._blocked = False
        self._present = False  # torch is imported, or was used
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
        if self.phase is Phase.IDLE:
            if self._retry is not None:
                return self._retry[0]
            return self._origin + (settings.after or 0.0) if settings.by_time else None
        if self.phase is Phase.EARLY:
            return self._window_since + settings.early_cap
        if self.phase is Phase.WINDOW and settings.by_time:
            return self._window_since + (settings.duration or DEFAULT_DURATION_SECONDS)
        return None

    def torch_imported(self, now: float) -> list[Action]:
        """Torch can be used from now on, and recording it needs no device that the program does not
        use.
        """
        self._present = True
        if self._blocked or self.phase is not Phase.IDLE:
            return []
        settings = self._settings
        if settings.first_step == 0 and not settings.by_time:
            return [] if settings.stacks else self._begin(Phase.WINDOW, now, 0)
        return self._begin(Phase.EARLY, now, 0) if settings.early else []

    def first_call(self, now: float, *, elsewhere: bool = False) -> list[Action]:
        """A module is called or an optimizer makes a step for the first time, or a block is
        entered.

        Args:
            now: The time.
            elsewhere: It happens on a thread which the recorder that runs does not record.
        """
        again, self._called, self._present = self._called, True, True
        if self._blocked:
            return []
        if self.phase is Phase.EARLY and not again:
            stale = now - self._window_since >= FRESH_SECONDS and not self._settings.from_the_start
            self._window_since = now
            return (
                [Action.SET_ASIDE, Action.START]
                if elsewhere or (stale and self._may_cross())
                else []
            )
        if self.phase is not Phase.IDLE:
            return []
        if self._settings.whole or (self._settings.first_step == 0 and not self._settings.by_time):
            return self._begin(Phase.WINDOW, now, 0)
        if self._settings.early:
            return self._begin(Phase.EARLY, now, 0)
        return []

    def held(self, now: float, *, enough: bool) -> list[Action]:
        """An early part has ended by its cap; `enough`: it holds as much of the program as anybody
        would look at.
        """
        if enough or self._blocked or self.phase is not Phase.IDLE or not self._settings.early:
            return []
        return self._begin(Phase.EARLY, now, 0)

    def refused(self, now: float) -> None:
        """The recorder that should have started could not: something that began under an earlier
        one is still open.
        """
        if self.phase is Phase.GRAPH:
            self.phase = Phase.GRAPH_PENDING
        elif self.recording:
            by_step = self.phase is Phase.WINDOW and not (
                self._settings.by_time or self._settings.whole
            )
            self._retry = None if by_step else (now + RETRY_SECONDS, self.phase)
            self.phase = Phase.IDLE

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
        if number < self._first or self.phase is Phase.DONE:
            return []
        if self.phase is Phase.IDLE:
            return self._begin(Phase.WINDOW, now, number)
        # from the early part to the window
        if not self._settings.from_the_start:
            if self._may_cross() or self._postponed >= MAX_POSTPONED:
                return [Action.DISCARD, *self._begin(Phase.WINDOW, now, number)]
            if (
                self._settings.stacks
            ):  # the early part has none; the next step may be a better moment
                self._postponed += 1
                return []
        self.phase, self._window_from = Phase.WINDOW, number
        return [Action.ADOPT]

    def at_time(self, now: float) -> list[Action]:
        """Time has passed."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        if self.phase is Phase.IDLE:
            phase = self._retry[1] if self._retry is not None else Phase.WINDOW
            return self._begin(phase, now, 0)
        if self.phase is Phase.EARLY:
            self.phase = Phase.IDLE
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
        if self._called:
            return self.first_call(now)
        return self.torch_imported(now) if self._present else []

    def finish(self) -> list[Action]:
        """The process, or the recording, ends."""
        phase, self.phase = self.phase, Phase.DONE
        if phase is Phase.GRAPH:
            return [Action.GRAPH_DISCARD]
        if phase in (Phase.EARLY, Phase.WINDOW):
            return [Action.HOLD]
        return []

    def _begin(self, phase: Phase, now: float, step: int) -> list[Action]:
        self.phase, self._window_since, self._window_from, self._retry = phase, now, step, None
        return [Action.START]

    def _end(self, *, pending: bool) -> list[Action]:
        """The window is full. Only between two steps can the graph step begin at once."""
        if not self._settings.graph_step:
            self.phase = Phase.DONE
            return [Action.KEEP]
        self.phase = Phase.GRAPH_PENDING if pending else Phase.GRAPH
        return [Action.KEEP] if pending else [Action.KEEP, Action.GRAPH_START]
