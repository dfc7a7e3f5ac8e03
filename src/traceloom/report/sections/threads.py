"""Threads: what each is for, and how many of them work at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import polars as pl

from traceloom import analyze
from traceloom.analyze.threads import CONCURRENCY, CURVE, ROLES, THREADS
from traceloom.harmless import harmless
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import or_null, ranked, record
from traceloom.report.table import Col, Table

MOST_CURVES = 8  # ranks whose curve is kept
_WIDTH, _HEIGHT = 720, 72


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank."""

    threads: pl.DataFrame
    concurrency: pl.DataFrame
    curve: pl.DataFrame
    most: int
    mean: float | None


_SUMS = pl.Schema({name: kind for name, kind in CONCURRENCY.items() if name != "step"})


def _measure(trace: Trace, _options: ReportOptions) -> Measured:
    threads = analyze.threads(trace)
    by_number = threads.concurrency.group_by("threads").agg(pl.col("ns").sum()).sort("threads").cast(_SUMS)
    return Measured(threads.threads, by_number, threads.curve, threads.most, threads.mean)


def _build(study: Study[Measured], absent: Absent) -> Row | None:
    table = study.concat(lambda measured: measured.threads)
    if not table.height:
        absent.say("threads")
        return None
    curves = study.concat(lambda measured: measured.curve)
    kept = [trace.rank for trace in study.part.traces][:MOST_CURVES]
    return {
        "threads": absent.rows(table, "threads.threads"),
        "concurrency": absent.rows(study.concat(lambda measured: measured.concurrency), "threads.concurrency"),
        "curve": absent.rows(curves.filter(pl.col("rank").is_in(kept, nulls_equal=True)), "threads.curve"),
    }


def _tables(value: Row) -> Iterator[Table]:
    rows = [{**row, "role": _role(row)} for row in value["threads"]]
    ranks = [Col("rank", "Rank", "count")] if len({row["rank"] for row in rows}) > 1 else []
    yield Table(
        "threads-threads",
        "Threads",
        [
            *ranks,
            Col("name", "Thread"),
            Col("active_ns", "Active", "time", "something is recorded, and it does not wait"),
            Col("blocking_call_ns", "Waiting", "time", "in calls that wait"),
            Col("op_ns", "Operators", "time", narrow=False),
            Col("launch_ns", "Runtime", "time", "calls of the GPU's runtime that do not wait", narrow=False),
            Col("python_ns", "Python", "time", narrow=False),
            Col("unobserved_ns", "Nothing", "time", "nothing is recorded", narrow=False),
            Col("event_count", "Events", "count", narrow=False),
            Col("role", "What for", "name"),
        ],
        rows,
        "threads.threads",
    )
    totals: dict[int | None, int] = {}
    for row in value["concurrency"]:
        totals[row["rank"]] = totals.get(row["rank"], 0) + row["ns"]
    shares = [{**row, "share": row["ns"] / max(totals[row["rank"]], 1)} for row in value["concurrency"]]
    yield Table(
        "threads-concurrency",
        "Threads active at once",
        [
            *ranks,
            Col("threads", "Threads", "count"),
            Col("ns", "Time", "time"),
            Col("share", "Share", "share", "of the window"),
        ],
        shares,
        "threads.concurrency",
    )


def _role(row: Row) -> str:
    """What the thread is for; where it only runs some Python, with the name that says so."""
    role = ROLES.get(row["role"], str(row["role"]))
    return f"{role}: {row['says']}" if row["role"] == "python" and row["says"] else role


def _summary(value: Row) -> str | None:
    rows = value["concurrency"]
    window = sum(row["ns"] for row in rows)
    if not window:
        return None
    several = sum(row["ns"] for row in rows if row["threads"] > 1)
    none = sum(row["ns"] for row in rows if row["threads"] == 0)
    count = len(value["threads"])
    return (
        f"{count} {'thread' if count == 1 else 'threads'}; none is active {units.share(none, window)} of the time, "
        f"several at once {units.share(several, window)}"
    )


def _picture(value: Row) -> str:
    """The number of active threads over time, of the first rank."""
    curve = value["curve"]
    if len(curve) < 2:
        return ""
    rank = curve[0]["rank"]
    active = [row["active"] for row in curve if row["rank"] == rank]
    most = max(*active, 1.0)
    step = _WIDTH / len(active)
    points = "".join(
        f"L{at * step:.1f} {_HEIGHT - value / most * _HEIGHT:.1f}H{(at + 1) * step:.1f}"
        for at, value in enumerate(active)
    )
    of = "" if rank is None or all(row["rank"] == rank for row in value["threads"]) else f" of rank {rank}"
    label = escape(harmless(f"Active threads{of} over time, at most {most:.2f}"))
    return (
        f'<figure class="spark"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" height="{_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{label}"><path d="M0 {_HEIGHT}{points}V{_HEIGHT}Z" '
        f'fill="currentColor" fill-opacity="0.35"/></svg><figcaption class="quiet">{label}</figcaption></figure>'
    )


SECTION = Section(
    key="threads",
    title="Threads",
    note="What each host thread is for, and how many work at the same time.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=or_null(
        record(
            {
                "threads": ranked(THREADS, nullable={"says", "role"}, what="one row per host thread"),
                "concurrency": ranked(_SUMS, what="how long exactly so many threads were active at once"),
                "curve": ranked(CURVE, what="mean number of active threads in equal parts of the window"),
            },
            what="host threads by what they do",
        )
    ),
    reasons={
        "threads": "no host events were recorded",
        "threads.threads[*].says": "no single name tells it",
        "threads.threads[*].role": "nothing recorded tells it",
        "threads.threads[*].rank": "the file does not say its rank",
        "threads.concurrency[*].rank": "the file does not say its rank",
        "threads.curve[*].rank": "the file does not say its rank",
    },
)
