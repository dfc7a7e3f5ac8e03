"""Communication that compute does not hide, and the part of it that the next compute really waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.blocking import blocking_calls
from traceloom.analyze.intervals import Bools, Ints, Spans, coverage, union
from traceloom.analyze.waits import stream_waits
from traceloom.model import Trace
from traceloom.model.arrays import column

# Work that was ready starts this soon after what it waited for; later, something else held it back.
PROMPT_NS = 30_000
# A host call that waits for a stream returns this soon after the stream's work is done.
RETURN_NS = 100_000


@dataclass(frozen=True, slots=True)
class Exposure:
    """Per communication kernel; arrays of shape (kernels,).

    Attributes:
        exposed_ns: Time in which it runs and no compute of its device does.
        blocking_ns: The part of it in which the next compute had been submitted and waited for this kernel; -1 where
            the launch of that compute is not recorded, so that it cannot be told.
        measured: Whether the dependency is recorded or follows from one stream; else it is inferred.
    """

    exposed_ns: Ints
    blocking_ns: Ints
    measured: Bools


def exposure(trace: Trace, kernels: pl.DataFrame, work: pl.DataFrame) -> Exposure:
    """Exposed and blocking time of communication kernels.

    Args:
        trace: One process's trace.
        kernels: Columns event, device, stream, start_ns, end_ns.
        work: All GPU work, of `gpu_work`.
    """
    size = kernels.height
    nothing = np.zeros(size, dtype=np.int64)
    out = Exposure(nothing, nothing.copy(), np.ones(size, dtype=np.bool_))
    columns = ("event", "device", "stream", "start_ns", "end_ns", "launch")
    compute = work.filter(pl.col("category") == "compute").select(columns)
    of_device = compute.with_columns(pl.col("device").fill_null(-1)).partition_by("device", as_dict=True)
    numbered = kernels.with_columns(pl.col("device").fill_null(-1)).with_row_index("row")
    for (device,), part in numbered.partition_by("device", as_dict=True).items():
        row = part["row"].to_numpy()
        beside = of_device.get((device,))
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        if beside is None:
            out.exposed_ns[row] = end - start
            continue
        spans = union(beside["start_ns"].to_numpy(), beside["end_ns"].to_numpy())
        out.exposed_ns[row] = end - start - coverage(spans, start, end)
        out.blocking_ns[row], out.measured[row] = _blocking(trace, part, beside, spans)
    return out


def _blocking(trace: Trace, kernels: pl.DataFrame, compute: pl.DataFrame, spans: Spans) -> tuple[Ints, Bools]:
    """Of the exposed time at the end of each kernel, what the compute that follows waited for."""
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    begins = compute["start_ns"].to_numpy()
    order = np.argsort(begins, kind="stable")
    begins = begins[order]
    after = np.searchsorted(begins, end, side="left")
    exists = after < begins.size
    following = order[np.minimum(after, begins.size - 1)]
    ends = np.append(np.iinfo(np.int64).min, spans.end)  # of the compute that began before, if any did (or took time)
    quiet = np.maximum(ends[np.searchsorted(spans.start, end, side="left")], start)
    open_end = quiet < end  # no compute runs when the kernel ends
    prompt = exists & open_end & (begins[np.minimum(after, begins.size - 1)] - end <= PROMPT_NS)
    next_event = compute["event"].to_numpy()[following].astype(np.int64)
    # several kernels may have the same next compute: it is looked up once, and in the order of rows
    different, inverse = np.unique(next_event, return_inverse=True)
    waited, recorded = stream_waits(trace, different)
    by_stream = waited[inverse]
    streams = compute["stream"].fill_null(-1).to_numpy()[following]
    same = streams == kernels["stream"].fill_null(-1).to_numpy()
    launch = compute["launch"].cast(pl.Int64).fill_null(-1).to_numpy()[following]
    called = column(trace, "start_ns")[np.maximum(launch, 0)]
    waits = same | by_stream
    held = np.clip(end - np.maximum(quiet, called), 0, None)
    by_host, since = _host_waited(trace, launch, end)
    held_by_host = np.clip(end - np.maximum(quiet, since), 0, None)
    late = exists & open_end & ~prompt & by_host
    blocking = np.where(prompt & waits, np.where(called <= end, held, 0), 0)
    blocking = np.where((blocking == 0) & (prompt | late) & by_host, held_by_host, blocking)
    blocking = np.where(prompt & (launch < 0), -1, blocking)
    return blocking, same | (by_stream & recorded)


def _host_waited(trace: Trace, launch: Ints, end: Ints) -> tuple[Bools, Ints]:
    """Whether the launching thread was in a waiting call that ended with the kernel, and since when."""
    calls = np.flatnonzero(blocking_calls(trace))
    none = np.zeros(launch.size, dtype=np.bool_)
    if not calls.size:
        return none, end
    lane = column(trace, "lane").astype(np.int64)
    starts = column(trace, "start_ns")
    backs = starts[calls] + np.maximum(column(trace, "duration_ns")[calls], 0)
    waited, since = none.copy(), end.copy()
    lanes = np.where(launch >= 0, lane[np.maximum(launch, 0)], -1)
    for thread in np.unique(lanes[lanes >= 0]).tolist():
        own_calls = calls[lane[calls] == thread]
        if not own_calls.size:
            continue
        on_thread = np.flatnonzero(lanes == thread)
        back = backs[lane[calls] == thread]
        order = np.argsort(back, kind="stable")
        at = np.searchsorted(back[order], end[on_thread], side="left")
        inside = at < back.size
        call = order[np.minimum(at, back.size - 1)]
        begun = starts[own_calls[call]]
        launched = starts[launch[on_thread]]
        ok = inside & (begun < end[on_thread]) & (back[call] - end[on_thread] <= RETURN_NS) & (launched >= back[call])
        waited[on_thread], since[on_thread] = ok, np.where(ok, begun, end[on_thread])
    return waited, since
