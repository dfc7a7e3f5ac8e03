"""Whom a rule traces: the processes that something is about, their job, or its slowest rank and a median one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from traceloom.agent.board import Board
from traceloom.agent.config import OWNER_LABELS, TriggerRule
from traceloom.agent.owners import Process
from traceloom.agent.steps import Steps


class Refusal(NamedTuple):
    """Why a rule traces nobody: a slug, and the sentence."""

    reason: str
    detail: str


class Chosen(NamedTuple):
    """Processes of one user that are to be traced together. `key`: the job, or the process where it has none."""

    key: str
    processes: tuple[Process, ...]
    refusal: Refusal | None = None


def concerned(board: Board, labels: Mapping[str, str]) -> list[Process]:
    """The processes that labels name, as `Firing` has them."""
    processes: Iterable[Process] = board.processes.values()
    if "process" in labels:
        process = board.processes.get(labels["process"])
        return [process] if process is not None else []
    if "device" in labels:
        whole = labels["device"]
        devices = {whole} | {uuid for uuid, device in board.devices.items() if device.parent == whole}
        return [each for each in processes if not devices.isdisjoint((*each.devices, *each.owner.devices))]
    if "cgroup" in labels:
        return [each for each in processes if each.cgroup == labels["cgroup"]]
    if "job" in labels:
        ranks = (labels.get("rank"), "") if labels.get("rank") else ()
        return [each for each in processes if each.owner.job == labels["job"] and (not ranks or _rank(each) in ranks)]
    return list(processes)


def owned_so(processes: Iterable[Process], where: Mapping[str, str]) -> list[Process]:
    """Those whose owner is as `where` says."""
    wanted = {label: value for label, value in where.items() if label in OWNER_LABELS}
    return [
        each
        for each in processes
        if all((_rank(each) if label == "rank" else getattr(each.owner, label)) == wanted[label] for label in wanted)
    ]


def chosen(
    rule: TriggerRule, processes: Iterable[Process], board: Board, polling: Collection[str], steps: Steps
) -> Iterator[Chosen]:
    """Whom a rule traces where something is about these processes.

    Args:
        rule: Says which of them.
        processes: Those that it is about.
        board: Has the others of their jobs.
        polling: Keys of processes whose PyTorch asks for traces.
        steps: How fast they step.
    """
    groups: dict[tuple[int, str], list[Process]] = {}
    for process in processes:
        job = process.owner.job
        of_job = bool(job) and rule.target != "process"
        groups.setdefault((process.uid, job if of_job else process.key), []).append(process)
    for (uid, key), members in groups.items():
        some = members
        if members[0].owner.job == key:
            some = [each for each in board.processes.values() if (each.uid, each.owner.job) == (uid, key)]
        some = [each for each in some if each.owner.rank is not None] or some  # launchers do not step
        if "timeline" in rule.profilers:
            some = [each for each in some if each.key in polling]
        if not some:
            yield Chosen(key, (), Refusal("not-registered", "its PyTorch does not ask for traces"))
        elif rule.target == "slowest-and-median":
            yield _slowest_and_median(rule, key, some, steps)
        else:
            yield Chosen(key, tuple(some))


def _slowest_and_median(rule: TriggerRule, key: str, processes: list[Process], steps: Steps) -> Chosen:
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
        return Chosen(key, (), Refusal("no-steps", f"{what} of its ranks are not known, so none is the slowest"))
    measured.sort()
    keys = {measured[-1][1], measured[(len(measured) - 1) // 2][1]}
    return Chosen(key, tuple(process for process in processes if process.key in keys))


def _rank(process: Process) -> str:
    return "" if process.owner.rank is None else str(process.owner.rank)
