"""The host cannot keep the device busy: launches, Python, many small kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom import analyze
from traceloom.findings.ground import Bools, Ground
from traceloom.findings.pauses import IDLE, between_operators, long_ns, waits_for_requests
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.findings.wording import brief
from traceloom.model import Trace, units
from traceloom.model import category as cat
from traceloom.model import graph_schema as gs
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
_ALSO = ("launch_latency", "kernel_to_kernel")  # pauses that one submission of everything shortens as well
_ELEMENTWISE = r"elementwise|pointwise|triton_poi"
_MANY = 20


def _gaps(ground: Ground) -> tuple[int, int, tuple[Evidence, ...]]:
    """Idle time of the devices in the step because launches came late, the most that better launching could win on
    one rank, and the longest such gaps.
    """
    whole, most, shown = 0, 0, []
    for trace in ground.traces:
        rows = ground.in_step(ground.ask(trace, analyze.idle).gaps)
        late = rows.filter(pl.col("cause").cast(pl.String).is_in(list(_LATE)))
        whole += int(late["duration_ns"].sum())
        also = rows.filter(pl.col("cause").cast(pl.String).is_in(list(_ALSO)))
        most = max(most, int(late["duration_ns"].sum()) + int(also["duration_ns"].sum()))
        for row in late.sort("duration_ns", descending=True).head(3).to_dicts():
            what = f"GPU idle: {brief(row['host_activity'] or 'nothing recorded')}"
            shown.append(Evidence(what, trace.rank, row["start_ns"], row["duration_ns"]))
    return whole, most, tuple(sorted(shown, key=lambda one: -(one.duration_ns or 0))[:4])


def launch_bound(ground: Ground) -> Iterator[Said]:
    """Kernels wait for their launches."""
    if not ground.on_device:
        yield Abstention("launch-bound", "no GPU work was recorded")
        return
    idle, most, evidence = _gaps(ground)
    if idle < _LEAST_GAP * ground.whole_ns:
        return
    most = min(most, ground.step_ns * ground.step_count)  # a pause may go on into the next step
    yield Candidate(
        title=f"launches come too late: the GPU is idle for {units.duration(idle)} of {ground.where}"
        f"{ground.over_ranks}"
        + (
            f", and in all {units.duration(most)} with the time launched work takes to begin"
            if most > 1.5 * idle
            else ""
        ),
        changes=(Change("graph", Selection("gpu")),),
        confidence=0.6,
        advice="Submit the step with fewer, larger launches: torch.compile, CUDA graphs (torch.cuda.graphs, "
        "mode='reduce-overhead'), larger batches, fused operators.",
        evidence=evidence,
        at_most_ns=most,
    )


def _loops(trace: Trace) -> pl.DataFrame:
    """Loops over the elements of a tensor, as runs of one operator: name, calls, step, first and last (events).

    `for value in tensor` begins with `aten::unbind`, after which any operator may be the loop's. What a data loader
    does is its own matter.
    """
    columns = ("event", "lane", "parent", "step", "start_ns")
    events = trace.events.select(*columns, pl.col("name", "category").cast(pl.String))
    above = events["parent"].fill_null(0)
    is_op = events["category"] == cat.OP
    loading = events["name"].str.contains(LOADING).gather(above)
    inner = events["parent"].is_not_null() & (is_op.gather(above) | loading)
    runs = (
        events.filter(is_op & ~inner)
        .sort("lane", "start_ns")
        .with_columns(run=pl.struct("lane", "step", "parent", "name").rle_id())
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("name", "lane", "step").first(),
            first=pl.col("event").first(),
            last=pl.col("event").last(),
            calls=pl.len(),
        )
    )
    parts = (pl.col("name").shift(1) == "aten::unbind") & (pl.col("lane").shift(1) == pl.col("lane"))
    return (
        runs.with_columns(parts=parts.fill_null(value=False), before=pl.col("first").shift(1))
        .filter(pl.col("calls") >= _LOOP, pl.col("parts") | pl.col("name").is_in(_OF_ELEMENTS))
        .with_columns(first=pl.when("parts").then("before").otherwise("first"))
    )


def looped(ground: Ground) -> tuple[Bools, dict[str, int]]:
    """All between the beginning and the end of such loops, with what they launch, and how often they call which."""
    nodes, edges = ground.graph.nodes, ground.graph.edges
    found = np.zeros(nodes.height, dtype=np.bool_)
    calls: dict[str, int] = {}
    host = ground.of_kind(gs.HOST, gs.THINK, gs.LAUNCH)
    start, lane = nodes["start_ns"].to_numpy(), nodes["lane"].fill_null(-1).to_numpy()
    for trace in ground.traces:
        loops = ground.in_step(ground.ask(trace, _loops)).sort("calls", descending=True).head(_MOST_LOOPS)
        for row in loops.to_dicts():
            ends = [np.flatnonzero(host & ground.nodes_of(trace, pl.Series([row[end]]))) for end in ("first", "last")]
            if ends[0].size and ends[1].size:
                found |= (
                    host & (lane == lane[ends[0][0]]) & (start >= start[ends[0][0]]) & (start <= start[ends[1]].max())
                )
                calls[row["name"]] = calls.get(row["name"], 0) + row["calls"]
    launched = edges["target"].filter(
        (edges["kind"].cast(pl.String) == "launch") & pl.Series(found).gather(edges["source"])
    )
    found[launched.to_numpy()] = True
    return found & ~ground.of_kind(*gs.COMMUNICATION), calls


def _loop(ground: Ground, mask: Bools, calls: dict[str, int]) -> Candidate:
    """Loops over the elements of tensors."""
    host = mask & ground.of_kind(gs.HOST, gs.THINK, gs.LAUNCH)
    many = ", ".join(f"{brief(name)} {units.count(count)} times" for name, count in sorted(calls.items())[:3])
    return Candidate(
        title=f"a loop over the elements of a tensor calls {many}: {units.duration(ground.work_ns(host))} of "
        f"{ground.where}{ground.over_ranks}",
        changes=(Change("remove", Chosen("loops over elements", mask)),),
        confidence=0.5,
        advice="One call for the whole tensor takes hardly longer than one of these; where Python needs the values, "
        "`tensor.tolist()` reads them at once.",
        evidence=ground.evidence(host),
    )


def python_bound(ground: Ground) -> Iterator[Said]:
    """Python between operators holds up the step."""
    if not ground.of_kind(gs.HOST).any() or not (ground.graph.nodes["category"] == cat.OP).any():
        yield Abstention("python-bound", "no operators were recorded: nobody knows what the host did")
        return
    if waits_for_requests(ground):
        yield Abstention("python-bound", IDLE)
        return
    loops, calls = looped(ground)
    if ground.work_ns(loops & ~ground.of_kind(gs.KERNEL, gs.COPY, gs.FILL)) >= _LEAST_GAP * ground.whole_ns:
        yield _loop(ground, loops, calls)
    work = ground.graph.nodes["work_ns"].to_numpy()
    short = between_operators(ground) & ~loops & (work < long_ns(ground))
    if not short.any():
        return
    time = ground.work_ns(short)
    if time < _LEAST_PYTHON * ground.whole_ns * max(ground.rank_count, 1):
        return  # as much lies between the operators of any step, most of it the cost of recording them
    slower = "; recording stacks makes it look longer than it is" if ground.stacks else ""
    yield Candidate(
        title=f"Python between operators takes {units.duration(time)} of {ground.where}{ground.over_ranks}{slower}",
        changes=(Change("scale", Chosen("Python between operators", short, "think"), _LEFT),),
        confidence=0.3 if ground.stacks else 0.4,
        advice="Compile the model or replay it as a CUDA graph; vectorise loops over tensors, cache what does not "
        "change, log less often.",
        evidence=ground.evidence(short),
        at_most_ns=ground.step_ran_ns,  # who waits runs no Python
    )


def small_kernels(ground: Ground) -> Iterator[Said]:
    """Runs of elementwise kernels that one kernel could do."""
    chosen = Selection("kernels", _ELEMENTWISE)
    mask = chosen.nodes(ground.graph)
    count = int(mask.sum())
    if count < _MANY * ground.step_count:
        return
    source, target = (ground.graph.edges[end].to_numpy() for end in ("source", "target"))
    streams = (ground.graph.edges["kind"].cast(pl.String) == "stream").to_numpy()
    following = np.zeros(mask.size, dtype=np.bool_)
    following[target[streams & mask[source] & mask[target]]] = True
    many = int(following.sum())
    if many < _MANY // 2 * ground.step_count:
        return
    yield Candidate(
        title=f"{ground.many(many)} of {ground.many(count)} elementwise kernels follow another one: they could be one",
        changes=(Change("fuse", chosen),),
        confidence=0.6,
        advice="Let torch.compile fuse them, or use fused operators.",
        evidence=(
            Evidence("elementwise kernels", count=count, total_ns=ground.work_ns(mask)),
            *ground.evidence(following, 2),
        ),
    )


RULES = (
    Rule("launch-bound", "launches come too late for the GPU", launch_bound),
    Rule("python-bound", "Python between operators decides the step", python_bound),
    Rule("small-kernels", "many small kernels that could be one", small_kernels),
)
