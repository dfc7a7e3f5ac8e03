"""The critical path of a step, and its tables.

Exact definitions: docs/concepts/critical-path.md.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.critical_path_pieces import (
    CLASSES,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    DATA,
    HOST,
    LAUNCH,
    RESIDUAL,
    SYNCHRONISATION,
    UNRECORDED,
    ClassType,
    PathPieces,
    PathWindow,
    build_path_pieces,
    find_data_waits,
    find_median_graph_step,
    find_median_step,
    find_path_window,
    match_clocks,
    split,
)
from traceloom.errors import UsageError
from traceloom.graph import graph as graph_schema, link_session
from traceloom.graph.critical_path import compute_slack_ns
from traceloom.graph.graph import Graph, get_point_times
from traceloom.graph.law import MAX_ERROR_SHARE, Law, law
from traceloom.system import units
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

PATH = build_schema(
    "start_ns duration_ns class node kind name rank lane thread event edge along_edge evidence",
    {
        "class": ClassType,
        "kind": graph_schema.NodeKind,
        "edge": graph_schema.EdgeKind,
        "evidence": graph_schema.Evidence,
    },
)
CLASS_ROWS = build_schema("class duration_ns fraction piece_count", {"class": ClassType})
RANKS = build_schema("rank class duration_ns fraction", {"class": ClassType})
NAMES = build_schema(
    "class name count duration_ns path_ns path_fraction least_slack_ns near_count near_ns",
    {"class": ClassType},
)
STRETCHES = build_schema(
    "start_ns duration_ns rank where kind process thread device stream class",
    "class_ns name name_ns piece_count first_event last_event edge evidence",
    {
        "where": pl.String,
        "class": ClassType,
        "edge": graph_schema.EdgeKind,
        "evidence": graph_schema.Evidence,
    },
)
_CLASS_BY_KIND = {
    graph_schema.KERNEL: COMPUTE,
    graph_schema.COLLECTIVE: COMMUNICATION,
    graph_schema.SEND: COMMUNICATION,
    graph_schema.RECEIVE: COMMUNICATION,
    graph_schema.COPY: COPIES,
    graph_schema.FILL: COPIES,
    graph_schema.HOST: HOST,
    graph_schema.THINK: HOST,
    graph_schema.LAUNCH: LAUNCH,
    graph_schema.BLOCK: SYNCHRONISATION,
}

_CLASS_CODE_BY_KIND = np.array(
    [
        list(CLASSES).index(_CLASS_BY_KIND[kind]) if kind in _CLASS_BY_KIND else -1
        for kind in graph_schema.NODE_KINDS
    ]
)


def build_path_table(graph: Graph, pieces: PathPieces) -> pl.DataFrame:
    """Returns the pieces with their nodes, events and edges."""
    node, edge = pl.Series(pieces.node).replace(-1, None), pl.Series(pieces.edge).replace(-1, None)
    columns = ("node", "kind", "name", "rank", "lane", "event")
    node_fields = pl.DataFrame([graph.nodes[column][node.cast(pl.UInt32)] for column in columns])
    edge_fields = pl.DataFrame(
        [graph.edges[column][edge.cast(pl.UInt32)] for column in ("kind", "evidence")]
    )
    threads = (
        graph.lanes["name"][node_fields["lane"]]
        if graph.lanes.height
        else pl.Series([None] * node.len())
    )
    return node_fields.with_columns(
        # Time before the path begins is waiting for the rank that it begins on.
        pl.col("rank").fill_null(strategy="backward"),
        pl.Series("start_ns", pieces.start + graph.epoch_ns),
        pl.Series("duration_ns", pieces.end - pieces.start),
        pl.Series(list(CLASSES), dtype=ClassType)[pieces.kind].alias("class"),
        threads.alias("thread"),
        edge_fields["kind"].alias("edge"),
        edge_fields["evidence"],
        pl.Series("along_edge", pieces.along),
    ).pipe(cast_to_schema, PATH)


def merge_path_stretches(graph: Graph, rows: pl.DataFrame) -> pl.DataFrame:
    """Merges neighbouring pieces of one lane."""
    run = (
        pl.col("lane").is_null() | (pl.col("lane") != pl.col("lane").shift(1)).fill_null(value=True)
    ).cum_sum()
    placed = rows.lazy().with_columns(run.alias("run"))
    length = pl.col("duration_ns").sum()
    merged = placed.group_by("run", maintain_order=True).agg(
        pl.col("start_ns", "rank", "lane", "edge", "evidence").first(),
        length,
        pl.len().alias("piece_count"),
        pl.col("event").drop_nulls().first().alias("first_event"),
        pl.col("event").drop_nulls().last().alias("last_event"),
    )
    largest_frames = [
        placed.group_by("run", key, maintain_order=True)
        .agg(length.alias(f"{key}_ns"))
        .sort("run", f"{key}_ns", descending=[False, True], maintain_order=True)
        .group_by("run", maintain_order=True)
        .agg(pl.col(key, f"{key}_ns").first())
        for key in ("class", "name")
    ]
    lanes = graph.lanes.lazy().select(
        "lane", "kind", "process", "thread", "device", "stream", pl.col("name").alias("where")
    )
    for frame in largest_frames:
        merged = merged.join(frame, on="run", how="left", maintain_order="left")
    collected = merged.join(lanes, on="lane", how="left", maintain_order="left").collect()
    return collected.with_columns(pl.col("kind").cast(pl.String)).pipe(cast_to_schema, STRETCHES)


def build_class_table(rows: pl.DataFrame, length: int) -> pl.DataFrame:
    """Returns time by class; every class has a row."""
    summed = rows.group_by("class").agg(pl.col("duration_ns").sum(), pl.len().alias("piece_count"))
    all_classes = pl.DataFrame({"class": list(CLASSES)}, schema={"class": ClassType})
    filled = all_classes.join(summed, on="class", how="left", maintain_order="left").with_columns(
        pl.col("duration_ns", "piece_count").fill_null(0)
    )
    return filled.with_columns((pl.col("duration_ns") / max(length, 1)).alias("fraction")).pipe(
        cast_to_schema, CLASS_ROWS
    )


def build_rank_table(rows: pl.DataFrame, length: int) -> pl.DataFrame:
    """Returns time by rank and class, the ranks with the most of the path first."""
    summed = rows.group_by("rank", "class").agg(pl.col("duration_ns").sum())
    rank_total = pl.col("duration_ns").sum().over("rank")
    ordered = summed.sort(
        [rank_total, "rank", "duration_ns", "class"], descending=[True, False, True, False]
    )
    return ordered.with_columns((pl.col("duration_ns") / max(length, 1)).alias("fraction")).pipe(
        cast_to_schema, RANKS
    )


def build_name_table(
    graph: Graph, window: PathWindow, rows: pl.DataFrame, slack: Ints, near_slack_ns: int
) -> pl.DataFrame:
    """Returns the work of the window by name, with its part of the path and the slack of work that
    is not on it.
    """
    # Of the time along edges only the transfer of a communication is a node's own time; the rest is
    # between nodes.
    work_rows = rows.filter(
        ~pl.col("along_edge") | (pl.col("class") == COMMUNICATION), pl.col("class") != RESIDUAL
    )
    loading = pl.col("duration_ns").filter(pl.col("class") == DATA).sum().alias("data_ns")
    on_path = (
        work_rows.drop_nulls("node")
        .group_by("node")
        .agg(pl.col("duration_ns").sum().alias("path_ns"), loading)
    )
    start, duration = (graph.nodes[column].to_numpy() for column in ("start_ns", "duration_ns"))
    kind = _CLASS_CODE_BY_KIND[graph.nodes["kind"].to_physical().to_numpy()]
    node_rows = np.flatnonzero(
        (kind >= 0) & (start < window.high) & (start + duration >= window.low)
    )
    shares = np.zeros((2, graph.nodes.height), dtype=np.int64)
    shares[:, on_path["node"].to_numpy()] = (
        on_path["path_ns"].to_numpy(),
        on_path["data_ns"].to_numpy(),
    )
    slack = slack[node_rows]
    work = pl.LazyFrame(
        {
            "class": pl.Series(list(CLASSES), dtype=ClassType)[kind[node_rows].astype(np.uint32)],
            "name": graph.nodes["name"][node_rows],
            "duration_ns": duration[node_rows],
            "path_ns": shares[0, node_rows],
            "data_ns": shares[1, node_rows],
            "slack_ns": slack,
            "off": slack > 0,
            "near": (slack > 0) & (slack <= near_slack_ns),
        }
    )
    summed = work.group_by("class", "name").agg(
        pl.len().alias("count"),
        pl.col("duration_ns").sum(),
        pl.col("path_ns", "data_ns").sum(),
        pl.col("slack_ns").filter("off").min().alias("least_slack_ns"),
        pl.col("near").sum().alias("near_count"),
        pl.col("duration_ns").filter("near").sum().alias("near_ns"),
    )
    length = max(window.high - window.low, 1)
    return (
        summed.with_columns(
            (pl.col("path_ns") / length).alias("path_fraction"),
            # Work that is mostly waiting for data is labelled as that.
            pl.when(2 * pl.col("data_ns") > pl.col("path_ns"))
            .then(pl.lit(DATA, ClassType))
            .otherwise("class")
            .alias("class"),
        )
        .sort(
            "path_ns",
            "near_ns",
            "duration_ns",
            "name",
            "class",
            descending=[True, True, True, False, False],
        )
        .collect()
        .pipe(cast_to_schema, NAMES)
    )


_MIN_SHARE = 0.005


@dataclass(frozen=True)
class CriticalPath(Result):
    """The critical path of a step.

    Attributes:
        sentence: A summary of where its time goes.
        step: The step; None for the whole window.
        start_ns: Start of the window, where the first rank begins the step, on the session's clock.
        window_ns: Length of the window, up to where the last rank ends the step.
        path: The path as pieces that follow each other without a gap, from the window's start to
            its end: `start_ns` (on the session's clock), `duration_ns`, `class` (see CLASSES),
            `node` (row of the graph; null before the path begins and after it ends), `kind` (of the
            node), `name`, `rank`, `lane` (row of the graph's lanes), `thread` (name of the lane),
            `event` (row of the rank's trace), `edge` (the kind of edge by which the path came to
            it, or along which the time went by), `along_edge`, `evidence` (of the edge).
        stretches: The same, neighbouring pieces of one lane as one: `start_ns`, `duration_ns`,
            `rank`, `where` (name of the lane), the identity of the lane (`kind`, `process`,
            `thread`, `device`, `stream`), `class` and `name` with the most of its time (`class_ns`,
            `name_ns`), `piece_count`, `first_event` and `last_event` (rows of the rank's trace),
            `edge` and `evidence` (how the path came there).
        classes: `class`, `duration_ns`, `fraction`, `piece_count`: every class, in the order of
            CLASSES. The durations add up to `window_ns`.
        ranks: `rank`, `class`, `duration_ns`, `fraction`: the ranks on the path; adds up to
            `window_ns`. Time before the path begins counts to the rank it begins on: the others
            waited for it.
        names: Work in the window, by name: `class`, `name`, `count` (nodes), `duration_ns` (of all
            of them), `path_ns` (of the path), `path_fraction`, `least_slack_ns` (of those that are
            not on the path; null where all are), `near_count` and `near_ns` (those not on the path
            whose slack is at most `near_slack_ns`). The most of the path first.
        node_slack: `node`, `rank`, `event`, `slack_ns` of every node of the graph: how much later
            it could end without the step ending later; 0 where its work is on the path.
        near_slack_ns: The slack up to which nodes are nearly critical: 1 % of the window.
        law: How well the graph explains the run that it was made from: both errors.
    """

    sentence: str
    step: int | None
    start_ns: int
    window_ns: int
    path: pl.DataFrame
    stretches: pl.DataFrame
    classes: pl.DataFrame
    ranks: pl.DataFrame
    names: pl.DataFrame
    node_slack: pl.DataFrame
    near_slack_ns: int
    law: Law

    def check(self) -> None:
        """Raises AssertionError where the pieces do not tile the window, or a sum does not add up
        to it.
        """
        start, length = self.path["start_ns"].to_numpy(), self.path["duration_ns"].to_numpy()
        assert (length > 0).all()
        assert (start[1:] == (start + length)[:-1]).all()
        assert not start.size or (start[0] == self.start_ns)
        for frame in (self.path, self.stretches, self.classes, self.ranks):
            assert int(frame["duration_ns"].sum()) == self.window_ns
        assert (self.node_slack["slack_ns"] >= 0).all()


def critical_path(of: Session | Trace | Graph, step: int | None = None) -> CriticalPath:
    """Finds the critical path of a step over host, devices and all ranks.

    The path begins with the last point of the step (the end of its thread's time, or of GPU work it
    launched that ended later), goes back over what each node waited for last, and is cut to the
    time of the step.

    Args:
        of: A session or a trace, of which only the step is linked; or a linked graph.
        step: The step; None selects the whole step of median length, and without steps the whole
            window.

    Raises:
        UsageError: `no-such-step`; `nothing-to-link`: there is nothing in the graph.
        InputError: As `traceloom.graph.link_session`.

    Example:
        >>> import traceloom
        >>> path = traceloom.analyze.critical_path(traceloom.load("run"))  # doctest: +SKIP
        >>> print(path.sentence)  # doctest: +SKIP
    """
    if isinstance(of, Graph):
        session, graph = None, of
        step = find_median_graph_step(graph) if step is None else step
    else:
        session = Session((of,), of.meta.path) if isinstance(of, Trace) else of
        step = find_median_step(session.traces) if step is None else step
        graph = link_session(session, step=step)
    if graph.nodes.height <= graph.ranks.height:
        raise UsageError(
            "the traces hold no timed events, so there is no path through them",
            slug="nothing-to-link",
        )
    window = find_path_window(graph, step, session)
    path_pieces = build_path_pieces(graph, window)
    if session is not None:
        # Host time on the path in which the loop waits for its data.
        lane_of = np.append(graph.nodes["lane"].cast(pl.Int64).fill_null(-1).to_numpy(), -1)
        code = list(CLASSES).index(HOST)
        ranks = set(
            graph.nodes["rank"].gather(
                np.unique(path_pieces.node[(path_pieces.node >= 0) & (path_pieces.kind == code)])
            )
        )
        for trace, clock in match_clocks(graph, session, window.step):
            if clock.rank not in ranks:
                continue
            for lane, start, end in find_data_waits(graph, trace, clock.rank, clock.shift):
                on_lane = (path_pieces.kind == code) & (lane_of[path_pieces.node] == lane)
                path_pieces = split(path_pieces, on_lane, start, end, DATA)
    length = window.high - window.low
    near_slack_ns = length // 100
    slack = compute_slack_ns(graph, int(get_point_times(graph)[window.last]))
    path = build_path_table(graph, path_pieces)
    classes = build_class_table(path, length)
    names = build_name_table(graph, window, path, slack, near_slack_ns)
    nodes = graph.nodes.select("node", "rank", "event", pl.Series("slack_ns", slack))
    graph_law = law(graph)
    return CriticalPath(
        sentence=_describe_path(window, path, classes, graph_law),
        step=window.step,
        start_ns=graph.epoch_ns + window.low,
        window_ns=length,
        path=path,
        stretches=merge_path_stretches(graph, path),
        classes=classes,
        ranks=build_rank_table(path, length),
        names=names,
        node_slack=nodes,
        near_slack_ns=near_slack_ns,
        law=graph_law,
    )


_LABELS = {
    DATA: "waiting for data",
    HOST: "the host",
    UNRECORDED: "waits for what was not recorded",
    RESIDUAL: "without a known cause",
}


def _describe_path(
    window: PathWindow, path: pl.DataFrame, classes: pl.DataFrame, graph_law: Law
) -> str:
    length = window.high - window.low
    sums = dict(classes.select("class", "duration_ns").rows())
    late = path.head(1).filter(pl.col("node").is_null())
    parts = [(_LABELS.get(kind, kind), ns) for kind, ns in sums.items()]
    if late.height:
        waited = int(late["duration_ns"][0])
        rank = late["rank"][0]
        start_text = "before anything is recorded" if rank is None else f"before rank {rank} began"
        parts = [
            (label, ns - waited if label == _LABELS[UNRECORDED] else ns) for label, ns in parts
        ]
        parts.append((start_text, waited))
    largest = sorted(
        (part for part in parts if part[1] >= max(_MIN_SHARE * length, 1)),
        key=lambda part: -part[1],
    )
    listing = ", ".join(f"{label} {units.format_share(ns, length)}" for label, ns in largest)
    subject = f"step {window.step}" if window.step is not None else "the window"
    text = f"What decides the {units.format_duration(length)} of {subject}: {listing or 'nothing that takes time'}"
    if abs(graph_law.honest_error) > MAX_ERROR_SHARE:
        off = f"{graph_law.honest_error:+.1%}".replace("%", " %")
        text += f"; with usual delays alone the graph misses the measured time by {off}, so take this with care"
    return text + "."
