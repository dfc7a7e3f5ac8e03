"""Commits rows of captures, usage minutes and job facts to the tables, exactly once.

The table libraries need as much memory as the rest of the service, and never free what a commit
needed. So the service writes in a separate process, which ends after it was idle for a while.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path

import msgspec
import polars as pl

from traceloom import __version__, errors
from traceloom.agent.fleet_link.protocol import HostProcess, UsageRow
from traceloom.errors import InputError, OutputError, TraceloomError
from traceloom.fleet.service.worker import read_jobs
from traceloom.fleet.store.captures import CaptureRecord, ServiceState, TaskRecord
from traceloom.fleet.store.hosts import JobFacts
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.schema import (
    MINUTE_MS,
    compute_usage_hours,
    compute_usage_minutes,
    get_utc_day,
)
from traceloom.fleet.store.tables import Tables, unpack_rows
from traceloom.system.processes import WorkerProcess

MAX_JOBS_IN_BATCH = 20_000  # changes
_MAX_LABELS = 100
_MAX_TEXT_CHARS = 500  # of a label, as hosts are not trusted


def collect_job_facts(processes: Mapping[str, list[HostProcess]]) -> dict[str, JobFacts]:
    """Collects facts by job; for each fact the first process that states it counts, by host and
    rank.

    Args:
        processes: Host -> its processes.
    """
    members: dict[str, list[HostProcess]] = defaultdict(list)
    for host in sorted(processes):
        for process in sorted(
            processes[host], key=lambda process: (process.rank is None, process.rank, process.key)
        ):
            if process.job and "\0" not in process.job:  # NUL, which no database can store
                members[process.job].append(process)
    facts = {}
    for job, job_processes in members.items():
        labels: dict[str, str] = {}
        for process in job_processes:
            for name, text in process.labels.items():
                if len(labels) < _MAX_LABELS:
                    labels.setdefault(name[:_MAX_TEXT_CHARS], text[:_MAX_TEXT_CHARS])
        first = {
            name: next((text for process in job_processes if (text := getattr(process, name))), "")
            for name in ("scheduler", "user", "framework")
        }
        facts[job] = JobFacts(**first, labels=dict(sorted(labels.items())))
    return facts


def collect_capture_facts(captures: pl.DataFrame) -> dict[tuple[str, int], JobFacts]:
    """Collects the facts that captures state about their jobs, by job and start of the capture.

    Args:
        captures: Rows of this table.
    """
    rows = captures.filter(pl.col("job").is_not_null() & pl.col("torch").is_not_null()).select(
        "job", "start_ns"
    )
    return {
        (job, start_ns): JobFacts(framework="pytorch")
        for job, start_ns in rows.sort("start_ns").iter_rows()
    }


def commit_jobs(state: ServiceState, tables: Tables, term: str) -> int:
    """Commits a batch of job facts exactly once; returns the number of facts.

    `term`: term by which this service leads.
    """
    source = f"jobs {state.identity}"
    batch = state.open_job_facts(MAX_JOBS_IN_BATCH, term, tables.last_number("jobs", source))
    if batch is None:
        return 0
    number, waiting = batch
    rows = [
        {
            "day": get_utc_day(pending.since_ns),
            "job": pending.job,
            "valid_from_ns": pending.since_ns,
            **{
                name: value or None
                for name, value in msgspec.structs.asdict(pending.facts).items()
                if name != "labels"
            },
            "labels": msgspec.json.encode(pending.facts.labels).decode()
            if pending.facts.labels
            else None,
        }
        for pending in waiting
    ]
    tables.commit(source, number, {"jobs": pl.DataFrame(rows, infer_schema_length=None)})
    state.close_job_facts(number, term)
    return len(waiting)


MAX_USAGE_ROWS_IN_BATCH = 20_000  # minutes of hosts
_MAX_SILENT_MINUTES = 7 * 1440  # max minutes of an absent host that are recorded as unreachable
_MINUTE_NS = MINUTE_MS * 1_000_000
_USAGE_TYPES = {
    "time_ns": pl.Int64,
    "host": pl.String,
    "device": pl.String,
    "device_model": pl.String,
    "job": pl.String,
    "state": pl.String,
    "device_ms": pl.Int64,
    "busy_ms": pl.Int64,
    "energy_mj": pl.Int64,
    "flops_low": pl.Float64,
    "flops_high": pl.Float64,
    "input_bytes": pl.Int64,
}


def commit_usage(state: ServiceState, tables: Tables, term: str) -> int:
    """Commits a batch of usage minutes exactly once; returns the number of minutes.

    A host sends its minutes in order, so it will never send those it skipped: its devices are
    recorded as unreachable then. `term`: term by which this service leads.
    """
    source = f"usage {state.identity}"
    last = tables.last_number("usage_minute", source)
    batch = state.open_usage(MAX_USAGE_ROWS_IN_BATCH, term, last)
    if batch is None:
        return 0
    number, waiting = batch
    observed, silent = [], []
    for pending in waiting:
        rows = msgspec.json.decode(pending.document, type=list[UsageRow])
        observed += [
            (
                pending.minute * _MINUTE_NS,
                pending.host,
                row.device,
                row.device_model or None,
                row.job or None,
                row.state,
                row.device_ms,
                row.busy_ms,
                row.energy_mj,
                row.flops_low,
                row.flops_high,
                row.input_bytes,
            )
            for row in rows
        ]
        silent += [
            (minute * _MINUTE_NS, pending.host, device, model)
            for minute in range(
                max(pending.since, pending.minute - _MAX_SILENT_MINUTES), pending.minute
            )
            for device, model in {row.device: row.device_model or None for row in rows}.items()
        ]
    due = pl.DataFrame(silent, schema=dict(list(_USAGE_TYPES.items())[:4]), orient="row")
    minute_rows = compute_usage_minutes(
        pl.DataFrame(observed, schema=_USAGE_TYPES, orient="row"), due
    )
    tables.commit(
        source,
        number,
        {"usage_minute": minute_rows, "usage_hour": compute_usage_hours(minute_rows)},
    )
    state.close_usage(number, term)
    return len(waiting)


MAX_IN_BATCH = 64
IDLE_TIMEOUT_S = 15.0


class TableWriter:
    """Writes the tables in this process.

    Args:
        state: Holds pending rows, minutes and facts.
        objects: Holds rows of captures until they are in the tables.
        tables: Receives rows.
    """

    def __init__(self, state: ServiceState, objects: ObjectStore, tables: Tables) -> None:
        self.state, self.objects, self.tables = state, objects, tables

    def create(self) -> None:
        """Creates missing tables; errors as for `Tables.create`."""
        self.tables.create()

    def commit(self, term: str, *, minutes: bool = True) -> int:
        """Commits a batch of captures, or of minutes or jobs if no captures wait; returns its size.

        Args:
            term: Term by which this service leads.
            minutes: Whether minutes and jobs are due.

        Raises:
            TraceloomError: `not-leading`, or a store does not respond.
        """
        source = f"captures {self.state.identity}"
        last = self.tables.last_number("captures", source)
        batch = self.state.open_batch(MAX_IN_BATCH, term, last)
        if batch is None:
            if not minutes:
                return 0
            return commit_usage(self.state, self.tables, term) or commit_jobs(
                self.state, self.tables, term
            )
        frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        tasks, lost = [], []
        for task in batch.tasks:
            try:
                content = b"".join(self.objects.chunks(get_rows_name(task)))
            except InputError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                lost.append(task.id)  # it was committed already, before the state went back
                continue
            tasks.append(task)
            for name, frame in unpack_rows(content, task.capture).items():
                frames[name].append(frame)
        self.state.analyse_again(lost, term)
        replaced = [task.capture for task in tasks] if batch.again else []
        rows = {name: pl.concat(parts) for name, parts in frames.items()}
        if rows:
            for (job, start_ns), facts in collect_capture_facts(rows["captures"]).items():
                self.state.say_of_jobs({job: facts}, start_ns)
        self.tables.commit(source, batch.number, rows, replaced)
        self.state.close_batch(batch.number, term)
        for task in tasks:
            self.objects.delete(get_rows_name(task))
        return len(batch.tasks)

    def reconcile(self, term: str) -> int:
        """Holds the state against the tables and files, where one of them may have gone back, as
        from a backup or by a failover; returns the number of captures that are analysed again.

        These are the captures whose rows are not in the tables, and those that the state does not
        know, though their announcement is with their files. Minutes that the tables hold are not
        taken again. Errors as for `commit`.
        """
        committed = self.state.committed_tasks()  # before the tables, which may get more
        captures = self.tables.scan("captures").select("capture").unique().collect()["capture"]
        missing = committed.keys() - set(captures)
        self.state.analyse_again([committed[capture] for capture in missing], term)
        first, known = self.state.list_unsettled()
        unknown = [
            name
            for prefix in _list_announcement_prefixes(first)
            for name in self.objects.sizes(prefix)
            if Path(name).stem not in known
        ]
        for name in unknown:
            record = msgspec.json.decode(b"".join(self.objects.chunks(name)), type=CaptureRecord)
            self.state.add_capture(record)
            self.state.complete_capture(record.id, __version__, again=True)
        last = self.tables.last_number("usage_minute", f"usage {self.state.identity}")
        if last > self.state.number("usage"):
            minutes = self.tables.scan("usage_minute").group_by("host").agg(pl.col("time_ns").max())
            self.state.skip_usage(
                {host: time_ns // _MINUTE_NS for host, time_ns in minutes.collect().iter_rows()}
            )
        return len(missing) + len(unknown)

    def compact(self, today: date) -> None:
        """Runs the daily maintenance; errors as for `Tables.compact`."""
        self.tables.compact(today)

    def rest(self) -> None:
        """Does nothing: called when there is nothing to write."""

    def close(self) -> None:
        """Does nothing: there are no resources to release."""


class WriterProcess:
    """Writes the tables in a separate process, started on demand. Methods as of `TableWriter`.

    Args:
        state: URL of the state.
        store: URL of files and tables.
        idle_s: Seconds without writes after which the process ends.
    """

    def __init__(self, state: str, store: str, idle_s: float = IDLE_TIMEOUT_S) -> None:
        self._stores = {"state": state, "store": store}
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._used_s = 0.0  # of the monotonic clock

    def create(self) -> None:
        self._ask("create")

    def commit(self, term: str, *, minutes: bool = True) -> int:
        """Commits a batch; returns its size."""
        return self._ask("commit", term=term, minutes=minutes)

    def reconcile(self, term: str) -> int:
        """Holds the state against tables and files."""
        return self._ask("reconcile", term=term)

    def compact(self, today: date) -> None:
        self._ask("compact", today=today.isoformat())

    def rest(self) -> None:
        """Ends the process if it has been idle for long enough."""
        with self._lock:
            if time.monotonic() - self._used_s > self._idle_s:
                self._end()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, command: str, **arguments: str | bool) -> int:
        """Sends a command to the process; returns the count in its answer.

        Raises:
            OutputError: `cannot-write`: the process was killed, or cannot be started.
            TraceloomError: Of the state or a store.
        """
        with self._lock:
            try:
                if self._worker is None:
                    self._worker = WorkerProcess("traceloom.fleet.service.committer")
                    self._worker.send(self._stores)
                self._worker.send({"do": command, **arguments})
                answer = next(self._worker.answers(), None)
            except (
                OSError,
                ValueError,
            ) as error:
                # The process cannot be started, or was killed while it wrote.
                self._end()
                raise OutputError(
                    f"no process writes the tables: {error}", slug="cannot-write"
                ) from error
            self._used_s = time.monotonic()
            if answer is None:
                code = self._worker.ended()
                self._worker = None
                raise OutputError(
                    f"the process that writes the tables ended: {code}", slug="cannot-write"
                )
        if "slug" in answer:
            raise getattr(errors, answer.pop("kind"))(answer.pop("message"), **answer)
        return int(answer["count"])

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.ended()
        self._worker = None


def get_rows_name(task: TaskRecord) -> str:
    """Returns the object name of a capture's rows until they are in the tables."""
    return f"analysed/{task.id}.zip"


