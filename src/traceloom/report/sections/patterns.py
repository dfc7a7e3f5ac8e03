"""Sections about anti-patterns and repeated sequences of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.anti_patterns import MATCHES, PATTERNS
from traceloom.analyze.patterns import SEQUENCES, STEPS, Patterns
from traceloom.report.document import Col, ListSchema, ReportOptions, Table, UnknownValues
from traceloom.report.labels import fit_name
from traceloom.report.sections.section import Columns, Frames, Measurements, Section, build_table
from traceloom.system import units
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import AntiPatternsValue, PatternsValue


_MAX_MATCHES = 100  # matches of a rank, the longest of each pattern
_JOB_SCHEMA = build_schema(
    "pattern checked rank_count match_count host_ns gpu_ns evidence reason advice",
    {"pattern": PATTERNS["pattern"], "evidence": PATTERNS["evidence"]},
)
_SUM_COLUMNS = ("match_count", "host_ns", "gpu_ns")
_UNKNOWN_REASONS = {
    **dict.fromkeys(_SUM_COLUMNS, "the recording does not show it; see the reason"),
    "evidence": "without matches there is none",
}


class AntiPatternsSection(Section[Frames, "AntiPatternsValue"]):
    key, title = "anti_patterns", "Anti-patterns"
    note = "What PyTorch's own profiler warns of, looked for in the recording; and what the recording cannot tell."
    parts = {
        "job": ListSchema(
            _JOB_SCHEMA,
            "all known patterns over all ranks",
            _UNKNOWN_REASONS,
            ("reason",),
            ranked=False,
        ),
        "patterns": ListSchema(
            PATTERNS, "all known patterns of each rank, found or not", _UNKNOWN_REASONS, ("reason",)
        ),
        "matches": ListSchema(
            MATCHES,
            "the longest matches, about a hundred of each rank",
            nullable=("step", "thread"),
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        anti_patterns = analyze.anti_patterns(trace)
        max_per_pattern = max(
            _MAX_MATCHES // max(anti_patterns.matches["pattern"].n_unique(), 1), 1
        )
        longest = anti_patterns.matches.sort("duration_ns", "event", descending=[True, False])
        matches = (
            longest.group_by("pattern", maintain_order=True)
            .head(max_per_pattern)
            .select(list(MATCHES))
        )
        return {"patterns": anti_patterns.patterns, "matches": matches}

    def build(
        self, measurements: Measurements[Frames], unknowns: UnknownValues
    ) -> AntiPatternsValue:
        frames = measurements.frames(("patterns", "matches"))
        # over all ranks; checked if it was checked on one rank
        checked = pl.col("checked").any()
        job = (
            frames["patterns"]
            .group_by("pattern", maintain_order=True)
            .agg(
                checked,
                (pl.col("match_count") > 0).sum().alias("rank_count"),
                *(pl.when(checked).then(pl.col(name).sum()).alias(name) for name in _SUM_COLUMNS),
                pl.col("evidence").drop_nulls().first(),
                pl.when(~checked).then(pl.col("reason").first()).alias("reason"),
                pl.col("advice").first(),
            )
            .pipe(cast_to_schema, _JOB_SCHEMA)
        )
        return self.lists({"job": job, **frames}, unknowns)

    def tables(self, value: AntiPatternsValue) -> Iterator[Table]:
        several = ["rank_count"] if len({row["rank"] for row in value["patterns"]}) > 1 else []
        rows = [
            {
                **row,
                "pattern": row["pattern"].replace("_", " "),
                "says": row["reason"] or (row["advice"] if row["match_count"] else "not found"),
            }
            for row in sorted(
                value["job"],
                key=lambda row: (
                    not row["match_count"],
                    not row["checked"],
                    -(row["host_ns"] or 0),
                ),
            )
        ]
        columns: Columns = [
            *several,
            "pattern",
            "match_count",
            "host_ns",
            "gpu_ns",
            "+evidence",
            Col("says", "What to do, or why it is not known", "name"),
        ]
        yield build_table(
            "anti_patterns.job", "Known patterns", columns, rows, key="anti-patterns-patterns"
        )
        if value["matches"]:
            longest = sorted(value["matches"], key=lambda row: -row["duration_ns"])
            rows = [{**row, "pattern": row["pattern"].replace("_", " ")} for row in longest]
            yield build_table(
                "anti_patterns.matches",
                "Matches",
                ["?rank", "pattern", "duration_ns", "gpu_ns", "+start_ns", "+step", "detail"],
                rows,
                among=value["patterns"],
            )

    def summary(self, value: AntiPatternsValue) -> str | None:
        times = {row["pattern"]: row["match_count"] for row in value["job"] if row["match_count"]}
        unknown = sum(not row["checked"] for row in value["job"])
        unchecked_note = (
            f"; {unknown} of {len(value['job'])} could not be checked" if unknown else ""
        )
        if not times:
            return f"none of the known anti-patterns was found{unchecked_note}"
        matches = ", ".join(
            f"{name.replace('_', ' ')} ({units.format_count(count)} times)"
            for name, count in times.items()
        )
        return f"{matches}{unchecked_note}"


ANTI_PATTERNS_SECTION = AntiPatternsSection()

_PER_STEP = {name: kind for name, kind in STEPS.items() if name != "sequence"}
_JOB = build_schema(
    "kind rank_count count length launch_count kernel_ns gap_ns span_ns fraction elementwise mean_call_count names",
    {"kind": SEQUENCES["kind"], "names": pl.List(pl.String())},
)
_MAX_KERNEL_NAMES = 4  # names shown of a sequence
_MAX_NAME_WIDTH = 28


class PatternsSection(Section[Patterns, "PatternsValue"]):
    key, title = "patterns", "Patterns"
    note = (
        "Sequences of kernels that occur again and again: what could be fused, or put into a graph."
    )
    missing = "no sequence of GPU work occurs three times"
    parts = {
        "job": ListSchema(
            _JOB,
            "sequences of all ranks, equal ones added up",
            {},
            ("mean_call_count",),
            ranked=False,
        ),
        "ranks": ListSchema(
            {**SEQUENCES, **_PER_STEP},
            "frequent sequences of GPU work, of each rank by gain",
            {},
            tuple(_PER_STEP),
        ),
    }

    others = {"fusible_count": {"type": "integer"}}

    def measure(self, trace: Trace, options: ReportOptions) -> Patterns:
        return analyze.patterns(trace)

    def build(
        self, measurements: Measurements[Patterns], unknowns: UnknownValues
    ) -> PatternsValue | None:
        sequences = measurements.concat(
            lambda of: of.sequences.join(of.steps, on="sequence", how="left", maintain_order="left")
        )
        if not sequences.height:
            unknowns.explain("patterns")
            return None
        total_ns = sum(result.work_ns for result in measurements.results)
        # add up the same sequence over ranks
        job = (
            sequences.with_columns(pl.col("names").list.join("\x00").alias("key"))
            .group_by("kind", "key", maintain_order=True)
            .agg(
                pl.len().alias("rank_count"),
                pl.col("length", "elementwise", "names").first(),
                pl.col("count", "launch_count", "kernel_ns", "gap_ns", "span_ns").sum(),
                pl.col("mean_call_count").mean(),
            )
            .with_columns((pl.col("kernel_ns") / max(total_ns, 1)).alias("fraction"))
            .sort("kind", "kernel_ns", descending=[False, True], maintain_order=True)
        )
        return {
            **self.lists({"job": job.pipe(cast_to_schema, _JOB), "ranks": sequences}, unknowns),
            "fusible_count": sum(result.fusible_count for result in measurements.results),
        }

    def tables(self, value: PatternsValue) -> Iterator[Table]:
        several = ["rank_count"] if len({row["rank"] for row in value["ranks"]}) > 1 else []
        columns: Columns = [
            *several,
            "count",
            "length",
            "kernel_ns",
            "fraction",
            "gap_ns",
            "+launch_count",
            "+mean_call_count",
            Col("shown", "Kernels in order", "name"),
        ]
        for kind, title in (
            ("sequence", "Frequent sequences"),
            ("elementwise", "Runs of elementwise kernels"),
        ):
            rows = []
            for row in value["job"]:
                if row["kind"] == kind:
                    names = [
                        fit_name(name, _MAX_NAME_WIDTH) for name in row["names"][:_MAX_KERNEL_NAMES]
                    ]
                    hidden_count = len(row["names"]) - len(names)
                    rows.append(
                        {
                            **row,
                            "shown": " | ".join(names)
                            + (f" | … and {hidden_count} more" if hidden_count else ""),
                        }
                    )
            if rows:
                yield build_table("patterns.job", title, columns, rows, key=f"patterns-{kind}")

    def summary(self, value: PatternsValue) -> str | None:
        first = next((row for row in value["job"] if row["kind"] == "sequence"), None)
        if first is None:
            return None
        rank_prefix, work_label = "", "the GPU's work"
        length, count, fraction = first["length"], first["count"], first["fraction"]
        ranks = [row for row in value["ranks"] if row["kind"] == "sequence"]
        if first["rank_count"] < len(
            {row["rank"] for row in ranks}
        ):  # otherwise it may be part of another one
            longest = max(ranks, key=lambda row: row["kernel_ns"])
            length, count, fraction = longest["length"], longest["count"], longest["fraction"]
            rank_prefix, work_label = f"on rank {longest['rank']} ", "its work"
        text = (
            f"{rank_prefix}a sequence of {length} kernels occurs {units.format_count(count)} times and holds "
            f"{units.format_share(fraction, 1.0)} of {work_label}"
        )
        if value["fusible_count"]:
            ranks_suffix = " of all ranks" if rank_prefix else ""
            text += f"; fusing runs of elementwise kernels would save {units.format_count(value['fusible_count'])} kernels{ranks_suffix}"
        return text


SECTION = PatternsSection()
