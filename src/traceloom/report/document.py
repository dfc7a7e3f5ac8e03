"""Values of a document: Section, Table, Col, unknown values with reasons, and the JSON schema
derived from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.columns import find_column
from traceloom.trace.columns.declare import UNITS

if TYPE_CHECKING:
    import polars as pl

    from traceloom.analyze.kernel_rules import KindRule
    from traceloom.report.documents.report import AbsentRow


Cells = Mapping[str, Any]
"""A row as views see it: values by the keys of columns, for any kind of result."""
PICTURES = ("bar", "spark")
KINDS = (*UNITS, "grade", "delta", *PICTURES)
"""Kinds of a column: the kind of its values, so that every view writes them with a unit."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A duration as a stacked bar.

    Attributes:
        parts: (label, colour group, nanoseconds), from left to right.
        whole: The total of which the parts are shares.
        longest: The duration that fills the column; None where every bar fills it.
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
        kind: One of `KINDS`: text; name (long, may be cut); grade (severity of a notice); time in
            ns; bytes; count; share from 0 to 1; number; flops; flop_rate in FLOP/s; byte_rate in
            B/s; bar (a `Bar`); spark (a list of numbers, drawn on terminals only); delta (a
            difference in ns, drawn from the middle).
        hint: The meaning of the values; shown on hover.
        narrow: Whether it also appears on a terminal of 80 columns.
        swatch: Colour group shown before the title.
        scale: Columns with the same scale share one unit, so that they can be compared.
        kept: Whether it appears on terminals of any width, for example the compared values: texts
            wrap instead.
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
    """A table that every view draws: all rows in the page, the first `--top` of them on a terminal.

    Attributes:
        key: Its id, unique in the report: `copies-kinds`.
        title: Heading; the first letter is a capital.
        columns: In the order of the page. The last column of kind `name`, `bar` or `spark` takes
            the remaining width of a terminal.
        rows: Dicts in display order; a missing or null value shows as unknown.
        path: Path of the rows in the document (`copies.kinds`), for the reasons of unknown values.
        note: One sentence below the heading.
        unknown: Reasons of unknown values by column, in addition to those of `path`.
        position: Index in the document's `ranks` of its rank; the page shows the table of the
            chosen rank.
        picture: SVG or HTML above it in the page; names from traces escaped.
        weight: If not all rows are shown: the column by which the largest are kept, in their order.
        brief: Whether it appears in the short report on a terminal, if its section is of the core.
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
    """Formats a boolean cell; None stays unknown."""
    return None if value is None else "yes" if value else "no"


def format_cell(column: Col, value: Any) -> str:
    """Formats a cell as text, with its unit; `-` if unknown."""
    return (
        units.format_value(value, column.kind)
        if column.numeric or value is None
        else sanitize(str(value))
    )


_TIME_COLUMNS = ("start_ns", "time_ns", "peak_time_ns", "first_ns", "last_ns")

# Path in the document -> why a value there can be unknown, if its column does not declare it. `[*]`
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
    """Collects the reasons of unknown values while a document is built; a path is
    explained once.
    """

    def __init__(self, epoch_ns: int, extra_reasons: Mapping[str, str] | None = None) -> None:
        self.epoch_ns = epoch_ns
        self._known = {**UNKNOWN_REASONS, **(extra_reasons or {})}
        self._reasons: dict[str, str] = {}

    def explain(self, path: str, reason: str | None = None) -> None:
        """Explains the unknown or empty value at `path`: by `reason`, else by the declared reason
        of the path or its column.
        """
        if reason is None and (reason := self._known.get(path)) is None:
            parent_path, _, name = path.replace("[*]", "").rpartition(".")
            with suppress(KeyError):
                reason = find_column(name, parent_path).unknown
        self._reasons.setdefault(path, reason or "the trace does not say")

    def rows(self, frame: pl.DataFrame, path: str) -> list[Any]:
        """Returns the rows of a frame as they are at `path` of the document: times relative, each
        null column explained.
        """
        import polars as pl

        from traceloom.trace.frames import to_rows

        times = [name for name in frame.columns if name in _TIME_COLUMNS]
        frame = frame.with_columns(pl.col(times) - self.epoch_ns) if times else frame
        for name in frame.columns:
            if frame[name].null_count():
                self.explain(f"{path}[*].{name}")
        return to_rows(frame)

    def convert_list(self, frame: pl.DataFrame, path: str) -> list[Any]:
        """As `rows`, for a list that is itself explained where it is empty."""
        if not frame.height:
            self.explain(path)
        return self.rows(frame, path)

    def value(self, value: Any, path: str) -> Any:
        """Returns a single value; explained where it is null."""
        if value is None:
            self.explain(path)
        return value

    def to_list(self) -> list[AbsentRow]:
        return [{"path": path, "reason": reason} for path, reason in sorted(self._reasons.items())]


JsonSchema = dict[str, Any]
"""A JSON Schema."""


@dataclass(frozen=True)
class ListSchema:
    """A list in the document, with an object for each row of a frame.

    Attributes:
        columns: Name -> Polars type.
        what: Description of the list.
        unknown: Column -> why it can be null.
        nullable: Columns that can be null for the reason that `traceloom.trace.columns` gives.
        empty: Why the list may be empty; empty where that needs no reason.
        ranked: Whether the column `rank` precedes the others, as in `Measurements.concat`.
    """

    columns: Mapping[str, Any]
    what: str
    unknown: Mapping[str, str] = field(default_factory=dict)
    nullable: Collection[str] = ()
    empty: str = ""
    ranked: bool = True

    def schema(self) -> JsonSchema:
        import polars as pl

        columns = {"rank": pl.Int32, **self.columns} if self.ranked else self.columns
        nullable = {*self.unknown, *self.nullable, *(("rank",) if self.ranked else ())}
        properties = {
            name: build_type_schema(kind, nullable=name in nullable)
            for name, kind in columns.items()
        }
        return {"description": self.what, "type": "array", "items": build_object_schema(properties)}

    def reasons(self, path: str) -> dict[str, str]:
        """Returns why values can be unknown, by path in the document, if their columns do not
        declare it.
        """
        rows = {f"{path}[*].{name}": reason for name, reason in self.unknown.items()}
        return {path: self.empty, **rows} if self.empty else rows


def build_object_schema(
    properties: Mapping[str, JsonSchema], *, description: str = ""
) -> JsonSchema:
    shape: JsonSchema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
    }
    return {"description": description, **shape} if description else shape


def allow_null(shape: JsonSchema, *, description: str = "") -> JsonSchema:
    nullable: JsonSchema = {"anyOf": [shape, {"type": "null"}]}
    return {"description": description, **nullable} if description else nullable


def build_type_schema(kind: Any, *, nullable: bool = False) -> JsonSchema:
    import polars as pl

    kind = kind() if isinstance(kind, type) else kind
    if isinstance(kind, (pl.List, pl.Array)):
        shape: JsonSchema = {"type": "array", "items": build_type_schema(kind.inner)}
        return allow_null(shape) if nullable else shape
    name = "integer" if kind.is_integer() else "number" if kind.is_numeric() else "string"
    name = "boolean" if kind == pl.Boolean else name
    return {"type": [name, "null"] if nullable else name}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of `traceloom report`.

    Attributes:
        ranks: Only these ranks; None for all.
        steps: Only the work of the steps from the first to the last of these numbers, inclusive.
        by_shape: Operators are counted separately by the shapes of their inputs.
        top: Max rows of a table on a terminal or in Markdown. The document always has all.
        full: On a terminal, without `only`: the tables of the core and a line for each other
            section, instead of the answer, what to fix, and where to look.
        sort: Sort key of the displayed tables, one of `SORT_KEYS`; None for each table's own order.
        only: Sections to build beyond the core (`core` alone: none); on a terminal, those shown in
            full. None: all are built, and the terminal shows the short report, or `full`.
        peak: Peaks to compare with instead of those of the devices' names: a device's name (`H100
            SXM`) or numbers (`bf16=989e12,memory=3.35e12`).
        link_peak: Peak of the link of one device in one direction, 10^9 bytes per second, for
            groups of every kind; None for that of the device's name, if a group is within one host.
        graph_capture: File with the recording of the graphs' capture, or of the same model without
            graphs: the source of the operators of graph replays.
        cache: Whether that file may be read from and stored in the cache of read traces.
        tokens_per_step: Tokens per step, if given by the user.
        samples_per_step: Samples per step, if given by the user.
        kind_rules: The user's rules for kinds of kernels; they precede the built-in ones.
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
        """Whether a section is requested; without `only`, all are."""
        return self.only is None or section in self.only


# Key of --sort -> the corresponding columns; the first one that a table has is used.
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
    """Returns the rows that a table shows: sorted by `sort` where it has that column, the first (or
    heaviest) `top` of them.
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
