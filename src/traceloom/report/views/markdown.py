"""The report as Markdown for a pull request: the answer, a table per question, at most sixty lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.model.finding import HotFrame
from traceloom.report.names import short
from traceloom.report.notices import said_once
from traceloom.report.options import ReportOptions, ordered
from traceloom.report.sections import core, shown
from traceloom.report.table import PICTURES, written

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

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
    footer = f"<sub>traceloom {document['traceloom']}, {units.counted(events, 'event')}</sub>"
    notices = said_once(document["notices"], len(document["ranks"]))
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
    marked = _MARKS.sub(r"\\\1", harmless(words))
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
