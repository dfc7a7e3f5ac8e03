"""Schemas of the fleet's tables, and computation of usage per minute and hour.

All tables are partitioned by `day`. Times are int64 nanoseconds, instants Unix time; unknown values
are null. docs/reference/fleet-tables.md is generated from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone

import numpy as np
import polars as pl

from traceloom.analyze.idle import CAUSES
from traceloom.trace.array_types import Floats, Ints
from traceloom.trace.columns import find_column
from traceloom.trace.columns.declare import Column

VERSION = 1
"""Version of all schemas together; a service refuses tables of another version."""

STATES = ("busy", "idle-allocated", "unallocated", "unreachable")
"""States of a device: it computes; a job holds it; nobody holds it; its agent does not respond."""

MINUTE_MS = 60_000
BUSY, ALLOCATED, UNALLOCATED, UNREACHABLE = STATES

DIMENSIONS = ("division", "product", "application", "model", "user", "framework")
"""Attributes of a job that owners can set, besides its name."""

_NOT_SAID = "nobody says it"
_NO_STEPS = "the trace holds no whole step"
_NO_MODEL = "the file does not name the device"


@dataclass(frozen=True, slots=True)
class TableSchema:
    """Schema of one table.

    Attributes:
        name: Name of the table and of its directory.
        meaning: Meaning of a row.
        types: The columns in order, `day` first.
        columns: Their declarations.
        keep_days: Days after which rows are removed; None: never.
    """

    name: str
    meaning: str
    types: pl.Schema
    columns: Mapping[str, Column]
    keep_days: int | None = None

    def empty(self) -> pl.DataFrame:
        """Returns the table without rows."""
        return pl.DataFrame(schema=self.types)

    def complete(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Returns rows with all columns of the table, in its order and types; missing columns are
        null.

        Raises:
            ValueError: The frame has a column that the table does not have.
        """
        if unknown := set(frame.columns) - set(self.types):
            raise ValueError(f"`{self.name}` has no column {', '.join(sorted(unknown))}")
        return frame.select(
            pl.col(key).cast(kind) if key in frame.columns else pl.lit(None, kind).alias(key)
            for key, kind in self.types.items()
        )


_DAY_COLUMN = Column(
    "text",
    "Day",
    "day in UTC of the start of the capture or of the time, which tables are partitioned by",
)
_CAPTURE_COLUMN = Column("text", "Capture", "name of the capture")
_MODEL_COLUMN = Column("text", "Device", "model of the device", _NO_MODEL)
_JOB_COLUMN = Column("text", "Job", "name of the job", "it belongs to none, or nothing says which")

_OWNER_COLUMNS: dict[str, Column] = {
    "job": Column("text", "Job", "name of the job"),
    "scheduler": Column(
        "text", "Scheduler", "what started the job: slurm, kubernetes, ...", "nothing names it"
    ),
    "user": Column("text", "User", "who started it", _NOT_SAID),
    "model": Column("text", "Model", "model that is trained or served", _NOT_SAID),
    "product": Column("text", "Product", "product that it is for", _NOT_SAID),
    "division": Column("text", "Division", "division that pays for it", _NOT_SAID),
    "application": Column(
        "text", "Application", "sort of work: training, inference, evaluation, ...", _NOT_SAID
    ),
    "framework": Column(
        "text", "Framework", "framework that it runs on", "no framework was seen in its processes"
    ),
    "labels": Column(
        "text", "Labels", "labels of the job, as JSON text of an object of texts", "it has none"
    ),
    "valid_from_ns": Column("time", "From", "from when on this holds, Unix time"),
    "valid_to_ns": Column("time", "Until", "when it ceases to hold, Unix time", "it holds on"),
}

_USAGE_COLUMNS: dict[str, Column] = {
    "time_ns": Column("time", "Time", "start of the minute or hour, Unix time"),
    "host": Column("text", "Host", "name of the host"),
    "device": Column("text", "Device", "uuid of the device"),
    "device_model": Column("text", "Model", "model of the device", "the agent does not name it"),
    "job": _JOB_COLUMN,
    "state": Column("text", "State", f"what the device was in: {', '.join(STATES)}"),
    "device_ms": Column(
        "count",
        "Device time, ms",
        "share of the device's time, milliseconds: of each device and minute they add up to 60,000",
    ),
    "busy_ms": Column(
        "count",
        "Own busy time, ms",
        "time in which the job itself kept the device busy, ms; what several do at once counts for each",
        "only busy time has it, where it is measured",
    ),
    "energy_mj": Column(
        "count", "Energy, mJ", "energy of the share, millijoules", "the device does not measure it"
    ),
    "flops_low": Column(
        "flops", "FLOPs, least", "operations of the share, at least", "they are not measured"
    ),
    "flops_high": Column(
        "flops", "FLOPs, most", "operations of the share, at most", "they are not measured"
    ),
    "input_bytes": Column(
        "bytes", "Input", "bytes of input that the job read meanwhile", "nothing says how many"
    ),
}

