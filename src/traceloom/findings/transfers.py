"""Rules about copies and memory: needless copies, growth, fragmentation, nearly full devices."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.memory_snapshot import describe_sites
from traceloom.changes.changes import Change, NodeSelection
from traceloom.findings.context import Context, shorten_name
from traceloom.findings.rule import (
    NO_DEVICE,
    Candidate,
    Condition,
    FindingRule,
    MemoryCandidate,
    Message,
)
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace.batch import concatenate_by_trace
from traceloom.trace.notice import Abstention, Evidence
from traceloom.trace.session import RunGrowth, find_run_growth, read_run_steps
from traceloom.trace.trace import Trace

_MIN_BYTES = 4096  # fewer bytes are a value that is read, not data that is moved
_MIN_SHARE = 0.02
_HOST_COPY_KINDS = ("HtoD", "DtoH")


def _collect_copies(context: Context) -> pl.DataFrame:
    """Returns copies of all traces, of each in order: trace, event, kind, bytes, start_ns,
    duration_ns, op, launch, step.
    """
    columns = ["start_ns", "duration_ns", "op", "launch", "step"]
    copies = (
        trace.copies.hstack(trace.events[columns][trace.copies["event"]])
        for trace in context.traces
    )
    return concatenate_by_trace(copies).sort("trace", "start_ns")


def _select_host_device_copies(context: Context) -> pl.DataFrame:
    data = pl.col("kind").is_in(list(_HOST_COPY_KINDS)) & (pl.col("bytes") >= _MIN_BYTES)
    return context.ask(context, _collect_copies).filter(data)


def find_round_trip_copies(context: Context) -> Iterator[Message]:
    """Reports bytes that go to the host and come back."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    pairs = 0
    copies = context.in_step(_select_host_device_copies(context))
    for trace, trace_copies in context.split_by_trace(copies):
        # A copy to the host, and the next copy of as many bytes back.
        paired: list[int] = []
        waiting: dict[int, list[int]] = {}
        for event, kind, size in trace_copies[["event", "kind", "bytes"]].iter_rows():
            if kind == "DtoH":
                waiting.setdefault(size, []).append(event)
            elif waiting.get(size):
                paired += [waiting[size].pop(0), event]
        pairs += len(paired) // 2
        rows = pl.Series(paired, dtype=pl.UInt32)
        mask |= context.node_mask(
            trace, pl.concat([rows, trace.events["launch"][rows].cast(pl.UInt32)])
        )
    if not pairs or not mask.any():
        return
    on_device = mask & context.select_kinds(graph_schema.COPY)
    selection = NodeSelection("copies to the host and back", mask, "copies")
    yield Candidate(
        title=f"{units.format_count(pairs)} times data goes to the host and as many bytes come back: "
        f"{units.format_duration(context.work_ns(on_device))} of copying{context.rank_sum_suffix}",
        changes=(Change("drop", selection), Change("remove", selection)),
        confidence=0.5,
        advice="Keep it on the device: no `.cpu()`, `.numpy()` or `.to('cpu')` between two operations of the device.",
        evidence=context.evidence(on_device),
    )


def find_device_copies(context: Context) -> Iterator[Message]:
    op_times: dict[str, int] = {}
    copies = context.ask(context, _collect_copies).filter(pl.col("kind") == "DtoD")
    mask = context.select_nodes_of_stacked_events(copies)
    for number, op, duration_ns in (
        copies.group_by("trace", "op").agg(pl.col("duration_ns").sum()).iter_rows()
    ):
        names, parents = (context.traces[number].events[column] for column in ("name", "parent"))
        name = "no operator" if op is None else names[op]
        if name == "aten::copy_" and parents[op] is not None:  # the operator that made the copy
            name = names[parents[op]]
        op_times[shorten_name(name)] = op_times.get(shorten_name(name), 0) + duration_ns
    mask &= context.select_kinds(graph_schema.COPY)
    time = context.work_ns(mask)
    if not mask.any() or time < _MIN_SHARE * context.ranks_ns:
        return
    top_operator = max(op_times, key=lambda name: op_times[name])
    in_steps = context.own(mask)
    yield Candidate(
        title=f"{context.many(int(in_steps.sum()))} copies inside the device take {context.format_time_per_step(context.work_ns(in_steps))}, "
        f"most of it in {top_operator}{context.rank_sum_suffix}",
        changes=(Change("remove", NodeSelection("copies inside the device", mask, "copies")),),
        confidence=0.3,
        advice="Avoid clones and changes of layout: write in place or into preallocated tensors, keep one memory "
        "format, do not clone inputs of compiled or graphed functions that are never modified.",
        evidence=context.evidence(mask),
    )


