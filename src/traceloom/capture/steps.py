"""What a step is, and how long every step of the run took.

A step ends where `traceloom.step()` is called; without that, where the user's own `torch.profiler`
steps; without that, where an optimizer steps: the first one seen, or the slowest where several
alternate; and in a program that has no optimizer, where a backward pass begins.

A trace tells what a thread called, not whether it ran: between two operators it may compute in
Python or wait for a request. The difference is in the time that the system gave it.
"""

from __future__ import annotations

import threading
import time
import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

# A clock that has been silent for so many steps of another optimizer is no longer in use.
SILENCE = 1000


class Tick(Enum):
    """What one report of a possible step means."""

    NOTHING = "nothing"
    STEP = "step"
    RESTART = "restart"  # something else counts from now on: the numbers begin anew, and one step has ended


@dataclass
class _Optimizer:
    reference: weakref.ref[Any]
    count: int = 0
    since_clock: int = 0


class StepClock:
    """Decides which of the things that happen in a training loop is the step."""

    def __init__(self) -> None:
        self.source = "none"
        self.frozen = False  # once the window is full, numbers no longer change
        self._optimizers: dict[int, _Optimizer] = {}
        self._clock: _Optimizer | None = None

    def called(self) -> Tick:
        """`traceloom.step()` was called: even a full window gives way to it."""
        before, self.source = self.source, "call"
        return Tick.STEP if before in ("none", "call") else Tick.RESTART

    def profiler_stepped(self) -> Tick:
        """The user's own profiler made a step."""
        if self.source == "call" or (self.frozen and self.source != "profiler"):
            return Tick.NOTHING
        before, self.source = self.source, "profiler"
        return Tick.STEP if before in ("none", "profiler") else Tick.RESTART

    def backward_began(self) -> Tick:
        """A backward pass begins, in a program that has no optimizer so far."""
        if self.source not in ("none", "backward"):
            return Tick.NOTHING
        self.source = "backward"
        return Tick.STEP

    def optimizer_skipped(self) -> Tick:
        """An optimizer was not let make its step, because gradients were infinite."""
        if self.source not in {"none", "optimizer"}:
            return Tick.NOTHING
        self.source = "optimizer"
        return Tick.STEP

    def optimizer_stepped(self, optimizer: Any) -> Tick:
        if self.source not in ("none", "optimizer", "backward") or (
            self.frozen and self.source == "backward"
        ):
            return Tick.NOTHING
        before, self.source = self.source, "optimizer"
        stepped = self._optimizers.get(id(optimizer))
        # Identities are used again after an optimizer was freed, therefore the weak reference.
        if stepped is None or stepped.reference() is not optimizer:
            stepped = self._optimizers[id(optimizer)] = _Optimizer(weakref.ref(optimizer))
        stepped.count += 1
        clock = self._clock
        if clock is None or clock.reference() is None:
            self._clock = stepped
            return Tick.RESTART if before == "backward" else Tick.STEP
        if stepped is clock:
            for other in self._optimizers.values():
                other.since_clock = 0
            return Tick.STEP
        stepped.since_clock += 1
        if stepped.since_clock > SILENCE:
            self._clock = stepped
            return Tick.STEP
        if stepped.count < clock.count and not self.frozen:
            self._clock = stepped
            return Tick.RESTART
        return Tick.NOTHING


class Mark(Enum):
    """What happened to a step. Only `recorded` steps are in the timed trace."""

    PLAIN = "unrecorded"
    EARLY = "early"  # recorded as long as nothing better was there
    RECORDED = "recorded"
    GRAPH = "graph"
    DISTURBED = "disturbed"  # the recorder was at work: not for comparison


_CODES = list(Mark)


class Instant(NamedTuple):
    """A moment by all clocks: Unix time, a steady clock, and how long the thread that reads them
    has run.
    """

    unix_ns: int
    steady_ns: int
    thread: int
    ran_ns: int

    @classmethod
    def now(cls) -> Instant:
        return cls(
            time.time_ns(), time.perf_counter_ns(), threading.get_ident(), time.thread_time_ns()
        )


