"""A document as Markdown, and in a notebook."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from traceloom.report.comparison import tables
from traceloom.report.document import PICTURES, Cells, ReportOptions, Table, ordered, written
from traceloom.report.labels import gpu_accounts, merge_notices, short
from traceloom.report.run import build
from traceloom.report.sections import core, shown
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.notice import HotFrame
from traceloom.trace.session import Session

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.comparison import ComparisonDocument


_MOST_ROWS = 12
_MOST_NOTICES = 5
_MOST_FINDINGS = 5
_MOST_LINES = 60  # of a report of one run
_NAME_WIDTH = 70
_MARKS = re.compile(r"([\\`*_{}\[\]#|~!])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


def render(document: ReportDocument, options: ReportOptions) -> str:
    """The document as GitHub-flavoured Markdown, ended by a line end."""
    above = list(_lines(document, options))
    events = sum(entry["events"] for entry in document["inputs"])
    footer = f"<sub>traceloom {document['traceloom']}, {units.count_of(events, 'event')}</sub>"
    notices = merge_notices(document["notices"], len(document["ranks"]))
    below = [""] * bool(notices) + [f"- {n.severity}: {text(n.sentence)}" for n in notices[:_MOST_NOTICES]]
    if len(notices) > _MOST_NOTICES:
        below.append(f"- … and {len(notices) - _MOST_NOTICES} more")
    below += ["", footer]
    # One line per section that has something to say; the last ones are left out where there is no room for them.
    summaries = [
        (section.title, section.summary(value)) for section in shown(document) if (value := section.value(document))
    ]
    lines = [f"- **{text(title)}**: {text(sentence)}" for title, sentence in summaries if sentence]
    room = _MOST_LINES - len(above) - len(below)
    between = ["", *lines[: room - 1]] if lines and room > 1 else []
    return "\n".join([*above, *between, *below]) + "\n"


def text(words: str) -> str:
    """Words of strangers as they are: no markup, no HTML, no mention of a user, on one line."""
    marked = _MARKS.sub(r"\\\1", sanitize(words))
    return "".join(_ENTITIES.get(letter, letter) for letter in marked)


def code(name: str, width: int = _NAME_WIDTH, *, cell: bool = True) -> str:
    """A name of at most so many characters as a code span that it cannot leave, nor the cell of a table around it."""
    shown = short(name, width).replace("|", "\\|" if cell else "|")
    fence = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") or not shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _lines(document: ReportDocument, options: ReportOptions) -> Iterator[str]:
    yield f"### Traceloom: {code(document['name'], cell=False)}"
    yield ""
    yield f"**{text(document['answer']['sentence'])}**"
    runs = [
        [
            code(run["name"]),
            str(run["ranks"]),
            units.duration(run["window_ns"]),
            str(run["steps"]),
            text(run["sentence"]),
        ]
        for run in document["runs"]
    ]
    yield from table("run", ("ranks", "time", "steps", "answer"), runs[: _MOST_ROWS * 4])
    # What to fix first: what it saves, and what to do.
    findings = (document.get("findings") or [])[:_MOST_FINDINGS]
    if findings:
        yield from ("", "| saves | what | advice |", "|--:|---|---|")
    for row in findings:
        if row["list"] == "time":
            saves = ("≥ " if row["lower_bound"] else "") + units.share(row["saving_fraction"] or 0, 1)
        else:
            saves = units.size(row["saving_bytes"])
        titles = [row["title"], *(other["title"] for other in row["alternatives"])]
        frames = [f"{units.duration(frame['time_ns'])} in {HotFrame(**frame)}" for frame in row["frames"]]
        held = f" Host time: {'; '.join(frames)}." if frames else ""
        yield f"| {text(saves)} | {text('; or, for the same time: '.join(titles))} | {text(row['advice'] + held)} |"
    # The first table of each section that stands in Markdown, without pictures.
    for section in core() if not document["runs"] else ():
        shown_table = next(iter(section.tables(section.value(document))), None) if section.in_markdown else None
        if shown_table is None:
            continue
        columns = [column for column in shown_table.columns if column.narrow and column.kind not in PICTURES]
        rows = ordered(shown_table, options)[:_MOST_ROWS]
        cells = [
            [
                code(str(row.get(column.key))) if column.kind == "name" else text(written(column, row.get(column.key)))
                for column in columns
            ]
            for row in rows
        ]
        yield from table(shown_table.title, [column.title for column in columns[1:]], cells)
        if len(rows) < len(shown_table.rows):
            yield f"| … and {units.count(len(shown_table.rows) - len(rows))} more |{' |' * (len(columns) - 1)}"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table whose first column is text and whose others are numbers."""
    if not rows:
        return
    yield ""
    yield f"| {' | '.join((title, *head))} |"
    yield "|" + "|".join(("---", *("--:" for _ in head))) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


