"""Icicle, dots, stacked bars (on the shared figure module).

Places are shares of the width, so that texts keep their size. Nothing says more than the table that stands below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple

from htpy import Node, div, figcaption, figure, fragment, li, p, span, ul
from markupsafe import Markup

from traceloom.fleet.portal.tables import instant
from traceloom.system import units

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_HEIGHT = 220
_TOP, _BOTTOM = 12, 4
_STEPS_NS = (HOUR_NS, 3 * HOUR_NS, 6 * HOUR_NS, DAY_NS, 2 * DAY_NS, 5 * DAY_NS, 10 * DAY_NS, 30 * DAY_NS, 90 * DAY_NS)
_MOST_TIMES = 10
_BOX = 34  # height of a box of an icicle


class ChartDot(NamedTuple):
    """A value at a time. `look`: a colour group of the reports; `says`: what it is; `href`: where it leads."""

    time_ns: int
    value: float
    look: str
    says: str
    href: str


class ChartLevel(NamedTuple):
    """A value that holds for a stretch of time."""

    since_ns: int
    until_ns: int
    value: float
    look: str


class ChartColumn(NamedTuple):
    """Values of a stretch of time on top of each other: colour group and value of each, the lowest first."""

    time_ns: int
    parts: Sequence[tuple[str, float]]
    says: str


@dataclass(frozen=True)
class TreeBox:
    """A box of an icicle.

    Attributes:
        level: Row, from 0 on.
        start: Where it begins, share of the width.
        size: How wide it is.
        name: What it is.
        says: More of it, on hover and for readers who do not see it.
        amount: Its amount as text.
        filled: The share of it that is dark.
        look: Colour group.
        href: Where it leads.
        here: It is what the page is about.
    """

    level: int
    start: float
    size: float
    name: str
    says: str
    amount: str
    filled: float
    look: str
    href: str
    here: bool = False


def dots(
    points: Sequence[ChartDot], levels: Sequence[ChartLevel], marks: Sequence[tuple[int, str]], *, label: str,
    write: Callable[[float], str],
) -> Node:  # fmt: skip
    """Values over time.

    Args:
        points: One each, in any order.
        levels: Lines over stretches of time.
        marks: Times, with a word for each.
        label: What is shown, in a sentence.
        write: A value as text.
    """
    if not points:
        return None
    first, last = min(point.time_ns for point in points), max(point.time_ns for point in points)
    room = max((last - first) // 50, HOUR_NS // 2)
    first, last = first - room, last + room
    top = _nice(max(*(point.value for point in points), *(level.value for level in levels), 0.0))

    def x(time_ns: int) -> float:
        return 100 * (time_ns - first) / (last - first)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top[-1]

    inside = Markup("")
    for time_ns, words in marks:
        if first <= time_ns <= last:
            side = ("end", -6) if x(time_ns) > 80 else ("start", 6)
            inside += Markup(
                '<line class="moment" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="{1}"/>'
                '<text class="word" x="{0:.2f}%" dx="{2}" y="13" text-anchor="{3}">{4}</text>'
            ).format(x(time_ns), _HEIGHT, side[1], side[0], words)
    for point in points:
        inside += Markup(
            '<a href="{}" tabindex="-1"><circle class="f-{}" cx="{:.2f}%" cy="{:.1f}" r="3.5"><title>{}</title>'
            "</circle></a>"
        ).format(point.href, point.look, x(point.time_ns), y(point.value), point.says)
    for level in levels:
        inside += Markup('<line class="level l-{}" x1="{:.2f}%" x2="{:.2f}%" y1="{:.1f}" y2="{:.1f}"/>').format(
            level.look, x(max(level.since_ns, first)), x(min(level.until_ns, last)), y(level.value), y(level.value)
        )
    return _plot(inside, top, y, first, last, label, write)


def columns(stretches: Sequence[ChartColumn], every_ns: int, *, label: str, write: Callable[[float], str]) -> Node:
    """Amounts of stretches of time, each as parts on top of each other.

    Args:
        stretches: By time; those that are missing are empty.
        every_ns: How long each is.
        label: What is shown, in a sentence.
        write: An amount as text.
    """
    if not stretches:
        return None
    first, last = stretches[0].time_ns, stretches[-1].time_ns + every_ns
    top = _nice(max(sum(value for _, value in column.parts) for column in stretches))

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top[-1]

    inside = Markup("")
    width = 100 * every_ns / (last - first)
    for column in stretches:
        left = 100 * (column.time_ns - first) / (last - first)
        inside += Markup("<g><title>{}</title>").format(column.says)
        below = 0.0
        for look, value in column.parts:
            inside += Markup('<rect class="f-{}" x="{:.3f}%" y="{:.2f}" width="{:.3f}%" height="{:.2f}"/>').format(
                look, left + width * 0.08, y(below + value), width * 0.84, y(below) - y(below + value)
            )
            below += value
        inside += Markup("</g>")
    return _plot(inside, top, y, first, last, label, write)


def icicle(boxes: Iterable[TreeBox], label: str) -> Node:
    """Parts of a whole, and their parts below them, as wide as their amounts; each leads to itself."""
    inside, levels = Markup(""), 0
    for box in boxes:
        levels = max(levels, box.level + 1)
        inside += Markup(
            '<a href="{}"{}><svg class="box{}" x="{:.3f}%" y="{}" width="{:.3f}%" height="{}">'
            '<title>{}</title><rect class="ground f-{}" width="100%" height="100%"/>'
            '<rect class="part f-{}" y="{}" width="{:.1f}%" height="4"/>'
            '<foreignObject width="100%" height="{}"><span class="words"><b>{}</b><span class="amount">{}</span></span>'
            "</foreignObject></svg></a>"
        ).format(
            box.href, Markup(' aria-current="true"') if box.here else "", " here" if box.here else "", 100 * box.start,
            box.level * _BOX, 100 * box.size, _BOX - 1, box.says, box.look, box.look, _BOX - 5,
            100 * box.filled, _BOX - 5, box.name, box.amount,
        )  # fmt: skip
    picture = Markup('<svg class="tree-picture" role="group" aria-label="{}" width="100%" height="{}">{}</svg>')
    return figure(".chart.tree")[picture.format(label, levels * _BOX, inside)]


def share_bar(parts: Sequence[tuple[str, str, float]], write: Callable[[float], str], label: str) -> Node:
    """Parts of a whole side by side, with a legend: name, colour group and amount of each."""
    whole = sum(amount for *_, amount in parts)
    if whole <= 0:
        return None
    at, inside = 0.0, Markup("")
    for name, look, amount in parts:
        width = 100 * amount / whole
        inside += Markup(
            '<rect class="f-{}" x="{:.3f}%" width="{:.3f}%" height="100%"><title>{}</title></rect>'
        ).format(look, at, max(width - 0.12, 0.05), f"{name}: {write(amount)}")
        at += width
    picture = Markup('<svg class="share-bar" role="img" aria-label="{}" width="100%" height="22">{}</svg>')
    return figure(".chart")[picture.format(label, inside), legend((name, look, write(of)) for name, look, of in parts)]


def legend(entries: Iterable[tuple[str, str, str]]) -> Node:
    """Name, colour group and amount of each."""
    return ul(".legend")[
        (li[span(class_=f"swatch b-{look}"), name, " ", Markup("<b>{}</b>").format(amount)]
         for name, look, amount in entries)
    ]  # fmt: skip


def _plot(  # noqa: PLR0917  (all are what was just worked out)
    inside: Markup, top: Sequence[float], y: Callable[[float], float], first: int, last: int, label: str,
    write: Callable[[float], str],
) -> Node:  # fmt: skip
    lines = Markup("").join(
        Markup('<line class="grid" x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>').format(y(value)) for value in top
    )
    scale = Markup("").join(
        Markup('<text x="100%" dx="-8" y="{:.1f}" dy="4" text-anchor="end">{}</text>').format(y(value), write(value))
        for value in top
    )
    times = Markup("")
    step = next((step for step in _STEPS_NS if (last - first) / step <= _MOST_TIMES), None)
    if step is None:
        step = -(-(last - first) // _MOST_TIMES // DAY_NS) * DAY_NS
    form = "%H:%M" if step < DAY_NS else "%b %-d"  # whole hours or days, in UTC
    for time_ns in range(-(-first // step) * step, last + 1, step):
        words = f"{datetime.fromtimestamp(time_ns / 1e9, timezone.utc):{form}}"
        at = 100 * (time_ns - first) / (last - first)
        lines += Markup('<line class="grid" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%"/>').format(at)
        if at < 98:
            times += Markup('<text x="{:.2f}%" y="14" text-anchor="middle">{}</text>').format(at, words)
    return figure(".chart")[
        div(".plot")[
            Markup('<svg class="scale" aria-hidden="true" height="{}">{}</svg>').format(_HEIGHT, scale),
            Markup('<svg class="area" role="group" aria-label="{}" height="{}">{}{}</svg>').format(
                label, _HEIGHT, lines, inside
            ),
            Markup('<svg class="times" aria-hidden="true" height="20">{}</svg>').format(times),
        ],
        figcaption[label],
    ]


def _nice(most: float) -> list[float]:
    """Round values from 0 up to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * at for at in range(math.ceil(most / step - 1e-9) + 1)]


