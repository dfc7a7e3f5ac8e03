"""What was recorded beside the traces of a run, on the same clock: stacks, allocations, and what its hosts did.

`samples`: a stack that was seen at `time_ns` and, look after look, for `period_ns`; its frames from the outermost to
the innermost, spelled as the profiler of PyTorch does: `train.py(20): step`. `thread` is the kernel's number.

`telemetry`: every value of every series, `labels` as JSON text with sorted keys; counters as they are, not as rates.

`allocations`: every block that an allocator gave (bytes above 0) or took back (below), and its own totals where it says
them; `device_name` is `cpu` or `cuda:0`.

Times are int64 nanoseconds, Unix time; rows are in order of rank or host, then of series or thread, then of time.
"""

from __future__ import annotations

import polars as pl

from traceloom.model.frames import schema

SAMPLES = schema(
    "rank process thread thread_name time_ns period_ns stack",
    {"process": pl.Int64, "thread": pl.Int64, "stack": pl.List(pl.String)},
)
TELEMETRY = schema("host time_ns metric labels value unit kind", {"labels": pl.String, "unit": pl.String})
ALLOCATIONS = schema(
    "rank process thread time_ns address bytes device_name allocated_bytes reserved_bytes",
    {"process": pl.Int64, "thread": pl.Int64, "address": pl.UInt64},
)


def no_samples() -> pl.DataFrame:
    """Samples without rows."""
    return pl.DataFrame(schema=SAMPLES)


def no_telemetry() -> pl.DataFrame:
    """Telemetry without rows."""
    return pl.DataFrame(schema=TELEMETRY)


def no_allocations() -> pl.DataFrame:
    """Allocations without rows."""
    return pl.DataFrame(schema=ALLOCATIONS)
