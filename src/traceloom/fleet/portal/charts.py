"""Charts of pages: dots over time, stacked columns and areas, icicles and bars.

Horizontal positions are percentages, so that text keeps its size. A chart shows nothing that the
table below it does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple

from htpy import Node, div, figcaption, figure, fragment, li, p, span, ul
from markupsafe import Markup

from traceloom.fleet.portal.tables import render_time
from traceloom.system import units

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_HEIGHT = 220
_TOP, _BOTTOM = 12, 4
_TIME_STEPS_NS = (
    HOUR_NS,
    3 * HOUR_NS,
    6 * HOUR_NS,
    DAY_NS,
    2 * DAY_NS,
    5 * DAY_NS,
    10 * DAY_NS,
    30 * DAY_NS,
    90 * DAY_NS,
)
_MAX_TIMES = 10
_BOX_HEIGHT = 34  # of an icicle, in pixels


class ChartDot(NamedTuple):
    """A value at a time.

    `look`: a colour group of the reports; `says`: its description; `href`: link target.
    """

    time_ns: int
    value: float
    style: str
    says: str
    href: str


class ChartLevel(NamedTuple):
    """A constant value over a time interval."""

    since_ns: int
    until_ns: int
    value: float
    style: str


class ChartColumn(NamedTuple):
    """Stacked values of a time interval: colour group and value of each, lowest first."""

    time_ns: int
    parts: Sequence[tuple[str, float]]
    says: str


@dataclass(frozen=True)
class IcicleBox:
    """A box of an icicle.

    Attributes:
        level: Row, from 0 on.
        start: Left edge, share of the width.
        size: Width, share of the width.
        name: Name of the part.
        says: Description, on hover and for screen readers.
        amount: Its amount as text.
        filled: The share of it that is dark.
        style: Colour group.
        href: Link target.
        here: It is the current page.
    """

    level: int
    start: float
    size: float
    name: str
    says: str
    amount: str
    filled: float
    style: str
    href: str
    here: bool = False


def draw_dots(
    points: Sequence[ChartDot],
    levels: Sequence[ChartLevel],
    marks: Sequence[tuple[int, str]],
    *,
    label: str,
    write: Callable[[float], str],
) -> Node:
    """Draws values over time.

    Args:
        points: In any order.
        levels: Horizontal lines over time intervals.
        marks: Times, with a label for each.
        label: Description of the chart, a sentence.
        write: Formats a value.
    """
    if not points:
        return None
    first, last = min(point.time_ns for point in points), max(point.time_ns for point in points)
    margin_ns = max((last - first) // 50, HOUR_NS // 2)
    first, last = first - margin_ns, last + margin_ns
    top = _compute_axis_values(
        max(*(point.value for point in points), *(level.value for level in levels), 0.0)
    )

    def x(time_ns: int) -> float:
        return 100 * (time_ns - first) / (last - first)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top[-1]

    markup = Markup("")
    for time_ns, mark_label in marks:
        if first <= time_ns <= last:
            side = ("end", -6) if x(time_ns) > 80 else ("start", 6)
            markup += Markup(
                '<line class="moment" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="{1}"/>'
                '<text class="word" x="{0:.2f}%" dx="{2}" y="13" text-anchor="{3}">{4}</text>'
            ).format(x(time_ns), _HEIGHT, side[1], side[0], mark_label)
    for point in points:
        markup += Markup(
            '<a href="{}" tabindex="-1"><circle class="f-{}" cx="{:.2f}%" cy="{:.1f}" r="3.5"><title>{}</title>'
            "</circle></a>"
        ).format(point.href, point.style, x(point.time_ns), y(point.value), point.says)
    for level in levels:
        markup += Markup(
            '<line class="level l-{}" x1="{:.2f}%" x2="{:.2f}%" y1="{:.1f}" y2="{:.1f}"/>'
        ).format(
            level.style,
            x(max(level.since_ns, first)),
            x(min(level.until_ns, last)),
            y(level.value),
            y(level.value),
        )
    return _draw_plot(markup, top, y, first, last, label, write)


def draw_columns(
    columns: Sequence[ChartColumn], every_ns: int, *, label: str, write: Callable[[float], str]
) -> Node:
    """Draws amounts per time interval as stacked columns.

    Args:
        columns: By time; missing ones are empty.
        every_ns: Length of each interval.
        label: Description of the chart, a sentence.
        write: Formats an amount.
    """
    if not columns:
        return None
    first, last = columns[0].time_ns, columns[-1].time_ns + every_ns
    top = _compute_axis_values(max(sum(value for _, value in column.parts) for column in columns))

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top[-1]

    markup = Markup("")
    width = 100 * every_ns / (last - first)
    for column in columns:
        column_x = 100 * (column.time_ns - first) / (last - first)
        markup += Markup("<g><title>{}</title>").format(column.says)
        stacked = 0.0
        for colour_group, value in column.parts:
            markup += Markup(
                '<rect class="f-{}" x="{:.3f}%" y="{:.2f}" width="{:.3f}%" height="{:.2f}"/>'
            ).format(
                colour_group,
                column_x + width * 0.08,
                y(stacked + value),
                width * 0.84,
                y(stacked) - y(stacked + value),
            )
            stacked += value
        markup += Markup("</g>")
    return _draw_plot(markup, top, y, first, last, label, write)


def draw_icicle(boxes: Iterable[IcicleBox], label: str) -> Node:
    """Draws a hierarchy: boxes as wide as their amounts, children below, each with a link."""
    markup, levels = Markup(""), 0
    for box in boxes:
        levels = max(levels, box.level + 1)
        markup += Markup(
            '<a href="{}"{}><svg class="box{}" x="{:.3f}%" y="{}" width="{:.3f}%" height="{}">'
            '<title>{}</title><rect class="ground f-{}" width="100%" height="100%"/>'
            '<rect class="part f-{}" y="{}" width="{:.1f}%" height="4"/>'
            '<foreignObject width="100%" height="{}"><span class="words"><b>{}</b><span class="amount">{}</span></span>'
            "</foreignObject></svg></a>"
        ).format(
            box.href,
            Markup(' aria-current="true"') if box.here else "",
            " here" if box.here else "",
            100 * box.start,
            box.level * _BOX_HEIGHT,
            100 * box.size,
            _BOX_HEIGHT - 1,
            box.says,
            box.style,
            box.style,
            _BOX_HEIGHT - 5,
            100 * box.filled,
            _BOX_HEIGHT - 5,
            box.name,
            box.amount,
        )
    picture = Markup(
        '<svg class="tree-picture" role="group" aria-label="{}" width="100%" height="{}">{}</svg>'
    )
    return figure(".chart.tree")[picture.format(label, levels * _BOX_HEIGHT, markup)]


def draw_share_bar(
    parts: Sequence[tuple[str, str, float]], write: Callable[[float], str], label: str
) -> Node:
    """Draws parts of a whole as a bar, with a legend: name, colour group and amount of each."""
    total = sum(amount for *_, amount in parts)
    if total <= 0:
        return None
    offset, markup = 0.0, Markup("")
    for name, colour_group, amount in parts:
        width = 100 * amount / total
        markup += Markup(
            '<rect class="f-{}" x="{:.3f}%" width="{:.3f}%" height="100%"><title>{}</title></rect>'
        ).format(colour_group, offset, max(width - 0.12, 0.05), f"{name}: {write(amount)}")
        offset += width
    return figure(".chart")[
        Markup(
            '<svg class="share-bar" role="img" aria-label="{}" width="100%" height="22">{}</svg>'
        ).format(label, markup),
        draw_legend(
            (name, colour_group, write(part_amount)) for name, colour_group, part_amount in parts
        ),
    ]


def draw_legend(entries: Iterable[tuple[str, str, str]]) -> Node:
    """Draws a legend: name, colour group and amount of each."""
    return ul(".legend")[
        (
            li[
                span(class_=f"swatch b-{colour_group}"),
                name,
                " ",
                Markup("<b>{}</b>").format(amount),
            ]
            for name, colour_group, amount in entries
        )
    ]


def _draw_plot(  # noqa: PLR0917  (all were just computed)
    markup: Markup,
    top: Sequence[float],
    y: Callable[[float], float],
    first: int,
    last: int,
    label: str,
    write: Callable[[float], str],
) -> Node:
    lines = Markup("").join(
        Markup('<line class="grid" x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>').format(y(value))
        for value in top
    )
    scale = Markup("").join(
        Markup('<text x="100%" dx="-8" y="{:.1f}" dy="4" text-anchor="end">{}</text>').format(
            y(value), write(value)
        )
        for value in top
    )
    times = Markup("")
    step = next((step for step in _TIME_STEPS_NS if (last - first) / step <= _MAX_TIMES), None)
    if step is None:
        step = -(-(last - first) // _MAX_TIMES // DAY_NS) * DAY_NS
    time_format = "%H:%M" if step < DAY_NS else "%b %-d"  # whole hours or days, in UTC
    for time_ns in range(-(-first // step) * step, last + 1, step):
        time_label = f"{datetime.fromtimestamp(time_ns / 1e9, timezone.utc):{time_format}}"
        x_percent = 100 * (time_ns - first) / (last - first)
        lines += Markup('<line class="grid" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%"/>').format(
            x_percent
        )
        if x_percent < 98:
            times += Markup('<text x="{:.2f}%" y="14" text-anchor="middle">{}</text>').format(
                x_percent, time_label
            )
    return figure(".chart")[
        div(".plot")[
            Markup('<svg class="scale" aria-hidden="true" height="{}">{}</svg>').format(
                _HEIGHT, scale
            ),
            Markup('<svg class="area" role="group" aria-label="{}" height="{}">{}{}</svg>').format(
                label, _HEIGHT, lines, markup
            ),
            Markup('<svg class="times" aria-hidden="true" height="20">{}</svg>').format(times),
        ],
        figcaption[label],
    ]


def _compute_axis_values(max_value: float) -> list[float]:
    """Returns round values from 0 up to at least `max_value`."""
    if max_value <= 0:
        return [0.0, 1.0]
    rough = max_value / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * index for index in range(math.ceil(max_value / step - 1e-9) + 1)]


BarPart = tuple[str, str, float]
"""Name, colour group and amount."""

_WIDTH, _USAGE_HEIGHT = 1000, 120


def draw_bar(parts: Sequence[BarPart]) -> Node:
    """Draws parts of a whole as a bar, with their amounts."""
    total = sum(amount for _, _, amount in parts) or 1.0
    offset, rects = 0.0, Markup("")
    for _, colour, amount in parts:
        width = _WIDTH * amount / total
        rects += Markup('<rect class="f-{}" x="{:.2f}" y="0" width="{:.2f}" height="16"/>').format(
            colour, offset, width
        )
        offset += width
    return fragment[
        Markup(
            '<svg class="stack tall" viewBox="0 0 {} 16" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
        ).format(_WIDTH, rects),
        ul(".legend")[
            (
                li[
                    span(class_=f"swatch b-{colour}"),
                    name,
                    " ",
                    Markup("<b>{}</b>").format(units.format_number(amount)),
                ]
                for name, colour, amount in parts
            )
        ],
    ]


def draw_areas(
    times: Sequence[int],
    step_ns: int,
    parts: Mapping[tuple[str, str], Mapping[int, float]],
    label: str,
) -> Node:
    """Draws stacked areas over time, scaled to the highest total.

    Args:
        times: Starts of the time intervals, in order; ns.
        step_ns: Length of an interval.
        parts: (name, colour group) -> start -> amount, from bottom to top.
        label: Description for screen readers.
    """
    if not times:
        return p(".quiet")["Nothing was measured in this time."]
    first, last = times[0], times[-1] + step_ns
    max_total = (
        max(sum(part_amounts.get(time, 0.0) for part_amounts in parts.values()) for time in times)
        or 1.0
    )
    stacked = dict.fromkeys(times, 0.0)
    paths = Markup("")
    for (_, colour), amounts in parts.items():
        steps = []
        for time in times:
            left, right = (
                _WIDTH * (edge_ns - first) / (last - first) for edge_ns in (time, time + step_ns)
            )
            low = stacked[time]
            stacked[time] = high = low + amounts.get(time, 0.0)
            if high > low:
                top, bottom = (_USAGE_HEIGHT * (1 - level / max_total) for level in (high, low))
                steps.append(f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}Z")
        paths += Markup('<path class="f-{}" d="{}"/>').format(colour, "".join(steps))
    picture = Markup(
        '<svg class="areas" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    )
    return fragment[
        div(".areas-frame")[picture.format(_WIDTH, _USAGE_HEIGHT, label, paths)],
        div(".areas-ends")[render_time(first), render_time(last)],
        ul(".legend")[(li[span(class_=f"swatch b-{colour}"), name] for name, colour in parts)],
    ]
