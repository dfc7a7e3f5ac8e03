"""Declares questions: their parameters, the rows they read, and the tables they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import polars as pl
from msgspec import Meta

from traceloom.fleet.analyses.attribution import (
    UNATTRIBUTED,
    compute_ownership_periods,
    match_pattern,
)
from traceloom.fleet.rules import EARLIEST, LATEST, OwnerRule, Prices
from traceloom.fleet.store.schema import DIMENSIONS, UNALLOCATED, UNREACHABLE, get_utc_day
from traceloom.fleet.store.tables import Tables
from traceloom.server.problem import HttpResponseBody, make_bad_request
from traceloom.server.routing import parse_time
from traceloom.system.text import OPTIONAL_WORD, WORD_LIST
from traceloom.trace.columns.declare import Column
from traceloom.trace.frames import Result

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_MIN_DAYS_RANGE_NS = 2 * DAY_NS

Instant = Annotated[str, Meta(max_length=40)]


def _build_pattern_meta(text: str) -> Meta:
    return Meta(max_length=500, description=f"only {text}; `*` and `?` stand for any signs")


class TimeQuery(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A range of time, and filters.

    Ranges of two days and more begin at midnight in UTC, others at a full hour.
    """

    since: Annotated[
        Instant,
        Meta(
            description="from when on: a while ago as 30d or 6h, a day as 2026-11-01, an instant as "
            "2026-11-01T12:00"
        ),
    ] = "30d"
    until: Annotated[Instant, Meta(description="until when; the same (default: now)")] = ""
    job: Annotated[str, _build_pattern_meta("these jobs")] = ""
    user: Annotated[str, _build_pattern_meta("jobs of these users")] = ""
    division: Annotated[str, _build_pattern_meta("jobs of these divisions")] = ""
    product: Annotated[str, _build_pattern_meta("jobs for these products")] = ""
    application: Annotated[str, _build_pattern_meta("jobs of this sort of work")] = ""
    model: Annotated[str, _build_pattern_meta("jobs that train or serve these models")] = ""
    framework: Annotated[str, _build_pattern_meta("jobs on these frameworks")] = ""
    device_model: Annotated[str, _build_pattern_meta("devices of these models")] = ""
    host: Annotated[str, _build_pattern_meta("these hosts")] = ""

    @property
    def of_jobs(self) -> dict[str, str]:
        """Returns the filters on jobs: dimension, or `job`, -> pattern."""
        return {name: pattern for name in ("job", *DIMENSIONS) if (pattern := getattr(self, name))}


class PagedQuery(TimeQuery, frozen=True):
    """The same, and which rows of the answer, which has `more` where these are not the last."""

    top: Annotated[int, Meta(ge=1, le=1000, description="so many rows")] = 20
    skip: Annotated[
        int, Meta(ge=0, le=100_000, description="leave out so many rows before them")
    ] = 0


class TopKernelsQuery(PagedQuery, frozen=True):
    """A range of time, filters, and how kernels are ranked."""

    kernel: Annotated[str, _build_pattern_meta("these kernels")] = ""
    sort: Annotated[
        Literal["time", "cycles"],
        Meta(description="by GPU time, or by cycles: time at the clock of the device"),
    ] = "time"


class KernelFilterQuery(PagedQuery, frozen=True):
    """A range of time, and filters, of kernels too."""

    kernel: Annotated[str, _build_pattern_meta("these kernels")] = ""


class KernelHistoryQuery(TimeQuery, frozen=True, kw_only=True):
    """Of one kernel by its whole name: of these shapes and model of device; without them over all
    of them.
    """

    kernel: Annotated[
        str, Meta(min_length=1, max_length=2000, description="the name of the kernel")
    ]
    shapes: Annotated[
        str, Meta(max_length=2000, description="shapes of its inputs, as JSON text")
    ] = ""


class GroupedQuery(PagedQuery, frozen=True):
    """A range of time, filters, and by what GPU time is divided, outermost first."""

    kernel: Annotated[str, _build_pattern_meta("these kernels")] = ""
    by: Annotated[
        str,
        Meta(
            pattern=WORD_LIST,
            description="by what, outermost first: kind, bound, kernel, job, division",
        ),
    ] = "kind"


