"""Renders documents as Markdown, and in notebooks."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from traceloom.report.comparison import build_tables
from traceloom.report.document import (
    PICTURES,
    Cells,
    ReportOptions,
    Table,
    format_cell,
    select_top_rows,
)
from traceloom.report.labels import fit_name, merge_notices
from traceloom.report.run import build
from traceloom.report.sections import load_core_sections, select_visible_sections
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.notice import HotFrame
from traceloom.trace.session import Session

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.comparison import ComparisonDocument


_MAX_ROWS = 12
_MAX_NOTICES = 5
_MAX_FINDINGS = 5
_MAX_LINES = 60  # of a report of one run
_NAME_WIDTH = 70
_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


def render(document: ReportDocument, options: ReportOptions) -> str:
    """Renders the document as GitHub-flavored Markdown that ends with a newline."""
    head_lines = list(_render_lines(document, options))
    events = sum(entry["events"] for entry in document["inputs"])
    footer = (
        f"<sub>traceloom {document['traceloom']}, {units.format_quantity(events, 'event')}</sub>"
    )
    notices = merge_notices(document["notices"], len(document["ranks"]))
    foot_lines = [""] * bool(notices) + [
        f"- {n.severity}: {escape_markdown(n.sentence)}" for n in notices[:_MAX_NOTICES]
    ]
    if len(notices) > _MAX_NOTICES:
        foot_lines.append(f"- … and {len(notices) - _MAX_NOTICES} more")
    foot_lines += ["", footer]
    # One line per section with a summary; the last ones are omitted where there is no room.
    summaries = [
        (section.title, section.summary(value))
        for section in select_visible_sections(document)
        if (value := section.value(document))
    ]
    lines = [
        f"- **{escape_markdown(title)}**: {escape_markdown(summary)}"
        for title, summary in summaries
        if summary
    ]
    lines_left = _MAX_LINES - len(head_lines) - len(foot_lines)
    between = ["", *lines[: lines_left - 1]] if lines and lines_left > 1 else []
    return "\n".join([*head_lines, *between, *foot_lines]) + "\n"


def escape_markdown(text: str) -> str:
    """Escapes untrusted text: no markup, no HTML, no mention of a user, on one line."""
    marked = _MARKUP.sub(r"\\\1", sanitize(text))
    return "".join(_ENTITIES.get(letter, letter) for letter in marked)


def format_code_span(name: str, width: int = _NAME_WIDTH, *, cell: bool = True) -> str:
    """Formats a name of at most `width` characters as a code span that it cannot break out of, nor
    out of a table cell.
    """
    fitted_name = fit_name(name, width).replace("|", "\\|" if cell else "|")
    fence = "`" * (max((len(run) for run in re.findall("`+", fitted_name)), default=0) + 1)
    pad = " " if fitted_name.startswith("`") or fitted_name.endswith("`") or not fitted_name else ""
    return f"{fence}{pad}{fitted_name}{pad}{fence}"


def _render_lines(document: ReportDocument, options: ReportOptions) -> Iterator[str]:
    yield f"### Traceloom: {format_code_span(document['name'], cell=False)}"
    yield ""
    yield f"**{escape_markdown(document['answer']['sentence'])}**"
    runs = [
        [
            format_code_span(run["name"]),
            str(run["ranks"]),
            units.format_duration(run["window_ns"]),
            str(run["steps"]),
            escape_markdown(run["sentence"]),
        ]
        for run in document["runs"]
    ]
    yield from render_table("run", ("ranks", "time", "steps", "answer"), runs[: _MAX_ROWS * 4])
    # What to fix first: the saving, and the advice.
    findings = (document.get("findings") or [])[:_MAX_FINDINGS]
    if findings:
        yield from ("", "| saves | what | advice |", "|--:|---|---|")
    for row in findings:
        if row["list"] == "time":
            saves = ("≥ " if row["lower_bound"] else "") + units.format_share(
                row["saving_fraction"] or 0, 1
            )
        else:
            saves = units.format_size(row["saving_bytes"])
        titles = [row["title"], *(other["title"] for other in row["alternatives"])]
        frames = [
            f"{units.format_duration(frame['time_ns'])} in {HotFrame(**frame)}"
            for frame in row["frames"]
        ]
        host_time_note = f" Host time: {'; '.join(frames)}." if frames else ""
        yield f"| {escape_markdown(saves)} | {escape_markdown('; or, for the same time: '.join(titles))} | {escape_markdown(row['advice'] + host_time_note)} |"
    # The first table of each section that appears in Markdown, without figures.
    for section in load_core_sections() if not document["runs"] else ():
        shown_table = (
            next(iter(section.tables(section.value(document))), None)
            if section.in_markdown
            else None
        )
        if shown_table is None:
            continue
        columns = [
            column
            for column in shown_table.columns
            if column.narrow and column.kind not in PICTURES
        ]
        rows = select_top_rows(shown_table, options)[:_MAX_ROWS]
        cells = [
            [
                format_code_span(str(row.get(column.key)))
                if column.kind == "name"
                else escape_markdown(format_cell(column, row.get(column.key)))
                for column in columns
            ]
            for row in rows
        ]
        yield from render_table(shown_table.title, [column.title for column in columns[1:]], cells)
        if len(rows) < len(shown_table.rows):
            yield f"| … and {units.format_count(len(shown_table.rows) - len(rows))} more |{' |' * (len(columns) - 1)}"


def render_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields a table with text in the first column and numbers in the others."""
    if not rows:
        return
    yield ""
    yield f"| {' | '.join((title, *head))} |"
    yield "|" + "|".join(("---", *("--:" for _ in head))) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


