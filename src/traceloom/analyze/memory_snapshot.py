"""Allocations explained from allocator snapshots, and advice where memory ran out.

A snapshot has no operators and scopes but call stacks: Python's functions are used as scopes, and
where C++ frames were recorded, the outermost dispatched operator as the op.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import polars as pl

from traceloom.analyze.host_events import find_user_frame
from traceloom.analyze.memory import ACTIVATION_PREFIX, parse_census
from traceloom.analyze.memory_answers import ExplainedMemory
from traceloom.analyze.memory_blocks import EXISTED_BEFORE, STILL_ALIVE, Blocks, build_blocks
from traceloom.analyze.memory_names import NO_OP, EventScopes, NamedBlocks, count_occurrences
from traceloom.analyze.memory_owners import (
    CATEGORIES,
    CATEGORIES_BEFORE as BEFORE_RECORDING,
    GRADIENT,
    INFERRED,
    INPUT,
    NONE,
    STATE,
    TEMPORARY,
    UNKNOWN,
    BlockCategories,
    build_tree,
    find_owners,
)
from traceloom.system import units
from traceloom.trace.array_types import Ints
from traceloom.trace.session import MemorySnapshot, format_frame, format_stacks, is_python_frame
from traceloom.trace.trace import SCHEMAS, Meta, Trace, build_empty_frame

KIND = "memory-snapshot"
BACKWARD_PATH = "backward"
_ALLOCATED = "active_allocated"
_OPERATOR = re.compile(r"^at::_ops::(\w+?)(?:::|$)")
_NODE = re.compile(r"\b(\w+Backward\d*)::apply")
_CALL_WRAPPERS = frozenset(("_call_impl", "_wrapped_call_impl"))
_MAX_DEPTH = 64
# Part of the path of a file -> category of its allocations, if they outlive it; else temporary.
_CATEGORY_BY_FILE = (("torch/optim/", STATE), ("torch/utils/data/", INPUT))


def explain_snapshot(snapshot: MemorySnapshot, rank: int | None = None) -> ExplainedMemory:
    """Pairs, names and explains the allocations of a snapshot.

    Bytes are the requested ones; they count as allocated until they are given back
    (`free_requested`), as `torch.cuda.memory_allocated` counts. Blocks whose allocation is not in
    the history existed before it. Without a history there are only the blocks of the segments: made
    at one instant, in the order of their addresses.

    Categories are inferred from the stack, where it runs through an optimizer, a data loader or a
    backward node.
    """
    # `allocations` of the snapshot, by time, and the number of the stack of each.
    rows = snapshot.entries.with_row_index("order")
    if not rows.filter(pl.col("action") == "alloc").height:
        rows = _select_allocated_blocks(snapshot)
    requested = rows.filter(pl.col("action") == "free_requested")["device"].unique()
    is_free = (pl.col("action") == "free_requested") | (
        (pl.col("action") == "free_completed") & ~pl.col("device").is_in(requested.implode())
    )
    signed = rows.with_columns(
        change=pl.when(pl.col("action") == "alloc")
        .then("bytes")
        .when(is_free)
        .then(-pl.col("bytes"))
        .otherwise(0),
        held=pl.when(pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_map"]))
        .then("bytes")
        .when(pl.col("action").cast(pl.String).is_in(["segment_free", "segment_unmap"]))
        .then(-pl.col("bytes"))
        .otherwise(0),
    )
    # By device: bytes allocated and reserved when the snapshot was taken.
    device_segments = snapshot.segments.group_by("device").agg(
        pl.col("bytes").sum().alias("reserved")
    )
    active = snapshot.blocks.filter(pl.col("state") == _ALLOCATED)
    live = active.group_by("device").agg(pl.col("requested_bytes").sum().alias("allocated"))
    at_end = device_segments.join(live, on="device", how="left").with_columns(
        pl.col("allocated").fill_null(0)
    )
    end_levels = at_end.join(
        signed.group_by("device").agg(pl.col("change", "held").sum()), on="device", how="left"
    )
    starts = end_levels.select(
        "device",
        before=pl.col("allocated") - pl.col("change").fill_null(0),
        reserved_before=pl.col("reserved") - pl.col("held").fill_null(0),
    )
    levels = signed.join(starts, on="device", how="left", maintain_order="left").with_columns(
        allocated=pl.col("before").fill_null(0) + pl.col("change").cum_sum().over("device"),
        reserved=pl.col("reserved_before") + pl.col("held").cum_sum().over("device"),
    )
    order, time_us = pl.col("order").cast(pl.Int64), pl.col("time_us")
    # Some versions record no times
    time_ns = pl.when(time_us.is_null().any()).then(order).otherwise(time_us * 1000)
    events = levels.filter(pl.col("change") != 0).with_columns(time=time_ns).sort("time", "order")
    # Increasing times: entries of one microsecond keep their order by its nanoseconds.
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
            "device_type": pl.repeat(
                snapshot.device_type, events.height, eager=True, dtype=pl.String
            ),
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
    trace = _build_trace(snapshot, history, rank)
    all_blocks = build_blocks(trace)
    all_blocks.check()
    numbers = np.append(stack, 0)[np.where(all_blocks.made >= 0, all_blocks.made, -1)]
    named_blocks = _build_named_blocks(snapshot, all_blocks, numbers)
    kinds, owners = (
        _classify_blocks(snapshot, named_blocks, numbers),
        find_owners(trace, all_blocks),
    )
    return ExplainedMemory(
        trace, named_blocks, kinds, owners, format_stacks(snapshot).gather(numbers)
    )


def _select_allocated_blocks(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Returns the allocated blocks of a snapshot without a history, as if they were made one after
    the other.
    """
    return (
        snapshot.blocks.filter(pl.col("state") == _ALLOCATED)
        .select(
            "device",
            pl.lit("alloc").cast(snapshot.entries.schema["action"]).alias("action"),
            "address",
            pl.col("requested_bytes").alias("bytes"),
            pl.lit(None, pl.Int64).alias("time_us"),
            "stack",
        )
        .with_row_index("order")
    )


