"""What waits in the state goes into the tables: rows of captures, minutes of hosts, what jobs say of themselves.

Libraries of tables take as much memory as all else that the service has, and what a commit needs they keep. So the
service has a process of its own write; it ends when there was nothing to do for a while.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from datetime import date

import polars as pl

from traceloom import errors
from traceloom.collect.job_rows import commit_jobs, said_by_captures
from traceloom.collect.usage import commit_usage
from traceloom.collect.worker import jobs_from
from traceloom.errors import OutputError, TraceloomError
from traceloom.store.objects import Objects
from traceloom.store.row_files import unpacked_rows
from traceloom.store.state import State, TaskRecord
from traceloom.store.tables import Tables
from traceloom.workers import Worker

MOST_IN_BATCH = 64
IDLE_S = 15.0


class TableWriter:
    """Writes in this process.

    Args:
        state: What waits.
        objects: Where rows of captures are until they are in the tables.
        tables: Where rows go.
    """

    def __init__(self, state: State, objects: Objects, tables: Tables) -> None:
        self.state, self.objects, self.tables = state, objects, tables

    def create(self) -> None:
        """Make the tables that are not there; errors as of `Tables.create`."""
        self.tables.create()

    def commit(self, term: str, *, minutes: bool = True) -> int:
        """Put a batch into the tables: of captures, or where none wait of minutes or jobs; how many there were.

        Args:
            term: By which this service leads.
            minutes: Whether minutes and jobs are due.

        Raises:
            TraceloomError: `not-leading`, or a store does not answer.
        """
        batch = self.state.open_batch(MOST_IN_BATCH, term)
        if batch is None:
            if not minutes:
                return 0
            return commit_usage(self.state, self.tables, term) or commit_jobs(self.state, self.tables, term)
        frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        for task in batch.tasks:
            for name, frame in unpacked_rows(b"".join(self.objects.chunks(rows_of(task))), task.capture).items():
                frames[name].append(frame)
        replaced = [task.capture for task in batch.tasks] if batch.again else []
        rows = {name: pl.concat(parts) for name, parts in frames.items()}
        for (job, start_ns), facts in said_by_captures(rows["captures"]).items():
            self.state.say_of_jobs({job: facts}, start_ns)
        self.tables.commit(f"captures {self.state.identity}", batch.number, rows, replaced)
        self.state.close_batch(batch.number, term)
        for task in batch.tasks:
            self.objects.delete(rows_of(task))
        return len(batch.tasks)

    def compact(self, today: date) -> None:
        """Do what is to be done to the tables once a day; errors as of `Tables.compact`."""
        self.tables.compact(today)

    def rest(self) -> None:
        """There is nothing to do now."""

    def close(self) -> None:
        """Nothing is to be written any more."""


class WriterProcess:
    """Writes in a process of its own, which is started when there is something to write. Methods as of `TableWriter`.

    Args:
        state: Address of the state.
        store: Address of files and tables.
        idle_s: After how long without anything to write it ends.
    """

    def __init__(self, state: str, store: str, idle_s: float = IDLE_S) -> None:
        self._stores = {"state": state, "store": store}
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._used_s = 0.0  # of the monotonic clock

    def create(self) -> None:
        """Make the tables that are not there."""
        self._ask("create")

    def commit(self, term: str, *, minutes: bool = True) -> int:
        """Put a batch into the tables; how many there were."""
        return self._ask("commit", term=term, minutes=minutes)

    def compact(self, today: date) -> None:
        """Do what is to be done to the tables once a day."""
        self._ask("compact", today=today.isoformat())

    def rest(self) -> None:
        """There is nothing to do now: after a while the process ends."""
        with self._lock:
            if time.monotonic() - self._used_s > self._idle_s:
                self._end()

    def close(self) -> None:
        """Nothing is to be written any more."""
        with self._lock:
            self._end()

    def _ask(self, what: str, **arguments: str | bool) -> int:
        """Ask the process to do something; what it counts.

        Raises:
            OutputError: `cannot-write`: the process was killed, or cannot be started.
            TraceloomError: Of the state or a store.
        """
        with self._lock:
            try:
                if self._worker is None:
                    self._worker = Worker("traceloom.collect.table_writer")
                    self._worker.send(self._stores)
                self._worker.send({"do": what, **arguments})
                answer = next(self._worker.answers(), None)
            except (OSError, ValueError) as error:  # no process is to be had, or it was cut while it wrote
                self._end()
                raise OutputError(f"no process writes the tables: {error}", slug="cannot-write") from error
            self._used_s = time.monotonic()
            if answer is None:
                code = self._worker.ended()
                self._worker = None
                raise OutputError(f"the process that writes the tables ended: {code}", slug="cannot-write")
        if "slug" in answer:
            kind = answer.pop("kind")
            raise getattr(errors, kind)(answer.pop("message"), **answer)
        return int(answer["count"])

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.ended()
        self._worker = None


def rows_of(task: TaskRecord) -> str:
    """Where rows of a capture are until they are in the tables."""
    return f"analysed/{task.id}.zip"


def main() -> None:
    """Write as this process is told by lines of JSON, until whoever started it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; the service ends this one
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    jobs = jobs_from(sys.stdin)
    where = next(jobs)
    writer: TableWriter | None = None
    for job in jobs:
        answer: dict[str, str | int] = {"count": 0}
        try:
            if writer is None:
                writer = TableWriter(State(where["state"]), Objects(where["store"]), Tables(where["store"]))
            if job["do"] == "commit":
                answer["count"] = writer.commit(job["term"], minutes=job["minutes"])
            elif job["do"] == "compact":
                writer.compact(date.fromisoformat(job["today"]))
            else:
                writer.create()
        except TraceloomError as error:
            answer = {"kind": type(error).__name__, **error.to_dict()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
