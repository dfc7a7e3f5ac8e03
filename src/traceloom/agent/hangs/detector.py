"""Detects hanging jobs: processes that made steps and stopped, for no visible reason.

Times are on the monotonic clock, which stops while the host is suspended and is never set. Signs of
life without steps: batches from a data loader (an evaluation), disk I/O (a checkpoint). A job all
of whose processes are stopped was stopped by somebody. Whether a job works that shows none of these
can only be told from its stacks: the caller reports it by `works`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from traceloom.agent.config import Hangs
from traceloom.agent.ownership.model import Process
from traceloom.agent.steps import StepCounter, StepPace

_MIN_STEPS = 3  # before that the duration of a step is unknown
_NEWS = 3  # usual intervals between reports to wait, as a job may report many steps at once
_DISK_RATE = 1e6  # bytes per second above which a job reads or writes data, not just logs
_STOPPED_STATES = {"T", "t"}
_ASLEEP_S = 30.0  # a longer gap between two checks, normally a second apart, means a suspend


class JobKey(NamedTuple):
    """A job of a user. Names of jobs are not unique across users, as everyone can set them."""

    job: str
    uid: int


class HungProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a hanging job, by its key `PID@START`, and its number of steps if known."""

    key: str
    pid: int
    rank: int | None
    steps: int


class EndedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that made steps and ended, while others of its job live; `ended_ns` on the wall
    clock.
    """

    key: str
    pid: int
    rank: int | None
    ended_ns: int


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A job of which `processes` make no steps.

    `since_ns`: time of the last sign of life, `seen_ns`: time of the detection; wall clock, at most
    one period of the collectors late. `median_s`: median step time of the slowest of them, seconds.
    `busy`: they work, but for longer than a job may without steps.
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
        return JobKey(self.job, self.uid)


class HangEnd(NamedTuple):
    """A hang that is over: its processes step again (`recovered`), or have ended."""

    hang: Hang
    recovered: bool


class _JobObservation(NamedTuple):
    """An observation of a job: both clocks, its processes, and the paces of those that step, by
    key.
    """

    s: float
    ns: int
    processes: list[Process]
    paces: dict[str, StepPace]


@dataclass(slots=True)
class _WatchedJob:
    """State of a job: times of its signs of life in monotonic seconds; the processes that stepped,
    and those that ended.
    """

    lived: float = 0.0
    stopped: float = 0.0  # when all stepping processes were last seen stopped
    held_until: float = 0.0
    looked: float = 0.0
    disk_bytes: float = 0.0
    seen: dict[str, Process] = field(default_factory=dict)
    gone: dict[str, EndedProcess] = field(default_factory=dict)


class HangDetector:
    """Reports each hang once. Used from one thread.

    Args:
        settings: Thresholds.
        alive: Whether an unlisted process is alive, by its key: on an overloaded host, and shortly
            after the agent's start, not all processes are listed each time.
    """

    def __init__(self, settings: Hangs, alive: Callable[[str], bool] = lambda _: False) -> None:
        self.settings, self.alive = settings, alive
        self.hangs: dict[JobKey, Hang] = {}  # current hangs
        self.over: list[HangEnd] = []  # ended since the previous call of `check`
        self.stepping: set[JobKey] = set()  # jobs with known steps, whose hangs can be detected
        self._jobs: dict[JobKey, _WatchedJob] = {}
        self._looked, self._woke = 0.0, 0.0

    def check(
        self,
        now: float,
        now_ns: int,
        processes: Iterable[Process],
        steps: StepCounter,
        disk_bytes: Mapping[str, float] | None = None,
    ) -> list[Hang]:
        """Returns the hangs that are new since the previous call.

        Args:
            now: Monotonic clock, seconds.
            now_ns: Wall clock.
            processes: All relevant processes of this host.
            steps: Their steps.
            disk_bytes: Bytes read and written so far, by key of the process.
        """
        if self._looked and now - self._looked > _ASLEEP_S:
            # The host, its virtual machine or this agent was suspended, perhaps all jobs, too.
            self._woke = now
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
            if all(pace is not None and pace.steps > member.steps for member, pace in paced):
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
        """Withdraw a hang: its processes work without steps; do not report it again before `until`
        on the monotonic clock.
        """
        if self.hangs.pop(hang.key, None) is not None and hang.key in self._jobs:
            self._jobs[hang.key].held_until = until

    def resume(self, hang: Hang) -> None:
        """Restore a hang that an earlier agent detected."""
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
        """Update the signs of life of a job, and its processes that have ended."""
        # Between two runs of the collector nothing changes, so the rate is taken since the last
        # change.
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
        # A restarted rank is not missing.
        job.gone = {
            key: ended
            for key, ended in job.gone.items()
            if ended.rank is None or ended.rank not in ranks
        }
        job.seen.update({process.key: process for process in stepping})
