"""Bars, curve, scatter on log axes, heat map, icicle: values, and the SVG of each."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from traceloom.report.labels import allocator, short
from traceloom.system import units
from traceloom.system.sanitize import sanitize

if TYPE_CHECKING:
    from traceloom.report.documents.memory import MemoryCurveRow, MemoryRankStepsRow
    from traceloom.report.documents.replay import ReplayOpsRow
    from traceloom.report.documents.report import CurveRow
    from traceloom.report.documents.sections import RooflineOperatorsRow


_PLAIN = 1_000  # characters of JSON from which on packing is worth it


def embedded_json(value: Any) -> str:
    """A script element that holds a JSON object, safe whatever names it holds; `readIsland` of `unpack.js` reads it."""
    dumped = json.dumps(value, separators=(",", ":"))  # ASCII, so U+2028 and U+2029 are escaped already
    if len(dumped) < _PLAIN:
        body = dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    else:
        body = base64.b64encode(zlib.compress(dumped.encode(), 9)).decode()
    return f'<script type="application/json">{body}</script>'


def text(value: object) -> str:
    """Any text as HTML: escaped, control characters spelled out."""
    return escape(sanitize(str(value)))


def inline_code(value: object) -> str:
    """A sentence as HTML: as `text`, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(value))


_CURVE_WIDTH, _CURVE_HEIGHT, _CURVE_LEFT, _CURVE_RIGHT, _CURVE_TOP, _CURVE_BOTTOM = 1000, 190, 64, 8, 12, 22
_POINTS = 1_200  # of a drawn curve; extremes are kept


