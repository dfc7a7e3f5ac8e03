"""Sections about memory levels and owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from traceloom.analyze.memory_answers import GROWTH, explain
from traceloom.analyze.memory_owners import TREE
from traceloom.report import figure
from traceloom.report.document import (
    Cells,
    Col,
    JsonSchema,
    ListSchema,
    ReportOptions,
    Table,
    UnknownValues,
    allow_null,
    build_object_schema,
    build_type_schema,
)
from traceloom.report.figure import render_memory_figure as figure_figure
from traceloom.report.labels import fit_name, format_memory_name, format_rank_name
from traceloom.report.memory import (
    UNKNOWN_REASONS,
    MemoryState,
    build_peak_memories,
    build_step_rows,
    collapse_chains,
)
from traceloom.report.sections.section import (
    Columns,
    CoreSection,
    Measurements,
    RankMeasurements,
    Section,
    build_table,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import build_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.memory import MemoryCurveRow, MemoryRankStepsRow
    from traceloom.report.documents.report import CurveRow, MemoryValue
    from traceloom.report.documents.sections import (
        MemoryOwnersMemoriesRow,
        MemoryOwnersMemoriesTreeRow,
        MemoryOwnersValue,
    )


class MemorySection(CoreSection):
    key, title = "memory", "Memory"
    note = "What the allocator had given out."
    path = "memory.devices"

    def build(
        self, measurements: Measurements[RankMeasurements], unknowns: UnknownValues
    ) -> MemoryValue:
        """Returns peaks by device, and the curve of each as columns."""
        curves: list[CurveRow] = []
        for rank in measurements.results:
            for device_curve in rank.memory.curve.partition_by("device_type", "device"):
                if device_curve["reserved_bytes"].null_count():
                    unknowns.explain("memory.curve[*].reserved_bytes[*]")
                curves.append(
                    {
                        "rank": unknowns.value(rank.trace.rank, "memory.curve[*].rank"),
                        "device_type": device_curve["device_type"][0],
                        "device": device_curve["device"][0],
                        "time_ns": (device_curve["time_ns"] - unknowns.epoch_ns).to_list(),
                        "allocated_bytes": device_curve["allocated_bytes"].to_list(),
                        "reserved_bytes": device_curve["reserved_bytes"].to_list(),
                    }
                )
        # A device of a process that has several windows is one device, told at its highest peak.
        process_of = dict(
            zip(map(id, measurements.results), measurements.part.process_numbers, strict=True)
        )
        devices = measurements.concat(
            lambda rank: rank.memory.devices.with_columns(process=pl.lit(process_of[id(rank)]))
        )
        highest = (
            pl.col("peak_bytes")
            .rank("ordinal", descending=True)
            .over("process", "device_type", "device")
        )
        devices = devices.filter(highest == 1).drop("process")
        return {"devices": unknowns.convert_list(devices, "memory.devices"), "curve": curves}

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Yields the peaks of every device of every rank."""
        memory, ranks = document.get("memory") or {}, document["ranks"]
        devices = memory.get("devices") or []
        if not devices:
            return
        names = {rank["rank"]: format_rank_name(rank, k) for k, rank in enumerate(ranks)}
        curves = {
            (c["rank"], c["device_type"], c["device"]): c["allocated_bytes"]
            for c in memory["curve"]
        }
        rows = [
            {
                **row,
                "rank": names.get(row["rank"], "–"),
                "where": format_memory_name(row),
                "over_time": [
                    value or 0
                    for value in curves.get((row["rank"], row["device_type"], row["device"]), [])
                ],
            }
            for row in devices
        ]
        is_running_sum = any(row.get("evidence") == "running-sum" for row in devices)
        columns = [
            *((Col("rank", "Rank"),) if len(ranks) > 1 else ()),
            Col("where", "Device"),
            Col("peak_bytes", "Peak", "bytes", "most allocated at once"),
            Col("peak_time_ns", "At", "time", "after the start of the recording", narrow=False),
            Col("start_bytes", "At start", "bytes", narrow=False),
            Col("end_bytes", "At end", "bytes"),
            Col("allocation_count", "Allocations", "count"),
            Col("free_count", "Frees", "count", narrow=False),
            Col("over_time", "Over time", "spark"),
        ]
        note = "of the CPU: more than at the start of the recording" if is_running_sum else ""
        yield Table("memory-table", "Memory", columns, rows, "memory.devices", note)

    def picture(self, document: ReportDocument) -> str:
        """Draws the curves; the script shows those of the chosen rank."""
        ranks = [rank["rank"] for rank in document["ranks"]]
        curves = []
        for curve in (document.get("memory") or {}).get("curve") or []:
            if curve["time_ns"]:
                position = ranks.index(curve["rank"]) if curve["rank"] in ranks else 0
                rank_attribute = "" if len(ranks) == 1 else f' data-of-rank="{position}"'
                curves.append(f"<div{rank_attribute}>{figure.draw_curve(curve)}</div>")
        return "".join(curves)


