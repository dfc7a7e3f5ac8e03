"""Memory levels and owners."""

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
    Part,
    ReportOptions,
    Shape,
    Table,
    UnknownValues,
    of_type,
    or_null,
    record,
)
from traceloom.report.figure import figure as figure_figure
from traceloom.report.labels import allocator, rank_name, short
from traceloom.report.memory import REASONS, HeldMemory, collapse_chains, holders, steps
from traceloom.report.sections.section import Columns, CoreSection, Measurements, RankMeasurements, Section, table
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import schema
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
    """What the allocator had given out."""

    key, title = "memory", "Memory"
    note = "What the allocator had given out."
    path = "memory.devices"

    def build(self, study: Measurements[RankMeasurements], absent: UnknownValues) -> MemoryValue:
        """Peaks by device, and the curve of each as columns."""
        curves: list[CurveRow] = []
        for rank in study.results:
            for values in rank.memory.curve.partition_by("device_type", "device"):
                if values["reserved_bytes"].null_count():
                    absent.say("memory.curve[*].reserved_bytes[*]")
                curves.append(
                    {
                        "rank": absent.value(rank.trace.rank, "memory.curve[*].rank"),
                        "device_type": values["device_type"][0],
                        "device": values["device"][0],
                        "time_ns": (values["time_ns"] - absent.epoch_ns).to_list(),
                        "allocated_bytes": values["allocated_bytes"].to_list(),
                        "reserved_bytes": values["reserved_bytes"].to_list(),
                    }
                )
        return {
            "devices": absent.listed(study.concat(lambda rank: rank.memory.devices), "memory.devices"),
            "curve": curves,
        }

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Peaks of every device of every rank."""
        part, ranks = document.get("memory") or {}, document["ranks"]
        devices = part.get("devices") or []
        if not devices:
            return
        names = {rank["rank"]: rank_name(rank, k) for k, rank in enumerate(ranks)}
        curves = {(c["rank"], c["device_type"], c["device"]): c["allocated_bytes"] for c in part["curve"]}
        rows = [
            {
                **row,
                "rank": names.get(row["rank"], "–"),
                "where": allocator(row),
                "over_time": [value or 0 for value in curves.get((row["rank"], row["device_type"], row["device"]), [])],
            }
            for row in devices
        ]
        counted = any(row.get("evidence") == "running-sum" for row in devices)
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
        note = "of the CPU: more than at the start of the recording" if counted else ""
        yield Table("memory-table", "Memory", columns, rows, "memory.devices", note)

    def picture(self, document: ReportDocument) -> str:
        """The curves; the script shows those of the chosen rank."""
        ranks = [rank["rank"] for rank in document["ranks"]]
        curves = []
        for of_device in (document.get("memory") or {}).get("curve") or []:
            if of_device["time_ns"]:
                position = ranks.index(of_device["rank"]) if of_device["rank"] in ranks else 0
                only = "" if len(ranks) == 1 else f' data-of-rank="{position}"'
                curves.append(f"<div{only}>{figure.draw_curve(of_device)}</div>")
        return "".join(curves)


MEMORY_SECTION = MemorySection()

MOST_CURVES = 4  # memories with a curve in the document: those with the highest peaks
_NAME = 60
_MOST_OF = 0.9
_LEAST = 0.001  # of the peak; smaller scopes count to the one around them
_HEAD = schema("device_type device peak_bytes peak_time_ns peak_step end_bytes unseen_bytes")
_PART = schema("name bytes block_count fraction")
_KIND = schema("category evidence bytes block_count fraction")
_GROWS = pl.Schema({name: kind for name, kind in GROWTH.items() if name not in ("pool", "example")})
_STEPS = schema("step start_ns end_ns")
_PATH = "memory_owners.memories[*]"
_INTEGERS = {"type": "array", "items": {"type": "integer"}}


def _levels(what: str) -> Shape:
    items = record({"name": {"type": "string"}, "bytes": _INTEGERS})
    return {"description": what, "type": "array", "items": items}


_LISTS = {
    "tree": Part(TREE, "who holds what at the peak; adds up to it", nullable=("parent",), ranked=False),
    "modules": Part(_PART, "the same by module", ranked=False),
    "categories": Part(_KIND, "the same by what it is for", ranked=False),
    "growth": Part(_GROWS, "places that leave memory alive step after step", ranked=False),
    "steps": Part(_STEPS, "where steps begin and end", ranked=False),
}
_CURVE = record(
    {
        "time_ns": _INTEGERS,
        "categories": _levels("bytes at each of these instants"),
        "scopes": _levels("the same by scope and operator"),
        "stacks": or_null(
            _levels("the same by Python stack, the innermost frame first"),
            what="the same by Python stack; null without stacks",
        ),
    }
)
_MEMORY = record(
    {
        "rank": {"type": ["integer", "null"]},
        **{name: of_type(kind, nullable=name == "peak_step") for name, kind in _HEAD.items()},
        **{name: part.schema() for name, part in _LISTS.items()},
        "curve": or_null(_CURVE, what="the memory over time"),
    }
)


class MemoriesOfRank(NamedTuple):
    """The memories of one rank and its steps, in absolute times."""

    memories: list[HeldMemory]
    steps: list[MemoryRankStepsRow]


class MemoryOwnersSection(Section[MemoriesOfRank | None, "MemoryOwnersValue"]):
    """Who holds the memory."""

    key, title = "memory_owners", "Memory by owner"
    note = "Who holds the memory: over time, and at the peak by module, scope and category."
    what = "who holds the memory"
    missing = "allocations were not recorded (record with --memory, or profile_memory=True)"
    others = {"memories": {"description": "one entry for each device of each rank", "type": "array", "items": _MEMORY}}
    unknown = {
        "memories[*].rank": "the file does not say its rank",
        "memories[*].peak_step": "the peak is outside all steps",
        "memories[*].tree[*].parent": "null is the root",
        "memories[*].curve": "only the memories with the highest peaks have their curve here",
        "memories[*].curve.stacks": "Python stacks were not recorded",
    }

    def measure(self, trace: Trace, options: ReportOptions) -> MemoriesOfRank | None:
        """The memories and the steps of one rank; None without allocations."""
        if not trace.allocations.height:
            return None
        explained, absent = explain(trace), UnknownValues(0, REASONS)
        return MemoriesOfRank(holders(explained, absent), steps(explained, absent))

    def build(self, study: Measurements[MemoriesOfRank | None], absent: UnknownValues) -> MemoryOwnersValue | None:
        rank_memories = [
            (trace.rank, of_rank.steps, memory)
            for trace, of_rank in zip(study.part.traces, study.results, strict=True)
            if of_rank is not None
            for memory in of_rank.memories
        ]
        if not rank_memories:
            absent.say("memory_owners")
            return None
        highest = sorted(range(len(rank_memories)), key=lambda k: -rank_memories[k][2].totals["peak_bytes"])
        drawn = set(highest[:MOST_CURVES])
        epoch = absent.epoch_ns
        memories: list[MemoryOwnersMemoriesRow] = []
        for number, (rank, rank_steps, memory) in enumerate(rank_memories):
            curve: MemoryCurveRow | None = None
            if number in drawn:
                absent.value(memory.curve["stacks"], f"{_PATH}.curve.stacks")
                curve = {**memory.curve, "time_ns": [time - epoch for time in memory.curve["time_ns"]]}
            totals = memory.totals
            memories.append(
                {
                    "rank": absent.value(rank, f"{_PATH}.rank"),
                    "device_type": totals["device_type"],
                    "device": totals["device"],
                    "peak_bytes": totals["peak_bytes"],
                    "peak_time_ns": totals["peak_time_ns"] - epoch,
                    "peak_step": absent.value(totals["peak_step"], f"{_PATH}.peak_step"),
                    "end_bytes": totals["end_bytes"],
                    "unseen_bytes": totals["unseen_bytes"],
                    "tree": _pruned(absent.rows(memory.tree, f"{_PATH}.tree")),
                    "modules": absent.rows(memory.modules, f"{_PATH}.modules"),
                    "categories": absent.rows(memory.categories, f"{_PATH}.categories"),
                    "growth": absent.rows(memory.growth.select(*_GROWS), f"{_PATH}.growth"),
                    "steps": [
                        {"start_ns": row["start_ns"] - epoch, "end_ns": row["end_ns"] - epoch, "step": row["step"]}
                        for row in rank_steps
                    ],
                    "curve": absent.value(curve, f"{_PATH}.curve"),
                }
            )
        return {"memories": memories}

    def tables(self, value: MemoryOwnersValue) -> Iterator[Table]:
        memories = _worth(value["memories"])
        several = len(memories) > 1
        of = [Col("rank", "Rank", "count"), Col("where", "Memory")] if several else []
        held = ["bytes", "fraction", "block_count"]
        at = "memory_owners.memories"

        def rows(part: Callable[[MemoryOwnersMemoriesRow], Sequence[Cells]]) -> list[dict[str, object]]:
            return [
                {"rank": memory["rank"], "where": _label(memory), **row} if several else {**row}
                for memory in memories
                for row in part(memory)
            ]

        note = "Parameters, with their gradients and optimizer states, and what its calls allocated; at the peak."
        modules = rows(lambda memory: memory["modules"])
        yield table(f"{at}.modules", "By module", [*of, *held, "name"], modules, note, key="memory-modules")
        note = "Scopes, then operators, at the peak; each row holds the indented ones below it."
        columns: Columns = [*of, *held, "+self_bytes", "name"]
        scopes = rows(lambda memory: collapse_chains(memory["tree"]))
        yield table(f"{at}.tree", "By scope", columns, scopes, note, key="memory-scopes")
        kinds = rows(
            lambda memory: [{**row, "kind": row["category"].replace("_", " ")} for row in memory["categories"]]
        )
        columns = [*of, Col("kind", "Category"), *held, "evidence"]
        yield table(f"{at}.categories", "By category", columns, kinds, key="memory-categories")
        if growth := rows(lambda memory: memory["growth"]):
            note = "Made in a step and never freed, step after step."
            columns = [*of, "bytes_per_step", "step_count", "bytes", "site"]
            yield table(f"{at}.growth", "Grows", columns, growth, note, key="memory-growth")

    def summary(self, value: MemoryOwnersValue) -> str | None:
        top = max(value["memories"], key=lambda memory: memory["peak_bytes"])
        # the innermost scope that holds nearly all of what the largest branch holds
        who: MemoryOwnersMemoriesTreeRow | None = None
        for row in top["tree"][1:]:  # parents stand before children, the largest child first
            if who is None or (row["parent"] == who["node"] and row["bytes"] >= _MOST_OF * who["bytes"]):
                who = row
        if who is None:
            return None
        most = units.size(top["peak_bytes"])
        of = "" if top["rank"] is None or len(value["memories"]) == 1 else f" of rank {top['rank']}"
        return (
            f"of the {most} that {_label(top)}{of} holds at its peak, {units.size(who['bytes'])} "
            f"({units.share(who['bytes'], top['peak_bytes'])}) belong to {short(who['path'], _NAME)}"
        )

    def picture(self, value: MemoryOwnersValue) -> str:
        drawn = [(memory, curve) for memory in _worth(value["memories"]) if (curve := memory["curve"])]
        drawn.sort(key=lambda pair: -pair[0]["peak_bytes"])
        out = []
        for k, (memory, curve) in enumerate(drawn):
            of = "" if memory["rank"] is None else f"rank {memory['rank']}, "
            label = f"{of}{_label(memory)}: {units.size(memory['peak_bytes'])} at its peak"
            picture = figure_figure(curve, memory["steps"], label=label)
            if len(drawn) == 1:
                out.append(picture)
            else:
                head = f'<details class="other-owners"{" open" if k == 0 else ""}>'
                out.append(f"{head}<summary>{escape(sanitize(label))}</summary>{picture}</details>")
        return "".join(out)


def _pruned(tree: list[MemoryOwnersMemoriesTreeRow]) -> list[MemoryOwnersMemoriesTreeRow]:
    """The tree without its smallest branches, whose bytes then belong to the scope around them: it still adds up."""
    least = _LEAST * tree[0]["bytes"]
    number: dict[int | None, int | None] = {None: None}
    kept: list[MemoryOwnersMemoriesTreeRow] = []
    for row in tree:
        if row["parent"] in number and (row["parent"] is None or row["bytes"] >= least):
            number[row["node"]] = len(kept)
            kept.append({**row, "node": len(kept), "parent": number[row["parent"]], "self_bytes": row["bytes"]})
    for row in kept:
        if row["parent"] is not None:
            kept[row["parent"]]["self_bytes"] -= row["bytes"]
    return kept


def _label(memory: MemoryOwnersMemoriesRow) -> str:
    kind = str(memory["device_type"])
    return kind if memory["device"] < 0 else f"{kind}:{memory['device']}"


def _worth(memories: list[MemoryOwnersMemoriesRow]) -> list[MemoryOwnersMemoriesRow]:
    """Without those of less than a thousandth of the largest."""
    most = max(memory["peak_bytes"] for memory in memories)
    return [memory for memory in memories if memory["peak_bytes"] * 1000 >= most]


SECTION = MemoryOwnersSection()
