"""The figure of an allocator's curve over time, which the script lets read off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.report.island import island
from traceloom.report.names import allocator
from traceloom.report.views.html.text import text

if TYPE_CHECKING:
    from traceloom.report.documents.report import CurveRow

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 190, 64, 8, 12, 22
_POINTS = 1_200  # of a drawn curve; extremes are kept


def thinned(values: list[int], most: int) -> list[int]:
    """Positions of the first, last, lowest and highest of equal stretches: at most about `most` of them."""
    if len(values) <= most:
        return list(range(len(values)))
    width = -(-len(values) * 4 // most)
    kept: set[int] = set()
    for first in range(0, len(values), width):
        stretch = range(first, min(first + width, len(values)))
        kept |= {first, stretch[-1], min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(kept)


def figure(curve: CurveRow) -> str:
    """The curve of one device (an entry of `memory.curve`): allocated and, where known, reserved bytes."""
    at = thinned(curve["allocated_bytes"], _POINTS)
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
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (time - times[0]) / span

    def y(value: int | None) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (highest - (value or 0)) / (highest - lowest)

    paths = ""
    for name, values in reversed(series):  # staircases: a value holds until the next
        corners = [f"M{x(times[0]):.1f} {y(values[0]):.1f}"]
        corners += [f"H{x(time):.1f}V{y(value):.1f}" for time, value in zip(times[1:], values[1:], strict=True)]
        paths += f'<path class="line-{name}" d="{"".join(corners)}"/>'
    marks = "".join(
        f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{units.size(v)}</text>'
        for v in ((lowest,) if lowest < -highest // 12 else ()) + (0, highest // 2, highest)
    )
    caption = f"{allocator(curve)}: peak {units.size(max(allocated))} allocated"
    data = {"times": times, "left": _LEFT, "right": _RIGHT, "series": [{"name": n, "values": v} for n, v in series]}
    return (
        f'<figure class="curve"><figcaption><span class="curve-says" role="status">{text(caption)}</span></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" tabindex="0" role="img" aria-label="{text(caption)} over time">{marks}'
        f'{paths}<text x="{_LEFT}" y="{_HEIGHT - 4}">{units.duration(times[0])}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{units.duration(times[-1])}</text>'
        f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg>'
        f"{island(data)}</figure>"
    )
