"""Results of `traceloom whatif`: document, page, Markdown and terminal."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom import __version__
from traceloom.changes.changes import ASSUMPTIONS, Change
from traceloom.changes.whatif import Sweep, WhatIf
from traceloom.graph.law import Law
from traceloom.report.before_after import BeforeAfterTimeline
from traceloom.report.document import Col
from traceloom.report.figure import escape_html as figure_text, render_inline_code
from traceloom.report.labels import fit_name, format_rank
from traceloom.report.views import read_asset
from traceloom.report.views.markdown import escape_markdown, format_code_span
from traceloom.report.views.page import list_sections, render_key_numbers, render_page
from traceloom.report.views.page_table import render_html_table
from traceloom.report.views.terminal_table import (
    TextColumn,
    render_heading,
    render_paragraph,
    render_table,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import to_rows

if TYPE_CHECKING:
    from traceloom.report.documents.predictions import PathPart, WhatIfDocument


FORMAT = "traceloom-whatif"
VERSION = 1
_MAX_ROWS = 8
_WORK_LABELS = {
    "host": "operators, other work on the host",
    "think": "host time that nothing names",
    "wait": "waiting on the host",
    "launch": "launch calls",
    "block": "calls that wait for the device",
    "kernel": "kernels",
    "copy": "copies",
    "fill": "fills",
    "collective": "communication",
    "send": "sends",
    "receive": "receives",
    "rendezvous": "meetings of ranks",
    "arrival": "peers that were not recorded",
    "origin": "the beginning",
}
_DELAY_LABELS = {
    "call": "into and out of calls",
    "thread": "between events of a thread",
    "launch": "from launch to start",
    "stream": "between pieces of work of a stream",
    "wait": "after another stream",
    "queue": "full launch queue",
    "synchronize": "from the end of GPU work to the call that waits for it",
    "occupancy": "full device",
    "cross-thread": "from thread to thread",
    "rendezvous": "in meetings of ranks",
    "origin": "before a lane begins",
}
_UNTRUSTED_HINT = (
    "The change is smaller than the error of the graph or than 1 % of the time, or the graph misses the law: "
    "take it as a hint."
)


def build(
    name: str, step: int | None, changes: list[Change], result: WhatIf, law: Law
) -> WhatIfDocument:
    """Builds the document: the changes, their effect, how far it can be trusted."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": name,
        "step": step,
        "sentence": describe_whatif(result, step),
        "changes": [
            {"change": str(change), "assumes": ASSUMPTIONS[change.action]} for change in changes
        ],
        "before_ns": result.before_ns,
        "after_ns": result.after_ns,
        "saved_ns": result.saved_ns,
        "saved_fraction": result.saved_fraction,
        "host_ratio": result.host_ratio,
        "rescaled_saved_ns": result.rescaled_saved_ns,
        "ranks": to_rows(result.ranks),
        "path": to_rows(result.path),
        "law": {
            "sentence": law.sentence,
            "holds": law.holds,
            "honest_error": law.honest_error,
            "point_error": law.point_error,
            "residual_share": law.residual_share,
        },
        "trusted": result.trusted,
        "lower_bound": result.lower_bound,
        "upper_bound": result.upper_bound,
        "chance_ns": result.chance_ns,
    }


def describe_whatif(result: WhatIf, step: int | None) -> str:
    scope = "the window" if step is None else f"step {step}"
    before, after = units.format_duration(result.before_ns), units.format_duration(result.after_ns)
    if not result.saved_ns:
        return f"{scope[0].upper()}{scope[1:]} would take {after} as before: none of this is on the critical path."
    word = "save" if result.saved_ns > 0 else "cost"
    if result.upper_bound:
        word += " at most"
    elif result.lower_bound and result.saved_ns > 0:
        word += " at least"
    share = units.format_share(abs(result.saved_ns), result.before_ns)
    text = f"This would {word} {units.format_duration(abs(result.saved_ns))} ({share}) of {scope}: {before} to {after}"
    if result.rescaled_saved_ns != result.saved_ns:
        text += (
            f"; without the profiler, which makes steps {result.host_ratio:.2f} × as long, about "
            f"{units.format_duration(abs(result.rescaled_saved_ns))}"
        )
    if result.chance_ns:
        text += f"; by chance {units.format_duration(result.chance_ns)} more or less"
    if result.upper_bound:
        text += "; whether the workers of the data loader keep up with that was not recorded"
    return f"{text}."


