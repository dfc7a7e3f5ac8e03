"""Whose memory is it: ten million allocation events, and what recording them costs.

    python benchmarks/memory.py [--events 10000000] [--no-recording]

The events are made in memory as those of a training run: operators in nested scopes, each with
blocks that die at once, at the end of the step, or never. Pairing, naming, categories and the tree
at the peak are timed together (processor time), then the CSV file; memory is what is resident
beyond the trace itself, at its highest. Then one training step, with and without recording of
allocations, with module scopes and without; and an empty scope while nothing records.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.memory_answers import build_allocations, explain
from traceloom.analyze.memory_owners import iterate_block_tables
from traceloom.trace.trace import SCHEMAS, Meta, Trace, build_empty_frame

LIMIT_SECONDS = 20
LIMIT_SCOPE_US = 1.0
PER_OP = 5  # events of allocation for each operator
OPS_PER_SCOPE, SCOPES_PER_STEP = 8, 250


def made(events: int) -> Trace:
    """A trace of one thread: steps, scopes in them, operators in these, allocations and frees in
    those.
    """
    ops = events // PER_OP
    scopes = -(-ops // OPS_PER_SCOPE)
    steps = -(-scopes // SCOPES_PER_STEP)
    op_start = np.arange(ops, dtype=np.int64) * 1000 + 100
    scope_of = np.arange(ops) // OPS_PER_SCOPE
    scope_start = np.arange(scopes, dtype=np.int64) * OPS_PER_SCOPE * 1000 + 50
    step_start = np.arange(steps, dtype=np.int64) * SCOPES_PER_STEP * OPS_PER_SCOPE * 1000
    spans = [
        (step_start, SCOPES_PER_STEP * OPS_PER_SCOPE * 1000, 0),
        (scope_start, OPS_PER_SCOPE * 1000 - 60, 1),
        (op_start, 900, 2),
    ]
    start = np.concatenate([one for one, _, _ in spans])
    end = np.concatenate([one + length for one, length, _ in spans])
    depth = np.concatenate([np.full(one.size, level, dtype=np.uint16) for one, _, level in spans])
    order = np.lexsort((depth, start))
    place = np.empty(order.size, dtype=np.int64)
    place[order] = np.arange(order.size)
    above = np.concatenate(
        [np.full(steps, -1), place[np.arange(scopes) // SCOPES_PER_STEP], place[steps + scope_of]]
    )[order]
    names = [f"traceloom.step#{k}" for k in range(steps)]
    names += [f"traceloom.module:Net.blocks.{k % 24}" for k in range(scopes)]
    names += [f"aten::op{k}" for k in range(12)] * (ops // 12 + 1)
    category = np.concatenate(
        [np.zeros(steps + scopes, dtype=np.int64), np.ones(ops, dtype=np.int64)]
    )[order]
    step = (start[order] // (SCOPES_PER_STEP * OPS_PER_SCOPE * 1000)).astype(np.int32)
    frame = build_empty_frame("events")
    count = order.size
    columns: dict[str, Any] = {
        name: pl.repeat(None, count, dtype=kind, eager=True) for name, kind in frame.schema.items()
    }
    columns |= {
        "event": np.arange(count, dtype=np.uint32),
        "name": pl.Series(names[:count]).gather(order),
        "category": pl.Series(["annotation", "op"], dtype=SCHEMAS["events"]["category"]).gather(
            category
        ),
        "start_ns": start[order],
        "duration_ns": (end - start)[order],
        "nested_end_ns": end[order],
        "lane": np.zeros(count, dtype=np.uint32),
        "process": np.ones(count, dtype=np.int64),
        "thread": np.ones(count, dtype=np.int64),
        "parent": pl.Series(above).replace(-1, None),
        "depth": depth[order],
        "step": step,
    }
    lanes = pl.DataFrame(
        {
            "lane": [0],
            "kind": ["host"],
            "process": ["1"],
            "thread": ["1"],
            "device": [None],
            "stream": [None],
            "name": ["main thread"],
            "events": [count],
            "busy_ns": [int(end.max())],
        },
        schema=SCHEMAS["lanes"],
    )
    marks = pl.DataFrame(
        {
            "step": np.arange(steps),
            "start_ns": step_start,
            "end_ns": np.append(step_start[1:], end.max()),
        }
    )
    frames = {name: build_empty_frame(name) for name in SCHEMAS}
    frames |= {
        "events": pl.DataFrame(columns).select(frame.columns).cast(dict(frame.schema)),
        "lanes": lanes,
        "steps": marks.select(
            *(
                pl.col(name) if name in marks.columns else pl.lit(None).alias(name)
                for name in SCHEMAS["steps"]
            )
        ).cast(dict(SCHEMAS["steps"])),
        "allocations": _allocations(ops, op_start, place[steps + scopes :]),
    }
    return Trace(Meta("made"), **frames)


def _allocations(ops: int, start: np.ndarray, row: np.ndarray) -> pl.DataFrame:
    """In each operator a block that dies at once, one that dies in the next operator, and one in
    twenty that stays.
    """
    number = np.arange(ops, dtype=np.int64)
    sizes = 512 * (1 + number % 97)
    address = 1 << 40
    stays = number % 20 == 0
    rows = [
        (start + 10, address + number % 64 * 4096, sizes),
        (start + 20, address + number % 64 * 4096, -sizes),
        (start + 30, 2 * address + number * 4096, sizes + 512),
        (start + 40, 3 * address + number * 4096, np.where(stays, 64, 128)),
        (
            start + np.where(stays, 60, 50),
            np.where(stays, 4, 3) * address + number * 4096,
            np.where(stays, 32, -128),
        ),
    ]
    time_ns = np.concatenate([one[0] for one in rows])
    where = np.concatenate([one[1] for one in rows])
    size = np.concatenate([one[2] for one in rows])
    inside = np.tile(row, len(rows))
    # the third block of an operator dies in the operator after the next
    late = np.flatnonzero(number % 2 == 0)[:-2]
    time_ns[2 * ops + late + 1] = start[late + 1] + 30
    where[2 * ops + late + 1] = where[2 * ops + late]
    size[2 * ops + late + 1] = -size[2 * ops + late]
    order = np.argsort(time_ns, kind="stable")
    return pl.DataFrame(
        {
            "time_ns": time_ns[order],
            "address": where[order].astype(np.uint64),
            "bytes": size[order],
            "device_type": pl.repeat("cpu", order.size, eager=True),
            "device": np.full(order.size, -1, dtype=np.int32),
            "allocated_bytes": pl.repeat(None, order.size, dtype=pl.Int64, eager=True),
            "reserved_bytes": pl.repeat(None, order.size, dtype=pl.Int64, eager=True),
            "process": np.ones(order.size, dtype=np.int64),
            "thread": np.ones(order.size, dtype=np.int64),
            "op": inside[order].astype(np.uint32),
            "step": (time_ns[order] // (SCOPES_PER_STEP * OPS_PER_SCOPE * 1000)).astype(np.int32),
        },
        schema=SCHEMAS["allocations"],
    )


def resident_gb() -> tuple[float, float]:
    """Resident memory now, and the highest since `forget_peak`; where the system does not tell, the
    highest of all.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return highest, highest
    told = {
        name: line.split()[1]
        for line in lines
        for name in ("VmRSS", "VmHWM")
        if line.startswith(name)
    }
    return int(told["VmRSS"]) / 1e6, int(told["VmHWM"]) / 1e6