def _build_trace(snapshot: MemorySnapshot, history: pl.DataFrame, rank: int | None) -> Trace:
    """Returns a trace that holds the allocations and the time they span, and nothing else."""
    frames: dict[str, Any] = {name: build_empty_frame(name) for name in SCHEMAS}
    if history.height:
        first, last = int(history["time_ns"][0]), int(history["time_ns"][-1])
        span: dict[str, object] = dict.fromkeys(SCHEMAS["events"])
        span |= {
            "event": 0,
            "name": "memory history",
            "category": "annotation",
            "start_ns": first,
            "duration_ns": last - first,
            "nested_end_ns": last,
            "lane": 0,
            "depth": 0,
        }
        lane: dict[str, object] = dict.fromkeys(SCHEMAS["lanes"])
        lane |= {
            "lane": 0,
            "kind": "host",
            "name": "allocator",
            "events": 1,
            "busy_ns": last - first,
        }
        frames["events"] = pl.DataFrame([span], schema=SCHEMAS["events"])
        frames["lanes"] = pl.DataFrame([lane], schema=SCHEMAS["lanes"])
    meta = Meta(
        snapshot.path,
        KIND,
        rank=rank,
        capture={"live_storages_at_start": _build_early_census(snapshot, history)},
    )
    return Trace(meta, **{**frames, "allocations": history}, notices=snapshot.notices)


