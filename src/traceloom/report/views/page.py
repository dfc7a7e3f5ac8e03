"""A document as one HTML file: frame, navigation, sections, which ranks are shown one by one.

A page with every event of every rank of a large job would be slow and large, and nobody looks at sixty timelines. It
shows the rank to blame, the slowest, the median and the fastest one, in one step, and says the command for any other.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import islice
from string import Template
from typing import TYPE_CHECKING, Any

from traceloom.analyze.memory_answers import LEAST_STEPS
from traceloom.report import memory as tables
from traceloom.report.document import Col, Table
from traceloom.report.figure import figure, inline_code, text
from traceloom.report.labels import allocator, rank_name
from traceloom.report.memory import growth_unknown
from traceloom.report.sections import GROUPS, core, shown
from traceloom.report.sections.section import Section
from traceloom.report.views import page_head, timeline
from traceloom.report.views.page_head import Reasons
from traceloom.report.views.page_table import MOST_ROWS, table
from traceloom.report.views.timeline import add_overlay
from traceloom.system import units
from traceloom.trace.batch import cut
from traceloom.trace.session import Session

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument, ReportDocument
    from traceloom.report.documents.memory import MemoryMemoryRow, MemoryRankRow
    from traceloom.report.documents.report import RankRow


FEW_RANKS = 8  # up to here every rank is shown
FEW_EVENTS = 1_000_000  # of all ranks together
_UNUSUAL = 1.1  # of the median step: from here on the slowest step is shown, below it the median one


@dataclass(frozen=True, slots=True)
class DetailedRanks:
    """What is shown event by event.

    Attributes:
        positions: Places in the document's `ranks` and in the session's traces, in the order of the page.
        roles: Why each is there, by position.
        step: The step; None where the ranks have no steps.
        unusual: Whether that is the slowest step, not the median one.
    """

    positions: tuple[int, ...]
    roles: Mapping[int, str]
    step: int | None
    unusual: bool = False

    def session(self, whole: Session) -> Session:
        """These ranks, cut to the step."""
        traces = (whole.traces[position] for position in self.positions)
        shown = tuple(trace if self.step is None else cut(trace, (self.step, self.step)) for trace in traces)
        return replace(whole, traces=shown)

    def document(self, whole: ReportDocument) -> ReportDocument:
        """The document with only these ranks in what is told rank by rank."""
        return {**whole, "ranks": [whole["ranks"][position] for position in self.positions]}

    def sentence(self, document: ReportDocument) -> str:
        """What is shown, and how to see the rest; plain text, the command between backticks."""
        ranks = document["ranks"]
        named = "; ".join(f"{rank_name(ranks[k], k)} ({self.roles[k]})" for k in self.positions)
        step = "" if self.step is None else f", step {self.step} ({'the slowest' if self.unusual else 'a usual one'})"
        other = next(
            (r["rank"] for k, r in enumerate(ranks) if k not in self.positions and r.get("rank") is not None), 0
        )
        where = shlex.quote(str(document.get("name") or "DIR"))
        steps = "" if self.step is None else f" --steps {self.step}"
        return (
            f"Of {len(ranks)} ranks the page shows these event by event: {named}{step}. "
            "Times of the timeline count from its own beginning. "
            f"The tables cover all ranks. Any other: `traceloom report {where} --rank {other}{steps} -o out.html`."
        )


def choose(document: ReportDocument, session: Session) -> DetailedRanks | None:
    """The ranks and the step to show; None where all are few enough."""
    ranks = document.get("ranks") or []
    if len(ranks) != len(session.traces) or len(ranks) < 3:
        return None
    if len(ranks) <= FEW_RANKS and session.event_count <= FEW_EVENTS:
        return None
    step, unusual = _step(ranks)
    path = document.get("critical_path")
    if path and path.get("step") is not None and not unusual:
        step = path["step"]  # the usual one, whose critical path is drawn
    roles: dict[int, str] = {}
    busy = []  # how long a rank computes in the step (in all, without steps); the step, where no device computes
    for rank in ranks:
        entry = next((s for s in rank.get("steps") or [] if s["step"] == step), rank)
        computes = sum(device.get("compute_ns") or 0 for device in entry.get("devices") or [])
        busy.append(computes or entry.get("duration_ns") or rank.get("window_ns") or 0)
    order = sorted(range(len(ranks)), key=lambda k: (busy[k], k))
    # The rank that most of the waiting for other ranks goes back to, where that is known.
    across = document.get("across_ranks")
    most = max(across["ranks"], key=lambda row: (row["root_ns"], row["blame_ns"]), default=None) if across else None
    if most and (most["root_ns"] or most["blame_ns"]):
        culprit = next((k for k, rank in enumerate(ranks) if rank["rank"] == most["rank"]), None)
        if culprit is not None:
            roles[culprit] = "the others wait for it most"
    for position, role in ((order[-1], "computes longest"), (order[len(order) // 2], "median"), (order[0], "shortest")):
        roles[position] = f"{roles[position]}, {role}" if position in roles else role
    return DetailedRanks(tuple(roles), roles, step, unusual)


def _step(ranks: list[RankRow]) -> tuple[int | None, bool]:
    """The step to show, and whether it is the slowest: by the longest of all ranks, whole steps before cut ones."""
    lengths: dict[int, int] = {}
    for steps in ([s for s in rank.get("steps") or [] if s.get("complete", True)] for rank in ranks):
        for step in steps:
            lengths[step["step"]] = max(lengths.get(step["step"], 0), step["duration_ns"])
    if not lengths:
        return None, False
    order = sorted(lengths, key=lambda step: (lengths[step], step))
    median, slowest = order[(len(order) - 1) // 2], order[-1]
    unusual = len(order) > 2 and lengths[slowest] > _UNUSUAL * lengths[median]
    return (slowest, True) if unusual else (median, False)


# In the order of their imports: a script only uses what stands before it.
SCRIPTS = (
    "state.js", "units.js", "element.js", "inflate.js", "unpack.js", "levels.js", "events.js", "palette.js", "scale.js",
    "draw.js", "tracks.js", "rows.js", "overview.js", "pace.js", "path.js", "sides.js", "timeline.js", "gestures.js",
    "details.js", "search.js", "links.js", "cells.js", "tables.js", "icicle.js", "curve.js", "owners.js", "views.js",
    "lookup.js", "page.js", "main.js",
)  # fmt: skip
STYLES = ("colours.css", "page.css", "views.css", "timeline.css", "print.css")
_IMPORT = re.compile(r'^import [^;]*? from "\./[a-z]+\.js";\n', re.MULTILINE)
_MARGIN = re.compile(r"^(?: *//.*\n|[ \n]+)", re.MULTILINE)  # comments, indentation, empty lines
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


def render_page(
    *,
    title: str,
    name: str,
    headline: str,
    links: str,
    sections: str,
    footer: str,
    ranks: str = "",
    numbers: str = "",
    data: str = "",
    more: str = "",
    window: str = "",
) -> str:
    """A page that needs nothing but itself. `title` and `name` are plain words, all else is HTML.

    Args:
        title: Of the browser's tab.
        name: Of the run.
        headline: The answer.
        links: What the side bar leads to.
        sections: Of the first view.
        footer: How the page was made.
        ranks: A choice of ranks.
        numbers: The key numbers.
        data: The packed events of the timeline.
        more: The other views, as templates: they are made when they are first opened.
        window: From-to in ns: what the timeline shows.
    """
    # All modules in one script: their imports and exports resolve to names of one shared scope.
    modules = [_MARGIN.sub("", _EXPORT.sub("", _IMPORT.sub("", asset(module)))) for module in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(modules) + "})();\n"
    theme = asset("theme.js")
    style = "\n".join(asset(stylesheet) for stylesheet in STYLES)
    page = Template(asset("page.html")).substitute(
        policy=policy([theme, script], style),
        title=text(title),
        theme=theme,
        style=style,
        name=text(name),
        ranks=ranks,
        headline=headline,
        numbers=numbers,
        links=links,
        sections=sections,
        more=more,
        window=window,
        footer=footer,
        data=data,
        script=script,
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # names from JSON may hold halves of surrogate pairs


def list_sections(sections: Iterable[tuple[str, str, str, str]]) -> dict[str, str]:
    """`links` and `sections` of a page whose sections (id, title, note, body) are not grouped."""
    all_sections = list(sections)
    return {
        "links": "".join(f'<a href="#{key}">{title}</a>' for key, title, _, _ in all_sections),
        "sections": "\n".join(section_html(*section) for section in all_sections),
    }


def key_numbers(items: Iterable[tuple[str, str, str, str]]) -> str:
    """The numbers at the head of a page: label, value, exact value for hovering (empty: it is exact), what it is of."""
    shown = ""
    for label, value, exact, more in items:
        title = f' title="{text(exact)}"' if exact else ""
        shown += f"<div><dt>{text(label)}</dt><dd><b{title}>{text(value)}</b><span>{text(more)}</span></dd></div>"
    return f'<dl class="key">{shown}</dl>' if shown else ""


def rank_choice(names: Sequence[str]) -> str:
    """The choice between the ranks that are shown one by one; nothing for a single one."""
    options = "".join(f'<option value="{k}">{text(name)}</option>' for k, name in enumerate(names))
    label = f'<label class="rank">Show <select id="rank" aria-label="Rank">{options}</select></label>'
    return label if len(names) > 1 else ""


def asset(name: str) -> str:
    """A file of the page's own: a style, a script, a piece of HTML."""
    return files("traceloom.report.views").joinpath("assets", name).read_text(encoding="utf-8")


