"""`Session`: the traces of one run, the frames recorded with them, its steps, thread clocks and
memory snapshots.

`samples`: a stack that was seen at `time_ns` and, in consecutive samples, for `period_ns`; frames
from the outermost to the innermost, spelled as PyTorch's profiler does: `train.py(20): step`.
`thread` is the kernel's thread id.

`telemetry`: every value of every series, `labels` as JSON text with sorted keys; counters as raw
values, not as rates.

`allocations`: every block that an allocator allocated (bytes above 0) or freed (below), and the
allocator's own totals where it reports them; `device_name` is `cpu` or `cuda:0`.

Times are int64 nanoseconds, Unix time; rows are ordered by rank or host, then by series or thread,
then by time.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.errors import UsageError, broken, nearest
from traceloom.system import units
from traceloom.system.files import read_small
from traceloom.system.sanitize import sanitize
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import build_schema
from traceloom.trace.notice import Notice
from traceloom.trace.trace import Meta, Trace

SAMPLES_SCHEMA = build_schema(
    "rank process thread thread_name time_ns period_ns stack",
    {"process": pl.Int64, "thread": pl.Int64, "stack": pl.List(pl.String)},
)
TELEMETRY_SCHEMA = build_schema(
    "host time_ns metric labels value unit kind", {"labels": pl.String, "unit": pl.String}
)
ALLOCATIONS_SCHEMA = build_schema(
    "rank process thread time_ns address bytes device_name allocated_bytes reserved_bytes",
    {"process": pl.Int64, "thread": pl.Int64, "address": pl.UInt64},
)


def make_empty_samples() -> pl.DataFrame:
    return pl.DataFrame(schema=SAMPLES_SCHEMA)


def make_empty_telemetry() -> pl.DataFrame:
    return pl.DataFrame(schema=TELEMETRY_SCHEMA)


def make_empty_allocations() -> pl.DataFrame:
    return pl.DataFrame(schema=ALLOCATIONS_SCHEMA)


_MAX_HTML_ROWS = 20  # in a notebook's table of ranks


@dataclass(frozen=True)
class Session:
    """The traces of one run, by rank (then by start, where one rank has several windows).

    Attributes:
        traces: At least one. The ranks may have gaps and need not start at 0.
        name: The directory or file that the user gave.
        capture: The run's capture.json, where it was recorded by `traceloom record`.
        notices: Notices about the run as a whole; those of a rank are in its trace.
        samples: Stacks of its threads sampled from outside the process; often empty.
        telemetry: Metrics of its hosts and devices meanwhile; often empty.
        allocations: Allocations observed from outside the process; often empty. Those of a trace
            are in the trace.
    """

    traces: tuple[Trace, ...]
    name: str
    capture: dict[str, Any] | None = None
    notices: tuple[Notice, ...] = ()
    samples: pl.DataFrame = field(default_factory=make_empty_samples)
    telemetry: pl.DataFrame = field(default_factory=make_empty_telemetry)
    allocations: pl.DataFrame = field(default_factory=make_empty_allocations)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The ranks of `traces`, in their order (None where a trace does not say)."""
        return tuple(trace.rank for trace in self.traces)

    @cached_property
    def process_numbers(self) -> tuple[int, ...]:
        """The number of the process, from 0, of each trace: a process may have several windows.

        Traces at disjoint times that say one rank, or no rank and one process of one host, are
        windows of one process.
        """
        numbers: list[int] = []
        last_end_ns: dict[tuple[Any, ...], int] = {}
        known: dict[tuple[Any, ...], int] = {}
        for trace in self.traces:
            key: tuple[Any, ...] = (
                (trace.meta.host, trace.meta.process) if trace.rank is None else (trace.rank,)
            )
            is_window = key in known and None not in key[-1:] and trace.start_ns >= last_end_ns[key]
            number = known[key] if is_window else len(set(numbers))
            numbers.append(number)
            known[key], last_end_ns[key] = number, trace.end_ns
        return tuple(numbers)

    def process_of(self, trace: Trace) -> int:
        """The number of the process of one of the traces, see `process_numbers`."""
        index = next(index for index, each in enumerate(self.traces) if each is trace)
        return self.process_numbers[index]

    @property
    def world_size(self) -> int | None:
        """The number of ranks of the job, where a trace says; not the number of traces at hand."""
        return max(
            (t.meta.world_size for t in self.traces if t.meta.world_size is not None), default=None
        )

    @property
    def event_count(self) -> int:
        return sum(trace.events.height for trace in self.traces)

    @property
    def epoch_ns(self) -> int:
        """The earliest start of all traces, which report times are relative to."""
        return min(
            (int(trace.events["start_ns"][0]) for trace in self.traces if trace.events.height),
            default=0,
        )

    @property
    def recording_overhead_ratio(self) -> float | None:
        """Duration of recorded over unrecorded steps, the max over the ranks; None where
        unknown.
        """
        ratios = [_compute_step_ratio(trace.meta) for trace in self.traces]
        return max((ratio for ratio in ratios if ratio is not None), default=None)

    def of_rank(self, rank: int) -> Session:
        """Returns the session with only the windows of one rank."""
        return self.of_ranks((rank,))

    def of_ranks(self, ranks: tuple[int, ...]) -> Session:
        """Returns the session with only these ranks.

        Raises:
            UsageError: A rank is missing.
        """
        missing = [rank for rank in ranks if rank not in self.ranks]
        if missing:
            present = sorted({rank for rank in self.ranks if rank is not None})
            have = (
                f"it has {', '.join(map(str, present))}"
                if present
                else "its traces do not say their ranks"
            )
            raise UsageError(f"rank {missing[0]} is not in this run; {have}", slug="no-such-rank")
        traces = tuple(trace for trace in self.traces if trace.rank in ranks)
        is_selected = pl.col("rank").is_in(ranks)
        samples, allocations = (
            self.samples.filter(is_selected),
            self.allocations.filter(is_selected),
        )
        return replace(self, traces=traces, samples=samples, allocations=allocations)

    def all_notices(self) -> tuple[Notice, ...]:
        """Returns the run's notices, then those of every rank."""
        return self.notices + tuple(n.of_rank(t.rank) for t in self.traces for n in t.notices)

    def check(self) -> None:
        """Checks every trace, and the frames of the session."""
        for trace in self.traces:
            trace.check()
        for name, schema in (
            ("samples", SAMPLES_SCHEMA),
            ("telemetry", TELEMETRY_SCHEMA),
            ("allocations", ALLOCATIONS_SCHEMA),
        ):
            frame: pl.DataFrame = getattr(self, name)
            if frame.schema != schema:
                raise broken("columns", f"frame {name} has {frame.schema}, expected {schema}")
        if (self.samples["period_ns"] < 0).any():
            raise broken("order", "stack samples have negative periods")

    @property
    def kernels(self) -> pl.DataFrame:
        """GPU work by name, of all ranks (`analyze.kernels`), first the column `rank`."""
        return self._concat_ranks("kernels", "kernels")

    @property
    def operators(self) -> pl.DataFrame:
        """Operators by name, of all ranks (`analyze.operators`), first the column `rank`."""
        return self._concat_ranks("operators", "operators")

    @property
    def steps(self) -> pl.DataFrame:
        """The steps of all ranks (`analyze.step_times`), first the column `rank`."""
        return self._concat_ranks("step_times", "steps")

    @property
    def collectives(self) -> pl.DataFrame:
        """Every collective call of all ranks (`analyze.collectives`), first the column `rank`."""
        return self._concat_ranks("collectives", "calls")

    @property
    def findings(self) -> pl.DataFrame:
        """What to fix first (`findings.findings`): findings about time, the largest saving first,
        then those about memory.
        """
        ranked = importlib.import_module("traceloom.findings").findings(self)
        return pl.DataFrame(
            [
                {name: getattr(finding, name) for name in _FINDING_COLUMNS}
                for finding in (*ranked.time, *ranked.memory)
            ],
            schema=_FINDING_COLUMNS,
        )

    def _concat_ranks(self, analysis: str, frame_name: str) -> pl.DataFrame:
        # Analyses import this module, not the other way round, so they are imported on use.
        analyze = importlib.import_module("traceloom.analyze")
        frames = []
        for trace in self.traces:
            rank_frame: pl.DataFrame = getattr(getattr(analyze, analysis)(trace), frame_name)
            rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
            frames.append(rank_frame.select(rank, pl.all().exclude("rank")))
        return pl.concat(frames)

    if not TYPE_CHECKING:  # a type checker would take any attribute to exist

        def __getattr__(self, name: str) -> NoReturn:
            is_trace_attribute = name in Trace.__dataclass_fields__ or hasattr(Trace, name)
            hint = (
                f"its traces have: session.traces[0].{name}"
                if is_trace_attribute
                else nearest(name, dir(type(self))).rstrip()
            )
            hint = f"; {hint}" if hint else ""
            raise AttributeError(f"a Session has no `{name}`{hint}")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'?' if trace.rank is None else trace.rank}</td><td>{units.format_count(trace.events.height)}</td>"
            f"<td>{units.format_duration(trace.end_ns - trace.start_ns)}</td><td>{trace.steps.height}</td>"
            f"<td style='text-align:left'>{escape(sanitize(trace.meta.path))}</td></tr>"
            for trace in self.traces[:_MAX_HTML_ROWS]
        )
        remainder = (
            f"<p>… and {len(self.traces) - _MAX_HTML_ROWS} more</p>"
            if len(self.traces) > _MAX_HTML_ROWS
            else ""
        )
        head = "".join(f"<th>{title}</th>" for title in ("rank", "events", "time", "steps", "file"))
        return f"<p><b>{escape(sanitize(self.name))}</b></p><table><tr>{head}</tr>{rows}</table>{remainder}"

    def __repr__(self) -> str:
        return f"<Session {self.name}: {len(self.traces)} traces, {self.event_count:,} events>"


