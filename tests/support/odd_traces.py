"""Traces drawn by chance in which everything crosses everything, as rows for references that look at each of them."""

from __future__ import annotations

import copy
import random
import re
from collections import deque
from functools import cache
from itertools import pairwise
from typing import Any

from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

SEEDS = tuple(range(8))
Row = dict[str, Any]

_OPS = (
    "aten::mm",
    "aten::to",
    "aten::copy_",
    "aten::add",
    "traceloom.scope:block",
    "c10d::allreduce_",
)
_FRAMES = ("train.py(3): step", "model.py(8): forward", "train.py(9): loss")
_REGIONS = ("region", "gloo:all_reduce", "## forward ##")
_CALLS = ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaMalloc")
_KERNELS = (
    "gemm",
    "vectorized_elementwise_kernel<add>",
    "ncclDevKernel_AllReduce_Sum",
    "softmax",
    "日本 <b>&\"'",
)
_SHAPES = (None, [[4, 4], [4, 4]], [[8, 2], [2, 8]], [[4, 4], []])
_DIRECTIONS = (
    "HtoD (Pageable -> Device)",
    "HtoD (Pinned -> Device)",
    "DtoH (Device -> Pinned)",
    "DtoD (Device -> Device)",
)
_END = 400_000  # ns
_STEP = re.compile(r"^(?:ProfilerStep|traceloom\.step)#(\d+)$")


class Changed(TraceBuilder):
    """The same program at another time, on a clock of another speed, or with its two devices exchanged."""

    shift_us, scale, exchanged = 0.0, 1, False

    def _add(
        self,
        phase: str,
        category: str | None,
        name: str,
        time_us: float,
        duration_us: float | None,
        process: Any,
        thread: Any,
        args: dict[str, Any] | None,
    ) -> TraceBuilder:
        if args is not None and self.exchanged and "device" in args:
            process = args["device"] = 1 - args["device"]
        long = None if duration_us is None else duration_us * self.scale
        return super()._add(
            phase, category, name, self.shift_us + time_us * self.scale, long, process, thread, args
        )

    def shuffled(self, seed: int) -> Changed:
        """The same events in another order of the file; those of one time stay in theirs, which has a meaning."""
        times = [event["ts"] for event in self._events]
        random.Random(seed).shuffle(times)
        of_time: dict[int, deque[Row]] = {time: deque() for time in times}
        for event in self._events:
            of_time[event["ts"]].append(event)
        self._events = [of_time[time].popleft() for time in times]
        return self

    def without_device(self, device: int) -> Changed:
        """What is left when nothing ran on one of the devices."""
        self._events = [
            event for event in self._events if self._args(event).get("device") != device
        ]
        return self

    def renumbered(self, seed: int) -> Changed:
        """The same events, joined by other correlation numbers."""
        joined = {
            number
            for event in self._events
            if (number := self._args(event).get("correlation")) is not None
        }
        other = dict(
            zip(
                sorted(joined),
                random.Random(seed).sample(range(1, 10_000), len(joined)),
                strict=True,
            )
        )
        for event in self._events:
            if event.get("id") in other:
                event["id"] = other[event["id"]]
            if self._args(event).get("correlation") is not None:
                event["args"]["correlation"] = other[event["args"]["correlation"]]
        return self

    def again(self, later_us: float) -> Changed:
        """The same events, and all of them a second time so much later, with numbers of their own."""
        calls = 1 + max(self._args(event).get("correlation") or 0 for event in self._events)
        steps = [int(number) for event in self._events for number in _STEP.findall(event["name"])]
        after = 1 + max(steps, default=-1)

        def numbered_on(match: re.Match[str]) -> str:
            return match[0].replace(match[1], str(int(match[1]) + after))

        for event in copy.deepcopy(self._events):
            event["ts"] += round(later_us * 1000)
            event["name"] = _STEP.sub(numbered_on, event["name"])
            if "id" in event:
                event["id"] += calls
            if self._args(event).get("correlation") is not None:
                event["args"]["correlation"] += calls
            self._events.append(event)
        return self

    def _args(self, event: Row) -> Row:
        return event["args"] or {}


@cache
def odd_trace(
    seed: int, *, shift_us: float = 0.0, scale: int = 1, exchanged: bool = False
) -> Trace:
    """The trace of `odd_builder`."""
    return odd_builder(seed, shift_us=shift_us, scale=scale, exchanged=exchanged).build()


