"""PyTorch's known anti-patterns: what was found, and what could not be looked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.anti_patterns import MATCHES, PATTERNS
from traceloom.model import Trace, units
from traceloom.model.frames import as_declared, schema
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Columns, Frames, Section, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import AntiPatternsValue

_ROWS = 100  # matches of a rank, the longest of each pattern
_JOB = schema(
    "pattern checked rank_count match_count host_ns gpu_ns evidence reason advice",
    {"pattern": PATTERNS["pattern"], "evidence": PATTERNS["evidence"]},
)
_SUMS = ("match_count", "host_ns", "gpu_ns")
_NULLS = {
    **dict.fromkeys(_SUMS, "the recording does not show it; see the reason"),
    "evidence": "without matches there is none",
}


class AntiPatternsSection(Section[Frames, "AntiPatternsValue"]):
    """Known patterns and their matches."""

    key, title = "anti_patterns", "Anti-patterns"
    note = "What PyTorch's own profiler warns of, looked for in the recording; and what the recording cannot tell."
    parts = {
        "job": Part(_JOB, "all known patterns over all ranks", _NULLS, ("reason",), ranked=False),
        "patterns": Part(PATTERNS, "all known patterns of each rank, found or not", _NULLS, ("reason",)),
        "matches": Part(MATCHES, "the longest matches, about a hundred of each rank", nullable=("step", "thread")),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        anti_patterns = analyze.anti_patterns(trace)
        each = max(_ROWS // max(anti_patterns.matches["pattern"].n_unique(), 1), 1)
        longest = anti_patterns.matches.sort("duration_ns", "event", descending=[True, False])
        matches = longest.group_by("pattern", maintain_order=True).head(each).select(list(MATCHES))
        return {"patterns": anti_patterns.patterns, "matches": matches}

    def build(self, study: Study[Frames], absent: Absent) -> AntiPatternsValue:
        frames = study.frames(("patterns", "matches"))
        # over all ranks; checked where one rank can tell
        checked = pl.col("checked").any()
        job = (
            frames["patterns"]
            .group_by("pattern", maintain_order=True)
            .agg(
                checked,
                (pl.col("match_count") > 0).sum().alias("rank_count"),
                *(pl.when(checked).then(pl.col(name).sum()).alias(name) for name in _SUMS),
                pl.col("evidence").drop_nulls().first(),
                pl.when(~checked).then(pl.col("reason").first()).alias("reason"),
                pl.col("advice").first(),
            )
            .pipe(as_declared, _JOB)
        )
        return self.lists({"job": job, **frames}, absent)

    def tables(self, value: AntiPatternsValue) -> Iterator[Table]:
        several = ["rank_count"] if len({row["rank"] for row in value["patterns"]}) > 1 else []
        rows = [
            {
                **row,
                "pattern": row["pattern"].replace("_", " "),
                "says": row["reason"] or (row["advice"] if row["match_count"] else "not found"),
            }
            for row in sorted(
                value["job"], key=lambda row: (not row["match_count"], not row["checked"], -(row["host_ns"] or 0))
            )
        ]
        says = Col("says", "What to do, or why it is not known", "name")
        columns: Columns = [*several, "pattern", "match_count", "host_ns", "gpu_ns", "+evidence", says]
        yield table("anti_patterns.job", "Known patterns", columns, rows, key="anti-patterns-patterns")
        if value["matches"]:
            longest = sorted(value["matches"], key=lambda row: -row["duration_ns"])
            rows = [{**row, "pattern": row["pattern"].replace("_", " ")} for row in longest]
            yield table(
                "anti_patterns.matches",
                "Matches",
                ["?rank", "pattern", "duration_ns", "gpu_ns", "+start_ns", "+step", "detail"],
                rows,
                among=value["patterns"],
            )

    def summary(self, value: AntiPatternsValue) -> str | None:
        times = {row["pattern"]: row["match_count"] for row in value["job"] if row["match_count"]}
        unknown = sum(not row["checked"] for row in value["job"])
        rest = f"; {unknown} of {len(value['job'])} could not be checked" if unknown else ""
        if not times:
            return f"none of the known anti-patterns was found{rest}"
        matches = ", ".join(f"{name.replace('_', ' ')} ({units.count(count)} times)" for name, count in times.items())
        return f"{matches}{rest}"


SECTION = AntiPatternsSection()
