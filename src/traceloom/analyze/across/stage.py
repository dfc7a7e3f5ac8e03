"""When a rank computed in each step, and how long it stood in sends and receives: what a pipeline is made of."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.classify import gpu_work
from traceloom.analyze.intervals import coverage, difference, union
from traceloom.model import Trace

PAIRS = ("send", "recv", "send_recv")
STAGE_SCHEMA = pl.Schema(
    {
        "step": pl.Int32(),
        "first_ns": pl.Int64(),
        "last_ns": pl.Int64(),
        "compute_ns": pl.Int64(),
        "pair_before_ns": pl.Int64(),
        "pair_inside_ns": pl.Int64(),
        "pair_after_ns": pl.Int64(),
        "other_ns": pl.Int64(),
        "receives_from": pl.Int32(),
        "sends_to": pl.Int32(),
        "first_receive_ns": pl.Int64(),
        "first_send_ns": pl.Int64(),
        "send_count": pl.Int64(),
        "receive_count": pl.Int64(),
    }
)


def stage_times(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Per step in which the rank sends or receives (step null for a trace without steps).

    Returns:
        step, first_ns and last_ns (first start and last end of compute launched in the step), compute_ns (union),
        pair_before_ns, pair_inside_ns, pair_after_ns (time in sends and receives that compute does not hide, before,
        between and after those), other_ns (other communication between them that compute does not hide),
        receives_from and sends_to (peer of the first receive and of the first send; null without one or where unknown),
        first_receive_ns and first_send_ns (their starts), send_count, receive_count.
    """
    pairs = calls.filter(pl.col("kind").is_in(PAIRS))
    if not pairs.height:
        return pl.DataFrame(schema=STAGE_SCHEMA)
    stepped = trace.steps.height > 0
    work = gpu_work(trace).filter(pl.col("category") == "compute")
    compute = work.select("start_ns", "end_ns").with_columns(trace.events["step"].gather(work["event"]))
    talk = calls.with_columns((pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"))
    rows = []
    for step in pairs["step"].unique().sort().to_list() if stepped else [None]:
        inside = pl.lit(value=True) if not stepped else pl.col("step").eq_missing(step)
        rows.append({"step": step, **_times(compute.filter(inside), talk.filter(inside))})
    return pl.DataFrame(rows, schema=STAGE_SCHEMA).drop_nulls("first_ns")


def _times(compute: pl.DataFrame, talk: pl.DataFrame) -> dict[str, int | None]:
    pairs = talk.filter(pl.col("kind").is_in(PAIRS))
    busy = union(compute["start_ns"].to_numpy(), compute["end_ns"].to_numpy())
    if not busy.start.size:
        return {"first_ns": None}
    first, last = int(busy.start[0]), int(busy.end[-1])
    alone = difference(union(pairs["start_ns"].to_numpy(), pairs["end_ns"].to_numpy()), busy)
    others = talk.filter(~pl.col("kind").is_in(PAIRS) | pl.col("kind").is_null())
    rest = difference(difference(union(others["start_ns"].to_numpy(), others["end_ns"].to_numpy()), busy), alone)
    low, high = min(first, *pairs["start_ns"].to_list()), max(last, *pairs["end_ns"].to_list())
    cuts = np.array([low, first, last], dtype=np.int64), np.array([first, last, high], dtype=np.int64)
    before, inside, after = coverage(alone, *cuts).tolist()
    times = {
        "first_ns": first,
        "last_ns": last,
        "compute_ns": busy.total,
        "pair_before_ns": before,
        "pair_inside_ns": inside,
        "pair_after_ns": after,
        "other_ns": int(coverage(rest, cuts[0][1:2], cuts[1][1:2])[0]),
    }
    for kind, word, peer in (("recv", "receive", "receives_from"), ("send", "send", "sends_to")):
        of_kind = pairs.filter(pl.col("kind") == kind).sort("start_ns")
        begun = of_kind["start_ns"][0] if of_kind.height else None
        times |= {
            peer: of_kind["peer"][0] if of_kind.height else None,
            f"first_{word}_ns": begun,
            f"{word}_count": of_kind.height,
        }
    return times