def _build_early_census(snapshot: MemorySnapshot, history: pl.DataFrame) -> dict[str, list[object]]:
    """Returns the blocks that existed before the history and still exist, as a census."""
    last = history.group_by("device", "address").agg(pl.col("bytes").last())
    created = last.filter(pl.col("bytes") > 0).select("device", pl.col("address").cast(pl.Int64))
    early = snapshot.blocks.filter(pl.col("state") == _ALLOCATED).join(
        created, on=["device", "address"], how="anti"
    )
    early = early.filter(pl.col("requested_bytes") > 0)
    texts = []  # of each stack the innermost Python frame outside PyTorch, else the innermost
    for stack in snapshot.stacks:
        python = [frame for frame in stack if is_python_frame(frame)]
        users = [frame for frame in python if "/torch/" not in frame[0].replace("\\", "/")]
        frames = (users or python or list(stack))[:1]
        texts.append(format_frame(frames[0]) if frames else "no stack recorded")
    return {
        "address": early["address"].to_list(),
        "bytes": early["requested_bytes"].to_list(),
        "device_type": [snapshot.device_type] * early.height,
        "device": early["device"].to_list(),
        "owner": ["other"] * early.height,
        "name": [texts[number] for number in early["stack"].to_list()],
    }


def _build_named_blocks(snapshot: MemorySnapshot, all_blocks: Blocks, numbers: Ints) -> NamedBlocks:
    """Returns names from the stacks; the counter counts the allocations of each."""
    path_of, label_of, backward_of = [], [], []
    path_numbers, label_numbers = {"": 0}, {NO_OP: 0}
    for stack in snapshot.stacks:
        outermost_first = stack[::-1]
        python = [
            frame[2]
            for frame in outermost_first
            if is_python_frame(frame) and frame[2] not in _CALL_WRAPPERS
        ]
        ops = [match[1] for _, _, name in outermost_first if (match := _OPERATOR.match(name))]
        nodes = [match[1] for _, _, name in outermost_first if (match := _NODE.search(name))]
        scope = ".".join(python[-_MAX_DEPTH:]) or (BACKWARD_PATH if nodes else "")
        path_of.append(path_numbers.setdefault(scope, len(path_numbers)))
        label_of.append(label_numbers.setdefault((nodes or ops or [NO_OP])[0], len(label_numbers)))
        backward_of.append(bool(nodes))
    paths, labels = list(path_numbers), list(label_numbers)
    path = np.array(path_of, dtype=np.int64)[numbers]
    label = np.array(label_of, dtype=np.int64)[numbers]
    counter = np.zeros(path.size, dtype=np.int64)
    recorded = np.flatnonzero(all_blocks.made >= 0)
    counter[recorded] = count_occurrences((path * len(labels) + label)[recorded])
    none = np.zeros(0, dtype=np.int64)
    scopes = EventScopes(paths, [""] * len(paths), none, labels, none, none, none > 0, none > 0, 0)
    position = np.full(path.size, -1, dtype=np.int64)
    backward = np.array(backward_of, dtype=np.bool_)[numbers]
    return NamedBlocks(
        all_blocks,
        scopes,
        position,
        path,
        label,
        counter,
        counter,
        np.ones_like(counter),
        backward,
        position,
    )


def _classify_blocks(
    snapshot: MemorySnapshot, named_blocks: NamedBlocks, numbers: Ints
) -> BlockCategories:
    blocks = named_blocks.blocks
    makers = [
        next(
            (
                kind
                for file, _, _ in stack
                for part, kind in _CATEGORY_BY_FILE
                if part in file.replace("\\", "/")
            ),
            -1,
        )
        for stack in snapshot.stacks
    ]
    maker = np.array(makers, dtype=np.int64)[numbers]
    maker = np.where(named_blocks.backward & (maker < 0), GRADIENT, maker)
    is_alive = blocks.end_ns == STILL_ALIVE
    category = np.where(maker < 0, UNKNOWN, np.where(is_alive | (maker == INPUT), maker, TEMPORARY))
    category = np.where(blocks.start_ns == EXISTED_BEFORE, BEFORE_RECORDING, category)
    inferred = (category != UNKNOWN) & (category != BEFORE_RECORDING)
    assert category.max(initial=0) < len(CATEGORIES)
    return BlockCategories(category, np.where(inferred, INFERRED, NONE))