def policy(scripts: list[str], style: str) -> str:
    """Nothing may be loaded; only the scripts and the style of this page run, by their hashes."""

    def allowed(body: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(allowed(s) for s in scripts)}; style-src {allowed(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def section_html(identity: str, title: str, note: str, body: str) -> str:
    """A section of the page; one line where its body only says why it is missing."""
    is_missing = missing(body)
    look, beside = (' class="missing"', body) if is_missing else ("", f'<p class="quiet">{note}</p>')
    return (
        f'<section{look} id="{identity}" aria-labelledby="{identity}-title"><header><h2 id="{identity}-title">{title}'
        f"</h2>{beside}</header>{'' if is_missing else body}</section>"
    )


def missing(body: str) -> bool:
    """Whether a section is only one line that says why it is missing."""
    return body.startswith('<p class="quiet absent">') and body.count("<p") == 1


_FEW = 2  # sections without anything to show that stand as they are


@dataclass(frozen=True, slots=True)
class PageSection:
    """One section: key in the report, id in the page, title, how to read it, body, its main figure in a sentence."""

    key: str
    anchor: str
    title: str
    note: str
    body: str
    sentence: str = ""

    @property
    def drawn(self) -> str:
        """It as HTML."""
        return section_html(self.anchor, self.title, self.note, self.body)


@dataclass(frozen=True, slots=True)
class PageView:
    """Sections that are about the same thing: one is open at a time."""

    title: str
    shown: Sequence[PageSection]
    missing: Sequence[PageSection]

    @property
    def key(self) -> str:
        """Its name in the address."""
        return self.title.lower()

    @property
    def body(self) -> str:
        """Its sections; those without anything to show come last, folded into one line."""
        shown = "\n".join(section.drawn for section in self.shown)
        nothing = "".join(section.drawn for section in self.missing)
        if self.shown and len(self.missing) >= _FEW:
            titles = ", ".join(section.title for section in self.missing)
            nothing = (
                '<details class="nothing"><summary>Nothing to show here for '
                f"<span>{titles}</span></summary>{nothing}</details>"
            )
        return shown + nothing


def views(sections: Iterable[PageSection]) -> list[PageView]:
    """The views that have sections; the sections that no view names come before the last view.

    Args:
        sections: In any order.
    """
    by_key = {section.key: section for section in sections}
    named = {key for _, keys in GROUPS for key in keys}
    unnamed = tuple(key for key in by_key if key not in named)
    out = []
    for title, keys in (*GROUPS[:-1], ("More", unnamed), GROUPS[-1]):
        members = [by_key[key] for key in keys if key in by_key]
        if members:
            empty = [section for section in members if missing(section.body)]
            out.append(PageView(title, [section for section in members if section not in empty], empty))
    return out


def links(pages: Iterable[PageView]) -> str:
    """The side bar: the views; below the open one its sections."""
    out = []
    for view in pages:
        quiet = "" if view.shown else ' class="empty" title="Nothing was recorded for it"'
        inside = "".join(f'<a href="#{view.key}/{section.anchor}">{section.title}</a>' for section in view.shown)
        out.append(
            f'<a href="#{view.key}" data-view="{view.key}"{quiet}>{view.title}</a>'
            f'<div class="inside" data-of="{view.key}" hidden>{inside}</div>'
        )
    return "".join(out)


def templates(pages: Iterable[PageView]) -> str:
    """The views that are made when they are first opened."""
    return "\n".join(
        f'<template data-view="{view.key}"><h1 class="view-title">{view.title}</h1>{view.body}</template>'
        for view in pages
    )


def in_short(pages: Iterable[PageView]) -> str:
    """The main figure of every section of these views, with the way to it."""
    out = []
    for view in pages:
        lines = "".join(
            f'<li><a href="#{view.key}/{section.anchor}">{section.title}</a> {inline_code(section.sentence)}</li>'
            for section in view.shown
            if section.sentence
        )
        if lines:
            out.append(f"<div><h3>{view.title}</h3><ul>{lines}</ul></div>")
    if not out:
        return ""
    return section_html("in-short", "In short", "What the other views say.", f'<div class="short">{"".join(out)}</div>')


MAX_RANK_SECTIONS = 64  # whose own tables stand in the page
_MOST_ROWS_OF_MANY = 500  # of one table, where the page is about many ranks


def sections(document: ReportDocument, near: ReportDocument, reasons: Reasons) -> Iterator[PageSection]:
    """The sections that were made; of many ranks, tables have fewer rows of each.

    Args:
        document: The report.
        near: The same with only the ranks that are shown one by one.
        reasons: Why values are unknown.
    """
    for section in (*core(), *shown(document)):
        anchor = section.anchor or section.key.replace("_", "-")
        sentence = section.summary(value) if (value := section.value(document)) else None
        if sentence:
            sentence = sentence[0].upper() + sentence[1:] + ("" if sentence.endswith((".", "!", "?")) else ".")
        body = _body(section, document, near, reasons, sentence or "")
        yield PageSection(section.key, anchor, section.title, section.note, body, sentence or "")


def _body(
    section: Section[Any, Any], document: ReportDocument, near: ReportDocument, reasons: Reasons, sentence: str
) -> str:
    most = MOST_ROWS if near is document else _MOST_ROWS_OF_MANY
    value, shown_value = section.value(document), section.value(near)
    tables = [t for t in section.tables(value) if t.position is None] if value else []
    of_ranks = [t for t in section.tables(shown_value) if t.position is not None] if shown_value else []
    picture = section.picture(shown_value) if shown_value else ""
    if not tables and not of_ranks and not picture:
        # Why the section is missing, else why something that would stand in it is.
        path = section.path or section.key
        paths = [entry["path"] for entry in document.get("absent") or [] if entry["path"].startswith(path)]
        if section.nothing and path not in paths:
            return f'<p class="quiet">{section.nothing}</p>'
        return reasons.line(path if path in paths else next(iter(paths), path), section.title)
    body = (f'<p class="sentence">{inline_code(sentence)}</p>' if sentence else "") + picture
    if tables:
        body += drawn(tables[0], reasons, most, alone=len(tables) == 1 and not of_ranks)
    for each in tables[1:]:  # lines that unfold
        size = f"{units.count(len(each.rows))} {'row' if len(each.rows) == 1 else 'rows'}"
        head = f'<summary><h3>{escape(each.title)}</h3> <span class="quiet">{size}</span></summary>'
        body += f'<details class="fold">{head}{drawn(each, reasons, most, alone=True)}</details>'
    for position, rank in enumerate(near["ranks"][:MAX_RANK_SECTIONS] if of_ranks else ()):
        own = [each for each in of_ranks if each.position == position]
        inside = "".join(drawn(each, reasons, most, alone=not tables) for each in own)
        if not own:
            inside = reasons.line(section.path or section.key, f"{section.title} of {rank_name(rank, position)}")
        body += inside if len(near["ranks"]) == 1 else f'<div data-of-rank="{position}">{inside}</div>'
    if definition := section.definition(value):
        body += f'<details class="definition"><summary>How it is counted</summary>{definition}</details>'
    return body


def drawn(data_table: Table, reasons: Reasons, most: int = MOST_ROWS, *, alone: bool = True) -> str:
    """One table with its picture; with heading unless it stands alone in its section."""
    head = "" if alone else f"<h3>{escape(data_table.title)}</h3>"
    note = f'<p class="quiet">{inline_code(data_table.note)}</p>' if data_table.note else ""
    why = {**(reasons.columns(data_table.path) if data_table.path else {}), **(data_table.unknown or {})}
    figure = table(data_table.key, data_table.columns, data_table.rows, why, data_table.title, most=most)
    return head + note + data_table.picture + figure


_KEY_NUMBERS = 4
_ABOUT_FINDINGS = (
    "What each fix saves by re-timing the linked graph, with the fixes above it applied; savings do not overlap."
)


def render_report_page(document: ReportDocument, session: Session) -> str:
    """The report as one HTML page that needs nothing but itself.

    Args:
        document: What `traceloom.report.run.build` made of the session.
        session: The session, for the timeline.
    """
    began = time.perf_counter()
    reasons = Reasons(document["absent"])
    few = None if document.get("runs") else choose(document, session)
    near = document if few is None else few.document(document)
    drawn = session if few is None else few.session(session)
    view = None
    if not document.get("runs") and any(trace.events.height for trace in drawn.traces):
        kernels = document.get("kernels") or []
        communication = {row["name"] for row in kernels if row.get("category") == "communication"}
        curves = (document.get("memory") or {}).get("curve") or []
        epoch_ns = int(document["epoch_ns"]) if document.get("epoch_ns") else drawn.epoch_ns
        view = timeline.build(
            add_overlay(drawn), communication, curves, path=document.get("critical_path"), epoch_ns=epoch_ns
        )
    note = "" if few is None else f'<p class="quiet">{inline_code(few.sentence(document))}</p>'
    events = '<p class="quiet absent">Timeline: the trace has no events.</p>'
    if view is not None:
        events = note + asset("timeline.html")
        if view.omitted:
            largest_first = sorted(view.omitted.items(), key=lambda pair: -pair[1])
            kinds = ", ".join(f"{units.count(number)} {kind}" for kind, number in largest_first)
            events += (
                f'<p class="quiet">The timeline shows {units.count(view.shown)} events. The shortest ones are left out '
                f"to keep the page small ({escape(kinds)}); every table and number counts them. "
                "<code>traceloom report … -o x.perfetto.json.gz</code> writes all of them for Perfetto.</p>"
            )
    first, *others = views(_render_sections(document, near, reasons, events))
    name = document.get("name") or session.name
    version, epoch = text(document.get("traceloom", "")), text(document.get("epoch_ns", ""))
    versions = {f"{k} {v}" for entry in document.get("inputs") or [] for k, v in (entry.get("versions") or {}).items()}
    recorded = text(", ".join(sorted(versions))) or "no versions named in the files"
    return render_page(
        title=f"{name} – Traceloom",
        name=name,
        ranks=rank_choice([rank_name(r, k) for k, r in enumerate(near["ranks"][:MAX_RANK_SECTIONS])]),
        headline=page_head.headline(document),
        numbers=key_numbers(islice(page_head.numbers(document), _KEY_NUMBERS)),
        links=links([first, *others]),
        sections=first.body + in_short(others),
        more=templates(others),
        window=view.window if view else "",
        footer=(
            f"<p>Traceloom {version} · {recorded} · times count from {epoch} ns (Unix time where the trace gives it) · "
            f"page made in {time.perf_counter() - began:.2f} s</p>"
            "<p>The same numbers for programs: <code>traceloom report … -o report.json</code></p>"
        ),
        data=view.payload if view else "",
    )


def _render_sections(
    document: ReportDocument, near: ReportDocument, reasons: Reasons, events: str
) -> list[PageSection]:
    """All sections, in no order; `near` has the ranks that are shown one by one."""
    data = page_head.notices(document["notices"], reasons) + page_head.inputs(document, reasons)
    about_data = "What was read, and what to know about it."
    if document.get("runs"):
        runs = page_head.runs(document, reasons)
        return [
            PageSection("runs", "runs", "Runs", "Report one of them alone to see more.", runs),
            PageSection("data", "data", "Data", about_data, data),
        ]
    ranked = page_head.findings(document, reasons)
    return [
        PageSection("findings", "findings", "What to fix first", _ABOUT_FINDINGS, ranked),
        PageSection("timeline", "timeline", "Timeline", "Every event of every thread and stream.", events),
        *sections(document, near, reasons),
        PageSection("data", "data", "Data", about_data, data + page_head.capture(document, reasons)),
    ]


MOST_RANKS = 8  # that are shown one by one: those with the highest peaks
_MOST_ENDS = 8  # times that memory ran out, which are shown one by one
Body = tuple[str, str, str, str]


def render(document: MemoryDocument) -> str:
    """The document as one HTML page that needs nothing but itself."""
    reasons = Reasons(document["absent"])
    ranks = document["ranks"]
    named = [(rank_name(entry, k), entry) for k, entry in enumerate(ranks)]
    highest = sorted(range(len(ranks)), key=lambda k: -max((m["peak_bytes"] for m in ranks[k]["memories"]), default=0))
    shown = [named[k] for k in sorted(highest[:MOST_RANKS])]  # one by one, in their own order
    numbers = ""
    if memories := [(entry, memory) for entry in ranks for memory in entry["memories"]]:
        entry, most = max(memories, key=lambda pair: int(pair[1]["peak_bytes"]))
        attributed = sum(
            row["bytes"] for row in most["categories"] if row["category"] not in ("unknown", "before_recording")
        )
        whole = max(sum(row["bytes"] for row in most["categories"]), 1)
        where = "outside all steps" if most["peak_step"] is None else f"in step {most['peak_step']}"
        grows = sum(row["bytes_per_step"] for row in most["growth"])
        growth = (units.size(round(grows)), "per step") if grows else ("nothing", "from step to step")
        if growth_unknown(entry) is not None:
            growth = ("unknown", f"without {LEAST_STEPS + 1} steps")
        allocations = f"after {units.count_of(most['allocation_count'], 'allocation')}"
        shown_numbers = (
            ("Peak", units.size(most["peak_bytes"]), f"{allocator(most)}, {where}"),
            ("At the end", units.size(most["end_bytes"]), allocations),
            ("Told what it is for", units.share(attributed, whole), "of the bytes at the instant shown"),
            ("Grows", *growth),
        )
        numbers = key_numbers((label, value, "", more) for label, value, more in shown_numbers)
    name = str(document["name"])
    return render_page(
        title=f"{document['sentence']} – {name}",
        name=name,
        ranks=rank_choice([rank for rank, _ in shown]),
        headline=f"<h1>{text(document['sentence'])}</h1>",
        numbers=numbers,
        footer=(
            f"<p>Traceloom {text(document['traceloom'])} · times count from {text(document['epoch_ns'])} ns</p>"
            "<p>Every allocation by name: <code>traceloom memory … -o allocations.csv --all</code>; the same numbers "
            "for programs: <code>-o memory.json</code></p>"
        ),
        **list_sections(_sections(document, shown, reasons)),
    )


def _sections(document: MemoryDocument, shown: list[tuple[str, MemoryRankRow]], reasons: Reasons) -> Iterator[Body]:
    if document["out_of_memory"]:
        body = "".join(_ran_out(document, reasons))
        yield "out-of-memory", "Out of memory", "Who held it when it ran out, and what to try.", body
    if not shown:
        yield "memory", "Memory", "", reasons.line("ranks", "Memory")
    else:
        at = str(document["at"])
        at = "the peak" if at == "peak" else units.duration(int(at)) if at.isdigit() else at
        why = reasons.columns("memories[*].largest")
        every: list[tuple[str, str, str, Callable[[MemoryMemoryRow, MemoryRankRow, str], str]]] = [
            ("over-time", "Over time", "Click the curve, or use the arrow keys on it.",
             lambda memory, entry, _key: figure(
                 memory["curve"], entry["steps"], label=f"{allocator(memory)} over time",
                 chosen_ns=None if document["at"] == "peak" else memory["instant"]["time_ns"],
             )
             + (f'<p class="quiet">{text(state)}.</p>' if (state := tables.state_of_allocator(memory)) else "")),
            ("scopes", "Scopes", f"Who holds what at {text(at)}; each row holds the indented ones below it.",
             lambda memory, _entry, key: drawn(tables.scopes(memory, key), reasons)),
            ("modules", "Modules", "The part of the model: parameters with their gradients and states too.",
             lambda memory, _entry, key: drawn(tables.modules(memory, key), reasons)),
            ("categories", "Categories", "What it is for, and how that is known.",
             lambda memory, _entry, key: drawn(tables.categories(memory, key), reasons)),
            ("largest", "Largest allocations", f"The largest blocks alive at {text(at)}.",
             lambda memory, _entry, key: drawn(tables.largest(memory, key, why), reasons)),
            ("growth", "Growth", "Made in a step and never freed, step after step: a leak, or a cache.",
             lambda memory, entry, key: _growth(memory, entry, key, reasons)),
            ("activations", "Activations", "What checkpointing a module would free, and cost.",
             lambda memory, _entry, key: drawn(replace(tables.activations(memory, key), note=""), reasons)
             if memory["activations"] else '<p class="quiet">No activations are alive at this instant.</p>'),
        ]  # fmt: skip
        for key, title, note, make in every:
            parts = []
            for position, (name, entry) in enumerate(shown):
                only = "" if len(shown) == 1 else f' data-of-rank="{position}"'
                memories = tables.select_memories(entry["memories"])
                bodies = (
                    (f"<h3>{text(allocator(m))}</h3>" if len(memories) > 1 else "")
                    + make(m, entry, f"{key}-{position}-{k}")
                    for k, m in enumerate(memories)
                )
                parts.append(f'<div{only} data-rank-name="{text(name)}">{"".join(bodies)}</div>')
            yield key, title, note, "".join(parts)
        lives = [drawn(tables.lifetimes(entry, f"lifetimes-{k}"), reasons) for k, (_, entry) in enumerate(shown)]
        if len(lives) > 1:
            lives = [f'<div data-of-rank="{k}">{body}</div>' for k, body in enumerate(lives)]
        yield "lifetimes", "Lifetimes", "How long blocks live, of those made and freed here.", "".join(lives)
    if len(document["ranks"]) > 1:
        job = "".join(f'<p class="quiet">{text(sentence)}</p>' for sentence in tables.job(document))
        yield "ranks", "Ranks", "The peak of every memory.", job + drawn(tables.ranks(document), reasons)
    yield "data", "Data", "What to know about the data.", page_head.notices(document["notices"], reasons)


def _growth(memory: MemoryMemoryRow, entry: MemoryRankRow, key: str, reasons: Reasons) -> str:
    if (why := growth_unknown(entry)) is not None:
        return f'<p class="quiet">What grows from step to step cannot be determined: {text(why)}.</p>'
    grown = tables.growth(memory, key, reasons.columns("memories[*].growth"))
    if not grown.rows:
        return '<p class="quiet">Nothing grows from step to step.</p>'
    return drawn(replace(grown, note=""), reasons)


def _ran_out(document: MemoryDocument, reasons: Reasons) -> Iterator[str]:
    """Where memory ran out, what was alive then, and what to try first."""
    entries = document["out_of_memory"]
    for number, entry in enumerate(entries[:_MOST_ENDS]):
        rank = "" if entry["rank"] is None else f"rank {entry['rank']}: "
        request = "" if entry["asked_bytes"] is None else f"{units.size(entry['asked_bytes'])} were asked for, "
        step = "" if entry["step"] is None else f", in step {entry['step']}"
        yield f"<h3>{text(rank)}{text(request)}{units.size(entry['bytes'])} were alive{text(step)}</h3>"
        if entry["where"]:
            yield f'<p class="quiet">at <code>{text(entry["where"])}</code></p>'
        if entry["advice"]:
            columns = [Col("bytes", "Frees up to", "bytes"), Col("text", "What to try first"), Col("why", "Because")]
            unknown = {"bytes": "how much it frees is not known"}
            advice = Table(f"advice-{number}", "What to try first", columns, entry["advice"], unknown=unknown)
            yield drawn(advice, reasons)
        yield drawn(tables.alive_at_out_of_memory(entry, f"alive-{number}"), reasons)
        if entry["stack"]:
            frames = [{"frame": frame} for frame in reversed(entry["stack"])]
            columns = [Col("frame", "Stack, the innermost frame first", "name")]
            yield drawn(Table(f"stack-{number}", "Stack", columns, frames), reasons)
    if len(entries) > _MOST_ENDS:
        yield f'<p class="quiet">{len(entries) - _MOST_ENDS} more stand in <code>-o memory.json</code>.</p>'
