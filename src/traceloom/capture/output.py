"""What one process leaves behind: its traces, its tables and its part of `capture.json`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from traceloom.capture import distributed, environment, manifest, memory, writing
from traceloom.capture.main_thread import is_child_of_multiprocessing
from traceloom.capture.memory import AllocatorHistory, count_live_bytes
from traceloom.capture.settings import WARM_UP_STEPS, Settings, print_once
from traceloom.capture.steps import Mark, StepClock, StepLog

if TYPE_CHECKING:
    from traceloom.capture.kineto import GraphStepRecorder
    from traceloom.capture.recorder import RecordedWindow

# Longer tables are put into a file of their own.
INLINE_ROWS = 10_000
_OPERATOR = b'"cat": "cpu_op"'
_PIECE = 1 << 24


class FallbackTrace(NamedTuple):
    """A trace that is exported, in case nothing better follows."""

    path: Path
    whole: bool
    operators: int


class CaptureOutput:
    """Writes the files of one process into the capture directory."""

    def __init__(self, settings: Settings, log: StepLog, clock: StepClock) -> None:
        self._settings = settings
        self._log = log
        self._clock = clock
        self._writer = writing.BackgroundWriter()
        self._created_ns = time.time_ns()
        self._stem: str | None = None
        self._window: dict[str, Any] | None = None
        self._graph: dict[str, Any] | None = None
        self._graph_table: dict[str, Any] | None = None
        self._collectives: dict[str, Any] | None = None
        self._thread_cpu: dict[str, list[int]] | None = None
        self._shapes = bool(settings.shapes)
        self._census: dict[str, list[Any]] | None = None
        self._last_census: dict[str, list[Any]] | None = None
        self._out_of_memory: dict[str, str] | None = None
        self._allocators: list[dict[str, Any]] | None = None
        self._notices: list[dict[str, str]] = []
        self._place: tuple[int | None, int | None, int | None] = (None, None, None)
        self._groups: list[dict[str, Any]] = []
        self._job: str | None = None
        self.history = AllocatorHistory()
        self.directory = Path(settings.directory)
        self._places = writing.CaptureFolders(self.directory)
        self._holds = 0
        self._used_torch = False

    @property
    def busy(self) -> bool:
        """Whether files are written just now."""
        return self._writer.busy

    @property
    def empty(self) -> bool:
        """Whether this process has nothing to write."""
        return self._window is None and self._graph is None and self._out_of_memory is None

    @property
    def moved(self) -> bool:
        """Whether a part of it lies elsewhere, because the directory took no more."""
        return any(notice["slug"] == "capture-moved" for notice in self._notices)

    def rest(self) -> None:
        """Write what there is to be written, and have no thread until there is more."""
        self._writer.rest()

    def look_around(self) -> None:
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
            self.look_around()
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

    def hold(self, window: RecordedWindow) -> FallbackTrace | None:
        """Export what was recorded, without a name in the capture yet; None where it could not be
        written at all.
        """
        notes = self.directory / writing.NOTES
        folder = self._places.for_torch(window.end_ns - window.start_ns)
        if folder == self.directory:
            with contextlib.suppress(OSError):
                notes.mkdir(parents=True, exist_ok=True)
                folder = notes
        self._holds += 1
        plain = folder / f"{os.getpid()}-{self._holds}.kineto.json"
        complete = self._export(plain, window.kineto.save)
        if not plain.exists():
            return None
        operators, rest = 0, b""
        with plain.open("rb") as file:
            while piece := file.read(_PIECE):
                text = rest + piece
                operators += text.count(_OPERATOR)
                rest = text[-len(_OPERATOR) + 1 :]
        return FallbackTrace(plain, complete, operators)

    def keep(self, window: RecordedWindow, *, used_torch: bool) -> None:
        """Write a recorded window: exported now if it is not yet, compressed beside the steps."""
        self._used_torch = used_torch
        self.look_around()
        steps = max(0, window.end_step - window.first_step)
        held = window.held
        if not used_torch:
            # Without rank and steps, where others have recorded theirs, it has only started them;
            # one of several workers has not, and whether these are the job is known at the end.
            notes = self.directory / writing.NOTES
            others = notes.is_dir() and any(
                path.name.startswith(("rank", "pid")) for path in notes.iterdir()
            )
            has_started = others and not is_child_of_multiprocessing()
            is_bystander = self._place[0] is None and self._log.number == 0 and has_started
            if is_bystander or (
                held is not None and held.whole and not steps and not held.operators
            ):
                if held is not None:
                    held.path.unlink(missing_ok=True)
                return
        self._writer.wait()  # an earlier attempt may still be on its way into the same file
        if held is not None:
            plain = self._named(held.path, "kineto.json")
        else:
            plain = (
                self._places.for_torch(window.end_ns - window.start_ns)
                / f"{self.stem()}.kineto.json"
            )
            self._export(plain, window.kineto.save)
        if not plain.exists():
            return
        self._window = {
            "file": plain.name,
            "kind": window.kind,
            "first_step": window.first_step if steps else None,
            "step_count": steps,
            "start_ns": window.start_ns
            if steps
            else _read_first_operator_ns(plain) or window.start_ns,
            "end_ns": window.end_ns,
        }
        if window.kind == "early" and self._settings.stacks:
            message = (
                "the run ended before the window began; what was recorded until then has no stacks"
            )
            self._notices.append({"slug": "no-early-stacks", "message": message})
        self._collectives, self._census, self._last_census = (
            window.collectives,
            window.census,
            window.last_census,
        )
        self._thread_cpu, self._shapes = window.thread_cpu, window.shapes
        self._allocators = memory.describe_memory() if self._settings.memory else None
        if self._out_of_memory is None:  # else it is written, as it was at that instant
            self._memory_snapshot()
        table = self._window
        self._writer.submit(lambda: self._compress(table, "file", plain))
        self._writer.submit(lambda: self._publish("running"))

    def keep_before(self, held: FallbackTrace) -> None:
        """Write what came before the window, in a file of its own; it counts for nothing."""
        if self._window is None or not held.operators:
            held.path.unlink(missing_ok=True)
            return
        self._writer.wait()
        plain = self._named(held.path, "before.kineto.json")
        table = self._window["before"] = {"file": plain.name, "operators": held.operators}
        self._writer.submit(lambda: self._compress(table, "file", plain))

    def keep_graph(self, graph: GraphStepRecorder, step: int) -> None:
        """Write the graph step."""
        self._writer.wait()
        host = graph.host_path
        plain = host.with_name(f"{self.stem()}.graph.kineto.json")
        if not self._export(plain, graph.save):
            plain.unlink(missing_ok=True)
            host.unlink(missing_ok=True)
            return
        table = self._graph = {"step": step, "file": plain.name, "host_file": host.name}
        self._writer.submit(lambda: self._compress(table, "host_file", host))
        if self._settings.sources and "torch._inductor" in sys.modules:  # the program compiles
            self._writer.submit(lambda: self._copy_sources(table, plain))
        self._writer.submit(lambda: self._compress(table, "file", plain))
        self._writer.submit(lambda: self._publish("running"))

    def keep_out_of_memory(self, error: BaseException, steps: int) -> None:
        """Write what was alive when memory ran out."""
        path = self._places.choose(1_000_000) / f"{self.stem()}.oom.json"
        memory.write(path, error, steps)
        self._out_of_memory = {"file": path.name}
        self._memory_snapshot()
        requested = memory.parse_requested_bytes(error)
        amount = "" if requested is None else f" when {requested / 1e6:.4g} MB were asked for"
        print_once(
            "out-of-memory", f"memory ran out{amount}; see: traceloom memory {self._settings.shown}"
        )

    def forget(self) -> None:
        """The numbers of the steps begin anew: what was kept has lost its place."""
        if self.empty:
            return
        self._writer.wait()
        for table, keys in ((self._window, ("file",)), (self._graph, ("file", "host_file"))):
            for key in keys:
                if table is not None:
                    (self.directory / table[key]).unlink(missing_ok=True)
        for name in self._graph.get("sources", []) if self._graph is not None else []:
            manifest.remove(self.directory, name)
        self._window = self._graph = self._collectives = None

    def finish(self, reason: str, *, used_torch: bool, began: bool) -> None:
        """Wait for the files, then write this process's part and merge; `began`: whether anything
        was ever recorded.
        """
        self._writer.wait()
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

    def _export(self, plain: Path, save: Callable[[Path], None]) -> bool:
        """Let PyTorch write a file; False where it is cut.

        What there is of it stays: readers keep whole events.
        """
        try:
            save(plain)
        except OSError as error:
            for half in plain.parent.glob(f"{plain.name}*.tmp"):
                half.replace(plain)
            message = f"`{plain}` could not be written to its end: {writing.describe_write_error(error, plain.parent)}"
            print_once("disk-full", message)
            self._notices.append({"slug": "disk-full", "message": message})
            return False
        return True

    def _compress(self, table: dict[str, Any], key: str, plain: Path) -> None:
        path = self._places.compress(plain)
        table[key] = path.name if path.parent == self.directory else str(path)
        if path.parent != self.directory:
            self._notices.append(
                {"slug": "capture-moved", "message": f"{path.name} is in {path.parent}"}
            )

    def _copy_sources(self, table: dict[str, Any], plain: Path) -> None:
        """Put the sources of compiled kernels beside the host trace, wherever that is."""
        folder = (
            self.directory / table["host_file"]
        ).parent / f"{self.stem()}{manifest.SOURCES_SUFFIX}"
        try:
            copied = manifest.copy_sources(plain, folder)
        except OSError as error:
            self._notices.append(
                {
                    "slug": "sources-left-out",
                    "message": writing.describe_write_error(error, folder.parent),
                }
            )
            return
        table["sources"] = [f"{folder.name}/{name}" for name in copied.files]
        if copied.left_out:
            (name, why), count = copied.left_out[0], len(copied.left_out)
            message = (
                f"sources of compiled kernels that were not copied: {count} (first `{name}`: {why})"
            )
            self._notices.append({"slug": "sources-left-out", "message": message})

    def _named(self, path: Path, suffix: str) -> Path:
        """Give a file that is held back its name in the capture, or beside it where the capture
        takes no more.
        """
        folder = self.directory if path.parent == self.directory / writing.NOTES else path.parent
        return path.replace(folder / f"{self.stem()}.{suffix}")

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
        self.look_around()
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
        if self._graph is not None:
            self._graph["duration_ns"] = graph_ns[-1] if graph_ns else None
        return {
            "rank": rank,
            "world_size": size,
            "local_rank": local,
            "job": self._job,
            "name": self.stem(),
            **environment.describe(),
            "settings": self._settings.to_dict(shapes=self._shapes),
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
            "collectives": self._table("collectives", self._collectives, "start_ns"),
            "thread_cpu": self._table("thread_cpu", self._thread_cpu, "thread"),
            "live_bytes_at_start": None if self._census is None else count_live_bytes(self._census),
            "live_storages_at_start": self._census,
            "live_storages_at_end": self._last_census,
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


def _read_first_operator_ns(path: Path) -> int | None:
    """When the first operator of a trace in plain JSON began (PyTorch sorts them), in Unix
    nanoseconds.
    """
    with path.open("rb") as file:
        head = file.read(_PIECE)
    base = re.search(rb'"baseTimeNanoseconds": (\d+)', head)
    first = re.search(_OPERATOR + rb'[^{}]*"ts": (\d+)\.(\d{3})', head)
    if base is None or first is None:
        return None
    return int(base[1]) + int(first[1]) * 1000 + int(first[2])
