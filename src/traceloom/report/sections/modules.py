"""Sections about modules and the flame graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.flame import FRAMES, FUNCTIONS, Flame
from traceloom.analyze.host_events import is_user_frame
from traceloom.analyze.host_time import find_main_lane
from traceloom.report.document import Cells, Col, ListSchema, ReportOptions, Table, UnknownValues
from traceloom.report.figure import draw_icicle
from traceloom.report.labels import fit_name, format_rank_name
from traceloom.report.sections.section import (
    Columns,
    CoreSection,
    Measurements,
    RankMeasurements,
    Section,
    build_table,
    format_rank_suffix,
)
from traceloom.system import units
from traceloom.trace.frames import build_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import ModuleRow
    from traceloom.report.documents.sections import FlameFunctionsRow, FlameTreeRow, FlameValue


_MAX_NODES = 4_000  # of one rank's tree in the page


class ModulesSection(CoreSection):
    key, title = "modules", "Modules"
    note = "Which part of the model the time belongs to."

    def build(
        self, measurements: Measurements[RankMeasurements], unknowns: UnknownValues
    ) -> list[ModuleRow]:
        """Returns the module trees of all ranks, concatenated; `rank` is the rank of each."""
        return unknowns.convert_list(measurements.concat(lambda rank: rank.modules.tree), "modules")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Yields the tree of every rank as an icicle and a table, with separate forward, backward
        and repeated time.
        """
        several = len(document["ranks"]) > 1
        trees: dict[int | None, list[ModuleRow]] = {}
        for row in document.get("modules") or []:
            trees.setdefault(row["rank"], []).append(row)
        for position, rank in enumerate(document["ranks"]):
            tree = trees.get(rank["rank"], [])[:_MAX_NODES]
            if not tree:
                continue
            gpu = any(_sum_passes(row, "device_ns") for row in tree)
            index_of_node: dict[int | None, int] = {row["node"]: k for k, row in enumerate(tree)}
            nodes = [
                (
                    index_of_node.get(row["parent"]),
                    row["name"],
                    row["count"],
                    _sum_passes(row, "host_ns"),
                    _sum_passes(row, "device_ns"),
                )
                for row in tree
            ]
            yield Table(
                f"module-table-{position}",
                f"Modules of {format_rank_name(rank, position)}" if several else "Modules",
                _build_columns(tree, gpu=gpu),
                [
                    {
                        **row,
                        "name": "\u2003" * row["depth"] + row["name"],
                        "all_ns": _sum_passes(row, "device_ns" if gpu else "host_ns"),
                    }
                    for row in tree
                ],
                "modules",
                position=position,
                picture=draw_icicle(nodes, label="Module tree by time"),
                weight="all_ns",
                brief=position == 0,
            )


def _sum_passes(row: Cells, name: str) -> int:
    """Returns the sum of forward, backward and repeated time."""
    return sum(row.get(f"{part}{name}") or 0 for part in ("", "backward_", "recompute_"))