MEMORY_SECTION = MemorySection()

MAX_CURVES = 4  # memories with a curve in the document: those with the highest peaks
_MAX_NAME_WIDTH = 60
_MAIN_OWNER_SHARE = 0.9
_MIN_SCOPE_SHARE = 0.001  # of the peak; smaller scopes are merged into the enclosing one
_MEMORY_COLUMNS = build_schema(
    "device_type device peak_bytes peak_time_ns peak_step end_bytes unseen_bytes"
)
_MODULE_COLUMNS = build_schema("name bytes block_count fraction")
_CATEGORY_COLUMNS = build_schema("category evidence bytes block_count fraction")
_GROWTH_COLUMNS = pl.Schema(
    {name: kind for name, kind in GROWTH.items() if name not in ("pool", "example", "frame")}
)
_STEP_COLUMNS = build_schema("step start_ns end_ns")
_MEMORY_PATH = "memory_owners.memories[*]"
_INTEGER_ARRAY_SCHEMA = {"type": "array", "items": {"type": "integer"}}


def _build_curve_lines_schema(description: str) -> JsonSchema:
    items = build_object_schema({"name": {"type": "string"}, "bytes": _INTEGER_ARRAY_SCHEMA})
    return {"description": description, "type": "array", "items": items}


_LIST_SCHEMAS = {
    "tree": ListSchema(
        TREE, "who holds what at the peak; adds up to it", nullable=("parent",), ranked=False
    ),
    "modules": ListSchema(_MODULE_COLUMNS, "the same by module", ranked=False),
    "categories": ListSchema(_CATEGORY_COLUMNS, "the same by what it is for", ranked=False),
    "growth": ListSchema(
        _GROWTH_COLUMNS, "places that leave memory alive step after step", ranked=False
    ),
    "steps": ListSchema(_STEP_COLUMNS, "where steps begin and end", ranked=False),
}
_CURVE_SCHEMA = build_object_schema(
    {
        "time_ns": _INTEGER_ARRAY_SCHEMA,
        "categories": _build_curve_lines_schema("bytes at each of these instants"),
        "scopes": _build_curve_lines_schema("the same by scope and operator"),
        "stacks": allow_null(
            _build_curve_lines_schema("the same by Python stack, the innermost frame first"),
            description="the same by Python stack; null without stacks",
        ),
    }
)
_MEMORY_SCHEMA = build_object_schema(
    {
        "rank": {"type": ["integer", "null"]},
        **{
            name: build_type_schema(kind, nullable=name == "peak_step")
            for name, kind in _MEMORY_COLUMNS.items()
        },
        **{name: part.schema() for name, part in _LIST_SCHEMAS.items()},
        "curve": allow_null(_CURVE_SCHEMA, description="the memory over time"),
    }
)


class RankMemories(NamedTuple):
    """The memories of one rank and its steps, in absolute times."""

    memories: list[MemoryState]
    steps: list[MemoryRankStepsRow]


