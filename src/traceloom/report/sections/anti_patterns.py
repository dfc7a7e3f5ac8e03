"""PyTorch's known anti-patterns: what was found, and what could not be looked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import polars as pl

from traceloom import analyze
from traceloom.analyze.anti_patterns import MATCHES, PATTERNS, AntiPatterns
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked, record
from traceloom.report.sections.shapes import rows as rows_of
from traceloom.report.table import Col, Table

_ROWS = 100  # matches of a rank, the longest of each pattern
_JOB = pl.Schema(
    {
        "pattern": PATTERNS["pattern"],
        "checked": pl.Boolean(),
        "rank_count": pl.Int64(),
        "match_count": pl.Int64(),
        "host_ns": pl.Int64(),
        "gpu_ns": pl.Int64(),
        "evidence": PATTERNS["evidence"],
        "reason": pl.String(),
        "advice": pl.String(),
    }
)
_NULLS = ("match_count", "host_ns", "gpu_ns", "evidence", "reason")


def _measure(trace: Trace, _options: ReportOptions) -> AntiPatterns:
    anti_patterns = analyze.anti_patterns(trace)
    each = max(_ROWS // max(anti_patterns.matches["pattern"].n_unique(), 1), 1)
    longest = anti_patterns.matches.sort("duration_ns", "event", descending=[True, False])
    return replace(
        anti_patterns, matches=longest.group_by("pattern", maintain_order=True).head(each).select(list(MATCHES))
    )


def _build(study: Study[AntiPatterns], absent: Absent) -> Row:
    patterns = study.concat(lambda measured: measured.patterns)
    return {
        "job": absent.rows(_job(patterns), "anti_patterns.job"),
        "patterns": absent.rows(patterns, "anti_patterns.patterns"),
        "matches": absent.rows(study.concat(lambda measured: measured.matches), "anti_patterns.matches"),
    }


def _job(patterns: pl.DataFrame) -> pl.DataFrame:
    """The patterns over all ranks; checked where one rank can tell."""
    checked = pl.col("checked").any()
    return (
        patterns.group_by("pattern", maintain_order=True)
        .agg(
            checked,
            (pl.col("match_count") > 0).sum().alias("rank_count"),
            *(pl.when(checked).then(pl.col(name).sum()).alias(name) for name in ("match_count", "host_ns", "gpu_ns")),
            pl.col("evidence").drop_nulls().first(),
            pl.when(~checked).then(pl.col("reason").first()).alias("reason"),
            pl.col("advice").first(),
        )
        .select(list(_JOB))
        .cast(_JOB)
    )


def _tables(value: Row) -> Iterator[Table]:
    rank = [Col("rank", "Rank", "count")] if len({row["rank"] for row in value["patterns"]}) > 1 else []
    ordered = sorted(value["job"], key=lambda row: (not row["match_count"], not row["checked"], -(row["host_ns"] or 0)))
    columns = [
        *([Col("rank_count", "Ranks", "count", "in which it was found")] if rank else []),
        Col("pattern", "Pattern"),
        Col("match_count", "Matches", "count"),
        Col("host_ns", "Host", "time", "time of the matches"),
        Col("gpu_ns", "GPU", "time", "GPU work launched in them"),
        Col("evidence", "Evidence", narrow=False),
        Col("says", "What to do, or why it is not known", "name"),
    ]
    rows = [
        {
            **row,
            "pattern": row["pattern"].replace("_", " "),
            "says": row["reason"] or (row["advice"] if row["match_count"] else "not found"),
        }
        for row in ordered
    ]
    yield Table("anti-patterns-patterns", "Known patterns", columns, rows, "anti_patterns.job")
    if value["matches"]:
        columns = [
            *rank,
            Col("pattern", "Pattern"),
            Col("duration_ns", "Host", "time"),
            Col("gpu_ns", "GPU", "time"),
            Col("start_ns", "At", "time", narrow=False),
            Col("step", "Step", "count", narrow=False),
            Col("detail", "What was seen", "name"),
        ]
        rows = [{**row, "pattern": row["pattern"].replace("_", " ")} for row in value["matches"]]
        rows.sort(key=lambda row: -row["duration_ns"])
        yield Table("anti-patterns-matches", "Matches", columns, rows, "anti_patterns.matches")


def _summary(value: Row) -> str | None:
    times = {row["pattern"]: row["match_count"] for row in value["job"] if row["match_count"]}
    unknown = sum(not row["checked"] for row in value["job"])
    rest = f"; {unknown} of {len(value['job'])} could not be checked" if unknown else ""
    if not times:
        return f"none of the known anti-patterns was found{rest}"
    matches = ", ".join(f"{name.replace('_', ' ')} ({units.count(count)} times)" for name, count in times.items())
    return f"{matches}{rest}"


SECTION = Section(
    key="anti_patterns",
    title="Anti-patterns",
    note="What PyTorch's own profiler warns of, looked for in the recording; and what the recording cannot tell.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "job": rows_of(_JOB, nullable=_NULLS, what="all known patterns over all ranks"),
            "patterns": ranked(PATTERNS, nullable=_NULLS, what="all known patterns of each rank, found or not"),
            "matches": ranked(
                MATCHES, nullable=("step", "thread"), what="the longest matches, about a hundred of each rank"
            ),
        }
    ),
    reasons={
        **{f"anti_patterns.{name}[*].rank": "the file does not say its rank" for name in ("patterns", "matches")},
        **{
            f"anti_patterns.{part}[*].{name}": why
            for part in ("job", "patterns")
            for name, why in (
                *(
                    (name, "the recording does not tell; see its reason")
                    for name in ("match_count", "host_ns", "gpu_ns")
                ),
                ("evidence", "without matches there is none"),
                ("reason", "null is a pattern that was checked"),
            )
        },
        "anti_patterns.matches[*].step": "null is the time outside all steps",
        "anti_patterns.matches[*].thread": "the file does not number this thread",
    },
)
