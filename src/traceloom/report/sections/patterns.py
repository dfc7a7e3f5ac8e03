"""Frequent sequences of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.patterns import SEQUENCES, STEPS, Patterns
from traceloom.model import Trace, units
from traceloom.model.frames import as_declared, schema
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Columns, Section, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import PatternsValue

_PER_STEP = {name: kind for name, kind in STEPS.items() if name != "sequence"}
_JOB = schema(
    "kind rank_count count length launch_count kernel_ns gap_ns span_ns fraction elementwise mean_call_count names",
    {"kind": SEQUENCES["kind"], "names": pl.List(pl.String())},
)
_KERNELS = 4  # names shown of a sequence
_NAME = 28


class PatternsSection(Section[Patterns, "PatternsValue"]):
    """Frequent sequences of kernels, of each rank and of the job."""

    key, title = "patterns", "Patterns"
    note = "Sequences of kernels that occur again and again: what could be fused, or put into a graph."
    missing = "no sequence of GPU work occurs three times"
    parts = {
        "job": Part(_JOB, "sequences of all ranks, equal ones added up", {}, ("mean_call_count",), ranked=False),
        "ranks": Part(
            {**SEQUENCES, **_PER_STEP}, "frequent sequences of GPU work, of each rank by gain", {}, tuple(_PER_STEP)
        ),
    }

    others = {"fusible_count": {"type": "integer"}}

    def measure(self, trace: Trace, options: ReportOptions) -> Patterns:
        return analyze.patterns(trace)

    def build(self, study: Study[Patterns], absent: Absent) -> PatternsValue | None:
        sequences = study.concat(
            lambda of: of.sequences.join(of.steps, on="sequence", how="left", maintain_order="left")
        )
        if not sequences.height:
            absent.say("patterns")
            return None
        whole_ns = sum(of.work_ns for of in study.results)
        # the same sequence of several ranks added up
        job = (
            sequences.with_columns(pl.col("names").list.join("\x00").alias("key"))
            .group_by("kind", "key", maintain_order=True)
            .agg(
                pl.len().alias("rank_count"),
                pl.col("length", "elementwise", "names").first(),
                pl.col("count", "launch_count", "kernel_ns", "gap_ns", "span_ns").sum(),
                pl.col("mean_call_count").mean(),
            )
            .with_columns((pl.col("kernel_ns") / max(whole_ns, 1)).alias("fraction"))
            .sort("kind", "kernel_ns", descending=[False, True], maintain_order=True)
        )
        lists = self.lists({"job": job.pipe(as_declared, _JOB), "ranks": sequences}, absent)
        return {**lists, "fusible_count": sum(of.fusible_count for of in study.results)}

    def tables(self, value: PatternsValue) -> Iterator[Table]:
        several = ["rank_count"] if len({row["rank"] for row in value["ranks"]}) > 1 else []
        columns: Columns = [*several, "count", "length", "kernel_ns", "fraction", "gap_ns", "+launch_count",
                            "+mean_call_count", Col("shown", "Kernels in order", "name")]  # fmt: skip
        for kind, title in (("sequence", "Frequent sequences"), ("elementwise", "Runs of elementwise kernels")):
            rows = []
            for row in value["job"]:
                if row["kind"] == kind:
                    names = [short(name, _NAME) for name in row["names"][:_KERNELS]]
                    more = len(row["names"]) - len(names)
                    rows.append({**row, "shown": " | ".join(names) + (f" | … and {more} more" if more else "")})
            if rows:
                yield table("patterns.job", title, columns, rows, key=f"patterns-{kind}")

    def summary(self, value: PatternsValue) -> str | None:
        first = next((row for row in value["job"] if row["kind"] == "sequence"), None)
        if first is None:
            return None
        where, whose = "", "the GPU's work"
        length, count, fraction = first["length"], first["count"], first["fraction"]
        ranks = [row for row in value["ranks"] if row["kind"] == "sequence"]
        if first["rank_count"] < len({row["rank"] for row in ranks}):  # elsewhere it may be part of another one
            longest = max(ranks, key=lambda row: row["kernel_ns"])
            length, count, fraction = longest["length"], longest["count"], longest["fraction"]
            where, whose = f"on rank {longest['rank']} ", "its work"
        words = (
            f"{where}a sequence of {length} kernels occurs {units.count(count)} times and holds "
            f"{units.share(fraction, 1.0)} of {whose}"
        )
        if value["fusible_count"]:
            of = " of all ranks" if where else ""
            words += (
                f"; fusing runs of elementwise kernels would save {units.count(value['fusible_count'])} kernels{of}"
            )
        return words


SECTION = PatternsSection()
