"""Draws the page of `traceloom show`.

Columns of boxes go from left to right in order of dependency, with few crossings between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.report.figure import escape_html
from traceloom.report.labels import fit_name
from traceloom.report.views import read_asset
from traceloom.report.views.page import build_content_security_policy
from traceloom.report.workload import NodeNetwork
from traceloom.system import units

if TYPE_CHECKING:
    from traceloom.report.documents.graph import WorkloadSummaryDocument


MAX_BOXES = 48
MAX_NEIGHBOURS = 160
_DIGITS = r"\d+"  # numbers in names distinguish repetitions, which are drawn as one


@dataclass(frozen=True, slots=True)
class Box:
    """One box: a node, or all nodes of one kind and name.

    Attributes:
        title: Its name.
        kind: Kind of its nodes.
        note: Further facts as text.
        count: Number of its nodes.
        time_ns: Their time.
        bytes: Their bytes; None where none are known.
        place: Its position in the order, 0 to 1: the mean of its nodes.
        chosen: Whether it is the requested node.
    """

    title: str
    kind: str
    note: str
    count: int
    time_ns: int
    bytes: int | None
    place: float
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """`count` dependencies of one kind: box `target` waits for box `source`."""

    source: int
    target: int
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes and links; `omitted` describes what is not shown, and is empty where everything is."""

    title: str
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    omitted: str = ""


def collapse_nodes(network: NodeNetwork, max_boxes: int = MAX_BOXES) -> Picture:
    """Returns all nodes, those of one kind and name as one box.

    Numbers in names are ignored where needed to get few boxes; the nodes with least time share a
    box per kind.
    """
    nodes = network.nodes.select(
        "kind", "name", "time_ns", "bytes", "start_ns", pl.int_range(pl.len()).alias("row")
    ).with_columns(pl.col("name").alias("group"))
    if nodes.select("kind", "group").n_unique() > max_boxes:
        nodes = nodes.with_columns(pl.col("name").str.replace_all(_DIGITS, "#").alias("group"))
    moment = pl.coalesce("start_ns", "row").rank("ordinal") / max(nodes.height, 1)
    groups = (
        nodes.with_columns(moment.alias("place"))
        .group_by("kind", "group")
        .agg(
            pl.len().alias("count"),
            pl.col("time_ns").sum(),
            pl.when(pl.col("bytes").count() > 0).then(pl.col("bytes").sum()).alias("bytes"),
            pl.col("place").mean(),
        )
        .sort("time_ns", "count", "kind", "group", descending=[True, True, False, False])
        .with_row_index("rank_of_time")
    )
    is_own_box = pl.col("rank_of_time") < max_boxes
    groups = groups.with_columns(
        pl.when(is_own_box).then(pl.col("rank_of_time").cast(pl.Int64)).alias("box")
    )
    remaining_kinds = (
        groups.filter(~is_own_box)["kind"].unique(maintain_order=True).sort().to_list()
    )
    other = {
        kind: min(max_boxes, groups.height) + number for number, kind in enumerate(remaining_kinds)
    }
    groups = groups.with_columns(
        pl.coalesce(
            "box", pl.col("kind").replace_strict(other, default=None, return_dtype=pl.Int64)
        ).alias("box")
    )
    # One box per group, or for several small groups of a kind
    merged = (
        groups.group_by("box")
        .agg(
            pl.col("group").first(),
            pl.col("kind").first(),
            pl.len().alias("names"),
            pl.col("count").sum(),
            pl.col("time_ns").sum(),
            pl.when(pl.col("bytes").count() > 0).then(pl.col("bytes").sum()).alias("bytes"),
            (pl.col("place") * pl.col("count")).sum() / pl.col("count").sum(),
        )
        .sort("box")
    )
    boxes = tuple(
        Box(
            row["group"] if row["names"] == 1 else f"{row['names']} other names",
            row["kind"],
            "",
            row["count"],
            row["time_ns"],
            row["bytes"],
            row["place"],
        )
        for row in merged.iter_rows(named=True)
    )
    box = nodes.join(
        groups.select("kind", "group", "box"),
        on=["kind", "group"],
        how="left",
        maintain_order="left",
    )["box"].to_numpy()
    edges = network.edges.select(
        pl.Series("source", box[network.edges["source"].to_numpy()]),
        pl.Series("target", box[network.edges["target"].to_numpy()]),
        "kind",
    )
    counted = (
        edges.group_by("source", "target", "kind")
        .len()
        .sort("len", "source", "target", "kind", descending=True)
    )
    links = tuple(Link(*row) for row in counted.iter_rows())
    hidden = int(groups.filter(~is_own_box).height)
    omitted = f"{hidden} names with the least time share a box per kind" if hidden else ""
    return Picture("All nodes, by kind and name", boxes, links, omitted)


