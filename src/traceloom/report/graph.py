"""`traceloom link`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.text import Text

from traceloom import __version__
from traceloom.graph.graph import Graph
from traceloom.report.document import ReportOptions
from traceloom.report.labels import short
from traceloom.report.views import terminal_findings
from traceloom.report.views.terminal_table import DIM, TextColumn, cells, heading, lines, paragraph, plain, with_bars
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import to_rows
from traceloom.trace.notice import worst_first

if TYPE_CHECKING:
    from traceloom.graph.law import Law
    from traceloom.report.documents.graph import CoverageRow, GraphDocument


FORMAT, VERSION = "traceloom-link", 1


def build(graph: Graph, law: Law | None = None) -> GraphDocument:
    """The document.

    Args:
        graph: A graph.
        law: What `traceloom.graph.law` found, where it was asked for.
    """
    nodes, edges = graph.nodes, graph.edges
    kinds = nodes.group_by("kind").agg(pl.len().alias("count"), pl.col("duration_ns").sum().alias("time_ns"))
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
            graph.ranks.with_columns((pl.col("window_end_ns") - pl.col("window_start_ns")).alias("window_ns"))
        ),
        "coverage": to_rows(graph.coverage),
        "delays": to_rows(graph.delays),
        "law": law_fields,
        "notices": [notice.to_dict() for notice in worst_first(graph.notices)],
    }


# How an edge is known, from the surest on: a pattern and a colour each, as for every kind of time.
EVIDENCE = (
    ("measured", "█", "#3b82d6"),
    ("correlated", "▓", "#009e73"),
    ("inferred", "▒", "#e08a00"),
    ("assumed", "·", "bright_black"),
)
_PATH_ROWS = 8
_PARTS = {"delay": "usual {0} of {1}", "residual": "unexplained: {1}", "before": "before this rank began"}
_STYLES = {"work": "#3b82d6", "delay": "#e08a00", "residual": "#d55e00"}
_WORDS = {"host-ops": "host ops", "timed-ops": "timed ops", "gpu-work": "GPU work", "host-time": "host time"}
_LEAST_BAR, _MOST_BAR = 8, 64


def render(document: GraphDocument, width: int) -> Iterator[Text]:
    """The lines of the summary, none wider than `width`."""
    ranks = len(document["ranks"])
    facts = " · ".join(
        (
            f"{ranks} rank{'s' if ranks != 1 else ''}",
            f"{units.count_of(document['nodes']['count'], 'node')}",
            f"{units.count_of(document['edges']['count'], 'edge')}",
            units.duration(document["window_ns"]),
            document["stage"],
        )
    )
    name = short(document["name"], max(width - len(facts) - 3, 16))
    yield Text.assemble((name, "bold"), (f"  {facts}", DIM))
    yield Text("")
    law = document["law"]
    sentence = "The graph was not re-timed." if law is None else law["sentence"]
    yield from paragraph(sentence, width, "bold")
    yield from _path(document, width)
    yield from _coverage(document, width)
    yield from _edges(document, width)
    yield from _clocks(document, width)
    used = [row for row in document["delays"] if row["count"]]
    if most_frequent := sorted(used, key=lambda row: -row["count"])[:10]:
        yield from heading("Delays", "the usual delay of a kind of edge where nothing else held it back", width)
        rows = [(row["kind"], units.duration(row["median_ns"]), units.count(row["count"])) for row in most_frequent]
        columns = (TextColumn("kind", right=False), TextColumn("median"), TextColumn("edges"))
        last = ("of", lambda number, room: short(most_frequent[number]["place"] or "", room))
        yield from lines(columns, rows, last, width)
    yield from terminal_findings.notices(document["notices"], len(document["ranks"]), ReportOptions(), width)


def _path(document: GraphDocument, width: int) -> Iterator[Text]:
    """What the critical path consists of; the parts add up to the window."""
    law = document["law"]
    if not law or not law["path"]:
        return
    window = law["window_ns"]
    note = f"one re-timing pass takes {units.duration(law['pass_ns'])}"
    yield from heading("Critical path", note, width)
    parts = [
        (
            _PARTS.get(row["what"], "{} of {}").format(row["what"], row["kind"]),
            row["time_ns"],
            _STYLES.get(row["what"], DIM),
        )
        for row in law["path"][:_PATH_ROWS]
    ]
    if rest := law["path"][_PATH_ROWS:]:
        parts.append((f"{len(rest)} more", sum(row["time_ns"] for row in rest), DIM))
    rows = [(label, units.duration(time), units.share(time, window)) for label, time, _ in parts]

    def bar(number: int, room: int) -> Text:
        _, time, style = parts[number]
        return plain(max(time, 0) / max(window, 1), room, style)

    columns = (TextColumn("", right=False), TextColumn("time"), TextColumn("share"))
    yield from with_bars(columns, rows, bar, width)


def _coverage(document: GraphDocument, width: int) -> Iterator[Text]:
    """One line per outcome: how much of its subject, and on which ranks."""
    outcomes: dict[tuple[str, str], list[CoverageRow]] = {}
    for row in document["coverage"]:
        if not row["count"]:
            continue
        outcomes.setdefault((row["subject"], row["outcome"]), []).append(row)
    if not outcomes:
        return
    yield from heading("Coverage", "what was matched, and what not", width)
    whole: dict[str, int] = {}
    for (subject, _), outcome_rows in outcomes.items():
        whole[subject] = whole.get(subject, 0) + sum(row["count"] for row in outcome_rows)
    order = sorted(outcomes, key=lambda key: (list(whole).index(key[0]), -sum(r["count"] for r in outcomes[key])))
    rows: list[tuple[str, ...]] = []
    labels: list[tuple[str, str]] = []
    for subject, outcome in order:
        outcome_rows = outcomes[subject, outcome]
        count = sum(row["count"] for row in outcome_rows)
        times = [row["time_ns"] for row in outcome_rows if row["time_ns"] is not None]
        shown = _WORDS.get(subject, subject) if not labels or labels[-1][0] != subject else ""
        rows.append(
            (
                sanitize(shown),
                units.count(count),
                units.share(count, whole[subject]),
                units.duration(sum(times)) if times else "",
            )
        )
        # The ranks that have it, where not all do.
        named = sorted({row["rank"] for row in outcome_rows if row["rank"] is not None and row["count"]})
        on = ""
        if len(document["ranks"]) > 1 and named and len(named) != len(document["ranks"]):
            listed = ", ".join(map(str, named[:6])) + (", ..." if len(named) > 6 else "")
            on = f" (rank{'s' if len(named) > 1 else ''} {listed})"
        labels.append((subject, outcome + on))
    columns = (TextColumn("", right=False), TextColumn("count"), TextColumn("share"), TextColumn("time"))
    yield from lines(columns, rows, ("outcome", lambda number, room: short(labels[number][1], room)), width)


def _edges(document: GraphDocument, width: int) -> Iterator[Text]:
    kinds: dict[str, dict[str, int]] = {}
    for row in document["edges"]["kinds"]:
        kinds.setdefault(row["kind"], {})[row["evidence"]] = row["count"]
    if not kinds:
        return
    yield from heading("Edges", "what waits for what, and how that is known", width)
    names = [name for name, _, _ in EVIDENCE]
    rows = [
        (kind, *(units.count(counts[name]) if name in counts else "" for name in names))
        for kind, counts in kinds.items()
    ]
    headings = [Text.assemble((fill, color), " ", (name, "bold")) for name, fill, color in EVIDENCE]
    columns = (TextColumn("kind", right=False), *(TextColumn(heading) for heading in headings))
    most = max(sum(counts.values()) for counts in kinds.values())
    shares = list(kinds.values())

    def bar(number: int, room: int) -> Text:
        parts = [shares[number].get(name, 0) for name in names]
        length = max(1, round(room * sum(parts) / most))
        drawn = Text()
        for (_, fill, color), count in zip(EVIDENCE, cells(parts, length), strict=True):
            drawn.append(fill * count, color)
        return drawn

    def fitting(number: int, left: int) -> Text:
        return bar(number, min(left, _MOST_BAR)) if left >= _LEAST_BAR else Text()

    yield from lines(columns, rows, ("", fitting), width)


def _clocks(document: GraphDocument, width: int) -> Iterator[Text]:
    fitted = [(row, ns) for row in document["ranks"] if (ns := row["clock_residual_ns"]) is not None]
    if len(document["ranks"]) < 2 or not fitted:
        return
    yield from heading("Clocks", "fitted on the ends of collectives", width)
    worst = max(ns for _, ns in fitted)
    moved = [row for row, _ in fitted if row["clock_offset_ns"] or row["clock_drift"]]
    sentence = f"ends agree within {units.duration(worst)}"
    if moved:
        most = max(moved, key=lambda row: abs(row["clock_offset_ns"]))
        offset = units.duration(most["clock_offset_ns"])
        sentence += f" after {len(moved)} ranks were moved, rank {most['rank']} most: {offset}"
    else:
        sentence += "; no clock had to be moved"
    yield from paragraph(sentence, width)