class MemoryOwnersSection(Section[RankMemories | None, "MemoryOwnersValue"]):
    key, title = "memory_owners", "Memory by owner"
    note = "Who holds the memory: over time, and at the peak by module, scope and category."
    what = "who holds the memory"
    missing = "allocations were not recorded (record with --memory, or profile_memory=True)"
    others = {
        "memories": {
            "description": "one entry for each device of each rank",
            "type": "array",
            "items": _MEMORY_SCHEMA,
        }
    }
    unknown = {
        "memories[*].rank": "the file does not say its rank",
        "memories[*].peak_step": "the peak is outside all steps",
        "memories[*].tree[*].parent": "null is the root",
        "memories[*].curve": "only the memories with the highest peaks have their curve here",
        "memories[*].curve.stacks": "Python stacks were not recorded",
    }

    def measure(self, trace: Trace, options: ReportOptions) -> RankMemories | None:
        """Returns the memories and the steps of one rank; None without allocations."""
        if not trace.allocations.height:
            return None
        explanation, unknowns = explain(trace), UnknownValues(0, UNKNOWN_REASONS)
        return RankMemories(
            build_peak_memories(explanation, unknowns), build_step_rows(explanation, unknowns)
        )

    def build(
        self, measurements: Measurements[RankMemories | None], unknowns: UnknownValues
    ) -> MemoryOwnersValue | None:
        rank_memories = [
            (trace.rank, rank_result.steps, memory)
            for trace, rank_result in zip(
                measurements.part.traces, measurements.results, strict=True
            )
            if rank_result is not None
            for memory in rank_result.memories
        ]
        if not rank_memories:
            unknowns.explain("memory_owners")
            return None
        by_peak = sorted(
            range(len(rank_memories)), key=lambda k: -rank_memories[k][2].totals["peak_bytes"]
        )
        with_curve = set(by_peak[:MAX_CURVES])
        origin_ns = unknowns.epoch_ns
        memories: list[MemoryOwnersMemoriesRow] = []
        for index, (rank, rank_steps, memory) in enumerate(rank_memories):
            curve: MemoryCurveRow | None = None
            if index in with_curve:
                unknowns.value(memory.curve["stacks"], f"{_MEMORY_PATH}.curve.stacks")
                curve = {
                    **memory.curve,
                    "time_ns": [time - origin_ns for time in memory.curve["time_ns"]],
                }
            totals = memory.totals
            memories.append(
                {
                    "rank": unknowns.value(rank, f"{_MEMORY_PATH}.rank"),
                    "device_type": totals["device_type"],
                    "device": totals["device"],
                    "peak_bytes": totals["peak_bytes"],
                    "peak_time_ns": totals["peak_time_ns"] - origin_ns,
                    "peak_step": unknowns.value(totals["peak_step"], f"{_MEMORY_PATH}.peak_step"),
                    "end_bytes": totals["end_bytes"],
                    "unseen_bytes": totals["unseen_bytes"],
                    "tree": _prune_tree(unknowns.rows(memory.tree, f"{_MEMORY_PATH}.tree")),
                    "modules": unknowns.rows(memory.modules, f"{_MEMORY_PATH}.modules"),
                    "categories": unknowns.rows(memory.categories, f"{_MEMORY_PATH}.categories"),
                    "growth": unknowns.rows(
                        memory.growth.select(*_GROWTH_COLUMNS), f"{_MEMORY_PATH}.growth"
                    ),
                    "steps": [
                        {
                            "start_ns": row["start_ns"] - origin_ns,
                            "end_ns": row["end_ns"] - origin_ns,
                            "step": row["step"],
                        }
                        for row in rank_steps
                    ],
                    "curve": unknowns.value(curve, f"{_MEMORY_PATH}.curve"),
                }
            )
        return {"memories": memories}

    def tables(self, value: MemoryOwnersValue) -> Iterator[Table]:
        memories = _drop_small_memories(value["memories"])
        has_several = len(memories) > 1
        label_columns = (
            [Col("rank", "Rank", "count"), Col("where", "Memory")] if has_several else []
        )
        value_columns = ["bytes", "fraction", "block_count"]
        path = "memory_owners.memories"

        def rows(
            part: Callable[[MemoryOwnersMemoriesRow], Sequence[Cells]],
        ) -> list[dict[str, object]]:
            return [
                {"rank": memory["rank"], "where": _format_device(memory), **row}
                if has_several
                else {**row}
                for memory in memories
                for row in part(memory)
            ]

        note = "Parameters, with their gradients and optimizer states, and what its calls allocated; at the peak."
        yield build_table(
            f"{path}.modules",
            "By module",
            [*label_columns, *value_columns, "name"],
            rows(lambda memory: memory["modules"]),
            note,
            key="memory-modules",
        )
        note = "Scopes, then operators, at the peak; each row holds the indented ones below it."
        columns: Columns = [*label_columns, *value_columns, "+self_bytes", "name"]
        scopes = rows(lambda memory: collapse_chains(memory["tree"]))
        yield build_table(f"{path}.tree", "By scope", columns, scopes, note, key="memory-scopes")
        kinds = rows(
            lambda memory: [
                {**row, "kind": row["category"].replace("_", " ")} for row in memory["categories"]
            ]
        )
        columns = [*label_columns, Col("kind", "Category"), *value_columns, "evidence"]
        yield build_table(
            f"{path}.categories", "By category", columns, kinds, key="memory-categories"
        )
        if growth := rows(lambda memory: memory["growth"]):
            note = "Made in a step and never freed, step after step."
            columns = [*label_columns, "bytes_per_step", "step_count", "bytes", "site"]
            yield build_table(f"{path}.growth", "Grows", columns, growth, note, key="memory-growth")

    def summary(self, value: MemoryOwnersValue) -> str | None:
        largest = max(value["memories"], key=lambda memory: memory["peak_bytes"])
        # the innermost scope that holds nearly all memory of the largest branch
        owner: MemoryOwnersMemoriesTreeRow | None = None
        for row in largest["tree"][1:]:  # parents precede children, the largest child first
            if owner is None or (
                row["parent"] == owner["node"]
                and row["bytes"] >= _MAIN_OWNER_SHARE * owner["bytes"]
            ):
                owner = row
        if owner is None:
            return None
        peak_size = units.format_size(largest["peak_bytes"])
        rank_suffix = (
            ""
            if largest["rank"] is None or len(value["memories"]) == 1
            else f" of rank {largest['rank']}"
        )
        return (
            f"of the {peak_size} that {_format_device(largest)}{rank_suffix} holds at its peak, {units.format_size(owner['bytes'])} "
            f"({units.format_share(owner['bytes'], largest['peak_bytes'])}) belong to {fit_name(owner['path'], _MAX_NAME_WIDTH)}"
        )

    def picture(self, value: MemoryOwnersValue) -> str:
        curves = [
            (memory, curve)
            for memory in _drop_small_memories(value["memories"])
            if (curve := memory["curve"])
        ]
        curves.sort(key=lambda pair: -pair[0]["peak_bytes"])
        out = []
        for k, (memory, curve) in enumerate(curves):
            rank_prefix = "" if memory["rank"] is None else f"rank {memory['rank']}, "
            label = f"{rank_prefix}{_format_device(memory)}: {units.format_size(memory['peak_bytes'])} at its peak"
            picture = figure_figure(curve, memory["steps"], label=label)
            if len(curves) == 1:
                out.append(picture)
            else:
                head = f'<details class="other-owners"{" open" if k == 0 else ""}>'
                out.append(f"{head}<summary>{escape(sanitize(label))}</summary>{picture}</details>")
        return "".join(out)


