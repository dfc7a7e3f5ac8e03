"""The roofline picture: achieved FLOP/s over FLOPs per byte, below the ceilings of the device; both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.log_plane import LogPlane
from traceloom.report.names import short

Row = dict[str, Any]
_WIDTH, _HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 20, 46
_EDGES = (_LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM)
_MOST = 200  # points; the rest takes little time and would only cover others
_LINE = 12  # height of a line of text
_LARGEST = 22.0  # radius of the operator with the most time


def picture(operators: Sequence[Row]) -> str:
    """The SVG of the operators of a roofline; empty where none of them calculates in a known time.

    Args:
        operators: Rows with rank, name, shapes, count, total_ns, intensity, flop_rate, arithmetic, matrix,
            peak_flop_rate, peak_byte_rate, roofline_fraction and bound.
    """
    points = _over_ranks([row for row in operators if row["intensity"] and row["flop_rate"]])
    shown = sorted(points, key=lambda row: -row["total_ns"])[:_MOST]
    if not shown:
        return ""
    # (label, FLOP/s, bytes/s) of every peak that a shown operator is compared with, the highest first
    peaks: dict[tuple[float, float | None], set[str]] = {}
    for row in shown:
        if row["peak_flop_rate"]:
            name = str(row["arithmetic"]) if row["matrix"] else "vector units"
            peaks.setdefault((row["peak_flop_rate"], row["peak_byte_rate"]), set()).add(name)
    roofs = [(", ".join(sorted(peaks[key])), *key) for key in sorted(peaks, key=lambda key: -key[0])]
    rates = [row["flop_rate"] for row in shown] + [rate for _, rate, _ in roofs]
    ridges = [rate / memory for _, rate, memory in roofs if memory]
    plane = LogPlane([row["intensity"] for row in shown] + ridges, rates, _EDGES)
    lines, names = _roofs(plane, roofs)
    circles = "".join(_point(plane, row, shown[0]) for row in shown)
    caption = f"{units.count(len(shown))} operators: achieved FLOP/s over FLOPs per byte of memory traffic"
    left_out = len(_over_ranks(operators)) - len(shown)
    more = f"; {units.count(left_out)} that only move data, or take least time, are not drawn" if left_out else ""
    hint = " The larger a point, the more time; dashed lines are the peaks." if roofs else " The peaks are not known."
    return (
        f'<figure class="roofline"><figcaption>{escape(caption + more)}.{hint}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{_grid(plane)}{lines}{circles}{names}</svg></figure>"
    )


def _over_ranks(operators: Sequence[Row]) -> list[Row]:
    """One row for an operator with the same shapes on several ranks: times and calls are sums, rates of all together.

    `ranks` are the ranks; `roofline_fraction` is the least and the most of them.
    """
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in operators:
        alike.setdefault(tuple(row[key] for key in ("name", "shapes", "arithmetic", "matrix", "bound")), []).append(row)
    joined = []
    for rows in alike.values():
        total = sum(row["total_ns"] for row in rows)
        fractions = [row["roofline_fraction"] for row in rows if row["roofline_fraction"] is not None]
        rate = sum((row["flop_rate"] or 0) * row["total_ns"] for row in rows) / total if total else rows[0]["flop_rate"]
        joined.append(
            rows[0]
            | {"total_ns": total, "count": sum(row["count"] for row in rows), "flop_rate": rate}
            | {"ranks": [row["rank"] for row in rows]}
            | {"roofline_fraction": (min(fractions), max(fractions)) if fractions else None}
        )
    return joined


def _grid(plane: LogPlane) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for power in range(plane.x_low, plane.x_high + 1):
        x = plane.x(10.0**power)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_power(power)}</text>')
    prefixes = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
    for power in range(plane.y_low, plane.y_high + 1):
        y = plane.y(10.0**power)
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        base = max(0, min(18, power // 3 * 3))
        label = f"{_power(power - base)}\u00a0{prefixes[base]}FLOP/s"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">FLOPs per byte</text>')
    return "".join(parts)


def _power(power: int) -> str:
    return f"{10**power:,}".replace(",", "\u202f") if power >= 0 else f"{10.0**power:.{-power}f}"


def _roofs(plane: LogPlane, roofs: Sequence[tuple[str, float, float | None]]) -> tuple[str, str]:
    """Memory limits from the left, each arithmetic from its ridge to the right; and their names."""
    lines, names = [], []
    right, low, high = 10.0**plane.x_high, 10.0**plane.x_low, 10.0**plane.y_low
    for memory in sorted({memory for _, _, memory in roofs if memory}):
        top = max(rate for _, rate, of in roofs if of == memory)
        start, end = max(low, high / memory), min(right, top / memory)
        if end > start:
            line = f"M{plane.x(start):.1f} {plane.y(start * memory):.1f}L{plane.x(end):.1f} {plane.y(end * memory):.1f}"
            lines.append(f'<path class="roof" d="{line}"/>')
            middle = math.sqrt(start * end)
            position = f'x="{plane.x(middle) + 10:.1f}" y="{plane.y(middle * memory) + 14:.1f}"'
            names.append(f'<text class="roof-name" {position}>memory {units.byte_rate(memory)}</text>')
    last = -math.inf
    for label, rate, own in roofs:
        start = max(low, rate / own) if own else low
        y = plane.y(rate)
        name = escape(f"{label} {units.flop_rate(rate)}")
        path = f"M{plane.x(min(start, right)):.1f} {y:.1f}H{_WIDTH - _RIGHT}"
        lines.append(f'<path class="roof" d="{path}"><title>{name}</title></path>')
        if y - last > _LINE:  # names that would cover each other are on hover only
            position = f'x="{_WIDTH - _RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end"'
            names.append(f'<text class="roof-name" {position}>{name}</text>')
            last = y
    return "".join(lines), "".join(names)


def _point(plane: LogPlane, row: Row, largest: Row) -> str:
    radius = max(2.5, _LARGEST * math.sqrt(row["total_ns"] / max(largest["total_ns"], 1)))
    lines = [
        short(harmless(str(row["name"])), 120),
        short(harmless(str(row["shapes"])), 160),
        f"{units.duration(row['total_ns'])} in {units.counted(row['count'], 'call')}",
        f"{units.flop_rate(row['flop_rate'])}, {units.number(row['intensity'])} FLOPs per byte",
    ]
    if len(row["ranks"]) > 1:
        lines.append(f"on {len(row['ranks'])} ranks")
    if row["roofline_fraction"] is not None:
        low, high = (f"{100 * fraction:.1f}" for fraction in row["roofline_fraction"])
        lines.append(f"{low if low == high else f'{low} to {high}'} % of the roofline, bound by {row['bound']}")
    label = escape("\n".join(lines))
    return (
        f'<circle class="at-{row["bound"] or "unknown"}" cx="{plane.x(row["intensity"]):.1f}" '
        f'cy="{plane.y(row["flop_rate"]):.1f}" r="{radius:.1f}"><title>{label}</title></circle>'
    )
