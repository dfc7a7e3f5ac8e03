"""The flame graph: which frames take the host's time, and which feed the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from traceloom import analyze
from traceloom.analyze.flame import FRAMES, FUNCTIONS
from traceloom.analyze.host import main_lane
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.icicle import figure
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.chains import shortened
from traceloom.report.sections.section import Row, Section, Study, on_rank
from traceloom.report.sections.shapes import or_null, ranked, record, rows
from traceloom.report.table import Col, Table

MOST_FRAMES = 1000  # of the tree in the document; exports hold all
MOST_FUNCTIONS = 75  # of one rank
MOST_ROWS = 600  # of all ranks together, but
LEAST_FUNCTIONS = 10  # of each
_LEAST = 0.001  # share of the whole that a frame of the tree must have, in host time or in GPU time
_NAME = 60
_WORK = ("op", "launch", "module")  # what threads that take part in the program's work record
_TREE = pl.Schema({name: kind for name, kind in FRAMES.items() if name != "rank"})
_LIST = pl.Schema({**{name: kind for name, kind in FUNCTIONS.items() if name != "rank"}, "main_self_ns": pl.Int64()})


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank."""

    frames: pl.DataFrame
    functions: pl.DataFrame
    frame_count: int
    busy_ns: int
    gpu_work_ns: int


