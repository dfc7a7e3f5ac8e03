"""Targets of rules, budgets per window, and the charges of requests, kept over a restart."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from traceloom.agent.config import OWNER_LABELS, TriggerBudget, TriggerRule
from traceloom.agent.database import lend_database
from traceloom.agent.ownership.model import Process
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter
from traceloom.system.units import format_duration, format_size


class TriggerRefusal(NamedTuple):
    """Why a rule does not trace: a slug, and the sentence."""

    reason: str
    detail: str


class TriggerTarget(NamedTuple):
    """Processes of one user that are traced together. `key`: their job, or the process if it has
    none.

    Names of jobs are not unique: another user's job of the same name is another target. `uid` -1:
    no process is left.
    """

    uid: int
    key: str
    processes: tuple[Process, ...]
    refusal: TriggerRefusal | None = None


class ProcessIndex:
    """The snapshot's processes by job, device and cgroup, to find those that a rule is about.

    Args:
        host_snapshot: Its processes are replaced as a whole at each scan.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._indexed_processes: Mapping[str, Process] | None = None
        self._processes_by_label: dict[tuple[str, str], list[Process]] = {}

    def find_by_labels(self, labels: Mapping[str, str]) -> list[Process]:
        """Returns the processes that labels of an `Occurrence` name."""
        if "process" in labels:
            process = self._snapshot.processes.get(labels["process"])
            return [process] if process is not None else []
        if "device" in labels:
            device_uuid = labels["device"]
            partitions = [
                uuid
                for uuid, device in self._snapshot.devices.items()
                if device.parent == device_uuid
            ]
            members = [
                process
                for uuid in (device_uuid, *partitions)
                for process in self._look_up("device", uuid)
            ]
            return list({process.key: process for process in members}.values())
        if "cgroup" in labels:
            return self._look_up("cgroup", labels["cgroup"])
        if "job" in labels:
            rank = labels.get("rank")
            members = self._look_up("job", labels["job"])
            # The rank of a process may be known only from its step reports.
            with_rank = [member for member in members if _format_rank(member) == rank] or [
                member for member in members if not _format_rank(member)
            ]
            return with_rank if rank else members
        return list(self._snapshot.processes.values())

    def list_job_processes(self, uid: int, job: str) -> list[Process]:
        return [process for process in self._look_up("job", job) if process.uid == uid]

    def _look_up(self, label: str, value: str) -> list[Process]:
        if self._indexed_processes is not self._snapshot.processes:
            self._indexed_processes, self._processes_by_label = self._snapshot.processes, {}
            for process in self._indexed_processes.values():
                devices = dict.fromkeys((*process.devices, *process.owner.devices))
                for key in (
                    ("job", process.owner.job),
                    ("cgroup", process.cgroup),
                    *(("device", uuid) for uuid in devices),
                ):
                    self._processes_by_label.setdefault(key, []).append(process)
        return self._processes_by_label.get((label, value), [])


def filter_by_owner(processes: Iterable[Process], labels: Mapping[str, str]) -> list[Process]:
    owner_labels = {label: value for label, value in labels.items() if label in OWNER_LABELS}
    return [
        process
        for process in processes
        if all(
            (_format_rank(process) if label == "rank" else getattr(process.owner, label))
            == owner_labels[label]
            for label in owner_labels
        )
    ]


def select_targets(
    rule: TriggerRule,
    processes: Iterable[Process],
    index: ProcessIndex,
    registered_keys: Collection[str],
    step_counter: StepCounter,
) -> Iterator[TriggerTarget]:
    """Yields the targets of a rule for an occurrence about these processes.

    Args:
        rule: Selects among them.
        processes: Those that the occurrence is about.
        index: Has the other processes of their jobs.
        registered_keys: Keys of processes whose PyTorch polls for traces.
        step_counter: Their step rates.
    """
    groups: dict[tuple[int, str], list[Process]] = {}
    for process in _exclude_launchers(list(processes)):
        job = process.owner.job
        groups_by_job = bool(job) and rule.target != "process"
        groups.setdefault((process.uid, job if groups_by_job else process.key), []).append(process)
    for (uid, key), members in groups.items():
        candidates = _exclude_launchers(
            index.list_job_processes(uid, key) if members[0].owner.job == key else members
        )
        if "timeline" in rule.profilers:
            candidates = [member for member in candidates if member.key in registered_keys]
        if not candidates:
            yield TriggerTarget(
                uid,
                key,
                (),
                TriggerRefusal("not-registered", "its PyTorch does not ask for traces"),
            )
        elif rule.target == "slowest-and-median":
            yield _select_slowest_and_median(rule, uid, key, candidates, step_counter)
        else:
            yield TriggerTarget(uid, key, tuple(candidates))


def _exclude_launchers(processes: list[Process]) -> list[Process]:
    """Returns the processes without those that have no rank while others of their job have one."""
    jobs_with_ranks = {process.owner.job for process in processes if process.owner.rank is not None}
    return [
        process
        for process in processes
        if process.owner.rank is not None or process.owner.job not in jobs_with_ranks
    ]


