"""Renders documents on a terminal."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile, zip_longest
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from traceloom.report.document import (
    PICTURES,
    Bar,
    Col,
    ReportOptions,
    Table,
    format_cell,
    select_top_rows,
)
from traceloom.report.labels import build_answer_parts, fit_name, format_rank, merge_notices
from traceloom.report.sections import (
    CORE,
    FINDINGS,
    SECTION_NAMES,
    load_core_sections,
    select_visible_sections,
    summarise_core_sections,
)
from traceloom.report.views import terminal_findings
from traceloom.report.views.terminal_findings import render_notice_lines
from traceloom.report.views.terminal_table import (
    ASCII_FALLBACKS,
    BAR_FILLS,
    DIM_STYLE,
    MEMORY_CURVE_COLOUR,
    SEVERITY_STYLES,
    Cell,
    TextColumn,
    draw_signed_bar,
    draw_sparkline,
    draw_stacked_bar,
    render_bar_table,
    render_heading,
    render_paragraph,
    render_table,
    truncate_lines,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize, unwrap_stream

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.short import ShortReport
    from traceloom.report.sections.section import Section


_MIN_WIDTH, _MAX_WIDTH = 60, 140
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def show(document: ReportDocument, options: ReportOptions, stream: TextIO) -> None:
    """Writes the report to a stream: with colours where it is a terminal that supports them, in
    ASCII where required.
    """
    print_lines(partial(render, document, options), stream)


class _PipeSafeConsole(Console):
    """Leaves the handling of a closed pipe to the command line; Rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 (Rich calls this while it handles the BrokenPipeError)


def print_lines(rendered: Callable[[int], Iterable[Text]], stream: TextIO) -> None:
    """Writes the lines that `rendered` returns for the stream's width; warns first where it is too
    narrow.
    """
    stream.flush()  # output of other layers comes first
    # In a notebook Rich would show every line as a separate output, and write nothing to the
    # stream.
    console = _PipeSafeConsole(
        file=unwrap_stream(stream),
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
        force_jupyter=False,
    )
    width = max(_MIN_WIDTH, min(console.width, _MAX_WIDTH))
    ascii_only = not (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    if console.width < width:
        for part in textwrap.wrap(
            f"This needs {width} columns, the terminal has {console.width}: lines run on.",
            max(console.width, 1),
        ):
            console.print(part, no_wrap=True, overflow="ignore", crop=False)
    for line in truncate_lines(rendered(width), width):
        printed_line = line.copy()
        if ascii_only:
            printed_line.plain = (
                printed_line.plain.translate(ASCII_FALLBACKS).encode("ascii", "replace").decode()
            )
        # Styles are trusted, text is not; control characters are replaced without changing the
        # width of the line.
        printed_line.plain = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", printed_line.plain)
        console.print(printed_line, no_wrap=True, overflow="ignore", crop=False)


_SPACE_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|[a-zA-Zµ]{1,2}\b)")
_MIN_WIDE_WIDTH = 100  # from this width on all columns are tried
_MIN_NAME_WIDTH = 16
_MAX_TEXT_WIDTH = 40
_MAX_NAME_WIDTH = 400
_MAX_SPARK_WIDTH = 72
_DELTA_WIDTH = 15  # cells of a bar from the middle


