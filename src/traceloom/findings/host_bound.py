"""The host cannot keep the device busy: launches, Python, many small kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl

from traceloom.analyze.intervals import overlaps, union
from traceloom.analyze.vocabulary import vocabulary
from traceloom.findings.context import Bools, Context
from traceloom.findings.pauses import IDLE, SAMPLED, between_operators, long_ns, waits_for_requests
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.findings.wording import brief
from traceloom.model import Trace, units
from traceloom.model import category as cat
from traceloom.model import graph_schema as gs
from traceloom.model.arrays import NO_ROW, NULL, column, lookup
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import LOADING, Chosen, Selection

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


def launch_bound(context: Context) -> Iterator[Said]:
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
        Evidence(f"GPU idle: {brief(activity or 'nothing recorded')}", context.traces[trace].rank, start_ns, ns)
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
    inside = lookup(is_op | lookup(words.matching(LOADING), words.code), parent)
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


def looped(context: Context) -> tuple[Bools, dict[str, int]]:
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


def python_bound(context: Context) -> Iterator[Said]:
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
    loops, calls = looped(context)
    if context.work_ns(loops & ~context.of_kind(gs.KERNEL, gs.COPY, gs.FILL)) >= _LEAST_GAP * context.whole_ns:
        host = loops & context.of_kind(gs.HOST, gs.THINK, gs.LAUNCH)
        many = ", ".join(f"{brief(name)} {units.count(count)} times" for name, count in sorted(calls.items())[:3])
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


def small_kernels(context: Context) -> Iterator[Said]:
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
