"""What a process leaves behind: its traces, and the description of host and versions."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from traceloom.capture import distributed, manifest, memory, writing
from traceloom.capture.cut import TracePart, cut_trace
from traceloom.capture.exits import fork_quietly, is_child_of_multiprocessing
from traceloom.capture.memory import AllocatorHistory, count_live_bytes
from traceloom.capture.settings import WARM_UP_STEPS, Settings, print_once
from traceloom.capture.steps import Mark, StepClock, StepLog

if TYPE_CHECKING:
    from traceloom.capture.host_trace import HostTrace
    from traceloom.capture.recorder import RecordedWindow


def describe() -> dict[str, Any]:
    """Host, processor, devices and versions of this process. Never initialises a device."""
    processor = None
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,  # noqa: PTH123
    ):
        processor = next(
            (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), None
        )
    if processor is None:  # not Linux, or no processor of a PC; this may start a process
        processor = platform.processor() or None
    version = torch.version
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": getattr(version, "cuda", None),
        "hip": getattr(version, "hip", None),
        "xpu": getattr(version, "xpu", None),
    }
    nccl = getattr(torch.cuda, "nccl", None)
    if version.cuda and nccl is not None and torch.distributed.is_available():
        versions["nccl"] = ".".join(map(str, nccl.version()))
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "command": list(getattr(sys, "orig_argv", sys.argv)),
        "platform": platform.platform(),
        "processor": processor,
        "logical_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": describe_devices(),
        "versions": {name: str(value) for name, value in versions.items() if value},
    }


def describe_devices() -> list[dict[str, Any]]:
    """The accelerators this process uses; empty where none was initialised."""
    described = []
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is None or not getattr(backend, "is_initialized", lambda: False)():
            continue
        for index in range(backend.device_count()):
            properties = backend.get_device_properties(index)
            described.append(
                {
                    "device": index,
                    "kind": kind,
                    "name": str(properties.name),
                    "memory_bytes": int(properties.total_memory),
                    "multiprocessors": getattr(properties, "multi_processor_count", None),
                    "current": index == backend.current_device(),
                }
            )
    return described


# Longer tables are put into a file of their own.
INLINE_ROWS = 10_000
_BYTES_PER_EVENT = 700  # of a trace in plain JSON
_STUCK_SECONDS = 10.0  # without running: it waits for a lock that was held when it was made
_LOOKUP_COLUMNS = {"groups", "kinds", "types"}  # of columns, in a table of calls
_FORK_SECONDS = 5.0


class CaptureOutput:
    """Writes the files of one process into the capture directory."""

    def __init__(self, settings: Settings, log: StepLog, clock: StepClock) -> None:
        self._settings = settings
        self._log = log
        self._clock = clock
        self._created_ns = time.time_ns()
        self._stem: str | None = None
        self._window: dict[str, Any] | None = None
        self._graph: dict[str, Any] | None = None
        self._recorded: RecordedWindow | None = None
        self._out_of_memory: dict[str, str] | None = None
        self._allocators: list[dict[str, Any]] | None = None
        self._notices: list[dict[str, str]] = []
        self._place: tuple[int | None, int | None, int | None] = (None, None, None)
        self._groups: list[dict[str, Any]] = []
        self._job: str | None = None
        self.history = AllocatorHistory()
        self.directory = Path(settings.directory)
        self._places = writing.CaptureFolders(self.directory, self.note)
        self._used_torch = False
        self._writer_process = 0
        self._pid = os.getpid()
        self._host_trace: HostTrace | None = None
        self.kernel_files: set[str] = set()  # of compiled kernels that were launched

    @property
    def has_writer(self) -> bool:
        """Whether a fork writes, or has written, what was recorded."""
        return self._writer_process > 0

    @property
    def empty(self) -> bool:
        return self._window is None and self._graph is None and self._out_of_memory is None

    @property
    def moved(self) -> bool:
        """Whether a part of it lies elsewhere, because the directory took no more."""
        return any(notice["slug"] == "capture-moved" for notice in self._notices)

    def refresh_job_info(self) -> None:
        """Note the place in the job and the groups; at its end a program may have left them
        already.
        """
        self._place = (
            distributed.read_rank_and_world()
            if distributed.get_distributed() or self._place[0] is None
            else self._place
        )
        self._groups = distributed.describe_groups() or self._groups
        self._job = distributed.identify_job() or self._job

    def stem(self) -> str:
        """The name in front of all files of this process, taken when first needed."""
        if self._stem is None:
            self.refresh_job_info()
            rank = self._place[0]
            notes = self.directory / writing.NOTES
            try:
                notes.mkdir(parents=True, exist_ok=True)
                self._stem = writing.reserve_name(
                    self.directory, rank, is_child=distributed.is_child()
                )
            except OSError:
                self._stem = (
                    f"rank{rank or 0}"  # nothing can be written there; the files will go elsewhere
                )
        return self._stem

    def host_trace_path(self) -> Path:
        """Where PyTorch's observer writes during the graph step."""
        return self._places.for_torch(0) / f"{self.stem()}.host.json"

    def note(self, slug: str, message: str) -> None:
        """Keeps a notice about this recording, and says it once."""
        if all(notice["slug"] != slug for notice in self._notices):
            print_once(slug, message)
            self._notices.append({"slug": slug, "message": message})

    def prepare(self, window: RecordedWindow) -> None:
        """Notes what is known of a window whose session is paused."""
        self._recorded = window
        window.collectives = _cut_columns(window.collectives, window.start_ns, window.end_ns)
        self._allocators = memory.describe_memory() if self._settings.memory else None

    def save_in_fork(self, window: RecordedWindow, *, used_torch: bool) -> None:
        """Has a fork end the session and write it, while the program goes on.

        The fork is the child of a child that has ended, so that the program never has to wait for
        it; nobody is told of it who handles the ends of children.
        """
        if not used_torch or signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
            return
        self.stem()
        self._used_torch = used_torch
        read, write = os.pipe()
        child = fork_quietly()
        if child == 0:
            try:
                grandchild = fork_quietly()
                if grandchild > 0:
                    os.write(write, b"%d" % grandchild)
                elif grandchild == 0:
                    time.sleep(0)
                    os.write(write, b"+")
                    self._work_in_fork(window)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.close(write)
        if child > 0:
            received, deadline = b"", time.monotonic() + _FORK_SECONDS
            while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                received += (more := os.read(read, 32))
                if not more or (b"+" in received and len(received) > 1):
                    break
            number = int(received.strip(b"+") or b"0")
            if b"+" in received:
                self._writer_process = number
            else:  # they hang: a thread asked for Python in the very instant of a fork
                for process in (child, number):
                    if process:
                        os.kill(process, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(child, 0)
        os.close(read)

    def _work_in_fork(self, window: RecordedWindow) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        with contextlib.suppress(OSError):
            os.nice(5)
        busy = self._result_path().with_suffix(".writing")
        busy.write_text(str(os.getpid()), encoding="ascii")
        self.keep(window, used_torch=self._used_torch)
        result = {"window": self._window, "graph": self._graph, "notices": self._notices}
        writing.write_json(self._result_path(), result)
        busy.unlink()

    def _result_path(self) -> Path:
        return self.directory / writing.NOTES / f"{self.stem()}.written"

    def collect_forked_result(self) -> bool:
        """Takes over what a fork has written, and waits for it; False where there is nothing whole."""
        process, self._writer_process = self._writer_process, 0
        if not process:
            return False
        path = self._result_path()
        ran, since = -1, time.monotonic()
        while not path.exists():
            now_ran = _read_run_ticks(process)
            if now_ran is None:
                break
            if now_ran > ran:
                ran, since = now_ran, time.monotonic()
            elif time.monotonic() - since > _STUCK_SECONDS:
                os.kill(process, signal.SIGKILL)
                break
            time.sleep(0.01)
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        self._window, self._graph = result["window"], result["graph"]
        for notice in result["notices"]:  # the fork has said them to nobody
            if notice not in self._notices:
                print_once(notice["slug"], notice["message"])
        self._notices = result["notices"] + [
            notice for notice in self._notices if notice not in result["notices"]
        ]
        return True

    def keep(self, window: RecordedWindow, *, used_torch: bool) -> None:
        """Ends the session, writes its trace and cuts the window out of it."""
        self._used_torch = used_torch
        self.refresh_job_info()
        steps = max(0, window.end_step - window.first_step)
        expected = _BYTES_PER_EVENT * window.events
        window.session.end()
        if not used_torch and self._is_bystander(steps):
            return
        try:
            folder = self._places.for_torch(expected)
        except OSError as error:
            self.note("disk-full", f"nothing of the trace is written: {error}")
            return
        notes = self.directory / writing.NOTES
        if folder == self.directory:
            with contextlib.suppress(OSError):
                notes.mkdir(parents=True, exist_ok=True)
                folder = notes
        plain = folder / f"{os.getpid()}.raw.json"
        try:
            window.session.save(plain)
        except OSError as error:
            for half in plain.parent.glob(f"{plain.name}*"):
                half.unlink(missing_ok=True)
            why = writing.describe_write_error(error, plain.parent)
            self.note("disk-full", f"`{plain}` could not be written to its end: {why}")
            return
        part = TracePart(
            start_ns=window.start_ns if window.kind == "steps" else 0,
            end_ns=window.end_ns,
            steps=tuple(window.boundaries),
            thread=window.thread,
            process=self._pid,
            has_device=window.session.uses_device,
        )
        try:
            target, operators, first_ns = self._write_part(plain, "kineto.json.gz", part)
            if self._host_trace is not None:
                self._keep_graph(self._host_trace, plain, part)
        except OSError as error:
            self.note("disk-full", f"the trace could not be written: {error.strerror or error}")
            return
        finally:
            with contextlib.suppress(OSError):
                plain.unlink(missing_ok=True)
        if not used_torch and not steps and not operators:
            target.unlink(missing_ok=True)
            return
        self._window = {
            "file": self._name_of(target),
            "kind": window.kind,
            "first_step": window.first_step if steps else None,
            "step_count": steps,
            "start_ns": window.start_ns if steps else first_ns or window.start_ns,
            "end_ns": window.end_ns,
        }
        if self._out_of_memory is None:  # else it is written, as it was at that instant
            self._memory_snapshot()
        self._publish("running")

    def _is_bystander(self, steps: int) -> bool:
        """Whether this process, which called no module, has only started those that are recorded.

        One of several workers has not, and whether these are the job is known at the end.
        """
        notes = self.directory / writing.NOTES
        others = notes.is_dir() and any(
            path.name.startswith(("rank", "pid")) for path in notes.iterdir()
        )
        has_started = others and not is_child_of_multiprocessing()
        return bool(self._place[0] is None and not steps and has_started)

    def _write_part(
        self, plain: Path, suffix: str, part: TracePart
    ) -> tuple[Path, int, int | None]:
        """Cuts a part out of the session's trace; its file, operators, and when the first began.

        Raises:
            OSError: It could not be written anywhere.
        """
        within = plain.parent == self.directory / writing.NOTES
        target, (operators, first_ns) = self._places.write_compressed(
            f"{self.stem()}.{suffix}",
            self.directory if within else plain.parent,
            lambda sink: cut_trace(plain, sink, part),
        )
        return target, operators, first_ns

    def set_host_trace(self, graph: HostTrace) -> None:
        """Notes the host trace of the graph step, which goes with the session's trace."""
        self._host_trace = graph

    def _keep_graph(self, graph: HostTrace, plain: Path, part: TracePart) -> None:
        """Writes the graph step: its part of the session's trace, and the host trace."""
        try:
            graph.check()
        except OSError as error:
            self.note("no-graph-step", f"the graph step is left out: {error.strerror or error}")
            graph.path.unlink(missing_ok=True)
            return
        part = replace(
            part,
            start_ns=graph.start_ns,
            end_ns=graph.end_ns,
            steps=(),  # its marks are in it
        )
        target, _, _ = self._write_part(plain, "graph.kineto.json.gz", part)
        host = self._places.compress(graph.path)
        table = self._graph = {
            "step": graph.step,
            "file": self._name_of(target),
            "host_file": self._name_of(host),
        }
        if self._settings.sources and "torch._inductor" in sys.modules:  # the program compiles
            self._copy_sources(table, plain)

    def _name_of(self, path: Path) -> str:
        return path.name if path.parent == self.directory else str(path)

    def keep_out_of_memory(self, error: BaseException, steps: int) -> None:
        path = self._places.choose(1_000_000) / f"{self.stem()}.oom.json"
        memory.write(path, error, steps)
        self._out_of_memory = {"file": path.name}
        self._memory_snapshot()
        requested = memory.parse_requested_bytes(error)
        amount = "" if requested is None else f" when {requested / 1e6:.4g} MB were asked for"
        print_once(
            "out-of-memory", f"memory ran out{amount}; see: traceloom memory {self._settings.shown}"
        )

    def finish(self, reason: str, *, used_torch: bool, began: bool) -> None:
        """Wait for the files, then write this process's part and merge; `began`: whether anything
        was ever recorded.
        """
        if not self.empty:
            self._publish(reason)
        self._places.leave()
        notes = self.directory / writing.NOTES
        if (self.empty or self.moved) and notes.is_dir():
            steps = self._log.number
            end = {
                "steps": steps,
                "used_torch": used_torch,
                "wrote_elsewhere": self.moved,
                "began": began,
            }
            with contextlib.suppress(OSError):  # only the diagnosis would have used it
                (notes / f"{os.getpid()}.end").write_text(json.dumps(end), encoding="utf-8")

    # ---- parts

    def _copy_sources(self, table: dict[str, Any], plain: Path) -> None:
        """Put the sources of compiled kernels beside the host trace, wherever that is."""
        folder = (
            self.directory / table["host_file"]
        ).parent / f"{self.stem()}{manifest.SOURCES_SUFFIX}"
        try:
            copied = manifest.copy_sources(plain, folder, self.kernel_files)
        except OSError as error:
            self._notices.append(
                {
                    "slug": "sources-left-out",
                    "message": writing.describe_write_error(error, folder.parent),
                }
            )
            return
        table["sources"] = [f"{folder.name}/{name}" for name in copied.files]
        if copied.omitted:
            (name, why), count = copied.omitted[0], len(copied.omitted)
            message = (
                f"sources of compiled kernels that were not copied: {count} (first `{name}`: {why})"
            )
            self._notices.append({"slug": "sources-left-out", "message": message})

    def _memory_snapshot(self) -> None:
        """On GPUs the allocator's own history goes along with `--memory`."""
        if not self._settings.memory:
            return
        if self.history.problem:
            self._notices.append({"slug": "no-memory-history", "message": self.history.problem})
        try:
            self.history.save(self.directory / f"{self.stem()}.memory.pickle")
        except (OSError, RuntimeError) as error:
            message = f"the allocator's snapshot could not be written: {error}"
            print_once("no-memory-snapshot", message)
            self._notices.append({"slug": "no-memory-snapshot", "message": message})

    def _publish(self, reason: str) -> None:
        """Write this process's part, and merge all parts."""
        part = manifest.document([self.part(reason)], {})
        name = f"{self.stem()}.capture.json"
        try:
            writing.write_json(self.directory / name, part)
            manifest.merge(self.directory)
        except OSError as error:
            path = self._places.refuge() / name
            writing.write_json(path, part)
            where = f"what was recorded is in `{path.parent}`"
            why = writing.describe_write_error(error, self.directory)
            print_once("capture-moved", f"`{self.directory}` takes no more data ({why}); {where}")
            self._notices.append(
                {"slug": "capture-moved", "message": f"{name} is in {path.parent}"}
            )

    def part(self, reason: str) -> dict[str, Any]:
        """This process's entry of `capture.json`."""
        self.refresh_job_info()
        rank, size, local = self._place
        graph_ns = self._log.durations(self._log.numbers(Mark.GRAPH))
        # a worker of `multiprocessing` that called no module: of interest only where nobody else
        # was recorded
        incidental = (
            rank is None
            and not self._used_torch
            and not self._log.number
            and is_child_of_multiprocessing()
        )
        if rank is None:
            rank, size = 0, 1
        recorded = vars(self._recorded) if self._recorded is not None else {}
        census = recorded.get("census")
        if self._graph is not None:
            self._graph["duration_ns"] = graph_ns[-1] if graph_ns else None
        return {
            "rank": rank,
            "world_size": size,
            "local_rank": local,
            "job": self._job,
            "name": self.stem(),
            **describe(),
            "settings": self._settings.to_dict(),
            "groups": self._groups,
            "created_ns": self._created_ns,
            "written_ns": time.time_ns(),
            "ended": reason,
            "replay_of": self._settings.replay_of or None,
            "incidental": incidental,
            "window": self._window,
            "graph_step": self._graph,
            "step_source": self._clock.source,
            "steps": self._table("steps", self._log.to_dict(), "start_ns"),
            "collectives": self._table("collectives", recorded.get("collectives"), "start_ns"),
            "thread_cpu": self._table("thread_cpu", recorded.get("thread_cpu"), "thread"),
            "stack_samples": {
                "file": None,
                "reason": "no `traceloom record` has looked from outside",
            },
            "live_bytes_at_start": None if census is None else count_live_bytes(census),
            "live_storages_at_start": census,
            "live_storages_at_end": recorded.get("last_census"),
            "allocators_at_end": self._allocators,
            "out_of_memory": self._out_of_memory,
            "overhead": manifest.compute_overhead(self._log, WARM_UP_STEPS),
            "notices": self._notices,
        }

    def _table(
        self, name: str, columns: dict[str, Any] | None, length: str
    ) -> dict[str, Any] | None:
        """The columns themselves, or where they are when they are long; `length` is a column that
        counts the rows.
        """
        if columns is None or (rows := len(columns[length])) <= INLINE_ROWS:
            return columns
        path = self.directory / f"{self.stem()}.{name}.json"
        try:
            path.write_text(json.dumps(columns, separators=(",", ":")), encoding="utf-8")
        except OSError:
            return columns  # then they travel with the rest, wherever that can be written
        return {"file": self._places.compress(path).name, "rows": rows}


def _read_run_ticks(process: int) -> int | None:
    """How long a process has run; None where it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[11]) + int(fields[12])


def _cut_columns(
    columns: dict[str, Any] | None, start_ns: int, end_ns: int
) -> dict[str, Any] | None:
    """The rows of a table of calls that began within a span of time."""
    if columns is None:
        return None
    kept = [row for row, at in enumerate(columns["start_ns"]) if start_ns <= at < end_ns]
    return {
        name: values if name in _LOOKUP_COLUMNS else [values[row] for row in kept]
        for name, values in columns.items()
    }
