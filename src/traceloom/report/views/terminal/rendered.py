"""The lines of a report on a terminal: the answer, then where the time goes, then the tables, then what to do next."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import rank_label, short
from traceloom.report.options import ReportOptions
from traceloom.report.sections import CORE, FINDINGS
from traceloom.report.views.terminal import brief, findings, notices, sections
from traceloom.report.views.terminal.columns import TextColumn, heading, lines
from traceloom.report.views.terminal.look import DIM
from traceloom.report.views.terminal.recording import recording


def render(document: dict[str, Any], options: ReportOptions, width: int) -> Iterator[Text]:
    """The lines of the report, none wider than `width` but for commands, which stand whole."""
    for line in _lines(document, options, width):
        if line.cell_len > width:  # names in scripts whose letters take two cells
            line.truncate(width, overflow="ellipsis")
        yield line
    for run in document["runs"]:  # the answer of each, and the command that reports it
        yield Text("")
        for part in textwrap.wrap(harmless(run["sentence"]), width - 2, break_on_hyphens=False):
            yield Text(" " + part)
        yield Text(" " + harmless(run["command"]), DIM)


def _lines(document: dict[str, Any], options: ReportOptions, width: int) -> Iterator[Text]:
    facts = []
    if ranks := document["ranks"]:
        world = max((rank["world_size"] for rank in ranks if rank["world_size"]), default=None)
        many = len({rank["rank"] for rank in ranks})
        if many > 1 or ranks[0]["rank"] is not None:
            facts.append(
                (f"{many} ranks" if many > 1 else rank_label(ranks[0]["rank"])) + (f" of {world}" if world else "")
            )
        facts.append(f"{units.count(sum(rank['event_count'] for rank in ranks))} events")
        end = max(rank["start_ns"] + rank["window_ns"] for rank in ranks)
        facts.append(units.duration(end - min(rank["start_ns"] for rank in ranks)))
    shown = " · ".join(facts)
    name = short(document["name"], max(width - len(shown) - 3, 16))
    yield Text.assemble((name, "bold"), (f"  {shown}", DIM))
    yield Text("")
    for line in textwrap.wrap(harmless(document["answer"]["sentence"]), width - 2, break_on_hyphens=False):
        yield Text.assemble((" " + line, "bold"))
    if options.only is None and not options.full and not document["runs"]:
        yield from brief.brief(document, width)
        return
    if options.only is None or FINDINGS in options.only:
        yield from findings.findings(document, width, full=options.only is not None)
    yield from _runs(document, width)
    if not document["runs"]:
        yield from sections.sections(document, options, width)
    if options.only is None or CORE in options.only:
        yield from recording(document, width)
        yield from notices.notices(document, options, width)


def _runs(document: dict[str, Any], width: int) -> Iterator[Text]:
    """One line per run."""
    if not document["runs"]:
        return
    yield from heading("Runs", "", width)
    rows: list[list[str | Text]] = [
        [
            str(run["ranks"]) + (f" of {run['world_size']}" if run["world_size"] else ""),
            units.duration(run["window_ns"]),
            str(run["steps"]),
            units.count(run["events"]),
        ]
        for run in document["runs"]
    ]
    columns = [TextColumn("ranks"), TextColumn("time"), TextColumn("steps"), TextColumn("events")]
    # Paths without the folders that all of them share.
    paths = [PurePath(run["name"]) for run in document["runs"]]
    folders = zip(*(path.parts[:-1] for path in paths), strict=False)
    shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, folders)))
    names = [str(PurePath(*path.parts[shared:])) for path in paths]
    yield from lines(columns, rows, ("run", lambda i, room: short(names[i], room)), width)