_UNIT_TYPES = {
    **dict.fromkeys(("text", "name"), pl.String()),
    **dict.fromkeys(("time", "bytes", "count"), pl.Int64()),
    **dict.fromkeys(("share", "number", "flops"), pl.Float64()),
}
_OTHER_TYPES = {"day": pl.Date(), "notices": pl.List(pl.String())}


def _define_table(
    name: str, meaning: str, columns: Mapping[str, Column], keep_days: int | None = None
) -> TableSchema:
    declared = {"day": _DAY_COLUMN, **columns}
    types = {
        key: _OTHER_TYPES.get(key, _UNIT_TYPES[declaration.unit])
        for key, declaration in declared.items()
    }
    return TableSchema(name, meaning, pl.Schema(types), declared, keep_days)


def _get_shared_columns(*names: str) -> dict[str, Column]:
    return {name: find_column(name) for name in names}


SCHEMAS: dict[str, TableSchema] = {
    table.name: table
    for table in (
        _define_table(
            "captures",
            "one capture, as it was analysed last",
            {
                "capture": _CAPTURE_COLUMN,
                "request": Column(
                    "text", "Request", "request that it answers", "it was uploaded unasked"
                ),
                "job": _JOB_COLUMN,
                "start_ns": Column("time", "At", "start of its first event, Unix time"),
                "window_ns": Column(
                    "time", "Window", "from the first to the last event of all its ranks"
                ),
                "ranks": Column("count", "Ranks", "ranks that were captured"),
                "hosts": Column(
                    "count", "Hosts", "hosts that they ran on", "no file names its host"
                ),
                "device_model": Column(
                    "text", "Device", "model of its devices, where all are alike", _NO_MODEL
                ),
                "torch": Column(
                    "text", "PyTorch", "version of PyTorch", "the capture does not say it"
                ),
                "code": Column(
                    "text",
                    "Code",
                    "version of the program, such as a commit",
                    "the job does not say it",
                ),
                "step_ns": Column(
                    "time", "Step", "median duration of the whole steps of all ranks", _NO_STEPS
                ),
                "mfu": Column(
                    "share", "MFU", "as in the report, mean over the ranks", "the report has none"
                ),
                "roofline_fraction": Column(
                    "share",
                    "Roofline",
                    "share of the roofline that the steps reach, mean over the ranks",
                    "the report has none",
                ),
                "notices": Column("text", "Notices", "slugs of its notices, each once, in order"),
                "version": Column("text", "Version", "version of Traceloom that analysed it"),
            },
        ),
        _define_table(
            "devices",
            "one device of one rank in a capture: compute, exposed communication, exposed memory and idle time add up "
            "to the window, the causes of idle time to idle time",
            {
                "capture": _CAPTURE_COLUMN,
                **_get_shared_columns("rank", "host", "device"),
                "device_model": _MODEL_COLUMN,
                "window_ns": Column("time", "Window", "from the first to the last GPU work"),
                **_get_shared_columns("busy_ns", "idle_ns"),
                **{
                    f"idle_{cause}_ns": Column(
                        "time", f"Idle: {cause.replace('_', ' ')}", f"idle time: {meaning}"
                    )
                    for cause, meaning in CAUSES.items()
                },
                **_get_shared_columns(
                    "compute_ns",
                    "communication_ns",
                    "memory_ns",
                    "exposed_communication_ns",
                    "exposed_memory_ns",
                ),
            },
        ),
        _define_table(
            "kernels",
            "GPU work of a rank of a capture with the same kernel, operator, shapes, types and bound; of a capture the "
            "totals add up to all its GPU work",
            {
                "capture": _CAPTURE_COLUMN,
                **_get_shared_columns("rank"),
                "device_model": _MODEL_COLUMN,
                **_get_shared_columns("kernel"),
                "kind": Column(
                    "text", "Kind", "kind of work: gemm, attention, elementwise, copy, ..."
                ),
                "bound": Column(
                    "text", "Bound by", "what limits it: compute, memory, latency or unknown"
                ),
                **_get_shared_columns("op"),
                "shapes": Column(
                    "name", "Shapes", "shapes of its inputs, as JSON text", "they were not recorded"
                ),
                "types": Column(
                    "text",
                    "Types",
                    "element types of its inputs, as JSON text",
                    "they were not recorded",
                ),
                "count": Column("count", "Count", "pieces of GPU work"),
                **_get_shared_columns("total_ns"),
                "min_ns": Column("time", "Min", "shortest piece of work"),
                "max_ns": Column("time", "Max", "longest piece of work"),
                "roofline_ns": Column(
                    "time",
                    "At the peaks",
                    "time that its FLOPs or bytes need at the peaks of the device",
                    "of a part of it there is no model",
                ),
                "clock_hz": Column(
                    "number",
                    "Clock",
                    "mean clock of the device in the window, Hz",
                    "no telemetry was captured",
                ),
            },
        ),
        _define_table(
            "findings",
            "one finding of a capture",
            {
                "capture": _CAPTURE_COLUMN,
                "slug": Column(
                    "text", "Rule", "rule that it comes from, as `traceloom explain` names it"
                ),
                "saving_ns": Column(
                    "time", "Saves", "what fixing it saves per step", "it saves no time"
                ),
                "saving_fraction": Column(
                    "share", "Of the step", "the same over the step", "it saves no time"
                ),
                "confidence": Column("share", "Confidence", "how sure the rule is, 0 to 1"),
                "rank": Column(
                    "count",
                    "Rank",
                    "rank that its first evidence is of",
                    "it is about no single rank",
                ),
            },
        ),
        _define_table(
            "usage_minute",
            "a share of a device's minute, by job and state",
            _USAGE_COLUMNS,
            keep_days=30,
        ),
        _define_table("usage_hour", "the same, added up over an hour", _USAGE_COLUMNS),
        _define_table("jobs", "what a job, its scheduler and its agents say of it", _OWNER_COLUMNS),
        _define_table("owners", "what people say of a job, which goes before that", _OWNER_COLUMNS),
    )
}
"""Schemas by table, in the order of the documentation."""


