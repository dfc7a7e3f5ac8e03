"""The summary of a run that a verdict needs, and its storage as a baseline."""

import gzip
import zlib
from typing import Annotated, Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Meta

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.compare import DECISIVE, MINOR, compare_conditions
from traceloom.analyze.compare_tree import ComparedSteps, select_compared_steps
from traceloom.analyze.gpu_time import gpu_time
from traceloom.analyze.host_events import classify_events
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.memory import memory
from traceloom.analyze.steps import step_times
from traceloom.errors import InputError, UsageError, other_version
from traceloom.system.text import encode_json
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.session import Session, find_unrecorded_steps

FORMAT = "traceloom-baseline"
VERSION = 1
# A summary of a large job has a few MB; anything that decompresses to more is not a summary
_MAX_BYTES = 1 << 28
# Thirty years in ns, an exabyte; beyond, sums and squares overflow.
_BoundedFloat = Annotated[float, Meta(ge=-1e18, le=1e18)]
_BoundedInt = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_UnixSeconds = Annotated[int, Meta(ge=0, le=253_402_300_799)]  # of Unix time, up to the year 9999


class StatedCondition(msgspec.Struct, frozen=True):
    """A recorded condition of a run, and whether times can be compared where it differs."""

    condition: str
    value: str
    weight: str


class OperatorCalls(msgspec.Struct, frozen=True):
    """The operators of a run: name, input shapes (null where not recorded), calls per step.

    Columns of one length.
    """

    operator: list[str]
    shapes: list[str | None]
    count: list[_BoundedFloat]


class RunSummary(msgspec.Struct, frozen=True):
    """Summary of one run. Times are nanoseconds; a value of a step is the mean over ranks (for work
    of devices, their sum).

    Attributes:
        name: Where the run came from.
        stated: Its recorded conditions.
        program: Its operators.
        wall_ns: Wall time of every undisturbed, unrecorded step after the warm-up, in order; null
            where none was kept.
        steps: Numbers of the recorded steps; the columns of `scalars` and `tables`.
        scalars: By metric one value per recorded step; a metric that was not measured is absent.
        tables: By metric and name one value per recorded step.
        began_unix_ns: When the recording of its steps began; null where its traces do not record
            the time of day.
    """

    name: str
    stated: list[StatedCondition]
    program: OperatorCalls
    wall_ns: list[_BoundedFloat] | None
    steps: list[_BoundedInt]
    scalars: dict[str, list[_BoundedFloat]]
    tables: dict[str, dict[str, list[_BoundedFloat]]]
    began_unix_ns: _BoundedInt | None


class Baseline(msgspec.Struct, frozen=True):
    """A stored baseline: the summaries of its runs."""

    format: str
    version: int
    traceloom: str
    name: str
    saved_unix_s: _UnixSeconds
    runs: list[RunSummary]

    def check(self) -> None:
        """Checks that there are runs, that each has steps and their times, and that all its columns
        have one length.

        Raises:
            ValueError: A check fails.
        """
        if not self.runs:
            raise ValueError("no runs")
        for run in self.runs:
            columns = [
                *run.scalars.values(),
                *(values for table in run.tables.values() for values in table.values()),
            ]
            program = run.program
            even = len(program.operator) == len(program.shapes) == len(program.count)
            if (
                not run.steps
                or not even
                or any(len(values) != len(run.steps) for values in columns)
            ):
                raise ValueError("columns of several lengths")
            if "step_time" not in run.scalars:
                raise ValueError("no times of steps")


def encode(baseline: Baseline) -> bytes:
    """Returns the baseline as compressed JSON; the same bytes for the same content."""
    return gzip.compress(encode_json(baseline), mtime=0)


def decode(data: bytes, location: str) -> Baseline:
    """Decodes a baseline.

    Raises:
        InputError: `damaged-baseline`: it is not one, or is truncated; `other-version`.
    """
    try:
        unfolder = zlib.decompressobj(wbits=31)
        head: dict[str, Any] = msgspec.json.decode(unfolder.decompress(data, _MAX_BYTES), type=dict)
        if unfolder.eof and head.get("format") == FORMAT:
            if head.get("version") != VERSION:
                raise other_version("baseline", head.get("version"), VERSION, location)
            baseline = msgspec.convert(head, Baseline)
            baseline.check()
            return baseline
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        pass  # one message for all of them, below
    raise InputError(
        "this is no baseline, or it is damaged",
        slug="damaged-baseline",
        where=location,
        hint="save it again",
    )


_LONG_SCHEMA = build_schema("metric name step value")
_MEMORY_METRIC = "memory_peak"
_MAX_OPERATORS = 5_000
_IGNORED_CONDITIONS = ("whole steps", "steps known by")  # they depend on how long was recorded
_MACHINE_CONDITIONS = {
    "processor": "processor",
    "usable_cpus": "usable processor cores",
    "torch_threads": "threads of torch",
}


