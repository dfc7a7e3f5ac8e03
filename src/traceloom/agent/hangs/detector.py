"""Which jobs hang: processes that made steps and make none any more, for no reason that can be
seen.

Times are on the monotonic clock, which stands still while the host is suspended and which nobody
sets. What counts as life without steps: batches from a data loader (an evaluation), data to and
from disks (a checkpoint). A job all of whose processes are stopped was stopped by somebody. Whether
one works that shows none of these, only its stacks tell: who has looked at them says so by `works`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from traceloom.agent.config import Hangs
from traceloom.agent.ownership.model import Process
from traceloom.agent.steps import StepCounter, StepPace

_MIN_STEPS = 3  # before that nobody knows how long one takes
_NEWS = 3  # times that steps are usually heard of: a job may report many at once
_DISK_RATE = 1e6  # bytes per second of a job that writes or reads something large; logs are less
_STOPPED_STATES = {"T", "t"}
_ASLEEP_S = 30.0  # between two looks, which are a second apart


class JobKey(NamedTuple):
    """A job of a user: whoever starts a process names its job."""

    job: str
    uid: int


class HungProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a job that hangs, by its key `PID@START`, and how many steps it had made as far
    as is known.
    """

    key: str
    pid: int
    rank: int | None
    steps: int


class EndedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that made steps and ended, while others of its job live; `ended_ns` of the wall
    clock.
    """

    key: str
    pid: int
    rank: int | None
    ended_ns: int


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A job of which `processes` make no steps.

    `since_ns`: when the last sign of life was heard of, `seen_ns`: when that was seen, wall clock;
    at most one period of the collectors late. `median_s`: of the steps of the slowest of them,
    seconds. `busy`: they work, but for longer than a job may.
    """

    job: str
    uid: int
    processes: tuple[HungProcess, ...]
    gone: tuple[EndedProcess, ...] = ()
    since_ns: int
    seen_ns: int
    median_s: float
    busy: bool = False

    @property
    def key(self) -> JobKey:
        """Whose it is."""
        return JobKey(self.job, self.uid)


class HangEnd(NamedTuple):
    """A hang that is no more: its processes step again (`recovered`), or have ended."""

    hang: Hang
    recovered: bool


class _JobObservation(NamedTuple):
    """A look at a job: both clocks, its processes, and the paces of those that step, by key."""

    s: float
    ns: int
    processes: list[Process]
    paces: dict[str, StepPace]


@dataclass(slots=True)
class _WatchedJob:
    """What was seen of a job: signs of life, monotonic seconds; the processes that stepped, and
    those that ended.
    """

    lived: float = 0.0
    stopped: float = 0.0  # when all that step were last seen stopped
    held_until: float = 0.0
    looked: float = 0.0
    disk_bytes: float = 0.0
    seen: dict[str, Process] = field(default_factory=dict)
    gone: dict[str, EndedProcess] = field(default_factory=dict)