class StepLog:
    """Start, duration and processor time of every step, numbered from 0, and the memory that was
    held at its end where it was read. 41 bytes a step.
    """

    def __init__(self, now: Instant) -> None:
        self._columns = [array("q") for _ in range(5)]
        # Durations come last: their number is that of the steps that are whole.
        self._starts, self._ran, self._memory, self._device_memory, self._durations = self._columns
        self._marks = bytearray()
        self._now = now

    @property
    def number(self) -> int:
        """The number of the step that runs now; so many steps have ended."""
        return len(self._durations)

    def begin(self, now: Instant) -> None:
        self._now = now

    def end(self, now: Instant, mark: Mark, memory: int = -1, device_memory: int = -1) -> None:
        """The running step has ended, with so many bytes held by the process and on its device;
        -1: not read.
        """
        begin, number = self._now, self.number
        ran_ns = now.ran_ns - begin.ran_ns if now.thread == begin.thread else -1
        duration_ns = now.steady_ns - begin.steady_ns
        # A signal may have come between two of these lines the last time.
        self._marks[number:] = bytes([_CODES.index(mark)])
        row = (begin.unix_ns, ran_ns, memory, device_memory, duration_ns)
        for column, value in zip(self._columns, row, strict=True):
            column[number:] = array("q", [value])

    def restart(self) -> None:
        """Forget the steps so far: they become the beginning of the running one."""
        if self._starts:
            now, ran = self._now, list(self._ran)
            back_ns = now.unix_ns - self._starts[0]
            thread = now.thread if min(ran) >= 0 else -1
            self._now = Instant(
                self._starts[0], now.steady_ns - back_ns, thread, now.ran_ns - sum(ran)
            )
        del self._marks[:]
        for column in self._columns:
            del column[:]

    def relabel(self, first: int, end: int, before: Mark, after: Mark) -> None:
        """Steps `first` to `end - 1` that are marked `before` become `after`."""
        for step in range(first, min(end, len(self._marks))):
            if _CODES[self._marks[step]] is before:
                self._marks[step] = _CODES.index(after)

    def numbers(self, mark: Mark, *, skip: int = 0) -> list[int]:
        """The steps with this mark, without the first `skip` steps of the run."""
        code = _CODES.index(mark)
        return [number for number in range(skip, len(self._marks)) if self._marks[number] == code]

    def durations(self, numbers: Iterable[int]) -> list[int]:
        """Durations of these steps in nanoseconds."""
        return [self._durations[number] for number in numbers]

    def processor_times(self, numbers: Iterable[int]) -> list[int]:
        """How long the thread of the steps ran in each of these, where that is known; ns."""
        return [self._ran[number] for number in numbers if self._ran[number] >= 0]

    def to_dict(self) -> dict[str, Any]:
        """The table of `capture.json`: one list per column; the number of a step is its position."""
        return {
            "start_ns": self._starts.tolist(),
            "duration_ns": self._durations.tolist(),
            "cpu_ns": [ran if ran >= 0 else None for ran in self._ran],
            "memory_bytes": [size if size >= 0 else None for size in self._memory],
            "device_memory_bytes": [size if size >= 0 else None for size in self._device_memory],
            "state": [_CODES[code].value for code in self._marks],
        }


class ThreadTimes:
    """How long each Python thread of the program had run at some moments of the recording."""

    def __init__(self) -> None:
        self._values = array("q")  # of one sample after the other

    def sample(self) -> None:
        """Notes it for all threads; nothing where the system does not tell."""
        for thread in threading.enumerate():
            native = thread.native_id
            spent = None if native is None else _read_scheduler(f"/proc/self/task/{native}")
            if native is not None and spent is not None:
                self._values.extend((native, time.time_ns(), *spent))

    def to_columns(self) -> dict[str, list[int]] | None:
        """The samples as columns of one length in the order of time, or None where there are none.

        `thread` is the system's id, `time_ns` Unix time, `cpu_ns` how long the thread has run since
        it began, `waited_ns` how long it could have run, but others had the processors.
        """
        if not self._values:
            return None
        self.sample()
        names = ("thread", "time_ns", "cpu_ns", "waited_ns")
        return {
            name: self._values[column :: len(names)].tolist() for column, name in enumerate(names)
        }


def _read_scheduler(task: str) -> tuple[int, int] | None:
    """Returns how long a thread has run, and how long it has waited for a processor, ns."""
    try:
        with open(f"{task}/schedstat", encoding="ascii") as file:  # noqa: PTH123
            ran, waited, *_ = map(int, file.read().split())
            return ran, waited
    except (OSError, ValueError, IndexError):
        return None