class AttributionQuery(TimeQuery, frozen=True):
    """A range of time, filters, and by what device time is divided, outermost first; `over`: told
    apart by hour or day.

    `top`: so many parts of each part, the largest; the others are one part, so that all levels have
    the same sum.
    """

    by: Annotated[
        str,
        Meta(
            pattern=WORD_LIST,
            description="by what, outermost first: division, product, user, job, host, device_model",
        ),
    ] = "division,product,user"
    over: Annotated[
        Literal["", "hour", "day"], Meta(description="tell hours or days apart, for a curve")
    ] = ""
    top: Annotated[
        int, Meta(ge=1, le=100, description="so many parts of each part; the others are one")
    ] = 20


class ToplineQuery(PagedQuery, frozen=True):
    """A range of time, filters, and what a row is of; `by` "": everything in one row."""

    by: Annotated[
        str, Meta(pattern=OPTIONAL_WORD, description="what a row is of: model, job, user, host")
    ] = ""


class InvestmentQuery(PagedQuery, frozen=True):
    """A range of time, filters, and by what savings are divided, outermost first."""

    by: Annotated[
        str,
        Meta(pattern=WORD_LIST, description="by what, outermost first: rule, job, division, user"),
    ] = "rule"


class RuleQuery(PagedQuery, frozen=True):
    """A range of time, filters, and of which rule."""

    rule: Annotated[str, _build_pattern_meta("findings of these rules")] = ""


