"""The picture of recorded against replayed times of ops; both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.table import Row

_WIDTH, _HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 20, 46
_MOST = 300  # points; the rest takes little time and would only cover others
_LARGEST = 18.0  # radius of the op with the most time
_NEAR = 1.1  # ratios up to this, either way, are alike


def scatter(ops: Sequence[Row], recorded_key: str = "recorded_ns", replayed_key: str = "replayed_ns") -> str:
    """An SVG with a point for each op and its shapes; empty where none took any time.

    Args:
        ops: Rows of `ReplayComparison.ops`.
        recorded_key: Their recorded time.
        replayed_key: Their replayed time.
    """
    keys = recorded_key, replayed_key
    timed = [row for row in ops if all((row[key] or 0) > 0 for key in keys)]
    shown = sorted(timed, key=lambda row: -row[recorded_key] - row[replayed_key])[:_MOST]
    if not shown:
        return ""
    every = [row[key] / row["calls"] for row in shown for key in keys]
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
    most = max(row[recorded_key] for row in shown)
    for row in shown:
        recorded, replayed = (row[key] / row["calls"] for key in keys)
        ratio = replayed / recorded
        look = "slower" if ratio > _NEAR else "faster" if ratio < 1 / _NEAR else "alike"
        times = f"{units.duration(round(recorded))} recorded, {units.duration(round(replayed))} replayed"
        named = f"{short(harmless(row['name']), 80)} {short(harmless(row['shapes']), 120)}"
        label = f"{named}: {times}, {ratio:.2f} times; {units.counted(row['calls'], 'call')}"
        radius = max(2.5, _LARGEST * math.sqrt(row[recorded_key] / most))
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
