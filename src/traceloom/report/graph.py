"""The summary of a linked graph (`traceloom link`): document and terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.text import Text

from traceloom import __version__
from traceloom.graph.graph import Graph
from traceloom.report.document import ReportOptions
from traceloom.report.labels import fit_name
from traceloom.report.views import terminal_findings
from traceloom.report.views.terminal_table import (
    DIM_STYLE,
    TextColumn,
    allocate_cells,
    draw_bar,
    render_bar_table,
    render_heading,
    render_paragraph,
    render_table,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import to_rows
from traceloom.trace.notice import sort_by_severity

if TYPE_CHECKING:
    from traceloom.graph.law import Law
    from traceloom.report.documents.graph import CoverageRow, GraphDocument


FORMAT, VERSION = "traceloom-link", 1


def build(graph: Graph, law: Law | None = None) -> GraphDocument:
    """Builds the document.

    Args:
        graph: A graph.
        law: The result of `traceloom.graph.law`, if requested.
    """
    nodes, edges = graph.nodes, graph.edges
    kinds = nodes.group_by("kind").agg(
        pl.len().alias("count"), pl.col("duration_ns").sum().alias("time_ns")
    )
    typed = edges.group_by("kind", "evidence").agg(pl.len().alias("count"))
    law_fields: Any = None if law is None else law.to_dict()
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": graph.name,
        "stage": graph.stage,
        "epoch_ns": str(graph.epoch_ns),
        "world_size": graph.world_size,
        "window_ns": graph.end_ns,
        "nodes": {"count": nodes.height, "kinds": to_rows(kinds.sort("kind"))},
        "edges": {"count": edges.height, "kinds": to_rows(typed.sort("kind", "evidence"))},
        "ranks": to_rows(
            graph.ranks.with_columns(
                (pl.col("window_end_ns") - pl.col("window_start_ns")).alias("window_ns")
            )
        ),
        "coverage": to_rows(graph.coverage),
        "delays": to_rows(graph.delays),
        "law": law_fields,
        "notices": [notice.to_dict() for notice in sort_by_severity(graph.notices)],
    }


# Evidence of an edge, the most certain first: with a pattern and a colour each, as for every kind
# of time.
EVIDENCE = (
    ("measured", "█", "#3b82d6"),
    ("correlated", "▓", "#009e73"),
    ("inferred", "▒", "#e08a00"),
    ("assumed", "·", "bright_black"),
)
_PATH_ROWS = 8
_PART_LABELS = {
    "delay": "usual {0} of {1}",
    "residual": "unexplained: {1}",
    "before": "before this rank began",
}
_PART_STYLES = {"work": "#3b82d6", "delay": "#e08a00", "residual": "#d55e00"}
_SUBJECT_LABELS = {
    "host-ops": "host ops",
    "timed-ops": "timed ops",
    "gpu-work": "GPU work",
    "host-time": "host time",
}
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 8, 64


def render(document: GraphDocument, width: int) -> Iterator[Text]:
    """Yields the lines of the summary, none wider than `width`."""
    ranks = len(document["ranks"])
    facts = " · ".join(
        (
            f"{ranks} rank{'s' if ranks != 1 else ''}",
            f"{units.format_quantity(document['nodes']['count'], 'node')}",
            f"{units.format_quantity(document['edges']['count'], 'edge')}",
            units.format_duration(document["window_ns"]),
            document["stage"],
        )
    )
    name = fit_name(document["name"], max(width - len(facts) - 3, 16))
    yield Text.assemble((name, "bold"), (f"  {facts}", DIM_STYLE))
    yield Text("")
    law = document["law"]
    summary = "The graph was not re-timed." if law is None else law["sentence"]
    yield from render_paragraph(summary, width, "bold")
    yield from _render_critical_path(document, width)
    yield from _render_coverage(document, width)
    yield from _render_edges(document, width)
    yield from _render_clocks(document, width)
    used = [row for row in document["delays"] if row["count"]]
    if frequent_rows := sorted(used, key=lambda row: -row["count"])[:10]:
        yield from render_heading(
            "Delays", "the usual delay of a kind of edge where nothing else held it back", width
        )
        rows = [
            (row["kind"], units.format_duration(row["median_ns"]), units.format_count(row["count"]))
            for row in frequent_rows
        ]
        columns = (TextColumn("kind", right=False), TextColumn("median"), TextColumn("edges"))
        last = ("of", lambda number, room: fit_name(frequent_rows[number]["place"] or "", room))
        yield from render_table(columns, rows, last, width)
    yield from terminal_findings.render_notices(
        document["notices"], len(document["ranks"]), ReportOptions(), width
    )


def _render_critical_path(document: GraphDocument, width: int) -> Iterator[Text]:
    """Yields the parts of the critical path, which add up to the window."""
    law = document["law"]
    if not law or not law["path"]:
        return
    window = law["window_ns"]
    yield from render_heading(
        "Critical path", f"one re-timing pass takes {units.format_duration(law['pass_ns'])}", width
    )
    parts = [
        (
            _PART_LABELS.get(row["what"], "{} of {}").format(row["what"], row["kind"]),
            row["time_ns"],
            _PART_STYLES.get(row["what"], DIM_STYLE),
        )
        for row in law["path"][:_PATH_ROWS]
    ]
    if remaining := law["path"][_PATH_ROWS:]:
        parts.append(
            (f"{len(remaining)} more", sum(row["time_ns"] for row in remaining), DIM_STYLE)
        )
    rows = [
        (label, units.format_duration(time), units.format_share(time, window))
        for label, time, _ in parts
    ]

    def bar(number: int, width_left: int) -> Text:
        _, time, style = parts[number]
        return draw_bar(max(time, 0) / max(window, 1), width_left, style)

    yield from render_bar_table(
        (TextColumn("", right=False), TextColumn("time"), TextColumn("share")), rows, bar, width
    )


def _render_coverage(document: GraphDocument, width: int) -> Iterator[Text]:
    """Yields one line per outcome: the share of its subject, and the ranks."""
    outcomes: dict[tuple[str, str], list[CoverageRow]] = {}
    for row in document["coverage"]:
        if not row["count"]:
            continue
        outcomes.setdefault((row["subject"], row["outcome"]), []).append(row)
    if not outcomes:
        return
    yield from render_heading("Coverage", "what was matched, and what not", width)
    totals: dict[str, int] = {}
    for (subject, _), outcome_rows in outcomes.items():
        totals[subject] = totals.get(subject, 0) + sum(row["count"] for row in outcome_rows)
    order = sorted(
        outcomes,
        key=lambda key: (list(totals).index(key[0]), -sum(r["count"] for r in outcomes[key])),
    )
    rows: list[tuple[str, ...]] = []
    labels: list[tuple[str, str]] = []
    for subject, outcome in order:
        outcome_rows = outcomes[subject, outcome]
        count = sum(row["count"] for row in outcome_rows)
        times = [row["time_ns"] for row in outcome_rows if row["time_ns"] is not None]
        subject_label = (
            _SUBJECT_LABELS.get(subject, subject) if not labels or labels[-1][0] != subject else ""
        )
        rows.append(
            (
                sanitize(subject_label),
                units.format_count(count),
                units.format_share(count, totals[subject]),
                units.format_duration(sum(times)) if times else "",
            )
        )
        # The affected ranks, if not all.
        node_ranks = sorted(
            {row["rank"] for row in outcome_rows if row["rank"] is not None and row["count"]}
        )
        on = ""
        if len(document["ranks"]) > 1 and node_ranks and len(node_ranks) != len(document["ranks"]):
            rank_text = ", ".join(map(str, node_ranks[:6])) + (
                ", ..." if len(node_ranks) > 6 else ""
            )
            on = f" (rank{'s' if len(node_ranks) > 1 else ''} {rank_text})"
        labels.append((subject, outcome + on))
    columns = (
        TextColumn("", right=False),
        TextColumn("count"),
        TextColumn("share"),
        TextColumn("time"),
    )
    yield from render_table(
        columns, rows, ("outcome", lambda number, room: fit_name(labels[number][1], room)), width
    )


def _render_edges(document: GraphDocument, width: int) -> Iterator[Text]:
    kinds: dict[str, dict[str, int]] = {}
    for row in document["edges"]["kinds"]:
        kinds.setdefault(row["kind"], {})[row["evidence"]] = row["count"]
    if not kinds:
        return
    yield from render_heading("Edges", "what waits for what, and how that is known", width)
    names = [name for name, _, _ in EVIDENCE]
    rows = [
        (kind, *(units.format_count(counts[name]) if name in counts else "" for name in names))
        for kind, counts in kinds.items()
    ]
    headings = [Text.assemble((fill, color), " ", (name, "bold")) for name, fill, color in EVIDENCE]
    columns = (TextColumn("kind", right=False), *(TextColumn(heading) for heading in headings))
    max_count = max(sum(counts.values()) for counts in kinds.values())
    shares = list(kinds.values())

    def bar(number: int, width_left: int) -> Text:
        parts = [shares[number].get(name, 0) for name in names]
        length = max(1, round(width_left * sum(parts) / max_count))
        bar_text = Text()
        for (_, fill, color), count in zip(EVIDENCE, allocate_cells(parts, length), strict=True):
            bar_text.append(fill * count, color)
        return bar_text

    def fitting(number: int, width_left: int) -> Text:
        return (
            bar(number, min(width_left, _MAX_BAR_WIDTH)) if width_left >= _MIN_BAR_WIDTH else Text()
        )

    yield from render_table(columns, rows, ("", fitting), width)


def _render_clocks(document: GraphDocument, width: int) -> Iterator[Text]:
    fitted = [
        (row, ns) for row in document["ranks"] if (ns := row["clock_residual_ns"]) is not None
    ]
    if len(document["ranks"]) < 2 or not fitted:
        return
    yield from render_heading("Clocks", "fitted on the ends of collectives", width)
    worst = max(ns for _, ns in fitted)
    moved = [row for row, _ in fitted if row["clock_offset_ns"] or row["clock_drift"]]
    summary = f"ends agree within {units.format_duration(worst)}"
    if moved:
        most_moved = max(moved, key=lambda row: abs(row["clock_offset_ns"]))
        offset = units.format_duration(most_moved["clock_offset_ns"])
        summary += f" after {len(moved)} ranks were moved, rank {most_moved['rank']} most: {offset}"
    else:
        summary += "; no clock had to be moved"
    yield from render_paragraph(summary, width)
