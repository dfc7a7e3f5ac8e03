"""Renders findings and notices on a terminal."""

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
from traceloom.report.views.terminal_table import (
    DIM_STYLE,
    SEVERITY_STYLES,
    draw_bar,
    render_heading,
    render_paragraph,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.notice import HotFrame

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import FindingRow, FindingsGroundValue


_MAX_FINDINGS = 5
_MAX_BRIEF_FINDINGS = 3
_BAR_WIDTH = 10
_SEVERITY_STYLES = {"high": "#d55e00", "medium": "#e08a00", "low": "bright_black"}
_TITLE_INDENT = 21  # cells of values and bar
_RESERVED_WIDTH = _TITLE_INDENT + 3


def render_findings(document: ReportDocument, width: int, *, full: bool) -> Iterator[Text]:
    """Yields the findings, only the first five without `full`; with advice, evidence and page with
    it.
    """
    rows = document.get("findings") or []
    ground = document.get("findings_ground")
    if ground is None:
        return
    yield from render_heading(
        "What to fix first", f"savings {ground['basis']}, by re-timing; they do not overlap", width
    )
    if not rows:
        yield from _render_nothing(ground, width)
    visible = rows if full else rows[:_MAX_FINDINGS]
    for row in visible:
        yield from _render_finding(row, width, full=full)
        if not full:
            yield from _render_hottest_frame(row, width)
    if len(rows) > len(visible):
        yield Text(f" … and {len(rows) - len(visible)} more: --only findings", DIM_STYLE)
    if ground["limit"]:
        yield from render_paragraph(f"Of savings: {ground['limit']}.", width, DIM_STYLE)
    if not ground["holds"]:
        yield from render_paragraph(f"Take the savings as hints: {ground['law']}", width, "yellow")
    if full and any(row["host_ns"] and not row["frames"] for row in rows) and not ground["stacks"]:
        yield Text(" Which code holds the host: record with --stacks.", DIM_STYLE)
    if full and ground["abstentions"]:
        yield from render_heading("Checks skipped", "data missing", width)
        slugs_by_reason: dict[str, list[str]] = {}
        for abstention in ground["abstentions"]:
            slugs_by_reason.setdefault(abstention["reason"], []).append(abstention["slug"])
        for reason, slugs in slugs_by_reason.items():
            yield from render_paragraph(f"{', '.join(dict.fromkeys(slugs))}: {reason}", width)


def render_brief_findings(
    rows: list[FindingRow], ground: FindingsGroundValue | None, width: int
) -> Iterator[Text]:
    """Yields the first three findings: at most two lines of each, and one for the frame with most
    of its host time.
    """
    if ground is None:
        return
    count_text = (
        f"{_MAX_BRIEF_FINDINGS} of {len(rows)}; " if len(rows) > _MAX_BRIEF_FINDINGS else ""
    )
    basis = re.split(" from |, the middle", ground["basis"])[
        0
    ]  # the text without the method of counting
    yield from render_heading("What to fix first", f"{count_text}savings {basis}", width)
    if not rows:
        yield from _render_nothing(ground, width)
    for row in rows[:_MAX_BRIEF_FINDINGS]:
        yield from islice(_render_finding(row, width, full=False, max_lines=2), 2)
        yield from _render_hottest_frame(row, width)
    if rows and not ground["holds"]:
        yield Text("   Take the savings as hints: --only findings says why.", "yellow")


def _render_nothing(ground: FindingsGroundValue, width: int) -> Iterator[Text]:
    """Yields that no rule found anything, and how many could not decide."""
    yield Text(" No rule found anything that is worth half a per cent of the time.")
    skipped = len({abstention["slug"] for abstention in ground["abstentions"]})
    if skipped:
        checks = units.format_quantity(skipped, "check")
        yield from render_paragraph(
            f"{checks} could not decide; --only findings --full says why.", width, DIM_STYLE
        )


def _render_finding(
    row: FindingRow, width: int, *, full: bool, max_lines: int | None = None
) -> Iterator[Text]:
    """Yields the lines of a finding; with `max_lines`, the rule's name ends them, and the range of
    the saving is omitted.
    """
    if row["list"] == "time":
        fraction = row["saving_fraction"] or 0.0
        figure = (
            ("≥ " if row["lower_bound"] else "") + units.format_share(fraction, 1)
            if row["saving_ns"]
            else "note"
        )
    else:
        figure, fraction = (
            ("memory" if row["saving_bytes"] is None else units.format_size(row["saving_bytes"])),
            0.0,
        )
    style = _SEVERITY_STYLES[row["severity"]]
    bar = draw_bar(min(fraction, 1.0), _BAR_WIDTH, style)
    prefix = Text.assemble(
        " ", (f"{figure:>8}", f"bold {style}"), " ", bar, " " * (_BAR_WIDTH - bar.cell_len + 1)
    )
    saving_range = ""  # the values that the saving lies between, by the steps of the window
    if max_lines is None and row["saving_ns"] and row["saving_low_ns"] is not None:
        low, high = (
            units.format_duration(row["saving_low_ns"]),
            units.format_duration(row["saving_high_ns"]),
        )
        saving_range = f": saves up to {high}"
        if row["saving_low_ns"]:
            saving_range = f": saves {low}" if low == high else f": saves {low} to {high}"
    slug = f" [{row['slug']}]"
    title = textwrap.wrap(
        sanitize(f"{row['title']}{saving_range}{slug}"),
        max(width - _RESERVED_WIDTH, 24),
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=f" …{slug}",
    )
    for number, line in enumerate(title):
        yield Text.assemble(prefix if number == 0 else " " * _TITLE_INDENT, line)
    if not full:
        if row["alternatives"]:
            slugs = ", ".join(
                dict.fromkeys(alternative["slug"] for alternative in row["alternatives"])
            )
            for line in textwrap.wrap(
                f"or, for the same time: {slugs}",
                max(width - _RESERVED_WIDTH, 24),
                break_on_hyphens=False,
            ):
                yield Text(" " * _TITLE_INDENT + line, DIM_STYLE)
        return
    detail_width = max(width - _RESERVED_WIDTH - 2, 24)
    for paragraph in (
        row["advice"],
        *_describe_host_frames(row, detail_width),
        *_describe_evidence(row),
        row["risk"] and f"Risk: {row['risk']}.",
    ):
        for line in textwrap.wrap(sanitize(paragraph or ""), detail_width, break_on_hyphens=False):
            yield Text(" " * _TITLE_INDENT + line, DIM_STYLE)


def _render_hottest_frame(row: FindingRow, width: int) -> Iterator[Text]:
    """Yields one line for the frame with most of the host time; none where the title names it."""
    for hot in (HotFrame(**frame) for frame in row["frames"][:1]):
        if f"{hot.file}({hot.line})" in row["title"]:
            continue
        file = (hot.file or "").rpartition("/")[2]
        display_frames = [
            hot,
            *(replace(hot, file=start + file) for start in ("…/", "") if hot.file),
        ]
        candidates = [
            f"{units.format_duration(hot.time_ns)} in {frame}" for frame in display_frames
        ]
        if hot.inside is not None and hot.file:
            candidates.append(
                f"{units.format_duration(hot.inside_ns)} in {hot.inside}, from {file}:{hot.line}"
            )
        text_width = max(width - _RESERVED_WIDTH, 24)
        line = sanitize(
            next((line for line in candidates if len(sanitize(line)) <= text_width), candidates[-1])
        )
        yield Text(
            " " * _TITLE_INDENT
            + (line if len(line) <= text_width else f"{line[: text_width - 1]}…"),
            DIM_STYLE,
        )


def _describe_host_frames(row: FindingRow, max_width: int) -> Iterator[str]:
    descriptions = []
    for hot in (HotFrame(**frame) for frame in row["frames"]):
        file = hot.file or ""
        # Without folders, so that no line breaks inside.
        while "/" in file and len(f"({file}:{hot.line}),") > max_width:
            file = (
                f"…/{file.removeprefix('…/').partition('/')[2]}"
                if file.count("/") > 1
                else file.rpartition("/")[2]
            )
        shortened = replace(hot, file=file or None)
        descriptions.append(
            f"{units.format_duration(hot.time_ns)} ({units.format_share(hot.share, 1)}) in {shortened}"
        )
    if descriptions:
        yield f"Host time: {'; '.join(descriptions)}."


def _describe_evidence(row: FindingRow) -> Iterator[str]:
    descriptions = []
    for entry in row["evidence"][:3]:
        start_text = (
            "" if entry["start_ns"] is None else f" at {units.format_duration(entry['start_ns'])}"
        )
        length_ns = entry["duration_ns"] if entry["duration_ns"] is not None else entry["total_ns"]
        descriptions.append(
            f"{entry['what']}{start_text}"
            + ("" if length_ns is None else f" ({units.format_duration(length_ns)})")
        )
    if descriptions:
        yield f"See {'; '.join(descriptions)}."
    for alternative in row["alternatives"]:
        yield f"Or: {alternative['title']} ({units.format_duration(alternative['alone_ns'])}) [{alternative['slug']}]"
    alone_ns = row["alone_ns"]
    alone_text = (
        ""
        if alone_ns in (None, row["saving_ns"])
        else f"Alone it would save {units.format_duration(alone_ns)}. "
    )
    yield f"{alone_text}Confidence {row['confidence']:.1f}; more: traceloom explain {row['slug']}"


def render_notices(
    rows: Sequence[Cells], rank_count: int, options: ReportOptions, width: int
) -> Iterator[Text]:
    """Yields notices about the data of `rank_count` ranks, the worst first."""
    distinct = merge_notices(rows, rank_count)
    messages = []
    for notice in distinct:
        weakens = f"; weakens {', '.join(notice.weakens)}" if notice.weakens else ""
        messages.append((notice.severity, f"{notice.sentence}{weakens} [{notice.slug}]"))
    yield from render_notice_lines(messages[: options.top], width)
    if len(distinct) > options.top:
        yield Text(f" … and {len(distinct) - options.top} more, in the JSON report", DIM_STYLE)


def render_notice_lines(messages: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Yields severity and text of each; nothing where there are none."""
    if messages:
        yield from render_heading("Notices", "what to know about the data", width)
    for severity, message in messages:
        first, *remaining_lines = textwrap.wrap(
            sanitize(message), max(width - 4, 20), break_on_hyphens=False
        )
        yield Text.assemble(" ", SEVERITY_STYLES[severity], " ", first)
        yield from (Text("   " + line) for line in remaining_lines)