def get_utc_day(time_ns: int) -> date:
    """Returns the UTC day of a Unix time in nanoseconds.

    Raises:
        ValueError, OverflowError: It is outside the years 1 to 9999.
    """
    return datetime.fromtimestamp(time_ns // 1_000_000_000, timezone.utc).date()


_DEVICE_KEYS = ("time_ns", "host", "device")
_MINUTE_NS = MINUTE_MS * 1_000_000
_HOUR_NS = 60 * _MINUTE_NS
_MAX_AMOUNT = 1e18  # larger amounts are invalid, and their sum would overflow 64 bits
_TEXT_COLUMNS = ("host", "device", "device_model", "job", "state")
_AMOUNT_COLUMNS = ("busy_ms", "energy_mj", "flops_low", "flops_high", "input_bytes")
# Sums of amounts; null if no value is known.
_AMOUNT_SUMS = [
    pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)
    for name in _AMOUNT_COLUMNS
]


def compute_usage_minutes(observed: pl.DataFrame, due: pl.DataFrame | None = None) -> pl.DataFrame:
    """Computes rows of `usage_minute` from observations.

    The parts of a device's minute are rounded to whole milliseconds by largest remainder, with ties
    in the order of state and job. The rest of a minute is `unreachable`. Parts that add up to more
    than a minute, as from an agent that was polled twice or whose clock jumped, are scaled down to
    one.

    Args:
        observed: Columns of `usage_minute` except `day`; `device_ms` and the amounts may be
            fractional. Rows of one device, minute, job and state are added up. A time inside a
            minute counts for that minute; parts that are not positive are dropped, amounts that are
            negative or not finite are unknown.
        due: `time_ns` (start of a minute), `host`, `device`, `device_model` of devices that should
            have reported: those without observations in the minute are unreachable for all of it.
    """
    amounts = {name: pl.col(name).cast(pl.Float64) for name in ("device_ms", *_AMOUNT_COLUMNS)}
    parts = observed.select(
        pl.col("time_ns") // _MINUTE_NS * _MINUTE_NS,
        *(pl.col(name).cast(pl.String) for name in _TEXT_COLUMNS),
        *(
            pl.when(amount.is_between(0.0, _MAX_AMOUNT)).then(amount).alias(name)
            for name, amount in amounts.items()
        ),
    ).filter(pl.col("device_ms") > 0)
    if due is not None:
        silent = due.select(*_DEVICE_KEYS, "device_model").join(parts, on=_DEVICE_KEYS, how="anti")
        parts = pl.concat(
            [parts, silent.with_columns(state=pl.lit(UNREACHABLE), device_ms=0.0)], how="diagonal"
        )
    # Grouping and sorting integer codes takes a fraction of the time of strings.
    values = {name: parts[name].drop_nulls().unique() for name in _TEXT_COLUMNS}
    values["state"] = pl.concat([values["state"], pl.Series([UNREACHABLE])]).unique()
    orders = pl.Schema({name: pl.Enum(texts.sort()) for name, texts in values.items()})
    summed = (
        parts.cast(orders)
        .group_by(*_DEVICE_KEYS, "state", "job")
        .agg(pl.col("device_ms").sum(), *_AMOUNT_SUMS, pl.col("device_model").drop_nulls().first())
    )
    lost = (
        summed.group_by(_DEVICE_KEYS)
        .agg(
            pl.col("device_model").drop_nulls().first(),
            device_ms=MINUTE_MS - pl.col("device_ms").sum(),
        )
        .filter(pl.col("device_ms") > 0)
        .with_columns(state=pl.lit(UNREACHABLE, orders["state"]))
    )
    rows = pl.concat([summed, lost], how="diagonal").sort(*_DEVICE_KEYS, "state", "job")
    rows = rows.with_columns(
        device_ms=_fit_to_minutes(rows["device_ms"].to_numpy(), rows.select(_DEVICE_KEYS))
    )
    return (
        rows.filter(pl.col("device_ms") > 0).lazy().pipe(_cast_to_schema, "usage_minute").collect()
    )


