"""The same out of allocator snapshots; why memory ran out.

A snapshot has no operators and scopes but call stacks: Python's functions stand for scopes, and where C++ frames were
recorded, the outermost dispatched operator for the op.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import polars as pl

from traceloom.analyze.memory import KEPT, frame
from traceloom.analyze.memory_answers import ExplainedMemory
from traceloom.analyze.memory_blocks import ALIVE, EXISTED, Blocks, blocks
from traceloom.analyze.memory_names import NO_OP, EventScopes, NamedBlocks, number_occurrences
from traceloom.analyze.memory_owners import (
    CATEGORIES,
    GRADIENT,
    INFERRED,
    INPUT,
    NONE,
    STATE,
    TEMPORARY,
    UNKNOWN,
    Categories,
    owners,
    tree_of,
)
from traceloom.analyze.memory_owners import CATEGORIES_BEFORE as BEFORE_RECORDING
from traceloom.system import units
from traceloom.trace.array_types import Ints
from traceloom.trace.session import Snapshot, frame_text, is_python, stack_texts
from traceloom.trace.trace import SCHEMAS, Meta, Trace, empty

KIND = "memory-snapshot"
BACKWARD_PATH = "backward"
_ALLOCATED = "active_allocated"
_OPERATOR = re.compile(r"^at::_ops::(\w+?)(?:::|$)")
_NODE = re.compile(r"\b(\w+Backward\d*)::apply")
_PLUMBING = frozenset(("_call_impl", "_wrapped_call_impl"))
_DEEPEST = 64
# Part of the path of a file -> what its allocations are for, if they outlive it; else temporary.
_MAKERS = (("torch/optim/", STATE), ("torch/utils/data/", INPUT))


def explain_snapshot(snapshot: Snapshot, rank: int | None = None) -> ExplainedMemory:
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
    return ExplainedMemory(trace, named, kinds, whose, stack_texts(snapshot).gather(numbers))


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


def _named(snapshot: Snapshot, all_blocks: Blocks, numbers: Ints) -> NamedBlocks:
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
    counter[seen] = number_occurrences((path * len(labels) + label)[seen])
    none = np.zeros(0, dtype=np.int64)
    places = EventScopes(paths, [""] * len(paths), none, labels, none, none, none > 0, none > 0, 0)
    position = np.full(path.size, -1, dtype=np.int64)
    backward = np.array(backward_of, dtype=np.bool_)[numbers]
    return NamedBlocks(
        all_blocks, places, position, path, label, counter, counter, np.ones_like(counter), backward, position
    )


def _categories(snapshot: Snapshot, named: NamedBlocks, numbers: Ints) -> Categories:
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


KINDS = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients", "optimizer_state": "optimizer state",
    "activation": "kept for backward", "other": "other tensors",
}  # fmt: skip
_OF = re.compile(r"^.* of (.+)$")
_LIBRARY = re.compile(
    r"[/\\](?:site-packages|dist-packages|torch|traceloom|lib[/\\]python[\d.]+)[/\\]|^<frozen|^<string"
)
_BACKWARD = re.compile(r"\): (?:backward|_engine_run_backward)$")
_SMALL = 0.01  # of what was alive; advice that frees less is not worth a line


@dataclass(frozen=True)
class Advice:
    """Something to try.

    Attributes:
        action: Stable name: `shrink-request`, `release-gradients`, `drop-kept-tensors`, `checkpoint-activations`,
            `smaller-batch`, `shard-optimizer-state`, `expandable-segments`, `other-processes`, `stop-growth`.
        text: What to do.
        bytes: What it would free at most; None where it frees nothing but makes the request smaller.
        why: What in the data says so.
    """

    action: str
    text: str
    bytes: int | None
    why: str


class AllocatorState(TypedDict):
    """What an allocator said of its device; `free_bytes` and `total_bytes` are the device's."""

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


def census_of(document: dict[str, Any]) -> pl.DataFrame:
    """The live storages of a report on memory that ran out, `CENSUS`; rows that are none are left out."""
    return frame(document.get("live_storages"))


def tree(live: pl.DataFrame) -> pl.DataFrame:
    """Live storages by kind of owner, then by module, or by type; `holders.TREE`."""
    leaves: list[tuple[tuple[str, ...], int, int]] = []
    for owner, name, size in live.select("owner", "name", "bytes").rows():  # at most some ten thousand
        kind = KINDS.get(owner, KINDS["other"])
        if owner in ("activation", "other"):
            leaves.append(((kind, name.removeprefix(KEPT)), size, 1))
            continue
        of = _OF.match(name)
        path = of[1] if of else name
        path = path.removesuffix(".grad") if owner == "gradient" else path
        parts = [path] if path.startswith("(") else path.split(".")
        leaves.append(((kind, *parts), size, 1))
    return tree_of(leaves)


