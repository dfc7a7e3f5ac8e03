"""Rules about steps that the host limits: launches, Python, element loops, small kernels, copies
and operators that need not be.
"""

import re
from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.data_loading import find_loader_calls
from traceloom.analyze.intervals import find_overlaps, merge_intervals
from traceloom.analyze.names import build_vocabulary
from traceloom.changes.changes import Change, NodeSelection, Selection
from traceloom.findings.context import Bools, Context, shorten_name
from traceloom.findings.host_waits import (
    PROGRAM_WAITS,
    compute_min_pause_ns,
    select_time_between_operators,
)
from traceloom.findings.rule import NO_DEVICE, SAMPLED, Candidate, Condition, FindingRule, Message
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import (
    NO_ROW,
    NULL,
    find_nearest_ancestor,
    get_event_column,
)
from traceloom.trace.notice import Evidence
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
    parent, lane = _find_enclosing_events(trace), get_event_column(trace, "lane")
    makes_batch = trace.events["event"].is_in(find_loader_events(trace).implode()).to_numpy()
    row = np.flatnonzero(is_op & ~makes_batch & ((parent < 0) | ~is_op[parent]))
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


def _find_enclosing_events(trace: Trace) -> Ints:
    """Returns for each event the one around it that is no frame of Python, of which each call has
    its own; -1 for none.
    """
    is_python = (trace.events["category"] == vocab.PYTHON).to_numpy()
    return find_nearest_ancestor(get_event_column(trace, "parent", NO_ROW), ~is_python)


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
    loops, calls = context.ask(context, find_loops)
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
        advice=f"Compile the model{' or replay it as a CUDA graph' if context.has_gpu_work else ''}; vectorise loops "
        "over tensors, cache what does not change, log less often.",
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


_NO_OPERATORS: Condition = (
    lambda context: (
        not context.select_kinds(graph_schema.HOST).any()
        or not (context.graph.nodes["category"] == vocab.OP).any()
    ),
    "no operators were recorded: what the host did is unknown",
)
RULES = (
    FindingRule(
        "launch-bound",
        "launches come too late for the GPU",
        find_launch_bound,
        (NO_DEVICE, SAMPLED),
    ),
    FindingRule(
        "python-bound",
        "Python between operators decides the step",
        find_python_bound,
        (_NO_OPERATORS, PROGRAM_WAITS, SAMPLED),
    ),
    FindingRule("small-kernels", "many small kernels that could be one", find_small_kernels),
)

_COPY_OPS = r"^aten::(?:clone|contiguous|to|_to_copy|copy_|reshape|flatten|repeat)$"
_BACKWARD_COPY_OPS = r"^autograd::engine::evaluate_function: (?:CloneBackward|ToCopyBackward|CopyBackwards|CopySlices)"
_COPYING_OPS = r"^aten::(?:copy_|clone|_to_copy)$"
# Copies inside these belong to them: the bytes have to get from one place to another.
_OWN_COPIES_PATTERN = r"^(?:Optimizer\.|FSDP::|gloo:|enumerate\(DataLoader\))"
_FIRST_SHAPE_PATTERN = r"^\[\[([0-9,]+)\]"
_MIN_ELEMENTS = 1024  # of a tensor: with fewer the call takes the time, not the copy
_MAJORITY = 0.5  # of an operator's time
_MIN_SHARE = 0.02
_MAX_SHORT_NS = 100_000  # Python behind an operator that takes no longer is part of calling it
_NO_LANE = 2**32 - 1
_MAX_PERIOD = 6  # operators at most in the repeated pattern of tiny ones
_MIN_REPETITIONS = 24  # minimum repetitions in a row
_MAX_TINY_NS = 40_000  # the median of their recorded times
_MIN_TINY_SHARE = 0.05  # of the step
_HOST_KINDS = (graph_schema.HOST, graph_schema.THINK)
_MIN_DOMINATING_SHARE = 0.1  # of the step; without a device twice as much
_MIN_DOMINATING_NS = 100_000  # the mean of their times: many short ones are launches, or tiny
_MAX_ASLEEP_SHARE = 0.2  # of an operator's time: it waits
_NOT_ITSELF_PATTERN = rf"{_OWN_COPIES_PATTERN}|^autograd::engine|^c10d::|record_param_comms"
_MIN_CALLS, _INITIAL_PATTERN = 3, r"normal|uniform|random|fill_|zero_"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::convolution")
_BESIDE_THE_MODEL_PATTERN = (
    r"^aten::(?:_?sort|argsort|topk|kthvalue|median|_?unique|msort|cum|logcumsum|_?linalg|cdist|_cdist|_?fft"
    r"|normal|uniform_|random_|randperm|exponential_|multinomial|poisson|histc|bincount|searchsorted|upsample|nonzero)"
)


