"""What is true of a run of a made job, told from its spans and from runs without its faults: never from its traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from support.jobs.layout import Group
from support.jobs.simulation import Span

_TEXTS = ("kind", "group", "role")
_COLLECTIVES = {
    name: pl.String if name in _TEXTS else pl.Int64
    for name in (
        "instance",
        "kind",
        "group",
        "role",
        "sequence",
        "rank",
        "source",
        "target",
        "peer",
        "step",
        "in_bytes",
        "out_bytes",
        "stream",
        "correlation",
        "launch_ns",
        "arrival_ns",
        "end_ns",
        "wait_ns",
        "transfer_ns",
        "last_rank",
        "skew_ns",
    )
}
_STEPS = {
    "step": pl.Int64,
    "rank": pl.Int64,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "length_ns": pl.Int64,
    "bubble_ns": pl.Int64,
    "bubble_wait_ns": pl.Int64,
    "compute_ns": pl.Int64,
    "kernel_count": pl.Int64,
}
_BYTES = {"BFloat16": 2, "Float": 4}
_COMPUTE = 7


@dataclass(frozen=True)
class Truth:
    """The truth of a run; times in ns of the job's true clock.

    Attributes:
        spans: Everything that happened.
        groups: The process groups of the job.
        labels: Of its faults.
        without: Runs the job without the faults of these labels and gives the spans of that run.
    """

    spans: Sequence[Span]
    groups: Sequence[Group]
    labels: tuple[str, ...]
    without: Callable[[str], Sequence[Span]]

    @cached_property
    def steps(self) -> pl.DataFrame:
        """One row per rank and step.

        A step begins with its annotation and ends where the next one begins, the last one with its own annotation.
        `compute_ns` is the union of its work that is not communication (by the launches in the step), `bubble_ns` the
        time when the rank stood in a `recv` and computed nothing, `bubble_wait_ns` the part of it before the sender
        had come too.
        """
        rows = []
        for rank, spans in _by_rank(self.spans).items():
            starts = _step_starts(spans)
            step_of = _places(spans)
            for number, (step, start, end) in enumerate(starts):
                stop = starts[number + 1][1] if number + 1 < len(starts) else end
                device_spans = [
                    span
                    for span in spans
                    if span.stream is not None and step_of[span.correlation] == step
                ]
                compute = _union((s.start, s.end) for s in device_spans if "meeting" not in s.args)
                receives = [
                    s
                    for s in device_spans
                    if "meeting" in s.args and s.args["meeting"].kind == "recv"
                ]
                receiving = _union((s.start, s.end) for s in receives)
                waited = _union((s.start, s.args["met"]) for s in receives)
                rows.append(
                    {
                        "step": step,
                        "rank": rank,
                        "start_ns": start,
                        "end_ns": stop,
                        "length_ns": stop - start,
                        "bubble_ns": _left(receiving, compute),
                        "bubble_wait_ns": _left(waited, compute),
                        "compute_ns": _length(compute),
                        "kernel_count": sum(s.kind == "kernel" for s in device_spans),
                    }
                )
        return pl.DataFrame(rows, schema=_STEPS).sort("step", "rank")

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """One row per rank's part of a communication; `instance` numbers the communications by when all had come.

        `arrival_ns` is the start of the part's kernel, `wait_ns` how long it stood there until the last one came
        (`last_rank`), `transfer_ns` from then to its own end, `skew_ns` from the first to the last arrival.
        """
        return pl.DataFrame(
            _collectives(self.spans, {group.name: group.role for group in self.groups}),
            schema=_COLLECTIVES,
        )

    @cached_property
    def causes(self) -> pl.DataFrame:
        """How much waiting at each communication is there because of each fault.

        Columns: `instance`, `label`, `saved_ns` (waiting of all ranks, with the fault less without it), `wait_ns`.
        """
        waits = self._waits(self.collectives)
        rows = [
            waits.head(0).select(
                "instance",
                pl.lit("").alias("label"),
                pl.col("wait_ns").alias("saved_ns"),
                "wait_ns",
            )
        ]
        roles = {group.name: group.role for group in self.groups}
        for label in self.labels:
            other = self._waits(
                pl.DataFrame(_collectives(self.without(label), roles), schema=_COLLECTIVES)
            )
            both = waits.join(other, on=_KEY, suffix="_without", maintain_order="left")
            rows.append(
                both.select(
                    "instance",
                    pl.lit(label).alias("label"),
                    (pl.col("wait_ns") - pl.col("wait_ns_without")).alias("saved_ns"),
                    "wait_ns",
                )
            )
        return pl.concat(rows)

    @cached_property
    def why(self) -> pl.DataFrame:
        """The fault that most of the waiting at each communication is there for: `instance`, `label`, `saved_ns`.

        Communications of whose waiting no fault explains half are not there.
        """
        return (
            self.causes.filter(
                (pl.col("saved_ns") > 0) & (2 * pl.col("saved_ns") > pl.col("wait_ns"))
            )
            .sort("instance", "saved_ns", descending=[False, True])
            .unique("instance", keep="first", maintain_order=True)
            .select("instance", "label", "saved_ns")
        )

    @cached_property
    def window_ns(self) -> int:
        """From the first start to the last end over all ranks."""
        return _window(self.spans)

    @cached_property
    def costs(self) -> dict[str, int]:
        """By label of a fault: by how much the run is longer than without it."""
        return {label: self.window_ns - _window(self.without(label)) for label in self.labels}

    @staticmethod
    def _waits(parts: pl.DataFrame) -> pl.DataFrame:
        return parts.group_by(_KEY, maintain_order=True).agg(
            pl.col("instance").first(), pl.col("wait_ns").sum()
        )


_KEY = ["group", "role", "sequence", "source", "target"]


def _window(spans: Sequence[Span]) -> int:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _by_rank(spans: Iterable[Span]) -> dict[int, list[Span]]:
    out: dict[int, list[Span]] = {}
    for span in spans:
        out.setdefault(span.rank, []).append(span)
    return dict(sorted(out.items()))


def _step_starts(spans: Iterable[Span]) -> list[tuple[int, int, int]]:
    """Number, start and end of each step's annotation."""
    marks = [
        span
        for span in spans
        if span.kind == "annotation" and span.name.startswith("ProfilerStep#")
    ]
    return sorted((int(span.name.rpartition("#")[2]), span.start, span.end) for span in marks)


