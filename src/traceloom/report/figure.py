"""Draws figures as SVG: bars, curves, scatter plots on log axes, heat maps, icicles."""

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

from traceloom.report.labels import fit_name, format_memory_name
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.session import FRAME_SEPARATOR

if TYPE_CHECKING:
    from traceloom.report.documents.memory import MemoryCurveRow, MemoryRankStepsRow
    from traceloom.report.documents.replay import ReplayOpsRow
    from traceloom.report.documents.report import CurveRow
    from traceloom.report.documents.sections import RooflineOperatorsRow


_MIN_PACKED_CHARS = 1_000  # characters of JSON above which compression pays off


def render_json_script(value: Any) -> str:
    """Returns a script element that holds a JSON object, safe for any names in it; `readIsland` of
    `unpack.js` reads it.
    """
    dumped = json.dumps(
        value, separators=(",", ":")
    )  # ASCII, so U+2028 and U+2029 are escaped already
    if len(dumped) < _MIN_PACKED_CHARS:
        body = dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    else:
        body = base64.b64encode(zlib.compress(dumped.encode(), 9)).decode()
    return f'<script type="application/json">{body}</script>'


def escape_html(value: object) -> str:
    """Escapes any text as HTML; control characters are spelled out."""
    return escape(sanitize(str(value)))