def find_host_copies(context: Context) -> Iterator[Message]:
    """Reports copies that the program makes itself."""
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
        title=f"{units.format_quantity(count, 'copy')} of tensors on the host {'takes' if count == 1 else 'take'} {units.format_duration(time)} of {context.where}"
        f"{context.rank_sum_suffix}, most of it in {shorten_name(sums['name'][0])}",
        changes=(Change("remove", NodeSelection("copies of tensors on the host", mask, "ops")),),
        confidence=0.4,
        advice="Leave out unneeded clones and conversions; keep one layout and one type: each "
        "`.contiguous()`, `.to()` and `reshape` of a transposed tensor writes all of it anew, and its gradient, too.",
        evidence=context.evidence(mask),
    )


def _find_copy_operators(trace: Trace) -> pl.DataFrame:
    """Returns outermost operators that copy, without those of the optimizer, of FSDP and of the
    loader, and without copies of a few elements; of an operator that mostly does something else
    besides its copy the copy alone.
    """
    events = trace.events
    names, parent = events["name"], get_event_column(trace, "parent", NO_ROW)
    is_op = (events["category"] == vocab.OP).to_numpy()
    back = names.str.contains(_BACKWARD_COPY_OPS).to_numpy()
    copies = (names.str.contains(_COPYING_OPS).to_numpy() & is_op) | back
    copying = np.flatnonzero(copies)
    top = copying.copy()  # the outermost operator around each copy
    while (outer := (parent[top] >= 0) & is_op[np.maximum(parent[top], 0)]).any():
        top[outer] = parent[top[outer]]
    sizes = trace.tensors.select(
        "event", size=pl.col("shapes").str.extract(_FIRST_SHAPE_PATTERN).str.split(",")
    ).with_columns(
        pl.col("size").cast(pl.List(pl.Int64), strict=False).list.eval(pl.element().product())
    )
    small = sizes.filter(pl.col("size").list.first() < _MIN_ELEMENTS)["event"]
    kept = (
        (names.str.contains(_COPY_OPS).to_numpy() | back)[top]
        & ~_is_inside_marked(parent, copies, copying)
        & ~_is_inside_marked(parent, names.str.contains(_OWN_COPIES_PATTERN).to_numpy(), top)
        & ~np.isin(copying, small.to_numpy())
        & ~np.isin(top, small.to_numpy())
    )
    copying, top = copying[kept], top[kept]
    took = events["duration_ns"].to_numpy()
    copied_ns = np.zeros(parent.size, dtype=np.int64)
    np.add.at(copied_ns, top, took[copying])
    roots = np.unique(np.where(_MAJORITY * took[top] <= copied_ns[top], top, copying))
    rows: pl.DataFrame = events.select(
        "event", pl.col("name").cast(pl.String), "duration_ns", "step"
    )[roots]
    return rows


def _is_inside_marked(parent: Ints, marked: Bools, events: Ints) -> Bools:
    is_inside = np.zeros(events.size, dtype=np.bool_)
    ancestor = parent[events]
    while (ancestor >= 0).any():
        is_inside |= (ancestor >= 0) & marked[np.maximum(ancestor, 0)]
        ancestor = np.where(ancestor >= 0, parent[np.maximum(ancestor, 0)], -1)
    return is_inside


def find_loader_events(trace: Trace) -> pl.Series:
    """Returns the host events that make a batch, with the calls of the loader themselves."""
    tree = build_forest(trace)
    loading = np.zeros(tree.row.size, dtype=np.bool_)
    loading[tree.position[find_loader_calls(trace)]] = True
    return pl.Series(tree.row[tree.outermost_or_self(loading) >= 0], dtype=pl.UInt32)


