"""Collectives of a trace as rows with size, bandwidth and exposed time, and communication summed by
kind.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.bandwidth import add_link_peaks, add_sizes
from traceloom.analyze.collective_names import (
    add_algorithms,
    derive_backend,
    derive_collective_kinds,
    describe_collectives,
    find_host_calls,
)
from traceloom.analyze.gpu_work import find_stream_waits
from traceloom.analyze.host_events import (
    BACKWARD,
    FORWARD,
    LOADING,
    OPTIMIZER,
    PHASES,
    classify_events,
    mark_blocking_calls,
    mark_communication_scopes,
)
from traceloom.analyze.intervals import (
    EMPTY_SPANS,
    Spans,
    compute_coverage,
    merge_intervals,
    subtract_spans,
)
from traceloom.analyze.kernel_rules import Rule, select_gpu_work
from traceloom.analyze.steps import (
    contains,
    select_whole_steps,
    summarize_durations,
    summarize_per_step,
)
from traceloom.errors import InputError
from traceloom.formats.arguments import can_reread_events, read_event_texts
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import build_event_column, get_event_column
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_per_trace,
    concatenate_by_trace,
    gather_event_column,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

WhereType = pl.Enum(["device", "host"])
PhaseType = pl.Enum(PHASES)
FIELDS = (
    "kind",
    "group",
    "group_size",
    "members",
    "sequence",
    "element_type",
    "in_bytes",
    "out_bytes",
    "peer",
    "in_splits",
    "out_splits",
    "bytes",
)
"""Columns that the file can provide for a collective."""

_OWN_BYTES = ("in_bytes", "out_bytes", "in_splits", "out_splits", "bytes", "sequence")
_AMD_DEVICE = re.compile(r"\bMI\d|AMD|Radeon", re.IGNORECASE)
_MAX_LEVELS = 4  # annotation > (op >) launch; more than enough, and bounded


def list_communication_calls(trace: Trace, rules: Iterable[Rule] = ()) -> pl.DataFrame:
    """Returns the communication of a trace, kernels first, each by start.

    Returns:
        Columns where (device, host), event, name, backend, device, stream (null on the host), step,
        phase, start_ns, end_ns (>= start), launch (the call that submitted it; null on the host and
        where it is not recorded) and `FIELDS`.
    """
    rules = tuple(rules)
    return _collect_calls([trace], rules)[0] if rules else _calls_by_default_rules(trace)


def add_up_or_null(column: str) -> pl.Expr:
    """Returns the sum of a column; null where a value is not recorded."""
    return pl.when(pl.col(column).is_not_null().all()).then(pl.col(column).sum())


def _collect_calls(traces: Sequence[Trace], rules: tuple[Rule, ...] = ()) -> list[pl.DataFrame]:
    kernels = concatenate_by_trace(select_gpu_work(trace, rules) for trace in traces).filter(
        pl.col("category") == "communication"
    )
    descriptions = describe_collectives(traces)
    on_host = find_host_calls(traces, descriptions)
    rows_by_trace = list(
        zip(traces, split_by_trace(kernels, traces), split_by_trace(on_host, traces), strict=True)
    )
    annotations = pl.concat(
        [build_event_column(_find_annotations(*trace_rows)) for trace_rows in rows_by_trace]
    )
    # From a kernel's own arguments, else those of the op that launched it, else those of the
    # annotation, else its name.
    sources = []
    keys = [TRACE_COLUMN, "event"]
    for events, descriptions_of in (
        (kernels["event"], descriptions),
        (kernels["op"], descriptions),
        (annotations, on_host),
    ):
        # Sizes only where the event occurs once, or they would count several times.
        rows = pl.DataFrame([kernels[TRACE_COLUMN], events.alias("event")])
        joined = rows.with_columns(once=pl.struct(keys).is_unique() & pl.col("event").is_not_null())
        joined = joined.join(descriptions_of, on=keys, how="left", maintain_order="left")
        sources.append(
            joined.with_columns(pl.when("once").then(name).alias(name) for name in _OWN_BYTES)
        )
    name_kinds = derive_collective_kinds(tuple(kernels["name"].unique().sort().to_list()))
    sources.append(kernels[["name"]].join(name_kinds, on="name", how="left", maintain_order="left"))
    amd = pl.Series([_is_amd(trace) for trace in traces], dtype=pl.Boolean)[kernels[TRACE_COLUMN]]
    kernels = kernels.with_columns(
        *(
            pl.coalesce(*(source[name] for source in sources if name in source)).alias(name)
            for name in FIELDS
        ),
        derive_backend("rule", amd=amd).alias("backend"),
    )
    nested_ns = np.concatenate(
        [_compute_nested_ns(trace, calls) for trace, _, calls in rows_by_trace]
    )
    names = gather_event_column(traces, on_host, "event", "name").alias("name")
    hosted = on_host.with_columns(
        names,
        pl.lit(None, pl.UInt32).alias("launch"),
        pl.lit(None, pl.UInt32).alias("op"),
        pl.lit(None, pl.Int32).alias("device"),
        pl.lit(None, pl.Int64).alias("stream"),
        backend=pl.lit(names).str.extract(r"^(\w+):").str.to_lowercase(),
        end_ns=pl.col("end_ns") - pl.Series(nested_ns, dtype=pl.Int64),
    )
    calls = pl.concat(
        [
            _add_step_and_phase(traces, kernels, "device"),
            _add_step_and_phase(traces, hosted, "host"),
        ]
    )
    return split_by_trace(calls.sort(TRACE_COLUMN, maintain_order=True), traces)


def _is_amd(trace: Trace) -> bool:
    return any(name.startswith(("hip", "roc")) for name in trace.meta.versions) or any(
        _AMD_DEVICE.search(name or "") is not None for name in trace.devices["name"]
    )


def _find_annotations(trace: Trace, kernels: pl.DataFrame, on_host: pl.DataFrame) -> Ints:
    """Returns the annotation (`nccl:all_to_all`) around the launch of each kernel, within a few
    levels; -1 for none.
    """
    annotation = np.full(kernels.height, -1)
    if on_host.height and kernels.height:
        ancestor = kernels["launch"].cast(pl.Int64).fill_null(-1).to_numpy()
        parent, is_call = (
            get_event_column(trace, "parent", -1),
            np.zeros(trace.events.height + 1, dtype=np.bool_),
        )
        is_call[on_host["event"].to_numpy()] = True
        for _ in range(_MAX_LEVELS):
            ancestor = np.where(ancestor >= 0, parent[ancestor], -1)
            annotation = np.where((annotation < 0) & is_call[ancestor], ancestor, annotation)
    return annotation


def _compute_nested_ns(trace: Trace, on_host: pl.DataFrame) -> Ints:
    """Returns how much longer each call takes because it is a region around other parts of the
    step.
    """
    if not on_host.height or not mark_communication_scopes(trace).any():
        return np.zeros(on_host.height, dtype=np.int64)
    tree = build_forest(trace)
    part = tree.topmost(
        np.isin(classify_events(trace).phase, (LOADING, FORWARD, BACKWARD, OPTIMIZER))
    )
    positions = tree.position[on_host["event"].to_numpy()]
    inside_ns = tree.subtree_sums(np.where(part, tree.span_ns(), 0))
    return np.where(
        mark_communication_scopes(trace)[positions] & ~part[positions], inside_ns[positions], 0
    )


def _add_step_and_phase(traces: Sequence[Trace], rows: pl.DataFrame, where: str) -> pl.DataFrame:
    """Returns the rows with step and phase: of the kernel's launch, or of the call itself."""
    members = concatenate_by_trace(
        trace.groups.select("group", of_group="ranks", of_size="size") for trace in traces
    )
    grouped = rows.join(
        members.unique([TRACE_COLUMN, "group"], keep="first"),
        on=[TRACE_COLUMN, "group"],
        how="left",
        maintain_order="left",
    )
    members_of = pl.coalesce("members", "of_group")
    size = pl.coalesce("group_size", "of_size", members_of.list.len().cast(pl.Int32))
    sources = split_by_trace(
        rows.select(TRACE_COLUMN, event=pl.coalesce("launch", "op", "event")), traces
    )
    return grouped.select(
        TRACE_COLUMN,
        pl.lit(where, WhereType).alias("where"),
        "event",
        "name",
        "backend",
        "device",
        "stream",
        gather_event_column(traces, rows, "event", "step"),
        pl.concat(
            [
                _find_phases(trace, source["event"])
                for trace, source in zip(traces, sources, strict=True)
            ]
        ),
        "start_ns",
        "end_ns",
        "launch",
        *(
            {"members": members_of, "group_size": size}.get(name, pl.col(name)).alias(name)
            for name in FIELDS
        ),
    )