def _build_columns(tree: list[ModuleRow], *, gpu: bool) -> list[Col]:
    backward = any(row.get("backward_host_ns") for row in tree)
    has_recompute = any(row.get("recompute_host_ns") for row in tree)
    columns = [
        Col("name", "Module", "name"),
        Col("kind", "Kind", narrow=False),
        Col("count", "Calls", "count"),
        Col("host_ns", "Host", "time", "time in it outside the backward pass", scale="host"),
        Col("self_host_ns", "self", "time", "outside child rows", narrow=False, scale="host"),
        *(
            [
                Col(
                    "backward_host_ns",
                    "backward",
                    "time",
                    "of the nodes its operators made",
                    not gpu,
                    scale="host",
                )
            ]
            * backward
        ),
        *(
            [
                Col(
                    "recompute_host_ns",
                    "repeated",
                    "time",
                    "forward run again by checkpoints",
                    not gpu,
                    scale="host",
                )
            ]
            * has_recompute
        ),
    ]
    if gpu:
        columns += [
            Col("device_ns", "GPU", "time", "GPU work launched in it", scale="gpu"),
            Col(
                "self_device_ns",
                "self",
                "time",
                "launched outside child rows",
                narrow=False,
                scale="gpu",
            ),
            *(
                [Col("backward_device_ns", "backward", "time", "of its backward", scale="gpu")]
                * backward
            ),
            *(
                [Col("recompute_device_ns", "repeated", "time", "GPU work run again", scale="gpu")]
                * has_recompute
            ),
            Col(
                "kernel_count",
                "Kernels",
                "count",
                "launched in it outside the backward pass",
                narrow=False,
            ),
        ]
    if any(row.get("mean_all_host_ns") is not None for row in tree):
        side, title = ("device", "GPU") if gpu else ("host", "Host")
        hint = "forward, backward and repeated together, mean over the whole steps"
        columns += [
            Col(
                f"mean_all_{side}_ns", f"{title} per step", "time", hint, narrow=False, scale="step"
            ),
            Col(
                f"min_all_{side}_ns",
                "min",
                "time",
                "min over the whole steps",
                narrow=False,
                scale="step",
            ),
            Col(
                f"max_all_{side}_ns",
                "max",
                "time",
                "max over the whole steps",
                narrow=False,
                scale="step",
            ),
        ]
    return columns


MODULES_SECTION = ModulesSection()

MAX_FRAMES = 1000  # of the tree in the document; exports hold all
MAX_RANK_FUNCTIONS = 75  # of one rank
MAX_ROWS = 600  # max for all ranks together, unless `MIN_RANK_FUNCTIONS` requires more
MIN_RANK_FUNCTIONS = 10  # min for each rank
# Min share of the total, in host time or in GPU time, of a frame of the tree.
_MIN_FRAME_SHARE = 0.001
_MAX_NAME_WIDTH = 60
_WORK_KINDS = ("op", "launch", "module")  # recorded by threads that do work of the program
_SAME_TIME_SHARE = 0.98  # of a frame's time (host and GPU), in its only relevant child
_TREE = pl.Schema({name: kind for name, kind in FRAMES.items() if name != "rank"})
_LIST = build_schema(
    pl.Schema({name: kind for name, kind in FUNCTIONS.items() if name != "rank"}), "main_self_ns"
)
_NO_STEP_REASON = "the trace holds no whole step, or it does not occur in one"