Part = tuple[str, str, float]
"""What it is called, its colour group, how much it is."""

_WIDTH, _USAGE_HEIGHT = 1000, 120


def bar(parts: Sequence[Part]) -> Node:
    """Parts of a whole, one beside the other, and how much each is."""
    whole = sum(amount for _, _, amount in parts) or 1.0
    at, rects = 0.0, Markup("")
    for _, colour, amount in parts:
        width = _WIDTH * amount / whole
        rects += Markup('<rect class="f-{}" x="{:.2f}" y="0" width="{:.2f}" height="16"/>').format(colour, at, width)
        at += width
    picture = Markup(
        '<svg class="stack tall" viewBox="0 0 {} 16" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    )
    return fragment[
        picture.format(_WIDTH, rects),
        ul(".legend")[
            (
                li[span(class_=f"swatch b-{colour}"), name, " ", Markup("<b>{}</b>").format(units.number(amount))]
                for name, colour, amount in parts
            )
        ],
    ]


def areas(times: Sequence[int], step_ns: int, parts: Mapping[tuple[str, str], Mapping[int, float]], label: str) -> Node:
    """How much of each there was over time, one upon the other; the whole of the highest moment fills the height.

    Args:
        times: Starts of the stretches of time to be shown, in order; ns.
        step_ns: How long one lasts.
        parts: (name, colour group) -> start -> amount, from the bottom to the top.
        label: What it shows, for readers who do not see it.
    """
    if not times:
        return p(".quiet")["Nothing was measured in this time."]
    first, last = times[0], times[-1] + step_ns
    most = max(sum(of.get(time, 0.0) for of in parts.values()) for time in times) or 1.0
    below = dict.fromkeys(times, 0.0)
    paths = Markup("")
    for (_, colour), amounts in parts.items():
        steps = []
        for time in times:
            left, right = (_WIDTH * (at - first) / (last - first) for at in (time, time + step_ns))
            low = below[time]
            below[time] = high = low + amounts.get(time, 0.0)
            if high > low:
                top, bottom = (_USAGE_HEIGHT * (1 - level / most) for level in (high, low))
                steps.append(f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}Z")
        paths += Markup('<path class="f-{}" d="{}"/>').format(colour, "".join(steps))
    picture = Markup(
        '<svg class="areas" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    )
    return fragment[
        div(".areas-frame")[picture.format(_WIDTH, _USAGE_HEIGHT, label, paths)],
        div(".areas-ends")[instant(first), instant(last)],
        ul(".legend")[(li[span(class_=f"swatch b-{colour}"), name] for name, colour in parts)],
    ]