def find_exposed_copies(context: Context) -> Iterator[Message]:
    """Reports copies between host and device while nothing computes."""
    mask = context.select_nodes_of_stacked_events(
        _select_host_device_copies(context)
    ) & context.select_kinds(graph_schema.COPY)
    if context.compute_exposed_ns(mask) < _MIN_SHARE * context.ranks_ns:
        return
    in_steps = context.own(mask)
    exposed_ns = context.compute_exposed_ns(in_steps)
    size = (
        int(context.graph.nodes["bytes"].to_numpy()[in_steps].sum()) // context.step_count
        if in_steps.any()
        else 0
    )
    yield Candidate(
        title=f"nothing is computed during {context.format_time_per_step(exposed_ns)} of copying between host and device "
        f"({units.format_size(size)}{context.rank_sum_suffix})",
        changes=(
            Change(
                "overlap",
                NodeSelection("copies between host and device, beside computing", mask, "copies"),
            ),
        ),
        confidence=0.4,
        advice="Copy the next batch on a stream of its own while this one is computed: pinned memory, "
        "`non_blocking=True`, a prefetching loader.",
        evidence=context.evidence(mask),
    )


RULES = (
    FindingRule(
        "needless-copies",
        "data goes to the host and comes back",
        find_round_trip_copies,
        (NO_DEVICE,),
    ),
    FindingRule("device-copies", "copies from the device to itself", find_device_copies),
    FindingRule("exposed-copies", "copies not overlapped by compute", find_exposed_copies),
)

_NEARLY_FULL_SHARE = 0.9  # of the device
# Bytes per step; less takes more than 100,000 steps to become a gigabyte
_MIN_GROWTH_BYTES = 10_000
_MIN_SITE_BYTES = 1_000  # of these, of one place
_ORDINALS = {2: "second", 3: "third"}
_NOT_RECORDED: Condition = (
    lambda context: not context.allocations,
    "allocations were not recorded",
)
_MIN_FRAGMENTED_SHARE = 0.25  # of what is reserved, unused at the peak


def find_memory_growth(context: Context) -> Iterator[Message]:
    """Reports memory that every step leaves behind, or every second or third."""
    if not context.allocations:
        yield from _find_process_growth(context)
    for trace, allocations in context.allocations:
        growth = allocations.growth.filter(pl.col("bytes_per_step") >= _MIN_SITE_BYTES)
        for rows in growth.partition_by("pool", maintain_order=True):  # one leak, in many tensors
            per_step, periods = round(rows["bytes_per_step"].sum()), rows["period"].unique()
            if per_step < _MIN_GROWTH_BYTES:
                continue
            period = periods[0] if periods.len() == 1 else 1
            frames = " and ".join(rows["frame"].drop_nulls().unique(maintain_order=True)[:2])
            made = f" It is made in {frames}." if frames else ""
            steps = "step" if period == 1 else f"{_ORDINALS.get(period, f'{period}th')} step"
            yield MemoryCandidate(
                title=f"{describe_sites(rows['site'].to_list())} {units.format_size(per_step * period)} behind in every {steps}",
                saving_bytes=int(rows["bytes"].sum()),
                risk=f"memory grows by {units.format_size(per_step)} per step until it is full",
                severe=True,
                confidence=0.7,
                advice="Do not keep tensors with their graph: detach what is collected, or turn it into numbers."
                f"{made}",
                evidence=tuple(
                    Evidence(site, trace.rank, count=count)
                    for site, count in rows[["site", "block_count"]].head(4).iter_rows()
                ),
            )


