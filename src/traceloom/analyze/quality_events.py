"""Checks of single events: shapes, stacks, lengths, nesting, categories, collectives, autograd numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import polars as pl

from traceloom.analyze.intervals import union
from traceloom.analyze.phases import OURS
from traceloom.analyze.recompute import ENGINE
from traceloom.analyze.remembered import of_each
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.analyze.verdict import QualityCheck, graded, many
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column
from traceloom.model.units import count, duration, share

_ENOUGH_IDS = 500  # operators
_SAMPLED = 0.05  # of the numbers are in the file: recorded traces have 13 % and more
ABSURD_NS = 24 * 3600 * 10**9
"""A span this long is no measurement: profiles last seconds, and overflowed counters give days."""


def missing_ops(trace: Trace) -> QualityCheck | None:
    """GPU work or calls without a single framework operator."""
    seen = _count(trace, *cat.GPU_WORK, *cat.LAUNCHES)
    if not seen:
        return None
    ops = _count(trace, cat.OP)
    message = (
        "no framework operators were recorded (the profiler's CPU activity was off): operators, modules and phases are "
        "unknown, only calls and GPU work are shown"
    )
    return QualityCheck(0 if ops else seen, seen, "warning", message, slug="no-operators")


def operators_left_out(trace: Trace) -> QualityCheck | None:
    """Operators that were numbered one by one, of which a file holds a few: what lies between them is unknown."""
    ids = trace.events["external_id"].filter(trace.events["category"] == cat.OP).drop_nulls()
    if ids.len() < _ENOUGH_IDS:
        return None
    numbered = int(ids.max()) - int(ids.min()) + 1  # type: ignore[arg-type]
    held = ids.n_unique()
    message = (
        f"{count(held)} operators are in the file, with numbers that are {count(numbered)} apart: the others were left "
        "out (a sampled trace), so that idle time, and time between operators, may be theirs"
    )
    return QualityCheck(numbered - held if held < _SAMPLED * numbered else 0, numbered, "warning", message,
                 slug="operators-left-out")  # fmt: skip


def missing_shapes(trace: Trace) -> QualityCheck | None:
    """Ops without the shapes of their inputs."""
    is_op = (trace.events["category"] == cat.OP).to_numpy() & ~vocabulary(trace).events(OURS)
    ops = int(is_op.sum())
    if not ops:
        return None
    shaped = np.zeros(is_op.size, dtype=np.bool_)
    shaped[trace.tensors["event"].to_numpy()] = True
    without = ops - int((is_op & shaped).sum())
    message = (
        f"{count(without)} of {count(ops)} operators have no input shapes: they cannot be distinguished by size; "
        "record with shapes to see them"
    )
    # where shapes are on, some operators still have no tensors to speak of
    affected = without if without == ops else 0
    return QualityCheck(affected, ops, "info", message, slug="missing-shapes")


def missing_stacks(trace: Trace) -> QualityCheck | None:
    """No Python frames: what runs between operators is unknown."""
    ops = _count(trace, cat.OP)
    if not ops:
        return None
    frames = _count(trace, cat.PYTHON)
    message = (
        "no Python stacks were recorded: host time between operators shows as unobserved, and modules only as far as "
        "annotations go; record with stacks to see them, at some cost"
    )
    return QualityCheck(0 if frames else ops, ops, "info", message, slug="missing-stacks")


def shortened_events(trace: Trace) -> QualityCheck | None:
    """Events that overran the one they lie in."""
    host = trace.lanes["lane"].filter(trace.lanes["kind"] == "host")
    on_host = np.isin(column(trace, "lane"), host.to_numpy())
    events = int(on_host.sum())
    if not events:
        return None
    over = column(trace, "start_ns") + column(trace, "duration_ns") - column(trace, "nested_end_ns")
    lost = over[on_host & (over > 0)]
    message = (
        f"{count(lost.size)} of {many(events, 'host event')} crossed another one and are cut short, by "
        f"{duration(int(lost.sum()))} in all, so that no time counts twice"
    )
    return QualityCheck(lost.size, events, graded(lost.size, events, 0.01), message, slug="crossing-spans")


def negative_durations(trace: Trace) -> QualityCheck | None:
    """Events that end before they start."""
    total = trace.events.height
    affected = int((trace.events["duration_ns"] < 0).sum())
    message = f"{many(affected, 'event')} with a negative duration, counted as 0 ns: the recording is damaged there"
    return QualityCheck(affected, total, "warning", message, slug="negative-duration") if total else None


def absurd_durations(trace: Trace) -> QualityCheck | None:
    """Events of a day and more."""
    total = trace.events.height
    affected = int((trace.events["duration_ns"] >= ABSURD_NS).sum())
    message = (
        f"{many(affected, 'event')} longer than a day, which is a counter that overflowed: the window of the trace "
        "and every share of it are wrong"
    )
    return QualityCheck(affected, total, "error", message, slug="absurd-duration") if total else None


def unknown_categories(trace: Trace) -> QualityCheck | None:
    """Events of a category that this version does not know."""
    total = trace.events.height
    unknown = trace.events["name"].filter(trace.events["category"] == cat.OTHER)
    names = ", ".join(sorted(unknown.unique().to_list())[:3])
    message = (
        f"{many(unknown.len(), 'event')} of a category unknown to this version of Traceloom (for example {names!r}): "
        "shown in the timeline, counted nowhere"
    )
    return QualityCheck(unknown.len(), total, "info", message, slug="unknown-category") if total else None


def profiler_overhead(trace: Trace) -> QualityCheck | None:
    """Time that the profiler says it took itself."""
    window = trace.end_ns - trace.start_ns
    if not window:
        return None
    own = trace.events["category"] == cat.OVERHEAD
    start, duration_ns = (trace.events[name].filter(own).to_numpy() for name in ("start_ns", "duration_ns"))
    taken = union(start, start + duration_ns).total
    message = (
        f"the profiler reports {many(start.size, 'pause')} of its own (flushing buffers, allocating them), "
        f"{duration(taken)} or {share(taken, window)} of the window: this time is not the program's"
    )
    return QualityCheck(start.size, trace.events.height, graded(taken, window, 0.05), message, slug="profiler-overhead")


_DETAILS = {"kind": "kind", "element_type": "type", "in_elements": "size", "group_size": "group"}


def collectives_without_details(trace: Trace) -> QualityCheck | None:
    """Collective calls that do not say what they move (rule 5 of PyTorch's trace validator)."""
    calls = np.flatnonzero(vocabulary(trace).events(r"^record_param_comms$"))
    if not calls.size:
        return None
    present = np.zeros((trace.events.height + 1, len(_DETAILS)), dtype=np.bool_)  # of each event, and of none
    events = trace.collectives["event"].to_numpy()
    details = trace.collectives.select(pl.col(list(_DETAILS)).is_not_null()).to_numpy()
    np.logical_or.at(present, events, details)
    # what a call does not say itself, an annotation inside it may: `nccl:all_reduce`
    np.logical_or.at(present, column(trace, "parent", -1)[events], details)
    missing = ~present[calls]
    lacking = dict(zip(_DETAILS.values(), missing.sum(axis=0).tolist(), strict=True))
    counts = {word: number for word, number in lacking.items() if number}
    parts = [f"{', '.join(w for w, n in counts.items() if n == number)} in {count(number)}" for number in
             sorted(set(counts.values()), reverse=True)]  # fmt: skip
    affected = int(missing.any(axis=1).sum())
    message = (
        f"{count(affected)} of {count(calls.size)} collective calls do not say all that they move (missing: "
        f"{'; '.join(parts)}; an older PyTorch, or shapes were off): bytes and bandwidth of these may be unknown"
    )
    return QualityCheck(affected, calls.size, "info", message, slug="collectives-without-details")


def ambiguous_backward(trace: Trace) -> QualityCheck | None:
    """Sequence numbers with more than one backward op (rule 6 of PyTorch's trace validator)."""
    names = _names_of_sequence_numbers(trace)
    if not names.len():
        return None
    affected = int((names > 1).sum())
    message = (
        f"{count(affected)} of {count(names.len())} autograd sequence numbers belong to several backward operators: "
        "the forward operator of these is uncertain"
    )
    return QualityCheck(affected, names.len(), "info", message, slug="ambiguous-backward")


@of_each
def _names_of_sequence_numbers(traces: Sequence[Trace]) -> Iterable[pl.Series]:
    """For each sequence number of the backward pass how many names its nodes have."""
    parts = []
    for trace in traces:
        nodes = np.flatnonzero(vocabulary(trace).events(ENGINE) & (column(trace, "sequence", -1) >= 0))
        parts.append(trace.events[["name", "process", "forward_thread", "sequence"]][nodes])
    keys = [TRACE, "process", "forward_thread", "sequence"]
    names = stacked(parts).group_by(keys, maintain_order=True).agg(pl.col("name").n_unique())
    return [of_trace["name"] for of_trace in unstacked(names, traces)]


def _count(trace: Trace, *categories: str) -> int:
    return int(np.isin(column(trace, "category"), [cat.CATEGORIES.index(name) for name in categories]).sum())


EVENT_CHECKS: tuple[Callable[[Trace], QualityCheck | None], ...] = (
    missing_ops,
    operators_left_out,
    missing_shapes,
    missing_stacks,
    shortened_events,
    negative_durations,
    absurd_durations,
    unknown_categories,
    profiler_overhead,
    collectives_without_details,
    ambiguous_backward,
)
