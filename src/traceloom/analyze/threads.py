"""Which threads are there, what is each for, and how many of them work at the same time?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest, host_segments
from traceloom.analyze.call_tree import KINDS as NODE_KINDS
from traceloom.analyze.call_tree import call_tree
from traceloom.analyze.host import main_lane
from traceloom.analyze.intervals import complement, union
from traceloom.analyze.phases import ACTIVITIES, BACKWARD, BLOCKING_CALL, UNOBSERVED, activity, meaning
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.splitting import NO_STEP, split_at_steps
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, lookup, nullable
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

ROLES = {
    "main": "runs the program",
    "autograd": "runs the backward pass",
    "data_loader": "makes batches in this process",
    "pin_memory": "copies batches into pinned memory",
    "communication": "makes communication calls",
    "compiler": "compiles (torch.compile)",
    "operators": "runs operators for another thread",
    "runtime": "only makes calls of the GPU's runtime",
    "python": "runs other Python",
    "annotations": "holds only annotations",
}
THREADS = schema(
    "lane process thread name role says event_count window_ns busy_ns active_ns",
    *(f"{name}_ns" for name in ACTIVITIES),
    "launch_count",
    {"role": pl.Enum(list(ROLES))},
)
CONCURRENCY = schema("step threads ns")
CURVE = schema("start_ns active")
PARTS = 200  # of the window, for the curve

_LOADER = r"(^|/)torch/utils/data/(_utils/(worker|fetch|collate)|dataloader)\.py|^enumerate\(DataLoader\)#"
_PIN = r"(^|/)torch/utils/data/_utils/pin_memory\.py"
_COMPILER = (
    r"(^|/)torch/(_inductor|_dynamo|_functorch)/|\(dynamo_timed\)$|^(dynamo|inductor_compile|entire_\w+_compile)$"
)
_TALKS = r"^(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):|^_?c10d(_functional)?::|^record_param_comms$"
_STARTER = r"^(threading|concurrent/futures/thread|multiprocessing/\w+)\.py\(\d+\): |^<"


@dataclass(frozen=True)
class Threads(Result):
    """The host threads.

    Attributes:
        threads: One row per host lane, the main thread first, then by busy time. `role` is one of `ROLES`; `says` is
            what it was told by: a name recorded on the thread. `busy_ns` is the time with any event open, `active_ns`
            the part of it in which the thread does not stand in a call that waits; the five columns by activity
            (docs/concepts/host-time.md) add up to `window_ns`.
        concurrency: How long exactly so many threads were active at once, by step (null outside all steps); adds up to
            the window of the trace.
        curve: Mean number of active threads in each of up to 200 equal parts of the window.
        most: The largest number of threads active at once.
        mean: Mean number over the window; None for a window without length.
    """

    threads: pl.DataFrame
    concurrency: pl.DataFrame
    curve: pl.DataFrame
    most: int
    mean: float | None


def threads(trace: Trace) -> Threads:
    """Say of every host thread what it is for and what it did, and how many were active over time."""
    lanes = trace.lanes.filter(pl.col("kind") == "host").sort("lane")
    segments = host_segments(trace)
    doing = np.append(activity(trace), UNOBSERVED)[segments.owner]
    ns = segments.end_ns - segments.start_ns
    size = int(trace.lanes["lane"].to_numpy().max(initial=0)) + 1
    by_activity = np.zeros((size, len(ACTIVITIES)), dtype=np.int64)
    np.add.at(by_activity, (segments.lane, doing), ns)
    host_lanes = lanes["lane"].to_numpy()
    roles = _roles(trace)
    launches = [cat.CATEGORIES.index(category) for category in cat.LAUNCHES]
    calls = np.flatnonzero(np.isin(column(trace, "category"), launches))
    window = trace.end_ns - trace.start_ns
    busy = lanes["busy_ns"].fill_null(0).to_numpy()
    table = pl.DataFrame(
        {
            "lane": host_lanes,
            "process": lanes["process"],
            "thread": lanes["thread"],
            "name": lanes["name"],
            "role": pl.Series([roles[int(lane)][0] for lane in host_lanes], dtype=pl.String),
            "says": pl.Series([roles[int(lane)][1] for lane in host_lanes], dtype=pl.String),
            "event_count": lanes["events"].cast(pl.Int64),
            "window_ns": np.full(host_lanes.size, window),
            "busy_ns": busy,
            "active_ns": window - by_activity[host_lanes, UNOBSERVED] - by_activity[host_lanes, BLOCKING_CALL],
            **{f"{name}_ns": by_activity[host_lanes, at] for at, name in enumerate(ACTIVITIES)},
            "launch_count": np.bincount(column(trace, "lane")[calls], minlength=size)[host_lanes],
        }
    ).pipe(as_declared, THREADS)
    is_main = (pl.col("role") == "main").fill_null(False)
    # A thread is active whenever it does not rest: +1 where it begins to be, -1 where it ends.
    resting = np.flatnonzero((doing == UNOBSERVED) | (doing == BLOCKING_CALL))
    resting = resting[np.argsort(segments.lane[resting], kind="stable")]
    low, high = (np.searchsorted(segments.lane[resting], host_lanes, side=side) for side in ("left", "right"))
    times, change = [np.array([trace.start_ns, trace.end_ns])], [np.zeros(2, dtype=np.int64)]
    for first, last in zip(low.tolist(), high.tolist(), strict=True):
        rest = resting[first:last]
        active = complement(union(segments.start_ns[rest], segments.end_ns[rest]), trace.start_ns, trace.end_ns)
        times += active
        change += [np.ones_like(active.start), -np.ones_like(active.end)]
    start = np.concatenate(times)
    order = np.argsort(start, kind="stable")
    start, count = start[order], np.cumsum(np.concatenate(change)[order])
    is_last = np.append(start[1:] != start[:-1], True)
    start, count = start[is_last], count[is_last]  # the instants at which the number changes, and the end
    total = int((count[:-1] * np.diff(start)).sum()) if start.size else 0
    if start.size < 2:
        concurrency = CONCURRENCY.to_frame()
    else:
        pieces, step = split_at_steps(trace, start[:-1], start[1:])
        frame = pl.DataFrame(
            {
                "step": nullable(step, absent=int(NO_STEP)),
                "threads": count[:-1][pieces.source],
                "ns": pieces.end_ns - pieces.start_ns,
            }
        )
        concurrency = (
            frame.group_by("step", "threads")
            .agg(pl.col("ns").sum())
            .sort("step", "threads")
            .pipe(as_declared, CONCURRENCY)
        )
    return Threads(
        table.sort([~is_main, pl.col("busy_ns"), pl.col("lane")], descending=[False, True, False]),
        concurrency,
        _curve(trace, start, count),
        int(count.max(initial=0)),
        total / window if window else None,
    )


def _curve(trace: Trace, start: Ints, count: Ints) -> pl.DataFrame:
    window = trace.end_ns - trace.start_ns
    parts = min(PARTS, window)
    if start.size < 2 or not parts:
        return CURVE.to_frame()
    edges = trace.start_ns + window * np.arange(parts + 1) // parts
    spent = np.concatenate([[0], np.cumsum(count[:-1] * np.diff(start))])  # thread-nanoseconds up to each instant
    at = np.searchsorted(start, edges, side="right") - 1
    until = spent[at] + count[at] * (edges - start[at])
    return pl.DataFrame({"start_ns": edges[:-1], "active": np.diff(until) / np.diff(edges)}).pipe(as_declared, CURVE)


@per_trace
def _roles(trace: Trace) -> dict[int, tuple[str, str | None]]:
    """Role of every host lane, and the name that shows it."""
    tree = forest(trace)
    main = main_lane(trace)
    words = vocabulary(trace)
    code = words.code[tree.row]
    category = column(trace, "category")[tree.row]
    is_op = category == cat.CATEGORIES.index(cat.OP)
    backward = (tree.parent < 0) & (meaning(trace).phase == BACKWARD) & is_op
    launch = np.isin(category, [cat.CATEGORIES.index(name) for name in cat.LAUNCHES])
    python = category == cat.CATEGORIES.index(cat.PYTHON)
    tests = (
        ("pin_memory", lookup(words.matching(_PIN), code)),
        ("data_loader", lookup(words.matching(_LOADER), code) & python),
        ("autograd", backward),
        ("compiler", lookup(words.matching(_COMPILER), code) & ~launch),
        ("communication", lookup(words.matching(_TALKS), code) & (tree.parent < 0)),
        ("operators", is_op),
        ("python", python),
        ("runtime", launch),
        ("annotations", category == cat.CATEGORIES.index(cat.ANNOTATION)),
    )
    roles: dict[int, tuple[str, str | None]] = {}
    for role, matches in tests:
        rows = np.flatnonzero(matches)
        lanes, first = np.unique(tree.lane[rows], return_index=True)
        for lane, row in zip(lanes.tolist(), rows[first].tolist(), strict=True):
            roles.setdefault(lane, (role, str(words.names[int(code[row])])))
    for lane in [lane for lane, (role, _) in roles.items() if role == "python"]:
        # what it was started to do: its outermost frame that is not the machinery of starting threads
        folded = call_tree(trace)
        frames = np.flatnonzero((folded.lane == lane) & (folded.kind == NODE_KINDS.index("python")))
        names = folded.names[pl.Series(folded.label[frames], dtype=pl.UInt32)]
        targets = names.filter(~names.str.contains(_STARTER))
        if targets.len():
            roles[lane] = ("python", str(targets[0]) or roles[lane][1])
    if main is not None:
        roles[main] = ("main", None)
    everything = trace.lanes.filter(pl.col("kind") == "host")["lane"].to_list()
    return {lane: roles.get(lane, ("annotations", None)) for lane in everything}
