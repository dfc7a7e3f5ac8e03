"""The way of a capture: `received → checked → analysed → committed`.

Threads take tasks under leases, have an engine work on them, and keep what it gives; one committer for all services
that share a state puts rows of many captures into the tables at once. Each step can be done again: files are written
under names that say what they hold, and a batch has a number that the tables note. So a service that is killed loses
and doubles nothing: tasks it held are taken again when their leases end, and its batch is committed by whoever leads.
"""

from __future__ import annotations

import hashlib
import io
import logging
import secrets
import shutil
import tempfile
import threading
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import polars as pl

from traceloom import __version__
from traceloom.collect.executors import Engine, EngineTask, TaskError
from traceloom.collect.job_rows import commit_jobs, said_by_captures
from traceloom.collect.usage import commit_usage
from traceloom.errors import TraceloomError
from traceloom.store.objects import Objects
from traceloom.store.schemas import day_of
from traceloom.store.state import CaptureRecord, State, TaskRecord
from traceloom.store.tables import Tables

MOST_IN_BATCH = 64
COMMIT_S = 5.0
LEASE_S = 30.0
TASK_S = 1800.0
"""How long a task may take."""

_DAY_NS = 86_400 * 10**9
_NIGHT_NS = 2 * 3_600 * 10**9  # after midnight in UTC, when hosts have sent the last minutes of the day
_COMPACTED = "compacted"  # the number of the day on which the tables were compacted last
_POLL_S = 0.5  # between looks for a task, where there was none
_TROUBLE_S = 5.0  # before the next try, where the state or a store does not answer

_log = logging.getLogger(__name__)


def folder_of(capture: CaptureRecord) -> str:
    """Where the files of a capture are kept."""
    return f"captures/{capture.day}/{capture.id}"


