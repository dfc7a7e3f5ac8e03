"""A what-if as Markdown, and a sweep as a picture."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.views.markdown import code, text
from traceloom.report.whatif import part_name, trust
from traceloom.simulate.whatif import Sweep

if TYPE_CHECKING:
    from traceloom.report.documents.whatif import WhatIfDocument

_ROWS = 12
_LONGEST = 4_000  # characters of a change, which stands whole
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 260, 90, 12, 40


def markdown(document: WhatIfDocument) -> str:
    """The document for a pull request or a note."""
    lines = [f"## What if: {text(document['name'])}", "", text(document["sentence"]), ""]
    changes = [(code(row["change"], _LONGEST, cell=False), text(row["assumes"])) for row in document["changes"]]
    lines += [f"- {change}. Assumed: {assumed}." for change, assumed in changes]
    tables: list[tuple[list[str], list[list[str]]]] = []
    if len(document["ranks"]) > 1:
        ranks = [
            [f"rank {row['rank']}", *map(units.duration, (row["before_ns"], row["after_ns"], row["saved_ns"]))]
            for row in document["ranks"]
        ]
        tables.append((["rank", "before", "after", "saved"], ranks))
    path = [
        [part_name(row), units.duration(row["before_ns"]), units.duration(row["after_ns"])]
        for row in document["path"][:_ROWS]
    ]  # fmt: skip
    tables.append((["critical path", "before", "after"], path))
    for head, rows in tables:
        lines += ["", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        lines += [f"| {' | '.join(map(text, row))} |" for row in rows]
    return "\n".join([*lines, "", text(trust(document)), ""])


def picture(sweep: Sweep) -> str:
    """The times of a sweep over its factors, as SVG.

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
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{f:g}: {escape(units.duration(t))}</title></circle>'
        f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{f:g}</text>'
        for (x, y), f, t in zip(points, factors, times, strict=True)
    )
    base = _TOP + plot_height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{escape(harmless(sweep.template))}</title>'
        f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH - 20}" fill="none" stroke="#8c959f"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{escape(units.duration(top))}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>'
        f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="2"/><g fill="#0072b2">{dots}</g>'
        f'<text x="{_LEFT + plot_width / 2}" y="{_HEIGHT - 4}" text-anchor="middle">'
        f"{escape(harmless(sweep.template))}</text></svg>\n"
    )