def render_inline_code(value: object) -> str:
    """Escapes a sentence as HTML, with text between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape_html(value))


_CURVE_WIDTH, _CURVE_HEIGHT, _CURVE_LEFT, _CURVE_RIGHT, _CURVE_TOP, _CURVE_BOTTOM = (
    1000,
    190,
    64,
    8,
    12,
    22,
)
_MAX_CURVE_POINTS = 1_200  # of a drawn curve; extremes are kept


def downsample(values: list[int], limit: int) -> list[int]:
    """Returns positions of the first, last, lowest and highest value of equal stretches: about
    `limit` at most.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    width = -(-len(values) * 4 // limit)
    retained: set[int] = set()
    for first in range(0, len(values), width):
        segment = range(first, min(first + width, len(values)))
        retained |= {
            first,
            segment[-1],
            min(segment, key=values.__getitem__),
            max(segment, key=values.__getitem__),
        }
    return sorted(retained)


def draw_curve(curve: CurveRow) -> str:
    """Draws the curve of one device (an entry of `memory.curve`): allocated and, where known,
    reserved bytes.
    """
    positions = downsample(curve["allocated_bytes"], _MAX_CURVE_POINTS)
    times = [curve["time_ns"][k] for k in positions]
    allocated = [curve["allocated_bytes"][k] for k in positions]
    series: list[tuple[str, Sequence[int | None]]] = [("allocated", allocated)]
    reserved = [curve["reserved_bytes"][k] for k in positions]
    if any(reserved):
        series.append(("reserved", reserved))
    sizes = [v for _, values in series for v in values if v is not None]
    highest = max([0, *sizes]) or 1
    # Negative where blocks from before the recording were freed and the initial level is unknown.
    lowest = min([0, *sizes])
    span = max(times[-1] - times[0], 1)

    def x(time: int) -> float:
        return _CURVE_LEFT + (_CURVE_WIDTH - _CURVE_LEFT - _CURVE_RIGHT) * (time - times[0]) / span

    def y(value: int | None) -> float:
        return _CURVE_TOP + (_CURVE_HEIGHT - _CURVE_TOP - _CURVE_BOTTOM) * (
            highest - (value or 0)
        ) / (highest - lowest)

    paths = ""
    for name, values in reversed(series):  # step curves: a value holds until the next
        corners = [f"M{x(times[0]):.1f} {y(values[0]):.1f}"]
        corners += [
            f"H{x(time):.1f}V{y(value):.1f}"
            for time, value in zip(times[1:], values[1:], strict=True)
        ]
        paths += f'<path class="line-{name}" d="{"".join(corners)}"/>'
    marks = "".join(
        f'<line class="mark" x1="{_CURVE_LEFT}" x2="{_CURVE_WIDTH - _CURVE_RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{_CURVE_LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{units.format_size(v)}</text>'
        for v in ((lowest,) if lowest < -highest // 12 else ()) + (0, highest // 2, highest)
    )
    caption = f"{format_memory_name(curve)}: peak {units.format_size(max(allocated))} allocated"
    data = {
        "times": times,
        "left": _CURVE_LEFT,
        "right": _CURVE_RIGHT,
        "series": [{"name": n, "values": v} for n, v in series],
    }
    return (
        f'<figure class="curve"><figcaption><span class="curve-says" role="status">{escape_html(caption)}</span></figcaption>'
        f'<svg viewBox="0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}" tabindex="0" role="img" aria-label="{escape_html(caption)} over time">{marks}'
        f'{paths}<text x="{_CURVE_LEFT}" y="{_CURVE_HEIGHT - 4}">{units.format_duration(times[0])}</text>'
        f'<text x="{_CURVE_WIDTH - _CURVE_RIGHT}" y="{_CURVE_HEIGHT - 4}" text-anchor="end">{units.format_duration(times[-1])}</text>'
        f'<line class="cursor" y1="{_CURVE_TOP}" y2="{_CURVE_HEIGHT - _CURVE_BOTTOM}"/></svg>'
        f"{render_json_script(data)}</figure>"
    )


class LogAxes:
    """Positions of values in a figure with log axes that show whole decades.

    Args:
        x: All values of the horizontal axis, above 0.
        y: All values of the vertical axis.
        edges: Edges of the plot area: left, right, top, bottom.
    """

    def __init__(
        self, x: Sequence[float], y: Sequence[float], edges: tuple[float, float, float, float]
    ) -> None:
        self._left, self._right, self._top, self._bottom = edges
        self.x_low, self.x_high = _find_decades(x)
        self.y_low, self.y_high = _find_decades(y)

    def x(self, value: float) -> float:
        return self._left + (self._right - self._left) * (math.log10(value) - self.x_low) / (
            self.x_high - self.x_low
        )

    def y(self, value: float) -> float:
        """Returns the vertical position of a value, from the top."""
        return self._top + (self._bottom - self._top) * (self.y_high - math.log10(value)) / (
            self.y_high - self.y_low
        )


def _find_decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


IcicleNode = tuple[int | None, str, int, int, int | None]
"""Index of the parent among the nodes (None for roots), name, calls, host time, GPU time (None: not
measured).
"""

SideTimes = Mapping[str, tuple[float, float]]
"""Of a node of two runs: `count`, `host` and `device` of the base and of the new run; these times
are then the widths.
"""

MEASURES = (("device", "GPU time"), ("host", "Host time"))


def draw_icicle(
    nodes: Sequence[IcicleNode],
    *,
    label: str,
    note: str = "",
    slim: bool = False,
    sides: Sequence[SideTimes] = (),
) -> str:
    """Draws the figure of one tree.

    Args:
        nodes: Parents before children.
        label: Description for screen readers.
        note: A sentence below the figure.
        slim: Low boxes, for call stacks.
        sides: For every node, if two runs are compared: the colour shows the change.
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
    note_html = f'<p class="quiet">{escape(note)}</p>' if note else ""
    data = {"nodes": rows, "sides": sides} if sides else {"nodes": rows}
    return (
        f'<figure class="{"stacks" if slim else "modules"}" data-measure="{measure}" data-label="{escape(label)}">'
        f'<div class="switch" role="group" aria-label="Width of the boxes">{switch if device else ""}</div>'
        '<div class="icicle"></div><p class="icicle-says quiet" role="status">'
        "Hover or use the arrow keys to read a box; click or Enter to zoom, Escape to go back.</p>"
        f"{render_json_script(data)}{note_html}</figure>"
    )


_HEAT_MAP_WIDTH, _HEAT_MAP_LEFT, _HEAT_MAP_TOP = 900, 90, 22
_LETTER_WIDTH = 6.4  # width of a character; few are wider
_MAX_HEAT_MAP_CELLS = 128  # rows or columns; more are not legible


def draw_heat_map(
    cells: Mapping[tuple[Any, Any], float],
    rows: Sequence[Any],
    columns: Sequence[Any],
    labels: Mapping[tuple[Any, Any], str],
    *,
    titles: tuple[str, str],
) -> str:
    """Draws an SVG of `cells` (row, column) -> value.

    Args:
        cells: Values; absent ones are left empty.
        rows: Keys from top to bottom.
        columns: Keys from left to right.
        labels: Texts of cells on hover.
        titles: Titles of rows and columns.

    Returns:
        Empty where no value is above 0, or where it would be too large to be legible.
    """
    max_value = max(cells.values(), default=0)
    if max_value <= 0 or len(rows) > _MAX_HEAT_MAP_CELLS or len(columns) > _MAX_HEAT_MAP_CELLS:
        return ""
    left_margin = max(_HEAT_MAP_LEFT, _LETTER_WIDTH * max(len(str(row)) for row in rows))
    wide = min((_HEAT_MAP_WIDTH - left_margin) / len(columns), 60)
    high = max(min(wide, 22.0), 6.0)
    height = _HEAT_MAP_TOP + high * len(rows) + 20
    caption = f"{titles[0]} by {titles[1]}"
    head = f'<svg viewBox="0 0 {_HEAT_MAP_WIDTH} {height:.0f}" width="100%" role="img" aria-label="{escape(caption)}"'
    out = [
        head + ' font-family="system-ui, sans-serif" font-size="11">',
        f'<text x="0" y="12" fill="currentColor">{escape(titles[0])} ↓ {escape(titles[1])} →</text>',
    ]
    # From the background to the colour for bad values, readable on light and dark backgrounds. A
    # cell refers to a shared shape: most of the page of a large job would be cells otherwise.
    cell = f"cell-{'-'.join(caption.split())}"
    shape = f'width="{max(wide - 1, 0.5):.1f}" height="{max(high - 1, 0.5):.1f}"'
    out.append(f'<defs><rect id="{cell}" {shape} stroke="var(--line)" stroke-width="0.4"/></defs>')
    label = max(1, round(14 / high))
    for row_index, row in enumerate(rows):
        top = _HEAT_MAP_TOP + row_index * high
        if row_index % label == 0:
            out.append(
                f'<text x="0" y="{top + high - 2:.1f}" fill="currentColor">{escape(str(row))}</text>'
            )
        out.append(f'<g transform="translate({left_margin:g} {top:.1f})" fill="var(--bad)">')
        for index, column in enumerate(columns):
            value = cells.get((row, column))
            if value is not None:
                part = f"{max(value, 0) / max_value:.2f}".lstrip("0")
                title = escape(labels.get((row, column), ""))
                out.append(
                    f'<use href="#{cell}" x="{index * wide:.4g}" fill-opacity="{part}"><title>{title}</title></use>'
                )
        out.append("</g>")
    label_interval = max(1, round(34 / wide))
    base = _HEAT_MAP_TOP + len(rows) * high + 13
    out += [
        f'<text x="{left_margin + index * wide:.1f}" y="{base:.1f}" fill="currentColor">{escape(str(columns[index]))}</text>'
        for index in range(0, len(columns), label_interval)
    ]
    return "".join([*out, "</svg>"])


_BLOCKS = " ░▒▓█"


def pick_block_character(value: float, max_value: float) -> str:
    level = round(4 * value / max_value) if max_value > 0 else 0
    return _BLOCKS[min(4, level)] if level > 0 else "·"


_WIDTH, _HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 20, 46
_PLOT_EDGES = (_LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM)
_MAX_ROOFLINE_POINTS = 200  # points; the others take little time and would only cover these
_LINE_HEIGHT = 12  # height of a line of text
_MAX_RADIUS = 22.0  # radius of the operator with the most time


class RooflinePoint(NamedTuple):
    """An operator with equal shapes and the same bound, on one or several ranks: times and calls
    are sums.
    """

    first: RooflineOperatorsRow  # for the values that all rows share
    rank_count: int
    call_count: int
    total_ns: int
    intensity: float
    flop_rate: float  # of all rows together
    fractions: tuple[float, float] | None  # of the roofline, min and max

    @classmethod
    def of(cls, rows: list[RooflineOperatorsRow]) -> RooflinePoint:
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


def draw_roofline(operators: Sequence[RooflineOperatorsRow]) -> str:
    """Draws the SVG of the operators of a roofline; empty where none has a known FLOP count and
    time.

    Args:
        operators: The operators of all ranks.
    """
    points = [
        RooflinePoint.of(rows)
        for rows in _group_operators([o for o in operators if o["intensity"] and o["flop_rate"]])
    ]
    visible = sorted(points, key=lambda point: -point.total_ns)[:_MAX_ROOFLINE_POINTS]
    if not visible:
        return ""
    # (label, FLOP/s, bytes/s) of every peak that a displayed operator is compared with, the highest
    # first
    peaks: dict[tuple[float, float | None], set[str]] = {}
    for row in (point.first for point in visible):
        if row["peak_flop_rate"]:
            name = str(row["arithmetic"]) if row["matrix"] else "vector units"
            peaks.setdefault((row["peak_flop_rate"], row["peak_byte_rate"]), set()).add(name)
    roofs = [
        (", ".join(sorted(peaks[key])), *key) for key in sorted(peaks, key=lambda key: -key[0])
    ]
    rates = [point.flop_rate for point in visible] + [rate for _, rate, _ in roofs]
    ridges = [rate / memory for _, rate, memory in roofs if memory]
    plane = LogAxes([point.intensity for point in visible] + ridges, rates, _PLOT_EDGES)
    lines, names = _draw_roofs(plane, roofs)
    circles = "".join(_draw_circle(plane, point, visible[0].total_ns) for point in visible)
    caption = f"{units.format_count(len(visible))} operators: achieved FLOP/s over FLOPs per byte of memory traffic"
    omitted = len(_group_operators(operators)) - len(visible)
    omitted_note = (
        f"; {units.format_count(omitted)} that only move data, or take least time, are not drawn"
        if omitted
        else ""
    )
    hint = (
        " The larger a point, the more time; dashed lines are the peaks."
        if roofs
        else " The peaks are not known."
    )
    return (
        f'<figure class="roofline"><figcaption>{escape(caption + omitted_note)}.{hint}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{_draw_grid(plane)}{lines}{circles}{names}</svg></figure>"
    )


def _group_operators(operators: Sequence[RooflineOperatorsRow]) -> list[list[RooflineOperatorsRow]]:
    """Groups the rows of all ranks by operator, shapes and bound."""
    alike: dict[tuple[object, ...], list[RooflineOperatorsRow]] = {}
    for row in operators:
        key = (row["name"], row["shapes"], row["arithmetic"], row["matrix"], row["bound"])
        alike.setdefault(key, []).append(row)
    return list(alike.values())


def _draw_grid(plane: LogAxes) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for power in range(plane.x_low, plane.x_high + 1):
        x = plane.x(10.0**power)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_format_power(power)}</text>'
        )
    prefixes = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
    for power in range(plane.y_low, plane.y_high + 1):
        y = plane.y(10.0**power)
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        base = max(0, min(18, power // 3 * 3))
        label = f"{_format_power(power - base)}\u00a0{prefixes[base]}FLOP/s"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">FLOPs per byte</text>'
    )
    return "".join(parts)


def _format_power(power: int) -> str:
    return f"{10**power:,}".replace(",", "\u202f") if power >= 0 else f"{10.0**power:.{-power}f}"


def _draw_roofs(
    plane: LogAxes, roofs: Sequence[tuple[str, float, float | None]]
) -> tuple[str, str]:
    """Draws memory limits from the left, each arithmetic limit from its ridge to the right; and
    their names.
    """
    lines, names = [], []
    right, low, high = 10.0**plane.x_high, 10.0**plane.x_low, 10.0**plane.y_low
    for memory in sorted({memory for _, _, memory in roofs if memory}):
        top = max(rate for _, rate, memory_rate in roofs if memory_rate == memory)
        start, end = max(low, high / memory), min(right, top / memory)
        if end > start:
            line = f"M{plane.x(start):.1f} {plane.y(start * memory):.1f}L{plane.x(end):.1f} {plane.y(end * memory):.1f}"
            lines.append(f'<path class="roof" d="{line}"/>')
            middle = math.sqrt(start * end)
            position = f'x="{plane.x(middle) + 10:.1f}" y="{plane.y(middle * memory) + 14:.1f}"'
            names.append(
                f'<text class="roof-name" {position}>memory {units.format_byte_rate(memory)}</text>'
            )
    last = -math.inf
    for label, rate, memory_bandwidth in roofs:
        start = max(low, rate / memory_bandwidth) if memory_bandwidth else low
        y = plane.y(rate)
        name = escape(f"{label} {units.format_flop_rate(rate)}")
        path = f"M{plane.x(min(start, right)):.1f} {y:.1f}H{_WIDTH - _RIGHT}"
        lines.append(f'<path class="roof" d="{path}"><title>{name}</title></path>')
        if y - last > _LINE_HEIGHT:  # names that would overlap appear on hover only
            position = f'x="{_WIDTH - _RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end"'
            names.append(f'<text class="roof-name" {position}>{name}</text>')
            last = y
    return "".join(lines), "".join(names)


def _draw_circle(plane: LogAxes, point: RooflinePoint, largest_ns: int) -> str:
    row = point.first
    radius = max(2.5, _MAX_RADIUS * math.sqrt(point.total_ns / max(largest_ns, 1)))
    lines = [
        fit_name(sanitize(str(row["name"])), 120),
        fit_name(sanitize(str(row["shapes"])), 160),
        f"{units.format_duration(point.total_ns)} in {units.format_quantity(point.call_count, 'call')}",
        f"{units.format_flop_rate(point.flop_rate)}, {units.format_number(point.intensity)} FLOPs per byte",
    ]
    if point.rank_count > 1:
        lines.append(f"on {point.rank_count} ranks")
    if point.fractions is not None:
        low, high = (f"{100 * fraction:.1f}" for fraction in point.fractions)
        lines.append(
            f"{low if low == high else f'{low} to {high}'} % of the roofline, bound by {row['bound']}"
        )
    label = escape("\n".join(lines))
    return (
        f'<circle class="at-{row["bound"] or "unknown"}" cx="{plane.x(point.intensity):.1f}" '
        f'cy="{plane.y(point.flop_rate):.1f}" r="{radius:.1f}"><title>{label}</title></circle>'
    )


_SCATTER_WIDTH, _SCATTER_HEIGHT = 1000, 460
_SCATTER_LEFT, _SCATTER_RIGHT, _SCATTER_TOP, _SCATTER_BOTTOM = 92, 24, 20, 46
_MAX_SCATTER_POINTS = 300  # points; the others take little time and would only cover these
_MAX_SCATTER_RADIUS = 18.0  # radius of the op with the most time
_SIMILAR_RATIO = 1.1  # ratios up to this, in either direction, count as equal


class ReplayPoint(NamedTuple):
    """An op with its shapes, and the times of all its calls."""

    op: ReplayOpsRow
    recorded_ns: int
    replayed_ns: int


def draw_scatter(ops: Sequence[ReplayOpsRow], *, gpu_times: bool = False) -> str:
    """Draws an SVG with a point for each op and its shapes; empty where none took any time.

    Args:
        ops: The ops of all ranks.
        gpu_times: Whether times are those of the launched GPU work.
    """
    if gpu_times:
        points = [
            ReplayPoint(op, op["recorded_gpu_ns"] or 0, op["replayed_gpu_ns"] or 0) for op in ops
        ]
    else:
        points = [ReplayPoint(op, op["recorded_ns"], op["replayed_ns"]) for op in ops]
    timed_points = [point for point in points if point.recorded_ns > 0 and point.replayed_ns > 0]
    visible = sorted(timed_points, key=lambda point: -point.recorded_ns - point.replayed_ns)[
        :_MAX_SCATTER_POINTS
    ]
    if not visible:
        return ""
    call_times = [
        ns / point.op["calls"] for point in visible for ns in (point.recorded_ns, point.replayed_ns)
    ]
    low, high = math.floor(math.log10(min(call_times))), math.ceil(math.log10(max(call_times)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return _SCATTER_LEFT + (_SCATTER_WIDTH - _SCATTER_LEFT - _SCATTER_RIGHT) * (
            math.log10(value) - low
        ) / (high - low)

    def y(value: float) -> float:
        return _SCATTER_TOP + (_SCATTER_HEIGHT - _SCATTER_TOP - _SCATTER_BOTTOM) * (
            high - math.log10(value)
        ) / (high - low)

    parts = []
    for power in range(low, high + 1):
        tick_ns, name = 10.0**power, units.format_duration(10**power)
        parts.append(
            f'<line class="mark" x1="{x(tick_ns):.1f}" x2="{x(tick_ns):.1f}" y1="{_SCATTER_TOP}" y2="{_SCATTER_HEIGHT - _SCATTER_BOTTOM}"/>'
        )
        parts.append(
            f'<line class="mark" x1="{_SCATTER_LEFT}" x2="{_SCATTER_WIDTH - _SCATTER_RIGHT}" y1="{y(tick_ns):.1f}" y2="{y(tick_ns):.1f}"/>'
        )
        parts.append(
            f'<text x="{x(tick_ns):.1f}" y="{_SCATTER_HEIGHT - _SCATTER_BOTTOM + 18}" text-anchor="middle">{name}</text>'
        )
        parts.append(
            f'<text x="{_SCATTER_LEFT - 8}" y="{y(tick_ns) + 4:.1f}" text-anchor="end">{name}</text>'
        )
    diagonal_ends = (10.0**low, 10.0**high)
    parts.append(
        f'<path class="roof" d="M{x(diagonal_ends[0]):.1f} {y(diagonal_ends[0]):.1f}L{x(diagonal_ends[1]):.1f} {y(diagonal_ends[1]):.1f}"/>'
    )
    middle = (_SCATTER_LEFT + _SCATTER_WIDTH - _SCATTER_RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_SCATTER_HEIGHT - 8}" text-anchor="middle">recorded, one call</text>'
    )
    parts.append(f'<text x="{_SCATTER_LEFT + 6}" y="{_SCATTER_TOP + 12}">replayed, one call</text>')
    max_ns = max(point.recorded_ns for point in visible)
    for point in visible:
        op, calls = point.op, point.op["calls"]
        recorded, replayed = point.recorded_ns / calls, point.replayed_ns / calls
        ratio = replayed / recorded
        css_class = (
            "slower"
            if ratio > _SIMILAR_RATIO
            else "faster"
            if ratio < 1 / _SIMILAR_RATIO
            else "alike"
        )
        times = f"{units.format_duration(round(recorded))} recorded, {units.format_duration(round(replayed))} replayed"
        title = f"{fit_name(sanitize(op['name']), 80)} {fit_name(sanitize(op['shapes']), 120)}"
        label = f"{title}: {times}, {ratio:.2f} times; {units.format_quantity(calls, 'call')}"
        radius = max(2.5, _MAX_SCATTER_RADIUS * math.sqrt(point.recorded_ns / max_ns))
        parts.append(
            f'<circle class="{css_class}" cx="{x(recorded):.1f}" cy="{y(replayed):.1f}" r="{radius:.1f}">'
            f"<title>{escape(label)}</title></circle>"
        )
    caption = f"{units.format_quantity(len(visible), 'op')} by name and shapes: what a call took when replayed, over what it took"
    omitted = len(timed_points) - len(visible)
    omitted_note = (
        f"; {units.format_count(omitted)} that took least are not drawn" if omitted else ""
    )
    hint = "The larger a point, the more recorded time; on the line both took as long."
    return (
        f'<figure class="roofline scatter"><figcaption>{escape(caption + omitted_note)}. {hint}</figcaption>'
        f'<svg viewBox="0 0 {_SCATTER_WIDTH} {_SCATTER_HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def draw_stacked_bar(
    parts: Iterable[tuple[str, str, int]], total_ns: int, longest: int | None = None
) -> str:
    """Draws one stacked bar as SVG.

    Args:
        parts: (label, colour group, nanoseconds), from left to right.
        total_ns: The total of which the parts are shares.
        longest: Length of the longest bar of the figure; the width is relative to it. None: full
            width.
    """
    scale = 1000 / max(longest or total_ns, 1)
    offset, boxes, titles = 0.0, [], []
    for label, colour, ns in parts:
        width = ns * scale
        title = escape_html(
            f"{label} {units.format_duration(ns)} ({units.format_share(ns, total_ns)})"
        )
        titles.append(title)
        if width > 0:
            boxes.append(
                f'<rect class="f-{colour}" x="{offset:.2f}" width="{width:.2f}" height="1"><title>{title}</title></rect>'
            )
        offset += width
    return (
        '<svg class="stack" viewBox="0 0 1000 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{"; ".join(titles)}">{"".join(boxes)}</svg>'
    )


def render_legend(parts: Iterable[tuple[str, str, int]], total_ns: int) -> str:
    """Renders the parts as a list with their colours, times and shares."""
    items = "".join(
        f'<li><i class="swatch b-{colour}"></i><span>{escape_html(label)}</span> '
        f'<b>{escape_html(units.format_share(ns, total_ns))}</b> <span class="quiet">{units.format_duration(ns)}</span></li>'
        for label, colour, ns in parts
        if ns
    )
    return f'<ul class="legend">{items}</ul>'


# From the bottom: persistent kinds are below temporary ones. Each kind has one colour in all
# figures.
CATEGORY_COLOURS = {
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
_MAX_NAME_CHARS = 200  # characters of a name in the page


def render_memory_figure(
    curve: MemoryCurveRow,
    steps: list[MemoryRankStepsRow],
    *,
    label: str,
    chosen_ns: int | None = None,
) -> str:
    """Renders one memory over time; without scripts the page shows only the tables.

    Args:
        curve: Its levels.
        steps: The document's `steps` of the rank.
        label: Description for screen readers.
        chosen_ns: The instant that is selected first; None for the peak.
    """
    totals = [
        sum(values) for values in zip(*(kind["bytes"] for kind in curve["categories"]), strict=True)
    ]
    if not totals:
        return ""
    peak = totals.index(max(totals))
    selected = peak if chosen_ns is None else max(bisect_right(curve["time_ns"], chosen_ns) - 1, 0)
    order = list(CATEGORY_COLOURS)
    kinds = sorted(
        curve["categories"],
        key=lambda kind: order.index(kind["name"]) if kind["name"] in order else 99,
    )
    # Encode paths of scopes and stacks: each name once, and each path as numbers from the root.
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(sanitize(name[:_MAX_NAME_CHARS]), len(names))

    trees = {
        "scopes": [
            [
                [number(part) for part in level["name"].split(".")],
                encode_level_changes(level["bytes"]),
            ]
            for level in curve["scopes"]
        ]
    }
    if curve["stacks"]:
        trees["stacks"] = [
            [
                [number(frame) for frame in reversed(level["name"].split(FRAME_SEPARATOR))],
                encode_level_changes(level["bytes"]),
            ]
            for level in curve["stacks"]
        ]
    data = {
        "times": curve["time_ns"],
        "peak": peak,
        "chosen": selected,
        "steps": [[row["step"], row["start_ns"], row["end_ns"]] for row in steps],
        "kinds": [
            [
                kind["name"].replace("_", " "),
                CATEGORY_COLOURS.get(kind["name"], "idle"),
                encode_level_changes(kind["bytes"]),
            ]
            for kind in kinds
        ],
        "trees": {"names": list(names), **trees},
    }
    caption = (
        f"peak {units.format_size(totals[peak])} at {units.format_duration(curve['time_ns'][peak])}"
    )
    views = "".join(
        f'<button type="button" data-tree="{key}" aria-pressed="{str(key == "scopes").lower()}">{name}</button>'
        for key, name in (("scopes", "By scope"), ("stacks", "By Python stack"))
        if key in trees
    )
    return (
        f'<figure class="owners" data-label="{escape(sanitize(label))}">'
        '<div class="owners-head"><p class="owners-says" role="status">'
        f'{escape(caption)}</p><div class="switch" role="group" aria-label="Layers of the curve">'
        '<button type="button" data-layers="kinds" aria-pressed="true">By category</button>'
        '<button type="button" data-layers="scopes" aria-pressed="false">By scope</button>'
        '<button type="button" data-peak>Peak</button></div></div>'
        '<div class="areas" tabindex="0" role="slider" aria-orientation="horizontal"></div>'
        '<ul class="legend"></ul>'
        '<div class="holders" data-measure="bytes" data-label="Who holds what at the chosen instant">'
        f'<div class="switch" role="group" aria-label="What the boxes are">{views if "stacks" in trees else ""}'
        '</div><div class="icicle"></div><p class="icicle-says quiet" role="status">Click the curve, or use the arrow '
        "keys on it, to choose an instant. Hover or use the arrow keys to read a box; click or Enter to zoom, Escape "
        f"to go back.</p></div>{render_json_script(data)}</figure>"
    )


def encode_level_changes(levels: list[int]) -> list[int]:
    """Encodes a curve as a flat list of pairs (instants since the last change, change of the
    level); most levels rarely change.
    """
    out, last = [], 0
    for index, (before, after) in enumerate(pairwise([0, *levels])):
        if after != before:
            out += [index - last, after - before]
            last = index
    return out
