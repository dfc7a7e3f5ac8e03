"""The critical path of a step: what decides how long it takes, and what is nearly critical beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import polars as pl

from traceloom.analyze.critical_path import CriticalPath, critical_path
from traceloom.analyze.path.pieces import CLASSES
from traceloom.analyze.path.tables import CLASS_ROWS, NAMES, RANKS, STRETCHES
from traceloom.analyze.path.window import usual_step
from traceloom.errors import TraceloomError
from traceloom.model import Session, units
from traceloom.report.absent import Absent
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import of_type, or_null, record, rows
from traceloom.report.table import Col, Table

_MOST_EVENTS = 3_000_000  # a graph takes about 1 kB of memory for each
_MOST_STRETCHES = 5_000
_MOST_NAMES = 500
_COLOURS = {
    "compute": "compute",
    "communication": "communication",
    "copies": "memory",
    "host": "op",
    "data": "loading",
    "launch": "launch",
    "synchronisation": "sync",
    "pause": "other",
    "unrecorded": "idle",
    "residual": "overhead",
}
_LAW = {
    "exact_error_ns": pl.Int64,
    "honest_error_ns": pl.Int64,
    "honest_error": pl.Float64,
    "holds": pl.Boolean,
    "residual_ns": pl.Int64,
    "assumed_ns": pl.Int64,
}


def _build(study: Study[None], absent: Absent) -> Row | None:
    """The path of the usual one of the chosen steps, found in the whole session: what came before may still run."""
    step = usual_step(study.part.traces)
    session = study.session if step is not None else study.part
    events = _events(session, step)
    if events > _MOST_EVENTS:
        absent.say(
            "critical_path",
            f"about {events:,} events would have to be linked, more than {_MOST_EVENTS:,}; choose ranks with --rank",
        )
        return None
    try:
        path = critical_path(session, step)
    except TraceloomError as error:
        absent.say("critical_path", error.message)
        return None
    path.check()
    return _value(path, absent)


def _events(session: Session, step: int | None) -> int:
    """About how many events have to be linked: those of the step and of what it may need before it, of all ranks."""
    if step is None:
        return sum(trace.events.height for trace in session.traces)
    total = 0
    for trace in session.traces:
        of_step = trace.steps.filter(pl.col("step") == step)
        if of_step.height:
            length = int((of_step["end_ns"] - of_step["start_ns"])[0])
            total += round(trace.events.height * min(2 * length / max(trace.end_ns - trace.start_ns, 1), 1.0))
    return total


def _value(path: CriticalPath, absent: Absent) -> Row:
    longest = (
        path.stretches.with_row_index("row").sort("duration_ns", descending=True).head(_MOST_STRETCHES).sort("row")
    )
    law = asdict(path.law)
    named = path.names.filter((pl.col("path_ns") > 0) | (pl.col("near_count") > 0)).head(_MOST_NAMES)
    if path.step is None:
        absent.say("critical_path.step")
    return {
        "sentence": path.sentence,
        "step": path.step,
        "start_ns": path.start_ns - absent.epoch_ns,
        "window_ns": path.window_ns,
        "near_slack_ns": path.near_slack_ns,
        "classes": absent.rows(path.classes, "critical_path.classes"),
        "ranks": absent.rows(path.ranks, "critical_path.ranks"),
        "names": absent.rows(named, "critical_path.names"),
        "stretches": absent.rows(longest.drop("row"), "critical_path.stretches"),
        "omitted_stretch_count": path.stretches.height - longest.height,
        "law": {key: law[key] for key in _LAW},
    }


def _tables(value: Row) -> Iterator[Table]:
    length = max(value["window_ns"], 1)
    classes = [row | {"meaning": CLASSES.get(row["class"])} for row in value["classes"] if row["duration_ns"]]
    classes.sort(key=lambda row: -int(row["duration_ns"]))
    yield Table(
        "critical-path-classes",
        "What the path consists of",
        [
            Col("class", "Class"),
            Col("duration_ns", "Time", "time", "time of the path; adds up to the step"),
            Col("fraction", "Share", "share", "of the step"),
            Col("piece_count", "Pieces", "count", narrow=False),
            Col("meaning", "Meaning", narrow=False),
        ],
        classes,
        "critical_path.classes",
        _trust(value),
    )
    ranks = _by_rank(value["ranks"])
    if len(ranks) > 1:
        yield Table(
            "critical-path-ranks",
            "Which ranks it goes through",
            [
                Col("rank", "Rank", "count"),
                Col("duration_ns", "Time", "time", "time of the path on this rank"),
                Col("fraction", "Share", "share", "of the step"),
                Col("mostly", "Mostly"),
            ],
            ranks,
            "critical_path.ranks",
        )
    on_path = [row for row in value["names"] if row["path_ns"]]
    if on_path:
        yield Table(
            "critical-path-names",
            "Work on the path",
            [
                Col("path_ns", "On the path", "time", "its own time on the path"),
                Col("path_fraction", "Share", "share", "of the step"),
                Col("duration_ns", "In all", "time", "all of it in the step, on the path or beside it", narrow=False),
                Col("count", "Count", "count", narrow=False),
                Col("class", "Class"),
                Col("name", "Name", "name"),
            ],
            on_path,
            "critical_path.names",
        )
    near = sorted((row for row in value["names"] if row["near_count"]), key=lambda row: -int(row["near_ns"]))
    if near:
        yield Table(
            "critical-path-near",
            "Nearly critical",
            [
                Col("near_ns", "Time", "time", "work beside the path whose slack is at most 1 % of the step"),
                Col("near_count", "Count", "count"),
                Col(
                    "least_slack_ns", "Least slack", "time", "how much later it could end without the step ending later"
                ),
                Col("class", "Class"),
                Col("name", "Name", "name"),
            ],
            near,
            "critical_path.names",
            f"Work beside the path that could end at most {units.duration(value['near_slack_ns'])} later without the "
            f"step ({units.duration(length)}) ending later. What is won on the path beyond that shows here.",
        )
    yield _way(value)


def _way(value: Row) -> Table:
    omitted = value["omitted_stretch_count"]
    return Table(
        "critical-path-stretches",
        "The path from lane to lane",
        [
            Col("start_ns", "From", "time", "since the beginning of the recording"),
            Col("duration_ns", "Time", "time"),
            Col("rank", "Rank", "count", narrow=False),
            Col("where", "Where"),
            Col("edge", "Came by", hint="the edge of the graph over which the path came to this lane", narrow=False),
            Col("evidence", "Known", hint="how that edge is known", narrow=False),
            Col("class", "Mostly", hint="the class with the most of its time"),
            Col("name", "Longest in it", "name"),
        ],
        value["stretches"],
        "critical_path.stretches",
        f"The {units.count(omitted)} shortest stretches are left out." if omitted else "",
    )


def _picture(value: Row) -> str:
    """The time by class as one bar, and the way to the line in the timeline."""
    from traceloom.report.views.html.bars import bar, legend  # the page draws sections: it is not there yet

    parts = [(row["class"], _COLOURS.get(row["class"], "other"), row["duration_ns"]) for row in value["classes"]]
    way = '<p class="quiet"><a href="#at=timeline&amp;path=1">Show it in the timeline</a></p>'
    return bar(parts, value["window_ns"]) + legend(parts, value["window_ns"]) + (way if value["stretches"] else "")


def _by_rank(class_rows: list[Row]) -> list[Row]:
    """One row per rank, with its largest class."""
    ranks: dict[Any, Row] = {}
    for row in class_rows:
        total = ranks.setdefault(
            row["rank"], {"rank": row["rank"], "duration_ns": 0, "fraction": 0.0, "mostly": row["class"]}
        )
        total["duration_ns"] += row["duration_ns"]
        total["fraction"] += row["fraction"]
    return list(ranks.values())


def _trust(value: Row) -> str:
    """The two errors of the graph that the path was found in."""
    law = value["law"]
    exact = "exactly" if not law["exact_error_ns"] else f"but for {units.duration(law['exact_error_ns'])}"
    honest = f"{law['honest_error']:+.2%}".replace("%", " %")
    return f"Re-timed from its causes the step comes back {exact}, with usual delays alone {honest}."


def _summary(value: Row) -> str:
    return str(value["sentence"][0].lower() + value["sentence"][1:].rstrip("."))


SECTION = Section(
    key="critical_path",
    title="Critical path",
    note="What decides how long a step takes, over host, devices and ranks.",
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=or_null(
        record(
            {
                "sentence": {"type": "string"},
                "step": of_type(pl.Int64, nullable=True),
                "start_ns": of_type(pl.Int64),
                "window_ns": of_type(pl.Int64),
                "near_slack_ns": of_type(pl.Int64),
                "classes": rows(CLASS_ROWS, what="time of the path by class; adds up to window_ns"),
                "ranks": rows(RANKS, nullable={"rank"}, what="time of the path by rank and class"),
                "names": rows(
                    NAMES, nullable={"least_slack_ns"}, what="work of the step by name, on the path and near it"
                ),
                "stretches": rows(
                    STRETCHES,
                    nullable=set(STRETCHES) - {"start_ns", "duration_ns", "class", "class_ns", "piece_count"},
                    what="the path from lane to lane, in the order of time",
                ),
                "omitted_stretch_count": of_type(pl.Int64),
                "law": record(
                    {key: of_type(kind) for key, kind in _LAW.items()},
                    what="how well the graph that the path was found in gives back the measured time",
                ),
            },
            what="the critical path of one step",
        )
    ),
    reasons={
        "critical_path": "the traces hold no timed events",
        "critical_path.step": "the trace marks no steps; the path is that of the whole window",
        "critical_path.ranks[*].rank": "nothing is recorded of that time",
        "critical_path.names[*].least_slack_ns": "all of it is on the path",
        "critical_path.stretches[*].rank": "nothing is recorded of that time",
        "critical_path.stretches[*].where": "the time is of no thread or stream",
        **{
            f"critical_path.stretches[*].{key}": "the time is of no such thread or stream"
            for key in ("kind", "process", "thread", "device", "stream", "name", "name_ns", "edge", "evidence")
        },
        **{
            f"critical_path.stretches[*].{key}": "nothing in it is a recorded event"
            for key in ("first_event", "last_event")
        },
    },
)
