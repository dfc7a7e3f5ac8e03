"""The figure that the script draws as an icicle: boxes as wide as their time, what they hold below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from traceloom.harmless import harmless
from traceloom.report.island import island

Node = tuple[int | None, str, int, int, int | None]
"""Place of the parent among the nodes (None for roots), name, calls, host time, GPU time (None: not told)."""

Sides = Mapping[str, tuple[float, float]]
"""Of a node of two runs: `count`, `host` and `device` of the base and of the new run; its times are widths then."""

MEASURES = (("device", "GPU time"), ("host", "Host time"))


def figure(
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
        [-1 if parent is None else parent, harmless(name), count, ns, gpu if device else None]
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
        f"{island(data)}{more}</figure>"
    )
