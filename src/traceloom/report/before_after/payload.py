"""The timeline before and after as a payload of the report's own timeline (see `traceloom.report.views.html.timeline`).

Each lane stands there twice, as it was and as it would be. Columns of its own: `twin` (the same piece on the other
lane, as a position plus one; 0 where it is gone) and `changed` (1 where it holds something that the changes are about).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.array_types import Ints
from traceloom.harmless import harmless
from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.category import CATEGORIES
from traceloom.model.graph import Graph
from traceloom.report.before_after.chosen import LanesShown, choose
from traceloom.report.before_after.pieces import Pieces, pieces
from traceloom.report.names import short
from traceloom.report.views.html.packing import lane_steps, pack, sparse, zigzag
from traceloom.retime.critical_path import Path, critical_path
from traceloom.simulate import Scenario, WhatIf, changed_graph, changed_nodes

Bools = NDArray[np.bool_]

LIMIT = 40_000  # pieces, each drawn twice: at most about half a megabyte of page
_STRETCHES = 3_000  # of each critical path
_SEEN = 2_000  # parts of the picture: what is shorter does not part the line of a path
_NAMES = 200_000  # characters of all names together
_NAME, _SHORT = 200, 60  # characters of one name, and on the canvas
_UNNAMED = {gs.THINK: "host time outside any recorded event", gs.WAIT: "waiting"}
# Files of other writers name no categories.
_ALIKE = {gs.KERNEL: "kernel", gs.COPY: "copy", gs.FILL: "fill", gs.HOST: "op", gs.LAUNCH: "runtime"}
_WORDS = {gs.THINK: "python", gs.WAIT: "other", gs.BLOCK: "sync", **dict.fromkeys(gs.COMMUNICATION, "collective")}


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """The picture.

    Attributes:
        payload: Base64 text, see `packing`.
        shown: Pieces of time in it, before and after counted once.
        said: What is drawn and what is not, in words.
    """

    payload: str
    shown: int
    said: str


def build(graph: Graph, scenario: Scenario, result: WhatIf, *, limit: int = LIMIT) -> BeforeAfter | None:
    """Pack the timelines before and after changes; None where the graph has nothing to draw.

    Args:
        graph: As it was measured.
        scenario: With the changes.
        result: What the scenario came to.
        limit: The most pieces of time to embed.
    """
    if not result.ranks.height:
        return None
    after = changed_graph(graph, scenario, result.times)
    return pack_both(graph, after, changed_nodes(graph, scenario), result.ranks, limit=limit)


def pack_both(
    graph: Graph,
    other: Graph,
    changed: Bools,
    ranks_of: pl.DataFrame,
    *,
    limit: int = LIMIT,
    words: tuple[str, str] = ("before", "after"),
    paths: bool = True,
) -> BeforeAfter | None:
    """Pack the timelines of the same nodes at two times; None where there is nothing to draw.

    Args:
        graph: Before.
        other: After: the same nodes on the same lanes.
        changed: What is marked, shape (nodes,).
        ranks_of: rank, before_ns, after_ns, saved_ns of each rank.
        limit: The most pieces of time to embed.
        words: What the two sides are called.
        paths: Whether the critical paths are drawn.
    """
    critical = [critical_path(graph), critical_path(other)] if paths else []
    chosen = choose(graph, ranks_of, changed, [path.nodes for path in critical] or [np.zeros(0, dtype=np.int64)])
    times = (graph.point_times(), other.point_times())
    zero = [int(time.min()) for time in times]
    start, end = (np.stack([time[side::2] - z for time, z in zip(times, zero, strict=True)]) for side in (0, 1))
    slots = np.full(graph.lanes.height + 1, -1, dtype=np.int64)
    slots[chosen.lanes["lane"].to_numpy()] = np.arange(chosen.lanes.height)
    lane = slots[graph.nodes["lane"].fill_null(graph.lanes.height).to_numpy()]
    drawn = np.flatnonzero((lane >= 0) & (end > start).any(axis=0))
    if not drawn.size:
        return None
    made = pieces(lane[drawn], start[:, drawn], end[:, drawn], limit)
    columns, tables, counts = _columns(graph, made, drawn, changed)
    before_ns, after_ns = (int(np.ptp(time)) for time in times)
    longest = max(before_ns, after_ns, 1)
    spans = {row["rank"]: row for row in ranks_of.to_dicts()}
    ranks: list[dict[str, object]] = []
    for rank, why in chosen.ranks.items():
        row = spans[rank]
        durations = f"{units.duration(row['before_ns'])} {words[0]}, {units.duration(row['after_ns'])} {words[1]}"
        ranks.append({"rank": rank, "host": None, "steps": [], "memory": [], "curves": [],
                      "said": f"{why[0].upper()}{why[1:]}: {durations}" if why else durations})  # fmt: skip
    before, after = (
        _stretches(critical[side], start[side], end[side], 2 * lane + side, longest) if paths else [] for side in (0, 1)
    )
    both = {"step": None, "start": 0, "end": before_ns, "stretches": before, "after": after}
    header = {
        "version": 1,
        "epoch_ns": str(graph.epoch_ns + zero[0]),
        "span_ns": longest,
        "ranks": ranks,
        "lanes": _lanes(chosen, counts, words),
        "path": both if before or after else None,
        "open": True,
        **tables,
    }
    sentences = [chosen.sentence()]
    if made.grain_ns:
        sentences.append(
            f"What is shorter than {units.duration(made.grain_ns)} is drawn together with its neighbours; "
            "`-o after.perfetto.json.gz` has all of it."
        )
    return BeforeAfter(pack(header, columns), made.lane.size, " ".join(filter(None, sentences)))


def _columns(
    graph: Graph, made: Pieces, drawn: Ints, changed: Bools
) -> tuple[dict[str, Ints], dict[str, object], list[int]]:
    """The columns of the events, the texts they point to, and how many events each lane has."""
    present = made.end > made.start
    side, piece = np.nonzero(present)
    lane, start = made.lane[piece] * 2 + side, made.start[side, piece]
    order = np.lexsort((start, lane))
    side, piece, lane, start = side[order], piece[order], lane[order], start[order]
    duration = made.end[side, piece] - start
    position = np.zeros((2, made.lane.size), dtype=np.int64)
    position[side, piece] = np.arange(1, side.size + 1)
    twin = position[1 - side, piece]
    marks = np.add.reduceat(changed[drawn[made.order]].astype(np.int64), made.first) > 0
    counts = np.bincount(lane, minlength=2 * (int(made.lane.max()) + 1)).tolist()
    unit = max(int(np.gcd.reduce([np.gcd.reduce(start), np.gcd.reduce(duration)])), 1)
    # Name and kind of each event, as numbers of a table; names beyond what a page can hold are left out
    of = graph.nodes.select("name", "kind", "category")[drawn[made.longest[side, piece]]]
    kind = pl.col("kind").cast(pl.String)
    words = kind.replace_strict(_WORDS, default=None, return_dtype=pl.String)
    alike = kind.replace_strict(_ALIKE, default=None, return_dtype=pl.String)
    frame = of.select(
        name=kind.replace_strict(_UNNAMED, default=None, return_dtype=pl.String).fill_null(pl.col("name")),
        category=pl.coalesce(words, pl.col("category").cast(pl.String), alike, pl.lit("other")),
        time=pl.Series(duration),
    ).with_columns(name=pl.col("name").fill_null("").str.slice(0, 4 * _NAME))
    table = frame.group_by("name", "category").agg(pl.col("time").sum()).sort(
        "time", "name", "category", descending=[True, False, False]
    )  # fmt: skip
    room = pl.col("name").str.len_chars().clip(upper_bound=_NAME).cum_sum() <= _NAMES
    table = table.with_columns(shown=pl.when(room).then("name").otherwise(pl.lit("(name left out)")))
    shown = table.select("shown", "category").unique(maintain_order=True).with_row_index("label")
    numbered = table.join(shown, on=["shown", "category"], maintain_order="left")
    label = frame.join(numbered, on=["name", "category"], how="left", maintain_order="left")["label"]
    names = [short(name, _NAME) for name in shown["shown"].to_list()]
    codes = {name: code for code, name in enumerate(CATEGORIES)}
    kinds = shown["category"].to_list()
    labels = {
        "categories": list(CATEGORIES),
        "labels": [[name, codes[kind]] for name, kind in zip(names, kinds, strict=True)],
        "short": {i: short(name, _SHORT) for i, name in enumerate(names) if len(name) > _SHORT},
        "communication": [i for i, kind in enumerate(kinds) if kind == "collective"],
    }
    count, facts = np.unique(made.count[piece], return_inverse=True)
    alone = int(count[0] == 1)
    nothing = np.zeros(side.size, dtype=np.int64)
    columns = {
        "start": lane_steps(start // unit, counts),
        "duration": zigzag(duration // unit),
        "clip": nothing,
        "label": label.cast(pl.Int64).to_numpy(),
        "fact": facts.reshape(-1).astype(np.int64) + 1 - alone,
        "correlation": nothing,
        "launch": nothing,
        "forward": nothing,
        "twin": sparse(twin, twin > 0),
        "changed": marks[piece].astype(np.int64),
    }
    fact_texts = [
        f"stands for\x1f{units.count(number)} pieces; the longest is named" for number in count.tolist()[alone:]
    ]
    return columns, {"unit_ns": unit, "facts": fact_texts, **labels}, counts


def _lanes(chosen: LanesShown, counts: list[int], words: tuple[str, str]) -> list[dict[str, object]]:
    indices = {rank: index for index, rank in enumerate(chosen.ranks)}
    out: list[dict[str, object]] = []
    for number, row in enumerate(chosen.lanes.to_dicts()):
        for side, word in enumerate(("before", "after")):
            title = harmless(row["title"] or "")
            out.append({
                "trace": indices[row["rank"]], "kind": row["kind"], "name": f"{title}, {words[side]}",
                "label": words[side] if side else title,
                "device": row["device"], "stream": row["stream"], "process": row["process"], "thread": row["thread"],
                "count": counts[2 * number + side] if 2 * number + side < len(counts) else 0, "side": word,
            })  # fmt: skip
    return out


def _stretches(path: Path, start: Ints, end: Ints, lane: Ints, span: int) -> list[list[int]]:
    """The nodes of a critical path on the lanes that are drawn; neighbours on a lane as one where there are many.

    Returns:
        [lane, start, end], and a trailing 1 where the path came there over lanes that are not drawn.
    """
    every = path.nodes[::-1]
    shown = (lane[every] >= 0) & (end[every] > start[every])
    nodes = every[shown]
    elsewhere = np.cumsum(np.where(lane[every] < 0, end[every] - start[every], 0))[shown]
    jumps = np.diff(elsewhere, prepend=elsewhere[:1]) > span // _SEEN
    grain, heads = 0, np.arange(nodes.size)
    while heads.size > _STRETCHES:
        grain = max(2 * grain, -(-span // (8 * _STRETCHES)))
        key = np.unique(np.stack([start[nodes] // grain, lane[nodes]]), axis=1, return_inverse=True)[1].reshape(-1)
        by = np.lexsort((start[nodes], key))
        nodes, key, jumps = nodes[by], key[by], jumps[by]
        heads = np.flatnonzero(np.diff(key, prepend=-1))
    if not heads.size:
        return []
    first, last = np.minimum.reduceat(start[nodes], heads), np.maximum.reduceat(end[nodes], heads)
    by = np.argsort(first, kind="stable")
    stretches: list[list[int]] = np.stack([lane[nodes[heads]], first, last, jumps[heads]], axis=1)[by].tolist()
    return [stretch if stretch[-1] else stretch[:-1] for stretch in stretches]