def kinds(live: pl.DataFrame) -> dict[str, int]:
    """Bytes by kind of owner."""
    named = live.with_columns(
        kind=pl.when(pl.col("owner").is_in(list(KINDS)))
        .then(pl.col("owner").replace(KINDS))
        .otherwise(pl.lit(KINDS["other"]))
    )
    sums = named.group_by("kind").agg(pl.col("bytes").sum()).sort("bytes", "kind", descending=[True, False])
    return dict(sums.rows())


def where_in_program(stack: list[str]) -> str | None:
    """The innermost frame of the user's own code; the innermost of all where there is none."""
    own = [line for line in stack if not _LIBRARY.search(line.partition("(")[0])]
    return (own or stack)[-1] if stack else None


def advice(
    held: dict[str, int],
    live: pl.DataFrame,
    *,
    asked: int | None,
    stack: list[str],
    devices: Sequence[AllocatorState],
    ranks: int | None,
    growing: list[tuple[str, float, int]],
) -> list[Advice]:
    """What to try first, the largest saving first; each only where the data supports it.

    Args:
        held: Bytes by kind, as `kinds` gives them.
        live: The live storages; no rows without a census.
        asked: Bytes of the request that failed.
        stack: Where, the outermost frame first.
        devices: What the allocators say.
        ranks: How many ranks the job has.
        growing: (site, bytes per step, bytes so far) of what grows with every step.
    """
    whole = sum(held.values())
    out = []
    gradients, state = held.get(KINDS["gradient"], 0), held.get(KINDS["optimizer_state"], 0)
    kept, other = held.get(KINDS["activation"], 0), held.get(KINDS["other"], 0)
    if gradients and not any(_BACKWARD.search(line) for line in stack):
        text = "free the gradients before the next forward pass: optimizer.zero_grad(set_to_none=True)"
        out.append(Advice("release-gradients", text, gradients, "gradients were alive outside the backward pass"))
    if kept:
        many = f"{units.size(kept)} were kept for the backward pass"
        text = "recompute activations in the backward pass: torch.utils.checkpoint around the repeated blocks"
        out += [
            Advice("checkpoint-activations", text, kept, many),
            Advice("smaller-batch", "halve the batch (and accumulate gradients over two)", kept // 2, many),
        ]
    if other and live.height:
        largest = live.filter(~pl.col("owner").is_in([owner for owner in KINDS if owner != "other"]))
        most = largest.group_by("name").agg(pl.col("bytes").sum(), pl.len().alias("count"))
        name, size, count = most.sort("bytes", "name", descending=[True, False]).row(0)
        why = f"{units.count(count)} × {name} hold {units.size(size)} of them"
        text = "let go of tensors that the program itself holds (lists of results; losses with their graph: .detach())"
        out.append(Advice("drop-kept-tensors", text, other, why))
    if state and ranks is not None and ranks > 1:
        text = f"shard the optimizer's state over the {ranks} ranks (ZeroRedundancyOptimizer, fully_shard)"
        why = f"every rank holds all {units.size(state)} of it, if it is not sharded yet"
        out.append(Advice("shard-optimizer-state", text, state - state // ranks, why))
    for device in devices:
        idle = device["reserved_bytes"] - device["allocated_bytes"]
        if asked is not None and idle >= asked:
            text = "let the allocator join its free pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            why = f"{units.size(idle)} were reserved but free, in pieces too small for {units.size(asked)}"
            out.append(Advice("expandable-segments", text, idle, why))
        outside = device["total_bytes"] - device["free_bytes"] - device["reserved_bytes"]
        if outside > device["total_bytes"] // 10:
            text = "check what else uses the device: other processes (nvidia-smi), communication buffers, libraries"
            why = f"{units.size(outside)} of {units.size(device['total_bytes'])} are in use outside this allocator"
            out.append(Advice("other-processes", text, outside, why))
    out += [
        Advice("stop-growth", f"release what {site} leaves behind in every step", size,
               f"it grows by {units.size(round(per_step))} per step")
        for site, per_step, size in growing[:2]
    ]  # fmt: skip
    worth = [item for item in out if item.bytes is not None and item.bytes >= max(_SMALL * whole, 1)]
    worth.sort(key=lambda item: -(item.bytes or 0))
    if asked is not None and asked > whole:
        why = f"alone it asks for {units.size(asked)}, more than all that was alive ({units.size(whole)})"
        where = where_in_program(stack)
        at = f" at {where}" if where else ""
        worth.insert(0, Advice("shrink-request", f"check the request itself{at}", None, why))
    return worth