class Period(NamedTuple):
    """A half-open time range, ns since the epoch; `open`: it extends to now."""

    since_ns: int
    until_ns: int
    open: bool

    @classmethod
    def of(cls, query: TimeQuery, now_ns: int) -> Period:
        """Returns the time range of a query.

        Raises:
            HttpError: `wrong-request`: an invalid time, or the end is before the beginning.
        """
        since_ns = parse_time(query.since, now_ns)
        until_ns = parse_time(query.until, now_ns) if query.until else now_ns
        if since_ns >= until_ns:
            raise make_bad_request("`until` is before `since`")
        since_ns -= since_ns % (DAY_NS if until_ns - since_ns >= _MIN_DAYS_RANGE_NS else HOUR_NS)
        return cls(since_ns, -(-until_ns // HOUR_NS) * HOUR_NS, not query.until)


def describe_parameters(parameters: type[msgspec.Struct]) -> dict[str, dict[str, object]]:
    """Returns the JSON schema of each parameter, with its description and, if any, its default."""
    return {
        field.name: msgspec.json.schema(field.type)
        | ({} if field.required else {"default": field.default})
        for field in msgspec.structs.fields(parameters)
    }


class QuestionFrames:
    """Rows of the tables that a query selects.

    Args:
        tables: The tables.
        query: Selects rows.
        period: Time range.
        rules: Owner rules.
        prices: Prices of time and energy.
    """

    def __init__(
        self,
        tables: Tables,
        query: TimeQuery,
        period: Period,
        rules: Sequence[OwnerRule] = (),
        prices: Prices | None = None,
    ) -> None:
        self.tables, self.asked, self.period, self.rules, self.prices = (
            tables,
            query,
            period,
            rules,
            prices,
        )
        self._first = get_utc_day(period.since_ns)
        self._last = None if period.open else get_utc_day(period.until_ns - 1)

    @cached_property
    def owned(self) -> pl.DataFrame:
        """Owners of jobs, as of `compute_ownership_periods`, including jobs that began before the
        range.
        """
        return self.owned_by(self.rules)

    def owned_by(self, rules: Sequence[OwnerRule]) -> pl.DataFrame:
        return compute_ownership_periods(
            self.tables.scan("jobs", None, self._last), self.tables.scan("owners"), rules
        )

    @cached_property
    def captures(self) -> pl.LazyFrame:
        """Captures that began in the range, filtered by job, device and host."""
        captures = self._within(self.tables.scan("captures", self._first, self._last), "start_ns")
        captures = self._of_jobs(captures, "start_ns")
        if self.asked.host or self.asked.device_model:
            captures = captures.join(self._devices, on="capture", how="semi")
        return captures

    @property
    def devices(self) -> pl.LazyFrame:
        """Devices of these captures, filtered by device model and host."""
        return self._of_captures(self._devices)

    @property
    def kernels(self) -> pl.LazyFrame:
        """Kernels of these captures, filtered by host and device."""
        kernels = self.tables.scan("kernels", self._first, self._last)
        if kernel := getattr(self.asked, "kernel", ""):
            kernels = kernels.filter(match_pattern(pl.col("kernel"), kernel))
        if self.asked.device_model:
            kernels = kernels.filter(match_pattern(pl.col("device_model"), self.asked.device_model))
        if self.asked.host:
            kernels = kernels.join(
                self._devices, on=["capture", "rank"], how="semi", nulls_equal=True
            )
        return self._of_captures(kernels)

    @property
    def findings(self) -> pl.LazyFrame:
        return self._of_captures(self.tables.scan("findings", self._first, self._last))

    @property
    def usage(self) -> pl.LazyFrame:
        """Hours of devices, filtered by job, device and host; without filters, all."""
        rows = self._of_places(
            self._within(self.tables.scan("usage_hour", self._first, self._last), "time_ns")
        )
        if self.asked.of_jobs:
            rows = rows.filter(~pl.col("state").is_in((UNALLOCATED, UNREACHABLE)))
        return self._of_jobs(rows, "time_ns")

    @property
    def _devices(self) -> pl.LazyFrame:
        return self._of_places(self.tables.scan("devices", self._first, self._last))

    def _of_places(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        for name, pattern in (("device_model", self.asked.device_model), ("host", self.asked.host)):
            if pattern:
                rows = rows.filter(match_pattern(pl.col(name), pattern))
        return rows

    def _within(self, rows: pl.LazyFrame, time: str) -> pl.LazyFrame:
        """Filters by time: whole days are read, but the range may begin or end within a day."""
        if self.period.since_ns % DAY_NS:
            rows = rows.filter(pl.col(time) >= self.period.since_ns)
        if not self.period.open and self.period.until_ns % DAY_NS:
            rows = rows.filter(pl.col(time) < self.period.until_ns)
        return rows

    def _of_captures(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        covers_whole_days = not self.period.since_ns % DAY_NS and (
            self.period.open or not self.period.until_ns % DAY_NS
        )
        if covers_whole_days and not (
            self.asked.of_jobs or self.asked.host or self.asked.device_model
        ):
            return rows
        return rows.join(self.captures.select("capture"), on="capture", how="semi")

    def _of_jobs(self, rows: pl.LazyFrame, time: str) -> pl.LazyFrame:
        """Filters rows by job, and by its owners at the row's time."""
        job_filters = dict(self.asked.of_jobs)
        if job := job_filters.pop("job", ""):
            rows = rows.filter(match_pattern(pl.col("job"), job))
        if not job_filters:
            return rows
        until = pl.col("from_ns").shift(-1).over("job").fill_null(LATEST)
        ownership = self.owned.lazy().select("job", "from_ns", *job_filters, until_ns=until)
        columns = rows.collect_schema().names()
        # a job without any facts has no owners at any time
        dated = rows.join(ownership, on="job", how="left").filter(
            pl.col(time).is_between(
                pl.col("from_ns").fill_null(EARLIEST),
                pl.col("until_ns").fill_null(LATEST),
                closed="left",
            ),
            *(
                match_pattern(pl.col(name).fill_null(UNATTRIBUTED), pattern)
                for name, pattern in job_filters.items()
            ),
        )
        return dated.select(columns)


MAX_ROWS = 5_000
"""Max rows of a table in an answer that is not paged."""

_UNIT_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("text", "name"), str | None),
    **dict.fromkeys(("count", "bytes"), int | None),
    # a mean time is not a whole number of ns
    "time": int | float | None,
}
_DIMENSION_TYPE: Any = Annotated[
    str | msgspec.UnsetType, Meta(description="its value, where it is asked for")
]


@dataclass(frozen=True)
class AnswerTable:
    """A table of an answer.

    Attributes:
        meaning: What a row is, and how rows are ordered.
        columns: Their declarations.
        types: Types of columns that do not follow from their unit.
        divided: Dimensions that rows also have if requested, each as a text.
    """

    meaning: str
    columns: Mapping[str, Column]
    types: Mapping[str, Any] = field(default_factory=dict)
    divided: tuple[str, ...] = ()

    def row(self, name: str) -> Any:
        """Returns the struct type of a row; dimensions that were not requested are unset."""
        fields: list[Any] = [(key, _DIMENSION_TYPE, msgspec.UNSET) for key in self.divided]
        fields += [
            (key, _build_type(column, self.types.get(key))) for key, column in self.columns.items()
        ]
        return msgspec.defstruct(
            name, fields, bases=(HttpResponseBody,), frozen=True, kw_only=True, module=__name__
        )


def _build_type(column: Column, kind: Any = None) -> Any:
    return Annotated[
        kind or _UNIT_TYPES.get(column.unit, float | None),
        Meta(description=column.meaning + (f"; null: {column.unknown}" if column.unknown else "")),
    ]


@dataclass(frozen=True)
class Question:
    """A question about the tables.

    Attributes:
        name: Name of its command.
        summary: The question, as a fragment.
        parameters: Type of its parameters.
        tables: Field of the result -> its table; the first one is paged.
        facts: Other fields of the result.
        reads: The tables that it reads.
        compute: Computes the result.
        route: Path below `/api/v1/`; "": its name.
    """

    name: str
    summary: str
    parameters: type[TimeQuery]
    tables: Mapping[str, AnswerTable]
    facts: Mapping[str, Column]
    reads: tuple[str, ...]
    compute: Callable[[QuestionFrames, Any], Result]
    route: str = ""

    @property
    def path(self) -> str:
        return f"/api/v1/{self.route or self.name}"

    @cached_property
    def answer(self) -> type[msgspec.Struct]:
        """Struct type of its answer, with a description of each field."""
        title = "".join(word.title() for word in self.name.split("-"))
        fields: list[Any] = [
            *(
                (name, Annotated[int, Meta(description=meaning)])
                for name, meaning in _TIME_FACTS.items()
            ),
            *(
                (name, _build_type(column, _FACT_TYPES.get(name)))
                for name, column in self.facts.items()
            ),
            *(
                (
                    name,
                    Annotated[
                        list[table.row(f"{title}{name.title()}")],  # type: ignore[misc]
                        Meta(description=table.meaning),
                    ],
                )
                for name, table in self.tables.items()
            ),
            ("more", Annotated[bool, Meta(description="whether there are rows after these")]),
            ("lacking", Annotated[int, Meta(description=_LACKING)], 0),
        ]
        return msgspec.defstruct(
            f"{title}Answer",
            fields,
            bases=(HttpResponseBody,),
            frozen=True,
            kw_only=True,
            namespace={"__doc__": f"{self.summary[0].upper()}{self.summary[1:]}."},
            module=__name__,
        )

    def ask(self, frames: QuestionFrames, query: TimeQuery) -> msgspec.Struct:
        """Computes the answer, limited to the requested rows of each table.

        Raises:
            UsageError: As of `compute`.
        """
        result = self.compute(frames, query)
        answer: dict[str, object] = {
            "since_ns": frames.period.since_ns,
            "until_ns": frames.period.until_ns,
        }
        for name in self.tables:
            answer[name] = getattr(result, name).head(MAX_ROWS).to_dicts()
        first: pl.DataFrame = getattr(result, next(iter(self.tables)))
        skip, top = (query.skip, query.top) if isinstance(query, PagedQuery) else (0, MAX_ROWS)
        answer[next(iter(self.tables))] = first[skip : skip + top].to_dicts()
        has_more = first.height > skip + top
        facts = {name: getattr(result, name) for name in self.facts}
        return msgspec.convert(answer | facts | {"more": has_more}, self.answer)


_LACKING = "captures of any time that are in no answer yet: they wait, or are in quarantine"
_TIME_FACTS = {"since_ns": "begin of what was looked at, Unix time", "until_ns": "its end"}
_FACT_TYPES: Mapping[str, Any] = {"by": tuple[str, ...] | str}