_FINDING_COLUMNS = build_schema(
    "slug title severity confidence saving_ns saving_fraction saving_bytes risk advice",
    {
        "slug": pl.String,
        "title": pl.String,
        "severity": pl.String,
        "confidence": pl.Float64,
        "saving_fraction": pl.Float64,
        "risk": pl.String,
        "advice": pl.String,
    },
)
WARM_UP_STEPS = 3
"""Steps at the beginning of a run that are not representative, as in `overhead` of capture.json."""
_UNRECORDED_STATE = "unrecorded"
_MAX_TABLE_FILE_BYTES = 1 << 27  # of a file
_MIN_DECOMPRESSION_LIMIT_BYTES = 1 << 24
_MAX_COMPRESSION_RATIO = 100  # larger content is truncated and not read


class RunSteps(NamedTuple):
    """All steps of a run in order.

    Attributes:
        duration_ns: Wall times, shape (steps,).
        state: State of the recorder in each.
        ran_ns: CPU time of the stepping thread in each; None where unknown.
        memory_bytes: What the process held at the end of each; None where it was not read.
        device_memory_bytes: The same of its current GPU.
    """

    duration_ns: NDArray[np.int64]
    state: list[str]
    ran_ns: list[int | None]
    memory_bytes: list[int | None]
    device_memory_bytes: list[int | None]


