"""The document's part about memory that ran out: where, what was alive, and what to try first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import polars as pl

from traceloom.analyze.allocations import Explained, answers
from traceloom.analyze.allocations import ran_out as why
from traceloom.analyze.allocations.context import innermost
from traceloom.analyze.allocations.growth import growth
from traceloom.analyze.ancestry import forest
from traceloom.files import with_addresses
from traceloom.model.frames import rows
from traceloom.model.snapshot import frame_text
from traceloom.read.memory_files import whole
from traceloom.report.memory.sources import Sources

if TYPE_CHECKING:
    from traceloom.report.documents.memory import (
        MemoryAdviceRow,
        MemoryDeviceRow,
        MemoryEndKindsRow,
        MemoryEndRow,
        MemoryNodeRow,
        MemoryRankRow,
    )

MARK = "[OutOfMemory]"
MOST_FRAMES = 60
_DEVICE = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "retries")
_OF_CATEGORY = {
    "parameter": why.KINDS["parameter"], "buffer": why.KINDS["buffer"], "gradient": why.KINDS["gradient"],
    "optimizer_state": why.KINDS["optimizer_state"], "activation": why.KINDS["activation"],
}  # fmt: skip


class EndHolders(TypedDict):
    """The part of an entry that says who held what, the same as a tree, and what to try."""

    bytes: int
    kinds: list[MemoryEndKindsRow]
    tree: list[MemoryNodeRow]
    advice: list[MemoryAdviceRow]


def of_reports(sources: Sources, ranks: list[MemoryRankRow], epoch_ns: int) -> list[MemoryEndRow]:
    """One entry for each report that a run left.

    Args:
        sources: What was given.
        ranks: Entries of the document: they know what grows.
        epoch_ns: What times are relative to.
    """
    out: list[MemoryEndRow] = []
    for report in sources.reports:
        document = report.document
        listed = document.get("stack")
        stack = [str(frame)[:2000] for frame in listed[-MOST_FRAMES:]] if isinstance(listed, list) else []
        live = why.census_of(document)
        asked_bytes, time = whole(document.get("asked_bytes")), whole(document.get("time_ns"))
        devices = _devices(document.get("devices"))
        world = sources.session.world_size if sources.session is not None else None
        growing = [
            (row["site"], row["bytes_per_step"], row["bytes"])
            for entry in ranks
            if entry["rank"] == report.rank
            for memory in entry["memories"]
            for row in memory["growth"]
        ]
        held = why.kinds(live)
        suggestions = why.advice(
            held, live, asked=asked_bytes, stack=stack, devices=devices, ranks=world, growing=growing
        )
        out.append(
            {
                "rank": report.rank,
                "path": report.path,
                "evidence": "census",
                "time_ns": None if time is None else time - epoch_ns,
                "step": whole(document.get("step")),
                "asked_bytes": asked_bytes,
                "message": str(document.get("message", ""))[:4000],
                "where": why.where_in_program(stack),
                "stack": stack,
                "devices": devices,
                **_holders(held, why.tree(live), suggestions),
            }
        )
    return out


def of_blocks(explained: Explained, sources: Sources, epoch_ns: int) -> list[MemoryEndRow]:
    """One entry for each time that a trace or a snapshot says that memory ran out, where no report says it better."""
    if explained.trace.rank in {report.rank for report in sources.reports}:
        return []
    if explained.stacks is None:
        return _of_marks(explained, epoch_ns)
    snapshots = [*(snapshot for _, snapshot in sources.snapshots), *sources.attached.values()]
    snapshot = next(snapshot for snapshot in snapshots if snapshot.path == explained.trace.meta.path)
    ends = snapshot.entries.with_row_index("order").filter(pl.col("action") == "oom")
    times = explained.trace.allocations["time_ns"].to_numpy()
    out: list[MemoryEndRow] = []
    for asked_bytes, time_us, number, free in ends.select("bytes", "time_us", "stack", "address").rows():
        stack = [frame_text(frame) for frame in reversed(snapshot.stacks[number])][-MOST_FRAMES:]
        python = [frame for frame in stack if ".py(" in frame]
        row = times.size - 1 if time_us is None else int(np.searchsorted(times, time_us * 1000, side="right")) - 1
        out.append(
            {
                "rank": explained.trace.rank,
                "path": snapshot.path,
                "evidence": "snapshot",
                "time_ns": None if time_us is None else time_us * 1000 - epoch_ns,
                "step": None,
                "asked_bytes": asked_bytes,
                "message": f"{free} bytes were free on the device",
                "where": why.where_in_program(python or stack),
                "stack": stack,
                "devices": [],
                **_of_blocks(explained, row, asked_bytes, python or stack),
            }
        )
    return out


def _holders(held: dict[str, int], tree: pl.DataFrame, suggestions: Iterable[why.Advice]) -> EndHolders:
    total = sum(held.values())
    return {
        "bytes": total,
        "kinds": [{"name": name, "bytes": size, "fraction": size / max(total, 1)} for name, size in held.items()],
        "tree": rows(tree),
        "advice": [
            {"action": advice.action, "text": advice.text, "bytes": advice.bytes, "why": advice.why}
            for advice in suggestions
        ],
    }


def _devices(listed: object) -> list[MemoryDeviceRow]:
    """What the allocators said, with what is in use outside them."""
    out: list[MemoryDeviceRow] = []
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, dict) or any((whole(entry.get(key)) or 0) < 0 for key in _DEVICE):
            continue
        allocated, reserved, free, total, retries = (whole(entry.get(key)) or 0 for key in _DEVICE)
        out.append(
            {
                "device_type": str(entry.get("device_type", ""))[:40],
                "device": whole(entry.get("device")),
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "free_bytes": free,
                "total_bytes": total,
                "retries": retries,
                "outside_bytes": max(total - free - reserved, 0),
            }
        )
    return out


def _of_marks(explained: Explained, epoch_ns: int) -> list[MemoryEndRow]:
    """Marks of PyTorch in a trace: what was asked for and when; who held what follows from the blocks."""
    trace = explained.trace
    marks = trace.marks.filter(pl.col("name") == MARK)
    if not marks.height:
        return []
    threads = marks.select(
        "time_ns", pl.col("process").cast(pl.Int64, strict=False), pl.col("thread").cast(pl.Int64, strict=False)
    )
    positions = innermost(trace, forest(trace), threads)
    at = np.searchsorted(trace.allocations["time_ns"].to_numpy(), marks["time_ns"].to_numpy(), side="right") - 1
    out: list[MemoryEndRow] = []
    for k, (time, asked_bytes) in enumerate(marks.select("time_ns", "bytes").rows()):
        position, where = int(positions[k]), None
        if position >= 0:  # scope and op
            places = explained.named.places
            path, label = places.paths[int(places.path[position])], places.labels[int(places.label[position])]
            where = f"{path}.{label}" if path else label
        step = trace.steps.filter((pl.col("start_ns") <= time) & (pl.col("end_ns") > time))["step"]
        out.append(
            {
                "rank": trace.rank,
                "path": with_addresses(trace.meta.path),
                "evidence": "trace",
                "time_ns": time - epoch_ns,
                "step": int(step[0]) if step.len() else None,
                "asked_bytes": asked_bytes,
                "message": "",
                "where": where,
                "stack": [],
                "devices": [],
                **_of_blocks(explained, int(at[k]), asked_bytes, []),
            }
        )
    return out


def _of_blocks(explained: Explained, row: int, asked_bytes: int | None, stack: list[str]) -> EndHolders:
    """Who held what just after a row of the allocations, in the memory that held most."""
    pools = range(len(explained.named.blocks.pools))
    allocations = answers(explained, dict.fromkeys(pools, row))
    totals = allocations.categories.group_by("pool").agg(pl.col("bytes").sum()).sort("bytes", descending=True)
    pool = int(totals["pool"][0]) if totals.height else 0
    in_pool = pl.col("pool") == pool
    held: dict[str, int] = {}
    for category, size in allocations.categories.filter(in_pool).select("category", "bytes").rows():
        kind = _OF_CATEGORY.get(category, category.replace("_", " "))
        held[kind] = held.get(kind, 0) + size
    nobody = why.census_of({})
    growing = growth(explained.trace, explained.named).select("site", "bytes_per_step", "bytes").rows()
    suggestions = why.advice(held, nobody, asked=asked_bytes, stack=stack, devices=[], ranks=None, growing=growing)
    largest_first = dict(sorted(held.items(), key=lambda pair: -pair[1]))
    return _holders(largest_first, allocations.peak.filter(in_pool).drop("pool"), suggestions)