class FlameSection(Section[tuple[Flame, int], "FlameValue"]):
    """The host's time by call stack.

    Its measurement holds the analysis with the kept frames, and their original number.
    """

    key, title = "flame", "Flame graph"
    note = "Python frames, modules, operators and runtime calls by the time spent in them."
    what = "the host's time by call stack"
    missing = "no host events were recorded"
    parts = {
        "functions": ListSchema(
            _LIST,
            "the largest frames by name, wherever they are called from",
            dict.fromkeys(
                ("mean_self_ns", "min_self_ns", "max_self_ns", "step_count"), _NO_STEP_REASON
            ),
            ("file", "line"),
        ),
        "tree": ListSchema(
            _TREE,
            "its largest paths, parents before children",
            {"parent": "null is a thread"},
            ("file", "line"),
            ranked=False,
        ),
    }
    others = {
        "busy_ns": {"type": "integer"},
        "gpu_work_ns": {"type": "integer"},
        "tree_rank": {"type": ["integer", "null"]},
        "tree_frame_count": {"type": "integer"},
    }
    unknown = {"tree_rank": "the file does not say its rank"}

    def measure(self, trace: Trace, options: ReportOptions) -> tuple[Flame, int]:
        profile = analyze.flame(trace)
        gpu_functions = profile.functions.sort("self_device_ns", descending=True).head(
            MAX_RANK_FUNCTIONS // 4
        )
        gpu_functions = gpu_functions.filter(pl.col("self_device_ns") > 0)
        functions = pl.concat([profile.functions.head(MAX_RANK_FUNCTIONS), gpu_functions]).unique(
            maintain_order=True
        )
        key = ["name", "file", "line"]
        on_main = (
            profile.frames.filter(pl.col("lane").eq_missing(find_main_lane(trace)))
            .group_by(key)
            .agg(main_self_ns=pl.col("self_ns").sum())
        )
        functions = functions.join(
            on_main, on=key, how="left", nulls_equal=True, maintain_order="left"
        )
        functions = functions.with_columns(pl.col("main_self_ns").fill_null(0))[list(_LIST)]
        # Keep the frames with the most time, each with all of its ancestors, and renumber them: an
        # ancestor has at least the time of a frame, and precedes it, so that the selection includes
        # all ancestors.
        busy, gpu = profile.frames["self_ns"].sum(), profile.frames["self_device_ns"].sum()
        weight = pl.max_horizontal(
            pl.col("total_ns") / max(busy, 1), pl.col("device_ns") / max(gpu, 1)
        )
        retained = profile.frames.filter(weight >= _MIN_FRAME_SHARE)
        if retained.height > MAX_FRAMES:
            retained = (
                retained.sort(weight, descending=True, maintain_order=True)
                .head(MAX_FRAMES)
                .sort("node")
            )
        number = pl.Series("node", range(retained.height), dtype=pl.UInt32)
        parents = retained[["parent"]].join(
            retained.select(parent="node", above=number),
            on="parent",
            how="left",
            maintain_order="left",
        )["above"]
        tree = retained.with_columns(number, parents.alias("parent")).drop("rank")
        return replace(profile, frames=tree, functions=functions), profile.frames.height

    def build(
        self, measurements: Measurements[tuple[Flame, int]], unknowns: UnknownValues
    ) -> FlameValue | None:
        index = next(
            (k for k, (flame, _) in enumerate(measurements.results) if flame.frames.height), None
        )
        if index is None:
            unknowns.explain("flame")
            return None
        selected_flame, frame_count = measurements.results[index]
        max_functions = max(MAX_ROWS // len(measurements.results), MIN_RANK_FUNCTIONS)
        return {
            "busy_ns": sum(flame.busy_ns for flame, _ in measurements.results),
            "gpu_work_ns": sum(flame.gpu_work_ns for flame, _ in measurements.results),
            "functions": unknowns.rows(
                measurements.concat(lambda of: of[0].functions.head(max_functions)),
                "flame.functions",
            ),
            "tree_rank": unknowns.value(measurements.part.traces[index].rank, "flame.tree_rank"),
            "tree_frame_count": frame_count,
            "tree": unknowns.rows(selected_flame.frames, "flame.tree"),
        }

    def tables(self, value: FlameValue) -> Iterator[Table]:
        stepped = any(row["mean_self_ns"] is not None for row in value["functions"])
        columns: Columns = [
            "?rank",
            "self_ns",
            Col("share", "Share", "share", "of the time in which anything is recorded"),
            "total_ns",
            *(["device_ns"] if value["gpu_work_ns"] else []),
            "calls",
            *(["+mean_self_ns", "+max_self_ns"] if stepped else []),
            Col("where", "Frame", "name"),
        ]
        total_ns = max(value["busy_ns"], 1)
        rows = [
            {**row, "share": row["self_ns"] / total_ns, "where": format_frame(row)}
            for row in sorted(value["functions"], key=lambda row: -row["self_ns"])
        ]
        note = "Frames, operators and calls by the time spent in themselves."
        yield build_table("flame.functions", "Frames", columns, rows, note)

    def summary(self, value: FlameValue) -> str | None:
        top = max(value["functions"], key=lambda row: int(row["main_self_ns"]), default=None)
        if top is None or not top["main_self_ns"]:
            return None
        name, time = (
            fit_name(format_frame(top), _MAX_NAME_WIDTH),
            units.format_duration(top["main_self_ns"]),
        )
        return f"the main thread{format_rank_suffix(top, value['functions'])} spends the most time of its own, {time}, in {name}"

    def picture(self, value: FlameValue) -> str:
        working = {row["lane"] for row in value["tree"] if row["kind"] in _WORK_KINDS}
        idle = working and {row["lane"] for row in value["tree"]} - working
        tree = value["tree"]
        if idle:  # the rows of threads that do work, with renumbered parents
            number: dict[int | None, int | None] = {None: None}
            tree = []
            for row in value["tree"]:
                if row["lane"] in working:
                    number[row["node"]] = len(tree)
                    tree.append({**row, "parent": number[row["parent"]]})
        gpu = bool(value["gpu_work_ns"])
        nodes = [
            (
                row["parent"],
                row["name"],
                row["calls"],
                row["total_ns"],
                row["device_ns"] if gpu else None,
            )
            for row in collapse_call_chains(tree)
        ]
        omitted = value["tree_frame_count"] - len(value["tree"])
        rank = value["tree_rank"]
        rank_suffix = (
            ""
            if rank is None or not any(row["rank"] != rank for row in value["functions"])
            else f" of rank {rank}"
        )
        note = (
            f"The call stacks{rank_suffix}: the thread on top, what it calls below. Frames that do nothing but call the next "
            f"one are drawn as one (+n). {'Threads that run nothing but other Python are not drawn. ' if idle else ''}"
            f"{units.format_count(omitted)} smaller frames are left out; -o x.speedscope.json has all."
        )
        return draw_icicle(nodes, label="Call stacks by time", note=note, slim=True)


def format_frame(row: FlameFunctionsRow) -> str:
    """Formats a frame as `file.py:12 function`; the name alone where there is no file."""
    return f"{row['file']}:{row['line']} {row['name']}" if row.get("file") else str(row["name"])


def collapse_call_chains(tree: list[FlameTreeRow]) -> list[FlameTreeRow]:
    """Returns the rows of a tree (parents before children, `parent` a row number) with chains of
    single calls merged into one row.

    The row of a chain has the most informative name: the last frame of the user's code, else the
    last module, else the last frame; `(+n)` counts the others. Times and calls are those of its
    outermost frame.
    """
    children: dict[int | None, list[int]] = {}
    for number, row in enumerate(tree):
        children.setdefault(row["parent"], []).append(number)
    out: list[FlameTreeRow] = []
    stack: list[tuple[int, int | None]] = [
        (number, None) for number in reversed(children.get(None, []))
    ]
    while stack:
        first, parent = stack.pop()
        chain = [first]
        while tree[first]["kind"] != "thread":
            # the only relevant child: it has nearly all of the row's time and of its GPU work
            row = tree[chain[-1]]
            host, device = _SAME_TIME_SHARE * row["total_ns"], _SAME_TIME_SHARE * row["device_ns"]
            following = next(
                (
                    number
                    for number in children.get(chain[-1], [])
                    if tree[number]["total_ns"] >= host and tree[number]["device_ns"] >= device
                ),
                None,
            )
            if following is None:
                break
            chain.append(following)
        rows = [tree[number] for number in chain]
        users = [
            row
            for row in rows
            if row["file"] and is_user_frame(f"{row['file']}({row['line']}): {row['name']}")
        ]
        frame = ([row for row in rows if row["kind"] == "module"] or users or rows)[-1]
        location = f" {frame['file']}:{frame['line']}" if frame["file"] else ""
        chain_note = f" (+{len(chain) - 1})" if len(chain) > 1 else ""
        name = f"{str(frame['name']).removeprefix('nn.Module: ')}{location}{chain_note}"
        position = len(out)
        out.append({**tree[first], "parent": parent, "name": name})
        stack.extend((number, position) for number in reversed(children.get(chain[-1], [])))
    return out


SECTION = FlameSection()