def read_run_steps(meta: Meta) -> RunSteps | None:
    """Returns every complete step of the run; None if it has no such table, or an invalid one."""
    table = read_capture_table(meta.capture, meta.path, "steps") or {}
    durations, states = table.get("duration_ns"), table.get("state")
    if (
        not isinstance(durations, list)
        or not isinstance(states, list)
        or len(durations) != len(states)
    ):
        return None
    if not all(isinstance(duration, int) and 0 <= duration < 1 << 53 for duration in durations):
        return None
    columns = [
        column
        if isinstance(column, list) and len(column) == len(durations)
        else [None] * len(durations)
        for column in map(table.get, ("cpu_ns", "memory_bytes", "device_memory_bytes"))
    ]
    ran, memory, device_memory = (
        [value if isinstance(value, int) and 0 <= value < 1 << 53 else None for value in column]
        for column in columns
    )
    return RunSteps(
        np.array(durations, dtype=np.int64),
        [str(state) for state in states],
        ran,
        memory,
        device_memory,
    )


class RunGrowth(NamedTuple):
    """How memory grew from step to step of a run.

    Attributes:
        bytes_per_step: The slope.
        steps: Over how many steps.
        first_bytes: What was held in the first quarter of them (median).
        last_bytes: What was held in the last quarter of them.
    """

    bytes_per_step: int
    steps: int
    first_bytes: int
    last_bytes: int


