"""The base class of sections.

A section answers one question. Its module contains everything about it: the measurement of one
rank, its value in the document, why values may be unknown, and the tables that show it. The
terminal, the page and Markdown draw the same tables (`traceloom.report.document.Table`). A new
section is one module with a `SECTION`, registered in `sections/__init__.py`; its columns are
declared in `traceloom.trace.columns`; then `python scripts/report_schema.py` writes its schema into
the published schema, and the type of its value.

    class CopiesSection(Section[Frames, "CopiesValue"]):
        key, title, note = "copies", "Copies", "How much is copied."
        parts = {
            "kinds": ListSchema(KIND_SCHEMA, "copies by direction", empty="no copies were recorded")
        }

        def measure(self, trace: Trace, options: ReportOptions) -> Frames:
            return {"kinds": analyze.copies(trace).kinds}

        def build(self, measurements: Measurements[Frames], unknowns: UnknownValues) -> CopiesValue:
            return self.lists(measurements.frames(self.parts), unknowns)

        def tables(self, value: CopiesValue) -> Iterator[Table]:
            columns = ["?rank", "kind", "bytes"]
            yield build_table("copies.kinds", "Copies by direction", columns, value["kinds"])

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
    """The results of the analyses of one trace (with selected steps, of these alone)."""

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
        return AnswerInputs(
            self.trace,
            self.gpu,
            self.idle,
            self.host,
            self.operators,
            self.data_loading,
            self.step_times,
        )


def measure(trace: Trace, steps: tuple[int, int] | None, *, by_shape: bool) -> RankMeasurements:
    """Runs the analyses of a report on one trace.

    With `steps`, the time of devices and host threads is measured on the whole trace and kept for
    these steps, so that a step has the same values in every report; everything else is measured on
    the work that these steps launched.
    """
    trim_memory()  # return memory that reading freed
    part = trace if steps is None else cut_trace_to_steps(trace, steps)
    measured = RankMeasurements(
        trace=part,
        gpu=analyze.gpu_time(trace),
        idle=_trim_after(analyze.idle(trace)),
        host=_trim_after(analyze.host(trace)),
        step_times=analyze.step_times(trace),
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
    """Returns the result after returning freed memory to the system, before the next analysis
    allocates more.
    """
    trim_memory()
    return result


def _restrict_to_steps(measured: RankMeasurements, steps: tuple[int, int]) -> RankMeasurements:
    """Keeps these steps of the values per step; a device or a thread is the sum of its steps."""
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
        step_times=measured.step_times.select(*steps),
        gpu=replace(gpu, steps=gpu_steps, devices=devices),
        idle=replace(idle, gaps=idle.gaps.filter(in_steps), causes=causes, totals=totals),
        host=replace(measured.host, account=account, threads=step_threads),
    )


Frames = dict[str, pl.DataFrame]
Columns = list[str | Col]
TableSpec = tuple[str, str, Sequence[Cells], Sequence[str]]
"""Arguments for the table of a list of a section's value: name, heading, rows, columns (see
`build_table`).
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
    """Builds a table whose columns are declared in `traceloom.trace.columns`.

    Args:
        path: See `Table`.
        title: See `Table`.
        columns: Keys of the rows. A key that begins with `+` appears on wide terminals only; one
            with `?` (for example `?rank`) only where not all rows have the same value. A `Col` is a
            column that is not in the document, or has another heading or unit there.
        rows: See `Table`.
        note: See `Table`.
        key: See `Table`; by default the path with dashes.
        among: The rows that decide about the columns with `?`, if other than `rows`.
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
    """The input of `build`.

    Attributes:
        session: The chosen ranks, whole.
        part: The same, cut to the chosen steps; equal to `session` without `--steps`.
        options: The options of the user.
        results: The result of `measure` for each trace of `part`, in its order.
    """

    session: Session
    part: Session
    options: ReportOptions
    results: Sequence[Result]

    def concat(
        self, frame: Callable[[Result], pl.DataFrame], ranks: Sequence[bool] | None = None
    ) -> pl.DataFrame:
        """Concatenates a frame of all ranks, with a first column `rank` (Int32, null if unknown).

        Args:
            frame: Returns the rows of the result of a rank.
            ranks: Flags of the included ranks; None for all.
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
        """Returns `concat` of each of these frames, where results are `Frames` or have them as
        attributes.
        """
        out = {}
        for name in names:
            out[name] = self.concat(
                lambda of: of[name] if isinstance(of, dict) else getattr(of, name)  # noqa: B023
            )
        return out