def forget_peak() -> None:
    """The highest resident memory counts from now on: making the trace took more than the trace
    does.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def events(count: int) -> bool:
    """Pairing, naming and the tree at the peak of so many events, then the CSV file."""
    trace = made(count)
    print(f"{trace.allocations.height:,} allocation events, {trace.events.height:,} host events")
    forget_peak()
    bare = resident_gb()[0]
    print(f"  the trace itself                       {bare:8.2f} GB resident")
    started = time.process_time()
    known = explain(trace)
    found = build_allocations(known)
    spent = time.process_time() - started
    peak = int(found.pools["peak_bytes"][0])
    more = resident_gb()[1] - bare
    print(
        f"  paired, named, tree at the peak {spent:6.1f} s{more:8.2f} GB more at most (limit {LIMIT_SECONDS} s)"
    )
    assert found.peak.filter(pl.col("depth") == 0)["bytes"][0] == peak
    assert int(trace.allocations["bytes"].cum_sum().max()) == peak
    for whole, label in ((False, "name,bytes"), (True, "all columns")):
        started, size = time.process_time(), 0
        for part in iterate_block_tables(
            trace, known.named, known.kinds, known.whose, full_table=whole
        ):
            text = io.BytesIO()
            part.write_csv(text, include_header=False)
            size += text.tell()
        spent_csv = time.process_time() - started
        more = resident_gb()[1] - bare
        print(
            f"  CSV, {label:12}               {spent_csv:6.1f} s{more:8.2f} GB more at most, {size / 1e9:.2f} GB"
        )
    return spent <= LIMIT_SECONDS


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Kineto talks on descriptor 2; it is of no interest here."""
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def spent(step: Callable[[], None]) -> tuple[int, int]:
    """Processor time of the whole process in one step, and its wall time, which other work on the
    machine lengthens.
    """
    processor, wall = time.process_time_ns(), time.perf_counter_ns()
    step()
    return time.process_time_ns() - processor, time.perf_counter_ns() - wall


