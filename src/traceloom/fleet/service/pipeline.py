"""The pipeline of a capture: `received → checked → analysed → committed`.

Threads lease tasks, run them on an engine and store the results; one committer for all services
that share a state commits rows of many captures at once. Every step is idempotent: file names
depend on their content, and the tables record batch numbers. So a killed service loses and
duplicates nothing: its tasks are taken over when their leases expire, and its batch is committed by
the next leader.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Literal

import msgspec

from traceloom import __version__
from traceloom.errors import TraceloomError
from traceloom.fleet.service.committer import (
    MAX_IN_BATCH,
    TableWriter,
    WriterProcess,
    get_announcement_name,
    get_rows_name,
)
from traceloom.fleet.service.tasks import (
    BASE,
    NEW,
    Engine,
    EngineTask,
    TaskError,
    TaskFile,
    TaskName,
)
from traceloom.fleet.store.captures import CaptureRecord, ServiceState, TaskRecord
from traceloom.fleet.store.database import LEADER
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.schema import get_utc_day
from traceloom.fleet.store.tables import Tables, unpack_rows
from traceloom.system.text import hide_paths

COMMIT_INTERVAL_S = 5.0
_ROUNDS = 12  # minutes and jobs are committed every n-th round only, to avoid many small files
_ROUNDS_WHEN_MANY = 60
_MANY = 500  # pending host minutes that count as many
LEASE_S = 30.0
TASK_TIMEOUT_S = 1800.0
"""Max seconds of a task."""
ADDRESS_LIFETIME_S = 6 * 3600
"""Validity of a signed URL of a file, in seconds: a task may wait for a worker before it
downloads.
"""

_DAY_NS = 86_400 * 10**9
# After midnight in UTC, when hosts have sent the last minutes of the day.
_NIGHT_NS = 2 * 3_600 * 10**9
_ANNOUNCED_DAYS = 7  # after which an upload that was not finished is forgotten
_COMPACTED = "compacted"  # name of the number that holds the day of the last compaction
_POLL_S = 0.5  # between polls while no task waits
_ERROR_PAUSE_S = 5.0  # before a retry when the state or a store does not respond

_log = logging.getLogger(__name__)


def get_capture_directory(capture: CaptureRecord) -> str:
    """Returns the object prefix of a capture's files."""
    return f"captures/{capture.day}/{capture.id}"


