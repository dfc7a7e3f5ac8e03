"""Renders documents as one HTML file: frame, navigation, sections, and the choice of detailed
ranks.

A page with every event of every rank of a large job would be slow and large, and nobody reads sixty
timelines. It shows the rank to blame, the slowest, the median and the fastest one, in one step, and
the command for any other.
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
from itertools import islice
from string import Template
from typing import TYPE_CHECKING, Any

from traceloom.analyze.memory_answers import MIN_STEPS
from traceloom.report import memory as tables
from traceloom.report.document import Col, Table
from traceloom.report.figure import escape_html, render_inline_code, render_memory_figure
from traceloom.report.labels import format_memory_name, format_rank_name, get_step_length
from traceloom.report.memory import explain_unknown_growth
from traceloom.report.sections import GROUPS, load_core_sections, select_visible_sections
from traceloom.report.sections.section import Section
from traceloom.report.views import page_head, read_asset, timeline
from traceloom.report.views.page_head import Reasons
from traceloom.report.views.page_table import MAX_ROWS, render_html_table
from traceloom.report.views.timeline import add_overlay
from traceloom.system import units
from traceloom.trace.batch import cut_trace_to_steps
from traceloom.trace.session import Session

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument, ReportDocument
    from traceloom.report.documents.memory import MemoryMemoryRow, MemoryRankRow
    from traceloom.report.documents.report import RankRow


MAX_DETAILED_RANKS = 8  # up to this number every rank is shown
MAX_DETAILED_EVENTS = 1_000_000  # of all ranks together
# Relative to the median step: from here on the slowest step is shown, below it the median one.
_SLOW_STEP_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class DetailedRanks:
    """The ranks and the step that are shown event by event.

    Attributes:
        positions: Indices in the document's `ranks` and in the session's traces, in the order of
            the page.
        roles: The reason for each rank, by position.
        step: The step; None where the ranks have no steps.
        unusual: Whether it is the slowest step, not the median one.
    """

    positions: tuple[int, ...]
    roles: Mapping[int, str]
    step: int | None
    unusual: bool = False

    def session(self, complete_session: Session) -> Session:
        """Returns these ranks, cut to the step."""
        selected_traces = tuple(
            trace if self.step is None else cut_trace_to_steps(trace, (self.step, self.step))
            for trace in (complete_session.traces[position] for position in self.positions)
        )
        return replace(complete_session, traces=selected_traces)

    def document(self, complete_document: ReportDocument) -> ReportDocument:
        """Returns the document with only these ranks in its values per rank."""
        return {
            **complete_document,
            "ranks": [complete_document["ranks"][position] for position in self.positions],
        }

    def sentence(self, document: ReportDocument) -> str:
        """Describes what is shown, and how to see the rest; plain text, the command between
        backticks.
        """
        ranks = document["ranks"]
        rank_list = "; ".join(
            f"{format_rank_name(ranks[k], k)} ({self.roles[k]})" for k in self.positions
        )
        step = (
            ""
            if self.step is None
            else f", step {self.step} ({'the slowest' if self.unusual else 'a usual one'})"
        )
        other = next(
            (
                r["rank"]
                for k, r in enumerate(ranks)
                if k not in self.positions and r.get("rank") is not None
            ),
            0,
        )
        input_path = shlex.quote(str(document.get("name") or "DIR"))
        steps = "" if self.step is None else f" --steps {self.step}"
        return (
            f"Of {len(ranks)} ranks the page shows these event by event: {rank_list}{step}. "
            "Times of the timeline count from its own beginning. "
            f"The tables cover all ranks. Any other: `traceloom report {input_path} --rank {other}{steps} -o out.html`."
        )


def choose(document: ReportDocument, session: Session) -> DetailedRanks | None:
    """Chooses the ranks and the step to show; None where all are few enough."""
    ranks = document.get("ranks") or []
    if len(ranks) != len(session.traces) or len(ranks) < 3:
        return None
    if len(ranks) <= MAX_DETAILED_RANKS and session.event_count <= MAX_DETAILED_EVENTS:
        return None
    step, unusual = _choose_step(ranks)
    path = document.get("critical_path")
    if path and path.get("step") is not None and not unusual:
        step = path["step"]  # the typical step, whose critical path is drawn
    roles: dict[int, str] = {}
    # Computing time of each rank in the step (in total, without steps); or its duration, where no
    # device computes.
    busy = []
    for rank in ranks:
        entry = next((s for s in rank.get("steps") or [] if s["step"] == step), rank)
        computes = sum(device.get("compute_ns") or 0 for device in entry.get("devices") or [])
        busy.append(computes or entry.get("duration_ns") or rank.get("window_ns") or 0)
    order = sorted(range(len(ranks)), key=lambda k: (busy[k], k))
    # The rank that causes most of the waiting for other ranks, where known.
    across = document.get("across_ranks")
    blamed_rank = (
        max(across["ranks"], key=lambda row: (row["root_ns"], row["blame_ns"]), default=None)
        if across
        else None
    )
    if blamed_rank and (blamed_rank["root_ns"] or blamed_rank["blame_ns"]):
        culprit = next(
            (k for k, rank in enumerate(ranks) if rank["rank"] == blamed_rank["rank"]), None
        )
        if culprit is not None:
            roles[culprit] = "the others wait for it most"
    for position, role in (
        (order[-1], "computes longest"),
        (order[len(order) // 2], "median"),
        (order[0], "shortest"),
    ):
        roles[position] = f"{roles[position]}, {role}" if position in roles else role
    return DetailedRanks(tuple(roles), roles, step, unusual)


def _choose_step(ranks: list[RankRow]) -> tuple[int | None, bool]:
    """Returns the step to show, and whether it is the slowest: by the longest duration over all
    ranks, whole steps before cut ones.
    """
    lengths: dict[int, int] = {}
    for rank in ranks:
        for step in (step for step in rank["steps"] if step["complete"]):
            lengths[step["step"]] = max(lengths.get(step["step"], 0), get_step_length(rank, step))
    if not lengths:
        return None, False
    order = sorted(lengths, key=lambda step: (lengths[step], step))
    median, slowest = order[(len(order) - 1) // 2], order[-1]
    unusual = len(order) > 2 and lengths[slowest] > _SLOW_STEP_RATIO * lengths[median]
    return (slowest, True) if unusual else (median, False)


# In the order of their imports: a script only uses scripts before it.
SCRIPTS = (
    "state.js",
    "units.js",
    "element.js",
    "inflate.js",
    "unpack.js",
    "levels.js",
    "events.js",
    "palette.js",
    "scale.js",
    "draw.js",
    "tracks.js",
    "rows.js",
    "overview.js",
    "pace.js",
    "path.js",
    "sides.js",
    "timeline.js",
    "gestures.js",
    "details.js",
    "search.js",
    "links.js",
    "cells.js",
    "tables.js",
    "icicle.js",
    "curve.js",
    "owners.js",
    "views.js",
    "lookup.js",
    "page.js",
    "main.js",
)
STYLES = ("colours.css", "page.css", "views.css", "timeline.css", "print.css")
_IMPORT = re.compile(r'^import [^;]*? from "\./[a-z]+\.js";\n', re.MULTILINE)
_COMMENTS_AND_INDENTATION = re.compile(
    r"^(?: *//.*\n|[ \n]+)", re.MULTILINE
)  # comments, indentation, empty lines
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
    view_templates: str = "",
    window: str = "",
) -> str:
    """Renders a self-contained page. `title` and `name` are plain text, everything else is HTML.

    Args:
        title: Title of the browser's tab.
        name: Name of the run.
        headline: The answer.
        links: Links of the sidebar.
        sections: Sections of the first view.
        footer: How the page was generated.
        ranks: The selector of ranks.
        numbers: The key numbers.
        data: The packed events of the timeline.
        view_templates: The other views, as templates: they are instantiated when they are first
            opened.
        window: Range of the timeline, from-to in ns.
    """
    # All modules in one script: their imports and exports resolve to names of one shared scope.
    modules = [
        _COMMENTS_AND_INDENTATION.sub("", _EXPORT.sub("", _IMPORT.sub("", read_asset(module))))
        for module in SCRIPTS
    ]
    script = '(() => {\n"use strict";\n' + "\n".join(modules) + "})();\n"
    theme = read_asset("theme.js")
    style = "\n".join(read_asset(stylesheet) for stylesheet in STYLES)
    page = Template(read_asset("page.html")).substitute(
        policy=build_content_security_policy([theme, script], style),
        title=escape_html(title),
        theme=theme,
        style=style,
        name=escape_html(name),
        ranks=ranks,
        headline=headline,
        numbers=numbers,
        links=links,
        sections=sections,
        more=view_templates,
        window=window,
        footer=footer,
        data=data,
        script=script,
    )
    return page.encode("utf-8", "replace").decode(
        "utf-8"
    )  # names from JSON may contain halves of surrogate pairs


def list_sections(sections: Iterable[tuple[str, str, str, str]]) -> dict[str, str]:
    """Returns `links` and `sections` of a page with ungrouped sections (id, title, note, body)."""
    all_sections = list(sections)
    return {
        "links": "".join(f'<a href="#{key}">{title}</a>' for key, title, _, _ in all_sections),
        "sections": "\n".join(render_section(*section) for section in all_sections),
    }


def render_key_numbers(items: Iterable[tuple[str, str, str, str]]) -> str:
    """Renders the numbers at the head of a page: label, value, exact value for hovering (empty: it
    is exact), description.
    """
    html = ""
    for label, value, exact, detail in items:
        title = f' title="{escape_html(exact)}"' if exact else ""
        html += f"<div><dt>{escape_html(label)}</dt><dd><b{title}>{escape_html(value)}</b><span>{escape_html(detail)}</span></dd></div>"
    return f'<dl class="key">{html}</dl>' if html else ""


def render_rank_selector(names: Sequence[str]) -> str:
    """Renders the selector of the detailed ranks; empty for a single one."""
    options = "".join(
        f'<option value="{k}">{escape_html(name)}</option>' for k, name in enumerate(names)
    )
    label = (
        f'<label class="rank">Show <select id="rank" aria-label="Rank">{options}</select></label>'
    )
    return label if len(names) > 1 else ""


def build_content_security_policy(scripts: list[str], style: str) -> str:
    """Forbids loading anything; only the scripts and the style of this page run, by
    their hashes.
    """

    def allowed(body: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(allowed(s) for s in scripts)}; style-src {allowed(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def render_section(identity: str, title: str, note: str, body: str) -> str:
    """Renders a section of the page; one line where its body only explains why it is missing."""
    is_missing = is_missing_section(body)
    class_attribute, note_html = (
        (' class="missing"', body) if is_missing else ("", f'<p class="quiet">{note}</p>')
    )
    return (
        f'<section{class_attribute} id="{identity}" aria-labelledby="{identity}-title"><header><h2 id="{identity}-title">{title}'
        f"</h2>{note_html}</header>{'' if is_missing else body}</section>"
    )


def is_missing_section(body: str) -> bool:
    """Whether a section is only one line that explains why it is missing."""
    return body.startswith('<p class="quiet absent">') and body.count("<p") == 1


_MIN_FOLDED_SECTIONS = 2  # up to so many sections without content stay unfolded


@dataclass(frozen=True, slots=True)
class PageSection:
    """One section: key in the report, id in the page, title, note, body, and its main figure in a
    sentence.
    """

    key: str
    anchor: str
    title: str
    note: str
    body: str
    sentence: str = ""

    @property
    def drawn(self) -> str:
        return render_section(self.anchor, self.title, self.note, self.body)


@dataclass(frozen=True, slots=True)
class PageView:
    """Sections on one topic: one view is open at a time."""

    title: str
    shown: Sequence[PageSection]
    missing: Sequence[PageSection]

    @property
    def key(self) -> str:
        return self.title.lower()

    @property
    def body(self) -> str:
        """Its sections; those without content come last, folded into one line."""
        visible_html = "\n".join(section.drawn for section in self.shown)
        nothing = "".join(section.drawn for section in self.missing)
        if self.shown and len(self.missing) >= _MIN_FOLDED_SECTIONS:
            titles = ", ".join(section.title for section in self.missing)
            nothing = (
                '<details class="nothing"><summary>Nothing to show here for '
                f"<span>{titles}</span></summary>{nothing}</details>"
            )
        return visible_html + nothing


def build_views(sections: Iterable[PageSection]) -> list[PageView]:
    """Returns the views that have sections; sections that no view lists come before the last view.

    Args:
        sections: In any order.
    """
    sections_by_key = {section.key: section for section in sections}
    grouped_keys = {key for _, keys in GROUPS for key in keys}
    unnamed = tuple(key for key in sections_by_key if key not in grouped_keys)
    out = []
    for title, keys in (*GROUPS[:-1], ("More", unnamed), GROUPS[-1]):
        members = [sections_by_key[key] for key in keys if key in sections_by_key]
        if members:
            empty = [section for section in members if is_missing_section(section.body)]
            out.append(
                PageView(title, [section for section in members if section not in empty], empty)
            )
    return out


def render_navigation(pages: Iterable[PageView]) -> str:
    """Renders the sidebar: the views; below the open one its sections."""
    out = []
    for view in pages:
        quiet = "" if view.shown else ' class="empty" title="Nothing was recorded for it"'
        section_links = "".join(
            f'<a href="#{view.key}/{section.anchor}">{section.title}</a>' for section in view.shown
        )
        out.append(
            f'<a href="#{view.key}" data-view="{view.key}"{quiet}>{view.title}</a>'
            f'<div class="inside" data-of="{view.key}" hidden>{section_links}</div>'
        )
    return "".join(out)


def render_view_templates(pages: Iterable[PageView]) -> str:
    return "\n".join(
        f'<template data-view="{view.key}"><h1 class="view-title">{view.title}</h1>{view.body}</template>'
        for view in pages
    )


def render_summaries(pages: Iterable[PageView]) -> str:
    """Renders the main figure of every section of these views, with a link to it."""
    out = []
    for view in pages:
        lines = "".join(
            f'<li><a href="#{view.key}/{section.anchor}">{section.title}</a> {render_inline_code(section.sentence)}</li>'
            for section in view.shown
            if section.sentence
        )
        if lines:
            out.append(f"<div><h3>{view.title}</h3><ul>{lines}</ul></div>")
    if not out:
        return ""
    return render_section(
        "in-short",
        "In short",
        "What the other views say.",
        f'<div class="short">{"".join(out)}</div>',
    )


MAX_RANK_SECTIONS = 64  # max ranks with their own tables in the page
_MAX_ROWS_MANY_RANKS = 500  # of one table, for a page about many ranks


def build_sections(
    document: ReportDocument, detailed: ReportDocument, reasons: Reasons
) -> Iterator[PageSection]:
    """Yields the built sections; with many ranks, tables have fewer rows of each.

    Args:
        document: The report.
        detailed: The same with only the detailed ranks.
        reasons: Why values are unknown.
    """
    for section in (*load_core_sections(), *select_visible_sections(document)):
        anchor = section.anchor or section.key.replace("_", "-")
        summary = section.summary(value) if (value := section.value(document)) else None
        if summary:
            summary = (
                summary[0].upper()
                + summary[1:]
                + ("" if summary.endswith((".", "!", "?")) else ".")
            )
        body = _render_body(section, document, detailed, reasons, summary or "")
        yield PageSection(section.key, anchor, section.title, section.note, body, summary or "")


def _render_body(
    section: Section[Any, Any],
    document: ReportDocument,
    detailed: ReportDocument,
    reasons: Reasons,
    summary: str,
) -> str:
    max_rows = MAX_ROWS if detailed is document else _MAX_ROWS_MANY_RANKS
    value, shown_value = section.value(document), section.value(detailed)
    tables = [t for t in section.tables(value) if t.position is None] if value else []
    rank_tables = (
        [t for t in section.tables(shown_value) if t.position is not None] if shown_value else []
    )
    picture = section.picture(shown_value) if shown_value else ""
    if not tables and not rank_tables and not picture:
        # Why the section is missing, else why a part of it is.
        path = section.path or section.key
        paths = [
            entry["path"]
            for entry in document.get("absent") or []
            if entry["path"].startswith(path)
        ]
        if section.nothing and path not in paths:
            return f'<p class="quiet">{section.nothing}</p>'
        return reasons.line(path if path in paths else next(iter(paths), path), section.title)
    body = (f'<p class="sentence">{render_inline_code(summary)}</p>' if summary else "") + picture
    if tables:
        body += render_titled_table(
            tables[0], reasons, max_rows, standalone=len(tables) == 1 and not rank_tables
        )
    for table in tables[1:]:  # rows that unfold
        size = f"{units.format_count(len(table.rows))} {'row' if len(table.rows) == 1 else 'rows'}"
        head = (
            f'<summary><h3>{escape(table.title)}</h3> <span class="quiet">{size}</span></summary>'
        )
        body += f'<details class="fold">{head}{render_titled_table(table, reasons, max_rows, standalone=True)}</details>'
    for position, rank in enumerate(detailed["ranks"][:MAX_RANK_SECTIONS] if rank_tables else ()):
        own_tables = [table for table in rank_tables if table.position == position]
        content = "".join(
            render_titled_table(table, reasons, max_rows, standalone=not tables)
            for table in own_tables
        )
        if not own_tables:
            content = reasons.line(
                section.path or section.key,
                f"{section.title} of {format_rank_name(rank, position)}",
            )
        body += (
            content
            if len(detailed["ranks"]) == 1
            else f'<div data-of-rank="{position}">{content}</div>'
        )
    if definition := section.definition(value):
        body += f'<details class="definition"><summary>How it is counted</summary>{definition}</details>'
    return body


def render_titled_table(
    data_table: Table, reasons: Reasons, max_rows: int = MAX_ROWS, *, standalone: bool = True
) -> str:
    """Renders one table with its figure; with a heading unless it is alone in its section."""
    head = "" if standalone else f"<h3>{escape(data_table.title)}</h3>"
    note = f'<p class="quiet">{render_inline_code(data_table.note)}</p>' if data_table.note else ""
    figure = render_html_table(
        data_table.key,
        data_table.columns,
        data_table.rows,
        {
            **(reasons.columns(data_table.path) if data_table.path else {}),
            **(data_table.unknown or {}),
        },
        data_table.title,
        max_rows=max_rows,
    )
    return head + note + data_table.picture + figure


_MAX_KEY_NUMBERS = 4
_ABOUT_FINDINGS = "What each fix saves by re-timing the linked graph, with the fixes above it applied; savings do not overlap."


def render_report_page(document: ReportDocument, session: Session) -> str:
    """Renders the report as one self-contained HTML page.

    Args:
        document: The result of `traceloom.report.run.build` for the session.
        session: The session, for the timeline.
    """
    began = time.perf_counter()
    reasons = Reasons(document["absent"])
    detailed_ranks = None if document.get("runs") else choose(document, session)
    detailed = document if detailed_ranks is None else detailed_ranks.document(document)
    drawn_session = session if detailed_ranks is None else detailed_ranks.session(session)
    view = None
    if not document.get("runs") and any(trace.events.height for trace in drawn_session.traces):
        kernels = document.get("kernels") or []
        communication = {row["name"] for row in kernels if row.get("category") == "communication"}
        curves = (document.get("memory") or {}).get("curve") or []
        epoch_ns = int(document["epoch_ns"]) if document.get("epoch_ns") else drawn_session.epoch_ns
        view = timeline.build(
            add_overlay(drawn_session),
            communication,
            curves,
            path=document.get("critical_path"),
            epoch_ns=epoch_ns,
        )
    note = (
        ""
        if detailed_ranks is None
        else f'<p class="quiet">{render_inline_code(detailed_ranks.sentence(document))}</p>'
    )
    events = '<p class="quiet absent">Timeline: the trace has no events.</p>'
    if view is not None:
        events = note + read_asset("timeline.html")
        if view.omitted:
            kinds = ", ".join(
                f"{units.format_count(number)} {kind}"
                for kind, number in sorted(view.omitted.items(), key=lambda pair: -pair[1])
            )
            events += (
                f'<p class="quiet">The timeline shows {units.format_count(view.shown)} events. The shortest ones are left out '
                f"to keep the page small ({escape(kinds)}); every table and number counts them. "
                "<code>traceloom report … -o x.perfetto.json.gz</code> writes all of them for Perfetto.</p>"
            )
    first, *other_views = build_views(_render_sections(document, detailed, reasons, events))
    name = document.get("name") or session.name
    version, epoch = (
        escape_html(document.get("traceloom", "")),
        escape_html(document.get("epoch_ns", "")),
    )
    versions = {
        f"{k} {v}"
        for entry in document.get("inputs") or []
        for k, v in (entry.get("versions") or {}).items()
    }
    recorded = escape_html(", ".join(sorted(versions))) or "no versions named in the files"
    return render_page(
        title=f"{name} – Traceloom",
        name=name,
        ranks=render_rank_selector(
            [format_rank_name(r, k) for k, r in enumerate(detailed["ranks"][:MAX_RANK_SECTIONS])]
        ),
        headline=page_head.render_headline(document),
        numbers=render_key_numbers(islice(page_head.list_key_numbers(document), _MAX_KEY_NUMBERS)),
        links=render_navigation([first, *other_views]),
        sections=first.body + render_summaries(other_views),
        view_templates=render_view_templates(other_views),
        window=view.window if view else "",
        footer=(
            f"<p>Traceloom {version} · {recorded} · times count from {epoch} ns (Unix time where the trace gives it) · "
            f"page made in {time.perf_counter() - began:.2f} s</p>"
            "<p>The same numbers for programs: <code>traceloom report … -o report.json</code></p>"
        ),
        data=view.payload if view else "",
    )


def _render_sections(
    document: ReportDocument, detailed: ReportDocument, reasons: Reasons, events: str
) -> list[PageSection]:
    """Returns all sections, unordered; `detailed` has only the detailed ranks."""
    data = page_head.render_notices(document["notices"], reasons) + page_head.render_inputs(
        document, reasons
    )
    about_data = "What was read, and what to know about it."
    if document.get("runs"):
        runs = page_head.render_runs(document, reasons)
        return [
            PageSection("runs", "runs", "Runs", "Report one of them alone to see more.", runs),
            PageSection("data", "data", "Data", about_data, data),
        ]
    ranked = page_head.render_findings(document, reasons)
    return [
        PageSection("findings", "findings", "What to fix first", _ABOUT_FINDINGS, ranked),
        PageSection(
            "timeline", "timeline", "Timeline", "Every event of every thread and stream.", events
        ),
        *build_sections(document, detailed, reasons),
        PageSection(
            "data", "data", "Data", about_data, data + page_head.render_capture(document, reasons)
        ),
    ]


MAX_MEMORY_RANKS = 8  # max detailed ranks: those with the highest peaks
_MAX_OUT_OF_MEMORY = 8  # max detailed out-of-memory events
RenderedSection = tuple[str, str, str, str]


def render(document: MemoryDocument) -> str:
    """Renders the document as one self-contained HTML page."""
    reasons = Reasons(document["absent"])
    ranks = document["ranks"]
    named_entries = [(format_rank_name(entry, k), entry) for k, entry in enumerate(ranks)]
    highest = sorted(
        range(len(ranks)),
        key=lambda k: -max((m["peak_bytes"] for m in ranks[k]["memories"]), default=0),
    )
    visible = [
        named_entries[k] for k in sorted(highest[:MAX_MEMORY_RANKS])
    ]  # one by one, in their own order
    numbers = ""
    if memories := [(entry, memory) for entry in ranks for memory in entry["memories"]]:
        entry, largest_memory = max(memories, key=lambda pair: int(pair[1]["peak_bytes"]))
        attributed = sum(
            row["bytes"]
            for row in largest_memory["categories"]
            if row["category"] not in ("unknown", "before_recording")
        )
        total_bytes = max(sum(row["bytes"] for row in largest_memory["categories"]), 1)
        peak_location = (
            "outside all steps"
            if largest_memory["peak_step"] is None
            else f"in step {largest_memory['peak_step']}"
        )
        grows = sum(row["bytes_per_step"] for row in largest_memory["growth"])
        growth = (
            (units.format_size(round(grows)), "per step")
            if grows
            else ("nothing", "from step to step")
        )
        if explain_unknown_growth(entry) is not None:
            growth = ("unknown", f"without {MIN_STEPS + 1} steps")
        allocations = (
            f"after {units.format_quantity(largest_memory['allocation_count'], 'allocation')}"
        )
        shown_numbers = (
            (
                "Peak" if largest_memory["peak_recorded"] else "At the snapshot",
                units.format_size(largest_memory["peak_bytes"]),
                f"{format_memory_name(largest_memory)}, {peak_location}",
            ),
            ("At the end", units.format_size(largest_memory["end_bytes"]), allocations),
            (
                "Told what it is for",
                units.format_share(attributed, total_bytes),
                "of the bytes at the instant shown",
            ),
            ("Grows", *growth),
        )
        numbers = render_key_numbers(
            (label, value, "", detail) for label, value, detail in shown_numbers
        )
    name = str(document["name"])
    return render_page(
        title=f"{document['sentence']} – {name}",
        name=name,
        ranks=render_rank_selector([rank for rank, _ in visible]),
        headline=f"<h1>{escape_html(document['sentence'])}</h1>",
        numbers=numbers,
        footer=(
            f"<p>Traceloom {escape_html(document['traceloom'])} · times count from {escape_html(document['epoch_ns'])} ns</p>"
            "<p>Every allocation by name: <code>traceloom memory … -o allocations.csv --all</code>; the same numbers "
            "for programs: <code>-o memory.json</code></p>"
        ),
        **list_sections(_render_memory_sections(document, visible, reasons)),
    )


def _render_memory_sections(
    document: MemoryDocument, visible: list[tuple[str, MemoryRankRow]], reasons: Reasons
) -> Iterator[RenderedSection]:
    if document["out_of_memory"]:
        body = "".join(_render_out_of_memory(document, reasons))
        yield (
            "out-of-memory",
            "Out of memory",
            "Who held it when it ran out, and what to try.",
            body,
        )
    if not visible:
        yield "memory", "Memory", "", reasons.line("ranks", "Memory")
    else:
        instant_label = str(document["at"])
        instant_label = (
            "the peak"
            if instant_label == "peak"
            else units.format_duration(int(instant_label))
            if instant_label.isdigit()
            else instant_label
        )
        unknown_reasons = reasons.columns("memories[*].largest")
        section_makers: list[
            tuple[str, str, str, Callable[[MemoryMemoryRow, MemoryRankRow, str], str]]
        ] = [
            (
                "over-time",
                "Over time",
                "Click the curve, or use the arrow keys on it.",
                lambda memory, entry, _key: (
                    render_memory_figure(
                        memory["curve"],
                        entry["steps"],
                        label=f"{format_memory_name(memory)} over time",
                        chosen_ns=None
                        if document["at"] == "peak"
                        else memory["instant"]["time_ns"],
                    )
                    + (
                        f'<p class="quiet">{escape_html(state)}.</p>'
                        if (state := tables.describe_allocator(memory))
                        else ""
                    )
                ),
            ),
            (
                "scopes",
                "Scopes",
                f"Who holds what at {escape_html(instant_label)}; each row holds the indented ones below it.",
                lambda memory, _entry, key: render_titled_table(
                    tables.build_scopes_table(memory, key), reasons
                ),
            ),
            (
                "modules",
                "Modules",
                "The part of the model: parameters with their gradients and states too.",
                lambda memory, _entry, key: render_titled_table(
                    tables.build_modules_table(memory, key), reasons
                ),
            ),
            (
                "categories",
                "Categories",
                "What it is for, and how that is known.",
                lambda memory, _entry, key: render_titled_table(
                    tables.build_categories_table(memory, key), reasons
                ),
            ),
            (
                "largest",
                "Largest allocations",
                f"The largest blocks alive at {escape_html(instant_label)}.",
                lambda memory, _entry, key: render_titled_table(
                    tables.build_largest_table(memory, key, unknown_reasons), reasons
                ),
            ),
            (
                "growth",
                "Growth",
                "Made in a step and never freed, step after step: a leak, or a cache.",
                lambda memory, entry, key: _render_growth(memory, entry, key, reasons),
            ),
            (
                "activations",
                "Activations",
                "What checkpointing a module would free, and cost.",
                lambda memory, _entry, key: (
                    render_titled_table(
                        replace(tables.build_activations_table(memory, key), note=""), reasons
                    )
                    if memory["activations"]
                    else '<p class="quiet">No activations are alive at this instant.</p>'
                ),
            ),
        ]
        for key, title, note, make in section_makers:
            parts = []
            for position, (name, entry) in enumerate(visible):
                only = "" if len(visible) == 1 else f' data-of-rank="{position}"'
                memories = tables.select_memories(entry["memories"])
                bodies = (
                    (f"<h3>{escape_html(format_memory_name(m))}</h3>" if len(memories) > 1 else "")
                    + make(m, entry, f"{key}-{position}-{k}")
                    for k, m in enumerate(memories)
                )
                parts.append(
                    f'<div{only} data-rank-name="{escape_html(name)}">{"".join(bodies)}</div>'
                )
            yield key, title, note, "".join(parts)
        lives = [
            render_titled_table(tables.build_lifetimes_table(entry, f"lifetimes-{k}"), reasons)
            for k, (_, entry) in enumerate(visible)
        ]
        if len(lives) > 1:
            lives = [f'<div data-of-rank="{k}">{body}</div>' for k, body in enumerate(lives)]
        yield (
            "lifetimes",
            "Lifetimes",
            "How long blocks live, of those made and freed here.",
            "".join(lives),
        )
    if len(document["ranks"]) > 1:
        job = "".join(
            f'<p class="quiet">{escape_html(description)}</p>'
            for description in tables.describe_job(document)
        )
        yield (
            "ranks",
            "Ranks",
            "The peak of every memory.",
            job + render_titled_table(tables.build_ranks_table(document), reasons),
        )
    yield (
        "data",
        "Data",
        "What to know about the data.",
        page_head.render_notices(document["notices"], reasons),
    )


def _render_growth(
    memory: MemoryMemoryRow, entry: MemoryRankRow, key: str, reasons: Reasons
) -> str:
    if (reason := explain_unknown_growth(entry)) is not None:
        return f'<p class="quiet">What grows from step to step cannot be determined: {escape_html(reason)}.</p>'
    grown = tables.build_growth_table(memory, key, reasons.columns("memories[*].growth"))
    if not grown.rows:
        return '<p class="quiet">Nothing grows from step to step.</p>'
    return render_titled_table(replace(grown, note=""), reasons)


def _render_out_of_memory(document: MemoryDocument, reasons: Reasons) -> Iterator[str]:
    """Yields where memory ran out, what was alive then, and what to try first."""
    entries = document["out_of_memory"]
    for number, entry in enumerate(entries[:_MAX_OUT_OF_MEMORY]):
        rank = "" if entry["rank"] is None else f"rank {entry['rank']}: "
        request = (
            ""
            if entry["asked_bytes"] is None
            else f"{units.format_size(entry['asked_bytes'])} were asked for, "
        )
        step = "" if entry["step"] is None else f", in step {entry['step']}"
        yield f"<h3>{escape_html(rank)}{escape_html(request)}{units.format_size(entry['bytes'])} were alive{escape_html(step)}</h3>"
        if entry["where"]:
            yield f'<p class="quiet">at <code>{escape_html(entry["where"])}</code></p>'
        if entry["advice"]:
            columns = [
                Col("bytes", "Frees up to", "bytes"),
                Col("text", "What to try first"),
                Col("why", "Because"),
            ]
            unknown = {"bytes": "how much it frees is not known"}
            advice = Table(
                f"advice-{number}", "What to try first", columns, entry["advice"], unknown=unknown
            )
            yield render_titled_table(advice, reasons)
        yield render_titled_table(
            tables.build_out_of_memory_table(entry, f"alive-{number}"), reasons
        )
        if entry["stack"]:
            frames = [{"frame": frame} for frame in reversed(entry["stack"])]
            columns = [Col("frame", "Stack, the innermost frame first", "name")]
            yield render_titled_table(Table(f"stack-{number}", "Stack", columns, frames), reasons)
    if len(entries) > _MAX_OUT_OF_MEMORY:
        yield f'<p class="quiet">{len(entries) - _MAX_OUT_OF_MEMORY} more stand in <code>-o memory.json</code>.</p>'