def _find_phases(trace: Trace, events: pl.Series) -> pl.Series:
    """Returns forward, backward or optimizer, where an enclosing event determines it, or where a
    call that is alone on its thread begins while the backward pass runs on another; null elsewhere.
    """
    none = pl.Series("phase", [None] * events.len(), dtype=PhaseType)
    tree = build_forest(trace)
    if not events.len() or not tree.row.size:
        return none
    phase_of = classify_events(trace).phase
    rows = events.cast(pl.Int64).fill_null(-1).to_numpy()
    positions = np.where(rows >= 0, tree.position[rows], -1)
    nearest = tree.nearest_or_self(np.isin(phase_of, (FORWARD, BACKWARD, OPTIMIZER)))
    source = np.where(positions >= 0, nearest[np.maximum(positions, 0)], -1)
    # Gloo's calls are alone on threads of their own: their phase is that of autograd's thread at
    # the time.
    standalone = np.flatnonzero(
        (positions >= 0) & (source < 0) & (tree.parent[np.maximum(positions, 0)] < 0)
    )
    codes = np.where(source >= 0, phase_of[np.maximum(source, 0)], len(PHASES))
    backward = np.flatnonzero((phase_of == BACKWARD) & (tree.parent < 0))
    if standalone.size and backward.size:
        spans = merge_intervals(tree.start_ns[backward], tree.end_ns[backward])
        codes[standalone[contains(spans, tree.start_ns[positions[standalone]])]] = BACKWARD
    return pl.Series([*PHASES, None], dtype=PhaseType)[codes].alias("phase")