def _prune_tree(tree: list[MemoryOwnersMemoriesTreeRow]) -> list[MemoryOwnersMemoriesTreeRow]:
    """Removes the smallest branches of the tree; the enclosing scope keeps their bytes, so that it
    still adds up.
    """
    min_bytes = _MIN_SCOPE_SHARE * tree[0]["bytes"]
    new_nodes: dict[int | None, int | None] = {None: None}
    retained: list[MemoryOwnersMemoriesTreeRow] = []
    for row in tree:
        if row["parent"] in new_nodes and (row["parent"] is None or row["bytes"] >= min_bytes):
            new_nodes[row["node"]] = len(retained)
            retained.append(
                {
                    **row,
                    "node": len(retained),
                    "parent": new_nodes[row["parent"]],
                    "self_bytes": row["bytes"],
                }
            )
    for row in retained:
        if row["parent"] is not None:
            retained[row["parent"]]["self_bytes"] -= row["bytes"]
    return retained


def _format_device(memory: MemoryOwnersMemoriesRow) -> str:
    kind = str(memory["device_type"])
    return kind if memory["device"] < 0 else f"{kind}:{memory['device']}"


def _drop_small_memories(memories: list[MemoryOwnersMemoriesRow]) -> list[MemoryOwnersMemoriesRow]:
    """Removes memories of less than a thousandth of the largest."""
    largest_bytes = max(memory["peak_bytes"] for memory in memories)
    return [memory for memory in memories if memory["peak_bytes"] * 1000 >= largest_bytes]


MEMORY_OWNERS_SECTION = MemoryOwnersSection()
