"""Whom a rule traces: the processes that something is about, their job, or its slowest rank and a median one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from traceloom.agent.board import Board
from traceloom.agent.config import OWNER_LABELS, TriggerRule
from traceloom.agent.owners import Process
from traceloom.agent.steps import Steps


class TriggerRefusal(NamedTuple):
    """Why a rule traces nobody: a slug, and the sentence."""

    reason: str
    detail: str


class TriggerTarget(NamedTuple):
    """Processes of one user that are to be traced together. `key`: the job, or the process where it has none.

    The name of a job is nobody's own: another user's of the same name is another target. `uid`: -1: nobody is left.
    """

    uid: int
    key: str
    processes: tuple[Process, ...]
    refusal: TriggerRefusal | None = None


class ProcessIndex:
    """The board's processes by job, device and cgroup, so that what a rule sees finds those that it is about.

    Args:
        board: Whose processes are replaced as a whole when they are looked at again.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._processes: Mapping[str, Process] | None = None
        self._by: dict[tuple[str, str], list[Process]] = {}

    def concerned(self, labels: Mapping[str, str]) -> list[Process]:
        """The processes that labels name, as `Firing` has them."""
        if "process" in labels:
            process = self._board.processes.get(labels["process"])
            return [process] if process is not None else []
        if "device" in labels:
            whole = labels["device"]
            parts = [uuid for uuid, device in self._board.devices.items() if device.parent == whole]
            members = [process for uuid in (whole, *parts) for process in self._of("device", uuid)]
            return list({process.key: process for process in members}.values())
        if "cgroup" in labels:
            return self._of("cgroup", labels["cgroup"])
        if "job" in labels:
            rank = labels.get("rank")
            members = self._of("job", labels["job"])
            # A process may have told its rank with its steps, and nothing else knows it.
            of_rank = [each for each in members if _rank(each) == rank] or [each for each in members if not _rank(each)]
            return of_rank if rank else members
        return list(self._board.processes.values())

    def of_job(self, uid: int, job: str) -> list[Process]:
        """The processes of a job that are a user's."""
        return [process for process in self._of("job", job) if process.uid == uid]

    def _of(self, label: str, value: str) -> list[Process]:
        if self._processes is not self._board.processes:
            self._processes, self._by = self._board.processes, {}
            for process in self._processes.values():
                devices = dict.fromkeys((*process.devices, *process.owner.devices))
                for key in (
                    ("job", process.owner.job),
                    ("cgroup", process.cgroup),
                    *(("device", uuid) for uuid in devices),
                ):
                    self._by.setdefault(key, []).append(process)
        return self._by.get((label, value), [])


def owned_so(processes: Iterable[Process], where: Mapping[str, str]) -> list[Process]:
    """Those whose owner is as `where` says."""
    wanted = {label: value for label, value in where.items() if label in OWNER_LABELS}
    return [
        each
        for each in processes
        if all((_rank(each) if label == "rank" else getattr(each.owner, label)) == wanted[label] for label in wanted)
    ]


def chosen(
    rule: TriggerRule, processes: Iterable[Process], index: ProcessIndex, polling: Collection[str], steps: Steps
) -> Iterator[TriggerTarget]:
    """Whom a rule traces where something is about these processes.

    Args:
        rule: Says which of them.
        processes: Those that it is about.
        index: Has the others of their jobs.
        polling: Keys of processes whose PyTorch asks for traces.
        steps: How fast they step.
    """
    groups: dict[tuple[int, str], list[Process]] = {}
    for process in _without_launchers(list(processes)):
        job = process.owner.job
        of_job = bool(job) and rule.target != "process"
        groups.setdefault((process.uid, job if of_job else process.key), []).append(process)
    for (uid, key), members in groups.items():
        some = members
        if members[0].owner.job == key:
            some = index.of_job(uid, key)
        some = _without_launchers(some)
        if "timeline" in rule.profilers:
            some = [each for each in some if each.key in polling]
        if not some:
            yield TriggerTarget(uid, key, (), TriggerRefusal("not-registered", "its PyTorch does not ask for traces"))
        elif rule.target == "slowest-and-median":
            yield _slowest_and_median(rule, uid, key, some, steps)
        else:
            yield TriggerTarget(uid, key, tuple(some))


def _without_launchers(processes: list[Process]) -> list[Process]:
    """Without those that have no rank while others of their job have one."""
    ranked = {each.owner.job for each in processes if each.owner.rank is not None}
    return [each for each in processes if each.owner.rank is not None or each.owner.job not in ranked]


def _slowest_and_median(rule: TriggerRule, uid: int, key: str, processes: list[Process], steps: Steps) -> TriggerTarget:
    measured: list[tuple[float, str]] = []
    for process in processes:
        lately = steps.lately(process.key)
        if lately is None:
            continue
        amount = lately.seconds if rule.ranks_by == "steps" else lately.waited
        if amount is not None:
            measured.append((amount / lately.number, process.key))
    if not measured:
        what = "steps" if rule.ranks_by == "steps" else "waits for the data loader"
        return TriggerTarget(
            uid, key, (), TriggerRefusal("no-steps", f"{what} of its ranks are not known, so none is the slowest")
        )
    measured.sort()
    keys = {measured[-1][1], measured[(len(measured) - 1) // 2][1]}
    return TriggerTarget(uid, key, tuple(process for process in processes if process.key in keys))


def _rank(process: Process) -> str:
    return "" if process.owner.rank is None else str(process.owner.rank)
