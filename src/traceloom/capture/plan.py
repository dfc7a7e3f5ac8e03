"""When to record: a state machine without torch, clocks or files.

Events go in (the first call, a step that starts, a moment in time, a full budget), actions come
out. A process has one session, so there is one way through the phases:

    waiting ──first call, step `first`, moment──► recording ──window full──► [graph] ──► done

Where no steps are chosen the session begins with the first call of a module (or optimizer), so that
a run that ends early has something to show; the window is cut out of it afterwards.
"""

from __future__ import annotations

from enum import Enum

from traceloom.capture.settings import DEFAULT_DURATION_SECONDS, Settings


class Action(Enum):
    """What the recorder has to do now."""

    START = "start"
    STOP = "stop"
    GRAPH = "graph"  # add PyTorch's execution trace observer for one step


class Phase(Enum):
    """Where a recording stands."""

    WAITING = "waiting"
    RECORDING = "recording"
    GRAPH = "graph"
    DONE = "done"


class RecordingPlan:
    """The decisions of one recording in one process. Times are seconds of any one clock.

    Args:
        settings: What to record.
        now: The time at which torch was imported.
    """

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._origin = self._since = now
        self._start_step = 0
        self._has_steps = False
        self.phase = Phase.WAITING

    @property
    def starts_with_first_call(self) -> bool:
        """Whether the session begins with the first call rather than at a step or moment."""
        settings = self._settings
        return settings.whole or (settings.first_step in {None, 0} and not settings.by_time)

    @property
    def deadline(self) -> float | None:
        """The next moment at which `at_time` has something to do."""
        settings = self._settings
        if self.phase is Phase.WAITING and settings.by_time:
            return self._origin + (settings.after or 0.0)
        if self.phase is Phase.RECORDING:
            if settings.by_time:
                return self._since + (settings.duration or DEFAULT_DURATION_SECONDS)
            if not self._has_steps and not settings.whole:
                return self._since + settings.early_cap
        return None

    @property
    def window(self) -> tuple[int, int]:
        """First step of the window, and the step behind its last one."""
        first, count = self._settings.window
        first = max(first, self._start_step)
        return first, first + count

    @property
    def first_whole_step(self) -> int:
        return self._start_step

    def start(self, now: float, step: int) -> None:
        """The session has begun; `step` is the first one that is recorded from its beginning."""
        self.phase, self._since, self._start_step = Phase.RECORDING, now, step

    def step_starts(self, number: int) -> Action | None:
        """Step `number` begins, and the one before it has ended."""
        settings = self._settings
        self._has_steps = True
        if settings.by_time or settings.whole:
            return None
        if self.phase is Phase.WAITING:
            return Action.START if number >= (settings.first_step or 0) else None
        if self.phase is Phase.RECORDING and number >= self.window[1]:
            if settings.graph_step:
                self.phase = Phase.GRAPH
                return Action.GRAPH
            return self._stop()
        return self._stop() if self.phase is Phase.GRAPH else None

    def at_time(self, now: float) -> Action | None:
        deadline = self.deadline
        if deadline is None or now < deadline:
            return None
        return Action.START if self.phase is Phase.WAITING else self._stop()

    def finish(self) -> Action | None:
        """The process or the recording ends, or the memory for it is used up."""
        running = self.phase in {Phase.RECORDING, Phase.GRAPH}
        self.phase = Phase.DONE
        return Action.STOP if running else None

    def renumber(self, *, resumes: bool = False) -> None:
        """What counts as a step has changed: the numbers begin anew.

        Args:
            resumes: The window was over, but its session still records, and does so for the new one.
        """
        if resumes:
            self.phase = Phase.RECORDING
        if self.phase is Phase.RECORDING:
            self._start_step = 0

    def _stop(self) -> Action:
        self.phase = Phase.DONE
        return Action.STOP
