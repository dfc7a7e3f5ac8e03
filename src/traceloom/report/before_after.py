"""Two timelines, one above the other, for what-if, simulation and replay.

Each lane appears twice, before and after the changes. Additional columns: `twin` (position plus one
of the same piece on the other lane; 0 where it is gone) and `changed` (1 where it holds a changed
node).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import WhatIf, changed_graph, changed_nodes
from traceloom.graph import graph as graph_schema
from traceloom.graph.critical_path import Path, find_critical_path
from traceloom.graph.graph import Graph
from traceloom.report.labels import fit_name
from traceloom.report.views.page_table import (
    encode_sparse,
    encode_start_deltas,
    encode_zigzag,
    pack,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.array_types import Ints as ArrayTypesInts
from traceloom.trace.vocabulary import CATEGORIES

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

MAX_RANKS_SHOWN = 3  # up to this number every rank is shown
_HOST_LANES, _DEVICE_LANES = 2, 4  # of a rank
_DEVICE_WORK = (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)


@dataclass(frozen=True, slots=True)
class SelectedLanes:
    """The displayed ranks and lanes.

    Attributes:
        ranks: The ranks in display order, each with the reason; "" where all are shown.
        of: Number of ranks.
        lanes: Rows of the graph's lanes in display order: lane, rank, kind, name, with the columns
            `title`.
        omitted: Lanes of these ranks with work that are not shown.
    """

    ranks: dict[int, str]
    of: int
    lanes: pl.DataFrame
    omitted: int

    def sentence(self) -> str:
        """Describes the choice; empty where everything is drawn."""
        sentences = []
        if len(self.ranks) < self.of:
            rank_list = "; ".join(f"rank {rank} ({reason})" for rank, reason in self.ranks.items())
            sentences.append(f"Of {self.of} ranks these are drawn: {rank_list}.")
        if self.omitted:
            omitted = (
                "thread or stream that does" if self.omitted == 1 else "threads and streams that do"
            )
            sentences.append(
                f"Of each rank {_HOST_LANES} threads and {_DEVICE_LANES} streams are drawn: first those that "
                f"communicate or decide how long it takes, then the busiest; {self.omitted} {omitted} less are not."
            )
        return " ".join(sentences)


def select_lanes(
    graph: Graph, ranks: pl.DataFrame, changed: Bools, paths: Sequence[Ints]
) -> SelectedLanes:
    """Selects the relevant ranks, and their lanes.

    These are the slowest rank, the one that gains most, the median one; those with most of the
    critical path before and after; and the rank with the changes, if they are all on one.

    Args:
        graph: The graph as measured.
        ranks: rank, before_ns, after_ns, saved_ns of each rank, as `WhatIf.ranks`.
        changed: Which nodes are changed, shape (nodes,).
        paths: The nodes of the critical path before and after.
    """
    roles = _describe_roles(graph, ranks, changed, paths)
    busy = (
        graph.nodes.lazy()
        .filter(
            pl.col("lane").is_not_null(),
            pl.col("duration_ns") > 0,
            pl.col("rank").is_in(list(roles)),
        )
        .group_by("lane")
        .agg(
            busy=pl.col("duration_ns")
            .filter(~pl.col("kind").is_in([graph_schema.WAIT, graph_schema.THINK]))
            .sum(),
            count=pl.len(),
            talks=pl.col("kind").is_in(list(graph_schema.COMMUNICATION)).any(),
        )
        .collect()
    )
    on_path = (
        graph.nodes.select("lane", "duration_ns")[np.concatenate(paths)]
        .drop_nulls()
        .group_by("lane")
        .agg(decides=pl.col("duration_ns").sum())
    )
    lanes = (
        graph.lanes.join(busy, on="lane")
        .join(on_path, on="lane", how="left")
        .with_columns(pl.col("kind").cast(pl.String), pl.col("decides").fill_null(0))
    )
    # the thread with most events, then those on the critical path or that communicate themselves
    # (gloo)
    main = (pl.col("count") == pl.col("count").max().over("rank")).alias("main")
    host = lanes.filter(kind="host").with_columns(main)
    sort_columns = ["rank", "main", "decides", "talks", "count", "lane"]
    host = host.sort(sort_columns, descending=[False, True, True, True, True, False])
    sort_columns = ["rank", "talks", "decides", "busy", "lane"]
    device = lanes.filter(kind="device").sort(
        sort_columns, descending=[False, True, True, True, False]
    )
    retained = pl.concat(
        [
            device.group_by("rank", maintain_order=True).head(_DEVICE_LANES),
            host.drop("main").group_by("rank", maintain_order=True).head(_HOST_LANES),
        ],
        how="diagonal_relaxed",
    )
    several = retained.filter(kind="device")["device"].n_unique() > 1
    title = pl.when(
        pl.lit(several) & (pl.col("kind") == "device") & pl.col("device").is_not_null()
    ).then(pl.format("GPU {} {}", "device", "name"))
    position = pl.col("rank").replace_strict(
        {rank: number for number, rank in enumerate(roles)}, return_dtype=pl.Int64
    )
    visible = retained.with_columns(title=title.otherwise("name")).sort(
        position, pl.col("kind") == "device", "device", "stream", "lane", nulls_last=True
    )
    return SelectedLanes(roles, max(ranks.height, 1), visible, busy.height - visible.height)


def _describe_roles(
    graph: Graph, ranks: pl.DataFrame, changed: Bools, paths: Sequence[Ints]
) -> dict[int, str]:
    node_ranks = ranks["rank"].to_list()
    if len(node_ranks) <= MAX_RANKS_SHOWN:
        return dict.fromkeys(node_ranks, "")
    work = pl.when(pl.col("kind").is_in(list(_DEVICE_WORK))).then("duration_ns").otherwise(0)
    rank_changes = (
        graph.nodes.with_columns(changed=pl.Series(changed))
        .group_by("rank")
        .agg(computes=work.sum(), changes=pl.col("duration_ns").filter("changed").sum())
    )
    rank_totals = ranks.join(rank_changes, on="rank", how="left").fill_null(0)
    # Ranks that wait for each other take equally long: of these, the one that computes longest is
    # the slowest.
    order = rank_totals.sort("before_ns", "computes", "rank")["rank"].to_list()
    gains = rank_totals.sort("saved_ns", "changes", -pl.col("rank"))["rank"].to_list()
    changes = rank_totals.sort("changes", -pl.col("rank"))
    deciding = []  # the rank with most of each path
    for path in paths:
        spent = (
            graph.nodes.select("rank", "work_ns")[path]
            .drop_nulls()
            .group_by("rank")
            .agg(pl.col("work_ns").sum())
        )
        deciding += spent.sort("work_ns", -pl.col("rank"))["rank"].to_list()[-1:]
    labels = (
        ("decides how long it takes",)
        if len(set(deciding)) == 1
        else ("decides it before", "decides it after")
    )
    rank_roles = list(zip(deciding, labels, strict=False))
    rank_roles += [(order[-1], "the slowest"), (gains[-1], "gains most")]
    if changes["changes"].sum() and changes["changes"][-1] > 2 * changes["changes"].median():  # type: ignore[operator]
        rank_roles.append((changes["rank"][-1], "changed most"))
    rank_roles.append((order[(len(order) - 1) // 2], "the median one"))
    roles: dict[int, str] = {}
    for rank, role in rank_roles:
        roles[rank] = f"{roles[rank]}, {role}" if rank in roles else role
    return roles


_MIN_CELLS = 256  # min pieces of a lane, however many lanes there are


@dataclass(frozen=True, slots=True)
class MergedNodes:
    """Pieces, ordered by lane and time before.

    Shapes: P = pieces; (2, P) is before and after.

    Attributes:
        lane: The lane of each, (P,).
        start: Earliest start, ns, (2, P); 0 where the piece is absent.
        end: Latest end, ns, (2, P); the start where the piece is absent.
        longest: Its longest node, (2, P); -1 where the piece is absent.
        count: Number of merged nodes, (P,).
        first: Row in `order` of its first node, (P,).
        order: The nodes, piece by piece.
        grain_ns: Merged nodes are shorter than this; 0 where nothing was merged.
    """

    lane: Ints
    start: Ints
    end: Ints
    longest: Ints
    count: Ints
    first: Ints
    order: Ints
    grain_ns: int


def merge_nodes(lane: Ints, start: Ints, end: Ints, limit: int) -> MergedNodes:
    """Merges nodes until there are at most `limit` pieces.

    Neighbours on a lane become one piece when all of them lie in the same stretch of time before
    and in the same stretch of time after, and none is longer than a stretch. Stretches grow until
    at most `limit` pieces are left.

    Args:
        lane: The lane of each node, shape (N,).
        start: Start before and after, ns >= 0, shape (2, N).
        end: End before and after, ns, shape (2, N).
        limit: Max number of pieces.
    """
    order = np.lexsort((start[1], start[0], lane)).astype(np.int64)
    lane, start, end = lane[order], start[:, order], end[:, order]
    span = max(int(end.max()), 1) if end.size else 1
    grain, heads = 0, np.arange(lane.size)
    cells = 1 << 17
    while heads.size > limit and cells >= _MIN_CELLS:
        grain = -(-span // cells)
        long: Bools = np.any(end - start >= grain, axis=0)
        new = (np.diff(lane, prepend=-1) != 0) | long | np.append(False, long[:-1])
        # a removed node is invisible and does not separate its neighbours
        for cell in np.where(end > start, start // grain, -1):
            latest_cells = cell[np.maximum.accumulate(np.where(cell >= 0, np.arange(cell.size), 0))]
            new |= (
                np.diff(latest_cells, prepend=latest_cells[:1] - 1 if latest_cells.size else -1)
                != 0
            )
        heads = np.flatnonzero(new)
        cells = cells * 3 // 4
    if heads.size > limit:  # where the order changes, stretches separate few neighbours or all
        lane_starts = np.flatnonzero(np.diff(lane, prepend=-1))
        heads = np.union1d(lane_starts, heads[:: -(-heads.size // limit)])
    if not heads.size:
        none = np.zeros((2, 0), dtype=np.int64)
        return MergedNodes(lane[:0], none, none, none, heads, heads, order, grain)
    present = end > start
    count = np.diff(np.append(heads, lane.size))
    group = np.repeat(np.arange(heads.size), count)
    first = np.minimum.reduceat(np.where(present, start, np.iinfo(np.int64).max), heads, axis=1)
    last = np.maximum.reduceat(np.where(present, end, -1), heads, axis=1)
    absent = last < 0
    longest = np.empty((2, heads.size), dtype=np.int64)
    for side in (0, 1):
        # the longest node of each piece comes first
        longest[side] = order[np.lexsort((-(end[side] - start[side]), group))[heads]]
    return MergedNodes(
        lane[heads],
        np.where(absent, 0, first),
        np.where(absent, 0, last),
        np.where(absent, -1, longest),
        count,
        heads,
        order,
        grain,
    )


MAX_PIECES = 40_000  # pieces, each drawn twice: at most about half a megabyte of page
_MAX_STRETCHES = 3_000  # of each critical path
_PICTURE_PARTS = 2_000  # resolution of the drawing: shorter gaps do not split the line of a path
_MAX_NAME_CHARS = 200_000  # characters of all names together
_NAME, _SHORT = 200, 60  # characters of one name, and on the canvas
_DEFAULT_NAMES = {
    graph_schema.THINK: "host time outside any recorded event",
    graph_schema.WAIT: "waiting",
}
# Files of other writers have no categories.
_DEFAULT_CATEGORIES = {
    graph_schema.KERNEL: "kernel",
    graph_schema.COPY: "copy",
    graph_schema.FILL: "fill",
    graph_schema.HOST: "op",
    graph_schema.LAUNCH: "runtime",
}
_KIND_CATEGORIES = {
    graph_schema.THINK: "python",
    graph_schema.WAIT: "other",
    graph_schema.BLOCK: "sync",
    **dict.fromkeys(graph_schema.COMMUNICATION, "collective"),
}


@dataclass(frozen=True, slots=True)
class BeforeAfterTimeline:
    """A packed timeline before and after.

    Attributes:
        payload: Base64 text, see `traceloom.report.views.page_table`.
        shown: Number of pieces, before and after counted once.
        description: Describes what is drawn and what is not.
    """

    payload: str
    shown: int
    description: str


def build(
    graph: Graph, scenario: Scenario, result: WhatIf, *, limit: int = MAX_PIECES
) -> BeforeAfterTimeline | None:
    """Packs the timelines before and after changes; None where the graph has nothing to draw.

    Args:
        graph: The graph as measured.
        scenario: The scenario with the changes.
        result: The result of the scenario.
        limit: Max number of embedded pieces.
    """
    if not result.ranks.height:
        return None
    after = changed_graph(graph, scenario, result.times)
    return pack_timelines(graph, after, changed_nodes(graph, scenario), result.ranks, limit=limit)


def pack_timelines(
    graph: Graph,
    other: Graph,
    changed: Bools,
    ranks_of: pl.DataFrame,
    *,
    limit: int = MAX_PIECES,
    labels: tuple[str, str] = ("before", "after"),
    paths: bool = True,
) -> BeforeAfterTimeline | None:
    """Packs two timelines of the same nodes; None where there is nothing to draw.

    Args:
        graph: Before.
        other: After: the same nodes on the same lanes.
        changed: Which nodes are marked, shape (nodes,).
        ranks_of: rank, before_ns, after_ns, saved_ns of each rank.
        limit: Max number of embedded pieces.
        labels: Names of the two sides.
        paths: Whether the critical paths are drawn.
    """
    critical = [find_critical_path(graph), find_critical_path(other)] if paths else []
    selected = select_lanes(
        graph, ranks_of, changed, [path.nodes for path in critical] or [np.zeros(0, dtype=np.int64)]
    )
    times = (graph.point_times(), other.point_times())
    zero = [int(time.min()) for time in times]
    start, end = (
        np.stack([time[side::2] - z for time, z in zip(times, zero, strict=True)])
        for side in (0, 1)
    )
    slots = np.full(graph.lanes.height + 1, -1, dtype=np.int64)
    slots[selected.lanes["lane"].to_numpy()] = np.arange(selected.lanes.height)
    lane = slots[graph.nodes["lane"].fill_null(graph.lanes.height).to_numpy()]
    visible_nodes = np.flatnonzero((lane >= 0) & (end > start).any(axis=0))
    if not visible_nodes.size:
        return None
    merged = merge_nodes(lane[visible_nodes], start[:, visible_nodes], end[:, visible_nodes], limit)
    columns, tables, counts = _build_columns(graph, merged, visible_nodes, changed)
    before_ns, after_ns = (int(np.ptp(time)) for time in times)
    longest = max(before_ns, after_ns, 1)
    spans = {row["rank"]: row for row in ranks_of.to_dicts()}
    ranks: list[dict[str, object]] = []
    for rank, reason in selected.ranks.items():
        row = spans[rank]
        durations = f"{units.format_duration(row['before_ns'])} {labels[0]}, {units.format_duration(row['after_ns'])} {labels[1]}"
        ranks.append(
            {
                "rank": rank,
                "host": None,
                "steps": [],
                "memory": [],
                "curves": [],
                "description": f"{reason[0].upper()}{reason[1:]}: {durations}"
                if reason
                else durations,
            }
        )
    before, after = (
        _build_path_stretches(critical[side], start[side], end[side], 2 * lane + side, longest)
        if paths
        else []
        for side in (0, 1)
    )
    both = {"step": None, "start": 0, "end": before_ns, "stretches": before, "after": after}
    header = {
        "version": 1,
        "epoch_ns": str(graph.epoch_ns + zero[0]),
        "span_ns": longest,
        "ranks": ranks,
        "lanes": _build_lanes(selected, counts, labels),
        "path": both if before or after else None,
        "open": True,
        **tables,
    }
    sentences = [selected.sentence()]
    if merged.grain_ns:
        sentences.append(
            f"What is shorter than {units.format_duration(merged.grain_ns)} is drawn together with its neighbours; "
            "`-o after.perfetto.json.gz` has all of it."
        )
    return BeforeAfterTimeline(
        pack(header, columns), merged.lane.size, " ".join(filter(None, sentences))
    )


def _build_columns(
    graph: Graph, merged: MergedNodes, visible_nodes: ArrayTypesInts, changed: Bools
) -> tuple[dict[str, ArrayTypesInts], dict[str, object], list[int]]:
    """Returns the columns of the events, the texts they refer to, and how many events each lane
    has.
    """
    side, piece_index = np.nonzero(merged.end > merged.start)
    lane, start = merged.lane[piece_index] * 2 + side, merged.start[side, piece_index]
    order = np.lexsort((start, lane))
    side, piece_index, lane, start = side[order], piece_index[order], lane[order], start[order]
    duration = merged.end[side, piece_index] - start
    position = np.zeros((2, merged.lane.size), dtype=np.int64)
    position[side, piece_index] = np.arange(1, side.size + 1)
    twin = position[1 - side, piece_index]
    marks = np.add.reduceat(changed[visible_nodes[merged.order]].astype(np.int64), merged.first) > 0
    counts = np.bincount(lane, minlength=2 * (int(merged.lane.max()) + 1)).tolist()
    unit = max(int(np.gcd.reduce([np.gcd.reduce(start), np.gcd.reduce(duration)])), 1)
    # Encode name and kind of each event as numbers of a table; names beyond the limit of a page are
    # omitted.
    labelled_nodes = graph.nodes.select("name", "kind", "category")[
        visible_nodes[merged.longest[side, piece_index]]
    ]
    kind = pl.col("kind").cast(pl.String)
    kind_categories = kind.replace_strict(_KIND_CATEGORIES, default=None, return_dtype=pl.String)
    alike = kind.replace_strict(_DEFAULT_CATEGORIES, default=None, return_dtype=pl.String)
    frame = labelled_nodes.select(
        name=kind.replace_strict(_DEFAULT_NAMES, default=None, return_dtype=pl.String).fill_null(
            pl.col("name")
        ),
        category=pl.coalesce(
            kind_categories, pl.col("category").cast(pl.String), alike, pl.lit("other")
        ),
        time=pl.Series(duration),
    ).with_columns(name=pl.col("name").fill_null("").str.slice(0, 4 * _NAME))
    table = (
        frame.group_by("name", "category")
        .agg(pl.col("time").sum())
        .sort("time", "name", "category", descending=[True, False, False])
    )
    fits_budget = (
        pl.col("name").str.len_chars().clip(upper_bound=_NAME).cum_sum() <= _MAX_NAME_CHARS
    )
    table = table.with_columns(
        shown=pl.when(fits_budget).then("name").otherwise(pl.lit("(name left out)"))
    )
    visible_labels = (
        table.select("shown", "category").unique(maintain_order=True).with_row_index("label")
    )
    numbered = table.join(visible_labels, on=["shown", "category"], maintain_order="left")
    label = frame.join(numbered, on=["name", "category"], how="left", maintain_order="left")[
        "label"
    ]
    names = [fit_name(name, _NAME) for name in visible_labels["shown"].to_list()]
    codes = {name: code for code, name in enumerate(CATEGORIES)}
    kinds = visible_labels["category"].to_list()
    labels = {
        "categories": list(CATEGORIES),
        "labels": [[name, codes[kind]] for name, kind in zip(names, kinds, strict=True)],
        "short": {i: fit_name(name, _SHORT) for i, name in enumerate(names) if len(name) > _SHORT},
        "communication": [i for i, kind in enumerate(kinds) if kind == "collective"],
    }
    count, facts = np.unique(merged.count[piece_index], return_inverse=True)
    single_piece = int(count[0] == 1)
    nothing = np.zeros(side.size, dtype=np.int64)
    columns = {
        "start": encode_start_deltas(start // unit, counts),
        "duration": encode_zigzag(duration // unit),
        "clip": nothing,
        "label": label.cast(pl.Int64).to_numpy(),
        "fact": facts.reshape(-1).astype(np.int64) + 1 - single_piece,
        "correlation": nothing,
        "launch": nothing,
        "forward": nothing,
        "twin": encode_sparse(twin, twin > 0),
        "changed": marks[piece_index].astype(np.int64),
    }
    fact_texts = [
        f"stands for\x1f{units.format_count(number)} pieces; the longest is named"
        for number in count.tolist()[single_piece:]
    ]
    return columns, {"unit_ns": unit, "facts": fact_texts, **labels}, counts


def _build_lanes(
    selected: SelectedLanes, counts: list[int], labels: tuple[str, str]
) -> list[dict[str, object]]:
    indices = {rank: index for index, rank in enumerate(selected.ranks)}
    out: list[dict[str, object]] = []
    for number, row in enumerate(selected.lanes.to_dicts()):
        for side, word in enumerate(("before", "after")):
            title = sanitize(row["title"] or "")
            out.append(
                {
                    "trace": indices[row["rank"]],
                    "kind": row["kind"],
                    "name": f"{title}, {labels[side]}",
                    "label": labels[side] if side else title,
                    "device": row["device"],
                    "stream": row["stream"],
                    "process": row["process"],
                    "thread": row["thread"],
                    "count": counts[2 * number + side] if 2 * number + side < len(counts) else 0,
                    "side": word,
                }
            )
    return out


def _build_path_stretches(
    path: Path, start: ArrayTypesInts, end: ArrayTypesInts, lane: ArrayTypesInts, span: int
) -> list[list[int]]:
    """Returns the nodes of a critical path on the drawn lanes; neighbours on a lane are merged
    where there are many.

    Returns:
        [lane, start, end], and a trailing 1 where the path arrives over lanes that are not drawn.
    """
    path_nodes = path.nodes[::-1]
    visible = (lane[path_nodes] >= 0) & (end[path_nodes] > start[path_nodes])
    nodes = path_nodes[visible]
    elsewhere = np.cumsum(np.where(lane[path_nodes] < 0, end[path_nodes] - start[path_nodes], 0))[
        visible
    ]
    jumps = np.diff(elsewhere, prepend=elsewhere[:1]) > span // _PICTURE_PARTS
    grain, heads = 0, np.arange(nodes.size)
    while heads.size > _MAX_STRETCHES:
        grain = max(2 * grain, -(-span // (8 * _MAX_STRETCHES)))
        key = np.unique(
            np.stack([start[nodes] // grain, lane[nodes]]), axis=1, return_inverse=True
        )[1].reshape(-1)
        sort_order = np.lexsort((start[nodes], key))
        nodes, key, jumps = nodes[sort_order], key[sort_order], jumps[sort_order]
        heads = np.flatnonzero(np.diff(key, prepend=-1))
    if not heads.size:
        return []
    first, last = np.minimum.reduceat(start[nodes], heads), np.maximum.reduceat(end[nodes], heads)
    sort_order = np.argsort(first, kind="stable")
    segments: list[list[int]] = np.stack([lane[nodes[heads]], first, last, jumps[heads]], axis=1)[
        sort_order
    ].tolist()
    return [segment if segment[-1] else segment[:-1] for segment in segments]
