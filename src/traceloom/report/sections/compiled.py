"""torch.compile: what runs compiled, where graphs break, what is compiled again, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import polars as pl

from traceloom import analyze
from traceloom.analyze.compilations import COMPILATIONS, PARTS, STAGES
from traceloom.analyze.compiled import BREAKS, GRAPHS, REGIONS, UNCOMPILED
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import or_null, ranked, record
from traceloom.report.table import Col, Table

_MOST = 100  # rows of a table and rank
_TIME = pl.Schema({"part": pl.Enum(PARTS), "host_ns": pl.Int64(), "device_ns": pl.Int64(), "kernel_count": pl.Int64()})
_COUNTS = pl.Schema(
    {
        "lookup_count": pl.Int64(),
        "lookup_ns": pl.Int64(),
        "miss_count": pl.Int64(),
        "recompile_count": pl.Int64(),
        "compile_ns": pl.Int64(),
    }
)
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


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank; empty frames where nothing is compiled."""

    frames: dict[str, pl.DataFrame]


def _measure(trace: Trace, _options: ReportOptions) -> Measured:
    compiled = analyze.compiled(trace)
    host = compiled.time.group_by("part").agg(host_ns=pl.col("ns").sum())
    time = (
        host.join(compiled.device, on="part", how="full", coalesce=True)
        .sort("part")
        .with_columns(pl.exclude("part").fill_null(0))
    )
    counts = [
        (
            compiled.lookup_count,
            compiled.lookup_ns,
            compiled.miss_count,
            compiled.recompile_count,
            int(compiled.compilations["duration_ns"].sum()),
        )
    ]
    return Measured(
        {
            "counts": pl.DataFrame(counts if compiled.seen else [], schema=_COUNTS, orient="row"),
            "time": time.select(list(_TIME)).cast(_TIME),
            "regions": compiled.regions.sort("host_ns", descending=True).head(_MOST),
            "graphs": compiled.graphs.head(_MOST),
            "breaks": compiled.breaks.head(_MOST),
            "compilations": compiled.compilations.sort("duration_ns", descending=True).head(_MOST).drop("event"),
            "uncompiled": compiled.uncompiled.head(_MOST),
        }
    )


def _build(study: Study[Measured], absent: Absent) -> Row | None:
    if not any(measured.frames["counts"].height for measured in study.results):
        absent.say("compile")
        return None
    return {name: absent.rows(study.concat(partial(_frame, name)), f"compile.{name}") for name in _FRAMES}


def _frame(name: str, measured: Measured) -> pl.DataFrame:
    return measured.frames[name]


_FRAMES = {
    "counts": (_COUNTS, {"recompile_count"}, "lookups of compiled code, and compilations, by rank"),
    "time": (_TIME, set[str](), "host time of the threads that run compiled code, and GPU work, by part"),
    "regions": (
        REGIONS,
        {"function", "backward_host_ns", "backward_device_ns", *_SPREAD},
        "compiled regions, the longest first",
    ),
    "graphs": (GRAPHS, {"region"}, "compiled graphs"),
    "breaks": (BREAKS, {"place"}, "graph breaks"),
    "compilations": (
        pl.Schema({name: kind for name, kind in COMPILATIONS.items() if name != "event"}),
        {"region", "number", "recompile", "step"},
        "compilations in the window, the longest first",
    ),
    "uncompiled": (UNCOMPILED, set[str](), "outermost operators in no compiled graph"),
}


def _tables(value: Row) -> Iterator[Table]:
    ranks = [Col("rank", "Rank", "count")] if len({row["rank"] for row in value["counts"]}) > 1 else []
    device = any(row["device_ns"] for row in value["time"])
    gpu = [Col("device_ns", "GPU", "time", "GPU work launched there")] if device else []
    parts = [{**row, "part": _WORDS.get(row["part"], row["part"])} for row in value["time"]]
    yield Table(
        "compile-time",
        "Time by part",
        [*ranks, Col("part", "Part"), Col("host_ns", "Host", "time"), *gpu],
        parts,
        "compile.time",
    )
    if value["regions"]:
        yield Table(
            "compile-regions", "Compiled regions", [*ranks, *_region_columns(gpu)], value["regions"], "compile.regions"
        )
    if value["breaks"]:
        yield Table("compile-breaks", "Graph breaks", [*ranks, *_BREAK_COLUMNS], value["breaks"], "compile.breaks")
    if value["compilations"]:
        rows = [{**row, "again": {True: "yes", False: "no"}.get(row["recompile"])} for row in value["compilations"]]
        yield Table(
            "compile-compilations", "Compilations", [*ranks, *_COMPILATION_COLUMNS], rows, "compile.compilations"
        )
    graphs = [
        Col("host_ns", "Host", "time"),
        *gpu,
        Col("count", "Calls", "count"),
        Col("region", "Region"),
        Col("name", "Graph", "name"),
    ]
    if value["graphs"]:
        yield Table("compile-graphs", "Compiled graphs", [*ranks, *graphs], value["graphs"], "compile.graphs")
    if value["uncompiled"]:
        rows = [{**row, "part": _WORDS.get(row["part"], row["part"])} for row in value["uncompiled"]]
        columns = [
            Col("host_ns", "Host", "time"),
            *gpu,
            Col("count", "Calls", "count"),
            Col("part", "Where"),
            Col("name", "Operator", "name"),
        ]
        yield Table("compile-uncompiled", "Not compiled", [*ranks, *columns], rows, "compile.uncompiled")