def _measure(trace: Trace, _options: ReportOptions) -> Measured:
    profile = analyze.flame(trace)
    by_gpu = profile.functions.sort("self_device_ns", descending=True).head(MOST_FUNCTIONS // 4)
    chosen = pl.concat([profile.functions.head(MOST_FUNCTIONS), by_gpu.filter(pl.col("self_device_ns") > 0)]).unique(
        maintain_order=True
    )
    key = ["name", "file", "line"]
    on_main = (
        profile.frames.filter(pl.col("lane").eq_missing(main_lane(trace)))
        .group_by(key)
        .agg(main_self_ns=pl.col("self_ns").sum())
    )
    chosen = chosen.join(on_main, on=key, how="left", nulls_equal=True, maintain_order="left")
    return Measured(
        _largest(profile.frames).drop("rank"),
        chosen.with_columns(pl.col("main_self_ns").fill_null(0)).select(list(_LIST)),
        profile.frames.height,
        profile.busy_ns,
        profile.gpu_work_ns,
    )


def _largest(frames: pl.DataFrame) -> pl.DataFrame:
    """The frames with the most time, each with all above it, numbered anew."""
    busy, gpu = frames["self_ns"].sum(), frames["self_device_ns"].sum()
    weight = pl.max_horizontal(pl.col("total_ns") / max(busy, 1), pl.col("device_ns") / max(gpu, 1))
    # what is above a frame has at least its time, and stands before it, so that the choice is closed upwards
    kept = frames.filter(weight >= _LEAST).with_columns(weight=weight)
    kept = kept.sort("weight", descending=True, maintain_order=True).head(MOST_FRAMES).sort("node").drop("weight")
    number = pl.Series("number", range(kept.height), dtype=pl.UInt32)
    numbers = kept.select("node").with_columns(number)
    return (
        kept.join(numbers.rename({"node": "parent", "number": "above"}), on="parent", how="left", maintain_order="left")
        .with_columns(node=number, parent=pl.col("above"))
        .drop("above")
        .cast(FRAMES)
    )


def _build(study: Study[Measured], absent: Absent) -> Row | None:
    index = next((k for k, measured in enumerate(study.results) if measured.frames.height), None)
    if index is None:
        absent.say("flame")
        return None
    shown, trace = study.results[index], study.part.traces[index]
    most = max(MOST_ROWS // len(study.results), LEAST_FUNCTIONS)
    functions = study.concat(lambda measured: measured.functions.head(most))
    return {
        "busy_ns": sum(measured.busy_ns for measured in study.results),
        "gpu_work_ns": sum(measured.gpu_work_ns for measured in study.results),
        "functions": absent.rows(functions, "flame.functions"),
        "tree_rank": absent.value(trace.rank, "flame.tree_rank"),
        "tree_frame_count": shown.frame_count,
        "tree": absent.rows(shown.frames, "flame.tree"),
    }


def _tables(value: Row) -> Iterator[Table]:
    several = len({row["rank"] for row in value["functions"]}) > 1
    device = bool(value["gpu_work_ns"])
    stepped = any(row["mean_self_ns"] is not None for row in value["functions"])
    columns = [
        *([Col("rank", "Rank", "count")] if several else []),
        Col("self_ns", "Self", "time", "time in which the frame is innermost"),
        Col("share", "Share", "share", "of the time in which anything is recorded"),
        Col("total_ns", "Total", "time", "with what it calls; calls of itself count once"),
        *([Col("device_ns", "GPU", "time", "GPU work launched in it or in what it calls")] if device else []),
        Col("calls", "Calls", "count"),
        *(
            [
                Col("mean_self_ns", "Self per step", "time", "mean over the whole steps", narrow=False),
                Col("max_self_ns", "Most", "time", "in the step with the most of it", narrow=False),
            ]
            if stepped
            else []
        ),
        Col("where", "Frame", "name"),
    ]
    whole = max(value["busy_ns"], 1)
    rows = [{**row, "share": row["self_ns"] / whole, "where": frame_name(row)} for row in value["functions"]]
    rows.sort(key=lambda row: -int(row["self_ns"]))
    note = "Frames, operators and calls by the time spent in themselves."
    yield Table("flame-functions", "Frames", columns, rows, "flame.functions", note)


def frame_name(row: Row) -> str:
    """`file.py:12 function`; the name alone where there is no file."""
    return f"{row['file']}:{row['line']} {row['name']}" if row.get("file") else str(row["name"])


def _summary(value: Row) -> str | None:
    top = max(value["functions"], key=lambda row: int(row["main_self_ns"]), default=None)
    if top is None or not top["main_self_ns"]:
        return None
    name, time = short(frame_name(top), _NAME), units.duration(top["main_self_ns"])
    return f"the main thread{on_rank(top, value['functions'])} spends the most time of its own, {time}, in {name}"


def _of_lanes(tree: list[Row], lanes: set[int]) -> list[Row]:
    """The rows of some threads, with their parents numbered anew."""
    number: dict[int | None, int | None] = {None: None}
    out: list[Row] = []
    for row in tree:
        if row["lane"] in lanes:
            number[row["node"]] = len(out)
            out.append({**row, "parent": number[row["parent"]]})
    return out


def _picture(value: Row) -> str:
    working = {row["lane"] for row in value["tree"] if row["kind"] in _WORK}
    idle = working and {row["lane"] for row in value["tree"]} - working
    tree = shortened(_of_lanes(value["tree"], working) if idle else value["tree"])
    nodes = [
        (row["parent"], row["name"], row["calls"], row["total_ns"], row["device_ns"] if value["gpu_work_ns"] else None)
        for row in tree
    ]
    left_out = value["tree_frame_count"] - len(value["tree"])
    rank = value["tree_rank"]
    of = "" if rank is None or not any(row["rank"] != rank for row in value["functions"]) else f" of rank {rank}"
    note = (
        f"The call stacks{of}: the thread on top, what it calls below. Frames that do nothing but call the next one "
        f"are drawn as one (+n). {'Threads that run nothing but other Python are not drawn. ' if idle else ''}"
        f"{units.count(left_out)} smaller frames are left out; -o x.speedscope.json has all."
    )
    return figure(nodes, label="Call stacks by time", note=note, slim=True)


_NO_STEP = "the trace holds no whole step, or it does not occur in one"
SECTION = Section(
    key="flame",
    title="Flame graph",
    note="Python frames, modules, operators and runtime calls by the time spent in them.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=or_null(
        record(
            {
                "busy_ns": {"type": "integer", "description": "time in which anything is recorded on the host threads"},
                "gpu_work_ns": {"type": "integer", "description": "summed duration of the GPU work"},
                "functions": ranked(
                    _LIST,
                    nullable={"file", "line", "mean_self_ns", "min_self_ns", "max_self_ns", "step_count"},
                    what="the largest frames by name, wherever they are called from",
                ),
                "tree_rank": {"type": ["integer", "null"], "description": "whose call stacks `tree` shows"},
                "tree_frame_count": {"type": "integer", "description": "paths of that rank, those left out included"},
                "tree": rows(
                    _TREE, nullable={"parent", "file", "line"}, what="its largest paths, parents before children"
                ),
            },
            what="the host's time by call stack",
        )
    ),
    reasons={
        "flame": "no host events were recorded",
        "flame.tree_rank": "the file does not say its rank",
        "flame.functions[*].rank": "the file does not say its rank",
        "flame.tree[*].parent": "null is a thread",
        **{
            f"flame.{part}[*].{name}": "only Python frames have a place in a file"
            for part in ("functions", "tree")
            for name in ("file", "line")
        },
        **{f"flame.functions[*].{how}_self_ns": _NO_STEP for how in ("mean", "min", "max")},
        "flame.functions[*].step_count": _NO_STEP,
    },
)