def odd_builder(
    seed: int, *, shift_us: float = 0.0, scale: int = 1, exchanged: bool = False, rank: int = 0
) -> Changed:
    """Three threads of nested events, two devices with three streams each, orphans, graphs, steps of several kinds.

    Seeds 0 and 4 have no steps, 1 and 5 steps side by side, 2 and 6 steps with holes, 3 and 7 steps that begin late.
    Seed 7 holds no GPU work at all.
    """
    chance = random.Random(seed)
    builder = Changed(rank, devices=2, generation="2026" if seed % 2 else "2024")
    builder.shift_us, builder.scale, builder.exchanged = shift_us, scale, exchanged
    correlations: list[int] = []
    for thread in (1, 2, 3):
        _nest(
            chance,
            builder,
            thread,
            chance.randrange(20_000),
            _END - chance.randrange(20_000),
            0,
            correlations,
        )
    if seed != 7:
        _work(chance, builder, correlations)
    bounds = sorted(chance.sample(range(10, 380), 5))
    if seed % 4 == 1:
        for number, (low, high) in enumerate(pairwise(bounds)):
            builder.step(number, low, high - low, thread=4)
    elif seed % 4 == 2:
        for number, (low, high) in enumerate(zip(bounds[::2], bounds[1::2], strict=False)):
            builder.step(10 * number, low, high - low, thread=4)
    elif seed % 4 == 3:
        for number, low in enumerate(bounds[2:]):
            builder.mark(number + 5, low, thread=4)
    return builder


def rows_of(trace: Trace) -> list[Row]:
    """The events as dictionaries, with `end_ns` (clipped to the parent's on the host, never before the start)."""
    rows = trace.events.to_dicts()
    for row in rows:
        row["name"], row["category"] = str(row["name"]), str(row["category"])
        end = (
            row["nested_end_ns"]
            if row["device"] is None
            else row["start_ns"] + max(row["duration_ns"], 0)
        )
        row["end_ns"] = end
        row["ns"] = end - row["start_ns"]
    return rows


def gpu_rows_of(trace: Trace) -> list[Row]:
    """The kernels, copies and fills among `rows_of`."""
    return [row for row in rows_of(trace) if row["category"] in ("kernel", "copy", "fill")]


def above(rows: list[Row], row: Row | None) -> list[Row]:
    """The events around an event, the innermost first; the event itself is not among them."""
    around: list[Row] = []
    while row is not None and row["parent"] is not None:
        row = rows[row["parent"]]
        around.append(row)
    return around


def covered(spans: list[tuple[int, int]], low: int | None = None, high: int | None = None) -> int:
    """Time in at least one of the spans, between `low` and `high` where these are given."""
    total, reach = 0, low
    for start, end in sorted(spans):
        if reach is not None:
            start = max(start, reach)  # noqa: PLW2901
        end = end if high is None else min(end, high)  # noqa: PLW2901
        if end > start:
            total, reach = total + end - start, end
    return total


def _nest(
    chance: random.Random,
    builder: TraceBuilder,
    thread: int,
    low: int,
    high: int,
    depth: int,
    launched: list[int],
) -> None:
    """Fill a part of a thread with events, and some of these with others."""
    at = low + chance.randrange(1 + (high - low) // 8)
    while at < high - 500:
        length = chance.randrange(200, max((high - low) // (2 if depth < 2 else 4), 400))
        end = min(at + length, high)
        start_us, long_us = at / 1000, (end - at) / 1000
        kind = chance.choice(["op", "op", "python", "annotation", "launch" if depth else "op"])
        if kind == "op":
            builder.op(
                chance.choice(_OPS), start_us, long_us, thread=thread, shapes=chance.choice(_SHAPES)
            )
        elif kind == "launch":
            launched.append(len(launched) + 1)
            name = chance.choice([*_CALLS, "cudaGraphLaunch"])
            builder.launch(name, start_us, long_us, correlation=launched[-1], thread=thread)
        elif kind == "python":
            builder.python(chance.choice(_FRAMES), start_us, long_us, thread=thread)
        else:
            builder.annotation(chance.choice(_REGIONS), start_us, long_us, thread=thread)
        if kind != "launch" and depth < 4:
            _nest(chance, builder, thread, at, end, depth + 1, launched)
        at = end + chance.randrange(0, 1 + (high - low) // 6)


def _work(chance: random.Random, builder: TraceBuilder, launched: list[int]) -> None:
    """Up to four pieces of work for each launch, and some for none."""
    for correlation in [*launched, *[None] * 6]:
        device, stream = chance.choice([(0, 7), (0, 7), (0, 20), (1, 7), (1, 13)])
        at = chance.randrange(_END)
        for _ in range(chance.choice([0, 1, 1, 1, 2, 4])):
            long = chance.choice([0, chance.randrange(900), chance.randrange(1, 25_000)])
            where: Any = {"stream": stream, "device": device, "correlation": correlation}
            kind = chance.choice(["kernel", "kernel", "kernel", "copy", "fill"])
            if kind == "kernel":
                builder.kernel(chance.choice(_KERNELS), at / 1000, long / 1000, **where)
            elif kind == "copy":
                name = f"Memcpy {chance.choice(_DIRECTIONS)}"
                builder.copy(
                    name, at / 1000, long / 1000, bytes=chance.randrange(1, 1 << 22), **where
                )
            else:
                builder.fill(at / 1000, long / 1000, bytes=chance.randrange(1, 1 << 16), **where)
            at += long + chance.choice([0, 400, chance.randrange(20_000)])
