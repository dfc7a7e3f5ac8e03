"""Counts what a GPU did in a Kineto file by plain loops, with nothing of Traceloom.

Prints or returns, for a file: the period of each step on the device, the share in which any device
work runs, the idle time between its first and last work, and the ten kernels with most time.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

WORK = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
CALLS = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime"}
STEP = re.compile(r"ProfilerStep#\s*(\d+)$")


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events with a duration."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    document = json.loads(text.decode("utf-8", "replace"), strict=False, parse_float=Decimal)
    events = document if isinstance(document, list) else document["traceEvents"]
    return [
        event
        for event in events
        if event.get("ph") == "X" and not (event["ts"] == 0 and event.get("dur") == 0)
    ]


def ns(us: Decimal | str) -> int:
    """Microseconds of the file as nanoseconds."""
    return round(Decimal(us) * 1000)


def merge(spans: list[tuple[int, int]]) -> int:
    """Returns the length of the union of spans."""
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total += end - start
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def find_steps(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Returns start and end of each profiler step: to the start of the next one, the last by itself.

    The rest of the profile after the last call of `step` is none: it has hardly an operator.
    """
    lanes: dict[Any, dict[int, tuple[int, int]]] = defaultdict(dict)
    for event in events:
        match = STEP.match(event.get("name", ""))
        if match and event.get("cat", "").lower() in {"user_annotation", "cpu_op", "operator"}:
            start = ns(event["ts"])
            lanes[event["pid"], event["tid"]][start] = (start, start + ns(event["dur"]))
    if not lanes:
        return []
    thread = max(lanes, key=lambda lane: len(lanes[lane]))
    spans = sorted(lanes[thread].values())
    starts = [start for start, _ in spans]
    steps = list(zip(starts, [*starts[1:], spans[-1][1]], strict=True))
    begun = [
        ns(event["ts"])
        for event in events
        if event.get("cat", "").lower() in {"cpu_op", "operator"}
        and (event["pid"], event["tid"]) == thread
        and not STEP.match(event["name"])
    ]
    counts = [sum(start <= time < end for time in begun) for start, end in steps]
    is_rest = len(steps) > 1 and all(10 * counts[-1] < count for count in counts[:-1])
    return steps[:-1] if is_rest else steps


def count(path: Path) -> dict[str, Any]:
    """Returns the plain figures of a file; times in nanoseconds."""
    events = read_events(path)
    work: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    called: dict[int, int] = {}
    for event in events:
        category, args = str(event.get("cat", "")).lower(), event.get("args") or {}
        if category in WORK:
            work[args.get("device", event["pid"])].append(event)
        elif category in CALLS and "correlation" in args:
            called.setdefault(args["correlation"], ns(event["ts"]))
    devices = {}
    names: dict[str, int] = defaultdict(int)
    for device, pieces in work.items():
        spans = [(ns(piece["ts"]), ns(piece["ts"]) + ns(piece["dur"])) for piece in pieces]
        window = max(end for _, end in spans) - min(start for start, _ in spans)
        busy = merge(spans)
        devices[str(device)] = {"window_ns": window, "busy_ns": busy, "idle_ns": window - busy}
        for piece in pieces:
            if piece["cat"].lower() == "kernel":
                names[piece["name"]] += ns(piece["dur"])
    steps = find_steps(events)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for piece in (piece for pieces in work.values() for piece in pieces):
        launch = called.get((piece.get("args") or {}).get("correlation", -1))
        number = next(
            (n for n, (a, b) in enumerate(steps) if launch is not None and a <= launch < b), None
        )
        if number is not None:
            start = ns(piece["ts"])
            first[number] = min(first.get(number, start), start)
            last[number] = max(last.get(number, 0), start + ns(piece["dur"]))
    periods = [
        last[number] - (last.get(number - 1, first[number]) if number else first[number])
        for number in sorted(last)
    ]
    host = [end - start for start, end in steps]
    lags = [max(end - steps[number][1], 0) for number, end in last.items()]
    return {
        "devices": devices,
        "periods_ns": periods,
        "step_ns": None
        if not steps
        else median(periods)
        if len(periods) == len(steps)
        and median(periods) > 1.05 * median(host)
        and median(lags) > 0.05 * median(host)
        else median(host),
        "kernels": sorted(names.items(), key=lambda item: (-item[1], item[0]))[:10],
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, json.dumps(count(Path(name)), indent=1))
