"""Launch-bound, Python-bound, operators that need not be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.data_loading import loader_calls
from traceloom.analyze.intervals import overlaps, union
from traceloom.analyze.names import vocabulary
from traceloom.changes.changes import LOADING, Change, Chosen, Selection
from traceloom.findings.context import Bools, Context, shorten_name
from traceloom.findings.host_waits import IDLE, SAMPLED, between_operators, long_ns, waits_for_requests
from traceloom.findings.rule import Candidate, FindingRule, Message
from traceloom.graph import graph as gs
from traceloom.system import units
from traceloom.trace import vocabulary as cat
from traceloom.trace.arrays import NO_ROW, NULL, column, gather_rows
from traceloom.trace.notice import Abstention, Evidence
from traceloom.trace.trace import Trace

_LEAST_PYTHON = 0.15  # of the window
_LEAST_GAP = 0.02  # of the window
_LEFT = 0.3  # of the time of many short stretches of Python: what compiled or vectorised code leaves
_LOOP = 64  # calls in a row, from which on somebody loops over the elements of a tensor
# What Python calls for one element; runs of others may be a loop in C++ over many tensors.
_OF_ELEMENTS = ("aten::item", "aten::select", "aten::index", "aten::is_nonzero", "aten::equal")
_MOST_LOOPS = 16  # of a trace that are looked at, those of the most calls
_LATE = ("host_op", "host_launch", "host_python", "host_unobserved")
_SINGLE = ("host_op", "host_launch")
_BETWEEN = ("host_python", "host_unobserved")  # long ones are pauses: other launches do not shorten them
_ALSO = ("launch_latency", "kernel_to_kernel")  # pauses that one submission of everything shortens as well
_ELEMENTWISE = r"elementwise|pointwise|triton_poi"
_MANY = 20


def launch_bound(context: Context) -> Iterator[Message]:
    """Kernels wait for their launches."""
    if not context.on_device:
        yield Abstention("launch-bound", "no GPU work was recorded")
        return
    if context.sampled:
        yield Abstention("launch-bound", SAMPLED)
        return
    late = _late(context)
    idle = int(late["duration_ns"].sum())
    if idle < _LEAST_GAP * context.whole_ns:
        return
    also = context.gaps.filter(pl.col("cause").is_in(list(_ALSO)))
    of_ranks = np.zeros(len(context.traces), dtype=np.int64)
    for parts in (late, also):
        np.add.at(of_ranks, parts["trace"].to_numpy(), parts["duration_ns"].to_numpy())
    with_latency = int(of_ranks.sum())
    # what better launching could win at most on one rank; a pause may go on into the next step
    most = min(int(of_ranks.max()), context.step_ns * context.step_count)
    longest = late.sort("duration_ns", descending=True, maintain_order=True)
    gaps = [
        Evidence(f"GPU idle: {shorten_name(activity or 'nothing recorded')}", context.traces[trace].rank, start_ns, ns)
        for activity, trace, start_ns, ns in longest.filter(pl.int_range(pl.len()).over("trace") < 3)
        .head(4)
        .select("host_activity", "trace", "start_ns", "duration_ns")
        .iter_rows()
    ]
    yield Candidate(
        title=f"launches come too late: the GPU is idle for {units.duration(idle)} of {context.where}"
        f"{context.over_ranks}" + (f" ({units.duration(with_latency)} with launch latency)" if most > idle else ""),
        changes=(Change("graph", Selection("gpu")),),
        confidence=0.6,
        advice="Submit the step with fewer, larger launches: torch.compile, CUDA graphs (torch.cuda.graphs, "
        "mode='reduce-overhead'), larger batches, fused operators.",
        evidence=tuple(gaps),
        at_most_ns=most,
        host=partial(_while_late, context),
    )


def _late(context: Context) -> pl.DataFrame:
    """Parts of gaps, as in `Context.gaps`, in which the GPU waits for a launch that comes late."""
    cause, long = pl.col("cause"), long_ns(context)
    late = context.gaps.filter(
        cause.is_in(list(_LATE)), ~(cause.is_in(list(_BETWEEN)) & (pl.col("duration_ns") >= long))
    )
    if context.steps is not None or not late.height:
        return late
    # one call or operator that takes long, at the start say, does not come again
    took = pl.concat(trace.events["duration_ns"].gather(part["host_event"]) for trace, part in context.by_trace(late))
    once = pl.min_horizontal("duration_ns", took) >= long
    return late.filter(~(once & cause.is_in(list(_SINGLE))))


def _while_late(context: Context) -> pl.DataFrame:
    """What the threads that launch do while the GPU waits for them, `Context.stretches`."""
    host = context.stretches(context.of_kind(gs.HOST, gs.THINK, gs.LAUNCH))
    parts = [host.clear()]
    # of each gap as much as is late, from where that begins
    all_late = _late(context).drop_nulls("launch").group_by("trace", "gap", "step").agg(
        pl.col("launch").first(), pl.col("start_ns").min(), pl.col("duration_ns").sum()
    )  # fmt: skip
    rank = host["rank"].to_numpy()
    for trace, late in context.by_trace(all_late):
        rows = host[np.flatnonzero(rank == trace.rank)] if len(context.traces) > 1 else host
        # lanes one after the other on one axis
        width = trace.end_ns - trace.start_ns + 1
        offset = trace.events["lane"][late["launch"]].to_numpy().astype(np.int64) * width
        start = late["start_ns"].to_numpy() + offset
        lanes = rows["lane"].to_numpy().astype(np.int64) * width
        low, high = (rows[name].to_numpy() + lanes for name in ("start_ns", "end_ns"))
        shared = overlaps(low, high, union(start, start + late["duration_ns"].to_numpy()))
        at = pl.DataFrame({"start_ns": shared.start - lanes[shared.left], "end_ns": shared.end - lanes[shared.left]})
        parts.append(rows[["rank", "lane"]][shared.left].hstack(at))
    return pl.concat(parts)


def _loops(trace: Trace) -> pl.DataFrame:
    """Loops over the elements of a tensor, as runs of one operator: name, calls, step, first and last (events).

    `for value in tensor` begins with `aten::unbind`, after which any operator may be the loop's. What a data loader
    does is its own matter.
    """
    words, is_op = vocabulary(trace), (trace.events["category"] == cat.OP).to_numpy()
    parent, lane = column(trace, "parent", NO_ROW), column(trace, "lane")
    inside = gather_rows(is_op | gather_rows(words.matching(LOADING), words.code), parent)
    row = np.flatnonzero(is_op & ((parent < 0) | ~inside))
    row = row[np.argsort(lane[row], kind="stable")]
    # where a run begins: what comes before it is of another lane, step, parent or name
    begins = np.ones(row.size, dtype=np.bool_)
    columns = [values[row] for values in (lane, column(trace, "step", NULL), parent, words.code)]
    begins[1:] = np.any([values[1:] != values[:-1] for values in columns], axis=0)
    first = np.flatnonzero(begins)
    calls = np.diff(np.append(first, row.size))
    run = np.flatnonzero(calls >= _LOOP)
    before, last = row[first[np.maximum(run - 1, 0)]], row[first[run] + calls[run] - 1]
    events = trace.events[["name", "lane", "step"]]
    loops, above = events[row[first[run]]], events[before]
    parts = ((above["name"] == "aten::unbind") & (above["lane"] == loops["lane"])).to_numpy() & (run > 0)
    numbers = {"first": np.where(parts, before, row[first[run]]), "last": last, "calls": calls[run]}
    return loops.hstack(pl.DataFrame(numbers)).filter(pl.lit(pl.Series(parts)) | pl.col("name").is_in(_OF_ELEMENTS))


def find_loops(context: Context) -> tuple[Bools, dict[str, int]]:
    """The nodes of such loops from start to end, with what they launch, and how often each call is made."""
    nodes, edges = context.graph.nodes, context.graph.edges
    in_loops = np.zeros(nodes.height, dtype=np.bool_)
    calls: dict[str, int] = {}
    host = context.of_kind(gs.HOST, gs.THINK, gs.LAUNCH)
    start, lane = nodes["start_ns"].to_numpy(), nodes["lane"].fill_null(-1).to_numpy()
    for trace in context.traces:
        loops = context.in_step(context.ask(trace, _loops))
        for row in (loops.sort("calls", descending=True).head(_MOST_LOOPS) if loops.height else loops).to_dicts():
            ends = [np.flatnonzero(host & context.nodes_of(trace, pl.Series([row[end]]))) for end in ("first", "last")]
            if ends[0].size and ends[1].size:
                in_loops |= (
                    host & (lane == lane[ends[0][0]]) & (start >= start[ends[0][0]]) & (start <= start[ends[1]].max())
                )
                calls[row["name"]] = calls.get(row["name"], 0) + row["calls"]
    launched = edges["target"].filter(
        (edges["kind"].cast(pl.String) == "launch") & pl.Series(in_loops)[edges["source"]]
    )
    in_loops[launched.to_numpy()] = True
    return in_loops & ~context.of_kind(*gs.COMMUNICATION), calls


def python_bound(context: Context) -> Iterator[Message]:
    """Python between operators holds up the step."""
    if not context.of_kind(gs.HOST).any() or not (context.graph.nodes["category"] == cat.OP).any():
        yield Abstention("python-bound", "no operators were recorded: what the host did is unknown")
        return
    if waits_for_requests(context):
        yield Abstention("python-bound", IDLE)
        return
    if context.sampled:
        yield Abstention("python-bound", SAMPLED)
        return
    loops, calls = find_loops(context)
    if context.work_ns(loops & ~context.of_kind(gs.KERNEL, gs.COPY, gs.FILL)) >= _LEAST_GAP * context.whole_ns:
        host = loops & context.of_kind(gs.HOST, gs.THINK, gs.LAUNCH)
        many = ", ".join(
            f"{shorten_name(name)} {units.count(count)} times" for name, count in sorted(calls.items())[:3]
        )
        yield Candidate(
            title=f"a loop over the elements of a tensor calls {many}: {units.duration(context.work_ns(host))} of "
            f"{context.where}{context.over_ranks}",
            changes=(Change("remove", Chosen("loops over elements", loops)),),
            confidence=0.5,
            advice="One call for the whole tensor takes hardly longer than one of these; where Python needs the "
            "values, `tensor.tolist()` reads them at once.",
            evidence=context.evidence(host),
        )
    work = context.graph.nodes["work_ns"].to_numpy()
    short = between_operators(context) & ~loops & (work < long_ns(context))
    if not short.any():
        return
    time = context.work_ns(short)
    if time < _LEAST_PYTHON * context.whole_ns * max(context.rank_count, 1):
        return  # as much lies between the operators of any step, most of it the cost of recording them
    slower = "; recording stacks makes it look longer than it is" if context.stacks else ""
    yield Candidate(
        title=f"Python between operators takes {units.duration(time)} of {context.where}{context.over_ranks}{slower}",
        changes=(Change("scale", Chosen("Python between operators", short, "think"), _LEFT),),
        confidence=0.3 if context.stacks else 0.4,
        advice="Compile the model or replay it as a CUDA graph; vectorise loops over tensors, cache what does not "
        "change, log less often.",
        evidence=context.evidence(short),
        at_most_ns=context.step_ran_ns,  # who waits runs no Python
    )


def small_kernels(context: Context) -> Iterator[Message]:
    """Runs of elementwise kernels that one kernel could do."""
    chosen = Selection("kernels", _ELEMENTWISE)
    mask = chosen.nodes(context.graph)
    count = int(mask.sum())
    if count < _MANY * context.step_count:
        return
    source, target = (context.graph.edges[end].to_numpy() for end in ("source", "target"))
    streams = (context.graph.edges["kind"].cast(pl.String) == "stream").to_numpy()
    following = np.zeros(mask.size, dtype=np.bool_)
    following[target[streams & mask[source] & mask[target]]] = True
    many = int(following.sum())
    if many < _MANY // 2 * context.step_count:
        return
    own = [context.many(int(context.own(nodes).sum())) for nodes in (following, mask)]
    yield Candidate(
        title=f"{own[0]} of {own[1]} elementwise kernels follow another one: they could be one",
        changes=(Change("fuse", chosen),),
        confidence=0.6,
        advice="Let torch.compile fuse them, or use fused operators.",
        evidence=(
            Evidence("elementwise kernels", count=count, total_ns=context.work_ns(mask)),
            *context.evidence(following, 2),
        ),
    )


RULES = (
    FindingRule("launch-bound", "launches come too late for the GPU", launch_bound),
    FindingRule("python-bound", "Python between operators decides the step", python_bound),
    FindingRule("small-kernels", "many small kernels that could be one", small_kernels),
)

Ints = NDArray[np.int64]

_COPIES = r"^aten::(?:clone|contiguous|to|_to_copy|copy_|reshape|flatten|repeat)$"
_COPIES_BACK = r"^autograd::engine::evaluate_function: (?:CloneBackward|ToCopyBackward|CopyBackwards|CopySlices)"
_COPYING = r"^aten::(?:copy_|clone|_to_copy)$"
# Copies that these make are theirs: the bytes have to get from one place to another.
_OWN = r"^(?:Optimizer\.|FSDP::|gloo:|enumerate\(DataLoader\))"
_LEAST_SHARE = 0.02
_SHORT_NS = 100_000  # Python behind an operator that takes no longer is part of calling it
_NO_LANE = 2**32 - 1
_PERIOD = 6  # operators at most of which a stretch of tiny ones is made
_TIMES = 24  # at least that these come one after the other
_TINY_NS = 40_000  # most of them take no longer, recorded
_LEAST_TINY = 0.05  # of the step
_HOST = (gs.HOST, gs.THINK)


def extra_copies(context: Context) -> Iterator[Message]:
    """Copies that the program asks for itself."""
    if context.on_device:
        yield Abstention("host-copies", "the device computes: see device-copies and needless-copies")
        return
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    count, by_name = 0, pl.DataFrame()
    for trace in context.traces:
        rows = context.in_step(context.ask(trace, _copies))
        count += rows.height
        by_name = pl.concat([by_name, rows.select("name", "duration_ns")])
        if rows.height:
            mask |= context.below(trace, rows["event"])
    # the short stretch of Python behind each: it calls the next one, and gives the memory back
    nodes = context.graph.nodes
    order = nodes.select("rank", "lane", "start_ns", "node").with_row_index("at")
    order = order.sort("rank", "lane", "start_ns", "node")
    at, lane = order["at"].to_numpy(), order["lane"].fill_null(_NO_LANE).to_numpy()
    follows = np.zeros(at.size, dtype=np.bool_)
    follows[at[1:]] = mask[at[:-1]] & (lane[1:] == lane[:-1])
    mask |= follows & between_operators(context) & (nodes["work_ns"].to_numpy() <= _SHORT_NS)
    time = context.work_ns(mask & context.of_kind(*_HOST))
    if not count or time < _LEAST_SHARE * context.whole_ns * max(context.rank_count, 1):
        return
    sums = by_name.group_by("name").agg(pl.col("duration_ns").sum())
    sums = sums.sort("duration_ns", "name", descending=[True, False])
    yield Candidate(
        title=f"{units.count(count)} copies of tensors on the host take {units.duration(time)} of {context.where}"
        f"{context.over_ranks}, most of it in {shorten_name(sums['name'][0])}",
        changes=(Change("remove", Chosen("copies of tensors on the host", mask, "ops")),),
        confidence=0.4,
        advice="Leave out unneeded clones and conversions; keep one layout and one type: each "
        "`.contiguous()`, `.to()` and `reshape` of a transposed tensor writes all of it anew, and its gradient, too.",
        evidence=context.evidence(mask),
    )


def _copies(trace: Trace) -> pl.DataFrame:
    """Outermost operators that copy, without those of the optimizer, of FSDP and of the loader."""
    events = trace.events
    names, parent = events["name"], events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    is_op = (events["category"] == cat.OP).to_numpy()
    copying = names.str.contains(_COPYING).to_numpy() & is_op
    back = names.str.contains(_COPIES_BACK).to_numpy()
    candidate = np.flatnonzero((names.str.contains(_COPIES).to_numpy() & is_op) | back)
    outer = candidate[(parent[candidate] < 0) | ~is_op[np.maximum(parent[candidate], 0)]]
    has_copying = np.zeros(parent.size, dtype=np.bool_)  # inside
    above = parent[np.flatnonzero(copying)]
    while (above := above[above >= 0]).size:  # one turn per level of nesting
        has_copying[above] = True
        above = parent[above]
    inside = has_copying[outer] | copying[outer] | back[outer]
    own = _below(parent, names.str.contains(_OWN).to_numpy(), outer)
    kept = outer[inside & ~own]
    rows: pl.DataFrame = events.select("event", pl.col("name").cast(pl.String), "duration_ns", "step")[kept]
    return rows


def _below(parent: Ints, marked: Bools, events: Ints) -> Bools:
    """Which of some events lie inside a marked one."""
    inside = np.zeros(events.size, dtype=np.bool_)
    above = parent[events]
    while (above >= 0).any():
        inside |= (above >= 0) & marked[np.maximum(above, 0)]
        above = np.where(above >= 0, parent[np.maximum(above, 0)], -1)
    return inside


def tiny_operators(context: Context) -> Iterator[Message]:
    """The same few small operators again and again."""
    if context.on_device:
        yield Abstention("tiny-operators", "the device computes: see launch-bound and small-kernels")
        return
    in_loops, _ = find_loops(context)
    nodes = context.graph.nodes
    start, lane = nodes["start_ns"].to_numpy(), nodes["lane"].fill_null(-1).to_numpy()
    host = context.of_kind(*_HOST) & ~in_loops
    mask, left = np.zeros(nodes.height, dtype=np.bool_), np.ones(nodes.height)
    calls = 0
    for trace in context.traces:
        for row in context.in_step(context.ask(trace, _stretches)).to_dicts():
            ends = [np.flatnonzero(context.nodes_of(trace, pl.Series([row[end]]))) for end in ("first", "last")]
            if not ends[0].size or not ends[1].size:
                continue
            stretch = (
                host & (lane == lane[ends[0][0]]) & (start >= start[ends[0]].min()) & (start <= start[ends[1]].max())
            )
            mask |= stretch
            left[stretch] = 1 / row["times"]
            calls += row["calls"]
    work = nodes["work_ns"].to_numpy()
    time = int(work[mask].sum())
    if time < _LEAST_TINY * context.whole_ns * max(context.rank_count, 1):
        return
    remains = float((work[mask] * left[mask]).sum() / max(time, 1))
    yield Candidate(
        title=f"{units.count(calls)} tiny operators, the same few again and again, take {units.duration(time)} of "
        f"{context.where}{context.over_ranks}",
        changes=(Change("scale", Chosen("tiny operators, each kind once", mask, "host"), remains),),
        confidence=0.5,
        advice="Do it for all elements at once: stack the tensors and call each operator once, use the `_foreach_` or "
        "fused variant, or compile the function (torch.compile).",
        evidence=context.evidence(mask),
    )


def _stretches(trace: Trace) -> pl.DataFrame:
    """Stretches in which a few outermost operators repeat: first and last (events), step, calls, times.

    Those that make a batch are the loader's: `data-starved` has them.
    """
    schema = {"first": pl.UInt32, "last": pl.UInt32, "step": pl.Int32, "calls": pl.Int64, "times": pl.Int64}
    events = trace.events
    above = events["parent"].fill_null(0)
    is_op = events["category"] == cat.OP
    inner = events["parent"].is_not_null() & is_op.gather(above)
    loading = np.zeros(events.height, dtype=np.bool_)
    loading[loader_calls(trace)] = True
    parent = events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    makes_batch = pl.Series(_below(parent, loading, np.arange(events.height)))
    ops = (
        events.filter(is_op & ~inner & ~makes_batch)
        .select("event", "name", "lane", "parent", "step", "start_ns", "duration_ns")
        .sort("lane", "start_ns")
        .with_columns(key=pl.struct("name", "lane", "parent", "step").rank("dense"))
    )
    key, took = ops["key"].to_numpy(), ops["duration_ns"].to_numpy()
    taken = np.zeros(key.size, dtype=np.bool_)
    stretches: list[tuple[int, int, int | None, int, int]] = []
    for period in range(1, min(_PERIOD, key.size - 1) + 1):
        same = np.flatnonzero(
            np.diff(np.concatenate([[False], key[period:] == key[:-period], [False]]).astype(np.int8))
        )
        for low, high in same.reshape(-1, 2).tolist():
            last = high + period - 1
            times = (last + 1 - low) // period
            if times < _TIMES or taken[low : last + 1].any() or np.median(took[low : last + 1]) > _TINY_NS:
                continue
            taken[low : last + 1] = True
            stretches.append((ops["event"][low], ops["event"][last], ops["step"][low], last + 1 - low, times))
    return pl.DataFrame(stretches, schema=schema, orient="row")


HOST_OPERATORS_RULES = (
    FindingRule("host-copies", "copies of tensors on the host", extra_copies),
    FindingRule("tiny-operators", "many tiny operators on the host", tiny_operators),
)
