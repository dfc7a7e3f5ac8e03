"""The section about torch.compile: compiled code, graph breaks, recompilations, and their cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.compiled import (
    BREAKS,
    COMPILATIONS,
    GRAPHS,
    PARTS,
    REGIONS,
    STAGES,
    UNCOMPILED,
)
from traceloom.report.document import ListSchema, ReportOptions, Table, UnknownValues, format_yes_no
from traceloom.report.sections.section import Frames, Measurements, Section, TableSpec, build_table
from traceloom.system import units
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CompileValue

_MAX_ROWS = 100  # rows of a table and rank
_TIME = build_schema("part host_ns device_ns kernel_count", {"part": pl.Enum(PARTS)})
_COUNTS = build_schema(
    "lookup_count lookup_ns miss_count recompile_count compile_ns compilation_count break_count"
)
_COMPILATIONS = pl.Schema({name: kind for name, kind in COMPILATIONS.items() if name != "event"})
_PART_LABELS = {
    "compile": "compiling",
    "lookup": "looking compiled code up",
    "graph": "compiled graphs",
    "wrapper": "around compiled graphs",
    "break": "operators at graph breaks",
    "outside": "outside compiled regions",
    "unobserved": "nothing recorded",
}
_SPREAD_COLUMNS = ("mean_host_ns", "min_host_ns", "max_host_ns", "step_count")
_UNNUMBERED_REASON = "the trace does not number its compilations"


class CompileSection(Section[Frames, "CompileValue"]):
    key, title = "compile", "torch.compile"
    note = "What runs compiled, where graphs break, and what compiling costs."
    what = "what the trace shows of torch.compile"
    missing = "nothing of torch.compile was recorded"
    parts = {
        "counts": ListSchema(
            _COUNTS,
            "lookups of compiled code, and compilations, by rank",
            {"recompile_count": _UNNUMBERED_REASON},
        ),
        "time": ListSchema(
            _TIME, "host time of the threads that run compiled code, and GPU work, by part"
        ),
        "regions": ListSchema(
            REGIONS,
            "compiled regions, the longest first",
            dict.fromkeys(_SPREAD_COLUMNS, "the trace holds no whole step with it"),
            ("function", "backward_host_ns", "backward_device_ns"),
        ),
        "graphs": ListSchema(
            GRAPHS,
            "compiled graphs",
            {"region": "backward graphs run in no region, or the trace names none"},
        ),
        "breaks": ListSchema(BREAKS, "graph breaks", nullable=("place",)),
        "compilations": ListSchema(
            _COMPILATIONS,
            "compilations in the window, the longest first",
            dict.fromkeys(("region", "number", "recompile"), _UNNUMBERED_REASON),
            ("step",),
        ),
        "uncompiled": ListSchema(UNCOMPILED, "outermost operators in no compiled graph"),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        """Returns frames by part; empty ones where nothing is compiled."""
        compiled = analyze.compiled(trace)
        if not compiled.seen:
            return {name: pl.DataFrame(schema=part.columns) for name, part in self.parts.items()}
        host = compiled.time.group_by("part").agg(host_ns=pl.col("ns").sum())
        time = (
            host.join(compiled.device, on="part", how="full", coalesce=True)
            .sort("part")
            .with_columns(pl.exclude("part").fill_null(0))
        )
        compilations, breaks = compiled.compilations, int(compiled.breaks["count"].sum())
        compilation_totals = (int(compilations["duration_ns"].sum()), compilations.height)
        counts = (
            compiled.lookup_count,
            compiled.lookup_ns,
            compiled.miss_count,
            compiled.recompile_count,
            *compilation_totals,
            breaks,
        )
        return {
            "counts": pl.DataFrame([counts], schema=_COUNTS, orient="row"),
            "time": time.pipe(cast_to_schema, _TIME),
            "regions": compiled.regions.sort("host_ns", descending=True).head(_MAX_ROWS),
            "graphs": compiled.graphs.head(_MAX_ROWS),
            "breaks": compiled.breaks.head(_MAX_ROWS),
            "compilations": compilations.sort("duration_ns", descending=True)
            .head(_MAX_ROWS)
            .drop("event"),
            "uncompiled": compiled.uncompiled.head(_MAX_ROWS),
        }

    def build(
        self, measurements: Measurements[Frames], unknowns: UnknownValues
    ) -> CompileValue | None:
        if not any(frames["counts"].height for frames in measurements.results):
            unknowns.explain("compile")
            return None
        return self.lists(measurements.frames(self.parts), unknowns)

    def tables(self, value: CompileValue) -> Iterator[Table]:
        gpu = ["device_ns"] if any(row["device_ns"] for row in value["time"]) else []
        part_rows = [
            {**row, "part": _PART_LABELS.get(row["part"], row["part"])} for row in value["time"]
        ]
        compilations = [
            {**row, "recompile": format_yes_no(row["recompile"])} for row in value["compilations"]
        ]
        uncompiled = [
            {**row, "part": _PART_LABELS.get(row["part"], row["part"])}
            for row in value["uncompiled"]
        ]
        columns = ["?rank", "part", "host_ns", *gpu]
        yield build_table("compile.time", "Time by part", columns, part_rows, among=value["counts"])
        listed: list[TableSpec] = [
            (
                "regions",
                "Compiled regions",
                value["regions"],
                [
                    "?rank",
                    "region",
                    "host_ns",
                    "graph_ns",
                    "+wrapper_ns",
                    "break_ns",
                    *gpu,
                    "+backward_host_ns",
                    "count",
                    "graph_break_count",
                    "function",
                ],
            ),
            (
                "breaks",
                "Graph breaks",
                value["breaks"],
                ["?rank", "region", "resumed", "count", "between_ns", "lookup_ns", "place"],
            ),
            (
                "compilations",
                "Compilations",
                compilations,
                [
                    "?rank",
                    "region",
                    "direction",
                    "recompile",
                    "duration_ns",
                    *(f"+{stage}" for stage in STAGES),
                ],
            ),
            (
                "graphs",
                "Compiled graphs",
                value["graphs"],
                ["?rank", "host_ns", *gpu, "count", "region", "name"],
            ),
            (
                "uncompiled",
                "Not compiled",
                uncompiled,
                ["?rank", "host_ns", *gpu, "count", "part", "name"],
            ),
        ]
        yield from self.filled(listed, value["counts"])

    def summary(self, value: CompileValue) -> str | None:
        counts = value["counts"]
        compile_ns = sum(row["compile_ns"] for row in counts)
        recompile_counts = [
            row["recompile_count"] for row in counts if row["recompile_count"] is not None
        ]
        breaks = sum(row["break_count"] for row in counts)
        graphs = sum(row["host_ns"] for row in value["time"] if row["part"] == "graph")
        clauses = [f"compiled graphs take {units.format_duration(graphs)} of host time"]
        clauses += (
            [f"{units.format_count(breaks)} graph {'break' if breaks == 1 else 'breaks'}"]
            if breaks
            else []
        )
        if compile_ns:
            recompile_note = (
                f" ({units.format_count(sum(recompile_counts))} again)"
                if sum(recompile_counts)
                else ""
            )
            number = sum(row["compilation_count"] for row in counts)
            clauses.append(
                f"{units.format_count(number)} {'compilation' if number == 1 else 'compilations'}{recompile_note} "
                f"{'takes' if number == 1 else 'take'} {units.format_duration(compile_ns)}"
            )
        return ", ".join(clauses)


SECTION = CompileSection()
