"""The section about the critical path of a step, and about nearly critical work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom.analyze.critical_path import CLASS_ROWS, NAMES, RANKS, STRETCHES, critical_path
from traceloom.analyze.critical_path_pieces import CLASSES, find_median_step
from traceloom.errors import TraceloomError
from traceloom.report.document import (
    Col,
    ListSchema,
    Table,
    UnknownValues,
    build_object_schema,
    build_type_schema,
)
from traceloom.report.sections.section import Columns, Measurements, Section, build_table
from traceloom.system import units
from traceloom.trace.frames import build_schema

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CriticalPathRanksRow, CriticalPathValue

_MAX_EVENTS = 3_000_000  # a graph takes about 1 kB of memory for each
_MAX_STRETCHES = 5_000
_MAX_NAMES = 500
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
_LAW_SCHEMA = build_schema(
    "exact_error_ns honest_error_ns honest_error holds residual_ns assumed_ns"
)
_NO_LANE_REASON = "the time is of no such thread or stream"
_NOT_RECORDED_REASON = "nothing is recorded of that time"
_NO_EVENT_REASON = "nothing in it is a recorded event"


class CriticalPathSection(Section[None, "CriticalPathValue"]):
    key, title = "critical_path", "Critical path"
    note = "What decides how long a step takes, over host, devices and ranks."
    what = "the critical path of one step"
    missing = "the traces hold no timed events"
    parts = {
        "classes": ListSchema(
            CLASS_ROWS, "time of the path by class; adds up to window_ns", ranked=False
        ),
        "ranks": ListSchema(
            RANKS,
            "time of the path by rank and class",
            {"rank": _NOT_RECORDED_REASON},
            ranked=False,
        ),
        "names": ListSchema(
            NAMES,
            "work of the step by name, on the path and near it",
            {"least_slack_ns": "all of it is on the path"},
            ranked=False,
        ),
        "stretches": ListSchema(
            STRETCHES,
            "the path from lane to lane, in the order of time",
            {
                "rank": _NOT_RECORDED_REASON,
                "where": "the time is of no thread or stream",
                **dict.fromkeys(
                    (
                        "kind",
                        "process",
                        "thread",
                        "device",
                        "stream",
                        "name",
                        "name_ns",
                        "edge",
                        "evidence",
                    ),
                    _NO_LANE_REASON,
                ),
                "first_event": _NO_EVENT_REASON,
                "last_event": _NO_EVENT_REASON,
            },
            ranked=False,
        ),
    }
    others = {
        "sentence": {"type": "string"},
        "step": {"type": ["integer", "null"]},
        "start_ns": {"type": "integer"},
        "window_ns": {"type": "integer"},
        "near_slack_ns": {"type": "integer"},
        "omitted_stretch_count": {"type": "integer"},
        "law": build_object_schema(
            {key: build_type_schema(kind) for key, kind in _LAW_SCHEMA.items()},
            description="how well the graph that the path was found in gives back the measured time",
        ),
    }
    unknown = {"step": "the trace marks no steps; the path is that of the whole window"}

    def build(
        self, measurements: Measurements[None], unknowns: UnknownValues
    ) -> CriticalPathValue | None:
        """Returns the path of the typical step among the chosen ones, found in the whole session:
        earlier work may still run.
        """
        step = find_median_step(measurements.part.traces)
        session = measurements.session if step is not None else measurements.part
        # approximate number of events to link: those of the step and of the work that it may need
        # before, of all ranks
        events = 0
        for trace in session.traces:
            share = 1.0
            if step is not None:
                step_rows = trace.steps.filter(pl.col("step") == step)
                length = (
                    int((step_rows["end_ns"] - step_rows["start_ns"])[0]) if step_rows.height else 0
                )
                share = min(2 * length / max(trace.end_ns - trace.start_ns, 1), 1.0)
            events += round(trace.events.height * share)
        if events > _MAX_EVENTS:
            size_message = (
                f"about {events:,} events would have to be linked, more than {_MAX_EVENTS:,}"
            )
            unknowns.explain("critical_path", f"{size_message}; choose ranks with --rank")
            return None
        try:
            path = critical_path(session, step)
        except TraceloomError as error:
            unknowns.explain("critical_path", error.message)
            return None
        path.check()
        segments = path.stretches.with_row_index("row").sort("duration_ns", descending=True)
        longest = segments.head(_MAX_STRETCHES).sort("row").drop("row")
        law = path.law
        frames = {
            "classes": path.classes,
            "ranks": path.ranks,
            "names": path.names.filter((pl.col("path_ns") > 0) | (pl.col("near_count") > 0)).head(
                _MAX_NAMES
            ),
            "stretches": longest,
        }
        return {
            "sentence": path.sentence,
            "step": unknowns.value(path.step, "critical_path.step"),
            "start_ns": path.start_ns - unknowns.epoch_ns,
            "window_ns": path.window_ns,
            "near_slack_ns": path.near_slack_ns,
            **self.lists(frames, unknowns),
            "omitted_stretch_count": path.stretches.height - longest.height,
            "law": {
                "exact_error_ns": law.exact_error_ns,
                "honest_error_ns": law.honest_error_ns,
                "honest_error": law.honest_error,
                "holds": law.holds,
                "residual_ns": law.residual_ns,
                "assumed_ns": law.assumed_ns,
            },
        }

    def tables(self, value: CriticalPathValue) -> Iterator[Table]:
        path_classes = sorted(
            (row for row in value["classes"] if row["duration_ns"]),
            key=lambda row: -row["duration_ns"],
        )
        classes = [{**row, "meaning": CLASSES.get(row["class"])} for row in path_classes]
        # the two errors of the graph that contains the path
        law = value["law"]
        exact = (
            "exactly"
            if not law["exact_error_ns"]
            else f"but for {units.format_duration(law['exact_error_ns'])}"
        )
        honest = f"{law['honest_error']:+.2%}".replace("%", " %")
        columns: Columns = [
            "class",
            "duration_ns",
            "fraction",
            "+piece_count",
            Col("meaning", "Meaning", narrow=False),
        ]
        yield build_table(
            "critical_path.classes",
            "What the path consists of",
            columns,
            classes,
            f"Re-timed from its causes the step comes back {exact}, with usual delays alone {honest}.",
        )
        rank_rows: dict[int | None, list[CriticalPathRanksRow]] = {}
        for row in value["ranks"]:
            rank_rows.setdefault(row["rank"], []).append(row)
        if len(rank_rows) > 1:
            ranks = [
                {
                    "rank": rank,
                    "duration_ns": sum(row["duration_ns"] for row in rows),
                    "fraction": sum(row["fraction"] for row in rows),
                    "mostly": rows[0]["class"],  # the largest class is first
                }
                for rank, rows in rank_rows.items()
            ]
            columns = ["rank", "duration_ns", "fraction", Col("mostly", "Mostly")]
            yield build_table("critical_path.ranks", "Which ranks it goes through", columns, ranks)
        on_path = [row for row in value["names"] if row["path_ns"]]
        if on_path:
            columns = ["path_ns", "path_fraction", "+duration_ns", "+count", "class", "name"]
            yield build_table("critical_path.names", "Work on the path", columns, on_path)
        near_rows = sorted(
            (row for row in value["names"] if row["near_count"]), key=lambda row: -row["near_ns"]
        )
        if near_rows:
            slack, length = (
                units.format_duration(value["near_slack_ns"]),
                units.format_duration(max(value["window_ns"], 1)),
            )
            yield build_table(
                "critical_path.names",
                "Nearly critical",
                ["near_ns", "near_count", "least_slack_ns", "class", "name"],
                near_rows,
                f"Work beside the path that could end at most {slack} later without the step ({length}) ending later. "
                "What is won on the path beyond that shows here.",
                key="critical-path-near",
            )
        omitted = value["omitted_stretch_count"]
        note = (
            f"The {units.format_count(omitted)} shortest stretches are left out." if omitted else ""
        )
        columns = [
            "start_ns",
            "duration_ns",
            "+rank",
            "where",
            "+edge",
            "+evidence",
            "class",
            "name",
        ]
        yield build_table(
            "critical_path.stretches",
            "The path from lane to lane",
            columns,
            value["stretches"],
            note,
        )

    def summary(self, value: CriticalPathValue) -> str:
        return str(value["sentence"][0].lower() + value["sentence"][1:].rstrip("."))

    def picture(self, value: CriticalPathValue) -> str:
        """Returns the time by class as one bar, and the link to the path in the timeline."""
        # Imported late: the module of the page imports the sections.
        from traceloom.report.figure import (
            draw_stacked_bar,
            render_legend,
        )

        parts = [
            (row["class"], _COLOURS.get(row["class"], "other"), row["duration_ns"])
            for row in value["classes"]
        ]
        link = '<p class="quiet"><a href="#timeline&amp;path=1">Show it in the timeline</a></p>'
        return (
            draw_stacked_bar(parts, value["window_ns"])
            + render_legend(parts, value["window_ns"])
            + (link if value["stretches"] else "")
        )


SECTION = CriticalPathSection()
