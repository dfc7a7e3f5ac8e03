"""Packs events for the canvas, with stacks and telemetry as overlay.

Events are stored lane by lane, in the order of their start. Times are nanoseconds relative to the
session's epoch, divided by their greatest common divisor (`unit_ns`). References (`launch`,
`forward`) are positions in the payload plus one, 0 for none. `clip` is the part that nesting cuts
off the end of a span. The script derives rows (nesting, overlap) and steps from these, as the
reader does.

Only views do this: no analysis treats stack samples as events, or telemetry as counters of the
trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom import analyze
from traceloom.analyze.kernels import kernel_launches
from traceloom.analyze.roofline import select_modelled_work
from traceloom.report.document import Cells
from traceloom.report.labels import fit_name
from traceloom.report.views.page_table import (
    encode_sparse,
    encode_start_deltas,
    encode_zigzag,
    pack,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.array_types import Floats, Ints
from traceloom.trace.batch import update_event_rows
from traceloom.trace.session import Session
from traceloom.trace.trace import SCHEMAS, Trace
from traceloom.trace.vocabulary import (
    ANNOTATION,
    CATEGORIES,
    COLLECTIVE,
    GPU_ANNOTATION,
    GPU_WORK,
    KERNEL,
    OTHER,
    PYTHON,
)

if TYPE_CHECKING:
    from traceloom.report.documents.report import CurveRow
    from traceloom.report.documents.sections import CriticalPathValue


SCHEMA = {"name": pl.String, "time_ns": pl.Int64, "value": pl.Float64}
_BUCKETS = 500


def build_counters(trace: Trace) -> pl.DataFrame:
    """Returns all curves of a trace: name, time_ns, value; ordered by curve and time."""
    curves = []
    for (kind, device), curve in analyze.memory(trace).curve.group_by(
        "device_type", "device", maintain_order=True
    ):
        device_name = f"{kind} {device}" if isinstance(device, int) and device >= 0 else str(kind)
        for column, label in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved")):
            samples = curve.drop_nulls(column)
            curves.append(
                _build_curve(
                    f"{sanitize(device_name)} memory {label} MB",
                    samples["time_ns"].to_numpy(),
                    (samples[column] / 1e6).to_numpy(),
                )
            )
    return pl.concat([build_non_memory_counters(trace), *curves])


def build_non_memory_counters(trace: Trace) -> pl.DataFrame:
    """As `build_counters`, without the curves of memory, which the page has from the report."""
    curves = [pl.DataFrame(schema=SCHEMA)]
    for (device,), work in trace.gpu_work().group_by("device", maintain_order=True):
        start = work["start_ns"].to_numpy()
        curves.append(
            _build_curve(
                f"GPU {device} busy %",
                *compute_busy_percent(start, start + work["duration_ns"].clip(0).to_numpy()),
            )
        )
        curves.append(_count_queued_launches(trace, work, f"GPU {device} launches waiting"))
    bandwidth = analyze.copies(trace).curve.select(
        name=pl.format("GPU {} {} GB/s", pl.col("device").fill_null(-1), "kind"),
        time_ns="time_ns",
        value=pl.col("bytes_per_s") / 1e9,
    )
    recorded = trace.counters.drop_nulls("value").select(
        name=pl.concat_str("name", "key", separator=" "), time_ns="time_ns", value="value"
    )
    return pl.concat([*curves, bandwidth, recorded])


def _build_curve(name: str, time_ns: Ints, value: NDArray[np.float64]) -> pl.DataFrame:
    return pl.DataFrame(
        {"name": [name] * time_ns.size, "time_ns": time_ns, "value": value}, schema=SCHEMA
    )


def compute_busy_percent(start: Ints, end: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Returns the percentage of each of 500 equal parts of the window in which at least one span
    runs; ends with 0.

    Args:
        start: Starts of the spans, sorted.
        end: Their ends.
    """
    reach = np.maximum.accumulate(end)
    fresh = np.append(True, start[1:] > reach[:-1])
    low = start[fresh]
    high = reach[np.append(np.flatnonzero(fresh)[1:] - 1, start.size - 1)]
    # Relative to the first start: nanoseconds since 1970 exceed the exact range of floats.
    edges = np.unique(
        low[0] + np.linspace(0, int(high[-1] - low[0]), _BUCKETS + 1).astype(np.int64)
    )
    if edges.size < 2:
        return edges, np.zeros(edges.size)
    before = np.append(0, np.cumsum(high - low))
    open_ = np.searchsorted(low, edges, side="right") - 1
    passed = before[open_] + np.minimum(edges, high[open_]) - low[open_]
    return edges, np.append(np.round(np.diff(passed) * 100.0 / np.diff(edges), 1), 0.0)