_MAX_COMPARISON_ROWS = 10


def render_comparison_markdown(document: ComparisonDocument) -> str:
    """Renders the document as GitHub-flavored Markdown that ends with a newline."""
    base, new = (
        format_code_span(side["name"], cell=False) for side in (document["base"], document["new"])
    )
    lines = [f"### Traceloom: {base} → {new}", ""]
    lines.append(f"**{escape_markdown(document['sentence'])}**")
    for data_table in build_tables(document):
        # Differing conditions and the parts of the step are never truncated.
        max_rows = (
            len(data_table.rows)
            if data_table.key in ("diff-conditions", "diff-parts")
            else _MAX_COMPARISON_ROWS
        )
        lines += render_markdown_table(
            data_table, max_rows, all_columns=data_table.key == "diff-conditions"
        )
    return "\n".join([*lines, "", f"<sub>traceloom {document['traceloom']}</sub>"]) + "\n"


def render_markdown_table(
    declared: Table, max_rows: int, *, all_columns: bool = False
) -> Iterator[str]:
    """Yields a declared table: at most `max_rows` rows, all its columns with `all_columns`, else
    the narrow ones.
    """
    # The first column is text, so that the subject of a row comes first.
    columns = sorted(
        (column for column in declared.columns if column.narrow),
        key=lambda column: column.kind != "name",
    )
    columns = list(declared.columns) if all_columns else columns
    rows = [
        [
            (format_code_span if column.kind == "name" else escape_markdown)(
                format_cell(column, row.get(column.key))
            )
            for column in columns
        ]
        for row in declared.rows[:max_rows]
    ]
    yield from render_table(
        f"{declared.title}: {columns[0].title}", [column.title for column in columns[1:]], rows
    )
    if len(declared.rows) > max_rows:
        yield f"| … and {len(declared.rows) - max_rows} more |{' |' * (len(columns) - 1)}"


_COLORS = ("#3b82d6", "#e08a00", "#c2578f", "#2f9e6e", "#8a6fd1", "#9aa0a6")
_PICTURE_WIDTH, _PICTURE_ROWS = 640, 8
_FONT = 'font-family="sans-serif" font-size="12" fill="currentColor"'