OWNER_LABELS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "kept for backward",
    "other": "other tensors",
}
_NAME_OF_PATTERN = re.compile(r"^.* of (.+)$")
_BACKWARD_FRAME = re.compile(r"\): (?:backward|_engine_run_backward)$")
_MIN_ADVICE_SHARE = 0.01  # of what was alive; advice that frees less is left out


@dataclass(frozen=True)
class Advice:
    """Something to try.

    Attributes:
        action: Stable name: `shrink-request`, `release-gradients`, `drop-kept-tensors`,
            `checkpoint-activations`, `smaller-batch`, `shard-optimizer-state`,
            `expandable-segments`, `other-processes`, `stop-growth`.
        text: The advice.
        bytes: The most that it would free; None where it frees nothing but makes the request
            smaller.
        why: The evidence for it in the data.
    """

    action: str
    text: str
    bytes: int | None
    why: str


class AllocatorState(TypedDict):
    """The state of an allocator as reported; `free_bytes` and `total_bytes` are the device's."""

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


def parse_report_census(document: dict[str, Any]) -> pl.DataFrame:
    """Returns the live storages of a report on memory that ran out, `CENSUS`; invalid rows are left
    out.
    """
    return parse_census(document.get("live_storages"))


def build_live_tree(live: pl.DataFrame) -> pl.DataFrame:
    """Returns live storages by kind of owner, then by module, or by type; as `TREE` of
    `memory_owners`.
    """
    entries: list[tuple[tuple[str, ...], int, int]] = []
    for owner, name, size in live.select(
        "owner", "name", "bytes"
    ).rows():  # at most some ten thousand
        kind = OWNER_LABELS.get(owner, OWNER_LABELS["other"])
        if owner in ("activation", "other"):
            entries.append(((kind, name.removeprefix(ACTIVATION_PREFIX)), size, 1))
            continue
        match = _NAME_OF_PATTERN.match(name)
        path = match[1] if match else name
        path = path.removesuffix(".grad") if owner == "gradient" else path
        parts = [path] if path.startswith("(") else path.split(".")
        entries.append(((kind, *parts), size, 1))
    return build_tree(entries)


def compute_bytes_by_kind(live: pl.DataFrame) -> dict[str, int]:
    labelled = live.with_columns(
        kind=pl.when(pl.col("owner").is_in(list(OWNER_LABELS)))
        .then(pl.col("owner").replace(OWNER_LABELS))
        .otherwise(pl.lit(OWNER_LABELS["other"]))
    )
    sums = (
        labelled.group_by("kind")
        .agg(pl.col("bytes").sum())
        .sort("bytes", "kind", descending=[True, False])
    )
    return dict(sums.rows())


def describe_sites(sites: Sequence[str]) -> str:
    """Returns who leaves memory behind: the first place, and how many others, with the verb."""
    more = len(sites) - 1
    other = f" and {units.format_quantity(more, 'other place')} leave" if more else " leaves"
    return f"{sites[0]}{other}"


