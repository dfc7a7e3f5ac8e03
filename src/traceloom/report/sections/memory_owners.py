"""Whose memory it is: the curve by owner, and who holds what at the peak, by scope, module and category."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import polars as pl

from traceloom.analyze.allocations import explain
from traceloom.analyze.allocations.growth import GROWTH
from traceloom.analyze.allocations.holders import TREE
from traceloom.harmless import harmless
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.memory.chains import joined
from traceloom.report.memory.curve import steps
from traceloom.report.memory.document import REASONS, holders
from traceloom.report.memory.picture import figure
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import of_type, or_null, record, rows
from traceloom.report.table import Col, Table

MOST_CURVES = 4  # memories with a curve in the document: those with the highest peaks
_NAME = 60
_MOST_OF = 0.9
_LEAST = 0.001  # of the peak; smaller scopes count to the one around them
_HEAD = pl.Schema(
    {
        "device_type": pl.String,
        "device": pl.Int32,
        "peak_bytes": pl.Int64,
        "peak_time_ns": pl.Int64,
        "peak_step": pl.Int32,
        "end_bytes": pl.Int64,
        "unseen_bytes": pl.Int64,
    }
)
_PART = pl.Schema({"name": pl.String, "bytes": pl.Int64, "block_count": pl.Int64, "fraction": pl.Float64})
_KIND = pl.Schema(
    {"category": pl.String, "evidence": pl.String, "bytes": pl.Int64, "block_count": pl.Int64, "fraction": pl.Float64}
)
_GROWS = pl.Schema({name: kind for name, kind in GROWTH.items() if name not in ("pool", "example")})
_STEPS = pl.Schema({"step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64})


def _measure(trace: Trace, _options: ReportOptions) -> Row | None:
    """The memories of one rank and its steps, in absolute times; None without allocations."""
    if not trace.allocations.height:
        return None
    explained, absent = explain(trace), Absent(0, REASONS)
    return {"memories": holders(explained, absent), "steps": steps(explained, absent)}


def _build(study: Study[Row | None], absent: Absent) -> Row | None:
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
    memories = [_memory(at, k in drawn, absent) for k, at in enumerate(rank_memories)]
    return {"memories": memories}


def _memory(at: tuple[int | None, Row, Row], drawn: bool, absent: Absent) -> Row:
    rank, entry, memory = at
    path = "memory_owners.memories[*]"
    epoch = absent.epoch_ns
    out = {name: memory[name] for name in _HEAD}
    out["peak_time_ns"] -= epoch
    absent.value(out["peak_step"], f"{path}.peak_step")
    absent.say(f"{path}.tree[*].parent")
    steps = [{**{k: row[k] - epoch for k in ("start_ns", "end_ns")}, "step": row["step"]} for row in entry["steps"]]
    curve = None
    if drawn:
        absent.value(memory["curve"]["stacks"], f"{path}.curve.stacks")
        curve = {**memory["curve"], "time_ns": [time - epoch for time in memory["curve"]["time_ns"]]}
    return {
        "rank": absent.value(rank, f"{path}.rank"),
        **out,
        "tree": _pruned(memory["tree"]),
        "modules": memory["modules"],
        "categories": memory["categories"],
        "growth": [{name: row[name] for name in _GROWS} for row in memory["growth"]],
        "steps": steps,
        "curve": absent.value(curve, f"{path}.curve"),
    }


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


def _named(memory: Row, several: bool) -> Row:
    """What a row says of its memory."""
    return {"rank": memory["rank"], "where": _label(memory)} if several else {}


def _tables(value: Row) -> Iterator[Table]:
    memories = _worth(value["memories"])
    several = len(memories) > 1
    of = [Col("rank", "Rank", "count"), Col("where", "Memory")] if several else []
    held = [Col("bytes", "Bytes", "bytes"), Col("fraction", "Share", "share"), Col("block_count", "Blocks", "count")]
    modules = [{**_named(m, several), **row} for m in memories for row in m["modules"]]
    note = "Parameters, with their gradients and optimizer states, and what its calls allocated; at the peak."
    yield Table("memory-modules", "By module", [*of, *held, Col("name", "Module", "name")], modules, "", note)
    scopes = [{**_named(m, several), **row} for m in memories for row in joined(m["tree"])]
    note = "Scopes, then operators, at the peak; each row holds the indented ones below it."
    own = Col("self_bytes", "Its own", "bytes", "held by no row below it", narrow=False)
    name = Col("name", "Scope and operator", "name")
    yield Table("memory-scopes", "By scope", [*of, *held, own, name], scopes, "", note)
    kinds = [
        {**_named(m, several), **row, "kind": row["category"].replace("_", " ")}
        for m in memories
        for row in m["categories"]
    ]
    evidence = Col(
        "evidence", "Known by", "text", "census: the owner was asked; inferred: from where it was made and freed"
    )
    yield Table("memory-categories", "By category", [*of, Col("kind", "Category"), *held, evidence], kinds)
    grown = [{**_named(m, several), **row} for m in memories for row in m["growth"]]
    if grown:
        columns = [
            *of,
            Col("bytes_per_step", "Per step", "bytes"),
            Col("step_count", "Steps", "count"),
            Col("bytes", "So far", "bytes"),
            Col("site", "Allocated by", "name"),
        ]
        yield Table("memory-growth", "Grows", columns, grown, "", "Made in a step and never freed, step after step.")


def _worth(memories: list[Row]) -> list[Row]:
    """Without those of less than a thousandth of the largest."""
    most = max(memory["peak_bytes"] for memory in memories)
    return [memory for memory in memories if memory["peak_bytes"] * 1000 >= most]


def _summary(value: Row) -> str | None:
    top = max(value["memories"], key=lambda memory: int(memory["peak_bytes"]))
    who = _heaviest(top["tree"])
    if who is None:
        return None
    most = units.size(top["peak_bytes"])
    of = "" if top["rank"] is None or len(value["memories"]) == 1 else f" of rank {top['rank']}"
    return (
        f"of the {most} that {_label(top)}{of} holds at its peak, {units.size(who['bytes'])} "
        f"({units.share(who['bytes'], top['peak_bytes'])}) belong to {short(who['path'], _NAME)}"
    )


def _heaviest(tree: list[Row]) -> Row | None:
    """The innermost scope that holds nearly all of what the largest branch holds."""
    chosen = None
    for row in tree[1:]:  # parents stand before children, the largest child first
        if chosen is None or (row["parent"] == chosen["node"] and row["bytes"] >= _MOST_OF * chosen["bytes"]):
            chosen = row
    return chosen


def _picture(value: Row) -> str:
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
            opened = " open" if k == 0 else ""
            out.append(
                f'<details class="other-owners"{opened}><summary>{escape(harmless(label))}</summary>{picture}</details>'
            )
    return "".join(out)


def _levels(what: str) -> Row:
    number = {"type": "integer"}
    return {
        "description": what,
        "type": "array",
        "items": record({"name": {"type": "string"}, "bytes": {"type": "array", "items": number}}),
    }


SECTION = Section(
    key="memory_owners",
    title="Memory by owner",
    note="Who holds the memory: over time, and at the peak by module, scope and category.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=or_null(
        record(
            {
                "memories": {
                    "description": "one entry for each device of each rank",
                    "type": "array",
                    "items": record(
                        {
                            "rank": {"type": ["integer", "null"]},
                            **{name: of_type(kind, nullable=name == "peak_step") for name, kind in _HEAD.items()},
                            "tree": rows(TREE, nullable={"parent"}, what="who holds what at the peak; adds up to it"),
                            "modules": rows(_PART, what="the same by module"),
                            "categories": rows(_KIND, what="the same by what it is for"),
                            "growth": rows(_GROWS, what="places that leave memory alive step after step"),
                            "steps": rows(_STEPS, what="where steps begin and end"),
                            "curve": or_null(
                                record(
                                    {
                                        "time_ns": {"type": "array", "items": {"type": "integer"}},
                                        "categories": _levels("bytes at each of these instants"),
                                        "scopes": _levels("the same by scope and operator"),
                                        "stacks": or_null(
                                            _levels("the same by Python stack, the innermost frame first"),
                                            what="the same by Python stack; null without stacks",
                                        ),
                                    }
                                ),
                                what="the memory over time",
                            ),
                        }
                    ),
                }
            },
            what="who holds the memory",
        )
    ),
    reasons={
        "memory_owners": "allocations were not recorded (record with --memory, or profile_memory=True)",
        "memory_owners.memories[*].rank": "the file does not say its rank",
        "memory_owners.memories[*].peak_step": "the peak is outside all steps",
        "memory_owners.memories[*].tree[*].parent": "null is the root",
        "memory_owners.memories[*].curve": "only the memories with the highest peaks have their curve here",
        "memory_owners.memories[*].curve.stacks": "Python stacks were not recorded",
    },
)
