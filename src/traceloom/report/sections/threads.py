"""Threads: what each is for, and how many of them work at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.threads import CONCURRENCY, CURVE, ROLES, THREADS
from traceloom.harmless import harmless
from traceloom.model import Trace, units
from traceloom.model.frames import as_declared
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Frames, Section, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import ThreadsValue

MOST_CURVES = 8  # ranks whose curve is kept
_WIDTH, _HEIGHT = 720, 72
_SUMS = pl.Schema({name: kind for name, kind in CONCURRENCY.items() if name != "step"})


class ThreadsSection(Section[Frames, "ThreadsValue"]):
    """Host threads by what they do."""

    key, title = "threads", "Threads"
    note = "What each host thread is for, and how many work at the same time."
    what = "host threads by what they do"
    missing = "no host events were recorded"
    parts = {
        "threads": Part(THREADS, "one row per host thread", nullable=("says", "role")),
        "concurrency": Part(_SUMS, "how long exactly so many threads were active at once"),
        "curve": Part(CURVE, "mean number of active threads in equal parts of the window"),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        threads = analyze.threads(trace)
        by_number = (
            threads.concurrency.group_by("threads").agg(pl.col("ns").sum()).sort("threads").pipe(as_declared, _SUMS)
        )
        return {"threads": threads.threads, "concurrency": by_number, "curve": threads.curve}

    def build(self, study: Study[Frames], absent: Absent) -> ThreadsValue | None:
        frames = study.frames(self.parts)
        if not frames["threads"].height:
            absent.say("threads")
            return None
        kept = [trace.rank for trace in study.part.traces][:MOST_CURVES]
        frames["curve"] = frames["curve"].filter(pl.col("rank").is_in(kept, nulls_equal=True))
        return self.lists(frames, absent)

    def tables(self, value: ThreadsValue) -> Iterator[Table]:
        rows = []
        for row in value["threads"]:
            role = ROLES.get(row["role"] or "", str(row["role"]))
            # where it only runs some Python, with the name that says so
            rows.append({**row, "role": f"{role}: {row['says']}" if row["role"] == "python" and row["says"] else role})
        columns = ["?rank", "name", "active_ns", "blocking_call_ns", "+op_ns", "+launch_ns", "+python_ns",
                   "+unobserved_ns", "+event_count", "role"]  # fmt: skip
        yield table("threads.threads", "Threads", columns, rows)
        totals: Counter[int | None] = Counter()
        for at_once in value["concurrency"]:
            totals[at_once["rank"]] += at_once["ns"]
        shares = [{**row, "share": row["ns"] / max(totals[row["rank"]], 1)} for row in value["concurrency"]]
        share = Col("share", "Share", "share", "of the window")
        yield table(
            "threads.concurrency", "Threads active at once", ["?rank", "threads", "ns", share], shares, among=rows
        )

    def summary(self, value: ThreadsValue) -> str | None:
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

    def picture(self, value: ThreadsValue) -> str:
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


SECTION = ThreadsSection()