def build_neighbourhood(
    network: NodeNetwork, row: int, depth: int, max_nodes: int = MAX_NEIGHBOURS
) -> Picture:
    """Returns one node with everything up to `depth` dependencies away, in both directions; the
    nearest where that is too much.
    """
    source, target = network.edges["source"].to_numpy(), network.edges["target"].to_numpy()
    distance = {row: 0}
    cut = 0
    for near_ends, far_ends, sign in ((target, source, -1), (source, target, 1)):
        front = np.array([row])
        for step in range(1, depth + 1):
            reached = np.unique(far_ends[np.isin(near_ends, front)])
            fresh = [number for number in reached.tolist() if number not in distance]
            capacity_left = max(max_nodes - len(distance), 0)
            cut += max(len(fresh) - capacity_left, 0)
            fresh = fresh[:capacity_left]
            distance.update(dict.fromkeys(fresh, sign * step))
            front = np.array(fresh, dtype=np.int64)
            if not fresh:
                break
    rows = sorted(distance, key=lambda number: (distance[number], number))
    number_of = {node_row: number for number, node_row in enumerate(rows)}
    span = 2 * depth + 1
    boxes = []
    for number, node_row in enumerate(rows):
        node = network.nodes.row(node_row, named=True)
        box = Box(
            node["name"],
            node["kind"],
            f"node {node['id']}" + (f", rank {node['rank']}" if node["rank"] is not None else ""),
            1,
            node["time_ns"],
            node["bytes"],
            (distance[node_row] + depth) / span + number / (1000 * span * len(rows)),
            chosen=node_row == row,
        )
        boxes.append(box)
    links = tuple(
        Link(number_of[int(source[k])], number_of[int(target[k])], network.edges["kind"][int(k)], 1)
        for k in np.flatnonzero(np.isin(source, rows) & np.isin(target, rows))
    )
    omitted = f"{cut} more nodes are as near" if cut else ""
    node = network.nodes.row(row, named=True)
    return Picture(
        f"Node {node['id']} and what is up to {depth} dependencies away",
        tuple(boxes),
        links,
        omitted,
    )


_MAX_LINKS = 400
_MAX_LETTERS, _MAX_SMALL_LETTERS = 27, 42  # that fit into a box
_GROUPS = {
    "kernel": "compute",
    "compute": "compute",
    "collective": "communication",
    "send": "communication",
    "receive": "communication",
    "rendezvous": "communication",
    "arrival": "communication",
    "copy": "memory",
    "fill": "memory",
    "load": "memory",
    "store": "memory",
    "host": "op",
    "launch": "launch",
    "block": "blocking",
    "wait": "idle",
    "think": "python",
}
WIDTH, HEIGHT = 232, 50
_COLUMN_GAP, _ROW_GAP = 96, 22
_LAYOUT_SWEEPS = 6


