"""Rescaling work to another device: the duration of each kernel there, by which rule, and the
interval.

A kernel keeps its measured fraction of the roofline: its time is multiplied by the ratio of the two
rooflines. docs/concepts/simulation-device.md describes the assumptions of each rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.kernel_efficiency import LATENCY_SHARE, MAX_SHORT_NS, SHORT_LATENCY_SHARE
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.kernel_rules import (
    MATRIX_KINDS,
    KindMatcher,
    load_built_in_kind_rules,
    select_gpu_work,
)
from traceloom.analyze.modelled_calls import LINK_COPIES
from traceloom.analyze.placed_calls import Peak, parse_peak, place_on_roofline
from traceloom.analyze.roofline import PeakSpec
from traceloom.changes.changes import NODE_TARGETS
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import changed_graph
from traceloom.errors import UsageError
from traceloom.graph import Plan, graph as graph_schema
from traceloom.graph.graph import Graph, get_point_times
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session

RULES = {
    "roofline": "kernels whose operator has a model, and that come near its roofline: the ratio of the two rooflines; "
    "the interval ends where they take as long as here, and never beats the roofline there",
    "short of roofline": "modelled kernels too short or too narrow to come near their roofline: the same ratio; since "
    "neither peak decides how long they take, they may as well become longer by it",
    "peak": "kernels without a model whose kind calculates: the ratio of the peaks of their element type; the interval "
    "reaches to the ratio of bandwidths and to as long as here",
    "bandwidth": "kernels without a model whose kind moves bytes: the ratio of bandwidths of the memory; the interval "
    "reaches to the ratio of peaks and to as long as here",
    "device copy": "copies and fills inside the device: the ratio of bandwidths; the interval ends at as long as here",
    "same device": "all work of the device, where no other device is asked for: as long as here",
    "link copy": "copies between host and device: as long as here, since the link is none of the device's peaks",
    "communication": "as long as here: the network is the machine's",
    "host": "work of host threads: times the host factor; where it is 1, and the device another, the interval reaches a "
    "quarter faster and slower, since another device seldom has the same host",
}
"""Scaling rules, with a description of each."""
RuleType = pl.Enum(list(RULES))
ACCOUNT_SCHEMA = build_schema("rule kind count here_ns there_ns low_ns high_ns", {"rule": RuleType})
_TRACE_COLUMNS = build_schema(
    "rank event kind peak roofline_here roofline_there arithmetic matrix",
    {
        "peak": pl.Int64,
        "roofline_here": pl.Float64,
        "roofline_there": pl.Float64,
        "matrix": pl.Boolean,
    },
)
_MAX_FACTOR = 1e6
_HOST_INTERVAL = {"ratio": 1.0, "low": 0.8, "high": 1.25}  # factors of a host that nobody names
_RECORDED_DEVICE = Peak("the recorded device", {}, 1.0)
_DEVICE = (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)

# Element types by the names of matrix kernels; the first match wins.
_ELEMENT_TYPES = (
    ("fp8", r"(?i)e4m3|e5m2|fp8|float8|f8f8"),
    ("int8", r"(?i)imma|s8s8|i8816|int8"),
    ("bf16", r"(?i)bf16|bfloat16|_BBS|_BS_"),
    ("fp16", r"(?i)f16f16|fp16|half|h1688|h16816|hgemm|_HHS|_HSS|_HS_"),
    ("tf32", r"(?i)tf32|xf32"),
    ("fp64", r"(?i)dgemm|f64f64|fp64"),
    ("fp32", r"(?i)sgemm|f32f32|_SB_"),
)


@dataclass(frozen=True)
class DeviceChange(Result):
    """The effect of another device on the work of a graph.

    Attributes:
        device: The new device.
        recorded: The devices of the recording.
        host_factor: Factor on the durations of host work.
        before_ns: Duration of the graph as measured.
        after_ns: Duration on the new device, with communication as measured.
        low_ns: Min duration by the rules' intervals.
        high_ns: Max duration by the rules' intervals.
        account: Work of all ranks, one row per rule and kind of GPU work: rule (see `RULES`), kind
            (null on the host), count, here_ns, there_ns, low_ns, high_ns.
    """

    device: str
    recorded: tuple[str, ...]
    host_factor: float
    before_ns: int
    after_ns: int
    low_ns: int
    high_ns: int
    account: pl.DataFrame


@dataclass(frozen=True)
class Rescaled:
    """A graph rescaled to another device.

    Attributes:
        graph: As if measured there, with communication unchanged.
        low: The same with all work as short as the rules' intervals allow.
        high: The same with all work as long as they allow.
        account: What was scaled by which rule.
    """

    graph: Graph
    low: Graph
    high: Graph
    account: DeviceChange


def rescale(
    graph: Graph,
    session: Session | None,
    device: Peak | str | None,
    *,
    host_factor: float = 1.0,
    recorded: PeakSpec = None,
) -> Rescaled:
    """Rescale the work of a graph to another device. On the recorded device nothing changes, to the
    nanosecond.

    Args:
        graph: Calibrated, from the traces of the session or from one of its steps.
        session: The traces; None if there are none, as for a saved graph: all kernels are then
            scaled by kind.
        device: A device's name, `bf16=989e12,memory=3.35e12`, or a `Peak`; None for the recorded
            one.
        host_factor: Factor on the durations of host work.
        recorded: The recorded device, if the traces do not name one with known peaks.

    Raises:
        UsageError: slugs `no-such-device`, `bad-peak`, `bad-host-factor`; `no-recorded-device`: the
            peaks of the recorded device are unknown; `no-device-work`: the job ran on the CPU.
    """
    if not 0 < host_factor < _MAX_FACTOR:
        message = f"the host factor {host_factor:g} is not a number above 0"
        raise UsageError(
            message, slug="bad-host-factor", hint="0.8 makes host work a fifth shorter"
        )
    target_peak = _RECORDED_DEVICE if device is None else _complete(parse_peak(device))
    base = Scenario.of(graph)
    work = graph.nodes.filter(pl.Series(base.nodes(*_DEVICE))).select(
        "node", "rank", "event", "name", node_kind=pl.col("kind").cast(pl.String)
    )
    work = work.with_columns(pl.Series("ns", base.work_ns[work["node"].to_numpy()]))
    if device is not None and not work.height:
        message = f"the job did its work on the CPU: {target_peak.name} takes none of it over"
        raise UsageError(
            message,
            slug="no-device-work",
            hint="--host-factor says how many times as long a CPU takes",
        )
    work = work.join(
        graph.transfers.select("node", copied="kind"), on="node", how="left", maintain_order="left"
    )
    recorded_peak = None if recorded is None else parse_peak(recorded)
    if device is None:
        session, recorded_peak = None, target_peak
    traced, devices = _read_traces(graph, session, target_peak, recorded_peak)
    work = work.join(
        traced, on=["rank", "event"], how="left", maintain_order="left", nulls_equal=True
    )
    scaled = _add_rules(_classify_by_name(work), devices, target_peak)
    if device is None:
        scaled = scaled.with_columns(rule=pl.lit("same device"))
    host = base.nodes(*NODE_TARGETS["host"][0])
    is_other = host_factor == 1 and bool(
        (scaled.select("ratio", "low", "high") != 1).to_numpy().any()
    )
    plan = Plan(graph)
    works, graphs = [base.work_ns], [graph]
    for column in ("ratio", "low", "high"):
        factor = np.where(host, _HOST_INTERVAL[column] if is_other else host_factor, 1.0)
        factor[scaled["node"].to_numpy()] = scaled[column].to_numpy()
        scenario = base.copy()
        scenario.work_ns = np.rint(base.work_ns * factor).astype(np.int64)
        works.append(scenario.work_ns)
        graphs.append(changed_graph(graph, scenario, scenario.times(plan)))
    before, after, low, high = (
        int(np.ptp(get_point_times(case_graph))) if case_graph.nodes.height else 0
        for case_graph in graphs
    )
    account = DeviceChange(
        target_peak.name,
        tuple(dict.fromkeys(peak.name for peak in devices)),
        host_factor,
        before,
        after,
        low,
        high,
        _build_account(graph, scaled, host, works),
    )
    return Rescaled(graphs[1], graphs[2], graphs[3], account)


def _complete(peak: Peak) -> Peak:
    """Returns the peak after checking that it has a bandwidth, which all rules need."""
    if peak.memory is None:
        raise UsageError(
            f"the peaks of {peak.name} lack the memory bandwidth",
            slug="bad-peak",
            hint="add it, as memory=3.35e12",
        )
    return peak


def _read_traces(
    graph: Graph, session: Session | None, target_peak: Peak, recorded: Peak | None
) -> tuple[pl.DataFrame, list[Peak]]:
    """Returns the properties of each GPU kernel in the traces (`_TRACE_COLUMNS`; `peak` is an index
    into the list), and their devices.
    """
    frames = [pl.DataFrame(schema=_TRACE_COLUMNS)]
    devices: list[Peak] = []
    for trace in () if session is None else session.traces:
        # a single trace need not state its rank: the graph does
        rank = (
            trace.rank
            if trace.rank is not None or graph.ranks.height != 1
            else graph.ranks["rank"][0]
        )
        recorded_roofline, other = (
            place_on_roofline(trace, recorded),
            place_on_roofline(trace, target_peak),
        )
        numbers: dict[int, int] = {}
        for device, peak in recorded_roofline.devices.items():
            if isinstance(peak, str):
                hint = "name it with --recorded-device, as `H100 SXM`, or give its peaks: bf16=989e12,memory=3.35e12"
                message = f"the recorded device cannot be compared with {target_peak.name}: {peak}"
                raise UsageError(message, slug="no-recorded-device", hint=hint)
            if peak not in devices:
                devices.append(_complete(peak))
            numbers[device] = devices.index(peak)
        calls = recorded_roofline.calls.select(
            "position", "arithmetic", "matrix", "gpu_ns", roofline_here="roofline_ns"
        ).join(
            other.calls.select("position", roofline_there="roofline_ns"), on="position", how="left"
        )
        matrix_times = calls.filter("matrix").group_by("arithmetic").agg(pl.col("gpu_ns").sum())
        typical_arithmetic = (
            matrix_times.sort("gpu_ns", "arithmetic", descending=[True, False])[
                "arithmetic"
            ].first()
            if calls.height
            else None
        )
        work = (
            select_gpu_work(trace)
            .select("event", "device")
            .with_columns(classify_kinds(trace)["kind"].cast(pl.String))
        )
        # each kernel of a call gets its share of the call's roofline
        share = pl.when(pl.col("gpu_ns") > 0).then(pl.col("ns") / pl.col("gpu_ns"))
        traced = (
            work.join(
                recorded_roofline.work.select("event", "position", "ns"), on="event", how="left"
            )
            .join(calls, on="position", how="left")
            .with_columns(
                pl.col("roofline_here", "roofline_there") * share,
                pl.lit(rank).alias("rank"),
                pl.col("device")
                .replace_strict(numbers, default=None, return_dtype=pl.Int64)
                .alias("peak"),
                # matrix work without a model usually has the element type of work with one
                pl.coalesce("arithmetic", pl.lit(typical_arithmetic, pl.String)).alias(
                    "arithmetic"
                ),
            )
        )
        frames.append(traced.pipe(cast_to_schema, _TRACE_COLUMNS))
    if not devices:
        if recorded is None:
            message = "the recorded device is not known: a graph does not hold its name"
            raise UsageError(
                message,
                slug="no-recorded-device",
                hint="name it with --recorded-device, as `H100 SXM`",
            )
        devices.append(_complete(recorded))
    return pl.concat(frames).unique(["rank", "event"], keep="first"), devices


def _classify_by_name(work: pl.DataFrame) -> pl.DataFrame:
    """Determines the kind of work by name, for work that no trace describes."""
    names = work.filter(pl.col("kind").is_null())["name"].drop_nulls().unique()
    matcher = KindMatcher.of(load_built_in_kind_rules())
    nothing = np.zeros(names.len(), dtype=np.uint64)
    first = matcher.first(names, np.arange(names.len()), nothing, nothing)
    rules = [*(rule.kind for rule in matcher.rules), "other"]
    table = pl.DataFrame(
        {"name": names, "by_name": [rules[number] for number in first]},
        schema_overrides={"by_name": pl.String},
    )
    classified = work.join(table, on="name", how="left", maintain_order="left")
    copy = pl.when(pl.col("node_kind") != graph_schema.KERNEL).then(pl.lit("copy"))
    return classified.with_columns(
        pl.coalesce("kind", copy, "by_name", pl.lit("other")).alias("kind")
    )


def _add_rules(work: pl.DataFrame, devices: list[Peak], target_peak: Peak) -> pl.DataFrame:
    """Adds `rule`, and `ratio`, `low` and `high`: the factor on each duration, and its interval."""
    matrix = pl.col("kind").is_in(MATRIX_KINDS)
    types_by_name = (
        pl.when(pl.col("name").str.contains(pattern)).then(pl.lit(dtype))
        for dtype, pattern in _ELEMENT_TYPES
    )
    modelled = (pl.col("roofline_here") > 0) & (pl.col("roofline_there") > 0)
    classed = work.with_columns(
        pl.col("peak").fill_null(0),
        modelled.fill_null(value=False).alias("modelled"),
        pl.when(matrix)
        .then(pl.coalesce(*types_by_name, "arithmetic"))
        .otherwise(pl.lit("fp32"))
        .alias("element_type"),
        matrix.alias("calculates"),
    )
    keys = ["peak", "element_type", "calculates"]
    ratios = []
    for number, dtype, calculates in classed.select(keys).unique().rows():
        recorded_peak = devices[number]
        rates = [
            device.rate(dtype or "", matrix=calculates) for device in (recorded_peak, target_peak)
        ]
        ratios.append(
            (
                number,
                dtype,
                calculates,
                (recorded_peak.memory or 0) / (target_peak.memory or 1),
                rates[0] / rates[1] if rates[0] and rates[1] else None,
            )
        )
    table = pl.DataFrame(
        ratios,
        {**classed.select(keys).schema, "bandwidth": pl.Float64(), "peaks": pl.Float64()},
        orient="row",
    )
    rows = classed.join(table, on=keys, how="left", maintain_order="left", nulls_equal=True)
    ns, roofline = pl.col("ns"), pl.col("roofline_there") / pl.col("roofline_here")
    link, copy = pl.col("copied").is_in(LINK_COPIES), pl.col("node_kind") != graph_schema.KERNEL
    short = ((ns < MAX_SHORT_NS) & (pl.col("roofline_here") < SHORT_LATENCY_SHARE * ns)) | (
        pl.col("roofline_here") < LATENCY_SHARE * ns
    )
    rule = (
        pl.when(copy & link.fill_null(value=False))
        .then(pl.lit("link copy"))
        .when(pl.col("modelled") & short)
        .then(pl.lit("short of roofline"))
        .when("modelled")
        .then(pl.lit("roofline"))
        .when(copy)
        .then(pl.lit("device copy"))
        .when(pl.col("calculates") & pl.col("peaks").is_not_null())
        .then(pl.lit("peak"))
        .otherwise(pl.lit("bandwidth"))
    )
    bandwidth, same = pl.col("bandwidth"), pl.lit(1.0)
    lower_bound = pl.min_horizontal(
        roofline, pl.col("roofline_there") / ns
    )  # nothing is faster than the roofline there
    interval_bounds = {  # the ratio, and the other bounds of the interval
        "roofline": (roofline, pl.max_horizontal(same, lower_bound)),
        "short of roofline": (roofline, 1 / roofline),
        "peak": (pl.col("peaks"), bandwidth, same),
        "bandwidth": (bandwidth, pl.col("peaks"), same),
        "device copy": (bandwidth, same),
        "link copy": (same,),
    }
    interval = pl.coalesce(
        pl.when(pl.col("rule") == name).then(pl.concat_list(*bounds))
        for name, bounds in interval_bounds.items()
    )
    return rows.with_columns(rule.alias("rule")).with_columns(
        interval.list.first().alias("ratio"),
        interval.list.min().alias("low"),
        interval.list.max().alias("high"),
    )


def _build_account(
    graph: Graph, scaled: pl.DataFrame, host: Bools, works: Sequence[Ints]
) -> pl.DataFrame:
    """Returns the work by rule and kind, as measured and in each of the three cases."""
    columns = ("here_ns", "there_ns", "low_ns", "high_ns")
    all_works = pl.DataFrame(dict(zip(columns, works, strict=True)))
    duration = graph.nodes.filter(pl.col("kind").is_in(graph_schema.COMMUNICATION))["duration_ns"]
    frames = [
        scaled.select("rule", "kind").hstack(all_works[scaled["node"]]),
        pl.DataFrame(dict.fromkeys(columns, duration)).select(
            pl.lit("communication").alias("rule"), pl.lit("communication").alias("kind"), *columns
        ),
        all_works.filter(pl.Series(host)).select(
            pl.lit("host").alias("rule"), pl.lit(None, pl.String).alias("kind"), *columns
        ),
    ]
    sums = (
        pl.concat(frames)
        .group_by(pl.col("rule").cast(RuleType), "kind")
        .agg(pl.len().alias("count"), pl.col(columns).sum())
    )
    return sums.sort("rule", "here_ns", descending=[False, True]).pipe(
        cast_to_schema, ACCOUNT_SCHEMA
    )