def summarise(run: Session) -> RunSummary:
    """Measures one run, step by step.

    Raises:
        UsageError: `nothing-to-compare`: it holds no timed events.
    """
    all_compared = [select_compared_steps(trace) for trace in run.traces if trace.events.height]
    if not any(int(compared_steps.durations.sum()) for compared_steps in all_compared):
        raise UsageError("a run holds no timed events", slug="nothing-to-compare", where=run.name)
    rank_values = [_measure_rank(compared_steps) for compared_steps in all_compared]
    common = set.intersection(
        *({*_get_step_numbers(compared_steps).to_list()} for compared_steps in all_compared)
    )
    steps = sorted(common)
    # Ranks that were recorded at other times: the n-th step of one corresponds to the n-th of the
    # other
    if not steps:
        steps = list(range(min(compared_steps.step.len() for compared_steps in all_compared)))
        for index, compared_steps in enumerate(all_compared):
            order = pl.DataFrame(
                {
                    "step": _get_step_numbers(compared_steps),
                    "at": pl.Series(range(compared_steps.step.len()), dtype=pl.Int32),
                }
            )
            numbered = rank_values[index].join(order, on="step").drop("step").rename({"at": "step"})
            rank_values[index] = numbered.select(list(_LONG_SCHEMA))
    # One column per metric and name: the mean over ranks (for memory the max); missing values are
    # 0.
    step_rows = pl.DataFrame({"step": steps}, schema={"step": pl.Int32}).with_row_index("at")
    values = pl.concat(rank_values).join(step_rows, on="step").group_by("metric", "name", "at")
    over_ranks = values.agg(
        pl.when(pl.col("metric").first() == _MEMORY_METRIC)
        .then(pl.col("value").max())
        .otherwise(pl.col("value").sum() / len(rank_values))
    )
    scalars: dict[str, list[float]] = {}
    tables: dict[str, dict[str, list[float]]] = {}
    ordered = over_ranks.sort("metric", "name", "at")
    for (metric, name), part in ordered.group_by("metric", "name", maintain_order=True):
        column = np.zeros(len(steps))
        column[part["at"].to_numpy()] = part["value"].to_numpy()
        if name is None:
            scalars[str(metric)] = column.tolist()
        else:
            tables.setdefault(str(metric), {})[str(name)] = column.tolist()
    began = min(
        (trace.start_ns for trace in run.traces if trace.meta.clock == "unix"), default=None
    )
    # Operators with their input shapes, calls per step and rank; the most frequent where there are
    # very many.
    parts = []
    for compared_steps in all_compared:
        trace = compared_steps.trace
        rows = trace.events.filter(pl.col("category") == "op").select("event", "name", "step")
        op_rows = _filter_compared_steps(rows, compared_steps).join(
            trace.tensors.select("event", "shapes"), on="event", how="left"
        )
        counts = op_rows.group_by("name", "shapes").agg(pl.len().alias("count"))
        parts.append(
            counts.with_columns(
                pl.col("count") / (compared_steps.spans.start.size * len(all_compared))
            )
        )
    calls = pl.concat(parts).group_by("name", "shapes").agg(pl.col("count").sum())
    calls = calls.sort("count", "name", "shapes", descending=[True, False, False]).head(
        _MAX_OPERATORS
    )
    program = OperatorCalls(
        calls["name"].to_list(), calls["shapes"].to_list(), calls["count"].to_list()
    )
    # The recorded conditions of the run and its machine; unknown ones are left out.
    rows = compare_conditions(run, run).filter(~pl.col("condition").is_in(_IGNORED_CONDITIONS))
    stated = [
        StatedCondition(name, value, weight)
        for name, value, weight in rows.select("condition", "base", "weight").rows()
    ]
    has_gpu = any(trace.gpu_work().height for trace in run.traces)
    for key, name in _MACHINE_CONDITIONS.items():
        described = {
            str(value) for t in run.traces if (value := (t.meta.capture or {}).get(key)) is not None
        }
        if described:
            stated.append(
                StatedCondition(name, ", ".join(sorted(described)), MINOR if has_gpu else DECISIVE)
            )
    return RunSummary(
        run.name, stated, program, _collect_wall_times(run), steps, scalars, tables, began
    )


def _get_step_numbers(compared_steps: ComparedSteps) -> pl.Series:
    """Returns the number of each compared step; the window of a trace without steps is -1."""
    return compared_steps.step.fill_null(-1).cast(pl.Int32)