def _region_columns(gpu: list[Col]) -> list[Col]:
    return [
        Col("region", "Region", hint="frame/compilation: a second number above 0 is a recompilation"),
        Col("host_ns", "Host", "time", "without compilations, lookups and regions inside it"),
        Col("graph_ns", "In graphs", "time"),
        Col("wrapper_ns", "Around", "time", "bytecode, prologues and Python around its graphs", narrow=False),
        Col("break_ns", "Uncompiled", "time", "operators at graph breaks"),
        *gpu,
        Col("backward_host_ns", "Backward", "time", "of its graphs", narrow=False),
        Col("count", "Calls", "count"),
        Col("graph_break_count", "Breaks", "count", "continuations that ran inside it"),
        Col("function", "Function", "name"),
    ]


_BREAK_COLUMNS = (
    Col("region", "In"),
    Col("resumed", "Resumed by"),
    Col("count", "Count", "count"),
    Col("between_ns", "Between", "time", "host time from the end of the graph to the continuation"),
    Col("lookup_ns", "Lookup", "time", "the part of it that looked the continuation up"),
    Col("place", "Resumes at", "name"),
)
_STAGE_TITLES = ("Dynamo", "Guards", "Autograd", "Inductor", "Code")
_COMPILATION_COLUMNS = (
    Col("region", "Region"),
    Col("direction", "Graph"),
    Col("again", "Again", hint="the frame had been compiled before: a guard failed"),
    Col("duration_ns", "Time", "time"),
    *(Col(name, title, "time", narrow=False) for name, title in zip(STAGES, _STAGE_TITLES, strict=True)),
)


def _summary(value: Row) -> str | None:
    counts = value["counts"]
    compile_ns = sum(row["compile_ns"] for row in counts)
    again = [row["recompile_count"] for row in counts if row["recompile_count"] is not None]
    breaks = sum(row["count"] for row in value["breaks"])
    graphs = sum(row["host_ns"] for row in value["time"] if row["part"] == "graph")
    clauses = [f"compiled graphs take {units.duration(graphs)} of host time"]
    clauses += [f"{units.count(breaks)} graph {'break' if breaks == 1 else 'breaks'}"] if breaks else []
    if compile_ns:
        more = f" ({units.count(sum(again))} again)" if sum(again) else ""
        number = len(value["compilations"])
        clauses.append(
            f"{units.count(number)} {'compilation' if number == 1 else 'compilations'}{more} "
            f"{'takes' if number == 1 else 'take'} {units.duration(compile_ns)}"
        )
    return ", ".join(clauses)


_NO_STEP = "the trace holds no whole step with it"
SECTION = Section(
    key="compile",
    title="torch.compile",
    note="What runs compiled, where graphs break, and what compiling costs.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=or_null(
        record(
            {name: ranked(schema, nullable=nullable, what=what) for name, (schema, nullable, what) in _FRAMES.items()},
            what="what the trace shows of torch.compile",
        )
    ),
    reasons={
        "compile": "nothing of torch.compile was recorded",
        "compile.counts[*].recompile_count": "the trace does not number its compilations",
        "compile.regions[*].function": "Python stacks were not recorded",
        "compile.regions[*].backward_host_ns": "no backward operator tells its forward",
        "compile.regions[*].backward_device_ns": "no backward operator tells its forward",
        "compile.graphs[*].region": "backward graphs run in no region, or the trace names none",
        "compile.breaks[*].place": "Python stacks were not recorded",
        **{
            f"compile.compilations[*].{name}": "the trace does not number its compilations"
            for name in ("region", "number", "recompile")
        },
        "compile.compilations[*].step": "null is the time outside all steps",
        **{f"compile.regions[*].{name}": _NO_STEP for name in _SPREAD},
        **{f"compile.{name}[*].rank": "the file does not say its rank" for name in _FRAMES},
    },
)