def get_announcement_name(capture: CaptureRecord) -> str:
    """Returns the object name of the record of a complete capture, from which a state that went
    back gets it again.
    """
    return f"announced/{capture.day}/{capture.id}.json"


def _list_announcement_prefixes(first: str) -> list[str]:
    """Returns the folders of records from the day before the given one on ("": of all days)."""
    if not first:
        return ["announced"]
    begin = date.fromisoformat(first) - timedelta(days=1)  # clocks of services differ
    days = (get_utc_day(time.time_ns()) - begin).days + 1
    return [f"announced/{begin + timedelta(days=ago)}" for ago in range(days + 1)]


def main() -> None:
    """Executes commands from lines of JSON on standard input, until that ends."""
    # Ctrl-C in a terminal reaches all processes; the service ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output that libraries print must not mix with answers
    jobs = read_jobs(sys.stdin)
    stores = next(jobs)
    writer: TableWriter | None = None
    for job in jobs:
        answer: dict[str, str | int] = {"count": 0}
        try:
            if writer is None:
                writer = TableWriter(
                    ServiceState(stores["state"]),
                    ObjectStore(stores["store"]),
                    Tables(stores["store"]),
                )
            if "today" in job:
                job["today"] = date.fromisoformat(job["today"])
            answer["count"] = getattr(writer, job.pop("do"))(**job) or 0
        except TraceloomError as error:
            answer = {"kind": type(error).__name__, **error.to_dict()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