def _find_process_growth(context: Context) -> Iterator[Message]:
    """Reports that the memory of a process, or of its GPU, grows from step to step of the run."""
    found: list[tuple[RunGrowth, str, int | None]] = []
    for trace in context.traces:
        run = read_run_steps(trace.meta)
        if run is None:
            continue
        for place, held in (("GPU", run.device_memory_bytes), ("process", run.memory_bytes)):
            if growth := find_run_growth(run.state, held):
                found.append((growth, place, trace.rank))
                break
    if not found:
        yield Abstention("memory-growth", _NOT_RECORDED[1])
        return
    growth, place, rank = max(found, key=lambda item: item[0].bytes_per_step)
    per_step = units.format_size(growth.bytes_per_step)
    ranks = f", most in rank {rank} of {len(found)} that grow" if len(found) > 1 else ""
    yield MemoryCandidate(
        title=f"the memory of the {place} grows by {per_step} in every step{ranks}",
        saving_bytes=None,
        risk=f"it went from {units.format_size(growth.first_bytes)} to "
        f"{units.format_size(growth.last_bytes)} within {growth.steps} steps after the recording",
        severe=True,
        confidence=0.7,
        advice="Find the line that keeps it: `traceloom record --memory --stacks -- …`, then "
        "`traceloom memory`. Usually a loss or a metric is kept with its graph: detach it.",
        evidence=(),
    )


def _find_highest_peaks(context: Context) -> Iterator[tuple[Trace, dict[str, Any]]]:
    """Yields the pool of each device of each process at its highest peak, in whichever window of
    the recording that was.
    """
    highest: dict[tuple[Any, ...], tuple[Trace, dict[str, Any]]] = {}
    for trace, allocations in context.allocations:
        process = context.session.process_of(trace)
        for row in allocations.pools.to_dicts():
            key = (process, row["device_type"], row["device"])
            if key not in highest or row["peak_bytes"] > highest[key][1]["peak_bytes"]:
                highest[key] = trace, row
    yield from highest.values()


def find_fragmentation(context: Context) -> Iterator[Message]:
    """Reports memory that the allocator holds and cannot give out."""
    for trace, row in _find_highest_peaks(context):
        if row["reserved_at_peak_bytes"] is not None:
            spare = row["reserved_at_peak_bytes"] - row["peak_bytes"]
            if spare > _MIN_FRAGMENTED_SHARE * row["reserved_at_peak_bytes"]:
                yield MemoryCandidate(
                    title=f"{units.format_size(spare)} of {units.format_size(row['reserved_at_peak_bytes'])} reserved are unused "
                    "at the peak",
                    saving_bytes=spare,
                    risk=None,
                    severe=False,
                    confidence=0.5,
                    advice="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; keep shapes constant.",
                    evidence=(Evidence("peak", trace.rank, row["peak_time_ns"]),),
                )


def find_nearly_full_memory(context: Context) -> Iterator[Message]:
    for trace, row in _find_highest_peaks(context):
        sizes = {
            d.get("device"): d.get("memory_bytes")
            for d in (trace.meta.capture or {}).get("devices") or []
        }
        capacity = sizes.get(row["device"]) if row["device_type"] != "cpu" else None
        used = max(row["peak_bytes"], row["reserved_at_peak_bytes"] or 0)
        if isinstance(capacity, int) and used > _NEARLY_FULL_SHARE * capacity:
            yield MemoryCandidate(
                title=f"{units.format_size(used)} of {units.format_size(capacity)} are taken at the peak",
                saving_bytes=None,
                risk="a larger batch, a longer sequence or fragmentation ends the run",
                severe=True,
                confidence=0.8,
                advice="See who holds it: traceloom memory; checkpoint activations, shard states, lower the batch.",
                evidence=(Evidence("peak", trace.rank, row["peak_time_ns"]),),
            )


MEMORY_RULES = (
    FindingRule("memory-growth", "memory grows with every step", find_memory_growth),
    FindingRule(
        "memory-fragmentation",
        "reserved memory that is not used",
        find_fragmentation,
        (_NOT_RECORDED,),
    ),
    FindingRule(
        "memory-nearly-full",
        "a device that is nearly full",
        find_nearly_full_memory,
        (_NOT_RECORDED,),
    ),
)
