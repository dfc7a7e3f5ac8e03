"""Blocking calls: where host threads wait, which line of code makes them wait, and what the GPU
does meanwhile and after.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.flame import KINDS as NODE_KINDS, call_tree
from traceloom.analyze.host_events import (
    BLOCKING_CALL,
    RECORDER_FRAME_PATTERN,
    classify_events,
    is_user_frame,
    mark_device_setup_calls,
)
from traceloom.analyze.intervals import Spans, compute_coverage, merge_intervals
from traceloom.analyze.kernel_rules import select_gpu_work
from traceloom.analyze.steps import NO_STEP, select_whole_steps, summarize_per_step
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import get_event_column, to_nullable_series
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_per_trace,
    concatenate_by_trace,
    gather_event_column,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.trace import Trace

KINDS = {
    "item": "a value is read from the GPU: .item(), bool(), float()",
    "data_dependent_shape": "the size of a result is needed: nonzero, unique, boolean masks",
    "copy_to_host": "waits for a copy from the GPU: .cpu(), .to('cpu'), printing",
    "copy_to_device": "a copy to the GPU holds its caller: pageable memory, no non_blocking",
    "other_copy": "a copy whose direction is not recorded, or within one memory",
    "synchronize": "waits for the device or a stream",
    "event_synchronize": "waits for an event",
    "allocation": "memory of the device, or pinned memory, is taken or given back",
    "module_load": "code is loaded onto the device, or the device is set up",
    "fill": "a fill that is not asynchronous",
    "python": "Python waits: a lock, a queue, a socket, sleep",
    "other": "another call that waits",
}
_TIMES = ("blocked_ns", "gpu_busy_ns", "gpu_idle_ns", "idle_after_ns")
SITES = build_schema(
    "kind call op frame stack lane count pageable_count blocked_ns max_ns",
    *_TIMES[1:],
    "mean_blocked_ns min_blocked_ns max_blocked_ns step_count",
    {"kind": pl.Enum(list(KINDS)), "frame": pl.String},
)
CALLS = build_schema("event site step start_ns", *_TIMES, {"site": pl.UInt32})
_MAX_STACK_DEPTH = 8

# First match wins: by the operators around the call, then by its own name.
_KIND_BY_OP = (
    ("item", re.compile(r"^aten::(item|_local_scalar_dense|is_nonzero|equal)$")),
    (
        "data_dependent_shape",
        re.compile(r"^aten::(nonzero|_?unique|masked_select|repeat_interleave|bincount)"),
    ),
)
_KIND_BY_CALL = (
    ("event_synchronize", re.compile(r"EventSynchronize|EventHostSynchronize|Events?Wait$")),
    ("synchronize", re.compile(r"(?i)synchronize|QueueFinish")),
    (
        "allocation",
        re.compile(r"Malloc|Free|HostAlloc|HostRegister|HostUnregister|MemCreate|MemMap|MemUnmap"),
    ),
    ("module_load", re.compile(r"(Module|Library)(Load|Unload)")),
    ("fill", re.compile(r"Memset")),
    ("other_copy", re.compile(r"Memcpy")),
)


@dataclass(frozen=True)
class BlockingCalls(Result):
    """Calls in which host threads wait, by place.

    Attributes:
        sites: One row per place, waits in Python last, the longest first: what kind of wait
            (`KINDS`), the call, the operators around it from outermost to innermost, the innermost
            Python frame that is neither the framework's nor the standard library's, and up to eight
            such frames above it (outermost first, one per line); `op` and `frame` are null where
            none is recorded. `pageable_count` are calls that copy from or to pageable memory.
            `blocked_ns` is the host time in the calls; `gpu_busy_ns` and `gpu_idle_ns` are its
            parts in which any GPU work ran and none did. `idle_after_ns` is the time after the
            calls in which the GPU had nothing to do, until its next work or the thread's next such
            call. The GPU's three are null without GPU work. `mean_blocked_ns` and so on are per
            whole step.
        calls: One row per call, in time order; `site` is the row of `sites`.
        blocked_ns: Sum over all calls; calls inside each other count once.
        idle_after_ns: Sum over all calls; None without GPU work.
    """

    sites: pl.DataFrame
    calls: pl.DataFrame
    blocked_ns: int
    idle_after_ns: int | None


@cache_per_trace
def blocking_calls(trace: Trace) -> BlockingCalls:
    """Finds every call that waits, with the operators and frames around it.

    Which calls wait is decided in `traceloom.analyze.host_events` (docs/concepts/host-time.md);
    that the main thread waits for autograd's threads (`run_backward`) is not such a call.
    """
    return _find_blocking_calls(trace)


@run_in_batches
def _find_blocking_calls(traces: Sequence[Trace]) -> Iterable[BlockingCalls]:
    all_busy = []  # when any device of each trace works
    for trace in traces:
        work = select_gpu_work(trace)
        all_busy.append(merge_intervals(work["start_ns"].to_numpy(), work["end_ns"].to_numpy()))
    calls = concatenate_by_trace(map(_list_calls, traces, all_busy))
    if not calls.height:
        for busy in all_busy:
            yield BlockingCalls(
                SITES.to_frame(), CALLS.to_frame(), 0, 0 if busy.start.size else None
            )
        return
    calls = calls.hstack(_classify_calls(traces, calls))
    keys = [TRACE_COLUMN, "kind", "call", "op", "frame", "stack", "lane"]
    summed = (
        calls.group_by(keys, maintain_order=True)
        .agg(
            pl.len().alias("count"),
            pl.col("pageable").sum().alias("pageable_count"),
            pl.col("blocked_ns").max().alias("max_ns"),
            *(
                pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum())
                for name in _TIMES
            ),
        )
        .sort(
            [pl.col(TRACE_COLUMN), pl.col("kind") == "python", pl.col("blocked_ns")],
            descending=[False, False, True],
            maintain_order=True,
        )
        .with_columns(site=pl.int_range(pl.len(), dtype=pl.UInt32).over(TRACE_COLUMN))
    )
    calls = calls.join(
        summed[[*keys, "site"]], on=keys, how="left", nulls_equal=True, maintain_order="left"
    )
    spread = summarize_per_step(
        calls,
        [TRACE_COLUMN, "site"],
        ["blocked_ns"],
        concatenate_by_trace(map(select_whole_steps, traces)),
    )
    sites = summed.join(spread, on=[TRACE_COLUMN, "site"], how="left", maintain_order="left")
    for trace_sites, trace_calls, busy in zip(
        split_by_trace(sites, traces, SITES),
        split_by_trace(calls, traces, CALLS),
        all_busy,
        strict=True,
    ):
        idle = int(trace_calls["idle_after_ns"].sum()) if busy.start.size else None
        yield BlockingCalls(trace_sites, trace_calls, int(trace_calls["blocked_ns"].sum()), idle)


def _classify_calls(traces: Sequence[Trace], calls: pl.DataFrame) -> pl.DataFrame:
    """Returns the kind of wait of each call (`KINDS`), and whether it copies from or to pageable
    memory: kind, pageable.
    """
    copied = _find_call_copies(traces, calls)
    kind_of = {
        call: next((kind for kind, pattern in _KIND_BY_CALL if pattern.search(call)), "other")
        for call in calls["call"].unique()
    }
    call_kind = calls["call"].replace_strict(kind_of, return_dtype=pl.String)
    kind = (
        pl.when("python")
        .then(pl.lit("python"))
        .when("starting")
        .then(pl.lit("module_load"))
        .when((call_kind == "allocation") | (call_kind == "module_load"))
        .then(call_kind)
        .otherwise(pl.coalesce("by_op", copied["way"], call_kind))
    )
    return calls.select(kind.alias("kind"), copied["pageable"])


def _list_calls(trace: Trace, busy: Spans) -> pl.DataFrame:
    """Returns the calls of the program that wait, in time order, with the code around them, their
    times, and the activity of the GPU.

    Args:
        trace: The trace.
        busy: The time in which its GPUs work.

    Returns:
        Columns event, lane, step, start_ns, `_TIMES`, python and starting (what the call is), by_op
        (the kind of wait by the operators around it), call, op, frame and stack as in `SITES`.
    """
    tree = build_forest(trace)
    waits = classify_events(trace).activity == BLOCKING_CALL
    folded = call_tree(trace)
    waits &= ~folded.names.str.contains(r"^<built-in method run_backward").to_numpy()[
        folded.name_of
    ]
    rows = np.flatnonzero(tree.topmost(waits))
    rows = rows[np.argsort(tree.row[rows], kind="stable")]
    # Kind, call, op path, frame and stack of each call, computed once per distinct path.
    used, path_index = np.unique(folded.node[rows], return_inverse=True)
    path_rows, is_program = [], []
    for path in folded.paths(used) if used.size else ():  # from the thread down
        names = [str(folded.names[int(folded.label[node])]) for node in path[1:]]
        ancestors = [
            (name, NODE_KINDS[int(folded.kind[node])])
            for name, node in zip(names[:-1], path[1:-1], strict=True)
        ]
        ops = [name for name, kind in ancestors if kind == "op"]
        frames = [name for name, kind in ancestors if kind == "python" and is_user_frame(name)]
        op_kind = next(
            (kind for kind, pattern in _KIND_BY_OP if any(pattern.search(op) for op in ops)), None
        )
        stack = "\n".join(frames[-_MAX_STACK_DEPTH:]) or None
        path_rows.append(
            (op_kind, names[-1], " > ".join(ops) or None, frames[-1] if frames else None, stack)
        )
        is_program.append(not frames or re.search(RECORDER_FRAME_PATTERN, frames[-1]) is None)
    in_program = np.array(is_program, dtype=np.bool_)[path_index]
    rows, path_index = rows[in_program], path_index[in_program]
    paths = pl.DataFrame(
        path_rows,
        schema=dict.fromkeys(("by_op", "call", "op", "frame", "stack"), pl.String()),
        orient="row",
    )
    row = tree.row[rows]
    start, end, lane = tree.start_ns[rows], tree.end_ns[rows], tree.lane[rows]
    times: dict[str, Ints | pl.Series] = {"blocked_ns": end - start}
    if busy.start.size and rows.size:
        covered = compute_coverage(busy, start, end)
        order = np.lexsort((start, lane))
        same = lane[order][1:] == lane[order][:-1]
        next_call = np.full(lane.size, np.iinfo(np.int64).max)
        next_call[order[:-1][same]] = start[order][1:][same]
        # The first interval of GPU work that ends later
        after = np.searchsorted(busy.end, end, side="right")
        idle = np.maximum(np.minimum(np.append(busy.start, end.max())[after], next_call) - end, 0)
        idle_after = np.where(after == busy.start.size, 0, idle)
        times |= {
            "gpu_busy_ns": covered,
            "gpu_idle_ns": end - start - covered,
            "idle_after_ns": idle_after,
        }
    else:
        times |= dict.fromkeys(
            _TIMES[1:], pl.Series([None], dtype=pl.Int64).new_from_index(0, rows.size)
        )
    return pl.DataFrame(
        {
            "event": row,
            "lane": lane,
            "step": to_nullable_series(
                get_event_column(trace, "step", int(NO_STEP))[row], pl.Int32, int(NO_STEP)
            ),
            "start_ns": start,
            **times,
            "python": get_event_column(trace, "category")[row]
            == vocab.CATEGORIES.index(vocab.PYTHON),
            "starting": mark_device_setup_calls(trace)[row],
        }
    ).hstack(paths[pl.Series(path_index, dtype=pl.UInt32)])


def _find_call_copies(traces: Sequence[Trace], calls: pl.DataFrame) -> pl.DataFrame:
    """Returns the direction of the copy, and whether it is pageable, for calls that submit one or
    wait under the same operator.

    A copy that is not to block is submitted and then waited for in one operator (`aten::copy_`),
    which has both calls.
    """
    to = {"DtoH": "copy_to_host", "HtoD": "copy_to_device"}
    pageable = pl.any_horizontal(
        (pl.col(side) == "pageable").fill_null(False) for side in ("source_memory", "target_memory")
    )
    copies = concatenate_by_trace(trace.copies for trace in traces)
    submitted = copies.select(
        TRACE_COLUMN,
        gather_event_column(traces, copies, "event", "launch"),
        gather_event_column(traces, copies, "event", "op"),
        way=pl.col("kind").replace_strict(to, default=None),
        pageable=pageable,
    ).drop_nulls("launch")
    rows = calls[[TRACE_COLUMN, "event"]].with_columns(
        gather_event_column(traces, calls, "event", "op")
    )
    call_matches = rows.join(
        submitted.unique([TRACE_COLUMN, "launch"]),
        left_on=[TRACE_COLUMN, "event"],
        right_on=[TRACE_COLUMN, "launch"],
        how="left",
        maintain_order="left",
    )
    op_copies = submitted.drop("launch").drop_nulls("op").unique([TRACE_COLUMN, "op"], keep="last")
    op_matches = rows.join(op_copies, on=[TRACE_COLUMN, "op"], how="left", maintain_order="left")
    return pl.DataFrame(
        {
            "way": call_matches.select(pl.coalesce("way", op_matches["way"])).to_series(),
            "pageable": call_matches["pageable"].fill_null(False)
            | op_matches["pageable"].fill_null(False),
        }
    )