def _count_queued_launches(trace: Trace, work: pl.DataFrame, name: str) -> pl.DataFrame:
    """Counts launched work that has not begun: up at each launch, down at each start on
    the device.
    """
    launched = work.drop_nulls("launch")
    if not launched.height:
        return pl.DataFrame(schema=SCHEMA)
    begun = trace.events["start_ns"].gather(launched["launch"])
    steps = pl.concat(
        [
            pl.DataFrame({"time_ns": begun, "change": 1}),
            # A kernel that seems to start before its launch (clock error) never waited.
            pl.DataFrame(
                {
                    "time_ns": pl.select(
                        pl.max_horizontal(begun, launched["start_ns"])
                    ).to_series(),
                    "change": -1,
                }
            ),
        ]
    )
    return (
        steps.group_by("time_ns")
        .agg(pl.col("change").sum())
        .sort("time_ns")
        .select(
            name=pl.lit(name), time_ns="time_ns", value=pl.col("change").cum_sum().cast(pl.Float64)
        )
    )


MAX_EVENTS = 1_000_000  # events; about 8 MB of page and 60 MB of browser memory
_FACT_LENGTH = 300  # characters of one argument that are kept
_MAX_NAME_WIDTH = 60  # characters of a name on the canvas
_LANE_ORDER = {"device": 0, "device_annotation": 1, "device_sync": 2, "host": 3, "other": 4}
_EVENT_FACTS = {
    "tensors": {"shapes": "shapes", "types": "types", "concrete": "values"},
    "copies": {
        "kind": "direction",
        "bytes": "bytes",
        "source_memory": "from",
        "target_memory": "to",
    },
    "syncs": {"kind": "waits by", "stream": "stream", "awaited_stream": "awaited stream"},
    "collectives": {
        "kind": "collective",
        "group": "group",
        "group_size": "group size",
        "element_type": "element type",
        "in_elements": "elements in",
        "out_elements": "elements out",
        "in_bytes": "bytes in",
        "out_bytes": "bytes out",
        "sequence": "sequence",
        "peer": "peer",
    },
}
MAX_CURVES = 24  # of a rank; the file for Perfetto has all of them
_MAX_CURVE_POINTS = 600  # of a curve


@dataclass(frozen=True, slots=True)
class TimelinePayload:
    """The packed payload and what it omits.

    Attributes:
        payload: Base64 text, see `traceloom.report.views.page_table`.
        shown: Number of events in it.
        omitted: Number of omitted events by category; empty when all are included.
        window: Its range, from-to in ns of the document's times.
    """

    payload: str
    shown: int
    omitted: dict[str, int]
    window: str


