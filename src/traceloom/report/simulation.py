"""`traceloom simulate`, with `--ranks`."""

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
from traceloom.graph import graph as gs
from traceloom.report.before_after import BeforeAfter, pack_both
from traceloom.report.document import Col
from traceloom.report.figure import heat_map, inline_code, text
from traceloom.report.labels import rank_label, short
from traceloom.report.views.files import ResultFiles, encode
from traceloom.report.views.page import asset, key_numbers, list_sections, render_page
from traceloom.report.views.page_table import table
from traceloom.report.views.terminal_table import Cell, TextColumn, heading, lines, paragraph
from traceloom.report.whatif import part_name
from traceloom.system import units
from traceloom.system.gzip_stream import compress_output
from traceloom.system.text import encode_utf8
from traceloom.trace.frames import to_rows
from traceloom.workload.simulate.result import Simulation
from traceloom.workload.simulate.scale import Scaled

if TYPE_CHECKING:
    from traceloom.report.documents import SimulationDocument
    from traceloom.report.documents.scaled import ScaledDocument


SIMULATION_FORMAT = "traceloom-simulation"
VERSION = 1


def build_simulation(answer: Simulation) -> SimulationDocument:
    """The document: the answer, how far it can be trusted, and its tables but that of the nodes."""
    device: Any = None if answer.device is None else answer.device.to_dict()
    return {
        "format": SIMULATION_FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "sentence": sentence(answer),
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
    """The document as JSON."""
    handle.write(encode(build_simulation(answer)))


def sentence(answer: Simulation) -> str:
    """The answer in words."""
    scope = "The window" if answer.step is None else f"Step {answer.step}"
    after = units.duration(answer.after_ns)
    if answer.before_ns is None:
        return f"{scope} takes {after} on {answer.machine}."
    unmeasured = answer.measured_ns is None
    if not answer.machine:
        return f"{scope} takes {after} {'by its own durations' if unmeasured else 'on the recorded machine'}."
    interval = ""
    if answer.low_ns is not None and answer.high_ns is not None and answer.low_ns < answer.high_ns:
        interval = f" ({units.duration(answer.low_ns)} to {units.duration(answer.high_ns)})"
    error = "" if answer.identity_error is None else f", give or take {units.share(abs(answer.identity_error), 1)}"
    change = f" ({(answer.after_ns / answer.before_ns - 1) * 100:+.1f} %)" if answer.before_ns else ""
    return (
        f"{scope} would take {after}{interval} on {answer.machine}{error}; "
        f"{'by its own durations it takes' if unmeasured else 'it took'} {units.duration(answer.before_ns)}{change}."
    )


def _html(answer: Simulation, handle: BinaryIO) -> None:

    handle.write(encode_utf8(render(build_simulation(answer), answer)))


def _perfetto(answer: Simulation, handle: BinaryIO) -> None:
    from traceloom.report.exports.perfetto import write_simulation

    write_simulation(answer, handle)


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
        document: What `traceloom.report.simulation.build_simulation` made of the answer.
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
    return render_page(
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
        **list_sections(_sections(document, answer, view)),
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
    trust = f"<p>{inline_code(document['identity'])}</p>" if document["identity"] else ""
    notes = "".join(f"<li>{inline_code(notice.message)}</li>" for notice in answer.notices)
    trust += f"<ul>{notes}</ul>" if notes else ""
    yield "trust", "How far it goes", "What the answer rests on.", trust or "<p>Nothing was assumed.</p>"
    if view is None:
        yield "timeline", "Timeline", "", '<p class="quiet absent">Timeline: there is none of this mode.</p>'
    else:
        note = f'<p class="quiet">{inline_code(view.said)}</p>' if view.said else ""
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


SIMULATION = ResultFiles(
    "simulation",
    ("ranks", "nodes", "collectives", "links", "path", "became_critical"),
    {
        ".json": write_json,
        ".html": _html,
        ".htm": _html,
        ".perfetto.json": _perfetto,
        ".perfetto.json.gz": lambda answer, handle: compress_output(partial(_perfetto, answer))(handle),
    },
)

_ROWS = 8
_NOTICES = 4
_OWN = ("transfer-flag", "device-kept", "groups-assumed")  # of the simulation, not of the recording
_TimeOfRank = Literal[
    "before_ns", "end_ns", "compute_ns", "exposed_communication_ns", "memory_ns", "host_ns", "other_ns"
]
_TIMES: dict[_TimeOfRank, str] = {
    "before_ns": "before", "end_ns": "after",
    "compute_ns": "compute", "exposed_communication_ns": "exposed",
    "memory_ns": "copies", "host_ns": "host", "other_ns": "other",
}  # fmt: skip


class _Listing(NamedTuple):
    """A table: titles of its columns, and of each row what it is of and its cells."""

    title: str
    hint: str
    columns: tuple[str, ...]
    rows: list[tuple[str, list[Cell]]]


def render_simulation(document: SimulationDocument, width: int) -> Iterator[Text]:
    """The lines on a terminal."""
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    if document["identity"]:
        yield from paragraph(document["identity"], width)
    yield from paragraph(document["sentence"], width, "bold")
    worth_saying = [notice for notice in document["notices"] if notice["severity"] != "info"]
    worth_saying.sort(key=lambda notice: notice["slug"] not in _OWN)
    for notice in worth_saying[:_NOTICES]:
        yield from paragraph(f"{notice['severity']}: {notice['message']} [{notice['slug']}]", width)
    if len(worth_saying) > _NOTICES:
        yield from paragraph(f"and {len(worth_saying) - _NOTICES} more notices; --json has them all", width)
    yield from _ranks(document, width)
    for title, hint, columns, rows in _listings(document):
        if rows:
            yield from heading(title, hint, width)
            names, cells = zip(*rows, strict=True)

            def label(i: int, room: int, names: tuple[str, ...] = names) -> str:
                return short(names[i], room)

            yield from lines([TextColumn(column) for column in columns], cells, ("of", label), width)


def _ranks(document: SimulationDocument, width: int) -> Iterator[Text]:
    """What the ranks do with their time: those that end last, and first."""
    ranks = document["ranks"]
    by_end = sorted(ranks, key=lambda row: (-(row["end_ns"] or 0), row["rank"]))
    shown = (
        ranks if len(ranks) <= _ROWS else sorted(by_end[: _ROWS // 2] + by_end[-_ROWS // 2 :], key=lambda r: r["rank"])
    )
    hint = "exposed: communication while nothing computes"
    if len(shown) < len(ranks):
        hint = f"of the first and last of {len(ranks)} ranks"
    yield from heading("Time", hint, width)
    keys = [key for key in _TIMES if any(row[key] is not None for row in ranks)]
    rows: list[list[Cell]] = [
        [rank_label(row["rank"]), *("" if row[key] is None else units.duration(row[key]) for key in keys)]
        for row in sorted(shown, key=lambda row: row["rank"])
    ]
    columns = [TextColumn("", right=False), *(TextColumn(_TIMES[key]) for key in keys)]
    yield from lines(columns, rows, ("", lambda *_: ""), width)


def _listings(document: SimulationDocument) -> Iterator[_Listing]:
    """The path, what is new on it, the links that were busy for longest, and the rules for the other device."""
    path: list[tuple[str, list[Cell]]] = [
        (part_name(part), [units.duration(part["before_ns"]), units.duration(part["after_ns"])])
        for part in document["path"][:_ROWS]
    ]
    yield _Listing("Critical path", "what decides how long it takes", ("before", "after"), path)
    became: list[tuple[str, list[Cell]]] = [
        (
            ("" if part["rank"] is None else f"rank {part['rank']}: ") + f"{part_name(part)}, {part['name']}",
            [str(part["count"]), units.duration(part["time_ns"])],
        )
        for part in document["became_critical"][:_ROWS]
    ]
    yield _Listing("New on the critical path", "what did not decide before", ("count", "time"), became)
    used = [row for row in document["links"] if row["bytes"]]
    used.sort(key=lambda row: (-row["busy_ns"], -row["waiting_ns"], row["link"]))
    busiest: list[tuple[str, list[Cell]]] = [
        (row["name"], [units.size(row["bytes"]), units.duration(row["busy_ns"]), units.duration(row["waiting_ns"])])
        for row in used[:_ROWS]
    ]
    hint = "waiting: what it made transfers longer by"
    yield _Listing("Busiest links", hint, ("bytes", "busy", "waiting"), busiest)
    works: dict[str, list[tuple[int, ...]]] = {}
    for row in document["device"]["account"] if document["device"] else ():
        work = row["count"], row["here_ns"], row["there_ns"], row["low_ns"], row["high_ns"]
        works.setdefault(row["rule"], []).append(work)
    by_rule: list[tuple[str, list[Cell]]] = []
    for rule, of_rule in works.items():
        count, *times = map(sum, zip(*of_rule, strict=True))
        by_rule.append((rule, [str(count), *map(units.duration, times)]))
    hint = "the work of all ranks by the rule that put it there"
    yield _Listing("Device", hint, ("pieces", "here", "there", "at least", "at most"), by_rule)


FORMAT = "traceloom-scaled"
_MAX_SCALED_ROWS = 12


def build(answer: Scaled, name: str, machine: str = "") -> ScaledDocument:
    """The document: the answer, how far it can be trusted, and its tables.

    Args:
        answer: The scaled job.
        name: The workload, as the user named it.
        machine: Name of the machine; "" for the recorded one.
    """
    step = f"{'measured ' * answer.measured}step of {units.duration(answer.before_ns)}"
    drawn = f"{units.duration(answer.identity_ns)} ({answer.identity_error * 100:+.2f} %)"
    identity = f"Drawn at the recorded size, the {step} comes back as {drawn}."
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": name,
        "machine": machine,
        "sentence": answer.sentence,
        "identity": identity,
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
    """The lines on a terminal."""
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["identity"], width)
    yield from paragraph(document["sentence"], width, "bold")
    yield from heading("Steps", "so many of a hundred take no longer", width)
    quantiles = document["quantiles"]
    cells: list[list[Cell]] = [[units.duration(row["time_ns"]) for row in quantiles]]
    columns = [TextColumn(f"P{row['percent']}") for row in quantiles]
    yield from lines(columns, cells, ("", lambda *_: ""), width)
    meetings = document["collectives"][:_MAX_SCALED_ROWS]
    if meetings:
        yield from heading("Collectives", "of a rank: bytes it puts in, transfer, waiting for others", width)
        cells = [
            [
                str(row["calls"]),
                f"{row['ranks_before']} > {row['ranks_after']}",
                units.size(row["in_bytes_after"]),
                f"{units.duration(row['transfer_before_ns'])} > {units.duration(row['transfer_after_ns'])}",
                f"{units.duration(row['waiting_before_ns'])} > {units.duration(row['waiting_after_ns'])}",
            ]
            for row in meetings
        ]
        columns = [TextColumn(title) for title in ("calls", "ranks", "bytes", "transfer", "waiting")]
        yield from lines(columns, cells, ("kind", lambda i, room: short(meetings[i]["kind"] or "unknown", room)), width)
    for notice in document["notices"]:
        yield Text("")
        yield from paragraph(notice["message"], width)