def format_rank_suffix(row: Cells, rows: Iterable[Cells]) -> str:
    """Returns ` of rank 3` as suffix of a value of one row, where the rows are of several ranks."""
    return f" of {format_rank(row['rank'])}" if len({other["rank"] for other in rows}) > 1 else ""


def select_rank_column(document: ReportDocument, column: Col) -> tuple[Col, ...]:
    return (column,) if len(document["ranks"]) > 1 else ()


def format_sum(rows: Sequence[Cells], key: str, label: str) -> str:
    return f"{units.format_duration(sum(row[key] for row in rows))} {label}"


def add_shares(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    """Returns rows by name with their mean, and their `fraction` of the sum of a column; the
    largest first.
    """
    total = frame[column].sum()
    return frame.with_columns(
        mean_ns=pl.col("total_ns") // pl.col("count"),
        fraction=pl.col(column) / total if total else pl.lit(0.0),
    ).sort(column, "name", descending=[True, False], maintain_order=True)


class Section(Generic[Result, Value]):
    """One question of the report.

    Attributes:
        key: Key in the document, name for `--only`, id in the page: lower case with underscores.
        title: Heading.
        note: Describes the section in one line.
        what: Description of the value.
        parts: The lists of the value.
        others: JSON Schema of the other keys of the value.
        missing: Why the value may be null; empty where it never is.
        shows_only: Whether it has no key of its own, but shows values of other keys.
        path: Its path in the document, if not `key`: the reason for its absence is looked up there.
        anchor: Its id in the page, if that is not its key.
        nothing: Text in the page where it is empty but not missing.
        in_markdown: Whether its first table appears in Markdown.
        unknown: Path below `key` (empty: itself) -> why a value there can be null or empty, if
            `parts` do not declare it.
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
        """Measures one rank; the result is small.

        It runs rank by rank, so that no more than a few ranks are in memory.
        """
        return None  # type: ignore[return-value] # of sections that use the whole session only

    def build(self, measurements: Measurements[Result], unknowns: UnknownValues) -> Any:
        """Returns the JSON value under `key`; None or empty if unknown, with the reason added to
        `unknowns`.
        """
        raise NotImplementedError

    def value(self, document: ReportDocument) -> Value | None:
        """Returns the value that the section is drawn from; None where it is missing."""
        return cast("Value | None", document.get(self.key))

    def tables(self, value: Value) -> Iterable[Table]:
        """Yields the tables of the value; none where there is nothing to show."""
        raise NotImplementedError

    def summary(self, value: Value) -> str | None:
        """Returns one sentence with the main figure, for the short report; None where there is
        none.
        """
        return None

    def picture(self, value: Value) -> str:
        """Returns SVG or HTML above the tables of the page, with names from traces escaped; empty
        for none.
        """
        return ""

    def definition(self, value: Value) -> str:
        """Returns HTML that describes how it is counted, collapsed below the tables."""
        return ""

    @property
    def schema(self) -> JsonSchema:
        properties = {name: part.schema() for name, part in self.parts.items()}
        shape = build_object_schema({**properties, **self.others}, description=self.what)
        return allow_null(shape) if self.missing else shape

    @property
    def reasons(self) -> dict[str, str]:
        """Returns why values can be unknown, by path in the document; under `key` itself where the
        whole value may be missing.
        """
        out = {self.key: self.missing} if self.missing else {}
        for name, part in self.parts.items():
            out |= part.reasons(f"{self.key}.{name}")
        return out | {
            f"{self.key}.{path}".rstrip("."): reason for path, reason in self.unknown.items()
        }

    def filled(self, listed: Iterable[TableSpec], among: Iterable[Cells]) -> Iterator[Table]:
        """Yields the tables of those lists of the value that have rows; `among` as for
        `build_table`.
        """
        deciding = list(among)
        for name, title, rows, columns in listed:
            if rows:
                yield build_table(f"{self.key}.{name}", title, columns, rows, among=deciding)

    def lists(self, frames: Mapping[str, pl.DataFrame], absent: UnknownValues) -> Value:
        """Returns the rows of frames as in the document; adds the reason for an empty list where
        its part requires one.
        """
        out: dict[str, list[Any]] = {}
        for name, frame in frames.items():
            out[name] = absent.rows(frame, f"{self.key}.{name}")
            if not out[name] and self.parts[name].empty:
                absent.explain(f"{self.key}.{name}")
        return cast("Value", out)


class CoreSection(Section[RankMeasurements, "ReportDocument"]):
    """A section of the core: all share one measurement, and are drawn from the whole document."""

    def value(self, document: ReportDocument) -> ReportDocument:
        return document
