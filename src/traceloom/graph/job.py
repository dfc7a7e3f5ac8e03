"""Graphs of single ranks joined into one: the clocks of the hosts, and collectives that meet.

One offset and drift per host. The fit is robust (medians of differences, Theil-Sen for the drift):
a rank whose thread or kernel ended late by chance does not move it.

Rules (a part ends once those it waits for have begun, plus the transfer):
- all_reduce, all_gather, reduce_scatter, all_to_all, barrier, and unknown kinds: every part waits
  for all;
- broadcast, scatter: the others wait for the root; reduce, gather: the root waits for the others;
- send and receive: each waits for the other (both occupy their device until the data has passed).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.graph import graph as graph_schema
from traceloom.graph.communication import POINT_TO_POINT, MatchedParts, match_parts
from traceloom.graph.graph import GRAPH_SCHEMAS, Graph, get_edge_points, is_acyclic
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Notice

# No part of these ends before all parts have begun.
ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_MIN_DRIFT_MEETINGS = 8  # meetings, and
_MIN_DRIFT_SPAN_NS = 10_000_000  # time between the first and the last, before a drift is fitted
# Ranks of one host whose ends differ by more than this, and than so many times their spread, have
# clocks of their own
_MAX_APART_NS = 20_000
_MAX_APART_SPREADS = 3
_MAX_PAIRS = 400  # points of the Theil-Sen estimate, spread evenly; it is quadratic


class HostClock(Struct, frozen=True):
    """The correction of a host's clock: `corrected = time + offset_ns + drift * (time - since_ns)`.

    Attributes:
        offset_ns: Added to its times.
        drift: Nanoseconds per nanosecond.
        since_ns: The time at which the drift is 0.
        residual_ns: 95th percentile of the usual differences that remain; None where nothing was
            fitted.
        meetings: Number of collectives that the fit is based on.
    """

    offset_ns: int = 0
    drift: float = 0.0
    since_ns: int = 0
    residual_ns: int | None = None
    meetings: int = 0

    def corrected(self, times: Ints) -> Ints:
        """Returns times on the job's clock; never changes the order of times."""
        if not self.drift:
            return times + self.offset_ns
        drift_ns: Ints = np.floor(self.drift * (times - self.since_ns)).astype(np.int64)
        return times + self.offset_ns + drift_ns


def fit_clocks(meetings: pl.DataFrame, hosts: list[str]) -> dict[str, HostClock]:
    """Fits one clock per host; the first host of each connected set is the reference.

    Args:
        meetings: `instance`, `host`, `end_ns`: ends of joined collectives of `ENDS_TOGETHER`.
        hosts: Every host, the reference first.
    """
    # Medians of differences: nanoseconds since 1970 are too large for floating point numbers.
    earliest = pl.col("end_ns").min()
    instance_ends = meetings.group_by("instance", "host").agg(
        earliest + (pl.col("end_ns") - earliest).median().cast(pl.Int64)
    )
    host_ends = {
        str(name[0]): dict(zip(frame["instance"].to_list(), frame["end_ns"].to_list(), strict=True))
        for name, frame in instance_ends.group_by("host")
    }
    clocks: dict[str, HostClock] = {}
    for first in hosts:
        if first in clocks:
            continue
        # How far the ranks of the host disagree about the ends.
        disagreements = (
            meetings.filter(pl.col("host") == first)
            .group_by("instance")
            .agg((pl.col("end_ns").max() - pl.col("end_ns").min()).alias("apart"), pl.len())
        )
        several = disagreements.filter(pl.col("len") > 1)["apart"].to_numpy()
        residual = _compute_p95(several) if len(several) else None
        clocks[first] = HostClock(residual_ns=residual, meetings=len(host_ends.get(first, {})))
        # Every host that shares meetings with a fitted one, those with the most meetings first.
        on_job_clock: dict[int, list[int]] = defaultdict(list)
        host = first
        while True:
            own_ends = host_ends.get(host, {})
            times = clocks[host].corrected(np.array(list(own_ends.values()), dtype=np.int64))
            for key, time in zip(own_ends, times.tolist(), strict=True):
                on_job_clock[key].append(time)
            shared = [
                (len(host_ends[other].keys() & on_job_clock.keys()), other)
                for other in hosts
                if other not in clocks and other in host_ends
            ]
            max_shared, host = max(shared, default=(0, ""), key=lambda pair: pair[0])
            if not max_shared:
                break
            common = sorted(host_ends[host].keys() & on_job_clock.keys())
            job_ends = np.array(
                [_compute_median(np.array(on_job_clock[key], dtype=np.int64)) for key in common]
            )
            clocks[host] = _fit(
                np.array([host_ends[host][key] for key in common], dtype=np.int64), job_ends
            )
    return clocks


