"""Whose memory it is: the curve by owner, and who holds what at the peak, by scope, module and category."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom.analyze.allocations import explain
from traceloom.analyze.allocations.growth import GROWTH
from traceloom.analyze.allocations.holders import TREE
from traceloom.harmless import harmless
from traceloom.model import Trace, units
from traceloom.model.frames import schema
from traceloom.report.absent import Absent
from traceloom.report.memory.chains import joined
from traceloom.report.memory.curve import steps
from traceloom.report.memory.document import REASONS, holders
from traceloom.report.memory.picture import figure
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Columns, Section, Study, table
from traceloom.report.sections.shapes import Part, of_type, or_null, record
from traceloom.report.table import Col, Row, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import MemoryOwnersValue

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


def _levels(what: str) -> Row:
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


class MemoryOwnersSection(Section[Row | None, "MemoryOwnersValue"]):
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

    def measure(self, trace: Trace, options: ReportOptions) -> Row | None:
        """The memories of one rank and its steps, in absolute times; None without allocations."""
        if not trace.allocations.height:
            return None
        explained, absent = explain(trace), Absent(0, REASONS)
        return {"memories": holders(explained, absent), "steps": steps(explained, absent)}

    def build(self, study: Study[Row | None], absent: Absent) -> MemoryOwnersValue | None:
        rank_memories = [
            (trace.rank, entry, memory)
            for trace, entry in zip(study.part.traces, study.results, strict=True)
            if entry is not None
            for memory in entry["memories"]
        ]
        if not rank_memories:
            absent.say("memory_owners")
            return None
        highest = sorted(range(len(rank_memories)), key=lambda k: -rank_memories[k][2]["peak_bytes"])
        drawn = set(highest[:MOST_CURVES])
        epoch = absent.epoch_ns
        memories = []
        for number, (rank, entry, memory) in enumerate(rank_memories):
            absent.value(memory["peak_step"], f"{_PATH}.peak_step")
            absent.say(f"{_PATH}.tree[*].parent")
            curve = None
            if number in drawn:
                absent.value(memory["curve"]["stacks"], f"{_PATH}.curve.stacks")
                curve = {**memory["curve"], "time_ns": [time - epoch for time in memory["curve"]["time_ns"]]}
            memories.append(
                {
                    "rank": absent.value(rank, f"{_PATH}.rank"),
                    **{name: memory[name] for name in _HEAD},
                    "peak_time_ns": memory["peak_time_ns"] - epoch,
                    "tree": _pruned(memory["tree"]),
                    "modules": memory["modules"],
                    "categories": memory["categories"],
                    "growth": [{name: row[name] for name in _GROWS} for row in memory["growth"]],
                    "steps": [
                        {**{k: row[k] - epoch for k in ("start_ns", "end_ns")}, "step": row["step"]}
                        for row in entry["steps"]
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
        rows: dict[str, list[Row]] = {"tree": [], "modules": [], "categories": [], "growth": []}
        for memory in memories:
            named = {"rank": memory["rank"], "where": _label(memory)} if several else {}
            for part, collected in rows.items():
                own = joined(memory["tree"]) if part == "tree" else memory[part]
                collected += [{**named, **row} for row in own]
        at = "memory_owners.memories"
        note = "Parameters, with their gradients and optimizer states, and what its calls allocated; at the peak."
        yield table(f"{at}.modules", "By module", [*of, *held, "name"], rows["modules"], note, key="memory-modules")
        note = "Scopes, then operators, at the peak; each row holds the indented ones below it."
        columns: Columns = [*of, *held, "+self_bytes", "name"]
        yield table(f"{at}.tree", "By scope", columns, rows["tree"], note, key="memory-scopes")
        kinds = [{**row, "kind": row["category"].replace("_", " ")} for row in rows["categories"]]
        columns = [*of, Col("kind", "Category"), *held, "evidence"]
        yield table(f"{at}.categories", "By category", columns, kinds, key="memory-categories")
        if rows["growth"]:
            note = "Made in a step and never freed, step after step."
            columns = [*of, "bytes_per_step", "step_count", "bytes", "site"]
            yield table(f"{at}.growth", "Grows", columns, rows["growth"], note, key="memory-growth")

    def summary(self, value: MemoryOwnersValue) -> str | None:
        top = max(value["memories"], key=lambda memory: int(memory["peak_bytes"]))
        # the innermost scope that holds nearly all of what the largest branch holds
        who: Row | None = None
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
        drawn = [memory for memory in _worth(value["memories"]) if memory["curve"]]
        drawn.sort(key=lambda memory: -memory["peak_bytes"])
        out = []
        for k, memory in enumerate(drawn):
            of = "" if memory["rank"] is None else f"rank {memory['rank']}, "
            label = f"{of}{_label(memory)}: {units.size(memory['peak_bytes'])} at its peak"
            instant = {**memory, "instant": {"time_ns": memory["peak_time_ns"]}}
            picture = figure(instant, memory["steps"], label=label)
            if len(drawn) == 1:
                out.append(picture)
            else:
                head = f'<details class="other-owners"{" open" if k == 0 else ""}>'
                out.append(f"{head}<summary>{escape(harmless(label))}</summary>{picture}</details>")
        return "".join(out)


def _pruned(tree: list[Row]) -> list[Row]:
    """The tree without its smallest branches, whose bytes then belong to the scope around them: it still adds up."""
    least = _LEAST * tree[0]["bytes"]
    number: dict[int | None, int | None] = {None: None}
    kept: list[Row] = []
    for row in tree:
        if row["parent"] in number and (row["parent"] is None or row["bytes"] >= least):
            number[row["node"]] = len(kept)
            kept.append({**row, "node": len(kept), "parent": number[row["parent"]], "self_bytes": row["bytes"]})
    for row in kept[1:]:
        kept[row["parent"]]["self_bytes"] -= row["bytes"]
    return kept


def _label(memory: Row) -> str:
    kind = str(memory["device_type"])
    return kind if memory["device"] < 0 else f"{kind}:{memory['device']}"


def _worth(memories: list[Row]) -> list[Row]:
    """Without those of less than a thousandth of the largest."""
    most = max(memory["peak_bytes"] for memory in memories)
    return [memory for memory in memories if memory["peak_bytes"] * 1000 >= most]


SECTION = MemoryOwnersSection()
