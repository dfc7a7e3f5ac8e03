"""Timeline: the events of all ranks as one packed payload for the page's canvas.

Events stand lane by lane, in the order of their start. Times are nanoseconds relative to the session's epoch, divided
by their greatest common divisor (`unit_ns`). References (`launch`, `forward`) are positions in the payload plus one,
0 for none. `clip` is what nesting cuts off the end of a span. The script derives rows (nesting, overlap) and steps from
these, as the reader derives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.kernel_launches import kernel_launches
from traceloom.analyze.roofline import modelled
from traceloom.array_types import Floats, Ints
from traceloom.harmless import harmless
from traceloom.model import Session, Trace, units
from traceloom.model.category import ANNOTATION, CATEGORIES, COLLECTIVE, GPU_ANNOTATION, GPU_WORK, KERNEL, PYTHON
from traceloom.report.exports.perfetto.counters import beside_memory
from traceloom.report.names import short
from traceloom.report.table import Cells
from traceloom.report.views.html.packing import lane_steps, pack, sparse, zigzag

if TYPE_CHECKING:
    from traceloom.report.documents.report import CurveRow
    from traceloom.report.documents.sections import CriticalPathValue

LIMIT = 1_000_000  # events; about 8 MB of page and 60 MB of browser memory
_FACT_LENGTH = 300  # characters of one argument that are kept
_SHORT = 60  # characters of a name on the canvas
_LANE_ORDER = {"device": 0, "device_annotation": 1, "device_sync": 2, "host": 3, "other": 4}
_FACTS = {
    "tensors": {"shapes": "shapes", "types": "types", "concrete": "values"},
    "copies": {"kind": "direction", "bytes": "bytes", "source_memory": "from", "target_memory": "to"},
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
MOST_CURVES = 24  # of a rank; the file for Perfetto has all of them
_POINTS = 600  # of a curve


@dataclass(frozen=True, slots=True)
class TimelinePayload:
    """The packed payload and what it leaves out.

    Attributes:
        payload: Base64 text, see `packing`.
        shown: Events in it.
        omitted: Events left out, by category; empty when all are there.
        window: From-to in ns of the document's times: what it shows.
    """

    payload: str
    shown: int
    omitted: dict[str, int]
    window: str


def build(
    session: Session,
    communication: set[str],
    curves: list[CurveRow],
    limit: int = LIMIT,
    *,
    path: CriticalPathValue | None = None,
    epoch_ns: int | None = None,
) -> TimelinePayload:
    """Pack the events of a session.

    Args:
        session: All traces; one without events gets lanes without events.
        communication: Names of the kernels that are communication; all others count as compute.
        curves: The memory curves of the report document.
        limit: The most events to embed, shared fairly between the ranks; see `_ordered` for which go first.
        path: The critical path of the report document, where it has one.
        epoch_ns: What the times of the document count from; the session's own epoch where None.
    """
    shift = 0 if epoch_ns is None else session.epoch_ns - epoch_ns
    # All events of small traces; what is left is shared evenly by the large ones.
    sizes = [trace.events.height for trace in session.traces]
    quota, left = [0] * len(sizes), limit
    for done, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        quota[index] = min(sizes[index], left // (len(sizes) - done))
        left -= quota[index]
    parts, positions, lanes, first = [], [], [], 0
    for number, (trace, share) in enumerate(zip(session.traces, quota, strict=True)):
        table = _lanes(trace, number)
        part = _ordered(trace, table, share)
        position_of_event = np.full(trace.events.height + 1, 0, dtype=np.int64)
        position_of_event[part["event"].to_numpy()] = np.arange(first + 1, first + 1 + part.height)
        counts = dict(part.group_by("order").len().iter_rows())
        shown = table.drop("lane", "order").to_dicts()
        lanes += [{**row, "count": counts.get(position, 0)} for position, row in enumerate(shown)]
        parts.append(part)
        positions.append(position_of_event)
        first += part.height
    columns, tables = _columns(session, parts, positions, [lane["count"] for lane in lanes])
    # The labels of communication: kernels by name, annotations that have a collective.
    named = {harmless(name) for name in communication}
    for trace in session.traces:
        collectives = trace.events["name"].gather(trace.collectives["event"])
        named.update(harmless(name) for name in collectives.unique().to_list())
    coded = {CATEGORIES.index(name) for name in (KERNEL, ANNOTATION, GPU_ANNOTATION, COLLECTIVE)}
    tables["communication"] = [
        number for number, (name, code) in enumerate(tables["labels"]) if code in coded and name in named
    ]
    header = {
        "version": 1,
        "epoch_ns": str(session.epoch_ns),
        "shift_ns": shift,
        "span_ns": max((t.end_ns for t in session.traces), default=0) - session.epoch_ns,
        "categories": list(CATEGORIES),
        "ranks": [_rank(trace, session.epoch_ns, shift, curves) for trace in session.traces],
        "lanes": [lane for lane in lanes if lane["count"]],
        "path": _path(session, lanes, path, shift),
        **tables,
    }
    missing: dict[str, int] = {}
    for trace, part in zip(session.traces, parts, strict=True):
        for sign, frame in ((1, trace.events), (-1, part)) if trace.events.height != part.height else ():
            for category, count in frame.group_by("category").len().iter_rows():
                missing[category] = missing.get(category, 0) + sign * count
    omitted = {category: count for category, count in missing.items() if count}
    return TimelinePayload(pack(header, columns), first, omitted, f"{shift}-{shift + header['span_ns']}")


def _path(
    session: Session, lanes: list[dict[str, Any]], path: CriticalPathValue | None, shift: int
) -> dict[str, Any] | None:
    """The critical path as [lane, start, end]; None where there is none, or where none of it is on a lane."""
    ranks: dict[Any, int] = {}
    for number, trace in enumerate(session.traces):
        ranks.setdefault(0 if trace.rank is None else trace.rank, number)
    keys = ("kind", "process", "thread", "device", "stream")
    shown = [lane for lane in lanes if lane["count"]]
    lane_numbers = {(lane["trace"], *(lane[key] for key in keys)): number for number, lane in enumerate(shown)}
    stretches = []
    last = max((trace.end_ns for trace in session.traces), default=0) - session.epoch_ns
    rows: Sequence[Cells] = path["stretches"] if path else ()
    for row in rows:
        lane = lane_numbers.get((ranks.get(row["rank"]), *(row[key] for key in keys)))
        if lane is not None:
            start = row["start_ns"] - shift
            if start + row["duration_ns"] >= 0 and start <= last:
                stretches.append([lane, start, start + row["duration_ns"]])
    if path is None or not stretches:
        return None
    return {
        "step": path["step"],
        "start": path["start_ns"] - shift,
        "end": path["start_ns"] - shift + path["window_ns"],
        "stretches": stretches,
    }


def _lanes(trace: Trace, number: int) -> pl.DataFrame:
    """The trace's lanes in the order they are shown: GPU streams, then host threads, the busiest first."""
    main = pl.col("process") == pl.col("thread")
    of_gpu = (pl.col("kind") == "device") & pl.col("device").is_not_null()
    label = pl.when(of_gpu).then(pl.format("{} · GPU {}", "name", "device")).otherwise(pl.col("name"))
    kind = pl.col("kind").cast(pl.String)
    return (
        trace.lanes.with_columns(
            kind.replace_strict(_LANE_ORDER, return_dtype=pl.Int8).alias("_kind"),
            ((kind == "host") & ~main.fill_null(value=False)).alias("_side"),
            pl.when(kind == "host").then(-pl.col("events").cast(pl.Int64)).otherwise(0).alias("_few"),
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


def _ordered(trace: Trace, lanes: pl.DataFrame, share: int) -> pl.DataFrame:
    """The kept events, lane by lane, with their facts.

    Kept are the most useful: GPU work, annotations and collectives first, Python frames last, long before short.
    """
    columns = ["event", "name", "category", "start_ns", "duration_ns", "nested_end_ns", "lane", "correlation", "launch"]
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
    frames = [_launch_facts(trace), _model_facts(trace)]
    for name, facts in _FACTS.items():
        frame: pl.DataFrame = getattr(trace, name)
        texts = [
            pl.lit(f"{title}\x1f")
            + pl.col(column).cast(pl.String).str.replace_all("[\x1e\x1f]", " ").str.slice(0, _FACT_LENGTH)
            for column, title in facts.items()
        ]
        frames.append(frame.select("event", pl.concat_str(texts, separator="\x1e", ignore_nulls=True).alias("facts")))
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


def _launch_facts(trace: Trace) -> pl.DataFrame:
    """How the kernels were launched, as texts of facts: event, facts."""
    sizes = {
        what: pl.format("{} × {} × {}", *(f"{what}_{axis}" for axis in "xyz")).alias(what) for what in ("grid", "block")
    }
    values = {
        **sizes,
        "registers per thread": pl.col("registers").cast(pl.String),
        "shared memory": pl.col("shared_bytes").cast(pl.String),
        "blocks per SM": pl.col("blocks_per_sm").round(2).cast(pl.String),
        "estimated occupancy": pl.format("{} %", (100 * pl.col("occupancy")).round(0).cast(pl.Int64)),
    }
    texts = [pl.lit(f"{title}\x1f") + value for title, value in values.items()]
    rows = kernel_launches(trace).rows
    return rows.select("event", pl.concat_str(texts, separator="\x1e", ignore_nulls=True).alias("facts"))


def _model_facts(trace: Trace) -> pl.DataFrame:
    """FLOPs and bytes of GPU work, as models of operators have them, as texts of facts: event, facts."""
    work = modelled(trace)
    texts = []
    for column, written in {"flops": units.flops, "bytes": units.size}.items():
        values = work[column].unique().drop_nulls()
        words = pl.Series([f"modelled {column}\x1f{written(value)}" for value in values], dtype=pl.String)
        texts.append(pl.col(column).replace_strict(values, words, default=None, return_dtype=pl.String))
    return work.select("event", pl.concat_str(texts, separator="\x1e", ignore_nulls=True).alias("facts"))


def _columns(
    session: Session, parts: list[pl.DataFrame], positions: list[Ints], counts: list[int]
) -> tuple[dict[str, Ints], dict[str, Any]]:
    """The payload's columns, and the tables of texts that they point into."""
    events = pl.concat(parts)
    start = events["start_ns"].to_numpy() - session.epoch_ns
    duration = events["duration_ns"].to_numpy()
    clip = start + np.maximum(duration, 0) - (events["nested_end_ns"].to_numpy() - session.epoch_ns)
    unit = max(int(np.gcd.reduce([np.gcd.reduce(column) for column in (start, duration, clip)])), 1)
    label, labels = _table(events, ["name", "category"])
    fact, facts = _table(events, ["facts"])
    correlation = events["correlation"]
    columns = {
        "start": lane_steps(start // unit, counts),
        "duration": zigzag(duration // unit),
        "clip": zigzag(clip // unit),
        "label": label - 1,
        "fact": fact,
        "correlation": sparse(correlation.fill_null(0).to_numpy(), correlation.is_not_null().to_numpy()),
        "launch": _links("launch", parts, positions),
        "forward": _links("forward", parts, positions),
    }
    codes = {name: code for code, name in enumerate(CATEGORIES)}
    return columns, {
        "unit_ns": unit,
        "labels": [[harmless(name), codes[category]] for name, category in labels],
        "short": {i: cut for i, (name, _) in enumerate(labels) if (cut := short(name, _SHORT)) != harmless(name)},
        "facts": [text for (text,) in facts],
    }


def _links(column: str, parts: list[pl.DataFrame], positions: list[Ints]) -> Ints:
    """References between events as positions in the payload; to an event that was left out: none."""
    targets = []
    for part, position_of_event in zip(parts, positions, strict=True):
        row = part[column]
        has_target = row.is_not_null().to_numpy()
        targets.append(np.where(has_target, position_of_event[row.fill_null(0).to_numpy()], 0))
    target = np.concatenate(targets)
    return sparse(target, target > 0)


def _table(events: pl.DataFrame, columns: list[str]) -> tuple[Ints, list[tuple[Any, ...]]]:
    """Distinct values, the frequent ones first, and for each event the number of its value from 1 (0: null)."""
    distinct = (
        events.select(columns)
        .drop_nulls()
        .group_by(columns)
        .agg(pl.len().alias("count"))
        .sort("count", *columns, descending=[True, *[False] * len(columns)])
        .drop("count")
        .with_row_index("number", offset=1)
    )
    number = events.select(columns).join(distinct, on=columns, how="left", maintain_order="left")["number"]
    return number.fill_null(0).cast(pl.Int64).to_numpy(), distinct.drop("number").rows()


def _rank(trace: Trace, epoch_ns: int, shift: int, curves: list[CurveRow]) -> dict[str, Any]:
    """What the timeline shows of a rank beside its events: steps, the memory curves and other curves."""
    memory = []
    for curve in curves:
        if curve["rank"] != trace.rank or not curve["time_ns"]:
            continue
        shown = {key: curve[key] for key in ("device_type", "device", "time_ns", "allocated_bytes")}
        if shift:  # times count from the chosen steps; what lies outside them is left out
            time = np.asarray(curve["time_ns"], dtype=np.int64) - shift
            inside = (time >= 0) & (time <= trace.end_ns - trace.start_ns)
            shown["time_ns"] = time[inside].tolist()
            shown["allocated_bytes"] = np.asarray(curve["allocated_bytes"])[inside].tolist()
        memory.append(shown)
    steps = trace.steps.select("step", "name", pl.col("start_ns") - epoch_ns, pl.col("end_ns") - epoch_ns)
    return {
        "rank": trace.rank,
        "host": trace.meta.host,
        "steps": [list(row) for row in steps.iter_rows()],
        "memory": memory,
        "curves": tracks(trace, epoch_ns),
    }


def tracks(trace: Trace, epoch_ns: int) -> list[dict[str, Any]]:
    """The curves of one rank: name, time_ns (relative to the epoch), values; each at most about 600 points.

    A value holds from its time to the next. Curves that are 0 all the time are left out.
    """
    out = []
    curves = beside_memory(trace).sort("time_ns", maintain_order=True)
    for (name,), curve in sorted(curves.group_by("name"), key=lambda item: str(item[0][0])):
        time, value = curve["time_ns"].to_numpy() - epoch_ns, curve["value"].to_numpy()
        if not value.size or not value.any():
            continue
        at = kept(value, _POINTS)
        shown = [float(f"{number:.4g}") for number in value[at].tolist()]
        out.append({"name": harmless(str(name)).strip(), "time_ns": time[at].tolist(), "values": shown})
    return out[:MOST_CURVES]


def kept(value: Floats, most: int) -> NDArray[np.int64]:
    """Positions of the first, last, lowest and highest of equal stretches, ascending: at most about `most`."""
    if value.size <= most:
        return np.arange(value.size)
    width = -(-value.size * 4 // most)
    rows = -(-value.size // width)
    padded = np.concatenate([value, np.full(rows * width - value.size, value[-1])]).reshape(rows, width)
    base = np.arange(rows) * width
    places = [base, base + width - 1, base + padded.argmin(axis=1), base + padded.argmax(axis=1)]
    return np.unique(np.minimum(np.concatenate(places), value.size - 1))