class HangDetector:
    """Finds hangs, each once. Used from one thread.

    Args:
        settings: How long is too long.
        alive: Whether a process that is not listed lives all the same, by its key: on a host that is overloaded, and
            when the agent has just begun, not all are seen each time.
    """

    def __init__(self, settings: Hangs, alive: Callable[[str], bool] = lambda _: False) -> None:
        self.settings, self.alive = settings, alive
        self.hangs: dict[JobKey, Hang] = {}  # now
        self.over: list[HangEnd] = []  # since the look before
        self.stepping: set[JobKey] = set()  # jobs of which it could tell
        self._jobs: dict[JobKey, _WatchedJob] = {}
        self._looked, self._woke = 0.0, 0.0

    def look(
        self,
        now: float,
        now_ns: int,
        processes: Iterable[Process],
        steps: StepCounter,
        disk_bytes: Mapping[str, float] | None = None,
    ) -> list[Hang]:
        """Hangs that were not there at the look before.

        Args:
            now: Of the monotonic clock, seconds.
            now_ns: Of the wall clock.
            processes: All that matter on this host.
            steps: Those that they have made.
            disk_bytes: Read and written so far, by key of the process.
        """
        if self._looked and now - self._looked > _ASLEEP_S:
            self._woke = (
                now  # the host, its virtual machine or this agent stood still: so may all jobs have
            )
        self._looked = now
        processes_by_job: dict[JobKey, list[Process]] = {}
        for process in processes:
            if process.owner.job:
                processes_by_job.setdefault(JobKey(process.owner.job, process.uid), []).append(
                    process
                )
        self._jobs = {key: job for key, job in self._jobs.items() if key in processes_by_job}
        self.over = []
        for key, hang in list(self.hangs.items()):
            living = {process.key for process in processes_by_job.get(key, ())}
            remaining = [
                member
                for member in hang.processes
                if member.key in living or self.alive(member.key)
            ]
            paced = [(member, steps.pace(member.key)) for member in remaining]
            still = [member for member, pace in paced if pace is None or pace.steps <= member.steps]
            if not still:
                del self.hangs[key]
                self.over.append(HangEnd(hang, bool(remaining)))
        self.stepping, new = set(), []
        for key, job_processes in processes_by_job.items():
            paces = {
                p.key: pace
                for p in job_processes
                if (pace := steps.pace(p.key)) and pace.steps >= _MIN_STEPS
            }
            job, observation = (
                self._jobs.setdefault(key, _WatchedJob()),
                _JobObservation(now, now_ns, job_processes, paces),
            )
            self._note(
                job,
                observation,
                sum((disk_bytes or {}).get(process.key, 0.0) for process in job_processes),
            )
            if paces:
                self.stepping.add(key)
            if paces and key not in self.hangs and (begun := self._hang(key, job, observation)):
                self.hangs[key] = begun
                new.append(begun)
        return new

    def works(self, hang: Hang, until: float) -> None:
        """It is none: its processes work without steps; look again at `until` of the monotonic
        clock, no sooner.
        """
        if self.hangs.pop(hang.key, None) is not None and hang.key in self._jobs:
            self._jobs[hang.key].held_until = until

    def resume(self, hang: Hang) -> None:
        """Take up a hang that an agent before this one saw."""
        self.hangs[hang.key] = hang

    def _hang(self, key: JobKey, job: _WatchedJob, observation: _JobObservation) -> Hang | None:
        if observation.s < job.held_until:
            return None
        still: list[HungProcess] = []
        latest, median_s, busy = 0.0, 0.0, False
        for process in observation.processes:
            pace = observation.paces.get(process.key)
            if pace is None:
                continue
            limit = max(
                self.settings.least, self.settings.steps * pace.median_s, _NEWS * pace.every_s
            )
            last = max(pace.last, job.stopped, self._woke)
            worked = observation.s - last >= self.settings.busy + limit
            lived = last if worked else max(last, pace.lived, job.lived)
            if observation.s - lived >= limit:
                member = HungProcess(
                    key=process.key, pid=process.pid, rank=process.owner.rank, steps=pace.steps
                )
                still.append(member)
                latest, median_s = max(latest, lived), max(median_s, pace.median_s)
                busy = busy or worked
        if not still:
            return None
        return Hang(
            job=key.job,
            uid=key.uid,
            processes=tuple(still),
            gone=tuple(job.gone.values()),
            since_ns=observation.ns - int((observation.s - latest) * 1e9),
            seen_ns=observation.ns,
            median_s=median_s,
            busy=busy,
        )

    def _note(self, job: _WatchedJob, observation: _JobObservation, disk_bytes: float) -> None:
        """Signs of life of a job, and who of it has ended."""
        # Between two runs of the collector nothing changes: the rate is that since the last change.
        if job.looked and disk_bytes - job.disk_bytes > _DISK_RATE * max(
            observation.s - job.looked, 1.0
        ):
            job.lived = observation.s
        if disk_bytes != job.disk_bytes or not job.looked:
            job.disk_bytes, job.looked = disk_bytes, observation.s
        stepping = [
            process for process in observation.processes if process.key in observation.paces
        ]
        if stepping and all(process.state in _STOPPED_STATES for process in stepping):
            job.stopped = observation.s
        living = {process.key for process in observation.processes}
        ranks = {process.owner.rank for process in observation.processes}
        for key, process in list(job.seen.items()):
            if key not in living and not self.alive(key):
                del job.seen[key]
                job.gone[key] = EndedProcess(
                    key=key, pid=process.pid, rank=process.owner.rank, ended_ns=observation.ns
                )
        # A rank that was started again is not missing.
        job.gone = {
            key: ended
            for key, ended in job.gone.items()
            if ended.rank is None or ended.rank not in ranks
        }
        job.seen.update({process.key: process for process in stepping})