class Pipeline:
    """Works on tasks until it is stopped.

    Args:
        state: Where tasks stand.
        objects: Where files are.
        tables: Where rows go.
        engine: What works.
        lease_s: For how long a task is taken at a time; after that others take it over from a service that died.
        commit_s: How long rows wait for others to be committed with them.
        task_s: How long a task may take.
        temporary: Where captures are unpacked; None: the system's temporary directory.
        clock: Now, in ns since the epoch.
    """

    def __init__(
        self, state: State, objects: Objects, tables: Tables, engine: Engine, *, lease_s: float = LEASE_S,
        commit_s: float = COMMIT_S, task_s: float = TASK_S, temporary: Path | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self.state, self.objects, self.tables, self.engine = state, objects, tables, engine
        self.lease_s, self.commit_s, self.task_s, self.temporary = lease_s, commit_s, task_s, temporary
        self.clock = clock
        self.holder = secrets.token_hex(8)
        self._writing = threading.Lock()  # of the tables: who writes is one
        self.leads = False
        self._stop = threading.Event()
        self._more = threading.Event()  # a task may be there
        self._full = threading.Event()  # a whole batch waits
        self._waiting = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to work, in threads."""
        loops = [self._lead_loop, self._commit_loop, *[self._work_loop] * self.engine.slots]
        self._threads = [threading.Thread(target=loop, name="traceloom-pipeline") for loop in loops]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End: tasks that run are left to others."""
        self._stop.set()
        self._more.set()
        self._full.set()
        self.engine.close()
        for thread in self._threads:
            thread.join()
        try:
            self.state.resign(self.holder)
        except TraceloomError as error:  # the lease ends by itself
            _log.warning("%s", error)

    def look(self) -> None:
        """A task was added: do not wait to look for it."""
        self._more.set()

    def work(self) -> bool:
        """Take a task and bring it as far as it goes; False where none waits."""
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
                self.state.fail(task.id, self.holder, str(error), final=error.final)
        except (TraceloomError, OSError) as error:  # of the store or the disk, not of the capture
            _log.warning("%s: %s", task.id, error)
            self.state.give_back(task.id, self.holder, _TROUBLE_S)
        return True

    def commit(self) -> int:
        """Put the rows of a batch into the tables; how many captures were in it. For who leads alone."""
        batch = self.state.open_batch(MOST_IN_BATCH)
        if batch is None:
            return 0
        frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        for task in batch.tasks:
            with zipfile.ZipFile(io.BytesIO(b"".join(self.objects.chunks(_rows_of(task))))) as whole:
                for name in whole.namelist():
                    frames[name.removesuffix(".parquet")].append(pl.read_parquet(whole.read(name)))
        replaced = [task.capture for task in batch.tasks] if batch.again else []
        rows = {name: pl.concat(parts) for name, parts in frames.items()}
        for (job, start_ns), facts in said_by_captures(rows["captures"]).items():
            self.state.say_of_jobs({job: facts}, start_ns)
        self.tables.commit(f"captures {self.state.identity}", batch.number, rows, replaced)
        self.state.close_batch(batch.number)
        for task in batch.tasks:
            self.objects.delete(_rows_of(task))
        return len(batch.tasks)

    def compact(self, by_night: bool = False) -> bool:
        """Do what is to be done to the tables once a day; False where it is not time. For who leads alone.

        Args:
            by_night: Only once a day, and only from 02:00 in UTC on.
        """
        days, rest = divmod(self.clock(), _DAY_NS)
        if by_night and (rest < _NIGHT_NS or self.state.number(_COMPACTED) >= days):
            return False
        with self._writing:
            self.tables.compact(day_of(days * _DAY_NS))
        self.state.put_number(_COMPACTED, days)
        return True

    def rendered(self, capture: CaptureRecord, task: Literal["render", "render_timeline"]) -> str:
        """The name of the report of a capture, or of its timeline for Perfetto, which is made when first asked for.

        Raises:
            TaskError: It could not be rendered.
            TraceloomError: A store does not answer.
        """
        ending = "html" if task == "render" else "perfetto.json.gz"
        name = f"reports/{capture.day}/{capture.id}.{__version__}.{ending}"
        if self.objects.size(name) is None:
            with self._files(capture) as (folder, out):
                title = f"{capture.job} · {capture.id}" if capture.job else capture.id
                arguments = {"folder": str(folder), "out": str(out), "name": title}
                work = EngineTask(task, arguments, self.task_s)
                self.engine.submit(work).result()
                self.objects.put(name, out.read_bytes())
        return name

    def comparison(self, base: CaptureRecord, new: CaptureRecord) -> str:
        """The name of the page of a capture against another one, which is made when it is first asked for.

        Raises:
            TaskError: They cannot be compared.
            TraceloomError: A store does not answer.
        """
        both = hashlib.sha256(f"{base.id} {new.id}".encode()).hexdigest()[:32]
        name = f"reports/{new.day}/{both}.{__version__}.html"
        if self.objects.size(name) is None:
            with self._files(base) as (old, _), self._files(new) as (folder, out):
                arguments = {
                    "base": str(old), "base_name": base.job or base.id, "new": str(folder),
                    "new_name": new.job or new.id, "out": str(out),
                }  # fmt: skip
                self.engine.submit(EngineTask("compare", arguments, self.task_s)).result()
                self.objects.put(name, out.read_bytes())
        return name

    def _through(self, task: TaskRecord, capture: CaptureRecord) -> None:
        with self._files(capture) as (folder, out):
            if task.state == "received":
                files = msgspec.to_builtins(capture.files)
                self._done(task, EngineTask("check", {"folder": str(folder), "files": files}, self.task_s))
                if not self.state.advance(task.id, self.holder, "checked"):
                    return  # somebody else has it
            arguments = {
                "folder": str(folder), "out": str(out), "capture": capture.id, "job": capture.job,
                "received_ns": capture.received_ns,
            }  # fmt: skip
            self._done(task, EngineTask("analyse", arguments, self.task_s))
            self.objects.put(_rows_of(task), out.read_bytes())
        if self.state.advance(task.id, self.holder, "analysed"):
            self._waiting += 1
            if self._waiting >= MOST_IN_BATCH:
                self._full.set()

    def _done(self, task: TaskRecord, work: EngineTask) -> None:
        """Have it done, and keep the task meanwhile."""
        future: Future[None] = self.engine.submit(work)
        while not wait([future], self.lease_s / 3).done:
            self.state.renew(task.id, self.holder, self.lease_s)
        future.result()

    @contextmanager
    def _files(self, capture: CaptureRecord) -> Iterator[tuple[Path, Path]]:
        """A folder with the files of a capture, and where a result can be written beside it."""
        home = Path(tempfile.mkdtemp(prefix="traceloom-", dir=self.temporary))
        try:
            for file in capture.files:
                name = f"{folder_of(capture)}/{file.name}"
                if self.objects.size(name) is None:
                    raise TaskError(f"{file.name} is no longer in the store", final=True)
                self.objects.fetch(name, home / "files" / file.name)
            yield home / "files", home / "result"
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _work_loop(self) -> None:
        while not self._stop.is_set():
            try:
                if not self.work():
                    self._more.wait(_POLL_S)
                    self._more.clear()
            except Exception:  # noqa: BLE001, PERF203  (one defect must not end all work: it is logged)
                _log.exception("a task could not be worked on")
                self._stop.wait(_TROUBLE_S)

    def _commit_loop(self) -> None:
        while not self._stop.is_set():
            self._full.wait(self.commit_s)
            self._full.clear()
            self._waiting = 0
            try:
                while self.leads and not self._stop.is_set() and self._commit_any():
                    pass
                if self.leads and not self._stop.is_set():
                    self.compact(by_night=True)
            except Exception:  # noqa: BLE001  (as above)
                _log.exception("rows could not be committed")
                self._stop.wait(_TROUBLE_S)

    def _commit_any(self) -> int:
        with self._writing:
            return self.commit() or commit_usage(self.state, self.tables) or commit_jobs(self.state, self.tables)

    def _lead_loop(self) -> None:
        while not self._stop.is_set():
            try:
                self.leads = self.state.lead("committer", self.holder, self.lease_s)
            except TraceloomError as error:
                self.leads = False
                _log.warning("%s", error)
            self._stop.wait(self.lease_s / 3)


def _rows_of(task: TaskRecord) -> str:
    return f"analysed/{task.id}.zip"
