"""The short report: below the answer its bar, what to fix first, steps in a line, and where to look next."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from traceloom.model import units
from traceloom.report.notices import said_once
from traceloom.report.parts import of_answer
from traceloom.report.sections import CORE, NAMES, core
from traceloom.report.table import Bar
from traceloom.report.views.terminal import findings
from traceloom.report.views.terminal.bars import stacked
from traceloom.report.views.terminal.columns import heading
from traceloom.report.views.terminal.look import DIM, FILLS, SEVERITY
from traceloom.report.views.terminal.notices import notice_lines
from traceloom.report.views.terminal.sections import wrapped

Row = dict[str, Any]
_LABELS = {"memory": "copies"}  # as short as in the answer
_MOST_LINES = 2  # of a sentence
_MOST_NAMES = 3  # lines with names of sections


def brief(document: Row, width: int) -> Iterator[Text]:
    """What stands below the answer, in some twenty lines."""
    times: dict[str, int] = {}
    for _, group, ns in of_answer(document["answer"]):
        times[group] = times.get(group, 0) + ns
    if whole := sum(times.values()):
        bar = Bar([(_LABELS.get(group, group), group, ns) for group, ns in times.items()], whole)
        yield Text(" ") + stacked(bar, width - 2)
        legend = Text("")
        for label, group, ns in bar.parts:
            entry = Text.assemble(" ", FILLS[group], f" {label} {units.share(ns, whole)} ")
            if legend.cell_len + entry.cell_len > width:
                yield legend
                legend = Text("")
            legend = legend + entry
        yield legend
    yield from findings.brief(document, width)
    sentences = [(section.title, section.summary(section.value(document))) for section in core()]
    sentences = [(title, sentence) for title, sentence in sentences if sentence]
    widest = max((len(title) for title, _ in sentences), default=0)
    if sentences:
        yield Text("")
    for title, sentence in sentences:
        for number, part in enumerate(_cut(wrapped(sentence or "", width - widest - 4), _MOST_LINES)):
            yield Text.assemble((f" {title if number == 0 else '':<{widest}}  ", "bold"), part)
    distinct = said_once(document["notices"], len(document["ranks"]))
    errors = [notice for notice in distinct if notice.severity == "error"]
    yield from notice_lines([(each.severity, f"{each.sentence} [{each.slug}]") for each in errors[:_MOST_LINES]], width)
    if distinct := [notice for notice in distinct if notice not in errors]:
        slugs = ", ".join(dict.fromkeys(notice.slug for notice in distinct))
        words = f"{units.count(len(distinct))} notice{'' if len(distinct) == 1 else 's'} about the data: {slugs}"
        for line, part in enumerate(_cut(textwrap.wrap(words, width - 4, break_on_hyphens=False), _MOST_LINES)):
            yield Text.assemble(" ", SEVERITY[distinct[0].severity] if line == 0 else " ", " ", part)
    names = ", ".join(key for key in NAMES if key != CORE)
    yield from heading("More", "--full: the tables, too; --only NAME: one of these in full", width)
    for part in _cut(textwrap.wrap(names, width - 2, break_on_hyphens=False), _MOST_NAMES):
        yield Text(" " + part, DIM)


def _cut(lines: Sequence[str], most: int) -> Sequence[str]:
    """The first lines; an ellipsis ends the last of them where there are more."""
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1].rstrip(" ,.") + " …"]