_calls_by_default_rules = cache_per_trace(run_in_batches(_collect_calls))

CALL_SCHEMA = build_schema(
    "rank event where device stream step phase start_ns duration_ns kind backend name group",
    "group_size members sequence peer element_type in_bytes out_bytes in_splits out_splits",
    "size_bytes bus_factor algorithm_gb_per_s bus_gb_per_s link link_peak_gb_per_s link_fraction",
    "algorithm protocol name_certain channels exposed_ns blocking_ns launch launch_ns",
    {"where": WhereType, "phase": PhaseType, "members": pl.List(pl.Int32())},
    {"in_splits": pl.List(pl.Int64()), "out_splits": pl.List(pl.Int64())},
)
SUMMARY_KEYS = ("where", "kind", "group", "group_size", "size_bytes")
SUMMARY_SCHEMA = build_schema(
    *SUMMARY_KEYS,
    "count total_ns min_ns median_ns max_ns bus_gb_per_s best_bus_gb_per_s link_fraction",
    "exposed_ns blocking_ns mean_total_ns min_total_ns max_total_ns mean_call_count step_count",
    {"where": WhereType},
)

# Back ends whose host calls only submit kernels
_SUBMITTING_BACKENDS = (
    "nccl",
    "rccl",
    "hccl",
    "xccl",
    "oneccl",
)
# Work that was ready starts this soon after what it waited for; if later, something else held it
# back.
_MAX_START_DELAY_NS = 30_000
# A host call that waits for a stream returns this soon after the stream's work is done.
_MAX_RETURN_DELAY_NS = 100_000
_GRID = re.compile(rb'"grid"\s*:\s*\[\s*(\d{1,18})')
_MAX_BYTES = 256 << 20  # of text: reading more a second time is not worth this number


@dataclass(frozen=True)
class Collectives(Result):
    """The collectives of one trace. Definitions: docs/concepts/collectives.md.

    Attributes:
        calls: One row per communication kernel, and per collective that runs on a host thread, by
            start. `size_bytes` is the message that bandwidth is defined on; `algorithm_gb_per_s`
            and `bus_gb_per_s` (10^9 bytes/s) are over the whole duration, waiting for other ranks
            included; `link_fraction` is of the link's peak in one direction, null where the group
            may leave the host; `name_certain` says whether the library launches kernels of that
            name for nothing else; `exposed_ns` and `blocking_ns` are null on the host.
        summary: One row per place, kind, group and size, largest total first, with the spread of
            single calls (min_ns, median_ns, max_ns), the median and best bus bandwidth, and per
            whole step mean_total_ns, min_total_ns, max_total_ns, mean_call_count.
    """

    calls: pl.DataFrame
    summary: pl.DataFrame


