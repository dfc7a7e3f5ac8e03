"""torch.compile: what runs compiled, where graphs break, what is compiled again, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.compiled import BREAKS, COMPILATIONS, GRAPHS, PARTS, REGIONS, STAGES, UNCOMPILED
from traceloom.report.document import Part, ReportOptions, Table, UnknownValues, yes_or_no
from traceloom.report.sections.section import Frames, Listed, Measurements, Section, table
from traceloom.system import units
from traceloom.trace.frames import cast_to_schema, schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CompileValue

_MOST = 100  # rows of a table and rank
_TIME = schema("part host_ns device_ns kernel_count", {"part": pl.Enum(PARTS)})
_COUNTS = schema("lookup_count lookup_ns miss_count recompile_count compile_ns compilation_count break_count")
_COMPILATIONS = pl.Schema({name: kind for name, kind in COMPILATIONS.items() if name != "event"})
_WORDS = {
    "compile": "compiling",
    "lookup": "looking compiled code up",
    "graph": "compiled graphs",
    "wrapper": "around compiled graphs",
    "break": "operators at graph breaks",
    "outside": "outside compiled regions",
    "unobserved": "nothing recorded",
}
_SPREAD = ("mean_host_ns", "min_host_ns", "max_host_ns", "step_count")
_NO_NUMBERS = "the trace does not number its compilations"


class CompileSection(Section[Frames, "CompileValue"]):
    """What the trace shows of torch.compile."""

    key, title = "compile", "torch.compile"
    note = "What runs compiled, where graphs break, and what compiling costs."
    what = "what the trace shows of torch.compile"
    missing = "nothing of torch.compile was recorded"
    parts = {
        "counts": Part(
            _COUNTS, "lookups of compiled code, and compilations, by rank", {"recompile_count": _NO_NUMBERS}
        ),
        "time": Part(_TIME, "host time of the threads that run compiled code, and GPU work, by part"),
        "regions": Part(
            REGIONS,
            "compiled regions, the longest first",
            dict.fromkeys(_SPREAD, "the trace holds no whole step with it"),
            ("function", "backward_host_ns", "backward_device_ns"),
        ),
        "graphs": Part(
            GRAPHS, "compiled graphs", {"region": "backward graphs run in no region, or the trace names none"}
        ),
        "breaks": Part(BREAKS, "graph breaks", nullable=("place",)),
        "compilations": Part(
            _COMPILATIONS,
            "compilations in the window, the longest first",
            dict.fromkeys(("region", "number", "recompile"), _NO_NUMBERS),
            ("step",),
        ),
        "uncompiled": Part(UNCOMPILED, "outermost operators in no compiled graph"),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        """Frames by part; empty ones where nothing is compiled."""
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
        made = (int(compilations["duration_ns"].sum()), compilations.height)
        counts = (
            compiled.lookup_count,
            compiled.lookup_ns,
            compiled.miss_count,
            compiled.recompile_count,
            *made,
            breaks,
        )
        return {
            "counts": pl.DataFrame([counts], schema=_COUNTS, orient="row"),
            "time": time.pipe(cast_to_schema, _TIME),
            "regions": compiled.regions.sort("host_ns", descending=True).head(_MOST),
            "graphs": compiled.graphs.head(_MOST),
            "breaks": compiled.breaks.head(_MOST),
            "compilations": compilations.sort("duration_ns", descending=True).head(_MOST).drop("event"),
            "uncompiled": compiled.uncompiled.head(_MOST),
        }

    def build(self, study: Measurements[Frames], absent: UnknownValues) -> CompileValue | None:
        if not any(frames["counts"].height for frames in study.results):
            absent.say("compile")
            return None
        return self.lists(study.frames(self.parts), absent)

    def tables(self, value: CompileValue) -> Iterator[Table]:
        gpu = ["device_ns"] if any(row["device_ns"] for row in value["time"]) else []
        by_part = [{**row, "part": _WORDS.get(row["part"], row["part"])} for row in value["time"]]
        compilations = [{**row, "recompile": yes_or_no(row["recompile"])} for row in value["compilations"]]
        uncompiled = [{**row, "part": _WORDS.get(row["part"], row["part"])} for row in value["uncompiled"]]
        columns = ["?rank", "part", "host_ns", *gpu]
        yield table("compile.time", "Time by part", columns, by_part, among=value["counts"])
        listed: list[Listed] = [
            ("regions", "Compiled regions", value["regions"], ["?rank", "region", "host_ns", "graph_ns", "+wrapper_ns",
                "break_ns", *gpu, "+backward_host_ns", "count", "graph_break_count", "function"]),
            ("breaks", "Graph breaks", value["breaks"], ["?rank", "region", "resumed", "count", "between_ns",
                "lookup_ns", "place"]),
            ("compilations", "Compilations", compilations, ["?rank", "region", "direction", "recompile", "duration_ns",
                *(f"+{stage}" for stage in STAGES)]),
            ("graphs", "Compiled graphs", value["graphs"], ["?rank", "host_ns", *gpu, "count", "region", "name"]),
            ("uncompiled", "Not compiled", uncompiled, ["?rank", "host_ns", *gpu, "count", "part", "name"]),
        ]  # fmt: skip
        yield from self.filled(listed, value["counts"])

    def summary(self, value: CompileValue) -> str | None:
        counts = value["counts"]
        compile_ns = sum(row["compile_ns"] for row in counts)
        again = [row["recompile_count"] for row in counts if row["recompile_count"] is not None]
        breaks = sum(row["break_count"] for row in counts)
        graphs = sum(row["host_ns"] for row in value["time"] if row["part"] == "graph")
        clauses = [f"compiled graphs take {units.duration(graphs)} of host time"]
        clauses += [f"{units.count(breaks)} graph {'break' if breaks == 1 else 'breaks'}"] if breaks else []
        if compile_ns:
            more = f" ({units.count(sum(again))} again)" if sum(again) else ""
            number = sum(row["compilation_count"] for row in counts)
            clauses.append(
                f"{units.count(number)} {'compilation' if number == 1 else 'compilations'}{more} "
                f"{'takes' if number == 1 else 'take'} {units.duration(compile_ns)}"
            )
        return ", ".join(clauses)


SECTION = CompileSection()
