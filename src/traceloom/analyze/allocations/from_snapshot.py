"""Blocks, names and categories from a memory snapshot of PyTorch's allocator.

A snapshot has no operators and scopes but call stacks: Python's functions stand for scopes, and where C++ frames were
recorded, the outermost dispatched operator for the op.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import ALIVE, EXISTED, Blocks, blocks
from traceloom.analyze.allocations.categories import BEFORE as BEFORE_RECORDING
from traceloom.analyze.allocations.categories import (
    CATEGORIES,
    GRADIENT,
    INFERRED,
    INPUT,
    NONE,
    STATE,
    TEMPORARY,
    UNKNOWN,
    Categories,
)
from traceloom.analyze.allocations.explained import Explained
from traceloom.analyze.allocations.named import Named, turns
from traceloom.analyze.allocations.naming import NO_OP, EventScopes
from traceloom.analyze.allocations.owners import owners
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model.schema import SCHEMAS, empty
from traceloom.model.snapshot import Snapshot, frame_text, is_python, stack_texts
from traceloom.model.trace import Meta

KIND = "memory-snapshot"
BACKWARD_PATH = "backward"
_ALLOCATED = "active_allocated"
_OPERATOR = re.compile(r"^at::_ops::(\w+?)(?:::|$)")
_NODE = re.compile(r"\b(\w+Backward\d*)::apply")
_PLUMBING = frozenset(("_call_impl", "_wrapped_call_impl"))
_DEEPEST = 64
# Part of the path of a file -> what its allocations are for, if they outlive it; else temporary.
_MAKERS = (("torch/optim/", STATE), ("torch/utils/data/", INPUT))


def explain_snapshot(snapshot: Snapshot, rank: int | None = None) -> Explained:
    """Pair, name and explain the allocations of a snapshot.

    Bytes are those that were asked for; they count as allocated until they are given back (`free_requested`), as
    `torch.cuda.memory_allocated` counts. Blocks that the history does not show being made were there before it. Without
    a history the blocks of the segments are all there is: made at one instant, in the order of their addresses.

    Categories are inferred from the stack, where it runs through an optimizer, a data loader or a backward node.
    """
    # `allocations` of the snapshot, by time, and the number of the stack of each
    rows = snapshot.entries.with_row_index("order")
    if not rows.filter(pl.col("action") == "alloc").height:
        rows = _standing(snapshot)
    requested = rows.filter(pl.col("action") == "free_requested")["device"].unique()
    is_free = (pl.col("action") == "free_requested") | (
        (pl.col("action") == "free_completed") & ~pl.col("device").is_in(requested.implode())
    )
    signed = rows.with_columns(
        change=pl.when(pl.col("action") == "alloc").then("bytes").when(is_free).then(-pl.col("bytes")).otherwise(0),
        held=pl.when(pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_map"]))
        .then("bytes")
        .when(pl.col("action").cast(pl.String).is_in(["segment_free", "segment_unmap"]))
        .then(-pl.col("bytes"))
        .otherwise(0),
    )
    # by device: bytes allocated and reserved when the snapshot was taken
    held = snapshot.segments.group_by("device").agg(pl.col("bytes").sum().alias("reserved"))
    active = snapshot.blocks.filter(pl.col("state") == _ALLOCATED)
    live = active.group_by("device").agg(pl.col("requested_bytes").sum().alias("allocated"))
    at_end = held.join(live, on="device", how="left").with_columns(pl.col("allocated").fill_null(0))
    ends = at_end.join(signed.group_by("device").agg(pl.col("change", "held").sum()), on="device", how="left")
    starts = ends.select(
        "device", before=pl.col("allocated") - pl.col("change").fill_null(0),
        reserved_before=pl.col("reserved") - pl.col("held").fill_null(0),
    )  # fmt: skip
    levels = signed.join(starts, on="device", how="left", maintain_order="left").with_columns(
        allocated=pl.col("before").fill_null(0) + pl.col("change").cum_sum().over("device"),
        reserved=pl.col("reserved_before") + pl.col("held").cum_sum().over("device"),
    )
    order, time_us = pl.col("order").cast(pl.Int64), pl.col("time_us")
    time_ns = pl.when(time_us.is_null().any()).then(order).otherwise(time_us * 1000)  # some versions tell no times
    events = levels.filter(pl.col("change") != 0).with_columns(time=time_ns).sort("time", "order")
    # increasing times: entries of one microsecond keep their order by its nanoseconds
    index = np.arange(events.height)
    times = events["time"].cast(pl.Int64).to_numpy()
    times = np.maximum.accumulate(times - index) + index if index.size else times
    right = (events["allocated"] >= 0).all() and (events["reserved"].fill_null(0) >= 0).all()
    nothing = pl.repeat(None, events.height, eager=True)
    history = pl.DataFrame(
        {
            "time_ns": times,
            "address": events["address"].cast(pl.UInt64),
            "bytes": events["change"],
            "device_type": pl.repeat(snapshot.device_type, events.height, eager=True, dtype=pl.String),
            "device": events["device"],
            "allocated_bytes": events["allocated"] if right else nothing,
            "reserved_bytes": events["reserved"] if right else nothing,
            "process": nothing,
            "thread": nothing,
            "op": nothing,
            "step": nothing,
        },
        schema=SCHEMAS["allocations"],
    )
    stack = events["stack"].cast(pl.Int64).to_numpy()
    trace = _trace(snapshot, history, rank)
    all_blocks = blocks(trace)
    all_blocks.check()
    numbers = np.append(stack, 0)[np.where(all_blocks.made >= 0, all_blocks.made, -1)]
    named = _named(snapshot, all_blocks, numbers)
    kinds, whose = _categories(snapshot, named, numbers), owners(trace, all_blocks)
    return Explained(trace, named, kinds, whose, stack_texts(snapshot).gather(numbers))


def _standing(snapshot: Snapshot) -> pl.DataFrame:
    """The allocated blocks of a snapshot without a history, as if they were made one after the other."""
    return (
        snapshot.blocks.filter(pl.col("state") == _ALLOCATED)
        .select(
            "device", pl.lit("alloc").cast(snapshot.entries.schema["action"]).alias("action"), "address",
            pl.col("requested_bytes").alias("bytes"), pl.lit(None, pl.Int64).alias("time_us"), "stack",
        )
        .with_row_index("order")
    )  # fmt: skip


def _trace(snapshot: Snapshot, history: pl.DataFrame, rank: int | None) -> Trace:
    """A trace that holds the allocations and the time they span, and nothing else."""
    frames = {name: empty(name) for name in SCHEMAS}
    if history.height:
        first, last = int(history["time_ns"][0]), int(history["time_ns"][-1])
        span: dict[str, object] = dict.fromkeys(SCHEMAS["events"])
        span |= {
            "event": 0, "name": "memory history", "category": "annotation", "start_ns": first,
            "duration_ns": last - first, "nested_end_ns": last, "lane": 0, "depth": 0,
        }  # fmt: skip
        lane: dict[str, object] = dict.fromkeys(SCHEMAS["lanes"])
        lane |= {"lane": 0, "kind": "host", "name": "allocator", "events": 1, "busy_ns": last - first}
        frames["events"] = pl.DataFrame([span], schema=SCHEMAS["events"])
        frames["lanes"] = pl.DataFrame([lane], schema=SCHEMAS["lanes"])
    meta = Meta(snapshot.path, KIND, rank=rank, capture={"live_storages_at_start": _early(snapshot, history)})
    return Trace(meta, **{**frames, "allocations": history}, notices=snapshot.notices)


def _early(snapshot: Snapshot, history: pl.DataFrame) -> dict[str, list[object]]:
    """The blocks that were there before the history and are still there, as a census."""
    last = history.group_by("device", "address").agg(pl.col("bytes").last())
    made = last.filter(pl.col("bytes") > 0).select("device", pl.col("address").cast(pl.Int64))
    early = snapshot.blocks.filter(pl.col("state") == _ALLOCATED).join(made, on=["device", "address"], how="anti")
    early = early.filter(pl.col("requested_bytes") > 0)
    texts = []  # of each stack the innermost Python frame that is none of PyTorch's own, else the innermost
    for stack in snapshot.stacks:
        python = [frame for frame in stack if is_python(frame)]
        users = [frame for frame in python if "/torch/" not in frame[0].replace("\\", "/")]
        chosen = (users or python or list(stack))[:1]
        texts.append(frame_text(chosen[0]) if chosen else "no stack recorded")
    return {
        "address": early["address"].to_list(),
        "bytes": early["requested_bytes"].to_list(),
        "device_type": [snapshot.device_type] * early.height,
        "device": early["device"].to_list(),
        "owner": ["other"] * early.height,
        "name": [texts[number] for number in early["stack"].to_list()],
    }


def _named(snapshot: Snapshot, all_blocks: Blocks, numbers: Ints) -> Named:
    """Names from the stacks; the counter counts the allocations of each."""
    path_of, label_of, backward_of = [], [], []
    path_numbers, label_numbers = {"": 0}, {NO_OP: 0}
    for stack in snapshot.stacks:
        outermost_first = stack[::-1]
        python = [frame[2] for frame in outermost_first if is_python(frame) and frame[2] not in _PLUMBING]
        ops = [match[1] for _, _, name in outermost_first if (match := _OPERATOR.match(name))]
        nodes = [match[1] for _, _, name in outermost_first if (match := _NODE.search(name))]
        scope = ".".join(python[-_DEEPEST:]) or (BACKWARD_PATH if nodes else "")
        path_of.append(path_numbers.setdefault(scope, len(path_numbers)))
        label_of.append(label_numbers.setdefault((nodes or ops or [NO_OP])[0], len(label_numbers)))
        backward_of.append(bool(nodes))
    paths, labels = list(path_numbers), list(label_numbers)
    path = np.array(path_of, dtype=np.int64)[numbers]
    label = np.array(label_of, dtype=np.int64)[numbers]
    counter = np.zeros(path.size, dtype=np.int64)
    seen = np.flatnonzero(all_blocks.made >= 0)
    counter[seen] = turns((path * len(labels) + label)[seen])
    none = np.zeros(0, dtype=np.int64)
    places = EventScopes(paths, [""] * len(paths), none, labels, none, none, none > 0, none > 0, 0)
    position = np.full(path.size, -1, dtype=np.int64)
    backward = np.array(backward_of, dtype=np.bool_)[numbers]
    return Named(all_blocks, places, position, path, label, counter, counter, np.ones_like(counter), backward, position)


def _categories(snapshot: Snapshot, named: Named, numbers: Ints) -> Categories:
    blocks = named.blocks
    makers = [
        next((kind for file, _, _ in stack for part, kind in _MAKERS if part in file.replace("\\", "/")), -1)
        for stack in snapshot.stacks
    ]
    maker = np.array(makers, dtype=np.int64)[numbers]
    maker = np.where(named.backward & (maker < 0), GRADIENT, maker)
    lasts = blocks.end_ns == ALIVE
    category = np.where(maker < 0, UNKNOWN, np.where(lasts | (maker == INPUT), maker, TEMPORARY))
    category = np.where(blocks.start_ns == EXISTED, BEFORE_RECORDING, category)
    inferred = (category != UNKNOWN) & (category != BEFORE_RECORDING)
    assert category.max(initial=0) < len(CATEGORIES)
    return Categories(category, np.where(inferred, INFERRED, NONE))