def render_sections(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    """Yields the core and a line for each other section; with `options.only` these sections in
    full.
    """
    only = options.only
    for section in load_core_sections():
        if only is not None and section.key in only:
            yield from _render_full_section(section, document, options, width)
        elif only is None or CORE in only:
            value = section.value(document)  # None where there is nothing to show
            if summary := section.summary(value):
                yield from render_heading(section.title, "", width)
                for part in wrap_sentence(summary, width - 2):
                    yield Text(" " + part)
            for table in section.tables(value):
                if table.brief:
                    yield from render_declared_table(table, options, width)
    if only is None:
        candidates = [
            (section.key, section.summary(value))
            for section in select_visible_sections(document)
            if (value := section.value(document))
        ]
        summaries = [(key, summary) for key, summary in candidates if summary]
        if summaries:
            yield from render_heading("More", "add --only NAME to see one in full", width)
        widest = max((len(key) for key, _ in summaries), default=0)
        for key, summary in summaries:
            for number, part in enumerate(wrap_sentence(summary, max(width - widest - 3, 20))):
                yield Text.assemble((f" {key if number == 0 else '':<{widest}}  ", "bold"), part)
        return
    for section in select_visible_sections(document):
        if section.key in only:
            yield from _render_full_section(section, document, options, width)


def wrap_sentence(text: str, width: int) -> list[str]:
    """Wraps a sentence; numbers stay with their units."""
    return [
        line.replace("\u00a0", " ")
        for line in textwrap.wrap(
            _SPACE_BEFORE_UNIT.sub("\u00a0", sanitize(text)), width, break_on_hyphens=False
        )
    ]


def _render_full_section(
    section: Section[Any, Any], document: ReportDocument, options: ReportOptions, width: int
) -> Iterator[Text]:
    value = section.value(document)
    summary = section.summary(value) if value else None
    yield from render_heading(section.title, section.note, width)
    tables = list(section.tables(value)) if value else []
    if not tables:
        # The reason for the section, else for a part of it.
        reasons = {entry["path"]: entry["reason"] for entry in document["absent"]}
        section_path = section.path or section.key
        nested_reason = next(
            (reason for path, reason in reasons.items() if path.startswith(section_path)),
            "not recorded",
        )
        yield from render_paragraph(
            f"Nothing to show: {reasons.get(section_path) or nested_reason}.", width
        )
    for part in wrap_sentence(summary or "", width - 2):
        yield Text(" " + part)
    for table in tables:
        yield from render_declared_table(table, options, width)


def render_declared_table(table: Table, options: ReportOptions, width: int) -> Iterator[Text]:
    """Yields a declared table: heading, as many columns as fit, the first `options.top` rows."""
    rows = select_top_rows(table, options)
    if not rows:
        return
    note = (
        f"{len(rows)} of {units.format_count(len(table.rows))}"
        if len(rows) < len(table.rows)
        else ""
    )
    yield from render_heading(
        table.title, " · ".join(part for part in (note, table.note) if part), width
    )
    last = next((c for c in reversed(table.columns) if c.kind in ("name", *PICTURES)), None)
    tried = [
        _Column(c, rows)
        for c in table.columns
        if c is not last and (c.narrow or width >= _MIN_WIDE_WIDTH)
    ]
    # The columns that are always kept, else the first one; of the others as many as fit, from the
    # left.
    selected = [column for column in tried if column.declared.kept] or tried[:1]
    width_left = (
        width
        - 1
        - (_MIN_NAME_WIDTH if last and last.kind == "name" else 0)
        - sum(column.size for column in selected)
    )
    while (
        width_left < 0
        and last is None
        and (widest := max(selected, key=lambda column: column.size)).size > _MIN_NAME_WIDTH
    ):
        widest.size -= 1  # its texts wrap
        width_left += 1
    columns = []
    for column in tried:
        width_left -= 0 if column in selected else column.size
        if column in selected or width_left >= 0:
            columns.append(column)
    heads = [column.head for column in columns]
    cell_rows = list(zip(*(column.cells for column in columns), strict=True)) or [()] * len(rows)
    if last is None:
        wrapped: list[tuple[Cell, ...]] = []
        for row in cell_rows:  # texts that do not fit take several lines
            rooms = [column.size - 2 for column in columns]
            wrapped_cells = [
                textwrap.wrap(cell, width_left)
                if isinstance(cell, str) and len(cell) > width_left
                else [cell]
                for cell, width_left in zip(row, rooms, strict=True)
            ]
            wrapped += zip_longest(*wrapped_cells, fillvalue="")
        cell_rows = wrapped
    if last is not None and last.kind in PICTURES:
        key = last.key

        def bar(i: int, cell_width: int) -> Text:
            value = rows[i].get(key)
            if isinstance(value, Bar):
                return draw_stacked_bar(value, cell_width)
            return Text(
                draw_sparkline(value or [], min(cell_width, _MAX_SPARK_WIDTH)), MEMORY_CURVE_COLOUR
            )

        yield from render_bar_table(heads, cell_rows, bar, width)
        return

    def name(i: int, cell_width: int) -> str:
        return fit_name(_format_cell(last, rows[i].get(last.key)), cell_width) if last else ""

    yield from render_table(heads, cell_rows, (last.title if last else "", name), width)


class _Column:
    """A candidate column: `size` cells of the terminal including the gap before it."""

    def __init__(self, declared: Col, rows: Sequence[Mapping[str, Any]]) -> None:
        values = [row.get(declared.key) for row in rows]
        # A heading is preceded by the pattern of its part of the bar.
        fill = (BAR_FILLS[declared.swatch], " ") if declared.swatch else ()
        self.declared = declared
        self.head = TextColumn(
            Text.assemble(*fill, (declared.title, "bold")), right=declared.numeric
        )
        self.cells: list[Cell] = [_format_cell(declared, value) for value in values]
        if declared.kind == "delta":
            differences: list[int] = [row[declared.key] for row in rows]
            largest = max(map(abs, differences))
            self.cells = [
                draw_signed_bar(difference, largest, _DELTA_WIDTH) for difference in differences
            ]
        self.size = 2 + max(len(self.head.heading), *map(len, self.cells))


def _format_cell(column: Col, value: Any) -> str:
    shown_value = format_cell(column, value)
    long = column.kind == "name" or column.kept
    return (
        shown_value
        if column.numeric
        else fit_name(shown_value, _MAX_NAME_WIDTH if long else _MAX_TEXT_WIDTH)
    )


_GROUP_LABELS = {"memory": "copies"}  # as short as in the answer
_MAX_SENTENCE_LINES = 2  # of a sentence
_MAX_NAME_LINES = 3  # lines with names of sections
_MAX_STEPS_SPARKLINE_WIDTH = 40


def build_short_report(document: ReportDocument) -> ShortReport:
    """Builds the data of the short report: sentences of sections instead of their values."""
    return {
        "name": document["name"],
        "answer": document["answer"],
        "inputs": document["inputs"],
        "findings": document["findings"],
        "findings_ground": document.get("findings_ground"),
        "notices": document["notices"],
        "runs": document["runs"],
        "ranks": [
            {
                "rank": rank["rank"],
                "world_size": rank["world_size"],
                "event_count": rank["event_count"],
                "start_ns": rank["start_ns"],
                "window_ns": rank["window_ns"],
            }
            for rank in document["ranks"]
        ],
        "summaries": summarise_core_sections(document),
    }


def render(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    """Yields the lines of the report, none wider than `width` except commands, which
    are never cut.
    """
    if options.only is None and not options.full and not document["runs"]:
        yield from render_short(build_short_report(document), width)
        return
    yield from truncate_lines(_render_report_lines(document, options, width), width)
    for run in document["runs"]:  # the answer of each run, and the command that reports it
        yield Text("")
        yield from render_paragraph(run["sentence"], width)
        yield Text(" " + sanitize(run["command"]), DIM_STYLE, overflow="ignore")


def render_short(document: ShortReport, width: int) -> Iterator[Text]:
    """Yields the lines of the short report, which is about one run."""
    yield from truncate_lines(
        chain(_render_head(document, width), render_summary(document, width)), width
    )


def _render_report_lines(
    document: ReportDocument, options: ReportOptions, width: int
) -> Iterator[Text]:
    yield from _render_head(document, width)
    if options.wants(FINDINGS):
        yield from terminal_findings.render_findings(document, width, full=options.only is not None)
    yield from _render_runs(document, width)
    if not document["runs"]:
        yield from render_sections(document, options, width)
    if options.wants(CORE):
        yield from render_recording(document, width)
        yield from terminal_findings.render_notices(
            document["notices"], len(document["ranks"]), options, width
        )


def _render_head(document: ReportDocument | ShortReport, width: int) -> Iterator[Text]:
    facts = []
    if ranks := document["ranks"]:
        world = max((rank["world_size"] for rank in ranks if rank["world_size"]), default=None)
        rank_count = len({rank["rank"] for rank in ranks})
        if rank_count > 1 or ranks[0]["rank"] is not None:
            facts.append(
                (f"{rank_count} ranks" if rank_count > 1 else format_rank(ranks[0]["rank"]))
                + (f" of {world}" if world else "")
            )
        facts.append(
            f"{units.format_quantity(sum(rank['event_count'] for rank in ranks), 'event')}"
        )
        end = max(rank["start_ns"] + rank["window_ns"] for rank in ranks)
        facts.append(units.format_duration(end - min(rank["start_ns"] for rank in ranks)))
    fact_text = " · ".join(facts)
    name = fit_name(document["name"], max(width - len(fact_text) - 3, 16))
    yield Text.assemble((name, "bold"), (f"  {fact_text}", DIM_STYLE))
    yield Text("")
    yield from render_paragraph(document["answer"]["sentence"], width, "bold")


def _render_runs(document: ReportDocument, width: int) -> Iterator[Text]:
    if not document["runs"]:
        return
    yield from render_heading("Runs", "", width)
    rows: list[list[str | Text]] = [
        [
            str(run["ranks"]) + (f" of {run['world_size']}" if run["world_size"] else ""),
            units.format_duration(run["window_ns"]),
            str(run["steps"]),
            units.format_count(run["events"]),
        ]
        for run in document["runs"]
    ]
    columns = [TextColumn("ranks"), TextColumn("time"), TextColumn("steps"), TextColumn("events")]
    # Paths without their common folders.
    paths = [PurePath(run["name"]) for run in document["runs"]]
    folders = zip(*(path.parts[:-1] for path in paths), strict=False)
    shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, folders)))
    names = [str(PurePath(*path.parts[shared:])) for path in paths]
    yield from render_table(columns, rows, ("run", lambda i, room: fit_name(names[i], room)), width)


