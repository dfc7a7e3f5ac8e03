"""The figure that the script draws: a stacked curve, and below it who holds what at the chosen instant."""

from __future__ import annotations

from bisect import bisect_right
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.island import island

if TYPE_CHECKING:
    from traceloom.report.documents.memory import MemoryCurveRow, MemoryRankStepsRow

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
        return names.setdefault(harmless(name[:_LONGEST]), len(names))

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
        f'<figure class="owners" data-label="{escape(harmless(label))}">'
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
        f"to go back.</p></div>{island(data)}</figure>"
    )


def changes(levels: list[int]) -> list[int]:
    """A curve as pairs (instants since the last change, change of the level), one list; most levels rest mostly."""
    out, last = [], 0
    for at, (before, after) in enumerate(pairwise([0, *levels])):
        if after != before:
            out += [at - last, after - before]
            last = at
    return out