def choose_meetings(parts: pl.DataFrame) -> pl.DataFrame:
    """Returns the joined parts whose ends tell the clocks: collectives, and messages between ranks
    that no collective connects, which occupy both until they have passed.

    Ranks that name one host although their clocks are apart get a host each.

    Args:
        parts: `instance`, `part`, `rank`, `host`, `kind`, `end_ns`.
    """
    together = parts.filter(pl.col("kind").is_in(ENDS_TOGETHER))
    connected = {part: part for part in parts["part"].unique()}
    for several in together.group_by("instance").agg("part")["part"].list.unique().unique():
        roots = {connected[part] for part in several}
        connected = {
            part: min(roots) if root in roots else root for part, root in connected.items()
        }
    root = pl.col("part").replace_strict(connected).n_unique().over("instance")
    messages = parts.filter(pl.col("kind").is_in(POINT_TO_POINT)).filter(root > 1)
    meetings = pl.concat([together, messages])
    # How far each rank's ends are from those of its host
    own = meetings.filter(pl.len().over("instance", "host") > 1).with_columns(
        apart=pl.col("end_ns") - pl.col("end_ns").min().over("instance", "host")
    )
    own = own.with_columns(pl.col("apart") - pl.col("apart").median().over("instance", "host"))
    usual = own.group_by("part").agg(
        pl.col("apart").median().abs(),
        spread=(pl.col("apart") - pl.col("apart").median()).abs().quantile(0.95),
    )
    alone = usual.filter(
        pl.col("apart") > pl.max_horizontal(_MAX_APART_NS, _MAX_APART_SPREADS * pl.col("spread"))
    )["part"]
    own_host = pl.format("{} rank {}", "host", "rank")
    is_alone = pl.col("part").is_in(alone.implode())
    return meetings.with_columns(host=pl.when(is_alone).then(own_host).otherwise("host"))


def _fit(own_ends: Ints, job_ends: Ints) -> HostClock:
    order = np.argsort(own_ends, kind="stable")
    own_ends, job_ends = own_ends[order], job_ends[order]
    offsets = job_ends - own_ends
    offset = _compute_median(offsets)
    deviations = np.abs(offsets - offset)
    residual = _compute_p95(deviations)
    since = int(own_ends[0])
    # The Theil-Sen slope, where the meetings are not too few or too close.
    drift = 0.0
    if len(own_ends) >= _MIN_DRIFT_MEETINGS and own_ends[-1] - since >= _MIN_DRIFT_SPAN_NS:
        sample = np.unique(
            np.linspace(0, len(own_ends) - 1, min(len(own_ends), _MAX_PAIRS)).astype(np.int64)
        )
        x, y = (
            (own_ends - since).astype(np.float64)[sample],
            (offsets - offset).astype(np.float64)[sample],
        )
        first, second = np.triu_indices(len(x), 1)
        wide = x[second] - x[first] > 0
        if wide.any():
            drift = float(np.median((y[second] - y[first])[wide] / (x[second] - x[first])[wide]))
    if drift:
        drifted = offsets - np.floor(drift * (own_ends - since)).astype(np.int64)
        drifted_offset = _compute_median(drifted)
        drifted_left = np.abs(drifted - drifted_offset)
        # A drift that explains little is noise.
        if np.median(drifted_left) < 0.5 * np.median(deviations):
            return HostClock(
                drifted_offset, drift, since, _compute_p95(drifted_left), len(own_ends)
            )
    # An offset within the noise of its own measurement is taken as 0: ranks of one machine share a
    # clock.
    if abs(offset) <= residual and len(own_ends) > 1:
        return HostClock(0, 0.0, 0, _compute_p95(np.abs(offsets)), len(own_ends))
    return HostClock(offset, 0.0, 0, residual, len(own_ends))


