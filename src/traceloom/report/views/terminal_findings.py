"""Findings and notices on a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom.report.document import Cells, ReportOptions
from traceloom.report.labels import merge_notices
from traceloom.report.views.terminal_table import DIM, SEVERITY, heading, paragraph, plain
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.notice import HotFrame

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import FindingRow, FindingsGroundValue


_MOST = 5
_MOST_BRIEF = 3
_BAR = 10
_STYLE = {"high": "#d55e00", "medium": "#e08a00", "low": "bright_black"}
_INDENT = 21  # cells of figures and bar
_SIDE = _INDENT + 3


def findings(document: ReportDocument, width: int, *, full: bool) -> Iterator[Text]:
    """The findings, the first five of them where not asked for in full; with advice, evidence and page in full."""
    rows = document.get("findings") or []
    context = document.get("findings_ground")
    if context is None:
        return
    yield from heading("What to fix first", f"savings {context['basis']}, by re-timing; they do not overlap", width)
    if not rows:
        yield Text(" Nothing that is worth half a per cent of it.")
    shown = rows if full else rows[:_MOST]
    for row in shown:
        yield from _finding(row, width, full=full)
        if not full:
            yield from _hottest(row, width)
    if len(rows) > len(shown):
        yield Text(f" … and {len(rows) - len(shown)} more: --only findings", DIM)
    if context["limit"]:
        yield from paragraph(f"Of savings: {context['limit']}.", width, DIM)
    if not context["holds"]:
        yield from paragraph(f"Take the savings as hints: {context['law']}", width, "yellow")
    if full and any(row["host_ns"] for row in rows) and not context["stacks"]:
        yield Text(" Which code holds the host: record with --stacks.", DIM)
    if full and context["abstentions"]:
        yield from heading("Checks skipped", "data missing", width)
        by_reason: dict[str, list[str]] = {}
        for abstention in context["abstentions"]:
            by_reason.setdefault(abstention["reason"], []).append(abstention["slug"])
        for reason, slugs in by_reason.items():
            yield from paragraph(f"{', '.join(dict.fromkeys(slugs))}: {reason}", width)


def brief(rows: list[FindingRow], context: FindingsGroundValue | None, width: int) -> Iterator[Text]:
    """The first three findings: two lines of each at most, and one for the frame that holds most of its host time."""
    if context is None:
        return
    number = f"{_MOST_BRIEF} of {len(rows)}; " if len(rows) > _MOST_BRIEF else ""
    basis = re.split(" from |, the middle", context["basis"])[0]  # of what, without how that is counted
    yield from heading("What to fix first", f"{number}savings {basis}", width)
    if not rows:
        yield Text(" Nothing that is worth half a per cent of the time.")
    for row in rows[:_MOST_BRIEF]:
        yield from islice(_finding(row, width, full=False, most_lines=2), 2)
        yield from _hottest(row, width)
    if rows and not context["holds"]:
        yield Text("   Take the savings as hints: --only findings says why.", "yellow")


def _finding(row: FindingRow, width: int, *, full: bool, most_lines: int | None = None) -> Iterator[Text]:
    """The lines of a finding; the name of its rule stands at the end of so many, which leave out the range it saves."""
    if row["list"] == "time":
        fraction = row["saving_fraction"] or 0.0
        figure = ("≥ " if row["lower_bound"] else "") + units.share(fraction, 1) if row["saving_ns"] else "note"
    else:
        figure, fraction = ("memory" if row["saving_bytes"] is None else units.size(row["saving_bytes"])), 0.0
    style = _STYLE[row["severity"]]
    bar = plain(min(fraction, 1.0), _BAR, style)
    head = Text.assemble(" ", (f"{figure:>8}", f"bold {style}"), " ", bar, " " * (_BAR - bar.cell_len + 1))
    between = ""  # which values the saving lies between, by the steps of the window
    if most_lines is None and row["saving_ns"] and row["saving_low_ns"] is not None:
        low, high = units.duration(row["saving_low_ns"]), units.duration(row["saving_high_ns"])
        between = f": saves up to {high}"
        if row["saving_low_ns"]:
            between = f": saves {low}" if low == high else f": saves {low} to {high}"
    slug = f" [{row['slug']}]"
    title = textwrap.wrap(
        sanitize(f"{row['title']}{between}{slug}"), max(width - _SIDE, 24), break_on_hyphens=False,
        max_lines=most_lines, placeholder=f" …{slug}",
    )  # fmt: skip
    for number, part in enumerate(title):
        yield Text.assemble(head if number == 0 else " " * _INDENT, part)
    if not full:
        if row["alternatives"]:
            slugs = ", ".join(dict.fromkeys(alternative["slug"] for alternative in row["alternatives"]))
            for part in textwrap.wrap(
                f"or, for the same time: {slugs}", max(width - _SIDE, 24), break_on_hyphens=False
            ):
                yield Text(" " * _INDENT + part, DIM)
        return
    room = max(width - _SIDE - 2, 24)
    for words in (row["advice"], *_frames(row, room), *_evidence(row), row["risk"] and f"Risk: {row['risk']}."):
        for part in textwrap.wrap(sanitize(words or ""), room, break_on_hyphens=False):
            yield Text(" " * _INDENT + part, DIM)


def _hottest(row: FindingRow, width: int) -> Iterator[Text]:
    """One line for the frame that holds most of the host time; none where the title names it."""
    for hot in (HotFrame(**frame) for frame in row["frames"][:1]):
        if f"{hot.file}({hot.line})" in row["title"]:
            continue
        file = (hot.file or "").rpartition("/")[2]
        named = [hot, *(replace(hot, file=start + file) for start in ("…/", "") if hot.file)]
        lines = [f"{units.duration(hot.time_ns)} in {frame}" for frame in named]
        if hot.inside is not None and hot.file:
            lines.append(f"{units.duration(hot.inside_ns)} in {hot.inside}, from {file}:{hot.line}")
        room = max(width - _SIDE, 24)
        line = sanitize(next((line for line in lines if len(sanitize(line)) <= room), lines[-1]))
        yield Text(" " * _INDENT + (line if len(line) <= room else f"{line[: room - 1]}…"), DIM)


def _frames(row: FindingRow, room: int) -> Iterator[str]:
    held = []
    for hot in (HotFrame(**frame) for frame in row["frames"]):
        file = hot.file or ""
        while "/" in file and len(f"({file}:{hot.line}),") > room:  # without folders, so that no line breaks inside
            file = f"…/{file.removeprefix('…/').partition('/')[2]}" if file.count("/") > 1 else file.rpartition("/")[2]
        shown = replace(hot, file=file or None)
        held.append(f"{units.duration(hot.time_ns)} ({units.share(hot.share, 1)}) in {shown}")
    if held:
        yield f"Host time: {'; '.join(held)}."


def _evidence(row: FindingRow) -> Iterator[str]:
    shown = []
    for entry in row["evidence"][:3]:
        when = "" if entry["start_ns"] is None else f" at {units.duration(entry['start_ns'])}"
        long = entry["duration_ns"] if entry["duration_ns"] is not None else entry["total_ns"]
        shown.append(f"{entry['what']}{when}" + ("" if long is None else f" ({units.duration(long)})"))
    if shown:
        yield f"See {'; '.join(shown)}."
    for other in row["alternatives"]:
        yield f"Or: {other['title']} ({units.duration(other['alone_ns'])}) [{other['slug']}]"
    alone = row["alone_ns"]
    saves = "" if alone in (None, row["saving_ns"]) else f"Alone it would save {units.duration(alone)}. "
    yield f"{saves}Confidence {row['confidence']:.1f}; more: traceloom explain {row['slug']}"


def notices(rows: Sequence[Cells], ranks: int, options: ReportOptions, width: int) -> Iterator[Text]:
    """What the user must know about the data of so many ranks, worst first."""
    distinct = merge_notices(rows, ranks)
    messages = []
    for notice in distinct:
        weakens = f"; weakens {', '.join(notice.weakens)}" if notice.weakens else ""
        messages.append((notice.severity, f"{notice.sentence}{weakens} [{notice.slug}]"))
    yield from notice_lines(messages[: options.top], width)
    if len(distinct) > options.top:
        yield Text(f" … and {len(distinct) - options.top} more, in the JSON report", DIM)


def notice_lines(messages: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Severity and text of each; nothing where there are none."""
    if messages:
        yield from heading("Notices", "what to know about the data", width)
    for severity, message in messages:
        first, *rest = textwrap.wrap(sanitize(message), max(width - 4, 20), break_on_hyphens=False)
        yield Text.assemble(" ", SEVERITY[severity], " ", first)
        yield from (Text("   " + line) for line in rest)