def render_summary(document: ShortReport, width: int) -> Iterator[Text]:
    """Yields the part below the answer, about twenty lines."""
    times: dict[str, int] = {}
    for _, group, ns in build_answer_parts(document["answer"]):
        times[group] = times.get(group, 0) + ns
    if total_ns := sum(times.values()):
        bar = Bar(
            [(_GROUP_LABELS.get(group, group), group, ns) for group, ns in times.items()], total_ns
        )
        yield Text(" ") + draw_stacked_bar(bar, width - 2)
        legend = Text("")
        for label, group, ns in bar.parts:
            entry = Text.assemble(
                " ", BAR_FILLS[group], f" {label} {units.format_share(ns, total_ns)} "
            )
            if legend.cell_len + entry.cell_len > width:
                yield legend
                legend = Text("")
            legend = legend + entry
        yield legend
    yield from terminal_findings.render_brief_findings(
        document["findings"], document["findings_ground"], width
    )
    sentences = document["summaries"]
    widest = max((len(title) for title, _ in sentences), default=0)
    if sentences:
        yield Text("")
    for title, summary in sentences:
        for number, part in enumerate(
            _truncate(wrap_sentence(summary, width - widest - 4), _MAX_SENTENCE_LINES)
        ):
            yield Text.assemble((f" {title if number == 0 else '':<{widest}}  ", "bold"), part)
    distinct = merge_notices(document["notices"], len(document["ranks"]))
    errors = [notice for notice in distinct if notice.severity == "error"]
    yield from render_notice_lines(
        [
            (notice_row.severity, f"{notice_row.sentence} [{notice_row.slug}]")
            for notice_row in errors[:_MAX_SENTENCE_LINES]
        ],
        width,
    )
    if distinct := [notice for notice in distinct if notice not in errors]:
        slugs = ", ".join(dict.fromkeys(notice.slug for notice in distinct))
        notice_text = f"{units.format_quantity(len(distinct), 'notice')} about the data: {slugs}"
        for line, part in enumerate(
            _truncate(
                textwrap.wrap(notice_text, width - 4, break_on_hyphens=False), _MAX_SENTENCE_LINES
            )
        ):
            yield Text.assemble(
                " ", SEVERITY_STYLES[distinct[0].severity] if line == 0 else " ", " ", part
            )
    names = ", ".join(key for key in SECTION_NAMES if key != CORE)
    yield from render_heading(
        "More", "--full: the tables, too; --only NAME: one of these in full", width
    )
    for part in _truncate(textwrap.wrap(names, width - 2, break_on_hyphens=False), _MAX_NAME_LINES):
        yield Text(" " + part, DIM_STYLE)


