"""The lines of a report on a terminal: the answer, then where the time goes, then the tables, then what to do next."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import rank_label, short
from traceloom.report.notices import said_once
from traceloom.report.options import ReportOptions
from traceloom.report.parts import of_answer
from traceloom.report.sections import CORE, FINDINGS, NAMES, summaries
from traceloom.report.table import Bar
from traceloom.report.views.terminal import findings, notices, sections
from traceloom.report.views.terminal.bars import sparkline, stacked
from traceloom.report.views.terminal.columns import TextColumn, fitted, heading, lines, paragraph
from traceloom.report.views.terminal.look import DIM, FILLS, SEVERITY
from traceloom.report.views.terminal.notices import notice_lines
from traceloom.report.views.terminal.sections import wrapped

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.short import ShortReport

_LABELS = {"memory": "copies"}  # as short as in the answer
_MOST_LINES = 2  # of a sentence
_MOST_NAMES = 3  # lines with names of sections
_WIDEST_SPARKLINE = 40


def in_short(document: ReportDocument) -> ShortReport:
    """What the short report draws of a document: the sentences of sections instead of what they are made of."""
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
        "summaries": summaries(document),
    }


def render(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    """The lines of the report, none wider than `width` but for commands, which stand whole."""
    if options.only is None and not options.full and not document["runs"]:
        yield from render_short(in_short(document), width)
        return
    yield from fitted(_lines(document, options, width), width)
    for run in document["runs"]:  # the answer of each, and the command that reports it
        yield Text("")
        yield from paragraph(run["sentence"], width)
        yield Text(" " + harmless(run["command"]), DIM, overflow="ignore")


def render_short(document: ShortReport, width: int) -> Iterator[Text]:
    """The same of the short report, which is of one run."""
    yield from fitted(chain(_head(document, width), brief(document, width)), width)


def _lines(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    yield from _head(document, width)
    if options.wants(FINDINGS):
        yield from findings.findings(document, width, full=options.only is not None)
    yield from _runs(document, width)
    if not document["runs"]:
        yield from sections.sections(document, options, width)
    if options.wants(CORE):
        yield from recording(document, width)
        yield from notices.notices(document["notices"], len(document["ranks"]), options, width)


def _head(document: ReportDocument | ShortReport, width: int) -> Iterator[Text]:
    """What it is about, and the answer."""
    facts = []
    if ranks := document["ranks"]:
        world = max((rank["world_size"] for rank in ranks if rank["world_size"]), default=None)
        many = len({rank["rank"] for rank in ranks})
        if many > 1 or ranks[0]["rank"] is not None:
            facts.append(
                (f"{many} ranks" if many > 1 else rank_label(ranks[0]["rank"])) + (f" of {world}" if world else "")
            )
        facts.append(f"{units.counted(sum(rank['event_count'] for rank in ranks), 'event')}")
        end = max(rank["start_ns"] + rank["window_ns"] for rank in ranks)
        facts.append(units.duration(end - min(rank["start_ns"] for rank in ranks)))
    shown = " · ".join(facts)
    name = short(document["name"], max(width - len(shown) - 3, 16))
    yield Text.assemble((name, "bold"), (f"  {shown}", DIM))
    yield Text("")
    yield from paragraph(document["answer"]["sentence"], width, "bold")


def _runs(document: ReportDocument, width: int) -> Iterator[Text]:
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


def brief(document: ShortReport, width: int) -> Iterator[Text]:
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
    yield from findings.brief(document["findings"], document["findings_ground"], width)
    sentences = document["summaries"]
    widest = max((len(title) for title, _ in sentences), default=0)
    if sentences:
        yield Text("")
    for title, sentence in sentences:
        for number, part in enumerate(_cut(wrapped(sentence, width - widest - 4), _MOST_LINES)):
            yield Text.assemble((f" {title if number == 0 else '':<{widest}}  ", "bold"), part)
    distinct = said_once(document["notices"], len(document["ranks"]))
    errors = [notice for notice in distinct if notice.severity == "error"]
    yield from notice_lines([(each.severity, f"{each.sentence} [{each.slug}]") for each in errors[:_MOST_LINES]], width)
    if distinct := [notice for notice in distinct if notice not in errors]:
        slugs = ", ".join(dict.fromkeys(notice.slug for notice in distinct))
        words = f"{units.counted(len(distinct), 'notice')} about the data: {slugs}"
        for line, part in enumerate(_cut(textwrap.wrap(words, width - 4, break_on_hyphens=False), _MOST_LINES)):
            yield Text.assemble(" ", SEVERITY[distinct[0].severity] if line == 0 else " ", " ", part)
    names = ", ".join(key for key in NAMES if key != CORE)
    yield from heading("More", "--full: the tables, too; --only NAME: one of these in full", width)
    for part in _cut(textwrap.wrap(names, width - 2, break_on_hyphens=False), _MOST_NAMES):
        yield Text(" " + part, DIM)


def _cut(lines: Sequence[str], most: int) -> Sequence[str]:
    """The first lines; an ellipsis ends the last of them where there are more."""
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1].rstrip(" ,.") + " …"]


def recording(document: ReportDocument, width: int) -> Iterator[Text]:
    """The recording as the first rank saw it; nothing where the run was not recorded by traceloom."""
    ranks = _at(document["capture"], list, "ranks") or []
    first = ranks[0] if ranks and isinstance(ranks[0], dict) else None
    if first is None:
        return
    versions = _at(first, dict, "versions") or {}
    note = ", ".join(harmless(f"{name} {version}") for name, version in sorted(versions.items()))
    yield from heading("Recording", note if len(note) < width - 12 else "", width)
    command = _at(document["capture"], list, "run", "command")
    if command:
        yield Text(" " + short(shlex.join(map(str, command)), width - 2))
    first_step, count = _at(first, int, "window", "first_step"), _at(first, int, "window", "step_count")
    steps = _at(first, list, "steps", "duration_ns") or []
    facts = []
    if first_step is not None and count:
        window = f"step {first_step}" if count == 1 else f"steps {first_step} to {first_step + count - 1}"
        facts.append(f"recorded {window}" + (f" of {len(steps)}" if steps else ""))
    ratio = _at(first, (int, float), "overhead", "ratio")
    if ratio is not None:
        facts.append(f"a recorded step took {ratio:.2f} × an unrecorded one")
    if facts:
        yield Text(" " + short("; ".join(facts), width - 2))
    durations = [ns for ns in steps if isinstance(ns, int) and ns >= 0]
    if len(durations) > 1:
        spark = sparkline(durations, _WIDEST_SPARKLINE)
        longest = units.duration(max(durations))
        yield Text.assemble(" every step of the run  ", (spark, DIM), f"  up to {longest}")


def _at(value: Any, kind: Any, *keys: str) -> Any:
    """What stands below these keys of `capture.json`, which others may have touched: None if it is of another kind."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