def find_run_growth(states: list[str], held: list[int | None]) -> RunGrowth | None:
    """Returns how memory grew in the steps after the recorded ones, or None where it does not grow,
    or stops growing.

    It grows where each quarter of these steps holds more than the quarter before, and the last one
    gains at least half of what the first one did, and where of two steps the later one nearly
    always holds more (Kendall's tau): what fills up once slows down, and noise goes both ways. Recorded steps
    and those before are left out: recording takes memory itself.
    """
    after = max((n for n, state in enumerate(states) if state != _UNRECORDED_STATE), default=-1) + 1
    known = [
        (step, size) for step, size in enumerate(held) if step >= after + 1 and size is not None
    ]
    if len(known) < _MIN_GROWTH_SAMPLES:
        return None
    quarters = np.array_split(np.array(known, dtype=np.int64), 4)
    steps, sizes = np.array([np.median(quarter, axis=0) for quarter in quarters]).T
    gains = np.diff(sizes)
    total = sizes[-1] - sizes[0]
    some = np.array(known)[np.linspace(0, len(known) - 1, min(len(known), 100)).astype(int), 1]
    rising = np.sign(some[None, :] - some[:, None])[np.triu_indices(some.size, 1)].mean()
    if (
        rising < _MIN_RISING
        or gains.min() <= 0
        or 2 * gains[-1] < gains[0]
        or total < max(_MIN_GROWTH_BYTES, _MIN_GROWTH_SHARE * sizes[0])
    ):
        return None
    return RunGrowth(
        round(total / (steps[-1] - steps[0])),
        known[-1][0] - known[0][0],
        round(sizes[0]),
        round(sizes[-1]),
    )


_MIN_GROWTH_SAMPLES, _MIN_RISING = 8, 0.6
_MIN_GROWTH_BYTES, _MIN_GROWTH_SHARE = 8_000_000, 0.01