def _fit_to_minutes(parts: Floats, device_minutes: pl.DataFrame) -> Ints:
    """Rounds parts to whole milliseconds so that each device and minute adds up to 60,000.

    Parts of a device and minute must be adjacent.
    """
    if not parts.size:
        return np.empty(0, dtype=np.int64)
    group = (
        device_minutes.select(pl.struct(pl.all()).rle_id()).to_series().to_numpy().astype(np.int64)
    )
    first = np.flatnonzero(np.diff(group, prepend=-1))
    exact = parts * (MINUTE_MS / np.add.reduceat(parts, first))[group]
    floor = np.floor(exact)
    missing_ms = MINUTE_MS - np.add.reduceat(floor, first)
    # Stable sort by remainder within each group: equal remainders keep their order.
    remainder_order = np.argsort(group + (floor - exact), kind="stable")
    rank_in_group = np.empty(parts.size, dtype=np.int64)
    rank_in_group[remainder_order] = np.arange(parts.size) - first[group]
    return np.asarray(floor + (rank_in_group < missing_ms[group]), dtype=np.int64)


def compute_usage_hours(usage_minute: pl.DataFrame) -> pl.DataFrame:
    """Computes rows of `usage_hour` from rows of `usage_minute` or `usage_hour`.

    A partial hour gives a partial row.
    """
    rows = (
        usage_minute.with_columns(pl.col("time_ns") // _HOUR_NS * _HOUR_NS)
        .group_by(*_DEVICE_KEYS, "state", "job")
        .agg(pl.col("device_ms").sum(), *_AMOUNT_SUMS, pl.col("device_model").drop_nulls().first())
        .sort(*_DEVICE_KEYS, "state", "job")
    )
    return rows.lazy().pipe(_cast_to_schema, "usage_hour").collect()


def _cast_to_schema(frame: pl.LazyFrame, table: str) -> pl.LazyFrame:
    types = SCHEMAS[table].types
    rounded = [pl.col(name).round() for name in ("busy_ms", "energy_mj", "input_bytes")]
    return frame.with_columns(
        *rounded, day=pl.from_epoch(pl.col("time_ns"), "ns").dt.date()
    ).select(pl.col(name).cast(kind) for name, kind in types.items())
