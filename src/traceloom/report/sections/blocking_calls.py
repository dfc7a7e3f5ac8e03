"""Blocking calls by place: who asks to wait, how long, and what the GPU does meanwhile and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from traceloom import analyze
from traceloom.analyze.blocking_calls import KINDS, SITES
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked, record
from traceloom.report.table import Col, Table

MOST_SITES = 100  # of one rank
MOST_ROWS = 800  # of all ranks together, but
LEAST_SITES = 10  # of each
_GPU = ("gpu_busy_ns", "gpu_idle_ns", "idle_after_ns")
_SPREAD = ("mean_blocked_ns", "min_blocked_ns", "max_blocked_ns", "step_count")
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


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank."""

    sites: pl.DataFrame
    by_kind: pl.DataFrame
    blocked_ns: int


_BY_KIND = pl.Schema(
    {"kind": SITES["kind"], "count": pl.Int64(), "blocked_ns": pl.Int64(), "idle_after_ns": pl.Int64()}
)


def _measure(trace: Trace, _options: ReportOptions) -> Measured:
    calls = analyze.blocking_calls(trace)
    idle = pl.col("idle_after_ns")
    by_kind = (
        calls.sites.group_by("kind")
        .agg(pl.col("count", "blocked_ns").sum(), pl.when(idle.is_not_null().any()).then(idle.sum()))
        .sort("blocked_ns", "kind", descending=[True, False])
        .cast(_BY_KIND)
    )
    return Measured(calls.sites.head(MOST_SITES), by_kind, calls.blocked_ns)


def _build(study: Study[Measured], absent: Absent) -> Row | None:
    most = max(MOST_ROWS // len(study.results), LEAST_SITES)
    sites = study.concat(lambda measured: measured.sites.head(most))
    if not sites.height:
        absent.say("blocking_calls")
        return None
    return {
        "blocked_ns": sum(measured.blocked_ns for measured in study.results),
        "by_kind": absent.rows(study.concat(lambda measured: measured.by_kind), "blocking_calls.by_kind"),
        "sites": absent.rows(sites, "blocking_calls.sites"),
    }


def _tables(value: Row) -> Iterator[Table]:
    rows = [{**row, "what": _WORDS.get(row["kind"], row["kind"]), "where": where(row)} for row in value["sites"]]
    ranks = [Col("rank", "Rank", "count")] if len({row["rank"] for row in rows}) > 1 else []
    on_gpu = any(row["gpu_busy_ns"] is not None for row in rows)
    gpu = [
        Col("gpu_busy_ns", "GPU busy", "time", "part of the wait in which GPU work ran", narrow=False),
        Col("idle_after_ns", "Idle after", "time", "time without GPU work from the return to the next work or wait"),
    ]
    stepped = any(row["mean_blocked_ns"] is not None for row in rows)
    steps = [
        Col("mean_blocked_ns", "Per step", "time", "mean over the whole steps", narrow=False),
        Col("max_blocked_ns", "Most", "time", "in the step with the most of it", narrow=False),
    ]
    columns = [
        *ranks,
        Col("blocked_ns", "Blocked", "time", "host time in the calls"),
        *(gpu if on_gpu else []),
        Col("count", "Calls", "count"),
        Col("max_ns", "Longest", "time", narrow=False),
        *(steps if stepped else []),
        Col("what", "Kind"),
        Col("where", "Where", "name", "the line that asks, the operators around the call, the call"),
    ]
    yield Table("blocking-calls-sites", "Blocking calls", columns, rows, "blocking_calls.sites")


def where(row: Row) -> str:
    """The line (its file without folders), the outermost operator, the call: `train.py(12): step: aten::item, ...`."""
    operator = str(row["op"]).split(" > ", 1)[0] if row["op"] else None
    call = str(row["call"]).removeprefix("<built-in ").removesuffix(">")
    operation = ", ".join(part for part in (operator, call) if part)
    return f"{str(row['frame']).rsplit('/', 1)[-1]}: {operation}" if row["frame"] else operation


def _summary(value: Row) -> str | None:
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


_NO_GPU = "no GPU work was recorded"
_NO_STEP = "the trace holds no whole step, or the call is in none"
SECTION = Section(
    key="blocking_calls",
    title="Blocking calls",
    note="Where the host stops and waits, and whether the GPU has work meanwhile.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema={
        "anyOf": [
            record(
                {
                    "blocked_ns": {"type": "integer", "description": "host time in all such calls"},
                    "by_kind": ranked(_BY_KIND, nullable={"idle_after_ns"}, what=f"sums by kind: {', '.join(KINDS)}"),
                    "sites": ranked(
                        SITES,
                        nullable={"op", "frame", "stack", *_GPU, *_SPREAD},
                        what="by place, those in Python last, the longest first; at most 100 of a rank, fewer of many",
                    ),
                },
                what="calls in which the host waits",
            ),
            {"type": "null"},
        ]
    },
    reasons={
        "blocking_calls": "no call that waits was recorded",
        "blocking_calls.by_kind[*].idle_after_ns": _NO_GPU,
        "blocking_calls.by_kind[*].rank": "the file does not say its rank",
        "blocking_calls.sites[*].rank": "the file does not say its rank",
        "blocking_calls.sites[*].op": "no operator is recorded around the call",
        "blocking_calls.sites[*].frame": "no Python frame of the program is recorded around the call",
        "blocking_calls.sites[*].stack": "no Python frame of the program is recorded around the call",
        **{f"blocking_calls.sites[*].{name}": _NO_GPU for name in _GPU},
        **{f"blocking_calls.sites[*].{name}": _NO_STEP for name in _SPREAD},
    },
)