def list_advice(
    bytes_by_kind: dict[str, int],
    live: pl.DataFrame,
    *,
    requested_bytes: int | None,
    stack: list[str],
    devices: Sequence[AllocatorState],
    ranks: int | None,
    growing: list[tuple[str, float, int]],
) -> list[Advice]:
    """Returns advice, the largest saving first; each only where the data supports it.

    Args:
        bytes_by_kind: Bytes by kind of owner, as `compute_bytes_by_kind` returns them.
        live: The live storages; no rows without a census.
        requested_bytes: Bytes of the request that failed.
        stack: The stack of the request, the outermost frame first.
        devices: The states of the allocators.
        ranks: How many ranks the job has.
        growing: (site, bytes per step, bytes so far) of every site that grows with every step.
    """
    total = sum(bytes_by_kind.values())
    out = []
    gradients, state = (
        bytes_by_kind.get(OWNER_LABELS["gradient"], 0),
        bytes_by_kind.get(OWNER_LABELS["optimizer_state"], 0),
    )
    activations, other = (
        bytes_by_kind.get(OWNER_LABELS["activation"], 0),
        bytes_by_kind.get(OWNER_LABELS["other"], 0),
    )
    leaked = sum(size for _, _, size in growing)  # neither of the following frees it
    activations, other = max(activations - leaked, 0), max(other - max(leaked - activations, 0), 0)
    if gradients and not any(_BACKWARD_FRAME.search(line) for line in stack):
        text = (
            "free the gradients before the next forward pass: optimizer.zero_grad(set_to_none=True)"
        )
        out.append(
            Advice(
                "release-gradients",
                text,
                gradients,
                "gradients were alive outside the backward pass",
            )
        )
    if activations:
        evidence = f"{units.format_size(activations)} were kept for the backward pass"
        text = "recompute activations in the backward pass: torch.utils.checkpoint around the repeated blocks"
        out += [
            Advice("checkpoint-activations", text, activations, evidence),
            Advice(
                "smaller-batch",
                "halve the batch (and accumulate gradients over two)",
                activations // 2,
                evidence,
            ),
        ]
    if other and live.height:
        largest = live.filter(
            ~pl.col("owner").is_in([owner for owner in OWNER_LABELS if owner != "other"])
        )
        tensor_sums = largest.group_by("name").agg(pl.col("bytes").sum(), pl.len().alias("count"))
        name, size, count = tensor_sums.sort("bytes", "name", descending=[True, False]).row(0)
        reason = f"{units.format_count(count)} × {name} hold {units.format_size(size)} of them"
        text = "let go of tensors that the program itself holds (lists of results; losses with their graph: .detach())"
        out.append(Advice("drop-kept-tensors", text, other, reason))
    if state and ranks is not None and ranks > 1:
        text = f"shard the optimizer's state over the {ranks} ranks (ZeroRedundancyOptimizer, fully_shard)"
        reason = f"every rank holds all {units.format_size(state)} of it, if it is not sharded yet"
        out.append(Advice("shard-optimizer-state", text, state - state // ranks, reason))
    for device in devices:
        idle = device["reserved_bytes"] - device["allocated_bytes"]
        if requested_bytes is not None and idle >= requested_bytes:
            text = "let the allocator join its free pieces: PYTORCH_ALLOC_CONF=expandable_segments:True (before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF or PYTORCH_HIP_ALLOC_CONF)"
            reason = f"{units.format_size(idle)} were reserved but free, in pieces too small for {units.format_size(requested_bytes)}"
            out.append(Advice("expandable-segments", text, idle, reason))
        external = device["total_bytes"] - device["free_bytes"] - device["reserved_bytes"]
        if external > device["total_bytes"] // 10:
            text = "check what else uses the device: other processes (nvidia-smi, amd-smi), communication buffers, libraries"
            reason = f"{units.format_size(external)} of {units.format_size(device['total_bytes'])} are in use outside this allocator"
            out.append(Advice("other-processes", text, external, reason))
    if growing:
        text = (
            f"release what {describe_sites([site for site, _, _ in growing])} behind in every step"
        )
        per_step = sum(size for _, size, _ in growing)
        reason = f"it grows by {units.format_size(round(per_step))} per step"
        out.append(Advice("stop-growth", text, leaked, reason))
    advice = [
        item
        for item in out
        if item.bytes is not None and item.bytes >= max(_MIN_ADVICE_SHARE * total, 1)
    ]
    advice.sort(key=lambda item: -(item.bytes or 0))
    if requested_bytes is not None and requested_bytes > total:
        reason = f"alone it asks for {units.format_size(requested_bytes)}, more than all that was alive ({units.format_size(total)})"
        location = find_user_frame(stack)
        suffix = f" at {location}" if location else ""
        advice.insert(
            0, Advice("shrink-request", f"check the request itself{suffix}", None, reason)
        )
    return advice