def _truncate(lines: Sequence[str], max_lines: int) -> Sequence[str]:
    """Returns the first lines; an ellipsis ends the last one where there are more."""
    return (
        lines
        if len(lines) <= max_lines
        else [*lines[: max_lines - 1], lines[max_lines - 1].rstrip(" ,.") + " …"]
    )


def render_recording(document: ReportDocument, width: int) -> Iterator[Text]:
    """Yields the recording as seen by the first rank; nothing where the run was not recorded by
    traceloom.
    """
    ranks = _get_nested(document["capture"], list, "ranks") or []
    first = ranks[0] if ranks and isinstance(ranks[0], dict) else None
    if first is None:
        return
    versions = _get_nested(first, dict, "versions") or {}
    note = ", ".join(sanitize(f"{name} {version}") for name, version in sorted(versions.items()))
    yield from render_heading("Recording", note if len(note) < width - 12 else "", width)
    command = _get_nested(document["capture"], list, "run", "command")
    if command:
        yield Text(" " + fit_name(shlex.join(map(str, command)), width - 2))
    first_step, count = (
        _get_nested(first, int, "window", "first_step"),
        _get_nested(first, int, "window", "step_count"),
    )
    steps = _get_nested(first, list, "steps", "duration_ns") or []
    facts = []
    if first_step is not None and count:
        window = (
            f"step {first_step}"
            if count == 1
            else f"steps {first_step} to {first_step + count - 1}"
        )
        facts.append(f"recorded {window}" + (f" of {len(steps)}" if steps else ""))
    ratio = _get_nested(first, (int, float), "overhead", "ratio")
    if ratio is not None:
        facts.append(f"a recorded step took {ratio:.2f} × an unrecorded one")
    if facts:
        yield Text(" " + fit_name("; ".join(facts), width - 2))
    durations = [ns for ns in steps if isinstance(ns, int) and ns >= 0]
    if len(durations) > 1:
        spark = draw_sparkline(durations, _MAX_STEPS_SPARKLINE_WIDTH)
        longest = units.format_duration(max(durations))
        yield Text.assemble(" every step of the run  ", (spark, DIM_STYLE), f"  up to {longest}")


def _get_nested(value: Any, kind: Any, *keys: str) -> Any:
    """Returns the value below these keys of `capture.json`, which may have been edited: None if it
    is of another type.
    """
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