def render(picture: Picture, summary: WorkloadSummaryDocument) -> str:
    """Renders the page.

    Args:
        picture: The boxes and links to draw.
        summary: Summary of the whole workload, for the head.
    """
    style = "\n".join(
        [
            *(read_asset(name) for name in ("colours.css", "page.css", "views.css")),
            _read_asset("drawing.css"),
        ]
    )
    theme, script = read_asset("theme.js"), _read_asset("drawing.js")
    facts = [
        units.format_quantity(len(summary["ranks"]), "rank"),
        f"{units.format_quantity(summary['nodes'], 'node')}",
        units.format_quantity(summary["edges"], "dependency"),
        *(
            [units.format_duration(summary["window_ns"])]
            if summary["window_ns"] is not None
            else []
        ),
    ]
    omissions = [picture.omitted] if picture.omitted else []
    if (omitted_count := len(picture.links) - _MAX_LINKS) > 0:
        omissions.append(
            f"{units.format_count(omitted_count)} lines of the fewest dependencies are not drawn"
        )
    visible = Picture(picture.title, picture.boxes, picture.links[:_MAX_LINKS], picture.omitted)
    layout = arrange(visible)
    max_count = max((link.count for link in visible.links), default=1)
    lines = ""
    for link in reversed(visible.links):
        # From the right side of a box to the left side of the next; backward lines go round.
        if link.source == link.target:
            continue
        from_x, from_y = layout.x[link.source] + WIDTH, layout.y[link.source] + HEIGHT // 2
        to_x, to_y = layout.x[link.target], layout.y[link.target] + HEIGHT // 2
        bend = (to_x - from_x) // 2 if to_x > from_x else 60 + (from_x - to_x) // 6
        path = f"M{from_x} {from_y}C{from_x + bend} {from_y} {to_x - bend} {to_y} {to_x} {to_y}"
        width = round(1 + 3 * (link.count / max_count) ** 0.4, 1)
        label = f"{units.format_count(link.count)} × {link.kind}" if link.count > 1 else link.kind
        lines += (
            f'<path class="line{"" if to_x > from_x else " back"}" data-from="{link.source}" data-to="{link.target}" '
            f'd="{path}" stroke-width="{width}" marker-end="url(#tip)"><title>{escape_html(label)}</title></path>'
        )
    boxes = "".join(_draw_box(number, box, layout) for number, box in enumerate(visible.boxes))
    view = f"-20 -20 {layout.width + 40} {layout.height + 40}"
    kinds: dict[str, list[str]] = {}
    for box in picture.boxes:
        names = kinds.setdefault(_get_colour_group(box.kind), [])
        if box.kind not in names:
            names.append(box.kind)
    page = Template(_read_asset("drawing.html")).substitute(
        policy=build_content_security_policy([theme, script], style),
        title=escape_html(f"{picture.title} – {summary['name']}"),
        style=style,
        theme=theme,
        script=script,
        name=escape_html(summary["name"]),
        heading=escape_html(picture.title),
        facts=escape_html(" · ".join(facts)),
        drawing=f'<svg id="drawing" viewBox="{view}" data-view="{view}" role="group" aria-label="{escape_html(visible.title)}">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
        f'<g class="lines">{lines}</g><g class="boxes">{boxes}</g></svg>',
        legend="".join(
            f'<li><span class="swatch b-{group}"></span>{escape_html(", ".join(names))}</li>'
            for group, names in kinds.items()
        ),
        omitted=escape_html(f"Not shown: {'; '.join(omissions)}." if omissions else ""),
        rows="".join(_render_row(number, box) for number, box in enumerate(picture.boxes)),
        version=escape_html(__version__),
    )
    return page.encode("utf-8", "replace").decode(
        "utf-8"
    )  # names from files may contain halves of surrogate pairs


def _read_asset(name: str) -> str:
    return files("traceloom.report").joinpath("assets", name).read_text(encoding="utf-8")


def _get_colour_group(kind: str) -> str:
    return _GROUPS.get(kind, "other")


def _draw_box(number: int, box: Box, layout: Layout) -> str:
    x, y = layout.x[number], layout.y[number]
    chosen_class = " chosen" if box.chosen else ""
    title = fit_name(box.title or "(no name)", _MAX_LETTERS)
    return (
        f'<g class="box{chosen_class}" data-box="{number}" data-name="{escape_html(box.title.lower())}" tabindex="0" role="button" '
        f'aria-label="{escape_html(f"{box.title}, {_describe_box(box)}")}" transform="translate({x} {y})">'
        f"<title>{escape_html(box.title)}\n{escape_html(_describe_box(box))}</title>"
        f'<rect class="frame" width="{WIDTH}" height="{HEIGHT}" rx="7"/>'
        f'<rect class="f-{_get_colour_group(box.kind)}" width="6" height="{HEIGHT}" rx="3"/>'
        f'<text x="16" y="21">{escape_html(title)}</text>'
        f'<text class="small" x="16" y="39">{escape_html(_describe_box(box, brief=True))}</text></g>'
    )