_MAX_COMPARISON_ROWS = 10


def render_comparison_markdown(document: ComparisonDocument) -> str:
    """The document as GitHub-flavoured Markdown, ended by a line end."""
    base, new = (code(side["name"], cell=False) for side in (document["base"], document["new"]))
    lines = [f"### Traceloom: {base} → {new}", ""]
    lines.append(f"**{text(document['sentence'])}**")
    for data_table in tables(document):
        # What differs, and what the step consists of, is never cut short.
        most = len(data_table.rows) if data_table.key in ("diff-conditions", "diff-parts") else _MAX_COMPARISON_ROWS
        lines += table_of(data_table, most, whole=data_table.key == "diff-conditions")
    return "\n".join([*lines, "", f"<sub>traceloom {document['traceloom']}</sub>"]) + "\n"


def table_of(declared: Table, most: int, *, whole: bool = False) -> Iterator[str]:
    """A declared table: at most so many rows, all its columns where `whole`, else the narrow ones."""
    # The first column is text, so what a row is about stands first.
    columns = sorted((column for column in declared.columns if column.narrow), key=lambda column: column.kind != "name")
    columns = list(declared.columns) if whole else columns
    rows = [
        [(code if column.kind == "name" else text)(written(column, row.get(column.key))) for column in columns]
        for row in declared.rows[:most]
    ]
    yield from table(f"{declared.title}: {columns[0].title}", [column.title for column in columns[1:]], rows)
    if len(declared.rows) > most:
        yield f"| … and {len(declared.rows) - most} more |{' |' * (len(columns) - 1)}"


_COLORS = (
    ("compute", "compute_ns", "#3b82d6"),
    ("exposed communication", "exposed_communication_ns", "#e08a00"),
    ("exposed memory", "exposed_memory_ns", "#c2578f"),
    ("idle", "idle_ns", "#9aa0a6"),
)


@dataclass(frozen=True)
class Shown:
    """A report that shows itself: as HTML in a notebook, as text elsewhere.

    Attributes:
        document: The whole report, as `traceloom report --json` prints it.
        options: What it was made with.
    """

    document: ReportDocument
    options: ReportOptions

    def to_dict(self) -> ReportDocument:
        """The report document."""
        return self.document

    def __repr__(self) -> str:
        from traceloom.report.views import terminal

        stream = io.StringIO()
        terminal.show(self.document, self.options, stream)
        return stream.getvalue()

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{_text(self.document['answer']['sentence'])}</b></p>"]
        for rank, account in gpu_accounts(self.document):
            for device in account["devices"]:
                whole = device["window_ns"] or 1
                times: Cells = device
                cells = "".join(
                    f'<div title="{_text(f"{label}: {units.duration(ns)}, {units.share(ns, whole)}")}" '
                    f'style="width:{100 * ns / whole:.3f}%;background:{color}"></div>'
                    for label, ns, color in ((label, times[key], color) for label, key, color in _COLORS)
                )
                name = f"rank {'?' if rank['rank'] is None else rank['rank']}, GPU {device['device']}"
                text = ", ".join(f"{label} {units.share(times[key], whole)}" for label, key, _ in _COLORS)
                parts.append(
                    f"<div>{_text(f'{name}: {text}')}</div>"
                    f'<div style="display:flex;height:1em;max-width:50em;margin-bottom:.5em">{cells}</div>'
                )
        parts.append(_table("GPU work", self.document["kernels"], ("total_ns", "mean_ns"), self.options.top))
        parts.append(_table("Operators", self.document["operators"], ("self_ns", "total_ns"), self.options.top))
        notices = "".join(f"<li>{_text(notice['message'])}</li>" for notice in self.document["notices"])
        return "".join(parts) + (f"<details><summary>Notices</summary><ul>{notices}</ul></details>" if notices else "")


def show(session: Session, options: ReportOptions | None = None) -> Shown:
    """The report of a session, to look at in a notebook or at a prompt.

    Example:
        >>> traceloom.show(traceloom.load("run"))  # doctest: +SKIP
    """
    options = options or ReportOptions()
    return Shown(build(session, options), options)


def _text(text: str) -> str:
    return escape(sanitize(text))


def _table(title: str, rows: Sequence[Cells], columns: tuple[str, ...], top: int) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{column.removesuffix('_ns')}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{units.duration(row[column])}</td>" for column in columns)
        + f"<td>{units.count(row['count'])}</td>"
        + f'<td style="text-align:left" title="{_text(row["name"])}">{escape(short(row["name"], 80))}</td></tr>'
        for row in rows[:top]
    )
    return f"<h4>{title}</h4><table><tr>{head}<th>count</th><th>name</th></tr>{body}</table>"