def collectives(
    trace: Trace, rules: Iterable[Rule] = (), *, peak_gb_per_s: float | None = None
) -> Collectives:
    """Describes every collective of a trace.

    Args:
        trace: One process's trace.
        rules: The user's kernel rules, before the built-in table.
        peak_gb_per_s: Peak of the link of one device in one direction, for groups whose peak is not
            known.
    """
    if peak_gb_per_s is None and not rules:
        return _summarize_by_default_rules(trace)
    return next(
        iter(
            _summarize_collectives([trace], _build_call_rows([trace], tuple(rules), peak_gb_per_s))
        )
    )


@run_in_batches
def _summarize_by_default_rules(traces: Sequence[Trace]) -> Iterable[Collectives]:
    return _summarize_collectives(traces, [_rows_by_default_rules(trace) for trace in traces])


def _summarize_collectives(
    traces: Sequence[Trace], calls: Sequence[pl.DataFrame]
) -> Iterable[Collectives]:
    rows = concatenate_by_trace(calls)
    keys = [TRACE_COLUMN, *SUMMARY_KEYS]
    duration = pl.col("duration_ns")
    sums = rows.group_by(keys, maintain_order=True).agg(
        pl.len().alias("count"),
        duration.sum().alias("total_ns"),
        duration.min().alias("min_ns"),
        duration.median().cast(pl.Int64).alias("median_ns"),
        duration.max().alias("max_ns"),
        pl.col("bus_gb_per_s").median(),
        pl.col("bus_gb_per_s").max().alias("best_bus_gb_per_s"),
        pl.col("link_fraction").median(),
        add_up_or_null("exposed_ns"),
        add_up_or_null("blocking_ns"),
    )
    counted = rows.select(
        *keys, "step", duration.alias("total_ns"), pl.lit(1, pl.Int64).alias("call_count")
    )
    spread = summarize_per_step(
        counted,
        keys,
        ["total_ns", "call_count"],
        concatenate_by_trace(map(select_whole_steps, traces)),
    )
    summary = sums.join(spread, on=keys, how="left", nulls_equal=True, maintain_order="left").sort(
        TRACE_COLUMN,
        "total_ns",
        "kind",
        "size_bytes",
        descending=[False, True, False, False],
        nulls_last=True,
    )
    return map(Collectives, calls, split_by_trace(summary, traces, SUMMARY_SCHEMA))


def collect_session_calls(session: Session) -> pl.DataFrame:
    """Returns the calls of all traces of a session in one frame, with `trace` (its index in
    `session.traces`) before them.
    """
    return pl.concat(
        [
            _rows_by_default_rules(trace).select(pl.lit(number, pl.Int64).alias("trace"), pl.all())
            for number, trace in enumerate(session.traces)
        ]
    )