def find_tiny_operators(context: Context) -> Iterator[Message]:
    """Reports the same few small operators, repeated many times."""
    in_loops, _ = context.ask(context, find_loops)
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
    is_op, parent = events["category"] == vocab.OP, _find_enclosing_events(trace)
    inner = pl.Series((parent >= 0) & is_op.to_numpy()[parent])
    makes_batch = events["event"].is_in(find_loader_events(trace).implode())
    ops = (
        events.with_columns(parent=parent)
        .filter(is_op & ~inner & ~makes_batch)
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


def find_dominating_operators(context: Context) -> Iterator[Message]:
    """Reports operators on the host that take a large part of the step by themselves.

    With a device: those that launch nothing, whatever they are. Without one only what the model is
    not made of: orders, running sums, random numbers, and float64 beside products of other types.
    """
    nodes, on_device = context.graph.nodes, context.has_gpu_work
    names = nodes["name"].cast(pl.String).fill_null("")
    own = (
        context.own(context.select_kinds(graph_schema.HOST))
        & ((nodes["category"] == vocab.OP) & ~names.str.contains(_NOT_ITSELF_PATTERN))
        .fill_null(value=False)
        .to_numpy()
    )
    in_loops, _ = context.ask(context, find_loops)
    own &= ~in_loops & ~context.select_sleeping_nodes(own, _MAX_ASLEEP_SHARE)
    double = np.zeros(nodes.height, dtype=np.bool_)
    for trace in context.traces:
        events, types = trace.events, trace.tensors[["event", "types"]]
        launching = events.filter(pl.col("category").is_in(vocab.LAUNCHES))["op"].drop_nulls()
        own &= ~context.node_mask(trace, pl.concat([launching, find_loader_events(trace)]))
        is_double = types["types"].str.contains('"double"', literal=True).fill_null(value=False)
        kinds = events["name"].gather(types["event"])
        if not on_device and kinds.filter(~is_double).cast(pl.String).is_in(_PRODUCTS).any():
            double |= context.node_mask(trace, types["event"].filter(is_double))
    own &= double | ~names.str.contains(_COPYING_OPS).to_numpy()  # others: see host-copies
    what = pl.when(pl.Series(double)).then(pl.lit("float64")).otherwise(names)
    rows = nodes.select("node", "work_ns", what.alias("what"), name=names).filter(pl.Series(own))
    groups = rows.group_by("what").agg(pl.col("work_ns").sum().alias("ns"), pl.col("node").sort())
    for what_name, ns, group_nodes in groups.sort(
        "ns", "what", descending=[True, False]
    ).iter_rows():
        is_double = what_name == "float64"
        share = _MIN_DOMINATING_SHARE if on_device or is_double else 2 * _MIN_DOMINATING_SHARE
        if ns < max(share * context.ranks_ns, _MIN_DOMINATING_NS * len(group_nodes)) or not (
            is_double
            or re.search(r"^aten::" if on_device else _BESIDE_THE_MODEL_PATTERN, what_name)
        ):
            continue
        # Without steps: what is done once, or is how a model begins, does not come again
        if context.steps is None and (
            len(group_nodes) < _MIN_CALLS or re.search(_INITIAL_PATTERN, what_name)
        ):
            continue
        mask = np.zeros(nodes.height, dtype=np.bool_)
        mask[group_nodes] = True
        largest = (
            rows.filter(pl.Series(mask[rows["node"].to_numpy()]))
            .group_by("name")
            .agg(pl.col("work_ns").sum())
        )
        largest = largest.sort("work_ns", "name", descending=[True, False]).head(2)
        listed = " and ".join(shorten_name(name) for name in largest["name"])
        yield Candidate(
            title=f"{listed} {'take' if largest.height > 1 else 'takes'} {context.format_time_per_step(ns)} of the "
            f"{context.unit if context.steps else 'window'} on the host{context.rank_sum_suffix}"
            + (
                ", in float64"
                if is_double
                else ", which launches nothing meanwhile"
                if on_device
                else ""
            ),
            changes=(Change("remove", NodeSelection(f"{what_name} on the host", mask, "ops")),),
            confidence=0.5,
            advice="Its inputs are float64, as NumPy's arrays are: convert them to float32 where they are made, and "
            "compute on fewer elements."
            if is_double
            else "Make it once, outside the step, and write into it."
            if listed.startswith("aten::empty")
            else "Do it on the device (make the tensor there: device=...), or beside the step, in the workers of the "
            "loader."
            if on_device
            else "Do it less often, on fewer elements, or beside the step.",
            evidence=context.evidence(mask),
        )


def _see_instead(rules: str) -> Condition:
    return (lambda context: context.has_gpu_work), f"the device computes: see {rules}"


HOST_OPERATORS_RULES = (
    FindingRule(
        "host-operator",
        "operators on the host that take much of the step",
        find_dominating_operators,
        (SAMPLED,),
    ),
    FindingRule(
        "host-copies",
        "copies of tensors on the host",
        find_host_copies,
        (_see_instead("device-copies and needless-copies"),),
    ),
    FindingRule(
        "tiny-operators",
        "many tiny operators on the host",
        find_tiny_operators,
        (_see_instead("launch-bound and small-kernels"),),
    ),
)
