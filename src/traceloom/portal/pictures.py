"""Pictures of pages: bars and areas, in the colours of the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from htpy import Node, div, fragment, li, p, span, ul
from markupsafe import Markup

from traceloom.model import units
from traceloom.portal.table import instant

Part = tuple[str, str, float]
"""What it is called, its colour group, how much it is."""

_WIDTH, _HEIGHT = 1000, 120


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
                top, bottom = (_HEIGHT * (1 - level / most) for level in (high, low))
                steps.append(f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}Z")
        paths += Markup('<path class="f-{}" d="{}"/>').format(colour, "".join(steps))
    picture = Markup(
        '<svg class="areas" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    )
    return fragment[
        div(".areas-frame")[picture.format(_WIDTH, _HEIGHT, label, paths)],
        div(".areas-ends")[instant(first), instant(last)],
        ul(".legend")[(li[span(class_=f"swatch b-{colour}"), name] for name, colour in parts)],
    ]