def _places(spans: Sequence[Span]) -> dict[int | None, int]:
    """By correlation: the step in which the work was launched; -1 after the last."""
    starts = _step_starts(spans)
    out: dict[int | None, int] = {}
    for span in spans:
        if span.kind == "call":
            inside = [step for step, start, end in starts if start <= span.start < end]
            out[span.correlation] = inside[0] if inside else -1
    return out


def _collectives(spans: Sequence[Span], roles: dict[str, str]) -> list[dict[str, Any]]:
    by_key: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.stream is not None and "meeting" in span.args:
            by_key.setdefault(span.args["meeting"].key, []).append(span)
    places = {rank: _places(rank_spans) for rank, rank_spans in _by_rank(spans).items()}
    launches = {(s.rank, s.correlation): s.start for s in spans if s.kind == "call"}
    rows = []
    ordered = sorted(
        by_key.values(), key=lambda parts: (parts[0].args["met"], parts[0].args["meeting"].key)
    )
    for instance, parts in enumerate(ordered):
        last = max(parts, key=lambda part: (part.start, part.rank))
        first = min(part.start for part in parts)
        for part in sorted(parts, key=lambda part: part.rank):
            meeting = part.args["meeting"]
            size = _BYTES[meeting.element_type]
            message = meeting.kind in ("send", "recv")
            source, target = meeting.members[:2] if message else (-1, -1)
            peer = target if part.rank == source else source
            rows.append(
                {
                    "instance": instance,
                    "kind": meeting.kind,
                    "group": meeting.group,
                    "role": roles.get(meeting.group, ""),
                    "sequence": meeting.sequence,
                    "rank": part.rank,
                    "source": source,
                    "target": target,
                    "peer": peer if message else None,
                    "step": places[part.rank][part.correlation],
                    "in_bytes": meeting.elements * size,
                    "out_bytes": (
                        meeting.elements if meeting.out_elements is None else meeting.out_elements
                    )
                    * size,
                    "stream": part.stream,
                    "correlation": part.correlation,
                    "launch_ns": launches[part.rank, part.correlation],
                    "arrival_ns": part.start,
                    "end_ns": part.end,
                    "wait_ns": last.start - part.start,
                    "transfer_ns": part.end - last.start,
                    "last_rank": last.rank,
                    "skew_ns": last.start - first,
                }
            )
    return rows


Spans = list[tuple[int, int]]


def _union(spans: Iterable[tuple[int, int]]) -> Spans:
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _length(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def _left(spans: Spans, without: Spans) -> int:
    """Length of the first outside the second."""
    return _length(_union([*spans, *without])) - _length(without)