def _build_call_rows(
    traces: Sequence[Trace], rules: tuple[Rule, ...] = (), peak_gb_per_s: float | None = None
) -> list[pl.DataFrame]:
    calls = concatenate_by_trace(list_communication_calls(trace, rules) for trace in traces)
    # Where kernels communicate, host calls that only submit them communicate nothing themselves.
    on_device = pl.col("where") == "device"
    calls = calls.filter(
        on_device
        | ~on_device.any().over(TRACE_COLUMN)
        | ~pl.col("backend").is_in(_SUBMITTING_BACKENDS)
    )
    if not calls.height:
        return [CALL_SCHEMA.to_frame() for _ in traces]
    duration = pl.col("end_ns") - pl.col("start_ns")
    # Its duration is not the transfer's
    submits = (pl.col("where") == "host") & pl.col("backend").is_in(_SUBMITTING_BACKENDS)
    # bytes per ns are 10^9 bytes per second
    rate = pl.when(duration > 0, ~submits).then(pl.col("size_bytes") / duration)
    calls = add_sizes(_add_channels(add_algorithms(calls), traces)).with_columns(
        rate.alias("algorithm_gb_per_s"), (rate * pl.col("bus_factor")).alias("bus_gb_per_s")
    )
    calls = add_link_peaks(calls, traces, peak_gb_per_s)
    kernels = calls.filter(on_device)
    # Communication that compute does not hide, and the part of it that the next compute really
    # waited for.
    exposed_ns, blocking_ns = np.zeros((2, kernels.height), dtype=np.int64)
    work = concatenate_by_trace(select_gpu_work(trace, rules) for trace in traces)
    columns = [TRACE_COLUMN, "event", "device", "stream", "start_ns", "end_ns", "launch"]
    compute = work.filter(pl.col("category") == "compute")[columns]
    device_compute = compute.partition_by(TRACE_COLUMN, "device", as_dict=True)
    for part in kernels.with_row_index("row").partition_by(TRACE_COLUMN, "device"):
        row = part["row"].to_numpy()
        number, device = part[[TRACE_COLUMN, "device"]].row(0)
        concurrent = device_compute.get((number, device))
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        if concurrent is None:
            exposed_ns[row] = end - start
            continue
        spans = merge_intervals(concurrent["start_ns"].to_numpy(), concurrent["end_ns"].to_numpy())
        exposed_ns[row] = end - start - compute_coverage(spans, start, end)
        blocking_ns[row] = _compute_blocking_ns(traces[number], part, concurrent, spans)
    times = kernels[[TRACE_COLUMN, "event"]].hstack(
        [pl.Series("exposed_ns", exposed_ns), pl.Series("blocking_ns", blocking_ns)]
    )
    described = (
        calls.join(times, on=[TRACE_COLUMN, "event"], how="left", maintain_order="left")
        .with_columns(
            pl.Series("rank", [trace.rank for trace in traces], dtype=pl.Int32)[
                calls[TRACE_COLUMN]
            ],
            duration.alias("duration_ns"),
            pl.col("blocking_ns").replace(-1, None),
            gather_event_column(traces, calls, "launch", "start_ns").alias("launch_ns"),
        )
        .sort(TRACE_COLUMN, "start_ns", "event")
    )
    return split_by_trace(described, traces, CALL_SCHEMA)


def _add_channels(calls: pl.DataFrame, traces: Sequence[Trace]) -> pl.DataFrame:
    """Adds `channels`: NCCL and RCCL launch one thread block per channel; null for other back ends
    and without a grid.

    The grid is in no column of a trace: it is read again from the file, in one pass and for the
    communication kernels alone; also null where the file is gone or above 256 MiB.
    """
    kernels = calls.filter(
        pl.col("where") == "device", pl.col("backend").is_in(["nccl", "rccl"])
    ).sort(TRACE_COLUMN, "event")
    channels: list[tuple[int, int, int]] = []
    for number, (trace, trace_kernels) in enumerate(
        zip(traces, split_by_trace(kernels, traces), strict=True)
    ):
        if (
            not trace_kernels.height
            or not can_reread_events(trace)
            or trace.meta.file_bytes > _MAX_BYTES
        ):
            continue
        in_file = trace_kernels["event"][trace.sources["offset"][trace_kernels["event"]].arg_sort()]
        try:
            for event, text in zip(
                in_file, read_event_texts(trace, in_file.to_numpy()), strict=False
            ):
                grid = _GRID.search(text)
                if grid:
                    channels.append((number, event, min(int(grid[1]), np.iinfo(np.int32).max)))
        except (InputError, OSError):
            pass
    table = pl.DataFrame(
        channels,
        {TRACE_COLUMN: pl.UInt32(), "event": pl.UInt32(), "channels": pl.Int32()},
        orient="row",
    )
    return calls.join(table, on=[TRACE_COLUMN, "event"], how="left", maintain_order="left")