def _compute_median(times: Ints) -> int:
    """Returns the median of times of any size, halves rounded towards 0."""
    low, high = (
        int(np.partition(times, index)[index]) for index in ((times.size - 1) // 2, times.size // 2)
    )
    return (low + high) // 2 if low + high >= 0 else -(-(low + high) // 2)


def _compute_p95(differences: Ints) -> int:
    return int(np.percentile(differences, 95)) if len(differences) else 0


FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")
# Of what a transfer usually takes: one that takes no longer did not wait
_MAX_JITTER = 1.5
# Operations that should take equally long
_SIMILARITY_KEYS = [
    "kind",
    "in_bytes",
    "group",
    "group_size",
    "name",
]
_LINK_KEYS = ["pattern", "group", "group_size"]  # operations that use the same links


def add_rendezvous(graph: Graph, evidence: list[str | None]) -> Graph:
    """Adds the nodes and edges by which communications wait for their peers.

    Args:
        graph: All ranks, with `instance` set in `communication` where parts were joined.
        evidence: Evidence of the join, per row of `communication`.
    """
    if not graph.communication.height:
        return graph
    parts = _collect_communication_nodes(graph, evidence)
    # One row per operation that has, or must have had, several parts.
    sender_start = pl.col("from").filter(pl.col("gives"))
    meetings = (
        parts.group_by("key", maintain_order=True)
        .agg(
            sender_start.max().fill_null(pl.col("from").min()).alias("start"),
            (pl.col("expected").max() - pl.len()).clip(lower_bound=0).alias("missing"),
            pl.len().alias("parts"),
            pl.col("kind", "group", "in_bytes", "group_size", "rank", "evidence", "name").first(),
            pl.col("to").min().alias("earliest_end"),
        )
        .filter((pl.col("parts") > 1) | (pl.col("missing") > 0))
    )
    if not meetings.height:
        return replace(graph, coverage=_build_coverage(graph, parts))
    first = graph.nodes.height
    meetings = meetings.with_columns(
        (pl.int_range(pl.len(), dtype=pl.Int64) + first).alias("meeting")
    )
    parts = parts.join(
        meetings.select("key", "meeting", "start", "missing"),
        on="key",
        how="left",
        maintain_order="left",
    )
    arrivals = meetings.filter(pl.col("missing") > 0).with_columns(
        (pl.int_range(pl.len(), dtype=pl.Int64) + first + meetings.height).alias("arrival")
    )
    arrivals = _estimate_arrival_times(arrivals, parts)
    # Into an arrival from the start of the last recorded part, and on to the meeting. Unrecorded
    # peers are assumed to behave like this rank: if it comes earlier, so do they, and the time it
    # waited for them stays. The other assumption, that they keep their pace, would tie a graph of
    # few ranks to measured times.
    last = (
        parts.sort("from", descending=True, maintain_order=True)
        .group_by("key")
        .agg(pl.col("node").first())
    )
    assumed, no_slack = pl.lit("assumed").alias("evidence"), pl.lit(0).alias("slack")
    arrival = arrivals.join(last, on="key", how="left", maintain_order="left")
    arrive = arrival.select(
        pl.col("node").alias("source"), pl.col("arrival").alias("target"), assumed, no_slack
    )
    onward = arrival.select(
        pl.col("arrival").alias("source"), pl.col("meeting").alias("target"), assumed, no_slack
    )
    with_times = meetings.join(
        arrivals.select("key", "at"), on="key", how="left", maintain_order="left"
    )
    with_times = with_times.with_columns(pl.max_horizontal("start", "at").alias("met"))
    met = _build_point_nodes(graph_schema.RENDEZVOUS, with_times, "meeting", "met")
    nodes = pl.concat(
        [graph.nodes, met, _build_point_nodes(graph_schema.ARRIVAL, arrivals, "arrival", "at")]
    )
    incoming = parts.filter(pl.col("meeting").is_not_null() & pl.col("gives")).select(
        pl.col("node").alias("source"),
        pl.col("meeting").alias("target"),
        "evidence",
        pl.lit(0).alias("slack"),
    )
    when = met.select(pl.col("node").cast(pl.Int64).alias("meeting"), "start_ns")
    out_of = (
        parts.filter(pl.col("meeting").is_not_null() & pl.col("takes"))
        .join(when, on="meeting", how="left", maintain_order="left")
        .select(
            pl.col("meeting").alias("source"),
            pl.col("node").alias("target"),
            "evidence",
            (pl.col("to") - pl.col("start_ns")).alias("slack"),
        )
    )
    edges = pl.concat(
        [
            graph.edges,
            _build_edges(incoming, from_end=False, to_end=False),
            _build_edges(out_of, from_end=True, to_end=True),
            _build_edges(arrive, from_end=False, to_end=False),
            _build_edges(onward, from_end=True, to_end=False),
        ]
    )
    return replace(graph, nodes=nodes, edges=edges, coverage=_build_coverage(graph, parts))


def _collect_communication_nodes(graph: Graph, evidence: list[str | None]) -> pl.DataFrame:
    """Returns one row per communication node: times, its operation, whom it waits for, and whether
    others wait for it.
    """
    nodes = graph.nodes.select("rank", "name", "start_ns", "duration_ns")[
        graph.communication["node"]
    ]
    parts = graph.communication.with_columns(
        pl.Series("evidence", evidence, dtype=pl.String),
        *nodes.select(
            "rank",
            "name",
            pl.col("start_ns").alias("from"),
            (pl.col("start_ns") + pl.col("duration_ns")).alias("to"),
        ),
    )
    is_single = pl.col("instance").is_null()
    row_number = pl.int_range(pl.len(), dtype=pl.Int64)
    root = pl.col("peer").is_not_null() & (pl.col("peer") == pl.col("rank"))
    is_sender = ~pl.col("kind").fill_null("").is_in(FROM_ROOT) | root | pl.col("peer").is_null()
    is_receiver = ~pl.col("kind").fill_null("").is_in(TO_ROOT) | root | pl.col("peer").is_null()
    return parts.with_columns(
        pl.when(is_single).then(-1 - row_number).otherwise("instance").alias("key"),
        pl.when(is_single).then(1).otherwise(pl.len().over("instance")).alias("present"),
        is_sender.alias("gives"),
        # The root of a broadcast goes ahead; a member of a reduce hands in its part and goes on.
        (is_receiver & ~(pl.col("kind").fill_null("").is_in(FROM_ROOT) & root)).alias("takes"),
    ).with_columns(
        pl.when(pl.col("kind").is_in(["send", "receive"]))
        .then(2)
        .otherwise(
            pl.max_horizontal(
                pl.coalesce("group_size", pl.lit(graph.world_size), "present"), "present"
            )
        )
        .alias("expected")
    )


def _estimate_arrival_times(arrivals: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """Estimates when the unrecorded peers must have come: the end, less the time that such an
    operation takes alone.

    That time is the lower quartile of what operations of its kind, size, group and name took after
    the last recorded part came: some of them waited for no peer. The shortest one would count every
    jitter of the transfer as waiting. Where all of them waited, as at the first communication of a
    step for a peer that always begins late, other sizes in the same group give a bound: a transfer
    takes no longer than a larger one, nor longer per byte than a smaller one.
    """
    took = pl.col("to") - pl.max_horizontal("from", "start")
    size = pl.max_horizontal("in_bytes", "out_bytes").max().alias("size")
    typical = parts.group_by(_SIMILARITY_KEYS).agg(
        took.quantile(0.25, "lower").cast(pl.Int64).alias("transfer"), size
    )
    # The same ring, with and without arithmetic
    pattern = pl.col("kind").replace({"reduce_scatter": "all_gather"})
    sized = (
        typical.filter(pl.col("size") > 0, pl.col("transfer") >= 0)
        .with_columns(pattern.alias("pattern"))
        .sort("size")
        .with_columns(
            (pl.col("transfer") / pl.col("size")).cum_min().over(_LINK_KEYS).alias("per_byte"),
            pl.col("transfer").cum_min(reverse=True).over(_LINK_KEYS).alias("larger"),
        )
    )
    min_transfer = pl.min_horizontal(
        "larger", (pl.col("per_byte") * pl.col("size")).ceil().cast(pl.Int64)
    )
    unsized = typical.filter(
        ~((pl.col("size") > 0) & (pl.col("transfer") >= 0)).fill_null(value=False)
    )
    columns = [*_SIMILARITY_KEYS, "transfer"]
    transfers = pl.concat(
        [
            sized.with_columns(min_transfer.alias("transfer")).select(columns),
            unsized.select(columns),
        ]
    )
    with_transfer = arrivals.join(
        transfers, on=_SIMILARITY_KEYS, how="left", nulls_equal=True, maintain_order="left"
    )
    # Never before the last recorded part: what came earlier held nothing back.
    latest = parts.group_by("key").agg(pl.col("from").max().alias("latest"))
    last = pl.max_horizontal("start", "latest")
    waited = pl.col("earliest_end") - last > _MAX_JITTER * pl.col("transfer")
    estimate = pl.max_horizontal(
        pl.col("earliest_end") - pl.col("transfer").clip(lower_bound=0), last
    )
    return with_transfer.join(latest, on="key", how="left", maintain_order="left").with_columns(
        pl.when(waited).then(estimate).otherwise(last).alias("at")
    )


def _fill_schema(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    schema = graph_schema.GRAPH_SCHEMAS[name]
    missing = [pl.lit(None).alias(column) for column in schema if column not in frame.columns]
    return frame.with_columns(missing).pipe(cast_to_schema, schema)


def _build_point_nodes(kind: str, frame: pl.DataFrame, number: str, time: str) -> pl.DataFrame:
    return _fill_schema(
        "nodes",
        frame.select(
            pl.col(number).alias("node"),
            pl.lit(kind).alias("kind"),
            "rank",
            (
                pl.col("kind").fill_null("communication")
                + pl.lit(" ")
                + pl.col("group").fill_null("")
            )
            .str.strip_chars()
            .alias("name"),
            pl.col(time).alias("start_ns"),
            pl.lit(0).alias("duration_ns"),
            pl.lit(0).alias("work_ns"),
            pl.lit(0).alias("residual_ns"),
            pl.col("in_bytes").alias("bytes"),
        ),
    )


def _build_edges(frame: pl.DataFrame, *, from_end: bool, to_end: bool) -> pl.DataFrame:
    """Builds edges from `source`, `target`, `slack`, `evidence`; until calibration, none requires
    more than its measured slack.
    """
    return _fill_schema(
        "edges",
        frame.select(
            "source",
            "target",
            pl.lit("rendezvous").alias("kind"),
            pl.col("evidence").fill_null("assumed"),
            pl.lit(from_end).alias("from_end"),
            pl.lit(to_end).alias("to_end"),
            pl.min_horizontal(pl.lit(0), "slack").alias("delay_ns"),
            pl.lit(0).alias("residual_ns"),
        ),
    )


def _build_coverage(graph: Graph, parts: pl.DataFrame) -> pl.DataFrame:
    joined = pl.format("joined over {} ranks", pl.col("present"))
    unrecorded = (
        pl.when(pl.col("expected") > 1)
        .then(pl.lit("peers not recorded or not joined"))
        .otherwise(pl.lit("alone in its group"))
    )
    outcome = pl.when(pl.col("present") > 1).then(joined).otherwise(unrecorded)
    counted = (
        parts.with_columns(outcome.alias("outcome"))
        .group_by("rank", "outcome", maintain_order=True)
        .agg(pl.len().alias("count"), (pl.col("to") - pl.col("from")).sum().alias("time_ns"))
        .with_columns(pl.lit("collectives").alias("subject"))
    )
    return pl.concat([graph.coverage, _fill_schema("coverage", counted)])


# Frames whose rows refer to nodes, and the columns that do.
_NODE_COLUMNS = {
    "edges": ("source", "target"),
    **dict.fromkeys(("communication", "transfers", "foreign"), ("node",)),
}


def join_ranks(parts: Sequence[Graph], name: str = "") -> Graph:
    """Joins the graphs of single ranks.

    Times become those of one clock, starting at 0. Parts of a collective on several ranks get one
    `instance` and meet in a `rendezvous` node; peers that were not recorded are an `arrival`,
    assumed.

    Args:
        parts: One uncalibrated graph per rank, at least one.
        name: Name of the result.

    Returns:
        The uncalibrated graph of the job.
    """
    own_ranks = [part.ranks["rank"][0] if part.ranks.height else None for part in parts]
    free = iter(number for number in range(2 * len(parts)) if number not in own_ranks)
    # A part that does not state its rank gets the lowest free one.
    ranks = [next(free) if rank is None else rank for rank in own_ranks]
    parts = [_ensure_rank(part, rank) for part, rank in zip(parts, ranks, strict=True)]
    first_epoch = min(part.epoch_ns for part in parts)
    # A rank that does not state its host may have a clock of its own.
    hosts = [part.ranks["host"][0] or f"rank {number}" for number, part in enumerate(parts)]
    # The communication of all ranks in one frame, in the order of the parts, on a common epoch.
    frames = []
    for number, (part, host) in enumerate(zip(parts, hosts, strict=True)):
        nodes = part.nodes[["rank", "start_ns", "duration_ns"]][part.communication["node"]]
        start = nodes["start_ns"] + (part.epoch_ns - first_epoch)
        frames.append(
            part.communication.with_columns(
                nodes["rank"],
                start,
                pl.lit(number).alias("part"),
                (start + nodes["duration_ns"]).alias("end_ns"),
                pl.lit(host).alias("host"),
            )
        )
    communication = pl.concat(frames)
    joined = match_parts(communication)
    is_joined = pl.Series(joined.instance) >= 0
    meetings = choose_meetings(
        communication.with_columns(pl.Series("instance", joined.instance)).filter(is_joined)
    )
    hosts_by_part = dict(meetings.select("part", "host").iter_rows())
    hosts = [hosts_by_part.get(number, host) for number, host in enumerate(hosts)]
    fitted = fit_clocks(meetings.select("instance", "host", "end_ns"), list(dict.fromkeys(hosts)))
    clocks = [fitted[host] for host in hosts]
    merged = _merge_ranks(parts, first_epoch, clocks, name)
    joined_graph, doubts = _add_meetings(merged, joined)
    notices = [*merged.notices, *joined.notices, *doubts, *_find_impossible_clocks(joined_graph)]
    moved = [clock for clock in clocks if clock.offset_ns or clock.drift]
    if moved:
        worst = max(abs(clock.offset_ns) for clock in moved)
        max_residual = max(clock.residual_ns or 0 for clock in moved)
        text = (
            f"the clocks of {len(moved)} ranks were corrected by up to {worst / 1e6:.3f} ms, fitted on the ends of "
            f"collectives; {max_residual / 1e3:.1f} us remain"
        )
        notices.append(Notice("clocks-corrected", "info", text, len(moved)))
    return replace(joined_graph, notices=tuple(notices))


def _find_impossible_clocks(graph: Graph) -> list[Notice]:
    """Returns a notice where a communication ends before one of its parts has begun."""
    edges = graph.edges.filter(graph.edge_mask("rendezvous") & graph.edges["to_end"].to_numpy())
    early = -edges["delay_ns"].filter(edges["delay_ns"] < -_MAX_APART_NS)
    if not early.len():
        return []
    text = (
        f"{early.len()} parts of communications end up to {early.max() / 1e6:.3f} ms before another of their parts "  # type: ignore[operator]
        "begins: the clocks of the ranks contradict each other, and times between ranks cannot be trusted"
    )
    return [Notice("clocks-contradict", "warning", text, early.len())]


def _ensure_rank(part: Graph, rank: int) -> Graph:
    """Returns a part with its rank; with the given one, and a notice, where it has none."""
    if part.ranks.height and part.ranks["rank"][0] is not None:
        return part
    rank_column = pl.lit(rank, dtype=pl.Int32).alias("rank")
    ranks = part.ranks
    if not ranks.height:
        values = {
            "window_start_ns": 0,
            "window_end_ns": part.end_ns,
            "clock_offset_ns": 0,
            "clock_drift": 0.0,
        }
        schema = GRAPH_SCHEMAS["ranks"]
        ranks = pl.DataFrame([{column: values.get(column) for column in schema}], schema=schema)
    notice = Notice(
        "rank-assumed", "info", f"the trace does not say its rank; it is taken as rank {rank}"
    )
    return replace(
        part,
        ranks=ranks.with_columns(rank_column),
        notices=(*part.notices, notice),
        **{
            name: getattr(part, name).with_columns(rank_column)
            for name in ("nodes", "lanes", "host_ops", "coverage")
        },
    )


def _add_meetings(merged: Graph, joined: MatchedParts) -> tuple[Graph, list[Notice]]:
    """Returns the graph with its meetings; wrongly joined ones show up as ranks that wait for each
    other in a cycle.

    In that case the joins by the order of names are undone, and if that is not enough, all joins:
    parts that do not meet are ordered as each rank is.
    """
    is_measured = np.array([basis == "measured" for basis in joined.evidence], dtype=np.bool_)
    for retained in (np.ones_like(is_measured), is_measured, np.zeros_like(is_measured)):
        instance = np.where(retained, joined.instance, -1)
        numbers = pl.Series("instance", instance).replace(-1, None).cast(pl.Int64)
        communication = merged.communication.with_columns(numbers)
        graph = add_rendezvous(replace(merged, communication=communication), joined.evidence)
        if not (instance >= 0).any() or is_acyclic(graph.nodes.height, *get_edge_points(graph)):
            break
    dropped = int((joined.instance >= 0).sum() - (instance >= 0).sum())
    if not dropped:
        return graph, []
    text = (
        f"{dropped} parts of communications, joined between ranks, would wait for each other in a circle; "
        "they are not joined (the traces do not show one and the same run, or their order cannot be determined)"
    )
    return graph, [Notice("collectives-circle", "warning", text, dropped)]


def _merge_ranks(parts: Sequence[Graph], epoch: int, clocks: list[HostClock], name: str) -> Graph:
    frames: dict[str, list[pl.DataFrame]] = {key: [] for key in GRAPH_SCHEMAS}
    nodes = lanes = 0
    notices: list[Notice] = []
    for part, clock in zip(parts, clocks, strict=True):
        for key, frame in part.frames().items():
            frames[key].append(
                _shift_frame(key, frame, (nodes, lanes), part.epoch_ns - epoch, clock)
            )
        nodes += part.nodes.height
        lanes += part.lanes.height
        notices += [notice.of_rank(part.ranks["rank"][0]) for notice in part.notices]
    merged_frames = {key: pl.concat(several) for key, several in frames.items()}
    worlds = [part.world_size for part in parts if part.world_size is not None]
    merged = Graph(
        **merged_frames,
        name=name or parts[0].name,
        epoch_ns=epoch,
        world_size=max(worlds, default=None),
        stage=parts[0].stage,
        notices=tuple(notices),
    )
    # A clock correction may have moved the first node away from 0.
    first = int(merged.nodes["start_ns"].min()) if merged.nodes.height else 0  # type: ignore[arg-type]
    if not first:
        return merged
    return replace(
        merged,
        nodes=merged.nodes.with_columns(pl.col("start_ns") - first),
        ranks=merged.ranks.with_columns(
            pl.col("window_start_ns") - first, pl.col("window_end_ns") - first
        ),
        epoch_ns=merged.epoch_ns + first,
    )


def _shift_frame(
    key: str, frame: pl.DataFrame, before: tuple[int, int], shift: int, clock: HostClock
) -> pl.DataFrame:
    """Returns a frame of one rank with the numbers and times of the job; `before`: nodes and lanes
    of the ranks before it.
    """
    nodes, lanes = before
    if not frame.height or (
        key != "ranks" and not (nodes or lanes or shift or clock.offset_ns or clock.drift)
    ):
        return frame
    lane = (pl.col("lane") + lanes).cast(pl.UInt32)
    if key == "nodes":
        start = frame["start_ns"].to_numpy() + shift
        end = clock.corrected(start + frame["duration_ns"].to_numpy())
        start = clock.corrected(start)
        # The work is measured on the rank's clock; a drift of the clock must not make it longer
        # than the node.
        work = np.minimum(frame["work_ns"].to_numpy(), end - start)
        return frame.with_columns(
            pl.Series("start_ns", start),
            pl.Series("duration_ns", end - start),
            pl.Series("work_ns", work),
            (pl.col("node") + nodes).cast(pl.UInt32),
            lane,
        )
    if key == "lanes":
        return frame.with_columns(lane)
    if key == "ranks":
        window = [
            pl.Series(column, clock.corrected(frame[column].to_numpy() + shift))
            for column in ("window_start_ns", "window_end_ns")
        ]
        return frame.with_columns(
            *window,
            pl.lit(clock.offset_ns, dtype=pl.Int64).alias("clock_offset_ns"),
            pl.lit(clock.drift, dtype=pl.Float64).alias("clock_drift"),
            pl.lit(clock.residual_ns, dtype=pl.Int64).alias("clock_residual_ns"),
        )
    columns = _NODE_COLUMNS.get(key, ())
    return (
        frame.with_columns((pl.col(column) + nodes).cast(pl.UInt32) for column in columns)
        if columns
        else frame
    )