def render(document: WhatIfDocument, width: int) -> Iterator[Text]:
    yield Text(fit_name(document["name"], width), "bold")
    yield Text("")
    yield from render_paragraph(document["sentence"], width, "bold")
    for change in document["changes"]:
        yield Text("")
        yield Text.assemble(" ", (sanitize(change["change"]), "bold"))
        yield from render_paragraph(f"Assumed: {change['assumes']}.", width)
    if len(document["ranks"]) > 1:
        yield from render_heading("Ranks", "", width)
        ranks: list[list[str | Text]] = [
            [
                format_rank(r["rank"]),
                units.format_duration(r["before_ns"]),
                units.format_duration(r["after_ns"]),
                units.format_duration(r["saved_ns"]),
            ]
            for r in document["ranks"]
        ]
        columns = [
            TextColumn("", right=False),
            TextColumn("before"),
            TextColumn("after"),
            TextColumn("saved"),
        ]
        yield from render_table(columns, ranks, ("", lambda *_: ""), width)
    yield from render_heading("Critical path", "what decides how long it takes", width)
    parts = document["path"][:_MAX_ROWS]
    cells: list[list[str | Text]] = [
        [units.format_duration(p["before_ns"]), units.format_duration(p["after_ns"])] for p in parts
    ]
    columns = [TextColumn("before"), TextColumn("after")]

    def name(i: int, width_left: int) -> str:
        return fit_name(describe_path_part(parts[i]), width_left)

    yield from render_table(columns, cells, ("of", name), width)
    yield Text("")
    yield from render_paragraph(describe_trust(document), width)


def describe_trust(document: WhatIfDocument) -> str:
    hint = "It is a bound. " if document["upper_bound"] else f"{_UNTRUSTED_HINT} "
    return ("" if document["trusted"] else hint) + document["law"]["sentence"]


def describe_path_part(part: PathPart) -> str:
    part_type, kind = part["what"], part["kind"]
    if part_type == "before":
        return "before the path begins"
    if part_type == "work" or not kind:
        return _WORK_LABELS.get(kind, kind or part_type)
    return f"{'unexplained' if part_type == 'residual' else part_type}: {_DELAY_LABELS.get(kind) or _WORK_LABELS.get(kind, kind)}"


_MAX_WHATIF_ROWS = 12
_MAX_CHANGE_CHARS = 4_000  # characters of a change, which is shown whole
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 260, 90, 12, 40


def render_markdown(document: WhatIfDocument) -> str:
    lines = [
        f"## What if: {escape_markdown(document['name'])}",
        "",
        escape_markdown(document["sentence"]),
        "",
    ]
    changes = [
        (
            format_code_span(row["change"], _MAX_CHANGE_CHARS, cell=False),
            escape_markdown(row["assumes"]),
        )
        for row in document["changes"]
    ]
    lines += [f"- {change}. Assumed: {assumed}." for change, assumed in changes]
    tables: list[tuple[list[str], list[list[str]]]] = []
    if len(document["ranks"]) > 1:
        ranks = [
            [
                f"rank {row['rank']}",
                *map(units.format_duration, (row["before_ns"], row["after_ns"], row["saved_ns"])),
            ]
            for row in document["ranks"]
        ]
        tables.append((["rank", "before", "after", "saved"], ranks))
    path = [
        [
            describe_path_part(row),
            units.format_duration(row["before_ns"]),
            units.format_duration(row["after_ns"]),
        ]
        for row in document["path"][:_MAX_WHATIF_ROWS]
    ]
    tables.append((["critical path", "before", "after"], path))
    for head, rows in tables:
        lines += ["", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        lines += [f"| {' | '.join(map(escape_markdown, row))} |" for row in rows]
    return "\n".join([*lines, "", escape_markdown(describe_trust(document)), ""])


def picture(sweep: Sweep) -> str:
    """Draws the times of a sweep over its factors, as SVG.

    Example:
        >>> Path("network.svg").write_text(picture(sweep(graph, "network * {}", [1, 2, 4])))  # doctest: +SKIP
    """
    rows = sweep.table.sort("factor")
    factors, times = rows["factor"].to_list(), rows["time_ns"].to_list()
    low, high = (min(factors), max(factors)) if factors else (0.0, 1.0)
    top = max(times, default=1) or 1
    plot_width, plot_height = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - _BOTTOM
    points = [
        (_LEFT + (f - low) / ((high - low) or 1) * plot_width, _TOP + plot_height * (1 - t / top))
        for f, t in zip(factors, times, strict=True)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{f:g}: {escape(units.format_duration(t))}</title></circle>'
        f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{f:g}</text>'
        for (x, y), f, t in zip(points, factors, times, strict=True)
    )
    base = _TOP + plot_height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{escape(sanitize(sweep.template))}</title>'
        f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH - 20}" fill="none" stroke="#8c959f"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{escape(units.format_duration(top))}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>'
        f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="2"/><g fill="#0072b2">{dots}</g>'
        f'<text x="{_LEFT + plot_width / 2}" y="{_HEIGHT - 4}" text-anchor="middle">'
        f"{escape(sanitize(sweep.template))}</text></svg>\n"
    )


