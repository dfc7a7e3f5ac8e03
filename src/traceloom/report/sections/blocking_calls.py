"""Blocking calls by place: who asks to wait, how long, and what the GPU does meanwhile and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.blocking_calls import KINDS, SITES
from traceloom.model import Trace, units
from traceloom.model.frames import as_declared, schema
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Columns, Frames, Section, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import BlockingCallsSitesRow, BlockingCallsValue

MOST_SITES = 100  # of one rank
MOST_ROWS = 800  # of all ranks together, but
LEAST_SITES = 10  # of each
_NAME = 60
_WORDS = {
    "item": "reads of a value (.item())",
    "data_dependent_shape": "results whose size is needed (nonzero, masks)",
    "copy_to_host": "copies to the host",
    "copy_to_device": "copies to the GPU",
    "other_copy": "other copies",
    "synchronize": "synchronizing calls",
    "event_synchronize": "waits for events",
    "allocation": "allocations",
    "module_load": "loads of code",
    "fill": "fills",
    "python": "waits in Python",
    "other": "other calls",
}
_BY_KIND = schema("kind count blocked_ns idle_after_ns", {"kind": SITES["kind"]})
_SPREAD = ("mean_blocked_ns", "min_blocked_ns", "max_blocked_ns", "step_count")
_NO_FRAME = "no Python frame of the program is recorded around the call"


class BlockingCallsSection(Section[tuple[Frames, int], "BlockingCallsValue"]):
    """Calls in which the host waits. Measured are its lists, and the time in all calls."""

    key, title = "blocking_calls", "Blocking calls"
    note = "Where the host stops and waits, and whether the GPU has work meanwhile."
    what = "calls in which the host waits"
    missing = "no call that waits was recorded"
    parts = {
        "by_kind": Part(_BY_KIND, f"sums by kind: {', '.join(KINDS)}", nullable=("idle_after_ns",)),
        "sites": Part(
            SITES,
            "by place, those in Python last, the longest first; at most 100 of a rank, fewer of many",
            {
                "op": "no operator is recorded around the call",
                "frame": _NO_FRAME,
                "stack": _NO_FRAME,
                **dict.fromkeys(_SPREAD, "the trace holds no whole step, or the call is in none"),
            },
            ("gpu_busy_ns", "gpu_idle_ns", "idle_after_ns"),
        ),
    }
    others = {"blocked_ns": {"type": "integer"}}

    def measure(self, trace: Trace, options: ReportOptions) -> tuple[Frames, int]:
        calls = analyze.blocking_calls(trace)
        idle = pl.col("idle_after_ns")
        by_kind = (
            calls.sites.group_by("kind")
            .agg(pl.col("count", "blocked_ns").sum(), pl.when(idle.is_not_null().any()).then(idle.sum()))
            .sort("blocked_ns", "kind", descending=[True, False])
            .pipe(as_declared, _BY_KIND)
        )
        return {"by_kind": by_kind, "sites": calls.sites.head(MOST_SITES)}, calls.blocked_ns

    def build(self, study: Study[tuple[Frames, int]], absent: Absent) -> BlockingCallsValue | None:
        most = max(MOST_ROWS // len(study.results), LEAST_SITES)
        sites = study.concat(lambda of: of[0]["sites"].head(most))
        if not sites.height:
            absent.say("blocking_calls")
            return None
        lists = self.lists({"by_kind": study.concat(lambda of: of[0]["by_kind"]), "sites": sites}, absent)
        return {"blocked_ns": sum(blocked_ns for _, blocked_ns in study.results), **lists}

    def tables(self, value: BlockingCallsValue) -> Iterator[Table]:
        rows = [{**row, "what": _WORDS.get(row["kind"], row["kind"]), "where": where(row)} for row in value["sites"]]
        on_gpu = any(row["gpu_busy_ns"] is not None for row in rows)
        stepped = any(row["mean_blocked_ns"] is not None for row in rows)
        columns: Columns = [
            "?rank",
            "blocked_ns",
            *(["+gpu_busy_ns", "idle_after_ns"] if on_gpu else []),
            "count",
            "+max_ns",
            *(["+mean_blocked_ns", "+max_blocked_ns"] if stepped else []),
            Col("what", "Kind"),
            Col("where", "Where", "name", "the line that asks, the operators around the call, the call"),
        ]
        yield table("blocking_calls.sites", "Blocking calls", columns, rows)

    def summary(self, value: BlockingCallsValue) -> str | None:
        kinds = [row for row in value["by_kind"] if row["kind"] != "python"] or value["by_kind"]
        whole = sum(row["blocked_ns"] for row in kinds)
        by_site: dict[tuple[str, str], int] = defaultdict(int)  # over all ranks
        for row in value["sites"]:
            if any(row["kind"] == kind["kind"] for kind in kinds):
                by_site[row["kind"], where(row)] += row["blocked_ns"]
        kind, site = max(by_site, key=lambda key: by_site[key])
        share = units.share(by_site[kind, site], max(whole, 1))
        return (
            f"{units.duration(whole)} of host time in calls that wait; "
            f"{share} of it for {_WORDS.get(kind, kind)} at {short(site, _NAME)}"
        )


def where(row: BlockingCallsSitesRow) -> str:
    """The line (its file without folders), the outermost operator, the call: `train.py(12): step: aten::item, ...`."""
    operator = str(row["op"]).split(" > ", 1)[0] if row["op"] else None
    call = str(row["call"]).removeprefix("<built-in ").removesuffix(">")
    operation = ", ".join(part for part in (operator, call) if part)
    return f"{str(row['frame']).rsplit('/', 1)[-1]}: {operation}" if row["frame"] else operation


SECTION = BlockingCallsSection()
