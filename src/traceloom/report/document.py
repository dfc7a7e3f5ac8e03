"""Document, Section, Table, Figure as values; unknown values with reasons; JSON and its schema
derived.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.columns import find_column
from traceloom.trace.frames import UNITS, to_rows

if TYPE_CHECKING:
    from traceloom.analyze.kernel_rules import KindRule
    from traceloom.report.documents.report import AbsentRow


Cells = Mapping[str, Any]
"""A row as views see it: values by the keys of columns, whatever results they are of."""
PICTURES = ("bar", "spark")
KINDS = (*UNITS, "grade", "delta", *PICTURES)
"""Kinds of a column: what its values are, so that every view writes them with a unit."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One stretch of time as a stacked bar.

    Attributes:
        parts: (label, colour group, nanoseconds), from left to right.
        whole: What the parts are shares of.
        longest: The stretch that is as long as the column; None where every bar is.
    """

    parts: Sequence[tuple[str, str, int]]
    whole: int
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Col:
    """One column of a table.

    Attributes:
        key: Key of the row, and the name of the column in the page's address.
        title: Heading.
        kind: One of `KINDS`: text; name (long, may be cut); grade (how bad a notice is); time in ns; bytes;
            count; share from 0 to 1; number; flops; flop_rate in FLOP/s; byte_rate in B/s; bar (a
            `Bar`); spark (a list of numbers, drawn on terminals only); delta (a difference in ns,
            drawn from the middle).
        hint: What is counted; shown on hover.
        narrow: Whether it also stands on a terminal of 80 columns.
        swatch: Colour group shown before the title.
        scale: Columns with the same scale share one unit, so that they can be compared.
        kept: Whether it stands on terminals of any width, as what is compared does: texts wrap instead.
    """

    key: str
    title: str
    kind: str = "text"
    hint: str = ""
    narrow: bool = True
    swatch: str = ""
    scale: str = ""
    kept: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of column")

    @property
    def numeric(self) -> bool:
        """Whether cells are aligned on the decimal and sorted as numbers."""
        return self.kind in units.NUMERIC_UNITS


@dataclass(frozen=True, slots=True)
class Table:
    """One table, drawn by every view: all rows in the page, the first `--top` of them on a
    terminal.

    Attributes:
        key: Its id, unique in the report: `copies-kinds`.
        title: Heading; the first letter is a capital.
        columns: In the order of the page. The last column of kind `name`, `bar` or `spark` takes what room is left on a
            terminal.
        rows: Dicts in the order to be shown; a missing or null value shows as unknown.
        path: Where the rows stand in the document (`copies.kinds`), so that unknown values can say why.
        note: One sentence below the heading.
        unknown: Why values are unknown, by column, beside what `path` says.
        position: Place in the document's `ranks` of the rank that it is about; the page shows that of the chosen rank.
        picture: SVG or HTML above it in the page; names from traces escaped.
        weight: Where not all rows are shown: the column whose largest rows are, in their order.
        brief: Whether it stands in the short report on a terminal, if its section is of the core.
    """

    key: str
    title: str
    columns: Sequence[Col]
    rows: Sequence[Cells]
    path: str = ""
    note: str = ""
    unknown: Mapping[str, str] | None = None
    position: int | None = None
    picture: str = ""
    weight: str = ""
    brief: bool = True


def format_yes_no(value: bool | None) -> str | None:
    """A cell that answers a question; None stays unknown."""
    return None if value is None else "yes" if value else "no"


def format_cell(column: Col, value: Any) -> str:
    """A cell as text, with its unit; `-` for what is unknown."""
    if column.numeric or value is None:
        return units.format_value(value, column.kind)
    return sanitize(str(value))


_TIME_COLUMNS = ("start_ns", "time_ns", "peak_time_ns", "first_ns", "last_ns")

# Path in the document -> why a value there can be unknown, where its column does not say. `[*]`
# stands for any row.
UNKNOWN_REASONS = {
    "ranks[*].devices": "no GPU work was recorded",
    "ranks[*].gpu_account": "no GPU work was recorded",
    "answer.step_ns": "no trace marks steps that last",
    "ranks[*].steps": "the trace marks no steps",
    "ranks[*].steps[*].lag_ns": "the step launched no GPU work",
    "ranks[*].host.threads": "no host events were recorded",
    "ranks[*].step_times": "the trace marks no steps",
    "ranks[*].step_times.spread_fraction": "the median step has no length",
    "kernels": "no GPU work was recorded",
    "operators": "no framework operators were recorded",
    "operators[*].shapes": "not counted apart by shape (ask with --by-shape), or shapes were not recorded",
    "operators[*].device_ns": "no GPU work was recorded",
    "operators[*].self_device_ns": "no GPU work was recorded",
    "operators[*].kernel_count": "no GPU work was recorded",
    "modules": "neither Python stacks nor module annotations were recorded",
    "communication.collectives": "no collective communication was recorded",
    "communication.collectives[*].group_description": "the group has no description",
    "communication.collectives[*].exposed_ns": "only communication on a device can overlap its compute",
    "memory.devices": "allocations were not recorded (record with --memory, or profile_memory=True)",
    "memory.devices[*].end_bytes": "the allocator's own total was not recorded",
    "memory.devices[*].peak_bytes": "the allocator's own total was not recorded",
    "memory.curve[*].reserved_bytes[*]": "the allocator does not say what it has reserved",
    "data_loading": "no data loader was recorded",
    "data_loading.waits[*].maker": "neither the name of the call nor the Python frames say who makes the batch",
    "data_loading.waits[*].gpu_idle_ns": "no GPU work was recorded",
    "data_loading.steps[*].gpu_idle_ns": "no GPU work was recorded, or no loader in this step",
    "data_loading.steps[*].bottleneck": "no loader was recorded in this step",
    "data_loading.steps[*].wait_ns": "no loader was recorded in this step",
    "notices[*].rank": "the notice is about the whole run, or the file does not say its rank",
    "capture": "the run was not recorded by `traceloom record`",
    "findings": "no rule found anything that is worth half a per cent of the step",
    "findings[*].saving_low_ns": "it is about memory, or only one step was looked at",
    "findings[*].saving_high_ns": "it is about memory, or only one step was looked at",
    "findings[*].frames": "it is not about what the host does, or no frame holds 5 % of that",
    "findings[*].frames[*].file": "a built-in function is in no file",
    "findings[*].frames[*].line": "a built-in function is in no file",
    "findings[*].frames[*].inside": "nothing that it calls takes half of its time",
    "findings[*].frames[*].inside_ns": "nothing that it calls takes half of its time",
    "findings_ground.limit": "savings were evaluated over several steps, or there are no steps",
    "findings_ground.step": "the trace marks no steps: the whole window is looked at",
    "findings_ground.host_ratio": "the cost of recording was not measured",
    "runs[*].world_size": "the files do not say how many ranks the job has",
}


class UnknownValues:
    """Collects the reasons while a document is built; a path is explained once."""

    def __init__(self, epoch_ns: int, extra_reasons: Mapping[str, str] | None = None) -> None:
        self.epoch_ns = epoch_ns
        self._known = {**UNKNOWN_REASONS, **(extra_reasons or {})}
        self._reasons: dict[str, str] = {}

    def say(self, path: str, reason: str | None = None) -> None:
        """Explain the unknown or empty value at `path`: by `reason`, else as the path or its column
        is declared.
        """
        if reason is None and (reason := self._known.get(path)) is None:
            parent_path, _, name = path.replace("[*]", "").rpartition(".")
            with suppress(KeyError):
                reason = find_column(name, parent_path).unknown
        self._reasons.setdefault(path, reason or "the trace does not say")

    def rows(self, frame: pl.DataFrame, path: str) -> list[Any]:
        """The rows of a frame as they stand at `path` of the document: times relative, each null
        column explained.
        """
        times = [name for name in frame.columns if name in _TIME_COLUMNS]
        frame = frame.with_columns(pl.col(times) - self.epoch_ns) if times else frame
        for name in frame.columns:
            if frame[name].null_count():
                self.say(f"{path}[*].{name}")
        return to_rows(frame)

    def convert_list(self, frame: pl.DataFrame, path: str) -> list[Any]:
        """`rows` of a list that is itself explained where it is empty."""
        if not frame.height:
            self.say(path)
        return self.rows(frame, path)

    def value(self, value: Any, path: str) -> Any:
        """A single value; explained where it is null."""
        if value is None:
            self.say(path)
        return value

    def to_list(self) -> list[AbsentRow]:
        """`absent` of the document."""
        return [{"path": path, "reason": reason} for path, reason in sorted(self._reasons.items())]


JsonSchema = dict[str, Any]
"""A JSON Schema."""


@dataclass(frozen=True)
class ListSchema:
    """A list in the document, with an object for each row of a frame.

    Attributes:
        columns: Name -> Polars type.
        what: What the list holds.
        unknown: Column -> why it can be null.
        nullable: Columns that can be null for the reason that `traceloom.trace.columns` gives.
        empty: Why the list may be empty; empty where that needs no reason.
        ranked: Whether the column `rank` stands before the others, as `Study.concat` makes it.
    """

    columns: Mapping[str, Any]
    what: str
    unknown: Mapping[str, str] = field(default_factory=dict)
    nullable: Collection[str] = ()
    empty: str = ""
    ranked: bool = True

    def schema(self) -> JsonSchema:
        """Its JSON Schema."""
        columns = {"rank": pl.Int32, **self.columns} if self.ranked else self.columns
        nullable = {*self.unknown, *self.nullable, *(("rank",) if self.ranked else ())}
        properties = {
            name: build_type_schema(kind, nullable=name in nullable)
            for name, kind in columns.items()
        }
        return {"description": self.what, "type": "array", "items": build_object_schema(properties)}

    def reasons(self, path: str) -> dict[str, str]:
        """Path in the document -> why a value there can be unknown, where its column does not say."""
        rows = {f"{path}[*].{name}": reason for name, reason in self.unknown.items()}
        return {path: self.empty, **rows} if self.empty else rows


def build_object_schema(
    properties: Mapping[str, JsonSchema], *, description: str = ""
) -> JsonSchema:
    """An object with all these keys."""
    shape: JsonSchema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
    }
    return {"description": description, **shape} if description else shape


def allow_null(shape: JsonSchema, *, description: str = "") -> JsonSchema:
    """The same, or null."""
    nullable: JsonSchema = {"anyOf": [shape, {"type": "null"}]}
    return {"description": description, **nullable} if description else nullable


def build_type_schema(kind: Any, *, nullable: bool = False) -> JsonSchema:
    """One value of a Polars type."""
    kind = kind() if isinstance(kind, type) else kind
    if isinstance(kind, (pl.List, pl.Array)):
        shape: JsonSchema = {"type": "array", "items": build_type_schema(kind.inner)}
        return allow_null(shape) if nullable else shape
    name = "integer" if kind.is_integer() else "number" if kind.is_numeric() else "string"
    name = "boolean" if kind == pl.Boolean else name
    return {"type": [name, "null"] if nullable else name}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Choices of `traceloom report`.

    Attributes:
        ranks: Only these ranks; None for all.
        steps: Only the work of the steps from the first to the last of these numbers, both included.
        by_shape: Operators are counted apart by the shapes of their inputs.
        top: How many rows a table shows on a terminal or in Markdown. The document always has all.
        full: On a terminal, without `only`: the tables of the core and a line for each other section, instead of the
            answer, what to fix, and where to look.
        sort: What shown tables are sorted by: a key of `SORT_KEYS`; None for each table's own order.
        only: Which sections are made beyond the core (`core` alone: none); on a terminal, what is shown in full. None:
            all are made, and the terminal is short, or `full`.
        peak: Peaks to compare with instead of those of the devices' names: a device's name (`H100 SXM`) or numbers
            (`bf16=989e12,memory=3.35e12`).
        link_peak: Peak of the link of one device in one direction, 10^9 bytes per second, for groups of every kind;
            None for that of the device's name where a group stays inside a host.
        graph_capture: File with the recording of the graphs' capture, or of the same model without graphs: from it the
            operators of graph replays are known.
        cache: Whether that file may come from the cache of read traces, and go there.
        tokens_per_step: Tokens that a step makes, where the user says so.
        samples_per_step: Samples that a step takes, where the user says so.
        kind_rules: The user's rules for kinds of kernels; they come before ours.
    """

    ranks: tuple[int, ...] | None = None
    steps: tuple[int, int] | None = None
    by_shape: bool = False
    top: int = 10
    full: bool = False
    sort: str | None = None
    only: tuple[str, ...] | None = None
    peak: str | None = None
    link_peak: float | None = None
    graph_capture: str | None = None
    cache: bool = True
    tokens_per_step: int | None = None
    samples_per_step: int | None = None
    kind_rules: tuple[KindRule, ...] = ()

    def wants(self, section: str) -> bool:
        """Whether a section is asked for: all are, where none is named."""
        return self.only is None or section in self.only


# Key of --sort -> the columns it means, the first one a table has.
SORT_KEYS = {
    "self": ("self_ns", "total_ns"),
    "total": ("total_ns",),
    "device": ("device_ns", "total_ns"),
    "mean": ("mean_ns",),
    "max": ("max_ns", "total_ns"),
    "count": ("count",),
    "name": ("name",),
}


def select_top_rows(table: Table, options: ReportOptions) -> Sequence[Mapping[str, Any]]:
    """The rows a table shows: sorted by `sort` where it has that column, the first (or heaviest)
    `top` of them.
    """
    rows = table.rows
    columns = SORT_KEYS[options.sort] if options.sort else ()
    column = next((name for name in columns if rows and name in rows[0]), None)
    if column == "name":
        rows = sorted(rows, key=lambda row: str(row["name"]))
    elif column is not None:
        rows = sorted(rows, key=lambda row: -(row[column] or 0))
    elif table.weight and len(rows) > options.top:
        heaviest = sorted(range(len(rows)), key=lambda i: -rows[i][table.weight])[: options.top]
        return [rows[i] for i in sorted(heaviest)]
    return rows[: options.top]
