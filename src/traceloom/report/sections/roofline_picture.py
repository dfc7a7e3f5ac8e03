"""The roofline picture: achieved FLOP/s over FLOPs per byte, below the ceilings of the device; both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.log_plane import LogPlane
from traceloom.report.names import short

if TYPE_CHECKING:
    from traceloom.report.documents.sections import RooflineOperatorsRow

_WIDTH, _HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 20, 46
_EDGES = (_LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM)
_MOST = 200  # points; the rest takes little time and would only cover others
_LINE = 12  # height of a line of text
_LARGEST = 22.0  # radius of the operator with the most time


class RooflinePoint(NamedTuple):
    """An operator with the same shapes, bound alike, on one or several ranks: times and calls are sums."""

    first: RooflineOperatorsRow  # for what they have in common
    rank_count: int
    call_count: int
    total_ns: int
    intensity: float
    flop_rate: float  # of all together
    fractions: tuple[float, float] | None  # of the roofline, the least and the most

    @classmethod
    def of(cls, rows: list[RooflineOperatorsRow]) -> RooflinePoint:
        """The point of these rows."""
        first, total = rows[0], sum(row["total_ns"] or 0 for row in rows)
        rates = [(row["flop_rate"] or 0) * (row["total_ns"] or 0) for row in rows]
        fractions = [fraction for row in rows if (fraction := row["roofline_fraction"]) is not None]
        return cls(
            first,
            len(rows),
            sum(row["count"] for row in rows),
            total,
            first["intensity"] or 0.0,
            sum(rates) / total if total else first["flop_rate"] or 0.0,
            (min(fractions), max(fractions)) if fractions else None,
        )


def picture(operators: Sequence[RooflineOperatorsRow]) -> str:
    """The SVG of the operators of a roofline; empty where none of them calculates in a known time.

    Args:
        operators: Those of all ranks.
    """
    points = [RooflinePoint.of(rows) for rows in _alike([o for o in operators if o["intensity"] and o["flop_rate"]])]
    shown = sorted(points, key=lambda point: -point.total_ns)[:_MOST]
    if not shown:
        return ""
    # (label, FLOP/s, bytes/s) of every peak that a shown operator is compared with, the highest first
    peaks: dict[tuple[float, float | None], set[str]] = {}
    for row in (point.first for point in shown):
        if row["peak_flop_rate"]:
            name = str(row["arithmetic"]) if row["matrix"] else "vector units"
            peaks.setdefault((row["peak_flop_rate"], row["peak_byte_rate"]), set()).add(name)
    roofs = [(", ".join(sorted(peaks[key])), *key) for key in sorted(peaks, key=lambda key: -key[0])]
    rates = [point.flop_rate for point in shown] + [rate for _, rate, _ in roofs]
    ridges = [rate / memory for _, rate, memory in roofs if memory]
    plane = LogPlane([point.intensity for point in shown] + ridges, rates, _EDGES)
    lines, names = _roofs(plane, roofs)
    circles = "".join(_circle(plane, point, shown[0].total_ns) for point in shown)
    caption = f"{units.count(len(shown))} operators: achieved FLOP/s over FLOPs per byte of memory traffic"
    left_out = len(_alike(operators)) - len(shown)
    more = f"; {units.count(left_out)} that only move data, or take least time, are not drawn" if left_out else ""
    hint = " The larger a point, the more time; dashed lines are the peaks." if roofs else " The peaks are not known."
    return (
        f'<figure class="roofline"><figcaption>{escape(caption + more)}.{hint}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{_grid(plane)}{lines}{circles}{names}</svg></figure>"
    )


def _alike(operators: Sequence[RooflineOperatorsRow]) -> list[list[RooflineOperatorsRow]]:
    """The rows of operators with the same shapes that are bound alike, of all ranks together."""
    alike: dict[tuple[object, ...], list[RooflineOperatorsRow]] = {}
    for row in operators:
        key = (row["name"], row["shapes"], row["arithmetic"], row["matrix"], row["bound"])
        alike.setdefault(key, []).append(row)
    return list(alike.values())


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


def _circle(plane: LogPlane, point: RooflinePoint, largest_ns: int) -> str:
    row = point.first
    radius = max(2.5, _LARGEST * math.sqrt(point.total_ns / max(largest_ns, 1)))
    lines = [
        short(harmless(str(row["name"])), 120),
        short(harmless(str(row["shapes"])), 160),
        f"{units.duration(point.total_ns)} in {units.counted(point.call_count, 'call')}",
        f"{units.flop_rate(point.flop_rate)}, {units.number(point.intensity)} FLOPs per byte",
    ]
    if point.rank_count > 1:
        lines.append(f"on {point.rank_count} ranks")
    if point.fractions is not None:
        low, high = (f"{100 * fraction:.1f}" for fraction in point.fractions)
        lines.append(f"{low if low == high else f'{low} to {high}'} % of the roofline, bound by {row['bound']}")
    label = escape("\n".join(lines))
    return (
        f'<circle class="at-{row["bound"] or "unknown"}" cx="{plane.x(point.intensity):.1f}" '
        f'cy="{plane.y(point.flop_rate):.1f}" r="{radius:.1f}"><title>{label}</title></circle>'
    )
