"""The critical path of a step: what decides how long it takes, and what is nearly critical beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom.analyze.critical_path import CLASS_ROWS, NAMES, RANKS, STRETCHES, critical_path
from traceloom.analyze.critical_path_pieces import CLASSES, usual_step
from traceloom.errors import TraceloomError
from traceloom.report.document import Col, Part, Table, UnknownValues, of_type, record
from traceloom.report.sections.section import Columns, Measurements, Section, table
from traceloom.system import units
from traceloom.trace.frames import schema

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CriticalPathRanksRow, CriticalPathValue

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
_LAW = schema("exact_error_ns honest_error_ns honest_error holds residual_ns assumed_ns")
_NO_LANE = "the time is of no such thread or stream"
_NOTHING = "nothing is recorded of that time"
_NO_EVENT = "nothing in it is a recorded event"


class CriticalPathSection(Section[None, "CriticalPathValue"]):
    """The critical path of one step."""

    key, title = "critical_path", "Critical path"
    note = "What decides how long a step takes, over host, devices and ranks."
    what = "the critical path of one step"
    missing = "the traces hold no timed events"
    parts = {
        "classes": Part(CLASS_ROWS, "time of the path by class; adds up to window_ns", ranked=False),
        "ranks": Part(RANKS, "time of the path by rank and class", {"rank": _NOTHING}, ranked=False),
        "names": Part(
            NAMES,
            "work of the step by name, on the path and near it",
            {"least_slack_ns": "all of it is on the path"},
            ranked=False,
        ),
        "stretches": Part(
            STRETCHES,
            "the path from lane to lane, in the order of time",
            {
                "rank": _NOTHING,
                "where": "the time is of no thread or stream",
                **dict.fromkeys(
                    ("kind", "process", "thread", "device", "stream", "name", "name_ns", "edge", "evidence"), _NO_LANE
                ),
                "first_event": _NO_EVENT,
                "last_event": _NO_EVENT,
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
        "law": record(
            {key: of_type(kind) for key, kind in _LAW.items()},
            what="how well the graph that the path was found in gives back the measured time",
        ),
    }
    unknown = {"step": "the trace marks no steps; the path is that of the whole window"}

    def build(self, study: Measurements[None], absent: UnknownValues) -> CriticalPathValue | None:
        """The path of the usual one of the chosen steps, found in the whole session: what came before may still run."""
        step = usual_step(study.part.traces)
        session = study.session if step is not None else study.part
        # about how many events have to be linked: those of the step and of what it may need before it, of all ranks
        events = 0
        for trace in session.traces:
            share = 1.0
            if step is not None:
                of_step = trace.steps.filter(pl.col("step") == step)
                length = int((of_step["end_ns"] - of_step["start_ns"])[0]) if of_step.height else 0
                share = min(2 * length / max(trace.end_ns - trace.start_ns, 1), 1.0)
            events += round(trace.events.height * share)
        if events > _MOST_EVENTS:
            many = f"about {events:,} events would have to be linked, more than {_MOST_EVENTS:,}"
            absent.say("critical_path", f"{many}; choose ranks with --rank")
            return None
        try:
            path = critical_path(session, step)
        except TraceloomError as error:
            absent.say("critical_path", error.message)
            return None
        path.check()
        stretches = path.stretches.with_row_index("row").sort("duration_ns", descending=True)
        longest = stretches.head(_MOST_STRETCHES).sort("row").drop("row")
        law = path.law
        named = path.names.filter((pl.col("path_ns") > 0) | (pl.col("near_count") > 0)).head(_MOST_NAMES)
        frames = {"classes": path.classes, "ranks": path.ranks, "names": named, "stretches": longest}
        return {
            "sentence": path.sentence,
            "step": absent.value(path.step, "critical_path.step"),
            "start_ns": path.start_ns - absent.epoch_ns,
            "window_ns": path.window_ns,
            "near_slack_ns": path.near_slack_ns,
            **self.lists(frames, absent),
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
        of_path = sorted((row for row in value["classes"] if row["duration_ns"]), key=lambda row: -row["duration_ns"])
        classes = [{**row, "meaning": CLASSES.get(row["class"])} for row in of_path]
        # the two errors of the graph that the path was found in
        law = value["law"]
        exact = "exactly" if not law["exact_error_ns"] else f"but for {units.duration(law['exact_error_ns'])}"
        honest = f"{law['honest_error']:+.2%}".replace("%", " %")
        columns: Columns = ["class", "duration_ns", "fraction", "+piece_count", Col("meaning", "Meaning", narrow=False)]
        yield table(
            "critical_path.classes",
            "What the path consists of",
            columns,
            classes,
            f"Re-timed from its causes the step comes back {exact}, with usual delays alone {honest}.",
        )
        by_rank: dict[int | None, list[CriticalPathRanksRow]] = {}
        for row in value["ranks"]:
            by_rank.setdefault(row["rank"], []).append(row)
        if len(by_rank) > 1:
            ranks = [
                {
                    "rank": rank,
                    "duration_ns": sum(row["duration_ns"] for row in rows),
                    "fraction": sum(row["fraction"] for row in rows),
                    "mostly": rows[0]["class"],  # the largest class is first
                }
                for rank, rows in by_rank.items()
            ]
            columns = ["rank", "duration_ns", "fraction", Col("mostly", "Mostly")]
            yield table("critical_path.ranks", "Which ranks it goes through", columns, ranks)
        on_path = [row for row in value["names"] if row["path_ns"]]
        if on_path:
            columns = ["path_ns", "path_fraction", "+duration_ns", "+count", "class", "name"]
            yield table("critical_path.names", "Work on the path", columns, on_path)
        near = sorted((row for row in value["names"] if row["near_count"]), key=lambda row: -row["near_ns"])
        if near:
            slack, length = units.duration(value["near_slack_ns"]), units.duration(max(value["window_ns"], 1))
            yield table(
                "critical_path.names",
                "Nearly critical",
                ["near_ns", "near_count", "least_slack_ns", "class", "name"],
                near,
                f"Work beside the path that could end at most {slack} later without the step ({length}) ending later. "
                "What is won on the path beyond that shows here.",
                key="critical-path-near",
            )
        omitted = value["omitted_stretch_count"]
        note = f"The {units.count(omitted)} shortest stretches are left out." if omitted else ""
        columns = ["start_ns", "duration_ns", "+rank", "where", "+edge", "+evidence", "class", "name"]
        yield table("critical_path.stretches", "The path from lane to lane", columns, value["stretches"], note)

    def summary(self, value: CriticalPathValue) -> str:
        return str(value["sentence"][0].lower() + value["sentence"][1:].rstrip("."))

    def picture(self, value: CriticalPathValue) -> str:
        """The time by class as one bar, and the way to the line in the timeline."""
        from traceloom.report.figure import bar, legend  # the page draws sections: it is not there yet

        parts = [(row["class"], _COLOURS.get(row["class"], "other"), row["duration_ns"]) for row in value["classes"]]
        way = '<p class="quiet"><a href="#timeline&amp;path=1">Show it in the timeline</a></p>'
        return bar(parts, value["window_ns"]) + legend(parts, value["window_ns"]) + (way if value["stretches"] else "")


SECTION = CriticalPathSection()