def recording(rounds: int) -> bool:
    """One training step of the example, in turns: unrecorded, recorded, with memory, with module
    scopes.
    """
    import tempfile

    import traceloom

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from record import STEPS, in_fork, workload

    step: Callable[[], None] = workload()
    ways: dict[str, dict[str, Any] | None] = {
        "unrecorded": None,
        "recorded": {},
        "with memory, no module scopes": {"memory": True, "module_names": "off"},
        "with memory": {"memory": True},
    }
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in ways}

    def take(step: Callable[[], None], options: dict[str, Any] | None) -> list[tuple[int, int]]:
        if options is None:
            return [spent(step) for _ in range(STEPS)]
        with (
            tempfile.TemporaryDirectory() as place,
            traceloom.record(f"{place}/run", quiet=True, **options),
        ):
            return [spent(step) for _ in range(STEPS)]

    with quiet():
        take(step, None)  # warm-up
        for _ in range(rounds):
            for name, options in ways.items():
                times[name] += in_fork(take, step, options)  # a process can be recorded once
    print(f"one training step of the example, {rounds} rounds of {STEPS} steps, in turns")
    for number, label in enumerate(("processor", "wall")):
        bare = min(pair[number] for pair in times["unrecorded"])
        for name, pairs in times.items():
            values = [pair[number] for pair in pairs]
            middle, least = statistics.median(values) / 1e6, min(values) / 1e6
            print(
                f"  {label:10}{name:32}{middle:8.1f} ms{least:8.1f} ms at least, {min(values) / bare:6.3f} x unrecorded"
            )
    return empty_scope()


def empty_scope() -> bool:
    """What a scope costs while nothing records."""
    code = (
        "import time, torch, traceloom\n"
        "def cost(count=200_000):\n"
        "    started = time.process_time()\n"
        "    for _ in range(count):\n"
        "        with traceloom.scope('a'): pass\n"
        "    return (time.process_time() - started) / count * 1e6\n"
        "print(min(cost() for _ in range(5)))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    print(f"an empty scope while nothing records: {float(said):.2f} us (limit {LIMIT_SCOPE_US} us)")
    return float(said) <= LIMIT_SCOPE_US


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-recording", action="store_true", help="only the events")
    arguments = parser.parse_args()
    good = events(arguments.events)
    if not arguments.no_recording:
        good = recording(arguments.rounds) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