def _compute_blocking_ns(
    trace: Trace, kernels: pl.DataFrame, compute: pl.DataFrame, spans: Spans
) -> Ints:
    """Returns the part of the exposed time at the end of each kernel that the following compute
    waited for.
    """
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    compute_starts = compute["start_ns"].to_numpy()
    order = np.argsort(compute_starts, kind="stable")
    compute_starts = compute_starts[order]
    after = np.searchsorted(compute_starts, end, side="left")
    exists = after < compute_starts.size
    following = order[np.minimum(after, compute_starts.size - 1)]
    # Of the compute that began before, if any did (or took time)
    compute_ends = np.append(np.iinfo(np.int64).min, spans.end)
    quiet = np.maximum(compute_ends[np.searchsorted(spans.start, end, side="left")], start)
    open_end = quiet < end  # no compute runs when the kernel ends
    prompt = (
        exists
        & open_end
        & (compute_starts[np.minimum(after, compute_starts.size - 1)] - end <= _MAX_START_DELAY_NS)
    )
    next_event = compute["event"].to_numpy()[following].astype(np.int64)
    # Several kernels may have the same next compute: it is looked up once, and in the order of
    # rows.
    different, inverse = np.unique(next_event, return_inverse=True)
    waited = find_stream_waits(trace)[0][different]
    streams = compute["stream"].fill_null(-1).to_numpy()[following]
    same = streams == kernels["stream"].fill_null(-1).to_numpy()
    launch = compute["launch"].cast(pl.Int64).fill_null(-1).to_numpy()[following]
    called = get_event_column(trace, "start_ns")[np.maximum(launch, 0)]
    waits = same | waited[inverse]
    held_ns = np.clip(end - np.maximum(quiet, called), 0, None)
    is_host_wait, since = _find_host_waits(trace, launch, end)
    held_by_host = np.clip(end - np.maximum(quiet, since), 0, None)
    late = exists & open_end & ~prompt & is_host_wait
    blocking = np.where(prompt & waits, np.where(called <= end, held_ns, 0), 0)
    blocking = np.where((blocking == 0) & (prompt | late) & is_host_wait, held_by_host, blocking)
    return np.where(prompt & (launch < 0), -1, blocking)


def _find_host_waits(trace: Trace, launch: Ints, end: Ints) -> tuple[Bools, Ints]:
    """Returns whether the launching thread was in a waiting call that ended with the kernel, and
    since when.
    """
    calls = np.flatnonzero(mark_blocking_calls(trace))
    none = np.zeros(launch.size, dtype=np.bool_)
    if not calls.size:
        return none, end
    lane = get_event_column(trace, "lane").astype(np.int64)
    starts = get_event_column(trace, "start_ns")
    backs = starts[calls] + np.maximum(get_event_column(trace, "duration_ns")[calls], 0)
    waited, since = none.copy(), end.copy()
    lanes = np.where(launch >= 0, lane[np.maximum(launch, 0)], -1)
    for thread in np.unique(lanes[lanes >= 0]).tolist():
        own_calls = calls[lane[calls] == thread]
        if not own_calls.size:
            continue
        on_thread = np.flatnonzero(lanes == thread)
        back = backs[lane[calls] == thread]
        order = np.argsort(back, kind="stable")
        wait_index = np.searchsorted(back[order], end[on_thread], side="left")
        is_found = wait_index < back.size
        call = order[np.minimum(wait_index, back.size - 1)]
        begun = starts[own_calls[call]]
        launched = starts[launch[on_thread]]
        ok = (
            is_found
            & (begun < end[on_thread])
            & (back[call] - end[on_thread] <= _MAX_RETURN_DELAY_NS)
            & (launched >= back[call])
        )
        waited[on_thread], since[on_thread] = ok, np.where(ok, begun, end[on_thread])
    return waited, since


_rows_by_default_rules = cache_per_trace(run_in_batches(_build_call_rows))

KEYS = ("kind", "group", "group_description", "group_size", "element_type", "where")
COLLECTIVE_SCHEMA = build_schema(
    "kind group group_description group_size element_type where count bytes total_ns mean_ns min_ns max_ns exposed_ns",
    {"where": WhereType},
)
DEVICE_SCHEMA = build_schema("device count total_ns union_ns exposed_ns")