_TIMES = (
    Col("before_ns", "Before", "time", scale="t"),
    Col("after_ns", "After", "time", scale="t"),
)
_SAVED = Col("saved_ns", "Saved", "time", scale="t")
_ABOUT_TIMELINE = (
    "Every lane as it was and, below it, as it would be, on one axis. A dark edge marks what the changes are about, "
    "a line the critical path: what decides how long it takes."
)
_ABOUT_PATH = "What decides how long it takes; each column adds up to the whole."


def render_before_after_page(
    document: WhatIfDocument, view: BeforeAfterTimeline | None = None
) -> str:
    """Renders the document as one self-contained HTML page.

    Args:
        document: The result of `traceloom.report.whatif.build`.
        view: The timeline before and after; without one the page states that.
    """
    name = document["name"]
    before, after, saved = document["before_ns"], document["after_ns"], document["saved_ns"]
    max_ns = max(before, after, 1)
    bars = "".join(
        f'<rect class="{side}" x="0" y="{14 * k}" width="{time / max_ns * 100:.2f}" height="10"/>'
        for k, (side, time) in enumerate((("before", before), ("after", after)))
    )
    label = f"before {units.format_duration(before)}, after {units.format_duration(after)}"
    picture = (
        f'<svg class="sides" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{bars}</svg>'
    )
    key_numbers = [
        ("Before", units.format_duration(before), "as measured"),
        ("After", units.format_duration(after), "with the changes"),
        (
            "Saved",
            units.format_duration(saved),
            f"{units.format_share(saved, before)} of it" if saved >= 0 else "it takes longer",
        ),
    ]
    if document["rescaled_saved_ns"] != saved:
        key_numbers.append(
            (
                "Unrecorded",
                units.format_duration(document["rescaled_saved_ns"]),
                "saved when not recording",
            )
        )
    else:
        key_numbers.append(
            (
                "Error of the graph",
                f"{100 * document['law']['honest_error']:+.2f} %",
                "more than that is saved" if document["trusted"] else "take it as a hint",
            )
        )
    return render_page(
        title=f"What if: {document['sentence']} – {name}",
        name=f"What if: {name}",
        headline=f"<h1>{figure_text(document['sentence'])}</h1>{picture}",
        numbers=render_key_numbers(
            (label, value, "", detail) for label, value, detail in key_numbers
        ),
        footer=(
            f"<p>Traceloom {figure_text(document['traceloom'])} · times count from the beginning of the graph</p>"
            "<p>The same for programs: <code>traceloom whatif … -o whatif.json</code>; the whole timeline after the "
            "change: <code>-o after.perfetto.json.gz</code></p>"
        ),
        data=view.payload if view else "",
        **list_sections(_render_sections(document, view)),
    )


def _render_sections(
    document: WhatIfDocument, view: BeforeAfterTimeline | None
) -> Iterator[tuple[str, str, str, str]]:
    changes = "".join(
        f'<li><code>{figure_text(change["change"])}</code> <span class="quiet">Assumed: {figure_text(change["assumes"])}.</span></li>'
        for change in document["changes"]
    )
    yield (
        "changes",
        "Changes",
        "What was asked, and what each change assumes.",
        f"<ul>{changes}</ul>",
    )
    if view is None:
        missing = (
            '<p class="quiet absent">Timeline: nothing takes any time on any thread or stream.</p>'
        )
        yield "timeline", "Timeline", "", missing
    else:
        note = (
            f'<p class="quiet">{render_inline_code(view.description)}</p>'
            if view.description
            else ""
        )
        yield "timeline", "Timeline", _ABOUT_TIMELINE, note + read_asset("timeline.html")
    if len(document["ranks"]) > 1:
        columns = (Col("rank", "Rank", "count"), *_TIMES, _SAVED)
        yield (
            "ranks",
            "Ranks",
            "How long each rank takes.",
            render_html_table("ranks-table", columns, document["ranks"], {}, "Ranks"),
        )
    parts = [{**part, "of": describe_path_part(part)} for part in document["path"]]
    kinds = (Col("of", "Time", hint="kind of time on the path"), *_TIMES)
    yield (
        "path",
        "Critical path",
        _ABOUT_PATH,
        render_html_table("path-table", kinds, parts, {}, "Critical path"),
    )
    yield (
        "trust",
        "Trust",
        "How far the answer goes.",
        f"<p>{figure_text(describe_trust(document))}</p>",
    )