def find_unrecorded_steps(meta: Meta) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns the steps after the warm-up that ran while nothing was recorded.

    Returns:
        Their numbers, ascending, and their wall times in nanoseconds; None if the run has no table
        of steps, or an invalid one.
    """
    run = read_run_steps(meta)
    if run is None:
        return None
    is_unrecorded = np.array(run.state, dtype=np.str_) == _UNRECORDED_STATE
    steps = np.flatnonzero(is_unrecorded[WARM_UP_STEPS:]) + WARM_UP_STEPS
    return steps, run.duration_ns[steps]


def read_capture_table(
    capture: dict[str, Any] | None, path: str, key: str
) -> dict[str, Any] | None:
    """Returns a table of capture.json as columns; long tables are in a file next to the trace.

    Args:
        capture: A rank's part of capture.json.
        path: The path of its trace.
        key: Name of the table.
    """
    table = (capture or {}).get(key)
    if not isinstance(table, dict):
        return None
    name = table.get("file")
    if not isinstance(name, str):
        return table
    if Path(name).name != name:  # an untrusted name must not leave the directory
        return None
    try:
        data = read_small(Path(path).parent / name, _MAX_TABLE_FILE_BYTES)
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(wbits=31).decompress(
                data, max(_MIN_DECOMPRESSION_LIMIT_BYTES, _MAX_COMPRESSION_RATIO * len(data))
            )
        columns: dict[str, Any] = msgspec.json.decode(data, type=dict)
    except (OSError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return columns


class ThreadClock(Struct, frozen=True):
    """The CPU time of one thread, sampled in ascending time.

    Attributes:
        time_ns: Unix time of each sample, shape (samples,).
        ran_ns: CPU time of the thread until then, never falling, shape (samples,).
        waited_ns: How long until then it could have run, but others had the processors; None where
            that is not recorded.
    """

    time_ns: Ints
    ran_ns: Ints
    waited_ns: Ints | None = None

    def bound_cpu_time(self, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
        """Returns the min and max CPU time of the thread between two times, ns.

        Samples within the span give the min, those around it the max; without a sample on one side,
        the max is the whole span.

        Args:
            start_ns: Starts, ns, shape (spans,).
            end_ns: Ends, not before them, ns, shape (spans,).
        """
        last = self.time_ns.size - 1
        first_inside = np.searchsorted(self.time_ns, start_ns, side="left")
        last_inside = np.searchsorted(self.time_ns, end_ns, side="right") - 1
        has_inner_samples = last_inside > first_inside
        inner_cpu_ns = (
            self.ran_ns[np.maximum(last_inside, 0)] - self.ran_ns[np.minimum(first_inside, last)]
        )
        lower_bound = np.minimum(np.where(has_inner_samples, inner_cpu_ns, 0), end_ns - start_ns)
        before = np.searchsorted(self.time_ns, start_ns, side="right") - 1
        after = np.searchsorted(self.time_ns, end_ns, side="left")
        outer_cpu_ns = self.ran_ns[np.minimum(after, last)] - self.ran_ns[np.maximum(before, 0)]
        upper_bound = np.where(
            (before >= 0) & (after <= last),
            np.minimum(outer_cpu_ns, end_ns - start_ns),
            end_ns - start_ns,
        )
        return lower_bound, np.maximum(upper_bound, lower_bound)


def read_thread_clocks(meta: Meta) -> dict[str, ThreadClock]:
    """Returns the samples of each thread that has at least two, by the system's thread id."""
    return parse_thread_clocks(meta.capture, meta.path)


def measure_processor_wait(meta: Meta) -> tuple[int, int]:
    """Returns how long the threads of a process could have run but waited for a processor, and how
    long they ran, ns; both 0 where that is unknown.
    """
    spent = [
        (clock.waited_ns[-1] - clock.waited_ns[0], clock.ran_ns[-1] - clock.ran_ns[0])
        for clock in read_thread_clocks(meta).values()
        if clock.waited_ns is not None
    ]
    return sum(int(waited) for waited, _ in spent), sum(int(ran) for _, ran in spent)


def _compute_step_ratio(meta: Meta) -> float | None:
    """Returns how many times as long the steps of one rank are as without recording.

    Recording takes processor time, and with it the time for which a busy machine lets threads wait;
    what a step waits for otherwise takes no longer.
    """
    overhead = (meta.capture or {}).get("overhead")
    figures = overhead if isinstance(overhead, dict) else {}
    ratio, step_ns, ran_ns = (
        figures.get(name) for name in ("ratio", "recorded_median_ns", "recorded_cpu_median_ns")
    )
    if not isinstance(ratio, float):
        return None
    if figures.get("ratio_of") != "cpu" or ratio <= 1 or not step_ns or not ran_ns:
        return ratio
    waited, ran = measure_processor_wait(meta)
    busy_ns = min(ran_ns * (1 + waited / max(ran, 1)), step_ns)
    return float(step_ns / (step_ns - busy_ns * (1 - 1 / ratio)))