@dataclass(frozen=True)
class DisplayedReport:
    """A report with a display form: HTML in a notebook, text elsewhere.

    Attributes:
        document: The whole report, as `traceloom report --json` prints it.
        options: The options that it was built with.
    """

    document: ReportDocument
    options: ReportOptions

    def to_dict(self) -> ReportDocument:
        return self.document

    def __repr__(self) -> str:
        from traceloom.report.views import terminal

        stream = io.StringIO()
        terminal.show(self.document, self.options, stream)
        return stream.getvalue()

    def _repr_html_(self) -> str:
        answer = self.document["answer"]
        parts = [f"<p><b>{_escape_html(answer['sentence'])}</b></p>", _draw_parts(answer["parts"])]
        cards = "".join(
            f"<li><b>{_escape_html(finding['title'])}</b>"
            + (
                f", saves {units.format_share(finding['saving_fraction'] or 0, 1)} of the step"
                if finding["saving_ns"]
                else ""
            )
            + f"<br>{_escape_html(finding['advice'])}</li>"
            for finding in self.document["findings"][: self.options.top]
        )
        parts.append(f"<h4>What to fix first</h4><ol>{cards}</ol>" if cards else "")
        steps = [
            (f"step {step['step']}", step["duration_ns"])
            for rank in self.document["ranks"][:1]
            for step in rank["steps"]
            if step["complete"]
        ]
        parts.append(_draw_bars("Steps", steps[-_PICTURE_ROWS:]))
        work: Sequence[Cells] = self.document["kernels"] or self.document["operators"]
        time = "total_ns" if self.document["kernels"] else "self_ns"
        parts.append(
            _draw_bars(
                "Largest kernels" if self.document["kernels"] else "Largest operators",
                [(fit_name(row["name"], 40), row[time]) for row in work[:_PICTURE_ROWS]],
            )
        )
        parts.append(
            _render_html_table(
                "GPU work", self.document["kernels"], ("total_ns", "mean_ns"), self.options.top
            )
        )
        parts.append(
            _render_html_table(
                "Operators", self.document["operators"], ("self_ns", "total_ns"), self.options.top
            )
        )
        notices = "".join(
            f"<li>{_escape_html(notice['message'])}</li>" for notice in self.document["notices"]
        )
        return "".join(parts) + (
            f"<details><summary>Notices</summary><ul>{notices}</ul></details>" if notices else ""
        )


def show(session: Session, options: ReportOptions | None = None) -> DisplayedReport:
    """Builds the report of a session for display in a notebook or at a prompt.

    Example:
        >>> traceloom.show(traceloom.load("run"))  # doctest: +SKIP
    """
    options = options or ReportOptions()
    return DisplayedReport(build(session, options), options)


def _escape_html(text: str) -> str:
    return escape(sanitize(text))


def _draw_parts(parts: Sequence[Cells]) -> str:
    """Draws the parts of the step as one bar, with a legend."""
    x, bars, legend = 0.0, [], []
    for part, color in zip(
        parts, itertools.chain(_COLORS, itertools.repeat(_COLORS[-1])), strict=False
    ):
        text = _escape_html(f"{part['label']} {units.format_share(part['fraction'], 1)}")
        width = part["fraction"] * _PICTURE_WIDTH
        bars.append(
            f'<rect x="{x:.1f}" width="{width:.1f}" height="16" fill="{color}"><title>{text}</title></rect>'
        )
        legend.append(f'<span style="color:{color}">&#9632;</span> {text}')
        x += width
    picture = f'<svg width="{_PICTURE_WIDTH}" height="16" role="img">{"".join(bars)}</svg>'
    return (
        f"<div>{picture}</div><div>{' &nbsp; '.join(legend[: len(_COLORS)])}</div>" if bars else ""
    )


def _draw_bars(title: str, rows: Sequence[tuple[str, int]]) -> str:
    longest = max((ns for _, ns in rows), default=0)
    if not longest:
        return ""
    bars = "".join(
        f'<text x="230" y="{20 * k + 13}" text-anchor="end" {_FONT}>{_escape_html(name)}</text>'
        f'<rect x="240" y="{20 * k + 2}" width="{300 * ns / longest:.1f}" height="14" fill="{_COLORS[0]}"/>'
        f'<text x="{246 + 300 * ns / longest:.1f}" y="{20 * k + 13}" {_FONT}>{units.format_duration(ns)}</text>'
        for k, (name, ns) in enumerate(rows)
    )
    return f'<h4>{title}</h4><svg width="{_PICTURE_WIDTH}" height="{20 * len(rows)}" role="img">{bars}</svg>'


def _render_html_table(
    title: str, rows: Sequence[Cells], columns: tuple[str, ...], top: int
) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{column.removesuffix('_ns')}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{units.format_duration(row[column])}</td>" for column in columns)
        + f"<td>{units.format_count(row['count'])}</td>"
        + f'<td style="text-align:left" title="{_escape_html(row["name"])}">{escape(fit_name(row["name"], 80))}</td></tr>'
        for row in rows[:top]
    )
    return f"<h4>{title}</h4><table><tr>{head}<th>count</th><th>name</th></tr>{body}</table>"