class CapturePipeline:
    """Processes tasks until it is stopped.

    Args:
        state: Holds tasks.
        objects: Holds files.
        tables: Receives rows.
        engine: Runs tasks.
        lease_s: Duration of a task's lease; once it expires, others take over from a dead service.
        commit_s: How long rows wait to be committed together with others.
        task_s: Max duration of a task.
        writer: Writes the tables; None: this process does.
        clock: Now, in ns since the epoch.
    """

    def __init__(
        self,
        state: ServiceState,
        objects: ObjectStore,
        tables: Tables,
        engine: Engine,
        *,
        lease_s: float = LEASE_S,
        commit_s: float = COMMIT_INTERVAL_S,
        task_s: float = TASK_TIMEOUT_S,
        writer: TableWriter | WriterProcess | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.state, self.objects, self.engine = state, objects, engine
        self._writer = writer or TableWriter(state, objects, tables)
        self._next_usage_commit_s = 0.0  # monotonic time at which usage minutes and jobs are due
        self.lease_s, self.commit_s, self.task_s, self.clock = lease_s, commit_s, task_s, clock
        self.holder = secrets.token_hex(8)
        self.url = ""  # at which other services of the state reach this one
        self.state_answers = True  # when it was asked last
        self.term = ""  # under which this service leads: a new name each time it becomes leader
        self._leads_until = 0.0  # monotonic clock: it advances while suspended
        self.commit_error = ""  # why the last commit failed
        self._settled_at = time.monotonic()  # when rows were committed last, or none waited
        self._reconciled = ""  # the term in which state and tables were held against each other
        self._writing = threading.Lock()  # there is only one writer of the tables
        self._stop = threading.Event()
        self._more = threading.Event()  # a task may be available
        self._full = threading.Event()  # a whole batch waits
        self._waiting = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        loops = [self._lead_loop, self._commit_loop, *[self._work_loop] * self.engine.slots]
        self._threads = [threading.Thread(target=loop, name="traceloom-pipeline") for loop in loops]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stops; running tasks are left to other services."""
        self._stop.set()
        self._more.set()
        self._full.set()
        self.engine.close()
        for thread in self._threads:
            thread.join()
        self._writer.close()
        try:
            self.state.resign(self.term)
        except TraceloomError as error:  # the lease expires by itself
            _log.warning("%s", error)

    @property
    def leads(self) -> bool:
        """Whether this service talks to hosts and commits; its writes are refused once another one
        leads.
        """
        return bool(self.term) and time.monotonic() < self._leads_until

    @property
    def commit_delay_s(self) -> float:
        """For how long rows have waited though this service leads, in seconds."""
        return time.monotonic() - self._settled_at if self.leads else 0.0

    def wake(self) -> None:
        """Wakes up a worker, as a task was added."""
        self._more.set()

    def accept(self, capture: CaptureRecord) -> None:
        """Takes a capture whose files are all in the store, and queues its analysis; idempotent.

        Its record goes to the files, so that a state from a backup need not know it.
        """
        record = msgspec.structs.replace(capture, complete=False)
        self.objects.put(get_announcement_name(capture), msgspec.json.encode(record))
        self.state.complete_capture(capture.id, __version__)
        self.wake()

    def work(self) -> bool:
        """Takes a task and processes it as far as possible; returns False if none waits."""
        task = self.state.claim(self.holder, self.lease_s)
        if task is None:
            return False
        capture = self.state.capture(task.capture)
        assert capture is not None, "tasks refer to captures"
        try:
            self._through(task, capture)
        except TaskError as error:
            if self._stop.is_set():
                self.state.give_back(task.id, self.holder, 0)
            else:
                self.state.fail(task.id, self.holder, hide_paths(str(error)), final=error.final)
        except (
            TraceloomError,
            OSError,
        ) as error:
            # A failure of the engine, the store or the disk, not of the capture.
            _log.warning("%s: %s", task.id, error)
            self.state.give_back(task.id, self.holder, _ERROR_PAUSE_S)
        return True

    def lead(self) -> None:
        """Becomes leader if there is none, or extends the lease.

        Raises:
            OutputError: The state does not respond.
        """
        until = time.monotonic() + self.lease_s
        if self.term and not self.state.renew_lease(LEADER, self.term, self.lease_s):
            self.term = ""
        if not self.term:
            term = secrets.token_hex(8)
            if self.state.lead(LEADER, term, self.lease_s, self.url):
                self.term = term
        self._leads_until = until
        if not self.term:
            self._settled_at = time.monotonic()

    def commit(self, *, minutes: bool = True) -> int:
        """Commits a batch to the tables, as `TableWriter.commit`."""
        return self._writer.commit(self.term, minutes=minutes)

    def reconcile(self) -> None:
        """Holds the state against tables and files, as `TableWriter.reconcile`."""
        term = self.term
        if count := self._writer.reconcile(term):
            _log.warning("%d captures are analysed again: the state or the tables went back", count)
            self.wake()
        self._reconciled = term

    def compact(self, nightly: bool = False) -> bool:
        """Runs the daily maintenance of the tables; returns False if it is not due. Only the leader
        may.

        Args:
            nightly: Only once a day, and only from 02:00 in UTC on.
        """
        days, ns_of_day = divmod(self.clock(), _DAY_NS)
        if nightly and (ns_of_day < _NIGHT_NS or self.state.number(_COMPACTED) >= days):
            return False
        with self._writing:
            self._writer.compact(get_utc_day(days * _DAY_NS))
        before_ns = (days - _ANNOUNCED_DAYS) * _DAY_NS
        for capture in self.state.expire_announcements(before_ns):
            for file in capture.files:
                self.objects.delete(f"{get_capture_directory(capture)}/{file.name}")
        for name in self.objects.sizes("incoming"):  # signed addresses outlive what they are for
            if name.split("/")[1] < get_utc_day(before_ns).isoformat():
                self.objects.delete(name)
        self.state.put_number(_COMPACTED, days)
        return True

    def rendered(self, capture: CaptureRecord, task: Literal["render", "render_timeline"]) -> str:
        """Returns the name of a capture's report or Perfetto timeline, rendered on first access.

        Raises:
            TaskError: It could not be rendered.
            TraceloomError: A store does not respond.
        """
        ending = "html" if task == "render" else "perfetto.json.gz"
        name = f"reports/{capture.day}/{capture.id}.{__version__}.{ending}"
        if self.objects.size(name) is None:
            title = f"{capture.job} · {capture.id}" if capture.job else capture.id
            self.objects.put(
                name,
                self.engine.submit(self._build_engine_task(capture, task, name=title)).result(),
            )
        return name

    def comparison(self, base: CaptureRecord, new: CaptureRecord) -> str:
        """Returns the name of the page that compares a capture with a base, rendered on first
        access.

        Raises:
            TaskError: They cannot be compared.
            TraceloomError: A store does not respond.
        """
        pair_hash = hashlib.sha256(f"{base.id} {new.id}".encode()).hexdigest()[:32]
        name = f"reports/{new.day}/{pair_hash}.{__version__}.html"
        if self.objects.size(name) is None:
            files = (*self._list_task_files(base, BASE), *self._list_task_files(new, NEW))
            names: dict[str, str | int] = {
                "base_name": base.job or base.id,
                "new_name": new.job or new.id,
            }
            work = EngineTask("compare", files, names, self.task_s)
            self.objects.put(name, self.engine.submit(work).result())
        return name

    def _through(self, task: TaskRecord, capture: CaptureRecord) -> None:
        if task.state == "received":
            self._done(task, self._build_engine_task(capture, "check"))
            if not self.state.advance(task.id, self.holder, "checked"):
                return  # another service has it
        work = self._build_engine_task(
            capture, "analyse", capture=capture.id, job=capture.job, received_ns=capture.received_ns
        )
        content = self._done(task, work)
        try:
            unpack_rows(content, capture.id)
        except ValueError as error:  # once stored, they would make every commit fail
            raise TaskError(f"`analyse` gave no rows of the capture: {error}") from error
        self.objects.put(get_rows_name(task), content)
        if self.state.advance(task.id, self.holder, "analysed"):
            self._waiting += 1
            if self._waiting >= MAX_IN_BATCH:
                self._full.set()

    def _done(self, task: TaskRecord, work: EngineTask) -> bytes:
        future = self.engine.submit(work)
        while not wait([future], self.lease_s / 3).done:
            self.state.renew(task.id, self.holder, self.lease_s)
        return future.result()

    def _build_engine_task(
        self, record: CaptureRecord, task: TaskName, /, **arguments: str | int
    ) -> EngineTask:
        """Returns an engine task on all files of a capture, wherever they are stored."""
        return EngineTask(task, tuple(self._list_task_files(record)), arguments, self.task_s)

    def _list_task_files(self, capture: CaptureRecord, directory: str = "") -> Iterator[TaskFile]:
        for file in capture.files:
            address = self.objects.readable_at(
                f"{get_capture_directory(capture)}/{file.name}", ADDRESS_LIFETIME_S
            )
            if address is None:
                raise TaskError(f"{file.name} is no longer in the store", final=True)
            yield TaskFile(
                f"{directory}/{file.name}" if directory else file.name,
                file.size,
                file.sha256,
                address,
            )

    def _work_loop(self) -> None:
        while not self._stop.is_set():
            try:
                if not self.work():
                    self._more.wait(_POLL_S)
                    self._more.clear()
            except TraceloomError as error:  # noqa: PERF203  (of the state)
                _log.warning("no task can be taken: %s", error)
                self._stop.wait(_ERROR_PAUSE_S)
            except Exception:  # noqa: BLE001  (one defect must not stop all work: it is logged)
                _log.exception("a task could not be worked on")
                self._stop.wait(_ERROR_PAUSE_S)

    def _commit_loop(self) -> None:
        while not self._stop.is_set():
            self._full.wait(self.commit_s)
            self._full.clear()
            self._waiting = 0
            try:
                minutes, max_count = time.monotonic() >= self._next_usage_commit_s, 0
                with self._writing:
                    if self.leads and self._reconciled != self.term:
                        self.reconcile()
                    while (
                        self.leads
                        and not self._stop.is_set()
                        and self.state.has_rows_to_commit(minutes=minutes)
                    ):
                        count = self.commit(minutes=minutes)
                        if not count:
                            break
                        self._settled_at = time.monotonic()
                        max_count = max(max_count, count)
                    self._writer.rest()
                self._settled_at = time.monotonic()
                if minutes and self.leads:
                    rounds = _ROUNDS_WHEN_MANY if max_count > _MANY else _ROUNDS
                    self._next_usage_commit_s = time.monotonic() + rounds * self.commit_s
                if self.leads and not self._stop.is_set():
                    self.compact(nightly=True)
            except TraceloomError as error:
                self.commit_error = str(error)
                _log.warning("rows could not be committed: %s", error)
                self._stop.wait(_ERROR_PAUSE_S)
            except Exception as error:  # noqa: BLE001  (as above)
                self.commit_error = str(error)
                _log.exception("rows could not be committed")
                self._stop.wait(_ERROR_PAUSE_S)

    def _lead_loop(self) -> None:
        while not self._stop.is_set():
            try:
                self.lead()
                self.state_answers = True
            except TraceloomError as error:  # it leads until its lease expires
                self.state_answers = False
                self._reconciled = ""  # another database may answer next
                _log.warning("%s", error)
            self._stop.wait(self.lease_s / 3)