def parse_thread_clocks(capture: dict[str, Any] | None, path: str) -> dict[str, ThreadClock]:
    """`read_thread_clocks` from a rank's part of capture.json and the path of its trace."""
    table = read_capture_table(capture, path, "thread_cpu") or {}
    names = ["thread", "time_ns", "cpu_ns", *(["waited_ns"] if "waited_ns" in table else [])]
    columns = [table.get(name) for name in names]
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < len(columns) or len({len(column) for column in lists}) != 1:
        return {}
    if not all(
        isinstance(value, int) and 0 <= value < 1 << 62 for column in lists for value in column
    ):
        return {}
    arrays = [np.array(column, dtype=np.int64) for column in lists]
    order = np.lexsort((arrays[1], arrays[0]))
    bounds = np.flatnonzero(np.diff(arrays[0][order])) + 1
    parts = zip(*(np.split(column[order], bounds) for column in arrays), strict=True)
    return {
        str(threads[0]): ThreadClock(times, *map(np.maximum.accumulate, spent))
        for threads, times, *spent in parts
        if threads.size > 1
    }


SNAPSHOT_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
    "user_defined",
)
SNAPSHOT_ENTRIES_SCHEMA = build_schema(
    "device action address bytes time_us stack",
    {"action": pl.Enum(SNAPSHOT_ACTIONS), "stack": pl.Int32},
)
"""`address` of an oom: the bytes that were free on the device; `time_us`: Unix time, null in
snapshots of older versions; `stack`: index into `stacks`, 0 is none.
"""
SNAPSHOT_SEGMENTS_SCHEMA = build_schema("device address bytes stream")
SNAPSHOT_BLOCKS_SCHEMA = build_schema(
    "device segment address bytes requested_bytes state stack", {"stack": pl.Int32}
)
"""`segment`: row of `segments`; `state`: active_allocated, active_pending_free (or
active_awaiting_free), inactive.
"""
FRAME_SEPARATOR = " < "

StackFrame = tuple[str, int, str]
"""File, line, function."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot of PyTorch's allocator with its history.

    Attributes:
        path: The file.
        entries: The history by device, in order of occurrence; columns as in
            `SNAPSHOT_ENTRIES_SCHEMA`.
        segments: Columns as in `SNAPSHOT_SEGMENTS_SCHEMA`.
        blocks: Columns as in `SNAPSHOT_BLOCKS_SCHEMA`, by address within their segment.
        stacks: Call stacks, the innermost frame first; the first one is empty.
        notices: What was left out.
        device_type: Type of its devices, such as `cuda` or `cpu`.
    """

    path: str
    entries: pl.DataFrame
    segments: pl.DataFrame
    blocks: pl.DataFrame
    stacks: tuple[tuple[StackFrame, ...], ...]
    notices: tuple[Notice, ...] = ()
    device_type: str = "cuda"


def format_frame(frame: Sequence[Any]) -> str:
    """Returns `file(line): function`, as frames are spelled in traces."""
    file, line, name = frame
    return f"{file}({line}): {name}" if file and file != "??" else str(name)


def is_python_frame(frame: StackFrame) -> bool:
    return frame[0].endswith((".py", ".pyx")) or frame[0].startswith("<")


def format_stacks(snapshot: MemorySnapshot) -> pl.Series:
    """Returns each stack as text, the innermost frame first: only the Python frames if it has any;
    null for an empty one.
    """
    texts = []
    for stack in snapshot.stacks:
        frames = [format_frame(frame) for frame in stack if is_python_frame(frame)] or [
            format_frame(frame) for frame in stack
        ]
        texts.append(FRAME_SEPARATOR.join(frames) or None)
    return pl.Series(texts, dtype=pl.String)