@dataclass(frozen=True)
class Communication(Result):
    """Communication of one trace. Definitions: docs/concepts/communication.md; none of the numbers
    is a bandwidth.

    Attributes:
        collectives: One row per kind, group, element type and place, largest total first: kind
            (all_reduce, ...; null where neither arguments nor name show it), group,
            group_description, group_size, element_type (null where the file does not state it),
            where (device: kernels; host: calls that run on the host), count, bytes (sum of message
            sizes; null where one of them is unknown), total_ns (sum of durations), mean_ns (rounded
            down), min_ns, max_ns, exposed_ns (device time in which such a kernel runs and no
            compute does, summed over devices; null on the host).
        devices: device, count (kernels), total_ns (sum), union_ns and exposed_ns
            (`communication_ns` and `exposed_communication_ns` of gpu_time).
    """

    collectives: pl.DataFrame
    devices: pl.DataFrame


def communication(trace: Trace, rules: Iterable[Rule] = ()) -> Communication:
    """Sums communication kernels, and collectives that run on the host, by kind, group and element
    type.
    """
    return _summarize_communication(trace, tuple(rules))


@run_in_batches
def _summarize_communication(
    traces: Sequence[Trace], rules: tuple[Rule, ...]
) -> Iterable[Communication]:
    calls = concatenate_by_trace(list_communication_calls(trace, rules) for trace in traces)
    if not calls.height:
        return [
            Communication(COLLECTIVE_SCHEMA.to_frame(), DEVICE_SCHEMA.to_frame()) for _ in traces
        ]
    work = concatenate_by_trace(select_gpu_work(trace, rules) for trace in traces)
    computing = work.filter(pl.col("category") == "compute")[
        [TRACE_COLUMN, "device", "start_ns", "end_ns"]
    ]
    device_parts = computing.partition_by(TRACE_COLUMN, "device", as_dict=True)
    compute = {device: _merge_spans(part) for device, part in device_parts.items()}
    kernels = calls.filter(pl.col("where") == "device")
    keys = [TRACE_COLUMN, "where", "kind", "group", "group_size", "element_type"]
    exposed = []
    for part in kernels.partition_by(*keys, "device"):
        *key, device = part[[*keys, "device"]].row(0)
        exposed.append(
            (
                *key,
                subtract_spans(
                    _merge_spans(part), compute.get((key[0], device), EMPTY_SPANS)
                ).total,
            )
        )
    types = {
        TRACE_COLUMN: pl.UInt32(),
        **{name: COLLECTIVE_SCHEMA[name] for name in (*keys[1:], "exposed_ns")},
    }
    over_devices = (
        pl.DataFrame(exposed, schema=types, orient="row")
        .group_by(keys)
        .agg(pl.col("exposed_ns").sum())
    )
    rows = []
    for part in kernels.partition_by(TRACE_COLUMN, "device"):
        number, device = part[[TRACE_COLUMN, "device"]].row(0)
        spans, total = _merge_spans(part), int((part["end_ns"] - part["start_ns"]).sum())
        exposed_spans = subtract_spans(spans, compute.get((number, device), EMPTY_SPANS))
        rows.append((number, device, part.height, total, spans.total, exposed_spans.total))
    devices = pl.DataFrame(
        rows, schema={TRACE_COLUMN: pl.UInt32(), **DEVICE_SCHEMA}, orient="row"
    ).sort(TRACE_COLUMN, "device")
    size = pl.col("bytes")
    described = concatenate_by_trace(
        trace.groups.select("group", group_description="description") for trace in traces
    )
    collectives = (
        calls.group_by(keys)
        .agg(
            *summarize_durations(pl.col("end_ns") - pl.col("start_ns")),
            pl.when(size.is_not_null().all()).then(size.sum()).alias("bytes"),
        )
        .join(
            described.unique([TRACE_COLUMN, "group"], keep="first"),
            on=[TRACE_COLUMN, "group"],
            how="left",
        )
        .join(over_devices, on=keys, how="left", nulls_equal=True)
        .pipe(cast_to_schema, {TRACE_COLUMN: pl.UInt32(), **COLLECTIVE_SCHEMA})
        .sort(
            TRACE_COLUMN,
            "total_ns",
            *KEYS,
            descending=[False, True] + [False] * len(KEYS),
            nulls_last=True,
        )
    )
    return map(Communication, split_by_trace(collectives, traces), split_by_trace(devices, traces))


def _merge_spans(part: pl.DataFrame) -> Spans:
    return merge_intervals(part["start_ns"].to_numpy(), part["end_ns"].to_numpy())
