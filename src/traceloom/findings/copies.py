"""Copies that need not be, or that computing could hide."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.analyze.stacked import stacked
from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.findings.wording import brief
from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.finding import Abstention
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_LEAST_BYTES = 4096  # less is a value that is read, not data that is moved
_LEAST_SHARE = 0.02
_HOST = ("HtoD", "DtoH")


def _copies(context: Context) -> pl.DataFrame:
    """Copies of all traces, of each in order: trace, event, kind, bytes, start_ns, duration_ns, op, launch, step."""
    columns = ["start_ns", "duration_ns", "op", "launch", "step"]
    copies = (trace.copies.hstack(trace.events[columns][trace.copies["event"]]) for trace in context.traces)
    return stacked(copies).sort("trace", "start_ns")


def _between_host_and_device(context: Context) -> pl.DataFrame:
    """Those that move data between host and device."""
    data = pl.col("kind").is_in(list(_HOST)) & (pl.col("bytes") >= _LEAST_BYTES)
    return context.ask(context, _copies).filter(data)


def back_and_forth(context: Context) -> Iterator[Said]:
    """The same number of bytes goes to the host and comes back."""
    if not context.of_kind(gs.COPY).any():
        if not context.on_device:
            yield Abstention("needless-copies", "no GPU work was recorded")
        return
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    pairs = 0
    copies = context.in_step(_between_host_and_device(context))
    for trace, of_trace in context.by_trace(copies):
        # a copy to the host, and the next copy of as many bytes back
        paired: list[int] = []
        waiting: dict[int, list[int]] = {}
        for event, kind, size in of_trace[["event", "kind", "bytes"]].iter_rows():
            if kind == "DtoH":
                waiting.setdefault(size, []).append(event)
            elif waiting.get(size):
                paired += [waiting[size].pop(0), event]
        pairs += len(paired) // 2
        rows = pl.Series(paired, dtype=pl.UInt32)
        calls = trace.events["launch"][rows]
        mask |= context.nodes_of(trace, pl.concat([rows, calls.cast(pl.UInt32)]))
    if not pairs or not mask.any():
        return
    on_device = mask & context.of_kind(gs.COPY)
    chosen = Chosen("copies to the host and back", mask, "copies")
    yield Candidate(
        title=f"{units.count(pairs)} times data goes to the host and as many bytes come back: "
        f"{units.duration(context.work_ns(on_device))} of copying{context.over_ranks}",
        changes=(Change("drop", chosen), Change("remove", chosen)),
        confidence=0.5,
        advice="Keep it on the device: no `.cpu()`, `.numpy()` or `.to('cpu')` between two operations of the device.",
        evidence=context.evidence(on_device),
    )


def on_the_device(context: Context) -> Iterator[Said]:
    """Copies from the device to itself."""
    by_op: dict[str, int] = {}
    copies = context.ask(context, _copies).filter(pl.col("kind") == "DtoD")
    mask = context.nodes_of_all(copies)
    for number, op, duration_ns in copies.group_by("trace", "op").agg(pl.col("duration_ns").sum()).iter_rows():
        names, parents = (context.traces[number].events[column] for column in ("name", "parent"))
        name = "no operator" if op is None else names[op]
        if name == "aten::copy_" and parents[op] is not None:  # who asked for the copy
            name = names[parents[op]]
        by_op[brief(name)] = by_op.get(brief(name), 0) + duration_ns
    mask &= context.of_kind(gs.COPY)
    time = context.work_ns(mask)
    if not mask.any() or time < _LEAST_SHARE * context.whole_ns * max(context.rank_count, 1):
        return
    most = max(by_op, key=lambda name: by_op[name])
    own = context.own(mask)
    yield Candidate(
        title=f"{context.many(int(own.sum()))} copies inside the device take {context.in_words(context.work_ns(own))}, "
        f"most of it in {most}{context.over_ranks}",
        changes=(Change("remove", Chosen("copies inside the device", mask, "copies")),),
        confidence=0.3,
        advice="Avoid clones and changes of layout: write in place or into preallocated tensors, keep one memory "
        "format, do not clone inputs of compiled or graphed functions that are never modified.",
        evidence=context.evidence(mask),
    )


def exposed(context: Context) -> Iterator[Said]:
    """Copies between host and device while nothing computes."""
    mask = context.nodes_of_all(_between_host_and_device(context)) & context.of_kind(gs.COPY)
    if context.exposed_ns(mask) < _LEAST_SHARE * context.whole_ns:
        return
    own = context.own(mask)
    alone = context.exposed_ns(own)
    size = int(context.graph.nodes["bytes"].to_numpy()[own].sum()) // context.step_count if own.any() else 0
    yield Candidate(
        title=f"nothing is computed during {context.in_words(alone)} of copying between host and device "
        f"({units.size(size)}{context.over_ranks})",
        changes=(Change("overlap", Chosen("copies between host and device, beside computing", mask, "copies")),),
        confidence=0.4,
        advice="Copy the next batch on a stream of its own while this one is computed: pinned memory, "
        "`non_blocking=True`, a prefetching loader.",
        evidence=context.evidence(mask),
    )


RULES = (
    FindingRule("needless-copies", "data goes to the host and comes back", back_and_forth),
    FindingRule("device-copies", "copies from the device to itself", on_the_device),
    FindingRule("exposed-copies", "copies not overlapped by compute", exposed),
)
