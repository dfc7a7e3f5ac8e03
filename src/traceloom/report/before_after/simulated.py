"""A simulation as a page of its own in the frame of the report's page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.report.before_after.payload import BeforeAfter, pack_both
from traceloom.report.sections.heat_map import heat_map
from traceloom.report.table import Col
from traceloom.report.views.html.frame import asset, framed, key_numbers, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import prose, text
from traceloom.report.whatif import part_name
from traceloom.simulate.simulation import Simulation

if TYPE_CHECKING:
    from traceloom.report.documents import SimulationDocument

_LINKS, _BINS = 24, 60  # rows and columns of the heat map
_BEFORE, _AFTER = Col("before_ns", "Before", "time", scale="t"), Col("after_ns", "After", "time", scale="t")
_ABOUT_TIMELINE = (
    "Every lane as it was and, below it, as it would be, on one axis. A dark edge marks communication, a line the "
    "critical path: what decides how long it takes."
)
_RANKS = (
    Col("rank", "Rank", "count"),
    _BEFORE,
    Col("end_ns", "After", "time", scale="t"),
    Col("compute_ns", "Compute", "time"),
    Col("exposed_communication_ns", "Exposed communication", "time"),
    Col("memory_ns", "Copies", "time"),
    Col("host_ns", "Host", "time"),
    Col("other_ns", "Other", "time"),
    Col("communication_ns", "Communication", "time", hint="whatever else runs meanwhile"),
)
_COLLECTIVES = (
    Col("kind", "Kind", "name"),
    Col("group", "Group"),
    Col("ranks", "Ranks", "count"),
    Col("bytes", "Bytes", "bytes"),
    Col("start_ns", "First arrival", "time"),
    Col("waiting_ns", "Waiting", "time", hint="from the first arrival to the last"),
    Col("before_ns", "Transfer before", "time"),
    Col("transfer_ns", "Transfer", "time", hint="from the last arrival to the end"),
    Col("bandwidth", "Bus GB/s", "number"),
    Col("algorithm", "Algorithm"),
)
_FLAGS = Col("flags", "But")
_LINK_COLUMNS = (
    Col("name", "Link", "name"),
    Col("bytes", "Bytes", "bytes"),
    Col("busy_ns", "Busy", "time"),
    Col("waiting_ns", "Waiting", "time", hint="of messages that shared it"),
)


def picture(answer: Simulation) -> BeforeAfter | None:
    """The timeline before and after; None where there is none, or nothing takes any time."""
    if answer.graph is None or answer.recorded is None or not answer.ranks.height:
        return None
    ranks = answer.ranks.select(
        "rank", "before_ns", after_ns="end_ns", saved_ns=pl.col("before_ns") - pl.col("end_ns")
    ).drop_nulls()
    communicates = answer.graph.nodes["kind"].cast(pl.String).is_in(list(gs.COMMUNICATION)).to_numpy()
    return pack_both(answer.recorded, answer.graph, communicates, ranks)


def render(document: SimulationDocument, answer: Simulation) -> str:
    """The document as one HTML page that needs nothing but itself.

    Args:
        document: What `traceloom.report.simulation.build` made of the answer.
        answer: The answer, whose timelines and loads are drawn.
    """
    name, view = document["name"], picture(answer)
    before, after = document["before_ns"], document["after_ns"]
    whole = max(before or 0, after, 1)
    sides = [(side, time) for side, time in (("before", before), ("after", after)) if time is not None]
    bars = "".join(
        f'<rect class="{side}" x="0" y="{14 * k}" width="{time / whole * 100:.2f}" height="10"/>'
        for k, (side, time) in enumerate(sides)
    )
    label = ", ".join(f"{side} {units.duration(time)}" for side, time in sides)
    drawn = (
        f'<svg class="sides" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{bars}</svg>'
    )
    return framed(
        title=f"Simulated: {document['sentence']} – {name}",
        name=f"Simulated: {name}",
        headline=f"<h1>{text(document['sentence'])}</h1>{drawn}",
        numbers=key_numbers((title, value, "", more) for title, value, more in _numbers(answer)),
        footer=(
            f"<p>Traceloom {text(document['traceloom'])} · times count from the beginning of the workload</p>"
            "<p>The same for programs: <code>traceloom simulate … -o simulation.json</code>; the whole timeline: "
            "<code>-o after.perfetto.json.gz</code></p>"
        ),
        data=view.payload if view else "",
        **one_after_the_other(_sections(document, answer, view)),
    )


def _numbers(answer: Simulation) -> Iterator[tuple[str, str, str]]:
    if answer.before_ns is not None:
        yield "Before", units.duration(answer.before_ns), "as measured" if answer.measured_ns else "as the files say"
    yield "After", units.duration(answer.after_ns), f"on {answer.machine}" if answer.machine else "recorded machine"
    exposed = answer.ranks["exposed_communication_ns"].max() if answer.ranks.height else None
    if isinstance(exposed, int):
        share = units.share(exposed, max(answer.after_ns, 1))
        yield "Exposed communication", units.duration(exposed), f"{share} of it, on the worst rank"
    if answer.links.height:
        busiest = answer.links.sort("busy_ns", descending=True).row(0, named=True)
        yield "Busiest link", units.share(busiest["busy_ns"], max(answer.after_ns, 1)), str(busiest["name"])
    if answer.identity_error is not None:
        yield "Error of the graph", f"{100 * answer.identity_error:+.2f} %", "the measurement simulated again"


def _sections(
    document: SimulationDocument, answer: Simulation, view: BeforeAfter | None
) -> Iterator[tuple[str, str, str, str]]:
    trust = f"<p>{prose(document['identity'])}</p>" if document["identity"] else ""
    notes = "".join(f"<li>{prose(notice.message)}</li>" for notice in answer.notices)
    trust += f"<ul>{notes}</ul>" if notes else ""
    yield "trust", "How far it goes", "What the answer rests on.", trust or "<p>Nothing was assumed.</p>"
    if view is None:
        yield "timeline", "Timeline", "", '<p class="quiet absent">Timeline: there is none of this mode.</p>'
    else:
        note = f'<p class="quiet">{prose(view.said)}</p>' if view.said else ""
        yield "timeline", "Timeline", _ABOUT_TIMELINE, note + asset("timeline.html")
    ranks = table("ranks-table", _RANKS, document["ranks"], {}, "Ranks", whole="-o ranks.csv")
    yield "ranks", "Ranks", "Compute, exposed communication, copies, host and other add up to each rank's time.", ranks
    if document["path"]:
        parts = [{**part, "of": part_name(part)} for part in document["path"]]
        kinds = (Col("of", "Time", hint="kind of time on the path"), _BEFORE, _AFTER)
        body = table("path-table", kinds, parts, {}, "Critical path")
        yield "path", "Critical path", "What decides how long it takes; each column adds up to the whole.", body
    if answer.collectives.height:
        rows = answer.collectives.sort("transfer_ns", descending=True).to_dicts()
        columns = (*_COLLECTIVES, *((_FLAGS,) if any(row["flags"] for row in rows) else ()))
        body = table("collectives-table", columns, rows, {}, "Collectives", whole="-o collectives.csv")
        yield "collectives", "Collectives", "Those that transfer longest come first.", body
    if answer.links.height:
        rows = answer.links.sort("busy_ns", "link", descending=[True, False]).to_dicts()
        body = _load_map(answer) + table("links-table", _LINK_COLUMNS, rows, {}, "Links", whole="-o links.csv")
        yield "links", "Links", "The busiest first; the picture shows when each is used, darker is more.", body


def _load_map(answer: Simulation) -> str:
    """How much of each of the busiest links is used over time."""
    if not answer.load.height or not answer.after_ns:
        return ""
    busiest = answer.links.sort("busy_ns", "link", descending=[True, False]).head(_LINKS)
    edges = np.linspace(0, answer.after_ns, _BINS + 1)
    cells: dict[tuple[str, str], float] = {}
    labels: dict[tuple[str, str], str] = {}
    digits = max(0, math.ceil(-math.log10(edges[1] / 1e6)))  # so that no two bins are named alike
    columns = [f"{edge / 1e6:.{digits}f}" for edge in edges[:-1]]
    for link, name in busiest.select("link", "name").iter_rows():
        own = answer.load.filter(link=link).sort("time_ns")
        if not own.height:
            continue
        time = own["time_ns"].to_numpy().astype(np.float64)
        share = own["share"].to_numpy()
        used = np.concatenate([[0.0], np.cumsum(share[:-1] * np.diff(time))])
        mean = np.diff(np.interp(edges, time, used)) / np.diff(edges)
        for column, value in zip(columns, mean.tolist(), strict=True):
            if value > 0:
                cells[name, column] = value
                labels[name, column] = f"{name}: {value:.0%} of its bandwidth from {column} ms"
    rows = [name for name in busiest["name"] if any((name, column) in cells for column in columns)]
    return heat_map(cells, rows, columns, labels, titles=("link", "ms"))