def _measure_rank(compared_steps: ComparedSteps) -> pl.DataFrame:
    """Returns everything that is measured of one rank: `metric`, `name` (null of a whole step),
    `step`, `value`.
    """
    trace = compared_steps.trace
    parts = [
        _convert_to_long(
            "step_time",
            pl.DataFrame(
                {"step": _get_step_numbers(compared_steps), "value": compared_steps.durations}
            ),
        )
    ]
    if trace.gpu_work().height:
        times = gpu_time(trace)
        if compared_steps.step.null_count():
            edge = pl.lit(0)  # without steps only the window of a device exists
            device_times = times.devices.with_columns(pl.lit(-1, pl.Int32).alias("step"))
        else:
            edge = pl.col("edge_idle_before_ns") + pl.col("edge_idle_after_ns")
            device_times = _filter_compared_steps(times.steps, compared_steps)
        sums = device_times.group_by("step").agg(
            pl.col("busy_ns").sum().alias("gpu_time"),
            pl.col("exposed_communication_ns").sum().alias("exposed_communication"),
            (pl.col("idle_ns") + edge).alias("idle").sum(),
        )
        parts += [
            _convert_to_long(metric, sums.select("step", value=metric))
            for metric in sums.columns
            if metric != "step"
        ]
        if not compared_steps.step.null_count():
            parts.append(
                _convert_to_long(
                    "launches",
                    _filter_compared_steps(
                        step_times(trace).steps.select("step", value="launch_count"), compared_steps
                    ),
                )
            )
        duration = pl.col("duration_ns").clip(lower_bound=0).alias("value")
        work = _filter_compared_steps(
            trace.gpu_work().select("event", "name", "step", "op", duration), compared_steps
        )
        kind = classify_kinds(trace).select("event", name=pl.col("kind").cast(pl.String))
        owner = trace.events.select(op="event", operator="name")
        parts += [
            _convert_to_long("kernel", work),
            _convert_to_long("kind", work.drop("name").join(kind, on="event", how="left")),
            _convert_to_long("op_gpu", work.join(owner, on="op").with_columns(name="operator")),
        ]
    # Host time in which an operator is the innermost one.
    tree, is_op = build_forest(trace), classify_events(trace).op
    operators = np.flatnonzero(is_op)
    self_ns = tree.self_ns(is_op, tree.nearest(is_op))[operators]
    rows = trace.events.select("name", "step")[tree.row[operators]].with_columns(
        pl.Series("value", self_ns)
    )
    parts.append(_convert_to_long("op", _filter_compared_steps(rows, compared_steps)))
    # Highest memory in each step, of the device with the most of it, where an amount is known.
    usage = memory(compared_steps.trace)
    # Relative to an unknown amount
    devices = usage.devices.filter(pl.col("evidence") != "running-sum")
    on_device = devices.filter(~pl.col("device_type").str.starts_with("cpu"))
    devices = on_device if on_device.height else devices
    spans = compared_steps.host_spans
    peaks = np.zeros(spans.start.size)
    for kind, device, before in devices.select("device_type", "device", "start_bytes").rows():
        curve = usage.curve.filter((pl.col("device_type") == kind) & (pl.col("device") == device))
        time, level = curve["time_ns"].to_numpy(), curve["allocated_bytes"].to_numpy()
        level = np.append(level, before or 0)  # the last one is for the time before the first
        first = np.searchsorted(time, spans.start, side="right")
        last = np.searchsorted(time, spans.end, side="left")
        for step_index, (low, high) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            highest = int(level[low:high].max()) if high > low else 0
            peaks[step_index] = max(peaks[step_index], highest, float(level[low - 1]))
    if devices.height:
        parts.append(
            _convert_to_long(
                _MEMORY_METRIC,
                pl.DataFrame({"step": _get_step_numbers(compared_steps), "value": peaks}),
            )
        )
    return pl.concat(parts)


def _convert_to_long(metric: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Returns rows of step, value and, where it is of a part of the step, name in the columns of
    `_LONG`, with names summed.
    """
    if "name" in rows.columns:
        rows = rows.group_by("name", "step").agg(pl.col("value").sum())
    else:
        rows = rows.with_columns(pl.lit(None, pl.String).alias("name"))
    return rows.with_columns(pl.lit(metric).alias("metric")).pipe(cast_to_schema, _LONG_SCHEMA)


def _filter_compared_steps(rows: pl.DataFrame, compared_steps: ComparedSteps) -> pl.DataFrame:
    """Returns rows of the compared steps; of a trace without steps all, as step -1."""
    if compared_steps.step.null_count():
        return rows.with_columns(pl.lit(-1, pl.Int32).alias("step"))
    return rows.filter(pl.col("step").is_in(compared_steps.step.implode()))


def _collect_wall_times(run: Session) -> list[float] | None:
    """Returns wall times of the undisturbed steps that every rank has, mean over ranks."""
    frames = []
    for trace in {
        trace.rank: trace for trace in run.traces
    }.values():  # several windows of a rank have one table
        unrecorded = find_unrecorded_steps(trace.meta)
        if unrecorded is None:
            return None
        frames.append(pl.DataFrame({"step": unrecorded[0], "ns": unrecorded[1]}))
    rows = pl.concat(frames).group_by("step").agg(pl.len().alias("ranks"), pl.col("ns").mean())
    wall_times: list[float] = (
        rows.filter(pl.col("ranks") == len(frames)).sort("step")["ns"].to_list()
    )
    return wall_times