def build(
    session: Session,
    communication: set[str],
    curves: list[CurveRow],
    limit: int = MAX_EVENTS,
    *,
    path: CriticalPathValue | None = None,
    epoch_ns: int | None = None,
) -> TimelinePayload:
    """Packs the events of a session.

    Args:
        session: All traces; one without events gets lanes without events.
        communication: Names of the kernels that are communication; all others count as compute.
        curves: The memory curves of the report document.
        limit: Max number of embedded events, shared fairly between the ranks; see `_select_events`
            for their priority.
        path: The critical path of the report document, where it has one.
        epoch_ns: Time zero of the document; the session's own epoch if None.
    """
    shift = 0 if epoch_ns is None else session.epoch_ns - epoch_ns
    # Small traces keep all events; the rest of the limit is shared evenly by the large ones.
    sizes = [trace.events.height for trace in session.traces]
    quota, remaining = [0] * len(sizes), limit
    for done, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        quota[index] = min(sizes[index], remaining // (len(sizes) - done))
        remaining -= quota[index]
    parts, positions, lanes, first = [], [], [], 0
    for number, (trace, share) in enumerate(zip(session.traces, quota, strict=True)):
        table = _sort_lanes(trace, number)
        part = _select_events(trace, table, share)
        position_of_event = np.full(trace.events.height + 1, 0, dtype=np.int64)
        position_of_event[part["event"].to_numpy()] = np.arange(first + 1, first + 1 + part.height)
        counts = dict(part.group_by("order").len().iter_rows())
        lanes += [
            {**row, "count": counts.get(position, 0)}
            for position, row in enumerate(table.drop("lane", "order").to_dicts())
        ]
        parts.append(part)
        positions.append(position_of_event)
        first += part.height
    columns, tables = _build_columns(session, parts, positions, [lane["count"] for lane in lanes])
    # Names of communication: kernels by name, annotations of a collective.
    collective_names = {sanitize(name) for name in communication}
    for trace in session.traces:
        collectives = trace.events["name"].gather(trace.collectives["event"])
        collective_names.update(sanitize(name) for name in collectives.unique().to_list())
    coded = {CATEGORIES.index(name) for name in (KERNEL, ANNOTATION, GPU_ANNOTATION, COLLECTIVE)}
    tables["communication"] = [
        number
        for number, (name, code) in enumerate(tables["labels"])
        if code in coded and name in collective_names
    ]
    header = {
        "version": 1,
        "epoch_ns": str(session.epoch_ns),
        "shift_ns": shift,
        "span_ns": max((t.end_ns for t in session.traces), default=0) - session.epoch_ns,
        "categories": list(CATEGORIES),
        "ranks": [_build_rank(trace, session.epoch_ns, shift, curves) for trace in session.traces],
        "lanes": [lane for lane in lanes if lane["count"]],
        "path": _build_path(session, lanes, path, shift),
        **tables,
    }
    missing: dict[str, int] = {}
    for trace, part in zip(session.traces, parts, strict=True):
        for sign, frame in (
            ((1, trace.events), (-1, part)) if trace.events.height != part.height else ()
        ):
            for category, count in frame.group_by("category").len().iter_rows():
                missing[category] = missing.get(category, 0) + sign * count
    omitted = {category: count for category, count in missing.items() if count}
    return TimelinePayload(
        pack(header, columns), first, omitted, f"{shift}-{shift + header['span_ns']}"
    )


def _build_path(
    session: Session, lanes: list[dict[str, Any]], path: CriticalPathValue | None, shift: int
) -> dict[str, Any] | None:
    """Returns the critical path as [lane, start, end]; None where there is none, or where none of
    it is on a lane.
    """
    ranks: dict[Any, int] = {}
    for number, trace in enumerate(session.traces):
        ranks.setdefault(0 if trace.rank is None else trace.rank, number)
    keys = ("kind", "process", "thread", "device", "stream")
    lane_numbers = {
        (lane["trace"], *(lane[key] for key in keys)): number
        for number, lane in enumerate([lane for lane in lanes if lane["count"]])
    }
    segments = []
    last = max((trace.end_ns for trace in session.traces), default=0) - session.epoch_ns
    rows: Sequence[Cells] = path["stretches"] if path else ()
    for row in rows:
        lane = lane_numbers.get((ranks.get(row["rank"]), *(row[key] for key in keys)))
        if lane is not None:
            start = row["start_ns"] - shift
            if start + row["duration_ns"] >= 0 and start <= last:
                segments.append([lane, start, start + row["duration_ns"]])
    if path is None or not segments:
        return None
    return {
        "step": path["step"],
        "start": path["start_ns"] - shift,
        "end": path["start_ns"] - shift + path["window_ns"],
        "stretches": segments,
    }


def _sort_lanes(trace: Trace, number: int) -> pl.DataFrame:
    """Returns the trace's lanes in display order: GPU streams, then host threads, the busiest
    first.
    """
    main = pl.col("process") == pl.col("thread")
    is_gpu = (pl.col("kind") == "device") & pl.col("device").is_not_null()
    label = (
        pl.when(is_gpu).then(pl.format("{} · GPU {}", "name", "device")).otherwise(pl.col("name"))
    )
    kind = pl.col("kind").cast(pl.String)
    return (
        trace.lanes.with_columns(
            kind.replace_strict(_LANE_ORDER, return_dtype=pl.Int8).alias("_kind"),
            ((kind == "host") & ~main.fill_null(value=False)).alias("_side"),
            pl.when(kind == "host")
            .then(-pl.col("events").cast(pl.Int64))
            .otherwise(0)
            .alias("_few"),
        )
        .sort("_kind", "device", "_side", "_few", "stream", "lane", nulls_last=True)
        .select(
            "lane",
            pl.lit(number, dtype=pl.Int32).alias("trace"),
            kind,
            label.alias("name"),
            "device",
            "stream",
            "process",
            "thread",
        )
        .with_row_index("order")
    )


def _select_events(trace: Trace, lanes: pl.DataFrame, share: int) -> pl.DataFrame:
    """Returns the kept events, lane by lane, with their facts.

    The most useful events are kept: GPU work, annotations and collectives first, Python frames
    last, long before short.
    """
    columns = [
        "event",
        "name",
        "category",
        "start_ns",
        "duration_ns",
        "nested_end_ns",
        "lane",
        "correlation",
        "launch",
    ]
    forward_of_backward = (
        trace.flows.filter(pl.col("kind") == "forward-backward")
        .drop_nulls(["source", "target"])
        .unique("target", keep="first", maintain_order=True)
        .select(pl.col("target").alias("event"), pl.col("source").alias("forward"))
    )
    events = trace.events.select(columns)
    if events.height > share:
        first = pl.col("category").is_in([*GPU_WORK, ANNOTATION, COLLECTIVE])
        useful = pl.when(first).then(0).when(pl.col("category") == PYTHON).then(2).otherwise(1)
        events = events.sort(useful, -pl.col("duration_ns"), "event").head(share)
    # The arguments of an event as one text: key, unit separator, value, record separator, key, ...
    frames = [_build_launch_facts(trace), _build_model_facts(trace)]
    for name, facts in _EVENT_FACTS.items():
        frame: pl.DataFrame = getattr(trace, name)
        texts = [
            pl.lit(f"{title}\x1f")
            + pl.col(column)
            .cast(pl.String)
            .str.replace_all("[\x1e\x1f]", " ")
            .str.slice(0, _FACT_LENGTH)
            for column, title in facts.items()
        ]
        frames.append(
            frame.select(
                "event", pl.concat_str(texts, separator="\x1e", ignore_nulls=True).alias("facts")
            )
        )
    facts_of_event = (
        pl.concat(frames)
        .filter(pl.col("facts") != "")
        .group_by("event", maintain_order=True)
        .agg(pl.col("facts").str.join("\x1e"))
    )
    return (
        events.join(lanes.select("lane", "order"), on="lane", how="left")
        .join(facts_of_event, on="event", how="left")
        .join(forward_of_backward, on="event", how="left")
        .sort("order", "event")
    )


def _build_launch_facts(trace: Trace) -> pl.DataFrame:
    """Returns the launch configurations of kernels, as texts of facts: event, facts."""
    values = {
        **{
            dimension: pl.format("{} × {} × {}", *(f"{dimension}_{axis}" for axis in "xyz")).alias(
                dimension
            )
            for dimension in ("grid", "block")
        },
        "registers per thread": pl.col("registers").cast(pl.String),
        "shared memory": pl.col("shared_bytes").cast(pl.String),
        "blocks per SM": pl.col("blocks_per_sm").round(2).cast(pl.String),
        "estimated occupancy": pl.format(
            "{} %", (100 * pl.col("occupancy")).round(0).cast(pl.Int64)
        ),
    }
    texts = [pl.lit(f"{title}\x1f") + value for title, value in values.items()]
    return kernel_launches(trace).rows.select(
        "event", pl.concat_str(texts, separator="\x1e", ignore_nulls=True).alias("facts")
    )


def _build_model_facts(trace: Trace) -> pl.DataFrame:
    """Returns FLOPs and bytes of GPU work from models of operators, as texts of facts: event,
    facts.
    """
    work = select_modelled_work(trace)
    texts = []
    for column, written in {"flops": units.format_flops, "bytes": units.format_size}.items():
        values = work[column].unique().drop_nulls()
        fact_texts = pl.Series(
            [f"modelled {column}\x1f{written(value)}" for value in values], dtype=pl.String
        )
        texts.append(
            pl.col(column).replace_strict(values, fact_texts, default=None, return_dtype=pl.String)
        )
    return work.select(
        "event", pl.concat_str(texts, separator="\x1e", ignore_nulls=True).alias("facts")
    )


def _build_columns(
    session: Session, parts: list[pl.DataFrame], positions: list[Ints], counts: list[int]
) -> tuple[dict[str, Ints], dict[str, Any]]:
    """Returns the payload's columns, and the tables of texts that they refer to."""
    events = pl.concat(parts)
    start = events["start_ns"].to_numpy() - session.epoch_ns
    duration = events["duration_ns"].to_numpy()
    clip = start + np.maximum(duration, 0) - (events["nested_end_ns"].to_numpy() - session.epoch_ns)
    unit = max(int(np.gcd.reduce([np.gcd.reduce(column) for column in (start, duration, clip)])), 1)
    label, labels = _encode_distinct(events, ["name", "category"])
    fact, facts = _encode_distinct(events, ["facts"])
    correlation = events["correlation"]
    columns = {
        "start": encode_start_deltas(start // unit, counts),
        "duration": encode_zigzag(duration // unit),
        "clip": encode_zigzag(clip // unit),
        "label": label - 1,
        "fact": fact,
        "correlation": encode_sparse(
            correlation.fill_null(0).to_numpy(), correlation.is_not_null().to_numpy()
        ),
        "launch": _encode_links("launch", parts, positions),
        "forward": _encode_links("forward", parts, positions),
    }
    codes = {name: code for code, name in enumerate(CATEGORIES)}
    return columns, {
        "unit_ns": unit,
        "labels": [[sanitize(name), codes[category]] for name, category in labels],
        "short": {
            i: cut
            for i, (name, _) in enumerate(labels)
            if (cut := fit_name(name, _MAX_NAME_WIDTH)) != sanitize(name)
        },
        "facts": [text for (text,) in facts],
    }


def _encode_links(column: str, parts: list[pl.DataFrame], positions: list[Ints]) -> Ints:
    """Encodes references between events as positions in the payload; 0 for an omitted event."""
    targets = []
    for part, position_of_event in zip(parts, positions, strict=True):
        row = part[column]
        has_target = row.is_not_null().to_numpy()
        targets.append(np.where(has_target, position_of_event[row.fill_null(0).to_numpy()], 0))
    target = np.concatenate(targets)
    return encode_sparse(target, target > 0)


def _encode_distinct(
    events: pl.DataFrame, columns: list[str]
) -> tuple[Ints, list[tuple[Any, ...]]]:
    """Returns distinct values, the frequent ones first, and for each event the number of its value
    from 1 (0: null).
    """
    distinct = (
        events.select(columns)
        .drop_nulls()
        .group_by(columns)
        .agg(pl.len().alias("count"))
        .sort("count", *columns, descending=[True, *[False] * len(columns)])
        .drop("count")
        .with_row_index("number", offset=1)
    )
    return events.select(columns).join(distinct, on=columns, how="left", maintain_order="left")[
        "number"
    ].fill_null(0).cast(pl.Int64).to_numpy(), distinct.drop("number").rows()


def _build_rank(trace: Trace, epoch_ns: int, shift: int, curves: list[CurveRow]) -> dict[str, Any]:
    """Returns the values of a rank besides its events: steps, the memory curves and
    other curves.
    """
    memory = []
    for curve in curves:
        if curve["rank"] != trace.rank or not curve["time_ns"]:
            continue
        curve_data = {
            key: curve[key] for key in ("device_type", "device", "time_ns", "allocated_bytes")
        }
        if shift:  # times count from the chosen steps; values outside them are omitted
            time = np.asarray(curve["time_ns"], dtype=np.int64) - shift
            in_trace = (time >= 0) & (time <= trace.end_ns - trace.start_ns)
            curve_data["time_ns"] = time[in_trace].tolist()
            curve_data["allocated_bytes"] = np.asarray(curve["allocated_bytes"])[in_trace].tolist()
        memory.append(curve_data)
    steps = trace.steps.select(
        "step", "name", pl.col("start_ns") - epoch_ns, pl.col("end_ns") - epoch_ns
    )
    return {
        "rank": trace.rank,
        "host": trace.meta.host,
        "steps": [list(row) for row in steps.iter_rows()],
        "memory": memory,
        "curves": build_tracks(trace, epoch_ns),
    }


def build_tracks(trace: Trace, epoch_ns: int) -> list[dict[str, Any]]:
    """Returns the curves of one rank: name, time_ns (relative to the epoch), values; each at most
    about 600 points.

    A value holds from its time to the next. Curves that are always 0 are omitted.
    """
    out = []
    curves = build_non_memory_counters(trace).sort("time_ns", maintain_order=True)
    for (name,), curve in sorted(curves.group_by("name"), key=lambda item: str(item[0][0])):
        time, value = curve["time_ns"].to_numpy() - epoch_ns, curve["value"].to_numpy()
        if not value.size or not value.any():
            continue
        positions = downsample_extremes(value, _MAX_CURVE_POINTS)
        out.append(
            {
                "name": sanitize(str(name)).strip(),
                "time_ns": time[positions].tolist(),
                "values": [float(f"{number:.4g}") for number in value[positions].tolist()],
            }
        )
    return out[:MAX_CURVES]


def downsample_extremes(value: Floats, limit: int) -> NDArray[np.int64]:
    """Returns positions of the first, last, lowest and highest value of equal stretches, ascending:
    about `limit` at most.
    """
    if value.size <= limit:
        return np.arange(value.size)
    width = -(-value.size * 4 // limit)
    rows = -(-value.size // width)
    padded = np.concatenate([value, np.full(rows * width - value.size, value[-1])]).reshape(
        rows, width
    )
    base = np.arange(rows) * width
    positions = [base, base + width - 1, base + padded.argmin(axis=1), base + padded.argmax(axis=1)]
    return np.unique(np.minimum(np.concatenate(positions), value.size - 1))


_METRIC_PREFIX = "traceloom_"
# Of some hundred series, those that explain a timeline; the others are in the telemetry file.
_SHOWN_METRICS = (
    "gpu_power_watts",
    "gpu_sm_active_ratio",
    "gpu_dram_active_ratio",
    "gpu_busy_ratio",
    "host_cpu_seconds_total",
    "host_network_bytes_total",
    "rdma_bytes_total",
    "host_disk_bytes_total",
    "process_cpu_seconds_total",
    "process_disk_bytes_total",
)
# Display form of a call: the function first, then its file without the directory of packages or
# programs.
_NAME_REPLACEMENTS = (
    (r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/", ""),
    (r"^/.*/", ""),
    (r"^(.+?)\((\d+)\): (.+)$", "$3 ($1:$2)"),
)
_SPANS = {
    "name": pl.String,
    "start_ns": pl.Int64,
    "nested_end_ns": pl.Int64,
    "depth": pl.UInt16,
    "parent": pl.Int64,
    "lane": pl.UInt32,
}
_IDLE_MODES = ("idle", "iowait")
_REFERENCES = ("parent", "op", "launch")


class _Span(NamedTuple):
    """A call seen in samples; `caller` is its number among those of the thread."""

    name: str
    start_ns: int
    end_ns: int
    depth: int
    caller: int | None


def add_overlay(session: Session) -> Session:
    """Returns the session with stack samples as spans on separate lanes; telemetry and allocated
    memory as counters.

    All are cut to the time of the trace. The counters of a host are added to the first of its
    traces; counters that only increase become rates per second.
    """
    if (
        not session.samples.height
        and not session.telemetry.height
        and not session.allocations.height
    ):
        return session
    traces, hosts = [], set()
    for trace in session.traces:
        if trace.events.height:
            if trace.meta.host not in hosts:
                trace = _add_telemetry(trace, session.telemetry)  # noqa: PLW2901
            hosts.add(trace.meta.host)
            is_rank = pl.col("rank").eq_missing(trace.rank)
            trace = _add_allocations(trace, session.allocations.filter(is_rank))  # noqa: PLW2901
            trace = _add_samples(trace, session.samples.filter(is_rank))  # noqa: PLW2901
        traces.append(trace)
    return replace(session, traces=tuple(traces))


def _add_samples(trace: Trace, samples: pl.DataFrame) -> Trace:
    spans = [
        (*span, len(trace.lanes) + lane)
        for lane, (_, rows) in enumerate(
            groupby(
                samples.select("thread", "time_ns", "period_ns", "stack").iter_rows(),
                key=itemgetter(0),
            )
        )
        for span in _build_spans((row[1:] for row in rows), trace.start_ns, trace.end_ns)
    ]
    if not spans:
        return trace
    span_frame = pl.DataFrame(spans, schema=_SPANS, orient="row")
    for pattern, shorter in _NAME_REPLACEMENTS:
        span_frame = span_frame.with_columns(pl.col("name").str.replace(pattern, shorter))
    first = trace.events.height
    # A parent is the number of a span in its lane, from 0.
    lane_bases = (
        span_frame.with_row_index("at")
        .group_by("lane", maintain_order=True)
        .agg(pl.col("at").min().alias("base"))
    )
    span_frame = span_frame.join(
        lane_bases, on="lane", how="left", maintain_order="left"
    ).with_columns(
        parent=(pl.col("parent") + pl.col("base").cast(pl.Int64) + first).cast(pl.UInt32),
        category=pl.lit(OTHER),
        duration_ns=pl.col("nested_end_ns") - pl.col("start_ns"),
    )
    added = span_frame.select(
        (pl.col(name) if name in span_frame.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in SCHEMAS["events"].items()
    ).with_columns(event=pl.int_range(first, first + pl.len(), dtype=pl.UInt32))
    events = pl.concat([trace.events, added])
    order = np.argsort(
        events["start_ns"].to_numpy(), kind="stable"
    )  # those of the trace keep their order
    row = np.empty(events.height, dtype=np.int64)
    row[order] = np.arange(events.height)
    events = update_event_rows(
        events[order].with_columns(event=pl.int_range(pl.len(), dtype=pl.UInt32)), row, _REFERENCES
    )
    frames: dict[str, Any] = {
        name: update_event_rows(frame, row, ("event",))
        for name, frame in trace.frames().items()
        if name != "events" and "event" in frame.columns
    }
    if trace.sources.height == first:  # a row for each event, found by its number
        nowhere = added.select("event", offset=pl.lit(0, pl.Int64), length=pl.lit(0, pl.Int32))
        sources = pl.concat([trace.sources, nowhere])[order]
        frames["sources"] = sources.with_columns(event=pl.int_range(pl.len(), dtype=pl.UInt32))
    frames["flows"] = update_event_rows(trace.flows, row, ("source", "target"))
    frames["allocations"] = update_event_rows(trace.allocations, row, ("op",))
    lanes = _build_overlay_lanes(samples, span_frame, len(trace.lanes))
    return replace(trace, events=events, lanes=pl.concat([trace.lanes, lanes]), **frames)


def _build_spans(samples: Iterable[tuple[int, int, list[str]]], low: int, high: int) -> list[_Span]:
    """Builds calls from the samples of a thread (time, period, stack), ordered by start, between
    two times.

    A call lasts as long as consecutive samples contain it with the same callers.
    """
    spans: list[_Span] = []
    open_calls: list[int] = []  # numbers of spans, the outermost first
    reached = low
    for time_ns, period_ns, stack in samples:
        start, end = max(time_ns, reached), min(time_ns + period_ns, high)
        if end <= start:
            continue
        same = 0
        if start == reached:
            while (
                same < min(len(open_calls), len(stack))
                and spans[open_calls[same]].name == stack[same]
            ):
                same += 1
        del open_calls[same:]
        for depth in range(same, len(stack)):
            caller = open_calls[-1] if open_calls else None
            open_calls.append(len(spans))
            spans.append(_Span(stack[depth], start, end, depth, caller))
        for number in open_calls:
            spans[number] = spans[number]._replace(end_ns=end)
        reached = end
    return spans


def _build_overlay_lanes(samples: pl.DataFrame, spans: pl.DataFrame, first: int) -> pl.DataFrame:
    counted = spans.group_by("lane").agg(
        events=pl.len(), busy_ns=pl.col("duration_ns").filter(pl.col("depth") == 0).sum()
    )
    name = (
        pl.when(pl.col("thread_name") == "")
        .then(pl.format("thread {}", "thread"))
        .otherwise("thread_name")
    )
    threads = samples.group_by("thread", maintain_order=True).agg(pl.col("thread_name").first())
    rows = threads.with_row_index("lane", offset=first)
    rows = rows.with_columns(kind=pl.lit("host"), name=pl.format("stacks · {}", name))
    rows = rows.join(counted, on="lane", how="left", maintain_order="left").with_columns(
        pl.col("events", "busy_ns").fill_null(0)
    )
    # Without a process the lane follows the threads of the trace, and is distinct from them.
    return rows.select(
        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in SCHEMAS["lanes"].items()
    )


def _add_telemetry(trace: Trace, telemetry: pl.DataFrame) -> Trace:
    hosts = telemetry["host"].unique().to_list()
    host_telemetry = (
        telemetry
        if len(hosts) == 1
        else telemetry.filter(pl.col("host") == (trace.meta.host or ""))
    )
    selected = host_telemetry.filter(
        pl.col("metric").is_in([_METRIC_PREFIX + name for name in _SHOWN_METRICS])
    )
    curves = []
    for (metric, labels, kind), curve in selected.group_by(
        "metric", "labels", "kind", maintain_order=True
    ):
        values = msgspec.json.decode(str(labels), type=dict[str, str])
        if values.get("mode") in _IDLE_MODES or values.get("interface") == "lo":
            continue
        name = str(metric).removeprefix(_METRIC_PREFIX)
        curve = curve.unique("time_ns", keep="last", maintain_order=True)  # noqa: PLW2901
        if kind == "counter":
            # Growth between two readings is known at the second; a value holds from its time on.
            rate = pl.col("value").diff().shift(-1) / pl.col("time_ns").diff().shift(-1) * 1e9
            curve = curve.with_columns(value=rate).drop_nulls("value").filter(pl.col("value") >= 0)  # noqa: PLW2901
            name = name.removesuffix("_total") + "/s"
        curves.append((name, " ".join(values.values()), curve))
    return _add_counters(trace, curves)


def _add_allocations(trace: Trace, allocations: pl.DataFrame) -> Trace:
    """Adds the bytes allocated by each allocator: as it reports them, else since the recording
    began.
    """
    curves = []
    for (device,), events in allocations.group_by("device_name", maintain_order=True):
        value = (
            pl.coalesce("allocated_bytes", pl.col("bytes").cum_sum())
            .cast(pl.Float64)
            .alias("value")
        )
        curves.append(("allocated_bytes", str(device), events.select("time_ns", value)))
    return _add_counters(trace, curves)


def _add_counters(trace: Trace, curves: list[tuple[str, str, pl.DataFrame]]) -> Trace:
    """Returns the trace with curves (name, key, values by time) among its counters, cut to its
    time.
    """
    added = []
    for name, key, curve in curves:
        # The last value before the trace holds at its start.
        before = (
            curve.filter(pl.col("time_ns") < trace.start_ns)
            .tail(1)
            .with_columns(time_ns=pl.lit(trace.start_ns, dtype=pl.Int64))
        )
        in_trace = pl.concat(
            [before, curve.filter(pl.col("time_ns").is_between(trace.start_ns, trace.end_ns))]
        )
        added.append(in_trace.select("time_ns", "value", name=pl.lit(name), key=pl.lit(key)))
    if not added:
        return trace
    rows = pl.concat(added)
    rows = rows.select(
        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in SCHEMAS["counters"].items()
    )
    return replace(
        trace, counters=pl.concat([trace.counters, rows]).sort("time_ns", maintain_order=True)
    )
