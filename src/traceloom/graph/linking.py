"""Links files or a session into one calibrated graph."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, field

from traceloom.errors import InputError, UsageError
from traceloom.formats import Cache
from traceloom.formats.alignment import find_timed_ops, match_ops
from traceloom.formats.host_trace import read_host_trace
from traceloom.formats.kineto import read_kineto
from traceloom.formats.loading import ReadProgress, Report, fetch_remote, read_all
from traceloom.graph import calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.host_match import Matching, match
from traceloom.graph.inputs import AnyPath, Window, find_inputs
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.system.files import restore_addresses
from traceloom.system.process import trim_memory
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import NO_ROW, build_event_column, extract_column, to_series
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.trace.storage import MappedFiles, is_large_session
from traceloom.trace.trace import HostTrace, Trace, build_empty_frame
from traceloom.trace.vocabulary import COMMAND, GPU_WORK

ProgressCallback = Callable[[str], None]

# Of the ops of the timed steps; below, the graph step does not represent them
_MIN_MATCHED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Linked:
    """The result of linking.

    Attributes:
        graph: All ranks, calibrated.
        refused: One notice (`refused-input`) per file that could not be used; the command exits
            with 4 then.
    """

    graph: Graph
    refused: tuple[Notice, ...] = ()


def link(
    *paths: AnyPath,
    window: Window = "timed",
    cache: bool = True,
    progress: ProgressCallback | None = None,
) -> Linked:
    """Links host and device traces of the ranks of one run into one graph.

    Args:
        paths: A capture, directories, or files in any order; the kind of each is recognized by its
            content. Device traces alone are enough, but give less detail.
        window: For a capture: the `timed` steps, with details of the host trace carried over by the
            order of ops; or the `graph` step, in which every op is known by its id, but which was
            slowed down by observing it.
        cache: Whether to use and fill the cache of read traces.
        progress: Called with a description of each step.

    Returns:
        The graph, with delays calibrated, and the files that were refused.

    Raises:
        UsageError: `several-runs`, `no-inputs`.
        InputError: Nothing given is a device trace; `host-mismatch`: a host trace is of another
            run.

    Example:
        >>> import traceloom
        >>> graph = traceloom.graph.link("run").graph  # doctest: +SKIP
    """
    report_progress: ProgressCallback = progress or (lambda _: None)

    def tell(reading: ReadProgress) -> None:
        part = (
            f" {reading.done_bytes * 100 // reading.total_bytes} %" if reading.total_bytes else ""
        )
        report_progress(f"reading{part}")

    report_progress("reading")
    loaded = load_ranks(*paths, window=window, cache=cache, progress=tell)
    trim_memory()
    # Not earlier: refused input does not need it.
    from traceloom.graph import calibrate
    from traceloom.graph.job import join_ranks
    from traceloom.graph.rank import link_rank

    parts = []
    for number, loaded_rank in enumerate(loaded.ranks, 1):
        report_progress(f"linking rank {loaded_rank.rank} ({number} of {len(loaded.ranks)})")
        parts.append(link_rank(loaded_rank.trace, loaded_rank.matching))
        trim_memory()
    report_progress("joining ranks and calibrating")
    refused = tuple(
        Notice("refused-input", "error", f"refused: {error}", where=error.where)
        for error in loaded.refused
    )
    trim_memory()
    graph = calibrate(join_ranks(parts, loaded.name))
    trim_memory()
    return Linked(replace(graph, notices=(*loaded.notices, *refused, *graph.notices)), refused)


class LoadedRank(Struct, frozen=True):
    """One rank, read and matched.

    Attributes:
        rank: The rank.
        trace: The device trace.
        matching: Its host trace joined to it; None without one.
    """

    rank: int
    trace: Trace
    matching: Matching | None


class LoadedRanks(Struct):
    """All ranks.

    Attributes:
        name: Short name of what the user gave.
        ranks: The ranks, ascending.
        notices: Notices about what is missing or left out.
        refused: Files that could not be used.
    """

    name: str
    ranks: list[LoadedRank] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    refused: list[InputError] = field(default_factory=list)


def load_ranks(
    *paths: AnyPath, window: Window = "timed", cache: bool = True, progress: Report | None = None
) -> LoadedRanks:
    """Reads the traces of one run and joins host and device traces.

    Args:
        paths: As for `traceloom.graph.inputs.find_inputs`.
        window: For a capture, what to link.
        cache: Whether to use and fill the cache of read traces.
        progress: Called with how far the reading is.

    Raises:
        UsageError, InputError: As `find_inputs`; `host-mismatch` where a host trace that was given
        belongs to another process; the refusal of the only device trace.
    """
    inputs = find_inputs(*fetch_remote(paths, cache=cache), window=window)
    out = LoadedRanks(
        restore_addresses(inputs.name), notices=list(inputs.notices), refused=list(inputs.refused)
    )
    # Host traces first: a device trace may be decoded in parallel until then (see
    # `traceloom.formats.ahead`).
    hosts: list[HostTrace | InputError | None] = []
    for rank_input in inputs.ranks:
        try:
            host = rank_input.host
            hosts.append(None if host is None else read_host_trace(host.path, capture=host.entry))
        except InputError as error:  # noqa: PERF203  (few)
            hosts.append(error)
    devices = read_all(
        [rank_input.device for rank_input in inputs.ranks],
        cache=Cache() if cache else None,
        report=progress,
    )
    for rank_input, host_trace, trace in zip(inputs.ranks, hosts, devices, strict=True):
        if isinstance(trace, InputError):
            out.refused.append(trace)
            continue
        rank, host, graph_step = rank_input.rank, rank_input.host, rank_input.graph_step
        matching = None
        try:
            if isinstance(host_trace, InputError):
                raise host_trace
            if host_trace is not None and graph_step is None:
                matching = match(trace, host_trace)
            elif host_trace is not None and graph_step is not None:
                # Joined via the graph step of a capture
                step = read_kineto(graph_step.path, capture=graph_step.entry)
                matching = _propagate_matching(trace, step, match(step, host_trace))
        except InputError as error:
            if host is None or host.capture is None:  # the user gave it
                raise
            text = f"the host trace of rank {rank} is left out: {error}"
            out.notices.append(
                Notice("host-trace-unused", "warning", text, rank=rank, where=str(host.path))
            )
        # Ranks that were merged in one file have labels, or else are numbered.
        for number, each in enumerate((trace, *trace.siblings), rank):
            own = each.rank if trace.siblings and each.rank is not None else number
            out.ranks.append(LoadedRank(own, each, matching if each is trace else None))
    if not out.ranks:
        raise out.refused[0]
    return out


def _propagate_matching(timed_trace: Trace, graph: Trace, matching: Matching) -> Matching:
    """Gives every op of the timed steps the host op that the same op of the graph step has.

    Host ops and the graph step are joined by ids, the graph step and each timed step by the order
    of names.

    Args:
        timed_trace: The trace of the timed window.
        graph: The trace of the graph step, of the same process.
        matching: The host trace joined to the graph step.

    Returns:
        The host trace joined to the timed steps; its outcomes are those of the graph step. Evidence
        is `inferred`.
    """
    same = match_ops(timed_trace, graph, matching.host_op >= 0)
    host_op = np.where(same >= 0, matching.host_op[same], -1)
    matched, all_ops = int((host_op >= 0).sum()), int(find_timed_ops(timed_trace).sum())
    carried = replace(
        matching,
        host_op=host_op,
        exact=False,
        carried=(matched, all_ops - matched),
        rank=timed_trace.rank if timed_trace.rank is not None else matching.rank,
    )
    if matched >= _MIN_MATCHED_SHARE * all_ops and matched:
        return carried
    text = f"only {matched:,} of {all_ops:,} ops of the timed window are found in the graph step; the rest have no host op"
    return carried.with_notices(
        Notice("unlike-graph-step", "warning", text, all_ops - matched, where=timed_trace.meta.path)
    )


_MAX_CACHED_GRAPHS = 2  # for one run the whole and one step
_EVENT_COLUMNS = {
    **dict.fromkeys(("collectives", "copies", "syncs", "python", "tensors"), ("event",)),
    "flows": ("source", "target"),
}
_NOT_LINKED = ("allocations", "kernels", "sources")
_TIMED_FRAMES = ("counters", "marks")
_REFERENCES = ("parent", "op", "launch")
_MIN_LEAD_SHARE = 0.01  # of the step: GPU work from before that goes on for less needs no lead


class _GraphCache:
    """Graphs of the most recent traces; dropped with the first of these traces that is freed."""

    def __init__(self) -> None:
        self._traces: tuple[weakref.ref[Trace], ...] = ()
        self._graphs: dict[tuple[int, int] | None, Graph] = {}

    def of(self, traces: tuple[Trace, ...]) -> dict[tuple[int, int] | None, Graph]:
        """Returns the cached graphs of these traces by first and last step; callers read and add to
        it.
        """
        if len(traces) != len(self._traces) or any(
            ref() is not trace for ref, trace in zip(self._traces, traces, strict=True)
        ):
            self._graphs = {}
            self._traces = tuple(weakref.ref(trace, self.forget) for trace in traces)
        return self._graphs

    def forget(self, reference: weakref.ref[Trace]) -> None:
        if any(ref is reference for ref in self._traces):
            self._traces, self._graphs = (), {}


_graph_cache = _GraphCache()


def link_session(
    session: Session,
    *,
    step: int | None = None,
    last: int | None = None,
    progress: ProgressCallback | None = None,
    remember: bool = True,
) -> Graph:
    """Links the traces of a loaded session into one calibrated graph; the files are not read again.

    With a `step`, every rank is cut to that step before it is linked, so that a step of a large job
    fits in memory. The graph holds what the host did from the step's beginning to its end, the GPU
    work that this launched, however late it ran, and what ran before it on the same devices.
    `event` and `op` of the nodes are rows of the whole traces. Host traces are not used.

    The most recent graphs are cached as long as the traces live: do not change them.

    Args:
        session: The run.
        step: The number of a step; None links all of it.
        last: The last of several steps of which `step` is the first; one step where None.
        progress: Called with a description of each step.
        remember: Whether the graph is cached for the next caller.

    Returns:
        The graph, as `traceloom.graph.link` gives it.

    Raises:
        UsageError: `no-such-step`: no trace has that step.
        InputError: `several-windows`: one rank has several traces (and `step` is not given);
            `unknown-ranks`: several traces do not state their rank.

    Example:
        >>> import traceloom
        >>> from traceloom.graph.linking import link_session
        >>> graph = link_session(traceloom.load("run"), step=12)  # doctest: +SKIP
    """
    cached = _graph_cache.of(session.traces)
    steps = None if step is None else (step, step if last is None else last)
    if steps in cached:
        return cached[steps]
    report_progress: ProgressCallback = progress or (lambda _: None)
    selected, notices = _select_traces(session, steps)
    several = is_large_session(selected)
    parts, storage = [], MappedFiles()
    for number, trace in enumerate(selected, 1):
        subject = (
            "the trace"
            if len(selected) == 1
            else f"rank {trace.rank} ({number} of {len(selected)})"
        )
        report_progress(f"linking {subject}")
        part = link_rank(trace) if steps is None else _link_steps(trace, *steps)
        parts.append(storage.graph(part) if several else part)
    report_progress("joining ranks and calibrating")
    merged = join_ranks(parts, session.name)
    parts.clear()  # calibrating needs as much memory again
    merged = MappedFiles().graph(merged) if several else merged
    trim_memory()
    graph = calibrate(replace(merged, notices=(*notices, *merged.notices)))
    trim_memory()
    if not remember:
        return graph
    if len(cached) >= _MAX_CACHED_GRAPHS:
        del cached[next(iter(cached))]
    cached[steps] = graph
    return graph


def _select_traces(
    session: Session, steps: tuple[int, int] | None
) -> tuple[list[Trace], list[Notice]]:
    """Returns one trace per rank: with steps the first trace that has the first and the last of
    them; one trace may not state its rank.
    """
    candidates = list(session.traces)
    step_label = ""
    if steps is not None:
        step_label = (
            f"step {steps[0]}" if steps[0] == steps[1] else f"step {steps[0]} to {steps[1]}"
        )
        candidates = [
            trace
            for trace in candidates
            if trace.steps["step"].is_in(steps).sum() == len(set(steps))
        ]
        if not candidates:
            recorded = sorted(
                {number for trace in session.traces for number in trace.steps["step"].to_list()}
            )
            recorded_text = (
                f"; the traces have {recorded[0]} to {recorded[-1]}"
                if recorded
                else ": the traces have no steps"
            )
            raise UsageError(f"there is no {step_label}{recorded_text}", slug="no-such-step")
    unique = steps is None or any(trace.rank is None for trace in candidates)
    first: dict[int | None, Trace] = {}
    for trace in candidates:
        if first.setdefault(trace.rank, trace) is trace or not unique:
            continue
        both = f"{first[trace.rank].meta.path}, {trace.meta.path}"
        if trace.rank is None:
            raise InputError(
                f"several traces do not say their rank: {both}",
                slug="unknown-ranks",
                hint="put the rank into the file names, as in rank0.json.gz",
            )
        raise InputError(
            f"there are two device traces of rank {trace.rank}: {both}",
            slug="several-windows",
            hint="a graph is of one window; give one device trace per rank, or ask for one step",
        )
    unnumbered = first.get(None)
    if unnumbered is not None and 0 in first:  # next to others it gets the lowest free number
        free = next(number for number in range(len(first) + 1) if number not in first)
        first[None] = replace(unnumbered, meta=replace(unnumbered.meta, rank=free))
    incomplete = sorted(
        {trace.rank for trace in session.traces if trace.rank is not None} - set(first)
    )
    if not incomplete:
        return list(first.values()), []
    rank_list = ", ".join(map(str, incomplete[:8])) + ("…" if len(incomplete) > 8 else "")
    text = f"{step_label} is not in the traces of {len(incomplete)} ranks ({rank_list}); they are not in the graph"
    return list(first.values()), [Notice("step-missing", "warning", text, len(incomplete))]


def _link_steps(trace: Trace, first: int, last: int) -> Graph:
    """Returns the graph of some steps; a separate function, so that the part of the trace is
    freed.
    """
    bounds = trace.steps.filter(pl.col("step").is_in((first, last)))  # ascending
    part, row = _cut(trace, int(bounds["start_ns"][0]), int(bounds["end_ns"][-1]))
    graph = link_rank(part)
    rows = pl.Series(row, dtype=pl.UInt32)  # events are identified by their rows in the whole trace
    nodes = graph.nodes.with_columns(
        rows[graph.nodes[column]].alias(column) for column in ("event", "op")
    )
    return replace(graph, nodes=nodes)


def _cut(trace: Trace, low: int, high: int) -> tuple[Trace, Ints]:
    """Cuts a trace to [low, high) of its host time, the GPU work that belongs to that, and a lead.

    Kept are: what the host does until `high`; GPU work that it launched, however late it runs, and
    GPU work launched before that still runs. The lead begins where the first GPU work that still
    runs in the step was launched, at most one step length before the step: waits between streams
    are known from calls that come before the work. There is no lead where such work goes on for a
    moment only: it would hold what the host did meanwhile, up to a whole step of one rank without
    its peers. Host events that cross a bound are shortened to it.

    Args:
        trace: The whole trace.
        low: Start of the step, ns.
        high: Its end, ns.

    Returns:
        The part, with rows of its own, for linking (summaries of lanes are those of the whole
        trace); and the row in the whole trace of each of its events.
    """
    events = trace.events
    start = events["start_ns"].to_numpy()
    end = start + np.maximum(events["duration_ns"].to_numpy(), 0)
    device = events["category"].is_in([*GPU_WORK, COMMAND]).to_numpy()
    launch = extract_column(events, "launch", NO_ROW, large=False)
    running = device & (start < high) & (end > low) & (launch >= 0)
    before = running.copy()
    before[running] = start[launch[running]] < low
    from_ns = low
    if int(end[before].max(initial=low)) - low >= _MIN_LEAD_SHARE * (high - low):
        from_ns = max(int(start[launch[running]].min(initial=low)), low - (high - low))
    launched_ns = np.where(launch >= 0, start[launch], start) if start.size else start
    own_work = device & (launched_ns >= from_ns) & (launched_ns < high)
    until = max(high, int(end[own_work].max(initial=high)))
    # Work launched after the step comes after the step's work on each stream: it held nothing of it
    # back.
    ran = device & (end > from_ns) & (start < until) & ((launch < 0) | (launched_ns < high))
    host = (
        (trace.lanes["kind"] == "host").to_numpy()[events["lane"].to_numpy()]
        if events.height
        else device
    )
    bound = np.where(host, high, until)
    # Events of length 0 count by their start; the lower bound belongs to the part, the upper does
    # not.
    retained = own_work | ran | (~device & (start < bound) & ((end > from_ns) | (start >= from_ns)))
    parent = extract_column(events, "parent", NO_ROW, large=False)
    # Keep the parents of all retained events.
    while (missing := parent[retained & (parent >= 0) & ~retained[parent]]).size:
        retained[missing] = True
    row = np.flatnonzero(retained)
    first = np.where(host[row], np.maximum(start[row], from_ns), start[row])
    order = np.argsort(first, kind="stable")
    row, first = row[order], first[order]
    # The events of these rows and everything that refers to them.
    number = np.full(events.height + 1, -1, dtype=np.int64)  # the last for rows that are null
    number[row] = np.arange(row.size)
    events, host = events[row], host[row]
    duration, nested = events["duration_ns"].to_numpy(), events["nested_end_ns"].to_numpy()
    last = start[row] + duration
    last = np.where(host, np.minimum(last, high), last)
    nested = np.where(host, np.minimum(nested, high), nested)
    events = events.with_columns(
        pl.int_range(row.size, dtype=pl.UInt32).alias("event"),
        pl.Series("start_ns", first),
        # Negative durations of damaged files stay; others end at the bound, never before they
        # begin.
        pl.Series("duration_ns", np.where(duration < 0, duration, np.maximum(last - first, 0))),
        pl.Series("nested_end_ns", np.maximum(nested, first)),
        *(
            build_event_column(_map_to_part_rows(events[name], number)).alias(name)
            for name in _REFERENCES
        ),
    )
    frames: dict[str, Any] = {
        "events": events,
        **{name: build_empty_frame(name) for name in _NOT_LINKED},
    }
    for name, columns in _EVENT_COLUMNS.items():
        frame: pl.DataFrame = getattr(trace, name)
        moved = [_map_to_part_rows(frame[column], number) for column in columns]
        in_part = np.flatnonzero(np.min(moved, axis=0) >= 0)
        part = frame[in_part]
        for column, rows in zip(columns, moved, strict=True):
            part.replace_column(
                part.get_column_index(column), to_series(rows[in_part], pl.UInt32).alias(column)
            )
        frames[name] = part
    for name in _TIMED_FRAMES:
        times = getattr(trace, name)["time_ns"].to_numpy()
        frames[name] = getattr(trace, name)[np.flatnonzero((times >= from_ns) & (times < high))]
    return replace(trace, **frames), row


def _map_to_part_rows(rows: pl.Series, number: Ints) -> Ints:
    """Returns references to rows of the whole trace as rows of the part; -1 where the row is not in
    it.
    """
    moved: Ints = number[
        (rows.fill_null(number.size - 1) if rows.null_count() else rows).to_numpy()
    ]
    return moved
