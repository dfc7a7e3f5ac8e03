"""Rules about steps that the host limits: launches, Python, element loops, small kernels, copies
and operators that need not be.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.data_loading import find_loader_calls
from traceloom.analyze.intervals import find_overlaps, merge_intervals
from traceloom.analyze.names import build_vocabulary
from traceloom.changes.changes import DATA_LOADING_PATTERN, Change, NodeSelection, Selection
from traceloom.findings.context import Bools, Context, shorten_name
from traceloom.findings.host_waits import (
    OPERATORS_SAMPLED,
    PROGRAM_WAITS,
    compute_min_pause_ns,
    select_time_between_operators,
    waits_for_requests,
)
from traceloom.findings.rule import Candidate, FindingRule, Message
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace import vocabulary as vocab
from traceloom.trace.arrays import NO_ROW, NULL, gather_rows, get_event_column
from traceloom.trace.notice import Abstention, Evidence
from traceloom.trace.trace import Trace

_MIN_PYTHON_SHARE = 0.15  # of the window
_MIN_GAP_SHARE = 0.02  # of the window
# Of the time of many short intervals of Python: the part that compiled or vectorised code leaves
_PYTHON_LEFT = 0.3
_MIN_LOOP_CALLS = 64  # calls in a row, from which on a run is a loop over the elements of a tensor
# The operators that Python calls for one element; runs of others may be a loop in C++ over many
# tensors.
_ELEMENT_OPS = ("aten::item", "aten::select", "aten::index", "aten::is_nonzero", "aten::equal")
_MAX_LOOPS = 16  # loops analysed per trace, those with the most calls
_LATE_CAUSES = ("host_op", "host_launch", "host_python", "host_unobserved")
_SINGLE_CALL_CAUSES = ("host_op", "host_launch")
# Long ones are pauses: other launches do not shorten them
_PYTHON_CAUSES = (
    "host_python",
    "host_unobserved",
)
# Pauses that a single submission of everything shortens as well
_LAUNCH_COST_CAUSES = (
    "launch_latency",
    "kernel_to_kernel",
)
_ELEMENTWISE_PATTERN = r"elementwise|pointwise|triton_poi"
_MIN_KERNELS_PER_STEP = 20


def find_launch_bound(context: Context) -> Iterator[Message]:
    """Reports kernels that wait for their launches."""
    if not context.has_gpu_work:
        yield Abstention("launch-bound", "no GPU work was recorded")
        return
    if context.sampled:
        yield Abstention("launch-bound", OPERATORS_SAMPLED)
        return
    late = _select_late_gaps(context)
    idle = int(late["duration_ns"].sum())
    if idle < _MIN_GAP_SHARE * context.ranks_ns:
        return
    also = context.gaps.filter(pl.col("cause").is_in(list(_LAUNCH_COST_CAUSES)))
    rank_idle_ns = np.zeros(len(context.traces), dtype=np.int64)
    for parts in (late, also):
        np.add.at(rank_idle_ns, parts["trace"].to_numpy(), parts["duration_ns"].to_numpy())
    total_idle_ns = int(rank_idle_ns.sum())
    # The most that better launching could save on one rank; a pause may go on into the next step.
    max_saving_ns = min(int(rank_idle_ns.max()), context.step_ns * context.step_count)
    longest = late.sort("duration_ns", descending=True, maintain_order=True)
    gaps = [
        Evidence(
            f"GPU idle: {shorten_name(activity or 'nothing recorded')}",
            context.traces[trace].rank,
            start_ns,
            ns,
        )
        for activity, trace, start_ns, ns in longest.filter(
            pl.int_range(pl.len()).over("trace") < 3
        )
        .head(4)
        .select("host_activity", "trace", "start_ns", "duration_ns")
        .iter_rows()
    ]
    yield Candidate(
        title=f"launches come too late: the GPU is idle for {units.format_duration(idle)} of {context.where}"
        f"{context.rank_sum_suffix}"
        + (
            f" ({units.format_duration(total_idle_ns)} with launch latency)"
            if max_saving_ns > idle
            else ""
        ),
        changes=(Change("graph", Selection("gpu")),),
        confidence=0.6,
        advice="Submit the step with fewer, larger launches: torch.compile, CUDA graphs (torch.cuda.graphs, "
        "mode='reduce-overhead'), larger batches, fused operators.",
        evidence=tuple(gaps),
        at_most_ns=max_saving_ns,
        host=partial(_select_host_work_during_gaps, context),
    )


def _select_late_gaps(context: Context) -> pl.DataFrame:
    """Returns parts of gaps, as in `Context.gaps`, in which the GPU waits for a launch that comes
    late.
    """
    cause, long = pl.col("cause"), compute_min_pause_ns(context)
    late = context.gaps.filter(
        cause.is_in(list(_LATE_CAUSES)),
        ~(cause.is_in(list(_PYTHON_CAUSES)) & (pl.col("duration_ns") >= long)),
    )
    if context.steps is not None or not late.height:
        return late
    # One call or operator that takes long, for example at the start, does not occur again.
    durations = pl.concat(
        trace.events["duration_ns"].gather(part["host_event"])
        for trace, part in context.split_by_trace(late)
    )
    once = pl.min_horizontal("duration_ns", durations) >= long
    return late.filter(~(once & cause.is_in(list(_SINGLE_CALL_CAUSES))))


def _select_host_work_during_gaps(context: Context) -> pl.DataFrame:
    """Returns what the launching threads do while the GPU waits for them, as
    `Context.stretches`.
    """
    host = context.stretches(
        context.select_kinds(graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH)
    )
    parts = [host.clear()]
    # Of each gap the late part, from where it begins.
    all_late = (
        _select_late_gaps(context)
        .drop_nulls("launch")
        .group_by("trace", "gap", "step")
        .agg(pl.col("launch").first(), pl.col("start_ns").min(), pl.col("duration_ns").sum())
    )
    rank = host["rank"].to_numpy()
    for trace, late in context.split_by_trace(all_late):
        rows = host[np.flatnonzero(rank == trace.rank)] if len(context.traces) > 1 else host
        # Lanes one after the other on one axis.
        width = trace.end_ns - trace.start_ns + 1
        offset = trace.events["lane"][late["launch"]].to_numpy().astype(np.int64) * width
        start = late["start_ns"].to_numpy() + offset
        lanes = rows["lane"].to_numpy().astype(np.int64) * width
        low, high = (rows[name].to_numpy() + lanes for name in ("start_ns", "end_ns"))
        shared = find_overlaps(
            low, high, merge_intervals(start, start + late["duration_ns"].to_numpy())
        )
        shared_times = pl.DataFrame(
            {
                "start_ns": shared.start - lanes[shared.left],
                "end_ns": shared.end - lanes[shared.left],
            }
        )
        parts.append(rows[["rank", "lane"]][shared.left].hstack(shared_times))
    return pl.concat(parts)


def _find_element_loops(trace: Trace) -> pl.DataFrame:
    """Returns loops over the elements of a tensor, as runs of one operator: name, calls, step,
    first and last (events).

    `for value in tensor` begins with `aten::unbind`, after which any operator may be the loop's.
    Loops of a data loader are left out.
    """
    vocabulary, is_op = build_vocabulary(trace), (trace.events["category"] == vocab.OP).to_numpy()
    parent, lane = get_event_column(trace, "parent", NO_ROW), get_event_column(trace, "lane")
    is_nested = gather_rows(
        is_op | gather_rows(vocabulary.matching(DATA_LOADING_PATTERN), vocabulary.code), parent
    )
    row = np.flatnonzero(is_op & ((parent < 0) | ~is_nested))
    row = row[np.argsort(lane[row], kind="stable")]
    # A run begins where the event before it is of another lane, step, parent or name.
    is_run_start = np.ones(row.size, dtype=np.bool_)
    columns = [
        values[row]
        for values in (lane, get_event_column(trace, "step", NULL), parent, vocabulary.code)
    ]
    is_run_start[1:] = np.any([values[1:] != values[:-1] for values in columns], axis=0)
    first = np.flatnonzero(is_run_start)
    calls = np.diff(np.append(first, row.size))
    run = np.flatnonzero(calls >= _MIN_LOOP_CALLS)
    before, last = row[first[np.maximum(run - 1, 0)]], row[first[run] + calls[run] - 1]
    events = trace.events[["name", "lane", "step"]]
    loops, preceding = events[row[first[run]]], events[before]
    parts = (
        (preceding["name"] == "aten::unbind") & (preceding["lane"] == loops["lane"])
    ).to_numpy() & (run > 0)
    numbers = {"first": np.where(parts, before, row[first[run]]), "last": last, "calls": calls[run]}
    return loops.hstack(pl.DataFrame(numbers)).filter(
        pl.lit(pl.Series(parts)) | pl.col("name").is_in(_ELEMENT_OPS)
    )


def find_loops(context: Context) -> tuple[Bools, dict[str, int]]:
    """Returns the nodes of such loops from start to end, with what they launch, and how often each
    call is made.
    """
    nodes, edges = context.graph.nodes, context.graph.edges
    in_loops = np.zeros(nodes.height, dtype=np.bool_)
    calls: dict[str, int] = {}
    host = context.select_kinds(graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH)
    start, lane = nodes["start_ns"].to_numpy(), nodes["lane"].fill_null(-1).to_numpy()
    for trace in context.traces:
        loops = context.in_step(context.ask(trace, _find_element_loops))
        for row in (
            loops.sort("calls", descending=True).head(_MAX_LOOPS) if loops.height else loops
        ).to_dicts():
            end_nodes = [
                np.flatnonzero(host & context.node_mask(trace, pl.Series([row[end]])))
                for end in ("first", "last")
            ]
            if end_nodes[0].size and end_nodes[1].size:
                in_loops |= (
                    host
                    & (lane == lane[end_nodes[0][0]])
                    & (start >= start[end_nodes[0][0]])
                    & (start <= start[end_nodes[1]].max())
                )
                calls[row["name"]] = calls.get(row["name"], 0) + row["calls"]
    launched = edges["target"].filter(
        (edges["kind"].cast(pl.String) == "launch") & pl.Series(in_loops)[edges["source"]]
    )
    in_loops[launched.to_numpy()] = True
    return in_loops & ~context.select_kinds(*graph_schema.COMMUNICATION), calls


def find_python_bound(context: Context) -> Iterator[Message]:
    """Reports Python between operators that delays the step."""
    if (
        not context.select_kinds(graph_schema.HOST).any()
        or not (context.graph.nodes["category"] == vocab.OP).any()
    ):
        yield Abstention("python-bound", "no operators were recorded: what the host did is unknown")
        return
    if waits_for_requests(context):
        yield Abstention("python-bound", PROGRAM_WAITS)
        return
    if context.sampled:
        yield Abstention("python-bound", OPERATORS_SAMPLED)
        return
    loops, calls = find_loops(context)
    if (
        context.work_ns(
            loops & ~context.select_kinds(graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)
        )
        >= _MIN_GAP_SHARE * context.ranks_ns
    ):
        host = loops & context.select_kinds(
            graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH
        )
        call_list = ", ".join(
            f"{shorten_name(name)} {units.format_count(count)} times"
            for name, count in sorted(calls.items())[:3]
        )
        yield Candidate(
            title=f"a loop over the elements of a tensor calls {call_list}: {units.format_duration(context.work_ns(host))} of "
            f"{context.where}{context.rank_sum_suffix}",
            changes=(Change("remove", NodeSelection("loops over elements", loops)),),
            confidence=0.5,
            advice="One call for the whole tensor takes hardly longer than one of these; where Python needs the "
            "values, `tensor.tolist()` reads them at once.",
            evidence=context.evidence(host),
        )
    work = context.graph.nodes["work_ns"].to_numpy()
    short = select_time_between_operators(context) & ~loops & (work < compute_min_pause_ns(context))
    if not short.any():
        return
    time = context.work_ns(short)
    if time < _MIN_PYTHON_SHARE * context.ranks_ns:
        # As much lies between the operators of any step, most of it the cost of recording them
        return
    slower = "; recording stacks makes it look longer than it is" if context.stacks else ""
    yield Candidate(
        title=f"Python between operators takes {units.format_duration(time)} of {context.where}{context.rank_sum_suffix}{slower}",
        changes=(
            Change(
                "scale", NodeSelection("Python between operators", short, "think"), _PYTHON_LEFT
            ),
        ),
        confidence=0.3 if context.stacks else 0.4,
        advice="Compile the model or replay it as a CUDA graph; vectorise loops over tensors, cache what does not "
        "change, log less often.",
        evidence=context.evidence(short),
        at_most_ns=context.step_thread_cpu_ns,  # a waiting thread runs no Python
    )


def find_small_kernels(context: Context) -> Iterator[Message]:
    """Reports runs of elementwise kernels that one kernel could do."""
    selection = Selection("kernels", _ELEMENTWISE_PATTERN)
    mask = selection.nodes(context.graph)
    count = int(mask.sum())
    if count < _MIN_KERNELS_PER_STEP * context.step_count:
        return
    source, target = (context.graph.edges[end].to_numpy() for end in ("source", "target"))
    streams = (context.graph.edges["kind"].cast(pl.String) == "stream").to_numpy()
    following = np.zeros(mask.size, dtype=np.bool_)
    following[target[streams & mask[source] & mask[target]]] = True
    follower_count = int(following.sum())
    if follower_count < _MIN_KERNELS_PER_STEP // 2 * context.step_count:
        return
    counts = [context.many(int(context.own(nodes).sum())) for nodes in (following, mask)]
    yield Candidate(
        title=f"{counts[0]} of {counts[1]} elementwise kernels follow another one: they could be one",
        changes=(Change("fuse", selection),),
        confidence=0.6,
        advice="Let torch.compile fuse them, or use fused operators.",
        evidence=(
            Evidence("elementwise kernels", count=count, total_ns=context.work_ns(mask)),
            *context.evidence(following, 2),
        ),
    )


RULES = (
    FindingRule("launch-bound", "launches come too late for the GPU", find_launch_bound),
    FindingRule("python-bound", "Python between operators decides the step", find_python_bound),
    FindingRule("small-kernels", "many small kernels that could be one", find_small_kernels),
)

Ints = NDArray[np.int64]

_COPY_OPS = r"^aten::(?:clone|contiguous|to|_to_copy|copy_|reshape|flatten|repeat)$"
_BACKWARD_COPY_OPS = r"^autograd::engine::evaluate_function: (?:CloneBackward|ToCopyBackward|CopyBackwards|CopySlices)"
_COPYING_OPS = r"^aten::(?:copy_|clone|_to_copy)$"
# Copies inside these belong to them: the bytes have to get from one place to another.
_OWN_COPIES_PATTERN = r"^(?:Optimizer\.|FSDP::|gloo:|enumerate\(DataLoader\))"
_MIN_SHARE = 0.02
_MAX_SHORT_NS = 100_000  # Python behind an operator that takes no longer is part of calling it
_NO_LANE = 2**32 - 1
_MAX_PERIOD = 6  # operators at most in the repeated pattern of tiny ones
_MIN_REPETITIONS = 24  # minimum repetitions in a row
_MAX_TINY_NS = 40_000  # the median of their recorded times
_MIN_TINY_SHARE = 0.05  # of the step
_HOST_KINDS = (graph_schema.HOST, graph_schema.THINK)


def find_host_copies(context: Context) -> Iterator[Message]:
    """Reports copies that the program makes itself."""
    if context.has_gpu_work:
        yield Abstention(
            "host-copies", "the device computes: see device-copies and needless-copies"
        )
        return
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    count, name_times = 0, pl.DataFrame()
    for trace in context.traces:
        rows = context.in_step(context.ask(trace, _find_copy_operators))
        count += rows.height
        name_times = pl.concat([name_times, rows.select("name", "duration_ns")])
        if rows.height:
            mask |= context.below(trace, rows["event"])
    # The short interval of Python behind each copy: it calls the next operator, and releases the
    # memory.
    nodes = context.graph.nodes
    order = nodes.select("rank", "lane", "start_ns", "node").with_row_index("at")
    order = order.sort("rank", "lane", "start_ns", "node")
    rows_in_order, lane = order["at"].to_numpy(), order["lane"].fill_null(_NO_LANE).to_numpy()
    follows = np.zeros(rows_in_order.size, dtype=np.bool_)
    follows[rows_in_order[1:]] = mask[rows_in_order[:-1]] & (lane[1:] == lane[:-1])
    mask |= (
        follows
        & select_time_between_operators(context)
        & (nodes["work_ns"].to_numpy() <= _MAX_SHORT_NS)
    )
    time = context.work_ns(mask & context.select_kinds(*_HOST_KINDS))
    if not count or time < _MIN_SHARE * context.ranks_ns:
        return
    sums = name_times.group_by("name").agg(pl.col("duration_ns").sum())
    sums = sums.sort("duration_ns", "name", descending=[True, False])
    yield Candidate(
        title=f"{units.format_count(count)} copies of tensors on the host take {units.format_duration(time)} of {context.where}"
        f"{context.rank_sum_suffix}, most of it in {shorten_name(sums['name'][0])}",
        changes=(Change("remove", NodeSelection("copies of tensors on the host", mask, "ops")),),
        confidence=0.4,
        advice="Leave out unneeded clones and conversions; keep one layout and one type: each "
        "`.contiguous()`, `.to()` and `reshape` of a transposed tensor writes all of it anew, and its gradient, too.",
        evidence=context.evidence(mask),
    )


def _find_copy_operators(trace: Trace) -> pl.DataFrame:
    """Returns outermost operators that copy, without those of the optimizer, of FSDP and of the
    loader.
    """
    events = trace.events
    names, parent = events["name"], events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    is_op = (events["category"] == vocab.OP).to_numpy()
    copying = names.str.contains(_COPYING_OPS).to_numpy() & is_op
    back = names.str.contains(_BACKWARD_COPY_OPS).to_numpy()
    candidate = np.flatnonzero((names.str.contains(_COPY_OPS).to_numpy() & is_op) | back)
    outer = candidate[(parent[candidate] < 0) | ~is_op[np.maximum(parent[candidate], 0)]]
    has_copying = np.zeros(parent.size, dtype=np.bool_)  # inside
    ancestors = parent[np.flatnonzero(copying)]
    while (ancestors := ancestors[ancestors >= 0]).size:  # one iteration per level of nesting
        has_copying[ancestors] = True
        ancestors = parent[ancestors]
    does_copy = has_copying[outer] | copying[outer] | back[outer]
    is_internal = _is_inside_marked(
        parent, names.str.contains(_OWN_COPIES_PATTERN).to_numpy(), outer
    )
    selected = outer[does_copy & ~is_internal]
    rows: pl.DataFrame = events.select(
        "event", pl.col("name").cast(pl.String), "duration_ns", "step"
    )[selected]
    return rows


def _is_inside_marked(parent: Ints, marked: Bools, events: Ints) -> Bools:
    """Returns which of some events lie inside a marked one."""
    is_inside = np.zeros(events.size, dtype=np.bool_)
    ancestor = parent[events]
    while (ancestor >= 0).any():
        is_inside |= (ancestor >= 0) & marked[np.maximum(ancestor, 0)]
        ancestor = np.where(ancestor >= 0, parent[np.maximum(ancestor, 0)], -1)
    return is_inside


def find_tiny_operators(context: Context) -> Iterator[Message]:
    """Reports the same few small operators, repeated many times."""
    if context.has_gpu_work:
        yield Abstention(
            "tiny-operators", "the device computes: see launch-bound and small-kernels"
        )
        return
    in_loops, _ = find_loops(context)
    nodes = context.graph.nodes
    start, lane = nodes["start_ns"].to_numpy(), nodes["lane"].fill_null(-1).to_numpy()
    host = context.select_kinds(*_HOST_KINDS) & ~in_loops
    mask, remaining_share = np.zeros(nodes.height, dtype=np.bool_), np.ones(nodes.height)
    calls = 0
    for trace in context.traces:
        for row in context.in_step(context.ask(trace, _find_repeated_operators)).to_dicts():
            end_nodes = [
                np.flatnonzero(context.node_mask(trace, pl.Series([row[end]])))
                for end in ("first", "last")
            ]
            if not end_nodes[0].size or not end_nodes[1].size:
                continue
            run_nodes = (
                host
                & (lane == lane[end_nodes[0][0]])
                & (start >= start[end_nodes[0]].min())
                & (start <= start[end_nodes[1]].max())
            )
            mask |= run_nodes
            remaining_share[run_nodes] = 1 / row["times"]
            calls += row["calls"]
    work = nodes["work_ns"].to_numpy()
    time = int(work[mask].sum())
    if time < _MIN_TINY_SHARE * context.ranks_ns:
        return
    remains = float((work[mask] * remaining_share[mask]).sum() / max(time, 1))
    yield Candidate(
        title=f"{units.format_count(calls)} tiny operators, the same few again and again, take {units.format_duration(time)} of "
        f"{context.where}{context.rank_sum_suffix}",
        changes=(
            Change("scale", NodeSelection("tiny operators, each kind once", mask, "host"), remains),
        ),
        confidence=0.5,
        advice="Do it for all elements at once: stack the tensors and call each operator once, use the `_foreach_` or "
        "fused variant, or compile the function (torch.compile).",
        evidence=context.evidence(mask),
    )


def _find_repeated_operators(trace: Trace) -> pl.DataFrame:
    """Returns intervals in which a few outermost operators repeat: first and last (events), step,
    calls, times.

    Operators that make a batch belong to the loader: `data-starved` reports them.
    """
    schema = {
        "first": pl.UInt32,
        "last": pl.UInt32,
        "step": pl.Int32,
        "calls": pl.Int64,
        "times": pl.Int64,
    }
    events = trace.events
    parent_row = events["parent"].fill_null(0)
    is_op = events["category"] == vocab.OP
    inner = events["parent"].is_not_null() & is_op.gather(parent_row)
    loading = np.zeros(events.height, dtype=np.bool_)
    loading[find_loader_calls(trace)] = True
    parent = events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    makes_batch = pl.Series(_is_inside_marked(parent, loading, np.arange(events.height)))
    ops = (
        events.filter(is_op & ~inner & ~makes_batch)
        .select("event", "name", "lane", "parent", "step", "start_ns", "duration_ns")
        .sort("lane", "start_ns")
        .with_columns(key=pl.struct("name", "lane", "parent", "step").rank("dense"))
    )
    key, took = ops["key"].to_numpy(), ops["duration_ns"].to_numpy()
    used = np.zeros(key.size, dtype=np.bool_)
    runs: list[tuple[int, int, int | None, int, int]] = []
    for period in range(1, min(_MAX_PERIOD, key.size - 1) + 1):
        same = np.flatnonzero(
            np.diff(
                np.concatenate([[False], key[period:] == key[:-period], [False]]).astype(np.int8)
            )
        )
        for low, high in same.reshape(-1, 2).tolist():
            last = high + period - 1
            times = (last + 1 - low) // period
            if (
                times < _MIN_REPETITIONS
                or used[low : last + 1].any()
                or np.median(took[low : last + 1]) > _MAX_TINY_NS
            ):
                continue
            used[low : last + 1] = True
            runs.append(
                (ops["event"][low], ops["event"][last], ops["step"][low], last + 1 - low, times)
            )
    return pl.DataFrame(runs, schema=schema, orient="row")


HOST_OPERATORS_RULES = (
    FindingRule("host-copies", "copies of tensors on the host", find_host_copies),
    FindingRule("tiny-operators", "many tiny operators on the host", find_tiny_operators),
)