def _describe_box(box: Box, *, brief: bool = False) -> str:
    parts = [box.kind, *([box.note] if box.note else [])]
    parts += [f"{units.format_count(box.count)} ×"] if box.count > 1 else []
    parts += [units.format_duration(box.time_ns)] if box.time_ns or not brief else []
    parts += [units.format_size(box.bytes)] if box.bytes is not None and not brief else []
    label = " · ".join(parts)
    return fit_name(label, _MAX_SMALL_LETTERS) if brief else label


def _render_row(number: int, box: Box) -> str:
    size = "–" if box.bytes is None else units.format_size(box.bytes)
    detail = f"{escape_html(box.note)}" if box.note else units.format_count(box.count)
    return (
        f'<tr data-row="{number}"><td class="s"><span class="swatch b-{_get_colour_group(box.kind)}"></span>{escape_html(box.kind)}</td>'
        f'<td class="name"><button type="button" class="plain" data-goto="{number}">{escape_html(box.title or "(no name)")}'
        "</button></td>"
        f'<td class="n">{detail}</td><td class="n" title="{box.time_ns} ns">{units.format_duration(box.time_ns)}</td>'
        f'<td class="n">{size}</td></tr>'
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The top left corner of every box, and the size of the whole."""

    x: tuple[int, ...]
    y: tuple[int, ...]
    width: int
    height: int


def arrange(picture: Picture) -> Layout:
    """Positions every box; the same picture always looks the same."""
    # A box is one column right of the box that it depends on most, among those before it in the
    # order
    order = sorted(range(len(picture.boxes)), key=lambda box: (picture.boxes[box].place, box))
    rank = {box: number for number, box in enumerate(order)}
    strongest: dict[int, tuple[int, int]] = {}
    for link in picture.links:
        if rank[link.source] < rank[link.target]:
            key = (link.count, rank[link.source])
            if key > strongest.get(link.target, (0, -1)):
                strongest[link.target] = key
    column: dict[int, int] = {}
    for box in order:
        before = strongest.get(box)
        column[box] = column[order[before[1]]] + 1 if before else 0
    count = max(column.values(), default=-1) + 1
    columns = [[box for box in order if column[box] == number] for number in range(count)]
    # Sort every column by the mean position of the neighbours, left and right in turn
    neighbours: dict[int, list[int]] = {}
    for link in picture.links:
        if link.source != link.target:
            neighbours.setdefault(link.source, []).append(link.target)
            neighbours.setdefault(link.target, []).append(link.source)
    position = {
        box: number / max(len(boxes), 1) for boxes in columns for number, box in enumerate(boxes)
    }
    for sweep in range(_LAYOUT_SWEEPS):
        for boxes in columns if sweep % 2 == 0 else reversed(columns):
            mean = {
                box: sum(position[other] for other in neighbours[box]) / len(neighbours[box])
                if neighbours.get(box)
                else position[box]
                for box in boxes
            }
            boxes.sort(key=lambda box: (mean[box], box))
            position.update({box: (number + 0.5) / len(boxes) for number, box in enumerate(boxes)})
    tallest = max(map(len, columns), default=0)
    height = tallest * (HEIGHT + _ROW_GAP) - _ROW_GAP if tallest else 0
    x, y = [0] * len(picture.boxes), [0] * len(picture.boxes)
    for number, boxes in enumerate(columns):
        top = (height - len(boxes) * (HEIGHT + _ROW_GAP) + _ROW_GAP) // 2
        for slot, box in enumerate(boxes):
            x[box], y[box] = number * (WIDTH + _COLUMN_GAP), top + slot * (HEIGHT + _ROW_GAP)
    width = len(columns) * (WIDTH + _COLUMN_GAP) - _COLUMN_GAP if columns else 0
    return Layout(tuple(x), tuple(y), max(width, 1), max(height, 1))