def _select_slowest_and_median(
    rule: TriggerRule, uid: int, key: str, processes: list[Process], step_counter: StepCounter
) -> TriggerTarget:
    seconds_per_step: list[tuple[float, str]] = []
    for process in processes:
        recent_steps = step_counter.lately(process.key)
        if recent_steps is None:
            continue
        total_seconds = recent_steps.seconds if rule.ranks_by == "steps" else recent_steps.waited
        if total_seconds is not None:
            seconds_per_step.append((total_seconds / recent_steps.number, process.key))
    if not seconds_per_step:
        quantity = "steps" if rule.ranks_by == "steps" else "waits for the data loader"
        return TriggerTarget(
            uid,
            key,
            (),
            TriggerRefusal(
                "no-steps", f"{quantity} of its ranks are not known, so none is the slowest"
            ),
        )
    seconds_per_step.sort()
    keys = {seconds_per_step[-1][1], seconds_per_step[(len(seconds_per_step) - 1) // 2][1]}
    return TriggerTarget(uid, key, tuple(process for process in processes if process.key in keys))


def _format_rank(process: Process) -> str:
    return "" if process.owner.rank is None else str(process.owner.rank)


DAY_NS = 86_400 * 10**9
_MIN_BUDGET_AGE_NS = 3600 * 10**9  # a younger process may be traced for as long as one of this age


class BaseCharge(msgspec.Struct, kw_only=True):
    """What a rule's request costs: bytes kept, and what its budget counts; the maximum until it is
    `settled`.
    """

    request: str
    rule: str
    at_ns: int
    bytes: int
    settled: bool = False

    @property
    def scope(self) -> tuple[object, ...]:
        """Returns what has a cooldown of its own: the rule, and what it traced."""
        raise NotImplementedError


class Charge(BaseCharge, kw_only=True):
    """The cost of a rule's request for one process: seconds traced and bytes kept."""

    process: str
    uid: int
    target: str
    seconds: float

    @property
    def scope(self) -> tuple[object, ...]:
        """The rule, the user and the target."""
        return self.rule, self.uid, self.target


class BytesBudget(Protocol):
    """A budget of bytes of a day."""

    @property
    def mb_per_trace(self) -> float:
        """Max size of a file."""

    @property
    def mb_per_day(self) -> float:
        """Max bytes of all in 24 hours."""


AnyCharge = TypeVar("AnyCharge", bound=BaseCharge)
AnyBudget = TypeVar("AnyBudget", bound=BytesBudget)


class Ledger(Generic[AnyCharge, AnyBudget]):
    """All charges that still count: those of the last 24 hours, and of requests that have not ended.

    Args:
        budget: The limits.
    """

    def __init__(self, budget: AnyBudget) -> None:
        self.budget = budget
        self.charges: list[AnyCharge] = []  # oldest first
        self._last_fired_ns: dict[tuple[object, ...], int] = {}  # scope -> time of the last request

    def add(self, charges: Iterable[AnyCharge], now_ns: int) -> None:
        """Add charges; those in the future, as after a clock was set back, are dated now."""
        for charge in charges:
            charge.at_ns = min(charge.at_ns, now_ns)
            self.charges.append(charge)
            last_ns = self._last_fired_ns.get(charge.scope, 0)
            self._last_fired_ns[charge.scope] = max(charge.at_ns, last_ns)
        self.charges.sort(key=lambda charge: charge.at_ns)

    def forget(self, before_ns: int) -> list[AnyCharge]:
        """Drop and return settled charges before an instant, which is at least a day ago."""
        removed = [charge for charge in self.charges if charge.settled and charge.at_ns < before_ns]
        if removed:
            self.charges = [
                charge for charge in self.charges if not charge.settled or charge.at_ns >= before_ns
            ]
            self._last_fired_ns = {
                scope: at_ns for scope, at_ns in self._last_fired_ns.items() if at_ns >= before_ns
            }
        return removed

    def fired_ns(self, *scope: object) -> int | None:
        """Returns when a rule last traced this; None if unknown."""
        return self._last_fired_ns.get(scope)

    def cooling(self, scope: tuple[object, ...], cooldown_s: float, now_ns: int) -> float:
        """Returns the seconds until a rule may trace this again; 0.0 if it may."""
        fired_ns = self.fired_ns(*scope)
        return 0.0 if fired_ns is None else max(0.0, cooldown_s - (now_ns - fired_ns) / 1e9)

    def reserve(self, file_count: int) -> int:
        """Returns the max bytes of so many files."""
        return file_count * int(self.budget.mb_per_trace * 1e6)

    def bytes_left(self, now_ns: int) -> int:
        """Returns the bytes that may still be kept; unsettled charges count with their maximum."""
        spent = sum(charge.bytes for charge in self.list_counted(now_ns))
        return int(self.budget.mb_per_day * 1e6) - spent

    def list_counted(self, now_ns: int) -> list[AnyCharge]:
        return [
            charge
            for charge in self.charges
            if charge.at_ns > now_ns - DAY_NS or not charge.settled
        ]


class TriggerLedger(Ledger[Charge, TriggerBudget]):
    """All charges of the rules of an agent."""

    def refusal(
        self,
        processes: Sequence[Process],
        seconds: Mapping[str, float],
        files_per_process: int,
        now_ns: int,
    ) -> TriggerRefusal | None:
        """Returns why processes cannot be traced for these seconds (by key), with so many files
        each; None if they can.
        """
        for process in processes:
            requested_s = seconds[process.key]
            spent_s = sum(
                charge.seconds
                for charge in self.list_counted(now_ns)
                if charge.process == process.key
            )
            age_ns = min(max(now_ns - process.started_ns, _MIN_BUDGET_AGE_NS), DAY_NS)
            allowed_s = self.budget.share * age_ns / 1e9
            if spent_s + requested_s > allowed_s:
                return TriggerRefusal(
                    "budget-share",
                    f"process {process.pid} was traced for {_format_seconds(spent_s)} of the last day, and {_format_seconds(requested_s)} more "
                    f"are above the {_format_seconds(allowed_s)} that `trigger_budget.share` allows",
                )
        requested_bytes, remaining_bytes = (
            self.reserve(len(processes) * files_per_process),
            self.bytes_left(now_ns),
        )
        if requested_bytes > remaining_bytes:
            return TriggerRefusal(
                "budget-bytes",
                f"{format_size(requested_bytes)} are to be set aside, and {format_size(max(remaining_bytes, 0))} of `trigger_budget.mb_per_day` are left",
            )
        return None


def _format_seconds(seconds: float) -> str:
    return format_duration(int(seconds * 1e9))


SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (
    request TEXT NOT NULL, process TEXT NOT NULL, document BLOB NOT NULL, PRIMARY KEY (request, process)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rules (name TEXT PRIMARY KEY, document BLOB NOT NULL) WITHOUT ROWID;
"""


class LastFiring(msgspec.Struct, frozen=True, kw_only=True):
    """When a rule last made a request, and why. `uid`: whose the processes are."""

    at_ns: int
    request: str
    target: str
    what: str
    uid: int


class LastRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """When a rule was last refused, and why."""

    at_ns: int
    target: str
    what: str
    uid: int
    reason: str
    detail: str


class RuleCounts(msgspec.Struct, kw_only=True):
    """Counts of a rule since it was created. None: never."""

    fired: int = 0
    refusals: dict[str, int] = {}  # by reason
    traced_seconds: float = 0.0
    kept_bytes: int = 0
    last: LastFiring | None = None
    last_refusal: LastRefusal | None = None


class TriggerStore:
    """Blocks, so it is called in a thread, once the loop runs.

    An unreadable file is moved away: requests still contain their triggers.

    Args:
        path: The file; its directory is created. None: in memory only.

    Raises:
        InputError: `other-version`: the file has another schema.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.last_error = ""  # why the last change could not be written
        self._lend = partial(lend_database, path, _SCHEMA, SCHEMA_VERSION, "database of triggers")
        self.load()

    def load(self) -> tuple[list[Charge], dict[str, RuleCounts]]:
        """Returns the charges, and the counts of each rule; empty if the file cannot be read, see
        `last_error`.
        """
        try:
            with self._lend() as database:
                rows = database.execute("SELECT name, document FROM rules").fetchall()
                documents = database.execute("SELECT document FROM charges").fetchall()
                try:
                    rules = {
                        name: msgspec.json.decode(text, type=RuleCounts) for name, text in rows
                    }
                    charges = [msgspec.json.decode(text, type=Charge) for (text,) in documents]
                except msgspec.DecodeError as error:  # SQLite checks no contents
                    raise sqlite3.DatabaseError(str(error)) from error
        except (sqlite3.Error, OSError) as error:
            self.last_error = str(error)
            return [], {}
        return charges, rules

    def put(
        self,
        charges: Sequence[Charge],
        rules: dict[str, RuleCounts],
        removed: Sequence[Charge] = (),
    ) -> None:
        """Write changes; on failure `last_error` is set, and the next agent restores them from the
        requests.
        """
        try:
            with self._lend() as database:
                database.executemany(
                    "INSERT OR REPLACE INTO charges VALUES (?, ?, ?)",
                    [
                        (charge.request, charge.process, msgspec.json.encode(charge))
                        for charge in charges
                    ],
                )
                database.executemany(
                    "DELETE FROM charges WHERE request = ? AND process = ?",
                    [(charge.request, charge.process) for charge in removed],
                )
                database.executemany(
                    "INSERT OR REPLACE INTO rules VALUES (?, ?)",
                    [(name, msgspec.json.encode(counts)) for name, counts in rules.items()],
                )
            self.last_error = ""
        except (sqlite3.Error, OSError) as error:
            self.last_error = str(error)
