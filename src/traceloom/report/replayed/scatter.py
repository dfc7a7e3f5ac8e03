"""The picture of recorded against replayed times of ops; both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short

if TYPE_CHECKING:
    from traceloom.report.documents.replay import ReplayOpsRow

_WIDTH, _HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 20, 46
_MOST = 300  # points; the rest takes little time and would only cover others
_LARGEST = 18.0  # radius of the op with the most time
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
    shown = sorted(timed, key=lambda point: -point.recorded_ns - point.replayed_ns)[:_MOST]
    if not shown:
        return ""
    every = [ns / point.op["calls"] for point in shown for ns in (point.recorded_ns, point.replayed_ns)]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - math.log10(value)) / (high - low)

    parts = []
    for power in range(low, high + 1):
        at, name = 10.0**power, units.duration(10**power)
        parts.append(f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>')
        parts.append(f'<text x="{x(at):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{name}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{name}</text>')
    ends = (10.0**low, 10.0**high)
    parts.append(f'<path class="roof" d="M{x(ends[0]):.1f} {y(ends[0]):.1f}L{x(ends[1]):.1f} {y(ends[1]):.1f}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">recorded, one call</text>')
    parts.append(f'<text x="{_LEFT + 6}" y="{_TOP + 12}">replayed, one call</text>')
    most = max(point.recorded_ns for point in shown)
    for point in shown:
        op, calls = point.op, point.op["calls"]
        recorded, replayed = point.recorded_ns / calls, point.replayed_ns / calls
        ratio = replayed / recorded
        look = "slower" if ratio > _NEAR else "faster" if ratio < 1 / _NEAR else "alike"
        times = f"{units.duration(round(recorded))} recorded, {units.duration(round(replayed))} replayed"
        named = f"{short(harmless(op['name']), 80)} {short(harmless(op['shapes']), 120)}"
        label = f"{named}: {times}, {ratio:.2f} times; {units.counted(calls, 'call')}"
        radius = max(2.5, _LARGEST * math.sqrt(point.recorded_ns / most))
        parts.append(
            f'<circle class="{look}" cx="{x(recorded):.1f}" cy="{y(replayed):.1f}" r="{radius:.1f}">'
            f"<title>{escape(label)}</title></circle>"
        )
    caption = f"{units.counted(len(shown), 'op')} by name and shapes: what a call took when replayed, over what it took"
    left_out = len(timed) - len(shown)
    more = f"; {units.count(left_out)} that took least are not drawn" if left_out else ""
    hint = "The larger a point, the more recorded time; on the line both took as long."
    return (
        f'<figure class="roofline scatter"><figcaption>{escape(caption + more)}. {hint}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{''.join(parts)}</svg></figure>"
    )
