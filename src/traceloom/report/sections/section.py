"""What a section is.

A section answers one question. Its module holds everything about it: how one rank is measured, what
stands in the document, why values may be unknown, and which tables show it. The terminal, the page
and Markdown draw the same tables (`report/table.py`). A new section is one module with a `SECTION`,
named in `sections/__init__.py`; its columns are declared in `traceloom.trace.columns`; then `python
scripts/report_schema.py` writes its shape into the published schema, and the type of its value.

    class CopiesSection(Section[Frames, "CopiesValue"]):
        key, title, note = "copies", "Copies", "How much is copied."
        parts = {"kinds": Part(KIND_SCHEMA, "copies by direction", empty="no copies were recorded")}

        def measure(self, trace: Trace, options: ReportOptions) -> Frames:
            return {"kinds": analyze.copies(trace).kinds}

        def build(self, study: Study[Frames], absent: Absent) -> CopiesValue:
            return self.lists(study.frames(self.parts), absent)

        def tables(self, value: CopiesValue) -> Iterator[Table]:
            yield table("copies.kinds", "Copies by direction", ["?rank", "kind", "bytes"],
            value["kinds"])

    SECTION = CopiesSection()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import polars as pl

from traceloom import analyze
from traceloom.analyze.answer import AnswerInputs
from traceloom.analyze.gpu_time import FIELDS
from traceloom.report.document import (
    Cells,
    Col,
    JsonSchema,
    ListSchema,
    ReportOptions,
    Table,
    UnknownValues,
    allow_null,
    build_object_schema,
)
from traceloom.report.labels import format_rank
from traceloom.system import units
from traceloom.system.process import trim_memory
from traceloom.trace.batch import cut_trace_to_steps
from traceloom.trace.columns import find_column
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.analyze.collectives import Communication
    from traceloom.analyze.data_loading import DataLoading
    from traceloom.analyze.gpu_time import GpuTime
    from traceloom.analyze.host_time import HostTime
    from traceloom.analyze.idle import Idle
    from traceloom.analyze.kernels import Kernels, Operators
    from traceloom.analyze.memory import Memory
    from traceloom.analyze.modules import Modules
    from traceloom.analyze.steps import StepTimes
    from traceloom.report.documents import ReportDocument


T = TypeVar("T")


@dataclass(frozen=True)
class RankMeasurements:
    """What the analyses say about one trace (and, with chosen steps, about these alone)."""

    trace: Trace
    gpu: GpuTime
    idle: Idle
    host: HostTime
    step_times: StepTimes
    data_loading: DataLoading
    kernels: Kernels
    operators: Operators
    modules: Modules
    communication: Communication
    memory: Memory
    notices: tuple[Notice, ...]

    @cached_property
    def facts(self) -> AnswerInputs:
        """What the answer is drawn from."""
        return AnswerInputs(
            self.trace, self.gpu, self.idle, self.host, self.operators, self.data_loading
        )


def measure(trace: Trace, steps: tuple[int, int] | None, *, by_shape: bool) -> RankMeasurements:
    """Run the analyses of a report on one trace.

    With `steps`, the time of devices and host threads is measured on the whole trace and kept for
    these steps, so that a step has the same figures in every report; everything else is measured on
    the work these steps launched.
    """
    trim_memory()  # of what reading freed
    part = trace if steps is None else cut_trace_to_steps(trace, steps)
    measured = RankMeasurements(
        trace=part,
        gpu=analyze.gpu_time(trace),
        idle=_trim_after(analyze.idle(trace)),
        host=_trim_after(analyze.host(trace)),
        step_times=analyze.step_times(part),
        data_loading=analyze.data_loading(part),
        kernels=analyze.kernels(part),
        operators=_trim_after(analyze.operators(part, by_shape=by_shape)),
        modules=_trim_after(analyze.modules(part)),
        communication=analyze.communication(part),
        memory=analyze.memory(part),
        notices=analyze.quality(trace).notices,
    )
    return measured if steps is None else _restrict_to_steps(measured, steps)


def _trim_after(result: T) -> T:
    """The result; what was freed on the way to it goes back to the system before the next analysis
    takes more.
    """
    trim_memory()
    return result


def _restrict_to_steps(measured: RankMeasurements, steps: tuple[int, int]) -> RankMeasurements:
    """Keep these steps of what is told per step; a device or a thread is the sum of its steps."""
    in_steps = pl.col("step").is_between(*steps)
    gpu, idle = measured.gpu, measured.idle
    gpu_steps = gpu.steps.filter(in_steps)
    devices: pl.DataFrame = gpu_steps.group_by("device", maintain_order=True).agg(
        pl.col("name").first(), pl.col("start_ns").min(), pl.col(*FIELDS).sum()
    )
    devices = devices.pipe(cast_to_schema, gpu.devices.schema)
    causes = idle.causes.filter(in_steps)
    totals = causes.group_by("device", "cause", maintain_order=True).agg(
        pl.col("idle_ns", "gap_count").sum()
    )
    totals = totals.pipe(cast_to_schema, idle.totals.schema)
    account = measured.host.account.filter(in_steps)
    threads = measured.host.threads
    observed = pl.col("ns").filter(pl.col("activity").cast(pl.String) != "unobserved")
    times = account.group_by("lane").agg(window_ns=pl.col("ns").sum(), busy_ns=observed.sum())
    counts = measured.trace.events.group_by("lane").agg(event_count=pl.len())
    step_threads = (
        threads.drop("window_ns", "busy_ns", "event_count")
        .join(times, on="lane", how="inner", maintain_order="left")
        .join(counts, on="lane", how="inner", maintain_order="left")
        .pipe(cast_to_schema, threads.schema)
    )
    return replace(
        measured,
        gpu=replace(gpu, steps=gpu_steps, devices=devices),
        idle=replace(idle, gaps=idle.gaps.filter(in_steps), causes=causes, totals=totals),
        host=replace(measured.host, account=account, threads=step_threads),
    )


Frames = dict[str, pl.DataFrame]
Columns = list[str | Col]
TableSpec = tuple[str, str, Sequence[Cells], Sequence[str]]
"""A list of a section's value as a table: its name, the heading, the rows, the columns (see
`table`).
"""
Result = TypeVar("Result")
Value = TypeVar("Value")


def build_table(
    path: str,
    title: str,
    columns: Iterable[str | Col],
    rows: Sequence[Cells],
    note: str = "",
    *,
    key: str = "",
    among: Iterable[Cells] | None = None,
) -> Table:
    """A table whose columns are declared in `traceloom.trace.columns`.

    Args:
        path: See `Table`.
        title: See `Table`.
        columns: Keys of the rows. A key that begins with `+` stands on wide terminals only; one with `?` (as `?rank`)
            only where not all rows have the same value. A `Col` is what is no column of the
            document, or has another heading or unit than there.
        rows: See `Table`.
        note: See `Table`.
        key: See `Table`; by default the path with dashes.
        among: The rows that decide about the columns with `?`, where these are not the same.
    """
    deciding = rows if among is None else list(among)
    selected = []
    for requested in columns:
        if isinstance(requested, Col):
            selected.append(requested)
            continue
        name = requested.lstrip("+?")
        if not requested.startswith("?") or len({row[name] for row in deciding}) > 1:
            declared = find_column(name, path)
            selected.append(
                Col(
                    name,
                    declared.title,
                    declared.unit,
                    declared.meaning,
                    narrow=not requested.startswith("+"),
                )
            )
    return Table(key or path.replace(".", "-").replace("_", "-"), title, selected, rows, path, note)


@dataclass(frozen=True, slots=True)
class Measurements(Generic[Result]):
    """What `build` may ask.

    Attributes:
        session: The chosen ranks, whole.
        part: The same, cut to the chosen steps; equal to `session` without `--steps`.
        options: The choices of the user.
        results: What `measure` gave for each trace of `part`, in its order.
    """

    session: Session
    part: Session
    options: ReportOptions
    results: Sequence[Result]

    def concat(
        self, frame: Callable[[Result], pl.DataFrame], ranks: Sequence[bool] | None = None
    ) -> pl.DataFrame:
        """One frame of all ranks, rank after rank, first the column `rank` (Int32, null where a
        file does not say).

        Args:
            frame: result of a rank -> its rows.
            ranks: Which of them; None for all.
        """
        frames = []
        pairs = list(zip(self.part.traces, self.results, strict=True))
        for trace, result in pairs if ranks is None else compress(pairs, ranks):
            rank_frame = frame(result)
            numbers = pl.Series("rank", [trace.rank], dtype=pl.Int32).new_from_index(
                0, rank_frame.height
            )
            frames.append(rank_frame.clone().insert_column(0, numbers))
        return pl.concat(frames)

    def frames(self, names: Iterable[str]) -> Frames:
        """`concat` of each of these frames, where results are `Frames` or have them as attributes."""
        out = {}
        for name in names:
            out[name] = self.concat(
                lambda of: of[name] if isinstance(of, dict) else getattr(of, name)  # noqa: B023
            )
        return out


def format_rank_suffix(row: Cells, rows: Iterable[Cells]) -> str:
    """` of rank 3` behind a figure of one row, where the rows are of several ranks."""
    return f" of {format_rank(row['rank'])}" if len({other["rank"] for other in rows}) > 1 else ""


def select_rank_column(document: ReportDocument, column: Col) -> tuple[Col, ...]:
    """The column, where the document is about several ranks."""
    return (column,) if len(document["ranks"]) > 1 else ()


def format_sum(rows: Sequence[Cells], key: str, label: str) -> str:
    """How much the rows of a table add up to."""
    return f"{units.format_duration(sum(row[key] for row in rows))} {label}"


def add_shares(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    """Rows by name with their mean, and their `fraction` of the sum of a column; the largest first."""
    total = frame[column].sum()
    share = pl.col(column) / total if total else pl.lit(0.0)
    return frame.with_columns(mean_ns=pl.col("total_ns") // pl.col("count"), fraction=share).sort(
        column, "name", descending=[True, False], maintain_order=True
    )


class Section(Generic[Result, Value]):
    """One question of the report.

    Attributes:
        key: Key in the document, name for `--only`, id in the page: lower case with underscores.
        title: Heading.
        note: What the section tells, in one line.
        what: Description of the value.
        parts: The lists of the value.
        others: JSON Schema of what else the value holds.
        missing: Why the value may be null; empty where it never is.
        shows_only: Whether it has no key of its own, but shows what stands under others.
        path: Where it stands in the document, if not under `key`: why it is missing is looked up there.
        anchor: Its id in the page, if that is not its key.
        nothing: What stands in the page where there is nothing to show and nothing is missing.
        in_markdown: Whether its first table stands in Markdown.
        unknown: Path below `key` (empty: itself) -> why a value there can be null or empty, where `parts` do not say.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    note: ClassVar[str]
    what: ClassVar[str] = ""
    parts: ClassVar[Mapping[str, ListSchema]] = {}
    others: ClassVar[Mapping[str, JsonSchema]] = {}
    missing: ClassVar[str] = ""
    unknown: ClassVar[Mapping[str, str]] = {}
    shows_only: ClassVar[bool] = False
    path: ClassVar[str] = ""
    anchor: ClassVar[str] = ""
    nothing: ClassVar[str] = ""
    in_markdown: ClassVar[bool] = False

    def measure(self, trace: Trace, options: ReportOptions) -> Result:
        """What is known of one rank: small.

        Runs rank by rank, so that no more than a few ranks are in memory.
        """
        return None  # type: ignore[return-value]  # of sections that look at the whole session only

    def build(self, measurements: Measurements[Result], unknowns: UnknownValues) -> Any:
        """The JSON value under `key`; None or empty where nothing is known, with the reason said to
        `unknowns`.
        """
        raise NotImplementedError

    def value(self, document: ReportDocument) -> Value | None:
        """What the section is drawn from; None where it is missing."""
        return cast("Value | None", document.get(self.key))

    def tables(self, value: Value) -> Iterable[Table]:
        """The tables of the value; none where there is nothing to show."""
        raise NotImplementedError

    def summary(self, value: Value) -> str | None:
        """One sentence with the main figure, for the short report; None where there is nothing to
        say.
        """
        return None

    def picture(self, value: Value) -> str:
        """SVG or HTML above the tables of the page; names from traces escaped. Empty for none."""
        return ""

    def definition(self, value: Value) -> str:
        """HTML of how it is counted, folded below the tables."""
        return ""

    @property
    def schema(self) -> JsonSchema:
        """JSON Schema of the value."""
        properties = {name: part.schema() for name, part in self.parts.items()}
        shape = build_object_schema({**properties, **self.others}, description=self.what)
        return allow_null(shape) if self.missing else shape

    @property
    def reasons(self) -> dict[str, str]:
        """Path in the document -> why a value there can be unknown; `key` itself where all may be
        missing.
        """
        out = {self.key: self.missing} if self.missing else {}
        for name, part in self.parts.items():
            out |= part.reasons(f"{self.key}.{name}")
        return out | {
            f"{self.key}.{path}".rstrip("."): reason for path, reason in self.unknown.items()
        }

    def filled(self, listed: Iterable[TableSpec], among: Iterable[Cells]) -> Iterator[Table]:
        """The tables of those lists of the value that have rows; `among` as for `table`."""
        deciding = list(among)
        for name, title, rows, columns in listed:
            if rows:
                yield build_table(f"{self.key}.{name}", title, columns, rows, among=deciding)

    def lists(self, frames: Mapping[str, pl.DataFrame], absent: UnknownValues) -> Value:
        """The rows of frames as they stand in the document; why there are none, where the part of
        that name says so.
        """
        out: dict[str, list[Any]] = {}
        for name, frame in frames.items():
            out[name] = absent.rows(frame, f"{self.key}.{name}")
            if not out[name] and self.parts[name].empty:
                absent.say(f"{self.key}.{name}")
        return cast("Value", out)


class CoreSection(Section[RankMeasurements, "ReportDocument"]):
    """A section of the core: all share one measurement, and are drawn from the whole document."""

    def value(self, document: ReportDocument) -> ReportDocument:
        return document