def downsample(values: list[int], most: int) -> list[int]:
    """Positions of the first, last, lowest and highest of equal stretches: at most about `most` of them."""
    if len(values) <= most:
        return list(range(len(values)))
    width = -(-len(values) * 4 // most)
    kept: set[int] = set()
    for first in range(0, len(values), width):
        stretch = range(first, min(first + width, len(values)))
        kept |= {first, stretch[-1], min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(kept)


def draw_curve(curve: CurveRow) -> str:
    """The curve of one device (an entry of `memory.curve`): allocated and, where known, reserved bytes."""
    at = downsample(curve["allocated_bytes"], _POINTS)
    times = [curve["time_ns"][k] for k in at]
    allocated = [curve["allocated_bytes"][k] for k in at]
    series: list[tuple[str, Sequence[int | None]]] = [("allocated", allocated)]
    reserved = [curve["reserved_bytes"][k] for k in at]
    if any(reserved):
        series.append(("reserved", reserved))
    sizes = [v for _, values in series for v in values if v is not None]
    highest = max([0, *sizes]) or 1
    # Below zero where blocks from before the recording were freed and what was there at its start is unknown.
    lowest = min([0, *sizes])
    span = max(times[-1] - times[0], 1)

    def x(time: int) -> float:
        return _CURVE_LEFT + (_CURVE_WIDTH - _CURVE_LEFT - _CURVE_RIGHT) * (time - times[0]) / span

    def y(value: int | None) -> float:
        return _CURVE_TOP + (_CURVE_HEIGHT - _CURVE_TOP - _CURVE_BOTTOM) * (highest - (value or 0)) / (highest - lowest)

    paths = ""
    for name, values in reversed(series):  # staircases: a value holds until the next
        corners = [f"M{x(times[0]):.1f} {y(values[0]):.1f}"]
        corners += [f"H{x(time):.1f}V{y(value):.1f}" for time, value in zip(times[1:], values[1:], strict=True)]
        paths += f'<path class="line-{name}" d="{"".join(corners)}"/>'
    marks = "".join(
        f'<line class="mark" x1="{_CURVE_LEFT}" x2="{_CURVE_WIDTH - _CURVE_RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{_CURVE_LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{units.size(v)}</text>'
        for v in ((lowest,) if lowest < -highest // 12 else ()) + (0, highest // 2, highest)
    )
    caption = f"{allocator(curve)}: peak {units.size(max(allocated))} allocated"
    data = {
        "times": times,
        "left": _CURVE_LEFT,
        "right": _CURVE_RIGHT,
        "series": [{"name": n, "values": v} for n, v in series],
    }
    return (
        f'<figure class="curve"><figcaption><span class="curve-says" role="status">{text(caption)}</span></figcaption>'
        f'<svg viewBox="0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}" tabindex="0" role="img" aria-label="{text(caption)} over time">{marks}'
        f'{paths}<text x="{_CURVE_LEFT}" y="{_CURVE_HEIGHT - 4}">{units.duration(times[0])}</text>'
        f'<text x="{_CURVE_WIDTH - _CURVE_RIGHT}" y="{_CURVE_HEIGHT - 4}" text-anchor="end">{units.duration(times[-1])}</text>'
        f'<line class="cursor" y1="{_CURVE_TOP}" y2="{_CURVE_HEIGHT - _CURVE_BOTTOM}"/></svg>'
        f"{embedded_json(data)}</figure>"
    )


class LogAxes:
    """Where values lie on a picture; whole decades are shown.

    Args:
        x: All values to the right, above 0.
        y: All values upwards.
        edges: Of the plane in the picture: left, right, top, bottom.
    """

    def __init__(self, x: Sequence[float], y: Sequence[float], edges: tuple[float, float, float, float]) -> None:
        self._left, self._right, self._top, self._bottom = edges
        self.x_low, self.x_high = _decades(x)
        self.y_low, self.y_high = _decades(y)

    def x(self, value: float) -> float:
        """How far to the right a value lies."""
        return self._left + (self._right - self._left) * (math.log10(value) - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        """How far down a value lies."""
        return self._top + (self._bottom - self._top) * (self.y_high - math.log10(value)) / (self.y_high - self.y_low)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


Node = tuple[int | None, str, int, int, int | None]
"""Place of the parent among the nodes (None for roots), name, calls, host time, GPU time (None: not told)."""

Sides = Mapping[str, tuple[float, float]]
"""Of a node of two runs: `count`, `host` and `device` of the base and of the new run; its times are widths then."""

MEASURES = (("device", "GPU time"), ("host", "Host time"))


def draw_icicle(
    nodes: Sequence[Node], *, label: str, note: str = "", slim: bool = False, sides: Sequence[Sides] = ()
) -> str:
    """The figure of one tree.

    Args:
        nodes: Parents before children.
        label: What it shows, for readers that do not see it.
        note: A sentence below the picture.
        slim: Low boxes, for call stacks.
        sides: Of every node, where two runs are compared: the colour says what changed.
    """
    device = any(node[4] for node in nodes)
    host = any(node[3] for node in nodes)
    measure = "host" if slim and host else "device" if device else "host"
    rows = [
        [-1 if parent is None else parent, sanitize(name), count, ns, gpu if device else None]
        for parent, name, count, ns, gpu in nodes
    ]
    switch = "".join(
        f'<button type="button" data-measure-as="{key}" aria-pressed="{str(key == measure).lower()}">{name}</button>'
        for key, name in MEASURES
    )
    more = f'<p class="quiet">{escape(note)}</p>' if note else ""
    data = {"nodes": rows, "sides": sides} if sides else {"nodes": rows}
    return (
        f'<figure class="{"stacks" if slim else "modules"}" data-measure="{measure}" data-label="{escape(label)}">'
        f'<div class="switch" role="group" aria-label="Width of the boxes">{switch if device else ""}</div>'
        '<div class="icicle"></div><p class="icicle-says quiet" role="status">'
        "Hover or use the arrow keys to read a box; click or Enter to zoom, Escape to go back.</p>"
        f"{embedded_json(data)}{more}</figure>"
    )


_HEAT_MAP_WIDTH, _HEAT_MAP_LEFT, _HEAT_MAP_TOP = 900, 90, 22
_LETTER = 6.4  # width of one, at most but for a few
_MAX_HEAT_MAP_CELLS = 128  # rows or columns; more are no picture any more


def heat_map(
    cells: Mapping[tuple[Any, Any], float],
    rows: Sequence[Any],
    columns: Sequence[Any],
    labels: Mapping[tuple[Any, Any], str],
    *,
    titles: tuple[str, str],
) -> str:
    """An SVG of `cells` (row, column) -> value.

    Args:
        cells: Values; absent ones are left empty.
        rows: Keys from top to bottom.
        columns: Keys from left to right.
        labels: What a cell says on hover.
        titles: What rows and columns are.

    Returns:
        Empty where there is nothing above 0, or where it would be too large to be seen.
    """
    most = max(cells.values(), default=0)
    if most <= 0 or len(rows) > _MAX_HEAT_MAP_CELLS or len(columns) > _MAX_HEAT_MAP_CELLS:
        return ""
    left = max(_HEAT_MAP_LEFT, _LETTER * max(len(str(row)) for row in rows))
    wide = min((_HEAT_MAP_WIDTH - left) / len(columns), 60)
    high = max(min(wide, 22.0), 6.0)
    height = _HEAT_MAP_TOP + high * len(rows) + 20
    caption = f"{titles[0]} by {titles[1]}"
    head = f'<svg viewBox="0 0 {_HEAT_MAP_WIDTH} {height:.0f}" width="100%" role="img" aria-label="{escape(caption)}"'
    out = [
        head + ' font-family="system-ui, sans-serif" font-size="11">',
        f'<text x="0" y="12" fill="currentColor">{escape(titles[0])} ↓ {escape(titles[1])} →</text>',
    ]
    # From the paper to the colour of what is bad, readable on light and dark paper. A cell names its shape: most of the
    # page of a large job would be cells otherwise.
    cell = f"cell-{'-'.join(caption.split())}"
    shape = f'width="{max(wide - 1, 0.5):.1f}" height="{max(high - 1, 0.5):.1f}"'
    out.append(f'<defs><rect id="{cell}" {shape} stroke="var(--line)" stroke-width="0.4"/></defs>')
    label = max(1, round(14 / high))
    for at, row in enumerate(rows):
        top = _HEAT_MAP_TOP + at * high
        if at % label == 0:
            out.append(f'<text x="0" y="{top + high - 2:.1f}" fill="currentColor">{escape(str(row))}</text>')
        out.append(f'<g transform="translate({left:g} {top:.1f})" fill="var(--bad)">')
        for index, column in enumerate(columns):
            value = cells.get((row, column))
            if value is not None:
                part = f"{max(value, 0) / most:.2f}".lstrip("0")
                title = escape(labels.get((row, column), ""))
                out.append(
                    f'<use href="#{cell}" x="{index * wide:.4g}" fill-opacity="{part}"><title>{title}</title></use>'
                )
        out.append("</g>")
    every = max(1, round(34 / wide))
    base = _HEAT_MAP_TOP + len(rows) * high + 13
    out += [
        f'<text x="{left + index * wide:.1f}" y="{base:.1f}" fill="currentColor">{escape(str(columns[index]))}</text>'
        for index in range(0, len(columns), every)
    ]
    return "".join([*out, "</svg>"])


_BLOCKS = " ░▒▓█"


def blocks(value: float, most: float) -> str:
    """One character for a value, for terminals."""
    level = round(4 * value / most) if most > 0 else 0
    return _BLOCKS[min(4, level)] if level > 0 else "·"


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
    plane = LogAxes([point.intensity for point in shown] + ridges, rates, _EDGES)
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


def _grid(plane: LogAxes) -> str:
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


def _roofs(plane: LogAxes, roofs: Sequence[tuple[str, float, float | None]]) -> tuple[str, str]:
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


def _circle(plane: LogAxes, point: RooflinePoint, largest_ns: int) -> str:
    row = point.first
    radius = max(2.5, _LARGEST * math.sqrt(point.total_ns / max(largest_ns, 1)))
    lines = [
        short(sanitize(str(row["name"])), 120),
        short(sanitize(str(row["shapes"])), 160),
        f"{units.duration(point.total_ns)} in {units.count_of(point.call_count, 'call')}",
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


_SCATTER_WIDTH, _SCATTER_HEIGHT = 1000, 460
_SCATTER_LEFT, _SCATTER_RIGHT, _SCATTER_TOP, _SCATTER_BOTTOM = 92, 24, 20, 46
_MAX_SCATTER_POINTS = 300  # points; the rest takes little time and would only cover others
_SCATTER_LARGEST = 18.0  # radius of the op with the most time
_NEAR = 1.1  # ratios up to this, either way, are alike


class ReplayPoint(NamedTuple):
    """An op with its shapes, and the times of all its calls."""

    op: ReplayOpsRow
    recorded_ns: int
    replayed_ns: int


def scatter(ops: Sequence[ReplayOpsRow], *, of_gpu: bool = False) -> str:
    """An SVG with a point for each op and its shapes; empty where none took any time.

    Args:
        ops: Those of all ranks.
        of_gpu: Whether times are those of the GPU work that they launched.
    """
    if of_gpu:
        points = [ReplayPoint(op, op["recorded_gpu_ns"] or 0, op["replayed_gpu_ns"] or 0) for op in ops]
    else:
        points = [ReplayPoint(op, op["recorded_ns"], op["replayed_ns"]) for op in ops]
    timed = [point for point in points if point.recorded_ns > 0 and point.replayed_ns > 0]
    shown = sorted(timed, key=lambda point: -point.recorded_ns - point.replayed_ns)[:_MAX_SCATTER_POINTS]
    if not shown:
        return ""
    every = [ns / point.op["calls"] for point in shown for ns in (point.recorded_ns, point.replayed_ns)]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return _SCATTER_LEFT + (_SCATTER_WIDTH - _SCATTER_LEFT - _SCATTER_RIGHT) * (math.log10(value) - low) / (
            high - low
        )

    def y(value: float) -> float:
        return _SCATTER_TOP + (_SCATTER_HEIGHT - _SCATTER_TOP - _SCATTER_BOTTOM) * (high - math.log10(value)) / (
            high - low
        )

    parts = []
    for power in range(low, high + 1):
        at, name = 10.0**power, units.duration(10**power)
        parts.append(
            f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_SCATTER_TOP}" y2="{_SCATTER_HEIGHT - _SCATTER_BOTTOM}"/>'
        )
        parts.append(
            f'<line class="mark" x1="{_SCATTER_LEFT}" x2="{_SCATTER_WIDTH - _SCATTER_RIGHT}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>'
        )
        parts.append(
            f'<text x="{x(at):.1f}" y="{_SCATTER_HEIGHT - _SCATTER_BOTTOM + 18}" text-anchor="middle">{name}</text>'
        )
        parts.append(f'<text x="{_SCATTER_LEFT - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{name}</text>')
    ends = (10.0**low, 10.0**high)
    parts.append(f'<path class="roof" d="M{x(ends[0]):.1f} {y(ends[0]):.1f}L{x(ends[1]):.1f} {y(ends[1]):.1f}"/>')
    middle = (_SCATTER_LEFT + _SCATTER_WIDTH - _SCATTER_RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_SCATTER_HEIGHT - 8}" text-anchor="middle">recorded, one call</text>')
    parts.append(f'<text x="{_SCATTER_LEFT + 6}" y="{_SCATTER_TOP + 12}">replayed, one call</text>')
    most = max(point.recorded_ns for point in shown)
    for point in shown:
        op, calls = point.op, point.op["calls"]
        recorded, replayed = point.recorded_ns / calls, point.replayed_ns / calls
        ratio = replayed / recorded
        look = "slower" if ratio > _NEAR else "faster" if ratio < 1 / _NEAR else "alike"
        times = f"{units.duration(round(recorded))} recorded, {units.duration(round(replayed))} replayed"
        named = f"{short(sanitize(op['name']), 80)} {short(sanitize(op['shapes']), 120)}"
        label = f"{named}: {times}, {ratio:.2f} times; {units.count_of(calls, 'call')}"
        radius = max(2.5, _SCATTER_LARGEST * math.sqrt(point.recorded_ns / most))
        parts.append(
            f'<circle class="{look}" cx="{x(recorded):.1f}" cy="{y(replayed):.1f}" r="{radius:.1f}">'
            f"<title>{escape(label)}</title></circle>"
        )
    caption = (
        f"{units.count_of(len(shown), 'op')} by name and shapes: what a call took when replayed, over what it took"
    )
    left_out = len(timed) - len(shown)
    more = f"; {units.count(left_out)} that took least are not drawn" if left_out else ""
    hint = "The larger a point, the more recorded time; on the line both took as long."
    return (
        f'<figure class="roofline scatter"><figcaption>{escape(caption + more)}. {hint}</figcaption>'
        f'<svg viewBox="0 0 {_SCATTER_WIDTH} {_SCATTER_HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def bar(parts: Iterable[tuple[str, str, int]], whole: int, longest: int | None = None) -> str:
    """An SVG of one stacked bar.

    Args:
        parts: (label, colour group, nanoseconds), from left to right.
        whole: What the parts are shares of.
        longest: Length of the longest bar of the picture; the width is relative to it. None: full width.
    """
    scale = 1000 / max(longest or whole, 1)
    left, boxes, words = 0.0, [], []
    for label, colour, ns in parts:
        width = ns * scale
        title = text(f"{label} {units.duration(ns)} ({units.share(ns, whole)})")
        words.append(title)
        if width > 0:
            boxes.append(
                f'<rect class="f-{colour}" x="{left:.2f}" width="{width:.2f}" height="1"><title>{title}</title></rect>'
            )
        left += width
    return (
        '<svg class="stack" viewBox="0 0 1000 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{"; ".join(words)}">{"".join(boxes)}</svg>'
    )


def legend(parts: Iterable[tuple[str, str, int]], whole: int) -> str:
    """The parts as a list with their colours, times and shares."""
    items = "".join(
        f'<li><i class="swatch b-{colour}"></i><span>{text(label)}</span> '
        f'<b>{text(units.share(ns, whole))}</b> <span class="quiet">{units.duration(ns)}</span></li>'
        for label, colour, ns in parts
        if ns
    )
    return f'<ul class="legend">{items}</ul>'


# From the ground up: what stays stands below what comes and goes. Each kind has one colour wherever it is drawn.
COLOURS = {
    "parameter": "compute",
    "buffer": "op",
    "optimizer_state": "optimizer",
    "before_recording": "other",
    "gradient": "backward",
    "unknown": "idle",
    "input": "loading",
    "activation": "memory",
    "temporary": "communication",
    "autograd_detail": "annotation",
}
_FRAME = " < "
_LONGEST = 200  # characters of a name in the page


def figure(curve: MemoryCurveRow, steps: list[MemoryRankStepsRow], *, label: str, chosen_ns: int | None = None) -> str:
    """One memory over time; the page without scripts shows the tables alone.

    Args:
        curve: Its levels.
        steps: The document's `steps` of the rank.
        label: What the figure is about, for readers that do not see it.
        chosen_ns: The instant that is shown first; None for the peak.
    """
    totals = [sum(values) for values in zip(*(kind["bytes"] for kind in curve["categories"]), strict=True)]
    if not totals:
        return ""
    peak = totals.index(max(totals))
    chosen = peak if chosen_ns is None else max(bisect_right(curve["time_ns"], chosen_ns) - 1, 0)
    order = list(COLOURS)
    kinds = sorted(curve["categories"], key=lambda kind: order.index(kind["name"]) if kind["name"] in order else 99)
    # Levels of the paths of scopes and stacks: names once, and each path as their numbers from the root
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(sanitize(name[:_LONGEST]), len(names))

    trees = {
        "scopes": [
            [[number(part) for part in level["name"].split(".")], changes(level["bytes"])] for level in curve["scopes"]
        ]
    }
    if curve["stacks"]:
        trees["stacks"] = [
            [[number(frame) for frame in reversed(level["name"].split(_FRAME))], changes(level["bytes"])]
            for level in curve["stacks"]
        ]
    data = {
        "times": curve["time_ns"],
        "peak": peak,
        "chosen": chosen,
        "steps": [[row["step"], row["start_ns"], row["end_ns"]] for row in steps],
        "kinds": [
            [kind["name"].replace("_", " "), COLOURS.get(kind["name"], "idle"), changes(kind["bytes"])]
            for kind in kinds
        ],
        "trees": {"names": list(names), **trees},
    }
    tell = f"peak {units.size(totals[peak])} at {units.duration(curve['time_ns'][peak])}"
    views = "".join(
        f'<button type="button" data-tree="{key}" aria-pressed="{str(key == "scopes").lower()}">{name}</button>'
        for key, name in (("scopes", "By scope"), ("stacks", "By Python stack"))
        if key in trees
    )
    return (
        f'<figure class="owners" data-label="{escape(sanitize(label))}">'
        '<div class="owners-head"><p class="owners-says" role="status">'
        f'{escape(tell)}</p><div class="switch" role="group" aria-label="Layers of the curve">'
        '<button type="button" data-layers="kinds" aria-pressed="true">By category</button>'
        '<button type="button" data-layers="scopes" aria-pressed="false">By scope</button>'
        '<button type="button" data-peak>Peak</button></div></div>'
        '<div class="areas" tabindex="0" role="slider" aria-orientation="horizontal"></div>'
        '<ul class="legend"></ul>'
        '<div class="holders" data-measure="bytes" data-label="Who holds what at the chosen instant">'
        f'<div class="switch" role="group" aria-label="What the boxes are">{views if "stacks" in trees else ""}'
        '</div><div class="icicle"></div><p class="icicle-says quiet" role="status">Click the curve, or use the arrow '
        "keys on it, to choose an instant. Hover or use the arrow keys to read a box; click or Enter to zoom, Escape "
        f"to go back.</p></div>{embedded_json(data)}</figure>"
    )


def changes(levels: list[int]) -> list[int]:
    """A curve as pairs (instants since the last change, change of the level), one list; most levels rest mostly."""
    out, last = [], 0
    for at, (before, after) in enumerate(pairwise([0, *levels])):
        if after != before:
            out += [at - last, after - before]
            last = at
    return out
