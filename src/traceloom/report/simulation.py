"""Results of `traceloom simulate`, also with `--ranks`: documents, page and terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import polars as pl
from rich.text import Text

from traceloom import __version__
from traceloom.graph import graph as graph_schema
from traceloom.report.before_after import BeforeAfterTimeline, pack_timelines
from traceloom.report.document import Col
from traceloom.report.figure import draw_heat_map, escape_html, render_inline_code
from traceloom.report.labels import fit_name, format_rank
from traceloom.report.views import read_asset
from traceloom.report.views.files import ResultFiles, encode
from traceloom.report.views.page import list_sections, render_key_numbers, render_page
from traceloom.report.views.page_table import render_html_table
from traceloom.report.views.terminal_table import (
    Cell,
    TextColumn,
    render_heading,
    render_paragraph,
    render_table,
)
from traceloom.report.whatif import describe_path_part
from traceloom.system import units
from traceloom.system.gzip_stream import compress_output
from traceloom.system.text import encode_utf8
from traceloom.trace.frames import to_rows
from traceloom.workload.simulate.result import Simulation
from traceloom.workload.simulate.scale import Scaled

if TYPE_CHECKING:
    from traceloom.report.documents import SimulationDocument
    from traceloom.report.documents.predictions import ScaledDocument


SIMULATION_FORMAT = "traceloom-simulation"
VERSION = 1


def build_simulation(answer: Simulation) -> SimulationDocument:
    """Builds the document: the answer, how far it can be trusted, and its tables except that of the
    nodes.
    """
    device: Any = None if answer.device is None else answer.device.to_dict()
    return {
        "format": SIMULATION_FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "sentence": describe_simulation(answer),
        "mode": answer.mode,
        "name": answer.name,
        "machine": answer.machine,
        "step": answer.step,
        "measured_ns": answer.measured_ns,
        "identity_ns": answer.identity_ns,
        "identity_error": answer.identity_error,
        "before_ns": answer.before_ns,
        "after_ns": answer.after_ns,
        "ranks": to_rows(answer.ranks),
        "low_ns": answer.low_ns,
        "high_ns": answer.high_ns,
        "collectives": to_rows(answer.collectives),
        "links": to_rows(answer.links),
        "path": to_rows(answer.path),
        "became_critical": to_rows(answer.became_critical),
        "notices": [notice.to_dict() for notice in answer.notices],
        "identity": answer.identity,
        "trusted": answer.trusted,
        "device": device,
    }


def write_json(answer: Simulation, handle: BinaryIO) -> None:
    handle.write(encode(build_simulation(answer)))


def describe_simulation(answer: Simulation) -> str:
    scope = "The window" if answer.step is None else f"Step {answer.step}"
    after = units.format_duration(answer.after_ns)
    if answer.before_ns is None:
        return f"{scope} takes {after} on {answer.machine}."
    unmeasured = answer.measured_ns is None
    if not answer.machine:
        return f"{scope} takes {after} {'by its own durations' if unmeasured else 'on the recorded machine'}."
    interval = ""
    if answer.low_ns is not None and answer.high_ns is not None and answer.low_ns < answer.high_ns:
        interval = (
            f" ({units.format_duration(answer.low_ns)} to {units.format_duration(answer.high_ns)})"
        )
    # What the answer leaves out, and how far the method is off: neither is the error of the answer.
    kept = ""
    if any(notice.slug == "device-kept" for notice in answer.notices):
        kept = " All work of host and device stays as recorded."
    elif answer.device is not None and answer.device.host_factor == 1:
        kept = " Work of the host stays as recorded."
    if answer.identity_error is not None:
        share = units.format_share(abs(answer.identity_error), 1)
        kept += f" Simulated on its own machine, the recording comes back within {share}."
    change = (
        f" ({(answer.after_ns / answer.before_ns - 1) * 100:+.1f} %)" if answer.before_ns else ""
    )
    return (
        f"{scope} would take {after}{interval} on {answer.machine}; "
        f"{'by its own durations it takes' if unmeasured else 'it took'} {units.format_duration(answer.before_ns)}{change}.{kept}"
    )


def _write_html(answer: Simulation, handle: BinaryIO) -> None:

    handle.write(encode_utf8(render(build_simulation(answer), answer)))


def _write_perfetto(answer: Simulation, handle: BinaryIO) -> None:
    from traceloom.report.exports.perfetto import write_simulation

    write_simulation(answer, handle)


_LINKS, _BINS = 24, 60  # rows and columns of the heat map
_BEFORE, _AFTER = (
    Col("before_ns", "Before", "time", scale="t"),
    Col("after_ns", "After", "time", scale="t"),
)
_ABOUT_TIMELINE = (
    "Every lane as it was and, below it, as it would be, on one axis. A dark edge marks communication, a line the "
    "critical path: what decides how long it takes."
)
_RANK_COLUMNS = (
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
_COLLECTIVE_COLUMNS = (
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
_FLAGS_COLUMN = Col("flags", "But")
_LINK_COLUMNS = (
    Col("name", "Link", "name"),
    Col("bytes", "Bytes", "bytes"),
    Col("busy_ns", "Busy", "time"),
    Col("waiting_ns", "Waiting", "time", hint="of messages that shared it"),
)


def build_timeline(answer: Simulation) -> BeforeAfterTimeline | None:
    """Builds the timeline before and after; None where there is none, or nothing takes any time."""
    if answer.graph is None or answer.recorded is None or not answer.ranks.height:
        return None
    ranks = answer.ranks.select(
        "rank", "before_ns", after_ns="end_ns", saved_ns=pl.col("before_ns") - pl.col("end_ns")
    ).drop_nulls()
    communicates = (
        answer.graph.nodes["kind"]
        .cast(pl.String)
        .is_in(list(graph_schema.COMMUNICATION))
        .to_numpy()
    )
    return pack_timelines(answer.recorded, answer.graph, communicates, ranks)


def render(document: SimulationDocument, answer: Simulation) -> str:
    """Renders the document as one self-contained HTML page.

    Args:
        document: The result of `traceloom.report.simulation.build_simulation` for the answer.
        answer: The answer, whose timelines and loads are drawn.
    """
    name, view = document["name"], build_timeline(answer)
    before, after = document["before_ns"], document["after_ns"]
    max_ns = max(before or 0, after, 1)
    sides = [
        (side, time) for side, time in (("before", before), ("after", after)) if time is not None
    ]
    bars = "".join(
        f'<rect class="{side}" x="0" y="{14 * k}" width="{time / max_ns * 100:.2f}" height="10"/>'
        for k, (side, time) in enumerate(sides)
    )
    label = ", ".join(f"{side} {units.format_duration(time)}" for side, time in sides)
    bars_html = (
        f'<svg class="sides" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{bars}</svg>'
    )
    return render_page(
        title=f"Simulated: {document['sentence']} – {name}",
        name=f"Simulated: {name}",
        headline=f"<h1>{escape_html(document['sentence'])}</h1>{bars_html}",
        numbers=render_key_numbers(
            (title, value, "", detail) for title, value, detail in _list_key_numbers(answer)
        ),
        footer=(
            f"<p>Traceloom {escape_html(document['traceloom'])} · times count from the beginning of the workload</p>"
            "<p>The same for programs: <code>traceloom simulate … -o simulation.json</code>; the whole timeline: "
            "<code>-o after.perfetto.json.gz</code></p>"
        ),
        data=view.payload if view else "",
        **list_sections(_render_sections(document, answer, view)),
    )


def _list_key_numbers(answer: Simulation) -> Iterator[tuple[str, str, str]]:
    if answer.before_ns is not None:
        yield (
            "Before",
            units.format_duration(answer.before_ns),
            "as measured" if answer.measured_ns else "as the files say",
        )
    yield (
        "After",
        units.format_duration(answer.after_ns),
        f"on {answer.machine}" if answer.machine else "recorded machine",
    )
    exposed = answer.ranks["exposed_communication_ns"].max() if answer.ranks.height else None
    if isinstance(exposed, int):
        share = units.format_share(exposed, max(answer.after_ns, 1))
        yield (
            "Exposed communication",
            units.format_duration(exposed),
            f"{share} of it, on the worst rank",
        )
    if answer.links.height:
        busiest = answer.links.sort("busy_ns", descending=True).row(0, named=True)
        yield (
            "Busiest link",
            units.format_share(busiest["busy_ns"], max(answer.after_ns, 1)),
            str(busiest["name"]),
        )
    if answer.identity_error is not None:
        yield (
            "Error of the graph",
            f"{100 * answer.identity_error:+.2f} %",
            "the measurement simulated again",
        )


def _render_sections(
    document: SimulationDocument, answer: Simulation, view: BeforeAfterTimeline | None
) -> Iterator[tuple[str, str, str, str]]:
    trust = f"<p>{render_inline_code(document['identity'])}</p>" if document["identity"] else ""
    notes = "".join(f"<li>{render_inline_code(notice.message)}</li>" for notice in answer.notices)
    trust += f"<ul>{notes}</ul>" if notes else ""
    yield (
        "trust",
        "How far it goes",
        "What the answer rests on.",
        trust or "<p>Nothing was assumed.</p>",
    )
    if view is None:
        yield (
            "timeline",
            "Timeline",
            "",
            '<p class="quiet absent">Timeline: there is none of this mode.</p>',
        )
    else:
        note = (
            f'<p class="quiet">{render_inline_code(view.description)}</p>'
            if view.description
            else ""
        )
        yield "timeline", "Timeline", _ABOUT_TIMELINE, note + read_asset("timeline.html")
    ranks = render_html_table(
        "ranks-table", _RANK_COLUMNS, document["ranks"], {}, "Ranks", full_command="-o ranks.csv"
    )
    yield (
        "ranks",
        "Ranks",
        "Compute, exposed communication, copies, host and other add up to each rank's time.",
        ranks,
    )
    if document["path"]:
        parts = [{**part, "of": describe_path_part(part)} for part in document["path"]]
        kinds = (Col("of", "Time", hint="kind of time on the path"), _BEFORE, _AFTER)
        body = render_html_table("path-table", kinds, parts, {}, "Critical path")
        yield (
            "path",
            "Critical path",
            "What decides how long it takes; each column adds up to the whole.",
            body,
        )
    if answer.collectives.height:
        rows = answer.collectives.sort("transfer_ns", descending=True).to_dicts()
        columns = (
            *_COLLECTIVE_COLUMNS,
            *((_FLAGS_COLUMN,) if any(row["flags"] for row in rows) else ()),
        )
        body = render_html_table(
            "collectives-table", columns, rows, {}, "Collectives", full_command="-o collectives.csv"
        )
        yield "collectives", "Collectives", "Those that transfer longest come first.", body
    if answer.links.height:
        rows = answer.links.sort("busy_ns", "link", descending=[True, False]).to_dicts()
        body = _draw_link_load(answer) + render_html_table(
            "links-table", _LINK_COLUMNS, rows, {}, "Links", full_command="-o links.csv"
        )
        yield (
            "links",
            "Links",
            "The busiest first; the picture shows when each is used, darker is more.",
            body,
        )


def _draw_link_load(answer: Simulation) -> str:
    """Draws the utilization of the busiest links over time."""
    if not answer.load.height or not answer.after_ns:
        return ""
    busiest = answer.links.sort("busy_ns", "link", descending=[True, False]).head(_LINKS)
    edges = np.linspace(0, answer.after_ns, _BINS + 1)
    cells: dict[tuple[str, str], float] = {}
    labels: dict[tuple[str, str], str] = {}
    digits = max(
        0, math.ceil(-math.log10(edges[1] / 1e6))
    )  # so that no two bins have the same name
    columns = [f"{edge / 1e6:.{digits}f}" for edge in edges[:-1]]
    for link, name in busiest.select("link", "name").iter_rows():
        link_load = answer.load.filter(link=link).sort("time_ns")
        if not link_load.height:
            continue
        time = link_load["time_ns"].to_numpy().astype(np.float64)
        share = link_load["share"].to_numpy()
        used = np.concatenate([[0.0], np.cumsum(share[:-1] * np.diff(time))])
        mean = np.diff(np.interp(edges, time, used)) / np.diff(edges)
        for column, value in zip(columns, mean.tolist(), strict=True):
            if value > 0:
                cells[name, column] = value
                labels[name, column] = f"{name}: {value:.0%} of its bandwidth from {column} ms"
    rows = [name for name in busiest["name"] if any((name, column) in cells for column in columns)]
    return draw_heat_map(cells, rows, columns, labels, titles=("link", "ms"))


SIMULATION = ResultFiles(
    "simulation",
    ("ranks", "nodes", "collectives", "links", "path", "became_critical"),
    {
        ".json": write_json,
        ".html": _write_html,
        ".htm": _write_html,
        ".perfetto.json": _write_perfetto,
        ".perfetto.json.gz": lambda answer, handle: compress_output(
            partial(_write_perfetto, answer)
        )(handle),
    },
)

_MAX_ROWS = 8
_MAX_NOTICES = 4
_SIMULATION_NOTICES = (
    "transfer-flag",
    "device-kept",
    "groups-assumed",
)  # of the simulation, not of the recording
_RankTimeKey = Literal[
    "before_ns",
    "end_ns",
    "compute_ns",
    "exposed_communication_ns",
    "memory_ns",
    "host_ns",
    "other_ns",
]
_TIME_HEADINGS: dict[_RankTimeKey, str] = {
    "before_ns": "before",
    "end_ns": "after",
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed",
    "memory_ns": "copies",
    "host_ns": "host",
    "other_ns": "other",
}


class _Listing(NamedTuple):
    """A table: titles of its columns, and label and cells of each row."""

    title: str
    hint: str
    columns: tuple[str, ...]
    rows: list[tuple[str, list[Cell]]]


def render_simulation(document: SimulationDocument, width: int) -> Iterator[Text]:
    yield Text(fit_name(document["name"], width), "bold")
    yield Text("")
    if document["identity"]:
        yield from render_paragraph(document["identity"], width)
    yield from render_paragraph(document["sentence"], width, "bold")
    important_notices = [notice for notice in document["notices"] if notice["severity"] != "info"]
    important_notices.sort(key=lambda notice: notice["slug"] not in _SIMULATION_NOTICES)
    for notice in important_notices[:_MAX_NOTICES]:
        yield from render_paragraph(
            f"{notice['severity']}: {notice['message']} [{notice['slug']}]", width
        )
    if len(important_notices) > _MAX_NOTICES:
        yield from render_paragraph(
            f"and {len(important_notices) - _MAX_NOTICES} more notices; --json has them all", width
        )
    yield from _render_ranks(document, width)
    for title, hint, columns, rows in _build_listings(document):
        if rows:
            yield from render_heading(title, hint, width)
            names, cells = zip(*rows, strict=True)

            def label(i: int, width_left: int, names: tuple[str, ...] = names) -> str:
                return fit_name(names[i], width_left)

            yield from render_table(
                [TextColumn(column) for column in columns], cells, ("of", label), width
            )


def _render_ranks(document: SimulationDocument, width: int) -> Iterator[Text]:
    """Yields the time of the ranks by activity: of those that end last, and first."""
    ranks = document["ranks"]
    ranks_by_end = sorted(ranks, key=lambda row: (-(row["end_ns"] or 0), row["rank"]))
    visible = (
        ranks
        if len(ranks) <= _MAX_ROWS
        else sorted(
            ranks_by_end[: _MAX_ROWS // 2] + ranks_by_end[-_MAX_ROWS // 2 :],
            key=lambda r: r["rank"],
        )
    )
    hint = "exposed: communication while nothing computes"
    if len(visible) < len(ranks):
        hint = f"of the first and last of {len(ranks)} ranks"
    yield from render_heading("Time", hint, width)
    keys = [key for key in _TIME_HEADINGS if any(row[key] is not None for row in ranks)]
    rows: list[list[Cell]] = [
        [
            format_rank(row["rank"]),
            *("" if row[key] is None else units.format_duration(row[key]) for key in keys),
        ]
        for row in sorted(visible, key=lambda row: row["rank"])
    ]
    columns = [TextColumn("", right=False), *(TextColumn(_TIME_HEADINGS[key]) for key in keys)]
    yield from render_table(columns, rows, ("", lambda *_: ""), width)


def _build_listings(document: SimulationDocument) -> Iterator[_Listing]:
    """Yields the path, new items on it, the links that were busy for longest, and the rules for the
    other device.
    """
    path: list[tuple[str, list[Cell]]] = [
        (
            describe_path_part(part),
            [units.format_duration(part["before_ns"]), units.format_duration(part["after_ns"])],
        )
        for part in document["path"][:_MAX_ROWS]
    ]
    yield _Listing("Critical path", "what decides how long it takes", ("before", "after"), path)
    became: list[tuple[str, list[Cell]]] = [
        (
            ("" if part["rank"] is None else f"rank {part['rank']}: ")
            + f"{describe_path_part(part)}, {part['name']}",
            [str(part["count"]), units.format_duration(part["time_ns"])],
        )
        for part in document["became_critical"][:_MAX_ROWS]
    ]
    yield _Listing(
        "New on the critical path", "what did not decide before", ("count", "time"), became
    )
    used = [row for row in document["links"] if row["bytes"]]
    used.sort(key=lambda row: (-row["busy_ns"], -row["waiting_ns"], row["link"]))
    busiest: list[tuple[str, list[Cell]]] = [
        (
            row["name"],
            [
                units.format_size(row["bytes"]),
                units.format_duration(row["busy_ns"]),
                units.format_duration(row["waiting_ns"]),
            ],
        )
        for row in used[:_MAX_ROWS]
    ]
    hint = "waiting: what it made transfers longer by"
    yield _Listing("Busiest links", hint, ("bytes", "busy", "waiting"), busiest)
    works: dict[str, list[tuple[int, ...]]] = {}
    for row in document["device"]["account"] if document["device"] else ():
        work = row["count"], row["here_ns"], row["there_ns"], row["low_ns"], row["high_ns"]
        works.setdefault(row["rule"], []).append(work)
    rule_rows: list[tuple[str, list[Cell]]] = []
    for rule, rule_works in works.items():
        count, *times = map(sum, zip(*rule_works, strict=True))
        rule_rows.append((rule, [str(count), *map(units.format_duration, times)]))
    hint = "the work of all ranks by the rule that put it there"
    yield _Listing("Device", hint, ("pieces", "here", "there", "at least", "at most"), rule_rows)


FORMAT = "traceloom-scaled"
_MAX_SCALED_ROWS = 12


def build(answer: Scaled, name: str, machine: str = "") -> ScaledDocument:
    """Builds the document: the answer, how far it can be trusted, and its tables.

    Args:
        answer: The scaled job.
        name: The workload, as the user named it.
        machine: Name of the machine; "" for the recorded one.
    """
    step = f"{'measured ' * answer.measured}step of {units.format_duration(answer.before_ns)}"
    identity_text = (
        f"{units.format_duration(answer.identity_ns)} ({answer.identity_error * 100:+.2f} %)"
    )
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": name,
        "machine": machine,
        "sentence": answer.sentence,
        "identity": f"Drawn at the recorded size, the {step} comes back as {identity_text}.",
        "ranks_before": answer.ranks_before,
        "ranks": answer.ranks,
        "data_parallel_before": answer.data_parallel_before,
        "data_parallel": answer.data_parallel,
        "recorded": answer.recorded,
        "before_ns": answer.before_ns,
        "measured": answer.measured,
        "identity_ns": answer.identity_ns,
        "identity_error": answer.identity_error,
        "equal_ns": answer.equal_ns,
        "after_ns": answer.after_ns,
        "p10_ns": answer.p10_ns,
        "p90_ns": answer.p90_ns,
        "quantiles": to_rows(answer.quantiles),
        "collectives": to_rows(answer.collectives),
        "draws": answer.draws,
        "seed": answer.seed,
        "notices": [notice.to_dict() for notice in answer.notices],
    }


def render_scaled(document: ScaledDocument, width: int) -> Iterator[Text]:
    yield Text(fit_name(document["name"], width), "bold")
    yield Text("")
    yield from render_paragraph(document["identity"], width)
    yield from render_paragraph(document["sentence"], width, "bold")
    yield from render_heading("Steps", "so many of a hundred take no longer", width)
    quantiles = document["quantiles"]
    cells: list[list[Cell]] = [[units.format_duration(row["time_ns"]) for row in quantiles]]
    columns = [TextColumn(f"P{row['percent']}") for row in quantiles]
    yield from render_table(columns, cells, ("", lambda *_: ""), width)
    meetings = document["collectives"][:_MAX_SCALED_ROWS]
    if meetings:
        yield from render_heading(
            "Collectives", "of a rank: bytes it puts in, transfer, waiting for others", width
        )
        cells = [
            [
                str(row["calls"]),
                f"{row['ranks_before']} > {row['ranks_after']}",
                units.format_size(row["in_bytes_after"]),
                f"{units.format_duration(row['transfer_before_ns'])} > {units.format_duration(row['transfer_after_ns'])}",
                f"{units.format_duration(row['waiting_before_ns'])} > {units.format_duration(row['waiting_after_ns'])}",
            ]
            for row in meetings
        ]
        columns = [
            TextColumn(title) for title in ("calls", "ranks", "bytes", "transfer", "waiting")
        ]
        yield from render_table(
            columns,
            cells,
            ("kind", lambda i, room: fit_name(meetings[i]["kind"] or "unknown", room)),
            width,
        )
    for notice in document["notices"]:
        yield Text("")
        yield from render_paragraph(notice["message"], width)
